"""The gate op on a device: every dtype against the fp64 oracle, big offsets, graphs, streams, host time."""

from __future__ import annotations

import pytest
import torch

from inputs import cu_seqlens, gate_parameter, host_us, ragged, relative, sliced
from kdagen import reference as R
from kdagen.ops.gate import kda_gate

pytestmark = pytest.mark.gpu

FP32 = 2e-6  # inputs of any dtype are read exactly and computed in fp32: exp2 and division are good to 2e-7
FORMS = {"softplus": {}, "bounded": {"lower_bound": -5.0}}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def tensors(rng, *shape, dtype=torch.bfloat16):
    HV, K = shape[2:]
    g = (torch.randn(*shape, generator=rng) * 3).to(dtype).cuda()
    return g, gate_parameter(rng, HV).cuda(), torch.randn(HV, K, generator=rng).cuda()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1, 1, 4, 128), (2, 1333, 4, 128), (1, 77, 3, 100)])
def test_decay_and_beta(rng, dtype, form, shape):
    g, A_log, bias = tensors(rng, *shape, dtype=dtype)
    beta = torch.randn(shape[:3], generator=rng).to(dtype).cuda()
    out = torch.full(shape, float("nan"), device="cuda")
    decay, strength = kda_gate(g, A_log, bias, **FORMS[form], beta=beta, out=out)
    assert relative(decay, R.kda_gate(g, A_log, bias, **FORMS[form])) < FP32
    assert relative(strength, R.kda_beta(beta)) < FP32
    again = kda_gate(sliced(rng, g), A_log, bias, **FORMS[form], beta=sliced(rng, beta))
    assert torch.equal(again[0], decay) and torch.equal(again[1], strength)


@pytest.mark.parametrize(("chunk_size", "dtype"), [
    *((chunk, torch.bfloat16) for chunk in (16, 32, 64, 128)), (64, torch.float16), (64, torch.float32),
])
def test_cumulative_sums(rng, chunk_size, dtype):
    lengths = [0, 1, chunk_size, *ragged(rng, 5, 3 * chunk_size)]
    g, A_log, bias = tensors(rng, 1, sum(lengths), 4, 128, dtype=dtype)
    edges = cu_seqlens(lengths).cuda()
    table = R.chunk_table(edges, chunk_size)[0]
    for form in FORMS.values():
        out = torch.full(g.shape, float("nan"), device="cuda")
        kda_gate(g, A_log, bias, **form, chunk_size=chunk_size, cu_seqlens=edges, chunk_indices=table, out=out)
        assert relative(out, R.chunk_cumsum(R.kda_gate(g, A_log, bias, **form), chunk_size, edges)) < FP32
        alone = kda_gate(g[:, : lengths[1] + chunk_size][:, 1:], A_log, bias, **form, chunk_size=chunk_size)
        assert torch.equal(alone, out[:, 1 : 1 + chunk_size])  # the same bits alone and inside a batch


def test_offsets_past_2_31_elements(rng):
    T, HV, K = 2**31 // (32 * 128) + 100, 32, 128
    if torch.cuda.mem_get_info()[0] < T * HV * K * 7:
        pytest.skip("needs 15 GB")
    _, A_log, bias = tensors(rng, 1, 1, HV, K)
    g = torch.zeros(1, T, HV, K, dtype=torch.bfloat16, device="cuda")
    g[:, -200:] = torch.randn(1, 200, HV, K, generator=rng).bfloat16().cuda()
    for options in ({}, {"chunk_size": 64}):
        tail = kda_gate(g, A_log, bias, **options)[:, -150:]
        first = (T - 150) // 64 * 64
        want = R.kda_gate(g[:, first:], A_log, bias)
        want = R.chunk_cumsum(want, 64) if options else want
        assert relative(tail, want[:, -150:]) < FP32


def test_replays_on_another_stream_without_a_synchronization(rng):
    g, A_log, bias = tensors(rng, 1, 64, 32, 128)
    beta = torch.randn(1, 64, 32, generator=rng).bfloat16().cuda()
    lengths = [64]
    edges = cu_seqlens(lengths).cuda()
    table = R.chunk_table(edges, 64)[0]
    call = lambda: (*kda_gate(g, A_log, bias, beta=beta),
                    kda_gate(g, A_log, bias, chunk_size=64, cu_seqlens=edges, chunk_indices=table))
    want = call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    g.neg_()
    graph.replay()
    for a, b, c in zip(got, call(), want):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == (c is want[1])  # beta is still the same


def test_host_time(rng):
    g, A_log, bias = tensors(rng, 1, 64, 32, 128)
    beta = torch.randn(1, 64, 32, generator=rng).bfloat16().cuda()
    assert host_us(lambda: kda_gate(g, A_log, bias, beta=beta)) < 20


def test_compiles_into_one_graph(rng):
    g, A_log, bias = tensors(rng, 1, 70, 4, 128)
    layer = lambda g: kda_gate(g, A_log, bias, lower_bound=-5.0) * 2
    assert torch.equal(torch.compile(layer, fullgraph=True)(g), layer(g))

"""The gated RMSNorm op on a device: every dtype against the fp64 oracle, slices, big offsets, graphs, host time."""

from __future__ import annotations

import pytest
import torch

from inputs import host_us, relative, sliced
from kdagen import reference as R
from kdagen.ops.norm import gated_rmsnorm

pytestmark = pytest.mark.gpu

# rounding of the output alone: 2^-9 and 2^-12 of each element at most, about 1.7e-3 and 2e-4 in the norm
TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-6}


def tensors(rng, *shape, dtype=torch.bfloat16):
    o, z = ((torch.randn(*shape, generator=rng) * 3).to(dtype).cuda() for _ in range(2))
    return o, z, torch.randn(shape[-1], generator=rng).cuda()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 4, 128), (1, 64, 32, 128), (2, 1500, 12, 128), (5, 3, 60), (9, 1000)])
def test_against_the_oracle(rng, dtype, shape):
    o, z, weight = tensors(rng, *shape, dtype=dtype)
    out = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
    gated_rmsnorm(o, z, weight, out=out)
    assert relative(out, R.gated_rmsnorm(o, z, weight)) < TOLERANCE[dtype]
    assert torch.equal(gated_rmsnorm(o, z, weight), out)
    if len(shape) == 4:
        assert torch.equal(gated_rmsnorm(o[:1, :1], z[:1, :1], weight), out[:1, :1])  # the same bits alone and in a batch
        assert torch.equal(gated_rmsnorm(sliced(rng, o[:1]), sliced(rng, z[:1]), weight), out[:1])


def test_offsets_past_2_31_elements(rng):
    rows = 2**31 // 128 + 1000
    if torch.cuda.mem_get_info()[0] < rows * 128 * 7:
        pytest.skip("needs 15 GB")
    o, z = (torch.ones(rows, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    tail = tensors(rng, 500, 128)
    o[-500:], z[-500:] = tail[:2]
    out = gated_rmsnorm(o, z, tail[2], out=o)[-500:]
    assert relative(out, R.gated_rmsnorm(*tail)) < TOLERANCE[torch.bfloat16]


def test_replays_on_another_stream_without_a_synchronization(rng):
    o, z, weight = tensors(rng, 1, 64, 32, 128)
    gated_rmsnorm(o, z, weight)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            got = gated_rmsnorm(o, z, weight)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    o.normal_()
    graph.replay()
    assert torch.equal(got, gated_rmsnorm(o, z, weight))


def test_host_time(rng):
    o, z, weight = tensors(rng, 1, 64, 32, 128)
    assert host_us(lambda: gated_rmsnorm(o, z, weight)) < 20


def test_compiles_into_one_graph(rng):
    o, z, weight = tensors(rng, 3, 4, 128)
    layer = lambda o: gated_rmsnorm(o, z, weight) * 2
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(o), layer(o))

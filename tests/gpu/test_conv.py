"""The short convolution on a GPU: bf16 beside the oracle, bits, graphs, streams, sizes past 32 bits."""

from __future__ import annotations

import pytest
import torch

from inputs import cu_seqlens, ragged, relative
from kdagen.ops.conv import causal_conv1d, causal_conv1d_update
from kdagen.ops.metadata import build_conv1d_chunk_schedule
from kdagen.reference import conv as oracle

pytestmark = pytest.mark.gpu

# The last rounding alone: 1.7e-3 of the norm in bf16, 2e-4 in fp16; fp32: exp2 and the division are good to 2 ulp.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}


@pytest.fixture
def gpu_rng(rng):
    return torch.Generator("cuda").manual_seed(rng.initial_seed())


def normal(rng, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=rng, device="cuda").to(dtype)


def guarded(rng, *shape, dtype):
    """A random tensor inside a NaN-filled one: rows are strided, and a load past an edge would show."""
    wide = torch.full((shape[0] + 2, *shape[1:-1], shape[-1] + 32), float("nan"), device="cuda", dtype=dtype)
    inner = wide[1:-1, ..., 16:-16]
    inner.copy_(normal(rng, *shape))
    return inner


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("channels, width", [(1040, 4), (70, 3), (258, 2)])
@pytest.mark.parametrize("block", [None, 8, 24])
def test_prompts_on_a_pool(rng, gpu_rng, dtype, channels, width, block):
    lengths = [*ragged(rng, 9, 300), 1, 2, 3]
    N, D = len(lengths), channels
    host, slots = cu_seqlens(lengths), torch.randperm(3 * N, generator=rng)[:N].cuda().int()
    edges, known = host.cuda(), torch.rand(N, generator=rng).cuda() < 0.5
    slots[4] = -1
    x = guarded(gpu_rng, sum(lengths), D, dtype=dtype)
    w, bias, pool = normal(gpu_rng, D, width), normal(gpu_rng, D), normal(gpu_rng, 3 * N, width + 1, D, dtype=dtype)
    before = pool.clone()
    history = pool[slots.long(), : width - 1].double()
    history[~known] = 0
    y, final = oracle.causal_conv1d(x[None], w, bias, initial_state=history, cu_seqlens=edges, output_final_state=True)
    y[0, host[4]:host[5]] = 0
    after = before.double()
    for n, length in enumerate(lengths):
        if n != 4 and length:
            after[slots[n], : width - 1] = final[n]
    more = {} if block is None else {"schedule": build_conv1d_chunk_schedule(host, block, "cuda"), "block_m": block}
    out = torch.full((sum(lengths), D), float("nan"), device="cuda", dtype=dtype)
    torch.cuda.set_sync_debug_mode("error")
    try:
        causal_conv1d(x, w, bias=bias, cu_seqlens=edges, conv_states=pool, cache_indices=slots, has_initial_state=known,
                      out=out, **more)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert relative(out, y[0]) < TOLERANCE[dtype] and torch.equal(pool.double(), after)
    again = before.clone()
    twice = causal_conv1d(x, w, bias=bias, cu_seqlens=edges, conv_states=again, cache_indices=slots, has_initial_state=known)
    assert torch.equal(twice, out) and torch.equal(again, pool)  # whatever the schedule, to the bit


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("channels, width", [(1536, 4), (70, 3)])
def test_tokens_one_by_one_equal_the_prompt(gpu_rng, dtype, channels, width):
    x, w = normal(gpu_rng, 3, 20, channels, dtype=dtype), normal(gpu_rng, channels, width)
    lines = torch.zeros(6, width - 1, channels, device="cuda", dtype=dtype)
    whole = causal_conv1d(x, w, conv_states=lines[:3], has_initial_state=False)
    steps = torch.stack([causal_conv1d_update(x[:, t], lines[3:], w) for t in range(20)], 1)
    assert torch.equal(steps, whole) and torch.equal(lines[:3], lines[3:])
    assert relative(whole, oracle.causal_conv1d(x, w)[0]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 4, 6])
def test_update_on_a_pool(rng, gpu_rng, dtype, tokens):
    N, D, k = 37, 1536, 5
    pool = normal(gpu_rng, 64, 3 + k, D, dtype=dtype)
    table = torch.randperm(63, generator=rng)[:N].cuda().int() + 1
    table = torch.stack([table, table], 1)
    table[5, 0], table[9, 0] = 0, -1
    accepted = torch.randint(0, k + 3, (N,), generator=rng).cuda().int()
    x, w = guarded(gpu_rng, N, tokens, D, dtype=dtype), normal(gpu_rng, D, 4)
    slots = torch.where(table[:, 0] <= 0, -1, table[:, 0])
    after = pool.double()
    y = oracle.causal_conv1d_update(x, after, w, state_indices=slots, num_accepted_tokens=accepted)
    out = torch.full((N, tokens, D), float("nan"), device="cuda", dtype=dtype)
    torch.cuda.set_sync_debug_mode("error")
    try:
        causal_conv1d_update(x, pool, w, cache_indices=table, num_accepted_tokens=accepted, pad_slot=0, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert relative(out, y) < TOLERANCE[dtype] and torch.equal(pool.double(), after)


def test_captured_graph_follows_new_steps(rng, gpu_rng):
    """Captured once, with fewer lines than the padded batch has rows; replayed with other boundaries and slots."""
    N, T, D = 12, 200, 1536
    w, pool = normal(gpu_rng, D, 4), normal(gpu_rng, 8, 3, D, dtype=torch.bfloat16)
    x, row = (torch.empty(n, D, device="cuda", dtype=torch.bfloat16) for n in (T, N))
    edges, slots = (torch.full((n,), value, device="cuda", dtype=torch.int32) for n, value in ((N + 1, 0), (N, -1)))
    known = torch.zeros(N, device="cuda", dtype=torch.bool)

    def step():
        y = causal_conv1d(x, w, cu_seqlens=edges, conv_states=pool, cache_indices=slots, has_initial_state=known)
        return y, causal_conv1d_update(row, pool, w, cache_indices=slots)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, z = step()
    for _ in range(3):
        lengths = ragged(rng, 5, 40) + [0] * (N - 5)
        edges.copy_(cu_seqlens(lengths))
        slots.fill_(-1)[:5] = torch.randperm(8, generator=rng)[:5].cuda().int()
        known.copy_(torch.rand(N, generator=rng) < 0.5)
        x.copy_(normal(gpu_rng, T, D))
        row.copy_(normal(gpu_rng, N, D))
        lines, total = pool.clone(), sum(lengths)
        graph.replay()
        want = causal_conv1d(x[:total], w, cu_seqlens=edges, conv_states=lines, cache_indices=slots, has_initial_state=known)
        want_row = causal_conv1d_update(row, lines, w, cache_indices=slots)
        assert torch.equal(y[:total], want) and torch.equal(z, want_row) and torch.equal(pool, lines)
        assert not z[5:].any() and z[:5].any(1).all()


def test_runs_on_the_current_stream(gpu_rng):
    """Behind a slow producer on a stream of its own: a launch elsewhere would read what is not there yet."""
    x, w = normal(gpu_rng, 1, 4096, 1536, dtype=torch.bfloat16), normal(gpu_rng, 1536, 4)
    want, late, stream = causal_conv1d(x, w), torch.zeros_like(x), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        got = causal_conv1d(late, w)
    stream.synchronize()
    assert torch.equal(got, want)


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two devices")
def test_runs_on_the_tensors_device(gpu_rng):
    x, w = normal(gpu_rng, 1, 64, 512, dtype=torch.bfloat16), normal(gpu_rng, 512, 4)
    want = causal_conv1d(x, w)
    with torch.cuda.device(0):
        got = causal_conv1d(x.to("cuda:1"), w.to("cuda:1"))
    assert got.device.index == 1 and torch.equal(got.cpu(), want.cpu())


def test_more_than_65535_programs(gpu_rng):
    x, w = normal(gpu_rng, 70_000, 1536, dtype=torch.bfloat16), normal(gpu_rng, 1536, 4)
    pool = normal(gpu_rng, 70_000, 3, 1536, dtype=torch.bfloat16)
    some = torch.tensor([0, 65_535, 69_999], device="cuda")
    lines = pool[some].clone()
    y = causal_conv1d_update(x, pool, w)
    assert torch.equal(y[some], causal_conv1d_update(x[some], lines, w)) and torch.equal(pool[some], lines)


@pytest.mark.slow
def test_offsets_past_31_bits(gpu_rng):
    """T * D and slots * columns * D both past 2^31 elements: the far end equals the same tokens by themselves."""
    D, T, slots = 12288, 176_000, 60_000
    if torch.cuda.mem_get_info()[0] < 2.5e10:
        pytest.skip("needs 25 GB of free device memory")
    x = torch.empty(T, D, device="cuda", dtype=torch.bfloat16).normal_(generator=gpu_rng)
    w, pool = normal(gpu_rng, D, 4), torch.zeros(slots, 3, D, device="cuda", dtype=torch.bfloat16)
    edges = torch.tensor([0, T - 100, T], device="cuda")
    assert x.numel() > 2**31 and pool.numel() > 2**31
    y = causal_conv1d(x, w, cu_seqlens=edges, conv_states=pool, has_initial_state=False,
                      cache_indices=torch.tensor([1, slots - 1], device="cuda"))
    own = torch.zeros(1, 3, D, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(y[-100:], causal_conv1d(x[None, -100:], w, conv_states=own, has_initial_state=False)[0])
    assert torch.equal(pool[-1], own[0]) and torch.equal(pool[1], x[T - 103:T - 100]) and not pool[2:-1].any()
    assert torch.equal(y[T - 200:T - 100], causal_conv1d(x[None, T - 203:T - 100], w)[0, 3:])
    row = x[:1]
    assert torch.equal(causal_conv1d_update(row, pool, w, cache_indices=torch.tensor([slots - 1], device="cuda")),
                       causal_conv1d_update(row, own, w))
    assert torch.equal(pool[-1], own[0])


def test_compiles_whole(gpu_rng):
    x, w, pool = normal(gpu_rng, 2, 9, 512, dtype=torch.bfloat16), normal(gpu_rng, 512, 4), normal(gpu_rng, 2, 3, 512)

    def layer(x, lines):
        y = causal_conv1d(x, w, conv_states=lines, has_initial_state=True)
        return causal_conv1d_update(y[:, -1], lines, w)

    eager, compiled = pool.clone(), pool.clone()
    want = layer(x, eager)
    assert torch.equal(torch.compile(layer, fullgraph=True)(x, compiled), want) and torch.equal(compiled, eager)
    assert not torch.equal(eager, pool)

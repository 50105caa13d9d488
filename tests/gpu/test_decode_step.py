"""The fused decode step on a GPU: bf16 beside the oracle, pools, bits, graphs, streams."""

from __future__ import annotations

import pytest
import torch

import kdagen
from inputs import gate_parameter, relative
from kdagen import reference as R
from kdagen.ops import _scratch
from kdagen.ops.decode_step import kda_decode_step

pytestmark = pytest.mark.gpu

# Output: its last rounding alone, 1.7e-3 of the norm in bf16 (more where few elements carry it: at most 2^-8 of any); 2e-4
# in fp16, at most 4.9e-4; in fp32 the approximate exp2, reciprocals and square roots of sm90, each good to 2 ulp. States
# stay fp32: 1e-7 to 6e-7 is usual.
OUTPUT = {torch.float32: 4e-6, torch.float16: 5e-4, torch.bfloat16: 2.5e-3}
STATE = 2e-6
CONV, POOL, TABLE = 4, 6, 7  # positions in the list of tensors


def case(rng, N, H=4, HV=None, K=128, V=128, W=4, k=0, dtype=torch.bfloat16, pool=torch.float32, v_first=True, pad=0):
    """(positional tensors, options): columns of one projection with NaN around, twice as many slots as rows and one more."""
    HV = HV or H
    D, P, slots = 2 * H * K + HV * V, HV * V, 2 * N * (1 + k) + 1
    normal = lambda *shape: torch.randn(*shape, device="cuda")
    wide = torch.full((N, 16 + D + P + HV + 24), float("nan"), device="cuda").to(dtype)
    wide[:, 16 : 16 + D + P + HV] = normal(N, D + P + HV)
    qkv, z, beta = wide[:, 16 : 16 + D], wide[:, 16 + D : 16 + D + P], wide[:, 16 + D + P : 16 + D + P + HV]
    inner = (HV, V, K) if v_first else (HV, K, V)
    states = normal(slots, HV * K * V + pad).to(pool)[:, : HV * K * V].unflatten(1, inner)
    table = 1 + torch.randperm(slots - 1, generator=rng)[: N * (1 + k)].int().cuda()
    table = table.view(N, 1 + k) if k else table
    weight = 0.5 * normal(D, W)
    tensors = [qkv, z, normal(N, HV * K).to(dtype), beta, normal(slots, W - 1 + k, D).to(dtype), weight, states, table,
               normal(V).to(dtype)]
    options = dict(A_log=gate_parameter(rng, HV).cuda(), dt_bias=normal(HV, K), state_v_first=v_first)
    return tensors, options


def run(tensors, options, compute=kda_decode_step):
    """(out, conv pool, state pool) from copies of the pools; the op's output is poisoned first."""
    x = [t.clone() if at in (CONV, POOL) else t for at, t in enumerate(tensors)]
    HV = x[3].shape[1]
    K, V = x[2].shape[1] // HV, x[1].shape[1] // HV
    if compute is kda_decode_step:
        out = torch.full((len(x[0]), HV, V), float("nan"), device="cuda", dtype=x[0].dtype)
        kda_decode_step(*x, **options, out=out)
    else:
        out = compute(*x, **options, heads=(x[0].shape[1] - HV * V) // (2 * K), K=K)
    return out, x[CONV], x[POOL]


def agree(tensors, options, state=STATE):
    mine, theirs = run(tensors, options), run(tensors, options, R.kda_decode_step)
    # few elements: each may be off by all of its last rounding, or by twice as much where the rounding falls the other way
    assert relative(mine[0], theirs[0]) < (OUTPUT[tensors[0].dtype] if mine[0].numel() >= 100 else 2**-8)
    assert torch.equal(mine[1], theirs[1])
    assert relative(mine[2], theirs[2]) < state
    return mine


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtype", OUTPUT, ids=str)
def test_serving_shape_in_every_dtype(rng, dtype, lower_bound, v_first):
    tensors, options = case(rng, 9, H=12, dtype=dtype, v_first=v_first, pad=32)
    agree(tensors, options | dict(lower_bound=lower_bound))


@pytest.mark.parametrize("sizes", [
    dict(H=2, HV=8, K=64, V=128), dict(K=100, V=60), dict(K=128, V=256), dict(K=256, V=64), dict(K=16, V=16), dict(K=1, V=1),
    dict(W=2), dict(W=3),
], ids=str)
def test_heads_head_dims_and_widths(rng, sizes):
    agree(*case(rng, 5, **sizes))


def test_half_size_pool(rng):
    agree(*case(rng, 5, pool=torch.bfloat16), state=1e-4)


def test_after_accepted_drafts_with_padding_and_fresh_rows(rng):
    tensors, options = case(rng, 8, k=3)
    tensors[TABLE][2] = -1
    tensors[TABLE][5] = 0
    fresh = tensors[TABLE][7].long()
    tensors[CONV][fresh] = tensors[POOL][fresh] = float("nan")
    options |= dict(
        num_accepted_tokens=torch.tensor([1, 4, 2, 3, 0, 1, 99, 1], device="cuda"), pad_slot=0,
        has_initial_state=torch.arange(8, device="cuda") != 7)
    mine, theirs = run(tensors, options), run(tensors, options, R.kda_decode_step)
    assert torch.equal(mine[0][[2, 5]], torch.zeros_like(mine[0][:2]))
    assert relative(mine[0], theirs[0]) < OUTPUT[torch.bfloat16]
    written = tensors[TABLE][[0, 1, 3, 4, 6, 7], 0].long()
    assert relative(mine[2][written], theirs[2][written]) < STATE
    assert torch.equal(mine[1][written, :3], theirs[1][written, :3])  # the fresh row's other columns stay NaN
    rest = torch.ones(len(mine[2]), dtype=torch.bool, device="cuda")
    rest[written] = False
    same = lambda a, b: torch.equal(a[rest].nan_to_num(7.0), b[rest].nan_to_num(7.0))
    assert same(mine[2], tensors[POOL]) and same(mine[1], tensors[CONV])


def pinned(rows):
    """Every bf16 step runs the schedule with so many columns of V a program: 16 or 32, one tile; 128, all of them."""
    spec = kdagen.spec.Spec.make("decode_step", k=128, v=128, dtype="bf16")
    schedule = kdagen.spec.Schedule.make(bv=32 if rows == 32 else 16, regs=128 * (rows == 128), rows=rows)
    return kdagen.dispatch.pin(kdagen.spec.Variant(spec, schedule.source_key).name)


@pytest.fixture
def rows(request):
    with pinned(request.param):
        yield request.param


@pytest.mark.parametrize("columns", [16, 32, 128])
@pytest.mark.parametrize("HV", [4, 8])
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_twice_and_alone_and_in_a_batch(rng, pool, HV, columns):
    """A history written while another program still reads it, or o read too early, would show as a changed bit."""
    tensors, options = case(rng, 130, HV=HV, pool=pool)
    with pinned(columns):
        first = run(tensors, options)
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(run(tensors, options), first))
    alone_is_the_same(tensors, options, first, (0, 64, 129))


def alone_is_the_same(tensors, options, batch, rows):
    for n in rows:
        row = [t[n : n + 1] if at in (0, 1, 2, 3, TABLE) else t for at, t in enumerate(tensors)]
        alone, slot = run(row, options), tensors[TABLE][n].long()
        assert torch.equal(alone[0], batch[0][n : n + 1])
        assert torch.equal(alone[1][slot], batch[1][slot]) and torch.equal(alone[2][slot], batch[2][slot])


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("dtype", OUTPUT, ids=str)
def test_a_row_alone_and_in_batches_of_every_form(rng, dtype, v_first):
    """The schedule is chosen by the number of states: each one that the default can choose, then the same row alone."""
    family = kdagen.families.get("decode_step")
    name = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    spec = kdagen.spec.Spec.make("decode_step", k=128, v=128, dtype=name, k_first=not v_first)
    seen = set()
    for N in (160, 20, 3):
        seen.add(family.default(spec, kdagen.devices.machine(), kdagen.spec.Problem(N, N, 4)))
        tensors, options = case(rng, N, dtype=dtype, v_first=v_first)
        alone_is_the_same(tensors, options, agree(tensors, options), (0, N - 1))
    assert len(seen) == (3 if v_first else 2) and seen <= set(family.default_schedules(spec))


@pytest.mark.parametrize("sizes", [dict(K=64, V=256), dict(K=256, V=128), dict(K=100, V=60)], ids=str)
def test_other_head_dims_alone_and_in_a_batch(rng, sizes):
    tensors, options = case(rng, 40, **sizes)
    alone_is_the_same(tensors, options, agree(tensors, options), (0, 39))


def schedules(v_first):
    family = kdagen.families.get("decode_step")
    spec = kdagen.spec.Spec.make("decode_step", k=128, v=128, dtype="bf16", k_first=not v_first)
    return [pytest.param(spec, schedule, id=kdagen.spec.Variant(spec, schedule.source_key).name.split("__", 1)[1])
            for schedule in family.candidates(spec) if family.supports(spec, schedule, kdagen.devices.named("h200")) is None]


@pytest.mark.parametrize("spec, schedule", schedules(True) + schedules(False))
def test_every_schedule_of_the_space_alone_is_right_and_gives_the_same_bits(rng, spec, schedule):
    if kdagen.families.get("decode_step").supports(spec, schedule, kdagen.devices.machine()):
        pytest.skip("not for this device")
    tensors, options = case(rng, 3, H=2, HV=4, v_first=not spec.k_first)
    default = run(tensors, options)
    with kdagen.dispatch.pin(kdagen.spec.Variant(spec, schedule.source_key).name, warps=schedule.warps):
        mine = agree(tensors, options)
    assert all(torch.equal(a, b) for a, b in zip(mine, default))


# --- the scratch that a launch's programs share ---------------------------------------------------------------------


def steps(tensors, options, out, count):
    """``count`` steps in place on the tensors' own pools, their outputs in a row of ``out`` each."""
    for at in range(count):
        kda_decode_step(*tensors, **options, out=out[at])


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("rows, HV", [(16, 4), (16, 8), (128, 8)], indirect=["rows"])
def test_two_streams_at_once(rng, HV, how, rows):
    """Launches of both streams run side by side. With counters in common a program would norm what is not there yet."""
    work = [case(rng, N, HV=HV) for N in (61, 67)]
    outs = [torch.full((40, N, HV, 128), float("nan"), device="cuda", dtype=torch.bfloat16) for N in (61, 67)]
    start = [[tensors[at].clone() for at in (CONV, POOL)] for tensors, _ in work]
    wants = []
    for (tensors, options), out in zip(work, outs):
        steps(tensors, options, out, len(out))
        wants.append((out.clone(), tensors[CONV].clone(), tensors[POOL].clone()))
    streams = [torch.cuda.Stream() for _ in work]
    graphs = []
    if how == "graph":
        for (tensors, options), out in zip(work, outs):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                steps(tensors, options, out, len(out))
    for _ in range(5):
        for (tensors, _), out, pools in zip(work, outs, start):
            out.fill_(float("nan"))
            tensors[CONV].copy_(pools[0])
            tensors[POOL].copy_(pools[1])
        torch.cuda.synchronize()
        if how == "graph":
            for stream, graph in zip(streams, graphs):
                with torch.cuda.stream(stream):
                    graph.replay()
        else:
            for at in range(40):
                for stream, (tensors, options), out in zip(streams, work, outs):
                    with torch.cuda.stream(stream):
                        kda_decode_step(*tensors, **options, out=out[at])
        torch.cuda.synchronize()
        for (tensors, _), out, want in zip(work, outs, wants):
            assert all(torch.equal(a, b) for a, b in zip((out, tensors[CONV], tensors[POOL]), want))
    assert not any(own.counters.any() for own in _scratch._streams.values())


def test_counters_of_captures_are_their_own(rng):
    """One part for all launches of a stream in a capture, which later calls outside do not touch; a larger one if needed."""
    small, large = case(rng, 3), case(rng, 32)
    _scratch._streams.clear()
    run(*small)
    before = set(_scratch._captures)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph):
            for tensors, options in (small, small, large, small):
                run(tensors, options)
    made = [_scratch._captures[key] for key in _scratch._captures if key not in before]
    assert len(made) == 2 and len({part.data_ptr() for part in made}) == 2 and {len(part) for part in made} == {128}
    graphs[0].replay()
    run(*large)
    torch.cuda.synchronize()
    assert not _scratch._blocks[torch.cuda.current_device()].memory.any()


@pytest.mark.parametrize("lack", ["_blocks", "_capture_number"])
def test_capture_without_zeroed_counters_zeroes_them(rng, lack, monkeypatch):
    """The first call of a process may be in a capture, and the driver may not tell captures apart: right all the same."""
    tensors, options = case(rng, 6)
    want = run(tensors, options)
    monkeypatch.setattr(_scratch, lack, {} if lack == "_blocks" else lambda stream: None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(tensors, options)
    for _ in range(3):
        for tensor in got:
            tensor.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_more_than_65535_programs(rng):
    """8,200 rows of 8 heads; the oracle computes the first and last of them."""
    tensors, options = case(rng, 8200, H=8, K=16, V=16)
    out, lines, states = run(tensors, options)
    assert bool(torch.isfinite(out).all())
    for rows in (slice(0, 2), slice(8190, 8200)):
        few = [t[rows] if at in (0, 1, 2, 3, TABLE) else t for at, t in enumerate(tensors)]
        want = run(few, options, R.kda_decode_step)
        slots = tensors[TABLE][rows].long()
        assert relative(out[rows], want[0]) < OUTPUT[torch.bfloat16]
        assert relative(states[slots], want[2][slots]) < STATE and torch.equal(lines[slots], want[1][slots])


def test_graph_replays_with_new_slots_and_never_waits_for_the_device(rng):
    tensors, options = case(rng, 6)
    out = torch.empty(6, 4, 128, device="cuda", dtype=torch.bfloat16)
    step = lambda: kda_decode_step(*tensors, **options, out=out)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        tensors[TABLE].copy_(torch.randperm(12, generator=rng)[:6].int())
        tensors[TABLE][3] = -1
        want = run(tensors, options, R.kda_decode_step)
        out.fill_(float("nan"))
        graph.replay()
        assert relative(out, want[0]) < OUTPUT[torch.bfloat16]
        assert torch.equal(tensors[CONV], want[1]) and relative(tensors[POOL], want[2]) < STATE


def test_runs_on_the_current_stream(rng):
    tensors, options = case(rng, 2)
    want = run(tensors, options)[0]
    late = torch.zeros_like(tensors[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # qkv arrives late on this stream: a launch elsewhere would read zeros
        late.copy_(tensors[0])
        out = run([late, *tensors[1:]], options)[0]
    stream.synchronize()
    assert torch.equal(out, want)


def test_compiles_as_one_graph(rng):
    tensors, options = case(rng, 2)
    step = lambda conv, pool: kda_decode_step(*tensors[:CONV], conv, tensors[5], pool, *tensors[TABLE:], **options) * 2
    mine, theirs = ([tensors[CONV].clone(), tensors[POOL].clone()] for _ in range(2))
    want = step(*theirs)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(*mine), want)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs))

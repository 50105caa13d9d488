"""The sm90 forms of prefill on the device: against fp64, and the same bits however a call is cut."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kdagen import devices, loader, reference
from kdagen.ops import _lanes, prefill_plan, prefill_sm90
from kdagen.ops.metadata import step_tables
from kdagen.spec import Schedule, Spec, Variant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or devices.machine().arch != "sm90", reason="the forms are for sm90"),
]

SIZES = dict(chunk=64, k=128, v=128, dtype="bf16")
NAN = float("nan")
RAGGED = (70, 0, 331, 9, 64)
# Relative error in norm of o and the state against fp64. A state that holds nothing but its last tokens is off by 2.5e-3: k,
# its decay and v' are each rounded to bf16. Nearly equal keys make the chunk's inverse ill conditioned.
TOLERANCE = {"random": (6e-3, 4e-3), "bound": (6e-3, 4e-3), "zero": (6e-3, 4e-3), "slow": (6e-3, 4e-3),
             "mixed": (6e-3, 4e-3), "equal": (1.5e-2, 1e-2)}


def module(family, **blocks):
    return loader.load(Variant(Spec.make(family, **SIZES), Schedule.make(warps=0, stages=0, **blocks)))


def kernels(bv=64):
    prepare, state = module("prefill_prepare", form="gluon"), module("prefill_state", form="gluon", bv=bv)
    return prefill_plan.Kernels(*[None] * len(prefill_plan.Kernels._fields))._replace(
        prepare=prepare.launch, prepare_options={"num_warps": 4, "num_stages": 1}, prepare_module=prepare,
        state=state.launch, state_options={"num_warps": 4 if bv == 64 else 8, "num_stages": 3},
        segments_spec=Spec.make("prefill_segments", **SIZES), row_bytes=74240)


def inputs(rng, T, H, HV=None, kind="random"):
    HV = HV or H
    make = lambda *shape: torch.randn(*shape, generator=rng)
    q, k, v, g, beta = make(1, T, H, 128), make(1, T, H, 128), make(1, T, HV, 128), make(1, T, HV, 128), make(1, T, HV)
    if kind in ("bound", "zero", "equal"):
        g = torch.full_like(g, 60.0 if kind == "bound" else -60.0)
    if kind == "slow":
        g = g - 6
    if kind == "mixed":
        g = torch.where(g > 0, 60.0, -60.0)
    if kind == "equal":
        k, beta = make(1, 1, H, 128) + 0.05 * k, torch.full_like(beta, 5.0)
    tokens = [x.to("cuda", torch.bfloat16) for x in (q, k, v, g, beta)]
    return [*tokens, (torch.rand(HV, generator=rng) * 2 - 1).cuda(), (make(HV, 128) * 0.1).cuda()]


def make_call(x, lengths, bv=64, **changes):
    q, k, v, g, beta, A_log, dt_bias = x
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    tables = step_tables(edges.cuda(), edges, chunk_size=64, rows=True)
    N, HV = len(lengths), v.shape[2]
    call = prefill_plan.Call(
        q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, lower_bound=-5.0, scale=128**-0.5, beta_scale=1.0,
        l2norm=True, sigmoid_beta=True, out=torch.full_like(v, NAN), cu_seqlens=edges.cuda(),
        chunk_offsets=tables.chunk_offsets, chunk_rows=tables.chunk_rows, longest=max(-(-n // 64) for n in lengths),
        h_in=None, read_slots=None, has_initial=None, h_out=torch.full((N, HV, 128, 128), NAN, device="cuda"),
        write_slots=None,
        ckpt_offsets=None, ckpt_slots=None, ckpt_pool=None, pad_slot=-1, N=N, H=q.shape[2], HV=HV, v_first=True,
        batch_invariant=False, max_workspace=8 << 30, kernels=kernels(bv))
    return call._replace(**changes)


def run(call, cut=None):
    assert prefill_sm90.run(call, prefill_plan.matrices_of, cut)
    torch.cuda.synchronize()
    return call.out, call.h_out


def oracle(x, lengths, h0=None, **flags):
    q, k, v, g, beta, A_log, dt_bias = [None if t is None else t.cpu() for t in x]
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    flags = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True) | flags
    return reference.recurrent_kda(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=-5.0, initial_state=None if h0 is None else h0.cpu(),
        output_final_state=True, cu_seqlens=edges, use_gate_in_kernel=True, **flags)


def error(got, want):
    return ((got.cpu().double() - want).norm() / want.norm()).item()


def check(out, state, want, kind="random"):
    assert error(out, want[0]) < TOLERANCE[kind][0]
    assert error(state, want[1]) < TOLERANCE[kind][1]


SERIAL = prefill_sm90.Plan("serial")


@pytest.mark.parametrize("kind", TOLERANCE)
def test_against_fp64(rng, kind):
    x = inputs(rng, sum(RAGGED), 2, kind=kind)
    h0 = torch.randn(len(RAGGED), 2, 128, 128, generator=rng).cuda() * 0.3
    want = oracle(x, RAGGED, h0)
    first = run(make_call(x, RAGGED, h_in=h0), SERIAL)
    check(*first, want, kind)
    wide = run(make_call(x, RAGGED, bv=128, h_in=h0), SERIAL)
    assert torch.equal(first[0], wide[0]) and torch.equal(first[1], wide[1]), "the V tile changed the bits"
    again = run(make_call(x, RAGGED, h_in=h0), SERIAL)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    check(*run(make_call(x, RAGGED, h_in=h0), prefill_sm90.Plan("segments", (), 3, 2)), want, kind)


@pytest.mark.parametrize("H, HV", [(1, 2), (2, 8)])
def test_grouped_heads_and_cuts(rng, H, HV):
    x = inputs(rng, 500, H, HV)
    h0 = torch.randn(1, HV, 128, 128, generator=rng).cuda()
    want = oracle(x, [500], h0)
    out, state = run(make_call(x, [500], h_in=h0), SERIAL)
    check(out, state, want)
    for cuts in ((0, 4, 6, 8), (0, 1, 8), tuple(range(9))):
        other = run(make_call(x, [500], h_in=h0), prefill_sm90.Plan("windows", cuts))
        assert torch.equal(out, other[0]) and torch.equal(state, other[1]), f"windows {cuts} changed the bits"
    for segments, chunks, head in ((2, 4, 1), (3, 3, 1), (8, 1, 1), (8, 1, 3), (4, 2, 3)):
        whole = run(make_call(x, [500], h_in=h0), prefill_sm90.Plan("segments", (), segments, chunks, head))
        check(*whole, want)
        for cuts in ((0, 4, 8), (0, 1, 3, 5, 8)):
            other = run(make_call(x, [500], h_in=h0), prefill_sm90.Plan("segments", cuts, segments, chunks, head))
            assert torch.equal(whole[0], other[0]) and torch.equal(whole[1], other[1]), f"windows {cuts} changed the bits"


def test_issue_limits_on_random_inputs(rng):
    x = inputs(rng, sum(RAGGED), 2)
    h0 = torch.randn(len(RAGGED), 2, 128, 128, generator=rng).cuda() * 0.3
    want = oracle(x, RAGGED, h0)
    out, state = run(make_call(x, RAGGED, h_in=h0))
    assert error(out, want[0]) < 6e-3 and error(state, want[1]) < 2e-3


def test_flags_off(rng):
    x = inputs(rng, 200, 2)
    x[1] = torch.nn.functional.normalize(x[1].float(), dim=-1).bfloat16()
    x[4], x[5], x[6] = torch.rand(1, 200, 2, generator=rng).cuda(), None, None
    got = run(make_call(x, [200], l2norm=False, sigmoid_beta=False))
    check(*got, oracle(x, [200], use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False))


def test_negative_eigenvalues(rng):
    x = inputs(rng, 200, 2)
    check(*run(make_call(x, [200], beta_scale=2.0)), oracle(x, [200], allow_neg_eigval=True))


def test_slices_of_a_fused_projection(rng):
    x = inputs(rng, 200, 2)
    wide = torch.randn(1, 200, 3 * 256 + 64, generator=rng).to("cuda", torch.bfloat16)
    for i in range(3):
        wide[..., i * 256:(i + 1) * 256] = x[i].flatten(-2)
    y = [*(wide[..., i * 256:(i + 1) * 256].unflatten(-1, (2, 128)) for i in range(3)), *x[3:]]
    first, second = run(make_call(x, [200])), run(make_call(y, [200]))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pools_padding_and_neighbours_of_nan(rng, dtype):
    lengths = [70, 5, 130, 0, 64]
    x = inputs(rng, sum(lengths), 2)
    for t in x[:5]:
        t[:, 70:75] = NAN  # sequence 1
    pool = torch.randn(9, 2, 128, 128, generator=rng).cuda().to(dtype)
    pool[3] = NAN
    before = pool.clone()
    index = lambda *values: torch.tensor(values, dtype=torch.int32, device="cuda")
    h0 = before[[1, 3, 5, 7, 0]].float()
    h0[[1, 4]] = 0
    want = oracle([t.nan_to_num(0) for t in x[:5]] + x[5:], lengths, h0, state_v_first=False)
    call = make_call(x, lengths, h_in=pool, h_out=pool, read_slots=index(1, 3, 5, 7, -1),
                     write_slots=index(2, 4, 5, 7, -1), v_first=False,
                     has_initial=torch.tensor([True, False, True, True, True]).cuda())
    out, _ = run(call)
    assert error(out[:, :70], want[0][:, :70]) < 6e-3 and error(out[:, 75:205], want[0][:, 75:205]) < 6e-3
    for n, slot in ((0, 2), (2, 5)):  # of a single state; a bf16 pool rounds too
        assert error(pool[slot].float(), want[1][n]) < (5e-3 if dtype == torch.float32 else 6e-3)
    assert (out[:, 205:] == 0).all(), "outputs of a padding sequence"
    assert out[:, 70:75].isnan().all()
    for slot in (0, 1, 3, 6, 7, 8):
        assert torch.equal(pool[slot].nan_to_num(7), before[slot].nan_to_num(7)), f"slot {slot} changed"


@pytest.mark.parametrize("cut", [SERIAL, prefill_sm90.Plan("segments", (), 2, 2)], ids=["serial", "segments"])
def test_checkpoints(rng, cut):
    x = inputs(rng, 264, 2)
    pool = torch.full((8, 2, 128, 128), 7.0, device="cuda")
    index = lambda *rows: torch.tensor(rows, dtype=torch.int32, device="cuda")
    offsets, slots = index([64, 192], [64, 128]), index([1, 2], [3, 4])
    run(make_call(x, [200, 64], ckpt_offsets=offsets, ckpt_slots=slots, ckpt_pool=pool), cut)
    for slot, first, last in ((1, 0, 64), (2, 0, 192), (3, 200, 264)):
        part = [t[:, first:last] for t in x[:5]] + x[5:]
        assert error(pool[slot], oracle(part, [last - first])[1][0]) < 5e-3
    assert (pool[[0, 4, 5, 6, 7]] == 7).all(), "slots that no checkpoint names"


@pytest.mark.parametrize("kind", ["random", "bound", "zero", "mixed"])
@pytest.mark.parametrize("T", [22, 70, 200])
def test_later_tokens_change_nothing(rng, T, kind):
    x, y = inputs(rng, T, 2, kind=kind), inputs(rng, T, 2, kind="bound")
    out, _ = run(make_call(x, [T]), SERIAL)
    for last in (1, 5, 20):
        mixed = [torch.cat([a[:, :T - last], b[:, T - last:]], 1) for a, b in zip(x[:5], y[:5])] + x[5:]
        assert torch.equal(out[:, :T - last], run(make_call(mixed, [T]), SERIAL)[0][:, :T - last])
        shorter = [t[:, :T - last].contiguous() for t in x[:5]] + x[5:]
        assert torch.equal(out[:, :T - last], run(make_call(shorter, [T - last]), SERIAL)[0])


CUTS = {"serial": SERIAL, "windows": prefill_sm90.Plan("windows", (0, 8, 16, 24)),
        "segments": prefill_sm90.Plan("segments", (), 4, 6), "both": prefill_sm90.Plan("segments", (0, 8, 16, 24), 8, 3, 4)}


def poison(call):
    call.out.fill_(NAN)
    call.h_out.fill_(NAN)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_in_a_graph(rng, cut):
    x = inputs(rng, 64 * 24, 4)
    call = make_call(x, [64 * 24])
    out, state = (t.clone() for t in run(call, cut))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert prefill_sm90.run(call, prefill_plan.matrices_of, cut)
    for _ in range(2):
        poison(call)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, call.out) and torch.equal(state, call.h_out)
    poison(call)
    run(call, cut)  # the events of a capture serve eager calls again
    assert torch.equal(out, call.out) and torch.equal(state, call.h_out)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_threads_on_streams_of_their_own(rng, cut):
    calls = [make_call(inputs(rng, 64 * 24, 4), [64 * 24]) for _ in range(3)]
    wanted = [tuple(t.clone() for t in run(call, cut)) for call in calls]
    for call in calls:
        poison(call)
    torch.cuda.synchronize()

    def work(call):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                assert prefill_sm90.run(call, prefill_plan.matrices_of, cut)
            torch.cuda.current_stream().synchronize()
            return call.out.clone(), call.h_out.clone()

    with ThreadPoolExecutor(len(calls)) as pool:
        for (out, state), want in zip(pool.map(work, calls), wanted):
            assert torch.equal(out, want[0]) and torch.equal(state, want[1])


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_call_that_comes_again_becomes_a_graph(rng, cut):
    """Same addresses: the same bits from the graph, on the caller's stream, beside other calls and inside a capture."""
    call, other = (make_call(inputs(rng, 64 * 24, 4), [64 * 24]) for _ in range(2))
    wanted = [tuple(t.clone() for t in run(one, cut)) for one in (call, other)]
    _lanes.lanes(0).calls.clear()
    before = len(_lanes._GRAPHS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(_lanes.GRAPH_AT + 2):
            poison(call)
            assert prefill_sm90.run(call, prefill_plan.matrices_of, cut)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(wanted[0][0], call.out) and torch.equal(wanted[0][1], call.h_out)
    assert len(_lanes._GRAPHS) == before + 1
    for one, (out, state) in zip((other, call), (wanted[1], wanted[0])):
        poison(one)
        run(one, cut)
        assert torch.equal(out, one.out) and torch.equal(state, one.h_out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert prefill_sm90.run(call, prefill_plan.matrices_of, cut)
    poison(call)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(wanted[0][0], call.out) and torch.equal(wanted[0][1], call.h_out)


def test_graphs_are_made_and_calls_forgotten_beside_a_capture_of_another_thread(rng, monkeypatch):
    """torch's captures forbid other threads much of the driver: neither they nor this thread's graphs may break."""
    monkeypatch.setattr(_lanes, "MAX_CALLS", 2)
    calls = [make_call(inputs(rng, 64 * 24, 4), [64 * 24]) for _ in range(4)]
    cut, stream, x, graph = CUTS["windows"], torch.cuda.Stream(), torch.zeros(1000, device="cuda"), torch.cuda.CUDAGraph()
    wanted = [tuple(t.clone() for t in run(call, cut)) for call in calls]

    def work(times):
        before = len(_lanes._GRAPHS)
        with torch.cuda.stream(stream):
            for call in calls:
                poison(call)
                for _ in range(times):
                    assert prefill_sm90.run(call, prefill_plan.matrices_of, cut)
        return len(_lanes._GRAPHS) - before

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work, 1).result()  # torch itself must not need new memory while another thread captures
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()  # torch.cuda.graph would empty the allocator's cache
            x += 1
            made = pool.submit(work, _lanes.GRAPH_AT + 1).result()
            x += 1
            graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    assert made == len(calls) and (x == 2).all()
    for call, (out, state) in zip(calls, wanted):
        assert torch.equal(out, call.out) and torch.equal(state, call.h_out)


def test_no_stream_is_shared_with_torchs_pool(rng):
    """What others put on a stream of torch's pool while a call is captured would be captured, and not done."""
    cut = CUTS["both"]
    call = make_call(inputs(rng, 64 * 24, 4), [64 * 24])
    for _ in range(_lanes.GRAPH_AT + 1):
        run(call, cut)
    mine = {stream.cuda_stream for stream in _lanes.lanes(0).streams.values()}
    assert len(mine) == 4
    for priority in (0, -1, -5):
        assert mine.isdisjoint({torch.cuda.Stream(priority=priority).cuda_stream for _ in range(64)})


def test_what_follows_on_the_stream_waits_for_the_other_streams(rng):
    """The workspace goes back to the allocator at once: what takes it up must come after all that still uses it."""
    x = inputs(rng, 64 * 24, 4)
    for cut in CUTS.values():
        call = make_call(x, [64 * 24])
        out, state = (t.clone() for t in run(call, cut))
        for _ in range(20):
            poison(call)
            assert prefill_sm90.run(call, prefill_plan.matrices_of, cut)
            torch.empty(40 << 20, dtype=torch.uint8, device="cuda").fill_(255)
            assert torch.equal(out, call.out) and torch.equal(state, call.h_out), cut.form


def slow_constants(value):
    """A maker of constants that takes the device some milliseconds."""
    def make():
        torch.cuda._sleep(20_000_000)
        return (torch.full((1024,), value, device="cuda"),)
    return make


def test_constants_are_ready_on_any_stream():
    like, made = torch.empty(1, device="cuda"), _lanes.Constants(2)
    torch.cuda.synchronize()
    made.get("a", like, slow_constants(7.0))
    with torch.cuda.stream(torch.cuda.Stream()):
        (found,) = made.get("a", like, slow_constants(8.0))
        assert (found == 7).all()
    torch.cuda.synchronize()
    made.settle()
    assert not made._pending
    made.get("b", like, slow_constants(7.0))
    assert made.get("c", like, slow_constants(9.0))[0][0] == 9, "past the limit"
    assert made.get("c", like, slow_constants(10.0))[0][0] == 10, "past the limit nothing is kept"


def test_a_capture_makes_constants_that_the_device_may_not_have():
    like, made, graph = torch.empty(1, device="cuda"), _lanes.Constants(8), torch.cuda.CUDAGraph()
    out, stream = torch.zeros(1024, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        made._made["a"] = _lanes.Made((torch.zeros(0),), torch.cuda.Event())  # as if in the making elsewhere
        out.copy_(made.get("a", like, lambda: (torch.full((1024,), 3.0, device="cuda"),))[0])
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 3).all()


def test_never_waits_for_the_device(rng):
    call = make_call(inputs(rng, 64 * 64, 16), [64 * 64])
    run(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert prefill_sm90.run(call, prefill_plan.matrices_of)
    finally:
        torch.cuda.set_sync_debug_mode("default")

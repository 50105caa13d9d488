"""The recurrent op on a GPU: bf16 beside the oracle, pools at scale, bits, graphs, streams, sizes past 32 bits."""

from __future__ import annotations

import pytest
import torch

import kdagen
from inputs import CLASSES, cu_seqlens, kda, relative, sliced
from kdagen import reference as R
from kdagen.ops.decode import fused_recurrent_kda

pytestmark = pytest.mark.gpu

# Output: its last rounding alone, 1.7e-3 of the norm in bf16, at most 2^-9 = 1.95e-3 of any element; 2e-4 in fp16, at most
# 4.9e-4; in fp32 the approximate exp2, reciprocals and square roots of sm90, each good to 2 ulp. States stay fp32: 1e-7 to
# 6e-7 is usual.
OUTPUT = {torch.float32: 4e-6, torch.float16: 5e-4, torch.bfloat16: 2e-3}
STATE = 2e-6


def on_gpu(tensors: dict) -> dict:
    return {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in tensors.items()}


def case(rng, name="bounded", **sizes):
    x, options = kda(rng, name, **sizes)
    return on_gpu(x), on_gpu(options)


def pool_case(rng, N, slots, pad=0, pool_dtype=torch.float32, columns=0, **sizes):
    """(inputs without states, options, pool, index table): random slots but the last, ``pad`` elements between slots."""
    x, options = case(rng, B=N, **sizes)
    inner = x.pop("initial_state").shape[1:]
    pool = torch.randn(slots, inner.numel() + pad, device="cuda").to(pool_dtype)[:, : inner.numel()].unflatten(1, inner)
    shape = (N, columns) if columns else (N,)
    table = torch.randperm(slots - 1, generator=rng)[: torch.Size(shape).numel()].reshape(shape).int().cuda()
    return x, options, pool, table


@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("dtype", OUTPUT, ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_in_every_dtype(rng, name, dtype, state_v_first):
    x, options = case(rng, name, B=2, T=40, H=2, HV=4, K=128, V=64, dtype=dtype)
    options |= dict(output_final_state=True, state_v_first=state_v_first)
    if not state_v_first:
        x["initial_state"] = x["initial_state"].mT.contiguous()
    out = torch.full_like(x["v"], float("nan"))
    o, final = fused_recurrent_kda(**x, **options, out=out)
    want, final_ref = R.recurrent_kda(**x, **options)
    assert relative(o, want) < OUTPUT[dtype]
    assert relative(final, final_ref) < STATE


@pytest.mark.parametrize("K, V", [(48, 60), (60, 100), (100, 48), (256, 256), (192, 80), (16, 8), (1, 1)])
def test_head_dims(rng, K, V):
    x, options = case(rng, "softplus", T=9, H=2, K=K, V=V, dtype=torch.bfloat16, sequences=4)
    options |= dict(output_final_state=True, cu_seqlens=cu_seqlens([0, 4, 0, 5]).cuda())
    want, final_ref = R.recurrent_kda(**x, **options)
    x |= {n: sliced(rng, x[n]) for n in ("q", "k", "v", "g", "beta")}  # NaN on both sides
    o, final = fused_recurrent_kda(**x, **options)
    few = o.numel() < 100  # then the norm is that of a few elements, each rounded by up to 2^-8
    assert relative(o, want) < (2**-8 if few else OUTPUT[torch.bfloat16])
    assert relative(final, final_ref) < STATE


@pytest.mark.parametrize("length", [1, 2, 63, 65, 1026])
def test_lengths(rng, length):
    x, options = case(rng, T=length, K=64, dtype=torch.bfloat16)
    o, final = fused_recurrent_kda(**x, **options, output_final_state=True)
    want, final_ref = R.recurrent_kda(**x, **options, output_final_state=True)
    assert relative(o, want) < OUTPUT[torch.bfloat16] and relative(final, final_ref) < STATE


@pytest.mark.parametrize("beta", [0.0, 1e-3])
def test_4096_steps_of_slow_decay(rng, beta):
    """State and decay in fp32, the decay to more digits than that: within 1e-4 after 4,096 steps of one direction."""
    for g in (-1e-4, -3e-5, -7.7e-4):
        x, _ = case(rng, "rand", T=4096, H=1, K=64, V=16)
        x |= dict(g=torch.full_like(x["g"], g), beta=torch.full_like(x["beta"], beta))
        _, final = fused_recurrent_kda(**x, output_final_state=True)
        _, want = R.recurrent_kda(**x, output_final_state=True)
        assert relative(final, want) < 1e-5
    x, options = case(rng, "softplus", T=4096, H=1, K=64, V=16)
    options["A_log"] = torch.full_like(options["A_log"], -9.0)  # raw gates of about -1e-4
    _, final = fused_recurrent_kda(**x, **options, output_final_state=True)
    assert relative(final, R.recurrent_kda(**x, **options, output_final_state=True)[1]) < 1e-4


@pytest.mark.parametrize("pad_slot", [-1, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pool_of_serving_size(rng, dtype, pad_slot):
    N, slots = 40, 90
    x, options, pool, table = pool_case(rng, N, slots, pad=128, pool_dtype=dtype, T=1, H=4, K=128, dtype=torch.bfloat16)
    table = 1 + table  # slot 0 stays free
    table[torch.tensor([0, 17, 39])] = torch.tensor([pad_slot, -1, pad_slot], dtype=torch.int32, device="cuda")
    rows = [n for n in range(N) if n not in (0, 17, 39)]
    live = table[rows].long()
    before, theirs = pool.clone(), pool.clone()
    out = torch.full_like(x["v"], float("nan"))
    o, _ = fused_recurrent_kda(**x, **options, state_pool=pool, state_indices=table, pad_slot=pad_slot, out=out)
    want = R.recurrent_kda_pool(**x, **options, pool=theirs, state_indices=table, pad_slot=pad_slot)
    assert relative(o, want) < OUTPUT[torch.bfloat16]
    assert torch.equal(o[[0, 17, 39]], torch.zeros_like(o[:3]))
    assert relative(pool[live], theirs[live]) < (STATE if dtype == torch.float32 else 1e-4)
    rest = torch.ones(slots, dtype=torch.bool)
    rest[live.cpu()] = False
    assert torch.equal(pool[rest.cuda()], before[rest.cuda()])


def test_speculative_rounds_equal_the_sequential_run(rng):
    N, k, H = 8, 3, 2
    x, options, pool, table = pool_case(rng, N, 64, columns=1 + k, T=4 * (1 + k), H=H, K=128, V=64, dtype=torch.bfloat16)
    state = pool[table[:, 0].long()].clone()
    accepted = torch.ones(N, dtype=torch.int32, device="cuda")
    kept, outputs = [[] for _ in range(N)], [[] for _ in range(N)]
    for step in range(4):
        width = 1 + k if step != 2 else 1  # one step without drafts in between
        span = slice(step * (1 + k), step * (1 + k) + width)
        o, _ = fused_recurrent_kda(**{n: t[:, span] for n, t in x.items()}, **options, state_pool=pool,
                                   state_indices=table, num_accepted_tokens=accepted)
        accepted = torch.randint(1, width + 1, (N,), generator=rng).int().cuda()
        for n, count in enumerate(accepted.tolist()):
            kept[n] += range(span.start, span.start + count)
            outputs[n].append(o[n, :count])
    for n in range(N):
        own = {name: t[n : n + 1, kept[n]] for name, t in x.items()}
        want, final = R.recurrent_kda(**own, **options, initial_state=state[n : n + 1], output_final_state=True)
        assert relative(torch.cat(outputs[n])[None], want) < OUTPUT[torch.bfloat16]
        column = int(accepted[n]) - 1
        assert relative(pool[table[n, column].long()][None], final) < STATE


# --- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_twice_and_alone_and_in_a_batch(rng, tokens, state_v_first, pool_dtype):
    N = 200
    x, options, pool, table = pool_case(rng, N, 210, pool_dtype=pool_dtype, T=tokens, H=4, K=128, dtype=torch.bfloat16)
    before = pool.clone()
    run = lambda pool, x, table: fused_recurrent_kda(
        **x, **options, state_pool=pool, state_indices=table, state_v_first=state_v_first)[0]
    first = run(pool, x, table)
    for _ in range(10):
        again = before.clone()
        assert torch.equal(run(again, x, table), first) and torch.equal(again, pool)
    for n in (0, 99, 199):
        alone = before.clone()
        o = run(alone, {name: t[n : n + 1] for name, t in x.items()}, table[n : n + 1])
        assert torch.equal(o, first[n : n + 1])
        assert torch.equal(alone[table[n].long()], pool[table[n].long()])


def test_every_schedule_of_the_space_alone_is_right_and_gives_the_same_bits(rng):
    """Each on poisoned outputs: which one runs depends on the batch, what it gives must not."""
    family = kdagen.families.get("recurrent")
    x, options = case(rng, B=3, T=2, H=2, K=128, V=128, dtype=torch.bfloat16)
    for k_first in (False, True):
        spec = kdagen.spec.Spec.make("recurrent", k=128, v=128, dtype="bf16", k_first=k_first)
        want, final_ref = R.recurrent_kda(**x, **options, output_final_state=True, state_v_first=not k_first)
        bits = None
        for schedule in family.candidates(spec):
            if family.supports(spec, schedule, kdagen.devices.machine()):
                continue
            out = torch.full_like(x["v"], float("nan"))
            variant = kdagen.spec.Variant(spec, schedule.source_key).name
            with kdagen.dispatch.pin(variant, warps=schedule.warps):
                _, final = fused_recurrent_kda(**x, **options, output_final_state=True, state_v_first=not k_first, out=out)
            assert relative(out, want) < OUTPUT[torch.bfloat16], schedule
            assert relative(final, final_ref) < STATE, schedule
            bits = bits or (out, final)
            assert torch.equal(out, bits[0]) and torch.equal(final, bits[1]), schedule


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_more_than_65535_programs(rng):
    N, HV, K, V = 9000, 8, 16, 8  # 72,000 programs of whole states
    x, options = case(rng, B=N, T=1, H=HV, K=K, V=V)
    o, final = fused_recurrent_kda(**x, **options, output_final_state=True)
    want, final_ref = R.recurrent_kda(**x, **options, output_final_state=True)
    assert relative(o, want) < OUTPUT[torch.float32] and relative(final, final_ref) < STATE


def test_pool_offsets_past_32_bits(rng):
    slots, H, K = 2300, 64, 128  # 2.4e9 elements
    if torch.cuda.mem_get_info()[0] < 8 * slots * H * K * K * 1.1:
        pytest.skip("needs 21 GB")
    x, options = case(rng, B=3, T=1, H=H, K=K, dtype=torch.bfloat16)
    states = x.pop("initial_state")
    pool = torch.zeros(slots, H, K, K, device="cuda")
    table = torch.tensor([slots - 1, 3, slots - 2], device="cuda")
    pool[table] = states
    o, _ = fused_recurrent_kda(**x, **options, state_pool=pool, state_indices=table)
    want, final = R.recurrent_kda(**x, **options, initial_state=states, output_final_state=True)
    assert relative(o, want) < OUTPUT[torch.bfloat16] and relative(pool[table], final) < STATE
    assert int(pool[:3].count_nonzero()) == 0 and int(pool[4 : slots - 2].count_nonzero()) == 0


def test_token_offsets_past_32_bits(rng):
    H, K, T, first = 96, 128, 180_000, 179_990  # T * H * K = 2.2e9 elements; only the last ten tokens are a sequence
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 25 GB")
    x, options = case(rng, "bounded", T=10, H=H, K=K, dtype=torch.bfloat16)
    options["output_final_state"] = True
    want, final_ref = R.recurrent_kda(**x, **options)
    wide = {}
    for name in ("q", "k", "v", "g", "beta"):
        wide[name] = torch.zeros(1, T, *x[name].shape[2:], dtype=x[name].dtype, device="cuda")
        wide[name][:, first:] = x[name]
    bounds = torch.tensor([first, T], dtype=torch.int32, device="cuda")
    o, final = fused_recurrent_kda(**wide, initial_state=x["initial_state"], **options, cu_seqlens=bounds)
    assert relative(o[:, first:], want) < OUTPUT[torch.bfloat16] and relative(final, final_ref) < STATE


# --- how it runs ----------------------------------------------------------------------------------------------------


def test_graph_replays_with_new_slots_and_never_waits_for_the_device(rng):
    N = 6
    x, options, pool, table = pool_case(rng, N, 30, T=1, H=4, K=128)
    out = torch.empty_like(x["v"])
    step = lambda: fused_recurrent_kda(**x, **options, state_pool=pool, state_indices=table, out=out)
    before = pool.clone()
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
        pool.copy_(before)
        table.copy_(torch.randperm(30, generator=rng)[:N].int())
        table[2] = -1
        theirs = pool.clone()
        out.fill_(float("nan"))
        graph.replay()
        want = R.recurrent_kda_pool(**x, **options, pool=theirs, state_indices=table)
        assert relative(out, want) < OUTPUT[torch.float32] and relative(pool, theirs) < STATE


def test_runs_on_the_current_stream(rng):
    x, options = case(rng, B=2, T=1, K=128, dtype=torch.bfloat16)
    want = fused_recurrent_kda(**x, **options)[0]
    late = {n: torch.zeros_like(t) for n, t in x.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the inputs arrive late on this stream: a launch elsewhere would read zeros
        for name, tensor in x.items():
            late[name].copy_(tensor)
        o = fused_recurrent_kda(**late, **options)[0]
    stream.synchronize()
    assert torch.equal(o, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_runs_on_the_tensors_device(rng):
    x, options = kda(rng, "bounded", B=2, T=1, K=128, dtype=torch.bfloat16)
    move = lambda d: {n: t.to("cuda:1") if isinstance(t, torch.Tensor) else t for n, t in d.items()}
    o = fused_recurrent_kda(**move(x), **move(options))[0]
    assert o.device.index == 1 and relative(o, R.recurrent_kda(**x, **options)[0]) < OUTPUT[torch.bfloat16]


def test_compiles_as_one_graph(rng):
    x, options, pool, table = pool_case(rng, 4, 9, T=1, H=2, K=128)
    step = lambda pool: fused_recurrent_kda(**x, **options, state_pool=pool, state_indices=table)[0] * 2
    mine, theirs = pool.clone(), pool.clone()
    want = step(theirs)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(mine)
    assert torch.equal(got, want) and torch.equal(mine, theirs)

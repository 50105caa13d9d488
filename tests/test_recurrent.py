"""The recurrent op against its fp64 oracle: in the interpreter (fp32, fp16) and on the CPU path."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kdagen
from inputs import CLASSES, cu_seqlens, kda, relative, sliced
from kdagen import families
from kdagen import reference as R
from kdagen.errors import ArgumentError, ArgumentTypeError, Unsupported
from kdagen.ops.decode import fused_recurrent_kda
from kdagen.spec import Problem, Schedule, Spec, Variant, parse

FP32 = 2e-6   # fp32 products and sums of up to 256 terms, a few tokens: 1e-7 is usual
FP16 = 1e-3   # one rounding of the output to fp16: 2^-11 at most, 3e-4 as a norm


def slots_of(rng, slots: int, *shape: int) -> torch.Tensor:
    """Distinct slots in random order: an index table of any shape."""
    count = torch.Size(shape).numel()
    return torch.randperm(slots, generator=rng)[:count].reshape(shape).to(torch.int32)


def pooled(rng, states: torch.Tensor, slots: int, dtype: torch.dtype = torch.float32, pad: int = 0) -> torch.Tensor:
    """A randomly filled pool for states like these; ``pad`` elements of NaN between slots."""
    inner = states.shape[1:]
    flat = torch.full((slots, inner.numel() + pad), float("nan"), dtype=dtype)
    flat[:, : inner.numel()] = torch.randn(slots, inner.numel(), generator=rng)
    return flat[:, : inner.numel()].unflatten(1, inner)


def both(x, options, pool, table, **more):
    """(o, pool) of the op, and of the oracle, each from its own copy of the pool. The op's output is poisoned first."""
    v = x["v"]
    x = {name: tensor for name, tensor in x.items() if name != "initial_state"}
    mine, theirs = pool.clone(), pool.clone()
    out = torch.full(v.shape, float("nan"), dtype=v.dtype)
    fused_recurrent_kda(**x, **options, state_pool=mine, state_indices=table, out=out, **more)
    return (out, mine), (R.recurrent_kda_pool(**x, **options, pool=theirs, state_indices=table, **more), theirs)


# --- the formula ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_inputs_and_both_state_layouts(rng, name, state_v_first):
    x, options = kda(rng, name, B=2, T=3, H=1, HV=2, K=16, V=12)
    if not state_v_first:
        x["initial_state"] = x["initial_state"].mT.contiguous()
    options |= dict(output_final_state=True, state_v_first=state_v_first)
    o, final = fused_recurrent_kda(**x, **options)
    o_ref, final_ref = R.recurrent_kda(**x, **options)
    assert relative(o, o_ref) < FP32
    assert relative(final, final_ref) < FP32
    assert final.dtype == torch.float32


@pytest.mark.parametrize("K, V", [(1, 3), (48, 8), (60, 20), (100, 4), (8, 130), (256, 4)])
def test_head_dims_that_are_no_power_of_two_read_nothing_beyond_them(rng, K, V):
    x, options = kda(rng, "softplus", T=2, H=1, K=K, V=V)
    options["output_final_state"] = True
    want = R.recurrent_kda(**x, **options)
    x |= {name: sliced(rng, x[name]) for name in ("q", "k", "v", "g", "beta")}  # NaN on both sides
    got = fused_recurrent_kda(**x, **options)
    assert relative(got[0], want[0]) < FP32
    assert relative(got[1], want[1]) < FP32


@pytest.mark.parametrize("HV", [2, 4, 8])
def test_grouped_value_heads_and_packed_sequences_with_empty_ones(rng, HV):
    lengths = [0, 2, 0, 1, 3, 0]
    x, options = kda(rng, "bounded", T=6, H=2, HV=HV, K=8, V=4, sequences=6)
    options |= dict(output_final_state=True, cu_seqlens=cu_seqlens(lengths))
    o, final = fused_recurrent_kda(**x, **options)
    o_ref, final_ref = R.recurrent_kda(**x, **options)
    assert relative(o, o_ref) < FP32
    assert relative(final, final_ref) < FP32
    assert torch.equal(final[[0, 2, 5]], x["initial_state"][[0, 2, 5]])  # an empty sequence keeps its state, to the bit


def test_one_token_and_int64_boundaries(rng):
    x, options = kda(rng, "rand", T=3, K=8, sequences=3)
    options |= dict(output_final_state=True, cu_seqlens=cu_seqlens([1, 1, 1], torch.int64))
    got, want = fused_recurrent_kda(**x, **options), R.recurrent_kda(**x, **options)
    assert relative(got[0], want[0]) < FP32
    # the same as three batch rows of one token
    rows = {n: t if n == "initial_state" else t.transpose(0, 1) for n, t in x.items()}
    alone = fused_recurrent_kda(**rows, output_final_state=True)
    assert torch.equal(alone[0].transpose(0, 1), got[0])
    assert torch.equal(alone[1], got[1])


@pytest.mark.parametrize("flags", [
    dict(use_qk_l2norm_in_kernel=True), dict(use_beta_sigmoid_in_kernel=True),
    dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True), dict(scale=0.3),
], ids=lambda flags: "-".join(flags))
def test_each_flag_alone(rng, flags):
    x, _ = kda(rng, "rand", B=2, T=2, K=12)
    x["k"] *= 1.2
    if "use_beta_sigmoid_in_kernel" in flags:
        x["beta"] = torch.randn(2, 2, 2, generator=rng)
    o, _ = fused_recurrent_kda(**x, **flags)
    assert relative(o, R.recurrent_kda(**x, **flags)[0]) < FP32
    assert relative(o, R.recurrent_kda(**x)[0]) > 1e-2  # and the flag changes the result


def test_gate_forms_differ_and_take_their_parameters_in_both_shapes(rng):
    x, options = kda(rng, "bounded", T=2, K=8)
    flat = options | dict(dt_bias=options["dt_bias"].flatten())
    bounded = fused_recurrent_kda(**x, **options)[0]
    assert torch.equal(bounded, fused_recurrent_kda(**x, **flat)[0])
    no_bias = options | dict(dt_bias=None)
    assert relative(fused_recurrent_kda(**x, **no_bias)[0], R.recurrent_kda(**x, **no_bias)[0]) < FP32
    # without A_log the factor is 1
    bare = options | dict(A_log=None)
    assert torch.allclose(fused_recurrent_kda(**x, **bare)[0],
                          fused_recurrent_kda(**x, **options | dict(A_log=torch.zeros(2)))[0])
    # the bounded form is no clamp of the softplus form
    raw = R.kda_gate(x["g"], options["A_log"], options["dt_bias"])
    ready = {n: v for n, v in options.items() if n.startswith("use_") and "gate" not in n}
    clamped = R.recurrent_kda(**x | dict(g=raw.clamp(min=-5.0)), **ready)[0]
    assert relative(bounded, R.recurrent_kda(**x, **options)[0]) < FP32 < 1e-2 < relative(bounded, clamped)


def test_fp16_inputs_keep_beta_decay_and_state_in_fp32(rng):
    x, options = kda(rng, "softplus", B=2, T=3, K=16, dtype=torch.float16)
    options["output_final_state"] = True
    o, final = fused_recurrent_kda(**x, **options)
    o_ref, final_ref = R.recurrent_kda(**x, **options)
    assert o.dtype == torch.float16
    assert relative(o, o_ref) < FP16
    assert relative(final, final_ref) < FP32  # a beta or a decay in 16 bits would be off by 1e-4


@pytest.mark.parametrize("g, beta", [(-1e-4, 0.0), (-0.24, 1e-3)])
def test_slow_decay_does_not_drift(rng, g, beta):
    """The whole state decays by the same factor: a factor rounded to fp32 is off by up to 3e-8 at each step."""
    steps = 300
    x, _ = kda(rng, "rand", T=steps, H=1, K=4, V=4)
    x |= dict(g=torch.full_like(x["g"], g), beta=torch.full_like(x["beta"], beta))
    x["initial_state"] = torch.ones(1, 1, 4, 4)
    _, final = fused_recurrent_kda(**x, output_final_state=True)
    _, want = R.recurrent_kda(**x, output_final_state=True)
    assert relative(final, want) < 1.5e-6


# --- memory: strides, buffers ---------------------------------------------------------------------------------------


def test_slices_of_one_fused_projection_are_read_in_place(rng):
    N, H, K, V = 3, 2, 8, 12
    P, U = H * K, H * V
    wide = torch.randn(N, 3 * P + U + H + 5, generator=rng)
    cut = lambda at, width: wide[:, at : at + width]
    x = dict(q=cut(0, P).view(N, 1, H, K), k=cut(P, P).view(N, 1, H, K), v=cut(2 * P, U).view(N, 1, H, V),
             g=cut(2 * P + U, P).view(N, 1, H, K), beta=cut(3 * P + U, H)[:, None])
    options = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0)
    before = wide.clone()
    o, _ = fused_recurrent_kda(**x, **options)
    assert relative(o, R.recurrent_kda(**x, **options)[0]) < FP32
    assert torch.equal(wide, before)
    # as packed tokens, and as a batch whose rows lie apart
    packed = {n: t.transpose(0, 1) for n, t in x.items()}
    assert torch.equal(fused_recurrent_kda(**packed, **options, cu_seqlens=cu_seqlens([1] * N))[0].transpose(0, 1), o)
    apart = {n: t[::2] for n, t in x.items()}
    assert torch.equal(fused_recurrent_kda(**apart, **options)[0], o[::2])


def test_output_goes_to_the_given_buffer_and_nowhere_else(rng):
    x, _ = kda(rng, "rand", B=2, T=2, H=2, K=8, V=4)
    wide = torch.full((2, 2, 2, 12), 7.0)
    out = wide[..., 4:8]
    o, final = fused_recurrent_kda(**x, out=out)
    assert o is out and final is None
    assert relative(o, R.recurrent_kda(**x)[0]) < FP32
    assert torch.equal(wide[..., :4], torch.full((2, 2, 2, 4), 7.0))
    assert torch.equal(wide[..., 8:], torch.full((2, 2, 2, 4), 7.0))


def test_nothing_to_do(rng):
    x, options = kda(rng, "rand", B=2, T=0, K=8)
    o, final = fused_recurrent_kda(**x, **options, output_final_state=True)
    assert o.shape == (2, 0, 2, 8) and torch.equal(final, x["initial_state"])
    x, options = kda(rng, "rand", B=0, T=3, K=8, sequences=None)
    x["initial_state"] = torch.zeros(0, 2, 8, 8)
    o, final = fused_recurrent_kda(**x, **options, output_final_state=True)
    assert o.shape == (0, 3, 2, 8) and final.shape == (0, 2, 8, 8)
    x, options = kda(rng, "rand", B=1, T=0, K=8)
    x["initial_state"] = torch.zeros(0, 2, 8, 8)
    assert fused_recurrent_kda(**x, cu_seqlens=cu_seqlens([]), output_final_state=True)[1].shape == (0, 2, 8, 8)


# --- pools ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad_slot", [-1, 0], ids=["negative", "reserved"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_padding_is_neither_read_nor_written_and_gives_zeros(rng, tokens, pad_slot):
    N, slots = 6, 9
    x, options = kda(rng, "softplus", B=N, T=tokens, H=1, HV=2, K=8, V=4)
    pool = pooled(rng, x["initial_state"], slots, pad=5)
    table = 1 + slots_of(rng, slots - 1, N)
    table[[0, 3, 5]] = torch.tensor([pad_slot, -1, pad_slot], dtype=torch.int32)  # negative is padding under both
    for name in ("q", "k", "v", "g", "beta"):
        x[name][3] = float("nan")  # what stands in a padded row does not matter
    clean = {n: t.nan_to_num() for n, t in x.items()}
    (o, mine), _ = both(x, options, pool, table, pad_slot=pad_slot)
    _, (o_ref, theirs) = both(clean, options, pool, table, pad_slot=pad_slot)
    assert relative(o, o_ref) < FP32
    assert torch.equal(o[[0, 3, 5]], torch.zeros(3, tokens, 2, 4))
    live = table[[1, 2, 4]].long()
    assert relative(mine[live], theirs[live]) < FP32
    untouched = [slot for slot in range(slots) if slot not in live.tolist()]
    assert torch.equal(mine[untouched], pool[untouched])


def test_slots_outside_the_pool_are_padding_even_in_a_pool_smaller_than_the_batch(rng):
    x, _options = kda(rng, "rand", B=5, T=1, H=1, K=8, V=4)
    pool = pooled(rng, x["initial_state"], 2)
    whole = torch.cat([pool, torch.full((3, 1, 4, 8), 3.0)])  # what lies after the pool in memory must stay
    before = whole.clone()
    table = torch.tensor([7, 1, 2, -9, 0], dtype=torch.int64)
    o, _ = fused_recurrent_kda(**{n: t for n, t in x.items() if n != "initial_state"}, state_pool=whole[:2],
                               state_indices=table)
    assert torch.equal(o[[0, 2, 3]], torch.zeros(3, 1, 1, 4))
    assert torch.equal(whole[2:], before[2:])
    theirs = pool.clone()
    want = R.recurrent_kda_pool(**{n: t[[1, 4]] for n, t in x.items() if n != "initial_state"}, pool=theirs,
                                state_indices=torch.tensor([1, 0]))
    assert relative(o[[1, 4]], want) < FP32
    assert relative(whole[:2], theirs) < FP32


def test_table_that_is_a_strided_column_of_a_wider_one(rng):
    x, options = kda(rng, "rand", B=3, T=1, K=8)
    wide = slots_of(rng, 12, 3, 4)
    pool = pooled(rng, x["initial_state"], 12)
    (o, mine), (o_ref, theirs) = both(x, options, pool, wide[:, 2])
    assert relative(o, o_ref) < FP32 and relative(mine, theirs) < FP32
    (o, mine), (o_ref, theirs) = both(x, options, pool, wide.T[1:3].T)  # [S, 2], both strides odd
    assert relative(o, o_ref) < FP32 and relative(mine, theirs) < FP32


@pytest.mark.parametrize("how", ["pool", "initial"])
def test_fresh_sequences_do_not_read_their_stale_state(rng, how):
    x, options = kda(rng, "softplus", B=3, T=1, K=8)
    fresh = torch.tensor([True, False, True])
    stale = x["initial_state"].clone()
    stale[1] = float("nan")
    zeroed = x | dict(initial_state=torch.where(fresh[:, None, None, None], x["initial_state"], 0))
    want, final = R.recurrent_kda(**zeroed, **options, output_final_state=True)
    if how == "initial":
        o, state = fused_recurrent_kda(**x | dict(initial_state=stale), **options, output_final_state=True,
                                       has_initial_state=fresh)
    else:
        del x["initial_state"]
        o, state = fused_recurrent_kda(**x, **options, state_pool=stale, state_indices=torch.arange(3),
                                       has_initial_state=fresh)
    assert relative(o, want) < FP32 and relative(state, final) < FP32


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_half_pools_round_the_state_once_a_write(rng, dtype):
    x, options = kda(rng, "rand", B=2, T=3, H=1, K=16, V=8)
    pool = pooled(rng, x["initial_state"], 7, dtype)
    table = slots_of(rng, 7, 2, 3)
    (o, mine), (o_ref, theirs) = both(x, options, pool, table)
    assert mine.dtype == dtype
    assert relative(o, o_ref) < FP32  # a state rounded between tokens would be off by 1e-4
    assert relative(mine, theirs) < (FP32 if dtype == torch.float32 else 1e-4)  # ties may round to another fp16 value


def test_no_initial_state_and_no_final_state(rng):
    x, _options = kda(rng, "rand", T=2, K=8)
    del x["initial_state"]
    o, final = fused_recurrent_kda(**x)
    assert final is None and relative(o, R.recurrent_kda(**x)[0]) < FP32


def test_steps_after_a_first_part_equal_the_whole(rng):
    """T tokens at once, or T - n at once and then n single steps on a pool: K != V would show a transposed state."""
    x, options = kda(rng, "bounded", T=6, H=1, HV=2, K=12, V=4)
    whole, final = fused_recurrent_kda(**x, **options, output_final_state=True)
    part = lambda a, b: {n: t if n == "initial_state" else t[:, a:b] for n, t in x.items()}
    _, state = fused_recurrent_kda(**part(0, 4), **options, output_final_state=True)
    pool = pooled(rng, state, 5)
    slot = slots_of(rng, 5, 1)
    pool[slot.long()] = state
    steps = []
    for t in (4, 5):
        x_t = {n: v for n, v in part(t, t + 1).items() if n != "initial_state"}
        steps.append(fused_recurrent_kda(**x_t, **options, state_pool=pool, state_indices=slot)[0])
    assert torch.equal(torch.cat(steps, 1), whole[:, 4:])
    assert torch.equal(pool[slot.long()], final)


# --- speculative decode ---------------------------------------------------------------------------------------------


def test_rejected_drafts_leave_no_trace(rng):
    """Steps of 1 + k tokens of which some are accepted, then a step without drafts: as the accepted tokens one by one."""
    N, k, steps = 2, 2, 3
    x, options = kda(rng, "softplus", B=N, T=steps * (1 + k) + 1, H=1, K=8, V=4)
    state = x.pop("initial_state")
    pool, table = pooled(rng, state, 10), slots_of(rng, 10, N, 1 + k)
    pool[table[:, 0].long()] = state
    accepted = torch.ones(N, dtype=torch.int32)
    kept: list[list[int]] = [[] for _ in range(N)]  # the tokens that each row accepted
    outputs: list[list[torch.Tensor]] = [[] for _ in range(N)]
    for step in range(steps + 1):
        length = 1 + k if step < steps else 1
        tokens = slice(step * (1 + k), step * (1 + k) + length)
        o, _ = fused_recurrent_kda(**{n: t[:, tokens] for n, t in x.items()}, **options, state_pool=pool,
                                   state_indices=table, num_accepted_tokens=accepted)
        accepted = torch.randint(1, length + 1, (N,), generator=rng).to(torch.int32)
        for n in range(N):
            kept[n] += range(tokens.start, tokens.start + int(accepted[n]))
            outputs[n].append(o[n, : int(accepted[n])])
    for n in range(N):
        own = {name: t[n : n + 1, kept[n]] for name, t in x.items()}
        want, final = R.recurrent_kda(**own, **options, initial_state=state[n : n + 1], output_final_state=True)
        assert relative(torch.cat(outputs[n])[None], want) < FP32
        assert relative(pool[table[n, 0].long()][None], final) < FP32


def test_accepted_counts_outside_the_table_are_clamped(rng):
    x, options = kda(rng, "rand", B=4, T=2, H=1, K=8, V=4)
    pool, table = pooled(rng, x["initial_state"], 12), slots_of(rng, 12, 4, 2)
    wild = torch.tensor([-3, 0, 9, 2**31 - 1], dtype=torch.int32)
    (o, mine), (o_ref, theirs) = both(x, options, pool, table, num_accepted_tokens=wild)
    assert relative(o, o_ref) < FP32 and relative(mine, theirs) < FP32
    again, _ = both(x, options, pool, table, num_accepted_tokens=torch.tensor([1, 1, 2, 2]))
    assert torch.equal(again[0], o) and torch.equal(again[1], mine)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_prompts_about_as_long_as_a_speculative_step(rng, k):
    """Fresh prompts of k, k + 1 and k + 2 tokens through one table; tokens past the last column share it."""
    lengths = [k, k + 1, k + 2]
    x, options = kda(rng, "rand", T=sum(lengths), H=1, K=8, V=4, sequences=3)
    pool = torch.full((3 * (1 + k) + 1, 1, 4, 8), float("nan"))
    table = slots_of(rng, len(pool), 3, 1 + k)
    bounds = cu_seqlens(lengths)
    x.pop("initial_state")
    o, _ = fused_recurrent_kda(**x, **options, state_pool=pool, state_indices=table, cu_seqlens=bounds,
                               num_accepted_tokens=torch.ones(3, dtype=torch.int64), has_initial_state=torch.zeros(3).bool())
    want, finals = R.recurrent_kda(**x, **options, cu_seqlens=bounds, output_final_state=True)
    assert relative(o, want) < FP32
    for n, length in enumerate(lengths):
        column = min(length, 1 + k) - 1
        assert relative(pool[table[n, column].long()], finals[n]) < FP32
        assert pool[table[n, column + 1 :].long()].isnan().all()  # columns without a token stay as they were


def test_padding_inside_a_speculative_table(rng):
    x, options = kda(rng, "rand", B=3, T=3, H=1, K=8, V=4)
    pool, table = pooled(rng, x["initial_state"], 12), slots_of(rng, 12, 3, 3)
    table[0] = -1          # a padded row
    table[1, 1] = -1       # a column that is only not written
    (o, mine), (o_ref, theirs) = both(x, options, pool, table, num_accepted_tokens=torch.tensor([2, 1, 3]))
    assert torch.equal(o[0], torch.zeros(3, 1, 4))
    assert relative(o, o_ref) < FP32 and relative(mine, theirs) < FP32
    untouched = [slot for slot in range(12) if slot not in table.flatten().tolist()]
    assert torch.equal(mine[untouched], pool[untouched])


# --- the same bits --------------------------------------------------------------------------------------------------


def test_twice_and_alone_and_in_a_batch_give_the_same_bits(rng):
    x, options = kda(rng, "softplus", B=3, T=2, K=8)
    pool, table = pooled(rng, x["initial_state"], 6), slots_of(rng, 6, 3)
    (o, mine), _ = both(x, options, pool, table)
    (again, mine_again), _ = both(x, options, pool, table)
    assert torch.equal(o, again) and torch.equal(mine, mine_again)
    for n in range(3):
        (one, one_pool), _ = both({name: t[n : n + 1] for name, t in x.items()}, options, pool, table[n : n + 1])
        assert torch.equal(one, o[n : n + 1])
        assert torch.equal(one_pool[table[n].long()], mine[table[n].long()])


@pytest.mark.parametrize("blocks", ["bv16_evict0", "bv32_evict1"])
def test_a_pinned_schedule_changes_no_bit(rng, blocks):
    x, options = kda(rng, "bounded", T=2, H=1, K=16, V=20)
    o, final = fused_recurrent_kda(**x, **options, output_final_state=True)
    with kdagen.dispatch.pin(f"recurrent__k16_v20_fp32__{blocks}"):
        pinned = fused_recurrent_kda(**x, **options, output_final_state=True)
    assert torch.equal(pinned[0], o) and torch.equal(pinned[1], final)


# --- refusals -------------------------------------------------------------------------------------------------------


def bad(x, options):
    """(what is wrong, the exception, words of the message)"""
    fill = lambda *shape: torch.zeros(shape)
    table = torch.zeros(2, dtype=torch.int32)
    pool = dict(state_pool=fill(4, 2, 8, 8), state_indices=table, initial_state=None)
    return {
        "g of [B, T, H]": (dict(g=fill(2, 3, 2)), ArgumentError, "g: got shape [2, 3, 2], expected shape [2, 3, 2, 8]"),
        "beta of [B, T, H, 1]": (dict(beta=fill(2, 3, 2, 1)), ArgumentError, "beta: got shape [2, 3, 2, 1]"),
        "q of three dimensions": (dict(q=fill(2, 3, 16)), ArgumentError, "q: got shape"),
        "another k": (dict(k=fill(2, 3, 2, 9)), ArgumentError, "k: got shape"),
        "value heads": (dict(v=fill(2, 3, 3, 8)), ArgumentError, "multiple of the 2 heads"),
        "dtype of k": (dict(k=x["k"].half()), ArgumentTypeError, "k: got torch.float16"),
        "integer q": (dict(q=x["q"].int()), ArgumentTypeError, "q: got torch.int32"),
        "strided K": (dict(q=fill(2, 3, 2, 16)[..., ::2]), ArgumentError, "q.contiguous()"),
        "state of another layout": (dict(initial_state=fill(2, 2, 8, 9)), ArgumentError, "initial_state: got shape"),
        "state that is a transpose": (dict(initial_state=fill(2, 2, 8, 8).mT), ArgumentError, "initial_state: got strides"),
        "no gate parameter": (dict(use_gate_in_kernel=True), ArgumentError, "A_log"),
        "positive bound": (dict(use_gate_in_kernel=True, lower_bound=5.0), ArgumentError, "lower_bound: got 5.0"),
        "A_log of K": (dict(use_gate_in_kernel=True, A_log=fill(8)), ArgumentError, "A_log: got shape [8]"),
        "dt_bias of K": (dict(use_gate_in_kernel=True, A_log=fill(2), dt_bias=fill(8)), ArgumentError, "dt_bias"),
        "eigval without sigmoid": (dict(allow_neg_eigval=True), ArgumentError, "use_beta_sigmoid_in_kernel"),
        "out": (dict(out=fill(2, 3, 2, 9)), ArgumentError, "out: got shape"),
        "out's dtype": (dict(out=fill(2, 3, 2, 8).half()), ArgumentTypeError, "out: got torch.float16"),
        "pool without table": (dict(pool, state_indices=None), ArgumentError, "state_pool: got no state_indices"),
        "table without pool": (dict(pool, state_pool=None), ArgumentError, "state_pool: got None"),
        "pool and state": (dict(pool, initial_state=fill(2, 2, 8, 8)), ArgumentError, "initial_state"),
        "table of another length": (dict(pool, state_indices=table[:1]), ArgumentError, "state_indices: got shape [1]"),
        "table of floats": (dict(pool, state_indices=table.float()), ArgumentTypeError, "state_indices"),
        "too few columns": (dict(pool, state_indices=table[:, None]), ArgumentError, "state_indices: got 1 columns"),
        "accepted without table": (dict(num_accepted_tokens=table), ArgumentError, "num_accepted_tokens"),
        "accepted of another length": (dict(pool, num_accepted_tokens=table[:1]), ArgumentError, "num_accepted_tokens"),
        "has_initial_state of ints": (dict(has_initial_state=table), ArgumentTypeError, "has_initial_state"),
        "boundaries of a batch": (dict(cu_seqlens=cu_seqlens([3, 3])), ArgumentError, "cu_seqlens: got a batch of 2 rows"),
    }


@pytest.mark.parametrize("case", bad(dict(k=torch.zeros(1), q=torch.zeros(1)), {}))
def test_refusals_name_the_argument_what_came_and_what_was_expected(rng, case):
    x, options = kda(rng, "rand", B=2, T=3, K=8)
    change, error, words = bad(x, options)[case]
    with pytest.raises(error) as caught:
        fused_recurrent_kda(**x | options | change)
    assert words in str(caught.value) and "expected" in str(caught.value)


@pytest.mark.parametrize("edges", [[0, 2, 1, 3], [1, 3], [0, 2], [0, 4], [], [[0, 3]]])
def test_wrong_boundaries_are_refused_and_unchecked_ones_never_leave_the_tensor(rng, edges):
    x, _ = kda(rng, "rand", T=3, K=8, sequences=max(0, len(edges) - 1))
    bounds = torch.tensor(edges, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="cu_seqlens"):
        fused_recurrent_kda(**x, cu_seqlens=bounds)
    with pytest.raises(ArgumentTypeError, match="cu_seqlens"):
        fused_recurrent_kda(**x, cu_seqlens=cu_seqlens([3]).float())
    if len(edges) > 1:
        clamped = torch.tensor(edges).clamp(0, 3)
        surround = torch.full((1, 9, 2, 8), 5.0)
        fused_recurrent_kda(**x, cu_seqlens=bounds, out=surround[:, 3:6], checked=False)
        assert torch.equal(surround[:, :3], torch.full((1, 3, 2, 8), 5.0))
        assert torch.equal(surround[:, 6:], torch.full((1, 3, 2, 8), 5.0))
        first = slice(int(clamped[0]), int(clamped[1]))
        own = {n: t[:1] if n == "initial_state" else t[:, first] for n, t in x.items()}
        if len(edges) == 2:
            assert relative(surround[:, 3:6][:, first], R.recurrent_kda(**own)[0]) < FP32


def test_unknown_keywords_and_large_heads_are_refused(rng):
    x, _ = kda(rng, "rand", T=1, K=8)
    with pytest.raises(TypeError, match="initial_states"):
        fused_recurrent_kda(**x, initial_states=None)
    wide, _ = kda(rng, "rand", T=1, H=1, K=257, V=8)
    with pytest.raises(Unsupported, match="K = 257"):
        fused_recurrent_kda(**wide)


def test_bf16_is_refused_by_the_interpreter_and_runs_on_the_cpu_path(rng, monkeypatch):
    x, options = kda(rng, "bounded", T=2, K=8, dtype=torch.bfloat16)
    if not torch.cuda.is_available():
        with pytest.raises(ArgumentTypeError, match="TRITON_INTERPRET"):
            fused_recurrent_kda(**x, **options)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    o, _ = fused_recurrent_kda(**x, **options)
    assert o.dtype == torch.bfloat16
    assert relative(o, R.recurrent_kda(**x, **options)[0]) < 3e-3  # one rounding to bf16: 1.7e-3 as a norm


# --- CPU path, registration -----------------------------------------------------------------------------------------


def test_cpu_path_is_the_oracle(rng, cpu_path):
    x, options = kda(rng, "softplus", T=6, H=1, HV=2, K=12, V=20, sequences=3)
    options |= dict(cu_seqlens=cu_seqlens([1, 0, 5]), output_final_state=True)
    o, final = fused_recurrent_kda(**x, **options)
    want, final_ref = R.recurrent_kda(**x, **options)
    assert relative(o, want) < 1e-6 and relative(final, final_ref) < 1e-6


def test_cpu_path_on_a_pool_keeps_the_rules_of_the_kernel(rng, cpu_path):
    x, options = kda(rng, "softplus", T=6, H=1, HV=2, K=12, V=20, sequences=3)
    options |= dict(cu_seqlens=cu_seqlens([2, 1, 3]), has_initial_state=torch.tensor([True, True, False]))
    pool = pooled(rng, x["initial_state"], 5)
    pool[1] = float("nan")
    (o, mine), (o_ref, theirs) = both(x, options, pool, torch.tensor([4, -1, 1]))
    assert relative(o, o_ref) < 1e-6 and relative(mine, theirs) < 1e-6
    assert torch.equal(o[:, 2], torch.zeros(1, 2, 20))
    del x["initial_state"]
    seven = pool.clone()
    o_seven, _ = fused_recurrent_kda(**x, **options, state_pool=seven, state_indices=torch.tensor([4, 7, 1]))
    assert torch.equal(o_seven, o) and torch.equal(seven.nan_to_num(), mine.nan_to_num())  # 7 is not in the pool: padding


def test_compiles_as_one_graph_with_a_pool(rng, cpu_path):
    x, options = kda(rng, "softplus", B=2, T=1, K=8)
    state = x.pop("initial_state")
    table = torch.tensor([2, 0])

    def step(pool, **tensors):
        o, _ = fused_recurrent_kda(**tensors, **options, state_pool=pool, state_indices=table)
        return o * 2

    eager_pool, compiled_pool = (pooled(rng, state, 4) for _ in range(2))
    compiled_pool.copy_(eager_pool)
    want = step(eager_pool, **x)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled_pool, **x)
    assert torch.equal(got, want) and torch.equal(compiled_pool, eager_pool)


def test_registration_is_sound(rng, cpu_path):
    x, _options = kda(rng, "rand", B=2, T=2, K=8)
    arguments = (*(x[n] for n in ("q", "k", "v", "g", "beta")), None, None, torch.empty_like(x["v"]), x["initial_state"],
                 torch.empty(2, 2, 8, 8), None, None, None, None, None, None, -1, False, False, False, False, True, True)
    torch.library.opcheck(torch.ops.kdagen.fused_recurrent_kda_.default, arguments,
                          test_utils=("test_schema", "test_faketensor"))
    wrong = (arguments[0], arguments[1][..., :4], *arguments[2:])
    with pytest.raises(ArgumentError, match="k: got shape"), torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        torch.ops.kdagen.fused_recurrent_kda_.default(*wrong)


# --- the family -----------------------------------------------------------------------------------------------------


def test_limits_are_stated_once_and_defaults_respect_them():
    family = families.get("recurrent")
    for spec in family.committed():
        for schedule in family.default_schedules(spec):
            assert family.supports(spec, schedule, kdagen.devices.named("h200")) is None
            assert family.supports(spec, schedule, kdagen.devices.named("mi300x")) is None
            name = Variant(spec, schedule.source_key).name
            assert parse(name).name == name
    for k in (1, 17, 128, 256):
        for v in (1, 3, 60, 256):
            for k_first in (False, True):
                spec = Spec.make("recurrent", k=k, v=v, dtype="fp32", k_first=k_first)
                assert family.supports(spec, family.default(spec), kdagen.devices.named("h200")) is None
    spec = Spec.make("recurrent", k=128, v=128, dtype="bf16")
    refusal = lambda **schedule: family.supports(spec, Schedule.make(**schedule), None) or ""
    assert "not bv and evict" in refusal(bv=8, warps=1)
    assert "0 or 1" in refusal(bv=8, evict=2, warps=1)
    assert "power of two" in refusal(bv=12, evict=0, warps=1)
    assert "more than V" in refusal(bv=256, evict=0, warps=1)
    assert "registers" in refusal(bv=64, evict=0, warps=1)
    assert "threads" in refusal(bv=64, evict=0, warps=64)
    assert "another order" in refusal(bv=8, evict=0, warps=2)
    assert "other threads" in refusal(bv=2, evict=0, warps=1)
    plain = Schedule.make(bv=4, evict=0, warps=1)
    assert "K = 300" in family.supports(Spec.make("recurrent", k=300, v=8, dtype="bf16"), plain, None)
    assert "dtype" in family.supports(Spec.make("recurrent", k=8, v=8, dtype="i32"), plain, None)
    turned = Spec.make("recurrent", k=128, v=128, dtype="bf16", k_first=True)
    assert "another order" in family.supports(turned, Schedule.make(bv=16, evict=0, warps=2), None)


@given(k=st.integers(1, 256), v=st.integers(1, 256), half_state=st.booleans(), k_first=st.booleans(),
       seqs=st.integers(1, 4096), heads=st.integers(1, 96), tokens=st.integers(1, 8))
def test_default_is_supported_and_committed_for_every_problem(k, v, half_state, k_first, seqs, heads, tokens):
    family = families.get("recurrent")
    spec = Spec.make("recurrent", k=k, v=v, dtype="bf16", half_state=half_state, k_first=k_first)
    for target in (None, kdagen.devices.named("h200"), kdagen.devices.named("mi300x")):
        schedule = family.default(spec, target, Problem(seqs * tokens, seqs, heads))
        assert family.supports(spec, schedule, target) is None
        assert schedule in family.default_schedules(spec)

"""The fused decode step against its fp64 oracle: in the interpreter (fp32, fp16) and on the CPU path."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kdagen
from inputs import gate_parameter, relative
from kdagen import families
from kdagen import reference as R
from kdagen.errors import ArgumentError, ArgumentTypeError
from kdagen.families import decode_step as rule
from kdagen.ops import decode_step
from kdagen.ops._common import interpreting
from kdagen.ops._scratch import scratch
from kdagen.ops.decode import fused_recurrent_kda
from kdagen.ops.decode_step import kda_decode_step
from kdagen.spec import Problem, Schedule, Spec, Variant, parse

FP32 = 2e-6  # fp32 products and sums of up to 256 terms; 2e-7 is usual


def case(rng, N=3, H=1, HV=None, K=16, V=None, W=4, k=0, slots=7, dtype=torch.float32, v_first=True, wide=True):
    """(positional tensors, options) of a call. qkv, z and beta are columns of one projection, NaN around them."""
    HV, V = HV or H, V or K
    D, P = 2 * H * K + HV * V, HV * V
    normal = lambda *shape: torch.randn(*shape, generator=rng)
    row = torch.full((N, 4 + D + P + HV + 4), float("nan"), dtype=dtype)
    row[:, 4:-4] = normal(N, D + P + HV)
    qkv, z, beta = row[:, 4 : 4 + D], row[:, 4 + D : 4 + D + P], row[:, 4 + D + P : -4]
    if not wide:
        qkv, z, beta = qkv.clone(), z.clone(), beta.clone()
    g = normal(N, HV * K).to(dtype)
    states = normal(slots, *((HV, V, K) if v_first else (HV, K, V)))
    table = torch.randperm(slots, generator=rng)[: N * (1 + k)].to(torch.int32)
    table = table.view(N, 1 + k) if k else table
    tensors = [qkv, z, g, beta, normal(slots, W - 1 + k, D).to(dtype), normal(D, W), states, table, normal(V)]
    options = dict(A_log=gate_parameter(rng, HV), dt_bias=normal(HV, K), state_v_first=v_first)
    return tensors, options


CONV, STATE, TABLE = 4, 6, 7  # positions in the list of tensors


def both(tensors, options):
    """(out, conv pool, state pool) of the op and of the oracle, from copies of the pools; the op's output is poisoned."""
    answers = []
    for compute in (kda_decode_step, R.kda_decode_step):
        x = [t.clone() if at in (CONV, STATE) else t for at, t in enumerate(tensors)]
        HV, K = x[3].shape[1], x[2].shape[1] // x[3].shape[1]
        V = x[1].shape[1] // HV
        if compute is kda_decode_step:
            out = torch.full((len(x[0]), HV, V), float("nan"), dtype=x[0].dtype)
            assert kda_decode_step(*x, **options, out=out) is out
        else:
            out = compute(*x, **options, heads=(x[0].shape[1] - HV * V) // (2 * K), K=K)
        answers.append((out, x[CONV], x[STATE]))
    return answers


def agree(mine, theirs, tolerance=FP32):
    assert relative(mine[0], theirs[0]) < tolerance
    assert torch.equal(mine[1], theirs[1])  # the history is copied, not computed
    assert relative(mine[2], theirs[2]) < FP32


@pytest.fixture(autouse=True)
def every_form(monkeypatch):
    """Also for small K and V, which the interpreter sums in one order whatever the form."""
    monkeypatch.setattr("kdagen.families.decode_step.has_forms", lambda spec: True)


@pytest.fixture(params=["split", "whole"])
def form(request, monkeypatch):
    """What the family's default does with few states, a program for each tile of V, and with many, one for all of V."""
    monkeypatch.setattr(rule, "WHOLE", 10**9 if request.param == "split" else 0)
    return request.param


# --- the formula ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
@pytest.mark.parametrize("sizes", [
    dict(H=2), dict(H=1, HV=2, K=8, V=16), dict(H=2, HV=8, K=16, V=8), dict(K=12, V=20), dict(K=60, V=4), dict(K=1, V=1),
    dict(K=24, V=100),
], ids=str)
def test_heads_and_head_dims(rng, sizes, lower_bound, v_first, form):
    tensors, options = case(rng, N=2, v_first=v_first, **sizes)
    # of one channel, the norm takes any output to about 1: what a difference of two numbers lost is seen in full
    tolerance = 1e-4 if sizes.get("V") == 1 else FP32
    agree(*both(tensors, options | dict(lower_bound=lower_bound)), tolerance)


@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_widths_and_bias_of_the_convolution(rng, W, bias, form):
    tensors, options = case(rng, W=W, V=40)
    if bias:
        options["conv_bias"] = torch.randn(tensors[0].shape[1], generator=rng)
    agree(*both(tensors, options))


@pytest.mark.parametrize("change", [
    dict(A_log=None, lower_bound=-3.0), dict(dt_bias=None), dict(allow_neg_eigval=True), dict(scale=0.01), dict(eps=0.1),
], ids=lambda change: "-".join(change))
def test_each_option_counts_and_is_right(rng, change):
    tensors, options = case(rng)
    mine, theirs = both(tensors, options | change)
    agree(mine, theirs)
    assert relative(mine[0], both(tensors, options)[0][0]) > 1e-4


def test_fp16_inputs_round_nothing_but_the_output(rng):
    tensors, options = case(rng, H=2, dtype=torch.float16)
    mine, theirs = both(tensors, options)
    assert mine[0].dtype == torch.float16
    agree(mine, theirs, tolerance=1e-3)  # 2^-11 at most, 3e-4 as a norm


def test_half_size_pool(rng, form):
    tensors, options = case(rng, V=40)
    tensors[STATE] = tensors[STATE].half()
    (out, _, states), (want, _, states_ref) = both(tensors, options)
    assert relative(out, want) < FP32
    assert states.dtype == torch.float16 and relative(states, states_ref) < 1e-4  # ties may round to another fp16 value


def test_three_ops_in_a_row_give_the_same(rng):
    """What the step fuses: the recurrent op on the convolved projection, then the norm, all of them apart."""
    tensors, options = case(rng, N=3, H=2, HV=4, K=8, V=12)
    qkv, z, g, beta, conv_pool, weight, states, table, norm = (t.clone() for t in tensors)
    mixed = R.causal_conv1d_update(qkv[:, None], conv_pool, weight, state_indices=table, dtype=torch.float32)
    q, k, v = (x.reshape(3, 1, -1, size) for x, size in zip(mixed.split([16, 16, 48], -1), (8, 8, 12)))
    o, _ = fused_recurrent_kda(
        q, k, v, g.view(3, 1, 4, 8), beta[:, None], **options, state_pool=states, state_indices=table,
        use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    want = R.gated_rmsnorm(o[:, 0], z.view(3, 4, 12), norm)
    mine, _ = both(tensors, options)
    assert relative(mine[0], want) < FP32 and relative(mine[2], states) < FP32 and torch.equal(mine[1], conv_pool)


def test_steps_on_a_pool_follow_the_sequence(rng, form):
    """Five steps equal the oracle's five: state and history are where the next step looks for them."""
    tensors, options = case(rng, N=2, K=8, V=40)
    mine, theirs = [t.clone() for t in tensors], [t.clone() for t in tensors]
    for _ in range(5):
        for at in (0, 1, 2, 3):
            mine[at] = theirs[at] = torch.randn(tensors[at].shape, generator=rng)
        out = kda_decode_step(*mine, **options)
        assert relative(out, R.kda_decode_step(*theirs, **options, heads=1, K=8)) < FP32
    agree((out, mine[CONV], mine[STATE]), (out, theirs[CONV], theirs[STATE]))


# --- pools ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad_slot", [-1, 0], ids=["negative", "reserved"])
def test_padding_is_neither_read_nor_written_and_gives_zeros(rng, pad_slot, form):
    tensors, options = case(rng, N=5, V=40, slots=9)
    table = tensors[TABLE] = 1 + torch.randperm(8, generator=rng)[:5].to(torch.int32)  # slot 0 stays free
    table[0], table[3] = pad_slot, -7
    for at in range(4):
        tensors[at][3] = float("nan")
    mine, _ = both(tensors, options | dict(pad_slot=pad_slot))
    clean = [t.nan_to_num() if at < 4 else t for at, t in enumerate(tensors)]
    _, theirs = both(clean, options | dict(pad_slot=pad_slot))
    agree(mine, theirs)
    assert torch.equal(mine[0][[0, 3]], torch.zeros(2, 1, 40))
    rest = [slot for slot in range(9) if slot not in table[[1, 2, 4]].tolist()]
    assert torch.equal(mine[1][rest], tensors[CONV][rest]) and torch.equal(mine[2][rest], tensors[STATE][rest])


@pytest.mark.parametrize("path", ["interpreter", "cpu"])
@pytest.mark.parametrize("column", [0, 1], ids=["line", "accepted"])
def test_a_row_half_of_padding_is_padding(rng, column, path, monkeypatch):
    """The line is live and the state it starts from is not, or the other way round: neither pool is touched."""
    monkeypatch.setenv("TRITON_INTERPRET", "1" if path == "interpreter" else "0")
    tensors, options = case(rng, N=3, k=2, slots=9)
    tensors[TABLE][1, column] = -1
    tensors[STATE][tensors[TABLE][1, 1 - column].long()] = float("nan")
    options["num_accepted_tokens"] = torch.tensor([3, 2, 1])
    mine, theirs = both(tensors, options)
    assert torch.equal(mine[0][1], torch.zeros(1, 16)) and torch.equal(theirs[0][1].float(), mine[0][1])
    for out in (mine, theirs):
        for pool, at in ((out[1], CONV), (out[2], STATE)):
            slots = [slot for slot in range(9) if slot not in tensors[TABLE][[0, 2], 0].tolist()]
            torch.testing.assert_close(pool[slots], tensors[at][slots], rtol=0, atol=0, equal_nan=True)
    live = tensors[TABLE][[0, 2], 0].long()
    assert relative(mine[0], theirs[0]) < FP32 and relative(mine[2][live], theirs[2][live]) < FP32
    assert torch.equal(mine[1], theirs[1])


def test_slots_outside_either_pool_are_padding(rng):
    tensors, options = case(rng, N=3, slots=5)
    tensors[TABLE] = torch.tensor([9, 4, 1])
    tensors[CONV] = tensors[CONV][:4]  # slot 4 is in one pool only
    mine, _ = both([*tensors[:TABLE], torch.tensor([-1, -1, 1]), *tensors[TABLE + 1 :]], options)
    x = [t.clone() for t in tensors]
    out = kda_decode_step(*x, **options)
    assert torch.equal(out, mine[0]) and torch.equal(x[CONV], mine[1]) and torch.equal(x[STATE], mine[2])
    assert torch.equal(out[:2], torch.zeros(2, 1, 16))


def test_padded_slots_and_a_strided_table(rng, form):
    tensors, options = case(rng, N=2, H=2, V=40, slots=6)
    wide = torch.full((6, tensors[STATE][0].numel() + 9), float("nan"))
    wide[:, :-9] = tensors[STATE].flatten(1)
    tensors[STATE] = wide[:, :-9].unflatten(1, tensors[STATE].shape[1:])
    lines = torch.full((6, 3, tensors[0].shape[1] + 5), float("nan"))
    lines[..., :-5] = tensors[CONV]
    tensors[CONV] = lines[..., :-5]
    tensors[TABLE] = torch.tensor([[0, 5, 1], [0, 2, 1]])[:, 1]
    want = both(tensors, options)[1]
    keep, keep_lines = wide.clone(), lines.clone()
    out = kda_decode_step(*tensors, **options)
    agree((out, tensors[CONV], tensors[STATE]), want)
    assert torch.equal(wide[:, -9:].isnan(), keep[:, -9:].isnan())
    assert torch.equal(lines[..., -5:].isnan(), keep_lines[..., -5:].isnan())


def test_fresh_rows_do_not_read_stale_pools(rng, form):
    tensors, options = case(rng, N=3, V=40)
    stale = tensors[TABLE][1].long()
    tensors[CONV][stale] = tensors[STATE][stale] = float("nan")
    options["has_initial_state"] = torch.tensor([True, False, True])
    mine, theirs = both(tensors, options)
    agree(mine, theirs)
    assert not mine[1][stale].isnan().any()


# --- after speculative steps ----------------------------------------------------------------------------------------


def test_step_without_drafts_after_accepted_drafts(rng, form):
    """The history starts at accepted - 1, the state in that column; counts outside 1..1+k are clamped."""
    tensors, options = case(rng, N=5, k=2, slots=16, HV=2, V=40)
    tensors[TABLE][4] = -1
    options["num_accepted_tokens"] = torch.tensor([1, 3, 99, -2, 1], dtype=torch.int32)
    mine, theirs = both(tensors, options)
    agree(mine, theirs)
    clamped = options | dict(num_accepted_tokens=torch.tensor([1, 3, 3, 1, 2]))
    assert torch.equal(both(tensors, clamped)[0][0], mine[0])


def test_line_longer_than_the_window_without_speculation(rng, form):
    tensors, options = case(rng, N=2, V=40, k=3, slots=9)
    tensors[TABLE] = tensors[TABLE][:, 0]
    mine, theirs = both(tensors, options)
    agree(mine, theirs)
    assert torch.equal(mine[1][:, 3:], tensors[CONV][:, 3:])


# --- the same bits --------------------------------------------------------------------------------------------------


def test_twice_alone_and_in_a_batch(rng, form):
    tensors, options = case(rng, N=3, H=2, V=40)
    first, again = both(tensors, options)[0], both(tensors, options)[0]
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    for n in range(3):
        rows = [t[n : n + 1] if at in (0, 1, 2, 3, TABLE) else t for at, t in enumerate(tensors)]
        alone = both(rows, options)[0]
        slot = tensors[TABLE][n].long()
        assert torch.equal(alone[0], first[0][n : n + 1])
        assert torch.equal(alone[1][slot], first[1][slot]) and torch.equal(alone[2][slot], first[2][slot])


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("HV", [1, 3])
def test_every_schedule_is_right_and_gives_the_same_bits(rng, HV, v_first):
    tensors, options = case(rng, N=2, K=16, V=60, HV=HV, v_first=v_first)
    family, answers = families.get("decode_step"), {}
    spec = Spec.make("decode_step", k=16, v=60, dtype="fp32", k_first=not v_first)
    for schedule in family.candidates(spec):
        if family.supports(spec, schedule, None) is None:
            with kdagen.dispatch.pin(Variant(spec, schedule.source_key).name):
                mine, theirs = both(tensors, options)
            agree(mine, theirs)
            answers[schedule.name] = mine
    wanted = {"bv32_regs0_rows32", "bv32_regs0_rows64", "bv32_regs128_rows64"}
    if v_first:
        wanted |= {"bv16_regs0_rows16"} | {f"bv16_regs{regs}_rows{rows}" for regs in (0, 128) for rows in (32, 64)}
    assert set(answers) == wanted
    first, *rest = answers.values()
    assert all(torch.equal(a, b) for answer in rest for a, b in zip(answer, first))


def test_a_row_alone_and_in_a_batch_of_many_states(rng):
    """The form that is chosen depends on the batch, the bits do not."""
    tensors, options = case(rng, N=65, H=2, K=8, V=40, slots=65)
    family, spec = families.get("decode_step"), Spec.make("decode_step", k=8, v=40, dtype="fp32")
    alone, many = (family.default(spec, None, Problem(N, N, 2)).block["rows"] for N in (1, 65))
    assert alone < 40 <= many
    batch = both(tensors, options)[0]
    for n in (0, 33, 64):
        rows = [t[n : n + 1] if at in (0, 1, 2, 3, TABLE) else t for at, t in enumerate(tensors)]
        mine, slot = both(rows, options)[0], tensors[TABLE][n].long()
        assert torch.equal(mine[0], batch[0][n : n + 1])
        assert torch.equal(mine[1][slot], batch[1][slot]) and torch.equal(mine[2][slot], batch[2][slot])


def test_int64_counts_are_clamped_before_they_are_narrowed(rng):
    tensors, options = case(rng, N=2, k=2, slots=9)
    counts = torch.tensor([2**32 + 1, -(2**40)])
    mine, theirs = (both(tensors, options | dict(num_accepted_tokens=n))[0] for n in (counts, counts.clamp(1, 3)))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


@pytest.mark.skipif(not interpreting(), reason="orders the interpreter's programs")
@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_whichever_program_arrives_last(rng, order, form, monkeypatch):
    """The programs one by one in another order: the last does what needs all, and leaves the counters at zero."""
    from triton.runtime.interpreter import interpreter_builder

    tensors, options = case(rng, N=2, H=2, HV=4, K=16, V=40)
    want, used = both(tensors, options)[0], []
    programs = 2 * 4 * (3 if form == "split" else 1)
    order = list(range(programs))[::-1] if order == "reversed" else torch.randperm(programs, generator=rng).tolist()
    turn = interpreter_builder.set_grid_idx
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda x, y, z: turn(order[x], y, z))
    monkeypatch.setattr(decode_step, "scratch", lambda *sizes: used.append(scratch(*sizes)) or used[-1])
    mine = both(tensors, options)[0]
    assert all(torch.equal(a, b) for a, b in zip(mine, want))
    assert [own.room for own in used] == [(4, 2 * 4 * 40 if form == "split" else 0)]
    assert not used[0].counters.any()


def test_scratch_is_asked_for_only_if_programs_share_a_head(rng, form, monkeypatch):
    asked = []
    monkeypatch.setattr(decode_step, "scratch", lambda *sizes: asked.append(sizes[2:]) or scratch(*sizes))
    both(*case(rng, N=2, H=2, V=40))
    assert asked == ([(4, 2 * 2 * 40)] if form == "split" else [])


def test_nothing_to_do(rng):
    tensors, options = case(rng, N=1)
    empty = [t[:0] if at in (0, 1, 2, 3, TABLE) else t for at, t in enumerate(tensors)]
    before = tensors[STATE].clone()
    assert kda_decode_step(*empty, **options).shape == (0, 1, 16)
    assert torch.equal(tensors[STATE], before)


# --- refusals -------------------------------------------------------------------------------------------------------

NAMES = ("qkv", "z", "g", "beta", "conv_pool", "conv_weight", "state_pool", "state_indices", "norm_weight")
BAD = {
    "qkv of other columns": ("qkv", lambda t: t[:, :-1], ArgumentError, "qkv: got 47 columns"),
    "qkv of tokens": ("qkv", lambda t: t[:, None], ArgumentError, "one token a sequence"),
    "qkv of integers": ("qkv", lambda t: t.nan_to_num().int(), ArgumentTypeError, "qkv: got torch.int32"),
    "z of another width": ("z", lambda t: t[:, :0], ArgumentError, "z: got 0 columns"),
    "g of fewer rows": ("g", lambda t: t[:1], ArgumentError, "g: got shape"),
    "beta with columns apart": ("qkv", lambda t: t.repeat_interleave(2, 1)[:, ::2], ArgumentError, "qkv.contiguous()"),
    "conv pool of other channels": ("conv_pool", lambda t: t[..., :-1], ArgumentError, "conv_pool: got shape"),
    "conv pool too short": ("conv_pool", lambda t: t[:, :2], ArgumentError, "at least W - 1 = 3"),
    "conv pool channel-last": ("conv_pool", lambda t: t.mT.contiguous().mT, ArgumentError, "conv_pool"),
    "five taps": ("conv_weight", lambda t: torch.cat([t, t[:, :1]], 1), ArgumentError, "W = 2, 3 or 4"),
    "weights transposed": ("conv_weight", lambda t: t.T.contiguous().T, ArgumentError, "conv_weight.contiguous()"),
    "state of another layout": ("state_pool", lambda t: t[..., :-1], ArgumentError, "state_pool: got shape"),
    "table of another length": ("state_indices", lambda t: t[:1], ArgumentError, "state_indices: got shape [1]"),
    "table of floats": ("state_indices", lambda t: t.float(), ArgumentTypeError, "state_indices"),
    "norm weight of K": ("norm_weight", lambda t: torch.cat([t, t]), ArgumentError, "norm_weight: got shape [32]"),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(rng, name):
    tensors, options = case(rng)
    which, change, error, words = BAD[name]
    at = NAMES.index(which)
    tensors[at] = change(tensors[at])
    with pytest.raises(error) as caught:
        kda_decode_step(*tensors, **options)
    assert words in str(caught.value) and "expected" in str(caught.value)


@pytest.mark.parametrize("change, error, words", [
    (dict(A_log=None), ArgumentError, "A_log"),
    (dict(lower_bound=1.0), ArgumentError, "lower_bound"),
    (dict(conv_bias=torch.zeros(3)), ArgumentError, "conv_bias"),
    (dict(num_accepted_tokens=torch.zeros(3)), ArgumentTypeError, "num_accepted_tokens"),
    (dict(has_initial_state=torch.zeros(2).bool()), ArgumentError, "has_initial_state"),
    (dict(out=torch.zeros(3, 1, 17)), ArgumentError, "out"),
    (dict(out=torch.zeros(3, 1, 16).half()), ArgumentTypeError, "out"),
    (dict(out=torch.zeros(3, 1, 32)[..., ::2]), ArgumentError, "out"),
    (dict(silu=True), TypeError, "silu"),
])
def test_refused_options(rng, change, error, words):
    tensors, options = case(rng)
    with pytest.raises(error, match=words):
        kda_decode_step(*tensors, **options | change)


# --- CPU path, registration, the family -----------------------------------------------------------------------------


def test_cpu_path_keeps_the_rules_of_the_kernel(rng, cpu_path):
    tensors, options = case(rng, N=3, HV=2, K=12, V=20, k=1, slots=8, dtype=torch.bfloat16)
    tensors[TABLE][1] = 55  # not in the pool: padding
    options["num_accepted_tokens"] = torch.tensor([2, 1, 1])
    padded = [*tensors[:TABLE], tensors[TABLE].clamp(max=20).where(tensors[TABLE] < 8, -1), *tensors[TABLE + 1 :]]
    want = both(padded, options)[1]
    x = [t.clone() for t in tensors]
    out = kda_decode_step(*x, **options)
    assert out.dtype == torch.bfloat16 and relative(out, want[0]) < 3e-3  # one rounding to bf16
    assert torch.equal(x[CONV], want[1]) and relative(x[STATE], want[2]) < 1e-6


def test_compiles_as_one_graph(rng, cpu_path):
    tensors, options = case(rng, N=2)
    step = lambda conv, states: kda_decode_step(
        *tensors[:CONV], conv, tensors[5], states, *tensors[TABLE:], **options) + 1
    mine, theirs = ([tensors[CONV].clone(), tensors[STATE].clone()] for _ in range(2))
    want = step(*theirs)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*mine)
    assert torch.equal(got, want) and all(torch.equal(a, b) for a, b in zip(mine, theirs))


def test_registration_is_sound(rng, cpu_path):
    tensors, options = case(rng, N=2)
    qkv, z, g, beta, conv, weight, states, table, norm = tensors
    arguments = (qkv.clone(), z, g, beta, torch.empty(2, 1, 16), conv, weight, None, states, table, None, None,
                 options["A_log"], options["dt_bias"], norm, None, None, 1e-5, -1, False, True, True)
    torch.library.opcheck(torch.ops.kdagen.kda_decode_step_.default, arguments,
                          test_utils=("test_schema", "test_faketensor"))


def test_limits_and_names():
    family = families.get("decode_step")
    for spec in family.committed():
        for schedule in family.default_schedules(spec):
            name = Variant(spec, schedule.source_key).name
            assert parse(name).name == name
    spec = Spec.make("decode_step", k=128, v=128, dtype="bf16")
    refusal = lambda **schedule: family.supports(spec, Schedule.make(**schedule), None) or ""
    assert "are not bv, regs and rows" in refusal(bv=32, warps=4)
    assert "power of two" in refusal(bv=48, regs=0, rows=48, warps=4)
    assert "rows 256 is not a power of two up to V" in refusal(bv=32, regs=0, rows=256, warps=4)
    assert "1 to 16 tiles" in refusal(bv=32, regs=0, rows=16, warps=4)
    assert "not 0 or 128" in refusal(bv=16, regs=96, rows=128, warps=4)
    assert "several tiles" in refusal(bv=16, regs=128, rows=16, warps=4)
    assert "another order than bv 16" in refusal(bv=8, regs=0, rows=8, warps=4)
    assert "another order than 4" in refusal(bv=32, regs=0, rows=128, warps=8)
    assert "registers a thread" in refusal(bv=128, regs=0, rows=128, warps=2)
    for bv, rows in ((16, 16), (16, 128), (32, 64), (128, 128)):
        assert not refusal(bv=bv, regs=0, rows=rows, warps=4)
    capped = Schedule.make(bv=16, regs=128, rows=128, warps=4)
    assert not refusal(**capped.block, warps=4)
    for slug in ("mi300x", "a100"):
        assert "sm90 and later only" in family.supports(spec, capped, kdagen.devices.named(slug))
    first = Spec.make("decode_step", k=128, v=128, dtype="bf16", k_first=True)
    assert "another order than bv 32" in family.supports(first, Schedule.make(bv=64, regs=0, rows=64, warps=4), None)
    chosen = {}
    for states in (1, 48, 49, 128, 129, 4096):
        chosen.setdefault(family.default(spec, None, Problem(states, states, 1)).name, []).append(states)
    assert chosen == {"bv16_regs0_rows16": [1, 48], "bv32_regs0_rows32": [49, 128], "bv16_regs128_rows128": [129, 4096]}


def test_other_head_dims_have_one_form(monkeypatch):
    monkeypatch.undo()  # every_form
    family = families.get("decode_step")
    spec = Spec.make("decode_step", k=64, v=256, dtype="bf16")
    forms = {family.default(spec, None, Problem(states, states, 1)) for states in (1, 100, 4096)}
    assert len(forms) == 1 and family.supports(spec, forms.pop(), None) is None
    assert "for any load" in family.supports(spec, Schedule.make(bv=16, regs=0, rows=128, warps=4), None)


@given(k=st.integers(1, 256), v=st.integers(1, 256), k_first=st.booleans(), width=st.sampled_from([2, 3, 4]),
       seqs=st.integers(1, 4096))
def test_default_is_supported_for_every_problem(k, v, k_first, width, seqs):
    family = families.get("decode_step")
    spec = Spec.make("decode_step", k=k, v=v, dtype="bf16", k_first=k_first, width=width)
    for target in (None, kdagen.devices.named("h200"), kdagen.devices.named("mi300x")):
        schedule = family.default(spec, target, Problem(seqs, seqs, 8))
        assert family.supports(spec, schedule, target) is None
        assert schedule in family.default_schedules(spec)

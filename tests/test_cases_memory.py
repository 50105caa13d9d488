"""What is read and written where: head dims that are no power of two, grouped heads, strided views, offsets past 2^31.

In the interpreter, fp32: 1e-6 is usual; a decay of e^-100, summed, has an exponent good to 100 * 6e-8.
What lies around a tensor is NaN, so that a read outside of it shows.
"""

from __future__ import annotations

import cases
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

import kdagen
from inputs import cu_seqlens, gate_parameter, kda, relative, sliced
from kdagen import reference as R
from kdagen.ops import prefill_plan
from kdagen.ops.conv import causal_conv1d, causal_conv1d_update
from kdagen.ops.decode import fused_recurrent_kda
from kdagen.ops.decode_step import kda_decode_step
from kdagen.ops.gate import kda_gate
from kdagen.ops.norm import gated_rmsnorm
from kdagen.ops.prefill import chunk_kda

FP32 = 2e-5
NAN = float("nan")
TOKENS = ("q", "k", "v", "g", "beta")


def check(found, wanted, tolerance=FP32):
    assert relative(found[0], wanted[0]) < tolerance, "o"
    assert relative(found[1], wanted[1]) < tolerance, "final state"


def in_the_middle(x: torch.Tensor, poison: float, extra: int = 5) -> torch.Tensor:
    """The same values in a buffer of poison: before and after each token's row, and before and after all of them."""
    wide = torch.full((x.shape[1] + 2, x[0, 0].numel() + 2 * extra), poison)
    wide[1:-1, extra:-extra] = x[0].reshape(x.shape[1], -1)
    return wide[1:-1, extra:-extra].unflatten(1, x.shape[2:])[None]


# --- head dims ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K, V", [(48, 6), (60, 12), (100, 20)])
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda", "kda_gate", "kda_decode_step"])
def test_poison_around_head_dims_of_no_power_of_two(op, K, V, rng):
    """Two kinds of poison, the same bits: nothing outside of the tensors enters, and the outputs are right."""
    lengths = [17, 0, 2] if op == "chunk_kda" else [1, 0, 1]
    x, options = kda(rng, "softplus", T=sum(lengths), H=1, K=K, V=V, sequences=3)
    options["cu_seqlens"] = cu_seqlens(lengths)
    parameters = {name: options[name] for name in ("A_log", "dt_bias")}
    if op == "kda_gate":
        wanted = [R.kda_gate(x["g"], **parameters), R.kda_beta(x["beta"])]
        call = lambda t: kda_gate(t["g"], **parameters, beta=t["beta"], out=torch.full_like(x["g"], NAN))
    elif op == "kda_decode_step":
        D, states, lines = 2 * K + V, x["initial_state"], torch.randn(3, 3, 2 * K + V, generator=rng)
        x = {"row": torch.randn(1, 3, D + V + K + 1, generator=rng)}
        weight, norm = torch.randn(D, 4, generator=rng), torch.randn(V, generator=rng)
        cut = lambda row: row[0].split([D, V, K, 1], 1)

        def step(compute, row, **more):
            held, history = states.clone(), lines.clone()
            out = compute(*cut(row), history, weight, held, torch.arange(3), norm, **parameters, **more)
            return out, held

        wanted = step(R.kda_decode_step, x["row"], heads=1, K=K)
        call = lambda t: step(kda_decode_step, t["row"])
    else:
        wanted = R.recurrent_kda(**x, **options, output_final_state=True)
        more = {"chunk_size": 16} if op == "chunk_kda" else {}
        call = lambda t: getattr(kdagen, op)(**x | t, **options, **more, output_final_state=True,
                                             out=in_the_middle(torch.full_like(x["v"], NAN), NAN))
    found = []
    for poison in (NAN, 1e30):
        found.append(call({name: in_the_middle(t, poison) for name, t in x.items() if name != "initial_state"}))
    check(found[0], wanted)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


# --- grouped heads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("HV, form", [(4, "windows"), (4, "segments"), (8, "whole")])
def test_grouped_value_heads_of_packed_prompts(HV, form, rng, monkeypatch):
    """H = 2, so that a wrong head is another head; K != V; the workspace in windows, a long sequence in segments."""
    lengths = [0, 18, 1] if form != "segments" else [16 * 4 + 1, 3]
    x, options = kda(rng, "bounded", T=sum(lengths), H=2, HV=HV, K=8, V=20, sequences=len(lengths))
    edges = cu_seqlens(lengths)
    more = {"max_workspace": 1} if form == "windows" else {}
    if form == "segments":
        monkeypatch.setattr(prefill_plan, "segments_of", lambda call: 3)
    o, state = chunk_kda(**x, **options, **more, cu_seqlens=edges, cu_seqlens_cpu=edges, output_final_state=True,
                         chunk_size=16, out=torch.full_like(x["v"], NAN))
    check((o, state), R.recurrent_kda(**x, **options, cu_seqlens=edges, output_final_state=True))


# --- strides --------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_copies(monkeypatch):
    """Inside a call no tensor is made contiguous or cloned."""
    def start():
        for name in ("contiguous", "clone"):
            monkeypatch.setattr(torch.Tensor, name, lambda *a, name=name, **k: pytest.fail(f"a silent {name}()"))
    return start, monkeypatch.undo


VIEWED = {"chunk_kda": TOKENS, "chunk_kda, pool": TOKENS, "fused_recurrent_kda": TOKENS, "fused_recurrent_kda, pool": TOKENS,
          "causal_conv1d": ("x",), "causal_conv1d_update": ("x",), "kda_decode_step": ("qkv", "z", "g", "beta"),
          "kda_gate": ("g", "beta"), "gated_rmsnorm": ("o", "z")}


@pytest.mark.parametrize("name", VIEWED)
def test_columns_of_a_projection_are_read_in_place(name, rng, no_copies):
    op, make = cases.CALLS[name]
    seed = int(torch.randint(2**31, (), generator=rng))
    call = lambda: make(torch.Generator().manual_seed(seed))
    plain, views = call(), call()
    op(**plain)
    for key in VIEWED[name]:
        t = views[key]
        rows = t.shape[:2] if t.dim() >= 3 and name != "gated_rmsnorm" else t.shape[:1]
        views[key] = sliced(rng, t.reshape(1, rows.numel(), -1))[0].unflatten(1, t.shape[len(rows):]).unflatten(0, rows)
        assert torch.equal(views[key], t) and not views[key].is_contiguous()
    start, undo = no_copies
    start()
    op(**views)
    undo()
    for key, tensor in cases.written(plain).items():
        torch.testing.assert_close(cases.written(views)[key], tensor, rtol=0, atol=0, equal_nan=True)


def test_heads_before_tokens_and_repeated_values(rng):
    """[B, H, T, K] tensors turned, and a beta that is the same number in every place (stride 0): right, or refused."""
    x, options = kda(rng, "bounded", T=19, H=2, K=16)
    wanted = R.recurrent_kda(**x, **options, output_final_state=True)
    turned = {n: t.transpose(1, 2).contiguous().transpose(1, 2) if n in TOKENS else t for n, t in x.items()}
    check(chunk_kda(**turned, **options, output_final_state=True, chunk_size=16), wanted)
    check(fused_recurrent_kda(**turned, **options, output_final_state=True), wanted)
    same = x | {"beta": torch.full((1, 1, 1), 0.3).expand(1, 19, 2)}
    wanted = R.recurrent_kda(**same, **options, output_final_state=True)
    check(chunk_kda(**same, **options, output_final_state=True, chunk_size=16), wanted)
    check(fused_recurrent_kda(**same, **options, output_final_state=True), wanted)


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda", "kda_gate", "causal_conv1d", "gated_rmsnorm"])
def test_a_last_dimension_with_gaps_is_refused(name, rng):
    op, make = cases.CALLS[name]
    call = make(rng)
    key = {"causal_conv1d": "x", "kda_gate": "g", "gated_rmsnorm": "o"}.get(name, "k")
    call[key] = call[key].repeat_interleave(2, -1)[..., ::2]
    with pytest.raises(ValueError, match=rf"{key}: got strides .*stride 1.*{key}\.contiguous\(\)"):
        op(**call)


# --- offsets past 2^31 ----------------------------------------------------------------------------------------------
# A row stride times a row number passes 2^31 elements; the memory between is reserved and never touched (cases.apart).


@pytest.fixture
def far(monkeypatch):
    """The interpreter without its copy back, which on a CPU copies each storage onto itself, all of it."""
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)


SIZE, STRIDE = 2300, 1 << 20  # 2.4e9 elements


def far_away(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x at the far end of dimension ``dim`` of a tensor of SIZE rows: [.., SIZE, ..], x its last rows."""
    return cases.apart(x, dim, STRIDE, SIZE, SIZE - x.shape[dim])


@pytest.mark.parametrize("which", [*TOKENS, "out"])
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_tokens_past_2_31(op, which, rng, far):
    """Only the last tokens are a sequence; one tensor at a time is far away."""
    n, first = 20, SIZE - 20
    x, options = kda(rng, "bounded", T=n, H=1, HV=2, K=4, V=4)
    wanted = R.recurrent_kda(**x, **options, output_final_state=True)
    x["out"] = torch.full_like(x["v"], NAN)
    place = lambda name, t: far_away(t, 1) if name == which else torch.cat([torch.zeros(1, first, *t.shape[2:]), t], 1)
    call = {name: t if name == "initial_state" else place(name, t) for name, t in x.items()}
    edges = torch.tensor([first, SIZE], dtype=torch.int32)
    more = {"chunk_size": 16, "cu_seqlens_cpu": edges} if op == "chunk_kda" else {}
    o, state = getattr(kdagen, op)(**call, **options, **more, output_final_state=True, cu_seqlens=edges, checked=False)
    check((o[:, first:], state), wanted)


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda", "speculative", "kda_decode_step"])
def test_slots_of_states_past_2_31(op, rng, far):
    x, options = kda(rng, "bounded", B=2 if op != "chunk_kda" else 1, T=1 if op != "chunk_kda" else 34, H=1, K=4, V=8,
                     sequences=2)
    states = x.pop("initial_state")
    pool = far_away(states, 0)
    slots = torch.tensor([SIZE - 1, SIZE - 2])
    if op == "chunk_kda":
        options |= dict(cu_seqlens=cu_seqlens([17, 17]), state_pool=None)
        wanted = R.recurrent_kda(**x, **{n: v for n, v in options.items() if n != "state_pool"},
                                 initial_state=states.flip(0), output_final_state=True)
        options["state_pool"] = pool
        o, _ = chunk_kda(**x, **options, cu_seqlens_cpu=options["cu_seqlens"], read_slots=slots, write_slots=slots,
                         checkpoint_offsets=torch.tensor([[16], [0]]), checkpoint_slots=torch.tensor([[SIZE - 3], [-1]]),
                         chunk_size=16)
        early = {n: t[:, :16] for n, t in x.items()}
        options = {n: v for n, v in options.items() if n not in ("cu_seqlens", "state_pool")}
        _, inner = R.recurrent_kda(**early, **options, initial_state=states[1:], output_final_state=True)
        assert relative(pool[SIZE - 3], inner[0]) < FP32
    elif op == "kda_decode_step":
        D, K, V = 16, 4, 8
        row = torch.randn(2, D + 2 * V + K + 1, generator=rng)
        weight, norm = torch.randn(D, 4, generator=rng), torch.randn(V, generator=rng)
        lines, parameters = torch.randn(2, 3, D, generator=rng), dict(A_log=options["A_log"], lower_bound=-5.0)
        held, history = states.flip(0).clone(), lines.flip(0).clone()
        qkv, z, g, beta, _ = row.split([D, V, K, 1, V], 1)
        o = kda_decode_step(qkv, z, g, beta, far_lines := far_away(lines, 0), weight, pool, slots, norm, **parameters)
        wanted = R.kda_decode_step(qkv, z, g, beta, history, weight, held, torch.arange(2), norm, **parameters, heads=1,
                                   K=K), held
        assert torch.equal(far_lines[slots], history)
    else:
        wanted = R.recurrent_kda(**x, **options, initial_state=states.flip(0), output_final_state=True)
        table = slots if op == "fused_recurrent_kda" else torch.stack([slots, slots], 1)
        more = {} if op == "fused_recurrent_kda" else {"num_accepted_tokens": torch.tensor([2, 1])}
        o, _ = fused_recurrent_kda(**x, **options, state_pool=pool, state_indices=table, **more)
    check((o, pool[slots]), wanted)


@pytest.mark.parametrize("which", ["x", "out", "lines"])
@pytest.mark.parametrize("op", ["prompt", "update"])
def test_convolution_past_2_31(op, which, rng, far):
    n, D = 6, 8
    x, w, lines = torch.randn(n, D, generator=rng), torch.randn(D, 4, generator=rng), torch.randn(1, 3, D, generator=rng)
    y, last = R.causal_conv1d(x[None], w, initial_state=lines.double(), output_final_state=True)
    place = lambda name, t: far_away(t, 0) if name == which else torch.cat([torch.zeros(SIZE - len(t), *t.shape[1:]), t])
    tokens, out, pool = place("x", x), place("out", torch.full_like(x, NAN)), place("lines", lines)
    edges, slots = torch.tensor([SIZE - n, SIZE], dtype=torch.int32), torch.tensor([SIZE - 1])
    if op == "prompt":
        causal_conv1d(tokens, w, cu_seqlens=edges, conv_states=pool, cache_indices=slots, has_initial_state=True, out=out,
                      checked=False)
    else:
        causal_conv1d_update(tokens, pool, w, query_start_loc=edges, cache_indices=slots, out=out, checked=False)
    assert relative(out[SIZE - n :], y[0]) < FP32 and torch.equal(pool[SIZE - 1].double(), last[0])


@pytest.mark.parametrize("which", ["g", "beta", "out"])
def test_gate_past_2_31(which, rng, far):
    n = 3  # the sums start anew at each chunk: only the last one is listed
    x = dict(g=torch.randn(1, n, 2, 8, generator=rng), beta=torch.randn(1, n, 2, generator=rng),
             out=torch.full((1, n, 2, 8), NAN))
    A_log = gate_parameter(rng, 2)
    wanted = R.chunk_cumsum(R.kda_gate(x["g"], A_log), 16), R.kda_beta(x["beta"])
    first = SIZE - n
    call = {name: far_away(t, 1) if name == which else torch.cat([torch.zeros(1, first, *t.shape[2:]), t], 1)
            for name, t in x.items()}
    edges = torch.tensor([first, SIZE], dtype=torch.int32)
    found = kda_gate(call["g"], A_log, beta=call["beta"], out=call["out"], chunk_size=16, cu_seqlens=edges,
                     chunk_indices=torch.zeros(1, 2, dtype=torch.int32), checked=False)
    check((found[0][:, first:], found[1][:, first:]), wanted)


@pytest.mark.parametrize("which", ["o", "z", "out"])
def test_norm_past_2_31(which, rng, far):
    """Three rows, the last of them beyond: it has no table to pick rows by."""
    x = dict(o=torch.randn(3, 2, 8, generator=rng), z=torch.randn(3, 2, 8, generator=rng), out=torch.full((3, 2, 8), NAN))
    weight = torch.randn(8, generator=rng)
    wanted = R.gated_rmsnorm(x["o"], x["z"], weight)
    call = {name: cases.apart(t, 0, 3 << 29, 3, 0) if name == which else t for name, t in x.items()}
    assert relative(gated_rmsnorm(call["o"], call["z"], weight, out=call["out"]), wanted) < FP32


@triton.jit
def product_kernel(out, i, stride):
    tl.store(out, ((i + tl.program_id(0)) * stride).to(tl.int64))


def test_a_32_bit_offset_would_show():
    """The interpreter wraps a product of 32-bit integers as a device does: an offset kept in 32 bits leads elsewhere."""
    out = torch.zeros(1, dtype=torch.int64)
    product_kernel[(1,)](out, SIZE - 1, STRIDE)
    assert int(out) == ((SIZE - 1) * STRIDE) - 2**32 < 0

"""Decay, gate and inverse: any gate from 0 to -1000 a token, the forms of the gate apart, the inverse of nearly equal keys.

In the interpreter (fp32, fp16). fp32: 1e-6 is usual; a decay of e^-100, summed, has an exponent good to 100 * 6e-8.
fp16 rounds every operand to 2^-12: 4e-3 is what the op promises, 6e-4 is usual, 2e-3 where keys of 4 channels add
up without decay.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

import kdagen
from inputs import cu_seqlens, gate_parameter, kda, relative, sliced
from kdagen import reference as R
from kdagen.ops.decode import fused_recurrent_kda
from kdagen.ops.decode_step import kda_decode_step
from kdagen.ops.gate import kda_gate
from kdagen.ops.prefill import chunk_kda

FP32, FP16 = 2e-5, 4e-3
NAN = float("nan")


def prefill(tensors, options, **more):
    """(o, final state) on a poisoned output."""
    return chunk_kda(**tensors, **options, output_final_state=True, out=torch.full_like(tensors["v"], NAN), **more)


def check(found, wanted, tolerance):
    assert relative(found[0], wanted[0]) < tolerance, "o"
    assert relative(found[1], wanted[1]) < tolerance, "final state"


STEADY = [0.0, -1e-9, -5.0, -5.3, -5.31, -20.0, -88.8, -1000.0]


@pytest.mark.parametrize("g", STEADY)
def test_the_same_decay_on_every_token(g, rng):
    """-5.3 is where a factored tile of 16 rows overflows; at -1000 every token is a masked one: o_t = scale beta (q.k) v."""
    tensors, options = kda(rng, "rand", T=19, H=1, K=4)
    tensors["g"] = torch.full_like(tensors["g"], g)
    wanted = R.recurrent_kda(**tensors, **options, output_final_state=True)
    check(prefill(tensors, options, chunk_size=32), wanted, FP32)
    check(fused_recurrent_kda(**tensors, **options, output_final_state=True), wanted, FP32)
    half = {x: t.half() if x in "qkv" else t for x, t in tensors.items()}
    check(prefill(half, options, chunk_size=32), R.recurrent_kda(**half, **options, output_final_state=True), FP16)


def test_any_channel_may_have_any_decay(rng):
    """The decays of one token differ from channel to channel, by all orders of magnitude; masked tokens lie between."""
    tensors, options = kda(rng, "rand", T=45, H=1, HV=2, K=16)
    scales = torch.tensor([0.0, -1e-6, -1e-3, -0.3, -5.0, -6.0, -50.0, -1000.0])
    tensors["g"] = scales[torch.randint(0, 8, tensors["g"].shape, generator=rng)]
    wanted = R.recurrent_kda(**tensors, **options, output_final_state=True)
    check(prefill(tensors, options, chunk_size=32), wanted, FP32)


@pytest.mark.parametrize("raw", [-60.0, 8.0, 1000.0])
@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
def test_a_steep_or_flat_raw_gate(lower_bound, raw, rng):
    """Softplus with A = 16: from no decay at all to -16,000 a token; bounded: 0 or -5 on every token."""
    tensors, options = kda(rng, "bounded", T=19, H=1, K=4)
    options |= dict(A_log=torch.full((1,), 2.772588722239781), lower_bound=lower_bound, dt_bias=None)
    tensors["g"] = torch.full_like(tensors["g"], raw)
    wanted = R.recurrent_kda(**tensors, **options, output_final_state=True)
    check(prefill(tensors, options, chunk_size=32), wanted, FP32)
    check(fused_recurrent_kda(**tensors, **options, output_final_state=True), wanted, FP32)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, FP32), (torch.float16, FP16)], ids=["fp32", "fp16"])
def test_kimi_linears_gate_over_chunks_of_64(dtype, tolerance, rng):
    """A_log = log U(1, 16) and softplus: exp(-cumsum) of a chunk is infinite in fp32, and the op is right."""
    tensors, options = kda(rng, "softplus", T=130, H=1, K=16, dtype=dtype)
    options["A_log"] = torch.log(torch.tensor([12.0]))
    decay = R.kda_gate(tensors["g"], options["A_log"], options["dt_bias"])
    assert torch.exp(-decay[:, :64].sum(1)).float().isinf().any(), "the hard case is what it says"
    wanted = R.recurrent_kda(**tensors, **options, output_final_state=True)
    check(prefill(tensors, options, chunk_size=64), wanted, tolerance)


def test_the_first_token_of_a_chunk_decays_what_came_before(rng):
    """An exclusive sum would leave out a chunk's own first decay: a state of ones, no new input, known factors."""
    T, K = 18, 16
    tensors, options = kda(rng, "rand", T=T, H=1, K=K)
    factor = torch.rand(T, generator=rng) * 0.5 + 0.5
    factor[3], factor[16] = 1.0, 1e-12  # exactly no decay; nearly all of it, on the first token of the second chunk
    tensors |= dict(g=factor.log()[None, :, None, None].expand(1, T, 1, K).contiguous(),
                    beta=torch.zeros(1, T, 1), initial_state=torch.ones(1, 1, K, K))
    o, state = prefill(tensors, options, chunk_size=16)
    left = factor.double().cumprod(0)
    wanted = left[:, None] * tensors["q"][0, :, 0].double().sum(-1, keepdim=True) * K**-0.5
    assert relative(o[0, :16, 0], wanted[:16].expand(16, K)) < FP32
    assert relative(o[0, 16:, 0], wanted[16:].expand(2, K)) < FP32
    assert relative(state, torch.full_like(state, float(left[-1]))) < FP32


@pytest.mark.parametrize("chunk, dtype, tolerance", [(128, torch.float32, 2e-5), (64, torch.float16, 5e-3)])
def test_the_inverse_of_nearly_equal_keys(chunk, dtype, tolerance, rng):
    """Beta near 1, no decay: rows of Akk sum to the chunk's length. The doubling series cancels there, ours does not."""
    T, K = chunk + 3, 16
    tensors, options = kda(rng, "rand", T=T, H=1, K=K, dtype=dtype)
    one = normalize(torch.randn(1, 1, 1, K, generator=rng), dim=-1)
    tensors["k"] = normalize(one + 0.01 * torch.randn(1, T, 1, K, generator=rng), dim=-1).to(dtype)
    tensors |= dict(g=torch.full_like(tensors["g"], -1e-6), beta=torch.full_like(tensors["beta"], 0.998))
    wanted = R.recurrent_kda(**tensors, **options, output_final_state=True)
    check(prefill(tensors, options, chunk_size=chunk), wanted, tolerance)
    # the hard case is hard: the same in fp32 by X = (I - A)(I + A^2)(I + A^4).. is wrong by far more
    k = tensors["k"][0, :chunk, 0].float()
    akk = (0.998 * k @ k.T).tril(-1)
    assert float(akk.norm(dim=1).max()) > 7
    series, power = torch.eye(chunk) - akk, akk
    for _ in range(chunk.bit_length() - 2):
        power = power @ power
        series = series + series @ power
    exact = torch.linalg.inv(torch.eye(chunk) + akk.double())
    assert relative(series.nan_to_num(1e30), exact) > 1e-2 > 1e-5 > relative(R.chunked.inverse(akk), exact)


# --- the forms of the gate ------------------------------------------------------------------------------------------


def through_each_op(rng) -> dict:
    """name -> (run(**gate parameters) of an op with a raw gate, the same through its oracle with a ready decay)."""
    HV, K = 2, 16
    x, _ = kda(rng, "bounded", T=20, H=HV, K=K)
    inside = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    ready = lambda decay: R.recurrent_kda(**x | {"g": decay}, **inside)[0]
    raw = dict(use_gate_in_kernel=True, **inside)
    normal = lambda *shape: torch.randn(*shape, generator=rng)
    D = 3 * HV * K
    row, lines, states = normal(3, D + 2 * HV * K + HV), normal(3, 3, D), normal(3, HV, K, K)
    step = (row[:, :D], row[:, D : D + HV * K], row[:, D + HV * K : -HV], row[:, -HV:])
    weight, norm = normal(D, 4), normal(K)

    def decode(**gate):
        return kda_decode_step(*step, lines.clone(), weight, states.clone(), torch.arange(3), norm, **gate)

    def decode_ready(decay):
        mixed = R.causal_conv1d_update(step[0][:, None], lines.clone(), weight, state_indices=torch.arange(3))
        q, k, v = (part.reshape(3, 1, HV, K) for part in mixed.split(HV * K, -1))
        o = R.recurrent_kda_pool(q, k, v, decay, step[3][:, None], states.clone(), torch.arange(3), **inside)
        return R.gated_rmsnorm(o[:, 0], step[1].reshape(3, HV, K), norm)

    return {
        "chunk_kda": (x["g"], lambda **gate: chunk_kda(**x, **raw, **gate, chunk_size=16)[0], ready),
        "fused_recurrent_kda": (x["g"], lambda **gate: fused_recurrent_kda(**x, **raw, **gate)[0], ready),
        "kda_gate": (x["g"], lambda **gate: kda_gate(x["g"], **gate), lambda decay: decay),
        "kda_decode_step": (step[2].reshape(3, 1, HV, K), decode, decode_ready),
    }


@pytest.mark.parametrize("path", ["interpreter", "cpu"])
@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda", "kda_gate", "kda_decode_step"])
def test_the_bounded_gate_of_each_op_is_no_clamp(name, path, rng, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if path == "interpreter" else "0")
    g, op, ready = through_each_op(rng)[name]
    A_log, bias = gate_parameter(rng, 2), torch.randn(2, 16, generator=rng)
    found = op(A_log=A_log, dt_bias=bias, lower_bound=-5.0)
    assert relative(found, ready(R.kda_gate(g, A_log, bias, -5.0))) < FP32
    clamped = ready(R.kda_gate(g, A_log, bias).clamp(min=-5.0))
    assert relative(found, clamped) > 0.01, "the two forms are told apart"


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda", "kda_gate", "kda_decode_step"])
def test_without_A_log_the_factor_of_each_op_is_1(name, rng):
    g, op, ready = through_each_op(rng)[name]
    bias = torch.randn(2, 16, generator=rng)
    found = op(A_log=None, dt_bias=bias, lower_bound=-4.0)
    assert relative(found, ready(-4.0 * torch.sigmoid(g.double() + bias))) < FP32


@pytest.mark.parametrize("path", ["interpreter", "cpu"])
def test_beta_and_decay_reach_the_state_unrounded(path, rng, monkeypatch):
    """From 16-bit inputs: one token into an empty state leaves beta k v, whose fp32 digits show a rounded beta."""
    monkeypatch.setenv("TRITON_INTERPRET", "1" if path == "interpreter" else "0")
    dtype = torch.float16 if path == "interpreter" else torch.bfloat16
    K = 8
    one = torch.zeros(1, 1, 1, K, dtype=dtype)
    one[..., 0] = 1
    raw = (torch.randn(1, 1, 1, generator=rng) * 2).to(dtype)
    g = torch.full((1, 1, 1, K), -0.0001, dtype=dtype)
    x = dict(q=one, k=one, v=one, g=g, beta=raw)
    for options in ({}, dict(allow_neg_eigval=True)):
        _, state = fused_recurrent_kda(**x, **options, use_beta_sigmoid_in_kernel=True, output_final_state=True)
        wanted = float(torch.sigmoid(raw.double())) * (2 if options else 1)
        assert abs(float(state[0, 0, 0, 0]) / wanted - 1) < 1e-6
    _, strength = kda_gate(g, torch.zeros(1), beta=raw)
    assert strength.dtype == torch.float32 and abs(float(strength) / float(torch.sigmoid(raw.double())) - 1) < 1e-6
    held = torch.ones(1, 1, K, K)
    _, state = fused_recurrent_kda(**x | {"beta": torch.full((1, 1, 1), -30.0, dtype=dtype)}, initial_state=held,
                                   use_beta_sigmoid_in_kernel=True, output_final_state=True)
    assert relative(1 - state, torch.full_like(held, 1 - float(g.double().exp()[0, 0, 0, 0]))) < 2e-3, "0.9999 is not 1"


# --- lengths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, dtype, tolerance", [("softplus", torch.float16, FP16)])
def test_every_length_beside_nan(name, dtype, tolerance, rng):
    """Lengths 1..2C+1 at C = 16, after each one a sequence of NaN: a row past an end that counts would show."""
    lengths = [n for length in range(1, 34) for n in (length, 1)]
    edges = cu_seqlens(lengths)
    tensors, options = kda(rng, name, T=sum(lengths), sequences=len(lengths), H=1, K=16, dtype=dtype)
    clean = R.recurrent_kda(**tensors, **options, cu_seqlens=edges, output_final_state=True)
    rows = torch.cat([torch.arange(int(edges[n]), int(edges[n + 1])) for n in range(0, len(lengths), 2)])
    for x in ("q", "k", "v", "g", "beta"):
        keep = tensors[x][:, rows]
        tensors[x] = torch.full_like(tensors[x], NAN)
        tensors[x][:, rows] = keep
    tensors["initial_state"][1::2] = NAN
    found = prefill(tensors, options, cu_seqlens=edges, cu_seqlens_cpu=edges, chunk_size=16)
    check((found[0][:, rows], found[1][::2]), (clean[0][:, rows], clean[1][::2]), tolerance)


@pytest.mark.parametrize("length", [1, 2, 63, 65])
def test_lengths_alone_with_nan_around(length, rng):
    """A batch of one row: no table of sequences, nothing but the tensor's end."""
    tensors, options = kda(rng, "softplus", T=length, H=1, K=16)
    wanted = R.recurrent_kda(**tensors, **options, output_final_state=True)
    around = {x: sliced(rng, torch.cat([t, torch.full_like(t, NAN)], 1))[:, :length] if x != "initial_state" else t
              for x, t in tensors.items()}
    check(prefill(around, options, chunk_size=64), wanted, FP32)
    check(fused_recurrent_kda(**around, **options, output_final_state=True), wanted, FP32)


def test_1026_tokens(rng, monkeypatch):
    tensors, options = kda(rng, "bounded", T=1026, H=1, K=4)
    wanted = R.recurrent_kda(**tensors, **options, output_final_state=True)
    check(prefill(tensors, options, chunk_size=128), wanted, 2e-5)  # nine chunks, each a link of the chain
    x, w = torch.randn(1, 1026, 3, generator=rng), torch.randn(3, 2, generator=rng)
    assert relative(kdagen.causal_conv1d(x, w), R.causal_conv1d(x, w)[0]) < 1e-6
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # token by token the interpreter is slow; tests/gpu has the kernel's 1026
    check(fused_recurrent_kda(**tensors, **options, output_final_state=True), wanted, 2e-5)


# --- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize("t", [0, 17])
def test_a_token_that_meets_an_empty_state_gives_no_gate_gradient(form, t, rng):
    """S_{t-1} = 0 as nothing was written before: o_t depends on q, k, v, beta of its own token, and on no decay."""
    T, K = 33, 6
    x, _ = kda(rng, "rand", T=T, H=1, K=K, dtype=torch.float64)
    x.pop("initial_state")
    beta = x["beta"].double()
    beta[:, :t] = 0
    raw = torch.randn(1, T, 1, K, generator=rng).double().requires_grad_()
    decay = R.kda_gate(raw, torch.zeros(1), None)
    x |= dict(beta=beta, g=decay)
    o, _ = R.recurrent_kda(**x) if form == "recurrent" else R.chunk_kda(**x, chunk_size=16)
    (gradient,) = torch.autograd.grad((o[:, t] * torch.randn(K, generator=rng)).sum(), raw, retain_graph=True)
    assert not gradient.any(), "the diagonal's two contributions cancel exactly"
    if t + 1 < T:
        (later,) = torch.autograd.grad(o[:, t + 1].sum(), raw)
        assert later[:, t + 1].any(), "and the next token's decay counts"


def test_the_gates_gradient_is_zero_where_the_decays_is(rng):
    g = torch.randn(1, 4, 2, 8, generator=rng).requires_grad_()
    for bound in (None, -5.0):
        d_decay = torch.randn(1, 4, 2, 8, generator=rng)
        d_decay[:, 1] = 0
        (gradient,) = torch.autograd.grad(kda_gate(g, torch.zeros(2), lower_bound=bound), g, d_decay)
        assert not gradient[:, 1].any() and gradient[:, [0, 2, 3]].any()

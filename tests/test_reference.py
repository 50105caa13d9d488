"""The oracles against the formulas of docs/kda.md, written once more here, against each other and against torch."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from inputs import CLASSES, READY, cu_seqlens, gate_parameter, kda, log_decay, ragged, relative, sliced
from kdagen import reference as R
from kdagen.errors import ArgumentError

FP64 = 1e-10  # two fp64 algorithms of one formula; 1e-13 is usual, cancellation with equal keys costs the rest


def textbook(q, k, v, g, beta, S):
    """One head, T tokens, straight from the paper's matrix form: S <- (I - b k k^T) diag(a) S + b k v^T; o = S^T q."""
    out = []
    for t in range(len(q)):
        decayed = g[t].exp().diag() @ S
        S = (torch.eye(len(k[t])) - beta[t] * torch.outer(k[t], k[t])) @ decayed + beta[t] * torch.outer(k[t], v[t])
        out.append(S.T @ q[t])
    return torch.stack(out), S


@pytest.fixture(autouse=True)
def fp64_defaults():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# --- recurrence -----------------------------------------------------------------------------------------------------


def test_recurrence_is_the_papers_matrix_form(rng):
    x, _ = kda(rng, "rand", B=2, T=9, H=2, HV=6, K=5, V=3, dtype=torch.float64)
    o, final = R.recurrent_kda(**x, scale=0.7, output_final_state=True)
    for b in range(2):
        for hv in range(6):
            h = hv // 3
            S = x["initial_state"][b, hv].T
            want, S = textbook(x["q"][b, :, h] * 0.7, x["k"][b, :, h], x["v"][b, :, hv], x["g"][b, :, hv].double(),
                               x["beta"][b, :, hv], S)
            assert relative(o[b, :, hv], want) < FP64
            assert relative(final[b, hv], S.T) < FP64


def test_scale_defaults_to_the_root_of_K_and_acts_after_the_norm(rng):
    x, _ = kda(rng, T=5, K=16)
    x["q"] = x["q"] * 7
    o = R.recurrent_kda(**x, use_qk_l2norm_in_kernel=True)[0]
    unit = x | {"q": x["q"].double() / (x["q"].double().square().sum(-1, keepdim=True) + 1e-6).sqrt()}
    unit["k"] = x["k"].double() / (x["k"].double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert relative(o, R.recurrent_kda(**unit, scale=0.25)[0]) < FP64


def test_state_layouts_are_transposes(rng):
    x, _ = kda(rng, T=6, K=8, V=5)
    _, by_v = R.recurrent_kda(**x, output_final_state=True)
    x["initial_state"] = x["initial_state"].transpose(-1, -2)
    _, by_k = R.recurrent_kda(**x, output_final_state=True, state_v_first=False)
    assert by_v.shape[-2:] == (5, 8)
    assert torch.equal(by_v, by_k.transpose(-1, -2))


def test_packed_sequences_are_separate_calls(rng):
    lengths = [0, 3, *ragged(rng, 4, 20), 0]
    x, _ = kda(rng, "mixed", T=sum(lengths), HV=4, K=6, V=4, sequences=len(lengths))
    edges = cu_seqlens(lengths)
    o, final = R.recurrent_kda(**x, cu_seqlens=edges, output_final_state=True)
    for n, (start, end) in enumerate(pairwise(edges)):
        part = {name: value[:, start:end] for name, value in x.items() if name != "initial_state"}
        one, last = R.recurrent_kda(**part, initial_state=x["initial_state"][n : n + 1], output_final_state=True)
        assert torch.equal(o[:, start:end], one) and torch.equal(final[n], last[0])
    assert torch.equal(final[0], x["initial_state"][0].double())  # an empty sequence keeps its state


@pytest.mark.parametrize("form", [R.recurrent_kda, R.chunk_kda])
def test_no_tokens_and_no_sequences(rng, form):
    x, _ = kda(rng, T=0, K=4, sequences=2)
    o, final = form(**x, cu_seqlens=cu_seqlens([0, 0]), output_final_state=True)
    assert o.numel() == 0 and torch.equal(final, x["initial_state"].double())
    x["initial_state"] = None
    o, final = form(**x, cu_seqlens=cu_seqlens([]), output_final_state=True)
    assert o.shape == (1, 0, 2, 4) and final.shape == (0, 2, 4, 4)


def test_an_unknown_keyword_is_refused(rng):
    x, _ = kda(rng, T=2)
    x.pop("initial_state")
    for form in (R.recurrent_kda, R.chunk_kda, R.chunk_stages):
        with pytest.raises(TypeError, match="use_gate"):
            form(**x, use_gate=True)


# --- chunk form -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
@pytest.mark.parametrize("name", CLASSES)
def test_chunk_form_is_the_recurrence(rng, name, chunk_size):
    lengths = [0, 1, 130, *ragged(rng, 3, 70)]
    x, options = kda(rng, name, T=sum(lengths), H=1, HV=2, K=8, V=6, sequences=len(lengths), dtype=torch.float64)
    options |= dict(cu_seqlens=cu_seqlens(lengths), output_final_state=True, allow_neg_eigval=name == "softplus")
    o, final = R.recurrent_kda(**x, **options)
    chunk_o, chunk_final = R.chunk_kda(**x, **options, chunk_size=chunk_size)
    assert relative(chunk_o, o) < FP64
    assert relative(chunk_final, final) < FP64


@pytest.mark.parametrize("name", READY)
def test_chunk_form_in_fp32_stays_near_fp64(rng, name):
    x, options = kda(rng, name, T=200, K=32, V=16)
    o, final = R.recurrent_kda(**x, **options, output_final_state=True)
    o32, final32 = R.chunk_kda(**x, **options, output_final_state=True, dtype=torch.float32)
    # fp32 rounding is 6e-8; G reaches 1e5 log2 units after -1000 tokens, whose ulp of 8e-3 then sits in the exponents
    tolerance = 5e-3 if name in ("mask", "mixed") else 2e-5
    assert relative(o32, o) < tolerance
    assert relative(final32, final) < tolerance


def test_every_length_around_a_chunk(rng):
    for T in range(1, 34):
        x, options = kda(rng, "bounded", T=T, H=1, K=4)
        o, final = R.recurrent_kda(**x, **options, output_final_state=True)
        chunk_o, chunk_final = R.chunk_kda(**x, **options, output_final_state=True, chunk_size=16)
        assert relative(chunk_o, o) < FP64 and relative(chunk_final, final) < FP64, T


def test_checkpoints_are_the_states_at_chunk_boundaries(rng):
    lengths = [40, 0, 16]
    x, _ = kda(rng, T=56, K=8, V=4, sequences=3)
    edges = cu_seqlens(lengths)
    _, final, states = R.chunk_kda(**x, cu_seqlens=edges, chunk_size=16, output_final_state=True, output_checkpoints=True)
    tokens = [(0, 0), (0, 16), (0, 32), (0, 40), (1, 0), (2, 0), (2, 16)]
    assert len(states) == len(tokens)
    for state, (n, length) in zip(states, tokens):
        start = int(edges[n])
        part = {name: value[:, start : start + length] for name, value in x.items() if name != "initial_state"}
        _, want = R.recurrent_kda(**part, initial_state=x["initial_state"][n : n + 1], output_final_state=True)
        assert relative(state, want[0]) < FP64
    assert torch.equal(states[[3, 4, 6]], final)


@pytest.mark.parametrize("name", ["rand", "bounded"])
def test_stages_are_their_definitions(rng, name):
    x, options = kda(rng, name, T=21, H=1, HV=1, K=6, V=5, dtype=torch.float64)
    x.pop("initial_state")
    stages = R.chunk_stages(**x, **options, chunk_size=16)
    p = R.recurrence.prepare(**x, **options)
    G = R.chunk_cumsum(p.g, 16)[0, :, 0]
    for c, (first, last) in enumerate([(0, 16), (16, 21)]):
        n = last - first
        q, k, v, beta, g = (t[0, first:last, 0] for t in (p.q, p.k, p.v, p.beta, G[None, :, None]))
        decay = torch.exp2(g[:, None] - g[None, :])  # [n, n, K]
        akk = (beta[:, None] * torch.einsum("id,jd,ijd->ij", k, k, decay)).tril(-1)
        X = torch.linalg.inv(torch.eye(n) + akk)
        want = dict(
            G=g, AKK=akk, AQK=torch.einsum("id,jd,ijd->ij", q, k, decay).tril(), QG=q * g.exp2(), X=X,
            KG=k * (g[-1] - g).exp2(), W=X @ (beta[:, None] * g.exp2() * k), U=X @ (beta[:, None] * v),
        )
        for stage, value in want.items():
            got = getattr(stages, stage)[c, 0]
            got, beyond = (got[:n, :n], got[n:, :n]) if stage in ("AKK", "AQK", "X") else (got[:n], got[n:])
            assert relative(got, value) < FP64, stage
            assert stage == "G" or not beyond.any(), stage
        assert relative(stages.DEC[c, 0], g[-1].exp2()) < FP64


def test_levels_stay_finite_for_any_gate(rng):
    for name, leaf, half in (("mask", 1, 0.0), ("bound", 16, 7.5 * 5 * R.gate.LOG2E)):
        G = log_decay(rng, name, 1, 64, 1, 8)[0, :, 0].float().cumsum(0) * R.gate.LOG2E
        q, k = torch.randn(64, 8, generator=rng, dtype=torch.float32), torch.ones(64, 8, dtype=torch.float32)
        aqk, akk = R.chunked.decayed_products(q, k, G, leaf, half)
        assert torch.isfinite(aqk).all() and torch.isfinite(akk).all()
        assert relative(aqk.diag(), q.sum(-1)) < 1e-5  # no decay between a token and itself


def test_inverse_of_equal_keys(rng):
    x, _ = kda(rng, "equal", T=64, H=1, K=16)
    k = x["k"][0, :, 0].float()
    akk = (0.993 * k @ k.T).tril(-1)
    want = torch.linalg.inv(torch.eye(64) + akk.double())
    assert relative(R.chunked.inverse(akk), want) < 1e-5  # the same in fp32: block forward substitution


# --- gate -----------------------------------------------------------------------------------------------------------


def test_gate_forms_at_single_points(rng):
    g, bias, a_log = torch.randn(1, 3, 2, 4, generator=rng) * 9, torch.randn(2, 4, generator=rng), torch.tensor([0.3, -1.0])
    soft, bounded = R.kda_gate(g, a_log, bias), R.kda_gate(g, a_log, bias.flatten(), lower_bound=-5.0)
    plain = R.kda_gate(g, None, None, lower_bound=-2.0)
    for t in range(3):
        for h in range(2):
            for d in range(4):
                x, a = float(g[0, t, h, d] + bias[h, d]), math.exp(float(a_log[h]))
                assert float(soft[0, t, h, d]) == pytest.approx(-a * math.log1p(math.exp(x)), rel=1e-7)
                assert float(bounded[0, t, h, d]) == pytest.approx(-5 / (1 + math.exp(-a * x)), rel=1e-9)
                assert float(plain[0, t, h, d]) == pytest.approx(-2 / (1 + math.exp(-float(g[0, t, h, d]))), rel=1e-9)


def test_softplus_is_linear_above_20():
    g = torch.tensor([19.0, 20.5, 800.0]).reshape(1, 3, 1, 1)
    assert R.kda_gate(g, torch.zeros(1)).flatten().tolist() == [-math.log1p(math.exp(19.0)), -20.5, -800.0]


def test_bounded_form_is_no_clamp_of_softplus(rng):
    g, a_log = torch.randn(1, 50, 2, 8, generator=rng), gate_parameter(rng, 2)
    clamped = R.kda_gate(g, a_log).clamp(min=-5.0)
    assert relative(R.kda_gate(g, a_log, lower_bound=-5.0), clamped) > 0.05


def test_gate_without_parameters_is_refused():
    with pytest.raises(ArgumentError, match="A_log"):
        R.kda_gate(torch.zeros(1, 1, 1, 4))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("flat_bias", [False, True])
def test_gate_gradients_are_autograds(rng, lower_bound, flat_bias):
    g, a_log, bias = torch.randn(2, 5, 3, 4, generator=rng), gate_parameter(rng, 3), torch.randn(3, 4, generator=rng)
    bias = bias.flatten() if flat_bias else bias
    leaves = [t.double().requires_grad_() for t in (g, a_log, bias)]
    dg = torch.randn(2, 5, 3, 4, generator=rng)
    R.kda_gate(*leaves, lower_bound).backward(dg)
    for got, leaf in zip(R.kda_gate_backward(dg, g, a_log, bias, lower_bound), leaves):
        assert got.shape == leaf.shape and relative(got, leaf.grad) < FP64


def test_a_loss_on_a_first_token_gives_no_gate_gradient(rng):
    x, _ = kda(rng, T=1, K=4, dtype=torch.float64)
    g = x["g"].double().requires_grad_()
    o, _ = R.recurrent_kda(**(x | {"g": g, "initial_state": None}))
    o.sum().backward()
    assert not g.grad.any()


def test_beta_and_chunk_cumsum(rng):
    raw = torch.randn(7, generator=rng)
    assert relative(R.kda_beta(raw, True), 2 / (1 + (-raw).exp())) < FP64
    lengths = [5, 0, 9, 4]
    g = torch.randn(1, 18, 2, 3, generator=rng)
    sums = R.chunk_cumsum(g, 4, cu_seqlens(lengths))
    for t in range(18):
        start = max(edge for edge in (0, 4, 5, 9, 13, 14) if edge <= t)
        assert relative(sums[0, t], g[0, start : t + 1].sum(0) / math.log(2)) < FP64


# --- convolution ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", None])
def test_convolution_is_torchs(rng, width, bias, activation):
    lengths, D = [3, 0, 1, 12], 6
    x, weight = torch.randn(1, 16, D, generator=rng), torch.randn(D, width, generator=rng)
    b = torch.randn(D, generator=rng) if bias else None
    state = torch.randn(4, width - 1, D, generator=rng)
    edges = cu_seqlens(lengths)
    y, final = R.causal_conv1d(x, weight, b, initial_state=state, cu_seqlens=edges, activation=activation,
                               output_final_state=True)
    for n, (start, end) in enumerate(pairwise(edges)):
        window = torch.cat([state[n], x[0, start:end]])
        assert torch.equal(final[n], window[len(window) - (width - 1) :])
        if start == end:
            continue
        want = F.conv1d(window.T[None], weight[:, None], b, groups=D)[0].T
        assert relative(y[0, start:end], F.silu(want) if activation else want) < FP64


def test_speculative_window_is_the_sequential_convolution(rng):
    """Random acceptances over many steps: the outputs of the accepted tokens are the convolution of their sequence."""
    k, D, width, slots = 3, 4, 4, 7
    weight, pool = torch.randn(D, width, generator=rng), torch.randn(slots, width - 1 + k, D, generator=rng)
    before, rows = pool.clone(), torch.tensor([[5, 0, 1, 2], [-1, 0, 0, 0], [3, 1, 1, 1]])
    prompt = torch.randn(2, width - 1, D, generator=rng)
    pool[[5, 3], : width - 1] = prompt
    streams, outputs, accepted = [list(prompt[0]), list(prompt[1])], [[], []], torch.tensor([1, 1, 1])
    for _ in range(12):
        x = torch.randn(3, 1 + k, D, generator=rng)
        y = R.causal_conv1d_update(x, pool, weight, state_indices=rows, num_accepted_tokens=accepted)
        assert not y[1].any()
        accepted = torch.randint(1, 2 + k, (3,), generator=rng)
        for stream, output, row in zip(streams, outputs, (0, 2)):
            stream += x[row, : accepted[row]]
            output += y[row, : accepted[row]]
    for stream, output in zip(streams, outputs):
        want = F.silu(F.conv1d(torch.stack(stream).T[None], weight[:, None], groups=D)[0].T)
        assert relative(torch.stack(output), want) < FP64
    untouched = [0, 1, 2, 4, 6]
    assert torch.equal(pool[untouched], before[untouched])


def test_plain_update_continues_a_prefill(rng):
    x, weight = torch.randn(1, 9, 5, generator=rng), torch.randn(5, 4, generator=rng)
    want, last = R.causal_conv1d(x, weight, output_final_state=True)
    _, pool = R.causal_conv1d(x[:, :6], weight, output_final_state=True)
    slot = torch.zeros(1, dtype=torch.int32)
    steps = [R.causal_conv1d_update(x[:, a:b], pool, weight, state_indices=slot) for a, b in ((6, 7), (7, 9))]
    assert relative(torch.cat(steps, 1), want[:, 6:]) < FP64
    assert torch.equal(pool, last)


# --- pools and speculative decode -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state_v_first", [True, False])
def test_prefill_then_decode_steps_is_one_prefill(rng, state_v_first):
    x, options = kda(rng, "softplus", T=20, H=1, HV=2, K=6, V=4, dtype=torch.float64)
    x.pop("initial_state")
    options["state_v_first"] = state_v_first
    want, last = R.chunk_kda(**x, **options, output_final_state=True, chunk_size=16)
    part = lambda a, b: {name: value[:, a:b] for name, value in x.items()}
    _, pool = R.chunk_kda(**part(0, 17), **options, output_final_state=True)
    for t in range(17, 20):
        o = R.recurrent_kda_pool(**part(t, t + 1), **options, pool=pool, state_indices=torch.tensor([0]))
        assert relative(o, want[:, t : t + 1]) < FP64
    assert relative(pool, last) < FP64


@pytest.mark.parametrize("k", [1, 2, 5])
def test_accepting_j_of_k_is_j_sequential_steps(rng, k):
    """Also a step with drafts followed by one without, and rejected drafts that must leave no trace."""
    S, slots = 2, 2 * (1 + k) + 1
    perm = torch.randperm(slots - 1, generator=rng) + 1
    table = perm.reshape(S, 1 + k).int()
    pool = torch.randn(slots, 1, 4, 6, generator=rng)
    running = pool[table[:, 0].long()].clone()
    accepted = torch.ones(S, dtype=torch.int32)
    for step in range(6):
        n = 1 if step == 3 else 1 + k
        x, options = kda(rng, "bounded", B=S, T=n, H=1, K=6, V=4, dtype=torch.float64)
        x.pop("initial_state")
        o = R.recurrent_kda_pool(**x, **options, pool=pool, state_indices=table, num_accepted_tokens=accepted)
        accepted = torch.randint(1, n + 1, (S,), generator=rng).int()
        for s in range(S):
            j = int(accepted[s])
            alone = {name: value[s : s + 1, :j] for name, value in x.items()}
            want, state = R.recurrent_kda(**alone, **options, initial_state=running[s : s + 1], output_final_state=True)
            assert relative(o[s, :j], want[0]) < FP64
            assert relative(pool[int(table[s, j - 1])], state[0]) < FP64
            running[s] = state[0]


@pytest.mark.parametrize("pad_slot", [-1, 0])
def test_padded_rows_touch_nothing(rng, pad_slot):
    x, _ = kda(rng, B=4, T=2, H=1, K=4)
    x.pop("initial_state")
    pool = torch.randn(6, 1, 4, 4, generator=rng, dtype=torch.float32)
    pool[0] = float("nan")
    before = pool.clone()
    slots = torch.tensor([3, pad_slot, 5, 6 if pad_slot else -1])  # 6: past the pool
    o = R.recurrent_kda_pool(**x, pool=pool, state_indices=slots, pad_slot=pad_slot)
    assert not o[[1, 3]].any() and torch.isfinite(o).all()
    same = (pool == before) | (pool.isnan() & before.isnan())
    assert same[[0, 1, 2, 4]].all() and not same[[3, 5]].all(dim=(1, 2, 3)).any()


def test_accepted_is_clamped_and_a_fresh_row_reads_nothing(rng):
    x, _ = kda(rng, B=3, T=2, H=1, K=4)
    x.pop("initial_state")
    table = torch.tensor([[1, 2], [3, 4], [5, 6]])
    pool = torch.randn(7, 1, 4, 4, generator=rng)
    pool[5:] = float("nan")
    other = pool.clone()
    fresh = torch.tensor([True, True, False])
    o = R.recurrent_kda_pool(**x, pool=pool, state_indices=table, num_accepted_tokens=torch.tensor([-3, 99, 1]),
                             has_initial_state=fresh)
    want = R.recurrent_kda_pool(**x, pool=other, state_indices=table, num_accepted_tokens=torch.tensor([1, 2, 2]),
                                has_initial_state=fresh)
    assert torch.equal(o, want) and torch.equal(pool[1:], other[1:]) and torch.isfinite(o).all()


def test_bf16_pool_rounds_at_each_write_only(rng):
    x, _ = kda(rng, T=4, H=1, K=4)
    x.pop("initial_state")
    pool = torch.randn(4, 1, 4, 4, generator=rng).bfloat16()
    start = pool[:1].clone()
    R.recurrent_kda_pool(**x, pool=pool, state_indices=torch.tensor([[0, 1, 2, 3]]))
    for t in range(4):
        part = {name: value[:, : t + 1] for name, value in x.items()}
        _, state = R.recurrent_kda(**part, initial_state=start, output_final_state=True)
        assert torch.equal(pool[t], state[0].bfloat16())


def test_decode_step_is_its_parts(rng):
    """One token a row against conv1d, normalize, the textbook recurrence and rms_norm of torch."""
    N, H, HV, K, V, slots = 3, 2, 4, 6, 5, 5
    D = 2 * H * K + HV * V
    projection = torch.randn(N, D + HV * V + HV + 3, generator=rng)
    qkv, z, beta = projection[:, :D], projection[:, D : D + HV * V], projection[:, -3 - HV : -3]
    g, bias, a_log = torch.randn(N, HV * K, generator=rng), torch.randn(HV, K, generator=rng), gate_parameter(rng, HV)
    conv_pool, weight = torch.randn(slots, 3, D, generator=rng), torch.randn(D, 4, generator=rng)
    pool, norm_weight = torch.randn(slots, HV, V, K, generator=rng), torch.randn(V, generator=rng)
    lines, states = conv_pool.clone(), pool.clone()
    index = torch.tensor([4, -1, 1])
    out = R.kda_decode_step(qkv, z, g, beta, conv_pool, weight, pool, index, norm_weight, heads=H, K=K, A_log=a_log,
                            dt_bias=bias, lower_bound=-5.0)
    assert not out[1].any()
    for n in (0, 2):
        slot = int(index[n])
        window = torch.cat([lines[slot], qkv[n : n + 1]])
        assert torch.equal(conv_pool[slot], window[1:])
        mixed = F.silu((window * weight.T).sum(0))
        q, k = (part.reshape(H, K) for part in (mixed[: H * K], mixed[H * K : 2 * H * K]))
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        v = mixed[2 * H * K :].reshape(HV, V)
        decay = -5 * torch.sigmoid(a_log.exp()[:, None] * (g[n].reshape(HV, K) + bias))
        for hv in range(HV):
            h = hv // 2
            o, S = textbook(q[h][None] * K**-0.5, k[h][None], v[hv][None], decay[hv][None],
                            torch.sigmoid(beta[n, hv])[None], states[slot, hv].T)
            want = F.rms_norm(o[0], (V,), norm_weight, 1e-5) * torch.sigmoid(z[n].reshape(HV, V)[hv])
            assert relative(out[n, hv], want) < FP64
            assert relative(pool[slot, hv], S.T) < FP64
    assert torch.equal(pool[[0, 2, 3]], states[[0, 2, 3]]) and torch.equal(conv_pool[[0, 2, 3]], lines[[0, 2, 3]])


# --- tables, and the tests' own tools -------------------------------------------------------------------------------


@pytest.mark.parametrize(("lengths", "indices", "offsets"), [
    ([5, 0, 130], [(0, 0), (2, 0), (2, 1), (2, 2)], [0, 1, 1, 4]),
    ([0, 64], [(1, 0)], [0, 0, 1]),
    ([0, 1, 3], [(1, 0), (2, 0)], [0, 0, 1, 2]),
    ([], [], [0]),
    ([0, 0], [], [0, 0, 0]),
])
def test_chunk_table_vectors(lengths, indices, offsets):
    for dtype in (torch.int32, torch.int64):
        got, at = R.chunk_table(cu_seqlens(lengths, dtype), 64)
        assert got.dtype == dtype and got.shape == (len(indices), 2) and at.dtype == torch.int64
        assert [tuple(row) for row in got.tolist()] == indices and at.tolist() == offsets


def test_conv_schedule_vector():
    schedule = R.conv_schedule(cu_seqlens([5, 0, 130]), 8)
    assert schedule["tot"] == 18
    assert schedule["batch_ptr"].tolist() == [0] + [2] * 17
    assert schedule["token_chunk_offset_ptr"].tolist() == [0, *range(17)]


def test_staged_padding():
    state = torch.arange(12, dtype=torch.int32).reshape(3, 4)[:, :2]
    staged, qsl, accepted = R.stage_spec_decode(state, torch.tensor([0, 3, 4, 9]), torch.tensor([2, 3, 9]), 4, 2, 2, -1)
    assert staged.tolist() == [[0, 1], [4, 5], [-1, -1], [-1, -1]]
    assert qsl.tolist() == [0, 3, 4, 4, 4] and accepted.tolist() == [2, 3, 1, 1]
    assert R.stage_spec_decode(state, torch.tensor([7]), torch.ones(0), 2, 2, 0)[1].tolist() == [7, 7, 7]


def test_error_measure_sees_nan_and_size():
    ref = torch.tensor([3.0, 4.0])
    assert relative(ref * 1.01, ref) == pytest.approx(0.01)
    assert relative(torch.tensor([3.0, float("nan")]), ref) == float("inf")
    with pytest.raises(AssertionError):
        relative(ref[:1], ref)


def test_sliced_inputs_are_the_values_in_a_wider_row(rng):
    x = torch.randn(2, 3, 4, 5, generator=rng)
    wide = sliced(rng, x)
    assert torch.equal(wide, x) and wide.stride(1) > 20 and not wide.is_contiguous()

"""compat.fla: signatures and results of the public package, on what a CPU can run."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch

from kdagen import reference
from kdagen.compat import fla
from kdagen.errors import KdagenError

pytestmark = pytest.mark.usefixtures("cpu_path")

needs_fla = pytest.mark.skipif(importlib.util.find_spec("fla") is None or importlib.util.find_spec("einops") is None,
                               reason="fla-core is not installed")

# (name, default) of every argument of fla-core 0.6.0, in order; its **kwargs are our keyword-only arguments
REQUIRED = inspect.Parameter.empty
QKVGB = [(name, REQUIRED) for name in ("q", "k", "v", "g", "beta")]
FLAGS = [(f"use_{name}_in_kernel", False) for name in ("qk_l2norm", "gate", "beta_sigmoid")] + [("allow_neg_eigval", False)]
GATE = [("A_log", None), ("dt_bias", None)]
SIGNATURES = {
    "chunk_kda": (
        [*QKVGB, ("scale", None), ("initial_state", None), ("output_final_state", False), *FLAGS, ("safe_gate", False),
         ("lower_bound", None), ("disable_recompute", False), ("return_intermediate_states", False),
         ("state_v_first", False), ("cu_seqlens", None), ("cu_seqlens_cpu", None), ("cp_context", None),
         ("use_graph", False), ("max_num_seqs", None)],
        {"A_log", "dt_bias", "chunk_size", "transpose_state_layout"}),
    "fused_recurrent_kda": (
        [*QKVGB, *GATE, ("scale", None), ("initial_state", None), ("output_final_state", False), *FLAGS,
         ("lower_bound", None), ("state_v_first", False), ("cu_seqlens", None)], {"transpose_state_layout"}),
    "fused_recurrent_kda_fwd": (
        [*QKVGB, *GATE, ("initial_state", None), ("scale", None), ("output_final_state", False),
         ("inplace_final_state", True), ("state_v_first", False), ("cu_seqlens", None), ("ssm_state_indices", None),
         ("num_accepted_tokens", None), *FLAGS, ("lower_bound", None), ("out", None)], set()),
    "fused_kda_gate": ([("g", REQUIRED), *GATE, ("lower_bound", None), ("output_dtype", torch.float32)], set()),
    "naive_recurrent_kda": (
        [*QKVGB, ("scale", None), ("initial_state", None), ("output_final_state", False)], set()),
}


def split(function):
    parameters = inspect.signature(function).parameters.values()
    of = lambda kind: [p for p in parameters if p.kind is kind]
    positional = [(p.name, p.default) for p in of(inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    return positional, {p.name for p in of(inspect.Parameter.KEYWORD_ONLY)}, of(inspect.Parameter.VAR_KEYWORD)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_the_package(name):
    positional, extra, wild = split(getattr(fla, name))
    assert positional == SIGNATURES[name][0] and extra == SIGNATURES[name][1] and not wild


@needs_fla
@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_match_the_installed_package(name):
    from fla.ops import kda
    from fla.ops.kda import fused_recurrent, gate, naive

    home = {"chunk_kda": kda, "fused_recurrent_kda": kda, "fused_recurrent_kda_fwd": fused_recurrent,
            "fused_kda_gate": gate, "naive_recurrent_kda": naive}[name]
    assert split(getattr(fla, name))[0] == split(getattr(home, name))[0]


@needs_fla
def test_results_match_the_installed_package(rng):
    from fla.ops.kda import naive
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate

    q, k, v, g, beta, state = make(rng, B=2, T=9, H=2, HV=4)
    theirs = naive.naive_recurrent_kda(q, k, v, g, beta, initial_state=state, output_final_state=True)
    for function in (fla.naive_recurrent_kda, fla.chunk_kda, fla.fused_recurrent_kda):
        ours = function(q, k, v, g, beta, initial_state=state, output_final_state=True)
        for mine, their in zip(ours, theirs):
            close(mine, their)
    A_log, bias = torch.randn(4, generator=rng), torch.randn(4 * 8, generator=rng)
    close(fla.fused_kda_gate(g, A_log, bias), naive_kda_gate(g, A_log, bias))
    close(fla.fused_kda_gate(g, A_log, bias, -5.0), naive_kda_lowerbound_gate(g, A_log, bias, -5.0))


def make(rng, B=1, T=40, H=2, HV=2, K=8, V=16, N=None):
    new = lambda *shape: torch.randn(*shape, generator=rng)
    unit = torch.nn.functional.normalize
    return (new(B, T, H, K), unit(new(B, T, H, K), dim=-1), new(B, T, HV, V), -new(B, T, HV, K).abs() * 0.2,
            new(B, T, HV).sigmoid(), new(N or B, HV, K, V))


def close(mine, want, tolerance=1e-5):
    """Both are fp32 sums in another order."""
    assert mine.shape == want.shape
    assert (mine.double() - want.double()).norm() <= tolerance * want.double().norm()


def oracle(*inputs, **options):
    return reference.recurrent_kda(*inputs, state_v_first=False, output_final_state=True, **options)


@pytest.mark.parametrize("function", [fla.chunk_kda, fla.fused_recurrent_kda], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("v_first", [False, True])
def test_a_batch_with_states_of_either_layout(function, v_first, rng):
    *inputs, state = make(rng, B=2, HV=4)
    want, final = oracle(*inputs, initial_state=state)
    given = state.transpose(-1, -2).contiguous() if v_first else state
    o, got = function(*inputs, initial_state=given, output_final_state=True, state_v_first=v_first)
    close(o, want)
    close(got.transpose(-1, -2) if v_first else got, final)
    o, none = function(*inputs, initial_state=given, state_v_first=v_first)
    assert none is None
    with pytest.warns(DeprecationWarning):
        renamed, _ = function(*inputs, initial_state=given, transpose_state_layout=v_first)
    torch.testing.assert_close(renamed, o, rtol=0, atol=0)


@pytest.mark.parametrize("function", [fla.chunk_kda, fla.fused_recurrent_kda], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("lower_bound", [None, -5.0, -8.0])
def test_gates_inside(function, lower_bound, rng):
    q, k, v, _, _, state = make(rng, N=3)
    g, beta = torch.randn(1, 40, 2, 8, generator=rng), torch.randn(1, 40, 2, generator=rng)
    A_log, bias = torch.randn(2, generator=rng) * 0.3, torch.randn(16, generator=rng)
    flags = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                 allow_neg_eigval=True)
    cu = torch.tensor([0, 7, 7, 40])
    want, final = oracle(q, k, v, g, beta, A_log=A_log, dt_bias=bias, lower_bound=lower_bound, cu_seqlens=cu,
                         initial_state=state, **flags)
    o, got = function(q, k, v, g, beta, A_log=A_log, dt_bias=bias, lower_bound=lower_bound, cu_seqlens=cu,
                      initial_state=state, output_final_state=True, **flags)
    close(o, want, 2e-5)
    close(got, final, 2e-5)


def test_graph_mode_and_safe_gate_change_nothing(rng):
    *inputs, _ = make(rng)
    cu = torch.tensor([0, 12, 40, 40])
    want, _ = fla.chunk_kda(*inputs, cu_seqlens=cu)
    for options in ({"use_graph": True, "max_num_seqs": 3}, {"safe_gate": True}, {"disable_recompute": True},
                    {"cu_seqlens_cpu": cu.clone()}):
        o, _ = fla.chunk_kda(*inputs, cu_seqlens=cu, **options)
        torch.testing.assert_close(o, want, rtol=0, atol=0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [32, 64])
def test_intermediate_states_are_those_before_each_chunk(packed, chunk, rng):
    lengths = (70, 0, 130, 64) if packed else (70, 70)
    edges = [0]
    for length in lengths:
        edges.append(edges[-1] + length)
    *inputs, state = make(rng, *((1, edges[-1]) if packed else (2, 70)), N=len(lengths))
    cu = torch.tensor(edges)
    with torch.inference_mode():
        _, _, h = fla.chunk_kda(*inputs, initial_state=state, return_intermediate_states=True, chunk_size=chunk,
                                **({"cu_seqlens": cu, "cu_seqlens_cpu": cu} if packed else {}))
    assert h.dtype == torch.bfloat16 and h.shape[0] == (1 if packed else 2)
    want = []
    for n, length in enumerate(lengths):
        rows = slice(edges[n], edges[n + 1]) if packed else slice(0, length)
        one = [x[0 if packed else n, rows][None] for x in inputs]
        for first in range(0, length, chunk):
            _, before = oracle(*(x[:, :first] for x in one), initial_state=state[n][None])
            want.append(before[0])
    close(h.flatten(0, 1).float(), torch.stack(want), 5e-3)  # stored in bf16


def test_in_place_on_a_pool(rng):
    *inputs, _ = make(rng, B=3, T=1)
    pool = torch.randn(8, 2, 8, 16, generator=rng)
    before, slots = pool.clone(), torch.tensor([5, -1, 2], dtype=torch.int32)
    out = torch.full_like(inputs[2], float("nan"))
    o, states = fla.fused_recurrent_kda_fwd(*inputs, initial_state=pool, ssm_state_indices=slots, out=out)
    assert o is out and states is pool
    want, final = oracle(*inputs, initial_state=before[slots.clamp(min=0).long()])
    close(o[[0, 2]], want[[0, 2]])
    assert not o[1].any(), "a negative index is padding"
    close(pool[[5, 2]], final[[0, 2]])
    untouched = [0, 1, 3, 4, 6, 7]
    torch.testing.assert_close(pool[untouched], before[untouched], rtol=0, atol=0)


def test_speculative_columns(rng):
    *inputs, _ = make(rng, T=6)
    cu, slots = torch.tensor([0, 3, 6]), torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    pool = torch.randn(8, 2, 8, 16, generator=rng)
    before = pool.clone()
    o, _ = fla.fused_recurrent_kda_fwd(*inputs, initial_state=pool, ssm_state_indices=slots, cu_seqlens=cu,
                                       num_accepted_tokens=torch.tensor([2, 3], dtype=torch.int32))
    for n, column in enumerate((1, 2)):
        one = [x[:, 3 * n:3 * n + 3] for x in inputs]
        start = before[slots[n, column].long()][None]
        close(o[:, 3 * n:3 * n + 3], oracle(*one, initial_state=start)[0])
        for t in range(3):
            close(pool[slots[n, t].long()], oracle(*(x[:, :t + 1] for x in one), initial_state=start)[1][0])


def test_rows_own_their_slots_without_indices(rng):
    *inputs, state = make(rng, B=2, T=4)
    want, final = oracle(*inputs, initial_state=state)
    o, got = fla.fused_recurrent_kda_fwd(*inputs, initial_state=state)
    close(o, want)
    assert got is state
    close(state, final)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("padding", [-1, 5], ids=["negative", "past the pool"])
def test_indices_without_changing_the_pool(rng, padding, packed, dtype):
    """As in place: padding is not read (a NaN in slot 0 or elsewhere does not matter), its output and its state are zero."""
    *inputs, _ = make(rng, B=3, T=4)
    pool = torch.randn(5, 2, 8, 16, generator=rng).to(dtype)
    pool[0] = pool[4] = float("nan")
    before, slots = pool.clone(), torch.tensor([2, padding, 3])
    want, states = oracle(*inputs, initial_state=torch.stack([before[2], torch.zeros_like(before[0]), before[3]]).float())
    want[1], states[1] = 0, 0
    options = {}
    if packed:
        inputs, want = [x.flatten(0, 1)[None] for x in inputs], want.flatten(0, 1)[None]
        options["cu_seqlens"] = torch.tensor([0, 4, 8, 12])
    for table in (slots, torch.stack([slots, slots + 1], 1)):
        o, final = fla.fused_recurrent_kda_fwd(*inputs, initial_state=pool, ssm_state_indices=table,
                                               inplace_final_state=False, output_final_state=True, **options)
        close(o, want)
        close(final, states)
        assert final.dtype == torch.float32
    assert fla.fused_recurrent_kda_fwd(*inputs, initial_state=pool, ssm_state_indices=slots, inplace_final_state=False,
                                       **options)[1] is None
    torch.testing.assert_close(pool, before, rtol=0, atol=0, equal_nan=True)
    if not packed:
        placed, _ = fla.fused_recurrent_kda_fwd(*inputs, initial_state=pool, ssm_state_indices=slots)
        close(placed, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 2, 8), (7, 2, 8), (2, 8)])
def test_the_gate_of_any_leading_shape(dtype, shape, rng):
    g, A_log, bias = torch.randn(*shape, generator=rng), torch.randn(2, generator=rng), torch.randn(16, generator=rng)
    got = fla.fused_kda_gate(g, A_log, bias, output_dtype=dtype)
    assert got.dtype == dtype and got.shape == shape
    close(got, reference.kda_gate(g, A_log, bias), 1e-6 if dtype == torch.float32 else 4e-3)
    close(fla.fused_kda_gate(g, None, bias, -5.0), reference.kda_gate(g, None, bias, -5.0))


def test_errors_are_of_the_package_s_types_and_ours(rng):
    q, k, v, g, beta, state = make(rng, B=2)
    cu = torch.tensor([0, 40])
    one = [x[:1] for x in (q, k, v, g, beta)]
    cases = [
        (ValueError, "batch of 1", lambda: fla.chunk_kda(q, k, v, g, beta, cu_seqlens=cu)),
        (ValueError, "batch of 1", lambda: fla.fused_recurrent_kda(q, k, v, g, beta, cu_seqlens=cu)),
        (ValueError, "initial_state.*1, one", lambda: fla.chunk_kda(*one, cu_seqlens=cu, initial_state=state)),
        (AssertionError, "float32", lambda: fla.chunk_kda(q, k, v, g, beta, initial_state=state.half())),
        (ValueError, "A_log", lambda: fla.chunk_kda(q, k, v, g, beta, use_gate_in_kernel=True)),
        (ValueError, "chunk_size", lambda: fla.chunk_kda(q, k, v, g, beta, chunk_size=16)),
        (ValueError, "lower_bound", lambda: fla.chunk_kda(q, k, v, g, beta, A_log=torch.zeros(2), use_gate_in_kernel=True,
                                                          safe_gate=True)),
        (ValueError, "lower_bound", lambda: fla.chunk_kda(q, k, v, g, beta, A_log=torch.zeros(2), use_gate_in_kernel=True,
                                                          safe_gate=True, lower_bound=-6.0)),
        (ValueError, "allow_neg_eigval", lambda: fla.chunk_kda(q, k, v, g, beta, allow_neg_eigval=True)),
        (ValueError, "allow_neg_eigval", lambda: fla.fused_recurrent_kda(q, k, v, g, beta, allow_neg_eigval=True)),
        (AssertionError, "k: got shape", lambda: fla.chunk_kda(q, k[..., :4], v, g, beta)),
        (AssertionError, r"q: got shape \[2, 40, 8\], expected \[B, T, H, K\]", lambda: fla.chunk_kda(
            q[:, :, 0], k, v, g, beta)),
        (AssertionError, r"v: got shape \[2, 40, 16\], expected \[B, T, HV, V\]", lambda: fla.chunk_kda(
            q, k, v[:, :, 0], g, beta)),
        (AssertionError, "initial_state: got None beside ssm_state_indices", lambda: fla.fused_recurrent_kda_fwd(
            q, k, v, g, beta, ssm_state_indices=torch.tensor([0, 1]), inplace_final_state=False)),
        (AssertionError, "multiple", lambda: fla.chunk_kda(q, k, v[:, :, :1], g[:, :, :1], beta[:, :, :1])),
        (AssertionError, "g: got shape", lambda: fla.chunk_kda(q, k, v, g[..., 0], beta)),
        (AssertionError, "beta: got shape", lambda: fla.chunk_kda(q, k, v, g, beta[..., None])),
        (AssertionError, "initial_state", lambda: fla.fused_recurrent_kda_fwd(q, k, v, g, beta)),
        (AssertionError, "out: got shape", lambda: fla.fused_recurrent_kda_fwd(q, k, v, g, beta, initial_state=state,
                                                                               out=q)),
        (AssertionError, "inference_mode", lambda: fla.chunk_kda(q, k, v, g, beta, return_intermediate_states=True)),
        (AssertionError, "max_num_seqs", lambda: fla.chunk_kda(*one, cu_seqlens=cu, use_graph=True, max_num_seqs=4)),
        (NotImplementedError, "cp_context", lambda: fla.chunk_kda(q, k, v, g, beta, cp_context=object())),
        (NotImplementedError, "grad", lambda: fla.chunk_kda(q.clone().requires_grad_(), k, v, g, beta)),
        (NotImplementedError, "num_accepted", lambda: fla.fused_recurrent_kda_fwd(
            q, k, v, g, beta, initial_state=state, inplace_final_state=False, ssm_state_indices=torch.tensor([0, 1]),
            num_accepted_tokens=torch.tensor([1, 1]))),
        (ValueError, "transpose_state_layout", lambda: fla.chunk_kda(q, k, v, g, beta, state_v_first=True,
                                                                     transpose_state_layout=True)),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words) as caught:
            call()
        assert isinstance(caught.value, KdagenError)


@pytest.mark.parametrize("name", SIGNATURES)
def test_unknown_keywords_are_refused(name):
    with pytest.raises(TypeError, match="unexpected keyword"):
        getattr(fla, name)(sclae=1.0)

"""The KDA functions of flash-linear-attention (fla-core 0.6.0) by their names, arguments, defaults and error types.

Change the import, keep the calls::

    from kdagen.compat.fla import chunk_kda, fused_recurrent_kda

Differences, all of them refusals instead of surprises: unknown keywords raise TypeError (the originals take ``**kwargs``,
so a misspelt one is lost); there is no backward yet, so tensors that require grad are refused; context parallelism
raises NotImplementedError. ``safe_gate``, ``disable_recompute`` and ``use_graph`` choose nothing here, since every path is
safe for any gate and reads its tables on the device; what the originals check about them is still checked.
"""

from __future__ import annotations

import warnings

import torch

from kdagen import reference
from kdagen.compat._fla_states import IntermediateStates, rows_of
from kdagen.errors import ArgumentError, KdagenError, refuse
from kdagen.ops import decode, gate, prefill


class CompatAssertion(ArgumentError, AssertionError):
    """Where the original has a bare ``assert``: catch it as AssertionError, ValueError or KdagenError."""


class CompatNotImplemented(KdagenError, NotImplementedError):
    """A feature of the original that has no counterpart here."""


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
):
    """Chunked KDA: (o, final_state), or (o, final_state, h) with ``return_intermediate_states`` (inference mode only).

    q, k [B, T, H, K]; v, o [B, T, HV, V]; g [B, T, HV, K] log decay, or raw with ``use_gate_in_kernel`` (A_log [HV],
    dt_bias [HV * K]); beta [B, T, HV]; states fp32 [N, HV, K, V], or [N, HV, V, K] with ``state_v_first``; cu_seqlens
    [N+1] with B = 1. h: bf16 [B, NT, HV, K, V], the state before each chunk of 64 (or ``chunk_size``) tokens.
    """
    state_v_first = _renamed_layout(state_v_first, transpose_state_layout)
    if cp_context is not None:
        raise CompatNotImplemented("cp_context: got a context, expected None. Context parallelism is not available; "
                                   "split heads over ranks instead.")
    if use_graph:
        if cu_seqlens is not None and max_num_seqs is not None and len(cu_seqlens) - 1 != max_num_seqs:
            _assert(f"cu_seqlens: got {len(cu_seqlens) - 1} sequences, expected max_num_seqs = {max_num_seqs}. "
                    "Pad it with sequences of length zero at its end.")
        cu_seqlens_cpu = None  # the tables come from the device boundaries, which may change between replays
    _check_varlen(q, initial_state, cu_seqlens)
    if initial_state is not None and initial_state.dtype != torch.float32:
        _assert(f"initial_state: got {initial_state.dtype}, expected torch.float32. Cast it: initial_state.float().")
    if use_gate_in_kernel and A_log is None and lower_bound is None:
        refuse("A_log", None, "a tensor [HV] with use_gate_in_kernel=True and no lower_bound")
    if chunk_size not in (32, 64):
        refuse("chunk_size", chunk_size, "32 or 64, as fla-core takes", "kdagen.chunk_kda takes 16 to 128.")
    if safe_gate and use_gate_in_kernel:
        if lower_bound is None:
            refuse("lower_bound", None, "a float in [-5, 0) with safe_gate=True and use_gate_in_kernel=True")
        if not -5 <= lower_bound < 0:
            refuse("lower_bound", lower_bound, "a float in [-5, 0)")
    _check_beta(beta, v, allow_neg_eigval, use_beta_sigmoid_in_kernel)
    _check_shapes(q, k, v, g, beta)
    _check_no_grad(q, k, v, g, beta, A_log, dt_bias, initial_state)
    keep = None
    if return_intermediate_states:
        if not torch.is_inference_mode_enabled():
            _assert("return_intermediate_states: got True outside inference mode, expected it inside "
                    "`with torch.inference_mode():`.")
        if disable_recompute:
            _assert("disable_recompute: got True, expected False with return_intermediate_states=True.")
        keep = IntermediateStates(q, v, cu_seqlens, cu_seqlens_cpu, initial_state, chunk_size, state_v_first)
    if use_gate_in_kernel and lower_bound is not None and lower_bound < -5:  # steeper than the fused bounded gate goes
        g, use_gate_in_kernel = fused_kda_gate(g, A_log, dt_bias, lower_bound), False
    if not use_gate_in_kernel:
        A_log = dt_bias = lower_bound = None
    o, final_state = prefill.chunk_kda(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, chunk_size=chunk_size,
        state_v_first=state_v_first, use_gate_in_kernel=use_gate_in_kernel,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, **({} if keep is None else keep.arguments()))
    return (o, final_state) if keep is None else (o, final_state, keep.states())


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """KDA token by token: (o [B, T, HV, V], final state fp32 [N, HV, K, V] or None). Arguments as ``chunk_kda``'s."""
    state_v_first = _renamed_layout(state_v_first, transpose_state_layout)
    _check_varlen(q, initial_state, cu_seqlens)
    _check_beta(beta, v, allow_neg_eigval, use_beta_sigmoid_in_kernel)
    return fused_recurrent_kda_fwd(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state, scale=scale,
        output_final_state=output_final_state, inplace_final_state=False, state_v_first=state_v_first,
        cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, lower_bound=lower_bound)


def fused_recurrent_kda_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One serving step: (o, states). With ``inplace_final_state`` (the default) the pool ``initial_state`` changes in place.

    ssm_state_indices [N] or [N, 1+k] select its slots (row n's own slot n without them); num_accepted_tokens [N] the
    column that a speculative row starts from, its token t leaving its state in column t. An index that is negative or past
    the pool is padding: not read, not written, output zero (the original reads and writes whatever lies before the pool).
    Without ``inplace_final_state`` the states are new ones, of the rows in order, and a padding row's is zero.
    """
    _check_beta(beta, v, allow_neg_eigval, use_beta_sigmoid_in_kernel)
    _check_no_grad(q, k, v, g, beta, A_log, dt_bias, initial_state)
    if out is not None and out.shape != v.shape:
        _assert(f"out: got shape {list(out.shape)}, expected v's shape {list(v.shape)}.")
    if inplace_final_state and initial_state is None:
        _assert("initial_state: got None, expected a state pool with inplace_final_state=True. "
                "Pass inplace_final_state=False to start from zeros.")
    if not use_gate_in_kernel:
        A_log = dt_bias = lower_bound = None
    options = dict(
        A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, scale=scale, cu_seqlens=cu_seqlens,
        use_gate_in_kernel=use_gate_in_kernel, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, out=out)
    if inplace_final_state:
        if ssm_state_indices is None:
            rows = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
            ssm_state_indices = torch.arange(rows, dtype=torch.int32, device=q.device)
        return decode.fused_recurrent_kda(q, k, v, g, beta, state_pool=initial_state, state_indices=ssm_state_indices,
                                       num_accepted_tokens=num_accepted_tokens, **options)
    if ssm_state_indices is not None:
        if num_accepted_tokens is not None:
            raise CompatNotImplemented("num_accepted_tokens: got a tensor with inplace_final_state=False, expected None. "
                                       "Candidate states need a pool: inplace_final_state=True.")
        if initial_state is None:
            _assert("initial_state: got None beside ssm_state_indices, expected the state pool that they select from. "
                    "Leave ssm_state_indices out to start from zeros.")
        states, rows = rows_of(initial_state, ssm_state_indices)
        o, _ = decode.fused_recurrent_kda(q, k, v, g, beta, state_pool=states, state_indices=rows, **options)
        return o, states if output_final_state else None
    return decode.fused_recurrent_kda(q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state,
                                   **options)


def fused_kda_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Log decay [..., H, K] of a raw gate g of that shape; A_log [H], dt_bias [H * K].

    -exp(A_log) * softplus(g + dt_bias), or with ``lower_bound``: lower_bound * sigmoid(exp(A_log) * (g + dt_bias)).
    """
    _check_no_grad(g, A_log, dt_bias)
    rows = g.reshape(1, -1, *g.shape[-2:])  # [..., H, K] -> [1, tokens, H, K]
    return gate.kda_gate(rows, A_log, dt_bias, lower_bound=lower_bound).view(g.shape).to(output_dtype)


def naive_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence in plain torch, fp32: (o in v's dtype, state fp32 [B, HV, K, V] or None)."""
    o, state = reference.recurrent_kda(q, k, v, g, beta, scale=scale, initial_state=initial_state,
                                       output_final_state=output_final_state, state_v_first=False, dtype=torch.float32)
    return o.to(v.dtype), state


def _renamed_layout(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        refuse("transpose_state_layout", transpose_state_layout, "nothing beside state_v_first, its new name")
    warnings.warn("transpose_state_layout is deprecated: its name is state_v_first", DeprecationWarning, stacklevel=3)
    return transpose_state_layout


def _check_varlen(q: torch.Tensor, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> None:
    if cu_seqlens is None:
        return
    if q.shape[0] != 1:
        refuse("q", f"a batch of {q.shape[0]}", "a batch of 1 with cu_seqlens", "Flatten: q.flatten(0, 1)[None].")
    if initial_state is not None and initial_state.shape[0] != len(cu_seqlens) - 1:
        refuse("initial_state", f"{initial_state.shape[0]} states", f"{len(cu_seqlens) - 1}, one for each sequence")


def _check_beta(beta: torch.Tensor, v: torch.Tensor, allow_neg_eigval: bool, sigmoid: bool) -> None:
    if allow_neg_eigval and not sigmoid:
        refuse("allow_neg_eigval", True, "use_beta_sigmoid_in_kernel=True beside it")
    if beta.dim() != 3:
        _assert(f"beta: got shape {list(beta.shape)}, expected [B, T, HV] = {[*v.shape[:3]]}.")


def _check_shapes(q, k, v, g, beta) -> None:
    try:
        (B, T, H, K), (_, _, HV, _) = q.shape, v.shape
    except ValueError:
        name, tensor, shape = ("q", q, "[B, T, H, K]") if q.dim() != 4 else ("v", v, "[B, T, HV, V]")
        _assert(f"{name}: got shape {list(tensor.shape)}, expected {shape}.")
    if k.shape != q.shape:
        _assert(f"k: got shape {list(k.shape)}, expected q's shape {list(q.shape)}.")
    if K > 256:
        _assert(f"q: got a head dimension of {K}, expected at most 256.")
    if HV % H:
        _assert(f"v: got {HV} value heads, expected a multiple of the {H} query heads.")
    for name, tensor, shape in (("g", g, (B, T, HV, K)), ("beta", beta, (B, T, HV))):
        if tensor.shape != shape:
            _assert(f"{name}: got shape {list(tensor.shape)}, expected {list(shape)}.")


def _check_no_grad(*tensors: torch.Tensor | None) -> None:
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise CompatNotImplemented("gradients: got a tensor that requires grad, expected none: there is no backward yet. "
                                   "Call inside torch.no_grad(), or detach the inputs.")


def _assert(message: str) -> None:
    raise CompatAssertion(message)

"""The recurrent op: T >= 1 tokens a sequence, states from and to tensors of their own, or in place in a pool."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch

from kdagen import dispatch
from kdagen import reference as oracle
from kdagen.errors import refuse
from kdagen.ops._again import Again, addresses, again, misaligned
from kdagen.ops._common import (
    DTYPE_NAMES,
    MEMO_ENTRIES,
    check_dtype,
    check_interpretable,
    check_number,
    check_tensors,
    layouts,
    on_device,
    register,
    runs_kernels,
    target_of,
)
from kdagen.ops._decode_checks import (
    check_boundaries,
    check_flags,
    check_float,
    check_gate,
    check_index_table,
    check_qkv,
    check_rows_contiguous,
    check_states,
    check_vector,
)
from kdagen.spec import Problem, Spec

_MEMO = dispatch.memo("fused_recurrent_kda")
_TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "out", "initial_state", "final_state", "cu_seqlens",
            "state_indices", "num_accepted_tokens", "has_initial_state")


CONSTANTS = (None,) * 8  # the kernel's constexpr arguments: the compiled kernel does not look at them


class Plan(NamedTuple):
    """What is known of all calls with the same shapes, strides, dtypes and flags: the arguments passed the checks."""

    launch: object          # the chosen module's launch
    options: dict           # its keyword arguments
    scale: float
    repeat: Again | None    # the same launch with other addresses


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_pool: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    pad_slot: int = -1,
    cu_seqlens: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    out: torch.Tensor | None = None,
    checked: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi Delta Attention token by token: (o [B, T, HV, V], final state, the pool, or None).

    Per head, for each token: S <- diag(exp(g)) S;  S <- S + beta k (v - S^T k)^T;  o = scale S^T q.

    Tokens. q, k [B, T, H, K], v [B, T, HV, V] of one dtype (bf16, fp16, fp32); HV a multiple of H; K, V from 1 to 256.
    g [B, T, HV, K]: log decay (natural log, <= 0), or with ``use_gate_in_kernel`` the raw gate of
    -exp(A_log) * softplus(g + dt_bias), or, with ``lower_bound`` < 0, of lower_bound * sigmoid(exp(A_log) * (g + dt_bias)):
    A_log [HV] (None only with lower_bound: a factor 1), dt_bias [HV, K] or [HV * K] or None; all three refused otherwise.
    beta [B, T, HV]: strength, or with ``use_beta_sigmoid_in_kernel`` its raw logit (times 2 after the sigmoid with
    ``allow_neg_eigval``). g and beta of any float dtype. ``use_qk_l2norm_in_kernel``: x / sqrt(sum(x^2) + 1e-6) on q, k.
    ``scale``: K^-0.5 by default. All tensors may be slices of wider ones (no copy is made), as long as the last
    dimension of q, k, v, g is contiguous. ``out``: a buffer for o.
    ``cu_seqlens`` [N+1]: N packed sequences, B = 1. On a GPU its values are not checked, as that would wait for the
    device: boundaries are clamped to 0..T in the kernel, and tokens of no sequence are not written.

    States [N, HV, V, K] (``state_v_first``), else [N, HV, K, V], fp32, bf16 or fp16; fp32 within the kernel.
    Either ``initial_state`` (zeros if None) and, with ``output_final_state``, a new fp32 tensor; a sequence without tokens
    keeps its state. Or ``state_pool`` [slots, ...] (the slot stride may be padded), changed in place, and
    ``state_indices``, int32 or int64 of any strides:
    - [N]: sequence n starts from that slot and leaves its last state there (none if it has no tokens);
    - [N, 1+k] (speculative decode): it starts from column ``num_accepted_tokens``[n] - 1 (0 if None), and token t leaves
      its state in column t. num_accepted_tokens outside 1..1+k is clamped to it in the kernel; tokens after the last
      column share that column.
    A slot that is negative, equal to ``pad_slot``, or not in the pool is padding: never read, never written. A sequence
    that starts from padding has zero output on all its tokens.
    ``has_initial_state`` [N] bool: False starts from zeros and does not read the state, whatever is there.

    ``checked=False`` skips the checks of a call whose shapes, strides and dtypes are new; known ones are never checked
    again. Raises ArgumentError (a ValueError), ArgumentTypeError (a TypeError) or Unsupported.
    Not differentiable. Formula: arXiv 2510.26692.
    """
    if out is None:
        out = torch.empty_like(v)
    if (state_pool is None) != (state_indices is None):
        refuse("state_pool", "no state_indices beside it" if state_indices is None else "None beside state_indices",
               "both or neither", "For states of their own pass initial_state.")
    if state_pool is not None:
        if initial_state is not None:
            refuse("initial_state", "a tensor beside state_pool", "None", "The pool's slots hold the initial states.")
        final_state = state_pool
    elif output_final_state:
        try:
            if initial_state is not None and initial_state.dtype == torch.float32 and initial_state.is_contiguous():
                final_state = torch.empty_like(initial_state)  # the quick way to a tensor of that shape
            else:
                N = q.shape[0] if cu_seqlens is None else max(cu_seqlens.shape[0] - 1, 0)
                inner = (v.shape[-1], q.shape[-1]) if state_v_first else (q.shape[-1], v.shape[-1])
                final_state = q.new_empty((N, *v.shape[2:3], *inner), dtype=torch.float32)
        except AttributeError:
            check_tensors(("cu_seqlens", "initial_state"), (cu_seqlens, initial_state))
            raise
    else:
        final_state = None
    arguments = (
        q, k, v, g, beta, A_log, dt_bias, out, initial_state, final_state, cu_seqlens,
        state_indices, num_accepted_tokens, has_initial_state, scale, lower_bound, pad_slot, use_gate_in_kernel,
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, checked,
    )
    if torch.compiler.is_compiling():
        _OP(*arguments)
    else:
        _run(*arguments)
    return out, final_state


def _run(
    q, k, v, g, beta, A_log, dt_bias, out, initial_state, final_state, cu_seqlens, state_indices, num_accepted, has_initial,
    scale, lower_bound, pad_slot, raw_gate, l2norm, beta_sigmoid, neg_eigval, v_first, checked,
) -> None:
    """The op itself: writes out and final_state. With state_indices, final_state is the pool, also read."""
    tensors = (q, k, v, g, beta, A_log, dt_bias, out, initial_state, final_state, cu_seqlens, state_indices, num_accepted,
               has_initial)
    key = layouts(_TENSORS, tensors), scale, lower_bound, pad_slot, raw_gate, l2norm, beta_sigmoid, neg_eigval, v_first
    plan = _MEMO.get(key)
    known = plan is not None and q.is_cuda
    if not known:
        arguments = (*tensors, scale, lower_bound, pad_slot, raw_gate, l2norm, beta_sigmoid, neg_eigval, v_first)
        if checked:
            _check(*arguments)
        if not runs_kernels(q):
            return _cpu(*arguments)
        plan = _plan(*arguments)
    if state_indices is not None:
        tensors = (*tensors[:8], final_state, *tensors[9:])  # the pool holds the initial states
    with on_device(q):
        if known and plan.repeat is not None:
            pointers = addresses(*tensors)
            if not misaligned(pointers) and plan.repeat.launch(pointers):
                return
        compiled = plan.launch(*tensors, plan.scale, lower_bound, pad_slot=pad_slot, **plan.options)
    if not known:
        _remember(key, plan, compiled, tensors, lower_bound, pad_slot)


def _plan(
    q, k, v, g, beta, A_log, dt_bias, out, initial_state, final_state, cu_seqlens, state_indices, num_accepted, has_initial,
    scale, lower_bound, pad_slot, raw_gate, l2norm, beta_sigmoid, neg_eigval, v_first,
) -> Plan:
    check_interpretable(q.dtype)
    K, HV, V = q.shape[-1], *v.shape[2:]
    states = final_state if final_state is not None else initial_state
    spec = Spec.make("recurrent", k=K, v=V, dtype=DTYPE_NAMES[q.dtype], k_first=not v_first,
                     half_state=states is not None and states.dtype != torch.float32)
    seqs = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    target = target_of(q.get_device())
    choice = dispatch.pick(spec, Problem(q.shape[0] * q.shape[1], seqs, HV), target)
    options = dict(raw_gate=raw_gate, l2norm=l2norm, beta_sigmoid=beta_sigmoid, beta_scale=2.0 if neg_eigval else 1.0,
                   num_warps=choice.schedule.warps, num_stages=choice.schedule.stages)
    return Plan(choice.module.launch, options, float(K**-0.5 if scale is None else scale), None)


def _remember(key: tuple, plan: Plan, compiled, tensors: tuple, lower_bound: float | None, pad_slot: int) -> None:
    """Keep the plan, and with it, where Triton allows, how to repeat the launch that has just been made."""
    if len(_MEMO) >= MEMO_ENTRIES:
        _MEMO.clear()
    q, k, v, g, beta, _, _, out, h0, ht, cu_seqlens, state_indices, _, _ = tensors
    module = sys.modules[plan.launch.__module__]
    rest = module.scalars(q, k, v, g, beta, out, h0, ht, state_indices, plan.scale, lower_bound, pad_slot) + CONSTANTS
    seqs = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    repeat = again(compiled, q.get_device(), module.programs(seqs, v.shape[2]), addresses(*tensors), rest)
    _MEMO[key] = plan._replace(repeat=repeat)


def _check(
    q, k, v, g, beta, A_log, dt_bias, out, initial_state, final_state, cu_seqlens, state_indices, num_accepted, has_initial,
    scale, lower_bound, pad_slot, raw_gate, l2norm, beta_sigmoid, neg_eigval, v_first, *, values: bool = True,
) -> None:
    B, T, _H, K, HV, V = check_qkv(q, k, v, g, beta)
    N = B
    if cu_seqlens is not None:
        check_boundaries(cu_seqlens, B, T, q.device, values=values)
        N = cu_seqlens.shape[0] - 1
    check_flags(A_log, dt_bias, lower_bound, raw_gate, beta_sigmoid, neg_eigval)
    check_number("scale", scale)
    if raw_gate:
        check_gate(A_log, dt_bias, lower_bound, HV, K, q.device)
    check_float("out", out, q.device, B, T, HV, V)
    check_dtype("out", out, q.dtype)
    check_rows_contiguous("out", out)
    inner = (HV, V, K) if v_first else (HV, K, V)
    if initial_state is not None:
        check_states("initial_state", initial_state, q.device, N, *inner)
    if state_indices is None:
        if num_accepted is not None:
            refuse("num_accepted_tokens", "a tensor without state_indices", "both", "It selects a column of that table.")
        check_vector("has_initial_state", has_initial, q.device, N, torch.bool)
        return
    check_states("state_pool", final_state, q.device, "slots", *inner)
    check_index_table(state_indices, num_accepted, has_initial, N, q.device)
    if cu_seqlens is None and state_indices.dim() == 2 and state_indices.shape[1] < T:
        refuse("state_indices", f"{state_indices.shape[1]} columns", f"one for each of the T = {T} tokens")


@torch.no_grad()
def _cpu(
    q, k, v, g, beta, A_log, dt_bias, out, initial_state, final_state, cu_seqlens, state_indices, num_accepted, has_initial,
    scale, lower_bound, pad_slot, raw_gate, l2norm, beta_sigmoid, neg_eigval, v_first,
) -> None:
    """The CPU path: the oracle in fp64, its results rounded into out and the states."""
    options = dict(
        A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, scale=scale, cu_seqlens=cu_seqlens,
        use_gate_in_kernel=raw_gate, use_qk_l2norm_in_kernel=l2norm, use_beta_sigmoid_in_kernel=beta_sigmoid,
        allow_neg_eigval=neg_eigval, state_v_first=v_first,
    )
    if state_indices is not None:
        slots = torch.where(state_indices < final_state.shape[0], state_indices, -1)
        out.copy_(oracle.recurrent_kda_pool(
            q, k, v, g, beta, final_state, slots, num_accepted_tokens=num_accepted, has_initial_state=has_initial,
            pad_slot=pad_slot, **options))
        return
    if initial_state is not None and has_initial is not None:
        initial_state = torch.where(has_initial[:, None, None, None], initial_state, 0)
    o, final = oracle.recurrent_kda(
        q, k, v, g, beta, initial_state=initial_state, output_final_state=final_state is not None, **options)
    out.copy_(o)
    if final_state is not None:
        final_state.copy_(final)


def _fake(*arguments) -> None:
    if arguments[-1]:
        _check(*arguments[:-1], values=False)


_OP = register(
    "fused_recurrent_kda_(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor(a!) out, Tensor? initial_state, Tensor(b!)? final_state, Tensor? cu_seqlens, Tensor? state_indices, "
    "Tensor? num_accepted_tokens, Tensor? has_initial_state, float? scale, float? lower_bound, int pad_slot, "
    "bool use_gate_in_kernel, bool use_qk_l2norm_in_kernel, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, "
    "bool state_v_first, bool checked) -> ()", _run, _fake)

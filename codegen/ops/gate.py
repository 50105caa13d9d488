"""The gate op: raw gate -> log decay or its chunk-local cumulative sums, raw beta -> strength; differentiable."""

from __future__ import annotations

import torch

from kdagen import dispatch
from kdagen import reference as oracle
from kdagen.errors import refuse
from kdagen.families.gate import MAX_K
from kdagen.ops._again import addresses, again, misaligned
from kdagen.ops._common import (
    DTYPE_NAMES,
    FLOATS,
    MEMO_ENTRIES,
    check_device,
    check_dtype,
    check_interpretable,
    check_shape,
    check_tensors,
    check_within,
    on_device,
    register,
    runs_kernels,
    target_of,
)
from kdagen.ops._decode_checks import (
    INTEGERS,
    check_boundaries,
    check_chunk_size,
    check_float,
    check_gate,
    check_rows_contiguous,
)
from kdagen.spec import Problem, Spec

_MEMO = dispatch.memo("kda_gate")
_CHOICES = dispatch.memo("kda_gate choices")


def kda_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    *,
    lower_bound: float | None = None,
    chunk_size: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    allow_neg_eigval: bool = False,
    out: torch.Tensor | None = None,
    checked: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Log decay [B, T, HV, K] fp32 of a raw gate; with ``beta`` (log decay, strength [B, T, HV] fp32).

    With x = g + dt_bias: -exp(A_log) * softplus(x), or, with ``lower_bound`` < 0, lower_bound * sigmoid(exp(A_log) * x).
    g [B, T, HV, K] of bf16, fp16 or fp32, K up to 1024; A_log [HV] (None only with lower_bound: a factor 1), dt_bias
    [HV, K] or [HV * K] or None. beta [B, T, HV]: raw logit; its strength is sigmoid(beta), twice that with
    ``allow_neg_eigval``. g and beta may be slices of wider tensors (no copy is made) as long as K has stride 1 in g.

    Without ``chunk_size`` the decay is in natural log units. With it (16, 32, 64 or 128) the result is the inclusive
    cumulative sum over the tokens of a chunk, in log2 units; chunks begin at the start of each sequence: each batch row,
    or, with B = 1, the sequences of ``cu_seqlens`` [N+1], whose chunks ``chunk_indices`` [NT, 2] lists as
    prepare_chunk_metadata_device does (same integer dtype or not; rows of -1 are passed over). On a GPU the values are not
    checked, as that would wait for the device: tokens of no listed chunk are not written, boundaries are clamped to 0..T.

    ``out``: a buffer [B, T, HV, K] fp32 for the decay, K with stride 1. ``checked=False`` skips the checks of a call
    whose shapes, strides and dtypes are new; known ones are never checked again on a GPU.
    Differentiable in g, A_log, dt_bias and beta without chunk_size and out.
    Raises ArgumentError (a ValueError), ArgumentTypeError (a TypeError) or Unsupported. Formula: arXiv 2510.26692.
    """
    if torch.is_grad_enabled() and _wants_gradient(g, A_log, dt_bias, beta):
        if chunk_size is not None or out is not None:
            refuse("chunk_size" if out is None else "out", chunk_size if out is None else "a buffer",
                   "None, as a gradient is wanted", "Call it under torch.no_grad(), or sum the decay with torch.cumsum.")
        decay, strength = _Differentiable.apply(g, A_log, dt_bias, beta, lower_bound, allow_neg_eigval, checked)
        return decay if beta is None else (decay, strength)
    if chunk_size == 0:
        refuse("chunk_size", 0, "None for the decay itself, or a chunk size")
    if out is None:
        out = torch.empty(g.shape, dtype=torch.float32, device=g.device)
    strength = None if beta is None else torch.empty(beta.shape, dtype=torch.float32, device=g.device)
    run = _OP if torch.compiler.is_compiling() else _run
    run(g, A_log, dt_bias, out, beta, strength, cu_seqlens, chunk_indices, lower_bound, chunk_size or 0, allow_neg_eigval,
        checked)
    return out if beta is None else (out, strength)


def _wants_gradient(g, A_log, dt_bias, beta) -> bool:
    try:
        return (g.requires_grad or (A_log is not None and A_log.requires_grad)
                or (dt_bias is not None and dt_bias.requires_grad) or (beta is not None and beta.requires_grad))
    except AttributeError:
        check_tensors(("g", "A_log", "dt_bias", "beta"), (g, A_log, dt_bias, beta))
        raise


class _Differentiable(torch.autograd.Function):
    """The op with its gradients (docs/kda.md): the forward launches the kernel, the backward is plain torch, fp32."""

    @staticmethod
    def forward(ctx, g, A_log, dt_bias, beta, lower_bound, allow_neg_eigval, checked):
        ctx.save_for_backward(g, A_log, dt_bias, beta)
        ctx.lower_bound, ctx.scale = lower_bound, 2.0 if allow_neg_eigval else 1.0
        with torch.no_grad():
            result = kda_gate(g.detach(), A_log, dt_bias, lower_bound=lower_bound, beta=beta, checked=checked,
                              allow_neg_eigval=allow_neg_eigval)
        return (result, None) if beta is None else result

    @staticmethod
    def backward(ctx, d_decay, d_strength):
        g, A_log, dt_bias, beta = ctx.saved_tensors
        found = oracle.kda_gate_backward(d_decay, g, A_log, dt_bias, ctx.lower_bound, torch.float32)
        found = [None if d is None else d.to(t.dtype) for d, t in zip(found, (g, A_log, dt_bias))]
        d_beta = None
        if beta is not None:
            s = torch.sigmoid(beta.float())
            d_beta = (d_strength * ctx.scale * s * (1 - s)).to(beta.dtype)
        return *found, d_beta, None, None, None


def _run(g, A_log, dt_bias, out, beta, strength, cu_seqlens, chunk_indices, lower_bound, chunk_size, neg_eigval, checked):
    """The op itself: writes out and, unless beta is None, strength."""
    try:
        key = (
            g.shape, g.stride(), g.dtype, g.get_device(), out.shape, out.stride(), out.dtype, out.get_device(),
            *((None,) if A_log is None else (A_log.shape, A_log.stride(), A_log.dtype, A_log.get_device())),
            *((None,) if dt_bias is None else (dt_bias.shape, dt_bias.stride(), dt_bias.dtype, dt_bias.get_device())),
            *((None,) if beta is None else (beta.shape, beta.stride(), beta.dtype, beta.get_device())),
            *((None,) if not chunk_size or cu_seqlens is None else (_table(cu_seqlens), _table(chunk_indices))),
            lower_bound, chunk_size, neg_eigval,
        )
    except AttributeError:
        check_tensors(("g", "out", "A_log", "dt_bias", "beta", "cu_seqlens", "chunk_indices"),
                      (g, out, A_log, dt_bias, beta, cu_seqlens, chunk_indices))
        raise
    plan = _MEMO.get(key)
    known = plan is not None and g.is_cuda
    if not known:
        if checked:
            _check(g, A_log, dt_bias, out, beta, cu_seqlens, chunk_indices, lower_bound, chunk_size)
        if not runs_kernels(g):
            return _cpu(g, A_log, dt_bias, out, beta, strength, cu_seqlens, lower_bound, chunk_size, neg_eigval)
        plan = _plan(g, out, beta, chunk_indices, lower_bound, chunk_size)
    launch, kept, warps, stages, bound, repeat = plan
    tables = (cu_seqlens, chunk_indices) if chunk_size else ()
    scale = 2.0 if neg_eigval else 1.0
    with on_device(g):
        if known and repeat is not None:
            pointers = addresses(g, A_log, dt_bias, out, beta, strength, *tables)
            if not misaligned(pointers) and repeat.launch(pointers):
                return
        compiled = launch(g, A_log, dt_bias, bound, out, beta, strength, scale, *tables,
                          kept=kept, num_warps=warps, num_stages=stages)
    if not known:
        if len(_MEMO) >= MEMO_ENTRIES:
            _MEMO.clear()
        programs, T, _, strides = kept
        repeat = again(compiled, g.get_device(), programs, addresses(g, A_log, dt_bias, out, beta, strength, *tables),
                       (bound, scale, T, *strides, None))
        _MEMO[key] = *plan[:-1], repeat


def _table(tensor: torch.Tensor | None):
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())


def _plan(g, out, beta, chunk_indices, lower_bound, chunk_size) -> tuple:
    """(launch, its layout, warps, stages, lower_bound, how to repeat it): all that calls with the same layouts share."""
    check_interpretable(g.dtype)
    B, T, HV, K = g.shape
    key = (g.dtype, K, chunk_size, (B * T * HV).bit_length(), g.get_device())
    choice = _CHOICES.get(key)
    if choice is None:
        target = target_of(g.get_device())
        spec = Spec.make("gate", chunk=chunk_size, k=K, dtype=DTYPE_NAMES[g.dtype])
        # a power of two of tokens x heads stands for all of its bucket, so that the choice does not depend on who came first
        choice = _CHOICES[key] = dispatch.pick(spec, Problem(1 << (B * T * HV).bit_length() >> 1, 1, 1), target)
    kept = choice.module.layout(g, out, beta, *((chunk_indices,) if chunk_size else ()))
    bound = None if lower_bound is None else float(lower_bound)
    return choice.module.launch, kept, choice.schedule.warps, choice.schedule.stages, bound, None


def _check(g, A_log, dt_bias, out, beta, cu_seqlens, chunk_indices, lower_bound, chunk_size) -> None:
    check_dtype("g", g, *FLOATS)
    if g.dim() != 4:
        check_shape("g", g, "B", "T", "HV", "K")
    B, T, HV, K = g.shape
    check_rows_contiguous("g", g)
    check_within("g", K, MAX_K, "K")
    check_gate(A_log, dt_bias, lower_bound, HV, K, g.device)
    if beta is not None:
        check_float("beta", beta, g.device, B, T, HV)
    check_shape("out", out, B, T, HV, K)
    check_dtype("out", out, torch.float32)
    check_device("out", out, g.device)
    check_rows_contiguous("out", out)
    if not chunk_size:
        return
    check_chunk_size(chunk_size, ", or None for the decay itself")
    if (cu_seqlens is None) != (chunk_indices is None):
        refuse("chunk_indices" if cu_seqlens is not None else "cu_seqlens", "None beside the other",
               "both cu_seqlens and chunk_indices, or neither",
               f"Build the table: kdagen.prepare_chunk_metadata_device(cu_seqlens, cu_seqlens_cpu, {chunk_size})[0].")
    if cu_seqlens is not None:
        check_boundaries(cu_seqlens, B, T, g.device, values=True)
        check_dtype("chunk_indices", chunk_indices, *INTEGERS)
        check_device("chunk_indices", chunk_indices, g.device)
        check_shape("chunk_indices", chunk_indices, "NT", 2)
        if not chunk_indices.is_contiguous():
            refuse("chunk_indices", f"strides {tuple(chunk_indices.stride())}", "a contiguous tensor",
                   "Pass chunk_indices.contiguous().")


def _cpu(g, A_log, dt_bias, out, beta, strength, cu_seqlens, lower_bound, chunk_size, neg_eigval) -> None:
    decay = oracle.kda_gate(g, A_log, dt_bias, lower_bound)
    out.copy_(oracle.chunk_cumsum(decay, chunk_size, cu_seqlens) if chunk_size else decay)
    if beta is not None:
        strength.copy_(oracle.kda_beta(beta, neg_eigval))


_OP = register(
    "kda_gate(Tensor g, Tensor? A_log, Tensor? dt_bias, Tensor(a!) out, Tensor? beta, Tensor(b!)? strength, "
    "Tensor? cu_seqlens, Tensor? chunk_indices, float? lower_bound, int chunk_size, bool allow_neg_eigval, bool checked)"
    " -> ()",
    _run,
    lambda *arguments: None,
)

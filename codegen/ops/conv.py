"""The short causal convolution: packed prompts (causal_conv1d) and decode steps on a pool (causal_conv1d_update)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from kdagen import dispatch
from kdagen.errors import refuse
from kdagen.ops._common import (
    DTYPE_NAMES,
    MEMO_ENTRIES,
    check_interpretable,
    layouts,
    on_device,
    register,
    runs_kernels,
    target_of,
)
from kdagen.ops._conv_checks import activation_flag, check_data, check_pool, check_schedule, check_update_rows
from kdagen.ops._conv_cpu import batched, run_prompts, run_steps
from kdagen.ops._decode_checks import check_boundaries
from kdagen.spec import Problem, Spec

_LAYOUTS = dispatch.memo("conv layouts")
_PLANS = dispatch.memo("conv plans")
_PROMPTS = ("x", "weight", "bias", "out", "cu_seqlens", "conv_states", "cache_indices", "has_initial_state")
_STEPS = ("x", "conv_states", "weight", "bias", "out", "query_start_loc", "cache_indices", "num_accepted_tokens",
          "has_initial_state")


class Plan(NamedTuple):
    """What runs for a family, dtype, width, device and size bucket."""

    launch: object  # the chosen module's launch
    block: int      # tokens a program takes (prefill)
    warps: int
    stages: int


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
    cu_seqlens: torch.Tensor | None = None,
    schedule: Mapping | None = None,
    block_m: int | None = None,
    conv_states: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | bool | None = None,
    pad_slot: int = -1,
    out: torch.Tensor | None = None,
    checked: bool = True,
) -> torch.Tensor:
    """Depthwise causal convolution of whole prompts: y[t, d] = act(bias[d] + sum_w weight[d, w] x[t - W + 1 + w, d]).

    Tokens. x [B, T, D] (B sequences), or with ``cu_seqlens`` [N + 1] x [1, T, D] or [T, D]: N packed sequences. bf16, fp16
    or fp32; D is any number of channels (q|k|v side by side); rows may be strided (a slice of a fused projection), channels
    contiguous. weight [D, W], W = 2, 3, 4, and bias [D] of any float dtype; activation "silu" or None. Sums are fp32, in
    one order whatever the block: y does not depend on schedule, batch or block to the bit. Returns y, of x's shape and
    dtype, in ``out`` if given (which must not be x). Rows of x after the last boundary are not written.

    Schedule: what ``build_conv1d_chunk_schedule`` makes of the same boundaries for blocks of ``block_m`` >= W - 1 tokens
    (taken from its key "block_m" if it has one). ``tot`` may be an upper bound, with -1 in the unused end of ``batch_ptr``.
    Without one, each program finds its tokens in ``cu_seqlens``: no table, no copy, safe in a captured graph.

    States. ``conv_states`` [slots, at least W - 1, D], channels contiguous, changed in place: columns 0..W-2 hold the W - 1
    inputs before a sequence, oldest first, and afterwards its last W - 1 inputs (old ones included where it is shorter);
    further columns are left alone. Sequence n uses line ``cache_indices``[n] (int32 or int64 [N] of any stride, or a table
    [N, columns]: its column 0), or line n without it; two sequences must not share a line. ``has_initial_state``, [N] bool
    or one bool for all, must be given with conv_states: False starts from zeros and does not read the line.
    A slot that is ``pad_slot``, negative or outside the pool is padding: never read, never written, and y is zero on all
    its tokens. Empty sequences leave their line as it is.

    Values of tensors on a GPU are not checked, as that would wait for the device: boundaries are clamped to 0..T.
    ``checked=False`` skips the checks of a call whose shapes, strides and dtypes are new; known ones are never checked
    again. Raises ArgumentError (a ValueError) or ArgumentTypeError (a TypeError). Not differentiable.
    """
    silu = activation_flag(activation)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tables = (None, None, -1)
    if schedule is not None:
        if checked:
            check_schedule(schedule, block_m, cu_seqlens, x.device)
        tables = schedule["batch_ptr"], schedule["token_chunk_offset_ptr"], schedule["tot"]
        block_m = schedule.get("block_m", block_m)
    if conv_states is None:
        if has_initial_state is True:
            refuse("has_initial_state", "True without conv_states", "both", "The lines it speaks of are in conv_states.")
    elif has_initial_state is None:
        refuse("has_initial_state", "None beside conv_states", "a bool tensor [N], or True or False for all sequences",
               "Fresh prompts must not continue what a slot held before.")
    flag = has_initial_state if isinstance(has_initial_state, bool) else has_initial_state is not None
    has = None if isinstance(has_initial_state, bool) else has_initial_state
    arguments = (x, weight, bias, out, cu_seqlens, *tables, block_m or 0, conv_states, cache_indices, has, flag, pad_slot,
                 silu, checked)
    if torch.compiler.is_compiling():
        _OP(*arguments)
    else:
        _run(*arguments)
    return out


def _run(x, weight, bias, out, cu_seqlens, batch_ptr, block_ptr, tot, block_m, pool, indices, has, initial, pad_slot, silu,
         checked) -> None:
    tensors = (x, weight, bias, out, cu_seqlens, pool, indices, has)
    key = "prefill", layouts(_PROMPTS, tensors), block_m
    if checked and out.data_ptr() == x.data_ptr() and x.numel():
        refuse("out", "x itself", "a buffer of its own", "A block's history is read after its neighbour was written.")
    plan = _LAYOUTS.get(key)
    if plan is None or not x.is_cuda:
        if checked:
            _check(x, weight, bias, out, cu_seqlens, block_m, pool, indices, has)
        if not runs_kernels(x):
            return run_prompts(x, weight, bias, out, cu_seqlens, pool, indices, has, initial, pad_slot, silu)
        seqs = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        plan = _remember(key, _plan("conv_prefill", x, weight, seqs))
    if x.dim() == 2:
        x, out = x.unsqueeze(0), out.unsqueeze(0)
    if indices is not None and indices.dim() == 2:
        indices = indices[:, 0]
    rows, tokens, dim = x.shape
    block = block_m or plan.block
    seqs = rows
    if cu_seqlens is None:
        programs = rows * -(-tokens // block)
    else:
        seqs = cu_seqlens.shape[0] - 1
        programs = tot if batch_ptr is not None else tokens // block + seqs if seqs and tokens else 0
    if programs and dim:
        with on_device(x):
            plan.launch(x, weight, bias, out, cu_seqlens, batch_ptr, block_ptr, pool, indices, has, seqs, tokens, programs,
                        pad_slot, silu=silu, initial=initial, block_m=block, num_warps=plan.warps, num_stages=plan.stages)


def causal_conv1d_update(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
    cache_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    pad_slot: int = -1,
    out: torch.Tensor | None = None,
    checked: bool = True,
) -> torch.Tensor:
    """One decode step of the short convolution, plain or speculative; ``conv_states`` changes in place. Returns y.

    x [N, D] or [N, T, D], or with ``query_start_loc`` [N + 1] the packed tokens [tokens, D] or [1, tokens, D]; rows may be
    strided, channels are contiguous; bf16, fp16 or fp32. weight [D, W], W = 2, 3, 4, and bias [D] of any float dtype;
    activation "silu" or None. y has x's shape and dtype and may be x itself (``out=x``); the sums are those of
    ``causal_conv1d``, to the bit.

    ``conv_states`` [slots, W - 1 + k, D], channels contiguous, one line a row: ``cache_indices``[n], int32 or int64 [N] of
    any stride, or a table [N, columns], of which column 0 counts; line n without it. Two rows must not share a line.
    - Plain (no num_accepted_tokens): columns 0..W-2 are the W - 1 inputs before the row; afterwards its last W - 1 inputs.
    - Speculative: ``num_accepted_tokens`` [N] belongs to the last step and counts its bonus token, 1..1+k; values outside
      are clamped in the kernel. The history is the W - 1 columns from accepted - 1 on; afterwards the line is the history
      without its oldest input, then all new tokens (those after column W - 2 + k are not kept).
    ``has_initial_state`` [N] bool: False takes zeros for the history and does not read the line.
    A slot that is ``pad_slot``, negative or outside the pool is padding: never read, never written, and y is zero on all
    its tokens. Rows without tokens leave their line; tokens after the last boundary are not written.

    Values of tensors on a GPU are not checked, as that would wait for the device: boundaries are clamped to 0..tokens.
    ``checked=False`` skips the checks of a call whose shapes, strides and dtypes are new; known ones are never checked
    again. Raises ArgumentError (a ValueError) or ArgumentTypeError (a TypeError).
    """
    silu = activation_flag(activation)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    arguments = (x, conv_states, weight, bias, out, query_start_loc, cache_indices, num_accepted_tokens, has_initial_state,
                 pad_slot, silu, checked)
    if torch.compiler.is_compiling():
        _UPDATE_OP(*arguments)
    else:
        _run_update(*arguments)
    return out


def _run_update(x, pool, weight, bias, out, boundaries, indices, accepted, has, pad_slot, silu, checked) -> None:
    tensors = (x, pool, weight, bias, out, boundaries, indices, accepted, has)
    key = "update", layouts(_STEPS, tensors)
    plan = _LAYOUTS.get(key)
    if plan is None or not x.is_cuda:
        if checked:
            _check_update(x, pool, weight, bias, out, boundaries, indices, accepted, has)
        if not runs_kernels(x):
            return run_steps(x, pool, weight, bias, out, boundaries, indices, accepted, has, pad_slot, silu)
        seqs = x.shape[0] if boundaries is None else boundaries.shape[0] - 1
        plan = _remember(key, _plan("conv_update", x, weight, seqs))
    x, out = batched(x, boundaries), batched(out, boundaries)
    if indices is not None and indices.dim() == 2:
        indices = indices[:, 0]
    seqs = x.shape[0] if boundaries is None else boundaries.shape[0] - 1
    if seqs and x.numel():
        with on_device(x):
            plan.launch(x, weight, bias, out, boundaries, pool, indices, has, accepted, seqs, pad_slot, silu=silu,
                        num_warps=plan.warps, num_stages=plan.stages)


def _remember(key: tuple, plan: Plan) -> Plan:
    """Calls of this layout have passed the checks, and run this plan."""
    if len(_LAYOUTS) >= MEMO_ENTRIES:
        _LAYOUTS.clear()
    _LAYOUTS[key] = plan
    return plan


def _plan(family: str, x, weight, seqs: int) -> Plan:
    """Dispatch's choice; one for all sizes of a bucket, so that a new length does not cost a look-up in the tables."""
    width, dim = weight.shape[1], x.shape[-1]
    tokens = x.numel() // max(1, dim)
    key = (family, x.dtype, width, x.get_device(), tokens > seqs, tokens.bit_length(), seqs.bit_length(), dim.bit_length())
    plan = _PLANS.get(key)
    if plan is None:
        check_interpretable(x.dtype)
        spec = Spec.make(family, dtype=DTYPE_NAMES[x.dtype], width=width)
        target = target_of(x.get_device())
        choice = dispatch.pick(spec, Problem(tokens, seqs, dim), target)
        schedule = choice.schedule
        plan = Plan(choice.module.launch, schedule.block.get("bt", 0), schedule.warps, schedule.stages)
        _PLANS[key] = plan
    return plan


def _check(x, weight, bias, out, cu_seqlens, block_m, pool, indices, has, *, values: bool = True) -> None:
    B, T, D, W = check_data(x, weight, bias, out, packed=cu_seqlens is not None)
    if cu_seqlens is not None:
        check_boundaries(cu_seqlens, B, T, x.device, values=values)
    if block_m and block_m < W - 1:
        refuse("block_m", block_m, f"at least the width - 1 = {W - 1} rows of history")
    check_pool(pool, indices, has, B if cu_seqlens is None else cu_seqlens.shape[0] - 1, W, D, x.device)


def _check_update(x, pool, weight, bias, out, boundaries, indices, accepted, has, *, values: bool = True) -> None:
    B, T, D, W = check_data(x, weight, bias, out, packed=boundaries is not None, decode=True)
    N = B
    if boundaries is not None:
        check_boundaries(boundaries, B, T, x.device, values=values, name="query_start_loc")
        N = boundaries.shape[0] - 1
    check_pool(pool, indices, has, N, W, D, x.device)
    if boundaries is not None:
        T = int(boundaries.diff().max()) if N and values and boundaries.device.type == "cpu" else None
    check_update_rows(accepted, N, T, pool.shape[1] - W + 1, x.device)


def _fake(x, weight, bias, out, cu_seqlens, batch_ptr, block_ptr, tot, block_m, pool, indices, has, initial, pad_slot, silu,
          checked) -> None:
    if checked:
        _check(x, weight, bias, out, cu_seqlens, block_m, pool, indices, has, values=False)


def _fake_update(*arguments) -> None:
    if arguments[-1]:
        x, pool, weight, bias, out, boundaries, indices, accepted, has, *_ = arguments
        _check_update(x, pool, weight, bias, out, boundaries, indices, accepted, has, values=False)


_OP = register(
    "causal_conv1d_(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, Tensor? cu_seqlens, Tensor? batch_ptr, "
    "Tensor? token_chunk_offset_ptr, SymInt tot, SymInt block_m, Tensor(b!)? conv_states, Tensor? cache_indices, "
    "Tensor? has_initial_state, bool initial, int pad_slot, bool silu, bool checked) -> ()", _run, _fake)
_UPDATE_OP = register(
    "causal_conv1d_update_(Tensor x, Tensor(a!) conv_states, Tensor weight, Tensor? bias, Tensor(b!) out, "
    "Tensor? query_start_loc, Tensor? cache_indices, Tensor? num_accepted_tokens, Tensor? has_initial_state, "
    "int pad_slot, bool silu, bool checked) -> ()", _run_update, _fake_update)

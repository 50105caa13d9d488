"""The short causal convolution: packed prompts (causal_conv1d) and decode steps on a pool (causal_conv1d_update)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from kdagen import devices, dispatch
from kdagen.errors import refuse
from kdagen.ops._common import DTYPE_NAMES, check_interpretable, on_device, register, runs_kernels
from kdagen.ops._conv_checks import activation_flag, check_data, check_pool, check_schedule, check_update_rows
from kdagen.ops._decode_checks import check_boundaries
from kdagen.reference import conv as oracle
from kdagen.spec import Problem, Spec

_PREFILL = dispatch.memo("causal_conv1d")
_UPDATE = dispatch.memo("causal_conv1d_update")


class Plan(NamedTuple):
    """What runs for a dtype, width, device and size bucket."""

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
    ``checked=False`` skips all checks. Raises ArgumentError (a ValueError) or ArgumentTypeError (a TypeError).
    Not differentiable.
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
    if conv_states is not None and has_initial_state is None:
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
    if checked:
        _check(x, weight, bias, out, cu_seqlens, block_m, pool, indices, has)
    if x.dim() == 2:
        x, out = x.unsqueeze(0), out.unsqueeze(0)
    if indices is not None and indices.dim() == 2:
        indices = indices[:, 0]
    if not runs_kernels(x):
        return _cpu(x, weight, bias, out, cu_seqlens, pool, indices, has, initial, pad_slot, silu)
    rows, tokens, dim = x.shape
    seqs = rows if cu_seqlens is None else cu_seqlens.shape[0] - 1
    key = (x.dtype, weight.shape[1], x.get_device(), (rows * tokens).bit_length(), seqs.bit_length(), dim.bit_length())
    plan = _PREFILL.get(key)
    if plan is None:
        plan = _PREFILL[key] = _plan("conv_prefill", x, weight, rows * tokens, seqs)
    block = block_m or plan.block
    if batch_ptr is not None:
        programs = tot
    elif cu_seqlens is not None:
        programs = tokens // block + seqs if seqs and tokens else 0
    else:
        programs = rows * -(-tokens // block)
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
    ``checked=False`` skips all checks. Raises ArgumentError (a ValueError) or ArgumentTypeError (a TypeError).
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
    if checked:
        _check_update(x, pool, weight, bias, out, boundaries, indices, accepted, has)
    if x.dim() == 2:  # [N, D] is [N, 1, D]; packed tokens [tokens, D] are [1, tokens, D]
        axis = 1 if boundaries is None else 0
        x, out = x.unsqueeze(axis), out.unsqueeze(axis)
    if indices is not None and indices.dim() == 2:
        indices = indices[:, 0]
    if not runs_kernels(x):
        return _cpu_update(x, pool, weight, bias, out, boundaries, indices, accepted, has, pad_slot, silu)
    rows, tokens, dim = x.shape
    seqs = rows if boundaries is None else boundaries.shape[0] - 1
    total = rows * tokens
    key = (x.dtype, weight.shape[1], x.get_device(), total > seqs, total.bit_length(), seqs.bit_length(), dim.bit_length())
    plan = _UPDATE.get(key)
    if plan is None:
        plan = _UPDATE[key] = _plan("conv_update", x, weight, total, seqs)
    if total and seqs and dim:
        with on_device(x):
            plan.launch(x, weight, bias, out, boundaries, pool, indices, has, accepted, seqs, pad_slot, silu=silu,
                        num_warps=plan.warps, num_stages=plan.stages)


def _plan(family: str, x, weight, tokens: int, seqs: int) -> Plan:
    check_interpretable(x.dtype)
    spec = Spec.make(family, dtype=DTYPE_NAMES[x.dtype], width=weight.shape[1])
    target = devices.of_index(x.get_device()) if x.is_cuda else devices.named("h200")
    choice = dispatch.pick(spec, Problem(tokens, seqs, x.shape[-1]), target)
    schedule = choice.schedule
    return Plan(choice.module.launch, schedule.block.get("bt", 0), schedule.warps, schedule.stages)


def _check(x, weight, bias, out, cu_seqlens, block_m, pool, indices, has, *, values: bool = True) -> None:
    B, T, D, W = check_data(x, weight, bias, out, packed=cu_seqlens is not None)
    if cu_seqlens is not None:
        check_boundaries(cu_seqlens, B, T, x.device, values=values)
    if block_m and block_m < W - 1:
        refuse("block_m", block_m, f"at least the width - 1 = {W - 1} rows of history")
    if values and out.data_ptr() == x.data_ptr() and out.numel():
        refuse("out", "x itself", "a buffer of its own", "A block's history is read after its neighbour was written.")
    check_pool(pool, indices, has, B if cu_seqlens is None else cu_seqlens.shape[0] - 1, W, D, x.device)


def _check_update(x, pool, weight, bias, out, boundaries, indices, accepted, has, *, values: bool = True) -> None:
    B, T, D, W = check_data(x, weight, bias, out, packed=boundaries is not None, decode=True)
    N = B
    if boundaries is not None:
        check_boundaries(boundaries, B, T, x.device, values=values, name="query_start_loc")
        N = boundaries.shape[0] - 1
    check_pool(pool, indices, has, N, W, D, x.device)
    check_update_rows(accepted, N, None if boundaries is not None else T, pool.shape[1] - W + 1, x.device)


def _lines(pool, indices, rows: int, pad_slot: int) -> torch.Tensor:
    """[rows] int64: the line of each sequence, -1 for padding."""
    slots = torch.arange(rows) if indices is None else indices.long()
    return torch.where((slots < 0) | (slots == pad_slot) | (slots >= pool.shape[0]), -1, slots)


def _cpu(x, weight, bias, out, cu_seqlens, pool, indices, has, initial, pad_slot, silu) -> None:
    """The CPU path: the oracle in fp64, its results rounded into out and the lines."""
    W, activation = weight.shape[1], "silu" if silu else None
    if pool is None:
        out.copy_(oracle.causal_conv1d(x, weight, bias, activation=activation, cu_seqlens=cu_seqlens)[0])
        return
    lengths = torch.full((x.shape[0],), x.shape[1]) if cu_seqlens is None else cu_seqlens.diff().long()
    slots = _lines(pool, indices, len(lengths), pad_slot)
    known = (slots >= 0) & initial
    if has is not None:
        known &= has
    history = torch.zeros(len(slots), W - 1, x.shape[2], dtype=torch.float64)
    history[known] = pool[slots[known], : W - 1].double()
    y, final = oracle.causal_conv1d(x, weight, bias, initial_state=history, activation=activation, cu_seqlens=cu_seqlens,
                                    output_final_state=True)
    if cu_seqlens is None:
        y[slots < 0] = 0
    else:
        y[0, (slots < 0).repeat_interleave(lengths)] = 0
    out.copy_(y)
    stored = (slots >= 0) & (lengths > 0)
    pool[slots[stored], : W - 1] = final[stored].to(pool.dtype)


def _cpu_update(x, pool, weight, bias, out, boundaries, indices, accepted, has, pad_slot, silu) -> None:
    rows = x.shape[0] if boundaries is None else boundaries.shape[0] - 1
    out.copy_(oracle.causal_conv1d_update(
        x, pool, weight, bias, state_indices=_lines(pool, indices, rows, pad_slot), num_accepted_tokens=accepted,
        has_initial_state=has, cu_seqlens=boundaries, activation="silu" if silu else None))


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

"""What the convolution ops refuse, and in which words."""

from __future__ import annotations

import torch

from kdagen.errors import ArgumentTypeError, Unsupported, refuse
from kdagen.ops._common import FLOATS, check_device, check_dtype, check_shape
from kdagen.ops._decode_checks import INTEGERS, check_float, check_rows_contiguous, check_vector

WIDTHS = (2, 3, 4)


def activation_flag(activation: str | None) -> bool:
    """Whether the sum goes through SiLU (which some call swish)."""
    if activation is not None and activation not in ("silu", "swish"):
        refuse("activation", repr(activation), '"silu" (or its other name "swish") or None')
    return activation is not None


def check_data(x, weight, bias, out, *, packed: bool, decode: bool = False) -> tuple[int, int, int, int]:
    """(B, T, D, W) of a call; [tokens, D] counts as one packed row, or as [N, 1, D] in a decode step."""
    check_dtype("x", x, *FLOATS)
    if x.dim() != 3 and not (x.dim() == 2 and (packed or decode)):
        refuse("x", f"shape {list(x.shape)}", "shape [B, T, D]" + (" or [tokens, D]" if packed or decode else
               ", or packed tokens beside cu_seqlens"))
    check_rows_contiguous("x", x)
    D = x.shape[-1]
    B, T = x.shape[:2] if x.dim() == 3 else (1, x.shape[0]) if packed else (x.shape[0], 1)
    check_float("weight", weight, x.device, D, "W")
    W = weight.shape[1]
    if W not in WIDTHS:
        refuse("weight", f"width {W}", "width 2, 3 or 4", kind=Unsupported)
    if bias is not None:
        check_vector("bias", bias, x.device, D, *FLOATS)
    check_shape("out", out, *x.shape)
    if out.dtype != x.dtype:
        refuse("out", str(out.dtype), f"the dtype of x, {x.dtype}", kind=ArgumentTypeError)
    check_device("out", out, x.device)
    check_rows_contiguous("out", out)
    return B, T, D, W


def check_pool(pool, indices, has, N: int, W: int, D: int, device: torch.device) -> None:
    if pool is None:
        for name, tensor in (("cache_indices", indices), ("has_initial_state", has)):
            if tensor is not None:
                refuse(name, "a tensor without conv_states", "both", "The lines it speaks of are in conv_states.")
        return
    check_float("conv_states", pool, device, "slots", "W - 1 + k", D)
    check_rows_contiguous("conv_states", pool)
    if pool.shape[1] < W - 1:
        refuse("conv_states", f"lines of {pool.shape[1]} columns", f"at least the width - 1 = {W - 1}")
    if indices is None:
        if pool.shape[0] < N:
            refuse("conv_states", f"{pool.shape[0]} lines", f"one for each of the {N} sequences", "Or pass cache_indices.")
    else:
        if indices.dim() not in (1, 2) or indices.shape[0] != N or 0 in indices.shape[1:]:
            refuse("cache_indices", f"shape {list(indices.shape)}", f"shape [{N}], or a table [{N}, columns]")
        check_dtype("cache_indices", indices, *INTEGERS)
        check_device("cache_indices", indices, device)
    check_vector("has_initial_state", has, device, N, torch.bool)


def check_update_rows(accepted, N: int, T: int | None, k: int, device: torch.device) -> None:
    """Refuse accepted counts that are no [N] integers, and rows of T > 1 + k tokens, which a line cannot take back."""
    if accepted is None:
        return
    check_shape("num_accepted_tokens", accepted, N)
    check_dtype("num_accepted_tokens", accepted, *INTEGERS)
    check_device("num_accepted_tokens", accepted, device)
    if T is not None and k < T - 1:
        refuse("conv_states", f"lines with room for k = {k} speculative tokens",
               f"room for the {T - 1} drafts of x's rows: width - 1 + {T - 1} columns")


def check_schedule(schedule, block_m, cu_seqlens, device: torch.device) -> None:
    """Refuse what build_conv1d_chunk_schedule does not make, a schedule whose block size is not known among it."""
    missing = [key for key in ("tot", "batch_ptr", "token_chunk_offset_ptr") if key not in schedule]
    if missing:
        refuse("schedule", f"no {', '.join(missing)}", "the dict of build_conv1d_chunk_schedule")
    if cu_seqlens is None:
        refuse("schedule", "one without cu_seqlens", "both", "The programs look their tokens up in cu_seqlens.")
    own = schedule.get("block_m")
    if own is None and block_m is None:
        refuse("block_m", "None", "the block size that the schedule was built for")
    if own is not None and block_m is not None and own != block_m:
        refuse("block_m", block_m, f"{own}, which the schedule was built for")
    for key in ("batch_ptr", "token_chunk_offset_ptr"):
        table = schedule[key]
        check_dtype(f"schedule[{key!r}]", table, torch.int32)
        check_device(f"schedule[{key!r}]", table, device)
        if table.dim() != 1 or table.shape[0] < schedule["tot"] or (table.shape[0] > 1 and table.stride(0) != 1):
            refuse(f"schedule[{key!r}]", f"shape {list(table.shape)}, strides {tuple(table.stride())}",
                   f"a contiguous vector of at least tot = {schedule['tot']}")

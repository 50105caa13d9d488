"""The metadata and convolution functions of vLLM's linear-attention layers by their names and arguments.

Own implementations with the mended edge cases of ``kdagen.ops``: an empty batch has offsets [0], empty sequences do not
shift the ones behind them, every schedule owns its buffers, and negative or unsorted boundaries are refused.
"""

from __future__ import annotations

import numpy as np
import torch

from kdagen.errors import ArgumentError, ArgumentTypeError, KdagenError, refuse
from kdagen.ops.conv import causal_conv1d
from kdagen.ops.conv import causal_conv1d_update as _conv_update
from kdagen.ops.metadata import build_conv1d_chunk_schedule, prepare_chunk_metadata_device
from kdagen.ops.staging import stage_spec_decode_metadata

__all__ = ["NULL_BLOCK_ID", "PAD_SLOT_ID", "build_conv1d_chunk_schedule", "causal_conv1d_fn", "causal_conv1d_update",
           "compute_causal_conv1d_metadata", "prepare_chunk_metadata_device", "stage_spec_decode_metadata"]

PAD_SLOT_ID = -1
NULL_BLOCK_ID = 0
_TILE_SIZES = (8,)
_LEAST_BUFFER = 1024


class BlockwiseCacheUnsupported(KdagenError, NotImplementedError):
    """Arguments of prefix caching inside the convolution, which kdagen does with checkpoints instead."""


def compute_causal_conv1d_metadata(query_start_loc_p_cpu: torch.Tensor, *, device: torch.device):
    """(nums_dict, batch_ptr, token_chunk_offset_ptr) of host boundaries [N+1], without a synchronising transfer.

    nums_dict[8] has nums [N] and offsetlist (int32) and mlist (int64) on the host, tot and mlist_len, and the two device
    tables, int32, padded with -1 to twice max(1024, programs).
    """
    if query_start_loc_p_cpu.device.type != "cpu":
        refuse("query_start_loc_p_cpu", f"a tensor on {query_start_loc_p_cpu.device}", "the host copy",
               kind=ArgumentTypeError)
    if query_start_loc_p_cpu.dtype not in (torch.int32, torch.int64):
        refuse("query_start_loc_p_cpu", str(query_start_loc_p_cpu.dtype), "torch.int32 or torch.int64",
               "Convert it: query_start_loc_p_cpu.to(torch.int32).", kind=ArgumentTypeError)
    lens = np.diff(query_start_loc_p_cpu.numpy())
    if len(lens) and lens.min() < 0:
        refuse("query_start_loc_p_cpu", f"a length of {lens.min()}", "boundaries that never decrease")
    nums_dict = {}
    for block_m in _TILE_SIZES:
        nums = -(-lens // block_m)
        mlist = np.repeat(np.arange(len(nums)), nums)
        offsets = np.arange(len(mlist)) - np.repeat(np.cumsum(nums) - nums, nums)
        tables = np.full((2, 2 * max(_LEAST_BUFFER, len(mlist))), PAD_SLOT_ID, np.int32)
        tables[0, :len(mlist)], tables[1, :len(mlist)] = mlist, offsets
        tables = torch.from_numpy(tables)
        if torch.device(device).type == "cuda":
            tables = tables.pin_memory()
        batch_ptr, token_chunk_offset_ptr = tables.to(device, non_blocking=True)
        nums_dict[block_m] = {
            "nums": torch.from_numpy(nums), "tot": len(mlist), "mlist": torch.from_numpy(mlist), "mlist_len": len(mlist),
            "offsetlist": torch.from_numpy(offsets.astype(np.int32)), "batch_ptr": batch_ptr,
            "token_chunk_offset_ptr": token_chunk_offset_ptr}
    return nums_dict, batch_ptr, token_chunk_offset_ptr


def _silu(activation) -> str | None:
    if isinstance(activation, bool):
        return "silu" if activation else None
    if activation not in (None, "silu", "swish"):
        refuse("activation", repr(activation), "None, True, 'silu' or 'swish'")
    return "silu" if activation else None


def _refuse_blockwise(**arguments) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise BlockwiseCacheUnsupported(f"{name}: got a value, expected None: states of several cache blocks in one "
                                            "call are not kept. Export them with checkpoints (KDAMetadata.checkpoint).")


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    block_idx_first_scheduled_token: torch.Tensor | None = None,
    block_idx_last_scheduled_token: torch.Tensor | None = None,
    initial_state_idx: torch.Tensor | None = None,
    num_computed_tokens: torch.Tensor | None = None,
    block_size_to_align: int = 0,
    metadata: object | None = None,
    validate_data: bool = False,
    *,
    null_block_id: int = NULL_BLOCK_ID,
) -> torch.Tensor:
    """Convolution of packed prompts, channels first: x [dim, tokens] -> [dim, tokens]; ``conv_states`` changes in place.

    weight [dim, width]; conv_states [lines, dim, at least width - 1], dim contiguous; query_start_loc [batch + 1];
    cache_indices [batch] (line n without it); has_initial_state [batch] bool, None: no sequence has one. ``metadata`` with
    the ``nums_dict`` of ``compute_causal_conv1d_metadata`` or ``build_conv1d_chunk_schedule`` saves the kernel the search
    for its tokens. Lines below 0, ``pad_slot_id`` and ``null_block_id`` (with cache_indices) are padding: neither read nor
    written, output zero.
    """
    _refuse_blockwise(block_idx_first_scheduled_token=block_idx_first_scheduled_token,
                      block_idx_last_scheduled_token=block_idx_last_scheduled_token, initial_state_idx=initial_state_idx,
                      num_computed_tokens=num_computed_tokens)
    nums = getattr(metadata, "nums_dict", None) or {}
    block = next(iter(nums), None)
    schedule = None if block is None else {key: nums[block][key] for key in ("tot", "batch_ptr", "token_chunk_offset_ptr")}
    rows = x.to(conv_states.dtype).transpose(0, 1)
    try:
        out = causal_conv1d(
            rows, weight, bias=bias, activation=_silu(activation), cu_seqlens=query_start_loc, schedule=schedule,
            block_m=block, conv_states=conv_states.transpose(1, 2), cache_indices=cache_indices,
            has_initial_state=False if has_initial_state is None else has_initial_state,
            pad_slot=_reserved(cache_indices, pad_slot_id, null_block_id))
    except ArgumentError:
        _refuse_channels_apart("x", x, 0, "x.t().contiguous().t()")
        _refuse_channels_apart("conv_states", conv_states, 1, "a pool made as [lines, columns, dim], its axes swapped")
        raise
    return out.transpose(0, 1).to(x.dtype)


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int = NULL_BLOCK_ID,
    block_idx_last_scheduled_token: torch.Tensor | None = None,
    initial_state_idx: torch.Tensor | None = None,
    validate_data: bool = False,
    *,
    pad_slot_id: int = PAD_SLOT_ID,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One decode step of the convolution, plain or speculative; ``conv_state`` changes in place. Returns x's shape.

    x [batch, dim], [batch, dim, seqlen], or with ``query_start_loc`` [batch + 1] packed [tokens, dim]; conv_state [lines,
    dim, width - 1 + k], dim contiguous; conv_state_indices [batch] or [batch, columns] (column 0 counts);
    num_accepted_tokens [batch] of the step before. Padding lines as in ``causal_conv1d_fn``. max_query_len is not needed.
    """
    _refuse_blockwise(block_idx_last_scheduled_token=block_idx_last_scheduled_token, initial_state_idx=initial_state_idx)
    rows = x.to(conv_state.dtype)
    if query_start_loc is None and x.dim() == 3:
        rows = rows.transpose(1, 2).contiguous()  # channels of a token side by side, as the kernel reads them
    try:
        y = _conv_update(
            rows, conv_state.transpose(1, 2), weight, bias=bias, activation=_silu(activation),
            cache_indices=conv_state_indices, num_accepted_tokens=num_accepted_tokens, query_start_loc=query_start_loc,
            pad_slot=_reserved(conv_state_indices, pad_slot_id, null_block_id))
    except ArgumentError:
        _refuse_channels_apart("conv_state", conv_state, 1, "a pool made as [lines, columns, dim], its axes swapped")
        raise
    y = (y.transpose(1, 2) if y.dim() == 3 else y).to(x.dtype)
    return y if out is None else out.copy_(y)


def _refuse_channels_apart(name: str, tensor: torch.Tensor, axis: int, instead: str) -> None:
    """Say of a tensor that came channels first what the op says of its transpose."""
    if tensor.dim() == axis + 2 and tensor.shape[axis] > 1 and tensor.stride(axis) != 1:
        refuse(name, f"strides {tuple(tensor.stride())} of shape {list(tensor.shape)}",
               "channels (dim) with stride 1, as vLLM lays them out", f"Pass {instead}.")


def _reserved(indices: torch.Tensor | None, pad_slot_id: int, null_block_id: int) -> int:
    """The one padding value besides the negative ones; without indices line 0 is a line like the others."""
    if indices is None:
        return PAD_SLOT_ID
    if pad_slot_id >= 0 and null_block_id >= 0 and pad_slot_id != null_block_id:
        refuse("pad_slot_id", pad_slot_id, f"a negative value, or null_block_id = {null_block_id}",
               "Negative slots are always padding; one other value can be.")
    return max(pad_slot_id, null_block_id)

"""What the checked builder refuses: batches that contradict themselves. Host arrays and shapes alone are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kdagen.errors import ArgumentTypeError, refuse

if TYPE_CHECKING:
    from kdagen.serving.batch import Batch
    from kdagen.serving.builder import KDAMetadataBuilder

SCHEDULER = "The scheduler's host copies and the device tensors must describe the same step."


def check_batch(builder: KDAMetadataBuilder, batch: Batch, starts: np.ndarray, seq_lens: np.ndarray,
                prefilling: np.ndarray | None, drafts: np.ndarray | None, accepted: torch.Tensor | None) -> None:
    """Refuse a batch whose boundaries, lengths, tables or dtypes do not fit together."""
    rows = len(starts) - 1
    if rows < 0 or starts.ndim != 1:
        refuse("query_start_loc_cpu", f"shape {list(starts.shape)}", "shape [R+1] with R >= 0", SCHEDULER)
    if starts.dtype != np.int32:
        refuse("query_start_loc_cpu", str(starts.dtype), "int32", kind=ArgumentTypeError)
    if starts[0] != 0:
        refuse("query_start_loc_cpu", f"a first entry of {starts[0]}", "0", "Boundaries are those of this step's tokens.")
    if rows and (starts[1:] < starts[:-1]).any():
        row = int((starts[1:] < starts[:-1]).argmax())
        refuse("query_start_loc_cpu", f"{starts[row + 1]} after {starts[row]} (row {row})", "boundaries that never decrease")
    if batch.num_actual_tokens < starts[-1]:
        refuse("num_actual_tokens", batch.num_actual_tokens, f"at least {starts[-1]}, the last boundary", SCHEDULER)
    host = (("seq_lens_cpu_upper_bound", seq_lens), ("is_prefilling_cpu", prefilling),
            ("num_decode_draft_tokens_cpu", drafts))
    for name, array in host:
        if array is not None and array.shape != (rows,):
            refuse(name, f"shape {list(array.shape)}", f"shape [{rows}], one entry for each request", SCHEDULER)
    if prefilling is not None and prefilling.dtype != bool:
        refuse("is_prefilling_cpu", str(prefilling.dtype), "bool", kind=ArgumentTypeError)
    _check_device_tensors(builder, batch, rows, accepted)
    if builder.cache_mode == "align" and batch.aligned_state_indices is None and rows:
        blocks = (max(int(seq_lens.max()), 1) - 1) // builder.block_size + builder.columns
        if batch.block_table.shape[1] < blocks:
            refuse("block_table", f"{batch.block_table.shape[1]} columns", f"at least {blocks} for the longest request",
                   "Each block of block_size tokens has a column, and num_spec columns follow the last.")


def _check_device_tensors(builder: KDAMetadataBuilder, batch: Batch, rows: int, accepted: torch.Tensor | None) -> None:
    device, int32 = builder.device.type, torch.int32
    for name, tensor, size in (("query_start_loc", batch.query_start_loc, rows + 1), ("seq_lens", batch.seq_lens, rows),
                               ("num_accepted_tokens", accepted, rows)):
        if tensor is None:
            continue
        if tensor.dtype != int32:
            refuse(name, str(tensor.dtype), "torch.int32", kind=ArgumentTypeError)
        if tensor.device.type != device:
            refuse(name, f"a tensor on {tensor.device}", f"one on {builder.device}", kind=ArgumentTypeError)
        if tensor.dim() != 1 or tensor.shape[0] != size:
            refuse(name, f"shape {list(tensor.shape)}", f"shape [{size}]", SCHEDULER)
    for name, table, columns in (("block_table", batch.block_table, 1 if builder.cache_mode == "align" else builder.columns),
                                 ("aligned_state_indices", batch.aligned_state_indices, builder.columns)):
        if table is None:
            continue
        if table.dtype != int32:
            refuse(name, str(table.dtype), "torch.int32", kind=ArgumentTypeError)
        if table.device.type != device:
            refuse(name, f"a tensor on {table.device}", f"one on {builder.device}", kind=ArgumentTypeError)
        if table.dim() != 2 or table.shape[0] < rows or table.shape[1] < columns:
            refuse(name, f"shape {list(table.shape)}", f"at least [{rows}, {columns}]",
                   "One row for each request, one column for each candidate state.")

"""What the checked builder refuses: batches that contradict themselves. Host arrays and shapes alone are read.

The usual step passes a dozen comparisons; the words of a refusal are put together only once something is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kdagen.errors import ArgumentTypeError, refuse

if TYPE_CHECKING:
    from kdagen.serving.batch import Batch
    from kdagen.serving.builder import KDAMetadataBuilder

INT32 = torch.int32
SCHEDULER = "The scheduler's host copies and the device tensors must describe the same step."


def check_batch(builder: KDAMetadataBuilder, batch: Batch, starts: np.ndarray, seq_lens: np.ndarray,
                prefilling: np.ndarray | None, drafts: np.ndarray | None, accepted: torch.Tensor | None) -> None:
    """Refuse a batch whose boundaries, lengths, tables or dtypes do not fit together."""
    rows = len(starts) - 1
    if rows < 0 or starts.ndim != 1:
        refuse("query_start_loc_cpu", f"shape {list(starts.shape)}", "shape [R+1] with R >= 0", SCHEDULER)
    if starts.dtype != np.int32:
        refuse("query_start_loc_cpu", str(starts.dtype), "int32", kind=ArgumentTypeError)
    if starts.item(0) != 0:
        refuse("query_start_loc_cpu", f"a first entry of {starts[0]}", "0", "Boundaries are those of this step's tokens.")
    decreasing = starts[1:] < starts[:-1]
    if rows and decreasing.item(row := decreasing.argmax()):
        refuse("query_start_loc_cpu", f"{starts[row + 1]} after {starts[row]} (row {row})", "boundaries that never decrease")
    if batch.num_actual_tokens < starts.item(-1):
        refuse("num_actual_tokens", batch.num_actual_tokens, f"at least {starts[-1]}, the last boundary", SCHEDULER)
    if seq_lens.shape != (rows,):
        _refuse_host("seq_lens_cpu_upper_bound", seq_lens, rows)
    short = seq_lens < starts[1:] - starts[:-1]
    if rows and short.item(row := short.argmax()):
        refuse("seq_lens_cpu_upper_bound", f"{seq_lens[row]} for row {row}",
               f"at least its {starts[row + 1] - starts[row]} tokens of this step", SCHEDULER)
    if prefilling is not None:
        if prefilling.shape != (rows,):
            _refuse_host("is_prefilling_cpu", prefilling, rows)
        if prefilling.dtype != np.bool_:
            refuse("is_prefilling_cpu", str(prefilling.dtype), "bool", kind=ArgumentTypeError)
    if drafts is not None and drafts.shape != (rows,):
        _refuse_host("num_decode_draft_tokens_cpu", drafts, rows)
    cuda, aligned = builder.cuda, builder.cache_mode == "align"
    q, s, table = batch.query_start_loc, batch.seq_lens, batch.block_table
    columns = 1 if aligned else builder.columns
    if not (q.dtype is s.dtype is table.dtype is INT32 and q.is_cuda is s.is_cuda is table.is_cuda is cuda
            and q.shape == (rows + 1,) and s.shape == (rows,)):
        _vector("query_start_loc", q, rows + 1, cuda)
        _vector("seq_lens", s, rows, cuda)
    if accepted is not None:
        _vector("num_accepted_tokens", accepted, rows, cuda)
    _table("block_table", table, rows, columns, cuda)
    if not aligned:
        return
    if batch.aligned_state_indices is not None:
        _table("aligned_state_indices", batch.aligned_state_indices, rows, builder.columns, cuda)
    elif rows:
        blocks = (max(int(seq_lens.max()), 1) - 1) // builder.block_size + builder.columns
        if batch.block_table.shape[1] < blocks:
            refuse("block_table", f"{batch.block_table.shape[1]} columns", f"at least {blocks} for the longest request",
                   "Each block of block_size tokens has a column, and num_spec columns follow the last.")


def _refuse_host(name: str, array: np.ndarray, rows: int) -> None:
    refuse(name, f"shape {list(array.shape)}", f"shape [{rows}], one entry for each request", SCHEDULER)


def _int32(name: str, tensor: torch.Tensor, cuda: bool) -> None:
    if tensor.dtype is not torch.int32:
        refuse(name, str(tensor.dtype), "torch.int32", kind=ArgumentTypeError)
    if tensor.is_cuda is not cuda:
        refuse(name, f"a tensor on {tensor.device}", f"one on {'the GPU' if cuda else 'the CPU'}", kind=ArgumentTypeError)


def _vector(name: str, tensor: torch.Tensor, size: int, cuda: bool) -> None:
    _int32(name, tensor, cuda)
    if tensor.shape != (size,):
        refuse(name, f"shape {list(tensor.shape)}", f"shape [{size}]", SCHEDULER)


def _table(name: str, table: torch.Tensor, rows: int, columns: int, cuda: bool) -> None:
    _int32(name, table, cuda)
    shape = table.shape
    if len(shape) != 2 or shape[0] < rows or shape[1] < columns:
        refuse(name, f"shape {list(shape)}", f"at least [{rows}, {columns}]",
               "One row for each request, one column for each candidate state.")

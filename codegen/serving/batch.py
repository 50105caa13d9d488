"""What goes into the builder and what comes out: plain dataclasses, no engine's classes.

``Batch`` is one engine step as the scheduler sees it. ``KDAMetadata`` is the same step as the kernels need it. Where
both a device tensor and a host copy of it exist, the host copy decides shapes and classes, the device tensor feeds the
kernels, and neither is ever read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from kdagen.errors import refuse

NULL_SLOT = 0  # the reserved slot: block tables are padded with it, kernels neither read nor write it


class Checkpoint(NamedTuple):
    """A wish for an interior state: the state of ``row`` after ``offset`` of its tokens of this step, into ``slot``."""

    row: int
    offset: int
    slot: int


@dataclass(slots=True)
class Batch:
    """One engine step: R requests, their new tokens packed one after the other.

    query_start_loc [R+1] int32, query_start_loc_cpu [R+1]: where each request's tokens start; equal neighbours are a
    request without tokens (a padding row). seq_lens [R] int32: tokens after this step; seq_lens_cpu_upper_bound [R]: a
    host copy that may be larger where drafts may still be rejected. block_table [R, columns] int32: state slots of each
    request, ``NULL_SLOT`` in padding. num_actual_tokens: tokens of the packed tensors, padding included.
    is_prefilling_cpu [R] bool: the request still works on its prompt; None in capture batches, where nothing does.
    aligned_state_indices [R, 1+k] int32: precomputed slots for cache mode "align", or None. checkpoints: interior states
    to keep, for rows that are prefilled. Host arrays may be numpy arrays or CPU tensors.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: Any
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: Any
    block_table: torch.Tensor
    num_actual_tokens: int
    is_prefilling_cpu: Any = None
    aligned_state_indices: torch.Tensor | None = None
    checkpoints: Sequence[Checkpoint] = ()

    @property
    def num_reqs(self) -> int:
        return len(self.query_start_loc_cpu) - 1

    @classmethod
    def make(cls, query_lens: Sequence[int], seq_lens: Sequence[int], block_table, *, is_prefilling=None, device="cpu",
             num_actual_tokens: int | None = None, checkpoints: Sequence[Checkpoint] = ()) -> Batch:
        """A batch from plain lists; the device copies are made from the host's without a synchronising transfer."""
        starts = np.zeros(len(query_lens) + 1, np.int32)
        np.cumsum(np.asarray(query_lens, np.int32), out=starts[1:])
        lens = np.asarray(seq_lens, np.int32)
        if len(lens) != len(query_lens):
            refuse("seq_lens", f"{len(lens)} entries", f"{len(query_lens)}, one for each of query_lens")
        try:
            table = block_table if isinstance(block_table, torch.Tensor) else np.asarray(block_table, np.int32)
        except ValueError:  # numpy's, of rows that differ
            refuse("block_table", f"rows of {[np.size(row) for row in block_table]} slots", "rows of one length",
                   "Pad them with NULL_SLOT.")
        if isinstance(table, np.ndarray):
            table = to_device(table[:, None] if table.ndim == 1 else table, device)
        return cls(to_device(starts, device), starts, to_device(lens, device), lens, table,
                   int(starts[-1]) if num_actual_tokens is None else num_actual_tokens,
                   None if is_prefilling is None else np.asarray(is_prefilling, bool), None, checkpoints)


@dataclass(slots=True)
class KDAMetadata:
    """What a KDA layer needs at one step. S speculative rows, Nn others, Np prefilled ones, k = drafts a row may have.

    Counts are host ints. Device tensors are int32 unless noted. Fields that do not apply are None.
    """

    num_reqs: int
    num_actual_tokens: int                   # tokens of the packed tensors, padding included
    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_spec_decodes: int
    num_spec_decode_tokens: int
    seq_lens: torch.Tensor                   # [R]
    block_table: torch.Tensor                # [R, columns], as it came
    query_start_loc: torch.Tensor            # [R+1], as it came
    has_initial_state: torch.Tensor | None = None              # [Nn] bool: computed tokens > 0; None without prefill
    spec_query_start_loc: torch.Tensor | None = None           # [S+1]; staged [R+1]
    non_spec_query_start_loc: torch.Tensor | None = None       # [Nn+1]; staged [R+1]; None in a purely speculative batch
    non_spec_query_start_loc_cpu: Any = None                   # its host twin, numpy
    spec_state_indices_tensor: torch.Tensor | None = None      # [S, 1+k]: slot of each candidate state; column 0: conv
    non_spec_state_indices_tensor: torch.Tensor | None = None  # [Nn], may be a strided column; staged contiguous
    spec_sequence_masks: torch.Tensor | None = None            # [R] bool
    spec_sequence_masks_cpu: Any = None                        # [R] bool, numpy
    spec_token_indx: torch.Tensor | None = None                # int32 if purely speculative, int64 if mixed
    non_spec_token_indx: torch.Tensor | None = None
    num_accepted_tokens: torch.Tensor | None = None            # [S]; staged [R]; initial column = value - 1
    uniform_spec_sequence_length: int | None = None            # 1 + drafts, where all speculative rows agree
    is_uniform_spec_decode: bool = False                       # purely speculative and every row has exactly k drafts
    chunk_size: int = 0
    chunk_indices: torch.Tensor | None = None                  # [NT, 2] (sequence, chunk) of the prefilled rows
    chunk_offsets: torch.Tensor | None = None                  # [Np+1] int64
    step_tables: Any = None                  # the StepTables they come from, with each chunk's first token and length
    prefill_query_start_loc: torch.Tensor | None = None        # [Np+1], rebased to 0
    prefill_query_start_loc_cpu: Any = None                    # its host twin, numpy
    prefill_state_indices: torch.Tensor | None = None          # [Np]
    prefill_has_initial_state: torch.Tensor | None = None      # [Np] bool
    nums_dict: dict | None = None            # block_m -> {tot, batch_ptr, token_chunk_offset_ptr}: the conv schedules
    batch_ptr: torch.Tensor | None = None                      # those of the first block size
    token_chunk_offset_ptr: torch.Tensor | None = None
    checkpoint: CheckpointTable | None = None                  # interior states to export while prefilling
    dense_decode: bool = False               # decode rows are rows 0.. with one token each, so token i belongs to row i
    spec_leads: bool = False                 # the speculative rows come first: both classes' tokens are slices
    staged: str | None = None                # "decode" or "spec": the tensors are the graph's persistent inputs
    epoch: int = 0                           # which call of GraphStaging wrote them


class CheckpointTable(NamedTuple):
    """Interior states to export: after ``offsets[i]`` tokens of prefilled row i, into slot ``state_indices[i]``.

    offsets and state_indices are [Np] int32 on the device, one per prefilled row, 0 and ``NULL_SLOT`` where nothing is
    exported; rows [E] int64 are the E prefilled rows that export, in the prefill tables' numbering; ``exported`` lists
    (row of the batch, offset) on the host, for the engine's prefix table.
    """

    offsets: torch.Tensor
    state_indices: torch.Tensor
    rows: torch.Tensor
    exported: tuple[tuple[int, int], ...]


def to_device(array: np.ndarray, device) -> torch.Tensor:
    """A host array on a device, through fresh pinned memory: no synchronisation, and the source may change at once."""
    source = torch.from_numpy(array)
    device = torch.device(device)
    if device.type != "cuda":
        return source.clone()
    pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    pinned.copy_(source)
    return pinned.to(device, non_blocking=True)


def host_array(name: str, value: Any) -> np.ndarray:
    """A numpy view of a host array; a device tensor is refused, because reading it would synchronise."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            refuse(name, f"a tensor on {value.device}", "a numpy array or a CPU tensor",
                   "Pass the host copy that the scheduler made; reading the device's would synchronise.")
        return value.numpy()
    return np.asarray(value)


def pack(device: torch.device, *, longs: Sequence[np.ndarray] = (), ints: Sequence[np.ndarray] = (),
         bools: Sequence[np.ndarray] = ()) -> list[torch.Tensor]:
    """Host arrays to the device in one transfer, in the order longs (int64), ints (int32), bools.

    Each begins on a 16-byte boundary: kernels are compiled for aligned pointers and for others, and ours stay aligned.
    """
    cuts, total, place = [], 0, []  # [bytes, padding, bytes, padding, ...]
    for kind, width, arrays in ((torch.int64, 8, longs), (torch.int32, 4, ints), (torch.bool, 1, bools)):
        for array in arrays:
            size = width * len(array)
            place.append((total, total + size, array, kind))
            cuts += (size, -size % 16)
            total += size + cuts[-1]
    cuda = device.type == "cuda"
    host = torch.empty(total, dtype=torch.uint8, pin_memory=cuda)
    raw = host.numpy()
    for start, end, array, kind in place:
        raw[start:end].view(_NUMPY[kind])[:] = array
    parts = (host.to(device, non_blocking=True) if cuda else host).split_with_sizes(cuts)
    return [part.view(kind) for part, (_, _, _, kind) in zip(parts[::2], place)]


_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.bool: np.bool_}

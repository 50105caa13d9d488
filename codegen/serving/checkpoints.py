"""Which interior states a prefill step exports, and where to.

A state can be exported where a chunk of the kernel ends: after ``offset`` tokens of a row, ``offset`` a multiple of the
chunk size. The engine may ask for one per row (``Batch.checkpoints``). In cache mode "align" a prompt that runs past the
last boundary of its cache blocks leaves the state at that boundary in that block's slot, as far as a chunk ends there;
where the prompt ends on the boundary, its own slot holds it anyway.
"""

from __future__ import annotations

import numpy as np
import torch

from kdagen.errors import refuse
from kdagen.serving.batch import NULL_SLOT, Batch, CheckpointTable, KDAMetadata, pack


def plan(batch: Batch, metadata: KDAMetadata, rows: np.ndarray, lens: np.ndarray, seq_lens: np.ndarray,
         block_size: int | None) -> CheckpointTable | None:
    """The exports of the prefill table's ``rows`` (row numbers of the batch); None where there are none."""
    if not batch.checkpoints and block_size is None:
        return None
    chunk = metadata.chunk_size
    offsets = np.zeros(len(rows), np.int32)
    if block_size is not None:
        boundary = seq_lens[rows] // block_size * block_size
        inside = boundary - (seq_lens[rows] - lens[rows])
        wanted = (inside > 0) & (inside < lens[rows]) & (inside % chunk == 0)
        offsets[wanted] = inside[wanted]
        blocks = np.where(wanted, boundary // block_size - 1, 0)
    slots = np.zeros(len(rows), np.int32)
    _asked_for(batch, rows, lens, chunk, offsets, slots)
    if not offsets.any():
        return None
    given = slots != NULL_SLOT
    exporting = offsets.nonzero()[0]
    exported = tuple((int(rows[i]), int(offsets[i])) for i in exporting)
    device = metadata.block_table.device
    if block_size is None:
        chosen, device_offsets, device_slots = pack(device, longs=(exporting,), ints=(offsets, slots))
        return CheckpointTable(device_offsets, device_slots, chosen, exported)
    chosen, index, columns, device_offsets, device_slots, from_table = pack(
        device, longs=(exporting, rows, blocks), ints=(offsets, slots), bools=((offsets > 0) & ~given,))
    looked_up = metadata.block_table[index, columns]
    return CheckpointTable(device_offsets, torch.where(from_table, looked_up, device_slots), chosen, exported)


def refuse_row(row: int, prefilled: list[int]) -> None:
    """Say that a row with a wish is not one of those that are prefilled."""
    which = f"one of {prefilled}" if prefilled else "of which there is none"
    refuse("checkpoints", f"row {row}", f"a row that is prefilled at this step, {which}")


def _asked_for(batch: Batch, rows: np.ndarray, lens: np.ndarray, chunk: int, offsets: np.ndarray, slots: np.ndarray) -> None:
    """Write the engine's own wishes over the plan; refuse those that no kernel can fulfil."""
    place = {int(row): i for i, row in enumerate(rows)}
    for wish in batch.checkpoints:
        row, offset, slot = wish
        if row not in place:
            refuse_row(row, sorted(place))
        length = int(lens[row])
        if not 0 < offset <= length:
            refuse("checkpoints", f"offset {offset} of row {row}", f"1 to {length}: it has {length} tokens in this step")
        if offset % chunk:
            refuse("checkpoints", f"offset {offset} of row {row}", f"a multiple of {chunk}, where a chunk ends")
        if slot == NULL_SLOT:
            refuse("checkpoints", f"slot {slot} of row {row}", "an allocated slot; slot 0 is reserved for padding")
        offsets[place[row]], slots[place[row]] = offset, slot

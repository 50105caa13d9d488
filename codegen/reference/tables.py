"""Oracle of the step tables: chunk table, conv schedule, staged decode metadata (docs/metadata.md)."""

from __future__ import annotations

from itertools import pairwise

import torch


def chunk_table(cu_seqlens: torch.Tensor, chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices [NT, 2] of cu_seqlens' dtype, offsets [N+1] int64) on its device.

    Row r of indices is (sequence n, chunk t in it), sequence-major, and r = offsets[n] + t. Empty sequences have none.
    """
    edges, rows, offsets = cu_seqlens.tolist(), [], [0]
    for n, (start, end) in enumerate(pairwise(edges)):
        chunks = -(-(end - start) // chunk_size)
        rows += [(n, t) for t in range(chunks)]
        offsets.append(offsets[-1] + chunks)
    indices = torch.tensor(rows, dtype=cu_seqlens.dtype, device=cu_seqlens.device).reshape(-1, 2)
    return indices, torch.tensor(offsets, dtype=torch.int64, device=cu_seqlens.device)


def conv_schedule(boundaries: torch.Tensor, block_m: int) -> dict:
    """{"tot": programs, "batch_ptr": sequence, "token_chunk_offset_ptr": block in it}: int32 [tot], sequence-major."""
    pairs = chunk_table(boundaries, block_m)[0].to(torch.int32)
    return {"tot": len(pairs), "batch_ptr": pairs[:, 0].clone(), "token_chunk_offset_ptr": pairs[:, 1].clone()}


def stage_spec_decode(
    state: torch.Tensor, qsl: torch.Tensor, accepted: torch.Tensor, rows: int, columns: int, num_spec_decodes: int,
    null_slot: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Padded copies for a captured graph: (state [rows, columns], qsl [rows+1], accepted [rows]).

    Rows past num_spec_decodes get the null slot in every column, the last real offset, and accepted = 1.
    """
    staged_state = torch.full((rows, columns), null_slot, dtype=state.dtype, device=state.device)
    staged_qsl = torch.empty(rows + 1, dtype=qsl.dtype, device=qsl.device)
    staged_accepted = torch.ones(rows, dtype=accepted.dtype, device=accepted.device)
    for r in range(rows + 1):
        staged_qsl[r] = qsl[min(r, num_spec_decodes)]
    for r in range(min(rows, num_spec_decodes)):
        staged_state[r] = state[r, :columns]
        staged_accepted[r] = accepted[r]
    return staged_state, staged_qsl, staged_accepted

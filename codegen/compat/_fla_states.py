"""States in forms that only flash-linear-attention has, put together from pools."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from kdagen.errors import refuse


def rows_of(pool: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the rows' states, copied out of a pool in fp32, zeros for padding; the number of each among them, -1 for padding)."""
    slots = indices if indices.dim() == 1 else indices[:, 0]
    live = (slots >= 0) & (slots < len(pool))
    states = torch.where(live[:, None, None, None], pool.index_select(0, torch.where(live, slots, 0)), 0)
    return states.float(), torch.where(live, torch.arange(len(slots), device=slots.device), -1)


class IntermediateStates:
    """The states before every chunk: the initial one, and an export at every inner chunk boundary."""

    def __init__(self, q, v, cu_seqlens, cu_seqlens_cpu, initial_state, chunk_size, state_v_first):
        if cu_seqlens is not None and cu_seqlens_cpu is None:
            refuse("cu_seqlens_cpu", None, "the host copy of cu_seqlens with return_intermediate_states=True",
                   "The number of chunks is needed on the host; reading the device's would synchronise.")
        batch, tokens = q.shape[:2]
        edges = [tokens * i for i in range(batch + 1)] if cu_seqlens is None else cu_seqlens_cpu.tolist()
        self.batch = batch if cu_seqlens is None else 1
        counts = [-(-(end - start) // chunk_size) for start, end in pairwise(edges)]
        columns = max([*counts, 1])
        inner = (v.shape[-1], q.shape[-1]) if state_v_first else (q.shape[-1], v.shape[-1])
        *firsts, self.total = accumulate(counts, initial=0)
        offsets, slots = [], []
        for first, count in zip(firsts, counts):
            offsets.append([min(i + 1, max(count - 1, 0)) * chunk_size if i + 1 < count else 0 for i in range(columns)])
            slots.append([first + i + 1 if i + 1 < count else -1 for i in range(columns)])
        self.pool = torch.zeros(max(self.total, 1), v.shape[2], *inner, dtype=torch.float32, device=q.device)
        to_device = lambda rows: torch.tensor(rows, dtype=torch.int32).to(q.device, non_blocking=True)
        self.offsets, self.slots = to_device(offsets), to_device(slots)
        if initial_state is not None:
            rows = [n for n, count in enumerate(counts) if count]
            self.pool[to_device([firsts[n] for n in rows]).long()] = initial_state[to_device(rows).long()]

    def arguments(self) -> dict:
        return {"checkpoint_offsets": self.offsets, "checkpoint_slots": self.slots, "state_pool": self.pool}

    def states(self) -> torch.Tensor:
        return self.pool[:self.total].unflatten(0, (self.batch, -1)).to(torch.bfloat16)

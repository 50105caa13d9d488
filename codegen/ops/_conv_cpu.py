"""The CPU path of the convolution ops: the oracle, with the lines of a pool read and written around it."""

from __future__ import annotations

import torch

from kdagen.reference import conv as oracle


def batched(x: torch.Tensor, boundaries: torch.Tensor | None) -> torch.Tensor:
    """A decode step's rows [N, D] as [N, 1, D]; packed tokens [tokens, D] as [1, tokens, D]."""
    return x if x.dim() == 3 else x.unsqueeze(1 if boundaries is None else 0)


def _lines(pool, indices, rows: int, pad_slot: int) -> torch.Tensor:
    """[rows] int64: the line of each sequence, -1 for padding."""
    slots = torch.arange(rows) if indices is None else (indices[:, 0] if indices.dim() == 2 else indices).long()
    return torch.where((slots < 0) | (slots == pad_slot) | (slots >= pool.shape[0]), -1, slots)


@torch.no_grad()
def run_prompts(x, weight, bias, out, cu_seqlens, pool, indices, has, initial, pad_slot, silu) -> None:
    """causal_conv1d: the oracle in fp64, its results rounded into out and the lines."""
    if x.dim() == 2:
        x, out = x.unsqueeze(0), out.unsqueeze(0)
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


@torch.no_grad()
def run_steps(x, pool, weight, bias, out, boundaries, indices, accepted, has, pad_slot, silu) -> None:
    """causal_conv1d_update: the same oracle, which changes the pool itself."""
    x, out = batched(x, boundaries), batched(out, boundaries)
    rows = x.shape[0] if boundaries is None else boundaries.shape[0] - 1
    out.copy_(oracle.causal_conv1d_update(
        x, pool, weight, bias, state_indices=_lines(pool, indices, rows, pad_slot), num_accepted_tokens=accepted,
        has_initial_state=has, cu_seqlens=boundaries, activation="silu" if silu else None))

"""Sizing, allocating and writing step tables: what the public ops of metadata.py share."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from kdagen import devices, dispatch
from kdagen.errors import refuse
from kdagen.families.step_tables import MAX_SCHEDULES
from kdagen.ops._common import DTYPE_NAMES, interpreting
from kdagen.spec import CHUNKS, Problem, Spec

try:  # what torch.compile's own code allocates with, for a third of torch.empty's host time
    from torch._C._dynamo.guards import _empty_strided_cuda
except ImportError:
    _empty_strided_cuda = None

_MEMO = dispatch.memo("step_tables")


@lru_cache(maxsize=256, typed=True)
def plan(chunk_size: int | None, blocks: tuple[int, ...]) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """(block sizes without repeats, [tables, 1] block - 1, [tables, 1] block); chunk_size None: no chunk table."""
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size not in CHUNKS):
        refuse("chunk_size", repr(chunk_size), f"one of {', '.join(map(str, CHUNKS))}")
    for block in blocks:
        if type(block) is not int or not 0 < block < 2**30:
            refuse("block_m" if chunk_size is None else "blocks", repr(block), "a positive number of tokens")
    blocks = tuple(dict.fromkeys(blocks))
    if len(blocks) > MAX_SCHEDULES:
        refuse("blocks", f"{len(blocks)} block sizes", f"at most {MAX_SCHEDULES}", "Call step_tables twice.")
    sizes = np.array([[size] for size in (chunk_size, *blocks) if size is not None], np.int32).reshape(-1, 1)
    return blocks, sizes - 1, sizes


def exact_sizes(name: str, host: torch.Tensor, planned: tuple, checked: bool) -> list[int]:
    """The number of rows of each table, from the host's boundaries."""
    edges = host.numpy()
    lengths = edges[1:] - edges[:-1]
    if checked and lengths.size and np.minimum.reduce(lengths) < 0:
        at = int(np.argmin(lengths))
        refuse(name, f"{edges[at]} followed by {edges[at + 1]} (sequence {at})", "boundaries that never decrease",
               "They are cumulative: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).")
    _, less_one, blocks = planned
    sizes = np.add.reduce((lengths + less_one) // blocks, axis=1).tolist()
    return sizes if checked else [max(size, 0) for size in sizes]


def bounded_sizes(n_seqs: int, tokens: int, planned: tuple) -> list[int]:
    """Row counts that no batch of n_seqs sequences and at most so many tokens exceeds."""
    return [-(-tokens // block) + n_seqs for block in planned[2].ravel().tolist()]


def write(
    cu_seqlens: torch.Tensor, n_seqs: int, chunk: int, blocks: tuple[int, ...], sizes: list[int], index: int, *,
    rows: bool = False, counts: bool = False,
) -> list[torch.Tensor]:
    """Allocate and write tables of these sizes on device ``index`` (the current one; -1: the CPU).

    Returns [chunk_indices, chunk_offsets, (chunk_rows,) (counts,) sequence, part, sequence, part, ...].
    """
    empty = _empty_cuda if index >= 0 and _empty_strided_cuda is not None else _empty_on(index)
    flat, arguments = [], [cu_seqlens, n_seqs, None]
    if chunk:
        n_chunks, *sizes = sizes
        indices, offsets = empty((n_chunks, 2), (2, 1), cu_seqlens.dtype), empty((n_seqs + 1,), (1,), torch.int64)
        flat += (indices, offsets)
        table = None
        if rows:
            table = empty((n_chunks, 4), (4, 1), torch.int32)
            flat.append(table)
        arguments += (offsets, indices, table, n_chunks)
    if counts:
        arguments[2] = empty((len(blocks) + (chunk > 0),), (1,), torch.int32)
        flat.append(arguments[2])
    for block, size in zip(blocks, sizes):
        seq, part = empty((size,), (1,), torch.int32), empty((size,), (1,), torch.int32)
        flat += (seq, part)
        arguments += (seq, part, block, size)
    if index >= 0 or interpreting():
        launch, warps, stages = _launcher(chunk, cu_seqlens.dtype, len(blocks), index)
        launch(*arguments, num_warps=warps, num_stages=stages)
    else:
        _write_on_cpu(chunk, *arguments)
    return flat


def _empty_cuda(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return _empty_strided_cuda(size, stride, dtype)


def _empty_on(index: int):
    device = torch.device("cuda", index) if index >= 0 else torch.device("cpu")
    return lambda size, stride, dtype: torch.empty(size, dtype=dtype, device=device)


def _launcher(chunk: int, dtype: torch.dtype, schedules: int, index: int):
    """(launch, warps, stages) of the variant that dispatch picks; index -1 is the interpreter."""
    key = (chunk, dtype, schedules, index)
    found = _MEMO.get(key)
    if found is None:
        spec = Spec.make("step_tables", chunk=chunk, dtype=DTYPE_NAMES[dtype], schedules=schedules)
        target = devices.of_index(index) if index >= 0 else devices.named("h200")
        choice = dispatch.pick(spec, Problem(1, 1, 1), target)
        found = _MEMO[key] = (choice.module.launch, choice.schedule.warps, choice.schedule.stages)
    return found


def _write_on_cpu(chunk: int, cu_seqlens: torch.Tensor, n_seqs: int, counts: torch.Tensor | None, *tables) -> None:
    """What the kernel does, in torch."""
    totals = []
    if chunk:
        offsets, indices, rows, n_chunks, *tables = tables
        seq, part, firsts = _table(cu_seqlens, chunk, n_chunks)
        indices.copy_(torch.stack((seq, part), 1))
        offsets.copy_(firsts.clamp(max=n_chunks))
        totals.append(firsts[-1])
        if rows is not None and n_chunks:
            first = cu_seqlens[seq] + part * chunk
            valid = (cu_seqlens[(seq + 1).clamp(max=n_seqs)] - first).clamp(max=chunk)
            rows.copy_(torch.stack((first, valid, seq, part), 1).where(seq[:, None] >= 0, -1))
    for seq_out, part_out, block, size in zip(tables[::4], tables[1::4], tables[2::4], tables[3::4]):
        seq, part, firsts = _table(cu_seqlens, block, size)
        seq_out.copy_(seq)
        part_out.copy_(part)
        totals.append(firsts[-1])
    if counts is not None:
        counts.copy_(torch.stack(totals))


def _table(cu_seqlens: torch.Tensor, block: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """([size] sequence, [size] part, [N+1] the row on which each sequence begins); rows past the last are -1."""
    parts = (cu_seqlens.diff().clamp(min=0).long() + block - 1) // block
    firsts = torch.cat((parts.new_zeros(1), parts.cumsum(0)))
    row = torch.arange(size)
    seq = torch.searchsorted(firsts, row, right=True) - 1  # the last sequence that begins on this row or before it
    part = row - firsts[seq]
    live = row < firsts[-1]
    return seq.where(live, -1), part.where(live, -1), firsts

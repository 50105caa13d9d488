"""Sizing, allocating and writing step tables: what the public ops of metadata.py share."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from kdagen import dispatch
from kdagen.errors import refuse
from kdagen.families.step_tables import MAX_SCHEDULES
from kdagen.launch import handle, knobs
from kdagen.ops._common import DTYPE_NAMES, interpreting, target_of
from kdagen.spec import CHUNKS, Problem, Spec

_MEMO = dispatch.memo("step_tables")
_FEW = 32  # up to so many sequences plain Python counts faster than numpy


class Plan(NamedTuple):
    """What the tables of a call are: block sizes, and how numpy divides by them."""

    chunk: int                     # 0: no chunk table
    blocks: tuple[int, ...]        # of the schedules, without repeats
    sizes: tuple[int, ...]         # of all tables, the chunk table's first
    less_one: np.ndarray           # [tables + 1, 1] block - 1; the row after the tables' finds negative lengths
    divide: np.ufunc
    divisor: np.ndarray            # [tables + 1, 1]


@lru_cache(maxsize=256, typed=True)
def plan(chunk_size: int | None, *blocks: int) -> Plan:
    """The block sizes of a call's tables, checked; chunk_size None: no chunk table."""
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size not in CHUNKS):
        refuse("chunk_size", repr(chunk_size), f"one of {', '.join(map(str, CHUNKS))}")
    for block in blocks:
        if type(block) is not int or not 0 < block < 2**30:
            refuse("block_m" if chunk_size is None else "blocks", repr(block), "a positive number of tokens")
    blocks = tuple(dict.fromkeys(blocks))
    if len(blocks) > MAX_SCHEDULES:
        refuse("blocks", f"{len(blocks)} block sizes", f"at most {MAX_SCHEDULES}", "Call step_tables twice.")
    sizes = blocks if chunk_size is None else (chunk_size, *blocks)
    less_one = np.array([[size - 1] for size in sizes] + [[0]], np.int32)
    if all(size & (size - 1) == 0 for size in sizes):  # a shift is several times faster than a division
        shifts = np.array([[size.bit_length() - 1] for size in sizes] + [[31]], np.int32)
        return Plan(chunk_size or 0, blocks, sizes, less_one, np.right_shift, shifts)
    divisors = np.array([[size] for size in sizes] + [[2**31 - 1]], np.int32)
    return Plan(chunk_size or 0, blocks, sizes, less_one, np.floor_divide, divisors)


def exact_sizes(name: str, host: torch.Tensor, n_seqs: int, planned: Plan, checked: bool) -> list[int]:
    """The number of rows of each table, from the host's boundaries."""
    if n_seqs <= _FEW:
        edges = host.tolist()
        negated = [start - end for start, end in pairwise(edges)]
        if not checked:
            negated = [min(length, 0) for length in negated]
        elif n_seqs and max(negated) > 0:
            _refuse_decreasing(name, edges)
        return [-sum([length // block for length in negated]) for block in planned.sizes]
    edges = host.numpy()
    lengths = edges[1:] - edges[:-1]
    *sizes, odd = np.add.reduce(planned.divide(lengths + planned.less_one, planned.divisor), 1).tolist()
    if odd and lengths.min() < 0:  # the last row is -1 where a length is negative
        if checked:
            _refuse_decreasing(name, edges.tolist())
        return [int(np.sum(-(-np.maximum(lengths, 0) // size))) for size in planned.sizes]
    return sizes


def _refuse_decreasing(name: str, edges: list[int]) -> None:
    at = next(n for n, (start, end) in enumerate(pairwise(edges)) if start > end)
    refuse(name, f"{edges[at]} followed by {edges[at + 1]} (sequence {at})", "boundaries that never decrease",
           "They are cumulative: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).")


def bounded_sizes(n_seqs: int, tokens: int, planned: Plan) -> list[int]:
    """Row counts that no batch of n_seqs sequences and at most so many tokens exceeds."""
    return [-(-tokens // block) + n_seqs for block in planned.sizes]


# ---- allocating and launching

def _empty_cpu(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype)


def _empty_current(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="cuda")


try:  # what torch.compile's own code allocates with on the current device: half of torch.empty's host time
    from torch._C._dynamo.guards import _empty_strided_cuda as _empty_cuda
except ImportError:
    _empty_cuda = _empty_current


def write(
    cu_seqlens: torch.Tensor, n_seqs: int, planned: Plan, sizes: list[int], index: int, *,
    rows: bool = False, counts: bool = False,
) -> list[torch.Tensor]:
    """Allocate and write tables of these sizes on device ``index``, the current one (-1: the CPU).

    Returns [chunk_indices, chunk_offsets, (chunk_rows,) (counts,) sequence, part, sequence, part, ...].
    """
    empty = _empty_cuda if index >= 0 else _empty_cpu
    dtype = cu_seqlens.dtype
    flat, arguments, n_table = [], [cu_seqlens, n_seqs, None], 0
    if planned.chunk:
        n_chunks, n_table = sizes[0], 1
        indices, offsets = empty((n_chunks, 2), (2, 1), dtype), empty((n_seqs + 1,), (1,), torch.int64)
        flat += (indices, offsets)
        arguments += (offsets, indices, None, n_chunks)
        if rows:
            arguments[5] = empty((n_chunks, 4), (4, 1), torch.int32)
            flat.append(arguments[5])
    if counts:
        arguments[2] = empty((len(sizes),), (1,), torch.int32)
        flat.append(arguments[2])
    for block in planned.blocks:
        size = sizes[n_table]
        n_table += 1
        seq, part = empty((size,), (1,), torch.int32), empty((size,), (1,), torch.int32)
        flat += (seq, part)
        arguments += (seq, part, block, size)
    launch = _MEMO.get((planned.chunk, dtype, len(planned.blocks), index, rows, counts))
    if launch is None:
        launch = _first_launch(planned, dtype, index, rows, counts)
    launch(arguments, sizes)
    return flat


def _first_launch(planned: Plan, dtype: torch.dtype, index: int, rows: bool, counts: bool):
    """``launch(arguments, sizes)`` of a kind of call, for the memo: the picked variant's kernel, or the CPU path."""
    if index < 0 and not interpreting():
        return lambda arguments, sizes: _write_on_cpu(planned.chunk, *arguments)
    spec = Spec.make("step_tables", chunk=planned.chunk, dtype=DTYPE_NAMES[dtype], schedules=len(planned.blocks))
    target = target_of(index)
    choice = dispatch.pick(spec, Problem(1, 1, 1), target)
    module, options = choice.module, {"num_warps": choice.schedule.warps, "num_stages": choice.schedule.stages}
    if index < 0:  # not remembered: the interpreter may be turned off
        return lambda arguments, sizes: module.launch(*arguments, **options)
    key = planned.chunk, dtype, len(planned.blocks), index, rows, counts

    def first(arguments, sizes):
        _MEMO[key] = _direct(module, arguments, sizes, options, index)

    return first


def _direct(module, arguments: list, sizes: list[int], options: dict, index: int):
    """Launch through Triton, which compiles, and return a ``launch(arguments, sizes)`` of the least host time.

    One compiled kernel serves all calls of a kind: sizes and the boundaries' alignment are not specialised on, and what
    ``write`` allocates is aligned.
    """
    kernel, rows_each = module.step_tables_kernel, module.ROWS
    count = lambda sizes: sum([-(-size // rows_each) or 1 for size in sizes])
    compiled = kernel.jit[(count(sizes),)](*arguments, ROWS=rows_each, **options)
    _, short, call, function, cooperative, pdl, packed = handle(compiled)
    runtime, stream, tensor = knobs.runtime, torch._C._cuda_getCurrentRawStream, torch.Tensor
    if not short:
        return lambda arguments, sizes: module.launch(*arguments, **options)

    def launch(arguments, sizes):
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:  # a profiler wants to see launches
            return module.launch(*arguments, **options)
        values = [value.data_ptr() if type(value) is tensor else value for value in arguments]
        call(count(sizes), 1, 1, stream(index), function, cooperative, pdl, None, None, packed, None, None, None,
             *values, rows_each)

    return launch


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

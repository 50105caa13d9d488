"""Sizing and writing step tables: what the public ops of metadata.py and the serving builder share."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from operator import sub

import numpy as np
import torch

from kdagen import dispatch
from kdagen.errors import refuse
from kdagen.families.step_tables import MAX_SCHEDULES
from kdagen.launch import handle
from kdagen.ops._common import DTYPE_NAMES, interpreting, target_of
from kdagen.ops._tables_source import Requests, StepTables, compose
from kdagen.spec import CHUNKS, Problem, Spec

_MEMO = dispatch.memo("step_tables")
CPU, INTERPRETED = -1, -2  # in the place of a device's index
_FEW = 16  # up to so many sequences plain Python counts faster than numpy


class Plan:
    """What the tables of a call are: block sizes, and how numpy finds what is missing to whole blocks.

    chunk: 0 without a chunk table. blocks: of the schedules, without repeats. sizes: of all tables, the chunk table's first.
    rest, divisors: ``rest(-lengths, divisors)`` is [tables, N] tokens missing to the next multiple of each block.
    """

    __slots__ = ("blocks", "chunk", "divisors", "key", "largest", "rest", "sizes")

    def __init__(self, chunk: int, blocks: tuple[int, ...]):
        self.chunk, self.blocks, self.key = chunk, blocks, (chunk, blocks)
        self.sizes = (chunk, *blocks) if chunk else blocks
        self.largest = max(self.sizes)
        powers = all(size & (size - 1) == 0 for size in self.sizes)  # a mask is several times faster than a remainder
        self.rest = np.bitwise_and if powers else np.remainder
        self.divisors = np.array([[size - powers] for size in self.sizes], np.int32)


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
    return Plan(chunk_size or 0, blocks)


def exact_sizes(name: str, host: torch.Tensor, n_seqs: int, planned: Plan, checked: bool) -> list[int]:
    """The number of rows of each table, from the host's boundaries [N+1]."""
    try:
        if n_seqs <= _FEW:
            return _few_sizes(host.tolist(), planned, checked)
        return _many_sizes(host.numpy(), planned, checked)
    except _Decreasing:
        edges = host.tolist()
    at = next(n for n, (start, end) in enumerate(pairwise(edges)) if start > end)
    refuse(name, f"{edges[at]} followed by {edges[at + 1]} (sequence {at})", "boundaries that never decrease",
           "They are cumulative: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).")


def sizes_of(edges: np.ndarray, planned: Plan) -> list[int]:
    """The number of rows of each table, from boundaries [N+1] that are known to be right."""
    return _few_sizes(edges.tolist(), planned, False) if len(edges) <= _FEW else _many_sizes(edges, planned, False)


class _Decreasing(Exception):
    """Boundaries that should never decrease do."""


def _few_sizes(edges: list[int], planned: Plan, checked: bool) -> list[int]:
    negated = list(map(sub, edges, edges[1:]))
    if negated and max(negated) > 0:
        if checked:
            raise _Decreasing
        negated = [min(length, 0) for length in negated]
    return [-sum([length // block for length in negated]) for block in planned.sizes]


def _many_sizes(edges: np.ndarray, planned: Plan, checked: bool) -> list[int]:
    negated = edges[:-1] - edges[1:]
    tokens = edges.item(-1) - edges.item(0)
    if negated.item(negated.argmax()) > 0:  # a third of the time of a maximum
        if checked:
            raise _Decreasing
        negated = np.minimum(negated, 0)
        tokens = -int(negated.sum(dtype=np.int64))
    accumulator = negated.dtype if len(negated) * planned.largest < 2**31 else np.int64
    missing = np.add.reduce(planned.rest(negated, planned.divisors), 1, accumulator).tolist()
    return [(tokens + more) // block for more, block in zip(missing, planned.sizes)]


def bounded_sizes(n_seqs: int, tokens: int, planned: Plan) -> list[int]:
    """Row counts that no batch of n_seqs sequences and at most so many tokens exceeds."""
    return [-(-tokens // block) + n_seqs for block in planned.sizes]


# ---- allocating and launching


def write(
    cu_seqlens: torch.Tensor, n_seqs: int, planned: Plan, sizes: list[int], index: int,
    rows: bool = False, counts: bool = False, apart: bool = False, requests: tuple = (),
) -> StepTables | tuple[StepTables, Requests]:
    """Allocate and write tables of these sizes on device ``index``, the current one (-1: the CPU).

    requests: of a step with prefills, (base, first, seq_lens, its stride, block table, its row stride); the kernel's
    ``launch`` says what they are. Then Requests are written too.
    All tables are aligned to 128 bytes. They are cut from one allocation for each dtype, or have one each where they must
    be ``apart``, as torch.compile wants the outputs of an op.
    """
    if index < 0 and interpreting():
        index = INTERPRETED
    key = planned.key, cu_seqlens.dtype, rows, counts, bool(requests), apart, index
    tables = _MEMO.get(key) or _first(key, planned)
    return tables(cu_seqlens, n_seqs, sizes, *requests)


def _first(key: tuple, planned: Plan):
    """The function that writes the tables of a kind of call: through the CPU path, or the picked variant's kernel.

    One compiled kernel serves all calls of a kind: sizes and the inputs' alignment are not specialised on, and the tables
    are aligned. So the first call on a GPU goes through Triton, which compiles, and later ones launch what it compiled.
    """
    _, dtype, rows, counts, requests, apart, index = key
    kind = planned, dtype, rows, counts, requests, apart
    if index == CPU:
        on_cpu = lambda *arguments: _write_on_cpu(planned, requests, *arguments)
        return _MEMO.setdefault(key, compose(*kind, run=on_cpu, cuda=False))
    flags = {"schedules": len(planned.blocks), "requests": requests}
    spec = Spec.make("step_tables", chunk=planned.chunk, dtype=DTYPE_NAMES[dtype], **flags)
    choice = dispatch.pick(spec, Problem(1, 1, 1), target_of(index))
    module, options = choice.module, {"num_warps": choice.schedule.warps, "num_stages": choice.schedule.stages}
    through_triton = lambda *arguments: module.launch(*arguments, **options)
    if index == INTERPRETED:
        return _MEMO.setdefault(key, compose(*kind, run=through_triton, cuda=False))

    def first(cu_seqlens, n_seqs, sizes, *given):
        def run(*arguments):
            found = handle(through_triton(*arguments))
            direct = (found, module, index) if found.short else None
            _MEMO[key] = compose(*kind, run=through_triton, cuda=True, direct=direct)

        return compose(*kind, run=run, cuda=True)(cu_seqlens, n_seqs, sizes, *given)

    return first


def _write_on_cpu(
    planned: Plan, requests: bool, cu_seqlens: torch.Tensor, n_seqs: int, counts: torch.Tensor | None, *tables,
) -> None:
    """What the kernel does, in torch."""
    totals, chunk = [], planned.chunk
    if requests:
        *tables, base, first, lens, _, slots_in, _, starts, slots, carries, first_carries = tables
        cu_seqlens, lens, slots_in = cu_seqlens[base:], lens[base:], slots_in[base:, 0]
        starts.copy_(cu_seqlens[first:] - cu_seqlens[first])
        slots.copy_(slots_in[first:n_seqs])
        carries.copy_(lens > cu_seqlens.diff())
        first_carries.copy_(carries[first:])
    if chunk:
        offsets, indices, rows, n_chunks, *tables = tables
        chunked = starts if requests else cu_seqlens
        seq, part, firsts = _table(chunked, chunk, n_chunks)
        indices.copy_(torch.stack((seq, part), 1))
        offsets.copy_(firsts.clamp(max=n_chunks))
        totals.append(firsts[-1])
        if rows is not None and n_chunks:
            token = chunked[seq] + part * chunk
            valid = (chunked[(seq + 1).clamp(max=len(chunked) - 1)] - token).clamp(max=chunk)
            rows.copy_(torch.stack((token, valid, seq, part), 1).where(seq[:, None] >= 0, -1))
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

"""The function that allocates and writes the tables of one kind of call, composed as source for the least host time.

A call allocates once for each dtype, cuts the allocation into its tables, and launches. What differs between kinds of call
(which tables there are, which block sizes) is known when the function is composed, so that nothing is looked up later.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

from kdagen.launch import Handle, knobs

ALIGN = 128  # bytes of whose multiple each table begins


class StepTables(NamedTuple):
    """All tables of a step. In bounded mode the row counts are capacities, and unused rows are -1."""

    chunk_indices: torch.Tensor       # [NT, 2] of cu_seqlens' dtype: (sequence, chunk in it)
    chunk_offsets: torch.Tensor       # [N+1] int64: the row of each sequence's first chunk; the last: their number
    chunk_rows: torch.Tensor | None   # [NT, 4] int32: (first token, valid tokens, sequence, chunk in it)
    counts: torch.Tensor | None       # [1 + schedules] int32, bounded mode: the true row counts, chunks first
    schedules: dict[int, dict]        # block size -> {"tot", "batch_ptr", "token_chunk_offset_ptr"}
    chunk_size: int                   # of the chunk table, in tokens


class Requests(NamedTuple):
    """What a step with prefills brings along for each request. Np of the N requests have rows in the chunk table."""

    starts: torch.Tensor          # [Np+1] int32: boundaries, from 0
    slots: torch.Tensor           # [Np] int32: state slots
    carries: torch.Tensor         # [N] bool: whether the request had tokens before this step
    first_carries: torch.Tensor   # [Np] bool: the same of those Np


def _empty(device: str):
    return lambda size, stride, dtype: torch.empty(size, dtype=dtype, device=device)


try:  # what torch.compile's own code allocates and cuts with: half the host time of torch.empty and of a slice
    from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda
    from torch._C._dynamo.guards import _reinterpret_tensor as view
except ImportError:
    _empty_strided_cpu, _empty_strided_cuda = _empty("cpu"), _empty("cuda")

    def view(tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """A view of so many elements, ``offset`` elements after the tensor's first; nothing is checked."""
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


class _Table(NamedTuple):
    name: str
    count: str          # entries, an expression
    dtype: torch.dtype
    shape: str          # size and stride, as ``view`` takes them


def _tables(planned, dtype: torch.dtype, rows: bool, counts: bool, requests: bool) -> list[_Table]:
    """What a call makes, in order."""
    line = lambda name, count, kind=torch.int32: _Table(name, count, kind, f"({count},), ONE")
    tables = []
    if planned.chunk:
        tables.append(_Table("chunks", "n_0 * 2", dtype, "(n_0, 2), TWO"))
        tables.append(line("offsets", "n_chunked + 1", torch.int64))
        if rows:
            tables.append(_Table("rows", "n_0 * 4", torch.int32, "(n_0, 4), FOUR"))
    if counts:
        tables.append(line("counts", str(len(planned.sizes))))
    for s in _schedules(planned):
        tables += [line(f"seq_{s}", f"n_{s}"), line(f"part_{s}", f"n_{s}")]
    if requests:
        tables += [line("starts", "n_chunked + 1"), line("slots", "n_chunked"), line("carries", "n_seqs", torch.bool),
                   line("first_carries", "n_chunked", torch.bool)]
    return tables


def _schedules(planned) -> range:
    return range(1, len(planned.blocks) + 1)


def _result(planned, made: set[str], requests: bool) -> str:
    given = lambda name: name if name in made else "None"
    schedules = ", ".join(f'{block}: {{"tot": n_{s}, "batch_ptr": seq_{s}, "token_chunk_offset_ptr": part_{s}}}'
                          for s, block in zip(_schedules(planned), planned.blocks))
    tables = ", ".join(given(name) for name in ("chunks", "offsets", "rows", "counts"))
    result = f"StepTables({tables}, {{{schedules}}}, {planned.chunk})"
    return f"{result}, Requests(starts, slots, carries, first_carries)" if requests else result


def _arguments(planned, made: set[str], requests: bool, reciprocal: Callable | None = None) -> list[str]:
    """The arguments of a generated module's ``launch``, in order; of its kernel, with the module's ``reciprocal``."""
    given = lambda name: name if name in made else "None"
    names = ["cu_seqlens", "n_seqs", given("counts")]
    if planned.chunk:
        names += ["offsets", "chunks", given("rows"), "n_0"]
    for s, block in zip(_schedules(planned), planned.blocks):
        names += [f"seq_{s}", f"part_{s}", *map(str, reciprocal(block) if reciprocal else (block,)), f"n_{s}"]
    if requests:
        names += ["base", "first", "lens", "lens_n", "table", "table_n", "starts", "slots", "carries", "first_carries"]
    return names


def _allocate(tables: list[_Table], apart: bool) -> tuple[list[str], dict[str, str]]:
    """Statements that make the tables, and for each table its address, an expression of addresses of allocations."""
    lines, addresses = [], {}
    kinds = [] if apart else list(dict.fromkeys(table.dtype for table in tables))
    pools = [[table] for table in tables] if apart else [[t for t in tables if t.dtype == kind] for kind in kinds]
    for pool in pools:
        kind = pool[0].dtype
        if len(pool) == 1:
            table, = pool
            lines.append(f"{table.name} = empty({table.shape}, {kind})")
            addresses[table.name] = f"p_{table.name}"
            continue
        name, words, end, cut = f"all_{kind}".replace("torch.", ""), ALIGN // kind.itemsize, "0", []
        for table in pool:
            cut.append(f"{table.name} = view({name}, {table.shape}, {end})")
            addresses[table.name] = f"p_{name} + {end} * {kind.itemsize}"
            lines.append(f"end_{table.name} = {end} + {table.count} + {words - 1} & {-words}")
            end = f"end_{table.name}"
        lines += [f"{name} = empty(({end},), ONE, {kind})", *cut]
    return lines, addresses


def compose(planned, dtype: torch.dtype, rows: bool, counts: bool, requests: bool, apart: bool, *, run: Callable,
            cuda: bool, direct: tuple[Handle, ModuleType, int] | None = None) -> Callable:
    """``tables(cu_seqlens, n_seqs, sizes, *requests)``: what ``_tables.write`` returns for such a call.

    apart: an allocation for each, else for each dtype. run: called with the arguments of the generated module's ``launch``,
    to write them. cuda: in the memory of the current CUDA device, else in the CPU's. direct: (a compiled kernel's handle,
    its module, the device's index): launch that instead, unless a profiler has hooked Triton's launches.
    """
    tables = _tables(planned, dtype, rows, counts, requests)
    made = {table.name for table in tables}
    sizes = [f"n_{n}" for n in range(0 if planned.chunk else 1, len(planned.blocks) + 1)]
    allocate, addresses = _allocate(tables, apart)
    body = [f"{', '.join(sizes)}, = sizes", f"n_chunked = n_seqs{' - first' * requests}", *allocate]
    scope = {"torch": torch, "view": view, "empty": _empty_strided_cuda if cuda else _empty_strided_cpu,
             "StepTables": StepTables, "Requests": Requests, "run": run, "ONE": (1,), "TWO": (2, 1), "FOUR": (4, 1)}
    written = f"run({', '.join(_arguments(planned, made, requests))})"
    if direct is None:
        body.append(written)
    else:
        (_, _, call, function, cooperative, pdl, packed), module, index = direct
        scope |= {"runtime": knobs.runtime, "stream": torch._C._cuda_getCurrentRawStream, "call": call,
                  "function": function, "cooperative": cooperative, "pdl": pdl, "packed": packed}
        each = [f"(-(-{size} // {module.ROWS}) or 1)" for size in sizes] + [f"n_seqs // {module.ROWS} + 1"] * requests
        inputs = {name: f"{name}.data_ptr()" for name in ("cu_seqlens", "lens", "table")}
        values = [(addresses | inputs).get(name, name) for name in _arguments(planned, made, requests, module.reciprocal)]
        body += ["if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:", f"    {written}", "else:"]
        body += [f"    p_{name} = {name}.data_ptr()" for name in dict.fromkeys(
            address.split()[0].removeprefix("p_") for address in addresses.values())]
        body.append(f"    call({' + '.join(each)}, 1, 1, stream({index}), function, cooperative, pdl, None, None, packed, "
                    f"None, None, None, {', '.join(values)}, {module.ROWS})")
    body.append(f"return {_result(planned, made, requests)}")
    given = ", base, first, lens, lens_n, table, table_n" * requests
    exec(f"def tables(cu_seqlens, n_seqs, sizes{given}):\n    " + "\n    ".join(body) + "\n", scope)
    return scope["tables"]

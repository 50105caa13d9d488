"""The tables that a step needs before its first kernel: which sequence, and which part of it, each program works on.

Three ops over one kernel family (``step_tables``): the two functions that serving calls, and ``step_tables``, which makes
everything in one launch. None of them waits for the device: sizes come from the host's copy of the boundaries, or, in
bounded mode, from a number of tokens that is never exceeded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdagen.errors import ArgumentTypeError, refuse
from kdagen.ops import _mail
from kdagen.ops._common import check_tensors, register
from kdagen.ops._tables import bounded_sizes, exact_sizes, plan, write
from kdagen.ops._tables_source import StepTables


def prepare_chunk_metadata_device(
    cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor, chunk_size: int, *, checked: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunk table of a ragged batch, without a transfer between host and device.

    cu_seqlens      [N+1] int32 or int64: boundaries; they may start anywhere, only differences count.
    cu_seqlens_cpu  [N+1] int32 or int64 on the CPU: the same boundaries; the only source of the number of chunks NT.
    chunk_size      16, 32, 64 or 128 tokens.
    checked         False skips the checks of tensors: wrong ones are then undefined, but no store is out of bounds.

    Returns (chunk_indices, chunk_offsets) on cu_seqlens' device: [NT, 2] of cu_seqlens' dtype, rows (sequence, chunk in
    it), sequence-major; and [N+1] int64, exclusive cumulative chunk counts, the last NT. Row r is (n, t) if and only if
    r == chunk_offsets[n] + t. If the device's boundaries imply fewer chunks than the host's, the rows left over are -1;
    if they imply more, the table ends at NT, and the offsets are at most NT.

    Raises ArgumentError or ArgumentTypeError: dtype, shape, device, decreasing boundaries, chunk size.
    """
    if torch.compiler.is_compiling():
        return _prepare_op(cu_seqlens, cu_seqlens_cpu, chunk_size, checked)
    return _prepare(cu_seqlens, cu_seqlens_cpu, chunk_size, checked, False)[:2]


def build_conv1d_chunk_schedule(
    query_start_loc_cpu: torch.Tensor, block_m: int, device: torch.device | str | int, *, checked: bool = True,
) -> dict:
    """The programs of a ragged short convolution, each of which takes ``block_m`` tokens of one sequence.

    query_start_loc_cpu  [N+1] int32 or int64 on the CPU: boundaries; only differences count.
    device               where the tables go. No synchronisation; each call's tables are its own.

    Returns {"tot": the number of programs, an int; "batch_ptr": int32 [tot], each one's sequence;
    "token_chunk_offset_ptr": int32 [tot], its block in that sequence}, sequence-major; empty sequences have none.

    Raises ArgumentError or ArgumentTypeError: boundaries not on the CPU, dtype, shape, decreasing, block_m < 1; and inside
    a CUDA graph's capture, where the host's boundaries would be frozen (``step_tables(tokens=...)`` can be captured).
    """
    device = torch.device(device)
    if torch.compiler.is_compiling():
        seq, part = _conv_op(query_start_loc_cpu, block_m, device, checked)
        return {"tot": seq.shape[0], "batch_ptr": seq, "token_chunk_offset_ptr": part}
    return _conv(query_start_loc_cpu, block_m, device, checked, False).schedules[block_m]


def step_tables(
    cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None = None, *, chunk_size: int = 64,
    blocks: Sequence[int] = (), tokens: int | None = None, rows: bool = False, checked: bool = True,
) -> StepTables:
    """All tables of a step in one launch, from one read of the boundaries on the device.

    cu_seqlens      [N+1] int32 or int64: boundaries that never decrease (chunk_rows counts tokens as they do).
    cu_seqlens_cpu  [N+1] on the CPU: exact mode. Each table has exactly its rows; no transfer, no synchronisation.
    tokens          bounded mode, instead of cu_seqlens_cpu: never more tokens than this. Each table has
                    ceil(tokens / block) + N rows, -1 in those not used; the true counts stay on the device. Can be
                    captured in a CUDA graph and replayed after the boundaries changed in place.
    chunk_size      16, 32, 64 or 128: of the chunk table.
    blocks          block sizes of the conv schedules: up to 16, of any size. Each schedule's tensors are its own.
    rows            also write chunk_rows, aligned with chunk_indices.

    Returns a StepTables. No table gets more rows than its size, whatever the boundaries hold.

    Raises ArgumentError or ArgumentTypeError, as ``prepare_chunk_metadata_device``.
    """
    if not torch.compiler.is_compiling():
        return _step(cu_seqlens, cu_seqlens_cpu, chunk_size, blocks, tokens, rows, checked, False)
    blocks = list(dict.fromkeys(blocks))
    flat = iter(_step_op(cu_seqlens, cu_seqlens_cpu, chunk_size, blocks, tokens, rows, checked))
    indices, offsets = next(flat), next(flat)
    chunk_rows, counts = next(flat) if rows else None, None if tokens is None else next(flat)
    schedules = {}
    for block, seq, part in zip(blocks, flat, flat):
        schedules[block] = {"tot": seq.shape[0], "batch_ptr": seq, "token_chunk_offset_ptr": part}
    return StepTables(indices, offsets, chunk_rows, counts, schedules, chunk_size)


# ---- checks


_INTEGERS = (torch.int32, torch.int64)


def _check_boundaries(name: str, boundaries: torch.Tensor) -> None:
    if boundaries.dtype not in _INTEGERS:
        refuse(name, str(boundaries.dtype), "torch.int32 or torch.int64", f"Convert it: {name}.to(torch.int32).",
               kind=ArgumentTypeError)
    if boundaries.dim() != 1 or boundaries.shape[0] < 1:
        refuse(name, f"shape {list(boundaries.shape)}", "shape [N+1]: the start, then the end of each sequence")
    if not boundaries.is_contiguous():
        refuse(name, f"stride {boundaries.stride(0)}", "a contiguous tensor", f"Call {name}.contiguous().")


def check_host(name: str, host: torch.Tensor, like: torch.Tensor | None = None) -> None:
    """Refuse what is not the host's boundaries, of ``like``'s shape."""
    check_tensors((name,), (host,), "a torch.Tensor on the CPU")
    if not host.is_cpu:
        refuse(name, f"a tensor on {host.device}", "one on the CPU",
               "Keep the host's copy of the boundaries; a copy from the device would wait for it.", kind=ArgumentTypeError)
    _check_boundaries(name, host)
    if like is not None and host.shape != like.shape:
        refuse(name, f"shape {list(host.shape)}", f"the shape of cu_seqlens, {list(like.shape)}")


def _check_both(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor, entries: int) -> None:
    try:
        fitting = (cu_seqlens.dtype in _INTEGERS and cu_seqlens_cpu.dtype in _INTEGERS and cu_seqlens.dim() == 1
                   and cu_seqlens_cpu.dim() == 1 and cu_seqlens_cpu.numel() == entries > 0 and cu_seqlens_cpu.is_cpu
                   and cu_seqlens.is_contiguous() and cu_seqlens_cpu.is_contiguous())
    except AttributeError:  # the host's copy is no tensor
        fitting = False
    if not fitting:
        _check_boundaries("cu_seqlens", cu_seqlens)
        check_host("cu_seqlens_cpu", cu_seqlens_cpu, cu_seqlens)


# ---- implementations and fakes; ``apart`` is True under torch.compile


def _write(cu_seqlens, n_seqs: int, planned, sizes: list[int], *kind):
    """``write`` on the boundaries' own device."""
    index = cu_seqlens.get_device()
    if index < 0 or index == torch._C._cuda_getDevice():
        return write(cu_seqlens, n_seqs, planned, sizes, index, *kind)
    with torch.cuda.device(index):
        return write(cu_seqlens, n_seqs, planned, sizes, index, *kind)


def _flat(made: StepTables) -> list[torch.Tensor]:
    """What an op returns: the tables that there are, in order."""
    *tables, schedules, _ = made
    return [table for table in tables if table is not None] + [
        schedule[name] for schedule in schedules.values() for name in ("batch_ptr", "token_chunk_offset_ptr")]


def _prepare(cu_seqlens, cu_seqlens_cpu, chunk_size: int, checked: bool, apart: bool) -> StepTables:
    try:
        n_seqs = cu_seqlens.numel() - 1
    except AttributeError:
        check_tensors(("cu_seqlens",), (cu_seqlens,))
        raise
    if checked:
        _check_both(cu_seqlens, cu_seqlens_cpu, n_seqs + 1)
    planned = plan(chunk_size or 0)
    sizes = exact_sizes("cu_seqlens_cpu", cu_seqlens_cpu, n_seqs, planned, checked)
    return _write(cu_seqlens, n_seqs, planned, sizes, False, False, apart)


def _prepare_fake(cu_seqlens, cu_seqlens_cpu, chunk_size: int, checked: bool):
    n_chunks = torch.library.get_ctx().new_dynamic_size()
    return cu_seqlens.new_empty(n_chunks, 2), cu_seqlens.new_empty(cu_seqlens.shape[0], dtype=torch.int64)


def _conv(query_start_loc_cpu, block_m: int, device: torch.device, checked: bool, apart: bool) -> StepTables:
    try:
        n_seqs = query_start_loc_cpu.numel() - 1
    except AttributeError:
        check_tensors(("query_start_loc_cpu",), (query_start_loc_cpu,), "a torch.Tensor on the CPU")
        raise
    if checked:
        check_host("query_start_loc_cpu", query_start_loc_cpu)
    planned = plan(None, block_m)
    sizes = exact_sizes("query_start_loc_cpu", query_start_loc_cpu, n_seqs, planned, checked)
    if device.type == "cpu":
        return write(query_start_loc_cpu, n_seqs, planned, sizes, -1, False, False, apart)
    current = torch.cuda.current_device()
    if device.index is not None and device.index != current:
        with torch.cuda.device(device):
            return _conv(query_start_loc_cpu, block_m, device, checked, apart)
    if torch.cuda.is_current_stream_capturing():
        refuse("build_conv1d_chunk_schedule", "a call inside a graph's capture", "a call outside it",
               "step_tables(cu_seqlens, tokens=..., blocks=[block_m]) can be captured.")
    boundaries = _mail.post(query_start_loc_cpu.numpy(), current)
    return write(boundaries, n_seqs, planned, sizes, current, False, False, apart)


def _conv_fake(query_start_loc_cpu, block_m: int, device: torch.device, checked: bool):
    programs = torch.library.get_ctx().new_dynamic_size()
    return tuple(torch.empty(programs, dtype=torch.int32, device=device) for _ in range(2))


def _step(
    cu_seqlens, cu_seqlens_cpu, chunk_size: int, blocks, tokens: int | None, rows: bool, checked: bool, apart: bool,
) -> StepTables:
    if (cu_seqlens_cpu is None) == (tokens is None):
        refuse("tokens", f"{tokens} with cu_seqlens_cpu {'absent' if cu_seqlens_cpu is None else 'given'}",
               "either cu_seqlens_cpu (exact sizes) or tokens (bounded sizes)")
    try:
        planned = plan(chunk_size or 0, *blocks)
        n_seqs = cu_seqlens.numel() - 1
    except TypeError:  # not to be unpacked, or not to be hashed
        plan(chunk_size if isinstance(chunk_size, int) else repr(chunk_size))
        refuse("blocks", repr(blocks), "a sequence of block sizes, such as (8,)", kind=ArgumentTypeError)
    except AttributeError:
        check_tensors(("cu_seqlens",), (cu_seqlens,))
        raise
    if tokens is None:
        if checked:
            _check_both(cu_seqlens, cu_seqlens_cpu, n_seqs + 1)
        sizes = exact_sizes("cu_seqlens_cpu", cu_seqlens_cpu, n_seqs, planned, checked)
        return _write(cu_seqlens, n_seqs, planned, sizes, rows, False, apart)
    if checked:
        _check_boundaries("cu_seqlens", cu_seqlens)
        if not isinstance(tokens, int) or tokens < 0:
            refuse("tokens", repr(tokens), "a number of tokens that no batch exceeds")
    return _write(cu_seqlens, n_seqs, planned, bounded_sizes(n_seqs, tokens, planned), rows, True, apart)


def _step_fake(cu_seqlens, cu_seqlens_cpu, chunk_size: int, blocks, tokens, rows: bool, checked: bool):
    n_seqs = cu_seqlens.shape[0] - 1
    if tokens is None:
        context = torch.library.get_ctx()
        sizes = [context.new_dynamic_size() for _ in (chunk_size, *blocks)]
    else:
        sizes = [(tokens + block - 1) // block + n_seqs for block in (chunk_size, *blocks)]
    table = cu_seqlens.new_empty
    flat = [table(sizes[0], 2), table(n_seqs + 1, dtype=torch.int64)]
    if rows:
        flat.append(table(sizes[0], 4, dtype=torch.int32))
    if tokens is not None:
        flat.append(table(len(sizes), dtype=torch.int32))
    return flat + [table(size, dtype=torch.int32) for size in sizes[1:] for _ in range(2)]


_prepare_op = register(
    "prepare_chunk_metadata_device(Tensor cu_seqlens, Tensor cu_seqlens_cpu, int chunk_size, bool checked)"
    " -> (Tensor, Tensor)", lambda *arguments: tuple(_flat(_prepare(*arguments, True))), _prepare_fake)
_conv_op = register(
    "build_conv1d_chunk_schedule(Tensor query_start_loc_cpu, int block_m, Device device, bool checked)"
    " -> (Tensor, Tensor)", lambda *arguments: tuple(_flat(_conv(*arguments, True))), _conv_fake)
_step_op = register(
    "step_tables(Tensor cu_seqlens, Tensor? cu_seqlens_cpu, int chunk_size, int[] blocks, SymInt? tokens, bool rows,"
    " bool checked) -> Tensor[]", lambda *arguments: _flat(_step(*arguments, True)), _step_fake)

"""Benchmark of the step's metadata: host time of the calls, device time of the kernels, beside the plain way.

The plain way is one Triton kernel with a program a sequence, and torch calls on the host. Every time stands beside the
number of wrong entries of tables made in the same run (``error``). Each call is also made once with torch's sync debug mode
set to error, so one that waits for the device would fail.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
import triton
import triton.language as tl

from kdagen.ops.metadata import build_conv1d_chunk_schedule, prepare_chunk_metadata_device, step_tables
from kdagen.ops.staging import stage_spec_decode_metadata
from kdagen.reference import tables as reference

from .common import Budget, row, time_graph, time_host

CHUNK, BLOCK = 64, 8
CASES = {  # name -> (sequences, mean length)
    "N=1": (1, 1024), "N=16": (16, 512), "N=128": (128, 256), "N=1024": (1024, 128), "1 x 200k": (1, 200_000),
}
OPS = {  # what a case makes -> the op that makes it
    "all tables": "step_tables", "bounded tables": "step_tables", "chunk table": "prepare_chunk_metadata_device",
    "conv schedule": "build_conv1d_chunk_schedule", "staging": "stage_spec_decode_metadata",
}


@triton.jit(do_not_specialize=["N"])
def _plain_kernel(cu_seqlens, chunks, offsets, N, C: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr):
    """A program a sequence: its offset, then its rows, BR at a time."""
    i_n = tl.program_id(0)
    o_n = tl.arange(0, BN)
    m_n = o_n < N
    b_len = tl.load(cu_seqlens + o_n + 1, mask=m_n, other=0) - tl.load(cu_seqlens + o_n, mask=m_n, other=0)
    b_parts = (b_len + C - 1) // C
    first = tl.sum(tl.where(o_n < i_n, b_parts, 0))
    parts = tl.sum(tl.where(o_n == i_n, b_parts, 0))
    tl.store(offsets + i_n, first.to(tl.int64))
    if i_n == 0:
        tl.store(offsets + N, tl.sum(b_parts).to(tl.int64))
    for r in range(0, parts, BR):
        o_r = r + tl.arange(0, BR)
        tl.store(chunks + (first + o_r) * 2, i_n, mask=o_r < parts)
        tl.store(chunks + (first + o_r) * 2 + 1, o_r, mask=o_r < parts)


def plain_chunk_table(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor, chunk_size: int):
    n_seqs = len(cu_seqlens_cpu) - 1
    n_chunks = int(((cu_seqlens_cpu.diff() + chunk_size - 1) // chunk_size).sum())
    chunks = torch.empty(n_chunks, 2, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    offsets = torch.empty(n_seqs + 1, dtype=torch.int64, device=cu_seqlens.device)
    _plain_kernel[(n_seqs,)](cu_seqlens, chunks, offsets, n_seqs, C=chunk_size,
                             BN=max(128, triton.next_power_of_2(n_seqs + 1)), BR=256)
    return chunks, offsets


def plain_conv_schedule(query_start_loc_cpu: torch.Tensor, block_m: int, device: torch.device) -> dict:
    parts = (query_start_loc_cpu.diff().long() + block_m - 1) // block_m
    seq = torch.repeat_interleave(torch.arange(len(parts)), parts)
    part = torch.arange(len(seq)) - torch.repeat_interleave(parts.cumsum(0) - parts, parts)
    seq, part = (t.to(torch.int32).pin_memory().to(device, non_blocking=True) for t in (seq, part))
    return {"tot": len(seq), "batch_ptr": seq, "token_chunk_offset_ptr": part}


def wrong(*pairs) -> int:
    """Entries that differ from the oracle's, over all tables; a wrong shape counts as all of them."""
    return sum(int((a.cpu() != b.cpu()).sum()) if a.shape == b.shape else max(a.numel(), b.numel()) for a, b in pairs)


@contextmanager
def no_sync():
    """Fail on any call that waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def batch(case: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    sequences, mean = CASES[case]
    lengths = torch.full((1,), mean) if sequences == 1 else torch.randint(0, 2 * mean + 1, (sequences,))
    host = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return host.to(device), host


def _calls(cu, host, device):
    """(tables, implementation, call, pairs to compare) of every measured call."""
    chunk, conv = reference.chunk_table(host, CHUNK), reference.conv_schedule(host, BLOCK)

    def conv_pairs(made):
        return [(made[key], conv[key]) for key in ("batch_ptr", "token_chunk_offset_ptr")]

    def step_pairs(made):
        return [(made.chunk_indices, chunk[0]), (made.chunk_offsets, chunk[1]), *conv_pairs(made.schedules[BLOCK])]

    def both():
        return (prepare_chunk_metadata_device(cu, host, CHUNK), build_conv1d_chunk_schedule(host, BLOCK, device))

    def plain():
        return plain_chunk_table(cu, host, CHUNK), plain_conv_schedule(host, BLOCK, device)

    def two_pairs(made):
        return [*zip(made[0], chunk), *conv_pairs(made[1])]

    bound = int(host[-1])
    return [
        ("all tables", "kdagen", lambda: step_tables(cu, host, chunk_size=CHUNK, blocks=(BLOCK,)), step_pairs),
        ("all tables", "kdagen, unchecked",
         lambda: step_tables(cu, host, chunk_size=CHUNK, blocks=(BLOCK,), checked=False), step_pairs),
        ("all tables", "kdagen, two functions", both, two_pairs),
        ("all tables", "plain", plain, two_pairs),
        ("chunk table", "kdagen", lambda: prepare_chunk_metadata_device(cu, host, CHUNK), lambda made: [*zip(made, chunk)]),
        ("chunk table", "plain", lambda: plain_chunk_table(cu, host, CHUNK), lambda made: [*zip(made, chunk)]),
        ("conv schedule", "kdagen", lambda: build_conv1d_chunk_schedule(host, BLOCK, device), conv_pairs),
        ("conv schedule", "plain", lambda: plain_conv_schedule(host, BLOCK, device), conv_pairs),
        ("bounded tables", "kdagen",
         lambda: step_tables(cu, chunk_size=CHUNK, blocks=(BLOCK,), tokens=bound),
         lambda made: [(made.chunk_offsets, chunk[1]), (made.chunk_indices[:len(chunk[0])], chunk[0]),
                       (made.counts, torch.tensor([len(chunk[0]), conv["tot"]]))]),
    ]


def _staging(requests: int, device: torch.device):
    """A staging call for ``requests`` of 2 * requests rows, 3 columns of a 32-wide table, and its pairs."""
    rows = 2 * requests
    sources = (torch.randint(1, 9999, (requests, 32), dtype=torch.int32, device=device),
               torch.arange(requests + 1, dtype=torch.int32, device=device) * 3,
               torch.randint(1, 4, (requests,), dtype=torch.int32, device=device))
    staged = tuple(torch.full(shape, -7, dtype=torch.int32, device=device) for shape in ((rows, 3), (rows + 1,), (rows,)))
    wanted = reference.stage_spec_decode(*(t.cpu() for t in sources), rows, 3, requests)
    return (lambda: stage_spec_decode_metadata(*sources, *staged, num_spec_decodes=requests)), staged, wanted


def _rows(case: str, tables: str, who: str, call, error: int, size: int, *, graph: bool, **sizes) -> list[dict]:
    with no_sync():
        call()
    common = {"error": float(error), "error_against": "entries that differ from the oracle's", "tables": tables, **sizes}
    name, op = f"{case}, {tables}", OPS[tables]
    rows = [row("metadata", name, op, who, time_host(call), how="host", **common)]
    if graph:
        rows.append(row("metadata", name, op, who, time_graph([call], budget_ms=20), how="graph", bytes_moved=size,
                        **common))
    return rows


def run(budget_s: float, *, peers: tuple[str, ...] = ()) -> list[dict]:
    """All rows of the section: host time of each call, device time of those that a graph can hold."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    for case in Budget(budget_s).over(CASES):
        cu, host = batch(case, device)
        sizes = {"seqs": len(host) - 1, "tokens": int(host[-1])}
        empty = time_host(lambda: torch.empty(1000, dtype=torch.int32, device=device))
        rows.append(row("metadata", f"{case}, one torch.empty", "torch.empty", "torch", empty, how="host",
                        note="what host times of this run compare with", **sizes))
        for tables, who, call, pairs in _calls(cu, host, device):
            made = pairs(call())
            size = sum(a.numel() * a.element_size() for a, _ in made)
            graph = tables == "chunk table" or (tables != "conv schedule" and who == "kdagen")
            rows += _rows(case, tables, who, call, wrong(*made), size, graph=graph, **sizes)
    for requests in (1, 33, 512):
        call, staged, wanted = _staging(requests, device)
        call()
        size = 2 * sum(t.numel() * t.element_size() for t in staged)
        rows += _rows(f"S={requests}", "staging", "kdagen", call, wrong(*zip(staged, wanted)), size, graph=True,
                      seqs=requests)
    return rows

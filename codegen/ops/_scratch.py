"""Scratch of kernels whose programs count arrivals: int32 counters, zero between launches, and fp32 values.

The last program to arrive sets its counter back to zero, so that nothing is reset between launches. In return no two
launches that may run at the same time share counters:

- Each stream has counters and values of its own. They grow with its largest launch.
- Each stream of a graph capture has counters of its own, for all launches of that capture: a part of a block that an
  earlier call outside any capture has allocated and zeroed. It is never given back, as nobody says when a graph is gone.
  The values are memory of the graph's own pool. Once captures have used half of a block, the next call of their thread
  outside of them makes a new one.
- A capture that finds no room, or cannot be told from others, has counters of its graph's pool, zeroed by the graph.

What outlives a call is allocated outside of the memory pools that the caller may be in (``_lasting``).

A launch that fails on the host has run no program. One that fails on the device takes the context, and with it all
counters: every later call reports that. So counters are off only after two launches at once on one stream's handle or one
captured graph, which CUDA orders one after the other. A destroyed stream's handle may come again: finish its work before.
"""

from __future__ import annotations

import ctypes
import threading
from typing import NamedTuple

import torch

from kdagen.ops._captures import driver
from kdagen.ops._lasting import lasting

BLOCK = 1 << 20  # counters of a block: 4 MB, 128 captures of 256 sequences and 32 heads
LINE = 32        # parts start on a memory line of their own


class Scratch(NamedTuple):
    counters: torch.Tensor | None
    values: torch.Tensor | None
    addresses: list[int]
    room: tuple[int, int]  # how many counters and values there are: known without asking the tensors

    @classmethod
    def of(cls, counters: torch.Tensor, values: torch.Tensor) -> Scratch:
        return cls(counters, values, [counters.data_ptr(), values.data_ptr()], (len(counters), len(values)))


NO_SCRATCH = Scratch(None, None, [0, 0], (0, 0))  # of a launch whose programs share nothing


class _Block:
    """Zeroed counters of one device, cut from the front."""

    def __init__(self, device: torch.device):
        self.memory = lasting(device, lambda: torch.zeros(BLOCK, dtype=torch.int32, device=device))
        self.used = 0
        done = torch.cuda.Event()
        done.record()
        done.synchronize()  # once a block: graphs on any stream may use it from now on

    def cut(self, count: int) -> torch.Tensor | None:
        start, self.used = self.used, self.used + -(-count // LINE) * LINE
        if self.used <= BLOCK:
            return self.memory[start : start + count]
        self.used = start
        return None

    @property
    def low(self) -> bool:
        return self.used > BLOCK // 2


_lock = threading.Lock()
_blocks: dict[int, _Block] = {}                            # of a device
_streams: dict[tuple[int, int], Scratch] = {}              # of a device and stream
_captures: dict[tuple[int, int, int], torch.Tensor] = {}   # of a device, capture and stream
_low: dict[int, int] = {}  # a device whose block is low -> the thread whose capture used it last


def scratch(device: torch.device, index: int, counters: int, values: int) -> Scratch:
    """At least so many counters and values for the next launch on the current stream of device ``index`` (-1: the CPU)."""
    if index < 0:
        return Scratch.of(torch.zeros(counters, dtype=torch.int32), torch.empty(values))
    stream = torch._C._cuda_getCurrentRawStream(index)
    if torch._C._cuda_isCurrentStreamCapturing():
        return Scratch.of(_captured(device, index, stream, counters), torch.empty(values, device=device))
    found = _streams.get((index, stream))
    if found is None or found.room[0] < counters or found.room[1] < values:
        found = _streams[index, stream] = lasting(device, lambda: _larger(device, found, counters, values))
        _renew(device, index)
    elif _low and _low.get(index) == threading.get_ident():
        _renew(device, index)
    return found


def _renew(device: torch.device, index: int) -> None:
    """A block for captures to come, where there is none or it is low; graphs keep their parts of the old one.

    In the steady state only the thread whose captures used it comes here, when they are over: a block is waited for, and
    while any thread captures, CUDA lets nobody wait for an event.
    """
    with _lock:
        if index not in _blocks or _blocks[index].low:
            _blocks[index] = _Block(device)
        _low.pop(index, None)


def _larger(device: torch.device, found: Scratch | None, counters: int, values: int) -> Scratch:
    """New scratch of the current stream, each part a power of two and no smaller than before."""
    if found is not None:
        counters, values = max(counters, found.room[0]), max(values, found.room[1])
    counters, values = (1 << max(0, size - 1).bit_length() for size in (counters, values))
    return Scratch.of(torch.zeros(counters, dtype=torch.int32, device=device), torch.empty(values, device=device))


def _captured(device: torch.device, index: int, stream: int, counters: int) -> torch.Tensor:
    capture = _capture_number(stream)
    key = index, capture, stream
    with _lock:
        found = _captures.get(key)
        if found is None or len(found) < counters:
            found = _blocks[index].cut(counters) if capture is not None and index in _blocks else None
            if index in _blocks and _blocks[index].low:
                _low[index] = threading.get_ident()
            if found is None:
                return torch.zeros(counters, dtype=torch.int32, device=device)
            _captures[key] = found
    return found


def _capture_number(stream: int) -> int | None:
    """The process-wide number of the capture that a stream is in, or None if the driver does not say."""
    ask = driver("cuStreamGetCaptureInfo_v2", "hipStreamGetCaptureInfo_v2")
    status, number = ctypes.c_int(), ctypes.c_uint64()
    if ask is None or ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None):
        return None
    return number.value if status.value == 1 else None

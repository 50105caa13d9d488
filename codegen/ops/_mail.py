"""Small host arrays that a kernel reads in place: pinned pages, so that a launch needs no copy before it.

A GPU reads pinned host memory through the same address. A page has SLOTS slots, all used by one stream of one thread;
when the last is taken, the next call records an event, and the page is used again once the event has passed. No call waits
for an event: while all pages are busy, a new one is allocated.
"""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import torch

from kdagen.ops._captures import permitted

SLOTS = 32


class _Page:
    def __init__(self, width: int):
        memory = torch.empty(SLOTS, width, dtype=torch.int32, pin_memory=True)
        self.width = width
        self.slots = [(slot, slot.numpy()) for slot in memory]
        self.used = 0
        self.event = torch.cuda.Event()


class _Stream:
    """The pages of one stream: the open one, and those that wait for their event."""

    def __init__(self):
        self.open: _Page | None = None
        self.busy: deque[_Page] = deque()

    def turn(self, width: int) -> _Page:
        """Retire the open page and open one with slots of at least ``width``."""
        if self.open is not None:
            self.open.event.record()
            self.busy.append(self.open)
        if self.busy and self._over(self.busy[0]):
            page = self.busy.popleft()
            if page.width >= width:
                page.used = 0
                self.open = page
                return page
        self.open = _Page(1 << max(9, (width - 1).bit_length()))
        return self.open

    @staticmethod
    def _over(page: _Page) -> bool:
        with permitted():
            return page.event.query()


class _Streams(threading.local):
    def __init__(self):
        self.of: dict[tuple[int, int], _Stream] = {}


_streams = _Streams()


def post(array: np.ndarray, index: int) -> torch.Tensor:
    """A pinned int32 tensor that begins with ``array``, to be read by one launch on the current stream of device ``index``.

    The launch must be the thread's next work on that stream. Values wrap to int32: differences stay right.
    """
    key = index, torch._C._cuda_getCurrentRawStream(index)
    stream = _streams.of.get(key)
    if stream is None:
        stream = _streams.of[key] = _Stream()
    page, width = stream.open, len(array)
    if page is None or page.used == SLOTS or page.width < width:
        page = stream.turn(width)
    slot, view = page.slots[page.used]
    page.used += 1
    view[:width] = array
    return slot

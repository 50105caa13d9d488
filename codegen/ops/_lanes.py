"""Streams and events beside the caller's stream, and constants for any stream; nothing here waits for the device."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from kdagen.ops._captures import is_capturing, own_stream, permitted
from kdagen.ops._lasting import lasting
from kdagen.ops._prefill_cut import HIGH, MAIN, MAPS, SIDE

GRAPH = "graph"  # the stream that a call is captured on
PRIORITY = {SIDE: 0, HIGH: -5, MAPS: -5, GRAPH: 0}  # the state pass and the maps: their programs are placed first
MAX_CALLS = 1024  # bound calls that a thread remembers on a device
GRAPH_AT = 4      # the time that a call comes with the same addresses at which it becomes a graph: that costs as much as a
#                   replay saves in three or four calls, and most calls never come again
MAX_GRAPHS = 256  # graphs of this process, all kept: to drop one while something captures would break the capture

Functions = list[tuple[Callable, tuple]]


class Bound:
    """A call bound to its addresses: the C functions that do it, with their arguments; later one graph of them."""

    __slots__ = ("functions", "graph", "times")

    def __init__(self, functions: Functions):
        self.functions, self.graph, self.times = functions, None, 0

    def run(self, lane: Lanes, bind: Callable[[Lanes], Functions | None]) -> None:
        """Do the call on the current stream; ``bind(lane)`` gives its functions for another one, to be captured there."""
        capturing = torch.cuda.is_current_stream_capturing()
        if self.graph is not None and not capturing:
            self.graph.replay()
            return
        for function, arguments in self.functions:
            function(*arguments)
        self.times += 1
        if self.times == GRAPH_AT and not capturing:
            self.graph = lane.graph(bind)


class Lanes:
    """The streams and events of one thread on one device, made once and used again by every call.

    Threads do not share them: a wait takes up the latest record of its event, whoever made that, and what is put on a
    stream that another thread captures takes part in that capture instead of being done. When the thread ends, the streams
    go to the next one that has none.
    """

    def __init__(self, device: int):
        self.device = device
        self.spare = _SPARE.setdefault(device, [])
        self.streams: dict[str, torch.cuda.Stream] = self.spare.pop() if self.spare else {}
        self.events: list[torch.cuda.Event] = []
        self.calls: dict[tuple, Bound] = {}  # by layout and all addresses

    def __del__(self):
        self.spare.append(self.streams)

    def stream(self, name: str) -> torch.cuda.Stream:
        """A stream of _prefill_cut's names, or GRAPH: the current one, or one of the thread's own."""
        if name == MAIN:
            return torch.cuda.current_stream(self.device)
        found = self.streams.get(name)
        if found is None:
            found = self.streams[name] = own_stream(self.device, PRIORITY[name])
        return found

    def keep(self, key: tuple, bound: Bound) -> None:
        if len(self.calls) >= MAX_CALLS:
            self.calls = {key: other for key, other in self.calls.items() if other.graph is not None}
        self.calls[key] = bound

    def graph(self, bind: Callable[[Lanes], Functions | None]) -> torch.cuda.CUDAGraph | None:
        """What ``bind(self)`` gives for the stream it is called on, as a graph to be replayed on any; None once there are
        many. Nothing runs yet; other threads may go on meanwhile, and capture graphs of their own."""
        if len(_GRAPHS) >= MAX_GRAPHS:
            return None
        with permitted(), torch.cuda.stream(self.stream(GRAPH)):
            functions = bind(self)
            if functions is None:
                return None
            made = torch.cuda.CUDAGraph()
            made.capture_begin(capture_error_mode="thread_local")
            for function, arguments in functions:
                function(*arguments)
            made.capture_end()
        _GRAPHS.append(made)
        return made

    def event(self, index: int) -> torch.cuda.Event:
        while index >= len(self.events):
            self.events.append(torch.cuda.Event())
        return self.events[index]

    def record(self, index: int, stream: torch.cuda.Stream) -> tuple[Callable, tuple]:
        """(function, arguments) that record an event: torch's C method, past the Python around it."""
        return super(torch.cuda.Event, self.event(index)).record, (stream,)

    def wait(self, index: int, stream: torch.cuda.Stream) -> tuple[Callable, tuple]:
        """(function, arguments) that make a stream wait for an event."""
        return super(torch.cuda.Event, self.event(index)).wait, (stream,)


_LOCAL = threading.local()
_SPARE: dict[int, list[dict[str, torch.cuda.Stream]]] = {}
_GRAPHS: list[torch.cuda.CUDAGraph] = []


def lanes(device: int) -> Lanes:
    found = _LOCAL.__dict__.get(device)
    if found is None:
        found = _LOCAL.__dict__[device] = Lanes(device)
    return found


class Constants:
    """Tensors on a device that are computed once, on whatever stream is the current one, and then read on any.

    Until the device is known to be done with them (it is asked in passing, never waited for), every reader's stream waits
    for their event; a graph's capture makes its own, as it cannot wait for work outside of it. They are never dropped, since
    a graph or another stream may still read them: once ``limit`` of them are kept, the others are made in each call. Those
    that are kept are made outside of the caller's memory pools (``_lasting``).
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._made: dict = {}            # key -> Made
        self._pending: list[Made] = []   # those that the device may not be done with
        self._lock = threading.Lock()    # for what a first call and settle change; a later get needs none

    def get(self, key, like: torch.Tensor, make: Callable[[], tuple]) -> tuple:
        """The tensors of ``key``, which ``make()`` computes on the current stream of ``like``'s device, the current one."""
        found = self._made.get(key)
        if found is None:
            return self._first(key, like, make)
        event = found.event  # another thread may find it over, and forget it, meanwhile
        if event is not None and not found.over():
            if torch.cuda.is_current_stream_capturing():
                return make()
            event.wait()
        return found.tensors

    def _first(self, key, like: torch.Tensor, make: Callable[[], tuple]) -> tuple:
        if is_capturing(like) or len(self._made) >= self.limit:
            return make()
        made = Made(lasting(like.device, make), None)
        if like.is_cuda:
            made.event = torch.cuda.Event()
            made.event.record()
        with self._lock:
            first = self._made.setdefault(key, made)
            if first is made and made.event is not None:
                self._pending.append(made)
        return made.tensors if first is made else self.get(key, like, make)  # another thread was quicker

    def settle(self) -> None:
        """Ask the device for those it was not done with, so that a capture after this call need not make its own."""
        if self._pending:
            with self._lock:
                self._pending = [made for made in self._pending if not made.over()]


class Made:
    """Tensors, and the event after their making until it is known to have happened."""

    __slots__ = ("event", "tensors")

    def __init__(self, tensors: tuple, event: torch.cuda.Event | None):
        self.tensors, self.event = tensors, event

    def over(self) -> bool:
        """Whether the device is done; False inside a capture, which must not ask."""
        event = self.event
        if event is None:
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
        with permitted():
            if not event.query():
                return False
        self.event = None
        return True

"""Taking time on a GPU: CUDA-graph replays over inputs that overflow the L2 cache, eager calls, the host's own share.

Times are medians with the 20th and 80th percentile. ``time_graph`` is the figure to compare kernels by: a graph of
calls that rotate over input sets which together overflow the cache, so launches cost nothing and data is cold.
``time_eager`` is what a caller without graphs waits for; ``time_host`` is the CPU's share of it. The sweep and
scripts/benchmark.py both use these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

L2_MARGIN = 3        # rotating inputs cover this many times the L2 cache
MAX_SETS = 64        # ... with no more sets than this
WARM_MS = 15.0       # the clocks of an idle GPU need some milliseconds of work

Call = Callable[[], object]


class Timing(NamedTuple):
    """Microseconds of one call: median, 20th and 80th percentile, and how many samples they come from."""

    us: float
    p20: float
    p80: float
    samples: int

    @property
    def noise(self) -> float:
        """Half the spread between the percentiles, relative to the median."""
        return (self.p80 - self.p20) / (2 * self.us) if self.us else 0.0


def summarize(samples_us: Sequence[float]) -> Timing:
    """Median and percentiles (nearest rank) of samples in microseconds."""
    ordered = sorted(samples_us)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    return Timing(at(0.5), at(0.2), at(0.8), len(ordered))


# Inputs

def l2_bytes() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


def sets_needed(bytes_a_call: float) -> int:
    """How many input sets a rotation takes so that a call never finds its own data in the L2 cache."""
    return max(2, min(MAX_SETS, -(-L2_MARGIN * l2_bytes() // max(1, int(bytes_a_call)))))


def rotate(make: Callable[[int], Call], bytes_a_call: float) -> list[Call]:
    """``make(seed)`` called once a set: the closures that ``time_graph`` and ``time_eager`` rotate over."""
    return [make(seed) for seed in range(sets_needed(bytes_a_call))]


# Time

def warm(call: Call, ms: float = WARM_MS) -> None:
    """Run for some milliseconds: compilation, handles and clocks are behind us afterwards."""
    call()
    torch.cuda.synchronize()
    end = time.perf_counter() + ms / 1e3
    while time.perf_counter() < end:
        call()
        torch.cuda.synchronize()


def capture(calls: Sequence[Call], repeats: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of all calls in turn, ``repeats`` times over; each is run once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    return graph


def time_graph(calls: Sequence[Call], *, budget_ms: float = 60.0, min_us: float = 300.0) -> Timing:
    """Device time of one call in a replayed graph of the calls; a graph lasts at least ``min_us``.

    The outputs that the closures allocate live in the graph's pool: keep big outputs preallocated.
    """
    return interleaved([calls], budget_ms=budget_ms, min_us=min_us)[0]


def interleaved(rivals: Sequence[Sequence[Call]], *, budget_ms: float = 60.0, min_us: float = 300.0) -> list[Timing]:
    """``time_graph`` of several rivals, their replays taking turns, so that drift hits them alike."""
    return race([Lap.of(calls, min_us=min_us) for calls in rivals], budget_ms=budget_ms)


class Lap(NamedTuple):
    """A captured graph and how many calls one replay makes."""

    graph: torch.cuda.CUDAGraph
    calls: int

    @classmethod
    def of(cls, calls: Sequence[Call], *, min_us: float = 300.0) -> Lap:
        """A graph of the calls in turn, repeated until a replay lasts at least ``min_us``."""
        graph = capture(calls)
        repeats = max(1, -(-int(min_us) // max(1, int(_graph_us(graph)))))
        return cls(graph if repeats == 1 else capture(calls, repeats), len(calls) * repeats)

    def us(self) -> float:
        """Microseconds of one call in one replay."""
        return _graph_us(self.graph) / self.calls


def race(laps: Sequence[Lap], *, budget_ms: float = 60.0, rounds: tuple[int, int] = (5, 200)) -> list[Timing]:
    """Replay the graphs in turn until the budget is over (at least and at most so many rounds)."""
    for _ in range(2):
        for lap in laps:
            lap.graph.replay()
    torch.cuda.synchronize()
    samples: list[list[float]] = [[] for _ in laps]
    end = time.perf_counter() + budget_ms / 1e3
    done = 0
    while done < rounds[0] or (time.perf_counter() < end and done < rounds[1]):
        events = []
        for lap in laps:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            lap.graph.replay()
            stop.record()
            events.append((start, stop))
        torch.cuda.synchronize()
        for mine, lap, (start, stop) in zip(samples, laps, events):
            mine.append(start.elapsed_time(stop) * 1e3 / lap.calls)
        done += 1
    return [summarize(mine) for mine in samples]


def _graph_us(graph: torch.cuda.CUDAGraph) -> float:
    graph.replay()
    torch.cuda.synchronize()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3


def time_eager(calls: Sequence[Call], *, budget_ms: float = 60.0) -> Timing:
    """Time of one eager call as its caller sees it: host launches and device work, events around each call, cold L2."""
    warm(calls[0])
    samples, turn = [], 0
    end = time.perf_counter() + budget_ms / 1e3
    while len(samples) < 5 or (time.perf_counter() < end and len(samples) < 500):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        calls[turn % len(calls)]()
        stop.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(stop) * 1e3)
        turn += 1
    return summarize(samples)


def time_host(call: Call, *, budget_ms: float = 40.0) -> Timing:
    """CPU time of one call, without waiting for the device (batches of 20 between synchronizations)."""
    warm(call, 5.0)
    samples = []
    end = time.perf_counter() + budget_ms / 1e3
    while len(samples) < 3 or (time.perf_counter() < end and len(samples) < 500):
        before = time.perf_counter()
        for _ in range(20):
            call()
        samples.append((time.perf_counter() - before) * 1e6 / 20)
        torch.cuda.synchronize()
    return summarize(samples)

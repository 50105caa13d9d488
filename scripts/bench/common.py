"""What all benchmark sections share: how time is taken, the measured ceilings, the environment, and the shape of a row.

Device times are medians with the 20th and 80th percentile. ``time_graph`` is the figure to compare kernels by: a CUDA
graph of calls that rotate over input sets which together overflow the L2 cache, so launches cost nothing and data is cold.
``time_eager`` is what a caller without graphs waits for; ``time_host`` is the CPU's share of it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

import torch

L2_MARGIN = 3        # rotating inputs cover this many times the L2 cache
MAX_SETS = 64        # ... with no more sets than this
WARM_MS = 15.0       # the clocks of an idle GPU need some milliseconds of work


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


class Budget:
    """Seconds that a section may spend: ``for case in budget.over(cases)`` stops before the case that would not fit."""

    def __init__(self, seconds: float):
        self.seconds, self.start = seconds, time.monotonic()

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.start)

    def over(self, cases: Iterable) -> Iterable:
        longest = 0.0
        for case in cases:
            if self.left < longest:
                return
            before = time.monotonic()
            yield case
            longest = max(longest, time.monotonic() - before)


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


def rotate(make: Callable[[int], Callable[[], object]], bytes_a_call: float) -> list[Callable[[], object]]:
    """``make(seed)`` called once a set: the closures that ``time_graph`` and ``time_eager`` rotate over."""
    return [make(seed) for seed in range(sets_needed(bytes_a_call))]


# Time

def warm(call: Callable[[], object], ms: float = WARM_MS) -> None:
    """Run for some milliseconds: compilation, handles and clocks are behind us afterwards."""
    call()
    torch.cuda.synchronize()
    end = time.perf_counter() + ms / 1e3
    while time.perf_counter() < end:
        call()
        torch.cuda.synchronize()


def capture(calls: Sequence[Callable[[], object]], repeats: int = 1) -> torch.cuda.CUDAGraph:
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


def time_graph(calls: Sequence[Callable[[], object]], *, budget_ms: float = 60.0, min_us: float = 300.0) -> Timing:
    """Device time of one call in a replayed graph of the calls; a graph lasts at least ``min_us``.

    The outputs that the closures allocate live in the graph's pool: keep big outputs preallocated.
    """
    return interleaved([calls], budget_ms=budget_ms, min_us=min_us)[0]


def interleaved(rivals: Sequence[Sequence[Callable[[], object]]], *, budget_ms: float = 60.0,
                min_us: float = 300.0) -> list[Timing]:
    """``time_graph`` of several rivals, their replays taking turns, so that drift hits them alike. Budget: all together."""
    graphs, per_graph = [], []
    for calls in rivals:
        graph = capture(calls)
        once = _graph_us(graph)
        repeats = max(1, -(-int(min_us) // max(1, int(once))))
        if repeats > 1:
            graph = capture(calls, repeats)
        graphs.append(graph)
        per_graph.append(len(calls) * repeats)
    for _ in range(2):
        for graph in graphs:
            graph.replay()
    torch.cuda.synchronize()
    samples: list[list[float]] = [[] for _ in graphs]
    end = time.perf_counter() + budget_ms / 1e3
    rounds = 0
    while rounds < 5 or (time.perf_counter() < end and rounds < 200):
        events = []
        for graph in graphs:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            events.append((start, stop))
        torch.cuda.synchronize()
        for mine, count, (start, stop) in zip(samples, per_graph, events):
            mine.append(start.elapsed_time(stop) * 1e3 / count)
        rounds += 1
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


def time_eager(calls: Sequence[Callable[[], object]], *, budget_ms: float = 60.0) -> Timing:
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


def time_host(call: Callable[[], object], *, budget_ms: float = 40.0) -> Timing:
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


# Ceilings of this card, in this run

@cache
def copy_ceiling() -> float:
    """Bytes a second of a large device-to-device copy, read plus written."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    timing = time_graph([lambda: target.copy_(source)])
    return 2 * source.numel() * source.element_size() / (timing.us * 1e-6)


@cache
def matmul_ceiling() -> float:
    """Operations a second of a bf16 8192 x 8192 x 8192 matrix product of random data."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    timing = time_graph([lambda: torch.matmul(a, b, out=out)])
    return 2 * n**3 / (timing.us * 1e-6)


def floor_us(bytes_moved: float, operations: float = 0.0) -> float:
    """No version runs much faster: bytes over the copy ceiling, or operations over the product ceiling."""
    return max(bytes_moved / copy_ceiling(), operations / matmul_ceiling() if operations else 0.0) * 1e6


# Results

def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """norm(out - ref) / norm(ref) in fp64; NaN or infinity anywhere gives infinity."""
    out, ref = out.double(), ref.double()
    if out.shape != ref.shape:
        raise ValueError(f"out has shape {list(out.shape)}, the reference {list(ref.shape)}")
    if not torch.isfinite(out).all():
        return float("inf")
    scale = ref.norm().item()
    error = (out - ref).norm().item()
    return error / scale if scale else error


def row(section: str, case: str, who: str, timing: Timing, *, how: str, bytes_moved: float = 0.0, operations: float = 0.0,
        err: float | None = None, err_against: str = "", note: str = "", **sizes: float | int | str) -> dict:
    """One line of the report. ``who`` is kdagen or a peer; ``how`` is graph, eager or host.

    ``sizes`` are the case's numbers (tokens, seqs, heads, batch ...): what plot.py draws against. With bytes or
    operations, the row carries its floor on this card and the share of it that was reached.
    """
    if how not in ("graph", "eager", "host"):
        raise ValueError(f"how: got {how!r}, expected graph, eager or host")
    out = {"section": section, "case": case, "who": who, "how": how, "us": timing.us, "p20": timing.p20,
           "p80": timing.p80, "samples": timing.samples, **sizes}
    if bytes_moved or operations:
        floor = floor_us(bytes_moved, operations)
        out |= {"bytes": int(bytes_moved), "operations": int(operations), "floor_us": floor, "share": floor / timing.us,
                "tb_s": bytes_moved / timing.us * 1e-6}
    if err is not None:
        out |= {"err": err, "err_against": err_against}
    if note:
        out["note"] = note
    return out


def skipped(section: str, case: str, who: str, why: str) -> dict:
    """The line of a case that could not run: the reason instead of a time."""
    return {"section": section, "case": case, "who": who, "skipped": why}


# Environment

PEERS = {"fla": ("fla", "fla-core"), "flashkda": ("flash_kda", "tokenspeed-flashkda")}  # name -> module, distribution


def peer(name: str):
    """The peer's module, or None where it cannot be imported."""
    try:
        return importlib.import_module(PEERS[name][0])
    except ImportError:
        return None


def package_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict:
    """What the figures depend on: the card and its clocks, versions, the measured ceilings."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    modules = {name: peer(name) for name in PEERS}
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "clocks": _clocks(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "triton": package_version("triton"),
        "python": platform.python_version(),
        "kdagen": package_version("kdagen"),
        "peers": {name: package_version(PEERS[name][1]) or getattr(module, "__version__", "unknown")
                  for name, module in modules.items() if module},
        "copy_tb_s": copy_ceiling() * 1e-12,
        "matmul_tflop_s": matmul_ceiling() * 1e-12,
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _clocks() -> str:
    """Driver, SM and memory clocks and power limit as nvidia-smi reports them; read, never set."""
    query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    try:
        return subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True,
                              text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"

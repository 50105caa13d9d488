"""What all benchmark sections share: the budget, the measured ceilings, the environment, and the shape of a row.

Time is taken by kdagen.tuning.timing, whose functions are at hand here: ``time_graph``, ``interleaved``,
``time_eager``, ``time_host``, ``rotate``, ``warm``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import platform
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from kdagen import dispatch
from kdagen.tuning.timing import (  # noqa: F401  (the sections take them from here)
    Lap,
    Timing,
    interleaved,
    race,
    rotate,
    sets_needed,
    summarize,
    time_eager,
    time_graph,
    time_host,
    warm,
)


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


class TooLong(Exception):
    """A peer outlasted its time."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise TooLong inside the block once it has lasted so many seconds: a peer's first call may compile for minutes.

    By SIGALRM, in the main thread: between two bytecodes, so what a library does in one call is waited for.
    """
    if math.isinf(seconds):
        yield
        return

    def stop(*_):
        raise TooLong(f"more than {seconds:.0f} s until its first result")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Ceilings of this card, in this run

@cache
def copy_ceiling() -> float:
    """Bytes a second of a large device-to-device copy, read plus written.

    Eager: a graph would replay it as a memcpy node, which moves less (2.75 against 4.2 TB/s seen on an H200).
    """
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    timing = time_eager([lambda: target.copy_(source)])
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

HOW = ("graph", "graph, alone", "eager", "host")


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


def row(section: str, case: str, op: str, implementation: str, timing: Timing, *, how: str, bytes_moved: float = 0.0,
        operations: float = 0.0, error: float | None = None, error_against: str = "", note: str = "",
        **sizes: float | int | str) -> dict:
    """One line of the report. ``op`` is the public op that the case is about, ``implementation`` is kdagen or a peer of it,
    ``how`` is graph, eager, host, or "graph, alone": without peers.

    ``sizes`` are the case's numbers (tokens, seqs, heads, batch ...): what plot.py draws against. With bytes or
    operations, the row carries its floor on this card and the share of it that was reached.
    """
    if how not in HOW:
        raise ValueError(f"how: got {how!r}, expected one of {', '.join(map(repr, HOW))}")
    out = {"section": section, "case": case, "op": op, "implementation": implementation, "how": how, "us": timing.us,
           "p20": timing.p20, "p80": timing.p80, "samples": timing.samples, **sizes}
    if bytes_moved or operations:
        floor = floor_us(bytes_moved, operations)
        out |= {"bytes": int(bytes_moved), "operations": int(operations), "floor_us": floor, "share": floor / timing.us,
                "tb_s": bytes_moved / timing.us * 1e-6}
    if error is not None:
        out |= {"error": error, "error_against": error_against}
    if note:
        out["note"] = note
    return out


def skipped(section: str, case: str, op: str, implementation: str, why: str) -> dict:
    """The line of a case that could not run: the reason instead of a time."""
    return {"section": section, "case": case, "op": op, "implementation": implementation, "skipped": why}


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
    """What the figures depend on: the card and its clocks, versions, the measured ceilings.

    ``generated`` is dispatch's digest of the kernels and tables.
    """
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
        "generated": dispatch.digest()[:12],
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

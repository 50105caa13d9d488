"""Worker processes with a deadline a job: a crash or a hang costs one job, never the sweep.

A worker imports ``module:function`` after its environment is set (which GPU it sees, if any), then answers one job after
the other. Ctrl-C and SIGTERM reach the parent alone, which stops its workers.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from multiprocessing import connection, get_context
from typing import Any, NamedTuple

CUDA_BROKEN = ("CUDA error", "an illegal memory access", "unspecified launch failure", "misaligned address",
               "HIP error", "device-side assert", "CUDA driver error")


class Failed(NamedTuple):
    """Why a job has no result: it raised (error), its process died (crash), or it outlasted its time (timeout)."""

    kind: str
    why: str


def answer_jobs(pipe, entry: str, env: dict[str, str]) -> None:
    """The life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.update(env)
    os.nice(int(env.get("KDAGEN_NICE", "0")))
    logging.getLogger("kdagen").setLevel(logging.ERROR)  # that candidates are rendered on demand is what is wanted here
    module_name, name = entry.split(":")
    module = import_module(module_name)
    getattr(module, "warm_up", lambda: None)()
    function = getattr(module, name)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(job)))
        except Exception as error:  # whatever a candidate does, it costs the candidate only
            why = f"{type(error).__name__}: {error}".strip()[:600]
            pipe.send((False, why))
            if any(mark in why for mark in CUDA_BROKEN):
                os._exit(3)  # the process's CUDA context is beyond repair


class Worker:
    """One process that answers jobs; started at the first job, and anew after a crash or a timeout."""

    def __init__(self, entry: str, env: dict[str, str] | None = None):
        self.entry, self.env = entry, env or {}
        self.process = self.pipe = None
        self.deadline = 0.0

    def start(self) -> None:
        """Start the process if it does not run."""
        if self.process is None or not self.process.is_alive():
            self._start()

    def submit(self, job: Any, timeout_s: float) -> None:
        self.start()
        self.deadline = time.monotonic() + timeout_s
        try:
            self.pipe.send(job)
        except (BrokenPipeError, OSError):  # it died between two jobs
            self._start()
            self.pipe.send(job)

    def wait(self) -> Any | Failed:
        """The submitted job's result, or why there is none."""
        while not self.pipe.poll(0):
            left = self.deadline - time.monotonic()
            if left <= 0:
                return self.give_up()
            connection.wait([self.pipe, self.process.sentinel], left)
            if not self.process.is_alive() and not self.pipe.poll(0):
                break
        return self.collect()

    def collect(self) -> Any | Failed:
        """The result of a worker whose pipe or sentinel is ready."""
        try:
            good, value = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode
            self.stop()
            return Failed("crash", f"the worker process died with exit code {code}")
        if not good and any(mark in value for mark in CUDA_BROKEN):
            self.stop()
            return Failed("crash", value)
        return value if good else Failed("error", value)

    def give_up(self) -> Failed:
        self.stop()
        return Failed("timeout", "outlasted its time limit")

    def call(self, job: Any, timeout_s: float) -> Any | Failed:
        self.submit(job, timeout_s)
        return self.wait()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join(5)
            self.pipe.close()
        self.process = self.pipe = None

    def _start(self) -> None:
        self.stop()
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=answer_jobs, args=(theirs, self.entry, self.env), daemon=True)
        self.process.start()
        theirs.close()


class Pool:
    """Several workers of one kind, kept from one batch of jobs to the next."""

    def __init__(self, entry: str, workers: int, timeout_s: float, env: dict[str, str] | None = None):
        self.timeout_s = timeout_s
        self.workers = [Worker(entry, env) for _ in range(workers)]

    def start(self) -> None:
        """Start all processes now: they are ready sooner."""
        for worker in self.workers:
            worker.start()

    def run(self, jobs: Iterable[Any]) -> Iterator[tuple[Any, Any | Failed]]:
        """(job, result or Failed) of every job, as they finish. One batch at a time."""
        todo, idle = iter(jobs), list(self.workers)
        busy: dict[Worker, Any] = {}
        try:
            while True:
                while idle and (job := next(todo, None)) is not None:
                    worker = idle.pop(0)
                    worker.submit(job, self.timeout_s)
                    busy[worker] = job
                if not busy:
                    return
                left = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
                ready = connection.wait([h for w in busy for h in (w.pipe, w.process.sentinel)], left)
                for worker in list(busy):
                    if worker.pipe in ready or worker.process.sentinel in ready:
                        outcome = worker.collect()
                    elif time.monotonic() >= worker.deadline:
                        outcome = worker.give_up()
                    else:
                        continue
                    idle.append(worker)
                    yield busy.pop(worker), outcome
        finally:
            for worker in busy:  # abandoned in the middle: their answers would meet the wrong job
                worker.stop()

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()

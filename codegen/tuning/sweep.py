"""The sweep: from a space to rows. Compile ahead, screen, verify, time, choose; every step journalled.

One thread a GPU takes points (a Spec at a load bucket), most wanted first, and asks that GPU's worker process. One thread
prepares points ahead of them: it plans each candidate's launches and has them compiled by processes that see no GPU. All
that a thread learns goes through the journal, so a sweep that was stopped goes on where it was.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kdagen import families, table
from kdagen.render import inputs_hash
from kdagen.spec import Schedule, Target
from kdagen.tuning import choose, compile_workers
from kdagen.tuning.ahead import Ahead, wire
from kdagen.tuning.journal import Journal
from kdagen.tuning.space import Candidate, Point
from kdagen.tuning.workers import Failed, Worker

JOB_TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0
NEARBY_OCTAVES = 4
WRITE_EVERY_S = 3.0


class Runner(Protocol):
    """Does measuring jobs (kdagen.tuning.measure.answer) on one GPU: a Worker, a Ray actor, or a test's stub."""

    def call(self, job: dict, timeout_s: float) -> dict | list | Failed: ...

    def stop(self) -> None: ...


class Compiler(Protocol):
    """Compiles noted launches (kdagen.tuning.compile_workers.compile_launch): a Pool, or a test's stub."""

    def run(self, jobs: list[dict]) -> Iterator[tuple[dict, dict | Failed]]: ...

    def stop(self) -> None: ...


class Reporter:
    """What a sweep tells whoever watches; progress.Bars draws it."""

    def begin(self, points: int) -> None: ...

    def compiled(self, done: int, of: int) -> None: ...

    def step(self, point: str, what: str) -> None: ...

    def finish(self, point: str, result: str) -> None: ...


@dataclass
class Settings:
    budget_s: float = 1200.0
    keep: float = 0.10           # a candidate this much slower than the best screened one is not looked at further
    finalists: int = 4
    compile_workers: int = 4
    compile_timeout_s: float = 60.0
    seed: int = 0
    final_ms: float = 30.0       # a finalist's share of the final race
    hopeless: float = 1.5        # slower by this factor at the two nearest buckets: not screened at this one


@dataclass
class Sweep:
    """All state of one sweep. ``run`` returns the rows of what was finished when the budget ended, or someone's patience."""

    points: list[Point]
    candidates: dict[str, list[Candidate]]     # Spec name -> its schedules, refused ones included
    target: Target
    env: dict                                  # what a row says about where it was measured
    runners: list[Runner]
    journal: Journal
    out: Path
    settings: Settings = field(default_factory=Settings)
    reporter: Reporter = field(default_factory=Reporter)
    compilers: list[Compiler] = field(default_factory=list)  # none given: processes of this host

    def __post_init__(self):
        self.deadline = time.monotonic() + self.settings.budget_s
        self.compilers = self.compilers or compile_workers.pools(self.settings.compile_workers,
                                                                 self.settings.compile_timeout_s)
        self.stopped = threading.Event()
        self.before = table.read(self.out, skipped=[])
        self.kept_before = table.read(table.swept_path(self.out), skipped=[])
        self.finals: dict[str, dict[tuple, choose.Finals]] = {}
        self.times: dict[str, dict[str, dict[str, float]]] = {}   # Spec -> point -> candidate -> screened us
        self.written = time.monotonic()
        self.taken = 0                                            # points that are measured, or were
        self.ahead = Ahead(self)
        self.errors: list[BaseException] = []
        self.lock = threading.Lock()
        self.turn = {id(runner): threading.Lock() for runner in self.runners}

    # The threads

    def run(self) -> list[table.Row]:
        """Sweep until all points are done, the budget is over, or Ctrl-C; then the rows, also written to ``out``."""
        self.reporter.begin(len(self.points))
        todo = iter(self.points)
        parts = len(self.compilers)
        ahead = [threading.Thread(target=self._guard, args=(self.ahead.prepare, part, parts), daemon=True)
                 for part in range(parts)]
        measuring = [threading.Thread(target=self._guard, args=(self._measure_all, runner, todo), daemon=True)
                     for runner in self.runners]
        try:
            for thread in [*ahead, *measuring]:
                thread.start()
            while any(thread.is_alive() for thread in measuring):
                for thread in measuring:
                    thread.join(0.1)
        except KeyboardInterrupt:
            pass
        finally:
            self.stopped.set()
            for process in [*self.runners, *self.compilers]:
                process.stop()
            for thread in [*ahead, *measuring]:
                if thread.is_alive():
                    thread.join(5.0)
        if self.errors:
            raise self.errors[0]
        return self.write()

    def _guard(self, work: Callable, *args) -> None:
        try:
            work(*args)
        except BaseException as error:  # a bug in the sweep itself: end it, keep the journal, raise in run()
            if not self.stopped.is_set():
                self.errors.append(error)
            self.stopped.set()

    @property
    def over(self) -> bool:
        return self.stopped.is_set() or time.monotonic() > self.deadline

    def call(self, runner: Runner, job: dict, timeout_s: float = JOB_TIMEOUT_S) -> dict | list | Failed:
        """One job at a time a runner: the preparing thread and the measuring thread take turns.

        What fails because the sweep ends is ``stopped``, and no candidate's fault.
        """
        stopped = Failed("stopped", "the sweep ended")
        with self.turn[id(runner)]:
            if self.stopped.is_set():
                return stopped
            left = self.deadline - time.monotonic()
            result = runner.call(job, min(timeout_s, max(5.0, left + 5.0)))
        return stopped if isinstance(result, Failed) and self.over else result

    # Measuring

    def _measure_all(self, runner: Runner, todo) -> None:
        while not self.over:
            with self.lock:
                point = next(todo, None)
                self.taken += 1
            if point is None:
                return
            fit = self.ahead.wait(point)
            if fit is None:
                return
            result = self._measure(point, runner, fit)
            if result is not None:
                self.reporter.finish(point.name, result)
                if time.monotonic() - self.written > WRITE_EVERY_S:
                    self.write()

    def _measure(self, point: Point, runner: Runner, fit: list[Candidate]) -> str | None:
        """Screen, verify and time one point; what came out in words, or None if the budget ended before."""
        default = families.get(point.spec.family).default(point.spec, self.target, point.problem)
        screened = self._screen(point, runner, fit, default)
        if screened is None:
            return None
        if not screened:
            return "no candidate ran"
        best = min(screened.values())
        ahead = sorted((us, c) for c, us in screened.items() if us <= best * (1 + self.settings.keep))
        self.reporter.step(point.name, f"verifying {min(len(ahead), self.settings.finalists)}")
        finalists: list[Candidate] = []
        for _, candidate in ahead:
            if len(finalists) == self.settings.finalists:
                break
            if self._verified(point, candidate, runner):
                finalists.append(candidate)
        with self.lock:
            nearby = choose.fewest(self.finals.get(point.spec.name, {}).values())
        wanted = {default} | {pick.schedule for pick in nearby.values()}  # the cover wants their times here too
        also = [c for c in screened if c not in finalists and c.schedule in wanted]
        finalists += [c for c in also if self._verified(point, c, runner)]
        if self.over:
            return None
        if not finalists:
            return "no candidate was right"
        return self._time(point, finalists, default, runner, len(screened))

    def _screen(self, point: Point, runner: Runner, fit: list[Candidate],
                default: Schedule) -> dict[Candidate, float] | None:
        screened: dict[Candidate, float] = {}
        mine = self.times.setdefault(point.spec.name, {})
        for number, candidate in enumerate(sorted(fit, key=lambda c: c.schedule != default)):  # the default first
            known = self.known("screened", point, candidate)
            if known is None:
                if self.over:
                    return None
                if candidate.schedule != default and self._hopeless(point, candidate):
                    self.note("screened", point, candidate, failed="far behind at the buckets nearby")
                    continue
                self.reporter.step(point.name, f"screening {number + 1} of {len(fit)}")
                result = self.call(runner, self.job("screen", point, candidate=wire(candidate),
                                                      best_us=min(screened.values(), default=None)))
                if isinstance(result, Failed) and result.kind == "stopped":
                    return None
                known = self.note("screened", point, candidate, **_values(result))
            if not known.get("failed"):
                screened[candidate] = known["us"]
                mine.setdefault(point.name, {})[candidate.name] = known["us"]
        return screened

    def _hopeless(self, point: Point, candidate: Candidate) -> bool:
        """Whether it was far behind at the two nearest buckets where it was screened, none of them far from here."""
        behind = []
        for load in self.finals.get(point.spec.name, {}):
            times = self.times[point.spec.name].get(f"{point.spec.name}@{load[0]},{load[1]}", {})
            octaves = max(abs(a - b) for a, b in zip(load, point.load))
            if candidate.name in times and octaves <= NEARBY_OCTAVES:
                behind.append((octaves, load, times[candidate.name] > self.settings.hopeless * min(times.values())))
        return len(behind) > 1 and all(far for _, _, far in sorted(behind)[:2])

    def _verified(self, point: Point, candidate: Candidate, runner: Runner) -> dict | None:
        known = self.known("verified", point, candidate)
        if known is None:
            if self.over:
                return None
            result = self.call(runner, self.job("verify", point, candidate=wire(candidate),
                                                  seed=self.settings.seed + 1_000_003))
            if isinstance(result, Failed) and result.kind == "stopped":
                return None
            known = self.note("verified", point, candidate, **_values(result))
        return None if known.get("failed") else known

    def _time(self, point: Point, finalists: list[Candidate], default: Schedule, runner: Runner, ran: int) -> str | None:
        known = {c: self.known("timed", point, c) for c in finalists}
        if not all(known.values()):
            self.reporter.step(point.name, f"timing {len(finalists)}")
            result = self.call(runner, self.job("time", point, candidates=[wire(c) for c in finalists],
                                                  budget_ms=self.settings.final_ms))
            if isinstance(result, Failed):
                if result.kind == "stopped":
                    return None
                self.note("timed", point, finalists[0], failed=result.why)
                return f"final timing failed: {result.why}"
            known = {c: self.note("timed", point, c, **times) for c, times in zip(finalists, result["times"])}
        timed = []
        for candidate, event in known.items():
            checked = self.known("verified", point, candidate)
            if not event.get("failed"):
                timed.append(choose.Timed(candidate.schedule, event["us"], event["noise"], checked["err"],
                                          checked["repeat"]))
        if not timed:
            return "final timing failed"
        final = choose.Finals(point.load, default, tuple(timed), ran)
        with self.lock:
            self.finals.setdefault(point.spec.name, {})[point.load] = final
        best, mine = final.best, final.of(default)
        gain = f"{mine.us / best.us:.2f}x over the default" if mine else "the default did not run"
        return f"{best.us:.1f} us, {gain}: {best.schedule.name} w{best.schedule.warps} s{best.schedule.stages}"

    # Results

    def rows(self) -> tuple[list[table.Row], list[table.Row]]:
        """Of all points finished so far: the tuned rows, and those of the buckets left to the default."""
        with self.lock:
            finals = {name: list(buckets.values()) for name, buckets in self.finals.items()}
        specs, tuned, kept = {point.spec.name: point.spec for point in self.points}, [], []
        for name, buckets in finals.items():
            rows = choose.rows(specs[name], buckets, self.env)
            tuned += rows
            kept += choose.kept(specs[name], buckets, rows, self.env)
        return sorted(tuned), kept

    def write(self) -> list[table.Row]:
        """Merge the rows, by the hysteresis rule, into what ``out`` held before this sweep; the kept defaults beside it."""
        rows, kept = self.rows()
        with self.lock:
            self.written = time.monotonic()
            if rows or kept or self.before:
                merged = table.merge(self.before, rows)
                table.write(self.out, merged)
                table.write(table.swept_path(self.out), table.settle(self.kept_before, kept, merged))
        return rows

    def regret(self) -> dict[str, float]:
        """Spec -> the geometric mean of default time over best time: what an untuned user loses."""
        out = {}
        for name, buckets in self.finals.items():
            ratios = [f.of(f.default).us / f.best.us for f in buckets.values() if f.of(f.default)]
            if ratios:
                product = 1.0
                for ratio in ratios:
                    product *= ratio
                out[name] = product ** (1 / len(ratios))
        return out

    # Helpers

    def job(self, do: str, point: Point, **more) -> dict:
        return {"do": do, "spec": point.spec.literal, "problem": list(point.problem)} | more

    def known(self, stage: str, point: Point, candidate: Candidate) -> dict | None:
        return self.journal.known(stage, point.name, candidate.name, inputs_hash(candidate.variant))

    def note(self, stage: str, point: Point, candidate: Candidate, **values) -> dict:
        return self.journal.note(stage, point.name, candidate.name, inputs_hash(candidate.variant), **values)


def _values(result: dict | Failed) -> dict:
    return {"failed": f"{result.kind}: {result.why}"} if isinstance(result, Failed) else result


def environment(runner: Runner) -> tuple[Target, dict]:
    """The device of a runner, and what its rows say about it."""
    env = runner.call({"do": "environment"}, START_TIMEOUT_S)
    if isinstance(env, Failed):
        raise RuntimeError(f"the measuring process does not start: {env.why}")
    smem = env.pop("smem")
    return Target(env["arch"], env["slug"], env["sms"], smem), env


def gpu_runner(gpu: int) -> Worker:
    """The worker process of one GPU of this host."""
    return Worker("kdagen.tuning.measure:answer", {"CUDA_VISIBLE_DEVICES": str(gpu), "TRITON_INTERPRET": "0"})


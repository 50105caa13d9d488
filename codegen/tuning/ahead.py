"""The part of a sweep that runs ahead of the measuring: which launches a candidate makes, and compiling them.

The GPU's process plans (it alone can make the op's arguments), processes that see no GPU compile. An op of several kernels
may stumble over the first one that gave nothing; it is planned again once that one is compiled.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kdagen.tuning import compile_workers
from kdagen.tuning.space import Candidate, Point
from kdagen.tuning.workers import Failed

if TYPE_CHECKING:
    from kdagen.tuning.sweep import Compiler, Runner, Sweep

PLAN_ROUNDS = 6
LOOK_AHEAD = 8   # points
PLAN_TIMEOUT_S = 300.0


class Ahead:
    """Prepares the sweep's points in their order; ``wait(point)`` gives the candidates that compile there."""

    def __init__(self, sweep: Sweep):
        self.sweep = sweep
        self.done = {point.name: threading.Event() for point in sweep.points}
        self.fit: dict[str, list[Candidate]] = {}
        self.launches: dict[tuple, str | None] = {}  # launch -> None if it compiled, else why not
        self.needs: dict[str, dict[Candidate, set[tuple]]] = {}  # Spec -> candidate -> its launches

    def wait(self, point: Point) -> list[Candidate] | None:
        """The candidates fit to be measured, once they are known; None if the sweep ends first."""
        while not self.done[point.name].wait(0.2):
            if self.sweep.over:
                return None
        return self.fit[point.name]

    def prepare(self, part: int, parts: int) -> None:
        """Prepare the points of every ``parts``-th Spec: several threads do, each with its own compiler.

        One Spec's last slow compilation then does not leave the others' cores idle.
        """
        specs = list(dict.fromkeys(point.spec for point in self.sweep.points))
        mine = [(number, point) for number, point in enumerate(self.sweep.points) if point.spec in specs[part::parts]]
        while mine and not self.sweep.over:
            found = self._next(mine)
            if found is None:
                time.sleep(0.02)
                continue
            mine.remove(found)
            number, point = found
            self._prepare(point, self.sweep.runners[number % len(self.sweep.runners)], self.sweep.compilers[part])
            self.done[point.name].set()

    def _next(self, todo: list[tuple[int, Point]]) -> tuple[int, Point] | None:
        """The next point that is soon measured; else the first of a new Spec, whose compilation takes long; else none.

        Planning everything at once would keep the GPU's process from measuring.
        """
        soon = self.sweep.taken + LOOK_AHEAD
        first = todo[0]
        return first if first[0] < soon else next((one for one in todo if one[1].spec.name not in self.needs), None)

    def _prepare(self, point: Point, runner: Runner, compiler: Compiler) -> None:
        """Fill ``fit[point]``: the candidates that compile for this point's launches, or that a journal already knows.

        Once a Spec is planned at one point, its default is planned first at the others: if that launches nothing new, the
        other candidates will not either.
        """
        fit, todo = [], []
        for candidate in self.sweep.candidates[point.spec.name]:
            if candidate.refused is None and not self.sweep.known("compiled", point, candidate):  # noted only when refused
                (fit if self.sweep.known("screened", point, candidate) else todo).append(candidate)
        planned_before = point.spec.name in self.needs
        needs = self.needs.setdefault(point.spec.name, {})
        for candidate in todo:
            needs.setdefault(candidate, set())
        refused: dict[Candidate, str] = {}
        for group in (todo[:1], todo[1:]) if planned_before else (todo,):
            before = set(self.launches)
            for _ in range(PLAN_ROUNDS):
                if not group or self.sweep.over:
                    break
                group = self._plan(point, runner, compiler, group, needs, refused)
            if all(needs[candidate] <= before for candidate in todo):
                break
        for candidate in todo:
            why = refused.get(candidate) or next(filter(None, map(self.launches.get, sorted(needs[candidate]))), None)
            if why:
                self.sweep.note("compiled", point, candidate, failed=why)
            else:
                fit.append(candidate)
        self.fit[point.name] = fit

    def _plan(self, point: Point, runner: Runner, compiler: Compiler, todo: list[Candidate], needs: dict,
              refused: dict) -> list[Candidate]:
        """Plan the candidates and compile what they launch; those whose plan is incomplete, and led to something new."""
        good = [key for candidate in todo for key in needs[candidate] if self.launches.get(key, "") is None]
        plans = self.sweep.call(runner, self.sweep.job("plan", point, candidates=[wire(c) for c in todo], compiled=good),
                                PLAN_TIMEOUT_S)
        if isinstance(plans, Failed):  # measure without a plan: the launches compile where they run
            return []
        wanted, again = {}, []
        for candidate, plan in zip(todo, plans):
            found = {compile_workers.key(launch): launch for launch in plan["launches"]}
            if plan.get("failed"):
                refused[candidate] = plan["failed"]
            elif plan.get("incomplete") and not found.keys() <= needs[candidate]:
                again.append(candidate)
            needs[candidate] |= found.keys()
            wanted |= {key: launch | {"arch": self.sweep.target.arch} for key, launch in found.items()
                       if key not in self.launches}
        self._compile(wanted, compiler)
        return [c for c in again if not any(map(self.launches.get, needs[c]))]

    def _compile(self, wanted: dict[tuple, dict], compiler: Compiler) -> None:
        results = compiler.run(list(wanted.values()))
        for done, (job, report) in enumerate(results, 1):
            key = compile_workers.key(job)
            if isinstance(report, Failed):
                self.launches[key] = f"{job['kernel']} did not compile ({report.kind}): {report.why}"
            else:
                self.launches[key] = compile_workers.refuse_resources(report, self.sweep.target)
            self.sweep.reporter.compiled(done, len(wanted))
            if self.sweep.over:
                return


def wire(candidate: Candidate) -> list:
    """A candidate as a job names it."""
    return [candidate.variant.name, candidate.schedule.warps, candidate.schedule.stages]

"""The bars of a sweep: points done, the time left, what is happening; plain lines where there is no terminal."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kdagen.tuning.sweep import Reporter


class Bars(Reporter):
    """``with Bars(budget_s) as bars``: draws on a terminal, else prints a line per finished point."""

    def __init__(self, budget_s: float, console: Console | None = None):
        self.console = console or Console()
        self.budget_s, self.start = budget_s, time.monotonic()
        self.done = self.total = 0
        self.progress = Progress(
            TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), TextColumn("[dim]{task.fields[now]}"), console=self.console,
            disable=not self.console.is_terminal)

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_) -> None:
        self.progress.stop()

    def begin(self, points: int) -> None:
        self.total = points
        self.points_bar = self.progress.add_task("points", total=points, now="")
        self.compile_bar = self.progress.add_task("compiling", total=None, now="", visible=False)

    def compiled(self, done: int, of: int) -> None:
        self.progress.update(self.compile_bar, completed=done, total=of, visible=done < of)

    def step(self, point: str, what: str) -> None:
        self.progress.update(self.points_bar, now=f"{point}: {what}")

    def finish(self, point: str, result: str) -> None:
        self.done += 1
        self.progress.update(self.points_bar, completed=self.done)
        self.console.print(f"{self.done}/{self.total} {self.left_s():4.0f} s left  {point}: {result}", highlight=False,
                           soft_wrap=True)

    def left_s(self) -> float:
        """An estimate: the points to come at the mean pace, and no more than the budget."""
        spent = time.monotonic() - self.start
        pace = spent / max(1, self.done)
        return max(0.0, min(pace * (self.total - self.done), self.budget_s - spent))

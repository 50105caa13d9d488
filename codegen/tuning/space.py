"""What a sweep visits: the load buckets of serving, most wanted first, and each Spec's schedules with why some are refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import NamedTuple

from kdagen import families, quirks, table
from kdagen.errors import refuse
from kdagen.spec import Problem, Schedule, Spec, Target, Variant

HEADS = (32, 12, 96, 4, 64, 16, 8, 6)          # per rank, the served models' first
BATCHES = (64, 8, 1, 256, 32, 128, 16, 512, 1024, 4, 2)
TOKENS = (8192, 2048, 32768, 512, 65536, 16384, 4096, 1024, 128)
SEQS = (1, 8, 64, 256)


class Point(NamedTuple):
    """One Spec at one load: what a tuned row is for."""

    spec: Spec
    problem: Problem

    @property
    def load(self) -> tuple[int, int]:
        return table.bucket(families.get(self.spec.family).load(self.spec, self.problem))

    @property
    def name(self) -> str:
        return f"{self.spec.name}@{self.load[0]},{self.load[1]}"


class Candidate(NamedTuple):
    """One schedule of a Spec, with the reason why it is refused, if it is."""

    spec: Spec
    schedule: Schedule
    refused: str | None = None

    @property
    def variant(self) -> Variant:
        return Variant(self.spec, self.schedule.source_key)

    @property
    def name(self) -> str:
        return f"{self.variant.name}:w{self.schedule.warps}:s{self.schedule.stages}"


def decode_problems() -> list[Problem]:
    """Decode batches: one token a sequence."""
    return [Problem(batch, batch, heads) for heads, batch in most_wanted(HEADS, BATCHES)]


def prefill_problems() -> list[Problem]:
    """Prefill batches of equal sequences of at least 16 tokens, by tokens in all."""
    return [Problem(tokens, seqs, heads) for tokens, heads, seqs in most_wanted(TOKENS, HEADS, SEQS) if tokens // seqs >= 16]


def most_wanted(*axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All combinations; each axis lists its most wanted values first, and so does the result."""
    places = sorted(product(*(range(len(axis)) for axis in axes)), key=lambda place: (sum(place), place))
    return [tuple(axis[i] for axis, i in zip(axes, place)) for place in places]


def read_problems(path: Path) -> list[Problem]:
    """Problems from a JSON file: a list of [tokens, seqs, heads]."""
    try:
        data = json.loads(path.read_text())
        problems = [Problem(*map(int, item)) for item in data]
    except (OSError, ValueError, TypeError) as error:
        refuse("--shapes", f"{path}: {error}", "a JSON list of [tokens, seqs, heads]")
    for problem in problems:
        if min(problem) < 1:
            refuse("--shapes", str(list(problem)), "tokens, seqs and heads of at least 1")
    return problems


def points_of(spec: Spec, problems: Iterable[Problem]) -> list[Point]:
    """One point a load bucket, the first problem that falls into it standing for it, in the order given."""
    found: dict[tuple[int, int], Point] = {}
    for problem in problems:
        point = Point(spec, problem)
        found.setdefault(point.load, point)
    return list(found.values())


def spaced(points: Iterable[Point], spacing: tuple[int, int]) -> list[Point]:
    """The points, in their order, without those whose load is within so many octaves, in both numbers, of an earlier one."""
    kept: list[Point] = []
    for point in points:
        if not any(all(abs(a - b) <= near for a, b, near in zip(point.load, one.load, spacing)) for one in kept):
            kept.append(point)
    return kept


def in_turn(lists: list[list[Point]], stride: int = 1) -> list[Point]:
    """``stride`` points of each list, then the next ``stride`` of each, and so on: a short budget serves every family."""
    longest = max(map(len, lists), default=0)
    return [point for start in range(0, longest, stride) for points in lists for point in points[start:start + stride]]


def candidates(spec: Spec, target: Target, triton: str, *, problems: Iterable[Problem] = (), seed: int = 0,
               limit: int | None = None, redundant: Callable = lambda spec, schedule: None) -> list[Candidate]:
    """Every schedule of the Spec's space and every default, each once: the default first, then what is most like one.

    Among those equally like, a seeded order. Refused ones carry their reason. ``limit`` keeps that many that are not
    refused (the defaults always).
    """
    family = families.get(spec.family)
    defaults = list(dict.fromkeys(family.default(spec, target, problem) for problem in [None, *problems]))
    space = [s for s in dict.fromkeys(family.candidates(spec)) if s not in defaults]
    random.Random(f"{seed} {spec.name}").shuffle(space)
    space.sort(key=lambda schedule: min(differences(schedule, default) for default in defaults))
    out, kept = [], 0
    for schedule in [*defaults, *space]:
        why = (family.supports(spec, schedule, target) or quirks.reason(spec, schedule, target, triton)
               or redundant(spec, schedule))
        if why is None and limit is not None and kept >= limit and schedule not in defaults:
            why = f"beyond the limit of {limit} candidates"
        kept += why is None
        out.append(Candidate(spec, schedule, why))
    return out


def differences(a: Schedule, b: Schedule) -> int:
    """In how many places two schedules differ: form, each block, warps, stages."""
    blocks = a.block.keys() | b.block.keys()
    return sum(a.block.get(name) != b.block.get(name) for name in blocks) + (a.form != b.form) + (
        a.warps != b.warps) + (a.stages != b.stages)


def specs_of(family: str, *, chunk: int | None = None, dtypes: Iterable[str] = ()) -> list[Spec]:
    """The committed Specs of a family, narrowed by chunk size and dtype."""
    wanted = tuple(dtypes)
    return sorted(spec for spec in families.get(family).committed()
                  if (chunk is None or spec.chunk in (0, chunk))
                  and (not wanted or not spec.dtype or spec.dtype in wanted or spec.dtype in ("i32", "i64")))

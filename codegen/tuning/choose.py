"""From final times to rows: the fewest variants within 3 % over a Spec's load buckets, and no row that gains nothing.

Each bucket in which the default was timed gets one row. Where the choice gains something it is a tuned row; elsewhere it
says that the default was kept (the ``.swept`` file), and dispatch weighs that like a row: it takes a tuned row up to two
octaves away, but not where a kept default is as near.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kdagen import table
from kdagen.render import inputs_hash
from kdagen.spec import Schedule, Spec, Variant

WITHIN = 0.03


class Timed(NamedTuple):
    """A verified candidate's final time at one load bucket."""

    schedule: Schedule
    us: float
    noise: float
    err: float
    repeat: int


class Finals(NamedTuple):
    """All final times of one Spec at one load bucket, with the default rule's schedule there."""

    load: tuple[int, int]     # the bucket
    default: Schedule
    timed: tuple[Timed, ...]
    ran: int | None = None    # schedules that ran here, these among them

    def of(self, schedule: Schedule) -> Timed | None:
        return next((t for t in self.timed if t.schedule == schedule), None)

    @property
    def best(self) -> Timed:
        return min(self.timed, key=lambda t: (t.us, t.schedule))


def fewest(finals: Iterable[Finals], within: float = WITHIN) -> dict[tuple[int, int], Timed]:
    """For each bucket a schedule within that share of its best, out of as few variants (files) as the greedy cover finds.

    The default's own file comes for free. Buckets in which the default was not timed are left out: their regret is unknown.
    """
    finals = sorted((f for f in finals if f.of(f.default)), key=lambda f: f.load)
    chosen = {f.default.source_key for f in finals}
    open_buckets = {f.load: f for f in finals if not _covered(f, chosen, within)}
    while open_buckets:
        uncovered = list(open_buckets.values())
        keys = {t.schedule.source_key for f in uncovered for t in f.timed if t.us <= f.best.us * (1 + within)}
        chosen.add(min((_worth(key, uncovered, within), key) for key in keys)[1])
        open_buckets = {load: f for load, f in open_buckets.items() if not _covered(f, chosen, within)}
    return {f.load: _fastest(f, chosen) for f in finals}


def _worth(key: Schedule, finals: list[Finals], within: float) -> tuple[int, float]:
    """How many buckets a file serves (negative), then how far from their best on average: the least is taken next."""
    covers = [f for f in finals if _covered(f, {key}, within)]
    return -len(covers), sum(_fastest(f, {key}).us / f.best.us for f in covers) / max(1, len(covers))


def _fastest(f: Finals, keys: set[Schedule]) -> Timed:
    return min((t for t in f.timed if t.schedule.source_key in keys), key=lambda t: (t.us, t.schedule))


def _covered(f: Finals, keys: set[Schedule], within: float) -> bool:
    fit = [t.us for t in f.timed if t.schedule.source_key in keys]
    return bool(fit) and min(fit) <= f.best.us * (1 + within)


def rows(spec: Spec, finals: Iterable[Finals], env: dict) -> list[table.Row]:
    """The Spec's tuned rows: where the choice gains at least ``table.MARGIN`` over the default."""
    finals = [f for f in finals if f.of(f.default)]
    picks = fewest(finals)
    return sorted(_row(spec, f, picks[f.load], env) for f in finals if _gains(f, picks[f.load]))


def kept(spec: Spec, finals: Iterable[Finals], tuned: Iterable[table.Row], env: dict) -> list[table.Row]:
    """Of the other buckets, rows of the default that was kept: what it took, and the best of the others."""
    taken = {row.load for row in tuned}
    return sorted(_row(spec, f, f.of(f.default), env) for f in finals if f.of(f.default) and f.load not in taken)


def _gains(f: Finals, pick: Timed) -> bool:
    default = f.of(f.default)
    noise = table.NOISE_FACTOR * max(pick.noise, default.noise)
    return pick.us < default.us * (1 - max(table.MARGIN, noise))


def _row(spec: Spec, f: Finals, pick: Timed, env: dict) -> table.Row:
    variant = Variant(spec, pick.schedule.source_key)
    others = [t.us for t in f.timed if t.schedule != pick.schedule]
    return table.Row(
        variant=variant.name, load=f.load, warps=pick.schedule.warps, stages=pick.schedule.stages, us=round(pick.us, 3),
        default_us=round(f.of(f.default).us, 3), next_us=round(min(others), 3) if others else None,
        noise=round(pick.noise, 5), err=float(f"{pick.err:.3e}"), repeat=pick.repeat, inputs=inputs_hash(variant), env=env,
        candidates=f.ran)

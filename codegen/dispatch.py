"""From a Spec, a load and a device to the schedule that runs: a table read, never a measurement.

The order is the one of docs/dispatch.md:
 1. pinned: ``with kdagen.pin(...)`` or KDAGEN_PIN;
 2. the nearest fresh row of exactly this Spec that fits the device and is no quirk: same product and SM count, then same
    architecture; nearest Triton minor; nearest load, at most two octaves away; then the name;
 3. the family's default, also in the place of a row of 2 that is no nearer, by product, Triton and load, than a load that
    a sweep left to this default (the ``.swept`` files).
Ops keep what ``pick`` answers in a ``memo``, so the hot path is one lookup of a plain tuple.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import NamedTuple

from kdagen import devices, families, files, loader, quirks, table
from kdagen.errors import KdagenError, UnknownName, Unsupported, refuse
from kdagen.spec import Problem, Schedule, Spec, Target, Variant, parse

MAX_OCTAVES = 2


class Choice(NamedTuple):
    """What runs: the variant's file, the whole schedule, and how it was chosen (pinned, exact, near, arch, default)."""

    variant: Variant
    schedule: Schedule
    how: str

    @property
    def module(self) -> ModuleType:
        return loader.load(self.variant)


class Verdict(NamedTuple):
    """One line of ``explain``: a schedule, its row if it has one, and why it won or lost."""

    schedule: Schedule
    row: table.Row | None
    rank: int | None
    why: str


_pins: dict[str, Schedule] = {}
_memos: dict[str, dict] = {}


def memo(name: str) -> dict:
    """A dictionary that an op may fill with its Choices; emptied whenever a pin or a table changes."""
    return _memos.setdefault(name, {})


def reset() -> None:
    """Forget all that was read: tables, manifests, memos. For tests, and after tables changed on disk."""
    for one in _memos.values():
        one.clear()
    rows_for.cache_clear()
    loader.committed.cache_clear()
    loader.load.cache_clear()
    environment_pins.cache_clear()


@cache
def triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


@cache
def rows_for(arch: str, kind: str = "jsonl") -> tuple[table.Row, ...]:
    """All rows of all tables of an architecture (kind swept: of kept defaults), bad lines logged once and passed over."""
    skipped: list[str] = []
    rows = [row for path in sorted((files.generated_dir() / "tuned").glob(f"{arch}-*.{kind}"))
            for row in table.read(path, skipped=skipped)]
    for message in skipped:
        loader.warn_once(f"skipped a tuned row: {message}")
    return tuple(rows)


@contextmanager
def pin(variant: str, *, warps: int | None = None, stages: int | None = None) -> Iterator[None]:
    """Run this variant, wherever its Spec is asked for, inside the ``with`` block. Process-wide; for experiments."""
    chosen = parse(variant)
    key, before = chosen.spec.name, dict(_pins)
    _pins[key] = _complete(chosen, warps, stages)
    _clear_memos()
    try:
        yield
    finally:
        _pins.clear()
        _pins.update(before)
        _clear_memos()


def _clear_memos() -> None:
    for one in _memos.values():
        one.clear()


def _complete(variant: Variant, warps: int | None, stages: int | None) -> Schedule:
    default = families.get(variant.spec.family).default(variant.spec)
    baked = variant.schedule
    return Schedule(baked.blocks, warps or default.warps, stages or default.stages, baked.form)


@cache
def environment_pins(value: str) -> dict[str, Schedule]:
    """KDAGEN_PIN: comma-separated ``variant`` or ``variant:w4:s2``."""
    pins = {}
    for item in filter(None, value.split(",")):
        name, *options = item.strip().split(":")
        sizes = {option[0]: int(option[1:]) for option in options if option[:1] in "ws" and option[1:].isdigit()}
        if len(sizes) != len(options):
            refuse("KDAGEN_PIN", repr(item), "VARIANT or VARIANT:w4:s2, as `kdagen list` prints variants")
        try:
            variant = parse(name)
        except KdagenError as error:
            refuse("KDAGEN_PIN", repr(item), "a variant as `kdagen list` prints it", str(error), kind=UnknownName)
        pins[variant.spec.name] = _complete(variant, sizes.get("w"), sizes.get("s"))
    return pins


def pinned(spec: Spec) -> Schedule | None:
    return _pins.get(spec.name) or environment_pins(os.environ.get("KDAGEN_PIN", "")).get(spec.name)


def unfit(spec: Spec, schedule: Schedule, target: Target) -> str | None:
    """Why a schedule may not run on a target: the family's limits, then the quirks."""
    return (families.get(spec.family).supports(spec, schedule, target)
            or quirks.reason(spec, schedule, target, triton_version()))


def _order(row: table.Row, load: tuple[int, int], target: Target) -> tuple[bool, int, int]:
    """How far what a row measured is from what is asked: (another product, Triton minors apart, octaves of load apart)."""
    same = row.env.get("slug") == target.slug and row.env.get("sms") == target.sms
    a, b = table.triton_minor(row.env.get("triton", "")), table.triton_minor(triton_version())
    distance = max(abs(x - y) for x, y in zip(row.load, table.bucket(load)))
    return not same, abs(a[0] - b[0]) * 100 + abs(a[1] - b[1]), distance


def rank(spec: Spec, load: tuple[int, int], target: Target, rows: tuple[table.Row, ...]) -> list[Verdict]:
    """Every row of the Spec with its verdict; the usable ones first, best first. Independent of the rows' order."""
    usable, lost = [], []
    for row in rows:
        if row.spec != spec:
            continue
        order = _order(row, load, target)
        distance = order[-1]
        if table.is_stale(row):
            lost.append(Verdict(row.schedule, row, None, "stale: the templates changed since it was measured"))
        elif distance > MAX_OCTAVES:
            lost.append(Verdict(row.schedule, row, None, f"load {distance} octaves away"))
        elif reason := unfit(spec, row.schedule, target):
            lost.append(Verdict(row.schedule, row, None, reason))
        else:
            usable.append(((*order, row.variant, row.warps, row.stages, row.us), row))
    ranked = []
    for number, (order, row) in enumerate(sorted(usable, key=lambda pair: (pair[0], pair[1].line()))):
        how = "arch" if order[0] else "exact" if order[2] == 0 else "near"
        ranked.append(Verdict(row.schedule, row, number, how))
    return ranked + sorted(lost, key=lambda verdict: verdict.row.line())


def pick(spec: Spec, problem: Problem, target: Target) -> Choice:
    """The Choice for a Spec and load on a target. Deterministic: the same on every rank with equal ``digest()``."""
    family = families.get(spec.family)
    chosen = pinned(spec)
    if chosen:
        reason = unfit(spec, chosen, target)
        if reason:
            refuse(f"the pinned schedule {chosen.name} of {spec.name}", reason, "a schedule that fits the device",
                   "Remove the pin, or see `kdagen explain`.", kind=Unsupported)
        return Choice(Variant(spec, chosen.source_key), chosen, "pinned")
    default = family.default(spec, target, problem)
    if loader.mode() != "default":
        load = family.load(spec, problem)
        ranked = rank(spec, load, target, rows_for(target.arch))
        if ranked and ranked[0].rank == 0 and not _default_is_nearer(spec, load, target, default, ranked[0].row):
            return Choice(Variant(spec, ranked[0].schedule.source_key), ranked[0].schedule, ranked[0].why)
    reason = unfit(spec, default, target)
    if reason:
        refuse(f"Spec {spec.name}", reason, f"a Spec that family {spec.family} supports on {target.slug} ({target.arch})",
               f"Limits: docs/limits.md, and supports of codegen/families/{spec.family}.py", kind=Unsupported)
    return Choice(Variant(spec, default.source_key), default, "default")


def _kept(spec: Spec, load: tuple[int, int], target: Target, default: Schedule) -> list[Verdict]:
    """The loads near this one that a sweep left to this default, best first."""
    return [verdict for verdict in rank(spec, load, target, rows_for(target.arch, "swept"))
            if verdict.rank is not None and verdict.schedule == default]


def _default_is_nearer(spec: Spec, load: tuple[int, int], target: Target, default: Schedule, row: table.Row) -> bool:
    """Whether a sweep left a load to this default that is as near to this one as the row's, or nearer, in rank's order."""
    kept = _kept(spec, load, target, default)
    return bool(kept) and _order(kept[0].row, load, target) <= _order(row, load, target)


def explain(spec: Spec, problem: Problem, target: Target) -> tuple[Choice, list[Verdict]]:
    """What ``pick`` answers, and every row and default with its rank or the reason why it lost."""
    family = families.get(spec.family)
    verdicts = rank(spec, family.load(spec, problem), target, rows_for(target.arch))
    default = family.default(spec, target, problem)
    choice, why = pick(spec, problem, target), "the family's default rule"
    by_rule = loader.mode() == "default"
    if choice.how == "default":
        lost = "KDAGEN_MODE=default: no row counts" if by_rule else "a load as near to this one was left to the default"
        verdicts = [v if v.rank is None else v._replace(rank=None, why=lost) for v in verdicts]
    row, measured = _swept(spec, family.load(spec, problem), target, default)
    if row or choice.how == "default":
        why += f"{' (KDAGEN_MODE=default)' * by_rule}; {measured}"
    verdicts.append(Verdict(default, row, None, unfit(spec, default, target) or why))
    return choice, verdicts


def _swept(spec: Spec, load: tuple[int, int], target: Target, default: Schedule) -> tuple[table.Row | None, str]:
    """What a sweep found of the default at the nearest load where it was kept, within two octaves; and that in words."""
    for _, row, _, how in _kept(spec, load, target, default):
        best = min(row.us, row.next_us or row.us)
        apart = _order(row, load, target)[-1]
        away = f" {apart} octave{'s' * (apart > 1)} away" if apart else ""
        where = f"swept{away}" + (f" on {row.env.get('slug')}" if how == "arch" else "")
        found = f"within {row.us / best - 1:.1%} of the fastest" if row.us > best else "the fastest"
        return row, f"{where}: {found} of {row.candidates or 'several'} schedules"
    return None, "not swept near this load"


def digest(target: Target | None = None) -> str:
    """A hash of all that dispatch depends on; equal on every rank, or their choices may differ."""
    target = target or devices.machine()
    parts = [str(target), triton_version(), loader.mode(), os.environ.get("KDAGEN_PIN", ""), str(sorted(_pins.items()))]
    root = files.generated_dir()
    tables = [path for kind in ("jsonl", "swept") for path in sorted((root / "tuned").glob(f"*.{kind}"))]
    for path in [root / "MANIFEST.json", *tables]:
        parts.append(path.read_text() if path.exists() else "")
    parts.append(str(quirks.entries()))
    return sha256("\0".join(parts).encode()).hexdigest()[:16]

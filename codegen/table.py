"""Tuned rows: one measured schedule of one Spec on one device and load, a line of generated/tuned/<arch>-<slug>.jsonl.

A row is evidence, not code: it names what was measured, how it compares, how wrong the output was, and whether repeats
agreed to the bit. Without ``err`` and ``repeat`` it is no row. A row whose ``inputs`` (the hash of template, Spec and
blocks) is not today's is stale: dispatch skips it, ``kdagen tuned prune`` removes it.

Beside a table lies what else its sweeps found, <arch>-<slug>.swept: rows of the same form that name the default rule's
schedule, one for each load bucket where no other gained enough to become a tuned row. Dispatch
prefers the default to a row that is no nearer to a load than one of them.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kdagen import files
from kdagen.errors import CorruptFile, KdagenError, refuse
from kdagen.spec import Schedule, Spec, Variant, parse

MARGIN = 0.02        # a challenger must be faster by more than this,
NOISE_FACTOR = 3.0   # and by more than this many times the measured noise
A_ROW = "a tuned row (codegen/table.py states its fields)"
MEND = "Remove the line, or run `kdagen tuned prune`."


@dataclass(frozen=True, order=True)
class Row:
    """One tuned row. Times in microseconds; ``load`` is (log2 programs, log2 steps)."""

    variant: str
    load: tuple[int, int]
    warps: int
    stages: int
    us: float
    default_us: float
    next_us: float | None          # the best schedule that is not this one
    noise: float                   # relative spread of repeated measurements
    err: float                     # relative error against the oracle
    repeat: int                    # bitwise-equal repeats
    inputs: str
    env: dict = field(default_factory=dict, compare=False)  # gpu, sms, triton, torch, cuda, how
    candidates: int | None = field(default=None, compare=False)  # schedules that ran at this load

    @property
    def spec(self) -> Spec:
        return parse(self.variant).spec

    @property
    def schedule(self) -> Schedule:
        baked = parse(self.variant).schedule
        return Schedule(baked.blocks, self.warps, self.stages, baked.form)

    @property
    def key(self) -> tuple:
        """Two rows of a table with equal keys collide: one Spec, one load bucket, one device and Triton minor."""
        return self.spec.name, self.load, self.env.get("slug"), self.env.get("sms"), triton_minor(self.env.get("triton", ""))

    def line(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of_line(cls, line: str, where: str, expected: str = A_ROW, hint: str = MEND) -> Row:
        try:
            data = json.loads(line)
            data["load"] = tuple(data["load"])
            row = cls(**data)
            if not isinstance(row.env, dict) or len(row.load) != 2:
                raise ValueError("load takes two numbers, env a dictionary")
            if row.candidates is not None and (type(row.candidates) is not int or row.candidates < 1):
                raise ValueError(f"candidates is {row.candidates!r}")
            for name in ("us", "default_us", "err", "noise"):
                value = getattr(row, name)
                if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                    raise ValueError(f"{name} is {value!r}")
            if row.repeat < 1:
                raise ValueError("a row needs at least one bitwise-equal repeat")
            parse(row.variant)
            return row
        except (ValueError, TypeError, KeyError, AttributeError, KdagenError) as error:
            refuse(where, str(error), expected, hint, kind=CorruptFile)


def bucket(load: tuple[int, int]) -> tuple[int, int]:
    """(programs, steps) -> their log2, rounded down: the load bucket of a tuned row."""
    return max(load[0], 1).bit_length() - 1, max(load[1], 1).bit_length() - 1


def triton_minor(version: str) -> tuple[int, int]:
    """``3.6.0`` -> (3, 6); (0, 0) when it is not a version."""
    parts = version.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit() else (0, 0)


def path_of(arch: str, slug: str, folder: Path | None = None) -> Path:
    return (folder or files.generated_dir() / "tuned") / f"{arch}-{slug}.jsonl"


def swept_path(path: Path) -> Path:
    """Where a table's rows of kept defaults lie: beside it."""
    return path.with_suffix(".swept")


def read(path: Path, *, skipped: list[str] | None = None, expected: str = A_ROW, hint: str = MEND) -> list[Row]:
    """The rows of a table. With ``skipped``, bad lines are noted there and passed over; without, they raise."""
    rows = []
    try:
        lines = path.read_text(errors="replace").splitlines()  # bytes that are no text spoil their line alone
    except FileNotFoundError:
        return []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(Row.of_line(line, f"{path.name}:{number}", expected, hint))
        except CorruptFile as error:
            if skipped is None:
                raise
            skipped.append(str(error))
    return rows


def write(path: Path, rows: list[Row]) -> bool:
    """Replace a table by these rows, sorted; a collision is refused."""
    clash = collisions(rows)
    if clash:
        refuse(str(path), f"two rows for {clash[0]}", "one row a key", "Run `kdagen tuned merge`.", kind=CorruptFile)
    return files.write_if_different(path, "".join(row.line() + "\n" for row in sorted(rows)))


def collisions(rows: list[Row]) -> list[tuple]:
    seen, clash = set(), []
    for row in rows:
        if row.key in seen:
            clash.append(row.key)
        seen.add(row.key)
    return clash


def is_stale(row: Row) -> bool:
    """Whether the row was measured from other templates than today's."""
    from kdagen.render import inputs_hash

    return row.inputs != inputs_hash(parse(row.variant))


def replaces(challenger: Row, holder: Row) -> bool:
    """The hysteresis rule: faster by more than max(2 %, 3 x noise)."""
    margin = max(MARGIN, NOISE_FACTOR * max(challenger.noise, holder.noise))
    return challenger.us < holder.us * (1 - margin)


def merge(old: list[Row], new: list[Row]) -> list[Row]:
    """One row a key: a fresh row beats a stale one, a challenger needs the hysteresis margin, order never matters."""
    best: dict[tuple, Row] = {}
    for row in old:
        best[row.key] = min(best.get(row.key, row), row, key=_preference)
    challengers: dict[tuple, Row] = {}
    for row in new:
        challengers[row.key] = min(challengers.get(row.key, row), row, key=_preference)
    for key, row in challengers.items():
        holder = best.get(key)
        if holder is None or is_stale(holder) or (not is_stale(row) and _same_choice(row, holder)) or (
                not is_stale(row) and replaces(row, holder)):
            best[key] = row
    return sorted(best.values())


def settle(old: list[Row], new: list[Row], tuned: list[Row]) -> list[Row]:
    """The rows of kept defaults: the newest of each key, none that is stale, none where a fresh tuned row chooses."""
    newest = {row.key: row for row in [*old, *new] if not is_stale(row)}
    taken = {row.key for row in tuned if not is_stale(row)}
    return sorted(row for key, row in newest.items() if key not in taken)


def _same_choice(a: Row, b: Row) -> bool:
    return (a.variant, a.warps, a.stages) == (b.variant, b.warps, b.stages)


def _preference(row: Row) -> tuple:
    return is_stale(row), row.us, row


def variants(folder: Path | None = None) -> set[Variant]:
    """The variants that the tables under generated/tuned name (bad lines passed over)."""
    folder = folder or files.generated_dir() / "tuned"
    return {parse(row.variant) for path in sorted(folder.glob("*.jsonl")) for row in read(path, skipped=[])}

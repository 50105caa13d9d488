"""What `kdagen tuned` shows and does: coverage, differences, merging, pruning, export. Functions returning rows or lines."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections import defaultdict
from pathlib import Path

from kdagen import families, files, table
from kdagen.errors import refuse
from kdagen.table import Row

STATUS = ["table", "family", "specs swept", "loads swept", "rows", "stale", "median gain", "worst regret", "kept default",
          "triton", "oldest"]
DIFF = ["variant", "load", "what", "committed", "other"]
EXPORT = ["variant", "load", "warps", "stages", "us", "default_us", "next_us", "noise", "err", "repeat", "stale"]


def tables() -> list[Path]:
    """The tables under generated/tuned."""
    return sorted((files.generated_dir() / "tuned").glob("*.jsonl"))


def status() -> tuple[list[str], list[list]]:
    """(columns, rows): for each table and family what was swept, stale rows, and what an untuned user would lose.

    ``specs swept`` is of the committed ones, ``loads swept`` the load buckets with a row or a kept default. Gain and regret
    are default time over tuned time: their median and worst. ``kept default`` is how far the kept defaults are from the
    fastest schedule, at most.
    """
    out = []
    for path in tables():
        skipped: list[str] = []
        by_family = defaultdict(list)
        for row in table.read(path, skipped=skipped):
            by_family[row.spec.family].append(row)
        kept_by_family = defaultdict(list)
        for row in table.read(table.swept_path(path), skipped=skipped):
            kept_by_family[row.spec.family].append(row)
        for family in families.everyone():
            rows, kept = by_family.get(family.name, []), kept_by_family.get(family.name, [])
            fresh, kept_fresh = ([row for row in some if not table.is_stale(row)] for some in (rows, kept))
            committed, known = set(family.committed()), [*fresh, *kept_fresh]
            ratios = sorted(row.default_us / row.us for row in fresh if row.us)
            lost = max((row.us / min(row.us, row.next_us or row.us) - 1 for row in kept_fresh if row.us), default=None)
            out.append([path.stem, family.name, f"{len({row.spec for row in known} & committed)} of {len(committed)}",
                        len({row.key for row in known}), len(rows), len(rows) + len(kept) - len(known),
                        f"{ratios[len(ratios) // 2]:.2f}x" if ratios else "", f"{ratios[-1]:.2f}x" if ratios else "",
                        "" if lost is None else f"within {lost:.1%}",
                        ", ".join(sorted({row.env.get("triton", "?") for row in [*rows, *kept]})), _age([*rows, *kept])])
        if skipped:
            out.append([path.stem, "(unreadable)", "", "", len(skipped), *[""] * 6])
    return STATUS, out


def _age(rows: list[Row]) -> str:
    """Days since the oldest row was measured; empty where the rows do not say."""
    days = [row.env["day"] for row in rows if row.env.get("day")]
    if not days:
        return ""
    try:
        then = time.mktime(time.strptime(min(days), "%Y-%m-%d"))
    except ValueError:
        return min(days)
    return f"{min(days)} ({max(0, math.floor((time.time() - then) / 86400))} days)"


def diff(other: Path) -> tuple[list[str], list[list]]:
    """(columns, rows): where another row file differs in its choice from the committed tables; empty when nowhere."""
    here = {row.key: row for path in tables() for row in table.read(path, skipped=[])}
    there = {row.key: row for row in _rows_of(other)}
    out = []
    for key in sorted(here.keys() | there.keys(), key=str):
        a, b = here.get(key), there.get(key)
        one = a or b
        if a is None or b is None:
            what = "only there" if a is None else "only here"
        elif _choice(a) == _choice(b):
            continue
        else:
            what = "replaces" if table.is_stale(a) or table.replaces(b, a) else "within the margin"
        out.append([one.spec.name, _load(one), what, a and _told(a), b and _told(b)])
    return DIFF, out


def _rows_of(path: Path) -> list[Row]:
    """The rows of a file that the user named, which `kdagen tuned prune` would not mend."""
    return table.read(path, expected="a row file of the sweep (python scripts/autotune_sweep.py --out FILE)", hint="")


def _choice(row: Row) -> tuple:
    return row.variant, row.warps, row.stages


def _load(row: Row) -> str:
    return f"2^{row.load[0]} x 2^{row.load[1]}"


def _told(row: Row) -> str:
    stale = " (stale)" if table.is_stale(row) else ""
    return f"{row.schedule.name or '-'} w{row.warps} s{row.stages}: {row.us:.1f} us{stale}"


def merge(others: list[Path]) -> list[str]:
    """Merge row files into the tables of their devices by the hysteresis rule; one line a table about what changed.

    The kept defaults that lie beside a row file come with it.
    """
    new, new_kept = defaultdict(list), defaultdict(list)
    for path in others:
        for rows, source in ((new, path), (new_kept, table.swept_path(path))):
            for row in _rows_of(source):
                rows[_path(row, source)].append(row)
    lines = []
    for path in sorted(new.keys() | new_kept.keys()):
        old, old_kept = table.read(path, skipped=[]), table.read(table.swept_path(path), skipped=[])
        merged = table.merge(old, new[path])
        kept = table.settle(old_kept, new_kept[path], merged)
        taken = sum(row not in old for row in merged)
        table.write(path, merged)
        table.write(table.swept_path(path), kept)
        lines.append(f"{path.name}: {taken} of {len(new[path])} rows taken, {len(merged)} in all, {len(kept)} loads left to "
                     "the default. Run: kdagen render")
    return lines


def _path(row: Row, source: Path) -> Path:
    arch, slug = row.env.get("arch"), row.env.get("slug")
    if not arch or not slug:
        refuse(source.name, f"a row of {row.variant} whose env lacks arch or slug", "rows of scripts/autotune_sweep.py")
    return table.path_of(arch, slug)


def prune() -> list[str]:
    """Remove stale, unreadable and colliding rows, kept defaults likewise; one line a table."""
    lines = []
    for path in tables():
        skipped: list[str] = []
        rows = table.read(path, skipped=skipped)
        fresh = [row for row in rows if not table.is_stale(row)]
        kept = table.merge(fresh, [])
        table.write(path, kept)
        swept = table.swept_path(path)
        if swept.exists():
            table.write(swept, table.settle([], table.read(swept, skipped=[]), kept))
        lines.append(f"{path.name}: {len(rows) - len(fresh)} stale, {len(skipped)} unreadable, {len(fresh) - len(kept)} "
                     f"colliding removed, {len(kept)} left")
    return lines


def export(fmt: str) -> str:
    """All rows, flat, as csv or json."""
    records = []
    for path in tables():
        for row in table.read(path, skipped=[]):
            values = {name: getattr(row, name) for name in EXPORT[:-1]}
            values["load"] = _load(row)
            records.append({"table": path.stem, "family": row.spec.family} | values | {"stale": table.is_stale(row)}
                           | {f"env_{name}": value for name, value in sorted(row.env.items())})
    if fmt == "json":
        return json.dumps(records, indent=1) + "\n"
    columns = list(dict.fromkeys(name for record in records for name in record)) or ["table", "family", *EXPORT]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()

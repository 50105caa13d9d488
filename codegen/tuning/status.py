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

STATUS = ["table", "family", "specs", "rows", "stale", "median gain", "worst regret", "triton", "oldest"]
DIFF = ["variant", "load", "what", "committed", "other"]
EXPORT = ["variant", "load", "warps", "stages", "us", "default_us", "next_us", "noise", "err", "repeat", "stale"]


def tables() -> list[Path]:
    """The tables under generated/tuned."""
    return sorted((files.generated_dir() / "tuned").glob("*.jsonl"))


def status() -> tuple[list[str], list[list]]:
    """(columns, rows): for each table and family the tuned Specs, stale rows, and what an untuned user would lose.

    ``specs`` is tuned of committed. Gain and regret are default time over tuned time: their median and worst.
    """
    out = []
    for path in tables():
        skipped: list[str] = []
        by_family = defaultdict(list)
        for row in table.read(path, skipped=skipped):
            by_family[row.spec.family].append(row)
        for family in families.everyone():
            rows = by_family.get(family.name, [])
            fresh = [row for row in rows if not table.is_stale(row)]
            committed = set(family.committed())
            tuned = {row.spec for row in fresh} & committed
            ratios = sorted(row.default_us / row.us for row in fresh if row.us)
            out.append([path.stem, family.name, f"{len(tuned)} of {len(committed)}", len(rows), len(rows) - len(fresh),
                        f"{ratios[len(ratios) // 2]:.2f}x" if ratios else "", f"{ratios[-1]:.2f}x" if ratios else "",
                        ", ".join(sorted({row.env.get("triton", "?") for row in rows})), _age(rows)])
        if skipped:
            out.append([path.stem, "(unreadable)", "", len(skipped), "", "", "", "", ""])
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
    there = {row.key: row for row in table.read(other)}
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


def _choice(row: Row) -> tuple:
    return row.variant, row.warps, row.stages


def _load(row: Row) -> str:
    return f"2^{row.load[0]} x 2^{row.load[1]}"


def _told(row: Row) -> str:
    stale = " (stale)" if table.is_stale(row) else ""
    return f"{row.schedule.name or '-'} w{row.warps} s{row.stages}: {row.us:.1f} us{stale}"


def merge(others: list[Path]) -> list[str]:
    """Merge row files into the tables of their devices by the hysteresis rule; one line a table about what changed."""
    new = defaultdict(list)
    for path in others:
        for row in table.read(path):
            new[_path(row, path)].append(row)
    lines = []
    for path, rows in sorted(new.items()):
        old = table.read(path, skipped=[])
        merged = table.merge(old, rows)
        taken = sum(row not in old for row in merged)
        table.write(path, merged)
        lines.append(f"{path.name}: {taken} of {len(rows)} rows taken, {len(merged)} in all. Run: kdagen render")
    return lines


def _path(row: Row, source: Path) -> Path:
    arch, slug = row.env.get("arch"), row.env.get("slug")
    if not arch or not slug:
        refuse(source.name, f"a row of {row.variant} whose env lacks arch or slug", "rows of scripts/autotune_sweep.py")
    return table.path_of(arch, slug)


def prune() -> list[str]:
    """Remove stale, unreadable and colliding rows; one line a table."""
    lines = []
    for path in tables():
        skipped: list[str] = []
        rows = table.read(path, skipped=skipped)
        fresh = [row for row in rows if not table.is_stale(row)]
        kept = table.merge(fresh, [])
        table.write(path, kept)
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

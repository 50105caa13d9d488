#!/usr/bin/env python
"""Measure kdagen on this machine's GPU, section by section, beside its peers: JSON with environment, and tables to look at.

    python scripts/benchmark.py --section decode --section prefill --peers fla,flashkda --budget 10m

Each section checks results before it times them. Peers run in the same process, on the same inputs, their replays taking
turns with ours, after all of ours were measured alone; the JSON is rewritten after every case, so that a peer which takes
minutes, fails or kills the process costs its own rows. scripts/plot.py draws what this writes.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

import bench

ORDER = ("metadata", "conv", "decode", "prefill", "layer")
SHARE = {"prefill": 8.0, "decode": 2.0, "conv": 2.0}  # of the budget, 1 for the others, which run first: they have no peers
OUT = Path(__file__).parent.parent / "docs" / "benchmarks"


def sections() -> list[str]:
    """The sections there are: every module of scripts/bench with a ``run``, in the order in which a report shows them."""
    found = [module.name for module in pkgutil.iter_modules(bench.__path__) if module.name != "common"]
    return sorted((name for name in found if not name.startswith("_")),
                  key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def run_section(name: str, budget_s: float, peers: tuple[str, ...],
                keep: Callable[[list[dict]], object] = lambda rows: None) -> list[dict]:
    """The section's rows, each of them complete; a section is told of peers, and tells ``keep``, only if it takes them."""
    module = importlib.import_module(f"bench.{name}")
    takes = inspect.signature(module.run).parameters
    rows = module.run(budget_s, **{key: value for key, value in (("peers", peers), ("keep", keep)) if key in takes})
    for one in rows:
        needed = {"section", "case", "op", "implementation"}
        complete = needed <= one.keys() and ({"us", "how"} <= one.keys() or "skipped" in one)
        if not complete or one["section"] != name:
            raise ValueError(f"section {name} made the row {one}, expected what bench.common.row or skipped make")
    return rows


def show(console: Console, name: str, rows: list[dict], took: float) -> None:
    """The section's rows as a table."""
    grid = Table(title=f"{name} ({took:.0f} s)", title_justify="left", box=None)
    words = ("case", "implementation", "how")
    for column in (*words, "us", "p20-p80", "floor", "share", "TB/s", "error"):
        grid.add_column(column, justify="left" if column in words else "right")
    for one in rows:
        if "skipped" in one:
            grid.add_row(one["case"], one["implementation"], "", f"[dim]{one['skipped']}[/dim]")
            continue
        floor = [f"{one['floor_us']:.1f}", f"{one['share']:.0%}", f"{one['tb_s']:.2f}"] if "floor_us" in one else [""] * 3
        grid.add_row(one["case"], one["implementation"], one["how"], f"{one['us']:.2f}",
                     f"{one['p20']:.2f}-{one['p80']:.2f}", *floor, f"{one['error']:.1e}" if "error" in one else "")
    console.print(grid)


def broken() -> bool:
    """Whether the device fails for whatever runs in this process from now on: a kernel went wrong."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def write(folder: Path, slug: str, name: str, environment: dict, rows: list[dict]) -> Path:
    """One JSON file a device and section, replaced whole."""
    from kdagen import files

    path = folder / f"{slug}-{name}.json"
    text = json.dumps({"section": name, "environment": environment, "rows": rows}, indent=1) + "\n"
    files.write_if_different(path, text)
    return path


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--section", "names", multiple=True, help="metadata, conv, decode, prefill, layer; all by default")
@click.option("--peers", default="fla", show_default=True, help="comma-separated: fla, flashkda; or none")
@click.option("--budget", default="10m", show_default=True, help="time for all sections: 90s, 10m")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=OUT,
              help="folder; docs/benchmarks by default")
def main(names, peers, budget, out):
    """Measure kdagen on this machine's GPU, section by section, beside its peers."""
    import torch
    from bench import common

    from kdagen import devices
    from kdagen.errors import KdagenError
    from kdagen.tuning.command import seconds

    console = Console(width=None if Console().is_terminal else 170)
    unknown = set(names) - set(sections())
    asked = tuple(p for p in peers.split(",") if p and p != "none")
    if unknown or set(asked) - set(common.PEERS):
        bad = sorted(unknown | (set(asked) - set(common.PEERS)))
        raise SystemExit(f"benchmark: {', '.join(bad)}: expected sections of {', '.join(sections())}, "
                         f"peers of {', '.join(common.PEERS)}")
    if not torch.cuda.is_available():
        raise SystemExit("benchmark: no GPU on this machine, expected one. The committed figures: docs/benchmarks.md")
    try:
        left = common.Budget(seconds(budget))
    except KdagenError as error:
        raise SystemExit(f"benchmark: {error}") from None
    todo = sorted(names or sections(), key=lambda name: name in SHARE)
    environment, failed = common.environment(), []
    slug = devices.machine().slug
    console.print(f"{environment['gpu']}: copy {environment['copy_tb_s']:.2f} TB/s, product "
                  f"{environment['matmul_tflop_s']:.0f} TFLOP/s; peers: {environment['peers'] or 'none'}", highlight=False)
    while todo:
        name = todo.pop(0)
        share = SHARE.get(name, 1.0)
        began = time.monotonic()
        keep = partial(write, out, slug, name, environment)
        try:
            rows = run_section(name, left.left * share / (share + sum(SHARE.get(n, 1.0) for n in todo)), asked, keep)
        except Exception:  # one section's failure is shown and does not cost the others
            traceback.print_exc()
            failed.append(name)
        else:
            show(console, name, rows, time.monotonic() - began)
            console.print(f"wrote {keep(rows)}", highlight=False, soft_wrap=True)
        if todo and broken():
            console.print(f"the device fails in this process; in a new one: {', '.join(todo)}", highlight=False)
            rest = [word for name in todo for word in ("--section", name)]
            os.execv(sys.executable, [sys.executable, __file__, *rest, "--peers", peers, "--out", str(out), "--budget",
                                      f"{max(1.0, left.left):.0f}s"])
        torch.cuda.empty_cache()
    if failed:
        raise SystemExit(f"benchmark: failed sections: {', '.join(failed)}")


if __name__ == "__main__":
    main()

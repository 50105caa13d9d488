"""The sweep as a command: options to points and candidates, dry run, runners, bars, summary. The script only calls main."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from kdagen import devices, dispatch, families, files, table
from kdagen.errors import KdagenError, refuse
from kdagen.spec import Target
from kdagen.tuning import cases, space
from kdagen.tuning.compile_workers import pools
from kdagen.tuning.journal import Journal
from kdagen.tuning.progress import Bars
from kdagen.tuning.space import Candidate, Point
from kdagen.tuning.sweep import Settings, Sweep, environment, gpu_runner

UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds(text: str) -> float:
    """``90``, ``90s``, ``20m`` or ``2h`` in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not match or not float(match[1]):
        refuse("--budget", repr(text), "a time such as 90s, 20m or 2h")
    return float(match[1]) * UNITS[match[2] or "s"]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--family", "names", multiple=True, help="a family; may be given several times; all by default")
@click.option("--chunk-size", type=int, help="only Specs of this chunk size")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(["bf16", "fp16", "fp32"]), help="bf16 by default")
@click.option("--shapes", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="a JSON list of [tokens, seqs, heads] instead of the serving shapes")
@click.option("--budget", default="20m", show_default=True, help="time for all: 90s, 20m, 2h")
@click.option("--gpus", default="0", show_default=True, help="comma-separated indices, one measuring process each")
@click.option("--ray", "ray_address", help="measure in the GPUs of this Ray cluster instead ('auto', or its address)")
@click.option("--resume", is_flag=True, help="go on from the journal of an earlier sweep")
@click.option("--dry-run", is_flag=True, help="print the space and why each point was refused; needs no GPU")
@click.option("--device", default="h200", show_default=True, help="whose limits a dry run applies")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="row file; generated/tuned/<device>.jsonl "
              "by default")
@click.option("--journal", "journal_path", type=click.Path(dir_okay=False, path_type=Path),
              help="journal file; in the cache folder by default")
@click.option("--seed", type=int, default=0, show_default=True, help="order of the candidates, and the inputs")
@click.option("--limit", type=int, default=48, show_default=True, help="candidates of one Spec, after refusals")
@click.option("--points", "max_points", type=int, help="load buckets of one Spec at most; all by default")
@click.option("--every-load", is_flag=True, help="also the load buckets next to a more wanted one")
@click.option("-j", "--jobs", type=int, help="compiling processes; the CPU's cores less one by default")
@click.option("--compile-timeout", default=60.0, show_default=True, help="seconds one kernel may take to compile")
def main(names, chunk_size, dtypes, shapes, budget, gpus, ray_address, resume, dry_run, device, out, journal_path, seed,
         limit, max_points, every_load, jobs, compile_timeout):
    """Measure schedules on this machine's GPUs and write the winners as tuned rows.

    Ctrl-C, or a scheduler's SIGTERM, keeps what was measured: run again with --resume.
    """
    console, began = Console(width=None if Console().is_terminal else 160), time.monotonic()
    try:
        chosen, budget_s = (names, chunk_size, dtypes or ("bf16",), shapes), seconds(budget)
        if dry_run:
            target = devices.named(device)
            points, candidates = plan(*chosen, target, seed, limit, max_points, every_load)
            show(console, points, candidates, target)
            return
        for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background process ignores SIGINT unless told otherwise
            signal.signal(number, signal.default_int_handler)
        settings = Settings(budget_s=budget_s, seed=seed, compile_timeout_s=compile_timeout,
                            compile_workers=jobs or max(1, (os.cpu_count() or 2) - 1))
        runners = _runners(gpus, ray_address)
        compilers = pools(settings.compile_workers, settings.compile_timeout_s)
        target, env = environment(runners[0])
        points, candidates = plan(*chosen, target, seed, limit, max_points, every_load)
        journal = Journal(journal_path or files.cache_dir() / f"sweep-{target.arch}-{target.slug}.jsonl", resume=resume)
        settings.budget_s = max(1.0, settings.budget_s - (time.monotonic() - began))
        with Bars(settings.budget_s, console) as bars:
            sweep = Sweep(points, candidates, target, env, runners, journal,
                          out or table.path_of(target.arch, target.slug), settings, bars, compilers)
            rows = sweep.run()
        summary(console, sweep, rows)
    except KdagenError as error:
        raise SystemExit(f"autotune_sweep: {error}") from None


def plan(names, chunk_size, dtypes, shapes, target: Target, seed: int, limit: int | None,
         max_points: int | None, every_load: bool = False) -> tuple[list[Point], dict[str, list[Candidate]]]:
    """The points of the asked Specs, most wanted first, and each Spec's candidates."""
    for name in names:
        families.get(name)
        cases.get(name)
    problems = space.read_problems(shapes) if shapes else None
    lists, candidates = [], {}
    for name in names or cases.names():
        for spec in space.specs_of(name, chunk=chunk_size, dtypes=dtypes):
            points = space.points_of(spec, problems or cases.get(name).problems(spec))
            points = space.spaced(points, (-1, -1) if every_load or problems else cases.get(name).spacing)[:max_points]
            lists.append(points)
            candidates[spec.name] = space.candidates(spec, target, dispatch.triton_version(), seed=seed, limit=limit,
                                                     problems=[point.problem for point in points],
                                                     redundant=cases.get(name).redundant)
    if not lists:
        refuse("the selection", "no committed Spec", "a family, chunk size and dtype that `kdagen list` shows")
    return space.in_turn(lists, stride=3), candidates


def show(console: Console, points: list[Point], candidates: dict[str, list[Candidate]], target: Target) -> None:
    """The dry run's tables: what would be measured, and why the rest would not."""
    grid = Table(title=f"space on {target.slug} ({target.arch})", title_justify="left", box=None)
    for column in ("spec", "load buckets", "schedules", "refused"):
        grid.add_column(column, justify="left" if column == "spec" else "right")
    for name, space_of in candidates.items():
        grid.add_row(name, str(sum(point.spec.name == name for point in points)),
                     str(sum(c.refused is None for c in space_of)), str(sum(c.refused is not None for c in space_of)))
    console.print(grid)
    for number, point in enumerate(points, 1):
        sizes = "{} tokens, {} sequences, {} heads".format(*point.problem)
        console.print(f"{number:4} {point.name}: {sizes}", highlight=False, soft_wrap=True)
    for space_of in candidates.values():
        for candidate in space_of:
            if candidate.refused:
                console.print(f"refused {candidate.name}: {candidate.refused}", highlight=False, soft_wrap=True)


def _runners(gpus: str, ray_address: str | None) -> list:
    if ray_address:
        from kdagen.tuning.on_ray import runners

        return runners(ray_address)
    if not re.fullmatch(r"\d+(,\d+)*", gpus):
        refuse("--gpus", repr(gpus), "comma-separated indices, such as 0,1")
    indices = list(map(int, gpus.split(",")))
    here = torch.cuda.device_count()
    if max(indices) >= here:
        refuse("--gpus", gpus, f"indices below {here}, the GPUs of this machine" if here else "a machine with a GPU",
               "See the space without one: add --dry-run")
    return [gpu_runner(index) for index in indices]


def summary(console: Console, sweep: Sweep, rows: list[table.Row]) -> None:
    """What came out, what failed, what an untuned user loses, and what to do next."""
    grid = Table(title="tuned", title_justify="left", box=None)
    for column in ("spec", "buckets timed", "rows", "regret of the default rule"):
        grid.add_column(column, justify="left" if column == "spec" else "right")
    regret = sweep.regret()
    for name, finals in sorted(sweep.finals.items()):
        grid.add_row(name, str(len(finals)), str(sum(row.spec.name == name for row in rows)),
                     f"{(regret[name] - 1) * 100:.1f} %" if name in regret else "")
    console.print(grid)
    failures = [event for event in sweep.journal.failures() if "far behind" not in event["failed"]]
    for event in failures[:20]:
        console.print(f"{event['stage']}: {event['point']} {event['candidate']}: {event['failed']}", highlight=False,
                      soft_wrap=True)
    console.print(f"{len(rows)} rows in {sweep.out}; {len(failures)} failures in {sweep.journal.path}. "
                  "Next: kdagen render && kdagen check", highlight=False, soft_wrap=True)

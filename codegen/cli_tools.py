"""The verbs that look at compilation, dispatch, tables and the machine: compile, explain, doctor, tuned, demo."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import click

from kdagen import cli, devices
from kdagen.errors import refuse
from kdagen.spec import Problem

STEP = ("conv_update", "recurrent", "decode_step")  # families whose tokens are the sequences of a step


@cli.main.command("compile")
@cli.selection
@click.option("--target", default="sm90", show_default=True, help="comma-separated: sm80,sm90,sm100,gfx942,gfx950, or all")
@click.option("-j", "--jobs", type=click.IntRange(1), default=2, show_default=True, help="worker processes")
@click.option("--timeout", type=click.FloatRange(1), default=300.0, show_default=True, help="seconds a kernel may take")
@click.option("--json", "as_json", is_flag=True)
def compile_(chunk_size, families_, head_dim, dtype, blocks, flags, names, target, jobs, timeout, as_json):
    """Compile variants for any target without a GPU: registers, spills, shared memory, matrix instructions, fit."""
    from kdagen.compile import compile_many, default_jobs

    targets = list(devices.ARCHS) if target == "all" else [name.strip() for name in target.split(",")]
    for name in targets:
        if name not in devices.ARCHS:
            refuse("--target", repr(name), f"one of {', '.join(devices.ARCHS)}, or all")
    variants = cli.chosen_variants(chunk_size, families_, head_dim, dtype, blocks, flags, names)
    for module in ("torch", "triton"):
        if find_spec(module) is None:  # one message, not one for each worker
            raise ModuleNotFoundError(f"no module named {module}", name=module)
    reports, left_out = [], []
    work = default_jobs(variants, targets, left_out)
    for number, found in enumerate(compile_many(work, workers=jobs, timeout=timeout), 1):
        reports += found
        if sys.stderr.isatty():
            click.echo(f"\r{number}/{len(work)} {work[number - 1][0].name[:70]:70}", nl=False, err=True)
    if sys.stderr.isatty():
        click.echo("", err=True)
    for variant, name, reason in left_out:
        click.echo(f"{variant.name}: not for {name}: {reason}", err=True)
    shown = lambda r: r.kernel if as_json or not r.case else f"{r.kernel} ({r.case})"
    rows = [[r.variant, shown(r), r.constants, r.target, f"w{r.warps} s{r.stages}", r.registers, r.stack, r.shared,
             r.matrix, r.error or ", ".join(r.fits()) or "no known device"] for r in reports]
    columns = ["variant", "kernel", "constants", "target", "launch", "registers", "stack B", "shared B", "matrix ops",
               "fits"]
    if not as_json:
        columns = [c for c in columns if c != "constants"]
        rows = [row[:2] + row[3:] for row in rows]
    cli.print_table(f"{len(reports)} kernels", columns, rows, as_json=as_json)
    sys.exit(1 if any(r.error for r in reports) or not reports else 0)


@cli.main.command()
@click.argument("what")
@click.option("--device", help="a device or architecture (h200, sm90); the machine's own by default")
@click.option("--tokens", type=click.IntRange(1), help="8192 by default; one a sequence for the ops of a decode step")
@click.option("--seqs", type=click.IntRange(1), default=1, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=32, show_default=True)
@click.option("--chunk-size", type=int, help="16, 32, 64 or 128; 64 by default")
@click.option("--head-dim", default="128", show_default=True)
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16", show_default=True)
@click.option("--flag", "flags", multiple=True, help="a flag of the Spec, such as gate=softplus")
@click.option("--json", "as_json", is_flag=True)
def explain(what, device, tokens, seqs, heads, chunk_size, head_dim, dtype, flags, as_json):
    """Say which schedule dispatch picks for WHAT, and why each other one lost.

    WHAT is a family, a public op such as chunk_kda, or a prefix such as prefill.

    Needs no GPU: --device names one that may be elsewhere.
    """
    from kdagen import dispatch, families

    names = families.meant(what)
    target = devices.named(device) if device else devices.machine()
    if target is None:
        refuse("--device", "nothing, on a machine without a GPU", f"one of {', '.join(devices.table())}",
               "Run: kdagen explain " + what + " --device h200")
    k, v = cli._head_dims(head_dim)
    kinds = [families.get(name) for name in names]
    cli._refuse_chunk(chunk_size, kinds)
    flags_of, rows = cli._flags_of(flags, kinds), []
    problems = {name: Problem(tokens or (seqs if name in STEP else 8192), seqs, heads) for name in names}
    for family in kinds:
        problem = problems[family.name]
        specs = {cli._with_flags(spec, flags_of[family.name])
                 for spec in family.chunk_specs(chunk_size or 64, k=k, v=v, dtype=dtype)}
        for spec in sorted(specs):
            choice, verdicts = dispatch.explain(spec, problem, target)
            schedule = choice.schedule
            rows.append([spec.name, "->", schedule.name, f"w{schedule.warps} s{schedule.stages}", None, None,
                         f"picked: {choice.how}"])
            for verdict in verdicts:
                row = verdict.row
                rows.append([spec.name, None if verdict.rank is None else verdict.rank + 1, verdict.schedule.name,
                             f"w{verdict.schedule.warps} s{verdict.schedule.stages}", row and f"{row.us:.1f}",
                             row and f"2^{row.load[0]} x 2^{row.load[1]}", verdict.why])
    sizes = " or ".join(map(str, sorted({problem.tokens for problem in problems.values()})))
    title = f"{what} on {target.slug} ({target.arch}, {target.sms} SMs): {sizes} tokens, {seqs} sequences, {heads} heads"
    cli.print_table(title, ["spec", "rank", "blocks", "launch", "us", "load", "why"], rows, as_json=as_json)


@cli.main.command()
@click.option("--json", "as_json", is_flag=True)
def doctor(as_json):
    """Say what this machine can do with kdagen: render, interpret, compile, launch; and what is missing."""
    from kdagen.doctor import rows

    cli.print_table("kdagen doctor", ["what", "found", "verdict"], list(rows()), as_json=as_json)


@cli.main.group()
def tuned():
    """Look at and maintain the tuned tables under generated/tuned."""


@tuned.command()
@click.option("--json", "as_json", is_flag=True)
def status(as_json):
    """Coverage, age, stale rows and what an untuned user would lose."""
    from kdagen.tuning import status as tables

    columns, rows = tables.status()
    cli.print_table("tuned tables", columns, rows, as_json=as_json)


@tuned.command()
@click.argument("other", type=click.Path(exists=True, path_type=Path, dir_okay=False))
@click.option("--json", "as_json", is_flag=True)
def diff(other, as_json):
    """Compare the committed table with the rows of another file; exit 1 if they differ."""
    from kdagen.tuning import status as tables

    columns, rows = tables.diff(other)
    if rows or as_json:
        cli.print_table(f"{other} against the committed table", columns, rows, as_json=as_json)
    else:
        click.echo(f"no difference between {other} and the committed table")
    sys.exit(1 if rows else 0)


@tuned.command()
@click.argument("others", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path, dir_okay=False))
def merge(others):
    """Merge row files (from other hosts, or a sweep) into the committed tables, by the hysteresis rule."""
    from kdagen.tuning import status as tables

    for line in tables.merge(list(others)):
        click.echo(line)


@tuned.command()
def prune():
    """Remove stale and unreadable rows."""
    from kdagen.tuning import status as tables

    for line in tables.prune():
        click.echo(line)


@tuned.command()
@click.option("--format", "fmt", type=click.Choice(["csv", "json"]), default="csv", show_default=True)
def export(fmt):
    """Print all rows, flat."""
    from kdagen.tuning import status as tables

    click.echo(tables.export(fmt), nl=False)


@cli.main.command()
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--quick", is_flag=True, help="the step tables alone")
def demo(seed, quick):
    """Run kdagen on whatever this machine has, and compare every result with the oracle."""
    from kdagen import demo as demos

    sys.exit(demos.run(seed=seed, quick=quick))

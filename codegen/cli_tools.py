"""The verbs that look at compilation, dispatch, tables and the machine: compile, explain, doctor, tuned, demo."""

from __future__ import annotations

import platform
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from kdagen import cli, devices, project
from kdagen.errors import KdagenError, refuse
from kdagen.spec import Problem


@cli.main.command("compile")
@cli.selection
@click.option("--target", default="sm90", show_default=True, help="comma-separated: sm80,sm90,sm100,gfx942,gfx950, or all")
@click.option("-j", "--jobs", type=click.IntRange(1), default=2, show_default=True, help="worker processes")
@click.option("--timeout", type=click.FloatRange(1), default=300.0, show_default=True, help="seconds a kernel may take")
@click.option("--json", "as_json", is_flag=True)
def compile_(chunk_size, families_, head_dim, dtype, blocks, flags, names, target, jobs, timeout, as_json):
    """Compile variants for any target without a GPU: registers, spills, shared memory, matrix instructions, fit."""
    from kdagen.compile import compile_many, default_jobs

    targets = list(devices.ARCHS) if target == "all" else target.split(",")
    for name in targets:
        if name not in devices.ARCHS:
            refuse("--target", repr(name), f"one of {', '.join(devices.ARCHS)}, or all")
    variants = cli.chosen_variants(chunk_size, families_, head_dim, dtype, blocks, flags, names)
    for module in ("torch", "triton"):
        if find_spec(module) is None:  # one message, not one for each worker
            raise ModuleNotFoundError(f"no module named {module}", name=module)
    work = default_jobs(variants, targets)
    reports = []
    for number, found in enumerate(compile_many(work, workers=jobs, timeout=timeout), 1):
        reports += found
        if sys.stderr.isatty():
            click.echo(f"\r{number}/{len(work)} {work[number - 1][0].name[:70]:70}", nl=False, err=True)
    if sys.stderr.isatty():
        click.echo("", err=True)
    rows = [[r.variant, r.kernel, r.constants, r.target, f"w{r.warps} s{r.stages}", r.registers, r.stack, r.shared,
             r.matrix, r.error or ", ".join(r.fits()) or "no known device"] for r in reports]
    columns = ["variant", "kernel", "constants", "target", "launch", "registers", "stack B", "shared B", "matrix ops",
               "fits"]
    if not as_json:
        columns = [c for c in columns if c != "constants"]
        rows = [row[:2] + row[3:] for row in rows]
    cli.print_table(f"{len(reports)} kernels", columns, rows, as_json=as_json)
    sys.exit(1 if any(r.error for r in reports) else 0)


@cli.main.command()
@click.argument("what")
@click.option("--device", help="a device or architecture (h200, sm90); the machine's own by default")
@click.option("--tokens", type=click.IntRange(1), default=8192, show_default=True)
@click.option("--seqs", type=click.IntRange(1), default=1, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=32, show_default=True)
@click.option("--chunk-size", type=int, default=64, show_default=True)
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
    problem = Problem(tokens, seqs, heads)
    rows = []
    for name in names:
        family = families.get(name)
        specs = {cli._with_flags(spec, flags) if flags else spec
                 for spec in family.chunk_specs(chunk_size, k=k, v=v, dtype=dtype)}
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
    title = f"{what} on {target.slug} ({target.arch}, {target.sms} SMs): {tokens} tokens, {seqs} sequences, {heads} heads"
    cli.print_table(title, ["spec", "rank", "blocks", "launch", "us", "load", "why"], rows, as_json=as_json)


@cli.main.command()
@click.option("--json", "as_json", is_flag=True)
def doctor(as_json):
    """Say what this machine can do with kdagen: render, interpret, compile, launch; and what is missing."""
    import importlib.metadata
    import os

    from kdagen import files

    rows = [["python", platform.python_version(), "ok" if sys.version_info >= (3, 10) else "needs 3.10 or newer"]]
    modules = {}
    for name, without in (("jinja2", "nothing renders"), ("click", "no command line"), ("rich", "no tables"),
                          ("torch", "ops cannot run: pip install 'kdagen[launch]'"),
                          ("triton", "kernels cannot run or compile: pip install 'kdagen[launch]'"),
                          ("numpy", "no interpreter")):
        try:
            modules[name] = importlib.import_module(name)
            rows.append([name, importlib.metadata.version(name), "ok"])
        except ImportError:
            rows.append([name, "missing", without])
    if "triton" in modules:
        minor = tuple(map(int, modules["triton"].__version__.split(".")[:2]))
        rows.append(["triton version", modules["triton"].__version__,
                     "ok" if (3, 6) <= minor < (3, 10) else "tested with 3.6 to 3.9"])
    if "numpy" in modules and "triton" in modules and minor == (3, 6):
        numpy_minor = tuple(map(int, modules["numpy"].__version__.split(".")[:2]))
        rows.append(["interpreter", f"numpy {modules['numpy'].__version__}",
                     "ok" if numpy_minor < (2, 4) else "Triton 3.6 cannot interpret loops with it: pip install 'numpy<2.4'"])
    target = devices.machine()
    rows.append(["GPU", f"{target.slug} ({target.arch}, {target.sms} SMs, {target.smem} B shared)" if target else "none",
                 "ok" if target else "ops take the CPU path; TRITON_INTERPRET=1 interprets fp32 and fp16 kernels"])
    cache = files.cache_dir()
    where = next(p for p in (cache, *cache.parents) if p.exists())
    rows.append(["cache", str(cache), "ok" if os.access(where, os.W_OK) else "not writable: set KDAGEN_CACHE"])
    for variable in ("KDAGEN_MODE", "KDAGEN_PIN", "KDAGEN_VARIANT_PATH", "KDAGEN_BATCH_INVARIANT", "TRITON_INTERPRET"):
        if os.environ.get(variable):
            rows.append([variable, os.environ[variable], "set"])
    try:
        errors = [f for f in project.check() if f.error]
        rows.append(["generated/", f"{len(project.committed_set())} variants", "ok" if not errors else "run: kdagen check"])
        from kdagen import dispatch

        rows.append(["dispatch digest", dispatch.digest(), "compare it across ranks"])
    except KdagenError as error:
        rows.append(["generated/", "unreadable", str(error)])
    cli.print_table("kdagen doctor", ["what", "found", "verdict"], rows, as_json=as_json)


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
    cli.print_table(f"{other} against the committed table", columns, rows, as_json=as_json)
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

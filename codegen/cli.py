"""The `kdagen` command. Each verb is a thin function: exit 0 is fine, 1 differs, 2 is an error with its reason.

torch, triton and rich are imported by the verbs that need them, so that `kdagen list` starts at once everywhere.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kdagen import files, project
from kdagen.errors import KdagenError, refuse
from kdagen.spec import CHUNKS, FlagValue, Schedule, Spec, Variant, parse

if TYPE_CHECKING:
    from kdagen.families import Family


class Group(click.Group):
    """A click group that prints what went wrong outside of kdagen's own code as one message and exits 2, no traceback."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except KdagenError as error:
            click.echo(f"kdagen: {error}", err=True)
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "triton", "numpy"):
                raise
            click.echo(f"kdagen: this needs {error.name}, which is not there. Run: pip install 'kdagen[launch]'", err=True)
        except OSError as error:
            if error.errno == errno.EPIPE:  # `kdagen list | head`: click ends in silence
                raise
            click.echo(f"kdagen: {error.filename or 'file'}: got {error.strerror}, expected a path that this user can read "
                       "and write. `kdagen doctor` shows the folders in use.", err=True)
        ctx.exit(2)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kdagen")
def main():
    """Render, check, compile, explain and run generated Triton kernels for Kimi Delta Attention."""


def print_table(title: str, columns: list[str], rows: list[list], *, as_json: bool = False) -> None:
    """A table for people, or with ``as_json`` one JSON list of objects for programs."""
    if as_json:
        click.echo(json.dumps([dict(zip(columns, row)) for row in rows], indent=1, default=str))
        return
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*("" if cell is None else str(cell) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(grid)


def selection(f):
    """The options that choose Specs, shared by render, compile and explain."""
    for option in reversed([
        click.option("--chunk-size", type=int, help="16, 32, 64 or 128"),
        click.option("--family", "families_", multiple=True, help="a family's name; may be given several times"),
        click.option("--head-dim", help="K = V = 128, or K,V as in 128,256"),
        click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"])),
        click.option("--block", "blocks", multiple=True, help="a baked block size, such as bv=64, or form=gluon"),
        click.option("--flag", "flags", multiple=True, help="a flag of the Spec, such as gate=softplus or varlen"),
        click.option("--variant", "names", multiple=True, help="a variant's name, as `kdagen list` prints it"),
    ]):
        f = option(f)
    return f


def chosen_variants(chunk_size, families_, head_dim, dtype, blocks, flags, names) -> list[Variant]:
    """The variants that the selection options name; all committed ones when none is given."""
    from kdagen import families

    if names:
        return [parse(name) for name in names]
    if not any((chunk_size, families_, head_dim, dtype, blocks, flags)):
        return project.committed_set()
    k, v = _head_dims(head_dim)
    found: list[Variant] = []
    committed = project.committed_set()  # the tuned winners of a chosen Spec belong to the choice
    kinds = [families.get(name) for name in families_] or families.everyone()
    _refuse_chunk(chunk_size, kinds)
    flags_of = _flags_of(flags, kinds)
    for family in kinds:
        for spec in family.chunk_specs(chunk_size or 64, k=k, v=v, dtype=dtype):
            spec = _with_flags(spec, flags_of[family.name])
            if blocks:
                found.append(Variant(spec, _with_blocks(spec, blocks).source_key))
            else:
                found += project.default_variants(spec) + [variant for variant in committed if variant.spec == spec]
    return sorted(set(found))


def _head_dims(text: str | None) -> tuple[int, int]:
    if not text:
        return 128, 128
    parts = text.split(",")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        refuse("--head-dim", repr(text), "K, or K,V (128 or 128,256)")
    return int(parts[0]), int(parts[-1])


def _refuse_chunk(chunk_size: int | None, kinds: Iterable[Family]) -> None:
    """Refuse a chunk size that is none, or that none of the families has."""
    if chunk_size is not None and chunk_size not in CHUNKS:
        refuse("--chunk-size", chunk_size, f"one of {', '.join(map(str, CHUNKS))}")
    if chunk_size is not None and not any(family.chunked for family in kinds):
        refuse("--chunk-size", chunk_size, f"none: {', '.join(family.name for family in kinds)} has no chunks")


def _flags_of(flags: Iterable[str], kinds: Iterable[Family]) -> dict[str, dict[str, FlagValue]]:
    """Family's name -> those of the given flags (``name`` or ``name=value``) that it has; one that none has is refused."""
    given = {}
    for flag in flags:
        name, _, value = flag.partition("=")
        given[name] = True if not value else int(value) if value.isdigit() else value
        if not any(name in family.flags for family in kinds):
            known = sorted({known for family in kinds for known in family.flags})
            refuse("--flag", repr(flag), f"a flag of {', '.join(family.name for family in kinds)}: "
                   f"{', '.join(known) or 'none'}")
    return {family.name: {name: value for name, value in given.items() if name in family.flags} for family in kinds}


def _with_flags(spec: Spec, given: dict[str, FlagValue]) -> Spec:
    if not given:
        return spec
    return Spec.make(spec.family, chunk=spec.chunk, k=spec.k, v=spec.v, dtype=spec.dtype, **dict(spec.flags) | given)


def _with_blocks(spec: Spec, blocks: tuple[str, ...]) -> Schedule:
    """The Spec's default schedule with these blocks; with ``form=NAME`` the default one of that form, if there is one."""
    from kdagen import families

    family, sizes, form = families.get(spec.family), {}, None
    for block in blocks:
        name, _, value = block.partition("=")
        if name == "form":
            form = "" if value == "portable" else value
            if form not in family.forms:
                refuse("--block", repr(block), f"a form of family {family.name}: "
                       f"{', '.join(known or 'portable' for known in family.forms)}")
        elif value.isdigit():
            sizes[name] = int(value)
        else:
            refuse("--block", repr(block), "NAME=NUMBER (bv=64) or form=NAME")
    schedule = family.default(spec)
    if form is not None:
        schedule = next((one for one in family.default_schedules(spec) if one.form == form), replace(schedule, form=form))
    known = sorted({*schedule.block, *family.space})
    if set(sizes) - set(known):
        refuse("--block", ", ".join(sorted(set(sizes) - set(known))), f"a block of family {family.name}: {', '.join(known)}")
    return Schedule.make(warps=schedule.warps, stages=schedule.stages, form=schedule.form, **schedule.block | sizes)


@main.command()
@selection
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="render into this folder instead")
@click.option("--stdout", is_flag=True, help="print the modules instead of writing them")
@click.option("--check", is_flag=True, help="write nothing; exit 1 and list what differs")
@click.option("--diff", is_flag=True, help="write nothing; print the difference, exit 1 if there is one")
@click.option("--prune", is_flag=True, help="also remove modules that do not belong")
def render(chunk_size, families_, head_dim, dtype, blocks, flags, names, out, stdout, check, diff, prune):
    """Render kernels: with no options the committed set into generated/, else what the options select.

    Selected variants that belong under generated/ are written there; others go to --out, or to the cache where dispatch
    finds them.
    """
    from kdagen.render import render as render_one

    others = [f"--{name}" for name, given in dict(check=check, diff=diff, out=out, prune=prune).items() if given]
    if stdout and others:
        refuse("--stdout", f"it together with {', '.join(others)}", "it alone: it writes nothing and compares nothing")
    selected = chosen_variants(chunk_size, families_, head_dim, dtype, blocks, flags, names)
    everything = not any((chunk_size, families_, head_dim, dtype, blocks, flags, names))
    if stdout:
        for variant in selected:
            click.echo(render_one(variant).text, nl=False)
        return
    if prune and not (everything or out):
        refuse("--prune", "a selection of variants", "the whole set, or a folder given by --out",
               "Run: kdagen render --prune")
    folder = out or files.generated_dir()
    whole = (everything and out is None) or prune
    inside = selected if out else [v for v in selected if v in set(project.committed_set())]
    if check or diff:
        changes = project.compare(inside, folder, whole=whole)
        for path in changes.written:
            click.echo(f"differs: {path}")
        for path in changes.extra:
            click.echo(f"extra:   {path}")
        if diff:
            click.echo("".join(changes.diffs), nl=False)
        click.echo(f"{len(changes.unchanged)} of {len(inside)} modules in {folder} are up to date")
        sys.exit(0 if changes.clean else 1)
    outside = [v for v in selected if v not in set(inside)]
    for variant in outside:
        render_one(variant)  # all renderings succeed before anything is written
    changes = project.write(inside, folder, whole=whole, prune=prune)
    for path in changes.written:
        click.echo(f"wrote {folder / path}")
    for path in changes.extra if prune else ():
        click.echo(f"removed {folder / path}")
    if outside:
        from kdagen.loader import cached

        for variant in outside:
            click.echo(f"cached {cached(variant, asked_for=True)}")
    click.echo(f"{len(changes.written)} written, {len(changes.unchanged)} unchanged, {len(outside)} in the cache")


@main.command("list")
@click.option("--families", "only_families", is_flag=True, help="list the families instead of the variants")
@click.option("--json", "as_json", is_flag=True)
def list_(only_families, as_json):
    """List the committed variants, or the families."""
    from kdagen import families, table

    if only_families:
        rows = [[f.name, f.title, "yes" if f.chunked else "", ", ".join(form or "portable" for form in f.forms)]
                for f in families.everyone()]
        print_table("kernel families", ["family", "what", "chunked", "forms"], rows, as_json=as_json)
        return
    tuned: dict[str, int] = {}
    for row in project.tuned_rows():
        if not table.is_stale(row):
            tuned[row.variant] = tuned.get(row.variant, 0) + 1
    rows = [[v.spec.family, v.name, tuned.get(v.name, 0)] for v in project.committed_set()]
    print_table("committed variants", ["family", "variant", "tuned rows"], rows, as_json=as_json)


@main.command()
@click.argument("variant")
@click.option("--map", "with_map", is_flag=True, help="put the template and line that made it before each line")
def show(variant, with_map):
    """Print a variant's module, rendered now."""
    from kdagen.render import render as render_one

    rendered = render_one(parse(variant), source_map=with_map)
    if not with_map:
        click.echo(rendered.text, nl=False)
        return
    for (template, line), text in zip(rendered.source_map, rendered.text.splitlines()):
        click.echo(f"{template}:{line:<4} | {text}")


@main.command()
@click.option("--json", "as_json", is_flag=True)
def check(as_json):
    """Prove that generated/ is exactly what templates, committed Specs and tuned tables say; exit 1 if not."""
    findings = project.check()
    errors = [f for f in findings if f.error]
    if findings or as_json:
        print_table("findings", ["", "what", "why", "next"],
                    [["error" if f.error else "note", f.what, f.why, f.next] for f in findings], as_json=as_json)
    if not as_json:
        click.echo(f"{len(project.committed_set())} variants, {len(project.tuned_rows())} tuned rows: "
                   + (f"{len(errors)} error{'s' * (len(errors) > 1)}" if errors else "all in order"))
    sys.exit(1 if errors else 0)


from kdagen import cli_tools  # noqa: E402  (registers compile, explain, doctor, tuned and demo on ``main``)

__all__ = ["cli_tools", "main"]

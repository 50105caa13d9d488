"""The set of files under generated/: what belongs there, writing it, and proving that it is exactly that.

Belonging: the default variants of each family's committed Specs, and the winners in the tuned tables.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kdagen import families, files, manifest, quirks, table
from kdagen.errors import CorruptFile, KdagenError
from kdagen.render import inputs_hash, render
from kdagen.spec import Spec, Variant, parse


def default_variants(spec: Spec) -> list[Variant]:
    """The files that a Spec's default rule can ask for."""
    keys = {schedule.source_key for schedule in families.get(spec.family).default_schedules(spec)}
    return sorted(Variant(spec, key) for key in keys)


def committed_set() -> list[Variant]:
    """Every variant that belongs under generated/, sorted."""
    defaults = {variant for family in families.everyone() for spec in family.committed()
                for variant in default_variants(spec)}
    tuned = {parse(row.variant) for row in tuned_rows() if not table.is_stale(row)}
    return sorted(defaults | tuned)


def tuned_rows() -> list[table.Row]:
    """The readable rows of all tables under generated/tuned."""
    folder = files.generated_dir() / "tuned"
    return [row for path in sorted(folder.glob("*.jsonl")) for row in table.read(path, skipped=[])]


@dataclass
class Changes:
    """What writing a set of variants into a folder did, or would do."""

    written: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    diffs: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.written or self.extra)


def compare(variants: Iterable[Variant], folder: Path, *, whole: bool) -> Changes:
    """What ``write`` would change. ``whole``: the folder should hold nothing but these."""
    changes = Changes()
    wanted = {variant.path: render(variant).text for variant in variants}
    for path, text in sorted(wanted.items()):
        file = folder / path
        now = file.read_text() if file.exists() else ""
        if now == text:
            changes.unchanged.append(path)
            continue
        changes.written.append(path)
        changes.diffs.append("".join(difflib.unified_diff(
            now.splitlines(True), text.splitlines(True), f"{path} (on disk)", f"{path} (rendered)")))
    if whole:
        changes.extra = sorted(set(python_files(folder)) - set(wanted))
    entries = _entries(variants, folder, whole=whole)
    if not changes.written and entries != _readable(folder):
        changes.written.append(manifest.NAME)
    return changes


def write(variants: Iterable[Variant], folder: Path, *, whole: bool, prune: bool = False) -> Changes:
    """Render all variants, then write those that differ and the manifest. Nothing is written if any rendering fails."""
    variants = list(variants)
    changes = compare(variants, folder, whole=whole)
    entries = _entries(variants, folder, whole=whole)
    for variant in variants:
        files.write_if_different(folder / variant.path, render(variant).text)
    if prune:
        for path in changes.extra:
            (folder / path).unlink()
            if not any((folder / path).parent.iterdir()):
                (folder / path).parent.rmdir()
    manifest.write(folder, entries)
    return changes


def _readable(folder: Path) -> dict[str, dict]:
    try:
        return manifest.read(folder)
    except CorruptFile:
        return {}


def _entries(variants: Iterable[Variant], folder: Path, *, whole: bool) -> dict[str, dict]:
    new = {variant.name: manifest.entry(variant, render(variant)) for variant in variants}
    return dict(sorted((new if whole else _readable(folder) | new).items()))


def python_files(folder: Path) -> list[str]:
    """The rendered modules below a folder, as relative paths."""
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/*.py") if path.parent.name != "tuned")


@dataclass(frozen=True)
class Finding:
    """One result of ``check``: ``error`` makes it exit 1, a note does not."""

    what: str
    why: str
    next: str
    error: bool = True


def check(folder: Path | None = None) -> list[Finding]:
    """Prove that generated/ is exactly what it should be: files, names, hashes, manifest, tables, quirks."""
    folder = folder or files.generated_dir()
    findings: list[Finding] = []
    wanted = {variant.path: variant for variant in committed_set()}
    present = set(python_files(folder))
    for path in sorted(set(wanted) - present):
        findings.append(Finding(path, "belongs under generated/ and is missing", "kdagen render"))
    for path in sorted(present - set(wanted)):
        findings.append(Finding(path, "an orphan: no committed Spec and no tuned row names it", "kdagen render --prune"))
    for path in sorted(present & set(wanted)):
        if (folder / path).read_text() != render(wanted[path]).text:
            findings.append(Finding(path, "differs from what the templates render", "kdagen render --diff"))
    findings += _check_manifest(folder, wanted)
    findings += _check_tables(folder)
    try:
        known = {family.name for family in families.everyone()} | {"*"}
        for entry in quirks.read(Path(quirks.__file__).parent / "quirks.toml"):
            if entry["family"] not in known:
                findings.append(Finding("quirks.toml", f"names the unknown family {entry['family']!r}", "mend the entry"))
    except (KdagenError, ValueError) as error:
        findings.append(Finding("quirks.toml", str(error), "mend the entry"))
    return findings


def _check_manifest(folder: Path, wanted: dict[str, Variant]) -> list[Finding]:
    try:
        entries = manifest.read(folder)
    except CorruptFile as error:
        return [Finding(manifest.NAME, str(error), "kdagen render")]
    findings = []
    for name in sorted({variant.name for variant in wanted.values()} ^ set(entries)):
        findings.append(Finding(manifest.NAME, f"{name}: in the manifest or the committed set, but not in both",
                                "kdagen render"))
    for name, entry in entries.items():
        try:
            variant = parse(name)
        except KdagenError as error:
            findings.append(Finding(manifest.NAME, str(error), "kdagen render"))
            continue
        path = folder / entry["path"]
        if entry["path"] != variant.path:
            findings.append(Finding(manifest.NAME, f"{name}: path {entry['path']} is not {variant.path}", "kdagen render"))
        elif path.exists() and files.digest(path.read_text()) != entry["sha256"]:
            findings.append(Finding(manifest.NAME, f"{name}: the file's hash is not the manifest's", "kdagen render"))
        if entry["inputs"] != inputs_hash(variant):
            findings.append(Finding(manifest.NAME, f"{name}: rendered from other templates than today's", "kdagen render"))
    return findings


def _check_tables(folder: Path) -> list[Finding]:
    findings = []
    for path in sorted(path for kind in ("jsonl", "swept") for path in (folder / "tuned").glob(f"*.{kind}")):
        skipped: list[str] = []
        rows = table.read(path, skipped=skipped)
        findings += [Finding(path.name, message, "kdagen tuned prune") for message in skipped]
        findings += [Finding(path.name, f"two rows for {key}", "kdagen tuned merge") for key in table.collisions(rows)]
        if rows != sorted(rows):
            findings.append(Finding(path.name, "its rows are not sorted", "kdagen tuned merge"))
        for row in rows:
            if table.is_stale(row):
                findings.append(Finding(path.name, f"{row.variant} load {row.load}: stale, dispatch skips it",
                                        "kdagen tuned prune, then sweep again", error=False))
    return findings

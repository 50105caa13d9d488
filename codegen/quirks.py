"""Known-bad schedules (quirks.toml): never dispatched, never swept, shown by `kdagen explain`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from kdagen.devices import tomllib
from kdagen.errors import CorruptFile, refuse
from kdagen.spec import Schedule, Spec, Target
from kdagen.table import triton_minor

_FIELDS = {"family", "arch", "triton", "match", "why", "link"}


@cache
def entries() -> tuple[dict, ...]:
    return tuple(read(Path(__file__).parent / "quirks.toml"))


def read(path: Path) -> list[dict]:
    """The entries of a quirks file, each complete, or CorruptFile."""
    try:
        found = tomllib.loads(path.read_text()).get("quirk", [])
    except tomllib.TOMLDecodeError as error:
        refuse(path.name, str(error), "a TOML file", kind=CorruptFile)
    for entry in found:
        if set(entry) != _FIELDS:
            refuse(path.name, f"an entry with {', '.join(sorted(entry))}", f"exactly {', '.join(sorted(_FIELDS))}",
                   kind=CorruptFile)
        versions = entry["triton"]
        if not isinstance(versions, list) or len(versions) != 2 or (0, 0) in map(triton_minor, versions):
            refuse(path.name, f"triton = {versions!r}", 'the first and last minor version, as in ["3.6", "3.7"]',
                   kind=CorruptFile)
        if not isinstance(entry["match"], dict):
            refuse(path.name, f"match = {entry['match']!r}", "a table of schedule or Spec fields, as in { warps = 8 }",
                   kind=CorruptFile)
    return found


def reason(spec: Spec, schedule: Schedule, target: Target, triton: str, known: tuple[dict, ...] | None = None) -> str | None:
    """Why this schedule must not run on this target with this Triton, or None."""
    values = {"warps": schedule.warps, "stages": schedule.stages, "form": schedule.form, "chunk": spec.chunk, "k": spec.k,
              "v": spec.v, "dtype": spec.dtype} | schedule.block
    for entry in entries() if known is None else known:
        first, last = map(triton_minor, entry["triton"])
        if (entry["family"] in ("*", spec.family) and entry["arch"] == target.arch
                and first <= triton_minor(triton) <= last
                and all(values.get(name) == value for name, value in entry["match"].items())):
            return f"{entry['why']} ({entry['link']})"
    return None

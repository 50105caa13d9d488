"""The registry of kernel families, in the order in which `kdagen list` prints them."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from kdagen.errors import UnknownName, refuse
from kdagen.families.base import Family

# One module per family, each defining FAMILY.
NAMES: tuple[str, ...] = (
    "step_tables",
    "stage_spec",
    "conv_prefill",
    "conv_update",
    "gate",
    "rmsnorm",
    "recurrent",
    "decode_step",
    "prefill_prepare",
    "prefill_state",
    "prefill_segments",
)


@cache
def get(name: str) -> Family:
    """The family of that name, or UnknownName with the names there are."""
    if name not in NAMES:
        refuse("family", repr(name), f"one of {', '.join(NAMES)}", "Run `kdagen list --families`.", kind=UnknownName)
    return import_module(f"kdagen.families.{name}").FAMILY


def everyone() -> tuple[Family, ...]:
    return tuple(get(name) for name in NAMES)

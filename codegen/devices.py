"""Devices: from a name, or from the machine's own, to a Target; no CUDA is touched unless a device index is asked for."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from kdagen.errors import UnknownName, refuse
from kdagen.spec import Target

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The architectures kdagen compiles for, each with the device whose limits stand for it.
ARCHS = {"sm80": "a100", "sm90": "h200", "sm100": "b200", "gfx942": "mi300x", "gfx950": "mi355x"}


@cache
def table() -> dict[str, dict]:
    return tomllib.loads((Path(__file__).parent / "devices.toml").read_text())


def named(name: str) -> Target:
    """The Target of a slug (``h200``) or of an architecture (``sm90``, by its representative device)."""
    slug = ARCHS.get(name.lower(), name.lower())
    if slug not in table():
        refuse("device", repr(name), f"one of {', '.join([*table(), *ARCHS])}", kind=UnknownName)
    row = table()[slug]
    return Target(row["arch"], slug, row["sms"], row["smem"])


@cache
def of_index(index: int) -> Target:
    """The Target of this machine's CUDA or ROCm device ``index``."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
    else:
        arch = f"sm{properties.major}{properties.minor}"
    # The longest match wins: H200 must not be read as H20.
    rows = [(len(row["match"]), slug) for slug, row in table().items() if row["match"] in properties.name]
    slug = max(rows)[1] if rows else properties.name.lower().replace(" ", "-")
    smem = getattr(properties, "shared_memory_per_block_optin", 0) or table().get(slug, {}).get("smem", 49152)
    return Target(arch, slug, properties.multi_processor_count, smem)


@cache
def machine() -> Target | None:
    """The current device's Target, or None where there is no GPU or no torch."""
    try:
        import torch
    except ImportError:
        return None
    return of_index(torch.cuda.current_device()) if torch.cuda.is_available() else None

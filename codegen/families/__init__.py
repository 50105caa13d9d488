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

# The families that a public op launches.
OPS: dict[str, tuple[str, ...]] = {
    "step_tables": ("step_tables",),
    "prepare_chunk_metadata_device": ("step_tables",),
    "build_conv1d_chunk_schedule": ("step_tables",),
    "stage_spec_decode_metadata": ("stage_spec",),
    "causal_conv1d": ("conv_prefill",),
    "causal_conv1d_update": ("conv_update",),
    "kda_gate": ("gate",),
    "gated_rmsnorm": ("rmsnorm",),
    "fused_recurrent_kda": ("recurrent",),
    "kda_decode_step": ("decode_step",),
    "chunk_kda": ("prefill_prepare", "prefill_state", "prefill_segments"),
}


@cache
def get(name: str) -> Family:
    """The family of that name, or UnknownName with the names there are."""
    if name not in NAMES:
        refuse("family", repr(name), f"one of {', '.join(NAMES)}", "Run `kdagen list --families`.", kind=UnknownName)
    return import_module(f"kdagen.families.{name}").FAMILY


def meant(name: str) -> tuple[str, ...]:
    """The names of the families that a family's name, a public op's name or a prefix (``prefill``) stands for."""
    found = OPS.get(name) or tuple(n for n in NAMES if n == name) or tuple(n for n in NAMES if n.startswith(name))
    return found or (get(name).name,)


def everyone() -> tuple[Family, ...]:
    return tuple(get(name) for name in NAMES)

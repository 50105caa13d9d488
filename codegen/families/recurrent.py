"""Recurrent KDA: one engine step of decoding (or any T >= 1 tokens a sequence), a memory-bound pass over the states.

A program is one warp with BV rows of V of one state, so that many small programs keep the memory busy; everything that
only drops a branch (gate form, L2 norm, one token, index table) is a constexpr of one file per K, V, dtype and layout.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdagen.families.base import Family, Kernel, next_power_of_2, pointers
from kdagen.spec import Flag, Problem, Schedule, Spec, Target

MAX_HEAD_DIM = 256
STRIDES = tuple(f"{x}_{axis}" for x in ("q", "k", "v", "g", "beta", "o") for axis in "bth") + (
    "h0_n", "ht_n", "index_n", "index_t")
UNALIGNED = ("beta_b", "beta_t", "beta_h", "index_n", "index_t")  # scalar loads: their strides may be anything


def refuse_head_dims(spec: Spec) -> str | None:
    """The reason why a decode family cannot take the Spec's K, V or dtype."""
    for name, size in (("K", spec.k), ("V", spec.v)):
        if not 1 <= size <= MAX_HEAD_DIM:
            return f"{name} = {size} is not within 1..{MAX_HEAD_DIM}"
    if spec.dtype not in ("bf16", "fp16", "fp32"):
        return f"dtype {spec.dtype or 'missing'} is not one of bf16, fp16, fp32"
    return None


def refuse_tile(elements: int, warps: int, target: Target | None) -> str | None:
    """The reason why a state tile does not suit its warps: idle threads, or more registers than a thread has."""
    if not warps:  # a file is asked about, whatever its warps
        return None
    threads = warps * (64 if target and target.vendor == "hip" else 32)
    if threads > 1024:
        return f"{threads} threads a program are more than 1024"
    if warps > 1 and elements < threads:  # two warps with the same element: one may read it after the other wrote it
        return f"a state tile of {elements} elements is less than one for each of {threads} threads"
    if elements > 128 * threads:
        return f"a state tile of {elements} elements needs {elements // threads} registers a thread, more than 128"
    return None


def layout_context(spec: Spec) -> dict:
    """How a state tile lies in memory: what the templates need to broadcast and reduce along K and V."""
    if spec.k_first:
        return {"tile": "[BK, BV]", "as_k": "[:, None]", "as_v": "[None, :]", "k_axis": 0,
                "state_dims": f"{spec.k}, {spec.v}", "state_offsets": "d_k[:, None] * V + d_v[None, :]"}
    return {"tile": "[BV, BK]", "as_k": "[None, :]", "as_v": "[:, None]", "k_axis": 1,
            "state_dims": f"{spec.v}, {spec.k}", "state_offsets": "d_v[:, None] * K + d_k[None, :]"}


class Recurrent(Family):
    name = "recurrent"
    title = "recurrent KDA for decode: T >= 1 tokens a sequence, states in place in a pool"
    flags = {"k_first": Flag("k_first", (False, True))}  # states [HV, K, V] instead of [HV, V, K]
    space = {"bv": (4, 8, 16, 32, 64)}
    warps = (1, 2, 4)
    stages = (1,)

    def context(self, spec: Spec, schedule: Schedule) -> dict:
        return layout_context(spec)

    def supports(self, spec: Spec, schedule: Schedule, target: Target | None) -> str | None:
        bv = schedule.block.get("bv", 0)
        if bv < 1 or bv & (bv - 1):
            return f"bv {bv} is not a power of two"
        if bv > next_power_of_2(spec.v):
            return f"bv {bv} is more than V = {spec.v} needs"
        return refuse_head_dims(spec) or refuse_tile(bv * next_power_of_2(spec.k), schedule.warps, target)

    def default(self, spec: Spec, target: Target | None = None, problem: Problem | None = None) -> Schedule:
        """8 rows of V and one warp; 32 columns where V is contiguous, so that a row of the tile is a whole memory line."""
        bv = min(32 if spec.k_first else 8, next_power_of_2(spec.v))
        return Schedule.make(bv=bv, warps=max(1, min(4, bv * next_power_of_2(spec.k) // 1024)) if spec.k_first else 1)

    def kernels(self, spec: Spec, schedule: Schedule) -> tuple[Kernel, ...]:
        runtime = pointers(spec.dtype, "q", "k", "v", "g", "beta", "o") | {"scale": "fp32"} | dict.fromkeys(
            ("T", "slots", "pad_slot", *STRIDES), "i32")
        divisible = tuple(stride for stride in STRIDES if stride not in UNALIGNED)
        heads = {"H": 4, "HV": 4, "L2NORM": True, "BETA_SIGMOID": True, "BETA_SCALE": 1.0}
        in_place = runtime | pointers("fp32", "A_log", "dt_bias", "h0", "ht") | {
            "state_indices": "*i32", "lower_bound": "fp32"}
        decode = Kernel("recurrent_kernel", in_place, heads | dict(
            cu_seqlens=None, num_accepted=None, has_initial=None, COLUMNS=0, ONE_TOKEN=True, RAW_GATE=True), divisible)
        speculative = Kernel(
            "recurrent_kernel",
            runtime | pointers("fp32", "A_log", "dt_bias") | pointers("bf16", "h0", "ht")
            | {"state_indices": "*i32", "cu_seqlens": "*i32", "num_accepted": "*i32", "has_initial": "*i1"},
            heads | dict(lower_bound=None, COLUMNS=4, ONE_TOKEN=False, RAW_GATE=True), divisible)
        ready = Kernel(
            "recurrent_kernel", runtime | pointers("fp32", "g", "h0", "ht"),
            heads | dict(A_log=None, dt_bias=None, cu_seqlens=None, state_indices=None, num_accepted=None, has_initial=None,
                         lower_bound=None, COLUMNS=0, ONE_TOKEN=False, RAW_GATE=False, L2NORM=False, BETA_SIGMOID=False),
            divisible)
        return decode, speculative, ready

    def committed(self) -> Iterable[Spec]:
        for k_first in (False, True):
            for dtype in ("bf16", "fp16", "fp32"):
                yield Spec.make("recurrent", k=128, v=128, dtype=dtype, k_first=k_first)


FAMILY = Recurrent()

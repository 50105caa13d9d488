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
    flags = {
        "half_state": Flag("half_state", (False, True)),  # states read and written in bf16 or fp16 instead of fp32
        "k_first": Flag("k_first", (False, True)),        # states [HV, K, V] instead of [HV, V, K]
    }
    space = {"bv": (4, 8, 16, 32), "evict": (0, 1)}  # rows of V a program; 1: states leave the L2 cache first
    warps = (1, 2)
    stages = (1,)

    def context(self, spec: Spec, schedule: Schedule) -> dict:
        return layout_context(spec) | {"evict": ', eviction_policy="evict_first"' if schedule.block["evict"] else ""}

    def supports(self, spec: Spec, schedule: Schedule, target: Target | None) -> str | None:
        bv, warps = schedule.block.get("bv", 0), schedule.warps
        if set(schedule.block) != {"bv", "evict"} or schedule.block["evict"] not in (0, 1):
            return f"blocks {dict(schedule.blocks)} are not bv and evict, the latter 0 or 1"
        if bv < 1 or bv & (bv - 1):
            return f"bv {bv} is not a power of two"
        if bv > next_power_of_2(spec.v):
            return f"bv {bv} is more than V = {spec.v} needs"
        reason = refuse_head_dims(spec) or refuse_tile(bv * next_power_of_2(spec.k), warps, target)
        if reason:
            return reason
        # Which schedule runs depends on the batch. A sequence's bits must not: all schedules sum over K in the same order.
        if spec.k_first:
            same = self.default(spec)
            if bv != same.block["bv"] or warps not in (0, same.warps):
                return f"bv {bv} with {warps} warps sums over K in another order than {same.name} with {same.warps}"
        elif warps not in (0, 1):
            return f"{warps} warps sum over K in another order than one"
        elif bv < min(self.smallest(spec), next_power_of_2(spec.v)):
            return f"bv {bv} with K = {spec.k} spreads the sum over K over other threads than larger tiles do"
        return None

    def smallest(self, spec: Spec) -> int:
        """The least bv whose tile has 8 elements for each thread of a warp, the most that one load takes; at least 4."""
        return max(4, 256 // next_power_of_2(spec.k))

    def default(self, spec: Spec, target: Target | None = None, problem: Problem | None = None) -> Schedule:
        """One warp and 2 KB of state a program, 4 KB of half-size states unless there are few.

        With V contiguous: 32 columns, so that a row of the tile is a whole memory line, and two warps. The states leave the
        L2 cache first, which keeps the rest of the step in it (measured on an H200: 6 % at 32 states, 4 % at 2,048), but not
        those of 8,192 or more, of which so much is written that it was 1 % slower (at 24,576).
        """
        states = problem.seqs * problem.heads if problem else 0
        if spec.k_first:
            bv = min(32, next_power_of_2(spec.v))
            return Schedule.make(bv=bv, evict=1, warps=2 if bv * next_power_of_2(spec.k) >= 1024 else 1)
        wanted = 16 if spec.half_state and states >= 128 else 4
        bv = min(next_power_of_2(spec.v), max(wanted, self.smallest(spec)))
        return Schedule.make(bv=bv, evict=int(spec.half_state or states < 8192), warps=1)

    def default_schedules(self, spec: Spec) -> Iterable[Schedule]:
        problems = (Problem(1, 1, 1), Problem(1024, 1024, 1), Problem(8192, 8192, 1))
        return dict.fromkeys(self.default(spec, None, problem) for problem in problems)

    def kernels(self, spec: Spec, schedule: Schedule) -> tuple[Kernel, ...]:
        runtime = pointers(spec.dtype, "q", "k", "v", "g", "beta", "o") | {"scale": "fp32"} | dict.fromkeys(
            ("T", "slots", "pad_slot", *STRIDES), "i32")
        divisible = tuple(stride for stride in STRIDES if stride not in UNALIGNED)
        heads = {"H": 4, "HV": 4, "L2NORM": True, "BETA_SIGMOID": True, "BETA_SCALE": 1.0}
        state = ("bf16" if spec.dtype == "fp32" else spec.dtype) if spec.half_state else "fp32"
        runtime |= pointers(state, "h0", "ht")
        in_place = runtime | pointers("fp32", "A_log", "dt_bias") | {"state_indices": "*i32", "lower_bound": "fp32"}
        decode = Kernel("recurrent_kernel", in_place, heads | dict(
            cu_seqlens=None, num_accepted=None, has_initial=None, COLUMNS=0, ONE_TOKEN=True, RAW_GATE=True), divisible)
        speculative = Kernel(
            "recurrent_kernel",
            runtime | pointers("fp32", "A_log", "dt_bias")
            | {"state_indices": "*i64", "cu_seqlens": "*i32", "num_accepted": "*i64", "has_initial": "*i1"},
            heads | dict(lower_bound=None, COLUMNS=4, ONE_TOKEN=False, RAW_GATE=True), divisible)
        ready = Kernel(
            "recurrent_kernel", runtime | pointers("fp32", "g"),
            heads | dict(A_log=None, dt_bias=None, cu_seqlens=None, state_indices=None, num_accepted=None, has_initial=None,
                         lower_bound=None, COLUMNS=0, ONE_TOKEN=False, RAW_GATE=False, L2NORM=False, BETA_SIGMOID=False),
            divisible)
        return decode, speculative, ready

    def committed(self) -> Iterable[Spec]:
        for dtype in ("bf16", "fp16", "fp32"):
            yield Spec.make("recurrent", k=128, v=128, dtype=dtype)
            yield Spec.make("recurrent", k=128, v=128, dtype=dtype, k_first=True)
            if dtype != "fp32":
                yield Spec.make("recurrent", k=128, v=128, dtype=dtype, half_state=True)


FAMILY = Recurrent()

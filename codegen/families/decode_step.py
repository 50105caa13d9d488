"""The fused decode step: everything between the input and the output projection of a KDA layer, in one launch.

A program is one tile of one state. The norm over V and the history of q and k are left to the last program of a sequence
and q/k head to arrive. Small batches win the launches of the separate ops; large ones are bound by the states' traffic.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdagen.families.base import Family, Kernel, next_power_of_2, pointers
from kdagen.families.recurrent import layout_context, refuse_head_dims, refuse_tile
from kdagen.spec import Flag, Problem, Schedule, Spec, Target

STRIDES = ("qkv_n", "z_n", "g_n", "beta_n", "o_n", "line_n", "line_c", "pool_n", "index_n", "index_t")
UNALIGNED = ("beta_n", "index_n", "index_t")  # scalar loads: their strides may be anything


class DecodeStep(Family):
    name = "decode_step"
    title = "fused decode step: convolution, norms, gate and recurrence in one launch"
    flags = {
        "k_first": Flag("k_first", (False, True)),       # states [HV, K, V] instead of [HV, V, K]
        "width": Flag("width", (4, 3, 2), prefix="w"),   # taps of the convolution
    }
    space = {"bv": (16, 32, 64)}  # rows of V a program
    warps = (1, 2, 4)
    stages = (1,)

    def context(self, spec: Spec, schedule: Schedule) -> dict:
        channels = (("q", "m_k"), ("k", "m_k"), ("v", "m_v"))  # of the convolution, and what masks them
        return layout_context(spec) | {"W": spec.width, "NV": -(-spec.v // schedule.block["bv"]), "channels": channels}

    def supports(self, spec: Spec, schedule: Schedule, target: Target | None) -> str | None:
        if set(schedule.block) != {"bv"}:
            return f"blocks {dict(schedule.blocks)} are not bv"
        bv = schedule.block["bv"]
        if bv < 1 or bv & (bv - 1) or bv > next_power_of_2(spec.v):
            return f"bv {bv} is not a power of two up to V = {spec.v}"
        reason = refuse_head_dims(spec) or refuse_tile(bv * next_power_of_2(spec.k), schedule.warps, target)
        if reason:
            return reason
        # Which schedule runs depends on the batch. A sequence's bits must not: all schedules sum in the same order.
        same = self.default(spec)
        if schedule.warps not in (0, same.warps):
            return f"{schedule.warps} warps sum over K and V in another order than {same.warps}"
        if bv < same.block["bv"] or (spec.k_first and bv != same.block["bv"]):
            return f"bv {bv} with K = {spec.k} sums over K in another order than bv {same.block['bv']}"
        return None

    def default(self, spec: Spec, target: Target | None = None, problem: Problem | None = None) -> Schedule:
        """Tiles of 16 rows, as many as make 8 elements for each thread of a warp, the most that one load takes.

        With V contiguous 32 columns: a row of the tile is a whole memory line.
        """
        BK = next_power_of_2(spec.k)
        bv = min(next_power_of_2(spec.v), 32 if spec.k_first else max(16, 256 // BK))
        return Schedule.make(bv=bv, warps=max(1, min(4, bv * BK // 512)))

    def kernels(self, spec: Spec, schedule: Schedule) -> tuple[Kernel, ...]:
        runtime = (
            pointers(spec.dtype, "qkv", "z", "g", "beta", "o", "conv_pool", "norm_weight")
            | pointers("fp32", "conv_weight", "A_log", "dt_bias", "o_raw") | pointers("i32", "state_indices", "arrivals")
            | dict.fromkeys(("slots", "pad_slot", *STRIDES), "i32") | {"scale": "fp32", "eps": "fp32"})
        divisible = tuple(stride for stride in STRIDES if stride not in UNALIGNED)
        heads = {"H": 4, "HV": 4, "BETA_SCALE": 1.0, "conv_bias": None, "has_initial": None}
        plain = Kernel(
            "decode_step_kernel", runtime | {"pool": "*fp32", "lower_bound": "fp32"},
            heads | {"num_accepted": None, "LINE": spec.width - 1, "COLUMNS": 0}, divisible)
        after_drafts = Kernel(
            "decode_step_kernel", runtime | {"pool": "*bf16", "num_accepted": "*i32"},
            heads | {"lower_bound": None, "LINE": spec.width + 2, "COLUMNS": 4}, divisible)
        return plain, after_drafts

    def committed(self) -> Iterable[Spec]:
        for dtype in ("bf16", "fp16", "fp32"):
            yield Spec.make("decode_step", k=128, v=128, dtype=dtype)


FAMILY = DecodeStep()

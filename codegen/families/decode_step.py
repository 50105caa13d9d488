"""The fused decode step: everything between the input and the output projection of a KDA layer, in one launch.

A program is one sequence and one q/k head: it holds the whole state, as the norm needs all of V, and owns its channels of
the convolution. Small batches win the launches of the separate ops; large ones are bound by the states' traffic.
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
    space = {"bv": (16, 32, 64, 128)}
    warps = (4, 8, 16)
    stages = (1,)

    def context(self, spec: Spec, schedule: Schedule) -> dict:
        weighted_sum = " + ".join(f"b_x{w}.to(tl.float32) * b_w{w}.to(tl.float32)" for w in range(spec.width))
        return layout_context(spec) | {
            "W": spec.width, "NV": -(-spec.v // schedule.block["bv"]), "weighted_sum": weighted_sum}

    def supports(self, spec: Spec, schedule: Schedule, target: Target | None) -> str | None:
        bv = schedule.block.get("bv", 0)
        if bv < 1 or bv & (bv - 1) or bv > next_power_of_2(spec.v):
            return f"bv {bv} is not a power of two up to V = {spec.v}"
        if spec.v > 16 * bv:
            return f"V = {spec.v} in tiles of bv {bv} is more than 16 tiles, each unrolled"
        return refuse_head_dims(spec) or refuse_tile(
            next_power_of_2(spec.k) * next_power_of_2(spec.v), schedule.warps, target)

    def default(self, spec: Spec, target: Target | None = None, problem: Problem | None = None) -> Schedule:
        """At most 64 elements of the state a thread, in tiles of 32 rows."""
        elements = next_power_of_2(spec.k) * next_power_of_2(spec.v)
        return Schedule.make(bv=min(32, next_power_of_2(spec.v)), warps=min(16, max(1, elements // 2048)))

    def kernels(self, spec: Spec, schedule: Schedule) -> tuple[Kernel, ...]:
        runtime = pointers(spec.dtype, "qkv", "z", "g", "beta", "o", "conv_pool", "norm_weight") | pointers(
            "fp32", "conv_weight", "A_log", "dt_bias") | {"state_indices": "*i32"} | dict.fromkeys(
            ("slots", "pad_slot", *STRIDES), "i32") | {"scale": "fp32", "eps": "fp32"}
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

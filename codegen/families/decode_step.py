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
    space = {"bv": (32, 64, 128), "regs": (0, 128)}  # rows of V a tile; registers a thread at most, 0: as many as it takes
    warps = (4, 8, 16)
    stages = (1,)

    def context(self, spec: Spec, schedule: Schedule) -> dict:
        NV = -(-spec.v // schedule.block["bv"])
        return layout_context(spec) | {"W": spec.width, "NV": NV}

    def supports(self, spec: Spec, schedule: Schedule, target: Target | None) -> str | None:
        if set(schedule.block) != {"bv", "regs"}:
            return f"blocks {dict(schedule.blocks)} are not bv and regs"
        bv, regs = schedule.block["bv"], schedule.block["regs"]
        if bv < 1 or bv & (bv - 1) or bv > next_power_of_2(spec.v):
            return f"bv {bv} is not a power of two up to V = {spec.v}"
        if spec.v > 16 * bv:
            return f"V = {spec.v} in tiles of bv {bv} is more than 16 tiles, each unrolled"
        if regs and regs not in (64, 96, 128, 168, 255):
            return f"regs {regs} is not 0, 64, 96, 128, 168 or 255"
        if regs and target and target.vendor == "hip":
            return "a cap on registers is an option of CUDA only"
        elements = next_power_of_2(spec.k) * next_power_of_2(spec.v)
        reason = refuse_head_dims(spec) or refuse_tile(elements, schedule.warps, target)
        if reason:
            return reason
        # Which schedule runs depends on the batch. A sequence's bits must not: all schedules sum in the same order.
        same = self.default(spec)
        if bv != same.block["bv"] or schedule.warps not in (0, same.warps):
            return f"bv {bv} with {schedule.warps} warps sums in another order than bv {same.block['bv']} with {same.warps}"
        return None

    def default(self, spec: Spec, target: Target | None = None, problem: Problem | None = None) -> Schedule:
        """At most 64 elements of the state a thread, in tiles of 32 rows. With 128 registers two programs fit an SM."""
        elements = next_power_of_2(spec.k) * next_power_of_2(spec.v)
        warps = min(16, max(1, elements // 2048))
        cap = elements <= 64 * 32 * warps and warps == 8 and not spec.k_first and not (target and target.vendor == "hip")
        return Schedule.make(bv=min(32, next_power_of_2(spec.v)), regs=128 if cap else 0, warps=warps)

    def default_schedules(self, spec: Spec) -> Iterable[Schedule]:
        default = self.default(spec)
        return dict.fromkeys((default, Schedule.make(bv=default.block["bv"], regs=0, warps=default.warps)))

    def kernels(self, spec: Spec, schedule: Schedule) -> tuple[Kernel, ...]:
        runtime = pointers(spec.dtype, "qkv", "z", "g", "beta", "o", "conv_pool", "norm_weight") | pointers(
            "fp32", "conv_weight", "A_log", "dt_bias") | {"state_indices": "*i32"} | dict.fromkeys(
            ("slots", "pad_slot", *STRIDES), "i32") | {"scale": "fp32", "eps": "fp32"}
        divisible = tuple(stride for stride in STRIDES if stride not in UNALIGNED)
        heads = {"H": 4, "HV": 4, "BETA_SCALE": 1.0, "conv_bias": None, "has_initial": None}
        options = {"maxnreg": schedule.block["regs"]} if schedule.block["regs"] else {}
        plain = Kernel(
            "decode_step_kernel", runtime | {"pool": "*fp32", "lower_bound": "fp32"},
            heads | {"num_accepted": None, "LINE": spec.width - 1, "COLUMNS": 0}, divisible, options)
        after_drafts = Kernel(
            "decode_step_kernel", runtime | {"pool": "*bf16", "num_accepted": "*i32"},
            heads | {"lower_bound": None, "LINE": spec.width + 2, "COLUMNS": 4}, divisible, options)
        return plain, after_drafts

    def committed(self) -> Iterable[Spec]:
        for dtype in ("bf16", "fp16", "fp32"):
            yield Spec.make("decode_step", k=128, v=128, dtype=dtype)


FAMILY = DecodeStep()

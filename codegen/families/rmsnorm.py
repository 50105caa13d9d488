"""Family ``rmsnorm``: gated RMSNorm over V behind the recurrence (templates/rmsnorm.py.j2)."""

from __future__ import annotations

from kdagen.families.base import Family, Kernel, next_power_of_2, pointers
from kdagen.families.gate import refuse_elements
from kdagen.spec import DTYPES, Schedule, Spec

MAX_V = 4096
STRIDES = ("o_t", "o_h", "z_t", "z_h", "out_t", "out_h")


class RMSNorm(Family):
    name = "rmsnorm"
    title = "RMSNorm over V times weight times sigmoid(output gate)"
    space = {"br": (1, 2, 4, 8, 16, 32, 64)}
    warps = (1, 2, 4, 8)

    def supports(self, spec, schedule, target):
        if spec.dtype not in ("bf16", "fp16", "fp32"):
            return f"dtype {spec.dtype or 'none'} is not one of bf16, fp16, fp32"
        if spec.k or spec.chunk:
            return "the norm has neither K nor a chunk"
        if not 1 <= spec.v <= MAX_V:
            return f"V = {spec.v} is not within 1..{MAX_V}"
        if set(schedule.block) != {"br"}:
            return f"blocks {sorted(schedule.block)} are not ['br']"
        br = schedule.block["br"]
        if br < 1 or br & (br - 1):
            return f"br = {br} is not a power of two"
        elements = br * next_power_of_2(spec.v)
        return refuse_elements(elements, schedule.warps, target) or self._refuse_order(spec, elements, schedule.warps)

    def _refuse_order(self, spec, elements, warps):
        """Which schedule runs depends on the batch. A row's bits must not: all schedules sum over V in the same order.

        Triton gives a thread up to 16 bytes side by side of a row, the rest of a row to the lanes, then to the warps.
        """
        same = 1 if next_power_of_2(spec.v) <= 512 else 4
        if warps not in (0, same):
            return f"{warps} warps sum over V in another order than {same}"
        if elements * DTYPES[spec.dtype] < 16 * 32 * same:
            return f"{elements} elements are less than 16 bytes a thread, which sums over V in another order"
        return None

    def default(self, spec, target=None, problem=None):
        """Tiles of 512 elements on one warp, so that many programs keep the memory busy; longer rows on four warps."""
        v = next_power_of_2(spec.v)
        return Schedule.make(br=max(1, 512 // v), warps=1 if v <= 512 else 4)

    def load(self, spec, problem):
        """(tokens x heads, 1): nothing is serial."""
        return problem.tokens * problem.heads, 1

    def kernels(self, spec, schedule):
        signature = (pointers(spec.dtype, "o", "z", "out") | {"weight": "*fp32", "eps": "fp32", "rows": "i32"}
                     | dict.fromkeys(STRIDES, "i32"))
        return (Kernel("rmsnorm_kernel", signature, {"HV": 1}, STRIDES),
                Kernel("rmsnorm_kernel", signature | {"weight": f"*{spec.dtype}"}, {"HV": 12}, STRIDES))

    def committed(self):
        return [Spec.make("rmsnorm", v=128, dtype=dtype) for dtype in ("bf16", "fp16", "fp32")]


FAMILY = RMSNorm()

"""Staged metadata of speculative decode: three padded copies in one launch. Template: stage_spec.py.j2.

Spec: nothing but the dtype of the tables (int32). Schedule: ``br`` requests a program.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdagen.families.base import Family, Kernel, next_power_of_2, pointers
from kdagen.spec import Problem, Schedule, Spec, Target


class StageSpec(Family):
    name = "stage_spec"
    title = "state slots, boundaries and accepted counts copied into a graph's padded buffers"
    space = {"br": (16, 32, 64, 128)}
    warps = (1, 2, 4)

    def supports(self, spec: Spec, schedule: Schedule, target: Target | None) -> str | None:
        if spec.dtype != "i32":
            return f"tables of dtype {spec.dtype or 'none'} are not i32"
        if spec.chunk or spec.k or spec.v:
            return "the staged tables have no chunk and no head dimension"
        rows = schedule.block.get("br", 0)
        if set(schedule.block) != {"br"} or rows != next_power_of_2(rows) or rows < 16:
            return f"blocks {schedule.name or 'none'} are not br, a power of two from 16"
        return self.refuse_threads(schedule, target)

    def default(self, spec: Spec, target: Target | None = None, problem: Problem | None = None) -> Schedule:
        return Schedule.make(br=32, warps=1, stages=1)

    def load(self, spec: Spec, problem: Problem) -> tuple[int, int]:
        """One load bucket: a step must never meet a kernel that was not compiled before it."""
        return 1, 1

    def kernels(self, spec: Spec, schedule: Schedule) -> tuple[Kernel, ...]:
        signature = pointers("i32", "state", "qsl", "accepted", "staged_state", "staged_qsl", "staged_accepted")
        signature |= dict.fromkeys(("S", "B", "null_slot", "state_n", "state_c", "qsl_n", "accepted_n", "staged_n"), "i32")
        return (Kernel("stage_spec_kernel", signature, {"COLUMNS": 4, "ROWS": schedule.block["br"]}),)

    def committed(self) -> Iterable[Spec]:
        return (Spec.make(self.name, dtype="i32"),)


FAMILY = StageSpec()

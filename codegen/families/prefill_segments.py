"""Prefill of few long heads: the map of each segment, and the states between segments. Template: prefill_segments.py.j2.

The state after a segment is h P + OFF in the state h before it. ``map_kernel`` finds P and OFF of all inner segments side by
side, ``combine_kernel`` chains them; then prefill_state walks all segments at once. Form ``tma`` is for sm90.
Schedule: ``bm`` rows of OFF (V of them) or of P (K) in a program of the map.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdagen.families.base import Family, Kernel, next_power_of_2, pointers
from kdagen.families.prefill_prepare import BARRIERS, padded, precision, refuse_hopper_form, refuse_sizes
from kdagen.families.prefill_state import refuse_rows
from kdagen.spec import Problem, Schedule, Spec, Target

# rows of V in a program of combine, rows and columns of a tile of P: small enough for every device, and without spills
COMBINE = 16, 64


def stage_bytes(spec: Spec, bm: int) -> int:
    """Shared memory of one stage of the map's loop: w, kg and the u tile."""
    return spec.chunk * (2 * padded(spec.k) + bm) * (4 if spec.dtype == "fp32" else 2)


def operand_bytes(spec: Spec, bm: int, target: Target) -> int:
    """Shared memory of the map's loop without a pipeline, at most: a tile as operand, or the rows between layouts.

    Compared with what Triton 3.6 allocates: 16-bit tiles on NVIDIA lie there two at a time, beside the rows.
    """
    kp = padded(spec.k)
    alone = spec.dtype == "fp32" or target.vendor == "hip"
    tile = spec.chunk * (4 if spec.dtype == "fp32" else 2) if alone else 2 * (2 * spec.chunk + bm)
    return kp * max(tile, 4 * bm) + (BARRIERS if target.vendor == "cuda" else 0)


def combine_bytes(spec: Spec) -> int:
    """Shared memory of combine, at most: the states' halves, two tiles of P, a tile that changes its layout."""
    rows, tile, kp = COMBINE[0], min(padded(spec.k), COMBINE[1]), padded(spec.k)
    return 4 * rows * kp + 2 * tile * tile * (4 if spec.dtype == "fp32" else 2) + 4 * rows * tile


class Segments(Family):
    name = "prefill_segments"
    title = "prefill in segments: their maps, and the states between them"
    forms = ("", "tma")
    space = {"bm": (16, 32, 64, 128)}
    warps = (4, 8)
    stages = (1, 2, 3, 4)
    chunked = True

    def context(self, spec: Spec, schedule: Schedule) -> dict:
        kp, vp, bm = padded(spec.k), padded(spec.v), schedule.block.get("bm", 64)
        return {"kp": kp, "vp": vp, "bm": bm, "bc": COMBINE[0], "bt": min(kp, COMBINE[1]),
                "precision": precision(spec)}

    def supports(self, spec: Spec, schedule: Schedule, target: Target | None) -> str | None:
        if reason := self.refuse_chunk(spec) or refuse_sizes(spec) or self.refuse_threads(schedule, target):
            return reason
        bm, kp, vp = schedule.block.get("bm", 0), padded(spec.k), padded(spec.v)
        if schedule.form and (reason := refuse_hopper_form(spec, schedule, target) or refuse_rows(schedule, bm)):
            return reason
        if bm < 16 or bm != next_power_of_2(bm) or bm > min(kp, vp):
            return f"bm {bm} is not a power of two from 16 to {min(kp, vp)}"
        if schedule.warps and bm * kp > 128 * 32 * schedule.warps:
            return f"a tile of {bm} x {kp} fp32 needs more than 128 registers in each of {32 * schedule.warps} threads"
        if target is not None and schedule.stages > 1:
            need = schedule.stages * stage_bytes(spec, bm)
            if need > target.smem:
                return f"{schedule.stages} stages take {need} bytes, more than {target.slug}'s {target.smem}"
        if target is not None and not schedule.form:
            need = max(operand_bytes(spec, bm, target), combine_bytes(spec))
            if need > target.smem:
                return f"map of {bm} rows or combine: up to {need} bytes, more than {target.slug}'s {target.smem}"
        return None

    def default(self, spec: Spec, target: Target | None = None, problem: Problem | None = None) -> Schedule:
        if target is not None:
            schedule = Schedule.make(form="tma", bm=64, warps=4, stages=3)  # measured: bm = 128 is never faster
            if self.supports(spec, schedule, target) is None:
                return schedule
        kp = padded(spec.k)
        bm = min(kp, padded(spec.v), 64 if kp <= 128 else 32)
        while True:
            for stages in (3, 2, 1):
                schedule = Schedule.make(bm=bm, warps=4, stages=stages)
                fits = target is not None or stages * stage_bytes(spec, bm) < 220_000
                if fits and self.supports(spec, schedule, target) is None:
                    return schedule
            if bm <= 16:
                return Schedule.make(bm=bm, warps=4, stages=1)
            bm //= 2

    def default_schedules(self, spec: Spec) -> Iterable[Schedule]:
        from kdagen import devices

        found = [self.default(spec)] + [self.default(spec, devices.named(arch)) for arch in sorted(devices.ARCHS)]
        return tuple(dict.fromkeys(found))

    def load(self, spec: Spec, problem: Problem) -> tuple[int, int]:
        return max(1, problem.seqs * problem.heads), max(1, problem.tokens // max(1, problem.seqs) // spec.chunk)

    def kernels(self, spec: Spec, schedule: Schedule) -> tuple[Kernel, ...]:
        if schedule.form:
            return self._tma_kernels(spec, schedule)
        single = {"p_lo": None} if spec.dtype == "fp32" else {}
        shared = {"chunk_offsets": "*i64", "off": "*fp32"} | pointers(spec.dtype, "p_hi", "p_lo")
        shared |= dict.fromkeys(("seg_chunks", "nseg", "N", "HV"), "i32")
        of_map = pointers(spec.dtype, "kg", "w", "u") | {"dec": "*fp32"} | shared
        of_map |= dict.fromkeys(("slot_base", "seg_begin"), "i32")
        of_combine = shared | {"hs": "*fp32"}
        drop = lambda signature: {name: kind for name, kind in signature.items() if name not in single}
        return (Kernel("map_kernel", drop(of_map), single | {"STAGES": schedule.stages}),
                Kernel("combine_kernel", drop({n: t for n, t in of_combine.items() if n != "N"}), single,
                       options={"num_warps": 4, "num_stages": 1}))

    @staticmethod
    def _tma_kernels(spec: Spec, schedule: Schedule) -> tuple[Kernel, ...]:
        tile = lambda width: f"tensordesc<bf16[{spec.chunk}, {width}]>"
        shared = {"off": "*fp32", "p_hi": "*bf16", "p_lo": "*bf16", "chunk_offsets": "*i64"}
        shared |= dict.fromkeys(("seg_chunks", "nseg", "N", "HV"), "i32")
        of_map = {"kg": tile(spec.k), "w": tile(spec.k), "u": tile(schedule.block["bm"]), "dec": "*fp32"} | shared
        of_map |= dict.fromkeys(("slot_base", "seg_begin"), "i32")
        of_combine = {name: kind for name, kind in shared.items() if name != "N"} | {"hs": "*fp32"}
        return (Kernel("map_kernel", of_map, {"STAGES": schedule.stages}),
                Kernel("combine_kernel", of_combine, {"STAGES": 2}, options={"num_warps": 4, "num_stages": 2}))

    def committed(self) -> Iterable[Spec]:
        yield Spec.make(self.name, chunk=64, k=128, v=128, dtype="bf16")


FAMILY = Segments()

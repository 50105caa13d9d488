"""Prefill, second kernel: the state walks over a sequence's chunks and leaves outputs behind: prefill_state.py.j2.

A program is ``bv`` rows of V of one (sequence, value head, segment), with its part of the state, transposed to [BV, K], in
registers from the first chunk to the last. Everything that only drops a branch (slots, checkpoints, the state's layout,
inner starts and ends) is a constexpr of one file. Form ``gluon`` (sm90) has a warp that fetches tiles through descriptors,
and asynchronous products.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdagen.families.base import Family, Kernel, next_power_of_2, pointers
from kdagen.families.prefill_prepare import BARRIERS, gluon_tile, padded, precision, refuse_hopper_form, refuse_sizes
from kdagen.spec import Problem, Schedule, Spec, Target

STRIDES = ("so_t", "so_h", "sin_n", "sin_h", "sout_n", "sout_h", "sck_n", "sck_h")
SLOT_STRIDES = ("sread", "swrite", "scko", "scks")


def stage_bytes(spec: Spec, bv: int) -> int:
    """Shared memory of one stage of the pipelined loop: w, qg, kg, the u tile and aqk."""
    size = 4 if spec.dtype == "fp32" else 2
    return spec.chunk * (3 * padded(spec.k) + bv + spec.chunk) * size


def operand_bytes(spec: Spec, bv: int, target: Target) -> int:
    """Shared memory of the loop without a pipeline, at most: the widest tile beside the rows that it is multiplied with.

    Or the state's rows alone, in fp32 on their way between layouts. Compared with what Triton 3.6 allocates.
    """
    size, kp, wide = 4 if spec.dtype == "fp32" else 2, padded(spec.k), max(padded(spec.k), spec.chunk)
    if target.vendor == "hip":
        rows = 0 if bv == 32 and spec.chunk in (32, 64) else bv * wide  # 0: they stay in registers
    else:
        rows = 0 if spec.dtype == "fp32" else bv * (kp + spec.chunk)
    return max((spec.chunk * wide + rows) * size, 4 * bv * wide) + (BARRIERS if target.vendor == "cuda" else 0)


def refuse_rows(schedule: Schedule, rows: int) -> str | None:
    """The reason why an sm90 form cannot take so many rows of state (or of a map): it has 16 a warp, four or eight warps."""
    if rows not in (64, 128) or (schedule.warps and rows != 16 * schedule.warps):
        return f"the {schedule.form} form has 64 or 128 rows of state, 16 a warp, not {rows} in {schedule.warps} warps"
    return None


def launch_options(bv: int) -> dict[str, int]:
    """What the gluon form is compiled with: a program of eight computing warps has twelve in all to share the registers."""
    return {"maxnreg": 168} if bv == 128 else {}


class State(Family):
    name = "prefill_state"
    title = "serial half of prefill: the state over the chunks, and the outputs"
    forms = ("", "gluon")
    space = {"bv": (16, 32, 64, 128)}
    warps = (4, 8)
    stages = (1, 2, 3, 4)
    chunked = True

    def context(self, spec: Spec, schedule: Schedule) -> dict:
        bv = schedule.block.get("bv", 64)
        return {"kp": padded(spec.k), "vp": padded(spec.v), "bv": bv, "precision": precision(spec),
                "options": "".join(f", {name}={value}" for name, value in launch_options(bv).items())}

    def supports(self, spec: Spec, schedule: Schedule, target: Target | None) -> str | None:
        if reason := self.refuse_chunk(spec) or refuse_sizes(spec) or self.refuse_threads(schedule, target):
            return reason
        bv, kp = schedule.block.get("bv", 0), padded(spec.k)
        if schedule.form and (reason := refuse_hopper_form(spec, schedule, target) or refuse_rows(schedule, bv)):
            return reason
        if bv < 16 or bv != next_power_of_2(bv) or bv > padded(spec.v):
            return f"bv {bv} is not a power of two from 16 to {padded(spec.v)}"
        if schedule.warps and bv * kp > 128 * 32 * schedule.warps:
            return f"a state tile of {bv} x {kp} fp32 needs more than 128 registers in each of {32 * schedule.warps} threads"
        if target is not None and schedule.stages > 1:
            need = schedule.stages * stage_bytes(spec, bv)
            if need > target.smem:
                return f"{schedule.stages} stages take {need} bytes, more than {target.slug}'s {target.smem}"
        if target is not None and not schedule.form and (need := operand_bytes(spec, bv, target)) > target.smem:
            return f"products of {bv} rows take up to {need} bytes, more than {target.slug}'s {target.smem}"
        return None

    def default(self, spec: Spec, target: Target | None = None, problem: Problem | None = None) -> Schedule:
        """On sm90 the gluon form, else as many stages as fit, up to 3; a wide tile of V once the heads fill the device.

        The sm90 rule is measured on the H200: BV = 128 halves the loads, BV = 64 the length of a step.
        """
        kp, vp = padded(spec.k), padded(spec.v)
        if target is not None:
            programs = 0 if problem is None else problem.seqs * problem.heads
            many = problem is not None and (programs >= 400 or problem.tokens <= 2 * spec.chunk * problem.seqs)
            wide = many or (programs >= 90 and problem.seqs == 1)
            schedule = Schedule.make(form="gluon", bv=128 if wide else 64, warps=8 if wide else 4, stages=3)
            if self.supports(spec, schedule, target) is None:
                return schedule
        wide = problem is not None and target is not None and problem.seqs * problem.heads * vp >= 80 * 128
        bv = min(vp, 128 if wide and kp <= 128 else 64 if kp <= 128 else 32)
        while True:
            for stages in (3, 2, 1):
                schedule = Schedule.make(bv=bv, warps=8 if bv * kp > 64 * 128 else 4, stages=stages)
                fits = target is not None or stages * stage_bytes(spec, bv) < 220_000
                if fits and self.supports(spec, schedule, target) is None:
                    return schedule
            if bv <= 16:
                return Schedule.make(bv=bv, warps=4, stages=1)
            bv //= 2

    def default_schedules(self, spec: Spec) -> Iterable[Schedule]:
        from kdagen import devices

        sizes = (Problem(8192, 1, 1), Problem(8192, 1, 128))
        found = [self.default(spec)] + [self.default(spec, devices.named(arch), size)
                                        for arch in sorted(devices.ARCHS) for size in sizes]
        return tuple(dict.fromkeys(found))

    def load(self, spec: Spec, problem: Problem) -> tuple[int, int]:
        """The programs are squared: a load bucket then spans a factor of 1.4, and 64 heads are not taken for 96."""
        return max(1, problem.seqs * problem.heads) ** 2, max(1, problem.tokens // max(1, problem.seqs) // spec.chunk)

    def kernels(self, spec: Spec, schedule: Schedule) -> tuple[Kernel, ...]:
        if schedule.form:
            return self._gluon_kernels(spec, schedule)
        intermediates = pointers(spec.dtype, "qg", "kg", "w", "u", "aqk") | {"dec": "*fp32"}
        sizes = dict.fromkeys(("T", "row_begin", "row_end", "slot_base", "seg_begin", "seg_chunks", "mid_stride",
                               "checkpoints", "pad_slot", "slots", "N", "HV", *STRIDES, *SLOT_STRIDES), "i32")
        signature = intermediates | pointers(spec.dtype, "o") | {"cu_seqlens": "*i32", "chunk_offsets": "*i64"} | sizes
        base = {"V_FIRST": True, "STAGES": schedule.stages}
        absent = dict.fromkeys(("read_slots", "has_initial", "write_slots", "mid_in", "mid_out", "ckpt_offsets",
                                "ckpt_slots", "ckpt_pool"))
        plain = Kernel("state_kernel", signature | pointers("fp32", "h_in", "h_out"), base | absent, STRIDES, label="plain")
        pool = Kernel(
            "state_kernel",
            signature | pointers("fp32", "h_in", "h_out", "ckpt_pool")
            | pointers("i32", "read_slots", "write_slots", "ckpt_offsets", "ckpt_slots") | {"has_initial": "*i1"},
            base | {"mid_in": None, "mid_out": None}, STRIDES, label="pool")
        inner = Kernel("state_kernel", signature | pointers("fp32", "h_in", "h_out", "mid_in", "mid_out"),
                       base | {name: None for name in absent if not name.startswith("mid")}, STRIDES, label="inner")
        return plain, pool, inner

    @staticmethod
    def _gluon_kernels(spec: Spec, schedule: Schedule) -> tuple[Kernel, ...]:
        tile = lambda width: gluon_tile(spec.chunk, width)
        signature = dict.fromkeys(("qg", "kg", "w"), tile(spec.k))
        signature |= {"u": tile(schedule.block["bv"]), "aqk": tile(spec.chunk)}
        signature |= {"dec": "*fp32", "o": "*bf16", "cu_seqlens": "*i32", "chunk_offsets": "*i64", "has_initial": "*i1"}
        signature |= pointers("fp32", "h_in", "h_out", "mid_in", "mid_out", "ckpt_pool")
        signature |= pointers("i32", "read_slots", "write_slots", "ckpt_offsets", "ckpt_slots")
        strides = [f"stride_{x}" for x in ("o_t", "o_h", "in", "in_h", "out", "out_h", "ckpt", "ckpt_h")]
        signature |= dict.fromkeys((
            "T", "row_begin", "row_end", "slot_base", "seg_begin", "seg_chunks", "mid_stride", "pad_slot", "pool_slots",
            "N", "HV", *strides, "stride_read", "stride_write", "stride_at", "stride_ckpt_slots", "CKPTS"), "i32")
        pool = ("read_slots", "has_initial", "write_slots", "ckpt_offsets", "ckpt_slots", "ckpt_pool")
        found = []
        for label, absent in (("plain", (*pool, "mid_in", "mid_out")), ("pool", ("mid_in", "mid_out")), ("inner", pool)):
            kept = {name: kind for name, kind in signature.items() if name not in absent}
            constants = dict.fromkeys(absent) | {"V_FIRST": True, "STAGES": schedule.stages}
            found.append(Kernel("state_kernel", kept, constants, tuple(strides), launch_options(schedule.block["bv"]),
                                label))
        return tuple(found)

    def committed(self) -> Iterable[Spec]:
        yield Spec.make(self.name, chunk=64, k=128, v=128, dtype="bf16")


FAMILY = State()

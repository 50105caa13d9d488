"""Prefill, first kernel: a program per (chunk, value head) makes all that the state pass needs: prefill_prepare.py.j2.

Spec: ``gate`` is the raw gate's form (bounded, softplus) or ``log`` for a ready log decay. Only the bounded gate may use a
factored leaf: with -5 nats a token or more, 32 rows of decay about a middle reference stay inside bf16's and fp32's range.
The other gates, and fp16 whatever the gate (2^111 does not fit it), take the levels down to single rows.
Schedule: ``bk`` channels of K at a time. The intermediates are the same for every schedule and form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from kdagen.families.base import Family, Kernel, next_power_of_2, pointers
from kdagen.spec import Flag, Problem, Schedule, Spec, Target

MAX_HEAD_DIM = 256
LOWEST_BOUND = -5.0  # nats a token: the steepest bounded gate
LEAF = 32            # rows of a factored leaf
BARRIERS = 2048      # bytes that barriers of products and their alignment may take on NVIDIA
HOPPER_TRITON = (3, 6), (3, 10)  # the Triton versions whose Gluon the sm90 forms are written for: from, below
STRIDES = tuple(f"s{x}_{axis}" for x in ("q", "k", "v", "g", "beta") for axis in "th")

# Coefficients of t^0, t^1, .. of log2(1 + t) / t on [0, 1], by degree: minimax in relative error (5.7e-5 and 3.0e-8), so
# that gates near zero keep their bits. An fp16 gate is rounded by 2.4e-4 in any case.
LOG2_TERMS = {
    4: (1.4426132440567017, -0.7169874310493469, 0.44189882278442383, -0.22711944580078125, 0.05965154990553856),
    8: (1.4426950216293335, -0.7213401794433594, 0.48069295287132263, -0.35840848088264465, 0.27564141154289246,
        -0.19711896777153015, 0.1128561943769455, -0.04256706312298775, 0.007549182046204805),
}


def padded(size: int) -> int:
    """The width of an intermediate's rows: the next power of two, at least 16."""
    return max(16, next_power_of_2(size))


def refuse_sizes(spec: Spec) -> str | None:
    """The reason why a prefill family cannot take the Spec's dtype, K or V."""
    if spec.dtype not in ("bf16", "fp16", "fp32"):
        return f"dtype {spec.dtype or 'missing'} is not one of bf16, fp16, fp32"
    for name, size in (("K", spec.k), ("V", spec.v)):
        if not 1 <= size <= MAX_HEAD_DIM:
            return f"{name} = {size} is not within 1..{MAX_HEAD_DIM}"
    return None


def precision(spec: Spec) -> str:
    """What a template writes after the operands of tl.dot; see ``fp32_precision`` of _prefill_macros.py.j2."""
    return ", input_precision=PRECISION" if spec.dtype == "fp32" else ""


def gluon_tile(rows: int, columns: int) -> str:
    """Triton's type of a host descriptor of bf16 tiles, as the Gluon forms declare them."""
    return (f"tensordesc<bf16[{rows}, {columns}],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, "
            "transposed=False, fp4_padded=False, cga_layout=[])>")


def operand_bytes(spec: Spec, bk: int, target: Target) -> int:
    """Shared memory of the portable form, at most: two tiles of the gate, or X beside X or a tile of k or v.

    Compared with what Triton 3.6 allocates; on NVIDIA a tile of bk channels more.
    """
    size, wide = 4 if spec.dtype == "fp32" else 2, max(spec.chunk, bk, min(padded(spec.v), 128))
    most = spec.chunk * max(spec.chunk + wide, 2 * bk) * size
    return most if target.vendor == "hip" else most + spec.chunk * bk * size + BARRIERS


class Prepare(Family):
    name = "prefill_prepare"
    title = "chunk-local half of prefill: gate, decayed products, inverse, w and u"
    flags = {"gate": Flag("gate", ("bounded", "softplus", "log"))}
    forms = ("", "gluon", "levels")
    space = {"bk": (32, 64, 128)}
    warps = (4, 8)
    stages = (1,)
    chunked = True

    def context(self, spec: Spec, schedule: Schedule) -> dict:
        factored = spec.gate == "bounded" and spec.dtype != "fp16"
        leaf = min(LEAF, spec.chunk) if factored else 1
        steps = [1 << i for i in range(int(math.log2(spec.chunk)))]  # 1, 2, .., C/2
        levels = [s for s in reversed(steps) if s >= leaf]
        # fp16 gates are kept as multiples of a power of two, so that slow decays keep their bits; the matrices undo it
        bits = 0 if spec.dtype == "fp32" else 12 if spec.gate == "bounded" else 5
        return {
            "kp": padded(spec.k), "vp": padded(spec.v),
            "bk": schedule.block.get("bk", 128), "bv": min(padded(spec.v), 128),
            "leaf": leaf, "levels": levels, "inverse_steps": steps[1:],
            "leaf_shift": int((leaf - 1) / 2 * -LOWEST_BOUND * math.log2(math.e)),
            "log2_terms": LOG2_TERMS[8 if spec.dtype == "fp32" else 4],
            "gate_scale": float(1 << bits), "clamp": 160.0,  # log2 units a token: beyond it nothing is left in fp32
            "half": "tl.float32" if spec.dtype == "fp32" else "tl.float16",
            "precision": precision(spec),
        }

    def supports(self, spec: Spec, schedule: Schedule, target: Target | None) -> str | None:
        if reason := self.refuse_chunk(spec) or refuse_sizes(spec) or self.refuse_threads(schedule, target):
            return reason
        if schedule.form:
            gate = {"gluon": "bounded", "levels": "softplus"}[schedule.form]
            if schedule.warps not in (0, 4):
                return f"the {schedule.form} form is written for 4 warps, not {schedule.warps}"
            return refuse_hopper_form(spec, schedule, target) or (
                None if spec.gate == gate else f"the {schedule.form} form has only the {gate} gate, not {spec.gate}")
        bk = schedule.block.get("bk", 0)
        if bk < 16 or bk != next_power_of_2(bk) or bk > padded(spec.k):
            return f"bk {bk} is not a power of two from 16 to {padded(spec.k)}"
        tile = spec.chunk * max(bk, min(padded(spec.v), 128)) * (4 if spec.dtype == "fp32" else 2)
        if tile > 65536:
            return f"a tile of {spec.chunk} x {bk} {spec.dtype} takes {tile} bytes, more than 65536"
        if schedule.warps and spec.chunk * bk > 128 * 32 * schedule.warps:
            return f"a tile of {spec.chunk} x {bk} fp32 needs more than 128 registers a thread with {schedule.warps} warps"
        if target is not None and (need := operand_bytes(spec, bk, target)) > target.smem:
            return f"products of {spec.chunk} x {bk} tiles take up to {need} bytes, more than {target.slug}'s {target.smem}"
        return None

    def default(self, spec: Spec, target: Target | None = None, problem: Problem | None = None) -> Schedule:
        """The sm90 form where there is one for the gate; else all channels at once, unless a tile is too large there."""
        for form in ("gluon", "levels") if target is not None else ():
            schedule = Schedule.make(form=form, warps=4)
            if self.supports(spec, schedule, target) is None:
                return schedule
        wide = (64 if spec.chunk <= 64 else 32) if spec.dtype == "fp32" else 128 if spec.chunk <= 64 else 64
        widest = min(padded(spec.k), wide)
        found = [Schedule.make(bk=bk, warps=4 if spec.chunk <= 64 else 8) for bk in (128, 64, 32, 16) if bk <= widest]
        return next((one for one in found if self.supports(spec, one, target) is None), found[0])

    def default_schedules(self, spec: Spec) -> Iterable[Schedule]:
        from kdagen import devices

        found = [self.default(spec)] + [self.default(spec, devices.named(arch)) for arch in sorted(devices.ARCHS)]
        return tuple(dict.fromkeys(found))

    def load(self, spec: Spec, problem: Problem) -> tuple[int, int]:
        return max(1, problem.tokens * problem.heads // spec.chunk), 1

    def kernels(self, spec: Spec, schedule: Schedule) -> tuple[Kernel, ...]:
        if schedule.form:
            return (self._gluon_kernel(spec),)
        signature = pointers(spec.dtype, "q", "k", "v", "g", "beta") | pointers("fp32", "A_log", "dt_bias")
        signature |= {"chunk_table": "*i32", "matrices": "*fp32" if spec.dtype == "fp32" else "*fp16"}
        signature |= pointers(spec.dtype, "qg", "kg", "w", "u", "aqk") | pointers("fp32", "dec")
        signature |= dict.fromkeys(("row_begin", "slot_base", "T", "H", "HV"), "i32")
        signature |= dict.fromkeys(("lower_bound", "scale", "beta_scale"), "fp32") | dict.fromkeys(STRIDES, "i32")
        constants: dict[str, object] = {"L2NORM": True, "SIGMOID_BETA": True}
        if spec.gate == "log":
            constants |= {"A_log": None, "dt_bias": None}
        return (Kernel("prepare_kernel", {n: t for n, t in signature.items() if n not in constants}, constants,
                       tuple(s for s in STRIDES if not s.startswith("sbeta"))),)

    @staticmethod
    def _gluon_kernel(spec: Spec) -> Kernel:
        """Of the forms gluon and levels: tiles come and go through host descriptors."""
        tile = lambda width: gluon_tile(spec.chunk, width)
        signature = dict.fromkeys(("q", "k", "v", "g", "qg", "kg", "w", "u"), tile(spec.k)) | {"aqk": tile(spec.chunk)}
        signature |= pointers("bf16", "beta") | pointers("fp32", "A_log", "dt_bias", "dec")
        signature |= {"chunk_table": "*i32", "prefix": "*fp16"}
        signature |= dict.fromkeys((
            "row_begin", "slot_base", "T", "ALONE", "HV", "GROUP", "stride_beta_t", "stride_beta_h"), "i32")
        signature |= dict.fromkeys(("lower_bound", "scale", "beta_scale"), "fp32")
        return Kernel("prepare_kernel", signature, {"USE_L2NORM": True, "USE_SIGMOID": True})

    def committed(self) -> Iterable[Spec]:
        for gate in ("bounded", "softplus"):
            yield Spec.make(self.name, chunk=64, k=128, v=128, dtype="bf16", gate=gate)


def refuse_hopper_form(spec: Spec, schedule: Schedule, target: Target | None) -> str | None:
    """The reason why the sm90 forms (TMA, Gluon) of the prefill families cannot take this Spec on this target."""
    if (spec.chunk, spec.k, spec.v, spec.dtype) != (64, 128, 128, "bf16"):
        return f"the {schedule.form} form has only C=64, K=V=128, bf16"
    if target is not None and target.arch != "sm90":
        return f"the {schedule.form} form is for sm90, not {target.arch}"
    if target is not None and not HOPPER_TRITON[0] <= triton_minor() < HOPPER_TRITON[1]:
        low, high, here = (".".join(map(str, number)) for number in (*HOPPER_TRITON, triton_minor()))
        return f"the {schedule.form} form is written for Triton {low} to below {high}, not {here}"
    return None


@cache
def triton_minor() -> tuple[int, int]:
    """The installed Triton's (major, minor); that of the first known one where there is none."""
    try:
        return tuple(int(part) for part in version("triton").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return HOPPER_TRITON[0]


FAMILY = Prepare()

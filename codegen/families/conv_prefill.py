"""Family ``conv_prefill``: the short causal convolution of packed prompts (templates/conv_prefill.py.j2)."""

from __future__ import annotations

from kdagen.families.base import Family, Kernel, pointers
from kdagen.spec import Flag, Schedule, Spec

WIDTH = Flag("width", (4, 3, 2), prefix="w")
POOL_KEYS = {"cache_indices": "*i32", "has_initial_state": "*i1"}


def refuse_conv(family: Family, spec: Spec, schedule: Schedule) -> str | None:
    """The limits that both conv families share: dtype, no chunk or head dims, blocks that are there and sane."""
    if spec.dtype not in ("bf16", "fp16", "fp32"):
        return f"dtype {spec.dtype or 'none'} is not one of bf16, fp16, fp32"
    if spec.chunk or spec.k or spec.v:
        return "a convolution has no chunk size and no head dimensions"
    if set(schedule.block) != set(family.space):
        return f"blocks {sorted(schedule.block)} are not {sorted(family.space)}"
    bd = schedule.block["bd"]
    if bd < 32 or bd > 4096 or bd & (bd - 1):
        return f"bd = {bd} channels is not a power of two from 32 to 4096"
    if not 1 <= schedule.block["rows"] <= 64:
        return f"rows = {schedule.block['rows']} tokens in flight is not between 1 and 64"
    return None


def refuse_warps(schedule: Schedule, target) -> str | None:
    """At least one channel a lane (a program of idle lanes only costs), at most 1024 threads."""
    lanes = 64 if target is not None and target.vendor == "hip" else 32
    if schedule.warps * lanes > 1024:
        return f"{schedule.warps} warps of {lanes} lanes are more than 1024 threads"
    if schedule.warps and schedule.warps * 32 > schedule.block["bd"]:
        return f"{schedule.warps} warps have more lanes than bd = {schedule.block['bd']} channels"
    return None


class ConvPrefill(Family):
    name = "conv_prefill"
    title = "causal short convolution of packed prompts, with SiLU and conv state"
    flags = {"width": WIDTH}
    space = {"bd": (128, 256, 512, 1024), "bt": (16, 32, 64, 128), "rows": (4, 8, 16)}
    warps = (1, 2, 4)
    stages = (1, 3)

    def supports(self, spec, schedule, target):
        reason = refuse_conv(self, spec, schedule) or refuse_warps(schedule, target)
        if reason:
            return reason
        if schedule.block["bt"] < spec.width - 1:
            return f"bt = {schedule.block['bt']} tokens is less than the width - 1 = {spec.width - 1} rows of history"
        return None

    def default(self, spec, target=None, problem=None):
        """Four channels a lane, four rows a step, the next two steps' rows on their way."""
        return Schedule.make(bd=128, bt=32, rows=4, warps=1, stages=3)

    def load(self, spec, problem):
        """(tokens, channels): ``problem.heads`` is the number of channels."""
        return problem.tokens, problem.heads

    def kernels(self, spec, schedule):
        data = pointers(spec.dtype, "x", "out", "pool")
        tables = {"cu_seqlens": "*i32", "batch_ptr": "*i32", "block_ptr": "*i32"} | POOL_KEYS
        sizes = ("seqs", "tokens", "dim", "block_m", "slots", "pad_slot")
        strides = tuple("stride_" + s for s in ("xb", "xt", "ob", "ot", "wd", "ww", "ps", "pc", "ci"))
        signature = data | {"weight": "*fp32"} | tables | dict.fromkeys(sizes + strides, "i32")
        aligned = ("dim", "stride_xt", "stride_ot", "stride_ps", "stride_pc")
        flags = {"SILU": True, "INITIAL": True, "ROWWISE": True, "STAGES": schedule.stages}
        search = {"batch_ptr": None, "block_ptr": None}
        return (
            Kernel("conv_prefill_kernel", signature, {"bias": None} | flags, aligned),
            Kernel("conv_prefill_kernel", {n: t for n, t in signature.items() if n not in search},
                   {"bias": None} | search | flags, aligned),
        )

    def committed(self):
        return [Spec.make("conv_prefill", dtype=dtype) for dtype in ("bf16", "fp16", "fp32")]


FAMILY = ConvPrefill()

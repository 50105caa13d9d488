"""Family ``gate``: raw gate and beta to log decay, or its chunk-local sums, and strength (templates/gate.py.j2).

The gate's form (softplus, bounded), its parameters and beta are arguments of one file per K, chunk and dtype: they drop
a line, the cumulative sum changes what a program is.
"""

from __future__ import annotations

from kdagen.families.base import Family, Kernel, next_power_of_2, pointers
from kdagen.spec import Schedule, Spec

MAX_K = 1024


class Gate(Family):
    name = "gate"
    title = "KDA gate: log decay and beta, or their chunk-local cumulative sums"
    space = {"bt": (1, 2, 4, 8, 16, 32, 64), "bk": (32, 64, 128, 256)}  # tokens at a time, channels
    warps = (1, 2, 4, 8)
    chunked = True

    def supports(self, spec, schedule, target):
        if spec.dtype not in ("bf16", "fp16", "fp32"):
            return f"dtype {spec.dtype or 'none'} is not one of bf16, fp16, fp32"
        if spec.v:
            return "the gate has no V"
        if not 1 <= spec.k <= MAX_K:
            return f"K = {spec.k} is not within 1..{MAX_K}"
        if spec.chunk and (reason := self.refuse_chunk(spec)):
            return reason
        if set(schedule.block) != {"bt", "bk"}:
            return f"blocks {sorted(schedule.block)} are not ['bk', 'bt']"
        bt, bk = schedule.block["bt"], schedule.block["bk"]
        if any(n < 1 or n & (n - 1) for n in (bt, bk)):
            return f"bt = {bt} and bk = {bk} are not both powers of two"
        if spec.chunk and bt > min(16, spec.chunk):
            return f"bt = {bt} unrolled tokens of a cumulative sum are more than {min(16, spec.chunk)}"
        if bk > next_power_of_2(spec.k):
            return f"bk = {bk} is more than K = {spec.k} needs"
        return refuse_elements(bt * bk, schedule.warps, target)

    def default(self, spec, target=None, problem=None):
        """One warp: of four tokens and 128 channels, or, in a sum, eight tokens' loads at a time and 64 channels."""
        bt, bk = (8, 64) if spec.chunk else (4, 128)
        return Schedule.make(bt=bt, bk=min(next_power_of_2(spec.k), bk), warps=1)

    def load(self, spec, problem):
        """(tokens x heads, 1): nothing is serial."""
        return problem.tokens * problem.heads, 1

    def kernels(self, spec, schedule):
        strides = tuple(f"{x}_{axis}" for x in ("g", "out", "beta") for axis in "bth")
        runtime = (pointers(spec.dtype, "g", "beta") | pointers("fp32", "out", "dt_bias", "beta_out")
                   | {"beta_scale": "fp32", "T": "i32"} | dict.fromkeys(strides, "i32"))
        tables = {"cu_seqlens": "*i32", "chunk_indices": "*i32"}
        divisible = tuple(stride for stride in strides if not stride.startswith("beta"))
        softplus, bounded = {"A_log": "*fp32"}, {"lower_bound": "fp32"}
        if not spec.chunk:
            return (
                Kernel("gate_kernel", runtime | softplus, {"lower_bound": None, "HV": 32}, divisible),
                Kernel("gate_kernel", runtime | softplus | bounded, {"HV": 12}, divisible),
            )
        return (
            Kernel("gate_kernel", runtime | softplus | tables, {"lower_bound": None, "HV": 32}, divisible),
            Kernel("gate_kernel", runtime | bounded, {"A_log": None, "cu_seqlens": None, "chunk_indices": None, "HV": 12},
                   divisible),
        )

    def committed(self):
        for chunk in (0, 64):
            for dtype in ("bf16", "fp16", "fp32"):
                yield Spec.make("gate", chunk=chunk, k=128, dtype=dtype)


def refuse_elements(elements: int, warps: int, target) -> str | None:
    """The reason why a tile does not suit its warps: more than 1,024 threads, or than 128 elements a thread."""
    if not warps:  # a file is asked about, whatever its warps
        return None
    threads = warps * (64 if target is not None and target.vendor == "hip" else 32)
    if threads > 1024:
        return f"{threads} threads a program are more than 1024"
    if elements > 128 * threads:
        return f"a tile of {elements} elements is {elements // threads} a thread, more than 128"
    return None


FAMILY = Gate()

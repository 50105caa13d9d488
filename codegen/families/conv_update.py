"""Family ``conv_update``: one (speculative) decode step of the short convolution (templates/conv_update.py.j2)."""

from __future__ import annotations

from kdagen.families.base import Family, Kernel, pointers
from kdagen.families.conv_prefill import WIDTH, refuse_conv, refuse_warps
from kdagen.spec import Problem, Schedule, Spec


class ConvUpdate(Family):
    name = "conv_update"
    title = "decode step of the short convolution, plain and speculative, on a pool of cache lines"
    flags = {"width": WIDTH}
    space = {"bd": (128, 256, 512, 1024), "rows": (1, 2, 4, 8)}
    warps = (1, 2, 4)

    def supports(self, spec, schedule, target):
        return refuse_conv(self, spec, schedule) or refuse_warps(schedule, target)

    def default(self, spec, target=None, problem=None):
        """One row in flight and two channels a lane for plain decode; four of both where a row brings several tokens.

        With one token a program is a chain of loads: four warps were 10 % faster than two on an H200, up to 2^18 channels.
        """
        several = problem is not None and problem.tokens > problem.seqs
        return Schedule.make(bd=256, rows=4 if several else 1, warps=2 if several else 4)

    def default_schedules(self, spec):
        return self.default(spec), self.default(spec, None, Problem(4, 1, 1))

    def load(self, spec, problem):
        """(rows x channels, tokens a row): ``problem.heads`` is the number of channels."""
        return problem.seqs * problem.heads, max(1, problem.tokens // max(1, problem.seqs))

    def kernels(self, spec, schedule):
        tables = {"query_start_loc": "*i32", "cache_indices": "*i32", "has_initial_state": "*i1", "num_accepted": "*i32"}
        sizes = ("tokens", "dim", "columns", "slots", "pad_slot")
        strides = tuple("stride_" + s for s in ("xb", "xt", "ob", "ot", "wd", "ww", "ps", "pc", "ci", "na"))
        signature = (pointers(spec.dtype, "x", "out", "pool") | {"weight": "*fp32"} | tables
                     | dict.fromkeys(sizes + strides, "i32"))
        aligned = ("dim", "stride_xb", "stride_xt", "stride_ob", "stride_ot", "stride_ps", "stride_pc")
        absent = {"bias": None, "has_initial_state": None}
        plain = {"query_start_loc": None, "num_accepted": None, "tokens": 1}
        return (
            Kernel("conv_update_kernel", {n: t for n, t in signature.items() if n not in absent | plain},
                   absent | plain | {"SILU": True, "ROWWISE": True}, aligned),
            Kernel("conv_update_kernel", {n: t for n, t in signature.items() if n not in absent and n != "stride_wd"},
                   absent | {"SILU": True, "ROWWISE": False, "stride_wd": 1}, aligned),
        )

    def committed(self):
        return [Spec.make("conv_update", dtype=dtype) for dtype in ("bf16", "fp16", "fp32")]


FAMILY = ConvUpdate()

"""The fused decode step: everything between the input and the output projection of a KDA layer, in one launch.

With few states a program is one tile of one state, and the last program of a sequence and q/k head to arrive does what
needs them all: the norm over V, the history of q and k. With many, a program walks through all tiles of a state, alone.
Small batches win the launches of the separate ops; large ones are bound by the states' traffic.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdagen.families.base import Family, Kernel, next_power_of_2, pointers
from kdagen.families.recurrent import layout_context, refuse_head_dims, refuse_tile
from kdagen.spec import Flag, Problem, Schedule, Spec, Target

STRIDES = ("qkv_n", "z_n", "g_n", "beta_n", "o_n", "line_n", "line_c", "pool_n", "index_n", "index_t")
UNALIGNED = ("beta_n", "index_n", "index_t")  # scalar loads: their strides may be anything

SPLIT, WHOLE = 48, 128  # states: up to SPLIT, programs of 16 columns of V are fastest; above WHOLE, programs of all of V


def has_forms(spec: Spec) -> bool:
    """Whether the form may follow the load. All forms must give equal bits, which a GPU has shown for K = V = 128 alone."""
    return (spec.k, spec.v) == (128, 128)


def may_cap(target: Target | None) -> bool:
    """Whether registers may be capped at 128: not on HIP, which has no such option, nor on sm8x, where it spills."""
    return target is None or (target.vendor == "cuda" and not target.arch.startswith("sm8"))


class DecodeStep(Family):
    name = "decode_step"
    title = "fused decode step: convolution, norms, gate and recurrence in one launch"
    flags = {
        "k_first": Flag("k_first", (False, True)),       # states [HV, K, V] instead of [HV, V, K]
        "width": Flag("width", (4, 3, 2), prefix="w"),   # taps of the convolution
    }
    # columns of V of a tile, registers a thread at most (0: as many as it takes), columns of V of a program
    space = {"bv": (16, 32), "regs": (0, 128), "rows": (16, 32, 64, 128, 256)}
    warps = (1, 2, 4)
    stages = (1,)

    def context(self, spec: Spec, schedule: Schedule) -> dict:
        bv, rows, VP = schedule.block["bv"], schedule.block["rows"], next_power_of_2(spec.v)
        elements = max(1, bv * next_power_of_2(spec.k) // (32 * self.default(spec).warps))  # of a tile, for each thread
        return layout_context(spec) | {
            "W": spec.width, "T": rows // bv, "NP": -(-spec.v // rows),
            "channels": (("q", "m_k"), ("k", "m_k"), ("v", "m_v")),  # of the convolution, and what masks them
            "history": lambda c: ", ".join(f"x_{c}{w}" if c else f"x{w}" for w in range(1, spec.width)),
            # tiles on their way at a time: with 48 elements a thread, 128 registers hold a program
            "ahead": min(rows // bv, -(-48 // elements)),
            "o_first": rows == bv < spec.v and elements <= 16,
            # few states leave the L2 cache first; of many, plain access was 2 % faster (H200, 1,536 states)
            "evict": ', eviction_policy="evict_first"' if rows == bv else "",
            "halves": [VP >> i for i in range(1, VP.bit_length())]}

    def supports(self, spec: Spec, schedule: Schedule, target: Target | None) -> str | None:
        if set(schedule.block) != {"bv", "regs", "rows"}:
            return f"blocks {dict(schedule.blocks)} are not bv, regs and rows"
        bv, regs, rows = (schedule.block[name] for name in ("bv", "regs", "rows"))
        for name, size in (("bv", bv), ("rows", rows)):
            if size < 1 or size & (size - 1) or size > next_power_of_2(spec.v):
                return f"{name} {size} is not a power of two up to V = {spec.v}"
        if not bv <= rows <= 16 * bv:
            return f"rows {rows} are not 1 to 16 tiles of bv {bv}, each unrolled"
        if regs not in (0, 128):
            return f"regs {regs} is not 0 or 128"
        if regs and (rows == bv or not may_cap(target)):
            return "a cap on registers is for programs of several tiles, and for sm90 and later only"
        reason = refuse_head_dims(spec) or refuse_tile(bv * next_power_of_2(spec.k), schedule.warps, target)
        if reason:
            return reason
        # Which schedule runs depends on the batch. A sequence's bits must not: all schedules sum over K in the same order.
        same = self.default(spec)
        if not has_forms(spec) and schedule.blocks != same.blocks:
            return f"K = {spec.k}, V = {spec.v} has {same.name} for any load: other forms may give other bits"
        if schedule.warps not in (0, same.warps):
            return f"{schedule.warps} warps sum over K in another order than {same.warps}"
        if bv < same.block["bv"] or (spec.k_first and bv != same.block["bv"]):
            return f"bv {bv} with K = {spec.k} sums over K in another order than bv {same.block['bv']}"
        return None

    def default(self, spec: Spec, target: Target | None = None, problem: Problem | None = None) -> Schedule:
        """Tiles of 16 columns of V, as many as make 8 elements for each thread of a warp, the most that one load takes.

        With V contiguous 32 columns: a row of the tile is a whole memory line. SPLIT and WHOLE are measured (H200, K = V =
        128, 12 and 32 heads). With 128 registers four programs of all of V fit an SM. Other K, V have one schedule.
        """
        BK, VP = next_power_of_2(spec.k), next_power_of_2(spec.v)
        states = problem.seqs * problem.heads if problem and has_forms(spec) else 0
        bv = min(VP, 32 if spec.k_first else max(16, 256 // BK))
        warps = max(1, min(4, bv * BK // 512))
        if states > WHOLE:
            rows = min(VP, 16 * bv)
            cap = rows > bv and warps == 4 and bv * BK <= 2048 and may_cap(target)
            return Schedule.make(bv=bv, regs=128 if cap else 0, rows=rows, warps=warps)
        if states > SPLIT and not spec.k_first:
            bv = min(VP, 2 * bv)
        return Schedule.make(bv=bv, regs=0, rows=bv, warps=warps)

    def default_schedules(self, spec: Spec) -> Iterable[Schedule]:
        problems = (Problem(states, states, 1) for states in (SPLIT, WHOLE, WHOLE + 1))
        chosen = [self.default(spec, None, problem) for problem in problems]
        uncapped = [Schedule.make(**(schedule.block | {"regs": 0}), warps=schedule.warps) for schedule in chosen]
        return dict.fromkeys(chosen + uncapped)

    def kernels(self, spec: Spec, schedule: Schedule) -> tuple[Kernel, ...]:
        runtime = (
            pointers(spec.dtype, "qkv", "z", "g", "beta", "o", "conv_pool", "norm_weight")
            | pointers("fp32", "conv_weight", "A_log", "dt_bias", "o_raw") | pointers("i32", "state_indices", "arrivals")
            | dict.fromkeys(("slots", "pad_slot", *STRIDES), "i32") | {"scale": "fp32", "eps": "fp32"})
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

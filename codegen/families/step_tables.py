"""Step tables: chunk table and conv schedules of a step in one launch. Template: step_tables.py.j2.

Spec: ``chunk`` is the chunk table's chunk size, or 0 for no chunk table; ``dtype`` that of the boundaries (and of the
chunk table); ``schedules`` the number of conv schedules, whose block sizes are run-time arguments; ``requests`` whether
boundaries, slots and "has an initial state" of a step with prefills are written too, and the chunk table begins at a
later sequence than the schedules.
Schedule: ``br`` rows of a table in a program; ``bn`` sequences of one read. Where there are more, a program first skips
those before its rows, by reads of ``bm``.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdagen.families.base import Family, Kernel, next_power_of_2, pointers
from kdagen.spec import Flag, Problem, Schedule, Spec, Target

MAX_SCHEDULES = 16


class StepTables(Family):
    name = "step_tables"
    title = "chunk table and conv schedules of a step, one launch"
    flags = {"schedules": Flag("schedules", tuple(range(MAX_SCHEDULES + 1)), prefix="s"),
             "requests": Flag("requests", (False, True))}
    space = {"bn": (64, 128, 256), "bm": (512, 1024, 2048), "br": (64, 128, 256)}
    warps = (1, 2, 4, 8)
    chunked = True

    def context(self, spec: Spec, schedule: Schedule) -> dict:
        """``schedules``: their numbers from 1; ``row_counts``: the names of the tables' numbers of rows, in order.

        ``numbers`` and ``inputs``: the arguments whose value, and the pointers whose alignment, must compile nothing new.
        """
        schedules = self._schedules(spec)
        row_counts = ["n_chunks"] * (spec.chunk > 0) + [f"n_{s}" for s in schedules]
        numbers = ["n_seqs", *row_counts, *(f"{name}_{s}" for s in schedules for name in ("factor", "shift"))]
        inputs = ["cu_seqlens"]
        if spec.requests:
            numbers += ["base", "first", "lens_n", "table_n"]
            inputs += ["lens", "table"]
        return {"schedules": schedules, "row_counts": row_counts, "numbers": numbers, "inputs": inputs}

    @staticmethod
    def _schedules(spec: Spec) -> range:
        return range(1, spec.schedules + 1)

    def supports(self, spec: Spec, schedule: Schedule, target: Target | None) -> str | None:
        if spec.dtype not in ("i32", "i64"):
            return f"boundaries of dtype {spec.dtype or 'none'} are neither i32 nor i64"
        if spec.k or spec.v:
            return "the tables have no head dimension"
        if spec.chunk and (reason := self.refuse_chunk(spec)):
            return reason
        if not spec.chunk and not spec.schedules:
            return "neither a chunk table nor a conv schedule is asked for"
        if spec.requests and (not spec.chunk or spec.dtype != "i32"):
            return "requests are only written beside a chunk table, with boundaries of dtype i32"
        block = schedule.block
        if set(block) != set(self.space):
            return f"blocks {schedule.name or 'none'} are not bn, bm and br"
        if any(size != next_power_of_2(size) or size < 64 for size in block.values()):
            return f"blocks {schedule.name} are not powers of two from 64"
        return self.refuse_threads(schedule, target)

    def default(self, spec: Spec, target: Target | None = None, problem: Problem | None = None) -> Schedule:
        """One schedule for all sizes: a step must never meet a kernel that was not compiled before it."""
        return Schedule.make(bn=128, bm=1024, br=128, warps=4, stages=1)

    def load(self, spec: Spec, problem: Problem) -> tuple[int, int]:
        """One load bucket, for the same reason."""
        return 1, 1

    def kernels(self, spec: Spec, schedule: Schedule) -> tuple[Kernel, ...]:
        signature = {"cu_seqlens": f"*{spec.dtype}", "n_seqs": "i32", "counts": "*i32"}
        if spec.chunk:
            signature |= {"offsets": "*i64", "chunks": f"*{spec.dtype}", "rows": "*i32", "n_chunks": "i32"}
        for s in self._schedules(spec):
            signature |= {f"seq_{s}": "*i32", f"part_{s}": "*i32"}
            signature |= {f"factor_{s}": "i64", f"shift_{s}": "i32", f"n_{s}": "i32"}
        if spec.requests:
            signature |= dict.fromkeys(("base", "first"), "i32") | {"lens": "*i32", "lens_n": "i32", "table": "*i32",
                                                                    "table_n": "i32", "starts": "*i32", "slots": "*i32"}
            signature |= pointers("i1", "carries", "first_carries")
        absent = {name: None for name in ("counts", "rows") if name in signature}
        exact = {name: kind for name, kind in signature.items() if name not in absent}
        baked = {"ROWS": schedule.block["br"]}
        return (Kernel("step_tables_kernel", exact, baked | absent), Kernel("step_tables_kernel", signature, baked))

    def committed(self) -> Iterable[Spec]:
        """Chunk table alone for both dtypes of boundaries; with one schedule; the schedule alone; a step with prefills."""
        return (
            Spec.make(self.name, chunk=64, dtype="i32"),
            Spec.make(self.name, chunk=64, dtype="i64"),
            Spec.make(self.name, chunk=64, dtype="i32", schedules=1),
            Spec.make(self.name, dtype="i32", schedules=1),
            Spec.make(self.name, chunk=64, dtype="i32", schedules=1, requests=True),
        )


FAMILY = StepTables()

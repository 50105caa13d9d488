"""The interface of a kernel family: one template (or one a form), one Spec, one set of limits.

A family's file and its template are read side by side. ``supports`` is the only statement of the family's limits: the
sweep prunes with it, dispatch filters with it, ``kdagen explain`` prints it, and a test compares all three.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product

from kdagen.spec import CHUNKS, Flag, Problem, Schedule, Spec, Target


@dataclass(frozen=True)
class Kernel:
    """One jit function of a generated module, with what a compiler without a GPU needs to build it.

    ``signature`` maps run-time argument names to Triton types (``*bf16``, ``i32``, ``fp32``, ``tensordesc<...>``);
    ``constants`` the constexpr arguments to values; ``divisible`` the arguments promised to be multiples of 16
    (pointers always are). Several Kernels may name the same function with other constants. ``options`` are the compiler
    options that the module's ``launch`` sets beside the schedule's warps and stages, or in their place (``maxnreg``,
    ``num_stages``). ``label`` tells such Kernels apart in a table.
    """

    name: str
    signature: dict[str, str]
    constants: dict[str, object] = field(default_factory=dict)
    divisible: tuple[str, ...] = ()
    options: dict[str, object] = field(default_factory=dict)
    label: str = ""


class Family:
    """Base of all families; a subclass sets the class attributes and overrides the methods it needs."""

    name: str = ""
    title: str = ""                       # one line for `kdagen list`
    flags: dict[str, Flag] = {}
    forms: tuple[str, ...] = ("",)        # "" is the portable template <name>.py.j2; form f is <name>_<f>.py.j2
    space: dict[str, tuple[int, ...]] = {}  # block name -> values of the search space
    warps: tuple[int, ...] = (4,)
    stages: tuple[int, ...] = (1,)
    chunked: bool = False                 # whether the Spec has a chunk size

    def template(self, schedule: Schedule) -> str:
        return f"{self.name}_{schedule.form}.py.j2" if schedule.form else f"{self.name}.py.j2"

    def context(self, spec: Spec, schedule: Schedule) -> dict:
        """Extra names for the template, beside ``spec``, ``schedule``, ``blocks`` and render.py's globals."""
        return {}

    def supports(self, spec: Spec, schedule: Schedule, target: Target | None) -> str | None:
        """None, or the reason why this schedule cannot run this Spec on this target (None: any target)."""
        return None

    def default(self, spec: Spec, target: Target | None = None, problem: Problem | None = None) -> Schedule:
        """The schedule of a Spec with no tuned row: a plain rule that a person can read."""
        raise NotImplementedError

    def load(self, spec: Spec, problem: Problem) -> tuple[int, int]:
        """(programs, steps): how much parallel and how much serial work; the lookup key of tuned rows."""
        return problem.seqs * problem.heads, max(1, problem.tokens // max(1, problem.seqs))

    def kernels(self, spec: Spec, schedule: Schedule) -> tuple[Kernel, ...]:
        """What `kdagen compile` builds of one variant."""
        raise NotImplementedError

    def committed(self) -> Iterable[Spec]:
        """The Specs whose default variants are under generated/: what serving uses."""
        raise NotImplementedError

    def chunk_specs(self, chunk: int, *, k: int = 128, v: int = 128, dtype: str | None = None) -> Iterator[Spec]:
        """The committed Specs moved to another chunk size, other head dims or another dtype, each once."""
        floats = ("bf16", "fp16", "fp32")
        made = dict.fromkeys(
            Spec(spec.family, chunk if spec.chunk else 0, k if spec.k else 0, v if spec.v else 0,
                 dtype if dtype and spec.dtype in floats else spec.dtype, spec.flags)
            for spec in self.committed())
        yield from made

    def default_schedules(self, spec: Spec) -> Iterable[Schedule]:
        """Every schedule that ``default`` can return for the Spec, on any target and problem; generated/ holds them all."""
        return (self.default(spec),)

    def candidates(self, spec: Spec) -> Iterator[Schedule]:
        """The search space, unpruned, in a fixed order."""
        for form in self.forms:
            for sizes in product(*self.space.values()):
                for warps in self.warps:
                    for stages in self.stages:
                        yield Schedule.make(warps=warps, stages=stages, form=form, **dict(zip(self.space, sizes)))

    @staticmethod
    def refuse_threads(schedule: Schedule, target: Target | None) -> str | None:
        """The reason why a program has too many threads: 32 warps are 1,024 of 32 lanes, 2,048 of 64; for ``supports``."""
        threads = schedule.warps * (64 if target is not None and target.vendor == "hip" else 32)
        return f"{threads} threads a program are more than 1024" if threads > 1024 else None

    def refuse_chunk(self, spec: Spec) -> str | None:
        """The reason why the Spec's chunk size is none of 16, 32, 64, 128; for ``supports`` of chunked families."""
        return None if spec.chunk in CHUNKS else f"chunk size {spec.chunk} is not one of {', '.join(map(str, CHUNKS))}"


def pointers(dtype: str, *names: str) -> dict[str, str]:
    """``{"q": "*bf16", ...}``: a signature's entries for several pointers of one dtype."""
    return {name: f"*{dtype}" for name in names}


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()

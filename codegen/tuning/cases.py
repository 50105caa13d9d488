"""How the sweep runs one family: its inputs, its op under a pinned schedule, its oracle, its bytes.

A case knows nothing of schedules. It makes inputs (random, never zeros), calls the public op, and names the outputs. The
measuring process pins the candidate around the call, poisons what the op allocates, and copies what it writes in place.
The families' cases are in cases_decode.py, cases_prefill.py and cases_tables.py; each registers itself with ``@case``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import torch

from kdagen import families
from kdagen.errors import UnknownName, refuse
from kdagen.spec import Problem, Schedule, Spec
from kdagen.tuning import space

MODULES = ("cases_decode", "cases_prefill", "cases_tables")
FIRST = ("recurrent", "conv_update", "conv_prefill", "decode_step", "prefill_prepare", "prefill_state", "prefill_segments")
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
                "i32": torch.int32, "i64": torch.int64}
_CASES: dict[str, Case] = {}

Tensors = Mapping[str, torch.Tensor]


class Case:
    """One family's adapter. ``inputs`` holds tensors and plain values by name; ``run`` and ``oracle`` both take it."""

    in_place: tuple[str, ...] = ()   # inputs that the op writes: run on copies, and compared as outputs
    spacing: tuple[int, int] = (1, 1)  # octaves of (programs, steps): a load as near to a more wanted one is left to it

    def problems(self, spec: Spec) -> list[Problem]:
        """The serving sizes of the Spec, most wanted first."""
        return space.prefill_problems()

    def inputs(self, spec: Spec, problem: Problem, seed: int, device: torch.device) -> dict:
        raise NotImplementedError

    def run(self, spec: Spec, inputs: dict) -> Tensors:
        """Call the op once; the outputs by name (tensors named in ``in_place`` are added by the caller)."""
        raise NotImplementedError

    def oracle(self, spec: Spec, inputs: dict) -> Tensors:
        """What ``run`` should have given, in higher precision, the ``in_place`` inputs' new contents included."""
        raise NotImplementedError

    def bytes_moved(self, spec: Spec, problem: Problem) -> float:
        """The fewest bytes of device memory the op must move."""
        raise NotImplementedError

    def checkable(self, spec: Spec, problem: Problem) -> Problem:
        """The sizes at which the oracle is affordable; the problem itself where that is always so."""
        return problem

    def redundant(self, spec: Spec, schedule: Schedule) -> str | None:
        """Why a supported schedule is not worth a look: it is the same kernel as another one. None: it is its own."""
        return None

    def tolerance(self, spec: Spec, output: str) -> float:
        """The largest relative error that a right kernel shows in this output: its rounding, and little more."""
        return {"bf16": 4e-3, "fp16": 1e-3, "fp32": 1e-5}.get(spec.dtype, 0.0)


def case(name: str):
    """Class decorator: this is the case of that family."""
    def register(cls):
        _CASES[name] = cls()
        return cls
    return register


def get(name: str) -> Case:
    """The family's case; UnknownName where the sweep cannot run it."""
    if name not in _CASES:
        for module in MODULES:
            import_module(f"kdagen.tuning.{module}")
    if name not in _CASES:
        refuse("--family", repr(name), f"a family that the sweep can run: {', '.join(sorted(_CASES))}",
               "Add its case in codegen/tuning/cases_*.py, a new file's name to MODULES of codegen/tuning/cases.py "
               "(docs/tuning.md).", kind=UnknownName)
    return _CASES[name]


def names() -> list[str]:
    """The families with a case, in the order in which a sweep of all takes them: the time of a served step first."""
    for module in MODULES:
        import_module(f"kdagen.tuning.{module}")
    return sorted((name for name in families.NAMES if name in _CASES),
                  key=lambda name: (FIRST + (name,)).index(name))


class Random:
    """Tensors of one seed on one device."""

    def __init__(self, seed: int, device: torch.device):
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32).mul_(scale).to(dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device).mul_(high - low).add_(low)

    def order(self, n: int) -> torch.Tensor:
        """A permutation of 0..n-1, int32."""
        return torch.randperm(n, generator=self.generator, device=self.device).to(torch.int32)


def boundaries(problem: Problem) -> torch.Tensor:
    """cu_seqlens of ``seqs`` sequences of nearly equal length, int32 [N + 1], on the CPU."""
    steps = torch.arange(problem.seqs + 1, dtype=torch.int64)
    return (steps * problem.tokens // problem.seqs).to(torch.int32)

"""Compile a variant for any target, without a GPU: registers, stack, shared memory, matrix instructions.

Each compilation runs in a worker process that sees neither the GPU nor the interpreter, so that `kdagen compile` says the
same on every machine and a crash or a hang of the compiler costs one report.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from kdagen import devices, families, loader
from kdagen.errors import CompileError
from kdagen.families.base import Kernel
from kdagen.render import locate
from kdagen.spec import Problem, Schedule, Target, Variant

MATRIX_OPS = {"wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma", "mma.sync": r"mma\.sync", "mfma": r"v_mfma_"}

# loads that the default rules are asked for, from a token of a sequence to long prefill and full batches of decode
LOADS = (None, *(Problem(t, s, h) for t in (1, 64, 2048, 65536) for s in (1, 8, 256) for h in (1, 4, 12, 32, 96)))


@dataclass(frozen=True)
class Report:
    """One kernel of one variant on one target. Sizes in bytes; ``stack`` above 0 means spills; -1 is not reported."""

    variant: str
    kernel: str
    constants: str
    target: str
    warps: int
    stages: int
    registers: int = -1
    stack: int = -1
    shared: int = -1
    matrix: str = ""       # "wgmma 12" or "mma.sync 96": matrix instructions in the assembly
    error: str = ""
    case: str = ""         # which of the kernels of one name: the family's label, or the constants that differ

    def fits(self) -> list[str]:
        """The slugs of the known devices of this architecture whose shared memory suffices."""
        return [slug for slug, row in devices.table().items() if row["arch"] == self.target and self.shared <= row["smem"]]

    def json(self) -> dict:
        return asdict(self) | {"fits": self.fits()}


def compile_variant(variant: Variant, schedule: Schedule, target: str) -> list[Report]:
    """Compile every kernel of a variant in this process, for ``sm90`` or ``gfx942``. The interpreter must be off."""
    family = families.get(variant.spec.family)
    path = loader.find(variant) or loader.cached(variant)
    module = loader._import_file(f"kdagen_compiled.{variant.name}", path)
    reports = []
    kernels = family.kernels(variant.spec, schedule)
    for kernel in kernels:
        base = Report(variant.name, kernel.name, ", ".join(f"{k}={v}" for k, v in kernel.constants.items()), target,
                      kernel.options.get("num_warps", schedule.warps), kernel.options.get("num_stages", schedule.stages),
                      case=_case(kernel, kernels))
        try:
            compiled = _compile(getattr(module, kernel.name), kernel, schedule, target)
            reports.append(Report(**asdict(base) | _measure(compiled, target)))
        except Exception as error:  # whatever the compiler raises is this report's finding
            reports.append(Report(**asdict(base) | {"error": _explain(error, variant, path)}))
    return reports


def _case(kernel: Kernel, kernels: tuple[Kernel, ...]) -> str:
    """What tells a kernel from the others of its name: its label, else as few constants as do; empty if it is alone."""
    others = [one.constants for one in kernels if one.name == kernel.name and one is not kernel]
    if kernel.label:
        return kernel.label
    own, found, missing = kernel.constants, [], object()
    for name in dict.fromkeys([*own, *(name for other in others for name in other)]):
        value = own.get(name, missing)
        alike = [other for other in others if other.get(name, missing) == value]
        if len(alike) < len(others):
            found.append(f"with {name}" if value is missing else f"no {name}" if value is None else f"{name}={value}")
            others = alike
    return ", ".join(found)


def _compile(jit, kernel, schedule: Schedule, target: str):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source_class = ASTSource
    if getattr(jit, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource as source_class
    missing = [name for name in jit.arg_names if name not in kernel.signature and name not in kernel.constants]
    if missing:
        raise CompileError(f"kernel {kernel.name}: the family's signature lacks {', '.join(missing)}")
    signature = {name: "constexpr" if name in kernel.constants else kernel.signature[name] for name in jit.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(jit.arg_names)
             if signature[name].startswith("*") or name in kernel.divisible}
    source = source_class(jit, signature, kernel.constants, attrs)
    if target.startswith("sm"):
        gpu = GPUTarget("cuda", int(target[2:]), 32)
    else:
        gpu = GPUTarget("hip", target, 64)
    options = {"num_warps": schedule.warps, "num_stages": schedule.stages} | kernel.options
    return triton.compile(source, target=gpu, options=options)


def _measure(compiled, target: str) -> dict:
    found = {"shared": compiled.metadata.shared}
    text = compiled.asm["ptx"] if target.startswith("sm") else compiled.asm["amdgcn"]
    counts = {op: len(re.findall(rf"^\s*(?:@%?\w+ )?{pattern}", text, re.M)) for op, pattern in MATRIX_OPS.items()}
    found["matrix"] = ", ".join(f"{op} {count}" for op, count in counts.items() if count)
    if target.startswith("sm"):
        return found | _cubin_usage(compiled.asm["cubin"])
    registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
    stack = re.search(r"\.private_segment_fixed_size:\s*(\d+)", text)
    # .group_segment_fixed_size is 0: Triton's kernels are given their shared memory at launch
    numbers = {"registers": registers, "stack": stack}
    return found | {name: int(match[1]) for name, match in numbers.items() if match}


def _cubin_usage(cubin: bytes) -> dict:
    """Registers and stack of a cubin, by the cuobjdump that Triton carries."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", done.stdout)
    return {"registers": int(usage[1]), "stack": int(usage[2]) + int(usage[4])} if usage else {}


def _explain(error: Exception, variant: Variant, path: Path) -> str:
    """``templates/x.py.j2:47 (generated/...py:61): reason`` where the compiler names a line, else its first words."""
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    at = re.search(r"at (\d+):\d+:", text)
    number = None
    node, source = getattr(error, "node", None), getattr(error, "src", None)
    if at and source:
        # Triton counts from the first line of the function: find that line in the file.
        first = source.splitlines()[0].strip() if isinstance(source, str) else ""
        starts = [i for i, line in enumerate(path.read_text().splitlines(), 1) if line.strip() == first]
        if starts and node is not None:
            number = starts[0] + int(at[1]) - 1
    elif match := re.search(rf"{re.escape(str(path))}:(\d+)", text):
        number = int(match[1])
    reason = (lines[-1] if lines else "") or type(error).__name__
    if number:
        return f"{locate(variant, number)} (generated/{variant.path}:{number}): {reason}"
    return f"{type(error).__name__}: {reason}"


class Job(NamedTuple):
    """One compilation: a variant with its launch options, for a target such as sm90."""

    variant: Variant
    schedule: Schedule
    target: str


class LeftOut(NamedTuple):
    """A variant that no launch of runs on a target, and the family's reason."""

    variant: Variant
    target: str
    reason: str


def _start_worker() -> None:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}


def _run(job: Job) -> list[Report]:
    return compile_variant(*job)


def compile_many(jobs: Iterable[Job], *, workers: int = 2, timeout: float = 300.0) -> Iterator[list[Report]]:
    """The reports of each job, in order, from ``workers`` processes. A job over ``timeout`` seconds is reported as such."""
    jobs = list(jobs)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    futures = []
    try:
        futures = [pool.submit(_run, job) for job in jobs]
        for job, future in zip(jobs, futures):
            try:
                yield future.result(timeout=timeout)
            except FutureTimeout:
                yield [_failed(job, f"not compiled within {timeout:.0f} s")]
            except BrokenProcessPool:
                yield [_failed(job, "the compiler's process died")]
    finally:
        if all(future.done() for future in futures):
            pool.shutdown()
        else:  # a hung compilation, or a caller that wants no more: do not wait for it
            for process in list((pool._processes or {}).values()):
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)


def _failed(job: Job, why: str) -> Report:
    variant, schedule, target = job
    return Report(variant.name, "*", "", target, schedule.warps, schedule.stages, error=why)


def default_jobs(variants: Iterable[Variant], targets: Iterable[str], left_out: list[LeftOut] | None = None) -> list[Job]:
    """A job for each variant and each target its family supports, as dispatch launches it; others go to ``left_out``."""
    jobs = []
    for variant in variants:
        family = families.get(variant.spec.family)
        for name in targets:
            target: Target = devices.named(name)
            schedule = launch_options(variant, target)
            reason = family.supports(variant.spec, schedule, target)
            if reason is None:
                jobs.append(Job(variant, schedule, name))
            elif left_out is not None:
                left_out.append(LeftOut(variant, name, reason))
    return jobs


def launch_options(variant: Variant, target: Target | None = None) -> Schedule:
    """The variant's whole schedule: its own blocks with the warps and stages that the family gives them.

    The first that fits the target of: what the default rule picks there for some load, or on no target in particular; the
    family's other defaults, most stages first; the default's warps and stages; the search space. If none fits, the first.
    """
    family, spec = families.get(variant.spec.family), variant.spec
    picked = [family.default(spec, where, load) for where in (target, None) for load in LOADS]
    others = sorted(family.default_schedules(spec), key=lambda one: -one.stages)
    known = [one for one in (*picked, *others) if one.source_key == variant.schedule]
    default = family.default(spec, target)
    known.append(Schedule(variant.schedule.blocks, default.warps, default.stages, variant.schedule.form))
    searched = (one for one in family.candidates(spec) if one.source_key == variant.schedule)
    return next((one for one in chain(known, searched) if family.supports(spec, one, target) is None), known[0])

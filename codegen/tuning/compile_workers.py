"""Compile a sweep's candidates in parallel, in processes that see no GPU, into the cache that the measuring process reads.

Triton's cache key holds the exact types, constants and alignments of a launch. So the measuring process first *plans* a
candidate: it calls the op with a hook that notes each launch's specialization and stops before the compiler. Workers then
compile exactly those, in parallel, and report registers, stack and shared memory; the later real launch finds them in
Triton's cache in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from kdagen import compile as compiling
from kdagen import loader
from kdagen.spec import Schedule, Spec, Target, Variant, parse
from kdagen.tuning.workers import Pool

# No GPU, no interpreter, and behind the measuring process, which must not wait for a core when its GPU is done.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", "KDAGEN_NICE": "10"}
MAX_REGISTERS = 255
MAX_STACK = 1024     # bytes of stack frame a thread: beyond it a schedule only burns budget


@contextmanager
def recording(launches: list[dict], compiled: set[tuple] = frozenset()) -> Iterator[None]:
    """Inside the block a Triton launch that would compile is noted in ``launches``, and neither compiled nor run.

    Launches in ``compiled`` (as ``key`` makes them) do run: Triton finds them in its cache.
    """
    from triton import knobs

    def note(*, fn, compile, **_):
        source = fn.jit_function.fn.__globals__
        schedule = Schedule.make(warps=0, stages=0, **source["SCHEDULE"])
        launch = {"variant": Variant(Spec.of_literal(source["SPEC"]), schedule).name,
                  "kernel": fn.jit_function.fn.__name__, "specialization": compile["specialization_data"]}
        if key(launch) in compiled:
            return False
        launches.append(launch)
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def key(launch: dict) -> tuple[str, str, str]:
    """What tells one noted launch from another."""
    return launch["variant"], launch["kernel"], launch["specialization"]


def compile_launch(job: dict) -> dict:
    """Compile one noted launch of a variant; what a worker process does.

    ``job``: variant, kernel, specialization (Triton's own JSON), arch. Returns kernel, registers, stack, shared.
    """
    import triton
    from triton import language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    module = loader.load(parse(job["variant"]))
    function = getattr(module, job["kernel"])
    function = getattr(function, "jit", function)  # below the fast launch path
    data = json.loads(job["specialization"])

    def constant(value):
        if isinstance(value, str) and tl.dtype.is_dtype(value):
            return tl.dtype(value)
        if isinstance(value, dict) and "constexpr" in value:
            return tl.constexpr(value["constexpr"])
        return value

    constants = {tuple(path): constant(value) for path, value in zip(data["constant_keys"], data["constant_vals"])}
    attributes = {tuple(path): value for path, value in zip(data["attrs_keys"], data["attrs_vals"])}
    signature = {name: _as_tuple(kind) for name, kind in data["signature"].items()}
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in data["options"].items()}
    gpu = GPUTarget("cuda", int(job["arch"][2:]), 32) if job["arch"].startswith("sm") else GPUTarget(
        "hip", job["arch"], 64)
    source = _source_class(function)(function, signature, constants, attributes)
    parsed = make_backend(gpu).parse_options(options)
    compiled = triton.compile(source, target=gpu, options=parsed.__dict__)
    found = compiling._measure(compiled, job["arch"])
    return {"kernel": job["kernel"], "registers": found.get("registers", -1), "stack": found.get("stack", -1),
            "shared": found["shared"]}


def _source_class(function):
    if getattr(function, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _as_tuple(kind):
    return tuple(map(_as_tuple, kind)) if isinstance(kind, list) else kind


def refuse_resources(report: dict, target: Target) -> str | None:
    """Why a compiled kernel is not worth the GPU's time, or cannot run there at all."""
    if report["shared"] > target.smem:
        return f"{report['kernel']} needs {report['shared']} B of shared memory, {target.slug} has {target.smem} B"
    if report["registers"] > MAX_REGISTERS:
        return f"{report['kernel']} needs {report['registers']} registers a thread, the limit is {MAX_REGISTERS}"
    if report["stack"] > MAX_STACK:
        return f"{report['kernel']} spills into {report['stack']} B of stack a thread"
    return None


def warm_up() -> None:
    """What a worker process does before its first job: the slow imports."""
    import triton  # noqa: F401

    import kdagen.launch  # noqa: F401


def pool(workers: int, timeout_s: float) -> Pool:
    """Compiling processes, started: ``pool.run(jobs)`` yields (job, report or Failed) as they finish."""
    made = Pool("kdagen.tuning.compile_workers:compile_launch", workers, timeout_s, ENVIRONMENT)
    made.start()
    return made


def pools(workers: int, timeout_s: float) -> list[Pool]:
    """All processes, in up to three pools that work side by side."""
    parts = min(3, workers)
    return [pool((workers + part) // parts, timeout_s) for part in range(parts)]

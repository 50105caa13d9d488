"""What the process on the GPU does for a sweep: plan, screen, verify and time candidates, one job at a time.

A job is a dictionary and so is its answer, so that the same function serves a local worker, a Ray task and a test's stub.
A candidate is (variant name, warps, stages); it runs under ``dispatch.pin``, through the public op.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kdagen import devices, dispatch, families
from kdagen.errors import KdagenError
from kdagen.spec import Problem, Spec
from kdagen.tuning import cases, timing
from kdagen.tuning.compile_workers import recording

REPEATS = 20
MAX_ROTATION_BYTES = 24e9
SCREEN_REPLAYS = 4
HOPELESS = 2.0           # a first replay this much slower than the best known ends a screening


class Wrong(KdagenError):
    """A candidate whose output is wrong, unwritten in places, or differs between runs."""


def answer(job: dict) -> dict | list:
    """Do one job: ``{"do": "environment" | "plan" | "screen" | "verify" | "time", ...}``."""
    return {"environment": environment, "plan": plan, "screen": screen, "verify": verify, "time": time_final}[job["do"]](job)


# Inputs, kept from job to job while the point stays the same

_kept: dict[str, object] = {}


def _point(job: dict) -> tuple[cases.Case, Spec, Problem]:
    spec = Spec.of_literal(job["spec"])
    return cases.get(spec.family), spec, Problem(*job["problem"])


def _keep(slot: str, key: tuple, make):
    """``make()`` once a key; a slot holds one thing at a time, so a new point frees the old one's memory."""
    held = _kept.get(slot)
    if held is None or held[0] != key:
        _kept.pop(slot, None)
        _kept[slot] = held = (key, make())
    return held[1]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _sets(case: cases.Case, spec: Spec, problem: Problem) -> list[dict]:
    """Input sets that together overflow the L2 cache."""
    bytes_a_call = case.bytes_moved(spec, problem)
    count = max(2, min(timing.sets_needed(bytes_a_call), int(MAX_ROTATION_BYTES // max(bytes_a_call, 1))))
    return _keep("sets", (spec, problem), lambda: [case.inputs(spec, problem, seed, device()) for seed in range(count)])


@contextmanager
def pinned(candidate: list) -> Iterator[None]:
    variant, warps, stages = candidate
    with dispatch.pin(variant, warps=warps, stages=stages):
        yield


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside the block torch fills what it allocates with NaN (integers: their largest value)."""
    from torch.utils import deterministic

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = fill


def run_on_copies(case: cases.Case, spec: Spec, inputs: dict) -> dict[str, torch.Tensor]:
    """All outputs of one call, what it wrote in place among them; the inputs stay as they are."""
    copies = inputs | {name: inputs[name].clone() for name in case.in_place}
    outputs = dict(case.run(spec, copies))
    return outputs | {name: copies[name] for name in case.in_place}


# Jobs

def environment(job: dict) -> dict:
    """What a row says about where it was measured."""
    target = devices.of_index(torch.cuda.current_device())
    return {"gpu": torch.cuda.get_device_name(), "arch": target.arch, "slug": target.slug, "sms": target.sms,
            "smem": target.smem, "triton": dispatch.triton_version(), "torch": torch.__version__,
            "cuda": torch.version.cuda or torch.version.hip, "how": "graph replay, cold L2, interleaved",
            "day": time.strftime("%Y-%m-%d", time.gmtime())}


def plan(job: dict) -> list[dict]:
    """For each candidate the launches its op makes at this point and that are not compiled yet.

    An op that stumbles over a launch that gave nothing is ``incomplete``: once what it noted is compiled
    (``job["compiled"]``), planning it again leads further. A refusal of the candidate is ``failed``.
    """
    case, spec, problem = _point(job)
    inputs = _keep("plan", (spec, problem), lambda: case.inputs(spec, problem, 0, device()))
    compiled, plans = set(map(tuple, job["compiled"])), []
    for candidate in job["candidates"]:
        launches: list[dict] = []
        found = {"launches": launches}
        try:
            with pinned(candidate), recording(launches, compiled):
                run_on_copies(case, spec, inputs)
        except KdagenError as error:
            found["failed"] = f"{type(error).__name__}: {error}"[:400]
        except Exception as error:
            found["incomplete"] = f"{type(error).__name__}: {error}"[:400]
        plans.append(found)
    return plans


def _calls(case: cases.Case, spec: Spec, sets: list[dict]) -> list:
    return [lambda inputs=inputs: case.run(spec, inputs) for inputs in sets]


def screen(job: dict) -> dict:
    """A quick time of one candidate: a few replays of a graph over rotating inputs (the sweep's own copies)."""
    case, spec, problem = _point(job)
    with pinned(job["candidate"]):
        lap = timing.Lap.of(_calls(case, spec, _sets(case, spec, problem)), min_us=100.0)
    first = lap.us()
    if job.get("best_us") and first > HOPELESS * job["best_us"]:
        return {"us": first}
    return {"us": min(lap.us() for _ in range(SCREEN_REPLAYS))}


def time_final(job: dict) -> dict:
    """Final times of several candidates, their replays taking turns: [{us, noise}, ...] in the candidates' order."""
    case, spec, problem = _point(job)
    sets, laps = _sets(case, spec, problem), []
    for candidate in job["candidates"]:
        with pinned(candidate):
            laps.append(timing.Lap.of(_calls(case, spec, sets), min_us=200.0))
    timings = timing.race(laps, budget_ms=job.get("budget_ms", 60.0) * len(laps))
    return {"times": [{"us": t.us, "noise": t.noise} for t in timings]}


def verify(job: dict) -> dict:
    """Whether one candidate is right: {err, repeat}, or Wrong with what it did.

    At the point's own sizes: every element of poisoned outputs written, ``REPEATS`` runs equal to the bit, and a captured
    graph's replay equal to the eager run. Against the oracle at the sizes where it is affordable, and where these are not
    the point's own, against the default schedule's output at full size too.
    """
    case, spec, problem = _point(job)
    small, seed = case.checkable(spec, problem), job["seed"]
    errors = _errors(case, spec, small, seed, job["candidate"], oracle=True)
    if small != problem:
        at_full_size = _errors(case, spec, problem, seed, job["candidate"], oracle=False)
        errors = {name: max(error, at_full_size[name]) for name, error in errors.items()}
    for name, error in errors.items():
        if not error <= case.tolerance(spec, name):
            raise Wrong(f"{name} has relative error {error:.2e}, at most {case.tolerance(spec, name):.0e} is right")
    inputs = _keep("full", (spec, problem, seed), lambda: case.inputs(spec, problem, seed, device()))
    with pinned(job["candidate"]):
        first = run_on_copies(case, spec, inputs)
        for number in range(REPEATS):
            _same(first, run_on_copies(case, spec, inputs), f"repeat {number + 1}")
        if torch.cuda.is_available():
            _same(first, _replayed(case, spec, inputs), "the replay of a captured graph")
    return {"err": max(errors.values()), "repeat": REPEATS}


def _errors(case: cases.Case, spec: Spec, problem: Problem, seed: int, candidate: list, *, oracle: bool) -> dict:
    """Output -> relative error on poisoned outputs, against the oracle or the default schedule."""
    slot = "small" if oracle else "full"
    inputs = _keep(slot, (spec, problem, seed), lambda: case.inputs(spec, problem, seed, device()))
    if oracle:
        wanted = _keep("oracle", (spec, problem, seed), lambda: case.oracle(spec, inputs))
    else:
        wanted = _keep("default", (spec, problem, seed), lambda: _by_default(case, spec, problem, inputs))
    with pinned(candidate), poisoned():
        _poison_freed_memory(wanted)
        outputs = run_on_copies(case, spec, inputs)
    return {name: difference(outputs[name], wanted[name]) for name in wanted}


def _poison_freed_memory(like: dict) -> None:
    """Leave NaN (integers: a large number) in memory of the outputs' sizes, should an op's allocation go around torch's."""
    held = [torch.full_like(value, float("nan") if value.is_floating_point() else 0x7F7F7F7F)
            for value in like.values() for _ in range(2)]
    del held


def _by_default(case: cases.Case, spec: Spec, problem: Problem, inputs: dict) -> dict:
    default = families.get(spec.family).default(spec, devices.machine(), problem)
    with pinned([dispatch.Variant(spec, default.source_key).name, default.warps, default.stages]):
        return run_on_copies(case, spec, inputs)


def difference(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """norm(out - wanted) / norm(wanted) in fp64, infinite where out is not finite; integers: 0 if equal, else infinite."""
    if not out.is_floating_point():
        return 0.0 if torch.equal(out.long(), wanted.long()) else float("inf")
    if not torch.isfinite(out).all():
        return float("inf")
    scale = wanted.double().norm().item()
    error = (out.double() - wanted.double()).norm().item()
    return error / scale if scale else error


def _same(first: dict, again: dict, which: str) -> None:
    for name, value in first.items():
        if not torch.equal(_bits(value), _bits(again[name])):
            raise Wrong(f"{name} of {which} differs from the first run")


def _bits(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: equal floats of other bits (0 and -0) differ, equal NaNs do not."""
    return value.contiguous().view(-1).view(torch.uint8)


def _replayed(case: cases.Case, spec: Spec, inputs: dict) -> dict[str, torch.Tensor]:
    """The outputs of a graph captured around one call on copies, replayed once on fresh contents."""
    copies = inputs | {name: inputs[name].clone() for name in case.in_place}
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = dict(case.run(spec, copies))
    for name in case.in_place:
        copies[name].copy_(inputs[name])
    for value in outputs.values():
        if value.is_floating_point():
            value.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return {name: value.clone() for name, value in (outputs | {n: copies[n] for n in case.in_place}).items()}

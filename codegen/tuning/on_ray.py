"""The sweep's measuring jobs as Ray actors, one a GPU of a cluster; the optional extra ``kdagen[ray]``.

The actor runs the same function as a local worker process, so nothing else of the sweep knows about Ray. The hosts need
kdagen at the same revision, and the GPUs should be of one kind: their rows go into one table.
"""

from __future__ import annotations

from importlib import import_module

from kdagen.errors import refuse
from kdagen.tuning.workers import CUDA_BROKEN, Failed

ENTRY = "kdagen.tuning.measure:answer"


class Actor:
    """What runs on the GPU's host: answers jobs with ``module:function``."""

    def __init__(self, entry: str):
        module, name = entry.split(":")
        self.function = getattr(import_module(module), name)

    def answer(self, job: dict):
        try:
            return True, self.function(job)
        except Exception as error:  # whatever a candidate does, it costs the candidate only
            return False, f"{type(error).__name__}: {error}".strip()[:600]


class RayRunner:
    """A Runner whose process is a Ray actor; a crashed or hanging one is replaced."""

    def __init__(self, entry: str = ENTRY, gpus: float = 1):
        self.entry, self.gpus, self.actor = entry, gpus, None

    def call(self, job: dict, timeout_s: float):
        import ray

        if self.actor is None:
            self.actor = ray.remote(num_gpus=self.gpus, max_restarts=0)(Actor).remote(self.entry)
        try:
            good, value = ray.get(self.actor.answer.remote(job), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            self.stop()
            return Failed("timeout", "outlasted its time limit")
        except ray.exceptions.RayError as error:
            self.stop()
            return Failed("crash", f"the actor died: {type(error).__name__}")
        if good:
            return value
        if any(mark in value for mark in CUDA_BROKEN):
            self.stop()
            return Failed("crash", value)
        return Failed("error", value)

    def stop(self) -> None:
        import ray

        if self.actor is not None:
            ray.kill(self.actor)
        self.actor = None


def runners(address: str) -> list[RayRunner]:
    """One runner for each GPU of the cluster at that address."""
    try:
        import ray
    except ImportError:
        refuse("--ray", repr(address), "the package ray", "Run: pip install 'kdagen[ray]'")
    ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    count = int(ray.cluster_resources().get("GPU", 0))
    if not count:
        refuse("--ray", f"a cluster at {address} without GPUs", "at least one GPU")
    return [RayRunner() for _ in range(count)]

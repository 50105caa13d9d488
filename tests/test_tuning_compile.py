"""Launches noted on the measuring side compile in processes without a GPU, into the cache entry the launch looks up."""

import json
import os
import subprocess
import sys
import time

import pytest

from kdagen.spec import Target
from kdagen.tuning import compile_workers
from kdagen.tuning.workers import Failed, Pool, Worker

# A process whose Triton believes in an sm90 device: it notes launches as the measuring process does, and has them compiled.
SCRIPT = """
import json, sys
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Device:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0

if __name__ == "__main__":
    driver.set_active(Device())
    from kdagen import families, loader
    from kdagen.spec import Spec, Variant
    from kdagen.tuning import compile_workers

    spec = Spec.make("rmsnorm", v=128, dtype="bf16")
    schedule = families.get("rmsnorm").default(spec)
    variant = Variant(spec, schedule.source_key)
    kernel = loader.load(variant).rmsnorm_kernel
    kernel = getattr(kernel, "jit", kernel)
    data = [torch.zeros(64, 128, dtype=torch.bfloat16) for _ in range(3)]
    args = (data[0], data[1], torch.zeros(128), data[2], 1e-5, 64, 128, 0, 128, 0, 128, 0)
    launches = []
    with compile_workers.recording(launches):
        kernel[(16,)](*args, HV=1, num_warps=2, num_stages=1)
        kernel[(16,)](*args, HV=1, num_warps=4, num_stages=1)
    hits = []
    knobs.compilation.listener = lambda *, src, metadata, metadata_group, times, cache_hit: hits.append(cache_hit)
    pool = compile_workers.pool(2, 120.0)
    jobs = [launch | {"arch": "sm90"} for launch in launches]
    reports = [report for _, report in pool.run(jobs + [jobs[0] | {"kernel": "nobody"}])]
    pool.stop()
    for warps in (2, 4, 8):
        kernel.warmup(*args, HV=1, num_warps=warps, num_stages=1, grid=(16,))
    knobs.compilation.listener = None
    noted = []
    with compile_workers.recording(noted, {compile_workers.key(launches[0])}):
        for warps in (2, 4):
            kernel.device_caches.clear()
            try:
                kernel[(16,)](*args, HV=1, num_warps=warps, num_stages=1)
            except Exception:
                pass  # the first one is compiled, so it goes on to a device that is not there
    print(json.dumps([variant.name, launches, reports, hits, noted == launches[1:]]))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compile")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "triton"),
                                "KDAGEN_CACHE": str(folder / "kdagen"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_launches_are_noted_and_not_run(recorded):
    variant, launches, *_ = recorded
    assert [(one["variant"], one["kernel"]) for one in launches] == [(variant, "rmsnorm_kernel")] * 2
    warps = [json.loads(one["specialization"])["options"]["num_warps"] for one in launches]
    assert warps == [2, 4]


def test_workers_report_resources_and_failures(recorded):
    reports = recorded[2]
    good = [report for report in reports if isinstance(report, dict)]
    assert len(good) == 2
    for report in good:
        assert report["kernel"] == "rmsnorm_kernel" and 0 < report["registers"] <= 255 and report["stack"] == 0
        assert report["shared"] < 10_000
    (bad,) = [report for report in reports if not isinstance(report, dict)]
    assert bad[0] == "error" and "nobody" in bad[1]


def test_the_real_launch_finds_what_the_workers_compiled(recorded):
    assert recorded[3] == [True, True, False], "two were compiled ahead, the third never"


def test_compiled_launches_are_let_through(recorded):
    assert recorded[4] is True


@pytest.mark.parametrize("report, word", [
    ({"shared": 232449, "registers": 64, "stack": 0}, "232449 B of shared memory"),
    ({"shared": 0, "registers": 256, "stack": 0}, "256 registers"),
    ({"shared": 0, "registers": 255, "stack": 4096}, "4096 B of stack"),
    ({"shared": 232448, "registers": 255, "stack": 64}, None), ({"shared": 0, "registers": -1, "stack": -1}, None),
])
def test_resources_that_are_refused(report, word):
    why = compile_workers.refuse_resources({"kernel": "k"} | report, Target("sm90", "h200", 132, 232448))
    assert why is None if word is None else (why.startswith("k ") and word in why)


# What a worker process of these tests runs

def work(job):
    if job == "crash":
        os._exit(11)
    if job == "raise":
        raise ValueError("no such block")
    if job == "cuda":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if job == "hang":
        time.sleep(60)
    if job == "pid":
        return os.getpid()
    if job == "env":
        return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("TRITON_INTERPRET")
    return job * 2


ENTRY = "test_tuning_compile:work"


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    one = Worker(ENTRY, compile_workers.ENVIRONMENT)
    yield one
    one.stop()


def test_a_worker_survives_errors_and_is_replaced_after_crashes(worker):
    pid = worker.call("pid", 60.0)
    assert worker.call("env", 60.0) == ("", "0"), "it sees no GPU"
    assert worker.call("raise", 60.0) == Failed("error", "ValueError: no such block")
    assert worker.call("pid", 60.0) == pid, "an exception costs nothing"
    crash = worker.call("crash", 60.0)
    assert crash.kind == "crash" and "11" in crash.why
    assert worker.call("pid", 60.0) != pid
    assert worker.call("cuda", 60.0).kind == "crash", "a broken CUDA context ends the process"
    assert worker.call(21, 60.0) == 42


def test_a_hang_costs_its_time_limit(worker):
    pid = worker.call("pid", 60.0)
    before = time.monotonic()
    assert worker.call("hang", 0.3).kind == "timeout"
    assert time.monotonic() - before < 10
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert worker.call(1, 60.0) == 2


def test_a_pool_answers_every_job_once(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    pool = Pool(ENTRY, 2, 5.0)
    try:
        found = dict(pool.run([1, "crash", 2, "raise", 3]))
        assert {job: found[job] for job in (1, 2, 3)} == {1: 2, 2: 4, 3: 6}
        assert (found["crash"].kind, found["raise"].kind) == ("crash", "error")
        assert dict(pool.run([])) == {}
        half = pool.run([4, 5, 6])
        next(half)
        half.close()
        assert dict(pool.run([7, 8])) == {7: 14, 8: 16}, "answers of an abandoned batch do not meet later jobs"
    finally:
        pool.stop()

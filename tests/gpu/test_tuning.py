"""The sweep on a device: what it times, what it compiles ahead, and that an interrupted one goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kdagen import devices, families, table
from kdagen.spec import Spec, Variant
from kdagen.tuning import cases, compile_workers, measure, timing

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "autotune_sweep.py"


def test_graph_times_grow_with_the_work():
    small, large = (torch.randn(n, device="cuda") for n in (1 << 24, 1 << 26))
    targets = torch.empty_like(small), torch.empty_like(large)
    one, four = timing.interleaved([[lambda: targets[0].copy_(small)], [lambda: targets[1].copy_(large)]])
    assert 1.5 < four.us / one.us < 12, "four times the bytes; other tests may use the device at the same time"
    assert one.p20 <= one.us <= one.p80 and one.samples >= 5


def test_host_time_is_less_than_eager_time_of_a_long_kernel():
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    calls = [lambda: a @ a]
    assert timing.time_host(calls[0]).us < timing.time_eager(calls).us


def test_what_is_planned_is_what_the_launch_looks_up(tmp_path, monkeypatch):
    """Plan, compile in processes without a GPU, then launch: Triton's cache has it."""
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    spec = Spec.make("rmsnorm", v=176, dtype="bf16")  # no other test's: what this process has compiled is not planned
    schedule = families.get("rmsnorm").default(spec)
    candidate = [Variant(spec, schedule.source_key).name, schedule.warps, 1]
    point = {"spec": spec.literal, "problem": [4096, 1, 1]}
    (plan,) = measure.plan(point | {"candidates": [candidate], "compiled": []})
    assert plan.keys() == {"launches"} and len(plan["launches"]) == 1
    pool = compile_workers.pool(1, 120.0)
    target = devices.machine()
    ((_, report),) = pool.run([plan["launches"][0] | {"arch": target.arch}])
    pool.stop()
    assert compile_workers.refuse_resources(report, target) is None
    hits = []
    monkeypatch.setattr(knobs.compilation, "listener",
                        lambda *, src, metadata, metadata_group, times, cache_hit: hits.append(cache_hit))
    assert measure.screen(point | {"candidate": candidate})["us"] > 0
    assert hits == [True]


@pytest.mark.parametrize("name", ["rmsnorm", "conv_update", "recurrent"])
def test_the_default_schedule_verifies(name):
    (spec, *_) = [one for one in families.get(name).committed() if one.dtype == "bf16"]
    case = cases.get(name)
    problem = case.problems(spec)[0]
    schedule = families.get(name).default(spec, devices.machine(), problem)
    candidate = [Variant(spec, schedule.source_key).name, schedule.warps, schedule.stages]
    found = measure.verify({"spec": spec.literal, "problem": list(problem), "candidate": candidate, "seed": 3})
    assert found["repeat"] == measure.REPEATS and found["err"] < 6e-3


def test_an_interrupted_sweep_goes_on(tmp_path):
    command = [sys.executable, SCRIPT, "--family", "rmsnorm", "--points", "8", "--limit", "4", "--budget", "100s", "-j", "4",
               "--out", tmp_path / "rows.jsonl", "--journal", tmp_path / "journal.jsonl"]
    environment = os.environ | {"KDAGEN_CACHE": str(tmp_path / "cache")}
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in first.stdout:
        lines.append(line)
        if line.startswith("1/8"):
            first.send_signal(signal.SIGINT)
            break
    rest, _ = first.communicate(timeout=60)
    assert first.returncode == 0, "".join(lines) + rest
    noted = (tmp_path / "journal.jsonl").read_text()
    before = [json.loads(line) for line in noted.splitlines()]
    began = time.monotonic()
    done = subprocess.run([*command, "--resume"], env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    after = (tmp_path / "journal.jsonl").read_text()
    assert after.startswith(noted)
    new = [json.loads(line) for line in after[len(noted):].splitlines()]
    points = {event["point"] for event in before + new if event["stage"] == "timed"}
    assert len(points) == 8 > len({event["point"] for event in before if event["stage"] == "timed"})
    done_by = lambda events: {(event["stage"], event["point"], event["candidate"]) for event in events}
    assert not done_by(new) & done_by(before), "measured twice"
    assert time.monotonic() - began < 100
    for row in table.read(tmp_path / "rows.jsonl"):
        assert row.repeat == 20 and row.env["sms"] == devices.machine().sms and not table.is_stale(row)

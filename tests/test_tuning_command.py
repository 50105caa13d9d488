"""The sweep's command without a GPU: space, dry run, options, journal, bars, Ray."""

import io
import json
import os
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from kdagen import devices, dispatch, families
from kdagen.errors import ArgumentError, UnknownName
from kdagen.spec import Problem, Schedule, Spec
from kdagen.tuning import command, space
from kdagen.tuning.journal import Journal
from kdagen.tuning.progress import Bars
from kdagen.tuning.workers import Failed


def run(*arguments):
    return CliRunner().invoke(command.main, list(arguments))


def test_a_dry_run_needs_no_gpu_and_says_why():
    result = run("--dry-run", "--family", "prefill_state", "--chunk-size", "64", "--points", "3")
    assert result.exit_code == 0, result.output
    assert "prefill_state__c64_k128_v128_bf16" in result.output
    assert "8192 tokens, 1 sequences, 32 heads" in result.output
    refused = [line for line in result.output.splitlines() if line.startswith("refused ")]
    target = devices.named("h200")
    reasons = [c.refused for c in space.candidates(SPEC, target, "3.6.0", limit=48) if c.refused]
    assert len(refused) == len(reasons)
    assert all(any(line.endswith(f": {reason}") for line in refused) for reason in reasons)


def test_a_dry_run_covers_every_family():
    result = run("--dry-run", "--points", "1")
    assert result.exit_code == 0
    for name in families.NAMES:
        assert f"{name}__" in result.output, name


def test_a_sweep_leaves_loads_next_to_a_more_wanted_one_out():
    target = devices.named("h200")
    plan = lambda every: command.plan(("recurrent",), None, ("bf16",), None, target, 0, 4, None, every)[0]
    kept, every = plan(False), plan(True)
    assert 0 < len(kept) < len(every) and set(kept) < set(every) and kept[0] == every[0]
    for point in every:
        near = [one for one in kept if one.spec == point.spec
                and max(abs(a - b) for a, b in zip(one.load, point.load)) <= dispatch.MAX_OCTAVES]
        assert near, f"{point.name} would find no row on {target.slug}"
    points = [space.Point(SPEC, Problem(64, 1, heads)) for heads in (8, 16, 12, 64)]
    assert space.spaced(points, (3, 0)) == points[:1] + points[3:], "8 and 64 heads are six octaves of squares apart"
    assert space.spaced(points, (-1, -1)) == points


@pytest.mark.parametrize("arguments, words", [
    (["--dry-run", "--family", "gate", "--budget", "20x"], "20m"),
    (["--family", "nobody", "--dry-run"], "nobody"), (["--budget", "soon"], "20m"),
    (["--chunk-size", "48", "--family", "prefill_state",
                                                                   "--dry-run"], "no committed Spec"),
    (["--device", "h500", "--dry-run"], "h500"), ([], "--dry-run"),
])
def test_refusals_name_the_next_step(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 1 and words in str(result.exception)


@pytest.mark.parametrize("text, value", [("90", 90), ("90s", 90), ("20m", 1200), ("1.5h", 5400)])
def test_budgets(text, value):
    assert command.seconds(text) == value


@pytest.mark.parametrize("text", ["", "m", "soon", "-3", "5d", "0"])
def test_odd_budgets(text):
    with pytest.raises(ArgumentError, match="20m"):
        command.seconds(text)


@pytest.mark.parametrize("gpus", ["", "a", "0,", "0;1"])
def test_odd_gpu_lists(gpus):
    with pytest.raises(ArgumentError, match="0,1"):
        command._runners(gpus, None)


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(command.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ArgumentError, match="indices below 2"):
        command._runners("0,2", None)


def test_a_worker_for_each_gpu_sees_that_one_alone(monkeypatch):
    monkeypatch.setattr(command.torch.cuda, "device_count", lambda: 4)
    assert [runner.env["CUDA_VISIBLE_DEVICES"] for runner in command._runners("0,3", None)] == ["0", "3"]


# The space

SPEC = Spec.make("prefill_state", chunk=64, k=128, v=128, dtype="bf16")


def test_candidates_are_seeded_and_begin_with_the_default():
    target = devices.named("h200")
    one, again, other = (space.candidates(SPEC, target, "3.6.0", seed=seed) for seed in (1, 1, 2))
    assert one == again != other
    assert sorted(c.schedule for c in one) == sorted(c.schedule for c in other)
    assert one[0].schedule == families.get("prefill_state").default(SPEC, target, None)
    assert len({c.schedule for c in one}) == len(one)


def test_candidates_most_like_a_default_come_first():
    made = space.candidates(SPEC, devices.named("h200"), "3.6.0")
    apart = [space.differences(c.schedule, made[0].schedule) for c in made]
    assert apart == sorted(apart) and apart[1] == 1 and apart[-1] > 2
    one = Schedule.make(bv=8, warps=4, stages=1)
    assert space.differences(one, Schedule.make(bv=16, warps=4, stages=2)) == 2
    assert space.differences(one, Schedule.make(bv=8, br=1, warps=2, stages=1, form="tma")) == 3


def test_the_limit_keeps_defaults():
    target = devices.named("h200")
    problems = [Problem(8192, 1, 4), Problem(8192, 8, 96)]
    defaults = {families.get("prefill_state").default(SPEC, target, p) for p in problems}
    kept = [c.schedule for c in space.candidates(SPEC, target, "3.6.0", problems=problems, limit=1) if not c.refused]
    assert defaults <= set(kept) and len(kept) <= len(defaults) + 1
    beyond = [c for c in space.candidates(SPEC, target, "3.6.0", limit=3) if c.refused and "beyond the limit" in c.refused]
    assert beyond


def test_quirks_refuse(monkeypatch):
    entry = {"family": "prefill_state", "arch": "sm90", "triton": ["3.6", "3.6"], "match": {"bv": 64}, "why": "hangs",
             "link": "u"}
    monkeypatch.setattr(space.quirks, "entries", lambda: (entry,))
    refused = [c for c in space.candidates(SPEC, devices.named("h200"), "3.6.0") if c.schedule.block["bv"] == 64]
    assert refused and all(c.refused for c in refused)


def test_points_take_turns():
    lists = [[space.Point(SPEC, Problem(t, s, 1)) for t in (64, 512, 4096, 32768)] for s in (1, 8)]
    order = space.in_turn(lists, stride=3)
    assert order == lists[0][:3] + lists[1][:3] + lists[0][3:] + lists[1][3:]
    assert space.in_turn([]) == []


def test_shapes_from_a_file(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text("[[8192, 1, 32], [64, 64, 12]]")
    assert space.read_problems(path) == [Problem(8192, 1, 32), Problem(64, 64, 12)]
    for text in ("{", "[[1, 2]]", "[[0, 1, 1]]", "[1]", '[["a", 1, 1]]'):
        path.write_text(text)
        with pytest.raises(ArgumentError, match="--shapes"):
            space.read_problems(path)
    path.write_text("[[100, 4, 2]]")
    result = run("--dry-run", "--family", "recurrent", "--shapes", str(path))
    assert "100 tokens, 4 sequences, 2 heads" in result.output


# The journal

def test_a_journal_survives_a_cut_line(tmp_path):
    path = tmp_path / "j.jsonl"
    journal = Journal(path)
    journal.note("screened", "p", "c", "h", us=1.0)
    journal.note("screened", "p", "c", "h", us=2.0)
    journal.note("verified", "p", "c", "h", failed="wrong")
    journal.close()
    path.write_text(path.read_text() + '{"stage": "timed", "po')
    again = Journal(path, resume=True)
    assert again.known("screened", "p", "c", "h")["us"] == 2.0
    assert again.known("screened", "p", "c", "other") is None and again.known("timed", "p", "c", "h") is None
    assert [event["failed"] for event in again.failures()] == ["wrong"]
    again.note("timed", "p", "c", "h", us=3.0)
    again.close()
    assert Journal(path, resume=True).known("timed", "p", "c", "h")["us"] == 3.0
    assert json.loads(path.read_text().splitlines()[-1])["us"] == 3.0


def test_without_resume_a_journal_begins_anew(tmp_path):
    Journal(tmp_path / "j").note("screened", "p", "c", "h", us=1.0)
    assert Journal(tmp_path / "j").known("screened", "p", "c", "h") is None


# Bars

def test_bars_print_a_line_a_point_where_there_is_no_terminal():
    out = io.StringIO()
    with Bars(100.0, Console(file=out, width=100)) as bars:
        bars.begin(4)
        bars.compiled(1, 3)
        bars.step("a", "screening 1 of 9")
        bars.finish("a", "10.0 us, 1.20x over the default")
    assert out.getvalue().startswith("1/4") and "a: 10.0 us, 1.20x over the default" in out.getvalue()
    assert "screening" not in out.getvalue()


def test_the_time_left_is_at_most_the_budget():
    bars = Bars(100.0, Console(file=io.StringIO()))
    bars.begin(1000)
    bars.start = time.monotonic() - 10
    bars.done = 1
    assert 85 < bars.left_s() <= 90
    bars.done = 999
    assert bars.left_s() < 1


# Ray

def test_ray_absent_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ArgumentError, match="kdagen\\[ray\\]"):
        command._runners("0", "auto")


def answer(job):
    if job == "raise":
        raise ValueError("no such block")
    if job == "crash":
        os._exit(7)
    if job == "hang":
        time.sleep(60)
    return {"us": job}


def test_jobs_as_ray_actors(monkeypatch):
    ray = pytest.importorskip("ray")
    from kdagen.tuning import on_ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False,
             runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(
                 filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))}})
    try:
        runner = on_ray.RayRunner("test_tuning_command:answer", gpus=0)
        assert runner.call(3, 60.0) == {"us": 3}
        assert runner.call("raise", 60.0) == Failed("error", "ValueError: no such block")
        assert runner.call("crash", 60.0).kind == "crash"
        assert runner.call(4, 60.0) == {"us": 4}
        assert runner.call("hang", 2.0).kind == "timeout"
        assert runner.call(5, 60.0) == {"us": 5}
        runner.stop()
        with pytest.raises(ArgumentError, match="without GPUs"):
            on_ray.runners(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


def test_unknown_families_have_no_case():
    with pytest.raises(UnknownName):
        command.cases.get("nobody")

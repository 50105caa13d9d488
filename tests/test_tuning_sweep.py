"""The whole sweep without a GPU: a stub answers the measuring jobs from a table of times, errors and crashes."""

import _thread
import json
import threading

import pytest
import toy_family
from toy_family import H200, install, spec, toy  # noqa: F401

from kdagen import dispatch, table
from kdagen.spec import Problem, Schedule, Spec
from kdagen.tuning import ahead as ahead_of
from kdagen.tuning import space
from kdagen.tuning.journal import Journal
from kdagen.tuning.space import Point
from kdagen.tuning.sweep import Settings, Sweep, environment
from kdagen.tuning.workers import Failed

pytestmark = pytest.mark.usefixtures("toy")

ENV = {"gpu": "stub", "arch": "sm90", "slug": "h200", "sms": 132, "triton": "3.6.0"}
DEFAULT = Schedule.make(bv=16, warps=2, stages=1)
PROBLEMS = [Problem(64, 1, 32), Problem(64, 1, 256), Problem(8192, 1, 32)]   # loads (5, 6), (8, 6), (5, 13)


class Stub:
    """A runner whose GPU is a function: ``time(schedule, problem) -> us``."""

    def __init__(self, time, *, wrong=(), crash=(), on_job=None):
        self.time, self.wrong, self.crash, self.on_job = time, wrong, crash, on_job
        self.jobs: list[tuple] = []
        self.stopped = False

    def schedule(self, wire):
        name, warps, stages = wire
        baked = table.parse(name).schedule
        return Schedule(baked.blocks, warps, stages, baked.form)

    def call(self, job, timeout_s):
        assert timeout_s > 0
        if job["do"] == "environment":
            return ENV | {"smem": H200.smem}
        problem = Problem(*job["problem"])
        wires = job.get("candidates") or [job["candidate"]]
        schedules = [self.schedule(wire) for wire in wires]
        self.jobs.append((job["do"], problem, tuple(schedules)))
        if self.on_job:
            self.on_job(self)
        if self.stopped:
            return Failed("crash", "the worker process died with exit code -9")
        if job["do"] == "plan":
            return [{"launches": [{"variant": wire[0], "kernel": "toy_kernel", "specialization": f"w{s.warps} s{s.stages}"}]}
                    for wire, s in zip(wires, schedules)]
        if any(s in self.crash for s in schedules):
            return Failed("crash", "the worker process died with exit code -11")
        if job["do"] == "screen":
            return {"us": self.time(schedules[0], problem) * 1.01}
        if job["do"] == "verify":
            if schedules[0] in self.wrong:
                return Failed("error", "Wrong: relative error 3.0e-01")
            return {"err": 1.5e-3, "repeat": 20}
        return {"times": [{"us": self.time(s, problem), "noise": 0.001} for s in schedules]}

    def stop(self):
        self.stopped = True

    def done(self, what):
        return [job for job in self.jobs if job[0] == what]


class StubCompiler:
    def __init__(self, fail=(), shared=1024):
        self.fail, self.shared, self.jobs, self.stopped = fail, shared, [], False

    def run(self, jobs):
        for job in jobs:
            self.jobs.append(job)
            if job["variant"] in self.fail:
                yield job, Failed("timeout", "outlasted its time limit")
            else:
                shared = self.shared(job) if callable(self.shared) else self.shared
                yield job, {"kernel": job["kernel"], "registers": 64, "stack": 0, "shared": shared}

    def stop(self):
        self.stopped = True


def plain(schedule, problem):
    """bv 64 with one warp is best at many heads, the default elsewhere; others in fixed, distinct order."""
    penalty = 1.0 + 0.001 * schedule.warps + 0.002 * schedule.stages + (0.5 if schedule.form else 0)
    best = 64 if problem.heads > 100 else 16
    return 10.0 * penalty * (1.0 if schedule.block["bv"] == best else 1.4)


def sweep_of(tmp_path, runners, *, compilers=None, resume=False, problems=PROBLEMS, seed=0, specs=None, **settings):
    candidates, lists = {}, []
    for one in specs or [spec()]:
        candidates[one.name] = space.candidates(one, H200, "3.6.0", seed=seed)
        lists.append(space.points_of(one, problems))
    return Sweep(space.in_turn(lists), candidates, H200, ENV, runners,
                 Journal(tmp_path / "journal.jsonl", resume=resume), tmp_path / "rows.jsonl",
                 Settings(**{"budget_s": 60.0, "seed": seed} | settings), compilers=compilers or [StubCompiler()])


def test_rows_where_tuning_gains_and_nowhere_else(tmp_path):
    stub = Stub(plain)
    sweep = sweep_of(tmp_path, [stub])
    rows = sweep.run()
    assert [(row.load, row.schedule.block["bv"], row.warps) for row in rows] == [((8, 6), 64, 1)]
    row = rows[0]
    assert row.us == pytest.approx(plain(row.schedule, PROBLEMS[1]), rel=1e-4)
    assert row.default_us == pytest.approx(plain(DEFAULT, PROBLEMS[1]), rel=1e-4)
    assert row.next_us >= row.us and row.err == 1.5e-3 and row.repeat == 20 and row.noise == 0.001
    assert row.env["slug"] == "h200" and not table.is_stale(row)
    assert table.read(tmp_path / "rows.jsonl") == rows
    kept = table.read(tmp_path / "rows.swept")
    assert [(one.load, one.schedule) for one in kept] == [((5, 6), DEFAULT), ((5, 13), DEFAULT)]
    usable = sum(c.refused is None for c in space.candidates(spec(), H200, "3.6.0"))
    assert {one.candidates for one in [*rows, *kept]} == {usable}
    assert all(0.98 * one.us < one.next_us < one.us for one in kept), "a warp less is faster there, but not by 2 %"
    assert stub.stopped and sweep.compilers[0].stopped
    assert sweep.regret()[spec().name] > 1.1


def test_refused_schedules_are_never_asked_for(tmp_path):
    stub = Stub(plain)
    sweep_of(tmp_path, [stub]).run()
    too_big = {c.schedule for c in space.candidates(spec(), H200, "3.6.0") if c.refused}
    assert too_big, "the toy's space has points that do not fit"
    asked = {schedule for _, _, schedules in stub.jobs for schedule in schedules}
    assert not asked & too_big


def test_a_wrong_schedule_never_becomes_a_row_however_fast(tmp_path):
    fast = Schedule.make(bv=8, warps=1, stages=1)
    stub = Stub(lambda s, p: 1.0 if s == fast else plain(s, p), wrong={fast})
    rows = sweep_of(tmp_path, [stub]).run()
    assert rows == [], "all within 10 % of a wrong result were tried, and it alone was that fast"
    journal = Journal(tmp_path / "journal.jsonl", resume=True)
    failed = [e for e in journal.failures() if e["stage"] == "verified"]
    assert failed and all("bv8:w1:s1" in e["candidate"] and "relative error" in e["failed"] for e in failed)


def test_a_crash_costs_one_candidate(tmp_path):
    crasher = Schedule.make(bv=64, warps=1, stages=1)
    stub = Stub(plain, crash={crasher})
    rows = sweep_of(tmp_path, [stub]).run()
    assert [row.schedule.block["bv"] for row in rows] == [64]
    assert rows[0].schedule != crasher
    events = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    crashes = [e for e in events if "died with exit code -11" in str(e.get("failed"))]
    assert {e["candidate"] for e in crashes} == {"toy__k128_v128_bf16__bv64:w1:s1"}


def test_what_does_not_compile_or_fit_is_not_measured(tmp_path):
    slow_to_compile = "toy__k128_v128_bf16__bv64"
    compiler = StubCompiler(fail={slow_to_compile}, shared=lambda job: 300_000 if "bv32" in job["variant"] else 1024)
    stub = Stub(plain)
    assert sweep_of(tmp_path, [stub], compilers=[compiler]).run() == []
    measured = {s.block["bv"] for do, _, schedules in stub.jobs if do != "plan" for s in schedules if not s.form}
    assert measured == {8, 16, 128}
    why = {e["failed"] for e in Journal(tmp_path / "journal.jsonl", resume=True).failures() if e["stage"] == "compiled"}
    assert any("outlasted" in w for w in why) and any("300000 B of shared memory" in w for w in why)
    assert len(compiler.jobs) == len({json.dumps(job) for job in compiler.jobs}), "nothing is compiled twice"


def test_incomplete_plans_are_planned_again_once_they_led_further(tmp_path):
    """An op of two kernels that stumbles after the first until that one is compiled; another that always stumbles."""
    class Stumbling(Stub):
        def call(self, job, timeout_s):
            answer = super().call(job, timeout_s)
            if job["do"] != "plan":
                return answer
            compiled = {(variant, kernel) for variant, kernel, _ in job["compiled"]}
            for wire, plan in zip(job["candidates"], answer):
                if "bv8" in wire[0]:
                    plan["incomplete"] = "AttributeError: 'NoneType' object has no attribute 'run'"
                elif (wire[0], "toy_kernel") in compiled:
                    plan["launches"] = [plan["launches"][0] | {"kernel": "second_kernel"}]
                else:
                    plan["incomplete"] = "AttributeError: 'NoneType' object has no attribute 'run'"
            return answer

    compiler, stub = StubCompiler(), Stumbling(plain)
    rows = sweep_of(tmp_path, [stub], compilers=[compiler]).run()
    assert rows and {job["kernel"] for job in compiler.jobs if "bv64" in job["variant"]} == {"toy_kernel", "second_kernel"}
    assert len(compiler.jobs) == len({json.dumps(job) for job in compiler.jobs})
    assert any(s.block["bv"] == 8 for _, _, (s,) in stub.done("screen")), "a real error shows where it is measured"


@pytest.mark.parametrize("after", [1, 4, 9, 30, 45, 60])
def test_an_interrupted_sweep_resumes_to_the_same_rows(tmp_path, after):
    whole = sweep_of(tmp_path / "whole", [Stub(plain)]).run()

    def interrupt(stub):
        if len(stub.jobs) == after:
            stub.interrupted = True
            _thread.interrupt_main()
            threading.Event().wait(0.3)

    first = Stub(plain, on_job=interrupt)
    sweep_of(tmp_path, [first]).run()
    assert first.interrupted and first.stopped
    known = (tmp_path / "journal.jsonl").read_text()
    assert "exit code -9" not in known, "a process that the sweep itself stopped is no candidate's failure"
    second = Stub(plain)
    assert sweep_of(tmp_path, [second], resume=True).run() == whole
    assert (tmp_path / "journal.jsonl").read_text().startswith(known), "the journal is kept"
    noted = {(e["stage"], e["point"], e["candidate"]) for e in map(json.loads, known.splitlines())}
    for do, stage in (("screen", "screened"), ("verify", "verified")):
        for _, problem, schedules in second.done(do):
            point = Point(spec(), problem).name
            candidate = space.Candidate(spec(), schedules[0]).name
            assert (stage, point, candidate) not in noted, "measured twice"
    third = Stub(plain)
    assert sweep_of(tmp_path, [third], resume=True).run() == whole
    assert third.jobs == [], "all is in the journal"


def test_without_resume_all_is_measured_anew(tmp_path):
    sweep_of(tmp_path, [Stub(plain)]).run()
    stub = Stub(plain)
    sweep_of(tmp_path, [stub]).run()
    assert stub.done("screen")


def test_a_changed_template_invalidates_the_journal(tmp_path, toy):  # noqa: F811
    sweep_of(tmp_path, [Stub(plain)]).run()
    template = toy.parent / "templates" / "toy.py.j2"
    template.write_text(template.read_text() + "# changed\n")
    toy_family.forget()
    stub = Stub(plain)
    sweep_of(tmp_path, [stub], resume=True).run()
    assert stub.done("screen") and all(not s.form for _, _, (s,) in stub.done("screen")), "the tma form did not change"


def test_the_same_seed_gives_the_same_order(tmp_path):
    jobs = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        stub = Stub(plain)
        sweep_of(tmp_path / name, [stub], seed=seed).run()
        jobs[name] = [job for job in stub.jobs if job[0] != "plan"]
    assert jobs["a"] == jobs["b"]
    assert jobs["a"] != jobs["c"]
    assert all(job[2][0] == DEFAULT for job in (jobs["a"][0], jobs["c"][0])), "the default comes first"


def test_the_budget_ends_a_sweep(tmp_path):
    stub = Stub(plain, on_job=lambda stub: threading.Event().wait(0.02))
    sweep = sweep_of(tmp_path, [stub], budget_s=0.6)
    sweep.run()
    measured = len(stub.jobs)
    assert 5 < measured < 60
    assert sweep_of(tmp_path, [Stub(plain)], resume=True).run() == sweep_of(tmp_path / "x", [Stub(plain)]).run()


def test_several_gpus_share_the_points(tmp_path):
    stubs = [Stub(plain, on_job=lambda stub: threading.Event().wait(0.001)) for _ in range(3)]
    rows = sweep_of(tmp_path, stubs, problems=[Problem(64, 1, 2**i) for i in range(10)]).run()
    alone = sweep_of(tmp_path / "alone", [Stub(plain)], problems=[Problem(64, 1, 2**i) for i in range(10)]).run()
    assert {row.key: row.schedule for row in rows} == {row.key: row.schedule for row in alone}
    assert sum(bool(stub.done("screen")) for stub in stubs) > 1
    points = [problem for stub in stubs for problem in {job[1] for job in stub.done("time")}]
    assert len(points) == len(set(points)) == 10, "each point is timed on one GPU"


def test_several_specs_and_compilers(tmp_path):
    """Specs prepared side by side are measured in the same order, with the same rows; planning runs only a little ahead."""
    specs = [spec(), Spec("toy", k=64, v=128, dtype="bf16"), Spec("toy", k=32, v=128, dtype="bf16")]
    problems = [Problem(64, 1, 2**i) for i in range(12)]
    jobs, rows = [], []
    for name, parts in (("one", 1), ("three", 3)):
        ahead: list[int] = []
        stub = Stub(plain, on_job=lambda stub, ahead=ahead: ahead.append(
            len({j[1] for j in stub.done("plan")} - {j[1] for j in stub.done("screen")})))
        compilers = [StubCompiler() for _ in range(parts)]
        sweep = sweep_of(tmp_path / name, [stub], compilers=compilers, problems=problems, specs=specs)
        rows.append(sweep.run())
        jobs.append([job for job in stub.jobs if job[0] != "plan"])
        assert max(ahead) <= ahead_of.LOOK_AHEAD + 1
        assert all(compiler.jobs and compiler.stopped for compiler in compilers)
    assert rows[0] == rows[1] and rows[0]
    assert jobs[0] == jobs[1]


def test_a_runner_that_does_not_start_is_an_error():
    class Dead(Stub):
        def call(self, job, timeout_s):
            return Failed("crash", "no driver")

    with pytest.raises(RuntimeError, match="no driver"):
        environment(Dead(plain))
    assert environment(Stub(plain)) == (H200, ENV)


def test_a_bug_in_the_sweep_is_raised_and_not_hidden(tmp_path):
    class Odd(Stub):
        def call(self, job, timeout_s):
            return super().call(job, timeout_s) if job["do"] != "screen" else "nonsense"

    with pytest.raises(TypeError):
        sweep_of(tmp_path, [Odd(plain)]).run()


def test_rows_merge_into_the_table_by_hysteresis(tmp_path):
    held = toy_family.row(Schedule.make(bv=64, warps=1, stages=2), load=(8, 6), us=10.02, default_us=14.0)
    far = toy_family.row(Schedule.make(bv=8, warps=1), load=(0, 0))
    table.write(tmp_path / "rows.jsonl", [held, far])
    sweep_of(tmp_path, [Stub(plain)]).run()
    assert table.read(tmp_path / "rows.jsonl") == sorted([held, far]), "0.2 % faster does not replace a row"


def test_the_tuned_table_is_what_dispatch_then_uses(tmp_path, toy):  # noqa: F811
    rows = sweep_of(tmp_path, [Stub(plain)]).run()
    install(toy, *rows)
    for problem in PROBLEMS:
        choice = dispatch.pick(spec(), problem, H200)
        best = min(plain(s.schedule, problem) for s in space.candidates(spec(), H200, "3.6.0") if not s.refused)
        assert plain(choice.schedule, problem) <= 1.05 * best


def test_far_behind_candidates_are_not_screened_everywhere(tmp_path):
    problems = [Problem(64, 1, 2**i) for i in range(8)]

    def steep(schedule, problem):
        return 10.0 if schedule.block["bv"] == 16 else 50.0

    stub = Stub(steep)
    sweep_of(tmp_path, [stub], problems=problems).run()
    by_point = {p: sum(job[1] == p for job in stub.done("screen")) for p in problems}
    everyone, near, far = (by_point[problems[i]] for i in (0, 2, 5))
    assert by_point[problems[1]] == everyone > near == by_point[problems[4]]
    assert far == everyone, "five octaves away from the evidence all are looked at again"

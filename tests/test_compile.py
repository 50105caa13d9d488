"""Every generated variant compiles for every target without a GPU, fits its device, and the reports are true."""

import json
import os
import subprocess
import sys

import pytest

from kdagen import devices, families, files, project
from kdagen.compile import Job, compile_many, default_jobs, launch_options
from kdagen.spec import Problem, Variant, parse

ALL = project.committed_set()
WORKERS = int(os.environ.get("KDAGEN_COMPILE_WORKERS", "1"))


PROBLEMS = [None, *(Problem(t, s, h) for t in (1, 64, 2048, 65536) for s in (1, 8, 256) for h in (1, 4, 12, 32, 96))]


def chosen_on(target: str) -> set[str]:
    """The committed variants that a default rule picks on this target for some load."""
    device = devices.named(target)
    return {Variant(spec, families.get(spec.family).default(spec, device, problem).source_key).name
            for spec in {variant.spec for variant in ALL} for problem in PROBLEMS}


@pytest.mark.slow
@pytest.mark.parametrize("target", devices.ARCHS)
@pytest.mark.parametrize("family", families.NAMES)
def test_generated_variants_compile_and_fit(family, target):
    jobs = default_jobs([v for v in ALL if v.spec.family == family], [target])
    reports = [report for found in compile_many(jobs, workers=WORKERS) for report in found]
    assert {r.error for r in reports} <= {""}
    chosen = chosen_on(target)
    for report in reports:
        assert report.fits(), f"{report.variant} needs {report.shared} B of shared memory on {target}"
        assert report.registers > 0 and report.shared >= 0
        cap = parse(report.variant).schedule.block.get("regs")
        assert not cap or report.registers <= cap, f"{report.variant}: not compiled with the options of its launch"
        if target == "sm90" and report.variant in chosen:
            assert report.stack == 0, f"{report.variant} {report.kernel} spills: {report.stack} B of stack"


def test_each_target_is_supported_by_some_schedule_of_every_committed_spec():
    """A form for one architecture must not be the only form of a Spec."""
    for target in map(devices.named, devices.ARCHS):
        for spec in {variant.spec for variant in ALL}:
            family = families.get(spec.family)
            schedule = family.default(spec, target)
            assert family.supports(spec, schedule, target) is None, (spec.name, target.arch)


def test_default_schedules_hold_every_default():
    """generated/ holds what `default` returns, for every target and many loads."""
    for spec in {variant.spec for variant in ALL}:
        family = families.get(spec.family)
        files_ = {schedule.source_key for schedule in family.default_schedules(spec)}
        for target in (None, *map(devices.named, devices.ARCHS)):
            for problem in PROBLEMS:
                assert family.default(spec, target, problem).source_key in files_, (spec.name, target, problem)


def test_a_compile_error_names_template_and_line(tmp_path, monkeypatch):
    """In this process: the interpreter must be off, so only the message is made here, from Triton's own error."""
    from triton.compiler.errors import CompilationError

    from kdagen import compile as compiling

    variant = ALL[0]
    text = (files.generated_dir() / variant.path).read_text().splitlines()
    jit = lambda i: text[i].startswith("def ") and text[i - 1].startswith(("@triton.jit", ")"))
    first = next(i for i in range(1, len(text)) if jit(i))
    source = "\n".join(text[first:first + 30])

    class Node:
        lineno, col_offset = 5, 4

    error = CompilationError(source, Node, "no such thing")
    message = compiling._explain(error, variant, files.generated_dir() / variant.path)
    assert f"generated/{variant.path}:{first + 5}" in message and "templates/" in message and "no such thing" in message


def test_timeouts_and_dead_workers_are_reported():
    variant = ALL[0]
    reports = list(compile_many([Job(variant, launch_options(variant), "sm90")], workers=1, timeout=0.0))
    assert "not compiled within" in reports[0][0].error


def test_fits_compares_with_known_devices():
    from kdagen.compile import Report

    report = Report("v", "k", "", "sm90", 4, 1, shared=200_000)
    assert "h200" in report.fits()
    assert Report("v", "k", "", "sm90", 4, 1, shared=300_000).fits() == []
    assert Report("v", "k", "", "sm80", 4, 1, shared=200_000).fits() == []


def schedule_of(name: str, target: str):
    return launch_options(parse(name), devices.named(target))


@pytest.mark.parametrize("target", devices.ARCHS)
def test_what_is_compiled_is_what_dispatch_picks(target):
    """A default rule's own warps and stages on this target, and nothing that the family refuses there."""
    left_out = []
    jobs = default_jobs(ALL, [target], left_out)
    assert {job.variant for job in jobs} | {one.variant for one in left_out} == set(ALL)
    assert all(one.reason and one.target == target for one in left_out)
    device = devices.named(target)
    for job in jobs:
        family = families.get(job.variant.spec.family)
        picked = {family.default(job.variant.spec, device, problem) for problem in PROBLEMS}
        picked = {one for one in picked if one.source_key == job.variant.schedule}
        assert family.supports(job.variant.spec, job.schedule, device) is None
        assert job.schedule in picked or not picked, (job, picked)


def test_an_unlisted_variant_is_compiled_with_a_launch_that_fits():
    wide = schedule_of("prefill_state__c64_k256_v256_bf16__bv128", "sm90")
    assert wide.warps == 8, "128 x 256 fp32 do not fit four warps"
    assert schedule_of("prefill_state__c64_k128_v128_bf16__bv128", "sm90").stages == 3, "as many as fit"
    left_out = []
    assert default_jobs([parse("prefill_segments__c64_k128_v128_bf16__tma_bm64")], ["sm80"], left_out) == []
    assert left_out[0].reason == "the tma form is for sm90, not sm80"


def test_reports_are_those_of_the_launch():
    """Shared memory on AMD too; combine's own stages; each of the kernels of one name told apart."""
    jobs = default_jobs([parse("prefill_segments__c64_k128_v128_bf16__bm64"),
                         parse("prefill_state__c64_k128_v128_bf16__bv64")], ["gfx942"])
    of_segments, of_state = compile_many(jobs, workers=1)
    assert [(r.kernel, r.stages, r.error) for r in of_segments] == [("map_kernel", 1, ""), ("combine_kernel", 1, "")]
    assert all(0 < r.shared <= 65536 and r.fits() == ["mi300x"] for r in of_segments + of_state)
    assert [r.case for r in of_state] == ["plain", "pool", "inner"]


def test_kernels_of_one_name_are_told_apart():
    from kdagen.compile import _case

    for variant in ALL:
        kernels = families.get(variant.spec.family).kernels(variant.spec, variant.schedule)
        shown = [(kernel.name, _case(kernel, kernels)) for kernel in kernels]
        assert len(set(shown)) == len(shown), (variant.name, shown)


NEWEST = "3.9.0"


@pytest.mark.slow
def test_the_newest_triton_compiles_too(tmp_path):
    """The generated set with the newest supported Triton, for one target of each vendor; the suite's own is the oldest."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    fetched = subprocess.run([*pip, "--target", str(site), f"triton=={NEWEST}"], capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"no triton {NEWEST} from this package index: {fetched.stderr.strip().splitlines()[-1]}")
    code = "import sys; from kdagen.cli import main; main(sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": str(site), "KDAGEN_CACHE": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code, "compile", "--target", "sm90,gfx942", "-j", "1", "--json"],
                          capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads(done.stdout)
    assert {row["target"] for row in rows} == {"sm90", "gfx942"}
    assert {row["variant"] for row in rows} == {variant.name for variant in ALL}

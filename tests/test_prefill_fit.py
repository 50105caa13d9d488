"""The prefill families' schedules fit the devices' shared memory, or are refused with the numbers."""

from __future__ import annotations

from itertools import product

import pytest

from kdagen import devices, families
from kdagen.compile import Job, compile_many
from kdagen.spec import CHUNKS, Problem, Schedule, Spec, Variant

FAMILIES = ("prefill_prepare", "prefill_state", "prefill_segments")
HEADS = ((16, 16), (64, 64), (100, 60), (128, 128), (192, 128), (128, 256), (256, 16), (256, 256))
LOADS = (None, Problem(8192, 1, 1), Problem(8192, 1, 128))


def specs(name):
    for chunk, (k, v), dtype in product(CHUNKS, HEADS, ("bf16", "fp16", "fp32")):
        yield Spec.make(name, chunk=chunk, k=k, v=v, dtype=dtype)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_default_fits_or_its_refusal_has_the_numbers(name):
    """Refused are chunk 128 and K = 256, in wide tiles, on the device with the least shared memory; nothing elsewhere."""
    family, refused = families.get(name), []
    for spec, target, load in product(specs(name), map(devices.named, devices.ARCHS), LOADS):
        reason = family.supports(spec, family.default(spec, target, load), target)
        if reason:
            assert str(target.smem) in reason and target.slug in reason, reason
            assert target.slug == "mi300x" and (spec.chunk == 128 or spec.k > 128), (spec.name, target.slug, reason)
            refused.append(spec)
        else:
            assert family.default(spec, target, load) in family.default_schedules(spec) or load is not None
    assert not [spec for spec in refused if spec.dtype != "fp32" and (spec.chunk < 128 or spec.k <= 128)]


@pytest.mark.parametrize(("name", "wanted"), [
    ("prefill_prepare", Schedule.make(form="gluon", warps=4)),
    ("prefill_state", Schedule.make(form="gluon", bv=64, stages=3)),
    ("prefill_segments", Schedule.make(form="tma", bm=64, stages=3)),
])
def test_the_defaults_of_serving_on_sm90(name, wanted):
    spec = Spec.make(name, chunk=64, k=128, v=128, dtype="bf16")
    assert families.get(name).default(spec, devices.named("sm90")) == wanted


@pytest.mark.parametrize(("name", "sizes", "blocks", "need"), [
    ("prefill_prepare", (128, 128, 128, "fp32"), {"bk": 32}, 131072),
    ("prefill_state", (128, 256, 128, "bf16"), {"bv": 32}, 81920),
    ("prefill_state", (128, 256, 128, "fp32"), {"bv": 32}, 163840),
    ("prefill_state", (128, 100, 128, "fp32"), {"bv": 64}, 98304),
])
def test_one_stage_counts_too(name, sizes, blocks, need):
    """What Triton 3.6 allocates for gfx942 of schedules that were defaults once."""
    spec = Spec.make(name, **dict(zip(("chunk", "k", "v", "dtype"), sizes)))
    schedule = Schedule.make(warps=8 if name == "prefill_prepare" else 4, **blocks)
    assert f"{need} bytes" in families.get(name).supports(spec, schedule, devices.named("mi300x"))
    assert families.get(name).supports(spec, schedule, devices.named("h200")) is None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target", "sizes"), [
    ("prefill_prepare", "gfx942", (64, 128, 128, "bf16")), ("prefill_prepare", "sm80", (32, 256, 256, "fp32")),
    ("prefill_state", "gfx942", (64, 128, 128, "fp32")), ("prefill_state", "sm80", (32, 256, 256, "bf16")),
    ("prefill_segments", "gfx942", (64, 128, 128, "bf16")), ("prefill_segments", "sm80", (64, 256, 256, "bf16")),
])
def test_no_default_needs_more_than_is_counted(name, target, sizes):
    """The compiler's own numbers, for some defaults on the devices with the least shared memory."""
    family, spec = families.get(name), Spec.make(name, **dict(zip(("chunk", "k", "v", "dtype"), sizes)))
    schedule = family.default(spec, devices.named(target), LOADS[-1])
    assert family.supports(spec, schedule, devices.named(target)) is None
    (reports,) = compile_many([Job(Variant(spec, schedule.source_key), schedule, target)], workers=1)
    for report in reports:
        assert not report.error and report.fits(), (report.variant, report.kernel, report.shared, report.error)

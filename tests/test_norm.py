"""The gated RMSNorm op: kernels in the interpreter and the CPU path against the oracle; strides, refusals."""

from __future__ import annotations

import pytest
import torch

from inputs import relative, sliced
from kdagen import families
from kdagen import reference as R
from kdagen.errors import ArgumentError, ArgumentTypeError
from kdagen.families.base import next_power_of_2
from kdagen.ops.norm import gated_rmsnorm
from kdagen.spec import Problem, Spec

TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4}  # rounding of the output: 2^-24, 2^-11, and the reciprocal root


@pytest.fixture(params=["interpreter", "cpu"])
def path(request, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if request.param == "interpreter" else "0")
    if request.param == "interpreter" and torch.cuda.is_available():
        pytest.skip("Triton was imported for the GPU")


def tensors(rng, *shape, dtype=torch.float32):
    o, z = ((torch.randn(*shape, generator=rng) * 3).to(dtype) for _ in range(2))
    return o, z, torch.randn(shape[-1], generator=rng)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(16,), (5, 128), (1, 7, 3, 128), (2, 3, 2, 60), (3, 700), (1, 1, 1, 1)])
def test_against_the_oracle(rng, path, shape, dtype):
    o, z, weight = tensors(rng, *shape, dtype=dtype)
    out = torch.full(shape, float("nan"), dtype=dtype)
    assert gated_rmsnorm(o, z, weight, eps=1e-3, out=out) is out
    assert relative(out, R.gated_rmsnorm(o, z, weight, 1e-3)) < TOLERANCE[dtype]
    assert gated_rmsnorm(o, z, weight.to(dtype)).dtype == dtype


def test_small_rows_feel_eps(rng, path):
    o, z, weight = tensors(rng, 4, 32)
    o = o * torch.tensor([1e-4, 1e-2, 0.0, 1e10])[:, None]
    out = gated_rmsnorm(o, z, weight)
    assert relative(out, R.gated_rmsnorm(o, z, weight, 1e-5)) < 1e-6
    assert not out[2].any()
    assert relative(out, R.gated_rmsnorm(o, z, weight, 0.0).nan_to_num(0.0)) > 0.1


def test_slices_in_place_and_mixed_dtypes(rng, path):
    o, z, weight = tensors(rng, 2, 5, 3, 20)
    want = gated_rmsnorm(o, z.half().float(), weight)
    wide = sliced(rng, o)
    got = gated_rmsnorm(wide, sliced(rng, z.half()), weight, out=wide)
    assert got is wide and torch.equal(got, want)
    turned = o.transpose(1, 2).contiguous().transpose(1, 2)  # heads outside tokens, B = 1 of them walked by one stride
    assert torch.equal(gated_rmsnorm(turned[:1], z[:1].half(), weight), want[:1])
    assert gated_rmsnorm(o, z, weight, out=torch.empty(o.shape, dtype=torch.float16)).dtype == torch.float16


def test_no_rows(rng, path):
    o, z, weight = tensors(rng, 0, 3, 8)
    assert gated_rmsnorm(o, z, weight).shape == (0, 3, 8)


def test_compiles_into_one_graph(rng, path):
    o, z, weight = tensors(rng, 4, 2, 16)
    layer = lambda o, z: gated_rmsnorm(o + 1, z, weight) * 2
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(o, z), layer(o, z))


REFUSALS = {
    "z": (lambda x: x | {"z": x["z"][:3]}, r"z: got shape \[3, 2, 16\], expected shape \[4, 2, 16\]"),
    "weight": (lambda x: x | {"weight": torch.ones(15)}, r"weight: got shape \[15\], expected shape \[16\]"),
    "dtype": (lambda x: x | {"o": x["o"].double()}, r"o: got torch.float64"),
    "across V": (lambda x: x | {"o": torch.zeros(4, 16, 2).transpose(1, 2)}, r"o: got strides"),
    "out": (lambda x: x | {"out": torch.zeros(4, 2, 8)}, r"out: got shape"),
    "device": (lambda x: x | {"weight": torch.ones(16, device="meta")}, r"weight: got a tensor on meta"),
    "scalar": (lambda x: x | {"o": torch.zeros(())}, r"o: got a scalar"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_argument(rng, case):
    change, message = REFUSALS[case]
    o, z, weight = tensors(rng, 4, 2, 16)
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        gated_rmsnorm(**change(dict(o=o, z=z, weight=weight)))


def test_dimensions_without_one_stride_are_refused(rng, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("Triton was imported for the GPU")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    o, z, weight = tensors(rng, 3, 4, 2, 8)
    with pytest.raises(ArgumentError, match=r"o: got strides .*contiguous"):
        gated_rmsnorm(o.transpose(0, 1), z.transpose(0, 1), weight, out=torch.empty(4, 3, 2, 8))


def test_unknown_keyword(rng):
    with pytest.raises(TypeError, match="activation"):
        gated_rmsnorm(*tensors(rng, 2, 8), activation="silu")


def test_every_default_is_supported_and_announced():
    family = families.get("rmsnorm")
    for v in (1, 20, 64, 128, 200, 512, 1000, 4096):
        spec = Spec.make("rmsnorm", v=v, dtype="bf16")
        for problem in (None, Problem(1, 1, 1), Problem(1 << 20, 1, 32)):
            schedule = family.default(spec, None, problem)
            assert family.supports(spec, schedule, None) is None
            assert schedule in family.default_schedules(spec)
    assert "1..4096" in family.supports(Spec.make("rmsnorm", v=8192, dtype="bf16"), schedule, None)


def test_all_schedules_sum_a_row_in_the_same_order():
    """Which one runs depends on the batch, a row's bits must not. The interpreter cannot see it: the rule is held here."""
    family = families.get("rmsnorm")
    for v, dtype in ((128, "bf16"), (128, "fp32"), (16, "fp16"), (700, "bf16"), (4096, "fp32")):
        spec = Spec.make("rmsnorm", v=v, dtype=dtype)
        default = family.default(spec)
        allowed = [s for s in (*family.candidates(spec), default) if family.supports(spec, s, None) is None]
        assert {s.warps for s in allowed} == {default.warps}
        size = next_power_of_2(v) * (4 if dtype == "fp32" else 2)
        assert min(s.block["br"] * size / (32 * s.warps) for s in allowed) >= 16 and default in allowed

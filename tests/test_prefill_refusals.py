"""What chunk_kda refuses, and what its families and constants promise."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from inputs import cu_seqlens, kda, relative
from kdagen import devices, families
from kdagen import reference as R
from kdagen.errors import ArgumentError, ArgumentTypeError, Unsupported
from kdagen.families.prefill_prepare import LOG2_TERMS
from kdagen.ops.decode import fused_recurrent_kda
from kdagen.ops.metadata import step_tables
from kdagen.ops.prefill import chunk_kda
from kdagen.spec import Schedule, Spec


@pytest.fixture
def call(rng):
    tensors, options = kda(rng, "bounded", T=20, H=2, HV=4, K=16, V=32)

    def run(**changes):
        kept = {**tensors, **options} | changes
        return chunk_kda(**{"chunk_size": 16} | {name: value for name, value in kept.items() if value is not ...})

    run.tensors = tensors
    return run


def packed(edges, chunk_size):
    """One sequence of 20 tokens, with the tables of other boundaries."""
    tables = step_tables(torch.tensor(edges), torch.tensor(edges), chunk_size=chunk_size, rows=True)
    return {"cu_seqlens": torch.tensor([0, 20]), "tables": tables}


@pytest.mark.parametrize(("changes", "kind", "words"), [
    (lambda t: {"g": t["g"][..., 0]}, ArgumentError, ["g", "[1, 20, 4]", "[1, 20, 4, 16]"]),
    (lambda t: {"beta": t["beta"][..., None]}, ArgumentError, ["beta", "[1, 20, 4, 1]", "[1, 20, 4]"]),
    (lambda t: {"v": t["v"][:, :, :3]}, ArgumentError, ["v", "3 value heads", "multiple of the 2"]),
    (lambda t: {"k": t["k"].half()}, ArgumentTypeError, ["k", "float16", "float32"]),
    (lambda t: {"q": t["q"].transpose(-1, -2).contiguous().transpose(-1, -2)}, ArgumentError, ["q", "stride 1"]),
    (lambda t: {"lower_bound": -6.0}, ArgumentError, ["lower_bound", "-6.0", "[-5.0, 0)"]),
    (lambda t: {"lower_bound": 1.0}, ArgumentError, ["lower_bound", "negative"]),
    (lambda t: {"lower_bound": None, "A_log": None}, ArgumentError, ["A_log", "softplus"]),
    (lambda t: {"use_gate_in_kernel": False}, ArgumentError, ["A_log", "use_gate_in_kernel=True"]),
    (lambda t: {"initial_state": t["initial_state"].transpose(-1, -2)}, ArgumentError, ["initial_state", "[1, 4, 32, 16]"]),
    (lambda t: {"cu_seqlens": torch.tensor([0, 10, 5, 20], dtype=torch.int32)}, ArgumentError, ["cu_seqlens", "decrease"]),
    (lambda t: {"cu_seqlens": torch.tensor([0, 19], dtype=torch.int32)}, ArgumentError, ["cu_seqlens", "20"]),
    (lambda t: {"cu_seqlens": torch.tensor([0.0, 20.0])}, ArgumentTypeError, ["cu_seqlens", "float32", "int32"]),
    (lambda t: {"read_slots": torch.zeros(1, dtype=torch.int32), "initial_state": ...}, ArgumentError,
     ["state_pool", "read_slots"]),
    (lambda t: {"state_pool": torch.zeros(4, 4, 32, 16)}, ArgumentError, ["state_pool", "slots"]),
    (lambda t: {"out": torch.zeros(1, 20, 4, 31)}, ArgumentError, ["out", "[1, 20, 4, 32]"]),
    (lambda t: {"checkpoint_offsets": torch.zeros(1, dtype=torch.int32)}, ArgumentError,
     ["checkpoint_offsets", "checkpoint_slots"]),
    (lambda t: {"cu_seqlens_cpu": torch.tensor([0, 20])}, ArgumentError, ["cu_seqlens_cpu", "cu_seqlens"]),
    (lambda t: packed([0, 20], chunk_size=32), ArgumentError, ["tables", "chunks of 32", "chunks of 16"]),
    (lambda t: packed([0, 10, 20], chunk_size=16), ArgumentError, ["tables", "2 sequences", "1 sequences"]),
])
def test_refusals_name_argument_and_expectation(call, changes, kind, words):
    with pytest.raises(kind) as error:
        call(**changes(call.tensors))
    assert str(error.value).startswith(words[0]) and all(word in str(error.value) for word in words), str(error.value)


HOSTS = {  # what is given as cu_seqlens_cpu -> (value, error, words)
    "floats": (torch.tensor([0.0, 10.0, 20.0]), ArgumentTypeError, "torch.float32"),
    "another N": (torch.tensor([0, 20]), ArgumentError, "shape [2]"),
    "none": (torch.zeros(0, dtype=torch.int32), ArgumentError, "shape [0]"),
    "decreasing": (torch.tensor([0, 30, 20]), ArgumentError, "decrease"),
    "too short": (torch.tensor([0, 10, 19]), ArgumentError, "T = 20"),
    "another device": (torch.empty(3, dtype=torch.int64, device="meta"), ArgumentTypeError, "meta"),
    "a list": ([0, 10, 20], ArgumentTypeError, "a list"),
    "an array": (np.array([0, 10, 20]), ArgumentTypeError, "a ndarray"),
}


@pytest.mark.parametrize("path", ["interpreter", "cpu"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "tables"])
@pytest.mark.parametrize("name", HOSTS)
def test_host_boundaries_are_refused_on_both_paths(call, name, beside, path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if path == "interpreter" else "0")
    host, kind, words = HOSTS[name]
    edges = torch.tensor([0, 10, 20])
    tables = step_tables(edges, edges, chunk_size=16, rows=True) if beside else None
    if beside and name == "decreasing":
        pytest.skip("beside tables only the ends are looked at")
    with pytest.raises(kind) as error:
        call(cu_seqlens=edges, cu_seqlens_cpu=host, tables=tables, initial_state=None)
    assert str(error.value).startswith("cu_seqlens_cpu: got ") and words in str(error.value), str(error.value)


@pytest.mark.parametrize("path", ["interpreter", "cpu"])
@pytest.mark.parametrize(("changes", "kind", "words"), [
    ({"lower_bound": "5"}, ArgumentTypeError, "lower_bound: got '5', expected a number"),
    ({"scale": "x"}, ArgumentTypeError, "scale: got 'x', expected a number"),
    ({"scale": torch.ones(())}, ArgumentTypeError, "scale: got a Tensor, expected a number"),
    ({"chunk_size": 64.0}, ArgumentError, "chunk_size: got 64.0, expected one of 16, 32, 64, 128"),
    ({"cu_seqlens": [0, 20]}, ArgumentTypeError, "cu_seqlens: got a list, expected a torch.Tensor"),
    ({"cu_seqlens": np.array([0, 20])}, ArgumentTypeError, "cu_seqlens: got a ndarray, expected a torch.Tensor"),
    ({"cu_seqlens": torch.tensor([0, 20]), "tables": {}}, ArgumentTypeError, "tables: got a dict, expected the StepTables"),
    ({"has_initial_state": 1}, ArgumentTypeError, "has_initial_state: got an int, expected a torch.Tensor"),
    ({"has_initial_state": [True]}, ArgumentTypeError, "has_initial_state: got a list, expected a torch.Tensor"),
    ({"max_workspace": 0}, ArgumentError, "max_workspace: got 0, expected a number of bytes"),
    ({"max_workspace": -5}, ArgumentError, "max_workspace: got -5"),
    ({"q": torch.zeros(1, 20, 16)}, ArgumentError, "q: got shape [1, 20, 16], expected shape [B, T, H, K]"),
    ({"v": torch.zeros(1, 20, 16)}, ArgumentError, "v: got shape [1, 20, 16], expected shape [B, T, HV, V]"),
])
def test_arguments_of_another_kind(call, changes, kind, words, path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if path == "interpreter" else "0")
    with pytest.raises(kind) as error:
        call(**changes)
    assert str(error.value).startswith(words), str(error.value)


@pytest.mark.parametrize("path", ["interpreter", "cpu"])
@pytest.mark.parametrize(("sizes", "words"), [(dict(K=257), "q: got K = 257, expected K from 1 to 256"),
                                              (dict(K=16, V=300), "v: got V = 300, expected V from 1 to 256")])
def test_head_dims_past_the_kernels_are_refused_on_both_paths(rng, sizes, words, path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if path == "interpreter" else "0")
    tensors, options = kda(rng, "bounded", T=3, H=1, **sizes)
    for op in (chunk_kda, fused_recurrent_kda):
        with pytest.raises(Unsupported) as error:
            op(**tensors, **options)
        assert str(error.value) == words


@pytest.mark.parametrize("path", ["interpreter", "cpu"])
def test_no_result_requires_a_gradient(rng, path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if path == "interpreter" else "0")
    tensors, options = kda(rng, "bounded", T=5, H=1, K=16)
    tensors["q"].requires_grad_()
    for op in (chunk_kda, fused_recurrent_kda):
        o, final = op(**tensors, **options, output_final_state=True)
        assert not o.requires_grad and not final.requires_grad


def test_a_batch_stride_that_is_not_a_whole_number_of_rows_is_refused(rng):
    tensors, options = kda(rng, "bounded", B=2, T=20, H=1, K=16)
    tensors["q"] = torch.cat([tensors["q"], tensors["q"]], 1)[:, :20]
    with pytest.raises(ArgumentError, match="q: got strides"):
        chunk_kda(**tensors, **options, chunk_size=16)


def test_chunk_size_and_unknown_keywords(call):
    with pytest.raises(ArgumentError, match="chunk_size"):
        chunk_kda(**{x: t for x, t in call.tensors.items()}, chunk_size=48)
    with pytest.raises(TypeError, match="safe_gate"):
        call(safe_gate=True)
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in inspect.signature(chunk_kda).parameters.values())


def test_bf16_is_refused_by_the_interpreter_and_right_on_the_cpu_path(rng, cpu_path, monkeypatch):
    tensors, options = kda(rng, "bounded", T=40, H=1, K=16, dtype=torch.bfloat16)
    edges = cu_seqlens([15, 25])
    tensors["initial_state"] = torch.cat([tensors["initial_state"]] * 2)
    found = chunk_kda(**tensors, **options, cu_seqlens=edges, output_final_state=True, chunk_size=16)
    wanted = R.recurrent_kda(**tensors, **options, cu_seqlens=edges, output_final_state=True)
    assert relative(found[0], wanted[0]) < 4e-3 and relative(found[1], wanted[1]) < 1e-5  # o is rounded to bf16: 2^-9
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ArgumentTypeError, match="bfloat16"):
        chunk_kda(**tensors, **options, cu_seqlens=edges, chunk_size=16)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_in_one_graph(rng, cpu_path, packed):
    tensors, options = kda(rng, "bounded", T=20, H=1, K=16, sequences=2 if packed else 1)
    if packed:
        options |= dict(cu_seqlens=cu_seqlens([13, 7]), cu_seqlens_cpu=cu_seqlens([13, 7]))
    call = lambda t: chunk_kda(**t, **options, output_final_state=True, chunk_size=16)
    for found, wanted in zip(torch.compile(call, fullgraph=True, backend="aot_eager")(tensors), call(tensors)):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("degree", "error"), [(4, 6e-5), (8, 1e-7)])
def test_the_polynomial_of_the_softplus_gate(degree, error):
    t = torch.linspace(0, 1, 10001, dtype=torch.float64)[1:]
    found = sum(c * t ** (i + 1) for i, c in enumerate(LOG2_TERMS[degree]))
    assert float((found / torch.log1p(t) * math.log(2) - 1).abs().max()) < error


@pytest.mark.parametrize("name", ["prefill_prepare", "prefill_state", "prefill_segments"])
def test_defaults_are_supported_everywhere(name):
    """For every dtype, chunk size, head dim and device: the default fits, or the reason is about memory."""
    family = families.get(name)
    for dtype in ("bf16", "fp16", "fp32"):
        for chunk in (16, 32, 64, 128):
            for k, v in ((16, 16), (64, 128), (128, 128), (100, 60), (256, 256), (256, 64), (1, 8)):
                spec = Spec.make(name, chunk=chunk, k=k, v=v, dtype=dtype)
                assert family.supports(spec, family.default(spec), None) is None
                for arch in devices.ARCHS:
                    schedule = family.default(spec, devices.named(arch))
                    reason = family.supports(spec, schedule, devices.named(arch))
                    assert reason is None or "bytes" in reason, (spec.name, arch, reason)


def test_limits_say_why():
    prepare, state = families.get("prefill_prepare"), families.get("prefill_state")
    spec = Spec.make("prefill_prepare", chunk=64, k=128, v=128, dtype="bf16")
    for chunk, k, number in ((48, 128, "48"), (64, 300, "300")):
        odd = Spec.make("prefill_prepare", chunk=chunk, k=k, v=128, dtype="bf16")
        assert number in prepare.supports(odd, Schedule.make(bk=64), None)
    assert "bk 48" in prepare.supports(spec, Schedule.make(bk=48), None)
    wide = Spec.make("prefill_state", chunk=64, k=128, v=128, dtype="bf16")
    assert "stages" in state.supports(wide, Schedule.make(bv=64, stages=4), devices.named("a100"))


def test_the_environment_makes_calls_batch_invariant():
    code = "from kdagen.ops import prefill; print(prefill.BATCH_INVARIANT)"
    for value, wanted in (("1", "True"), ("0", "False")):
        done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"KDAGEN_BATCH_INVARIANT": value}, text=True,
                              capture_output=True, check=True)
        assert done.stdout.strip() == wanted

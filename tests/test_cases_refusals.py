"""Every public op refuses every wrong kind of argument, before it writes: shape, dtype, device, keyword, boundaries.

The calls are those of cases.py, each with one argument changed.
"""

from __future__ import annotations

import inspect

import cases
import pytest
import torch

import kdagen
from inputs import cu_seqlens, kda
from kdagen import compat, devices, families, serving
from kdagen.compat import fla, vllm
from kdagen.errors import ArgumentError, ArgumentTypeError, KdagenError
from kdagen.spec import Schedule

OPS = sorted({name.split(",")[0] for name in cases.CALLS})


def tensors_of(name: str) -> list[str]:
    call = cases.CALLS[name][1](torch.Generator().manual_seed(0))
    return [argument for argument, value in call.items() if isinstance(value, torch.Tensor)]


EACH_TENSOR = [(name, argument) for name in cases.CALLS for argument in tensors_of(name)]


def refused(name, rng, argument, value, kind=KdagenError):
    """The message; the op raised ``kind`` and wrote nothing."""
    op, make = cases.CALLS[name]
    call = make(rng) | {argument: value}
    kept = {key: tensor for key, tensor in cases.written(call).items() if key != argument}
    before = {key: tensor.clone() for key, tensor in kept.items()}
    with pytest.raises(kind) as caught:
        op(**call)
    assert isinstance(caught.value, KdagenError) and "expected" in str(caught.value), str(caught.value)
    for key, tensor in kept.items():
        torch.testing.assert_close(tensor, before[key], rtol=0, atol=0, equal_nan=True)
    return str(caught.value)


def test_the_calls_cover_every_public_op():
    ops = {name for name in kdagen.__all__ if kdagen._PUBLIC[name].startswith("ops.")}
    assert set(OPS) == ops


@pytest.mark.parametrize("name", cases.CALLS)
def test_the_unchanged_call_is_right_to_refuse_nothing(name, rng):
    op, make = cases.CALLS[name]
    op(**make(rng))


@pytest.mark.parametrize("name, argument", EACH_TENSOR)
def test_each_tensor_of_another_rank(name, argument, rng):
    value = cases.CALLS[name][1](rng)[argument]
    message = refused(name, rng, argument, value[None, None, None], ArgumentError)
    assert "shape" in message or "dimension" in message or "columns" in message, message


@pytest.mark.parametrize("name, argument", EACH_TENSOR)
def test_each_tensor_of_another_dtype(name, argument, rng):
    """Integers where floats belong, floats where integers or booleans do."""
    value = cases.CALLS[name][1](rng)[argument]
    other = value.nan_to_num().to(torch.int16) if value.is_floating_point() else value.float()
    message = refused(name, rng, argument, other, ArgumentTypeError)
    assert message.startswith((argument, f"query_start_loc: {argument}")) and str(other.dtype) in message, message


# the device of cu_seqlens says where the tables go: no other argument can contradict it
DEVICES = [(name, argument) for name, argument in EACH_TENSOR
           if (name, argument) not in (("prepare_chunk_metadata_device", "cu_seqlens"), ("step_tables", "cu_seqlens"))]


@pytest.mark.parametrize("name, argument", DEVICES)
def test_each_tensor_on_another_device(name, argument, rng):
    value = cases.CALLS[name][1](rng)[argument]
    message = refused(name, rng, argument, value.to("meta"), ArgumentTypeError)
    assert "meta" in message, message


@pytest.mark.parametrize("name", cases.CALLS)
def test_unknown_and_renamed_keywords(name, rng):
    op, make = cases.CALLS[name]
    assert all(p.kind is not p.VAR_KEYWORD for p in inspect.signature(op).parameters.values())
    for word in ("head_first", "initial_states", "ssm_state_indices", "safe_gate", "lengths"):
        call = make(rng)
        before = {key: tensor.clone() for key, tensor in cases.written(call).items()}
        with pytest.raises(TypeError, match=word):
            op(**call, **{word: None})
        for key, tensor in cases.written(call).items():
            torch.testing.assert_close(tensor, before[key], rtol=0, atol=0, equal_nan=True)


def test_no_public_function_or_class_takes_any_keyword():
    found = [getattr(kdagen, name) for name in kdagen.__all__] + [getattr(serving, name) for name in serving.__all__]
    for module in (fla, vllm):
        found += [value for name, value in vars(module).items()
                  if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")]
    seen = 0
    for one in found:
        if inspect.isfunction(one) or (inspect.isclass(one) and not issubclass(one, Exception)):
            kinds = [p.kind for p in inspect.signature(one).parameters.values()]
            assert inspect.Parameter.VAR_KEYWORD not in kinds, one
            seen += 1
    assert seen > 25 and compat is not None


# --- shapes that look right -----------------------------------------------------------------------------------------

SHAPES = [
    *((name, "g", lambda x: x[..., 0], "g: got shape [1, 6, 2]")
      for name in ("chunk_kda", "fused_recurrent_kda", "kda_gate")),
    *((name, "beta", lambda x: x[..., None], "beta: got shape [1, 6, 2, 1]")
      for name in ("chunk_kda", "fused_recurrent_kda", "kda_gate")),
    *((name, "g", lambda x: x[:, :, :1], "g: got shape [1, 6, 1, 4], expected shape [1, 6, 2, 4]")  # one a q/k head
      for name in ("chunk_kda", "fused_recurrent_kda")),
    *((name, "beta", lambda x: x[:, :, :1], "beta: got shape [1, 6, 1], expected shape [1, 6, 2]")
      for name in ("chunk_kda", "fused_recurrent_kda", "kda_gate")),
    *((name, "A_log", lambda x: x[:1], "A_log: got shape [1], expected shape [2]")
      for name in ("chunk_kda", "fused_recurrent_kda", "kda_gate", "kda_decode_step")),
    *((name, "dt_bias", lambda x: x[:1], "dt_bias: got shape [1, 4], expected shape [2, 4]")
      for name in ("chunk_kda", "fused_recurrent_kda", "kda_gate", "kda_decode_step")),
    *((name, "initial_state", lambda x: x.mT.contiguous(), "initial_state: got shape [4, 2, 4, 8]")
      for name in ("chunk_kda", "fused_recurrent_kda")),
    *((name, "initial_state", lambda x: x[:3], "initial_state: got shape [3, 2, 8, 4]")
      for name in ("chunk_kda", "fused_recurrent_kda")),
    *((name, "state_pool", lambda x: x.mT.contiguous(), "state_pool: got shape")
      for name in ("chunk_kda, pool", "fused_recurrent_kda, pool", "kda_decode_step")),
    ("kda_decode_step", "g", lambda x: x.view(4, 2, 4), "g: got shape [4, 2, 4]"),
    ("kda_decode_step", "beta", lambda x: x[..., None], "beta: got shape [4, 2, 1]"),
    ("causal_conv1d", "weight", lambda x: x[:, None], "weight: got shape [24, 1, 4]"),
    ("causal_conv1d", "conv_states", lambda x: x.mT.contiguous(), "conv_states: got shape [8, 24, 3]"),
    ("causal_conv1d_update", "conv_states", lambda x: x.mT.contiguous(), "conv_states: got shape [8, 24, 7]"),
]


@pytest.mark.parametrize("name, argument, change, words", SHAPES)
def test_shapes_that_would_broadcast_or_read_garbage(name, argument, change, words, rng):
    """g as [B, T, H], beta as [B, T, H, 1], and their like: the message names argument, shape and the shape expected."""
    assert words in refused(name, rng, argument, change(cases.CALLS[name][1](rng)[argument]), ArgumentError)


# --- boundaries -----------------------------------------------------------------------------------------------------

T = cases.T
BOUNDARIES = {"chunk_kda": "cu_seqlens", "chunk_kda, pool": "cu_seqlens", "fused_recurrent_kda": "cu_seqlens",
              "fused_recurrent_kda, pool": "cu_seqlens", "causal_conv1d": "cu_seqlens",
              "causal_conv1d_update": "query_start_loc", "kda_gate": "cu_seqlens"}
BAD = {"decreasing": [0, 3, 2, 5, T], "not from 0": [1, 3, 3, 5, T], "negative": [-1, 3, 3, 5, T],
       "too short": [0, 3, 3, 5, T - 1], "too long": [0, 3, 3, 5, T + 1], "empty": []}


@pytest.mark.parametrize("path", ["interpreter", "cpu"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", BOUNDARIES)
def test_wrong_boundaries(name, bad, dtype, path, rng, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if path == "interpreter" else "0")
    edges = torch.tensor(BAD[bad], dtype=dtype)
    message = refused(name, rng, BOUNDARIES[name], edges, ArgumentError)
    assert message.startswith((BOUNDARIES[name], "cu_seqlens_cpu")), message


@pytest.mark.parametrize("name, argument, value", [
    ("prepare_chunk_metadata_device", "cu_seqlens_cpu", [0, 3, 2, 5, T]),
    ("build_conv1d_chunk_schedule", "query_start_loc_cpu", [0, 3, 2, 5, T]),
    ("step_tables", "cu_seqlens_cpu", [0, 3, 2, 5, T]),
])
def test_decreasing_boundaries_of_the_tables(name, argument, value, rng):
    """Only differences count there, so that they may start anywhere: what can be wrong is a sequence of negative length."""
    assert argument in refused(name, rng, argument, torch.tensor(value, dtype=torch.int32), ArgumentError)


@pytest.mark.parametrize("name", BOUNDARIES)
def test_packed_tokens_have_one_batch_row(name, rng):
    op, make = cases.CALLS[name]
    call = make(rng)
    for key in ("q", "k", "v", "g", "beta", "x", "out"):
        if key in call:
            call[key] = torch.cat([call[key]] * 2)
    with pytest.raises(ArgumentError, match="batch of 2 rows"):
        op(**call)


@pytest.mark.parametrize("bad", ["not from 0", "negative", "too short", "too long", "decreasing"])
@pytest.mark.parametrize("name", ["chunk_kda", "chunk_kda, pool"])
def test_the_hosts_copy_is_checked_in_every_call(name, bad, rng):
    """On a GPU it is the only one that can be: what is remembered of a layout of arguments must not skip it."""
    assert "cu_seqlens_cpu" in refused(name, rng, "cu_seqlens_cpu", torch.tensor(BAD[bad], dtype=torch.int32), ArgumentError)


GUARD, ROOM = 7.0, 130


def guarded(tensor: torch.Tensor, fill: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(a buffer, the tensor in the middle of it)."""
    wide = torch.full((1, tensor.shape[1] + 2 * ROOM, *tensor.shape[2:]), fill)
    wide[:, ROOM:-ROOM] = tensor
    return wide, wide[:, ROOM:-ROOM]


UNCHECKED = [[0, 5, 3, 6, 99], [0, 3, 3, 4, 5], [-50, 3, 3, 5, 6]]


@pytest.mark.parametrize("edges", UNCHECKED)
@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda", "causal_conv1d", "causal_conv1d_update", "kda_gate"])
def test_unchecked_boundaries_write_inside_their_tensors_only(name, edges, rng):
    """A GPU's values are never read by the host: clamped to 0..T in the kernel, nothing outside of out is written."""
    op, make = cases.CALLS[name]
    call = make(rng) | {BOUNDARIES[name]: torch.tensor(edges, dtype=torch.int32), "checked": False}
    for key in ("q", "k", "v", "g", "beta", "x"):
        if key in call:
            call[key] = guarded(call[key], 0.0)[1]
    wide, call["out"] = guarded(torch.full_like(call["out"], GUARD), GUARD)
    if name == "chunk_kda":
        call["cu_seqlens_cpu"] = None
    op(**call)
    assert (wide[:, :ROOM] == GUARD).all() and (wide[:, -ROOM:] == GUARD).all()


# --- schedules that do not fit --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", families.NAMES)
def test_no_family_exceeds_1024_threads_of_a_64_wide_wavefront(name):
    """32 warps are 1,024 threads on NVIDIA and 2,048 on AMD: whatever else fits, the second is refused, with the number."""
    family, wide, narrow = families.get(name), devices.named("mi300x"), devices.named("h200")
    for spec in list(family.committed())[:2]:
        for schedule in {s.source_key: s for s in family.default_schedules(spec)}.values():
            if schedule.form:
                continue
            many = Schedule(schedule.blocks, 32, schedule.stages, schedule.form)
            reason = family.supports(spec, many, wide)
            assert reason is not None, many
            if family.supports(spec, many, narrow) is None:
                assert "1024" in reason, reason


@pytest.mark.parametrize("name", ["prefill_state", "prefill_segments"])
def test_too_much_shared_memory_is_refused_with_the_numbers(name):
    family, target = families.get(name), devices.named("a100")
    seen = 0
    for spec in family.committed():
        for schedule in family.candidates(spec):
            reason = family.supports(spec, schedule, target)
            if reason and "bytes" in reason and not schedule.form:
                assert str(target.smem) in reason
                seen += 1
    assert seen


def test_a_pinned_schedule_that_does_not_fit_is_refused_before_the_launch(rng, monkeypatch):
    """Through the public op: the pin is looked at before memory is touched."""
    x, options = kda(rng, "bounded", T=20, H=1, K=16)
    out = torch.full_like(x["v"], GUARD)
    with pytest.raises(KdagenError), kdagen.pin("recurrent__k16_v16_fp32__bv16_evict0", warps=64):
        kdagen.fused_recurrent_kda(**x, **options, out=out, cu_seqlens=cu_seqlens([20]))
    assert (out == GUARD).all()

"""Faults that only a device shows, for every public op: waits, streams, graphs, another device, boundaries out of range.

The calls are those of cases.py (small, K = 4, V = 8), moved to the device.
"""

from __future__ import annotations

import contextlib

import cases
import pytest
import torch
from torch.utils._pytree import tree_leaves

from inputs import kda, relative
from kdagen import devices, dispatch, families
from kdagen import reference as R
from kdagen.ops.decode import fused_recurrent_kda
from kdagen.ops.prefill import chunk_kda
from kdagen.spec import Problem, Variant
from kdagen.tuning import measure

pytestmark = pytest.mark.gpu

NAN = float("nan")
HOST = ("cu_seqlens_cpu", "query_start_loc_cpu")  # what stays on the host


def moved(call: dict, device: str = "cuda") -> dict:
    """The call on a device; its host arguments stay, each tensor in memory of its own."""
    to = lambda name, value: value.clone() if name in HOST else value.to(device, copy=True)
    made = {name: to(name, value) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    if "device" in made:
        made["device"] = device
    return made


def both(name, rng, device="cuda") -> tuple:
    """(op, the call on the device, the same once more)."""
    op, make = cases.CALLS[name]
    call = make(rng)
    return op, moved(call, device), moved(call, device)


def outcome(op, call) -> list[torch.Tensor]:
    """All tensors that the op returned or wrote."""
    returned = [leaf for leaf in tree_leaves(op(**call)) if isinstance(leaf, torch.Tensor)]
    return [*returned, *cases.written(call).values()]


def same(found: list, wanted: list) -> bool:
    assert len(found) == len(wanted) > 0
    return all(torch.equal(a.contiguous().view(-1).view(torch.uint8).cpu(), b.contiguous().view(-1).view(torch.uint8).cpu())
               for a, b in zip(found, wanted))


@contextlib.contextmanager
def no_waiting():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", cases.CALLS)
def test_no_op_waits_for_the_device(name, rng):
    """With the sync debug mode set to error; compilation, which may wait, comes before."""
    op, first, second = both(name, rng)
    outcome(op, first)  # compiled
    with no_waiting():
        op(**second)


@pytest.mark.parametrize("name", cases.CALLS)
def test_each_op_runs_on_the_current_stream(name, rng):
    """Its tensors arrive late on that stream: work anywhere else would see zeros."""
    op, first, second = both(name, rng)
    wanted = outcome(op, first)
    late = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) and value.is_cuda else value
            for key, value in second.items()}
    outcome(op, moved(late))  # this layout is known, so that nothing compiles behind the slow work
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(40_000_000)
        for key, value in second.items():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                late[key].copy_(value)
        found = outcome(op, late)
    stream.synchronize()
    assert same(found, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("name", cases.CALLS)
def test_each_op_runs_on_its_tensors_device(name, rng):
    op, make = cases.CALLS[name]
    call = make(rng)
    with torch.cuda.device(0):
        wanted = outcome(op, moved(call, "cuda:0"))
        for _ in range(2):  # a new layout, a known one
            found = outcome(op, moved(call, "cuda:1"))
            assert all(x.device.index == 1 for x in found) and torch.cuda.current_device() == 0
            assert same(found, wanted)


CAPTURED = [name for name in cases.CALLS if name != "build_conv1d_chunk_schedule"]  # it refuses: the host's values


@pytest.mark.parametrize("name", CAPTURED)
def test_each_op_is_captured_and_replayed(name, rng):
    """Replayed on fresh contents, the outputs poisoned: the bits of the eager call."""
    op, eager, captured = both(name, rng)
    wanted = outcome(op, eager)
    kept = {key: value.clone() for key, value in captured.items() if isinstance(value, torch.Tensor)}
    outcome(op, moved(kept | {k: v for k, v in captured.items() if not isinstance(v, torch.Tensor)}))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = [leaf for leaf in tree_leaves(op(**captured)) if isinstance(leaf, torch.Tensor)]
    for _ in range(2):
        for value in returned:
            value.fill_(NAN if value.is_floating_point() else 77)
        for key, value in kept.items():
            captured[key].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert same([*returned, *cases.written(captured).values()], wanted)


GUARD, ROOM = 7.0, 130
EDGES = {"chunk_kda": "cu_seqlens", "fused_recurrent_kda": "cu_seqlens", "causal_conv1d": "cu_seqlens",
         "causal_conv1d_update": "query_start_loc", "kda_gate": "cu_seqlens"}


WILD = [[0, 5, 3, 6, 99], [0, 3, 3, 4, 5], [-50, 3, 3, 5, 6]]


@pytest.mark.parametrize("edges", WILD)
@pytest.mark.parametrize("name", EDGES)
def test_boundaries_on_the_device_out_of_range(name, edges, rng):
    """Their values are not checked: clamped in the kernel, nothing outside of out is written."""
    op, make = cases.CALLS[name]
    call = moved(make(rng))
    for key in ("q", "k", "v", "g", "beta", "x", "out"):
        if key in call:
            fill = GUARD if key == "out" else 0.0
            wide = torch.full((1, cases.T + 2 * ROOM, *call[key].shape[2:]), fill, device="cuda")
            wide[:, ROOM:-ROOM] = GUARD if key == "out" else call[key]
            call[key] = wide[:, ROOM:-ROOM]
    call[EDGES[name]] = torch.tensor(edges, dtype=torch.int32, device="cuda")
    if name == "chunk_kda":
        call["cu_seqlens_cpu"] = None
    op(**call)
    torch.cuda.synchronize()
    assert (wide[:, :ROOM] == GUARD).all() and (wide[:, -ROOM:] == GUARD).all()  # the last one moved is out


@pytest.mark.parametrize("g", [0.0, -5.0, -5.31, -20.0, -1000.0])
@pytest.mark.parametrize("K", [64, 128])
def test_the_same_decay_on_every_token(g, K, rng):
    tensors, options = kda(rng, "rand", T=200, H=2, K=K, dtype=torch.bfloat16)
    tensors["g"] = torch.full_like(tensors["g"], g)
    tensors = {name: t.cuda() for name, t in tensors.items()}
    wanted = R.recurrent_kda(**tensors, **options, output_final_state=True)
    o, state = chunk_kda(**tensors, **options, output_final_state=True, out=torch.full_like(tensors["v"], NAN))
    assert relative(o, wanted[0]) < 6e-3 and relative(state, wanted[1]) < 5e-3  # bf16 operands (docs/limits.md)
    o, state = fused_recurrent_kda(**tensors, **options, output_final_state=True, out=torch.full_like(tensors["v"], NAN))
    assert relative(o, wanted[0]) < 2e-3 and relative(state, wanted[1]) < 2e-6


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
def test_1026_tokens(name, rng):
    """No multiple of 8, 16 or 64, 17 chunks: after the last row lies NaN."""
    tensors, options = kda(rng, "bounded", T=1026, H=2, K=128, dtype=torch.bfloat16)
    around = {}
    for x, t in tensors.items():
        around[x] = t.cuda()
        if x != "initial_state":
            wide = torch.full((1, 1100, *t.shape[2:]), NAN, dtype=t.dtype, device="cuda")
            wide[:, :1026] = t
            around[x] = wide[:, :1026]
    options = {x: t.cuda() if isinstance(t, torch.Tensor) else t for x, t in options.items()}
    wanted = R.recurrent_kda(**around, **options, output_final_state=True)
    function = {"chunk_kda": chunk_kda, "fused_recurrent_kda": fused_recurrent_kda}[name]
    o, state = function(**around, **options, output_final_state=True)
    # nothing of the state is older than a few tokens: all of it carries the roundings of bf16 operands (docs/limits.md)
    assert relative(o, wanted[0]) < 6e-3 and relative(state, wanted[1]) < (5e-3 if name == "chunk_kda" else 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prefill_prepare", "prefill_state", "prefill_segments", "conv_prefill", "conv_update"])
def test_every_schedule_of_the_space_alone_on_poisoned_outputs(name, monkeypatch):
    """What the sweep asks of a candidate, of all files: right alone, each element written, repeats equal to the bit."""
    monkeypatch.setattr(measure, "REPEATS", 3)
    family, target = families.get(name), devices.machine()
    spec = next(iter(family.committed()))
    problem = Problem(2048, 1, 4) if name == "prefill_segments" else Problem(96, 3, 256 if "conv" in name else 2)
    fit = [schedule for schedule in family.candidates(spec) if dispatch.unfit(spec, schedule, target) is None]
    for schedule in {one.source_key: one for one in fit}.values() if "conv" in name else dict.fromkeys(fit):
        variant = Variant(spec, schedule.source_key).name
        measure.verify({"spec": spec.literal, "problem": list(problem), "seed": 5,
                        "candidate": [variant, schedule.warps, schedule.stages]})
    assert fit

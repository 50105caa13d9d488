"""The step's tables and the staging on a device: no synchronisation, graphs, streams, devices, bounds, one compilation."""

from __future__ import annotations

import pytest
import torch

from kdagen import dispatch
from kdagen.errors import ArgumentError, ArgumentTypeError
from kdagen.ops.metadata import build_conv1d_chunk_schedule, prepare_chunk_metadata_device, step_tables
from kdagen.ops.staging import stage_spec_decode_metadata
from kdagen.reference import chunk_table, conv_schedule, stage_spec_decode

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
POISON = -77


def boundaries(lengths, dtype=torch.int32) -> torch.Tensor:
    return torch.nn.functional.pad(torch.as_tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0)).to(dtype)


def same(out: torch.Tensor, want: torch.Tensor) -> bool:
    return out.dtype == want.dtype and out.shape == want.shape and torch.equal(out.cpu(), want)


def same_schedule(made: dict, cu: torch.Tensor, block: int) -> bool:
    want = conv_schedule(cu, block)
    return made["tot"] == want["tot"] and all(same(made[key], want[key]) for key in ("batch_ptr", "token_chunk_offset_ptr"))


@pytest.fixture
def no_sync():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", ["none", "empty", "few", "128", "1024", "5000", "200k", "empties"])
def test_against_the_oracle_without_a_sync(no_sync, rng, shape, dtype):
    lengths = {
        "none": [], "empty": [0, 0, 0], "few": [5, 0, 130], "200k": [200_000],
        "128": torch.randint(0, 500, (128,), generator=rng), "1024": torch.randint(0, 300, (1024,), generator=rng),
        "5000": torch.randint(0, 70, (5000,), generator=rng),
        "empties": torch.randint(0, 600, (3000,), generator=rng) * (torch.rand(3000, generator=rng) < 0.02),
    }[shape]
    host = boundaries(lengths, dtype) + 11
    cu = torch.empty_like(host, device=DEVICE)
    cu.copy_(host.pin_memory(), non_blocking=True)
    tokens = int(host[-1] - host[0])
    made = prepare_chunk_metadata_device(cu, host, 64)
    schedule = build_conv1d_chunk_schedule(host, 8, DEVICE)
    exact = step_tables(cu, host, blocks=[8, 7], rows=True)
    bounded = step_tables(cu, blocks=[8], tokens=tokens + 77, rows=True)
    torch.cuda.set_sync_debug_mode("default")
    indices, offsets = chunk_table(host, 64)
    nt = len(indices)
    assert same(made[0], indices) and same(made[1], offsets)
    assert same(exact.chunk_indices, indices) and same(exact.chunk_offsets, offsets)
    assert same_schedule(schedule, host, 8) and all(same_schedule(exact.schedules[b], host, b) for b in (8, 7))
    first = host[indices[:, 0].long()] + indices[:, 1] * 64
    valid = (host[indices[:, 0].long() + 1] - first).clamp(max=64)
    rows = torch.stack((first, valid, indices[:, 0], indices[:, 1]), 1).int()
    assert same(exact.chunk_rows, rows) and same(bounded.chunk_rows[:nt], rows)
    assert same(bounded.chunk_indices[:nt], indices) and same(bounded.chunk_offsets, offsets)
    assert bool((bounded.chunk_indices[nt:] == -1).all()) and bool((bounded.chunk_rows[nt:] == -1).all())
    assert bounded.counts.tolist() == [nt, conv_schedule(host, 8)["tot"]]


def test_graph_replays_after_the_boundaries_changed():
    cu = boundaries([5, 0, 130]).to(DEVICE)
    step_tables(cu, blocks=[8, 3], tokens=400, rows=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step_tables(cu, blocks=[8, 3], tokens=400, rows=True)
    for lengths in ([5, 0, 130], [0, 400, 0], [133, 133, 134], [0, 0, 0]):
        cu.copy_(boundaries(lengths))
        for tensor in (made.chunk_indices, made.chunk_offsets, made.chunk_rows, made.counts):
            tensor.fill_(POISON)
        graph.replay()
        indices, offsets = chunk_table(cu.cpu(), 64)
        assert same(made.chunk_indices[:len(indices)], indices) and same(made.chunk_offsets, offsets)
        assert bool((made.chunk_indices[len(indices):] == -1).all())
        for number, (block, schedule) in enumerate(made.schedules.items()):
            want = conv_schedule(cu.cpu(), block)
            assert made.counts[number + 1] == want["tot"]
            assert same(schedule["batch_ptr"][:want["tot"]], want["batch_ptr"])
            assert bool((schedule["batch_ptr"][want["tot"]:] == -1).all())


def test_host_schedule_is_refused_inside_a_capture():
    build_conv1d_chunk_schedule(boundaries([9]), 8, DEVICE)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), pytest.raises(ArgumentError, match=r"capture.*step_tables"):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            build_conv1d_chunk_schedule(boundaries([9]), 8, DEVICE)
        finally:
            graph.capture_end()


def test_other_stream_and_host_boundaries_in_flight():
    """More calls behind a busy stream than one pinned page has slots: no call sees another's boundaries."""
    stream, made = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        build_conv1d_chunk_schedule(boundaries([1]), 8, DEVICE)  # compiled, and the stream's first page is there
        torch.cuda._sleep(400_000_000)
        for i in range(100):
            host = boundaries([i, 50, 3 * i])
            made.append((host.clone(), build_conv1d_chunk_schedule(host, 8, DEVICE)))
            host.fill_(POISON)
            assert i != 20 or not stream.query(), "20 calls waited for the stream"
    stream.synchronize()
    assert all(same_schedule(schedule, host, 8) for host, schedule in made)


def test_work_is_on_the_current_stream():
    stream, host = torch.cuda.Stream(), boundaries([64] * 9)
    cu, pinned = torch.zeros(10, dtype=torch.int32, device=DEVICE), host.pin_memory()
    prepare_chunk_metadata_device(cu, host, 64)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        cu.copy_(pinned, non_blocking=True)  # seen only by work behind it on this stream
        made = prepare_chunk_metadata_device(cu, host, 64)
    stream.synchronize()
    assert same(made[0], chunk_table(host, 64)[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_other_device_than_the_current_one():
    host = boundaries([5, 0, 130])
    with torch.cuda.device(0):
        made = step_tables(host.to("cuda:1"), host, blocks=[8])
        schedule = build_conv1d_chunk_schedule(host, 8, "cuda:1")
    assert made.chunk_indices.device.index == 1 and schedule["batch_ptr"].device.index == 1
    assert same(made.chunk_indices, chunk_table(host, 64)[0]) and same_schedule(schedule, host, 8)


@pytest.mark.parametrize(("host", "device"), [([64, 64], [6400, 1]), ([6400, 1], [64, 64]), ([64, 64], [-500, 900])])
def test_device_boundaries_that_disagree(host, device):
    """The host's sizes hold: more is cut, less is -1; a guard behind each table stays as it was."""
    made = step_tables(boundaries(device).to(DEVICE), boundaries(host), blocks=[8], rows=True)
    want, _ = chunk_table(boundaries([max(length, 0) for length in device]), 64)
    size = len(chunk_table(boundaries(host), 64)[0])
    got = made.chunk_indices.cpu()
    assert len(got) == size and torch.equal(got[:len(want)], want[:size]) and bool((got[len(want):] == -1).all())
    assert int(made.chunk_offsets.max()) <= size


def test_no_compilation_for_another_size():
    """One binary for all N, all lengths, all block sizes and any alignment of the boundaries."""
    from triton import knobs

    dispatch.reset()
    compiled = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **call: compiled.append(call["repr"])
    try:
        for n in (1, 2, 16, 127, 128, 129, 1024, 1025, 3000):
            host = boundaries([n % 70] * (n + 3))
            cu = host.to(DEVICE)
            for start in range(3):
                for block in (1, 8, 96):
                    step_tables(cu[start:], host[start:], blocks=[block])
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert len(compiled) <= 1, compiled


def test_boundaries_on_the_device_are_refused():
    cu = boundaries([5]).to(DEVICE)
    with pytest.raises(ArgumentTypeError, match="query_start_loc_cpu: got a tensor on cuda"):
        build_conv1d_chunk_schedule(cu, 8, DEVICE)
    with pytest.raises(ArgumentTypeError, match="cu_seqlens_cpu: got a tensor on cuda"):
        prepare_chunk_metadata_device(cu, cu, 64)


def test_compiles_without_a_break():
    def step(cu, host):
        indices, offsets = prepare_chunk_metadata_device(cu, host, 64)
        schedule = build_conv1d_chunk_schedule(host, 8, "cuda")
        exact = step_tables(cu, host, blocks=[8])
        return indices.sum(0), offsets, schedule["batch_ptr"], exact.schedules[8]["batch_ptr"] + 1

    run = torch.compile(step, fullgraph=True, backend="aot_eager")
    for lengths in ([5, 0, 130], [200, 1, 64]):
        host = boundaries(lengths)
        for got, want in zip(run(host.to(DEVICE), host), step(host.to(DEVICE), host), strict=True):
            assert torch.equal(got, want)


def test_staging_in_a_graph(no_sync, rng):
    """One captured launch stages whatever the sources hold; S is baked in at capture."""
    def random(low, high, *shape):
        return torch.randint(low, high, shape, generator=rng, dtype=torch.int32)

    table, qsl, accepted = random(1, 9999, 33, 32), boundaries(random(0, 5, 33)), random(1, 5, 33)
    torch.cuda.set_sync_debug_mode("default")
    sources = [t.to(DEVICE) for t in (table, qsl, accepted)]
    sources[0] = sources[0][:, 5:8]
    staged = [torch.full(shape, POISON, dtype=torch.int32, device=DEVICE) for shape in ((65, 3), (66,), (65,))]
    torch.cuda.set_sync_debug_mode("error")
    stage_spec_decode_metadata(*sources, *staged, num_spec_decodes=33)
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stage_spec_decode_metadata(*sources, *staged, num_spec_decodes=33)
    sources[2].fill_(2)
    for tensor in staged:
        tensor.fill_(POISON)
    graph.replay()
    want = stage_spec_decode(table[:, 5:8], qsl, torch.full_like(accepted, 2), 65, 3, 33)
    assert all(same(out, ref) for out, ref in zip(staged, want, strict=True))

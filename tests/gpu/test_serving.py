"""Serving on a GPU: no synchronisation in build, graph replays bitwise as eager, nothing stale, the loop and the layer."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from serving_driver import PAD, Driver, Row, spec

from kdagen.ops._lanes import Constants
from kdagen.serving import (
    Batch,
    Checkpoint,
    DecodeGraphs,
    GraphStaging,
    KDAConfig,
    KDAMetadataBuilder,
    StaleGraphInput,
)
from kdagen.serving import builder as builder_module
from kdagen.serving.loop import make_engine, make_requests, tolerance

pytestmark = pytest.mark.gpu
BOUNDED = KDAConfig(256, 2, lower_bound=-5.0)
SOFTPLUS = KDAConfig(256, 2, output_gate_rank=128)
BF16 = 3e-2  # of one output vector: projection, convolution, norm and output are each rounded to 8 bits


@contextmanager
def no_sync():
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def driver(lengths, k=0, **options):
    return Driver(lengths, k, device="cuda", dtype=torch.bfloat16, chunk_size=64, **({"config": BOUNDED} | options))


def table_of(rows, columns):
    return (np.random.default_rng(0).permutation(rows * columns) + 1).reshape(rows, columns).astype(np.int32)


STEPS = {
    "decode": ([1] * 40, None), "prefill": ([1] * 20 + [70, 130, 1], None), "speculation": ([4] * 40, [3] * 40),
    "mixed, leading": ([4] * 10 + [100, 1], [3] * 10 + [-1, -1]), "mixed, not leading": ([100, 4, 1, 4], [-1, 3, -1, 3]),
    "padding between": ([4, 0, 4, 1], [3, -1, 3, 0]), "padding last": ([4] * 5 + [0] * 3, [3] * 5 + [-1] * 3),
}


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_build_never_waits_for_the_device(step, staged, mode):
    lens, drafts = STEPS[step]
    k = 0 if drafts is None else 3
    staging = GraphStaging("cuda", 64, k) if staged else None
    options = {"cache_mode": mode, "block_size": 64} if mode == "align" else {}
    builder = KDAMetadataBuilder("cuda", k, staging=staging, **options)
    seqs = [n + (0 if n > 60 else 9) for n in lens]
    batch = Batch.make(lens, seqs, table_of(len(lens), k + 8), is_prefilling=[n > 4 for n in lens], device="cuda",
                       checkpoints=[Checkpoint(i, 64, 5) for i, n in enumerate(lens) if n > 64])
    arguments = (batch, *((None, None) if drafts is None else (torch.ones(len(lens), dtype=torch.int32, device="cuda"),
                                                               np.array(drafts, np.int32))))
    builder.build(*arguments)  # compiles
    torch.cuda.synchronize()
    with no_sync():
        got = builder.build(*arguments)
    cpu = KDAMetadataBuilder("cpu", k, staging=GraphStaging("cpu", 64, k) if staged else None, **options)
    host = Batch.make(lens, seqs, table_of(len(lens), k + 8), is_prefilling=[n > 4 for n in lens],
                      checkpoints=batch.checkpoints)
    want = cpu.build(host, None if drafts is None else torch.ones(len(lens), dtype=torch.int32), arguments[2])
    compared = 0
    for name in type(got).__dataclass_fields__:
        mine, theirs = getattr(got, name), getattr(want, name)
        if isinstance(theirs, torch.Tensor):
            assert torch.equal(mine.cpu(), theirs), name
            compared += 1
        elif name in ("num_prefills", "num_decodes", "num_spec_decodes", "staged", "uniform_spec_sequence_length"):
            assert mine == theirs, name
    assert compared >= 5
    if want.checkpoint is not None:
        assert torch.equal(got.checkpoint.offsets.cpu(), want.checkpoint.offsets)
        assert torch.equal(got.checkpoint.state_indices.cpu(), want.checkpoint.state_indices)


def test_what_steps_share_is_ready_on_any_stream(monkeypatch):
    """Token numbers and flags are made on the stream of the first step that wants them: here a late one, over garbage."""
    lens, drafts = STEPS["mixed, leading"]
    rows, late = len(lens), torch.cuda.Stream()
    batch = Batch.make(lens, [n + 9 for n in lens], table_of(rows, 8), is_prefilling=[n > 4 for n in lens], device="cuda")
    arguments = batch, torch.ones(rows, dtype=torch.int32, device="cuda"), np.array(drafts, np.int32)
    builder = KDAMetadataBuilder("cuda", 3)
    builder.build(*arguments)  # compiles
    torch.cuda.synchronize()
    monkeypatch.setattr(builder_module, "_constants", Constants(8))
    with torch.cuda.stream(late):
        for size, dtype in ((1 << 13, torch.int64), (1 << 10, torch.int64), (1 << 10, torch.bool)):
            torch.full((size,), 77, device="cuda").to(dtype)
        torch.cuda._sleep(40_000_000)
        builder.build(*arguments)
    got = builder.build(*arguments)
    tokens, flags = torch.cat([got.spec_token_indx, got.non_spec_token_indx]), got.spec_sequence_masks.clone()
    torch.cuda.synchronize()
    assert tokens.tolist() == list(range(sum(lens))) and flags.tolist() == [draft >= 0 for draft in drafts]


@pytest.mark.parametrize("k", [0, 3])
def test_replays_equal_eager_steps_bitwise_for_every_batch(k):
    """Batches of 1..cap requests: outputs and both pools, bit for bit; cap + 1 is not staged."""
    cap = 6 if k == 0 else 24
    most = cap // (k + 1)
    d = driver([40] * (most + 1), k)
    staging = GraphStaging("cuda", 64, k, cap)
    d.builder = KDAMetadataBuilder("cuda", k, staging=staging)
    graphs = DecodeGraphs(d.layer, d.cache, d.builder, range(1, most + 1))
    d.step(*(Row(i, 3 + i) for i in range(most + 1)))
    d.prefilling = False

    def both(hidden, metadata):
        pools = (d.cache.recurrent, d.cache.conv)
        before = [pool.clone() for pool in pools]
        eager = d.layer(hidden, metadata, d.cache)
        after = [pool.clone() for pool in pools]
        for pool, then in zip(pools, before):
            pool.copy_(then)
        replayed = graphs.run(hidden, metadata)
        assert torch.equal(eager, replayed)
        for pool, then in zip(pools, after):
            torch.testing.assert_close(pool, then, rtol=0, atol=0, equal_nan=True)
        return eager

    random = np.random.default_rng(k)
    for rows in range(1, most + 1):
        chosen = random.permutation(most + 1)[:rows]
        d.step(*(spec(i, k, int(random.integers(1, k + 2))) if k else Row(i, 1) for i in chosen), run=both)
        assert d.metadata.staged
    d.step(*(spec(i, k) if k else Row(i, 1) for i in range(most + 1)))
    assert d.metadata.staged is None
    with pytest.raises(StaleGraphInput):
        graphs.run(d.hidden([PAD]), d.metadata)
    d.check(BF16)


@pytest.mark.parametrize("k", [0, 2])
def test_fewer_tokens_than_captured(k):
    """Padded requests, and rows with fewer drafts than captured."""
    d = driver([40] * 3, k)
    d.builder = KDAMetadataBuilder("cuda", k, staging=GraphStaging("cuda", 64, k))
    graphs = DecodeGraphs(d.layer, d.cache, d.builder, [4])
    d.step(Row(0, 7), Row(1, 2), Row(2, 1))
    d.prefilling = False
    rows = [spec(0, k, k + 1), spec(1, 0), spec(2, 1, 1)] if k else [Row(0, 1), Row(1, 1), Row(2, 1)]
    for _ in range(3):
        d.step(*rows, PAD, run=graphs.run)
    d.check(BF16)


def test_a_replay_after_a_mixed_step_touches_no_state():
    k = 2
    d = driver([60] * 4, k)
    d.builder = KDAMetadataBuilder("cuda", k, staging=GraphStaging("cuda", 64, k))
    graphs = DecodeGraphs(d.layer, d.cache, d.builder, [3])
    d.step(*(Row(i, 5) for i in range(3)))
    decode = [spec(i, k, 2) for i in range(3)]
    d.step(*decode, run=graphs.run)
    stale = d.metadata
    d.step(*decode[:2], Row(3, 40))
    assert d.metadata.staged is None
    with pytest.raises(StaleGraphInput):
        graphs.run(d.hidden(decode), stale)
    before = [pool.clone() for pool in (d.cache.recurrent, d.cache.conv)]
    graphs._graphs[3].replay()  # what an engine without the check would do
    for pool, then in zip((d.cache.recurrent, d.cache.conv), before):
        torch.testing.assert_close(pool, then, rtol=0, atol=0, equal_nan=True)
    d.step(*decode, run=graphs.run)
    d.check(BF16)


@pytest.mark.parametrize("config", [BOUNDED, SOFTPLUS], ids=["bounded", "softplus"])
def test_all_kinds_of_steps(config):
    k = 3
    d = driver([150, 90, 200, 1, 40], k, config=config)
    d.step(Row(0, 65), Row(1, 64))
    d.step(Row(0, 64), spec(1, 0), Row(2, 130))
    d.step(spec(1, 3, 2), Row(0, 1), Row(2, 7), Row(3, 1))
    d.step(PAD, spec(1, 3, 4), spec(0, 2, 1), PAD, pad_tokens=3)
    d.step(spec(0, 3, 3), Row(4, 4), spec(1, 1, 1), Row(2, 33))
    d.step(spec(4, 0), spec(1, 0), spec(0, 0), PAD, pad_tokens=1)
    d.step(spec(2, 3, 4), spec(0, 3, 1), spec(1, 2, 3), spec(4, 3, 2))
    d.check(BF16)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("config", [BOUNDED, SOFTPLUS], ids=["bounded", "softplus"])
def test_the_loop(k, config):
    engine = make_engine(device="cuda", config=config, num_spec=k, max_requests=4, seed=k, keep_prefixes=True)
    requests = make_requests(seed=k)
    engine.add(*requests)
    while engine.busy and engine.steps < 400:
        engine.step()
    assert len(engine.finished) == len(requests) and engine.replays > 10
    assert engine.cache.free_slots == engine.cache.slots - 1
    for request in requests:
        worst, mean = engine.verify(request)
        assert worst <= tolerance(engine.layer) and mean <= tolerance(engine.layer) / 2, (request.name, worst, mean)


def test_interior_states_of_a_long_prompt():
    d = driver([130, 130])
    d.inputs[1], d.wanted[1] = d.inputs[0], d.wanted[0]
    kept, = d.cache.allocate(1)
    d.step(Row(0, 130), checkpoints=[Checkpoint(0, 128, kept)])
    d.step(Row(1, 128))
    for pool in (d.cache.recurrent, d.cache.conv[:, :3]):
        assert torch.equal(pool[kept], pool[d.slots[1][0]])  # a prefix is bitwise the same whatever follows it
    d.check(BF16)

"""chunk_kda with a pool of states, checkpoints, windows and segments, through the interpreter and on the CPU path."""

from __future__ import annotations

import pytest
import torch

from inputs import cu_seqlens, kda, relative
from kdagen import reference as R
from kdagen.ops import prefill, prefill_plan
from kdagen.ops.prefill import chunk_kda

FP32 = 5e-6
NAN = float("nan")
LENGTHS = [19, 0, 37, 5, 16]
SLOTS = 12


@pytest.fixture(params=["interpreter", "cpu"])
def path(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "0")
    return request.param


def make(rng, v_first=True, **more):
    tensors, options = kda(rng, "bounded", T=sum(LENGTHS), sequences=len(LENGTHS), H=1, HV=2, K=16, V=32, **more)
    start = tensors.pop("initial_state")
    pool = torch.randn(SLOTS, 2, *((32, 16) if v_first else (16, 32)), generator=rng)
    edges = cu_seqlens(LENGTHS)
    options |= dict(cu_seqlens=edges, state_v_first=v_first)
    slots = torch.randperm(SLOTS, generator=rng)[: len(LENGTHS)].to(torch.int32)
    return tensors, options, pool, slots, start


def run(tensors, options, **more):
    return chunk_kda(**tensors, **options, cu_seqlens_cpu=options["cu_seqlens"], chunk_size=16,
                     out=torch.full_like(tensors["v"], NAN), **more)


@pytest.mark.parametrize("v_first", [True, False])
def test_slots_are_read_and_written_in_place(rng, path, v_first):
    tensors, options, pool, slots, _ = make(rng, v_first)
    wide = torch.full((SLOTS, 2 * pool[0].numel()), NAN)  # a padded slot stride
    padded = wide[:, : pool[0].numel()].view(pool.shape)
    padded.copy_(pool)
    table = torch.full((len(LENGTHS), 3), 99, dtype=torch.int32)  # slots as a column of a wider table
    table[:, 1] = slots
    o, final = run(tensors, options, state_pool=padded, read_slots=table[:, 1], write_slots=table[:, 1])
    wanted_o, wanted = R.recurrent_kda(**tensors, **options, initial_state=pool[slots.long()], output_final_state=True)
    assert final is None and relative(o, wanted_o) < FP32
    assert relative(padded[slots.long()], wanted) < FP32
    others = sorted(set(range(SLOTS)) - set(slots.tolist()))
    assert torch.equal(padded[others], pool[others]) and wide[:, pool[0].numel():].isnan().all()


def test_read_here_write_there(rng, path):
    tensors, options, pool, slots, _ = make(rng)
    before = pool.clone()
    target = torch.tensor(sorted(set(range(SLOTS)) - set(slots.tolist()))[: len(LENGTHS)])
    run(tensors, options, state_pool=pool, read_slots=slots, write_slots=target)
    _, wanted = R.recurrent_kda(**tensors, **options, initial_state=before[slots.long()], output_final_state=True)
    assert relative(pool[target], wanted) < FP32 and torch.equal(pool[slots.long()], before[slots.long()])


@pytest.mark.parametrize(("padding", "pad_slot"), [(-1, -1), (0, 0), (SLOTS, -1)])
def test_padding_slots_are_neither_read_nor_written(rng, path, padding, pad_slot):
    tensors, options, pool, _, _ = make(rng)
    slots = torch.tensor([3, 4, padding, 5, 6], dtype=torch.int32)
    pool[0] = NAN
    before = pool.clone()
    o, _ = run(tensors, options, state_pool=pool, read_slots=slots, write_slots=slots, pad_slot=pad_slot)
    start = before[slots.long().clamp(0, SLOTS - 1)]
    start[2] = 0
    wanted_o, wanted = R.recurrent_kda(**tensors, **options, initial_state=start, output_final_state=True)
    assert torch.equal(o[:, 19:56], torch.zeros_like(o[:, 19:56]))
    for rows in (slice(0, 19), slice(56, None)):
        assert relative(o[:, rows], wanted_o[:, rows]) < FP32
    for n, slot in enumerate(slots.tolist()):
        if n != 2:
            assert relative(pool[slot], wanted[n]) < FP32
    untouched = [s for s in range(SLOTS) if s not in (3, 4, 5, 6)]
    assert torch.equal(pool[untouched].nan_to_num(7.0), before[untouched].nan_to_num(7.0))


@pytest.mark.parametrize("padding", [-1, SLOTS])
def test_the_final_state_of_a_padded_row_is_zero(rng, path, padding, monkeypatch):
    tensors, options, pool, slots, _ = make(rng)
    slots[2] = padding
    empty = torch.empty
    poisoned = lambda *a, **k: empty(*a, **k).fill_(NAN) if k.get("dtype") == torch.float32 else empty(*a, **k)
    monkeypatch.setattr(torch, "empty", poisoned)
    _, final = run(tensors, options, state_pool=pool, read_slots=slots, output_final_state=True)
    start = pool[slots.long().clamp(0, SLOTS - 1)]
    wanted = R.recurrent_kda(**tensors, **options, initial_state=start, output_final_state=True)[1]
    wanted[2] = 0
    assert relative(final, wanted) < FP32 and torch.equal(final[2], torch.zeros_like(final[2]))


def test_a_fresh_sequence_does_not_read_its_slot(rng, path):
    tensors, options, pool, slots, _ = make(rng)
    fresh = torch.tensor([True, False, False, True, False])
    start = pool[slots.long()].clone()
    start[~fresh] = 0
    pool[slots[~fresh].long()] = NAN
    o, _ = run(tensors, options, state_pool=pool, read_slots=slots, write_slots=slots, has_initial_state=fresh)
    wanted_o, wanted = R.recurrent_kda(**tensors, **options, initial_state=start, output_final_state=True)
    assert relative(o, wanted_o) < FP32 and relative(pool[slots.long()], wanted) < FP32


def test_initial_states_of_their_own_final_ones_to_the_pool(rng, path):
    tensors, options, pool, slots, start = make(rng)
    o, _ = run(tensors, options, initial_state=start, state_pool=pool, write_slots=slots)
    wanted_o, wanted = R.recurrent_kda(**tensors, **options, initial_state=start, output_final_state=True)
    assert relative(o, wanted_o) < FP32 and relative(pool[slots.long()], wanted) < FP32


@pytest.mark.parametrize("windows", [False, True])
def test_checkpoints_at_chunk_boundaries(rng, path, windows):
    """Of lengths 19, 0, 37, 5, 16: after 16; none; after 16 and 32 (10 is no boundary); past the end; at the very end."""
    tensors, options, pool, _, start = make(rng)
    offsets = torch.tensor([[16, 0, 0], [16, 0, 0], [10, 16, 32], [16, 0, 0], [16, 0, 0]], dtype=torch.int32)
    slots = torch.tensor([[0, -1, -1], [1, -1, -1], [2, 3, 4], [5, -1, -1], [6, -1, -1]], dtype=torch.int32)
    before = pool.clone()
    more = {"max_workspace": 12_000} if windows else {}
    _, final = run(tensors, options, initial_state=start, output_final_state=True, state_pool=pool,
                   checkpoint_offsets=offsets, checkpoint_slots=slots, **more)
    edges = options["cu_seqlens"].tolist()
    for n, tokens, slot in ((0, 16, 0), (2, 16, 3), (2, 32, 4), (4, 16, 6)):
        part = {x: tensors[x][:, edges[n] : edges[n] + tokens] for x in tensors}
        given = {name: value for name, value in options.items() if name != "cu_seqlens"}
        _, wanted = R.recurrent_kda(**part, **given, initial_state=start[n : n + 1], output_final_state=True)
        assert relative(pool[slot], wanted[0]) < FP32, slot
    assert torch.equal(pool[[1, 2, 5, 7, 8, 9, 10, 11]], before[[1, 2, 5, 7, 8, 9, 10, 11]])
    assert relative(final, R.recurrent_kda(**tensors, **options, initial_state=start, output_final_state=True)[1]) < FP32


def test_the_workspace_bound_changes_no_bit(rng):
    tensors, options, _, _, start = make(rng)
    plain = run(tensors, options, initial_state=start, output_final_state=True)
    row = prefill_plan.choose(tensors["q"], 16, 32, 16, "bounded", prefill_plan.INVARIANT).row_bytes * 2
    for rows in (0, 1, 2, 3):
        found = run(tensors, options, initial_state=start, output_final_state=True, max_workspace=rows * row or 1)
        assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])


@pytest.mark.parametrize("count", [2, 3, 5])
def test_segments(rng, monkeypatch, count):
    lengths = [16 * 7 + 3, 0, 40, 16 * 5]
    tensors, options = kda(rng, "slow", T=sum(lengths), sequences=4, H=1, K=16, V=32)
    edges = cu_seqlens(lengths)
    monkeypatch.setattr(prefill_plan, "segments_of", lambda call: count)
    seen = []
    monkeypatch.setattr(prefill_plan, "run_segments", lambda *a, f=prefill_plan.run_segments: (seen.append(a[1]), f(*a)))
    o, state = chunk_kda(**tensors, **options, cu_seqlens=edges, cu_seqlens_cpu=edges, output_final_state=True,
                         chunk_size=16, out=torch.full_like(tensors["v"], NAN))
    wanted = R.recurrent_kda(**tensors, **options, cu_seqlens=edges, output_final_state=True)
    assert seen == [count] and relative(o, wanted[0]) < FP32 and relative(state, wanted[1]) < FP32


@pytest.mark.parametrize(("K", "V", "dtype", "limit"), [
    (192, 16, torch.float32, FP32), (256, 32, torch.float32, FP32), (256, 16, torch.float16, 2e-3),
])
def test_segments_of_wide_heads(rng, monkeypatch, K, V, dtype, limit):
    """Combine takes its maps tile by tile where K is above a tile's width; two of four segments have a map."""
    lengths = [16 * 7 + 3, 16 * 2]
    tensors, options = kda(rng, "slow", T=sum(lengths), sequences=2, H=1, K=K, V=V, dtype=dtype)
    edges = cu_seqlens(lengths)
    monkeypatch.setattr(prefill_plan, "segments_of", lambda call: 4)
    o, state = chunk_kda(**tensors, **options, cu_seqlens=edges, cu_seqlens_cpu=edges, output_final_state=True,
                         chunk_size=16, out=torch.full_like(tensors["v"], NAN))
    wanted = R.recurrent_kda(**tensors, **options, cu_seqlens=edges, output_final_state=True)
    assert relative(o, wanted[0]) < limit and relative(state, wanted[1]) < limit


def test_batch_invariance(rng, monkeypatch):
    """One long sequence alone is cut into segments; with batch_invariant it has the bits that it has in any batch."""
    tensors, options = kda(rng, "bounded", T=16 * 20, H=1, K=16)
    cuts = []
    monkeypatch.setattr(prefill_plan, "segments_of", lambda c, f=prefill_plan.segments_of: (cuts.append(f(c)), cuts[-1])[1])
    call = lambda t, n, **more: chunk_kda(**t, **options, cu_seqlens=cu_seqlens([16 * 20] * n), chunk_size=16,
                                          cu_seqlens_cpu=cu_seqlens([16 * 20] * n), output_final_state=True, **more)
    call(tensors, 1)
    alone = call(tensors, 1, batch_invariant=True)
    both = {x: torch.cat([t.flip(1) if x != "initial_state" else t, t], 0 if x == "initial_state" else 1)
            for x, t in tensors.items()}
    together = call(both, 2, batch_invariant=True)
    assert cuts[0] > 1 and cuts[1:] == [1, 1]
    assert torch.equal(together[0][:, 320:], alone[0]) and torch.equal(together[1][1:], alone[1])
    monkeypatch.setattr(prefill, "BATCH_INVARIANT", True)  # what KDAGEN_BATCH_INVARIANT=1 sets at import
    assert torch.equal(call(tensors, 1)[0], alone[0]) and cuts[-1] == 1

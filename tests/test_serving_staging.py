"""Persistent graph inputs: what is staged, what padding holds, and that nothing stale can be replayed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdagen.errors import ArgumentError
from kdagen.serving import NULL_SLOT, Batch, GraphStaging, KDAMetadataBuilder, StaleGraphInput


@pytest.fixture(autouse=True)
def cpu_path(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def make(k=0, max_num_seqs=64, **options):
    staging = GraphStaging("cpu", max_num_seqs, k, options.pop("max_capture_size", 512))
    return KDAMetadataBuilder("cpu", k, staging=staging, **options), staging


def table_of(rows, columns, width=None, seed=0):
    """A wide table of which the builder may read the first columns: [rows, width], distinct slots."""
    width = width or columns + 2
    return (torch.randperm(rows * width, generator=torch.Generator().manual_seed(seed)) + 1).int().reshape(rows, width)


def decode_batch(rows, pad=0, seed=0):
    table = table_of(rows + pad, 1, width=8, seed=seed)
    table[rows:] = NULL_SLOT
    return Batch.make([1] * rows + [0] * pad, [9] * rows + [0] * pad, table)


def spec_batch(lens, k, pad=0, seed=0):
    table = table_of(len(lens) + pad, k + 1, seed=seed)
    table[len(lens):] = NULL_SLOT
    batch = Batch.make([*lens] + [0] * pad, [n + 20 for n in lens] + [0] * pad, table)
    generator = torch.Generator().manual_seed(seed)
    accepted = torch.randint(1, k + 2, (len(lens) + pad,), generator=generator, dtype=torch.int32)
    return batch, accepted, np.array([n - 1 for n in lens] + [-1] * pad, np.int32)


def is_padding(staging):
    """All of both sets of buffers."""
    return (not staging.decode_state.any() and not staging.spec_state.any() and not staging.spec_masks.any()
            and bool((staging.spec_accepted == 1).all()))


def test_decodes_are_padded_by_requests():
    builder, staging = make()
    batch = decode_batch(5, pad=3)
    batch.block_table[5:] = 99  # what an engine left there must not matter: rows without a token are padding
    metadata = builder.build(batch)
    assert metadata.staged == "decode" and metadata.num_decodes == 8 and metadata.num_decode_tokens == 5
    assert metadata.non_spec_state_indices_tensor.tolist() == [*batch.block_table[:5, 0].tolist(), 0, 0, 0]
    assert metadata.non_spec_query_start_loc.tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5]
    assert metadata.non_spec_state_indices_tensor.is_contiguous()
    assert metadata.non_spec_state_indices_tensor.data_ptr() == staging.decode_state.data_ptr()


def test_speculation_is_padded_by_requests():
    k = 2
    builder, staging = make(k)
    batch, accepted, drafts = spec_batch([3, 3, 1, 2], k, pad=2, seed=3)
    metadata = builder.build(batch, accepted, drafts)
    assert metadata.staged == "spec"
    want = batch.block_table[:4, :3].tolist() + [[0, 0, 0]] * 2
    assert metadata.spec_state_indices_tensor.tolist() == want
    assert metadata.spec_query_start_loc.tolist() == [0, 3, 6, 7, 9, 9, 9]
    assert metadata.num_accepted_tokens.tolist() == [*accepted[:4].tolist(), 1, 1]
    assert metadata.spec_sequence_masks.tolist() == [True] * 4 + [False] * 2
    assert metadata.spec_token_indx.tolist() == list(range(9)) and metadata.non_spec_token_indx.tolist() == []
    assert metadata.uniform_spec_sequence_length is None and not metadata.is_uniform_spec_decode
    assert metadata.spec_state_indices_tensor.data_ptr() == staging.spec_state.data_ptr()


def test_72_requests_of_4_tokens_stage_72_rows():
    builder, staging = make(3, max_num_seqs=72)
    batch, accepted, drafts = spec_batch([4] * 72, 3)
    metadata = builder.build(batch, accepted, drafts)
    assert staging.cap == 288 and metadata.staged == "spec"
    assert metadata.spec_state_indices_tensor.shape == (72, 4) and metadata.spec_query_start_loc.shape == (73,)
    assert metadata.spec_state_indices_tensor.tolist() == batch.block_table[:, :4].tolist()
    assert metadata.is_uniform_spec_decode and metadata.uniform_spec_sequence_length == 4


@pytest.mark.parametrize("rows, staged", [(15, True), (16, True), (17, False)])
def test_decodes_beyond_the_buffers_run_eagerly(rows, staged):
    builder, staging = make(max_num_seqs=32, max_capture_size=16)
    metadata = builder.build(decode_batch(rows))
    assert staging.cap == 16 and (metadata.staged == "decode") == staged
    assert metadata.non_spec_state_indices_tensor.tolist() == metadata.block_table[:, 0].tolist()  # right either way


def test_padding_rows_count_towards_the_bound():
    """16 live rows fit 16; padded to 17 requests they do not."""
    builder, staging = make(max_num_seqs=32, max_capture_size=16)
    assert builder.build(decode_batch(16, pad=1)).staged is None
    assert is_padding(staging)


@pytest.mark.parametrize("rows, staged", [(4, True), (5, False)])
def test_speculative_tokens_beyond_the_capture_size_run_eagerly(rows, staged):
    builder, _ = make(3, max_num_seqs=32, max_capture_size=16)
    batch, accepted, drafts = spec_batch([4] * rows, 3)
    metadata = builder.build(batch, accepted, drafts)
    assert (metadata.staged == "spec") == staged
    assert metadata.spec_state_indices_tensor.tolist() == batch.block_table[:, :4].tolist()


@pytest.mark.parametrize("requests, tokens, words", [(17, 17, "requests"), (5, 20, "num_actual_tokens")])
def test_capture_beyond_the_buffers_is_refused(requests, tokens, words):
    builder, _ = make(3, max_num_seqs=32, max_capture_size=16)
    batch, _, _ = spec_batch([tokens // requests] * requests, 3)
    with pytest.raises(ArgumentError, match=f"{words}.*at most 16"):
        builder.build_for_cudagraph_capture(batch)


def test_capture_of_decodes_and_of_speculation():
    builder, _ = make(2)
    spec, _, _ = spec_batch([3] * 4, 2)
    metadata = builder.build_for_cudagraph_capture(spec)
    assert metadata.staged == "spec" and metadata.num_accepted_tokens.tolist() == [3] * 4
    one, _, _ = spec_batch([1] * 4, 2)
    assert builder.build_for_cudagraph_capture(one).staged == "spec"  # zero drafts, with speculation on
    plain, _ = make(0)
    batch = decode_batch(4)
    batch.seq_lens_cpu_upper_bound[:] = 1  # as capture batches are: seq_len == query_len
    batch.seq_lens.fill_(1)
    assert plain.build_for_cudagraph_capture(batch).staged == "decode"
    with pytest.raises(ArgumentError, match="only decodes, or only speculative"):
        plain.build_for_cudagraph_capture(Batch.make([1, 5], [1, 5], table_of(2, 1)))
    with pytest.raises(ArgumentError, match="staging"):
        KDAMetadataBuilder("cpu").build_for_cudagraph_capture(decode_batch(2))


def test_a_smaller_step_pads_what_a_larger_one_left():
    builder, staging = make()
    builder.build(decode_batch(40))
    builder.build(decode_batch(3))
    assert staging.decode_state[:3].all() and not staging.decode_state[3:].any()
    assert staging.decode_starts[:41].tolist() == [0, 1, 2] + [3] * 38
    builder, staging = make(2)
    builder.build(*spec_batch([3] * 20, 2))
    builder.build(*spec_batch([3] * 2, 2))
    assert staging.spec_state[:2].all() and not staging.spec_state[2:].any()
    assert staging.spec_starts[:21].tolist() == [0, 3] + [6] * 19
    assert (staging.spec_accepted[2:] == 1).all() and staging.spec_masks.tolist() == [True] * 2 + [False] * 190


@pytest.mark.parametrize("other", ["prefill", "mixed", "too large", "interleaved padding"])
def test_a_step_that_is_not_staged_leaves_only_padding(other):
    k = 2
    builder, staging = make(k, max_num_seqs=8, max_capture_size=16)
    batch, accepted, drafts = spec_batch([3] * 4, k, seed=5)
    before = builder.build(batch, accepted, drafts)
    assert staging.spec_state[:4].all()
    if other == "prefill":
        after = builder.build(Batch.make([1, 50], [9, 50], table_of(2, 3), is_prefilling=[False, True]))
    elif other == "mixed":
        after = builder.build(Batch.make([50, 3], [50, 9], table_of(2, 3), is_prefilling=[True, False]),
                              torch.ones(2, dtype=torch.int32), np.array([-1, 2], np.int32))
    elif other == "too large":
        after = builder.build(*spec_batch([3] * 6, k))
    else:
        after = builder.build(Batch.make([3, 0, 3], [9, 0, 9], table_of(3, 3)), torch.ones(3, dtype=torch.int32),
                              np.array([2, -1, 2], np.int32))
    assert after.staged is None and is_padding(staging)
    assert not staging.spec_starts.any()
    with pytest.raises(StaleGraphInput, match="not staged"):
        staging.require(after)
    with pytest.raises(StaleGraphInput, match="epoch"):
        staging.require(before)


def test_decode_and_speculative_buffers_do_not_outlive_each_other():
    builder, staging = make(2)
    builder.build(decode_batch(4))  # without drafts the rows are plain decodes
    assert staging.decode_state[:4].all() and not staging.spec_state.any()
    builder.build(*spec_batch([3] * 3, 2))
    assert not staging.decode_state.any() and staging.spec_state[:3].all()
    builder.build(decode_batch(2))
    assert staging.decode_state[:2].all() and not staging.spec_state.any() and not staging.spec_masks.any()


def test_addresses_never_change():
    builder, staging = make(2)
    address = lambda: [buffer.data_ptr() for buffer in vars(staging).values() if isinstance(buffer, torch.Tensor)]
    before = address()
    for rows in (4, 1, 30):
        metadata = builder.build(*spec_batch([3] * rows, 2))
        assert metadata.spec_state_indices_tensor.data_ptr() == staging.spec_state.data_ptr()
        assert metadata.spec_query_start_loc.data_ptr() == staging.spec_starts.data_ptr()
        assert metadata.num_accepted_tokens.data_ptr() == staging.spec_accepted.data_ptr()
    assert address() == before


STEP = st.one_of(
    st.tuples(st.just("decode"), st.integers(0, 20), st.integers(0, 4)),
    st.tuples(st.just("spec"), st.integers(1, 20), st.integers(0, 4)),
    st.tuples(st.just("mixed"), st.integers(1, 5), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=6), st.integers(1, 3))
def test_any_row_outside_the_latest_step_is_padding(sequence, k):
    """The invariant, after any sequence of steps: nothing but the latest staged rows is live."""
    builder, staging = make(k, max_num_seqs=8, max_capture_size=16)
    for kind, rows, pad in sequence:
        if kind == "decode":
            batch, accepted, drafts = decode_batch(rows, pad), None, None
        elif kind == "spec":
            batch, accepted, drafts = spec_batch([k + 1] * rows, k, pad)
        else:
            batch = Batch.make([40] + [k + 1] * rows, [40] + [30] * rows, table_of(rows + 1, k + 1))
            accepted, drafts = torch.ones(rows + 1, dtype=torch.int32), np.array([-1] + [k] * rows, np.int32)
        metadata = builder.build(batch, accepted, drafts)
        live = {"decode": 0, "spec": 0}
        if metadata.staged:
            live[metadata.staged] = rows
            staging.require(metadata)
        assert staging.decode_state[:live["decode"]].tolist() == batch.block_table[:live["decode"], 0].tolist()
        assert not staging.decode_state[live["decode"]:].any()
        assert staging.spec_state[:live["spec"]].tolist() == batch.block_table[:live["spec"], :k + 1].tolist()
        assert not staging.spec_state[live["spec"]:].any()
        assert staging.spec_masks.tolist() == [row < live["spec"] for row in range(staging.cap)]
        assert (staging.spec_accepted[live["spec"]:] == 1).all()


def test_refusals():
    for arguments, words in (((0,), "max_num_seqs"), ((4, -1), "num_spec"), ((4, 0, 0), "max_capture_size")):
        with pytest.raises(ArgumentError, match=words):
            GraphStaging("cpu", *arguments)
    with pytest.raises(ArgumentError, match="columns"):
        KDAMetadataBuilder("cpu", 2, staging=GraphStaging("cpu", 4, 1))

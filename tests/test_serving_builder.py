"""The builder against a slow reference classification, row by row and field by field."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import serving_oracle as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdagen.errors import ArgumentError, ArgumentTypeError
from kdagen.ops._lanes import Constants
from kdagen.serving import Batch, Checkpoint, KDAMetadataBuilder
from kdagen.serving import builder as builder_module

SENTINEL = -77


@pytest.fixture(autouse=True)
def cpu_path(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def random_table(rows, columns, seed=0):
    """Distinct slots, none of them the reserved 0."""
    return (np.random.default_rng(seed).permutation(rows * columns) + 1).reshape(rows, columns).astype(np.int32)


def build(lens, seq_lens=None, prefilling=None, drafts=None, k=0, *, accepted=None, table=None, columns=None, **options):
    lens = list(lens)
    seq_lens = [n + 10 for n in lens] if seq_lens is None else list(seq_lens)
    table = random_table(len(lens), columns or k + 3) if table is None else table
    batch = Batch.make(lens, seq_lens, table, is_prefilling=prefilling)
    builder = KDAMetadataBuilder("cpu", k, **options)
    if drafts is not None and accepted is None:
        accepted = [1 + (i % (k + 1)) for i in range(len(lens))]
    metadata = builder.build(batch, None if accepted is None else torch.tensor(accepted, dtype=torch.int32),
                             None if drafts is None else np.asarray(drafts, np.int32))
    rows = oracle.make_rows(lens, seq_lens, prefilling, drafts, table.tolist(), accepted)
    return metadata, rows


def counts(metadata):
    return (metadata.num_prefills, metadata.num_prefill_tokens, metadata.num_decodes, metadata.num_decode_tokens,
            metadata.num_spec_decodes, metadata.num_spec_decode_tokens)


def same(tensor, values, dtype=torch.int32):
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tensor.tolist() == list(values)


def check(metadata, rows, k, keep_decodes=False, chunk=64, blocks=(32,)):
    """Every field of table 2.8."""
    want = oracle.classify(rows, k, keep_decodes)
    assert counts(metadata) == want.counts
    assert metadata.num_reqs == len(rows)
    pure_spec = want.spec and not want.decodes and not want.prefills
    if want.spec:
        same(metadata.spec_state_indices_tensor.flatten(), [s for row in want.spec for s in row.slots[:k + 1]])
        assert metadata.spec_state_indices_tensor.shape == (len(want.spec), k + 1)
        same(metadata.spec_query_start_loc, oracle.starts(want.spec))
        same(metadata.num_accepted_tokens, [row.accepted for row in want.spec])
        spec_rows = {row.index for row in want.spec}
        same(metadata.spec_sequence_masks, [row.index in spec_rows for row in rows], torch.bool)
        assert metadata.spec_sequence_masks_cpu.tolist() == metadata.spec_sequence_masks.tolist()
        index_dtype = torch.int32 if pure_spec else torch.int64
        same(metadata.spec_token_indx, oracle.tokens(want.spec), index_dtype)
        same(metadata.non_spec_token_indx, [] if pure_spec else oracle.tokens(want.non_spec), index_dtype)
        lengths = {row.length for row in want.spec}
        assert metadata.uniform_spec_sequence_length == (lengths.pop() if len(lengths) == 1 else None)
        assert metadata.is_uniform_spec_decode == bool(pure_spec and all(row.length == k + 1 for row in rows))
    else:
        for name in ("spec_state_indices_tensor", "spec_query_start_loc", "num_accepted_tokens", "spec_sequence_masks",
                     "spec_token_indx", "non_spec_token_indx", "uniform_spec_sequence_length"):
            assert getattr(metadata, name) is None, name
    if pure_spec:
        assert metadata.non_spec_query_start_loc is None and metadata.non_spec_state_indices_tensor is None
    else:
        same(metadata.non_spec_query_start_loc, oracle.starts(want.non_spec))
        assert metadata.non_spec_query_start_loc_cpu.tolist() == oracle.starts(want.non_spec)
        same(metadata.non_spec_state_indices_tensor, [row.slots[0] for row in want.non_spec])
    if not want.prefills:
        for name in ("has_initial_state", "chunk_indices", "chunk_offsets", "prefill_query_start_loc",
                     "prefill_state_indices", "prefill_has_initial_state", "nums_dict", "batch_ptr", "checkpoint"):
            assert getattr(metadata, name) is None, name
        assert metadata.dense_decode == all(row.length == 1 for row in want.decodes[:want.counts[3]])
        return
    same(metadata.has_initial_state, [row.computed > 0 for row in want.non_spec], torch.bool)
    same(metadata.prefill_query_start_loc, oracle.starts(want.prefill_table))
    assert metadata.prefill_query_start_loc_cpu.tolist() == oracle.starts(want.prefill_table)
    same(metadata.prefill_state_indices, [row.slots[0] for row in want.prefill_table])
    same(metadata.prefill_has_initial_state, [row.computed > 0 for row in want.prefill_table], torch.bool)
    table = oracle.chunk_table(want.prefill_table, chunk)
    assert metadata.chunk_indices.tolist() == [list(pair) for pair in table]
    assert metadata.chunk_indices.dtype == torch.int32
    same(metadata.chunk_offsets, [sum(n < m for n, _ in table) for m in range(len(want.prefill_table) + 1)], torch.int64)
    assert metadata.step_tables.chunk_rows.tolist() == [
        [oracle.starts(want.prefill_table)[n] + t * chunk, min(want.prefill_table[n].length - t * chunk, chunk), n, t]
        for n, t in table]
    assert set(metadata.nums_dict) == set(blocks)
    for block in blocks:
        schedule, pairs = metadata.nums_dict[block], oracle.chunk_table(want.non_spec, block)
        assert schedule["tot"] == len(pairs)
        same(schedule["batch_ptr"][:len(pairs)], [n for n, _ in pairs])
        same(schedule["token_chunk_offset_ptr"][:len(pairs)], [t for _, t in pairs])
    assert metadata.batch_ptr is metadata.nums_dict[blocks[0]]["batch_ptr"]


@pytest.mark.parametrize("lens, drafts, expected", [
    ([1, 3], [-1, 2], (0, 1, 1, 1)), ([3, 3], [2, 2], (0, 0, 0, 2)), ([1, 1, 1], None, (3, 0, 0, 0)),
    ([50, 3], [-1, 2], (0, 1, 50, 1)),
])
def test_the_vectors_of_the_policy(lens, drafts, expected):
    metadata, rows = build(lens, drafts=drafts, k=2)
    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_prefill_tokens, metadata.num_spec_decodes) == expected
    check(metadata, rows, 2)


def test_zero_draft_rows_are_speculative():
    metadata, rows = build([1, 1], drafts=[0, 0], k=2, accepted=[3, 1])
    assert metadata.num_spec_decodes == 2 and metadata.uniform_spec_sequence_length == 1
    assert not metadata.is_uniform_spec_decode
    check(metadata, rows, 2)


def test_drafts_are_ignored_without_speculation():
    metadata, _ = build([1, 1], drafts=[0, 0], k=0)
    assert counts(metadata) == (0, 0, 2, 2, 0, 0)


@pytest.mark.parametrize("lens, seq_lens, prefilling, expected", [
    ([1, 1, 5], [7, 1, 9], [False, True, True], (2, 6, 1, 1)),  # a one-token first chunk is a prefill
    ([1, 1, 5], [7, 9, 9], [False, True, True], (1, 5, 2, 2)),  # a one-token resumed chunk is a decode
    ([1, 1, 0, 0], [7, 9, 0, 0], None, (0, 0, 4, 2)),           # padding of a decode batch counts as decodes
    ([1, 5, 3, 0, 0], [7, 9, 9, 0, 0], None, (2, 8, 1, 1)),     # trailing padding is no prefill
    ([5, 0, 130, 0], [5, 0, 130, 0], [True] * 4, (3, 135, 0, 0)),
    ([1, 1], [1, 1], None, (0, 0, 2, 2)),                       # a capture batch: seq_len == query_len, nothing prefills
    ([0, 0], [0, 0], [True, True], (0, 0, 2, 0)),
    ([], [], None, (0, 0, 0, 0)),
])
def test_splits_without_speculation(lens, seq_lens, prefilling, expected):
    metadata, rows = build(lens, seq_lens, prefilling)
    assert counts(metadata)[:4] == expected
    check(metadata, rows, 0)


def test_the_chunk_table_does_not_shift_after_an_empty_sequence():
    metadata, _ = build([5, 0, 130], [5, 0, 130], [True, False, True])
    assert metadata.chunk_indices.tolist() == [[0, 0], [2, 0], [2, 1], [2, 2]]
    assert metadata.chunk_offsets.tolist() == [0, 1, 1, 4]


def test_prefill_tables_are_rebased_past_the_decodes():
    metadata, rows = build([1, 1, 70, 3], [9, 9, 70, 8], [False, False, True, True])
    assert metadata.prefill_query_start_loc.tolist() == [0, 70, 73]
    assert metadata.nums_dict[32]["tot"] == 1 + 1 + 3 + 1  # the convolution runs over all of them
    check(metadata, rows, 0)


@pytest.mark.parametrize("k", range(1, 6))
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_prompts_as_long_as_a_speculative_step(k, extra):
    """A prompt of k, k+1, k+2 tokens is a prefill: only its drafts make a row speculative."""
    length = max(k + 1 + extra, 1)
    metadata, rows = build([length, k + 1], [length, 30], [True, False], [-1, k], k)
    assert metadata.num_prefills == 1 and metadata.num_spec_decodes == 1
    assert metadata.prefill_has_initial_state.tolist() == [False]
    check(metadata, rows, k)


def test_a_row_whose_length_contradicts_its_drafts_is_not_speculative():
    metadata, rows = build([3, 2, 6], drafts=[2, 2, 5], k=2)
    assert metadata.num_spec_decodes == 1
    check(metadata, rows, 2)


def test_decodes_kept_beside_speculation():
    keep, rows = build([1, 0, 3, 1], drafts=[-1, -1, 2, -1], k=2, keep_decodes=True)
    assert counts(keep) == (0, 0, 2, 2, 1, 3)
    check(keep, rows, 2, keep_decodes=True)
    # one of the others is a first chunk: all become prefills
    fall, rows = build([1, 3, 1], [1, 13, 9], [True, False, False], [-1, 2, -1], 2, keep_decodes=True)
    assert counts(fall) == (2, 2, 0, 0, 1, 3)
    check(fall, rows, 2, keep_decodes=True)


@pytest.mark.parametrize("at", ["first", "middle", "last", "everywhere"])
def test_padding_rows_beside_pure_speculation(at):
    real = [(3, 2), (1, 0), (2, 1)]
    pad = (0, -1)
    rows_in = {"first": [pad, pad, *real], "middle": [real[0], pad, *real[1:]], "last": [*real, pad, pad],
               "everywhere": [pad, real[0], pad, real[1], pad, pad, real[2], pad]}[at]
    metadata, rows = build([n for n, _ in rows_in], drafts=[d for _, d in rows_in], k=2)
    assert counts(metadata) == (0, 0, 0, 0, 3, 6)
    check(metadata, rows, 2)


def test_what_steps_share_is_waited_for_on_other_streams(monkeypatch):
    """Token numbers and flags are made on the stream of one step; until the device has them, other steps wait for them."""
    events, made = [], []

    class Event:
        over = False

        def __init__(self):
            self.waits = 0
            events.append(self)

        record = lambda self: None
        query = lambda self: self.over

        def wait(self):
            self.waits += 1

    class OnDevice(Constants):
        def get(self, key, like, make):
            like = SimpleNamespace(is_cuda=True, device=like.device)
            return super().get(key, like, lambda: made.append(key) or make())

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(builder_module, "_constants", OnDevice(8))
    step = lambda rows: check(*build([3] * rows + [50, 9], [60] * (rows + 2), drafts=[2] * rows + [-1, -1], k=2), 2)
    for waits in range(3):
        step(4 + 10 * waits)
        assert [event.waits for event in events] == [waits, waits] and len(made) == 2, "of one size for both steps"
    Event.over = True
    step(4)
    assert [event.waits for event in events] == [2, 2] and len(made) == 2
    step(300)
    step(3000)
    assert len(set(made)) == len(made) == 4, "larger steps have their own"


ROW = st.sampled_from(["pad", "decode", "first_one", "chunk", "first", "spec", "zero_draft", "full", "odd"])


@st.composite
def steps(draw):
    k = draw(st.integers(0, 5))
    kinds = draw(st.lists(ROW, min_size=0, max_size=9))
    lens, seqs, prefilling, drafts = [], [], [], []
    for kind in kinds:
        done, flag, draft = draw(st.integers(1, 200)), False, -1
        if kind == "pad":
            n, done = 0, draw(st.sampled_from([0, 5]))
        elif kind == "decode":
            n = 1
        elif kind == "first_one":
            n, done, flag = 1, 0, True
        elif kind == "chunk":
            n, flag = draw(st.sampled_from([1, 2, k + 1, k + 2, 63, 64, 65])), True
        elif kind == "first":
            n, done, flag = draw(st.sampled_from([2, k + 1, k + 2, 64, 130])), 0, True
        elif kind == "spec":
            draft = draw(st.integers(0, k))
            n = draft + 1
        elif kind == "zero_draft":
            n, draft = 1, 0
        elif kind == "full":
            n, draft = k + 1, k
        else:
            n, draft = draw(st.integers(0, 8)), draw(st.integers(-1, 8))
        lens.append(n), seqs.append(done + n), prefilling.append(flag), drafts.append(draft)
    use_drafts = draw(st.booleans()) or k > 0
    flags = prefilling if draw(st.booleans()) or any(prefilling) else None
    return k, lens, seqs, flags, drafts if use_drafts else None, draw(st.booleans()), draw(st.integers(0, 2**16))


@settings(max_examples=300, deadline=None)
@given(steps())
def test_any_batch_is_classified_as_the_reference_does(step):
    k, lens, seqs, prefilling, drafts, keep, seed = step
    accepted = np.random.default_rng(seed).integers(1, k + 2, len(lens)).tolist() if drafts is not None else None
    metadata, rows = build(lens, seqs, prefilling, drafts, k, accepted=accepted, table=random_table(len(lens), k + 2, seed),
                           keep_decodes=keep)
    check(metadata, rows, k, keep)


@settings(max_examples=60, deadline=None)
@given(steps(), st.sampled_from([1, 16, 64]))
def test_aligned_slots(step, block_size):
    """Mode "align": 1+k columns from the block that the row's last token falls into."""
    k, lens, seqs, prefilling, drafts, keep, seed = step
    width = (max([*seqs, 1]) - 1) // block_size + 1 + k
    table = random_table(len(lens), width, seed)
    accepted = [1] * len(lens) if drafts is not None else None
    metadata, rows = build(lens, seqs, prefilling, drafts, k, accepted=accepted, table=table, keep_decodes=keep,
                           cache_mode="align", block_size=block_size)
    for row in rows:
        row.slots = oracle.aligned_slots(row.slots, row.seq_len, block_size, k + 1)
    metadata.checkpoint = None  # its own tests below
    check(metadata, rows, k, keep)


@pytest.mark.parametrize("lens, prefilling, drafts, k", [
    ([1, 1, 70, 3, 0], [False, False, True, True, True], None, 0), ([70, 0, 3], [True] * 3, None, 0),
    ([1, 0, 1, 1, 200], None, None, 0), ([3, 1, 2, 100, 0, 65], None, [2, 0, 1, -1, -1, -1], 2)])
def test_prefills_through_the_interpreted_kernel(monkeypatch, lens, prefilling, drafts, k):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    seq_lens = [n + (10 if i % 2 or n < 4 else 0) for i, n in enumerate(lens)]
    metadata, rows = build(lens, seq_lens, prefilling, drafts, k, conv_blocks=(8, 32))
    assert metadata.num_prefills
    check(metadata, rows, k, blocks=(8, 32))


def test_strided_inputs_of_a_step_with_prefills():
    """An engine's seq_lens and boundaries may be columns of wider tensors."""
    batch = Batch.make([1, 70], [9, 70], random_table(2, 3), is_prefilling=[False, True])
    wide = lambda tensor: torch.stack([tensor, torch.full_like(tensor, SENTINEL)], 1)[:, 0]
    batch.query_start_loc, batch.seq_lens = wide(batch.query_start_loc), wide(batch.seq_lens)
    metadata = KDAMetadataBuilder("cpu").build(batch)
    assert metadata.has_initial_state.tolist() == [True, False] and metadata.prefill_query_start_loc.tolist() == [0, 70]
    assert metadata.chunk_indices.tolist() == [[0, 0], [0, 1]] and metadata.nums_dict[32]["tot"] == 4


def test_aligned_slots_given_by_the_engine_are_used_as_they_are():
    table, given_slots = random_table(3, 9), random_table(3, 3, seed=9)
    batch = Batch.make([1, 1, 0], [40, 3, 0], table)
    batch.aligned_state_indices = torch.from_numpy(given_slots)
    metadata = KDAMetadataBuilder("cpu", 2, cache_mode="align", block_size=16).build(batch)
    assert metadata.non_spec_state_indices_tensor.tolist() == given_slots[:, 0].tolist()


@pytest.mark.parametrize("mode", ["none", "all"])
def test_unaligned_modes_pass_the_table_through(mode):
    metadata, rows = build([1, 1], mode_table := None, columns=6, cache_mode=mode)
    assert mode_table is None
    column = metadata.non_spec_state_indices_tensor
    assert column.stride() == (6,) and column.data_ptr() == metadata.block_table.data_ptr()  # a view, not a copy
    check(metadata, rows, 0)


def test_several_conv_blocks_own_their_schedules():
    metadata, rows = build([1, 70, 9], [5, 70, 9], [False, True, True], conv_blocks=(8, 16, 64))
    check(metadata, rows, 0, blocks=(8, 16, 64))
    pointers = {schedule["batch_ptr"].data_ptr() for schedule in metadata.nums_dict.values()}
    assert len(pointers) == 3


@pytest.mark.parametrize("chunk", [16, 32, 128])
def test_other_chunk_sizes(chunk):
    metadata, rows = build([1, 130, 16, 17], [5, 130, 16, 17], [False, True, True, True], chunk_size=chunk)
    check(metadata, rows, 0, chunk=chunk)


# -- checkpoints ---------------------------------------------------------------------------------------------------------


def test_checkpoints_asked_for():
    table = random_table(3, 1)
    batch = Batch.make([1, 130, 70], [9, 130, 90], table, is_prefilling=[False, True, True],
                       checkpoints=[Checkpoint(1, 128, 41)])
    got = KDAMetadataBuilder("cpu").build(batch).checkpoint
    same(got.offsets, [128, 0])
    same(got.state_indices, [41, 0])
    assert got.exported == ((1, 128),) and got.rows.tolist() == [0]


def test_aligned_prefills_export_the_state_of_their_last_whole_block():
    table = random_table(4, 8)
    # row 0 decodes; row 1: 130 tokens from 0, blocks of 64 -> after 128; row 2 ends on a boundary: its own slot holds it;
    # row 3 began at token 30: 64 - 30 = 34 tokens in, no chunk boundary of this call, so nothing can be exported
    batch = Batch.make([1, 130, 64, 50], [9, 130, 64, 80], table, is_prefilling=[False, True, True, True])
    got = KDAMetadataBuilder("cpu", cache_mode="align", block_size=64).build(batch).checkpoint
    same(got.offsets, [128, 0, 0])
    same(got.state_indices, [int(table[1, 1]), 0, 0])
    assert got.exported == ((1, 128),)


@pytest.mark.parametrize("wish, words", [
    (Checkpoint(0, 64, 3), "prefilled"), (Checkpoint(1, 100, 3), "multiple of 64"), (Checkpoint(1, 192, 3), "130 tokens"),
    (Checkpoint(1, 64, 0), "reserved"),
])
def test_checkpoints_that_cannot_be_had_are_refused(wish, words):
    batch = Batch.make([1, 130], [9, 130], random_table(2, 1), is_prefilling=[False, True], checkpoints=[wish])
    with pytest.raises(ArgumentError, match=words):
        KDAMetadataBuilder("cpu").build(batch)


def test_a_checkpoint_of_a_decode_is_refused_with_or_without_prefills_beside_it():
    for lens, words in (([1, 1], "row 0.*of which there is none"), ([1, 130], r"row 0.*one of \[1\]")):
        batch = Batch.make(lens, [9, 130], random_table(2, 1), is_prefilling=[False, lens[1] > 1],
                           checkpoints=[Checkpoint(0, 64, 3)])
        with pytest.raises(ArgumentError, match=f"checkpoints: got {words}"):
            KDAMetadataBuilder("cpu").build(batch)


# -- refusals ------------------------------------------------------------------------------------------------------------


def refused(kind, words, change, k=0, accepted=None, drafts=None):
    batch = Batch.make([1, 3], [5, 9], random_table(2, k + 1))
    change(batch)
    with pytest.raises(kind, match=words):
        KDAMetadataBuilder("cpu", k).build(batch, accepted, drafts)


def test_refusals_name_the_field():
    put = lambda name, value: lambda batch: setattr(batch, name, value)
    refused(ArgumentError, "query_start_loc_cpu.*never decrease", put("query_start_loc_cpu", np.array([0, 3, 1], np.int32)))
    refused(ArgumentError, "query_start_loc_cpu.*first entry", put("query_start_loc_cpu", np.array([1, 2, 3], np.int32)))
    refused(ArgumentTypeError, "query_start_loc_cpu.*int32", put("query_start_loc_cpu", np.array([0, 1, 4])))
    refused(ArgumentError, "num_actual_tokens", put("num_actual_tokens", 3))
    refused(ArgumentError, "seq_lens_cpu_upper_bound.*shape", put("seq_lens_cpu_upper_bound", np.array([1], np.int32)))
    refused(ArgumentError, "seq_lens_cpu_upper_bound: got 2 for row 1, expected at least its 3 tokens",
            put("seq_lens_cpu_upper_bound", np.array([5, 2], np.int32)))
    refused(ArgumentTypeError, "is_prefilling_cpu.*bool", put("is_prefilling_cpu", np.array([0, 1])))
    refused(ArgumentError, "seq_lens: .*shape", put("seq_lens", torch.ones(3, dtype=torch.int32)))
    refused(ArgumentTypeError, "block_table.*int32", put("block_table", torch.ones(2, 1)))
    refused(ArgumentError, "block_table.*at least", put("block_table", torch.ones(1, 1, dtype=torch.int32)))
    refused(ArgumentError, "block_table.*at least", lambda batch: setattr(batch, "block_table", batch.block_table[:, :1]), 2)
    refused(ArgumentError, "num_accepted_tokens", lambda batch: None, 2, None, np.array([0, 2], np.int32))
    refused(ArgumentError, "num_decode_draft_tokens_cpu", lambda batch: None, 2, torch.ones(2, dtype=torch.int32),
            np.array([0], np.int32))


def test_constructor_refusals():
    for options, words in (({"cache_mode": "some"}, "cache_mode"), ({"cache_mode": "align"}, "block_size"),
                           ({"num_spec": -1}, "num_spec"), ({"chunk_size": 48}, "chunk_size"),
                           ({"conv_blocks": ()}, "conv_blocks"), ({"conv_blocks": 8}, "conv_blocks: got 8"),
                           ({"chunk_size": 64.0}, "chunk_size: got 64.0")):
        with pytest.raises(ArgumentError, match=words):
            KDAMetadataBuilder("cpu", **options)
    with pytest.raises(TypeError):
        KDAMetadataBuilder("cpu", spec=2)


def test_a_ragged_table_is_refused():
    with pytest.raises(ArgumentError, match=r"block_table: got rows of \[2, 1\] slots, expected rows of one length"):
        Batch.make([1, 1], [3, 4], [[1, 2], [3]])


def test_an_aligned_table_too_narrow_for_its_request_is_refused():
    batch = Batch.make([1], [65], random_table(1, 2))
    with pytest.raises(ArgumentError, match="at least 4"):
        KDAMetadataBuilder("cpu", 2, cache_mode="align", block_size=64).build(batch, torch.ones(1, dtype=torch.int32),
                                                                             np.zeros(1, np.int32))

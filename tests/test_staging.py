"""Staging of speculative decode: padding, strides, stale buffers, capacities, refusals, compile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdagen.errors import ArgumentError, ArgumentTypeError
from kdagen.ops.staging import stage_spec_decode_metadata
from kdagen.reference import stage_spec_decode

POISON = -77


@pytest.fixture(params=["1", "0"], ids=["interpreter", "cpu"])
def path(request, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", request.param)


def sources(rng: torch.Generator, requests: int, *, width: int = 32, tokens: int = 4) -> tuple[torch.Tensor, ...]:
    """A block table, boundaries of up to ``tokens`` tokens each (zero-draft rows among them), accepted counts."""
    def random(low, high, *shape):
        return torch.randint(low, high, shape, generator=rng, dtype=torch.int32)

    lengths = random(0, tokens + 1, requests)
    qsl = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return random(1, 9999, requests, width), qsl, random(1, tokens + 1, requests)


def buffers(rows: int, columns: int, spare: int = 0) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full(shape, POISON, dtype=torch.int32)
                 for shape in ((rows + spare, columns), (rows + spare + 1,), (rows + spare,)))


def assert_staged(source, staged, requests: int, null_slot: int = 0) -> None:
    rows, columns = staged[0].shape
    want = stage_spec_decode(*source, rows, columns, requests, null_slot)
    for out, ref, length in zip(staged, want, (rows, rows + 1, rows)):
        assert torch.equal(out[:length], ref), f"{out.tolist()} instead of {ref.tolist()}"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 70), st.integers(0, 40), st.integers(1, 6), st.integers(0, 3), st.integers(-1, 5),
       st.integers(0, 2**31))
def test_any_step(path, requests, padding, columns, skip, null_slot, seed):
    """S requests in B rows; the state a strided slice of a wider table; every buffer poisoned before."""
    rng = torch.Generator().manual_seed(seed)
    table, qsl, accepted = sources(rng, requests + 2)  # more source rows than requests: never read
    source = table[:, skip:skip + 7], qsl, accepted
    staged = buffers(requests + padding, columns)
    stage_spec_decode_metadata(*source, *staged, num_spec_decodes=requests, null_slot=null_slot)
    assert_staged(source, staged, requests, null_slot)


def test_upstream_shape(path, rng):
    """33 requests in 65 rows, 3 columns out of a 32-wide table."""
    table, qsl, accepted = sources(rng, 33)
    staged = buffers(65, 3)
    stage_spec_decode_metadata(table[:, 5:8], qsl, accepted, *staged, num_spec_decodes=33)
    assert_staged((table[:, 5:8], qsl, accepted), staged, 33)


def test_every_other_column_and_strided_vectors(path, rng):
    table, qsl, accepted = sources(rng, 9)
    wide_qsl, wide_accepted = torch.full((10, 3), POISON, dtype=torch.int32), torch.full((9, 2), POISON, dtype=torch.int32)
    wide_qsl[:, 1], wide_accepted[:, 0] = qsl, accepted
    source = table.t().contiguous().t()[:, ::2], wide_qsl[:, 1], wide_accepted[:, 0]
    staged = buffers(12, 5)
    stage_spec_decode_metadata(*source, *staged, num_spec_decodes=9)
    assert_staged(source, staged, 9)


def test_padding_counts_requests_not_tokens(path, rng):
    """72 requests of 4 tokens stage 72 rows; rows of the buffers past B keep what they held."""
    table, _, accepted = sources(rng, 72)
    qsl = torch.arange(73, dtype=torch.int32) * 4
    state, staged_qsl, staged_accepted = buffers(72, 4, spare=20)
    stage_spec_decode_metadata(table, qsl, accepted, state[:72], staged_qsl, staged_accepted, num_spec_decodes=72)
    assert_staged((table, qsl, accepted), (state[:72], staged_qsl, staged_accepted), 72)
    for buffer, used in ((state, 72), (staged_qsl, 73), (staged_accepted, 72)):
        assert bool((buffer[used:] == POISON).all())


@pytest.mark.parametrize("over", [0, 1])
def test_capacity(path, rng, over):
    """As many requests as rows fit; one more is refused before anything is written."""
    source, staged = sources(rng, 8 + over), buffers(8, 3)
    if not over:
        stage_spec_decode_metadata(*source, *staged, num_spec_decodes=8)
        assert_staged(source, staged, 8)
        return
    with pytest.raises(ArgumentError, match=r"num_spec_decodes: got 9, expected 0 to 8.*requests, not tokens"):
        stage_spec_decode_metadata(*source, *staged, num_spec_decodes=9)
    assert all(bool((buffer == POISON).all()) for buffer in staged)


def test_no_request_leaves_nothing_stale(path, rng):
    """After a step of 6 requests, S = 0 makes every row padding: a graph replayed then touches no slot."""
    source, staged = sources(rng, 6), buffers(8, 3)
    stage_spec_decode_metadata(*source, *staged, num_spec_decodes=6)
    stage_spec_decode_metadata(*source, *staged, num_spec_decodes=0)
    assert not staged[0].any() and bool((staged[1] == source[1][0]).all()) and bool((staged[2] == 1).all())


def test_zero_draft_rows(path):
    """Requests with no draft (one token each) are staged like the others."""
    source = (torch.tensor([[7, 8], [9, 10]], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32),
              torch.tensor([1, 1], dtype=torch.int32))
    staged = buffers(3, 2)
    stage_spec_decode_metadata(*source, *staged, num_spec_decodes=2)
    assert [buffer.tolist() for buffer in staged] == [[[7, 8], [9, 10], [0, 0]], [0, 1, 2, 2], [1, 1, 1]]


@pytest.mark.parametrize(("position", "change", "kind", "words"), [
    (0, lambda t: t.long(), ArgumentTypeError, ("state_indices", "int64", "int32")),
    (0, lambda t: t[:, :2], ArgumentError, ("state_indices", "[4, 2]", "3 columns")),
    (0, lambda t: t[:3], ArgumentError, ("state_indices", "[3, 32]", "4 rows")),
    (0, lambda t: t[:, 0], ArgumentError, ("state_indices", "[4]", "2 dimensions")),
    (1, lambda t: t[:4], ArgumentError, ("query_start_loc", "[4]", "5 entries")),
    (1, lambda t: t.to("meta"), ArgumentTypeError, ("query_start_loc", "meta", "cpu")),
    (2, lambda t: t[:3], ArgumentError, ("num_accepted_tokens", "[3]", "4 entries")),
    (2, lambda t: t.float(), ArgumentTypeError, ("num_accepted_tokens", "float32")),
    (3, lambda t: t[:, :0], ArgumentError, ("state_indices", "1 columns")),
    (3, lambda t: t.t().contiguous().t(), ArgumentError, ("staged_state_indices", "strides", "contiguous")),
    (4, lambda t: t[:6], ArgumentError, ("staged_query_start_loc", "[6]", "7 entries")),
    (5, lambda t: t[:5], ArgumentError, ("staged_num_accepted_tokens", "[5]", "6 entries")),
])
def test_refusals(path, rng, position, change, kind, words):
    arguments = [*sources(rng, 4), *buffers(6, 3)]
    arguments[position] = change(arguments[position])
    with pytest.raises(kind) as caught:
        stage_spec_decode_metadata(*arguments, num_spec_decodes=4)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize("requests", [-1, 7])
def test_refused_counts(path, rng, requests):
    with pytest.raises(ArgumentError, match="num_spec_decodes"):
        stage_spec_decode_metadata(*sources(rng, 9), *buffers(6, 3), num_spec_decodes=requests)


def test_unknown_keyword(rng):
    with pytest.raises(TypeError, match="null_block"):
        stage_spec_decode_metadata(*sources(rng, 2), *buffers(2, 1), num_spec_decodes=2, null_block=0)


def test_compiles_without_a_break(cpu_path, rng):
    torch._dynamo.reset()

    def step(*arguments):
        stage_spec_decode_metadata(*arguments, num_spec_decodes=3)
        return arguments[4].sum()

    source, staged = sources(rng, 3), buffers(5, 2)
    total = torch.compile(step, fullgraph=True, backend="aot_eager")(*source, *staged)
    assert_staged(source, staged, 3)
    assert total == staged[1].sum()


def test_opcheck(cpu_path, rng):
    op, arguments = torch.ops.kdagen.stage_spec_decode_metadata.default, (*sources(rng, 3), *buffers(5, 2), 3, 0, True)
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))

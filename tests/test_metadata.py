"""The step's tables: against the oracle on both paths, every edge case of the boundaries, bounds, refusals, compile."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from inputs import cu_seqlens as boundaries
from kdagen import dispatch, families
from kdagen.errors import ArgumentError, ArgumentTypeError, KdagenError
from kdagen.families.step_tables import MAX_SCHEDULES
from kdagen.launch import Handle
from kdagen.ops import _tables_source
from kdagen.ops._tables import exact_sizes, plan, write
from kdagen.ops.metadata import build_conv1d_chunk_schedule, prepare_chunk_metadata_device, step_tables
from kdagen.reference import chunk_table, conv_schedule
from kdagen.spec import CHUNKS, Problem, Spec, Variant, parse

FAMILY = families.get("step_tables")
POISON = -77


@pytest.fixture(params=["1", "0"], ids=["interpreter", "cpu"])
def path(request, monkeypatch):
    """The kernel in Triton's interpreter, then the CPU path: the same results from both."""
    monkeypatch.setenv("TRITON_INTERPRET", request.param)
    return request.param


def chunk_rows(cu: torch.Tensor, chunk: int) -> torch.Tensor:
    """The oracle of step_tables' chunk_rows: [NT, 4] of (first token, valid tokens, sequence, chunk in it)."""
    edges, rows = cu.tolist(), []
    for n, t in chunk_table(cu, chunk)[0].tolist():
        first = edges[n] + t * chunk
        rows.append((first, min(chunk, edges[n + 1] - first), n, t))
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 4)


def assert_same(out: torch.Tensor, want: torch.Tensor) -> None:
    assert out.dtype == want.dtype and out.shape == want.shape, f"{out.dtype} {list(out.shape)}"
    assert torch.equal(out, want), f"{out.tolist()} instead of {want.tolist()}"


def assert_schedule(made: dict, cu: torch.Tensor, block: int) -> None:
    want = conv_schedule(cu, block)
    assert list(made) == ["tot", "batch_ptr", "token_chunk_offset_ptr"] and type(made["tot"]) is int
    assert made["tot"] == want["tot"]
    assert_same(made["batch_ptr"], want["batch_ptr"])
    assert_same(made["token_chunk_offset_ptr"], want["token_chunk_offset_ptr"])


def assert_padded(out: torch.Tensor, want: torch.Tensor, size: int) -> None:
    """``want``, then -1 up to ``size`` rows."""
    assert out.shape[0] == size
    assert_same(out[:len(want)], want)
    assert bool((out[len(want):] == -1).all())


def check_all(cu: torch.Tensor, chunk: int, blocks: list[int], spare: int) -> None:
    indices, offsets = chunk_table(cu, chunk)
    made = prepare_chunk_metadata_device(cu, cu, chunk)
    assert_same(made[0], indices)
    assert_same(made[1], offsets)
    exact = step_tables(cu, cu, chunk_size=chunk, blocks=blocks, rows=True)
    assert_same(exact.chunk_indices, indices)
    assert_same(exact.chunk_offsets, offsets)
    assert_same(exact.chunk_rows, chunk_rows(cu, chunk))
    assert exact.counts is None and set(exact.schedules) == set(blocks)
    for block in exact.schedules:
        assert_schedule(exact.schedules[block], cu, block)

    n_seqs, tokens = len(cu) - 1, int(cu[-1] - cu[0]) + spare
    bounded = step_tables(cu, chunk_size=chunk, blocks=blocks, rows=True, tokens=tokens)
    size = -(-tokens // chunk) + n_seqs
    assert_padded(bounded.chunk_indices, indices, size)
    assert_padded(bounded.chunk_rows, chunk_rows(cu, chunk), size)
    assert_same(bounded.chunk_offsets, offsets)
    for block, schedule in bounded.schedules.items():
        want = conv_schedule(cu, block)
        assert schedule["tot"] == -(-tokens // block) + n_seqs
        assert_padded(schedule["batch_ptr"], want["batch_ptr"], schedule["tot"])
        assert_padded(schedule["token_chunk_offset_ptr"], want["token_chunk_offset_ptr"], schedule["tot"])
    true = [len(indices), *(conv_schedule(cu, block)["tot"] for block in bounded.schedules)]
    assert bounded.counts.dtype == torch.int32 and bounded.counts.tolist() == true


# ---- against the oracle

edges = st.sampled_from([15, 16, 63, 64, 65, 128, 129])
lengths = st.lists(st.one_of(st.integers(0, 3), edges, st.integers(0, 700)), max_size=40)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths, st.integers(0, 10_000), st.sampled_from([torch.int32, torch.int64]), st.sampled_from(CHUNKS),
       st.lists(st.integers(1, 80), max_size=2), st.integers(0, 200))
def test_any_batch(path, lengths, start, dtype, chunk, blocks, spare):
    cu = boundaries(lengths, dtype) + start
    check_all(cu, chunk, blocks, spare)
    for block in blocks:
        assert_schedule(build_conv1d_chunk_schedule(cu, block, "cpu"), cu, block)


@pytest.mark.parametrize("lengths", [
    [], [0], [0, 0, 0], [0, 64], [64, 0], [5, 0, 130], [0, 0, 1, 0, 0, 70, 0], [64], [65], [1]])
def test_empty_sequences_and_exact_multiples(path, lengths):
    check_all(boundaries(lengths), 64, [8], spare=0)


@pytest.mark.parametrize(("lengths", "indices", "offsets"), [
    ([5, 0, 130], [[0, 0], [2, 0], [2, 1], [2, 2]], [0, 1, 1, 4]),
    ([0, 64], [[1, 0]], [0, 0, 1]),
    ([0, 1, 3], [[1, 0], [2, 0]], [0, 0, 1, 2]),
    ([], [], [0]),
])
def test_vectors(path, lengths, indices, offsets):
    made = prepare_chunk_metadata_device(boundaries(lengths), boundaries(lengths), 64)
    assert made[0].tolist() == indices and made[1].tolist() == offsets


def test_conv_vector(path):
    made = build_conv1d_chunk_schedule(boundaries([5, 0, 130]), 8, torch.device("cpu"))
    assert made["tot"] == 18
    assert made["batch_ptr"].tolist() == [0] + [2] * 17 and made["token_chunk_offset_ptr"].tolist() == [0, *range(17)]


@pytest.mark.parametrize("sequences", [128, 129, 1023, 1024, 1025, 2100])
def test_more_sequences_than_one_read(path, rng, sequences):
    """A program reads 128 sequences at once, and skips those before its rows 1,024 at a time: around both."""
    lengths = torch.randint(0, 3, (sequences,), generator=rng)
    lengths[torch.randint(0, sequences, (3,), generator=rng)] = 200
    check_all(boundaries(lengths.tolist()), 64, [], spare=10)


def test_many_block_sizes_in_one_launch(path, rng):
    cu = boundaries(torch.randint(0, 90, (7,), generator=rng).tolist())
    check_all(cu, 16, [1, 2, 3, 4, 8, 16, 32, 64, 128, 200], spare=3)


@pytest.mark.parametrize("empty", [0.0, 0.9])
def test_programs_begin_anywhere(path, rng, empty):
    """Programs skip nothing, part of a read, all of one."""
    lengths = torch.randint(0, 40, (1500,), generator=rng) * (torch.rand(1500, generator=rng) >= empty)
    lengths[700:860] = 0
    check_all(boundaries(lengths.tolist()), 16, [37], spare=0)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.integers(1, 2**30), st.integers(0, 30).map(lambda n: 1 << n)), st.integers(0, 2**31 - 1), st.data())
def test_the_reciprocal_is_exact(block, length, data):
    """For every length: any, whole blocks, and one token more or fewer."""
    module = dispatch.pick(Spec.make("step_tables", dtype="i32", schedules=1), Problem(1, 1, 1),
                           dispatch.devices.named("h200")).module
    factor, shift = module.reciprocal(block)
    assert 2**31 <= factor < 2**32, "an int64 for Triton, whatever the block"
    whole = data.draw(st.integers(0, (2**31 - 1) // block)) * block
    for tokens in (length, whole, max(whole - 1, 0), min(whole + 1, 2**31 - 1), 2**31 - 1):
        assert (tokens * factor + (1 << shift) - 1) >> shift == -(-tokens // block)
        assert tokens * factor + (1 << shift) - 1 < 2**64


@pytest.mark.parametrize("block", [2**30 - 1, 2**29, 715_827_883])
def test_sequences_of_two_billion_tokens(path, block):
    cu = boundaries([2**31 - 1, 0, 5, block], torch.int64)
    assert_schedule(build_conv1d_chunk_schedule(cu, block, "cpu"), cu, block)


def test_host_copy_of_another_dtype(path):
    cu = boundaries([5, 0, 130])
    made = prepare_chunk_metadata_device(cu, cu.long(), 64)
    assert_same(made[0], chunk_table(cu, 64)[0])
    assert made[1].dtype == torch.int64


# ---- how the work is spread


@pytest.mark.parametrize("lengths", [[200_000], [100] * 1024])
def test_built_by_many_programs(monkeypatch, lengths):
    """Neither one long sequence nor many short ones are the work of one program, and no program owns over 512 rows."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = Spec.make("step_tables", chunk=64, dtype="i32", schedules=1)
    module = dispatch.pick(spec, Problem(1, 1, 1), dispatch.devices.named("h200")).module
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(module, "step_tables_kernel", Kernel())
    cu = boundaries(lengths)
    made = step_tables(cu, cu, blocks=[8])
    rows = len(made.chunk_indices), made.schedules[8]["tot"]
    assert len(grids) == 1 and len(grids[0]) == 1
    assert grids[0][0] >= sum(-(-size // 512) for size in rows) >= 30
    assert module.ROWS <= 512


# ---- bounds: what happens when the boundaries on the device are not what the host said


def guarded(size: int, *columns: int, dtype=torch.int32) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned output in the middle of a poisoned buffer: (the buffer, the output)."""
    width = columns[0] if columns else 1
    buffer = torch.full(((size + 600) * width,), POISON, dtype=dtype)
    return buffer, buffer[300 * width:(300 + size) * width].view(size, *columns)


@pytest.mark.parametrize("host", [[5, 0, 130], [0, 0, 0], [64, 64, 64], [900, 1, 70]])
@pytest.mark.parametrize("device", [[5, 0, 130], [700, 5, 600], [0, 0, 0], [0, 0, 70], [-40, 300, -5], [-500, -1, -64]])
def test_device_boundaries_never_write_out_of_bounds(host, device):
    """More chunks than the host's copy: cut at the end. Fewer: -1. Negative lengths: as empty."""
    module = dispatch.pick(Spec.make("step_tables", chunk=64, dtype="i32", schedules=1), Problem(1, 1, 1),
                           dispatch.devices.named("h200")).module
    cu, true = boundaries(device) + 600, boundaries([max(length, 0) for length in device])
    n_chunks, tot = len(chunk_table(boundaries(host), 64)[0]), conv_schedule(boundaries(host), 8)["tot"]
    buffers, outputs = zip(guarded(4, dtype=torch.int64), guarded(n_chunks, 2), guarded(n_chunks, 4), guarded(tot),
                           guarded(tot))
    offsets, chunks, rows, seq, part = outputs
    counts = torch.full((2,), POISON, dtype=torch.int32)
    module.launch(cu, 3, counts, offsets, chunks, rows, n_chunks, seq, part, 8, tot)
    indices, schedule = chunk_table(true, 64)[0], conv_schedule(true, 8)
    assert counts.tolist() == [len(indices), schedule["tot"]]
    assert_padded(chunks, indices[:n_chunks], n_chunks)
    assert_padded(rows[:, 2:], indices[:n_chunks], n_chunks)
    assert_padded(seq, schedule["batch_ptr"][:tot], tot)
    assert_padded(part, schedule["token_chunk_offset_ptr"][:tot], tot)
    assert_same(offsets, chunk_table(true, 64)[1].clamp(max=n_chunks))
    for buffer, output in zip(buffers, outputs):
        assert int((buffer != POISON).sum()) == output.numel()


@pytest.mark.parametrize("pattern", [[1] * 16 + [0] * 16, [1] * 31 + [97], [0] * 31 + [64]])
def test_what_programs_skip_ends_on_their_first_row(pattern):
    """Empty sequences on a program's first row are its own: it writes their offsets, onto poison."""
    module = dispatch.pick(Spec.make("step_tables", chunk=64, dtype="i32", schedules=1), Problem(1, 1, 1),
                           dispatch.devices.named("h200")).module
    cu = boundaries(pattern * 40)
    (indices, starts), schedule, n_seqs = chunk_table(cu, 64), conv_schedule(cu, 64), len(cu) - 1
    offsets = torch.full((n_seqs + 1,), POISON, dtype=torch.int64)
    chunks, seq, part = (torch.full(shape, POISON, dtype=torch.int32) for shape in (indices.shape, *[(len(indices),)] * 2))
    module.launch(cu, n_seqs, None, offsets, chunks, None, len(chunks), seq, part, 64, len(seq))
    assert_same(offsets, starts)
    assert_same(chunks, indices)
    assert_same(seq, schedule["batch_ptr"])
    assert_same(part, schedule["token_chunk_offset_ptr"])


def test_device_and_host_disagree_through_the_op(path):
    """The same through the public op: the sizes are the host's."""
    host, device = boundaries([64, 64]), boundaries([640, 1])
    indices, offsets = prepare_chunk_metadata_device(device, host, 64)
    assert indices.tolist() == [[0, 0], [0, 1]] and offsets.tolist() == [0, 2, 2]
    indices, offsets = prepare_chunk_metadata_device(host, device, 64)
    assert indices.tolist() == [[0, 0], [1, 0]] + [[-1, -1]] * 9 and offsets.tolist() == [0, 1, 2]


def test_bounded_tokens_too_few(path):
    """More tokens than promised: the tables end at their size, the counts tell."""
    made = step_tables(boundaries([640]), tokens=64, blocks=[8])
    assert made.chunk_indices.tolist() == [[0, 0], [0, 1]] and made.chunk_offsets.tolist() == [0, 2]
    assert made.counts.tolist() == [10, 80] and made.schedules[8]["batch_ptr"].tolist() == [0] * 9


def test_every_call_owns_its_buffers(path):
    cu = boundaries([5, 0, 130])
    first = build_conv1d_chunk_schedule(cu, 8, "cpu")
    kept = {name: value.clone() for name, value in first.items() if name != "tot"}
    second = build_conv1d_chunk_schedule(cu, 16, "cpu")
    both = step_tables(cu, cu, blocks=[8, 16])
    tensors = [value for made in (first, second, *both.schedules.values()) for name, value in made.items() if name != "tot"]
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for tensor in tensors[2:]:
        tensor.fill_(POISON)
    assert all(torch.equal(first[name], value) for name, value in kept.items())


# ---- what a step with prefills needs besides


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.integers(0, 3), edges, st.integers(0, 300)), min_size=1, max_size=40), st.data())
def test_requests(path, lengths, data):
    """Base sequences are left out of everything, the next ``first`` of the chunk table; inputs are strided."""
    base = data.draw(st.integers(0, len(lengths) - 1))
    first = data.draw(st.integers(0, len(lengths) - base))
    cu = boundaries(lengths)
    before = torch.tensor([data.draw(st.sampled_from([0, 0, 1, 50])) for _ in lengths], dtype=torch.int32)
    lens = torch.stack([cu.diff() + before, torch.full_like(before, POISON)], 1)[:, 0]
    table = torch.arange(3 * len(lengths), dtype=torch.int32).view(-1, 3)
    planned, rest = plan(64, 8, 3), cu[base:]
    sizes = [exact_sizes("x", rest[first:], len(rest) - 1 - first, planned, True)[0],
             *exact_sizes("x", rest, len(rest) - 1, planned, True)[1:]]
    tables, requests = write(cu, len(rest) - 1, planned, sizes, -1, True, False, False,
                             (base, first, lens, lens.stride(0), table, table.stride(0)))
    chunked = rest[first:] - rest[first]
    indices, offsets = chunk_table(chunked, 64)
    assert_same(tables.chunk_indices, indices)
    assert_same(tables.chunk_offsets, offsets)
    assert_same(tables.chunk_rows, chunk_rows(chunked, 64))
    for block in (8, 3):
        assert_schedule(tables.schedules[block], rest, block)
    assert_same(requests.starts, chunked)
    assert_same(requests.slots, table[base + first:, 0].contiguous())
    assert_same(requests.carries, before[base:] > 0)
    assert_same(requests.first_carries, before[base + first:] > 0)


# ---- the short way to launch


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("sizes", "kind"), [
    ((64, 8), (False, False, False)), ((64, 8, 3), (True, True, False)), ((64,), (False, False, False)),
    ((0, 8), (False, False, False)), ((64, 8), (True, False, True)), ((64, 8, 3), (True, True, True))])
def test_a_direct_launch_passes_what_launch_does(monkeypatch, sizes, kind, apart):
    """Addresses, sizes, the grid and the order of both: the composed call beside the generated module's ``launch``."""
    requests = kind[2]
    chunk, *blocks = sizes
    planned, cu = plan(chunk or None, *blocks), boundaries([5, 0, 130, 700, 1])
    spec = Spec.make("step_tables", chunk=chunk, dtype="i32", schedules=len(blocks), requests=requests)
    module = dispatch.pick(spec, Problem(1, 1, 1), dispatch.devices.named("h200")).module
    launches = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: launches.append((*grid, *arguments, options["ROWS"]))

    def call(x, y, z, stream, function, cooperative, pdl, _1, _2, packed, _3, _4, _5, *values):
        assert (y, z, stream, function, cooperative, pdl, packed) == (1, 1, "stream 3", "function", 0, 1, "packed")
        launches.append((x, *values))

    monkeypatch.setattr(module, "step_tables_kernel", Kernel())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: f"stream {index}", raising=False)
    hooked = SimpleNamespace(calls=[])
    monkeypatch.setattr(_tables_source, "knobs", SimpleNamespace(
        runtime=SimpleNamespace(launch_enter_hook=hooked, launch_exit_hook=hooked)))
    direct = Handle(None, True, call, "function", 0, 1, "packed"), module, 3
    tables = _tables_source.compose(planned, torch.int32, *kind, apart, run=module.launch, cuda=False, direct=direct)
    n_rows = exact_sizes("x", cu, 5, planned, True)
    table = torch.zeros(5, 2, dtype=torch.int32)
    given = (cu, 5, n_rows, *((0, 2, cu, 1, table, 2) if requests else ()))
    made = tables(*given)
    hooked.calls.append("a profiler")
    again = tables(*given)
    grid = sum(-(-size // module.ROWS) for size in n_rows) + requests
    assert [launch[0] for launch in launches] == [grid, grid]
    where = {leaf.data_ptr(): number for leaves in (made, again)
             for number, leaf in enumerate(leaf for leaf in tree_leaves(leaves) if isinstance(leaf, torch.Tensor))}
    where |= {cu.data_ptr(): "cu_seqlens", table.data_ptr(): "table"}
    direct, plain = ([where.get(value.data_ptr() if isinstance(value, torch.Tensor) else value, value) for value in launch]
                     for launch in launches)
    assert direct == plain and not [value for value in plain if isinstance(value, torch.Tensor)]
    leaves = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
    assert all(leaf.data_ptr() % 16 == 0 for leaf in leaves)
    spans = sorted((leaf.data_ptr(), leaf.data_ptr() + leaf.nbytes) for leaf in leaves)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    allocations = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    assert len(allocations) == (len(leaves) if apart else len({leaf.dtype for leaf in leaves}))


# ---- refusals: which argument, what came, what was expected

CU = torch.tensor([0, 5, 5, 135], dtype=torch.int32)


def prepare(cu=CU, host=CU, chunk=64):
    return prepare_chunk_metadata_device(cu, host, chunk)


def conv(host=CU, block=8):
    return build_conv1d_chunk_schedule(host, block, "cpu")


META = CU.to("meta")
LONG = torch.arange(80, dtype=torch.int32) % 40  # more sequences than plain Python counts


@pytest.mark.parametrize(("call", "kind", "words"), [
    (lambda: prepare(cu=CU.float()), TypeError, ("cu_seqlens", "float32", "int32 or torch.int64")),
    (lambda: prepare(host=CU.short()), TypeError, ("cu_seqlens_cpu", "int16")),
    (lambda: prepare(cu=CU[None]), ValueError, ("cu_seqlens", "[1, 4]", "[N+1]")),
    (lambda: prepare(cu=CU[:0], host=CU[:0]), ValueError, ("cu_seqlens", "[0]", "[N+1]")),
    (lambda: prepare(cu=CU[::2], host=CU[::2].contiguous()), ValueError, ("cu_seqlens", "stride 2", "contiguous")),
    (lambda: prepare(host=CU[:3]), ValueError, ("cu_seqlens_cpu", "[3]", "[4]")),
    (lambda: prepare(host=META), TypeError, ("cu_seqlens_cpu", "meta", "CPU")),
    (lambda: prepare(host=torch.tensor([0, 9, 4, 20])), ValueError, ("cu_seqlens_cpu", "9 followed by 4", "sequence 1")),
    (lambda: prepare(LONG, LONG), ValueError, ("cu_seqlens_cpu", "39 followed by 0", "sequence 39")),
    (lambda: prepare(chunk=48), ValueError, ("chunk_size", "48", "16, 32, 64, 128")),
    (lambda: prepare(chunk=0), ValueError, ("chunk_size", "0", "16, 32, 64, 128")),
    (lambda: prepare(chunk=None), ValueError, ("chunk_size", "16, 32, 64, 128")),
    (lambda: prepare(chunk=64.0), ValueError, ("chunk_size", "64.0")),
    (lambda: conv(host=META), TypeError, ("query_start_loc_cpu", "meta", "CPU")),
    (lambda: conv(host=CU.double()), TypeError, ("query_start_loc_cpu", "float64")),
    (lambda: conv(host=CU.flip(0)), ValueError, ("query_start_loc_cpu", "135 followed by 5")),
    (lambda: conv(block=0), ValueError, ("block_m", "0", "positive")),
    (lambda: conv(block=-8), ValueError, ("block_m", "-8", "positive")),
    (lambda: conv(block=8.0), ValueError, ("block_m", "8.0")),
    (lambda: step_tables(CU), ValueError, ("tokens", "absent", "cu_seqlens_cpu")),
    (lambda: step_tables(CU, CU, tokens=9), ValueError, ("tokens", "given")),
    (lambda: step_tables(CU, tokens=-1), ValueError, ("tokens", "-1")),
    (lambda: step_tables(CU, tokens=1.5), ValueError, ("tokens", "1.5")),
    (lambda: step_tables(CU, CU, blocks=[8, 0]), ValueError, ("blocks", "0")),
    (lambda: step_tables(CU, CU, blocks=range(1, MAX_SCHEDULES + 2)), ValueError, ("blocks", "17", "16")),
    (lambda: step_tables(CU, CU, chunk_size=96), ValueError, ("chunk_size", "96")),
])
def test_refusals(path, call, kind, words):
    with pytest.raises(KdagenError) as caught:
        call()
    assert isinstance(caught.value, kind)
    assert isinstance(caught.value, ArgumentError if kind is ValueError else ArgumentTypeError)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize("op", [prepare_chunk_metadata_device, step_tables])
def test_unknown_keyword(op):
    with pytest.raises(TypeError, match="chunksize"):
        op(CU, CU, 64, chunksize=64) if op is prepare_chunk_metadata_device else op(CU, CU, chunksize=64)


def test_unchecked_boundaries_stay_in_bounds(path):
    """What is promised without checks: sequences of negative length count as empty, on the host as on the device."""
    bad = torch.tensor([0, 90, 10, 74], dtype=torch.int32)
    indices, offsets = prepare_chunk_metadata_device(bad, bad, 64, checked=False)
    assert indices.tolist() == [[0, 0], [0, 1], [2, 0]] and offsets.tolist() == [0, 2, 2, 3]
    for blocks in ([8], [7]):
        made = step_tables(LONG, LONG, chunk_size=16, blocks=blocks, checked=False)
        true = boundaries(LONG.diff().clamp(min=0).tolist())
        assert_same(made.chunk_indices, chunk_table(true, 16)[0])
        assert_schedule(made.schedules[blocks[0]], true, blocks[0])


# ---- torch.compile and the op's schema


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_compiles_without_a_break(cpu_path):
    def step(cu, host):
        indices, offsets = prepare_chunk_metadata_device(cu, host, 64)
        schedule = build_conv1d_chunk_schedule(host, 8, "cpu")
        exact = step_tables(cu, host, blocks=[8, 3], rows=True)
        bounded = step_tables(cu, blocks=[8], tokens=1000)
        return indices, offsets, schedule, exact, bounded, indices.sum(0)

    run = compiled(step)
    for lengths in ([5, 0, 130], [200, 1, 64], [1, 1]):
        cu = boundaries(lengths)
        for got, want in zip(tree_leaves(run(cu, cu)), tree_leaves(step(cu, cu)), strict=True):
            assert got is want is None or torch.equal(torch.as_tensor(got), torch.as_tensor(want))


def test_opcheck(cpu_path):
    for op, arguments in (
        (torch.ops.kdagen.prepare_chunk_metadata_device, (CU, CU, 64, True)),
        (torch.ops.kdagen.build_conv1d_chunk_schedule, (CU, 8, torch.device("cpu"), True)),
        (torch.ops.kdagen.step_tables, (CU, CU, 64, [8, 16], None, True, True)),
        (torch.ops.kdagen.step_tables, (CU, None, 64, [8], 500, True, True)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


# ---- the family


@pytest.mark.parametrize("schedules", [0, 1, MAX_SCHEDULES])
@pytest.mark.parametrize("chunk", [0, *CHUNKS])
@pytest.mark.parametrize("dtype", ["i32", "i64"])
def test_names_and_one_default(schedules, chunk, dtype):
    """Names round trip; no size of the problem changes the kernel, so crossing a power of two compiles nothing."""
    spec = Spec.make("step_tables", chunk=chunk, dtype=dtype, schedules=schedules)
    default = FAMILY.default(spec)
    if chunk or schedules:
        assert FAMILY.supports(spec, default, None) is None
        assert parse(Variant(spec, default.source_key).name).spec == spec
    else:
        assert "neither" in FAMILY.supports(spec, default, None)
    for seqs in (1, 2, 127, 128, 129, 1024, 5000):
        problem = Problem(seqs * 100, seqs, 1)
        assert FAMILY.default(spec, None, problem) == default and FAMILY.load(spec, problem) == (1, 1)


@pytest.mark.parametrize(("spec", "reason"), [
    ({"dtype": "bf16"}, "bf16"), ({"chunk": 48, "dtype": "i32"}, "48"), ({"chunk": 64, "dtype": "i32", "k": 128}, "head"),
])
def test_supports_refuses(spec, reason):
    made = Spec.make("step_tables", **spec)
    assert reason in FAMILY.supports(made, FAMILY.default(made), None)

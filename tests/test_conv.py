"""The short convolution beside its oracle: ragged prompts, pools, padding, speculative decode. fp32 and fp16 kernels run in
the interpreter; the CPU path and the refusals need none."""

from __future__ import annotations

import pytest
import torch

from inputs import cu_seqlens, ragged, relative
from kdagen import devices, dispatch, families
from kdagen.errors import KdagenError
from kdagen.ops.conv import causal_conv1d, causal_conv1d_update
from kdagen.ops.metadata import build_conv1d_chunk_schedule
from kdagen.reference import conv as oracle
from kdagen.spec import Problem, Schedule, Spec, Variant, parse

# The oracle is fp64. fp32: four products and a division, each rounded to 6e-8. fp16 and bf16: their last rounding alone is
# 2e-4 and 1.7e-3 of the norm.
TOLERANCE = {torch.float32: 3e-7, torch.float16: 4e-4, torch.bfloat16: 3e-3}
D = 70  # no multiple of a tile, nor of 16


def normal(rng, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=rng).to(dtype)


def poison(x):
    return torch.full_like(x, float("nan"))


def history(pool, slots, W, known=None):
    """[N, W-1, D] fp64: what each sequence's line holds before it; zeros for padding and for unknown lines."""
    rows = torch.zeros(len(slots), W - 1, pool.shape[2], dtype=torch.float64)
    for n, slot in enumerate(slots.tolist()):
        if 0 <= slot < pool.shape[0] and (known is None or known[n]):
            rows[n] = pool[slot, : W - 1].double()
    return rows


def expected(x, w, bias, act, edges, pool, slots, known, pad_slot=-1):
    """(y, pool) after a prompt step, from the oracle; fp64."""
    slots = torch.where((slots == pad_slot) | (slots >= len(pool)), -1, slots)
    y, final = oracle.causal_conv1d(x, w, bias, initial_state=history(pool, slots, w.shape[1], known), activation=act,
                                    cu_seqlens=edges, output_final_state=True)
    after = pool.double().clone()
    for n, (slot, start, end) in enumerate(zip(slots.tolist(), edges.tolist(), edges.tolist()[1:])):
        if slot < 0:
            y[0, start:end] = 0
        elif end > start:
            after[slot, : w.shape[1] - 1] = final[n]
    return y, after


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("driver", ["search", "schedule", "bounded"])
def test_prompts_on_a_pool(rng, width, dtype, driver):
    """Lengths around the width and the block, empty sequences, strided x, padding in the middle, fresh and known lines."""
    lengths = [5, 0, 1, 37, 2, 3, 67, 8, 0, 35]
    edges = cu_seqlens(lengths, torch.int64 if driver == "search" else torch.int32)
    total, slots = sum(lengths), torch.randperm(14, generator=rng)[:10].int()
    slots[[4, 9]] = torch.tensor([-1, 99], dtype=torch.int32)
    known = torch.rand(10, generator=rng) < 0.6
    known[3], known[6] = True, False
    wide = torch.full((1, total + 2, D + 9), float("nan"), dtype=dtype)  # a load past an edge would show
    x = wide[:, 1:-1, 4:-5].copy_(normal(rng, 1, total, D))
    w, bias, pool = normal(rng, D, width), normal(rng, D, dtype=dtype), normal(rng, 14, width + 1, D, dtype=dtype)
    for n, slot in enumerate(slots.tolist()):
        if 0 <= slot < 14 and not known[n]:
            pool[slot] = float("nan")  # a fresh prompt in a used slot must not see it
    y, after = expected(x, w, bias, "silu", edges, pool, slots, known)
    more = {}
    if driver != "search":
        more = {"schedule": build_conv1d_chunk_schedule(edges, 8, "cpu"), "block_m": 8}
    if driver == "bounded":
        unused = torch.full((5,), -1, dtype=torch.int32)
        tables = {key: torch.cat([more["schedule"][key], unused]) for key in ("batch_ptr", "token_chunk_offset_ptr")}
        more["schedule"] = {"tot": more["schedule"]["tot"] + 5} | tables
    out = poison(x.contiguous())
    got = causal_conv1d(x, w, bias=bias, cu_seqlens=edges, conv_states=pool, cache_indices=slots, has_initial_state=known,
                        out=out, **more)
    assert got is out and relative(out, y) < TOLERANCE[dtype]
    assert torch.equal(pool[~after.isnan()].double(), after[~after.isnan()])  # kept inputs are copies, exactly
    assert torch.equal(pool.isnan(), after.isnan())
    assert not out[0, edges[4]:edges[5]].any() and not out[0, edges[9]:].any()


def test_reserved_slot_is_padding(rng):
    edges, slots = cu_seqlens([9, 4, 6, 2]), torch.tensor([2, 0, 1, -1])
    x, w, pool = normal(rng, 21, D), normal(rng, D, 4), normal(rng, 3, 3, D)
    before = pool.clone()
    y, after = expected(x[None], w, None, None, edges, pool, slots, None, pad_slot=0)
    out = causal_conv1d(x, w, activation=None, cu_seqlens=edges, conv_states=pool, cache_indices=slots, pad_slot=0,
                        has_initial_state=True, out=poison(x))
    assert relative(out, y[0]) < TOLERANCE[torch.float32] and torch.equal(pool.double(), after)
    assert torch.equal(pool[0], before[0]) and not out[9:13].any() and not out[19:].any()


@pytest.mark.parametrize("width", [2, 3, 4])
def test_weight_of_any_strides(rng, width):
    """[D, W] in rows, as the transpose of [W, D], and as a slice of something wider: the same bits."""
    x, w = normal(rng, 1, 9, D), normal(rng, D, width)
    y, pool, want = oracle.causal_conv1d(x, w)[0], normal(rng, 1, 3, D), causal_conv1d(x, w)
    assert relative(want, y) < TOLERANCE[torch.float32]
    step = causal_conv1d_update(x[:, 0], pool.clone(), w)
    for same in (w.t().contiguous().t(), torch.cat([w, w], 1).repeat(2, 1)[D:, :width]):
        assert torch.equal(causal_conv1d(x, same), want)
        assert torch.equal(causal_conv1d_update(x[:, 0], pool.clone(), same), step)


def test_unchecked_boundaries_stay_in_bounds(rng):
    """Boundaries that decrease or pass the end touch nothing outside x and out; rows of no sequence keep their bits."""
    w, wide, around = normal(rng, D, 4), torch.full((30, D), float("nan")), torch.full((30, D), 7.0)
    x, out = wide[5:25], around[5:25]
    x.copy_(normal(rng, 20, D))
    for edges in ([0, 6, 4, 12, 99], [0, 12, 99], [0, 8, 13]):
        out.fill_(7)
        causal_conv1d(x, w, cu_seqlens=torch.tensor(edges), out=out, checked=False)
        assert (around[:5] == 7).all() and (around[25:] == 7).all() and torch.isfinite(out).all()
    assert (out[13:] == 7).all() and torch.equal(out[:8], causal_conv1d(x[None, :8], w)[0])
    causal_conv1d(x, w, cu_seqlens=torch.tensor([0, 12, 99]), out=out, checked=False)  # the end is clamped to T
    assert torch.equal(out[12:], causal_conv1d(x[None, 12:], w)[0])


@pytest.mark.parametrize("tokens", [1, 2, 63, 65])
def test_batch_without_states(rng, tokens):
    x, w = normal(rng, 2, tokens, D), normal(rng, D, 4)
    y, _ = oracle.causal_conv1d(x, w)
    assert relative(causal_conv1d(x, w, out=poison(x)), y) < TOLERANCE[torch.float32]


def test_batch_with_lines_of_its_own(rng):
    """Without cache_indices line n belongs to row n; x is a transposed view (rows and tokens strided)."""
    x, w, states = normal(rng, 5, 3, D).transpose(0, 1), normal(rng, D, 3), normal(rng, 3, 2, D)
    y, final = oracle.causal_conv1d(x, w, initial_state=states.double(), output_final_state=True)
    assert relative(causal_conv1d(x, w, conv_states=states, has_initial_state=True), y) < TOLERANCE[torch.float32]
    assert torch.equal(states.double(), final)


def test_no_prompts_at_all(rng):
    """N = 0; T = 0; all sequences empty: nothing is launched, no line changes."""
    w, pool = normal(rng, D, 4), normal(rng, 4, 3, D)
    before = pool.clone()
    for lengths in ([], [0, 0, 0]):
        out = causal_conv1d(torch.empty(1, 0, D), w, cu_seqlens=cu_seqlens(lengths), conv_states=pool,
                            has_initial_state=False)
        assert out.shape == (1, 0, D)
    assert torch.equal(pool, before)
    assert causal_conv1d(torch.empty(2, 0, D), w).shape == (2, 0, D)
    assert causal_conv1d_update(torch.empty(0, 1, D), pool, w).shape == (0, 1, D)


def test_result_does_not_depend_on_block_or_batch(rng):
    """Bitwise: any block size, any driver, alone or in a batch, and with something else after it."""
    lengths = [3, 29, 11]
    edges, total = cu_seqlens(lengths), 43
    x, w, b = normal(rng, total, D), normal(rng, D, 4), normal(rng, D)
    whole = causal_conv1d(x, w, bias=b, cu_seqlens=edges)
    for block in (3, 5, 8, 64):
        schedule = build_conv1d_chunk_schedule(edges, block, "cpu")
        assert torch.equal(causal_conv1d(x, w, bias=b, cu_seqlens=edges, schedule=schedule, block_m=block), whole)
    for n, (start, end) in enumerate(zip(edges.tolist(), edges.tolist()[1:])):
        assert torch.equal(causal_conv1d(x[None, start:end], w, bias=b)[0], whole[start:end]), n
    with dispatch.pin("conv_prefill__fp32__bd128_bt16_rows4", warps=1):
        assert torch.equal(causal_conv1d(x, w, bias=b, cu_seqlens=edges), whole)


@pytest.mark.parametrize("width", [2, 4])
def test_prompt_equals_its_tokens_one_by_one(rng, width):
    """Bitwise: prefill(T) == update on each token; and prefill(T - n), then n steps, with the same line after it."""
    T, w, b = 9, normal(rng, D, width), normal(rng, D)
    x = normal(rng, 1, T, D)
    lines = torch.zeros(3, width - 1, D)
    whole = causal_conv1d(x, w, bias=b, conv_states=lines[:1], has_initial_state=False)
    steps = [causal_conv1d_update(x[:, t], lines[1:2], w, bias=b) for t in range(T)]
    assert torch.equal(torch.stack(steps, 1), whole) and torch.equal(lines[0], lines[1])
    head = causal_conv1d(x[:, :5], w, bias=b, conv_states=lines[2:], has_initial_state=False)
    tail = causal_conv1d_update(x[:, 5:], lines[2:], w, bias=b)
    assert torch.equal(torch.cat([head, tail], 1), whole) and torch.equal(lines[2], lines[0])


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("form", ["plain", "several", "speculative", "packed"])
def test_update_on_a_pool(rng, width, form):
    """A permuted, partly poisoned pool; padding of both kinds; indices as column 0 of a wider table; accepted clamped."""
    k, N = 3, 7
    T = 1 if form == "plain" else 1 + k
    dtype = torch.float16 if form == "several" else torch.float32
    pool = normal(rng, 12, width - 1 + k, D, dtype=dtype)
    table = torch.full((N, 5), 11)
    table[:, 0] = torch.randperm(11, generator=rng)[:N]
    table[1, 0], table[4, 0], table[5, 0] = 0, -1, 12  # reserved, negative, outside
    known = torch.rand(N, generator=rng) < 0.7
    accepted = None
    if form in ("speculative", "packed"):
        accepted = torch.tensor([1, 2, 3, 4, 1, 0, 99])[torch.randperm(N, generator=rng)]
    edges = cu_seqlens(ragged(rng, N, 1 + k, empties=1)) if form == "packed" else None
    shape = (1, int(edges[-1]), D) if form == "packed" else (N, T, D)
    x, w, b = normal(rng, *shape, dtype=dtype), normal(rng, D, width), normal(rng, D)
    slots = torch.where((table[:, 0] <= 0) | (table[:, 0] >= 12), -1, table[:, 0])
    after = pool.double()
    row = dict(num_accepted_tokens=accepted, has_initial_state=known)
    y = oracle.causal_conv1d_update(x, after, w, b, state_indices=slots, cu_seqlens=edges, **row)
    out = causal_conv1d_update(x, pool, w, bias=b, cache_indices=table, query_start_loc=edges, pad_slot=0, out=poison(x),
                               **row)
    assert relative(out, y) < TOLERANCE[dtype] and torch.equal(pool.double(), after)


def test_update_in_place_and_strided(rng):
    """out may be x; x, the indices and the lines may be slices of wider tensors."""
    w, fused, wide = normal(rng, D, 4), normal(rng, 4, 2 * D + 6), normal(rng, 6, 5, D + 3)
    pool, indices = wide[:, 1:4, :D], torch.tensor([[5, 9], [0, 9], [2, 9], [3, 9]])[:, 0]
    x, after, outside = fused[:, 5:5 + D], pool.double(), wide.clone()
    y = oracle.causal_conv1d_update(x[:, None], after, w, state_indices=indices)[:, 0]
    assert causal_conv1d_update(x, pool, w, cache_indices=indices, out=x) is x
    assert relative(x, y) < TOLERANCE[torch.float32] and torch.equal(pool.double(), after)
    outside[:, 1:4, :D] = pool
    assert torch.equal(wide, outside)


def test_update_leaves_nan_lines_alone(rng):
    """A fresh row in a poisoned slot: finite; the other slots keep their bits, NaN or not."""
    w, pool = normal(rng, D, 4), torch.full((5, 3, D), float("nan"))
    pool[1] = normal(rng, 3, D)
    before = pool.clone()
    x = normal(rng, 2, D)
    known = torch.tensor([False, True])
    out = causal_conv1d_update(x, pool, w, cache_indices=torch.tensor([3, -1]), has_initial_state=known)
    assert torch.isfinite(out).all() and not out[1].any()
    assert torch.equal(pool[3, :2], torch.zeros(2, D)) and torch.equal(pool[3, 2], x[0])
    keep = [0, 1, 2, 4]
    assert torch.equal(pool[keep].view(torch.int32), before[keep].view(torch.int32))


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_speculative_steps_equal_the_accepted_sequence(rng, k):
    """Steps that accept any number of drafts, with and without drafts, after prompts of k, k+1 and k+2 tokens: every
    accepted token's output is, to the bit, the one of the plain sequence; rejected drafts leave no trace."""
    w, b = normal(rng, D, 4), normal(rng, D)
    prompts = [k, k + 1, k + 2]
    text = normal(rng, 3, 40, D)  # what is finally accepted, prompt first
    whole = causal_conv1d(text, w, bias=b)
    pool = normal(rng, 8, 3 + k, D)
    slots, edges = torch.randperm(8, generator=rng)[:3], cu_seqlens(prompts)
    packed = torch.cat([text[n, :p] for n, p in enumerate(prompts)])
    first = causal_conv1d(packed, w, bias=b, cu_seqlens=edges, conv_states=pool, cache_indices=slots,
                          has_initial_state=False)
    for n, p in enumerate(prompts):
        assert torch.equal(first[edges[n]:edges[n + 1]], whole[n, :p])
    done, accepted = prompts, torch.ones(3, dtype=torch.int32)
    for _ in range(6):
        drafts = torch.randint(0, k + 1, (3,), generator=rng).tolist()       # a row may have no draft
        good = [int(torch.randint(1, d + 2, (1,), generator=rng)) for d in drafts]
        rows = []
        for n in range(3):
            row = normal(rng, 1 + drafts[n], D)                              # wrong drafts
            row[:good[n]] = text[n, done[n]:done[n] + good[n]]
            rows.append(row)
        loc = cu_seqlens([len(row) for row in rows])
        out = causal_conv1d_update(torch.cat(rows), pool, w, bias=b, cache_indices=slots, num_accepted_tokens=accepted,
                                   query_start_loc=loc)
        for n in range(3):
            assert torch.equal(out[loc[n]:loc[n] + good[n]], whole[n, done[n]:done[n] + good[n]])
        done, accepted = [p + g for p, g in zip(done, good)], torch.tensor(good, dtype=torch.int32)


def test_cpu_path_agrees_with_the_kernels(rng, monkeypatch):
    """The same calls, with bf16 too, through the CPU path: outputs and lines."""
    lengths = [6, 0, 2, 20]
    edges, slots, known = cu_seqlens(lengths), torch.tensor([4, 2, -1, 0]), torch.tensor([True, True, True, False])
    accepted = torch.tensor([2, 1, 1, 3])
    x, w, pool, row = normal(rng, 28, D), normal(rng, D, 4), normal(rng, 6, 5, D), normal(rng, 4, 3, D)

    def both(dtype):
        lines = pool.clone().to(dtype)
        y = causal_conv1d(x.to(dtype), w, cu_seqlens=edges, conv_states=lines, cache_indices=slots, has_initial_state=known)
        z = causal_conv1d_update(row.to(dtype), lines, w, cache_indices=slots, num_accepted_tokens=accepted)
        return y, z, lines

    kernels = both(torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for got, want in zip(both(torch.float32), kernels):
        assert relative(got, want) < TOLERANCE[torch.float32]
    for got, want in zip(both(torch.bfloat16), kernels):
        # two roundings to bf16, of the inputs and of the output
        assert relative(got, want) < 2 * TOLERANCE[torch.bfloat16]


def test_compiles_whole(rng, cpu_path):
    """torch.compile(fullgraph=True), both ops, with the lines changed in place."""
    x, w, pool = normal(rng, 12, D), normal(rng, D, 4), normal(rng, 3, 3, D)
    edges, slots = cu_seqlens([7, 5]), torch.tensor([2, 0])

    def layer(x, step, lines):
        y = causal_conv1d(x, w, cu_seqlens=edges, conv_states=lines, cache_indices=slots, has_initial_state=True)
        return y, causal_conv1d_update(step, lines, w, cache_indices=slots)

    step, eager, compiled = normal(rng, 2, D), pool.clone(), pool.clone()
    want = layer(x, step, eager)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, step, compiled)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and torch.equal(compiled, eager)
    assert not torch.equal(compiled, pool)


def _prompt(**changes):
    call = dict(x=torch.zeros(1, 6, 8), weight=torch.zeros(8, 4), cu_seqlens=torch.tensor([0, 2, 6], dtype=torch.int32))
    call |= changes
    return causal_conv1d(call.pop("x"), call.pop("weight"), **call)


def _pool(**changes):
    return dict(conv_states=torch.zeros(4, 3, 8), has_initial_state=True) | changes


PAIR = torch.zeros(2, dtype=torch.int32)
SCHEDULE = {"tot": 2, "batch_ptr": PAIR, "token_chunk_offset_ptr": PAIR}


@pytest.mark.parametrize("changes, words", [
    (dict(x=torch.zeros(1, 6, 8, dtype=torch.int32)), "x: got torch.int32"),
    (dict(x=torch.zeros(6)), r"x: got shape \[6\]"),
    (dict(x=torch.zeros(1, 8, 6).transpose(1, 2)), "x: got strides"),
    (dict(x=torch.zeros(6, 8), cu_seqlens=None), r"x: got shape \[6, 8\].*packed tokens beside cu_seqlens"),
    (dict(weight=torch.zeros(8, 5)), "weight: got width 5, expected width 2, 3 or 4"),
    (dict(weight=torch.zeros(7, 4)), r"weight: got shape \[7, 4\], expected shape \[8, W\]"),
    (dict(weight=torch.zeros(8, 1, 4)), r"weight: got shape \[8, 1, 4\]"),
    (dict(bias=torch.zeros(1, 8)), r"bias: got shape \[1, 8\]"),
    (dict(activation="relu"), "activation: got 'relu'"),
    (dict(out=torch.zeros(1, 6, 8, dtype=torch.float16)), "out: got torch.float16"),
    (dict(out=torch.zeros(6, 8)), r"out: got shape \[6, 8\]"),
    (dict(cu_seqlens=torch.tensor([0, 4, 2, 6])), "cu_seqlens: got .*never decrease"),
    (dict(cu_seqlens=torch.tensor([1, 6])), "cu_seqlens: got .*start at 0"),
    (dict(cu_seqlens=torch.tensor([0, 5])), "cu_seqlens: got .*end at T = 6"),
    (dict(cu_seqlens=torch.tensor([0.0, 6.0])), "cu_seqlens: got torch.float32"),
    (dict(x=torch.zeros(2, 3, 8)), "cu_seqlens: got a batch of 2 rows"),
    (dict(conv_states=torch.zeros(4, 3, 8)), "has_initial_state: got None"),
    (_pool(conv_states=torch.zeros(4, 8, 3)), r"conv_states: got shape \[4, 8, 3\]"),
    (_pool(conv_states=torch.zeros(4, 2, 8)), "conv_states: got lines of 2 columns"),
    (_pool(conv_states=torch.zeros(1, 3, 8)), "conv_states: got 1 lines, expected one for each of the 2 sequences"),
    (_pool(conv_states=torch.zeros(4, 8, 3).transpose(1, 2)), "conv_states: got strides"),
    (_pool(cache_indices=torch.zeros(3, dtype=torch.int32)), r"cache_indices: got shape \[3\]"),
    (_pool(cache_indices=torch.zeros(2)), "cache_indices: got torch.float32"),
    (_pool(has_initial_state=torch.ones(2, dtype=torch.int32)), "has_initial_state: got torch.int32"),
    (_pool(has_initial_state=torch.ones(3, dtype=torch.bool)), r"has_initial_state: got shape \[3\]"),
    (dict(cache_indices=torch.zeros(2, dtype=torch.int32)), "cache_indices: got a tensor without conv_states"),
    (dict(schedule=SCHEDULE), "block_m: got None"),
    (dict(schedule=SCHEDULE, block_m=2), "block_m: got 2, expected at least the width - 1 = 3"),
    (dict(schedule=SCHEDULE, block_m=8, cu_seqlens=None), "schedule: got one without cu_seqlens"),
    (dict(schedule={"tot": 2}, block_m=8), "schedule: got no batch_ptr"),
    (dict(schedule=SCHEDULE | {"tot": 3}, block_m=8), "schedule.*at least tot = 3"),
    (dict(schedule=SCHEDULE | {"batch_ptr": torch.zeros(2)}, block_m=8), "schedule.*got torch.float32"),
])
def test_prompts_refused(changes, words):
    with pytest.raises(KdagenError, match=words):
        _prompt(**changes)


def test_out_must_not_be_x():
    x = torch.zeros(1, 6, 8)
    with pytest.raises(ValueError, match="out: got x itself"):
        _prompt(x=x, out=x)


def test_unknown_keywords_are_refused():
    with pytest.raises(TypeError):
        _prompt(initial_states=None)
    with pytest.raises(TypeError):
        causal_conv1d_update(torch.zeros(2, 8), torch.zeros(2, 3, 8), torch.zeros(8, 4), state_indices=None)


@pytest.mark.parametrize("changes, words", [
    (dict(x=torch.zeros(8, 2).t()), "x: got strides"),
    (dict(pool=torch.zeros(2, 3, 7)), r"conv_states: got shape \[2, 3, 7\]"),
    (dict(pool=torch.zeros(1, 3, 8)), "conv_states: got 1 lines"),
    (dict(num_accepted_tokens=torch.ones(3, dtype=torch.int32)), r"num_accepted_tokens: got shape \[3\]"),
    (dict(num_accepted_tokens=torch.ones(2)), "num_accepted_tokens: got torch.float32"),
    (dict(x=torch.zeros(2, 3, 8), num_accepted_tokens=PAIR), "room for k = 0 speculative tokens"),
    (dict(query_start_loc=torch.tensor([0, 2]), num_accepted_tokens=PAIR[:1]), "room for k = 0 speculative tokens"),
    (dict(cache_indices=torch.zeros(2, 0, dtype=torch.int32)), r"cache_indices: got shape \[2, 0\]"),
    (dict(query_start_loc=torch.tensor([0, 1])), "query_start_loc: got .*end at T = 2"),
])
def test_steps_refused(changes, words):
    call = dict(x=torch.zeros(2, 8), pool=torch.zeros(2, 3, 8), weight=torch.zeros(8, 4)) | changes
    with pytest.raises(KdagenError, match=words):
        causal_conv1d_update(call.pop("x"), call.pop("pool"), call.pop("weight"), **call)


def test_bf16_is_refused_by_the_interpreter_only(rng, monkeypatch):
    x, w = normal(rng, 1, 5, 8, dtype=torch.bfloat16), normal(rng, 8, 4)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    dispatch.reset()
    with pytest.raises(TypeError, match="TRITON_INTERPRET"):
        causal_conv1d(x, w)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert relative(causal_conv1d(x, w), oracle.causal_conv1d(x, w)[0]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("family, blocks, warps, dtype, words", [
    ("conv_prefill", dict(bd=128, bt=2, rows=4), 1, "bf16", "less than the width - 1"),
    ("conv_prefill", dict(bd=96, bt=32, rows=4), 1, "bf16", "not a power of two"),
    ("conv_prefill", dict(bd=128, bt=32), 1, "bf16", "are not"),
    ("conv_update", dict(bd=128, rows=0), 1, "bf16", "between 1 and 64"),
    ("conv_update", dict(bd=128, rows=1), 8, "bf16", "more lanes than bd"),
    ("conv_update", dict(bd=4096, rows=1), 32, "bf16", "more than 1024 threads"),
    ("conv_update", dict(bd=128, rows=1), 1, "i32", "is not one of bf16"),
])
def test_limits_of_the_families(family, blocks, warps, dtype, words):
    spec = Spec.make(family, dtype=dtype)
    schedule = Schedule.make(warps=warps, **blocks)
    assert words in families.get(family).supports(spec, schedule, devices.named("mi300x"))


@pytest.mark.parametrize("family", ["conv_prefill", "conv_update"])
def test_defaults_are_supported_and_known(family):
    """Whatever default() answers for any width, size and device is within the limits and among default_schedules()."""
    one = families.get(family)
    for width in (2, 3, 4):
        spec = Spec.make(family, dtype="bf16", width=width)
        known = {schedule.source_key for schedule in one.default_schedules(spec)}
        for target in map(devices.named, ("a100", "h200", "b200", "mi300x", "mi355x")):
            for problem in (Problem(1, 1, 1536), Problem(64, 64, 12288), Problem(256, 64, 12288), Problem(8192, 1, 12288)):
                schedule = one.default(spec, target, problem)
                assert one.supports(spec, schedule, target) is None and schedule.source_key in known
                name = Variant(spec, schedule.source_key).name
                assert parse(name) == Variant(spec, schedule.source_key)

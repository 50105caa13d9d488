"""State pools and speculative decode: padding, padded batches, stale slots, rejected drafts, empty sequences, half pools.

In the interpreter and on the CPU path. fp32: 1e-6 is usual; a decay of e^-100, summed, has an exponent good to 100 * 6e-8.
What is copied or untouched is compared to the bit.
"""

from __future__ import annotations

import cases
import pytest
import torch

import kdagen
from inputs import cu_seqlens, gate_parameter, kda, relative
from kdagen import reference as R
from kdagen.ops.conv import causal_conv1d, causal_conv1d_update
from kdagen.ops.decode import fused_recurrent_kda
from kdagen.ops.decode_step import kda_decode_step
from kdagen.ops.prefill import chunk_kda

FP32 = 2e-5
NAN = float("nan")
H, HV, K, V = cases.H, cases.HV, cases.K, cases.V


@pytest.fixture(params=["interpreter", "cpu"])
def path(request, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if request.param == "interpreter" else "0")
    return request.param


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# --- slots that are none ------------------------------------------------------------------------------------------------

# name -> (its call, the index table, the pools, the outputs of row n)
POOLED = {
    "chunk_kda": (cases.prefill_on_a_pool, ("read_slots", "write_slots"), ("state_pool",)),
    "fused_recurrent_kda": (cases.recurrent_on_a_pool, ("state_indices",), ("state_pool",)),
    "causal_conv1d": (cases.conv, ("cache_indices",), ("conv_states",)),
    "causal_conv1d_update": (cases.conv_update, ("cache_indices",), ("conv_states",)),
    "kda_decode_step": (cases.decode_step, ("state_indices",), ("state_pool", "conv_pool")),
}


def rows_of(name: str, call: dict, n: int) -> torch.Tensor:
    if name == "kda_decode_step":
        return call["out"][n]
    edges = cu_seqlens(cases.LENGTHS).tolist()
    return call["out"][0, edges[n] : edges[n + 1]]


# -1; the reserved slot (pad_slot); past the pool; and what only wraps to a live slot if it is cut to 32 bits
NOT_SLOTS = {"-1": -1, "reserved": 0, "the pool's size": None, "far below": -(2**31), "far above": 2**31 - 1,
             "2^32 + a live slot": 2**32 + 3, "-2^32 + a live slot": 3 - 2**32}


# in the interpreter what the kernels' own tests do not have
@pytest.mark.parametrize("path, slot", [*(("cpu", slot) for slot in NOT_SLOTS), ("interpreter", "reserved"),
                                        ("interpreter", "far above"), ("interpreter", "2^32 + a live slot")],
                         indirect=["path"])
@pytest.mark.parametrize("name", POOLED)
def test_no_slot_is_neither_read_nor_written(name, slot, rng, path):
    """Row 2 has no slot. Its outputs are zero, all slots but those of the other rows keep their bits, NaN or not."""
    make, tables, pools = POOLED[name]
    call = make(rng, pad_slot=0)
    slots = len(call[pools[0]])
    value = slots if NOT_SLOTS[slot] is None else NOT_SLOTS[slot]
    live = {}
    for table in tables:
        index = call[table].long()
        index[index == 0] = 0 if index.numel() >= slots else next(s for s in range(1, slots) if s not in index.tolist())
        index[2] = value
        call[table] = index
        live[table] = {s for s in index.flatten().tolist() if 0 < s < slots}
    if name == "chunk_kda":
        call["write_slots"] = call["read_slots"]
    before = {}
    for pool in pools:
        others = [s for s in range(slots) if s not in live[tables[0]]]
        call[pool][others] = NAN
        before[pool] = call[pool].clone(), others
    getattr(kdagen, name)(**call)
    assert torch.equal(rows_of(name, call, 2), torch.zeros_like(rows_of(name, call, 2)))
    for n in (0, 3):
        row = rows_of(name, call, n)
        padded = call[tables[0]].flatten()[n * (call[tables[0]].numel() // 4)] == 0
        assert torch.isfinite(row).all() and bool(row.any()) == (not padded)
    for pool, (kept, others) in before.items():
        assert same(call[pool][others], kept[others])
        assert not same(call[pool], kept), "the live rows were written"


def test_prefill_where_only_one_of_the_two_slots_is_padding(rng, path):
    """No slot to read: zeros, nothing written. No slot to write: outputs as ever, nothing written. Checkpoints alike."""
    call = cases.prefill_on_a_pool(rng)
    plain = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    plain["write_slots"] = torch.full((4,), -1)
    chunk_kda(**plain)
    before = call["state_pool"].clone()
    call["read_slots"], call["write_slots"] = torch.tensor([-1, 1, 2, 3]), torch.tensor([4, -1, -1, 5])
    call["read_slots"][1:] = plain["read_slots"][1:]
    free = next(s for s in range(8) if s not in plain["read_slots"].tolist())
    call["write_slots"] = torch.tensor([free, -1, -1, int(plain["read_slots"][3])])
    chunk_kda(**call)
    assert not call["out"][:, :3].any()
    assert torch.equal(call["out"][:, 3:], plain["out"][:, 3:])
    kept = [s for s in range(8) if s != int(plain["read_slots"][3])]
    assert same(call["state_pool"][kept], before[kept]) and same(plain["state_pool"], before)


def test_interior_states_go_to_no_padding_slot(rng, path):
    """A reserved, a negative and a far slot among the checkpoints: passed over, the others are written."""
    lengths = [40, 34, 17]
    x, options = kda(rng, "bounded", T=sum(lengths), H=1, K=8, V=12, sequences=3)
    edges, pool = cu_seqlens(lengths), torch.randn(6, 1, 12, 8, generator=rng)
    before = pool.clone()
    chunk_kda(**x, **options, cu_seqlens=edges, cu_seqlens_cpu=edges, chunk_size=16, state_pool=pool, pad_slot=0,
              checkpoint_offsets=torch.tensor([[16, 32], [16, 32], [16, 0]]),
              checkpoint_slots=torch.tensor([[0, 4], [-1, 2], [2**32 + 5, -1]]))
    assert same(pool[[0, 1, 3, 5]], before[[0, 1, 3, 5]])
    for n, slot in ((0, 4), (1, 2)):
        rows = slice(int(edges[n]), int(edges[n]) + 32)
        part = {name: t[:, rows] for name, t in x.items() if name != "initial_state"}
        _, state = R.recurrent_kda(**part, **options, initial_state=x["initial_state"][n : n + 1], output_final_state=True)
        assert relative(pool[slot], state[0]) < FP32


@pytest.mark.parametrize("name", POOLED)
def test_a_pool_smaller_than_the_padded_batch(name, rng, path):
    """As while a graph is captured: four rows, a pool of the reserved slot and one more, which row 1 has, or nobody."""
    make, tables, pools = POOLED[name]
    for owner in (None, 3):
        call = make(rng, pad_slot=0)
        for pool in pools:
            call[pool] = call[pool][:2].clone()
        for table in tables:
            call[table] = torch.zeros_like(call[table])
            if owner is not None:
                call[table][owner] = 1
        before = {pool: call[pool].clone() for pool in pools}
        getattr(kdagen, name)(**call)
        for n in (0, 2):
            assert not rows_of(name, call, n).any()
        for pool in pools:
            assert same(call[pool][0], before[pool][0])
            assert same(call[pool][1], before[pool][1]) == (owner is None)
        assert rows_of(name, call, 3).any() == (owner == 3)


@pytest.mark.parametrize("name", POOLED)
def test_indices_that_are_a_strided_column(name, rng, path):
    make, tables, pools = POOLED[name]
    seed = int(torch.randint(2**31, (), generator=rng))
    plain, strided = (make(torch.Generator().manual_seed(seed)) for _ in range(2))
    for table in tables:
        t = strided[table]
        columns = t[:, None] if t.dim() == 1 else t
        wide = torch.full((len(t), 3 * columns.shape[1] + 2), 77, dtype=torch.int32)
        wide[:, 1:-1:3] = columns
        strided[table] = wide[:, 1:-1:3] if t.dim() == 2 else wide[:, 1]
        assert strided[table].stride(0) > 1
    for call in (plain, strided):
        getattr(kdagen, name)(**call)
    for key in (*pools, "out"):
        assert same(strided[key], plain[key])


# --- fresh sequences, half pools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POOLED)
def test_a_fresh_one_token_prompt_in_a_stale_slot(name, rng, path):
    """Row 3 has one token and has_initial_state False; its slots are NaN. It equals the same row on slots of zeros."""
    make, tables, pools = POOLED[name]
    seed = int(torch.randint(2**31, (), generator=rng))
    stale, clean = (make(torch.Generator().manual_seed(seed)) for _ in range(2))
    for call, fill in ((stale, NAN), (clean, 0.0)):
        call["has_initial_state"][3] = False
        for pool in pools:
            call[pool][call[tables[0]][3]] = fill
        getattr(kdagen, name)(**call)
    assert same(stale["out"], clean["out"]) and torch.isfinite(stale["out"]).all()
    for pool in pools:
        slot = int(call[tables[0]].reshape(4, -1)[3, 0])
        width = 3 if pool in ("conv_states", "conv_pool") else None  # the columns of a line that a step leaves
        assert same(stale[pool][slot][:width], clean[pool][slot][:width])


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda", "kda_decode_step"])
def test_a_16_bit_pool_has_fp32_arithmetic_inside(name, rng, path):
    """Outputs equal those from an fp32 pool of the same values; states are rounded once, where they are written."""
    make, tables, _ = POOLED[name]
    seed, dtype = int(torch.randint(2**31, (), generator=rng)), torch.float16 if path == "interpreter" else torch.bfloat16
    half, full = (make(torch.Generator().manual_seed(seed)) for _ in range(2))
    half["state_pool"] = half["state_pool"].to(dtype)
    full["state_pool"] = half["state_pool"].float()
    for call in (half, full):
        getattr(kdagen, name)(**call)
    assert relative(half["out"], full["out"]) < 1e-6, "a state rounded between tokens would be off by 1e-4"
    slots = half[tables[0]].flatten()
    rounding = {torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    assert half["state_pool"].dtype == dtype
    assert relative(half["state_pool"][slots], full["state_pool"][slots]) < rounding
    # to the nearest: but for ties decided by the last bit of fp32, the very bits
    assert (half["state_pool"][slots] == full["state_pool"][slots].to(dtype)).double().mean() > 0.999


# --- prefill and decode agree about the state ---------------------------------------------------------------------------


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("K, V", [(8, 20), (20, 8)])
def test_prefill_into_a_pool_then_decode_from_it(K, V, v_first, rng, path):
    """chunk_kda of T - n tokens, then n steps of fused_recurrent_kda on the same slot: the whole, with K != V."""
    T, n = 22, 3
    x, options = kda(rng, "softplus", T=T, H=2, HV=4, K=K, V=V)
    x.pop("initial_state")
    pool = torch.full((5, 4, V, K) if v_first else (5, 4, K, V), NAN)
    slot, edges = torch.tensor([3]), cu_seqlens([T - n])
    part = lambda a, b: {name: t[:, a:b] for name, t in x.items()}
    o, _ = chunk_kda(**part(0, T - n), **options, cu_seqlens=edges, cu_seqlens_cpu=edges, state_pool=pool, read_slots=slot,
                     write_slots=slot, has_initial_state=torch.tensor([False]), state_v_first=v_first, chunk_size=16)
    outputs = [o] + [fused_recurrent_kda(**part(t, t + 1), **options, state_pool=pool, state_indices=slot,
                                         state_v_first=v_first)[0] for t in range(T - n, T)]
    wanted, state = R.recurrent_kda(**x, **options, output_final_state=True, state_v_first=v_first)
    assert relative(torch.cat(outputs, 1), wanted) < FP32 and relative(pool[3], state[0]) < FP32
    assert pool[[0, 1, 2, 4]].isnan().all()


@pytest.mark.parametrize("v_first", [True, False])
def test_prompt_then_fused_decode_steps(v_first, rng, path):
    """Convolution and prefill of a prompt, then kda_decode_step: lines and states mean the same to all of them."""
    H, HV, K, V, T, n = 1, 2, 8, 12, 9, 3
    D = 2 * H * K + HV * V
    normal = lambda *shape: torch.randn(*shape, generator=rng)
    qkv, z, g, beta = normal(T, D), normal(T, HV * V), normal(T, HV * K), normal(T, HV)
    weight, norm, A_log = normal(D, 4), normal(V), gate_parameter(rng, HV)
    lines, pool = torch.full((4, 3, D), NAN), torch.full((4, HV, V, K) if v_first else (4, HV, K, V), NAN)
    slot, edges, head = torch.tensor([2]), cu_seqlens([T - n]), slice(0, T - n)
    mixed = causal_conv1d(qkv[head], weight, cu_seqlens=edges, conv_states=lines, cache_indices=slot,
                          has_initial_state=False)
    split = lambda y: [part.reshape(1, len(y), -1, size) for part, size in zip(y.split([K, K, HV * V], 1), (K, K, V))]
    flags = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    chunk_kda(*split(mixed), g[head].view(1, T - n, HV, K), beta[None, head], A_log=A_log, **flags, cu_seqlens=edges,
              cu_seqlens_cpu=edges, state_pool=pool, write_slots=slot, state_v_first=v_first, chunk_size=16)
    found = [kda_decode_step(qkv[t : t + 1], z[t : t + 1], g[t : t + 1], beta[t : t + 1], lines, weight, pool, slot, norm,
                             A_log=A_log, state_v_first=v_first) for t in range(T - n, T)]
    whole = R.causal_conv1d(qkv[None], weight)[0][0]
    o, state = R.recurrent_kda(*split(whole), g.view(1, T, HV, K), beta[None], A_log=A_log, **flags, output_final_state=True,
                               state_v_first=v_first)
    wanted = R.gated_rmsnorm(o[0], z.view(T, HV, V), norm)[T - n :]
    assert relative(torch.cat(found), wanted) < FP32 and relative(pool[2], state[0]) < FP32
    assert torch.equal(lines[2], qkv[-3:])


def test_the_state_after_128_of_130_tokens(rng, path):
    x, options = kda(rng, "bounded", T=130, H=1, K=4, V=8)
    pool, edges = torch.full((3, 1, 8, 4), NAN), cu_seqlens([130])
    chunk_kda(**x, **options, cu_seqlens=edges, cu_seqlens_cpu=edges, state_pool=pool, write_slots=torch.tensor([0]),
              checkpoint_offsets=torch.tensor([[64, 128]]), checkpoint_slots=torch.tensor([[2, 1]]), chunk_size=64)
    for slot, tokens in ((2, 64), (1, 128), (0, 130)):
        part = {name: t if name == "initial_state" else t[:, :tokens] for name, t in x.items()}
        _, state = R.recurrent_kda(**part, **options, output_final_state=True)
        assert relative(pool[slot], state[0]) < FP32


# --- speculative decode ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_accepting_j_of_k_drafts_is_j_sequential_steps(k, rng, path):
    """One row for each j = 1..1+k, its other drafts wrong; then a step without drafts, from the accepted column.

    Convolution, recurrence and the fused step: each equals the plain run over the accepted tokens alone.
    """
    N, H, HV, K, V = 1 + k, 1, 2, 4, 8
    D = 2 * H * K + HV * V
    normal = lambda *shape: torch.randn(*shape, generator=rng)
    weight, norm, A_log = normal(D, 4), normal(V), gate_parameter(rng, HV)
    states, lines = normal(N * (1 + k) + 1, HV, V, K), normal(N * (1 + k) + 1, 3 + k, D)
    table = torch.randperm(len(states), generator=rng)[: N * (1 + k)].view(N, 1 + k)
    start = states[table[:, 0]].clone()
    history = lines[table[:, 0], :3].clone()
    qkv, g, beta, z = normal(N, 2 + k, D), normal(N, 2 + k, HV, K), normal(N, 2 + k, HV), normal(N, HV * V)
    split = lambda y: [part.reshape(*y.shape[:2], -1, size) for part, size in zip(y.split([K, K, HV * V], 2), (K, K, V))]
    flags = dict(A_log=A_log, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    ones, accepted = torch.ones(N, dtype=torch.int32), torch.arange(1, 2 + k, dtype=torch.int32)
    drafts = slice(0, 1 + k)
    mixed = causal_conv1d_update(qkv[:, drafts], lines, weight, cache_indices=table, num_accepted_tokens=ones)
    first, _ = fused_recurrent_kda(*split(mixed), g[:, drafts], beta[:, drafts], **flags, state_pool=states,
                                   state_indices=table, num_accepted_tokens=ones)
    # the step after it: no drafts, the last token of each row, by the fused step and by its parts
    one = slice(1 + k, 2 + k)
    parts = lines.clone(), states.clone()
    fused = kda_decode_step(qkv[:, 1 + k], z, g[:, 1 + k].flatten(1), beta[:, 1 + k], lines, weight, states, table, norm,
                            A_log=A_log, num_accepted_tokens=accepted)
    after = causal_conv1d_update(qkv[:, one], parts[0], weight, cache_indices=table, num_accepted_tokens=accepted)
    o, _ = fused_recurrent_kda(*split(after), g[:, one], beta[:, one], **flags, state_pool=parts[1], state_indices=table,
                               num_accepted_tokens=accepted)
    for n in range(N):
        j = n + 1
        own = [*range(j), 1 + k]  # the accepted tokens, then the new one
        y = R.causal_conv1d(qkv[n : n + 1, own], weight, initial_state=history[n : n + 1].double())[0]
        wanted, state = R.recurrent_kda(*split(y), g[n : n + 1, own], beta[n : n + 1, own], **flags,
                                        initial_state=start[n : n + 1], output_final_state=True)
        assert relative(first[n, :j], wanted[0, :j]) < FP32
        assert relative(after[n], y[0, j:]) < FP32 and relative(o[n], wanted[0, j:]) < FP32
        assert relative(fused[n], R.gated_rmsnorm(wanted[0, j], z[n].view(HV, V), norm)) < FP32
        for pool in (states, parts[1]):
            assert relative(pool[table[n, 0]], state[0]) < FP32


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_prompt_as_long_as_a_speculative_step_through_the_speculative_ops(k, extra, rng, path):
    """Lengths k, k+1, k+2 through the table of 1+k columns, as a graph would replay it: slots and lines are NaN before."""
    length, H, HV, K, V = k + 1 + extra, 1, 2, 4, 8
    D = 2 * H * K + HV * V
    normal = lambda *shape: torch.randn(*shape, generator=rng)
    room = max(k, length - 1)  # a line takes back what a row has
    lines, states = torch.full((3, 3 + room, D), NAN), torch.full((2 + k, HV, V, K), NAN)
    weight, table, fresh = normal(D, 4), torch.randperm(2 + k, generator=rng)[: 1 + k][None], torch.tensor([False])
    edges, A_log, ones = cu_seqlens([length]), gate_parameter(rng, HV), torch.ones(1, dtype=torch.int32)
    qkv, g, beta = normal(1, length, D), normal(1, length, HV, K), normal(1, length, HV)
    split = lambda y: [part.reshape(1, length, -1, size) for part, size in zip(y.split([K, K, HV * V], 2), (K, K, V))]
    flags = dict(A_log=A_log, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    mixed = causal_conv1d_update(qkv, lines, weight, cache_indices=torch.tensor([1]), num_accepted_tokens=ones,
                                 has_initial_state=fresh, query_start_loc=edges)
    o, _ = fused_recurrent_kda(*split(mixed), g, beta, **flags, state_pool=states, state_indices=table, cu_seqlens=edges,
                               num_accepted_tokens=ones, has_initial_state=fresh)
    y = R.causal_conv1d(qkv, weight)[0]
    wanted, state = R.recurrent_kda(*split(y), g, beta, **flags, output_final_state=True)
    assert relative(mixed, y) < FP32 and relative(o, wanted) < FP32
    assert relative(states[table[0, min(length, 1 + k) - 1]], state[0]) < FP32
    assert torch.equal(lines[1, 2 : 2 + length], qkv[0]) and lines[[0, 2]].isnan().all()


# --- nothing at all -------------------------------------------------------------------------------------------------------

EMPTY = {"first and last": [0, 2, 0], "middle": [1, 0, 0, 2], "all": [0, 0], "none": []}
IDS = list(EMPTY)


@pytest.mark.parametrize("where", IDS)
@pytest.mark.parametrize("form", ["own", "pool"])
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_empty_sequences_keep_their_states(op, form, where, rng, path):
    lengths = EMPTY[where]
    N, edges = len(lengths), cu_seqlens(lengths)
    x, options = kda(rng, "bounded", T=sum(lengths), H=1, HV=2, K=8, V=12, sequences=max(N, 1))
    states = x.pop("initial_state")[:N]
    options["cu_seqlens"] = edges
    out = torch.full_like(x["v"], NAN)
    more = dict(chunk_size=16, cu_seqlens_cpu=edges) if op == "chunk_kda" else {}
    function = getattr(kdagen, op)
    wanted, after = R.recurrent_kda(**x, **options, initial_state=states, output_final_state=True)
    if form == "own":
        o, found = function(**x, **options, **more, initial_state=states, output_final_state=True, out=out)
    else:
        pool, slots = torch.full((7, 2, 12, 8), NAN), torch.randperm(7, generator=rng)[:N]
        pool[slots] = states
        tables = {"state_indices": slots} if op == "fused_recurrent_kda" else {"read_slots": slots, "write_slots": slots}
        o, _ = function(**x, **options, **more, state_pool=pool, **tables, out=out)
        found = pool[slots]
        assert pool[[s for s in range(7) if s not in slots.tolist()]].isnan().all()
    assert o is out and found.shape == after.shape
    if sum(lengths):
        assert relative(o, wanted) < FP32
    for n, length in enumerate(lengths):
        assert torch.equal(found[n], states[n]) if length == 0 else relative(found[n], after[n]) < FP32


@pytest.mark.parametrize("where", IDS)
@pytest.mark.parametrize("op", ["causal_conv1d", "causal_conv1d_update", "speculative"])
def test_empty_sequences_keep_their_lines(op, where, rng, path):
    lengths, D = EMPTY[where], 6
    N, edges = len(lengths), cu_seqlens(lengths)
    x, w, pool = torch.randn(sum(lengths), D, generator=rng), torch.randn(D, 4, generator=rng), torch.full((7, 5, D), NAN)
    slots = torch.randperm(7, generator=rng)[:N]
    pool[slots] = torch.randn(N, 5, D, generator=rng)
    before, out = pool.clone(), torch.full_like(x, NAN)
    y, last = R.causal_conv1d(x[None], w, initial_state=pool[slots, :3].double(), cu_seqlens=edges, output_final_state=True)
    if op == "causal_conv1d":
        causal_conv1d(x, w, cu_seqlens=edges, conv_states=pool, cache_indices=slots, has_initial_state=True, out=out)
    else:
        more = {"num_accepted_tokens": torch.ones(N, dtype=torch.int32)} if op == "speculative" else {}
        causal_conv1d_update(x, pool, w, query_start_loc=edges, cache_indices=slots, out=out, **more)
    if sum(lengths):
        assert relative(out, y[0]) < FP32
    for n, length in enumerate(lengths):
        if length == 0:
            assert same(pool[slots[n]], before[slots[n]])
        elif op != "speculative":
            assert torch.equal(pool[slots[n], :3].double(), last[n])
    untouched = [s for s in range(7) if s not in slots.tolist()]
    assert same(pool[untouched], before[untouched])


def test_no_rows_and_no_tokens_of_every_op(rng, path):
    """N = 0 of everything that has rows of its own: an empty result of the right shape, no pool touched."""
    pool, lines = torch.randn(3, HV, V, K, generator=rng), torch.randn(3, 5, cases.D, generator=rng)
    before = pool.clone(), lines.clone()
    none = torch.empty(0, dtype=torch.int64)
    empty = lambda *shape: torch.empty(shape)
    x = dict(q=empty(0, 1, H, K), k=empty(0, 1, H, K), v=empty(0, 1, HV, V), g=empty(0, 1, HV, K), beta=empty(0, 1, HV))
    assert fused_recurrent_kda(**x, state_pool=pool, state_indices=none)[0].shape == (0, 1, HV, V)
    assert fused_recurrent_kda(**x, state_pool=pool, state_indices=none[:, None].expand(0, 3),
                               num_accepted_tokens=none)[0].shape == (0, 1, HV, V)
    o, state = chunk_kda(**x, output_final_state=True, chunk_size=16)
    assert o.shape == (0, 1, HV, V) and state.shape == (0, HV, V, K)
    no_tokens = {name: t.reshape(2, 0, *t.shape[2:]) for name, t in x.items()}
    held = torch.randn(2, HV, V, K, generator=rng)
    for function, more in ((chunk_kda, {"chunk_size": 16}), (fused_recurrent_kda, {})):
        o, state = function(**no_tokens, initial_state=held, output_final_state=True, **more)
        assert o.shape == (2, 0, HV, V) and torch.equal(state, held)
        o, state = function(**no_tokens, output_final_state=True, **more)
        assert not state.any() and state.shape == held.shape
    weight = torch.randn(cases.D, 4, generator=rng)
    for shape in ((0, cases.D), (0, 3, cases.D)):
        assert causal_conv1d_update(empty(*shape), lines, weight, cache_indices=none).shape == shape
        assert causal_conv1d_update(empty(*shape), lines, weight, cache_indices=none[:, None].expand(0, 2),
                                    num_accepted_tokens=none).shape == shape
    assert causal_conv1d(empty(0, 3, cases.D), weight, conv_states=lines, cache_indices=none,
                         has_initial_state=False).shape == (0, 3, cases.D)
    assert causal_conv1d(empty(3, 0, cases.D), weight, conv_states=lines, has_initial_state=True).shape == (3, 0, cases.D)
    out = kda_decode_step(empty(0, cases.D), empty(0, HV * V), empty(0, HV * K), empty(0, HV), lines, weight, pool, none,
                          empty(V), lower_bound=-5.0)
    assert out.shape == (0, HV, V)
    assert torch.equal(pool, before[0]) and torch.equal(lines, before[1])
    for shape in ((0, 3, HV, K), (2, 0, HV, K)):
        for chunk in (None, 16):
            decay, strength = kdagen.kda_gate(empty(*shape), lower_bound=-5.0, beta=empty(*shape[:3]), chunk_size=chunk)
            assert decay.shape == shape and strength.shape == shape[:3]
    assert kdagen.gated_rmsnorm(empty(2, 0, HV, V), empty(2, 0, HV, V), empty(V)).shape == (2, 0, HV, V)
    edges = cu_seqlens([])
    indices, offsets = kdagen.prepare_chunk_metadata_device(edges, edges, 16)
    assert indices.shape == (0, 2) and offsets.tolist() == [0]
    assert kdagen.build_conv1d_chunk_schedule(edges, 8, "cpu")["tot"] == 0
    for more in ({"cu_seqlens_cpu": edges}, {"tokens": 0}):
        tables = kdagen.step_tables(edges, chunk_size=16, blocks=[8], rows=True, **more)
        assert tables.chunk_rows.shape == (0, 4) and tables.schedules[8]["tot"] == 0

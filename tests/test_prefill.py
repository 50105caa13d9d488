"""chunk_kda through the interpreter (fp32, fp16) and on the CPU path, against the recurrence in fp64.

Tolerances: fp32 through the interpreter is exact fp32 (sums of a few hundred products: 1e-6 and a margin); fp16 rounds every
operand to 2^-12, which adds up to about 6e-4 in o and 1e-3 for nearly equal keys.
"""

from __future__ import annotations

import pytest
import torch

from inputs import cu_seqlens, kda, relative, sliced
from kdagen import reference as R
from kdagen.ops.metadata import step_tables
from kdagen.ops.prefill import chunk_kda

FP32, FP16 = 5e-6, 2e-3
NAN = float("nan")


def run(tensors, options, lengths, *, host=True, **more):
    """chunk_kda on a poisoned output; ``lengths`` of packed sequences."""
    edges = cu_seqlens(lengths)
    more.setdefault("out", torch.full_like(tensors["v"], NAN))
    return chunk_kda(**tensors, **options, cu_seqlens=edges, cu_seqlens_cpu=edges if host else None, output_final_state=True,
                     **more)


def oracle(tensors, options, lengths, **more):
    return R.recurrent_kda(**tensors, **options, cu_seqlens=cu_seqlens(lengths), output_final_state=True, **more)


def check(found, wanted, tolerance):
    assert relative(found[0], wanted[0]) < tolerance, "o"
    assert relative(found[1], wanted[1]) < tolerance, "final state"


@pytest.mark.parametrize("name", ["rand", "slow", "zero", "bound", "mask", "mixed", "equal", "softplus", "bounded"])
def test_every_class_of_gates_and_keys(rng, name):
    lengths = [35, 0, 16, 1]
    tensors, options = kda(rng, name, T=sum(lengths), sequences=4, H=1, HV=2, K=16, V=32)
    check(run(tensors, options, lengths, chunk_size=16), oracle(tensors, options, lengths), FP32)


@pytest.mark.parametrize(("chunk", "K", "V", "name"), [
    (32, 32, 16, "bounded"), (64, 16, 16, "bounded"), (64, 48, 20, "mixed"), (128, 16, 16, "softplus"),
    (32, 256, 16, "bounded"), (16, 100, 60, "softplus"), (16, 8, 8, "mask"),
])
def test_chunk_sizes_and_head_dims(rng, chunk, K, V, name):
    lengths = [chunk + 9, 0, 3]
    tensors, options = kda(rng, name, T=sum(lengths), sequences=3, H=1, K=K, V=V)
    check(run(tensors, options, lengths, chunk_size=chunk), oracle(tensors, options, lengths), FP32)


@pytest.mark.parametrize("name", ["bounded", "softplus", "mask", "equal"])
def test_fp16(rng, name):
    lengths = [40, 25]
    tensors, options = kda(rng, name, T=65, sequences=2, H=1, K=32, dtype=torch.float16)
    check(run(tensors, options, lengths, chunk_size=32), oracle(tensors, options, lengths), FP16)


def test_every_length_up_to_two_chunks_and_one(rng):
    lengths = list(range(34))
    tensors, options = kda(rng, "bounded", T=sum(lengths), sequences=len(lengths), H=1, K=16)
    check(run(tensors, options, lengths, chunk_size=16), oracle(tensors, options, lengths), FP32)


@pytest.mark.parametrize("lengths", [[0, 17], [17, 0], [0, 0], []])
def test_empty_sequences_keep_their_state(rng, lengths):
    tensors, options = kda(rng, "bounded", T=sum(lengths), sequences=len(lengths), H=1, K=16)
    tensors["initial_state"] = tensors["initial_state"][: len(lengths)]
    found = run(tensors, options, lengths, chunk_size=16)
    for n, length in enumerate(lengths):
        if not length:
            assert torch.equal(found[1][n], tensors["initial_state"][n])
    if sum(lengths):
        check(found, oracle(tensors, options, lengths), FP32)


def test_a_batch_is_as_many_packed_sequences(rng):
    tensors, options = kda(rng, "softplus", B=3, T=21, H=1, K=16)
    o, state = chunk_kda(**tensors, **options, output_final_state=True, chunk_size=16)
    packed = {name: x.flatten(0, 1)[None] if name != "initial_state" else x for name, x in tensors.items()}
    again = run(packed, options, [21] * 3, chunk_size=16)
    assert torch.equal(o.flatten(0, 1), again[0][0]) and torch.equal(state, again[1])
    check((o, state), R.recurrent_kda(**tensors, **options, output_final_state=True), FP32)


def test_options_of_the_inputs(rng):
    """Ready beta and no norm, doubled strength, scale, no A_log, no bias, no initial state: one at a time."""
    tensors, options = kda(rng, "bounded", T=20, H=1, K=16)
    for change in (
        {"use_qk_l2norm_in_kernel": False}, {"allow_neg_eigval": True}, {"scale": 0.7}, {"A_log": None}, {"dt_bias": None},
        {"lower_bound": -1.5}, {"use_beta_sigmoid_in_kernel": False}, {"initial_state": None},
    ):
        changed, given = dict(tensors), options | change
        if "initial_state" in change:
            changed.pop("initial_state"), given.pop("initial_state")
        if "use_beta_sigmoid_in_kernel" in change:
            changed["beta"] = torch.sigmoid(changed["beta"])
        if "use_qk_l2norm_in_kernel" in change:
            changed["k"] = R.l2norm(changed["k"])
        check(run(changed, given, [20], chunk_size=16), oracle(changed, given, [20]), FP32)


def test_the_bounded_gate_is_no_clamp_of_the_softplus_gate(rng):
    tensors, options = kda(rng, "bounded", T=20, H=1, K=16)
    found = run(tensors, options, [20], chunk_size=16)
    decay = R.kda_gate(tensors["g"], options["A_log"], options["dt_bias"]).clamp(min=-5)
    ready = {name: value for name, value in options.items() if name not in ("A_log", "dt_bias", "lower_bound")}
    clamped = oracle(tensors | {"g": decay}, ready | {"use_gate_in_kernel": False}, [20])
    assert relative(found[0], clamped[0]) > 0.01


@pytest.mark.parametrize("name", ["bounded", "mixed"])
def test_causal_to_the_bit(rng, name):
    tensors, options = kda(rng, name, T=70, H=1, K=16)
    other, _ = kda(rng, name, T=70, H=1, K=16)
    whole = run(tensors, options, [70], chunk_size=32)[0]
    for kept in (1, 20, 33, 50):
        changed = {x: torch.cat([tensors[x][:, :kept], other[x][:, kept:]], 1) if x != "initial_state" else tensors[x]
                   for x in tensors}
        assert torch.equal(run(changed, options, [70], chunk_size=32)[0][:, :kept], whole[:, :kept])
        cut = {x: tensors[x][:, :kept].contiguous() if x != "initial_state" else tensors[x] for x in tensors}
        assert torch.equal(run(cut, options, [kept], chunk_size=32)[0], whole[:, :kept])


def test_slices_of_one_projection_without_reading_beside_them(rng):
    lengths = [19, 30]
    tensors, options = kda(rng, "bounded", T=49, sequences=2, H=1, HV=2, K=24, V=20)
    views = {x: sliced(rng, tensors[x]) if x != "initial_state" else tensors[x] for x in tensors}
    out = torch.full((1, 49, 2, 32), NAN)[..., 6:26]
    found = run(views, options, lengths, chunk_size=16, out=out)
    plain = run(tensors, options, lengths, chunk_size=16)
    assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])


def test_nan_of_one_sequence_reaches_no_other(rng):
    lengths = [19, 20, 18]
    tensors, options = kda(rng, "bounded", T=57, sequences=3, H=1, K=16)
    clean = run(tensors, options, lengths, chunk_size=16)
    for x in ("q", "k", "v", "g", "beta"):
        tensors[x][:, 19:39] = NAN
    tensors["initial_state"][1] = NAN
    found = run(tensors, options, lengths, chunk_size=16)
    for rows, n in ((slice(0, 19), 0), (slice(39, 57), 2)):
        assert torch.equal(found[0][:, rows], clean[0][:, rows]) and torch.equal(found[1][n], clean[1][n])
    assert found[0][:, 19:39].isnan().all()


def test_tables_given_bounded_or_neither(rng):
    lengths = [19, 0, 30]
    edges = cu_seqlens(lengths)
    tensors, options = kda(rng, "bounded", T=49, sequences=3, H=1, K=16)
    plain = run(tensors, options, lengths, chunk_size=16)
    exact = step_tables(edges, edges, chunk_size=16, rows=True)
    bounded = step_tables(edges, tokens=64, chunk_size=16, rows=True)
    for more in ({"tables": exact, "host": False}, {"tables": bounded, "host": False}, {"host": False}):
        found = run(tensors, options, lengths, chunk_size=16, **more)
        assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])


@pytest.mark.parametrize("name", ["bounded", "softplus"])
def test_chunked_prefill_at_any_split(rng, name):
    tensors, options = kda(rng, name, T=60, H=1, K=16, V=32)
    whole = oracle(tensors, options, [60])
    for split in (1, 16, 37):
        state, parts = tensors["initial_state"], []
        for rows in (slice(0, split), slice(split, 60)):
            part = {x: tensors[x][:, rows].contiguous() for x in ("q", "k", "v", "g", "beta")}
            o, state = run(part | {"initial_state": state}, options, [part["q"].shape[1]], chunk_size=16)
            parts.append(o)
        check((torch.cat(parts, 1), state), whole, FP32)


def test_prefill_then_decode_is_prefill_of_the_whole(rng):
    from kdagen.ops.decode import fused_recurrent_kda

    tensors, options = kda(rng, "bounded", T=24, H=1, K=16, V=32)
    for first in (False, True):
        state = tensors["initial_state"] if first else tensors["initial_state"].transpose(-1, -2).contiguous()
        head = {x: tensors[x][:, :19].contiguous() for x in ("q", "k", "v", "g", "beta")} | {"initial_state": state}
        tail = {x: tensors[x][:, 19:].contiguous() for x in ("q", "k", "v", "g", "beta")}
        o, middle = run(head, options, [19], chunk_size=16, state_v_first=first)
        rest, _ = fused_recurrent_kda(**tail, **options, initial_state=middle, state_v_first=first)
        assert relative(torch.cat([o, rest], 1), oracle(tensors, options, [24])[0]) < FP32


def test_fp16_states_are_read_as_they_are(rng):
    tensors, options = kda(rng, "bounded", T=20, H=1, K=16)
    tensors["initial_state"] = tensors["initial_state"].half()
    check(run(tensors, options, [20], chunk_size=16), oracle(tensors, options, [20]), FP32)

"""The layer through hand-written steps: each accepted token equals the reference run alone, NaN in unwritten slots."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from serving_driver import BOUNDED, PAD, SOFTPLUS, Driver, Row, spec

from kdagen.errors import ArgumentError, ArgumentTypeError
from kdagen.serving import (
    Batch,
    Checkpoint,
    DecodeGraphs,
    GraphStaging,
    KDAConfig,
    KDALayer,
    KDAMetadataBuilder,
    random_weights,
    reference,
    shard_weights,
)

pytestmark = pytest.mark.usefixtures("cpu_path")


PAIRED = KDAConfig(24, 2, 16, gate_rank=64, output_gate_rank=64)  # both low-rank gates in one product, as Kimi-Linear


@pytest.mark.parametrize("config", [BOUNDED, SOFTPLUS, PAIRED], ids=["full gate", "low-rank gate", "paired low-rank gates"])
def test_prompts_in_chunks_then_decodes(config):
    d = Driver([40, 21, 1, 9], config=config)
    d.step(Row(0, 17), Row(1, 16))
    d.step(Row(0, 16), Row(1, 3), Row(2, 1), Row(3, 4))  # sequence 2 is a one-token first chunk
    d.prefilling = False
    d.step(Row(0, 1), Row(1, 1), Row(3, 1))
    d.step(Row(3, 1), Row(0, 1), Row(1, 1))
    d.check()
    assert d.computed == [35, 21, 1, 6] and d.layer.paired == (config is PAIRED)


def test_decodes_beside_prefills():
    d = Driver([12, 12, 40])
    d.step(Row(0, 5), Row(1, 8))
    d.step(Row(0, 1), Row(1, 1), Row(2, 20))  # a resumed one-token chunk is a decode
    assert d.metadata.num_decodes == 2 and d.metadata.num_prefills == 1
    d.step(Row(1, 1), Row(2, 18), Row(0, 4))
    d.check()


def test_a_fresh_one_token_prompt_never_sees_the_stale_slot():
    """The slot is NaN all over; only the flag keeps it out (zeroing is off)."""
    d = Driver([1, 6])
    d.step(Row(1, 5))
    d.step(Row(1, 1), Row(0, 1))
    assert d.metadata.num_decodes == 1 and d.metadata.num_prefills == 1
    d.check()


def test_zeroing_protects_engines_that_do_not_tell_first_chunks():
    """Without is_prefilling the prompt is taken for a decode: then the slot's zeros are its initial state."""
    d = Driver([1, 1])
    fresh = d.layer.new_cache(8, poison=True)  # zero="allocate", the default
    slots = fresh.allocate(2)
    batch = Batch.make([1, 1], [1, 1], [[slot] for slot in slots])
    metadata = d.builder.build(batch)
    assert metadata.num_decodes == 2
    output = d.layer(torch.cat(d.inputs), metadata, fresh)
    torch.testing.assert_close(output.double(), torch.cat(d.wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [1, 3])
def test_rejected_drafts_leave_no_trace(k):
    d = Driver([60, 60], k)
    d.step(Row(0, 7), Row(1, 2))
    for accept in range(1, k + 2):
        d.step(spec(0, k, accept), spec(1, k, k + 2 - accept))
    d.step(spec(0, 0), spec(1, 0))  # drafts accepted, then a step without: the state is that of the accepted column
    d.step(spec(0, k, 1), spec(1, 0))
    d.step(spec(0, 0), spec(1, k, k + 1))
    d.step(spec(1, 0), spec(0, 0))
    d.check()


def test_zero_drafts_everywhere_take_the_fused_step():
    d = Driver([30, 30], 2)
    d.step(Row(0, 4), Row(1, 4))
    d.step(spec(0, 2, 3), spec(1, 2, 2))
    d.step(spec(1, 0), spec(0, 0))
    assert d.metadata.uniform_spec_sequence_length == 1
    d.step(spec(0, 2, 1), spec(1, 1, 2))
    d.check()


@pytest.mark.parametrize("leading", [True, False])
def test_speculation_beside_prefills(leading):
    d = Driver([50, 50, 80], 2)
    d.step(Row(0, 5), Row(1, 3))
    order = lambda rows: rows if leading else [rows[2], rows[0], rows[1]]
    d.step(*order([spec(0, 2, 2), spec(1, 1, 2), Row(2, 33)]))
    assert d.metadata.spec_leads == leading
    d.step(*order([spec(0, 2, 3), spec(1, 0), Row(2, 1)]))
    d.step(*order([spec(0, 0), spec(1, 2, 1), Row(2, 20)]))
    d.step(spec(2, 2, 2), spec(0, 1, 1), spec(1, 2, 2))
    d.check()


@pytest.mark.parametrize("keep", [True, False])
def test_plain_decodes_beside_speculation(keep):
    """Sequence 2 never drafts: its one-token steps are decodes of their own, or prefills of one token."""
    d = Driver([40, 40, 40], 2, keep_decodes=keep, prefilling=True)
    d.step(Row(0, 5), Row(1, 3), Row(2, 6))
    d.prefilling = False
    d.step(spec(0, 2, 2), Row(2, 1), spec(1, 2, 1))
    assert (d.metadata.num_decodes, d.metadata.num_prefills) == ((1, 0) if keep else (0, 1))
    d.step(PAD, spec(0, 2, 3), spec(1, 2, 1), PAD, Row(2, 1))
    d.check()


@pytest.mark.parametrize("rows", [
    [PAD, Row(0, 1), PAD, Row(1, 1), PAD], [Row(0, 1), Row(1, 1), PAD, PAD], [PAD, PAD], [PAD, Row(0, 9), PAD, Row(1, 3)],
], ids=["decode, padding between", "decode, padding last", "padding alone", "prefill, padding between"])
def test_padding_rows_are_neither_read_nor_written(rows):
    d = Driver([20, 20])
    d.step(Row(0, 3), Row(1, 2))
    live = [d.slots[row.seq][0] for row in rows if row.seq >= 0]
    others = [slot for slot in range(d.cache.slots) if slot not in live]
    before = [pool[others].clone() for pool in (d.cache.recurrent, d.cache.conv)]
    d.step(*rows, pad_tokens=5)
    for pool, then in zip((d.cache.recurrent, d.cache.conv), before):
        torch.testing.assert_close(pool[others], then, rtol=0, atol=0, equal_nan=True)
    d.step(Row(0, 1), Row(1, 1))
    d.check()


def test_a_pool_smaller_than_a_padded_batch():
    """A capture batch of 8 requests on a pool of one usable slot: all rows are the reserved slot."""
    d = Driver([4])
    pool = d.layer.new_cache(2)
    pool.recurrent.fill_(3.0)
    staging = GraphStaging("cpu", 8)
    batch = Batch.make([1] * 8, [1] * 8, [0] * 8)
    metadata = KDAMetadataBuilder("cpu", staging=staging).build_for_cudagraph_capture(batch)
    output = d.layer(torch.randn(8, d.layer.config.hidden), metadata, pool)
    assert not output.any() and (pool.recurrent == 3).all() and not pool.conv.any()


@pytest.mark.parametrize("k", range(1, 6))
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_prompt_as_long_as_a_speculative_step(k, extra):
    """Lengths k, k+1, k+2: a prompt is a prefill from zeros, whatever its slot holds."""
    d = Driver([30, k + 1 + extra + 3], k)
    d.step(Row(0, 3))
    d.step(spec(0, k, 1), Row(1, k + 1 + extra))
    assert d.metadata.num_prefills == 1
    d.step(spec(0, k, k + 1), spec(1, min(k, 1), 1))
    d.check()


def test_states_at_chunk_boundaries_resume_a_second_prompt():
    """A prompt of 40 exports its state after 32; another row continues from the copy and equals the rest of the prompt."""
    d = Driver([40, 40])
    d.inputs[1], d.wanted[1] = d.inputs[0], d.wanted[0]
    kept, = d.cache.allocate(1)
    d.step(Row(1, 8))  # keeps the checkpointing row from being row 0 of the prefill table
    d.computed[1] = 0
    d.step(PAD, Row(0, 40), checkpoints=[Checkpoint(1, 32, kept)])
    assert d.metadata.checkpoint.exported == ((1, 32),)
    d.cache.remember("prefix", kept)
    assert d.cache.recall("prefix", d.slots[1][0])
    d.computed[1] = 32
    d.step(Row(1, 8))
    d.check()


def test_an_exported_state_is_the_one_that_a_split_prompt_reaches():
    d = Driver([130, 130], chunk_size=64)
    d.inputs[1], d.wanted[1] = d.inputs[0], d.wanted[0]
    kept, = d.cache.allocate(1)
    d.step(Row(0, 130), checkpoints=[Checkpoint(0, 128, kept)])  # after token 128 of 130 at C = 64
    d.step(Row(1, 128))
    for pool, tolerance in ((d.cache.recurrent, 1e-6), (d.cache.conv[:, :3], 0)):
        want = pool[d.slots[1][0]]
        assert (pool[kept] - want).norm() <= tolerance * want.norm()
    d.check()


def test_bf16_pools_keep_fp32_arithmetic():
    d = Driver([30], cache={"state_dtype": torch.bfloat16})
    d.step(Row(0, 20))
    assert d.cache.recurrent.dtype == torch.bfloat16
    d.step(Row(0, 1))
    d.check(2e-2)  # one rounding of the state to 8 bits lies between the steps
    assert d.worst > 1e-6  # and it did


def test_strided_tables_and_padded_slots():
    d = Driver([20, 20], 1)
    wide = torch.full((2, 7), 99, dtype=torch.int32)
    wide[:, 2:4] = torch.tensor(d.slots, dtype=torch.int32)
    make = Batch.make
    d.step(Row(0, 5), Row(1, 4))
    build = d.build

    def strided(rows, pad_tokens=0, checkpoints=()):
        batch = make([row.count for row in rows], [d.computed[row.seq] + row.count for row in rows], wide[:, 2:])
        import numpy as np
        return d.builder.build(batch, torch.tensor(d.accepted, dtype=torch.int32), np.array([1, 1], np.int32))

    d.build = strided
    d.step(spec(0, 1, 2), spec(1, 1, 1))
    d.build = build
    d.step(spec(0, 1, 1), spec(1, 1, 2))
    d.check()


@pytest.mark.parametrize("config", [KDAConfig(24, 4, 16, lower_bound=-5.0, gate_rank=8),
                                    KDAConfig(24, 4, 16, gate_rank=8, output_gate_rank=8)], ids=["full", "low rank"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_shards_sum_to_the_whole_layer(config, tp_size):
    weights = random_weights(config, dtype=torch.float32)
    hidden = torch.randn(9, config.hidden)
    whole = reference.forward(KDALayer(config, weights), hidden)
    total = 0
    for rank in range(tp_size):
        layer = KDALayer(config.shard(tp_size), shard_weights(weights, config, rank, tp_size))
        cache = layer.new_cache(3)
        batch = Batch.make([9], [9], [cache.allocate()], is_prefilling=[True])
        total = total + layer(hidden, KDAMetadataBuilder("cpu", chunk_size=16).build(batch), cache).double()
    assert (total - whole).norm() <= 1e-5 * whole.norm()


def test_sizes_of_the_models():
    k3, linear = KDAConfig.kimi_k3(), KDAConfig.kimi_linear()
    assert [k3.shard(n).heads for n in (8, 16)] == [12, 6] and linear.shard(8).heads == 4
    for config in (k3.shard(8), linear.shard(8), linear):
        ends = [part.stop for part in config.parts.values()]
        starts = [part.start for part in config.parts.values()]
        assert starts[1:] == ends[:-1], "no gaps before the last part at head_dim 128"
        assert config.packed % 64 == 0 and config.packed >= ends[-1]
    assert k3.shard(8).parts["z"] == slice(3 * 1536, 4 * 1536) and linear.parts["z"].stop - linear.parts["z"].start == 128


@pytest.mark.parametrize("changes", [{"heads": 0}, {"hidden": 64.0}, {"gate_rank": None}, {"output_gate_rank": 0},
                                     {"conv_width": 5}, {"lower_bound": 1.0}, {"lower_bound": -6.0}, {"lower_bound": "5"},
                                     {"head_dim": 512}])
def test_a_config_that_no_layer_has_is_refused(changes):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=f"{next(iter(changes))}: got"):
        dataclasses.replace(BOUNDED, **changes)


def test_graphs_need_sizes():
    layer = KDALayer(BOUNDED, random_weights(BOUNDED, dtype=torch.float32))
    builder = KDAMetadataBuilder("cpu", staging=GraphStaging("cpu", 4))
    with pytest.raises(ArgumentError, match="sizes: got"):
        DecodeGraphs(layer, layer.new_cache(4), builder, [])


def test_refusals():
    weights = random_weights(BOUNDED, dtype=torch.float32)
    with pytest.raises(ArgumentError, match="heads"):
        BOUNDED.shard(3)
    with pytest.raises(ArgumentError, match="rank"):
        shard_weights(weights, BOUNDED, 2, 2)
    with pytest.raises(ArgumentError, match=r"weights\['f_b'\].*shape"):
        KDALayer(BOUNDED, weights | {"f_b": weights["f_b"][:-1]})
    with pytest.raises(ArgumentTypeError, match=r"weights\['conv'\].*float32"):
        KDALayer(BOUNDED, weights | {"conv": weights["conv"].half()})
    with pytest.raises(ArgumentError, match="exactly"):
        KDALayer(BOUNDED, {name: tensor for name, tensor in weights.items() if name != "norm"})


def test_a_change_of_dtype_leaves_the_fp32_weights_alone():
    """Rounded to bf16, a decay of 0.9999 would be 1: conv weights, A_log, dt_bias and norm stay fp32, to the bit."""
    config = KDAConfig(24, 4, 16, gate_rank=8, output_gate_rank=8)
    weights = random_weights(config, dtype=torch.float32)
    layer = KDALayer(config, {name: weight.clone() for name, weight in weights.items()})
    assert layer.to(torch.bfloat16) is layer and layer.in_proj.dtype == torch.bfloat16
    layer.float().bfloat16()
    for name in ("conv", "A_log", "dt_bias", "norm"):
        assert torch.equal(getattr(layer, name), weights[name]), name
    assert layer._gate["A_log"] is layer.A_log, "the gate's options must follow the parameters"

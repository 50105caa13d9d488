"""compat.vllm: dictionary keys, argument names, and the convolution in vLLM's layout."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdagen import reference
from kdagen.compat import vllm
from kdagen.errors import ArgumentError, ArgumentTypeError, KdagenError

pytestmark = pytest.mark.usefixtures("cpu_path")


def names(function):
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]


def test_argument_names_and_order():
    assert names(vllm.causal_conv1d_fn) == [
        "x", "weight", "bias", "conv_states", "query_start_loc", "cache_indices", "has_initial_state", "activation",
        "pad_slot_id", "block_idx_first_scheduled_token", "block_idx_last_scheduled_token", "initial_state_idx",
        "num_computed_tokens", "block_size_to_align", "metadata", "validate_data"]
    assert names(vllm.causal_conv1d_update) == [
        "x", "conv_state", "weight", "bias", "activation", "conv_state_indices", "num_accepted_tokens", "query_start_loc",
        "max_query_len", "null_block_id", "block_idx_last_scheduled_token", "initial_state_idx", "validate_data"]
    assert names(vllm.prepare_chunk_metadata_device) == ["cu_seqlens", "cu_seqlens_cpu", "chunk_size"]
    assert names(vllm.build_conv1d_chunk_schedule) == ["query_start_loc_cpu", "block_m", "device"]
    parameters = inspect.signature(vllm.compute_causal_conv1d_metadata).parameters
    assert list(parameters) == ["query_start_loc_p_cpu", "device"]
    assert parameters["device"].kind is inspect.Parameter.KEYWORD_ONLY


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 90), max_size=6))
def test_the_schedule_s_dictionary(lengths):
    starts = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    nums, batch_ptr, offset_ptr = vllm.compute_causal_conv1d_metadata(starts, device=torch.device("cpu"))
    entry, = nums.values()
    assert list(nums) == [8] and set(entry) == {"nums", "tot", "mlist", "mlist_len", "offsetlist", "batch_ptr",
                                                "token_chunk_offset_ptr"}
    pairs = [(n, block) for n, length in enumerate(lengths) for block in range(-(-length // 8))]
    assert entry["tot"] == entry["mlist_len"] == len(pairs)
    assert entry["nums"].tolist() == [-(-length // 8) for length in lengths]
    assert entry["mlist"].tolist() == [n for n, _ in pairs] and entry["mlist"].dtype == torch.int64
    assert entry["offsetlist"].tolist() == [block for _, block in pairs] and entry["offsetlist"].dtype == torch.int32
    for table, column in ((batch_ptr, 0), (offset_ptr, 1)):
        assert table.dtype == torch.int32 and len(table) == 2 * max(1024, len(pairs))
        assert table[:len(pairs)].tolist() == [pair[column] for pair in pairs] and (table[len(pairs):] == -1).all()
    assert entry["batch_ptr"] is batch_ptr and entry["token_chunk_offset_ptr"] is offset_ptr
    ours = vllm.build_conv1d_chunk_schedule(starts, 8, "cpu")
    assert ours["tot"] == entry["tot"] and ours["batch_ptr"].tolist() == [n for n, _ in pairs]


def test_schedule_refusals():
    with pytest.raises(ArgumentError, match="never decrease"):
        vllm.compute_causal_conv1d_metadata(torch.tensor([0, 5, 3], dtype=torch.int32), device=torch.device("cpu"))
    with pytest.raises(ArgumentTypeError, match="host copy"):
        vllm.compute_causal_conv1d_metadata(torch.empty(3, dtype=torch.int32, device="meta"), device=torch.device("cpu"))
    with pytest.raises(ArgumentTypeError, match=r"query_start_loc_p_cpu: got torch.float32, expected torch.int32"):
        vllm.compute_causal_conv1d_metadata(torch.tensor([0.0, 3.0]), device=torch.device("cpu"))


def test_channels_that_are_not_side_by_side(rng):
    """The words are about what came, not about its transpose, which the op sees."""
    x, weight, starts = torch.randn(12, 7, generator=rng), torch.randn(12, 4), torch.tensor([0, 7], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"^x: got strides \(7, 1\) .*Pass x.t\(\).contiguous\(\).t\(\)"):
        vllm.causal_conv1d_fn(x, weight, None, pool_of(rng, 2, 12, 3), starts)
    vllm.causal_conv1d_fn(x.t().contiguous().t(), weight, None, pool_of(rng, 2, 12, 3), starts)
    with pytest.raises(ArgumentError, match=r"^conv_states: got strides \(36, 3, 1\)"):
        vllm.causal_conv1d_fn(x.t().contiguous().t(), weight, None, torch.randn(2, 12, 3), starts)
    with pytest.raises(ArgumentError, match=r"^conv_state: got strides \(36, 3, 1\)"):
        vllm.causal_conv1d_update(torch.randn(2, 12), torch.randn(2, 12, 3), weight)


class Metadata:
    def __init__(self, nums_dict):
        self.nums_dict = nums_dict


def pool_of(rng, lines, dim, columns):
    """[lines, dim, columns], channels contiguous, as vLLM keeps it."""
    return torch.randn(lines, columns, dim, generator=rng).transpose(1, 2)


@pytest.mark.parametrize("schedule", [None, "vllm", "ours"])
@pytest.mark.parametrize("pad", [-1, 0])
def test_prompts(schedule, pad, rng):
    starts = torch.tensor([0, 5, 6, 30], dtype=torch.int32)
    x = torch.randn(30, 12, generator=rng).t()  # [dim, tokens], tokens apart: vLLM's layout
    weight, bias, states = torch.randn(12, 4, generator=rng), torch.randn(12, generator=rng), pool_of(rng, 7, 12, 3)
    has = torch.tensor([True, False, True])
    lines = torch.tensor([5, 2, pad], dtype=torch.int32)
    metadata = None
    if schedule == "vllm":
        metadata = Metadata(vllm.compute_causal_conv1d_metadata(starts, device=torch.device("cpu"))[0])
    elif schedule == "ours":
        metadata = Metadata({16: vllm.build_conv1d_chunk_schedule(starts, 16, "cpu")})
    before = states.clone()
    y = vllm.causal_conv1d_fn(x, weight, bias, states, starts, cache_indices=lines, has_initial_state=has, metadata=metadata)
    history = torch.stack([before[5].t(), torch.zeros(3, 12)])
    want, final = reference.causal_conv1d(x.t()[None, :6], weight, bias, initial_state=history, cu_seqlens=starts[:3],
                                          output_final_state=True)
    assert y.shape == x.shape
    torch.testing.assert_close(y[:, :6].double(), want[0].t(), rtol=1e-5, atol=1e-5)
    assert not y[:, 6:].any()
    torch.testing.assert_close(states[[5, 2]].double(), final.transpose(1, 2), rtol=1e-6, atol=1e-6)
    assert torch.equal(states[[0, 1, 3, 4, 6]], before[[0, 1, 3, 4, 6]])


@pytest.mark.parametrize("form", ["one", "several", "packed"])
@pytest.mark.parametrize("activation, name", [(True, "silu"), (None, None), ("swish", "silu")])
def test_decode(form, activation, name, rng):
    weight, states = torch.randn(12, 4, generator=rng), pool_of(rng, 6, 12, 5)
    lines = torch.tensor([[3, 9], [0, 9], [4, 9]], dtype=torch.int32)  # column 0 counts; line 0 is the null block
    accepted = None if form == "one" else torch.tensor([2, 1, 3], dtype=torch.int32)
    starts, length = None, 1
    if form == "one":
        x = torch.randn(3, 12, generator=rng)
    elif form == "several":
        x, length = torch.randn(3, 12, 3, generator=rng), 3
    else:
        x, starts = torch.randn(7, 12, generator=rng), torch.tensor([0, 3, 5, 7], dtype=torch.int32)
    pool = states.transpose(1, 2).clone()
    rows = {"one": lambda: x[:, None], "several": lambda: x.transpose(1, 2), "packed": lambda: x[None]}[form]()
    want = reference.causal_conv1d_update(rows, pool, weight, state_indices=lines, num_accepted_tokens=accepted,
                                          cu_seqlens=starts, activation=name, pad_slot=0)
    y = vllm.causal_conv1d_update(x, states, weight, activation=activation, conv_state_indices=lines,
                                  num_accepted_tokens=accepted, query_start_loc=starts, max_query_len=length)
    got = {"one": lambda: y[:, None], "several": lambda: y.transpose(1, 2), "packed": lambda: y[None]}[form]()
    assert y.shape == x.shape
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(states.transpose(1, 2), pool)


def test_line_0_is_a_line_without_indices_or_a_null_block(rng):
    weight, states = torch.randn(12, 4, generator=rng), pool_of(rng, 2, 12, 3)
    x = torch.randn(2, 12, generator=rng)
    plain = vllm.causal_conv1d_update(x, states.clone(), weight)
    assert plain[0].any()
    lines = torch.tensor([0, 1], dtype=torch.int32)
    assert not vllm.causal_conv1d_update(x, states.clone(), weight, conv_state_indices=lines)[0].any()
    live = vllm.causal_conv1d_update(x, states.clone(), weight, conv_state_indices=lines, null_block_id=-1)
    torch.testing.assert_close(live, plain, rtol=0, atol=0)


def test_an_output_buffer(rng):
    weight, states = torch.randn(12, 4, generator=rng), pool_of(rng, 2, 12, 3)
    x = torch.randn(2, 12, generator=rng)
    want = vllm.causal_conv1d_update(x, states.clone(), weight)
    out = torch.empty_like(x)
    assert vllm.causal_conv1d_update(x, states.clone(), weight, out=out) is out and torch.equal(out, want)


def test_refusals(rng):
    weight, states, x = torch.randn(12, 4), pool_of(rng, 3, 12, 3), torch.randn(2, 12)
    lines = torch.tensor([1, 2], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="initial_state_idx") as caught:
        vllm.causal_conv1d_update(x, states, weight, conv_state_indices=lines, initial_state_idx=lines)
    assert isinstance(caught.value, KdagenError)
    with pytest.raises(ArgumentError, match="activation"):
        vllm.causal_conv1d_update(x, states, weight, activation="relu")
    with pytest.raises(ArgumentError, match="pad_slot_id"):
        vllm.causal_conv1d_update(x, states, weight, conv_state_indices=lines, pad_slot_id=2)
    with pytest.raises(TypeError):
        vllm.causal_conv1d_update(x, states, weight, conv_state_idx=lines)

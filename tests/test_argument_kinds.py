"""Arguments of another kind than an op takes, and sizes that no kernel has: refused by name, on both paths alike."""

from __future__ import annotations

import cases
import numpy as np
import pytest
import torch
from test_cases_refusals import EACH_TENSOR, refused

from kdagen.errors import ArgumentError, ArgumentTypeError, Unsupported


@pytest.mark.parametrize("path", ["interpreter", "cpu"])
@pytest.mark.parametrize("value", [[0, 3], np.array([0, 3]), 1], ids=["list", "array", "int"])
@pytest.mark.parametrize("name, argument", [(name, argument) for name, argument in EACH_TENSOR if argument in (
    "cu_seqlens", "cu_seqlens_cpu", "query_start_loc", "query_start_loc_cpu", "has_initial_state", "initial_state",
    "state_indices", "num_accepted_tokens", "cache_indices", "A_log", "dt_bias") and name != "stage_spec_decode_metadata"])
def test_what_is_no_tensor(name, argument, value, path, rng, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if path == "interpreter" else "0")
    message = refused(name, rng, argument, value, ArgumentTypeError)
    kind = {list: "a list", int: "an int", np.ndarray: "a ndarray"}[type(value)]
    assert message.startswith(f"{argument}: got {kind}, expected a torch.Tensor"), message


@pytest.mark.parametrize("path", ["interpreter", "cpu"])
@pytest.mark.parametrize("name, argument", [
    *((name, "lower_bound") for name in ("chunk_kda", "fused_recurrent_kda", "kda_decode_step", "kda_gate")),
    *((name, "scale") for name in ("chunk_kda", "fused_recurrent_kda", "kda_decode_step")),
    *((name, "eps") for name in ("gated_rmsnorm", "kda_decode_step"))])
def test_what_is_no_number(name, argument, path, rng, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if path == "interpreter" else "0")
    assert refused(name, rng, argument, "0.1", ArgumentTypeError) == f"{argument}: got '0.1', expected a number"


@pytest.mark.parametrize("name, argument, value, words", [
    ("kda_gate", "chunk_size", 16.0, "chunk_size: got 16.0, expected one of"),
    ("step_tables", "chunk_size", 16.0, "chunk_size: got 16.0, expected one of"),
    ("step_tables", "blocks", 8, "blocks: got 8, expected a sequence of block sizes"),
    ("step_tables", "blocks", [[8]], "blocks: got [[8]], expected a sequence of block sizes")])
def test_sizes_that_are_none(name, argument, value, words, rng, cpu_path):
    assert refused(name, rng, argument, value).startswith(words)


@pytest.mark.parametrize("value", [True, torch.ones(cases.N, dtype=torch.bool)], ids=["bool", "tensor"])
def test_an_initial_state_without_lines(value, rng):
    op, make = cases.CALLS["causal_conv1d"]
    with pytest.raises(ArgumentError, match=r"has_initial_state: got .* without conv_states, expected both"):
        op(**make(rng) | {"conv_states": None, "cache_indices": None, "has_initial_state": value})
    op(**make(rng) | {"conv_states": None, "cache_indices": None, "has_initial_state": False})


@pytest.mark.parametrize("path", ["interpreter", "cpu"])
@pytest.mark.parametrize("name, sizes, words", [
    ("kda_gate", dict(g=(1, 2, 1, 1025), A_log=(1,)), "g: got K = 1025, expected K from 1 to 1024"),
    ("gated_rmsnorm", dict(o=(1, 5000), z=(1, 5000), weight=(5000,)), "o: got V = 5000, expected V from 1 to 4096"),
    ("kda_decode_step", dict(qkv=(1, 2 * 257 + 8), z=(1, 8), g=(1, 257), beta=(1, 1), conv_pool=(2, 3, 522),
                             conv_weight=(522, 4), state_pool=(2, 1, 8, 257), norm_weight=(8,), A_log=(1,)),
     "g: got K = 257, expected K from 1 to 256")])
def test_sizes_past_the_kernels_are_refused_on_both_paths(name, sizes, words, path, rng, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if path == "interpreter" else "0")
    call = {argument: torch.randn(*shape, generator=rng) for argument, shape in sizes.items()}
    if name == "kda_decode_step":
        call["state_indices"] = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(Unsupported) as caught:
        cases.CALLS[name][0](**call)
    assert str(caught.value) == words


def test_shapes_are_told_by_the_names_of_their_axes(rng):
    for name, argument, words in (("kda_gate", "g", "[B, T, HV, K]"), ("kda_decode_step", "z", "[4, HV * V]"),
                                  ("kda_decode_step", "beta", "[4, HV]"), ("causal_conv1d", "conv_states", "[slots, W - 1"),
                                  ("chunk_kda, pool", "state_pool", "[slots, 2, 8, 4]")):
        value = cases.CALLS[name][1](rng)[argument]
        message = refused(name, rng, argument, value[None], ArgumentError)
        assert f"expected shape {words}" in message and "any" not in message, message

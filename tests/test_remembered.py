"""Calls that an op knows by their layout: another scalar or flag, with the same shapes, gives the other call's result.

Ops look into their memory on a GPU alone, so here tensors say that they are on one. The launch that repeats a remembered one
(ops/_again.py) only notes that it was asked, and leaves the work to an ordinary launch in the interpreter.
"""

from __future__ import annotations

import pytest
import torch

from inputs import cu_seqlens, gate_parameter, kda, relative
from kdagen import dispatch
from kdagen import reference as R
from kdagen.ops import conv, decode, decode_step, gate, norm
from kdagen.ops._common import interpreting

FP32 = 2e-6
N, H, K, SLOTS = 3, 2, 16, 5
EDGES = cu_seqlens([9, 0, 6])


@pytest.fixture
def asked(monkeypatch):
    """What remembered launches were asked for, by what they would have passed behind the pointers."""
    if torch.cuda.is_available() or not interpreting():
        pytest.skip("runs in the interpreter, on CPU tensors")
    notes = []

    class Repeat:
        def __init__(self, rest):
            self.rest = rest

        def launch(self, pointers):
            notes.append(self.rest)
            return False

    for module in (gate, decode, decode_step):
        monkeypatch.setattr(module, "again", lambda compiled, device, programs, pointers, rest: Repeat(rest))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    dispatch._clear_memos()
    yield notes
    dispatch._clear_memos()


def gates(rng):
    """(call, oracle), each of keyword arguments that give a list of tensors; the same for the ops below."""
    tensors = torch.randn(1, 20, H, K, generator=rng), gate_parameter(rng, H), torch.randn(H, K, generator=rng)
    beta = torch.randn(1, 20, H, generator=rng)

    def want(lower_bound=-5.0, chunk_size=None, allow_neg_eigval=False):
        decay = R.kda_gate(*tensors, lower_bound=lower_bound)
        return [R.chunk_cumsum(decay, chunk_size) if chunk_size else decay, R.kda_beta(beta, allow_neg_eigval)]

    return lambda **flags: gate.kda_gate(*tensors, beta=beta, **({"lower_bound": -5.0} | flags)), want


def steps(rng):
    """Fused decode steps: the pools are copies."""
    D = 3 * H * K
    normal = lambda *shape: torch.randn(*shape, generator=rng)
    qkv, z, g, beta, pool = normal(N, D), normal(N, H * K), normal(N, H * K), normal(N, H), normal(SLOTS, H, K, K)
    line, weight, norm_weight = normal(SLOTS, 3, D), normal(D, 4), normal(K)
    table, usual = torch.tensor([3, 0, 1]), dict(A_log=gate_parameter(rng, H), dt_bias=normal(H, K), lower_bound=-5.0)

    def run(step, flags):
        lines, states = line.clone(), pool.clone()
        out = step(qkv, z, g, beta, lines, weight, states, table, norm_weight, **(usual | flags))
        return [out, lines, states]

    return (lambda **flags: run(decode_step.kda_decode_step, flags),
            lambda **flags: run(R.kda_decode_step, {"heads": H, "K": K} | flags))


def recurrences(rng):
    x, usual = kda(rng, "bounded", B=N, T=2, H=H, K=K)
    pool = x.pop("initial_state").repeat(2, 1, 1, 1)[:SLOTS]
    table = torch.tensor([3, 0, 1])

    def run(op, name, flags):
        states = pool.clone()
        out = op(**x, **{name: states}, state_indices=table, **(usual | flags))
        return [out[0] if isinstance(out, tuple) else out, states]

    return (lambda **flags: run(decode.fused_recurrent_kda, "state_pool", flags),
            lambda **flags: run(R.recurrent_kda_pool, "pool", flags))


def norms(rng):
    o, z, weight = torch.randn(5, K, generator=rng), torch.randn(5, K, generator=rng), torch.randn(K, generator=rng)
    return (lambda **flags: [norm.gated_rmsnorm(o, z, weight, **flags)],
            lambda eps=1e-5: [R.gated_rmsnorm(o, z, weight, eps)])


def prompts(rng):
    x, weight, line = (torch.randn(*shape, generator=rng) for shape in ((1, 15, 8), (8, 4), (SLOTS, 3, 8)))
    table = torch.tensor([0, 3, 1])

    def run(flags):
        lines = line.clone()
        return [conv.causal_conv1d(x, weight, cu_seqlens=EDGES, conv_states=lines, cache_indices=table,
                                   **({"has_initial_state": True} | flags)), lines]

    return lambda **flags: run(flags), None


def updates(rng):
    x, weight, line = (torch.randn(*shape, generator=rng) for shape in ((N, 8), (8, 4), (SLOTS, 3, 8)))
    table = torch.tensor([3, 0, 1])

    def run(flags):
        lines = line.clone()
        return [conv.causal_conv1d_update(x, lines, weight, cache_indices=table, **flags), lines]

    return lambda **flags: run(flags), None


REPEATED = [
    *[(gates, flags) for flags in (
        dict(allow_neg_eigval=True), dict(lower_bound=-3.0), dict(lower_bound=None), dict(chunk_size=16))],
    *[(steps, flags) for flags in (
        dict(scale=0.5), dict(lower_bound=-3.0), dict(lower_bound=None), dict(eps=0.1), dict(pad_slot=0),
        dict(allow_neg_eigval=True), dict(state_v_first=False))],
    *[(recurrences, flags) for flags in (
        dict(scale=0.5), dict(lower_bound=-3.0), dict(lower_bound=None), dict(pad_slot=0), dict(allow_neg_eigval=True),
        dict(state_v_first=False), dict(use_qk_l2norm_in_kernel=False), dict(use_beta_sigmoid_in_kernel=False))],
]
ASKED_EACH_TIME = [
    (norms, dict(eps=0.1)),
    *[(prompts, flags) for flags in (dict(activation=None), dict(pad_slot=0), dict(has_initial_state=False))],
    *[(updates, flags) for flags in (dict(activation=None), dict(pad_slot=0))],
]
names = lambda cases: [f"{op.__name__}-{name}={value}" for op, flags in cases for name, value in flags.items()]


def agree(mine, theirs):
    return all(relative(a, b) < FP32 for a, b in zip(mine, theirs))


@pytest.mark.parametrize(("op", "flags"), REPEATED, ids=names(REPEATED))
def test_a_remembered_launch_is_repeated_for_the_same_scalars_alone(rng, asked, op, flags):
    call, want = op(rng)
    assert agree(call(), want()) and not asked
    assert agree(call(), want()) and len(asked) == 1, "known now"
    assert agree(call(**flags), want(**flags)) and len(asked) == 1, "a call of its own"
    assert not agree(want(**flags), want()), "the flag matters"
    assert agree(call(**flags), want(**flags)) and agree(call(), want())
    assert len(asked) == 3 and asked[2] == asked[0], "both are remembered beside each other"


@pytest.mark.parametrize(("op", "flags"), ASKED_EACH_TIME, ids=names(ASKED_EACH_TIME))
def test_a_remembered_layout_takes_the_scalars_of_each_call(rng, asked, op, flags, monkeypatch):
    call, _ = op(rng)
    with monkeypatch.context() as patch:
        patch.delattr(torch.Tensor, "is_cuda")
        want, other = call(), call(**flags)  # nothing is remembered of CPU tensors
    dispatch._clear_memos()
    call()
    monkeypatch.setattr(norm, "_plan", lambda *arguments: pytest.fail("not remembered"))
    monkeypatch.setattr(conv, "_plan", lambda *arguments: pytest.fail("not remembered"))
    same = lambda mine, theirs: all(torch.equal(a, b) for a, b in zip(mine, theirs))
    assert same(call(**flags), other) and same(call(), want) and not same(want, other)

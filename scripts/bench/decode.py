"""Benchmark of decode: the recurrent op on a pool, beside fla-core's, and the fused step beside the ops that it fuses.

bf16 inputs, K = V = 128, bounded gate, L2 norm, gate and sigmoid of beta in the kernel, states in place in a pool, slots in
random order. Graph replays over slots that overflow the L2 cache; rivals' replays take turns. Before anything is timed,
its output and the states it leaves are compared with the fp64 oracle on the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from kdagen import reference as oracle
from kdagen.ops.conv import causal_conv1d_update
from kdagen.ops.decode import fused_recurrent_kda
from kdagen.ops.decode_step import kda_decode_step
from kdagen.ops.norm import gated_rmsnorm

from ._passes import Keep, alone_then_beside, in_turn
from .common import Budget, limit, relative_error, row, sets_needed, skipped, time_host

K = V = 128
DTYPE = torch.bfloat16
LOWER_BOUND = -5.0
IN_KERNEL = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
OUTPUT = 2e-3  # a rounding to bf16 alone is 1.7e-3
STATE = {torch.float32: 2e-6, torch.bfloat16: 3e-3}
CHECKED = 4    # rows of a batch that are compared with the oracle


class Recurrent(NamedTuple):
    seqs: int
    heads: int
    drafts: int = 0
    state: torch.dtype = torch.float32

    op = "fused_recurrent_kda"

    @property
    def name(self) -> str:
        state = "" if self.state == torch.float32 else " bf16 states"
        return f"recurrent N={self.seqs} H={self.heads}" + (f" drafts={self.drafts}" if self.drafts else "") + state


class Step(NamedTuple):
    seqs: int
    heads: int

    op = "kda_decode_step"

    @property
    def name(self) -> str:
        return f"fused step N={self.seqs} H={self.heads}"


CASES = (
    Recurrent(64, 32), Recurrent(256, 96), Recurrent(8, 32), Recurrent(1, 32), Recurrent(64, 12),
    Step(1, 12), Step(8, 12), Step(32, 12), Step(128, 12), Step(1, 32), Step(8, 32), Step(32, 32), Step(128, 32),
    Recurrent(64, 32, state=torch.bfloat16), Recurrent(8, 32, state=torch.bfloat16), Recurrent(1, 32, state=torch.bfloat16),
    Recurrent(64, 32, 3), Recurrent(8, 32, 3), Recurrent(1, 32, 3), Recurrent(1, 12), Recurrent(8, 12),
)


class Rival(NamedTuple):
    """One implementation: ``call(table)`` for a table of slots, returning its output, and a note on what it is."""

    call: Callable[[torch.Tensor], torch.Tensor]
    note: str = ""


class Bench(NamedTuple):
    """A case set up: its rivals, the tables they rotate over, the pool they work on, and the oracle's (output, states)."""

    rivals: dict[str, Rival]
    tables: list[torch.Tensor]
    pool: torch.Tensor
    answer: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    moved: float


def _normal(*shape: int, dtype=DTYPE) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def _pool(slots: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
    pool = torch.empty(slots, heads, V, K, device="cuda", dtype=dtype)
    for part in pool.split(64):
        part.normal_()
    return pool


def _gate(heads: int) -> dict:
    return dict(A_log=torch.log(1 + 15 * torch.rand(heads, device="cuda")), dt_bias=_normal(heads, K, dtype=torch.float32),
                lower_bound=LOWER_BOUND)


def _tables(slots: int, *shape: int) -> list[torch.Tensor]:
    """Every slot once, in random order: as many tables of that shape as the pool holds."""
    return list(torch.randperm(slots, device="cuda").int().view(-1, *shape))


def recurrent(case: Recurrent, peers: tuple[str, ...]) -> Bench:
    N, H, T = case.seqs, case.heads, 1 + case.drafts
    moved = N * H * K * V * case.state.itemsize * (1 + T) + N * T * H * (K * 4 + V) * 2
    pool = _pool(sets_needed(moved) * N * T, H, case.state)
    x = {name: _normal(N, T, H, K) for name in ("q", "k", "v", "g")} | {"beta": _normal(N, T, H)}
    options, out = _gate(H) | IN_KERNEL, torch.full((N, T, H, V), float("nan"), device="cuda", dtype=DTYPE)
    accepted = torch.randint(1, T + 1, (N,), device="cuda", dtype=torch.int32) if case.drafts else None

    def ours(table):
        return fused_recurrent_kda(**x, **options, state_pool=pool, state_indices=table, num_accepted_tokens=accepted,
                                   out=out)[0]

    def theirs(table):
        return fla(**x, **options, initial_state=pool, ssm_state_indices=table, num_accepted_tokens=accepted,
                   state_v_first=True, out=out)[0]

    def answer(table):
        states, few = _only(pool, table)
        o = oracle.recurrent_kda_pool(
            **{name: tensor[:CHECKED] for name, tensor in x.items()}, **options, pool=states, state_indices=few,
            num_accepted_tokens=None if accepted is None else accepted[:CHECKED])
        return o, states

    rivals = {"kdagen": Rival(ours)}
    if "fla" in peers:
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd as fla

        rivals["fla"] = Rival(theirs, "fused_recurrent_kda_fwd, in place")
    return Bench(rivals, _tables(len(pool), N, T) if case.drafts else _tables(len(pool), N), pool, answer, moved)


def _only(pool: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(a pool of the slots of the checked rows alone, their table in it)"""
    slots = table[:CHECKED]
    return pool[slots.flatten().long()], torch.arange(slots.numel(), device="cuda").view(slots.shape)


def step(case: Step) -> Bench:
    N, H = case.seqs, case.heads
    P = H * K
    moved = N * H * K * V * 8 + N * P * 2 * (3 + 1 + 1 + 1 + 3 + 3 * 3) + 3 * P * 16
    pool = _pool(sets_needed(moved) * N, H, torch.float32)
    lines = _normal(len(pool), 3, 3 * P)
    wide = _normal(N, 4 * P + K + H + 8)  # q | k | v | output gate | low-rank gate | beta, as a layer projects them
    qkv, z, beta = wide[:, : 3 * P], wide[:, 3 * P : 4 * P], wide[:, 4 * P + K : 4 * P + K + H]
    g, weight, norm, gate = _normal(N, P), 0.5 * _normal(3 * P, 4, dtype=torch.float32), _normal(V), _gate(H)
    out, mixed, o = _normal(N, H, V), _normal(N, 3 * P), _normal(N, 1, H, V)
    q, k, v = (mixed[:, at : at + P].view(N, 1, H, K) for at in (0, P, 2 * P))

    def fused(table):
        return kda_decode_step(qkv, z, g, beta, lines, weight, pool, table, norm, **gate, out=out)

    def apart(table):
        causal_conv1d_update(qkv, lines, weight, cache_indices=table, out=mixed)
        fused_recurrent_kda(q, k, v, g.view(N, 1, H, K), beta[:, None], **gate, **IN_KERNEL, state_pool=pool,
                            state_indices=table, out=o)
        return gated_rmsnorm(o[:, 0], z.view(N, H, V), norm, out=out)

    def answer(table):
        states, few = _only(pool, table)
        rows = (x[:CHECKED] for x in (qkv, z, g, beta))
        y = oracle.kda_decode_step(*rows, _only(lines, table)[0], weight, states, few, norm, heads=H, K=K, **gate)
        return y, states

    rivals = {"kdagen": Rival(fused, "one launch"),
              "kdagen, ops apart": Rival(apart, "causal_conv1d_update, fused_recurrent_kda, gated_rmsnorm")}
    return Bench(rivals, _tables(len(pool), N), pool, answer, moved)


def _race(case: Recurrent | Step, sizes: dict, bench: Bench, tolerance: tuple[float, float], seconds: float) -> list[dict]:
    """Check each rival on slots that no other has touched, then time those that are right, their replays in turn."""
    rows, calls, common = [], {}, {}
    for at, (who, rival) in enumerate(bench.rivals.items()):
        peer, table = not who.startswith("kdagen"), bench.tables[at % len(bench.tables)]
        want, states = bench.answer(table)
        slots = table[:CHECKED].flatten().long()
        try:
            with limit(seconds if peer else math.inf):
                error = relative_error(rival.call(table)[:CHECKED], want)
            state = relative_error(bench.pool[slots], states)
        except Exception as failure:  # a peer that cannot run a case is a line of the report
            if not peer:
                raise
            rows.append(skipped("decode", case.name, case.op, who, f"{type(failure).__name__}: {failure}"[:200]))
            continue
        limits = (3 * OUTPUT, OUTPUT) if "apart" in who else tolerance  # the ops round to bf16 what they hand on
        if error > limits[0] or state > limits[1]:
            rows.append(skipped("decode", case.name, case.op, who,
                                f"wrong: relative errors {error:.2e}, states {state:.2e}"))
            continue
        calls[who] = [lambda rival=rival, table=table: rival.call(table) for table in bench.tables]
        common[who] = dict(error=error, error_against="fp64 oracle", state_error=state, note=rival.note, **sizes)
    timings, failed = in_turn(calls)
    rows += [skipped("decode", case.name, case.op, who, why) for who, why in failed.items()]
    for who, timing in timings.items():
        rows += [row("decode", case.name, case.op, who, timing, how="graph", bytes_moved=bench.moved, **common[who]),
                 row("decode", case.name, case.op, who, time_host(calls[who][0]), how="host", **common[who])]
    return rows


def lacks(case: Recurrent | Step, who: str) -> str | None:
    return "it has no fused step" if isinstance(case, Step) else None


def measure(case: Recurrent | Step, peers: tuple[str, ...], seconds: float) -> list[dict]:
    sizes = dict(seqs=case.seqs, heads=case.heads, tokens=case.seqs)
    if isinstance(case, Step):
        return _race(case, sizes, step(case), (OUTPUT, STATE[torch.float32]), seconds)
    sizes |= dict(drafts=case.drafts, state=str(case.state).removeprefix("torch."), tokens=case.seqs * (1 + case.drafts))
    return _race(case, sizes, recurrent(case, peers), (OUTPUT, STATE[case.state]), seconds)


def run(budget_s: float, *, peers: tuple[str, ...] = (), keep: Keep = lambda rows: None) -> list[dict]:
    """All rows of the section that fit in the budget, most wanted first; ``peers`` may name fla."""
    return alone_then_beside("decode", CASES, tuple(who for who in peers if who == "fla"), measure,
                             budget=Budget(budget_s), keep=keep, lacks=lacks)

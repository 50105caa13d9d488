"""Benchmark of the short convolution: prompts and decode steps, on pools of cache lines, beside fla-core's.

Graph replays over input sets that overflow the L2 cache; both implementations' replays take turns. Before anything is
timed, its output, and the pool it leaves, are compared with the oracle in fp64 on the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from kdagen.ops.conv import causal_conv1d, causal_conv1d_update
from kdagen.ops.metadata import build_conv1d_chunk_schedule
from kdagen.reference import conv as oracle

from ._passes import Keep, alone_then_beside, in_turn
from .common import Budget, limit, relative_error, rotate, row, skipped, time_host

WIDTH, DTYPE = 4, torch.bfloat16
TOLERANCE = 3e-3  # a rounding to bf16 alone is 1.7e-3


class Rival(NamedTuple):
    """One implementation of a case: a call whose output is checked, a call on a seed's inputs to be timed, the check."""

    once: Callable[[], torch.Tensor]
    make: Callable[[int], Callable]
    error: Callable[[torch.Tensor], float]


class Prompts(NamedTuple):
    tokens: int
    channels: int
    seqs: int = 1
    driver: str = "schedule"   # or search: no schedule given
    pool: bool = False         # initial states from, and new states to, a pool

    op = "causal_conv1d"

    @property
    def name(self) -> str:
        return f"prefill T={self.tokens} D={self.channels} N={self.seqs} {self.driver}{' pool' if self.pool else ''}"


class Steps(NamedTuple):
    rows: int
    channels: int
    drafts: int = 0

    op = "causal_conv1d_update"

    @property
    def name(self) -> str:
        return f"update N={self.rows} D={self.channels}" + (f" drafts={self.drafts}" if self.drafts else "")


CASES = (
    Prompts(8192, 12288), Prompts(8192, 12288, 1, "search"), Prompts(8192, 12288, 16, "schedule", True),
    Steps(64, 12288), Steps(1, 12288), Steps(256, 12288), Steps(8, 12288), Steps(64, 12288, 3), Steps(64, 4608),
    Prompts(8192, 4608), Prompts(2048, 12288), Prompts(512, 12288),
)


def _normal(seed: int, *shape: int, dtype=DTYPE) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)


def _boundaries(case: Prompts) -> torch.Tensor:
    """Host boundaries of ragged prompts that fill the step."""
    cuts = torch.randperm(case.tokens - 1, generator=torch.Generator().manual_seed(case.seqs))[: case.seqs - 1] + 1
    return torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([case.tokens])]).to(torch.int32)


def prompts(case: Prompts, peers: tuple[str, ...], seconds: float) -> list[dict]:
    T, D, N = case.tokens, case.channels, case.seqs
    weight, host = _normal(1, D, WIDTH, dtype=torch.float32), _boundaries(case)
    x, edges, out = _normal(3, 1, T, D), host.cuda(), torch.full((1, T, D), float("nan"), device="cuda", dtype=DTYPE)
    more, pool, history, first = {}, None, None, None
    if case.driver == "schedule":
        more = {"schedule": build_conv1d_chunk_schedule(host, 64, "cuda"), "block_m": 64}
    if case.pool:  # every other sequence continues a line, the others start from zeros
        pool, known = _normal(2, 4 * N, WIDTH - 1, D), torch.arange(N, device="cuda") % 2 == 0
        slots = torch.randperm(4 * N, device="cuda")[:N]
        more |= {"conv_states": pool, "has_initial_state": known, "cache_indices": slots.int()}
        history = pool[slots] * known[:, None, None]
        first = _peer_layout(history)
    ref, final = oracle.causal_conv1d(x, weight, initial_state=history, cu_seqlens=host, output_final_state=case.pool)

    def ours(x):
        return causal_conv1d(x, weight, cu_seqlens=edges, out=out, **more)

    # The peer remembers its tables by the identity of the boundaries: with new ones each call could not be captured.
    packed = {"cu_seqlens": edges.long(), "cu_seqlens_cpu": host.long()} if N > 1 else {}

    def theirs(x):
        return fla(x, weight, activation="silu", initial_state=first, output_final_state=case.pool, **packed)[0]

    def our_error(y):
        return relative_error(y, ref) if not case.pool or torch.equal(pool[slots].double(), final) else float("inf")

    moved = 2 * T * D * x.element_size() + weight.numel() * 4 + (4 * N * (WIDTH - 1) * D if case.pool else 0)
    rivals = {"kdagen": Rival(partial(ours, x), lambda seed: partial(ours, _normal(10 + seed, 1, T, D)), our_error)}
    if "fla" in peers:
        from fla.modules.causal_conv1d import causal_conv1d as fla

        rivals["fla"] = Rival(partial(theirs, x), lambda seed: partial(theirs, _normal(10 + seed, 1, T, D)),
                              lambda y: relative_error(y, ref))
    return _race(case, moved, dict(tokens=T, channels=D, seqs=N, driver=case.driver), rivals, seconds)


def _peer_layout(lines: torch.Tensor) -> torch.Tensor:
    """[N, W - 1, D] -> [N, D, W], contiguous, the column that the peer never reads first."""
    return torch.nn.functional.pad(lines.transpose(1, 2), (1, 0)).contiguous()


def steps(case: Steps, peers: tuple[str, ...], seconds: float) -> list[dict]:
    N, D, T = case.rows, case.channels, 1 + case.drafts
    weight, columns = _normal(1, D, WIDTH, dtype=torch.float32), WIDTH - 1 + case.drafts
    out = torch.full((N, T, D), float("nan"), device="cuda", dtype=DTYPE)
    accepted = torch.randint(1, T + 1, (N,), device="cuda", dtype=torch.int32) if case.drafts else None

    def data(seed):
        slots = torch.randperm(2 * N, device="cuda")[:N].int()
        return _normal(seed, N, T, D), _normal(seed + 1, 2 * N, columns, D), slots

    def ours(x, pool, slots):
        return causal_conv1d_update(x, pool, weight, cache_indices=slots, num_accepted_tokens=accepted, out=out)

    def theirs(x, cache):
        return fla(x, cache, weight=weight, activation="silu")[0]  # the output, and the cache that it changed

    x, pool, slots = data(5)
    after = pool.double()
    ref = oracle.causal_conv1d_update(x, after, weight, state_indices=slots, num_accepted_tokens=accepted)

    def our_error(y):
        return relative_error(y, ref) if torch.equal(pool.double(), after) else float("inf")

    moved = N * D * x.element_size() * (2 * T + WIDTH - 1 + (WIDTH - 2 + T)) + weight.numel() * 4
    rivals = {"kdagen": Rival(partial(ours, x, pool, slots), lambda seed: partial(ours, *data(100 + seed)), our_error)}
    if "fla" in peers:
        from fla.modules.causal_conv1d import causal_conv1d_update as fla

        line = _peer_layout(pool[slots.long()])
        rivals["fla"] = Rival(partial(theirs, x, line),
                              lambda seed: partial(theirs, data(100 + seed)[0], _normal(seed, N, D, WIDTH)),
                              lambda y: relative_error(y, ref))
    return _race(case, moved, dict(seqs=N, channels=D, drafts=case.drafts), rivals, seconds)


def lacks(case: Prompts | Steps, who: str) -> str | None:
    return "it has no speculative update" if isinstance(case, Steps) and case.drafts else None


def _race(case: Prompts | Steps, moved: float, sizes: dict, rivals: dict[str, Rival], seconds: float) -> list[dict]:
    """Check each rival, then time those that are right, their replays in turn; the host's time of ours alone."""
    rows, calls, common = [], {}, {}
    for who, rival in rivals.items():
        try:
            with limit(math.inf if who == "kdagen" else seconds):
                group = rotate(rival.make, moved)
                if who != "kdagen":
                    group[0]()  # a peer's first call tries out its configurations, on whatever it is given
                error = rival.error(rival.once())
        except Exception as failure:  # a peer that cannot run a case is a line of the report
            if who == "kdagen":
                raise
            rows.append(skipped("conv", case.name, case.op, who, f"{type(failure).__name__}: {failure}"[:200]))
            continue
        if error > TOLERANCE:
            rows.append(skipped("conv", case.name, case.op, who, f"wrong: relative error {error:.2e} against the oracle"))
        else:
            calls[who], common[who] = group, dict(error=error, error_against="fp64 oracle", **sizes)
    timings, failed = in_turn(calls)
    rows += [skipped("conv", case.name, case.op, who, why) for who, why in failed.items()]
    for who, timing in timings.items():
        rows.append(row("conv", case.name, case.op, who, timing, how="graph", bytes_moved=moved, **common[who]))
        if who == "kdagen":
            rows.append(row("conv", case.name, case.op, who, time_host(rivals[who].once), how="host", **common[who]))
    return rows


def run(budget_s: float, *, peers: tuple[str, ...] = (), keep: Keep = lambda rows: None) -> list[dict]:
    """All rows of the section that fit in the budget, most wanted first; ``peers`` may name fla."""
    measure = lambda case, *how: (prompts if isinstance(case, Prompts) else steps)(case, *how)
    return alone_then_beside("conv", CASES, tuple(who for who in peers if who == "fla"), measure, budget=Budget(budget_s),
                             keep=keep, lacks=lacks)

"""Benchmark of prefill: the chunked KDA forward, bounded and softplus gate, beside fla-core's and FlashKDA.

bf16, K = V = 128; gate, L2 norm and the sigmoid of beta in the kernel; the final state is returned. Graph replays over input
sets that overflow the L2 cache, all implementations' replays taking turns; then the eager call, and its host time. Before
anything is timed, two heads of its output and of its final state are compared with the fp64 chunk form on the same inputs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch

from kdagen import reference
from kdagen.ops.metadata import step_tables
from kdagen.ops.prefill import chunk_kda

from ._passes import Keep, alone_then_beside, in_turn
from .common import Budget, limit, relative_error, rotate, row, skipped, time_eager, time_host

K = V = 128
LOWER_BOUND = -5.0
TOLERANCE = 1e-2  # of o; the classes' own limits are tests, this only keeps wrong results from being timed
RAGGED = (1300, 547, 2048, 963, 271, 3063)


class Case(NamedTuple):
    lengths: tuple[int, ...]
    heads: int
    gate: str = "bounded"

    op = "chunk_kda"

    @property
    def name(self) -> str:
        n, t = len(self.lengths), sum(self.lengths)
        shape = f"T={t}" if n == 1 else f"ragged {n}, T={t}" if len(set(self.lengths)) > 1 else f"{n} x {self.lengths[0]}"
        return f"{shape} H={self.heads}" + ("" if self.gate == "bounded" else f" {self.gate}")


CASES = (
    Case((8192,), 96), Case((8192,), 32), Case((8192,), 96, "softplus"), Case((8192,), 32, "softplus"), Case((8192,), 64),
    Case((32768,), 32), Case((2048,), 32), Case((65536,), 8), Case(RAGGED, 32), Case((1024,) * 8, 96), Case((128,) * 64, 32),
    Case((8192,), 12), Case((8192,), 4), Case((2048,), 12), Case((32768,), 12),
)


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def of(cls, case: Case, seed: int) -> Inputs:
        generator = torch.Generator("cuda").manual_seed(seed)
        normal = lambda *shape: torch.randn(1, sum(case.lengths), case.heads, *shape, device="cuda", dtype=torch.bfloat16,
                                            generator=generator)
        return cls(normal(K), normal(K), normal(V), normal(K), normal())


class Setting(NamedTuple):
    """What all calls of a case share: gate parameters, boundaries on both sides, tables."""

    options: dict
    host: torch.Tensor
    edges: torch.Tensor
    tables: object

    @classmethod
    def of(cls, case: Case) -> Setting:
        generator = torch.Generator("cuda").manual_seed(0)
        spread = 15.0 if case.gate == "softplus" else 0.9  # A of Kimi-Linear: U(1, 16); of a bounded gate: U(0.1, 1)
        A = spread * torch.rand(case.heads, device="cuda", generator=generator) + (1.0 if case.gate == "softplus" else 0.1)
        options = {"A_log": A.log(), "dt_bias": torch.randn(case.heads, K, device="cuda", generator=generator) * 0.5}
        if case.gate == "bounded":
            options["lower_bound"] = LOWER_BOUND
        host = torch.tensor([0, *case.lengths]).cumsum(0).to(torch.int32)
        edges = host.cuda()
        return cls(options, host, edges, step_tables(edges, host, rows=True))


IN_KERNEL = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)


def ours(inputs: Inputs, setting: Setting, out: torch.Tensor):
    return chunk_kda(*inputs, **setting.options, **IN_KERNEL, output_final_state=True, cu_seqlens=setting.edges,
                     cu_seqlens_cpu=setting.host, tables=setting.tables, out=out)


def fla(setting: Setting, out: torch.Tensor) -> Callable:
    """fla-core's kernels, with its safe gate where the gate is bounded. Its FlashKDA backend is a peer of its own here."""
    os.environ["FLA_FLASH_KDA"] = "0"
    from fla.ops.kda import chunk_kda

    packed = {} if len(setting.host) == 2 else {"cu_seqlens": setting.edges.long(), "cu_seqlens_cpu": setting.host.long()}
    options = setting.options | {"dt_bias": setting.options["dt_bias"].reshape(-1)}
    return lambda inputs: chunk_kda(
        *inputs, **options, **IN_KERNEL, **packed, output_final_state=True, state_v_first=True,
        safe_gate="lower_bound" in options)


def flashkda(setting: Setting, out: torch.Tensor) -> Callable:
    """FlashKDA, which knows the bounded gate only."""
    from flash_kda import fwd

    edges, options = None if len(setting.host) == 2 else setting.edges.long(), setting.options
    state = torch.empty(len(setting.host) - 1, out.shape[2], V, K, device="cuda")

    def call(inputs: Inputs):
        fwd(*inputs, K**-0.5, out, options["A_log"], options["dt_bias"], LOWER_BOUND, final_state=state, cu_seqlens=edges)
        return out, state

    return call


RIVALS = {"flashkda": flashkda, "fla": fla}  # the one that needs no tuning first


def lacks(case: Case, who: str) -> str | None:
    return "it has no softplus gate" if who == "flashkda" and case.gate != "bounded" else None


@cache
def expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the final states of the first and the last head, from the inputs of seed 1, in fp64."""
    setting, inputs, heads = Setting.of(case), Inputs.of(case, 1), torch.tensor([0, case.heads - 1], device="cuda")
    options = {name: x[heads] if torch.is_tensor(x) else x for name, x in setting.options.items()}
    return reference.chunk_kda(*(x[:, :, heads] for x in inputs), **options, **IN_KERNEL, output_final_state=True,
                               cu_seqlens=setting.host)


def error(case: Case, found: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The larger relative error of o and of the final state, of the first and the last head; infinite where not finite."""
    if not all(bool(torch.isfinite(x).all()) for x in found):
        return float("inf")
    o, state = expected(case)
    heads = torch.tensor([0, case.heads - 1], device="cuda")
    return max(relative_error(found[0][:, :, heads], o), relative_error(found[1][:, heads], state))


def measure(case: Case, peers: tuple[str, ...], seconds: float) -> list[dict]:
    """Rows of one case: ours and the peers whose first call takes no longer than that, checked, then timed in turn."""
    setting = Setting.of(case)
    T, H, N = sum(case.lengths), case.heads, len(case.lengths)
    moved = T * H * (4 * K + V) * 2 + 2 * T * H + N * H * K * V * 4  # q, k, g, v, beta in; o and the states out
    out = torch.full((1, T, H, V), float("nan"), device="cuda", dtype=torch.bfloat16)
    calls = {"kdagen": lambda inputs: ours(inputs, setting, out)}
    first, rows, common = Inputs.of(case, 1), [], {}
    for who in ("kdagen", *peers):
        try:
            with limit(seconds if who in peers else math.inf):
                calls[who] = calls.get(who) or RIVALS[who](setting, torch.full_like(out, float("nan")))
                found = error(case, calls[who](first))
        except Exception as failure:  # a peer that cannot run a case is a line of the report
            if who == "kdagen":
                raise
            rows.append(skipped("prefill", case.name, case.op, who, f"{type(failure).__name__}: {failure}"[:200]))
            calls.pop(who, None)
            continue
        if found > TOLERANCE:
            rows.append(skipped("prefill", case.name, case.op, who, f"wrong: error {found:.1e}"))
            del calls[who]
        common[who] = dict(error=found, error_against="fp64 chunk form, two heads", tokens=T, seqs=N, heads=H,
                           gate=case.gate)
    data = rotate(lambda seed: Inputs.of(case, 10 + seed), moved)
    sets = {who: [partial(call, inputs) for inputs in data] for who, call in calls.items()}
    timings, failed = in_turn(sets, budget_ms=150.0)
    rows += [skipped("prefill", case.name, case.op, who, why) for who, why in failed.items()]
    for who, timing in timings.items():
        rows += [row("prefill", case.name, case.op, who, timing, how="graph", bytes_moved=moved, **common[who]),
                 row("prefill", case.name, case.op, who, time_eager(sets[who]), how="eager", **common[who]),
                 row("prefill", case.name, case.op, who, time_host(sets[who][0]), how="host", **common[who])]
    return rows


def run(budget_s: float, *, peers: tuple[str, ...] = (), keep: Keep = lambda rows: None) -> list[dict]:
    """Rows of the cases that fit the budget, the ones of the README's table first: ours, then beside one peer, then both."""
    return alone_then_beside("prefill", CASES, tuple(who for who in RIVALS if who in peers), measure,
                             budget=Budget(budget_s), keep=keep, lacks=lacks)

"""Benchmark of prefill: the chunked KDA forward, bounded and softplus gate, beside fla-core's and FlashKDA.

bf16, K = V = 128; gate, L2 norm and the sigmoid of beta in the kernel; the final state is returned. Graph replays over input
sets that overflow the L2 cache, all implementations' replays taking turns; then the eager call, and its host time. Before
anything is timed, two heads of its output and of its final state are compared with the fp64 chunk form on the same inputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from kdagen import reference
from kdagen.ops.metadata import step_tables
from kdagen.ops.prefill import chunk_kda

from .common import Budget, interleaved, peer, relative_error, rotate, row, skipped, time_eager, time_host

K = V = 128
LOWER_BOUND = -5.0
TOLERANCE = 1e-2  # of o; the classes' own limits are tests, this only keeps wrong results from being timed
RAGGED = (1300, 547, 2048, 963, 271, 3063)


class Case(NamedTuple):
    lengths: tuple[int, ...]
    heads: int
    gate: str = "bounded"

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

    if "lower_bound" not in setting.options:
        raise ValueError("it has no softplus gate")
    edges, options = None if len(setting.host) == 2 else setting.edges.long(), setting.options
    state = torch.empty(len(setting.host) - 1, out.shape[2], V, K, device="cuda")

    def call(inputs: Inputs):
        fwd(*inputs, K**-0.5, out, options["A_log"], options["dt_bias"], LOWER_BOUND, final_state=state, cu_seqlens=edges)
        return out, state

    return call


RIVALS = {"fla": fla, "flashkda": flashkda}


def error(found: tuple[torch.Tensor, torch.Tensor], inputs: Inputs, setting: Setting) -> float:
    """The larger relative error of o and of the final state, of the first and the last head; infinite where not finite."""
    if not all(bool(torch.isfinite(x).all()) for x in found):
        return float("inf")
    heads = torch.tensor([0, inputs.q.shape[2] - 1], device="cuda")
    options = {name: x[heads] if torch.is_tensor(x) else x for name, x in setting.options.items()}
    o, state = reference.chunk_kda(*(x[:, :, heads] for x in inputs), **options, **IN_KERNEL, output_final_state=True,
                                   cu_seqlens=setting.host)
    return max(relative_error(found[0][:, :, heads], o), relative_error(found[1][:, heads], state))


def measure(case: Case, peers: tuple[str, ...]) -> list[dict]:
    setting = Setting.of(case)
    T, H, N = sum(case.lengths), case.heads, len(case.lengths)
    moved = T * H * (4 * K + V) * 2 + 2 * T * H + N * H * K * V * 4  # q, k, g, v, beta in; o and the states out
    sizes = dict(tokens=T, seqs=N, heads=H, gate=case.gate)
    out = torch.full((1, T, H, V), float("nan"), device="cuda", dtype=torch.bfloat16)
    calls = {"kdagen": lambda inputs: ours(inputs, setting, out)}
    first, rows, errors = Inputs.of(case, 1), [], {}
    for who in ("kdagen", *peers):
        try:
            call = calls.get(who) or RIVALS[who](setting, torch.full_like(out, float("nan")))
            errors[who] = error(call(first), first, setting)
        except Exception as failure:  # a peer that cannot run a case is a line of the report
            if who == "kdagen":
                raise
            rows.append(skipped("prefill", case.name, who, f"{type(failure).__name__}: {failure}"[:200]))
            continue
        if errors[who] > TOLERANCE:
            rows.append(skipped("prefill", case.name, who, f"wrong: error {errors[who]:.1e}"))
            calls.pop(who, None)
        else:
            calls[who] = call
    data = rotate(lambda seed: Inputs.of(case, 10 + seed), moved) if calls else []
    sets = [[partial(call, inputs) for inputs in data] for call in calls.values()]
    common = dict(err_against="fp64 chunk form, two heads", **sizes)
    try:
        timings = dict(zip(calls, interleaved(sets, budget_ms=150.0))) if sets else {}
    except RuntimeError as failure:  # a peer that cannot be captured: ours alone
        rows += [skipped("prefill", case.name, who, f"graph: {failure}"[:200]) for who in calls if who != "kdagen"]
        timings = dict(zip(["kdagen"], interleaved(sets[:1], budget_ms=150.0)))
    for who, timing in timings.items():
        rows.append(row("prefill", case.name, who, timing, how="graph", bytes_moved=moved, err=errors[who], **common))
    for who, group in zip(calls, sets):
        rows.append(row("prefill", case.name, who, time_eager(group), how="eager", err=errors[who], **common))
        rows.append(row("prefill", case.name, who, time_host(group[0]), how="host", err=errors[who], **common))
    return rows


def run(budget_s: float, *, peers: tuple[str, ...] = ()) -> list[dict]:
    """Rows of the cases that fit the budget, the ones of the README's table first: ours alone, then again beside the peers.

    A peer's first call of a number of heads compiles and tunes for many seconds; ours are on the report whatever that takes.
    """
    missing = [skipped("prefill", "all", name, "not installed") for name in peers if peer(name) is None]
    found = tuple(name for name in peers if peer(name) is not None)
    rows: dict[Case, list[dict]] = {}
    budget = Budget(budget_s)
    for present in ((), found) if found else ((),):
        for case in budget.over(CASES):
            rows[case] = measure(case, present)
            torch.cuda.empty_cache()
    return missing + [one for case in CASES for one in rows.get(case, [])]

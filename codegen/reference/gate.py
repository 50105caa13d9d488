"""Oracle of the gate: raw gate -> log decay, beta, the chunk-local cumulative decay, and the gradients (docs/kda.md)."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from kdagen.errors import refuse

LOG2E = math.log2(math.e)


def shifted_gate(g: torch.Tensor, dt_bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x = g + dt_bias: [B, T, HV, K], the bias being [HV, K], [HV*K] or None."""
    x = g.to(dtype)
    return x if dt_bias is None else x + dt_bias.to(dtype).reshape(x.shape[-2:])


def kda_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Log decay (natural log, <= 0) [..., HV, K] of a raw gate of that shape; A_log [HV], dt_bias [HV, K] or None.

    Softplus form (lower_bound None; Kimi-Linear): -exp(A_log) * softplus(x). Bounded form (Kimi-K3):
    lower_bound * sigmoid(exp(A_log) * x), the factor being 1 without A_log. x = g + dt_bias.
    """
    x = shifted_gate(g, dt_bias, dtype)
    if A_log is None and lower_bound is None:
        refuse("A_log", "None", "a tensor [HV] for the softplus form, or lower_bound for the bounded one")
    a = torch.ones((), dtype=dtype, device=g.device) if A_log is None else A_log.to(dtype).exp().reshape(-1, 1)
    if lower_bound is None:
        softplus = torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))
        return -a * softplus
    return lower_bound * torch.sigmoid(a * x)


def kda_gate_backward(
    dg: torch.Tensor,
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(d raw gate [..., HV, K], dA_log [HV] or None, d dt_bias of its shape or None) from dg, the log decay's gradient."""
    x, dg = shifted_gate(g, dt_bias, dtype), dg.to(dtype)
    a = torch.ones((), dtype=dtype, device=g.device) if A_log is None else A_log.to(dtype).exp().reshape(-1, 1)
    if lower_bound is None:
        dx = dg * -a * torch.sigmoid(x)
        per_head = dg * kda_gate(g, A_log, dt_bias, None, dtype)
    else:
        s = torch.sigmoid(a * x)
        dx = dg * lower_bound * s * (1 - s) * a
        per_head = dx * x
    tokens = tuple(range(dx.dim() - 2))
    dA_log = None if A_log is None else per_head.sum(dim=(*tokens, -1)).reshape(A_log.shape)
    d_bias = None if dt_bias is None else dx.sum(dim=tokens).reshape(dt_bias.shape)
    return dx, dA_log, d_bias


def kda_beta(beta: torch.Tensor, allow_neg_eigval: bool = False, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Strength in (0, 1), or (0, 2) with allow_neg_eigval, of a raw logit of any shape."""
    return torch.sigmoid(beta.to(dtype)) * (2 if allow_neg_eigval else 1)


def boundaries(cu_seqlens: torch.Tensor | None, batch: int, tokens: int) -> list[tuple[int, int, int]]:
    """(batch row, first token, last token + 1) of each sequence; cu_seqlens [N+1] packs them into batch row 0."""
    if cu_seqlens is None:
        return [(row, 0, tokens) for row in range(batch)]
    edges = cu_seqlens.tolist()
    return [(0, start, end) for start, end in pairwise(edges)]


def chunk_cumsum(
    g: torch.Tensor, chunk_size: int, cu_seqlens: torch.Tensor | None = None, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Inclusive sums of the log decay g [B, T, HV, K] in log2 units, begun anew at each chunk of each sequence."""
    out = torch.zeros(g.shape, dtype=dtype, device=g.device)
    for row, start, end in boundaries(cu_seqlens, g.shape[0], g.shape[1]):
        for first in range(start, end, chunk_size):
            last = min(first + chunk_size, end)
            out[row, first:last] = g[row, first:last].to(dtype).cumsum(0) * LOG2E
    return out

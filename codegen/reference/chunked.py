"""Oracle of the chunk form, stage by stage, with the factored exponents that never overflow (docs/kda.md)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kdagen.reference.gate import LOG2E, boundaries
from kdagen.reference.recurrence import first_state, prepare


class Stages(NamedTuple):
    """What prefill computes before the state passes over the chunks; NT chunks in table order, rows past an end zero.

    G [NT, HV, C, K] is the inclusive cumulative decay in log2 units (constant past an end).
    """

    G: torch.Tensor
    AKK: torch.Tensor  # [NT, HV, C, C] beta_i k_i.k_j decay(i, j), j < i
    X: torch.Tensor    # [NT, HV, C, C] (I + AKK)^-1
    AQK: torch.Tensor  # [NT, HV, C, C] scale q_i.k_j decay(i, j), j <= i
    QG: torch.Tensor   # [NT, HV, C, K] scale q 2^G
    KG: torch.Tensor   # [NT, HV, C, K] k 2^(G_last - G)
    W: torch.Tensor    # [NT, HV, C, K] X (beta 2^G k)
    U: torch.Tensor    # [NT, HV, C, V] X (beta v)
    DEC: torch.Tensor  # [NT, HV, K] 2^G_last


def level_mask(C: int, s: int, device=None) -> torch.Tensor:
    """[C, C] bool: i in the upper, j in the lower half of one parent of 2s rows."""
    i = torch.arange(C, device=device)
    parent, upper = i // (2 * s), (i // s) % 2 == 1
    return (parent[:, None] == parent[None, :]) & upper[:, None] & ~upper[None, :]


def decayed_products(q, k, G, leaf: int = 1, half_range: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(q_i.k_j 2^(G_i - G_j) for j <= i, k_i.k_j 2^(G_i - G_j) for j < i), both [..., C, C], by levels.

    Pairs of one parent of 2s rows meet at R, G of the lower half's last row: 2^(G_i - R) and 2^(R - G_j) are <= 1.
    Levels s = C/2 .. leaf; inside a leaf one product about R = G(first row) - half_range. Leaf 1 is the diagonal.
    """
    C = q.shape[-2]
    i = torch.arange(C, device=q.device)
    aqk, akk = (q.new_zeros(*q.shape[:-2], C, C) for _ in range(2))
    s = C // 2
    while s >= leaf:
        R = G[..., i // (2 * s) * (2 * s) + s - 1, :]
        f = torch.exp2(torch.where(((i // s) % 2 == 1)[:, None], G - R, R - G))
        keep = level_mask(C, s, q.device)
        aqk += torch.where(keep, (q * f) @ (k * f).transpose(-1, -2), 0)
        akk += torch.where(keep, (k * f) @ (k * f).transpose(-1, -2), 0)
        s //= 2
    R = G[..., i // leaf * leaf, :] - half_range
    here, there = torch.exp2(G - R), torch.exp2(R - G)
    if leaf == 1:
        here = there = torch.ones_like(G)
    keep = (i[:, None] // leaf == i[None, :] // leaf) & (i[:, None] >= i[None, :])
    aqk += torch.where(keep, (q * here) @ (k * there).transpose(-1, -2), 0)
    akk += torch.where(keep & (i[:, None] > i[None, :]), (k * here) @ (k * there).transpose(-1, -2), 0)
    return aqk, akk


def inverse(akk: torch.Tensor) -> torch.Tensor:
    """(I + akk)^-1 of strictly lower triangular [..., C, C]: X <- X - X (akk on level s) X for s = 1, 2, .., C/2."""
    C = akk.shape[-1]
    X = torch.eye(C, dtype=akk.dtype, device=akk.device).expand(akk.shape)
    s = 1
    while s < C:
        X = X - X @ torch.where(level_mask(C, s, akk.device), akk, 0) @ X
        s *= 2
    return X


def by_chunk(x: torch.Tensor, spans, C: int) -> torch.Tensor:
    """[B, T, HV, ...] -> [NT, HV, C, ...], zeros past each sequence's end; chunks never span two sequences."""
    tiles = []
    for row, start, end in spans:
        for first in range(start, end, C):
            tile = x.new_zeros(C, *x.shape[2:])
            tile[: min(C, end - first)] = x[row, first : min(first + C, end)]
            tiles.append(tile.transpose(0, 1))
    return torch.stack(tiles) if tiles else x.new_zeros(0, x.shape[2], C, *x.shape[3:])


def chunk_stages(
    q, k, v, g, beta, *, chunk_size=64, A_log=None, dt_bias=None, lower_bound=None, scale=None, cu_seqlens=None,
    use_gate_in_kernel=False, use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, dtype=torch.float64,
) -> Stages:
    """All stages of all chunks, before any state is known; arguments as chunk_kda's."""
    inputs = prepare(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, scale=scale,
        use_gate_in_kernel=use_gate_in_kernel, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, dtype=dtype,
    )
    spans = boundaries(cu_seqlens, q.shape[0], q.shape[1])
    q, k, v, g, beta = (by_chunk(x, spans, chunk_size) for x in inputs)
    G = g.cumsum(-2) * LOG2E  # [NT, HV, C, K]
    bounded = lower_bound is not None and use_gate_in_kernel
    leaf, half_range = (min(16, chunk_size), 7.5 * abs(lower_bound) * LOG2E) if bounded else (1, 0.0)
    aqk, akk = decayed_products(q, k, G, leaf, half_range)
    akk = beta[..., None] * akk
    X = inverse(akk)
    last = G[..., -1:, :]
    return Stages(
        G, akk, X, aqk, q * torch.exp2(G), k * torch.exp2(last - G), X @ (beta[..., None] * torch.exp2(G) * k),
        X @ (beta[..., None] * v), torch.exp2(last[..., 0, :]),
    )


def chunk_kda(
    q, k, v, g, beta, *, chunk_size=64, A_log=None, dt_bias=None, lower_bound=None, scale=None, initial_state=None,
    output_final_state=False, cu_seqlens=None, use_gate_in_kernel=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=True, dtype=torch.float64,
    output_checkpoints=False,
):
    """(o, final state or None), as recurrent_kda; with output_checkpoints also the state before each chunk.

    Checkpoints are [NT + N, HV, V, K] (or K, V) in sequence order: for each sequence the states at tokens 0, C, 2C, ..
    and after its last one. Per chunk:  v' = u - w S;  o = qg S + aqk v';  S <- diag(dec) S + kg^T v'.
    """
    stages = chunk_stages(
        q, k, v, g, beta, chunk_size=chunk_size, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, scale=scale, use_gate_in_kernel=use_gate_in_kernel,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, dtype=dtype,
    )
    spans = boundaries(cu_seqlens, q.shape[0], q.shape[1])
    S0 = first_state(initial_state, len(spans), v.shape[2], q.shape[-1], v.shape[-1], state_v_first, stages.G)
    out = torch.zeros(v.shape, dtype=dtype, device=v.device)
    final, checkpoints, c = S0.clone(), [], 0
    for n, (row, start, end) in enumerate(spans):
        S = S0[n]
        for first in range(start, end, chunk_size):
            checkpoints.append(S)
            last = min(first + chunk_size, end)
            new_v = stages.U[c] - stages.W[c] @ S  # [HV, C, V]
            o = stages.QG[c] @ S + stages.AQK[c] @ new_v
            out[row, first:last] = o.transpose(0, 1)[: last - first]
            S = stages.DEC[c][..., None] * S + stages.KG[c].transpose(-1, -2) @ new_v
            c += 1
        checkpoints.append(S)
        final[n] = S
    turn = lambda S: S.transpose(-1, -2).contiguous() if state_v_first else S
    result = out, turn(final) if output_final_state else None
    return (*result, turn(torch.stack(checkpoints) if checkpoints else S0)) if output_checkpoints else result

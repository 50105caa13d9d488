"""Oracle of Kimi Delta Attention: the recurrence itself, token by token (docs/kda.md, "Recurrence")."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kdagen.reference.gate import boundaries, kda_beta, kda_gate


class Prepared(NamedTuple):
    """What the recurrence reads, q and k repeated to the value heads: [B, T, HV, K] (v: V), beta [B, T, HV]."""

    q: torch.Tensor  # normalised if asked for, and times scale
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor  # log decay, natural log
    beta: torch.Tensor


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def prepare(
    q, k, v, g, beta, *, A_log=None, dt_bias=None, lower_bound=None, scale=None, use_gate_in_kernel=False,
    use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, dtype=torch.float64,
) -> Prepared:
    """The inputs of the recurrence, in ``dtype``: L2 norm, scale, gate, beta and grouped heads applied."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    group = v.shape[2] // q.shape[2]
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    g = kda_gate(g, A_log, dt_bias, lower_bound, dtype) if use_gate_in_kernel else g.to(dtype)
    beta = kda_beta(beta, allow_neg_eigval, dtype) if use_beta_sigmoid_in_kernel else beta.to(dtype)
    return Prepared(q, k, v, g, beta)


def delta_step(S: torch.Tensor, q, k, v, g, beta) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: (S', o). S [N, HV, K, V]; q, k, g [N, HV, K]; v, o [N, HV, V]; beta [N, HV]. q carries the scale."""
    S = S * g.exp()[..., None]
    error = v - torch.einsum("nhkv,nhk->nhv", S, k)
    S = S + torch.einsum("nhk,nhv->nhkv", beta[..., None] * k, error)
    return S, torch.einsum("nhkv,nhk->nhv", S, q)


def by_sequence(x: torch.Tensor, spans: list[tuple[int, int, int]]) -> torch.Tensor:
    """[B, T, ...] -> [N, longest, ...], zeros after each sequence's end."""
    longest = max([end - start for _, start, end in spans], default=0)
    out = x.new_zeros(len(spans), longest, *x.shape[2:])
    for n, (row, start, end) in enumerate(spans):
        out[n, : end - start] = x[row, start:end]
    return out


def recurrent_kda(
    q, k, v, g, beta, *, A_log=None, dt_bias=None, lower_bound=None, scale=None, initial_state=None,
    output_final_state=False, cu_seqlens=None, use_gate_in_kernel=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=True, dtype=torch.float64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o [B, T, HV, V], final state or None), both of ``dtype``.

    q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K] raw (use_gate_in_kernel) or log decay; beta [B, T, HV] raw
    (use_beta_sigmoid_in_kernel; only then does allow_neg_eigval act) or strength; states [N, HV, V, K] with
    state_v_first, else [N, HV, K, V]; cu_seqlens [N+1] with B = 1. A sequence without tokens keeps its initial state.

        S <- diag(exp(g_t)) S;  S <- S + beta_t k_t (v_t - S^T k_t)^T;  o_t = scale S^T q_t
    """
    inputs = prepare(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, scale=scale,
        use_gate_in_kernel=use_gate_in_kernel, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, dtype=dtype,
    )
    spans = boundaries(cu_seqlens, q.shape[0], q.shape[1])
    rows = Prepared(*(by_sequence(x, spans) for x in inputs))  # after its end a sequence has g = beta = 0: S stays
    S = first_state(initial_state, len(spans), v.shape[2], q.shape[-1], v.shape[-1], state_v_first, inputs.q)
    steps = torch.zeros_like(rows.v)  # [N, longest, HV, V]
    for t in range(rows.q.shape[1]):
        S, steps[:, t] = delta_step(S, *(x[:, t] for x in rows))
    out = torch.zeros_like(inputs.v)
    for n, (row, start, end) in enumerate(spans):
        out[row, start:end] = steps[n, : end - start]
    if not output_final_state:
        return out, None
    return out, (S.transpose(-1, -2) if state_v_first else S).contiguous()


def first_state(initial_state, sequences, heads, K, V, state_v_first, like: torch.Tensor) -> torch.Tensor:
    """The starting S [N, HV, K, V] in the dtype of ``like``; zeros without initial_state."""
    if initial_state is None:
        return like.new_zeros(sequences, heads, K, V)
    S = initial_state.to(like.dtype)
    return S.transpose(-1, -2) if state_v_first else S


def recurrent_kda_pool(
    q, k, v, g, beta, pool, state_indices, *, num_accepted_tokens=None, has_initial_state=None, pad_slot=-1,
    A_log=None, dt_bias=None, lower_bound=None, scale=None, cu_seqlens=None, use_gate_in_kernel=False,
    use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=True,
    dtype=torch.float64,
) -> torch.Tensor:
    """o [B, T, HV, V] of ``dtype``; the states live in ``pool`` [slots, HV, V, K] (or K, V), changed in place.

    Row s of the batch is one of B rows, or sequence s of cu_seqlens [S+1].
    state_indices [S]: the row starts from that slot and leaves its last state there.
    state_indices [S, 1+k]: it starts from column num_accepted_tokens - 1 (clamped to 0..k; 0 without
    num_accepted_tokens) and token t leaves its state in column t, or the last one there is; the running state itself is
    never rounded.
    has_initial_state [S] bool: False starts from zeros without reading the slot.
    A slot outside the pool or equal to pad_slot is padding. A row that starts at a padding slot is neither read nor written
    and its output is zero on all its tokens; a padding column further on is only not written.
    """
    inputs = prepare(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, scale=scale,
        use_gate_in_kernel=use_gate_in_kernel, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, dtype=dtype,
    )
    out = torch.zeros_like(inputs.v)
    table = (state_indices[:, None] if state_indices.dim() == 1 else state_indices).tolist()
    is_padding = lambda slot: not 0 <= slot < len(pool) or slot == pad_slot
    started = []  # (row of the table, its span, S): every row reads the pool before any row writes
    for s, span in enumerate(boundaries(cu_seqlens, q.shape[0], q.shape[1])):
        column = 0
        if num_accepted_tokens is not None and state_indices.dim() == 2:
            column = min(max(int(num_accepted_tokens[s]), 1), len(table[s])) - 1
        if is_padding(table[s][column]):
            continue
        fresh = has_initial_state is not None and not bool(has_initial_state[s])
        held = None if fresh else pool[table[s][column]][None].clone()
        S = first_state(held, 1, v.shape[2], q.shape[-1], v.shape[-1], state_v_first, inputs.q)
        started.append((s, span, S))
    for s, (row, start, end), S in started:
        for t in range(end - start):
            S, o = delta_step(S, *(x[row, start + t][None] for x in inputs))
            out[row, start + t] = o[0]
            target = table[s][min(t, len(table[s]) - 1)]
            last = start + t + 1 == end
            if (state_indices.dim() == 2 or last) and not is_padding(target):
                pool[target] = (S[0].transpose(-1, -2) if state_v_first else S[0]).to(pool.dtype)
    return out

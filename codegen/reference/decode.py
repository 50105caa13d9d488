"""Oracle of the fused decode step: conv update + SiLU, L2 norm, gate, recurrence, gated RMSNorm (docs/kda.md)."""

from __future__ import annotations

import torch

from kdagen.reference.conv import causal_conv1d_update
from kdagen.reference.norm import gated_rmsnorm
from kdagen.reference.recurrence import recurrent_kda_pool


def kda_decode_step(
    qkv, z, g, beta, conv_pool, conv_weight, pool, state_indices, norm_weight, *, heads, K, A_log=None, dt_bias=None,
    lower_bound=None, conv_bias=None, num_accepted_tokens=None, has_initial_state=None, pad_slot=-1, scale=None,
    allow_neg_eigval=False, state_v_first=True, eps=1e-5, dtype=torch.float64,
) -> torch.Tensor:
    """Normed output of one step, [N, HV, V] (or [N, T, HV, V]); both pools change in place.

    qkv [N, 2*H*K + HV*V] before the convolution (or [N, T, ...] for T = 1..1+k speculative tokens), z [N, HV*V] output
    gate, g [N, HV*K] raw gate, beta [N, HV] raw: column slices of one projection, or not. ``heads`` = H;
    conv_pool [slots, W-1+k, D], conv_weight [D, W]; pool [slots, HV, V, K] (or K, V); state_indices [N] or [N, 1+k]
    (its column 0 is the conv line). A row whose line or starting state is padding touches neither pool and gives zeros.
    """
    single = qkv.dim() == 2
    if single:
        qkv, z, g, beta = (x[:, None] for x in (qkv, z, g, beta))
    N, T, HV = beta.shape
    V = z.shape[-1] // HV
    padding = dict(num_accepted_tokens=num_accepted_tokens, has_initial_state=has_initial_state, pad_slot=pad_slot)
    state_indices = _whole_rows(state_indices, num_accepted_tokens, pad_slot, min(len(conv_pool), len(pool)))
    mixed = causal_conv1d_update(qkv, conv_pool, conv_weight, conv_bias, state_indices=state_indices, dtype=dtype,
                                 **padding)
    q, k, v = mixed.split([heads * K, heads * K, HV * V], dim=-1)
    o = recurrent_kda_pool(
        q.reshape(N, T, heads, K), k.reshape(N, T, heads, K), v.reshape(N, T, HV, V), g.reshape(N, T, HV, K), beta,
        pool, state_indices, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, scale=scale,
        use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first, dtype=dtype, **padding,
    )
    out = gated_rmsnorm(o, z.reshape(N, T, HV, V), norm_weight, eps, dtype)
    return out[:, 0] if single else out


def _whole_rows(state_indices: torch.Tensor, accepted: torch.Tensor | None, pad_slot: int, slots: int) -> torch.Tensor:
    """The table with all of a row padding where its line (column 0) or the column that it starts from is."""
    table = state_indices if state_indices.dim() == 2 else state_indices[:, None]
    first = torch.zeros(len(table), dtype=torch.long, device=table.device)
    if accepted is not None:
        first = accepted.long().clamp(1, table.shape[1]) - 1
    used = torch.stack([table[:, 0], table.gather(1, first[:, None])[:, 0]])
    live = ((used >= 0) & (used < slots) & (used != pad_slot)).all(0)
    return torch.where(live[:, None], table, -1).view(state_indices.shape)

"""Oracle of the gated RMSNorm behind the recurrence (docs/kda.md, "The layer")."""

from __future__ import annotations

import torch


def gated_rmsnorm(o, z, weight, eps: float = 1e-5, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """o / sqrt(mean(o^2) + eps) * weight * sigmoid(z), over the last dimension: o, z [..., V], weight [V]."""
    o = o.to(dtype)
    normed = o * torch.rsqrt((o * o).mean(-1, keepdim=True) + eps)
    return normed * weight.to(dtype) * torch.sigmoid(z.to(dtype))

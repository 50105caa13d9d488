"""The whole layer in plain torch, fp64, one sequence at a time: no pools, no metadata, no state carried over."""

from __future__ import annotations

import torch

from kdagen import reference as oracle
from kdagen.serving.layer import KDALayer


def forward(layer: KDALayer, hidden: torch.Tensor, device="cpu") -> torch.Tensor:
    """The layer's output [T, hidden] in fp64 for one whole sequence hidden [T, hidden], computed on ``device``."""
    config = layer.config
    wide = {name: tensor.detach().to(device).double() for name, tensor in layer.named_parameters()}
    packed = hidden.detach().to(device).double() @ wide["in_proj"].T
    qkv, z, f_a, beta = (packed[:, part] for part in config.parts.values())
    if config.output_gate_rank is not None:
        z = z @ wide["z_b"].T
    mixed, _ = oracle.causal_conv1d(qkv[None], wide["conv"])
    heads = lambda x: x.reshape(1, len(hidden), config.heads, config.head_dim)
    q, k, v = (heads(x) for x in mixed.split(config.P, dim=-1))
    o, _ = oracle.recurrent_kda(
        q, k, v, heads(f_a @ wide["f_b"].T), beta[None], A_log=wide["A_log"], dt_bias=wide["dt_bias"],
        lower_bound=config.lower_bound, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=config.allow_neg_eigval)
    normed = oracle.gated_rmsnorm(o, heads(z), wide["norm"], config.norm_eps)
    return normed.reshape(len(hidden), config.P) @ wide["out_proj"].T

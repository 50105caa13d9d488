"""One KDA layer of one rank, from packed projection to output projection, on pools and metadata.

    packed = in_proj(hidden)                       # [T, q|k|v | output gate | f_a | beta]
    g, z   = f_b(f_a), z or z_b(z)                 # raw gate; output gate, full or of low rank
    q|k|v  = silu(conv(q|k|v))                     # width 4, lines of the conv pool
    o      = KDA(l2norm(q), l2norm(k), v, g, beta)  # states of the recurrent pool
    out    = out_proj(rmsnorm(o) * sigmoid(z))     # this rank's share: sum it over tensor-parallel ranks

Which kernels run is read off the metadata's counts, which are host ints: a captured graph keeps the path of its batch.
"""

from __future__ import annotations

import torch
from torch import nn

from kdagen.errors import ArgumentTypeError, refuse
from kdagen.ops.conv import causal_conv1d, causal_conv1d_update
from kdagen.ops.decode import fused_recurrent_kda
from kdagen.ops.decode_step import kda_decode_step
from kdagen.ops.norm import gated_rmsnorm
from kdagen.ops.prefill import chunk_kda
from kdagen.serving.batch import NULL_SLOT, KDAMetadata
from kdagen.serving.cache import KDACache
from kdagen.serving.config import KDAConfig

FP32 = ("conv", "A_log", "dt_bias", "norm")  # weights that stay fp32 whatever the model's dtype


class KDALayer(nn.Module):
    """The layer of one rank. ``config`` gives the rank's own sizes (``KDAConfig.shard``), ``weights`` name -> tensor.

    ``KDAConfig.weights()`` lists names and shapes; ``random_weights`` makes some, ``shard_weights`` cuts a whole layer's.
    The weights are parameters without gradients.
    """

    def __init__(self, config: KDAConfig, weights: dict[str, torch.Tensor]):
        super().__init__()
        self.config, self.parts = config, config.parts
        shapes = config.weights()
        if set(weights) != set(shapes):
            refuse("weights", f"{sorted(weights)}", f"exactly {sorted(shapes)}")
        for name, shape in shapes.items():
            tensor = weights[name]
            if tuple(tensor.shape) != shape:
                refuse(f"weights[{name!r}]", f"shape {list(tensor.shape)}", f"shape {list(shape)}",
                       "A shard's config comes from KDAConfig.shard(tp_size), its weights from shard_weights.")
            if name in FP32 and tensor.dtype != torch.float32:
                refuse(f"weights[{name!r}]", str(tensor.dtype), "torch.float32", kind=ArgumentTypeError)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        # two low-rank gates of one rank lie side by side in a packed row: one batched product for both
        self.paired = config.output_gate_rank == config.gate_rank == self.parts["f_a"].start - self.parts["z"].start
        if self.paired:
            self.register_buffer("gates_b", torch.stack([self.z_b, self.f_b]).transpose(1, 2), persistent=False)
        self._gate = dict(A_log=self.A_log, dt_bias=self.dt_bias, lower_bound=config.lower_bound,
                          allow_neg_eigval=config.allow_neg_eigval)
        self._raw = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                         pad_slot=NULL_SLOT, **self._gate)

    def _apply(self, fn, recurse=True):
        """``to(torch.bfloat16)`` and its like move everything, but leave in fp32 what must stay so."""
        kept = {name: getattr(self, name).data for name in FP32}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            weight = getattr(self, name)
            if weight.dtype != torch.float32:
                weight.data = before.to(weight.device)
        return self

    def new_cache(self, slots: int, num_spec: int = 0, **options) -> KDACache:
        """Pools that fit this layer, on its device, conv lines in its dtype; options as KDACache's."""
        config = self.config
        return KDACache(slots, config.heads, config.head_dim, config.head_dim, 3 * config.P, width=config.conv_width,
                        num_spec=num_spec, conv_dtype=self.in_proj.dtype, device=self.in_proj.device, **options)

    def forward(self, hidden: torch.Tensor, metadata: KDAMetadata, cache: KDACache) -> torch.Tensor:
        """This rank's share of the output [T, hidden] of the step's packed tokens, hidden [T, hidden].

        Rows past the last request's tokens, and those of padding rows, give zeros.
        """
        packed = torch.nn.functional.linear(hidden, self.in_proj)
        return torch.nn.functional.linear(self.mix(packed, metadata, cache), self.out_proj)

    def mix(self, packed: torch.Tensor, metadata: KDAMetadata, cache: KDACache) -> torch.Tensor:
        """Everything between the projections: packed [T, config.packed] -> normed output [T, P]."""
        qkv, z, f_a, beta = (packed[:, part] for part in self.parts.values())
        if self.paired:
            both = packed[:, self.parts["z"].start:self.parts["f_a"].stop].unflatten(1, (2, -1)).transpose(0, 1)
            z, g = torch.bmm(both, self.gates_b)  # [2, T, rank] x [2, rank, P]
        else:
            g = torch.nn.functional.linear(f_a, self.f_b)
            if self.config.output_gate_rank is not None:
                z = torch.nn.functional.linear(z, self.z_b)
        m = metadata
        if m.num_prefills == 0 and m.dense_decode and m.num_spec_decodes == 0:
            return self._one_token(qkv, z, g, beta, m.num_decode_tokens, m.non_spec_state_indices_tensor, None, cache)
        if m.num_prefills == 0 and m.num_decodes == 0 and m.uniform_spec_sequence_length == 1:  # every draft was dropped
            return self._one_token(qkv, z, g, beta, m.num_spec_decode_tokens, m.spec_state_indices_tensor,
                                   m.num_accepted_tokens, cache)
        o = qkv.new_zeros(len(qkv), self.config.heads, self.config.head_dim)
        live = m.num_prefill_tokens + m.num_decode_tokens + m.num_spec_decode_tokens
        rows = qkv[:live], g[:live], beta[:live], o[:live], m, cache
        if m.num_spec_decodes == 0:
            self._others(*rows)
        elif m.num_prefills == 0 and m.num_decodes == 0:
            self._speculative(*rows)
        else:
            self._mixed(*rows)
        z = z.unflatten(1, o.shape[1:])
        return gated_rmsnorm(o, z, self.norm, eps=self.config.norm_eps, out=o).flatten(1)

    # -- the classes of rows ---------------------------------------------------------------------------------------

    def _one_token(self, qkv, z, g, beta, tokens: int, slots, accepted, cache: KDACache) -> torch.Tensor:
        """Token i belongs to row i: the whole step in one launch."""
        rows = min(tokens, len(qkv))
        config = self.config
        out = torch.empty(len(qkv), config.heads, config.head_dim, dtype=qkv.dtype, device=qkv.device)
        if rows < len(qkv):
            out[rows:].zero_()
        if rows == 0:
            return out.flatten(1)
        if accepted is not None:
            accepted = accepted[:rows]
        kda_decode_step(
            qkv[:rows], z[:rows], g[:rows], beta[:rows], cache.conv, self.conv, cache.recurrent, slots[:rows], self.norm,
            num_accepted_tokens=accepted, pad_slot=NULL_SLOT, eps=config.norm_eps, out=out[:rows], **self._gate)
        return out.flatten(1)

    def _speculative(self, qkv, g, beta, o, m: KDAMetadata, cache: KDACache) -> None:
        """Rows of 1+drafts tokens, from the accepted candidate's state; token t leaves its state in column t."""
        mixed = causal_conv1d_update(
            qkv, cache.conv, self.conv, cache_indices=m.spec_state_indices_tensor,
            num_accepted_tokens=m.num_accepted_tokens, query_start_loc=m.spec_query_start_loc, pad_slot=NULL_SLOT)
        fused_recurrent_kda(
            *self._split(mixed, g, beta), state_pool=cache.recurrent, state_indices=m.spec_state_indices_tensor,
            num_accepted_tokens=m.num_accepted_tokens, cu_seqlens=m.spec_query_start_loc, out=o[None], **self._raw)

    def _others(self, qkv, g, beta, o, m: KDAMetadata, cache: KDACache) -> None:
        """Rows that are not speculative: decodes first, then prefills; one convolution over all of them."""
        starts, slots = m.non_spec_query_start_loc, m.non_spec_state_indices_tensor
        decoded = m.num_decode_tokens
        if m.num_prefills:
            block = next(iter(m.nums_dict))
            mixed = causal_conv1d(
                qkv, self.conv, cu_seqlens=starts, schedule=m.nums_dict[block], block_m=block, conv_states=cache.conv,
                cache_indices=slots, has_initial_state=m.has_initial_state, pad_slot=NULL_SLOT)
        else:
            mixed = causal_conv1d_update(qkv, cache.conv, self.conv, cache_indices=slots, query_start_loc=starts,
                                         pad_slot=NULL_SLOT)
        if decoded:
            fused_recurrent_kda(
                *self._split(mixed[:decoded], g[:decoded], beta[:decoded]), state_pool=cache.recurrent,
                state_indices=slots[:m.num_decodes], cu_seqlens=starts[:m.num_decodes + 1], out=o[None, :decoded],
                **self._raw)
        if m.num_prefills:
            tokens = slice(decoded, decoded + m.num_prefill_tokens)
            checkpoint = {} if m.checkpoint is None else {
                "checkpoint_offsets": m.checkpoint.offsets, "checkpoint_slots": m.checkpoint.state_indices}
            chunk_kda(
                *self._split(mixed[tokens], g[tokens], beta[tokens]), state_pool=cache.recurrent,
                read_slots=m.prefill_state_indices, write_slots=m.prefill_state_indices,
                has_initial_state=m.prefill_has_initial_state, cu_seqlens=m.prefill_query_start_loc,
                cu_seqlens_cpu=torch.from_numpy(m.prefill_query_start_loc_cpu), tables=m.step_tables,
                chunk_size=m.chunk_size, out=o[None, tokens], **checkpoint, **self._raw)
            if m.checkpoint is not None:
                self._export_lines(qkv[tokens], m, cache)

    def _mixed(self, qkv, g, beta, o, m: KDAMetadata, cache: KDACache) -> None:
        """Both kinds in one batch: slices where the speculative rows come first, gathered tokens where they do not."""
        if m.spec_leads:
            cut = m.num_spec_decode_tokens
            self._speculative(qkv[:cut], g[:cut], beta[:cut], o[:cut], m, cache)
            self._others(qkv[cut:], g[cut:], beta[cut:], o[cut:], m, cache)
            return
        for index, part in ((m.spec_token_indx, self._speculative), (m.non_spec_token_indx, self._others)):
            out = o.new_zeros(len(index), *o.shape[1:])
            part(qkv.index_select(0, index), g.index_select(0, index), beta.index_select(0, index), out, m, cache)
            o.index_copy_(0, index, out)

    def _split(self, mixed, g, beta):
        """q, k, v, g, beta [1, T, H, ...] as views of packed rows."""
        P, shape = self.config.P, (self.config.heads, self.config.head_dim)
        heads = lambda x: x.unflatten(1, shape)[None]
        return heads(mixed[:, :P]), heads(mixed[:, P:2 * P]), heads(mixed[:, 2 * P:]), heads(g), beta[None]

    def _export_lines(self, qkv, m: KDAMetadata, cache: KDACache) -> None:
        """The convolution's part of the checkpoints: the width-1 inputs before each exported boundary."""
        history = self.config.conv_width - 1
        rows = m.checkpoint.rows
        ends = (m.prefill_query_start_loc[:-1] + m.checkpoint.offsets).index_select(0, rows)
        back = torch.arange(-history, 0, device=qkv.device)
        inputs = qkv.index_select(0, (ends[:, None] + back).flatten()).unflatten(0, (-1, history))
        cache.conv[:, :history].index_copy_(0, m.checkpoint.state_indices.index_select(0, rows).long(), inputs)


def random_weights(config: KDAConfig, *, dtype: torch.dtype = torch.bfloat16, device="cpu", seed: int = 0) -> dict:
    """Weights of a plausible layer: activations of unit variance, A_log = log U(1, 16), decays from fast to slow."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda shape, std: torch.randn(shape, generator=generator) * std
    weights = {}
    for name, shape in config.weights().items():
        if name == "A_log":
            tensor = torch.empty(shape).uniform_(1, 16, generator=generator).log()
        elif name == "dt_bias":
            tensor = torch.empty(shape).uniform_(-6, -2, generator=generator)
        elif name == "norm":
            tensor = 1 + normal(shape, 0.1)
        else:
            tensor = normal(shape, shape[1] ** -0.5)
        weights[name] = tensor.to(device, torch.float32 if name in FP32 else dtype)
    return weights


def shard_weights(weights: dict[str, torch.Tensor], config: KDAConfig, rank: int, tp_size: int) -> dict[str, torch.Tensor]:
    """The weights of one rank from a whole layer's: its own heads; low-rank inputs and the norm are every rank's.

    ``config`` is the whole layer's. The outputs of all ranks sum to the whole layer's.
    """
    shard = config.shard(tp_size)
    if not 0 <= rank < tp_size:
        refuse("rank", rank, f"0 to {tp_size - 1}")
    heads = slice(rank * shard.heads, (rank + 1) * shard.heads)
    channels = slice(rank * shard.P, (rank + 1) * shard.P)
    packed = weights["in_proj"].new_zeros(shard.weights()["in_proj"])
    whole = {name: weights["in_proj"][part] for name, part in config.parts.items()}
    cut = {"qkv": whole["qkv"].unflatten(0, (3, config.P))[:, channels].flatten(0, 1), "f_a": whole["f_a"],
           "z": whole["z"][channels] if config.output_gate_rank is None else whole["z"], "beta": whole["beta"][heads]}
    for name, part in shard.parts.items():
        packed[part] = cut[name]
    out = {"in_proj": packed, "f_b": weights["f_b"][channels], "A_log": weights["A_log"][heads],
           "dt_bias": weights["dt_bias"][heads], "norm": weights["norm"], "out_proj": weights["out_proj"][:, channels],
           "conv": weights["conv"].unflatten(0, (3, config.P))[:, channels].flatten(0, 1)}
    if config.output_gate_rank is not None:
        out["z_b"] = weights["z_b"][channels]
    return {name: tensor.contiguous() for name, tensor in out.items()}

"""A small, valid call of every public op, as keywords: what the tests of faults change one argument of."""

from __future__ import annotations

import mmap

import numpy as np
import torch

import kdagen
from inputs import cu_seqlens, gate_parameter, kda

LENGTHS = [3, 0, 2, 1]
T, N = sum(LENGTHS), len(LENGTHS)
H, HV, K, V = 1, 2, 4, 8
D = 2 * H * K + HV * V

NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's, which Python names from 3.13 on


def flags(rng, lower_bound=-5.0, HV=HV, K=K) -> dict:
    """A raw gate with everything inside the kernel."""
    return dict(A_log=gate_parameter(rng, HV), dt_bias=torch.randn(HV, K, generator=rng), lower_bound=lower_bound,
                use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)


def tokens(rng, dtype=torch.float32, B=1, T=T) -> dict:
    """q, k, v, g, beta with everything raw."""
    x, _ = kda(rng, "bounded", B=B, T=T, H=H, HV=HV, K=K, V=V, dtype=dtype)
    x.pop("initial_state")
    return x


def prefill(rng, **change) -> dict:
    edges = cu_seqlens(LENGTHS)
    return tokens(rng) | flags(rng) | dict(
        cu_seqlens=edges, cu_seqlens_cpu=edges, initial_state=torch.randn(N, HV, V, K, generator=rng),
        output_final_state=True, chunk_size=16, out=torch.full((1, T, HV, V), float("nan"))) | change


def prefill_on_a_pool(rng, **change) -> dict:
    edges = cu_seqlens(LENGTHS)
    slots = torch.randperm(8, generator=rng)[:N]
    return tokens(rng) | flags(rng) | dict(
        cu_seqlens=edges, cu_seqlens_cpu=edges, state_pool=torch.randn(8, HV, V, K, generator=rng), read_slots=slots,
        write_slots=slots.clone(), has_initial_state=torch.ones(N, dtype=torch.bool), chunk_size=16,
        checkpoint_offsets=torch.full((N, 1), 16), checkpoint_slots=torch.full((N, 1), -1),
        out=torch.full((1, T, HV, V), float("nan"))) | change


def recurrent(rng, **change) -> dict:
    return tokens(rng) | flags(rng) | dict(
        cu_seqlens=cu_seqlens(LENGTHS), initial_state=torch.randn(N, HV, V, K, generator=rng), output_final_state=True,
        out=torch.full((1, T, HV, V), float("nan"))) | change


def recurrent_on_a_pool(rng, **change) -> dict:
    """Speculative: four candidate slots a row."""
    return tokens(rng) | flags(rng) | dict(
        cu_seqlens=cu_seqlens(LENGTHS), state_pool=torch.randn(4 * N + 1, HV, V, K, generator=rng),
        state_indices=torch.randperm(4 * N + 1, generator=rng)[: 4 * N].view(N, 4),
        num_accepted_tokens=torch.tensor([1, 2, 4, 3]), has_initial_state=torch.ones(N, dtype=torch.bool),
        out=torch.full((1, T, HV, V), float("nan"))) | change


def conv(rng, **change) -> dict:
    return dict(
        x=torch.randn(1, T, D, generator=rng), weight=torch.randn(D, 4, generator=rng), bias=torch.randn(D, generator=rng),
        cu_seqlens=cu_seqlens(LENGTHS), conv_states=torch.randn(8, 3, D, generator=rng),
        cache_indices=torch.randperm(8, generator=rng)[:N], has_initial_state=torch.ones(N, dtype=torch.bool),
        out=torch.full((1, T, D), float("nan"))) | change


def conv_update(rng, **change) -> dict:
    return dict(
        x=torch.randn(1, T, D, generator=rng), weight=torch.randn(D, 4, generator=rng), bias=torch.randn(D, generator=rng),
        query_start_loc=cu_seqlens(LENGTHS), conv_states=torch.randn(8, 3 + 4, D, generator=rng),
        cache_indices=torch.randperm(8, generator=rng)[:N], has_initial_state=torch.ones(N, dtype=torch.bool),
        num_accepted_tokens=torch.tensor([1, 2, 4, 3]), out=torch.full((1, T, D), float("nan"))) | change


def decode_step(rng, **change) -> dict:
    normal = lambda *shape: torch.randn(*shape, generator=rng)
    return dict(
        qkv=normal(N, D), z=normal(N, HV * V), g=normal(N, HV * K), beta=normal(N, HV), conv_pool=normal(8, 5, D),
        conv_weight=normal(D, 4), conv_bias=normal(D), state_pool=normal(8, HV, V, K),
        state_indices=torch.randperm(8, generator=rng).view(N, 2), norm_weight=normal(V), A_log=gate_parameter(rng, HV),
        dt_bias=normal(HV, K), lower_bound=-5.0, num_accepted_tokens=torch.tensor([1, 2, 2, 1]),
        has_initial_state=torch.ones(N, dtype=torch.bool), out=torch.full((N, HV, V), float("nan"))) | change


def gate(rng, **change) -> dict:
    edges = cu_seqlens(LENGTHS)
    table = kdagen.prepare_chunk_metadata_device(edges, edges, 16)[0]
    return dict(
        g=torch.randn(1, T, HV, K, generator=rng), A_log=gate_parameter(rng, HV), dt_bias=torch.randn(HV, K, generator=rng),
        beta=torch.randn(1, T, HV, generator=rng), chunk_size=16, cu_seqlens=edges, chunk_indices=table,
        out=torch.full((1, T, HV, K), float("nan"))) | change


def norm(rng, **change) -> dict:
    o, z = torch.randn(2, T, HV, V, generator=rng)
    return dict(o=o, z=z, weight=torch.randn(V, generator=rng), out=torch.full((T, HV, V), float("nan"))) | change


def chunk_metadata(rng, **change) -> dict:
    edges = cu_seqlens(LENGTHS)
    return dict(cu_seqlens=edges, cu_seqlens_cpu=edges.clone(), chunk_size=16) | change


def conv_schedule(rng, **change) -> dict:
    return dict(query_start_loc_cpu=cu_seqlens(LENGTHS), block_m=8, device="cpu") | change


def tables(rng, **change) -> dict:
    edges = cu_seqlens(LENGTHS)
    return dict(cu_seqlens=edges, cu_seqlens_cpu=edges.clone(), chunk_size=16, blocks=[8, 3], rows=True) | change


def staging(rng, **change) -> dict:
    ints = lambda *shape: torch.full(shape, -77, dtype=torch.int32)
    return dict(
        state_indices=torch.randint(1, 99, (N, 5), generator=rng, dtype=torch.int32), query_start_loc=cu_seqlens(LENGTHS),
        num_accepted_tokens=torch.ones(N, dtype=torch.int32), staged_state_indices=ints(N + 2, 3),
        staged_query_start_loc=ints(N + 3), staged_num_accepted_tokens=ints(N + 2), num_spec_decodes=N) | change


# name -> (public op, its call); an op that works on states of its own and on pools has one call for each
CALLS = {
    "chunk_kda": (kdagen.chunk_kda, prefill), "chunk_kda, pool": (kdagen.chunk_kda, prefill_on_a_pool),
    "fused_recurrent_kda": (kdagen.fused_recurrent_kda, recurrent),
    "fused_recurrent_kda, pool": (kdagen.fused_recurrent_kda, recurrent_on_a_pool),
    "causal_conv1d": (kdagen.causal_conv1d, conv), "causal_conv1d_update": (kdagen.causal_conv1d_update, conv_update),
    "kda_decode_step": (kdagen.kda_decode_step, decode_step), "kda_gate": (kdagen.kda_gate, gate),
    "gated_rmsnorm": (kdagen.gated_rmsnorm, norm),
    "prepare_chunk_metadata_device": (kdagen.prepare_chunk_metadata_device, chunk_metadata),
    "build_conv1d_chunk_schedule": (kdagen.build_conv1d_chunk_schedule, conv_schedule),
    "step_tables": (kdagen.step_tables, tables), "stage_spec_decode_metadata": (kdagen.stage_spec_decode_metadata, staging),
}


def written(call: dict) -> dict:
    """The tensors that an op writes or may write: output buffers and pools."""
    names = ("out", "state_pool", "conv_states", "conv_pool", "staged_state_indices", "staged_query_start_loc",
             "staged_num_accepted_tokens")
    return {name: call[name] for name in names if isinstance(call.get(name), torch.Tensor)}


def apart(x: torch.Tensor, dim: int, stride: int, size: int, at: int) -> torch.Tensor:
    """[.., size, ..] along ``dim`` with that stride, x lying at index ``at`` and after it; the rest is never touched.

    Memory is reserved, not used: only pages that are written exist. This is how a CPU shows offsets past 2^31.
    """
    item = x.element_size()
    inner = x.transpose(0, dim)
    held = mmap.mmap(-1, size * stride * item, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    flat = torch.from_numpy(np.frombuffer(held, dtype=np.uint8)).view(x.dtype)
    rows = flat.as_strided((size, inner[0].numel()), (stride, 1))
    rows[at : at + len(inner)] = inner.reshape(len(inner), -1)
    return rows.unflatten(1, inner.shape[1:]).transpose(0, dim)

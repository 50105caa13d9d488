"""The oracle of every op in plain torch, fp64 or fp32: what the kernels are compared with, and the CPU path."""

from kdagen.reference.chunked import Stages, chunk_kda, chunk_stages
from kdagen.reference.conv import causal_conv1d, causal_conv1d_update
from kdagen.reference.decode import kda_decode_step
from kdagen.reference.gate import chunk_cumsum, kda_beta, kda_gate, kda_gate_backward
from kdagen.reference.norm import gated_rmsnorm
from kdagen.reference.recurrence import l2norm, recurrent_kda, recurrent_kda_pool
from kdagen.reference.tables import chunk_table, conv_schedule, stage_spec_decode

__all__ = [
    "Stages", "causal_conv1d", "causal_conv1d_update", "chunk_cumsum", "chunk_kda", "chunk_stages", "chunk_table",
    "conv_schedule", "gated_rmsnorm", "kda_beta", "kda_decode_step", "kda_gate", "kda_gate_backward", "l2norm",
    "recurrent_kda", "recurrent_kda_pool", "stage_spec_decode",
]

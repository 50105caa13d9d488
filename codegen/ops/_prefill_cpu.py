"""The CPU path of chunk_kda: the oracle, with the slots of a pool read and written around it."""

from __future__ import annotations

import torch

from kdagen import reference as oracle
from kdagen.reference.gate import boundaries


@torch.no_grad()
def run_oracle(
    q, k, v, g, beta, A_log, dt_bias, out, initial_state, final_state, state_pool, read_slots, write_slots, has_initial,
    ckpt_offsets, ckpt_slots, cu_seqlens, scale, lower_bound, pad_slot, chunk, raw_gate, l2norm, sigmoid_beta, neg_eigval,
    v_first,
) -> None:
    """The CPU path: the chunk form of the oracle in fp32, with the slots read and written around it."""
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    spans = boundaries(cu_seqlens, q.shape[0], q.shape[1])
    is_padding = lambda slot: slot < 0 or slot == pad_slot or slot >= len(state_pool)
    listed = lambda slots: None if slots is None else slots.tolist()
    read, write = listed(read_slots), listed(write_slots)
    padding = [is_padding(slot) for slot in (read or write or [])] or [False] * N
    inner = (v.shape[2], v.shape[3], q.shape[3]) if v_first else (v.shape[2], q.shape[3], v.shape[3])
    start = torch.zeros((N, *inner), dtype=torch.float32)
    for n in range(N):
        if padding[n] or (has_initial is not None and not has_initial[n]):
            continue
        if read is not None:
            start[n] = state_pool[read[n]]
        elif initial_state is not None:
            start[n] = initial_state[n]
    o, final, inner_states = oracle.chunk_kda(
        q, k, v, g, beta, chunk_size=chunk, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, scale=scale,
        initial_state=start, output_final_state=True, cu_seqlens=cu_seqlens, use_gate_in_kernel=raw_gate,
        use_qk_l2norm_in_kernel=l2norm, use_beta_sigmoid_in_kernel=sigmoid_beta, allow_neg_eigval=neg_eigval,
        state_v_first=v_first, dtype=torch.float32, output_checkpoints=True)
    at = 0
    for n, (row, first, last) in enumerate(spans):
        chunks = -(-(last - first) // chunk)
        out[row, first:last] = 0 if padding[n] else o[row, first:last].to(out.dtype)
        if not padding[n]:
            if write is not None and not is_padding(write[n]):
                state_pool[write[n]] = final[n].to(state_pool.dtype)
            if ckpt_offsets is not None:
                before = 0
                for offset, slot in zip(ckpt_offsets[n].reshape(-1).tolist(), ckpt_slots[n].reshape(-1).tolist()):
                    if offset % chunk == 0 and before < offset <= last - first and not is_padding(slot):
                        state_pool[slot] = inner_states[at + offset // chunk].to(state_pool.dtype)
                        before = offset
        at += chunks + 1
    if final_state is not None:
        final[torch.tensor(padding, dtype=torch.bool)] = 0
        final_state.copy_(final)

# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: prefill_state.py.j2
# variant:  prefill_state__c64_k128_v128_bf16__bv64
# inputs:   ffbbf60ae253593f52a11b41f85b9808ebcbac261623442f2b0e6c504c570793

"""Prefill, second kernel: the state over the chunks of each sequence, and the outputs (KDA's chunk form).

One program holds 64 of the 128 rows of V of one (sequence, value head, segment): h = S^T, [64, 128] in fp32. Per chunk
    v' = u - w S      o = qg S + Aqk v'      S <- diag(2^G_last) S + kg^T v'
"""

import triton
import triton.language as tl

SPEC = {'family': 'prefill_state', 'chunk': 64, 'k': 128, 'v': 128, 'dtype': 'bf16'}
SCHEDULE = {'bv': 64}


@triton.jit
def _walk(b_h, i_lo, i_hi, i_v, i_hv, HV, slot_base, t_0, eos, qg, kg, w, u, aqk, dec, o, so_t, so_h, STAGES: tl.constexpr):
    """Take h over the chunk rows [i_lo, i_hi), the first of which begins at token t_0, and write their outputs."""
    C: tl.constexpr = 64
    r = tl.arange(0, C)
    d = tl.arange(0, 128)
    dv = i_v * 64 + tl.arange(0, 64)
    o_ck = r[:, None] * 128 + d[None, :]  # [C, K]
    o_kc = r[None, :] * 128 + d[:, None]  # [K, C], the same tile transposed
    o_vc = r[None, :] * 128 + dv[:, None]  # [BV, C]
    o_cc = r[None, :] * C + r[:, None]  # [C, C] transposed
    for i_c in tl.range(i_lo, i_hi, num_stages=STAGES):
        i_tile = (i_c - slot_base).to(tl.int64) * HV + i_hv
        # v' = u - w S, [BV, C]
        b_hh = b_h.to(tl.bfloat16)
        b_w = tl.load(w + i_tile * 8192 + o_kc)
        b_u = tl.load(u + i_tile * 8192 + o_vc)
        b_v = (b_u.to(tl.float32) - tl.dot(b_hh, b_w)).to(tl.bfloat16)
        # o = qg S + Aqk v', [BV, C]
        b_qg = tl.load(qg + i_tile * 8192 + o_kc)
        b_o = tl.dot(b_hh, b_qg)
        b_aqk = tl.load(aqk + i_tile * (C * C) + o_cc)
        b_o = tl.dot(b_v, b_aqk, b_o)
        # S <- diag(2^G_last) S + kg^T v'
        b_kg = tl.load(kg + i_tile * 8192 + o_ck)
        b_dec = tl.load(dec + i_tile * 128 + d)
        b_h = tl.dot(b_v, b_kg, b_h * b_dec[None, :])
        t = t_0 + (i_c - i_lo) * C + r
        m_o = (t < eos)[None, :]
        tl.store(o + t[None, :] * so_t + (i_hv * so_h + dv[:, None]), b_o.to(o.dtype.element_ty), mask=m_o)
    return b_h


@triton.jit
def _is_padding(slot, pad_slot, slots):
    return (slot < 0) | (slot == pad_slot) | (slot >= slots)


# windows, segments and sequences differ from step to step: no new binary for them
@triton.jit(do_not_specialize=[
    "row_begin", "row_end", "slot_base", "seg_begin", "seg_chunks", "mid_stride", "checkpoints", "pad_slot", "slots", "N",
])
def state_kernel(
    qg, kg, w, u, aqk, dec, o,  # as prefill_prepare leaves them; o [.., HV, V]
    cu_seqlens, chunk_offsets,  # [N+1] tokens, [N+1] chunk rows
    T, row_begin, row_end, slot_base, seg_begin, seg_chunks,
    h_in, read_slots, has_initial, h_out, write_slots,  # states [slots or N, HV, V, K] or [.., K, V]; any may be None
    mid_in, mid_out, mid_stride,  # [.., HV, 128, 128] fp32 or None: states between windows or segments
    ckpt_offsets, ckpt_slots, ckpt_pool, checkpoints,  # [N, checkpoints] int32, or None
    pad_slot, slots, N, HV, so_t, so_h, sin_n, sin_h, sout_n, sout_h, sck_n, sck_h, sread, swrite, scko, scks,
    V_FIRST: tl.constexpr, STAGES: tl.constexpr,
):
    C: tl.constexpr = 64
    i_v = tl.program_id(0) % 2
    i_hv = tl.program_id(0) // 2 % HV
    i_n = tl.program_id(0) // (2 * HV) % N
    i_s = seg_begin + tl.program_id(0) // (2 * HV) // N
    # chunk rows of this program: those of its sequence, its segment and the launch's window
    c_0 = tl.load(chunk_offsets + i_n).to(tl.int32)
    c_1 = tl.load(chunk_offsets + i_n + 1).to(tl.int32)
    i_lo = tl.maximum(c_0 + i_s * seg_chunks, row_begin)
    i_hi = tl.minimum(tl.minimum(c_0 + (i_s + 1) * seg_chunks, c_1), row_end)
    if (i_lo < i_hi) | ((c_0 == c_1) & (row_begin == 0) & (i_s == 0)):  # an empty sequence hands its state on
        first = i_lo <= c_0
        last = (i_hi >= c_1) | (c_0 == c_1)
        bos = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n), 0), T).to(tl.int64)  # the tokens that exist
        eos = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n + 1), bos), T).to(tl.int64)
        t_0 = bos + (i_lo - c_0).to(tl.int64) * C
        d = tl.arange(0, 128)
        dv = i_v * 64 + tl.arange(0, 64)
        m_h = (dv < 128)[:, None]
        o_h = dv[:, None] * 128 + d[None, :] if V_FIRST else dv[:, None] + d[None, :] * 128
        o_mid = dv[:, None] * 128 + d[None, :]

        # which slots: a sequence whose slot is padding is neither read nor written, and its outputs are zero
        slot_in = i_n.to(tl.int64)
        slot_out = i_n.to(tl.int64)
        live = True
        keep = True
        if write_slots is not None:
            slot_out = tl.load(write_slots + i_n * swrite).to(tl.int64)
            keep = ~_is_padding(slot_out, pad_slot, slots)
            live = keep
        if read_slots is not None:
            slot_in = tl.load(read_slots + i_n * sread).to(tl.int64)
            live = ~_is_padding(slot_in, pad_slot, slots)
        start = live & first
        if has_initial is not None:
            start = start & tl.load(has_initial + i_n).to(tl.int1)

        # the state at the start of these chunks
        b_h = tl.zeros([64, 128], tl.float32)
        if h_in is not None:
            b_h = tl.load(h_in + slot_in * sin_n + i_hv * sin_h + o_h, mask=m_h & start, other=0.0).to(tl.float32)
        if mid_in is not None:
            i_mid = (i_n * mid_stride + i_s).to(tl.int64) * HV + i_hv
            b_mid = tl.load(mid_in + i_mid * 16384 + o_mid, mask=(dv < 128)[:, None] & (live & (i_lo > c_0)), other=0.0)
            b_h = tl.where(first, b_h, b_mid)

        if live:
            if ckpt_pool is not None:
                i_at = i_lo
                # walk from one checkpoint to the next (ascending token offsets, multiples of C; others are passed over), then on
                for i_p in range(0, checkpoints + 1):
                    m_p = i_p < checkpoints
                    offset = tl.load(ckpt_offsets + i_n * scko + i_p, mask=m_p, other=0).to(tl.int32)
                    slot = tl.load(ckpt_slots + i_n * scks + i_p, mask=m_p, other=-1).to(tl.int64)
                    i_to = c_0 + offset // C
                    kept = (i_to > i_at) & (i_to <= i_hi) & (offset % C == 0) & (offset <= eos - bos)
                    kept = kept & ~_is_padding(slot, pad_slot, slots)
                    i_to = tl.where(m_p, tl.where(kept, i_to, i_at), i_hi)
                    b_h = _walk(b_h, i_at, i_to, i_v, i_hv, HV, slot_base, t_0 + (i_at - i_lo) * C, eos,
                                qg, kg, w, u, aqk, dec, o, so_t, so_h, STAGES)
                    tl.store(ckpt_pool + slot * sck_n + i_hv * sck_h + o_h, b_h.to(ckpt_pool.dtype.element_ty), mask=m_h & kept)
                    i_at = i_to
            else:
                b_h = _walk(b_h, i_lo, i_hi, i_v, i_hv, HV, slot_base, t_0, eos, qg, kg, w, u, aqk, dec, o, so_t, so_h, STAGES)
        else:
            r = tl.arange(0, C)
            for i_c in range(i_lo, i_hi):
                t = t_0 + (i_c - i_lo) * C + r
                tl.store(o + t[None, :] * so_t + (i_hv * so_h + dv[:, None]), tl.zeros([64, C], o.dtype.element_ty),
                         mask=(t < eos)[None, :] & (dv < 128)[:, None])

        # the state after them
        if h_out is not None:
            tl.store(h_out + slot_out * sout_n + i_hv * sout_h + o_h, b_h.to(h_out.dtype.element_ty),
                     mask=m_h & (live & keep & last))
        if mid_out is not None:
            i_mid = (i_n * mid_stride + i_s).to(tl.int64) * HV + i_hv
            tl.store(mid_out + i_mid * 16384 + o_mid, b_h, mask=(dv < 128)[:, None] & (live & ~last))


def launch(
    qg, kg, w, u, aqk, dec, o, cu_seqlens, chunk_offsets, row_begin, row_end, slot_base, seg_begin, segs, seg_chunks,
    h_in, read_slots, has_initial, h_out, write_slots, mid_in, mid_out, mid_stride, ckpt_offsets, ckpt_slots, ckpt_pool,
    pad_slot, N, HV, v_first, *, num_warps=4, num_stages=3,
):
    """Outputs and states of the chunk rows [row_begin, row_end) and the segments [seg_begin, seg_begin + segs) of seg_chunks chunks.

    qg .. dec as prefill_prepare wrote them, chunk row r at slot r - slot_base; o [.., HV, 128]; cu_seqlens, chunk_offsets [N+1].
    h_in, h_out, ckpt_pool [slots or N, HV, 128, 128] (v_first) or [.., 128, 128], fp32 or bf16, a head's state contiguous.
    read_slots, write_slots [N] int32 (None: sequence n has slot n); has_initial [N] bool (None: all); ckpt_offsets (tokens),
    ckpt_slots [N, P] int32. A slot that is negative, pad_slot or past the pool is padding. mid_in, mid_out [.., HV, 128, 128]
    fp32: a program that starts (ends) inside its sequence reads (writes) entry n * mid_stride + segment.
    """
    stride = lambda x, i: 0 if x is None else x.stride(i)
    pool = h_in if read_slots is not None else h_out if write_slots is not None else ckpt_pool
    state_kernel[(2 * HV * N * segs,)](
        qg, kg, w, u, aqk, dec, o, cu_seqlens, chunk_offsets, o.shape[:-2].numel(), row_begin, row_end, slot_base,
        seg_begin, seg_chunks, h_in, read_slots, has_initial, h_out, write_slots, mid_in, mid_out, mid_stride,
        ckpt_offsets, ckpt_slots, ckpt_pool, 0 if ckpt_offsets is None else ckpt_offsets.shape[1],
        pad_slot, 0 if pool is None else pool.shape[0], N, HV, o.stride(-3), o.stride(-2),
        stride(h_in, 0), stride(h_in, 1), stride(h_out, 0), stride(h_out, 1), stride(ckpt_pool, 0), stride(ckpt_pool, 1),
        stride(read_slots, 0), stride(write_slots, 0),
        stride(ckpt_offsets, 0), stride(ckpt_slots, 0),
        V_FIRST=v_first, STAGES=num_stages, num_warps=num_warps, num_stages=num_stages,
    )

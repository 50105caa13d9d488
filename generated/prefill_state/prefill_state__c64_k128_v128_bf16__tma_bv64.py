# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: prefill_state_tma.py.j2
# variant:  prefill_state__c64_k128_v128_bf16__tma_bv64
# inputs:   2c4f38ae477374f205f666a5913b957ee3bc4299e2670d9a8d68dcf886b8f5d9

"""Prefill, the state pass, for sm90: walks the chunks of one head of one sequence, 64 value channels a program.

The state h^T [BV, K] stays in fp32 accumulators. Per chunk, with h the incoming state:
  v' = u^T - h w^T        o^T = h qg^T + v' Aqk^T        h <- h 2^b_last + v' kg
Tiles come by TMA through host descriptors, num_stages deep. A launch covers a range of rows of the chunk table and a range
of segments, so the same kernel walks whole sequences, token windows, and the segments of a long sequence side by side.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

SPEC = {'family': 'prefill_state', 'chunk': 64, 'k': 128, 'v': 128, 'dtype': 'bf16'}
SCHEDULE = {'form': 'tma', 'bv': 64}


@triton.jit
def in_state(i_v, V_FIRST: tl.constexpr):
    """Offsets of the tile h^T [BV, K] within one head's state, which is stored [V, K] or [K, V]."""
    i_d = tl.arange(0, 128)[None, :]
    i_r = i_v * 64 + tl.arange(0, 64)[:, None]
    return i_r * 128 + i_d if V_FIRST else i_d * 128 + i_r


@triton.jit
def is_padding(slot, pad_slot, pool_slots):
    return (slot < 0) | (slot == pad_slot) | (slot >= pool_slots)


@triton.jit
def write_zeros(o, i_t, end, i_h, i_v, stride_o_t, stride_o_h):
    """o = 0 on all tokens of a padding sequence."""
    i_r = i_v * 64 + tl.arange(0, 64)
    for t in tl.range(i_t, end, 64):
        i = t + tl.arange(0, 64)
        p_o = o + i[:, None] * stride_o_t + i_h * stride_o_h + i_r[None, :]
        tl.store(p_o, tl.zeros([64, 64], o.dtype.element_ty), mask=(i < end)[:, None])


@triton.jit
def walk(b_h, qg, kg, w, u, aqk, dec, o, lo, hi, c_0, bos, eos, slot_base, i_h, i_v, HV, stride_o_t, stride_o_h,
         STAGES: tl.constexpr):
    """Carry h^T through the rows [lo, hi) of the chunk table and write their outputs."""
    i_d = tl.arange(0, 128)
    i_i = tl.arange(0, 64)
    i_r = i_v * 64 + tl.arange(0, 64)
    for i_c in tl.range(lo, hi, num_stages=STAGES):  # without num_stages here, dec would not be prefetched
        i_tile = (i_c - slot_base) * HV + i_h
        row = i_tile * 64
        b_w = w.load([row, 0])                                      # [C, K]
        b_u = u.load([row, i_v * 64])                      # [C, BV]
        b_qg = qg.load([row, 0])                                    # [C, K]
        b_aqk = aqk.load([row, 0])                                  # [C, C]
        b_kg = kg.load([row, 0])                                    # [C, K]
        b_dec = tl.load(dec + i_tile.to(tl.int64) * 128 + i_d)      # [K] 2^b_last
        b_hb = b_h.to(tl.bfloat16)
        b_vn = (tl.trans(b_u).to(tl.float32) - tl.dot(b_hb, tl.trans(b_w))).to(tl.bfloat16)
        b_o = tl.dot(b_hb, tl.trans(b_qg))
        b_o = tl.dot(b_vn, tl.trans(b_aqk), b_o)                    # [BV, C]
        b_h = tl.dot(b_vn, b_kg, b_h * b_dec[None, :])              # [BV, K]
        i_t = bos + (i_c - c_0) * 64 + i_i
        p_o = o + i_t[None, :] * stride_o_t + i_h * stride_o_h + i_r[:, None]
        tl.store(p_o, b_o.to(tl.bfloat16), mask=(i_t < eos)[None, :])
    return b_h


@triton.jit(do_not_specialize=[
    "T", "row_begin", "row_end", "slot_base", "seg_begin", "seg_chunks", "mid_stride", "pad_slot", "pool_slots", "N", "HV", "CKPTS",
    "stride_read", "stride_write", "stride_at", "stride_ckpt_slots"])
def state_kernel(qg, kg, w, u, aqk, dec, o, cu_seqlens, chunk_offsets, T, row_begin, row_end, slot_base, seg_begin, seg_chunks,
                 h_in, read_slots, has_initial, h_out, write_slots, mid_in, mid_out, mid_stride, ckpt_offsets, ckpt_slots, ckpt_pool,
                 pad_slot, pool_slots, N, HV, stride_o_t, stride_o_h, stride_in, stride_in_h, stride_out, stride_out_h,
                 stride_ckpt, stride_ckpt_h, stride_read, stride_write, stride_at, stride_ckpt_slots, CKPTS,
                 V_FIRST: tl.constexpr, STAGES: tl.constexpr):
    pid = tl.program_id(0)
    i_v = pid % 2
    i_h = pid // 2 % HV
    i_n = pid // (2 * HV) % N
    i_s = seg_begin + pid // (2 * HV * N)
    c_0 = tl.load(chunk_offsets + i_n).to(tl.int32)      # the sequence's rows of the chunk table
    c_1 = tl.load(chunk_offsets + i_n + 1).to(tl.int32)
    bos = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n), 0), T).to(tl.int64)  # the tokens that exist
    eos = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n + 1), bos), T).to(tl.int64)
    slot_in = i_n
    slot_out = i_n
    is_padded = False   # a padding sequence is neither read nor written, and its outputs are zero
    is_written = True
    if write_slots is not None:
        slot_out = tl.load(write_slots + i_n * stride_write).to(tl.int32)
        is_padded = is_padding(slot_out, pad_slot, pool_slots)
        is_written = not is_padded
    if read_slots is not None:
        slot_in = tl.load(read_slots + i_n * stride_read).to(tl.int32)
        is_padded = is_padding(slot_in, pad_slot, pool_slots)
    from_zero = False
    if has_initial is not None:
        from_zero = tl.load(has_initial + i_n) == 0
    lo = tl.maximum(c_0 + i_s * seg_chunks, row_begin)   # this launch's rows of it
    hi = tl.minimum(tl.minimum(c_0 + (i_s + 1) * seg_chunks, c_1), row_end)
    if is_padded:
        if lo < hi:
            i_t = bos + (lo - c_0) * 64
            write_zeros(o, i_t, tl.minimum(i_t + (hi - lo) * 64, eos), i_h, i_v, stride_o_t, stride_o_h)
    elif (lo < hi) | ((c_0 == c_1) & (row_begin == 0) & (i_s == 0)):  # an empty sequence keeps its state
        is_last = (hi >= c_1) | (c_0 == c_1)
        tile = in_state(i_v, V_FIRST)
        i_mid = ((i_n * mid_stride + i_s).to(tl.int64) * HV + i_h) * 16384 + in_state(i_v, True)
        # The incoming state: the sequence's own, or the one an earlier launch left here.
        b_h = tl.zeros([64, 128], tl.float32)
        if mid_in is not None:
            if lo > c_0:
                b_h = tl.load(mid_in + i_mid)
        if h_in is not None:
            if (lo <= c_0) & (not from_zero):
                b_h = tl.load(h_in + slot_in.to(tl.int64) * stride_in + i_h * stride_in_h + tile).to(tl.float32)

        if ckpt_pool is None:
            b_h = walk(b_h, qg, kg, w, u, aqk, dec, o, lo, hi, c_0, bos, eos, slot_base, i_h, i_v, HV,
                       stride_o_t, stride_o_h, STAGES)
        else:
            # Stop at each wanted interior state: after token ckpt_offsets[n, p], into the slot beside it. What outlives a walk
            # takes registers from it: so tokens count from the sequence's first one, and the slot is read after the walk.
            o_n = o + bos * stride_o_t
            T = (eos - bos).to(tl.int32)
            here = lo
            for i_p in range(0, CKPTS + 1):
                at = tl.load(ckpt_offsets + (i_n * stride_at + i_p), mask=i_p < CKPTS, other=-1).to(tl.int32)
                wanted = tl.where(i_p < CKPTS, c_0 + at // 64, hi)
                stop = tl.maximum(here, tl.minimum(wanted, hi))
                b_h = walk(b_h, qg, kg, w, u, aqk, dec, o_n, here, stop, c_0, 0, T, slot_base, i_h, i_v, HV,
                           tl.cast(stride_o_t, tl.int64), stride_o_h, STAGES)
                here = stop
                reached = (wanted > lo) & (wanted == stop) & (at % 64 == 0) & (at <= T)
                slot = tl.load(ckpt_slots + (i_n * stride_ckpt_slots + i_p), mask=i_p < CKPTS, other=-1).to(tl.int32)
                if reached & (not is_padding(slot, pad_slot, pool_slots)):
                    p_ckpt = ckpt_pool + (slot.to(tl.int64) * stride_ckpt + i_h * stride_ckpt_h) + tile
                    tl.store(p_ckpt, b_h.to(ckpt_pool.dtype.element_ty))

        # The outgoing state: the sequence's last, or one for a later launch.
        if h_out is not None:
            if is_last & is_written:
                p_out = h_out + slot_out.to(tl.int64) * stride_out + i_h * stride_out_h + tile
                tl.store(p_out, b_h.to(h_out.dtype.element_ty))
        if mid_out is not None:
            if not is_last:
                tl.store(mid_out + i_mid, b_h)


def rows_of(x, width):
    """The host descriptor of the [64, width] tiles of an intermediate [slots, HV, 64, channels]."""
    channels = x.shape[-1]
    return TensorDescriptor(x, [x.numel() // channels, channels], [channels, 1], [64, width])


def launch(qg, kg, w, u, aqk, dec, o, cu_seqlens, chunk_offsets, row_begin, row_end, slot_base, seg_begin, segs, seg_chunks,
           h_in, read_slots, has_initial, h_out, write_slots, mid_in, mid_out, mid_stride, ckpt_offsets, ckpt_slots, ckpt_pool,
           pad_slot, N, HV, v_first, *, num_warps=4, num_stages=3):
    """Outputs and states of the rows [row_begin, row_end) of the chunk table, for segments [seg_begin, seg_begin + segs).

    qg, kg, w [slots, HV, 64, 128], u [slots, HV, 64, 128], aqk [slots, HV, 64, 64] bf16, dec [slots, HV, 128] fp32 from
    prefill_prepare; o [.., HV, 128] bf16. A segment is seg_chunks chunks of one sequence. h_in, h_out: pools
    [slots, HV, 128, 128] (v_first) or [slots, HV, 128, 128], fp32 or bf16, or None; read_slots, write_slots int32 [N] or None
    (slot = sequence); a slot that is negative, pad_slot or not in the pool is padding. A sequence cut by the launch's range
    starts from mid_in[n * mid_stride + s] and ends in mid_out[same], fp32 [.., HV, 128, 128].
    ckpt_offsets [N, P] tokens (multiples of 64, ascending), ckpt_slots [N, P] int32 into ckpt_pool.
    """
    pool = h_in if read_slots is not None else h_out if write_slots is not None else ckpt_pool
    of = lambda x, *axes: [0 if x is None else x.stride(axis) for axis in axes]
    return state_kernel[(2 * HV * N * segs,)](
        rows_of(qg, 128), rows_of(kg, 128), rows_of(w, 128), rows_of(u, 64), rows_of(aqk, 64), dec, o,
        cu_seqlens, chunk_offsets, o.shape[:-2].numel(), row_begin, row_end, slot_base, seg_begin, seg_chunks, h_in,
        read_slots, has_initial, h_out, write_slots, mid_in, mid_out, mid_stride, ckpt_offsets, ckpt_slots, ckpt_pool, pad_slot,
        0 if pool is None else pool.shape[0], N, HV, *of(o, -3, -2), *of(h_in, 0, 1), *of(h_out, 0, 1),
        *of(ckpt_pool, 0, 1), *of(read_slots, 0), *of(write_slots, 0), *of(ckpt_offsets, 0), *of(ckpt_slots, 0),
        0 if ckpt_offsets is None else ckpt_offsets.shape[1], v_first, num_stages, num_warps=num_warps, num_stages=num_stages)

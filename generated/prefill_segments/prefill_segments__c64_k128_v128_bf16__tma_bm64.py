# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: prefill_segments_tma.py.j2
# variant:  prefill_segments__c64_k128_v128_bf16__tma_bm64
# inputs:   10ac6738ce3bb7d146d87321944fc51a0e450312d5009c1feade3e5dbb7a7865

"""Prefill, segments of a long sequence, for sm90: the map of each segment, and the chain of the maps.

Over the chunks of segment s the state h^T [V, K] goes to h^T P_s + OFF_s. The map kernel walks the state pass's recurrence
without outputs on V + K rows: rows below V start at zero with u and end as OFF_s; the K rows after them start at the
identity without u and end as P_s, kept as a bf16 pair (hi + lo). The combine kernel then chains HS[s + 1] = HS[s] P_s + OFF_s,
so that the state pass can walk all segments side by side. Segment 0 and the last one need no map.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

SPEC = {'family': 'prefill_segments', 'chunk': 64, 'k': 128, 'v': 128, 'dtype': 'bf16'}
SCHEDULE = {'form': 'tma', 'bm': 64}


@triton.jit(do_not_specialize=["slot_base", "seg_begin", "seg_chunks", "nseg", "N", "HV"])
def map_kernel(kg, w, u, dec, chunk_offsets, off, p_hi, p_lo, slot_base, seg_begin, seg_chunks, nseg, N, HV,
               STAGES: tl.constexpr):
    pid = tl.program_id(0)
    i_m = pid % 4                          # tile of BM rows of [V + K, K]
    i_h = pid // 4 % HV
    i_n = pid // (4 * HV) % N
    i_s = seg_begin + pid // (4 * HV * N)
    c_0 = tl.load(chunk_offsets + i_n).to(tl.int32)
    c_1 = tl.load(chunk_offsets + i_n + 1).to(tl.int32)
    lo = c_0 + i_s * seg_chunks
    hi = lo + seg_chunks
    if hi >= c_1:  # no segment comes after this one
        return
    i_d = tl.arange(0, 128)
    i_r = i_m * 64 + tl.arange(0, 64)
    is_off = i_m < 2
    with_u = tl.where(is_off, 1.0, 0.0)
    col = tl.where(is_off, i_m * 64, 0)
    b_h = tl.where(i_r[:, None] - 128 == i_d[None, :], 1.0, 0.0)
    for i_c in tl.range(lo, hi, num_stages=STAGES):
        i_tile = (i_c - slot_base) * HV + i_h
        row = i_tile * 64
        b_w = w.load([row, 0])                              # [C, K]
        b_u = u.load([row, col])                            # [C, BM]
        b_kg = kg.load([row, 0])                            # [C, K]
        b_dec = tl.load(dec + i_tile.to(tl.int64) * 128 + i_d)
        b_vn = tl.trans(b_u).to(tl.float32) * with_u - tl.dot(b_h.to(tl.bfloat16), tl.trans(b_w))
        b_h = tl.dot(b_vn.to(tl.bfloat16), b_kg, b_h * b_dec[None, :])
    i_map = (i_n * nseg + i_s).to(tl.int64) * HV + i_h
    if is_off:
        tl.store(off + i_map * 16384 + i_r[:, None] * 128 + i_d[None, :], b_h)
    else:
        tile = i_map * 16384 + (i_r - 128)[:, None] * 128 + i_d[None, :]
        b_hi = b_h.to(tl.bfloat16)
        tl.store(p_hi + tile, b_hi)
        tl.store(p_lo + tile, (b_h - b_hi.to(tl.float32)).to(tl.bfloat16))


@triton.jit(do_not_specialize=["seg_chunks", "nseg", "HV"])
def combine_kernel(hs, off, p_hi, p_lo, chunk_offsets, seg_chunks, nseg, HV, STAGES: tl.constexpr):
    pid = tl.program_id(0)
    i_v = pid % 2
    i_h = pid // 2 % HV
    i_n = pid // (2 * HV)
    chunks = tl.load(chunk_offsets + i_n + 1).to(tl.int32) - tl.load(chunk_offsets + i_n).to(tl.int32)
    last = tl.minimum(nseg, tl.cdiv(chunks, seg_chunks)) - 1  # the last segment that holds chunks: its state comes from HS
    i_d = tl.arange(0, 128)
    tile = (i_v * 64 + tl.arange(0, 64))[:, None] * 128 + i_d[None, :]
    square = i_d[:, None] * 128 + i_d[None, :]
    if last > 1:
        b_h = tl.load(hs + ((i_n * nseg + 1).to(tl.int64) * HV + i_h) * 16384 + tile)
        for i_s in tl.range(1, last, num_stages=STAGES):
            i_map = (i_n * nseg + i_s).to(tl.int64) * HV + i_h
            b_off = tl.load(off + i_map * 16384 + tile)
            b_hi = tl.load(p_hi + i_map * 16384 + square)
            b_lo = tl.load(p_lo + i_map * 16384 + square)
            # The product of two bf16 pairs, without the smallest of its four parts.
            h_hi = b_h.to(tl.bfloat16)
            h_lo = (b_h - h_hi.to(tl.float32)).to(tl.bfloat16)
            b_h = tl.dot(h_hi, b_lo, b_off)
            b_h = tl.dot(h_lo, b_hi, b_h)
            b_h = tl.dot(h_hi, b_hi, b_h)
            tl.store(hs + (i_map + HV) * 16384 + tile, b_h)


def launch_map(kg, w, u, dec, chunk_offsets, off, p_hi, p_lo, slot_base, seg_begin, segs, seg_chunks, nseg, N, HV,
               *, num_warps=4, num_stages=3):
    """Maps of segments [seg_begin, seg_begin + segs), each of seg_chunks chunks, of N sequences.

    kg, w [slots, HV, 64, 128], u [slots, HV, 64, 128] bf16 and dec [slots, HV, 128] fp32 from prefill_prepare;
    writes off [N, nseg, HV, 128, 128] fp32 and p_hi, p_lo [N, nseg, HV, 128, 128] bf16.
    """
    tiles = [TensorDescriptor(t, [t.numel() // 128, 128], [128, 1], [64, width])
             for t, width in ((kg, 128), (w, 128), (u, 64))]
    return map_kernel[(4 * HV * N * segs,)](
        *tiles, dec, chunk_offsets, off, p_hi, p_lo, slot_base, seg_begin, seg_chunks, nseg, N, HV, num_stages,
        num_warps=num_warps, num_stages=num_stages)


def launch_combine(hs, off, p_hi, p_lo, chunk_offsets, seg_chunks, nseg, N, HV, *, num_warps=4, num_stages=2):
    """HS[n, s + 1] = HS[n, s] P_s + OFF_s for s = 1 .. nseg - 2; hs [N, nseg, HV, 128, 128] fp32 holds HS[n, 1]."""
    return combine_kernel[(2 * HV * N,)](hs, off, p_hi, p_lo, chunk_offsets, seg_chunks, nseg, HV, num_stages,
                                        num_warps=num_warps, num_stages=num_stages)

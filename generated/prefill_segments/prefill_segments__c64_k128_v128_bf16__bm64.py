# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: prefill_segments.py.j2
# variant:  prefill_segments__c64_k128_v128_bf16__bm64
# inputs:   042abeb5862071d9eb683f4537ea04d1ff28e8781b11c37f6bda0f263605987f

"""Prefill in segments: with h = S^T [V, K], a segment takes h to h P + OFF.

The walk of prefill_state, v' = u - w S, S <- diag(2^G_last) S + kg^T v', is linear in S: from zero and with u it ends at OFF
(128 rows), from the identity and without u at P (128 rows). P is kept as a sum of two numbers of the inputs' dtype.
"""

import triton
import triton.language as tl

SPEC = {'family': 'prefill_segments', 'chunk': 64, 'k': 128, 'v': 128, 'dtype': 'bf16'}
SCHEDULE = {'bm': 64}


@triton.jit(do_not_specialize=["slot_base", "seg_begin", "seg_chunks", "nseg", "N"])
def map_kernel(
    kg, w, u, dec,  # as prefill_prepare leaves them
    chunk_offsets,  # [N+1] chunk rows
    off, p_hi, p_lo,  # [N, nseg, HV, 128, 128] fp32, [N, nseg, HV, 128, 128] bf16 x2 (fp32: p_lo None)
    slot_base, seg_begin, seg_chunks, nseg, N, HV,
    STAGES: tl.constexpr,
):
    C: tl.constexpr = 64
    i_v = tl.program_id(0) % 4
    i_hv = tl.program_id(0) // 4 % HV
    i_n = tl.program_id(0) // (4 * HV) % N
    i_s = seg_begin + tl.program_id(0) // (4 * HV) // N
    c_0 = tl.load(chunk_offsets + i_n).to(tl.int32) + i_s * seg_chunks
    c_1 = tl.load(chunk_offsets + i_n + 1).to(tl.int32)
    if c_0 + seg_chunks < c_1:  # only a segment with another one after it needs a map
        r = tl.arange(0, C)
        d = tl.arange(0, 128)
        of_u = i_v < 2  # rows of OFF; else rows of P
        dv = tl.where(of_u, i_v, i_v - 2) * 64 + tl.arange(0, 64)
        o_ck = r[:, None] * 128 + d[None, :]  # [C, K]
        o_kc = r[None, :] * 128 + d[:, None]  # [K, C]
        o_vc = r[None, :] * 128 + dv[:, None]  # [BM, C]
        m_u = (dv < 128)[:, None] & of_u
        b_h = tl.where((dv[:, None] == d[None, :]) & (i_v >= 2), 1.0, 0.0)  # [BM, K]
        for i_c in tl.range(c_0, c_0 + seg_chunks, num_stages=STAGES):
            i_tile = (i_c - slot_base).to(tl.int64) * HV + i_hv
            b_w = tl.load(w + i_tile * 8192 + o_kc)
            b_u = tl.load(u + i_tile * 8192 + o_vc, mask=m_u, other=0.0)
            b_kg = tl.load(kg + i_tile * 8192 + o_ck)
            b_dec = tl.load(dec + i_tile * 128 + d)
            # v' = u - w S, S <- diag(2^G_last) S + kg^T v'
            b_v = (b_u.to(tl.float32) - tl.dot(b_h.to(tl.bfloat16), b_w)).to(tl.bfloat16)
            b_h = tl.dot(b_v, b_kg, b_h * b_dec[None, :])
        i_map = ((i_n * nseg + i_s) * HV + i_hv).to(tl.int64)
        o_h = dv[:, None] * 128 + d[None, :]
        if of_u:
            tl.store(off + i_map * 16384 + o_h, b_h, mask=(dv < 128)[:, None])
        else:
            b_hi = b_h.to(tl.bfloat16)
            tl.store(p_hi + i_map * 16384 + o_h, b_hi, mask=(dv < 128)[:, None])
            if p_lo is not None:
                tl.store(p_lo + i_map * 16384 + o_h, (b_h - b_hi.to(tl.float32)).to(tl.bfloat16), mask=(dv < 128)[:, None])


@triton.jit(do_not_specialize=["seg_chunks", "nseg"])
def combine_kernel(
    hs,  # [N, nseg, HV, 128, 128] fp32: entry 1, the state after segment 0, is there already
    off, p_hi, p_lo, chunk_offsets, seg_chunks, nseg, HV,
):
    i_v = tl.program_id(0) % 8
    i_hv = tl.program_id(0) // 8 % HV
    i_n = tl.program_id(0) // (8 * HV)
    chunks = (tl.load(chunk_offsets + i_n + 1) - tl.load(chunk_offsets + i_n)).to(tl.int32)
    inner = tl.minimum(nseg, tl.cdiv(chunks, seg_chunks)) - 1  # segments 1 .. inner - 1 have another one after them
    if inner > 1:
        r = tl.arange(0, 64)
        o_h = (i_v * 16 + tl.arange(0, 16))[:, None] * 128 + r[None, :]  # [BV, 64]
        o_kk = r[:, None] * 128 + r[None, :]  # [64, 64]
        p_h = hs + ((i_n * nseg + 1) * HV + i_hv).to(tl.int64) * 16384 + o_h
        b_h0 = tl.load(p_h + 0)
        b_h64 = tl.load(p_h + 64)
        for i_s in range(1, inner):
            i_map = ((i_n * nseg + i_s) * HV + i_hv).to(tl.int64)
            p_off = off + i_map * 16384 + o_h
            p_hs = hs + (i_map + HV) * 16384 + o_h
            o_p = i_map * 16384 + o_kk
            # h P in twice the inputs' bits: (hi + lo) (P_hi + P_lo) without the product of the low parts
            b_hi0 = b_h0.to(tl.bfloat16)
            b_lo0 = (b_h0 - b_hi0.to(tl.float32)).to(tl.bfloat16)
            b_hi64 = b_h64.to(tl.bfloat16)
            b_lo64 = (b_h64 - b_hi64.to(tl.float32)).to(tl.bfloat16)
            b_n0 = tl.load(p_off + 0)
            b_p = tl.load(p_hi + o_p + 0)
            b_n0 = tl.dot(b_hi0, tl.load(p_lo + o_p + 0), b_n0)
            b_n0 = tl.dot(b_hi0, b_p, tl.dot(b_lo0, b_p, b_n0))
            b_p = tl.load(p_hi + o_p + 8192)
            b_n0 = tl.dot(b_hi64, tl.load(p_lo + o_p + 8192), b_n0)
            b_n0 = tl.dot(b_hi64, b_p, tl.dot(b_lo64, b_p, b_n0))
            tl.store(p_hs + 0, b_n0)
            b_n64 = tl.load(p_off + 64)
            b_p = tl.load(p_hi + o_p + 64)
            b_n64 = tl.dot(b_hi0, tl.load(p_lo + o_p + 64), b_n64)
            b_n64 = tl.dot(b_hi0, b_p, tl.dot(b_lo0, b_p, b_n64))
            b_p = tl.load(p_hi + o_p + 8256)
            b_n64 = tl.dot(b_hi64, tl.load(p_lo + o_p + 8256), b_n64)
            b_n64 = tl.dot(b_hi64, b_p, tl.dot(b_lo64, b_p, b_n64))
            tl.store(p_hs + 64, b_n64)
            b_h0 = b_n0
            b_h64 = b_n64


def launch_map(
    kg, w, u, dec, chunk_offsets, off, p_hi, p_lo, slot_base, seg_begin, segs, seg_chunks, nseg, N, HV,
    *, num_warps=4, num_stages=3,
):
    """Maps of the segments [seg_begin, seg_begin + segs) of seg_chunks chunks, of every sequence that goes on after them.

    kg, w, u, dec as prefill_prepare wrote them, chunk row r at slot r - slot_base; chunk_offsets [N+1]; off [N, nseg, HV, 128, 128] fp32,
    p_hi, p_lo [N, nseg, HV, 128, 128] bf16, written.
    """
    map_kernel[(4 * HV * N * segs,)](
        kg, w, u, dec, chunk_offsets, off, p_hi, p_lo, slot_base, seg_begin, seg_chunks, nseg, N, HV,
        STAGES=num_stages, num_warps=num_warps, num_stages=num_stages,
    )


def launch_combine(hs, off, p_hi, p_lo, chunk_offsets, seg_chunks, nseg, N, HV, *, num_warps=4, num_stages=1):
    """hs[n, s + 1] = hs[n, s] P + OFF for every inner segment s >= 1; hs [N, nseg, HV, 128, 128] fp32, entry 1 given."""
    combine_kernel[(8 * HV * N,)](
        hs, off, p_hi, p_lo, chunk_offsets, seg_chunks, nseg, HV, num_warps=num_warps, num_stages=num_stages,
    )

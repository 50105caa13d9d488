# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: gate.py.j2
# variant:  gate__c64_k128_fp32__bk64_bt64
# inputs:   388030a06d0aae513c7628f0371b373ba0f1893d75e761fe52b45b1a7fdf5cfd

"""The gate of Kimi Delta Attention, K = 128: raw gate -> its cumulative sums inside each chunk of 64 tokens, log2 units.

Each program takes BT tokens x BK channels of one value head, and the head's beta with its first block of channels.
Inputs are fp32 or wider, outputs fp32: rounded to bf16, a decay of 0.9999 would be 1.
"""

import torch
import triton
import triton.language as tl

SPEC = {'family': 'gate', 'chunk': 64, 'k': 128, 'dtype': 'fp32'}
SCHEDULE = {'bk': 64, 'bt': 64}


@triton.jit
def log_decay(b_x, b_a, lower_bound):
    """The gate: x = raw + dt_bias, a = exp(A_log) -> log decay, natural log, <= 0. lower_bound None: softplus form."""
    if lower_bound is None:
        # softplus(x) = max(x, 0) + log1p(e), e = exp(-|x|); log1p by its atanh series, because log(1 + e) loses all
        # digits of a small e, and a slow decay is used thousands of times
        b_e = tl.exp(-tl.abs(b_x))
        b_r = b_e / (2.0 + b_e)  # <= 1/3
        b_r2 = b_r * b_r
        b_p = 1 / 9 + b_r2 * (1 / 11 + b_r2 * (1 / 13 + b_r2 * (1 / 15)))
        b_p = 1.0 + b_r2 * (1 / 3 + b_r2 * (1 / 5 + b_r2 * (1 / 7 + b_r2 * b_p)))
        return -b_a * (tl.maximum(b_x, 0.0) + 2.0 * b_r * b_p)
    else:
        return lower_bound * tl.sigmoid(b_a * b_x)


# token counts and lower bounds differ from call to call: no new binary for them
@triton.jit(do_not_specialize=["T"])
def gate_kernel(
    g, A_log, dt_bias, out,  # [B, T, HV, K], [HV], [HV, K], [B, T, HV, K]; A_log and dt_bias may be None
    beta, beta_out,  # [B, T, HV] raw and, contiguous, its strength; both None: not wanted
    cu_seqlens, chunk_indices,  # [N+1], [NT, 2] (sequence, chunk in it); both None: each batch row is one sequence
    lower_bound, beta_scale, T,
    g_b, g_t, g_h, out_b, out_t, out_h, beta_b, beta_t, beta_h,
    HV: tl.constexpr,
):
    K: tl.constexpr = 128
    BT: tl.constexpr = 64
    BK: tl.constexpr = 64
    NK: tl.constexpr = 2
    i_k = tl.program_id(0) % NK
    i_h = tl.program_id(0) // NK % HV
    i_c = tl.program_id(0) // (NK * HV)

    # the tokens first .. end of this program, within its batch row
    if chunk_indices is not None:
        i_b = tl.zeros([], tl.int64)
        i_n = tl.load(chunk_indices + i_c.to(tl.int64) * 2).to(tl.int64)
        i_t = tl.load(chunk_indices + i_c.to(tl.int64) * 2 + 1).to(tl.int64)
        bos = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n), 0), T).to(tl.int64)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n + 1), bos), T).to(tl.int64)
        first = bos + i_t * BT
    else:
        NT = tl.cdiv(T, BT)
        i_b = (i_c // NT).to(tl.int64)
        first = (i_c % NT).to(tl.int64) * BT
        end = T
    o_t = tl.arange(0, BT)
    d_k = i_k * BK + tl.arange(0, BK)
    m_t = first + o_t < end
    m_k = d_k < K
    m_g = m_t[:, None] & m_k[None, :]  # [BT, BK]

    b_x = tl.load(g + i_b * g_b + first * g_t + i_h * g_h + o_t[:, None] * g_t + d_k[None, :], mask=m_g, other=0.0).to(tl.float32)
    if dt_bias is not None:
        b_x += tl.load(dt_bias + i_h * K + d_k, mask=m_k, other=0.0).to(tl.float32)[None, :]
    b_a = 1.0
    if A_log is not None:
        b_a = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    b_g = log_decay(b_x, b_a, lower_bound)
    # rows past the end add nothing; they come last, so that what a prefix gives never depends on what follows
    b_g = tl.cumsum(tl.where(m_g, b_g * 1.4426950408889634, 0.0), 0)
    tl.store(out + i_b * out_b + first * out_t + i_h * out_h + o_t[:, None] * out_t + d_k[None, :], b_g, mask=m_g)

    if beta is not None:
        if i_k == 0:
            b_beta = tl.load(beta + i_b * beta_b + first * beta_t + i_h * beta_h + o_t * beta_t, mask=m_t, other=0.0)
            b_beta = tl.sigmoid(b_beta.to(tl.float32)) * beta_scale
            tl.store(beta_out + (i_b * T + first + o_t) * HV + i_h, b_beta, mask=m_t)


def launch(
    g, A_log, dt_bias, lower_bound, out, beta, beta_out, beta_scale, cu_seqlens, chunk_indices, *,
    num_warps=4, num_stages=1,
):
    """Write ``out`` [B, T, HV, 128] fp32 and, unless beta is None, ``beta_out`` [B, T, HV] fp32 (contiguous).

    g [B, T, HV, 128] with unit stride in K; A_log [HV], dt_bias [HV, 128] fp32 contiguous, or None; lower_bound a
    float, None for the softplus form; beta [B, T, HV] raw, any strides, beta_scale 1.0 or 2.0;
    cu_seqlens [N+1] and chunk_indices [NT, 2] of one integer dtype with B = 1, or both None.
    """
    B, T, HV, _ = g.shape
    tiles = B * ((T + 63) // 64) if chunk_indices is None else chunk_indices.shape[0]
    if tiles == 0 or HV == 0:
        return
    g_b, g_t, g_h, _ = g.stride()
    out_b, out_t, out_h, _ = out.stride()
    beta_b, beta_t, beta_h = (0, 0, 0) if beta is None else beta.stride()
    gate_kernel[(tiles * HV * 2,)](
        g, A_log, dt_bias, out, beta, beta_out, cu_seqlens, chunk_indices, lower_bound, beta_scale, T,
        g_b, g_t, g_h, out_b, out_t, out_h, beta_b, beta_t, beta_h,
        HV=HV, num_warps=num_warps, num_stages=num_stages,
    )

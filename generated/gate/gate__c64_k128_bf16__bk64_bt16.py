# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: gate.py.j2
# variant:  gate__c64_k128_bf16__bk64_bt16
# inputs:   16f3fac9a88d73ae1f93f4354541416c4cfffd957c240b76852d2370d2b6448d

"""The gate of Kimi Delta Attention, K = 128: raw gate -> sums of its log decay over a chunk of 64 tokens, log2 units.

Each program walks down one chunk of one value head with BK channels in registers, BT tokens' loads in flight at a time:
a running sum costs one addition a token and no exchange between threads.
The first block of channels also makes the head's beta. Outputs are fp32: rounded to bf16, a decay of 0.9999 would be 1.
"""

import torch
import triton
import triton.language as tl

SPEC = {'family': 'gate', 'chunk': 64, 'k': 128, 'dtype': 'bf16'}
SCHEDULE = {'bk': 64, 'bt': 16}


@triton.jit
def log_decay(b_x, b_a, lower_bound):
    """The gate: x = raw + dt_bias, a = exp(A_log) -> log decay, natural log, <= 0. lower_bound None: softplus form."""
    if lower_bound is None:
        # softplus(x) = max(x, 0) + log1p(e), e = exp(-|x|). A slow decay is used thousands of times, and log(1 + e) loses
        # all digits of a small e: a polynomial instead, fitted to log1p(e) / e on 0..1, off by 1.5e-7 at most in fp32
        b_e = tl.exp(-tl.abs(b_x))
        b_p = -0.138770611 + b_e * (0.0805368925 + b_e * (-0.0308245049 + b_e * 0.00554203734))
        b_p = -0.499997839 + b_e * (0.333239366 + b_e * (-0.248755263 + b_e * (0.192177129 + b_e * b_p)))
        return -b_a * (tl.maximum(b_x, 0.0) + b_e * (1.0 + b_e * b_p))
    else:
        return lower_bound / (1.0 + tl.exp2(b_x * (b_a * -1.4426950408889634)))


# token counts differ from call to call: no new binary for them
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
    BK: tl.constexpr = 64
    NK: tl.constexpr = 2
    TOKENS: tl.constexpr = 64  # of a program
    i_k = tl.program_id(0) % NK
    i_h = tl.program_id(0) // NK % HV
    i_c = tl.program_id(0) // (NK * HV)

    # the tokens first .. end of this program, within its batch row
    if chunk_indices is not None:
        i_b = tl.zeros([], tl.int64)
        i_n = tl.load(chunk_indices + i_c.to(tl.int64) * 2).to(tl.int64)
        i_t = tl.load(chunk_indices + i_c.to(tl.int64) * 2 + 1).to(tl.int64)
        live = i_n >= 0  # a row of -1 is the unused end of a bounded table: no tokens
        bos = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n, mask=live, other=0), 0), T).to(tl.int64)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n + 1, mask=live, other=0), bos), T).to(tl.int64)
        first = bos + i_t * TOKENS
        end = tl.where(live, end, first)
    else:
        i_b = (i_c // tl.cdiv(T, TOKENS)).to(tl.int64)
        first = (i_c % tl.cdiv(T, TOKENS)).to(tl.int64) * TOKENS
        end = T
    n_t = tl.minimum(tl.maximum(end - first, 0), TOKENS).to(tl.int32)
    d_k = i_k * BK + tl.arange(0, BK)
    m_k = d_k < K

    b_a = 1.0
    if A_log is not None:
        b_a = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    b_bias = tl.zeros([BK], tl.float32)
    if dt_bias is not None:
        b_bias = tl.load(dt_bias + i_h * K + d_k, mask=m_k, other=0.0).to(tl.float32)
    if lower_bound is None:  # log2 units: the factor goes into a scalar of the formula
        b_a *= 1.4426950408889634
    else:
        lower_bound *= 1.4426950408889634

    p_g = g + i_b * g_b + first * g_t + i_h * g_h + d_k
    p_out = out + i_b * out_b + first * out_t + i_h * out_h + d_k
    b_sum = tl.zeros([BK], tl.float32)
    for i in range(0, n_t, 16):
        b_x0 = tl.load(p_g + 0 * g_t, mask=m_k & (i + 0 < n_t), other=0.0).to(tl.float32)
        b_x1 = tl.load(p_g + 1 * g_t, mask=m_k & (i + 1 < n_t), other=0.0).to(tl.float32)
        b_x2 = tl.load(p_g + 2 * g_t, mask=m_k & (i + 2 < n_t), other=0.0).to(tl.float32)
        b_x3 = tl.load(p_g + 3 * g_t, mask=m_k & (i + 3 < n_t), other=0.0).to(tl.float32)
        b_x4 = tl.load(p_g + 4 * g_t, mask=m_k & (i + 4 < n_t), other=0.0).to(tl.float32)
        b_x5 = tl.load(p_g + 5 * g_t, mask=m_k & (i + 5 < n_t), other=0.0).to(tl.float32)
        b_x6 = tl.load(p_g + 6 * g_t, mask=m_k & (i + 6 < n_t), other=0.0).to(tl.float32)
        b_x7 = tl.load(p_g + 7 * g_t, mask=m_k & (i + 7 < n_t), other=0.0).to(tl.float32)
        b_x8 = tl.load(p_g + 8 * g_t, mask=m_k & (i + 8 < n_t), other=0.0).to(tl.float32)
        b_x9 = tl.load(p_g + 9 * g_t, mask=m_k & (i + 9 < n_t), other=0.0).to(tl.float32)
        b_x10 = tl.load(p_g + 10 * g_t, mask=m_k & (i + 10 < n_t), other=0.0).to(tl.float32)
        b_x11 = tl.load(p_g + 11 * g_t, mask=m_k & (i + 11 < n_t), other=0.0).to(tl.float32)
        b_x12 = tl.load(p_g + 12 * g_t, mask=m_k & (i + 12 < n_t), other=0.0).to(tl.float32)
        b_x13 = tl.load(p_g + 13 * g_t, mask=m_k & (i + 13 < n_t), other=0.0).to(tl.float32)
        b_x14 = tl.load(p_g + 14 * g_t, mask=m_k & (i + 14 < n_t), other=0.0).to(tl.float32)
        b_x15 = tl.load(p_g + 15 * g_t, mask=m_k & (i + 15 < n_t), other=0.0).to(tl.float32)
        b_sum += log_decay(b_x0 + b_bias, b_a, lower_bound)
        tl.store(p_out + 0 * out_t, b_sum, mask=m_k & (i + 0 < n_t))
        b_sum += log_decay(b_x1 + b_bias, b_a, lower_bound)
        tl.store(p_out + 1 * out_t, b_sum, mask=m_k & (i + 1 < n_t))
        b_sum += log_decay(b_x2 + b_bias, b_a, lower_bound)
        tl.store(p_out + 2 * out_t, b_sum, mask=m_k & (i + 2 < n_t))
        b_sum += log_decay(b_x3 + b_bias, b_a, lower_bound)
        tl.store(p_out + 3 * out_t, b_sum, mask=m_k & (i + 3 < n_t))
        b_sum += log_decay(b_x4 + b_bias, b_a, lower_bound)
        tl.store(p_out + 4 * out_t, b_sum, mask=m_k & (i + 4 < n_t))
        b_sum += log_decay(b_x5 + b_bias, b_a, lower_bound)
        tl.store(p_out + 5 * out_t, b_sum, mask=m_k & (i + 5 < n_t))
        b_sum += log_decay(b_x6 + b_bias, b_a, lower_bound)
        tl.store(p_out + 6 * out_t, b_sum, mask=m_k & (i + 6 < n_t))
        b_sum += log_decay(b_x7 + b_bias, b_a, lower_bound)
        tl.store(p_out + 7 * out_t, b_sum, mask=m_k & (i + 7 < n_t))
        b_sum += log_decay(b_x8 + b_bias, b_a, lower_bound)
        tl.store(p_out + 8 * out_t, b_sum, mask=m_k & (i + 8 < n_t))
        b_sum += log_decay(b_x9 + b_bias, b_a, lower_bound)
        tl.store(p_out + 9 * out_t, b_sum, mask=m_k & (i + 9 < n_t))
        b_sum += log_decay(b_x10 + b_bias, b_a, lower_bound)
        tl.store(p_out + 10 * out_t, b_sum, mask=m_k & (i + 10 < n_t))
        b_sum += log_decay(b_x11 + b_bias, b_a, lower_bound)
        tl.store(p_out + 11 * out_t, b_sum, mask=m_k & (i + 11 < n_t))
        b_sum += log_decay(b_x12 + b_bias, b_a, lower_bound)
        tl.store(p_out + 12 * out_t, b_sum, mask=m_k & (i + 12 < n_t))
        b_sum += log_decay(b_x13 + b_bias, b_a, lower_bound)
        tl.store(p_out + 13 * out_t, b_sum, mask=m_k & (i + 13 < n_t))
        b_sum += log_decay(b_x14 + b_bias, b_a, lower_bound)
        tl.store(p_out + 14 * out_t, b_sum, mask=m_k & (i + 14 < n_t))
        b_sum += log_decay(b_x15 + b_bias, b_a, lower_bound)
        tl.store(p_out + 15 * out_t, b_sum, mask=m_k & (i + 15 < n_t))
        p_g += 16 * g_t
        p_out += 16 * out_t
    o_t = tl.arange(0, TOKENS)
    if beta is not None:
        if i_k == 0:
            p_beta = beta + i_b * beta_b + first * beta_t + i_h * beta_h + o_t * beta_t
            b_beta = tl.sigmoid(tl.load(p_beta, mask=o_t < n_t, other=0.0).to(tl.float32)) * beta_scale
            tl.store(beta_out + (i_b * T + first + o_t) * HV + i_h, b_beta, mask=o_t < n_t)


def layout(g, out, beta, chunk_indices):
    """(programs, T, HV, the nine strides): what ``launch`` needs of shapes and strides; callers may keep it."""
    B, T, HV, _ = g.shape
    tiles = B * ((T + 63) // 64) if chunk_indices is None else chunk_indices.shape[0]
    beta_strides = (0, 0, 0) if beta is None else beta.stride()
    return tiles * HV * 2, T, HV, (*g.stride()[:3], *out.stride()[:3], *beta_strides)


def launch(
    g, A_log, dt_bias, lower_bound, out, beta, beta_out, beta_scale, cu_seqlens, chunk_indices, *,
    kept=None, num_warps=1, num_stages=1,
):
    """Write ``out`` [B, T, HV, 128] fp32 and, unless beta is None, ``beta_out`` [B, T, HV] fp32 (contiguous).

    g [B, T, HV, 128] with unit stride in K; A_log [HV], dt_bias [HV, 128] contiguous, or None; lower_bound a float,
    None for the softplus form; beta [B, T, HV] raw, any strides, beta_scale 1.0 or 2.0;
    cu_seqlens [N+1] and chunk_indices [NT, 2] of integers with B = 1, or both None.
    ``kept``: ``layout(...)`` of an earlier call with the same shapes and strides. Returns the compiled kernel, or None if
    there is nothing to do.
    """
    programs, T, HV, strides = kept or layout(g, out, beta, chunk_indices)
    if not programs:
        return None
    return gate_kernel[(programs,)](
        g, A_log, dt_bias, out, beta, beta_out, cu_seqlens, chunk_indices, lower_bound, beta_scale, T, *strides,
        HV=HV, num_warps=num_warps, num_stages=num_stages,
    )

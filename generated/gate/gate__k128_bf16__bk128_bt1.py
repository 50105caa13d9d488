# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: gate.py.j2
# variant:  gate__k128_bf16__bk128_bt1
# inputs:   af60d717356e45a1bf08b1075ac903c89621131faa6172c984b6513e931ffd07

"""The gate of Kimi Delta Attention, K = 128: raw gate -> log decay, natural log.

Each program takes BT tokens x BK channels of one value head.
The first block of channels also makes the head's beta. Outputs are fp32: rounded to bf16, a decay of 0.9999 would be 1.
"""

import torch
import triton
import triton.language as tl

SPEC = {'family': 'gate', 'k': 128, 'dtype': 'bf16'}
SCHEDULE = {'bk': 128, 'bt': 1}


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
    lower_bound, beta_scale, T,
    g_b, g_t, g_h, out_b, out_t, out_h, beta_b, beta_t, beta_h,
    HV: tl.constexpr,
):
    K: tl.constexpr = 128
    BK: tl.constexpr = 128
    NK: tl.constexpr = 1
    TOKENS: tl.constexpr = 1  # of a program
    i_k = tl.program_id(0) % NK
    i_h = tl.program_id(0) // NK % HV
    i_c = tl.program_id(0) // (NK * HV)

    # the tokens first .. end of this program, within its batch row
    i_b = (i_c // tl.cdiv(T, TOKENS)).to(tl.int64)
    first = (i_c % tl.cdiv(T, TOKENS)).to(tl.int64) * TOKENS
    n_t = tl.minimum(T - first, TOKENS).to(tl.int32)
    d_k = i_k * BK + tl.arange(0, BK)
    m_k = d_k < K

    b_a = 1.0
    if A_log is not None:
        b_a = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    b_bias = tl.zeros([BK], tl.float32)
    if dt_bias is not None:
        b_bias = tl.load(dt_bias + i_h * K + d_k, mask=m_k, other=0.0).to(tl.float32)
    o_t = tl.arange(0, TOKENS)
    m_g = (o_t < n_t)[:, None] & m_k[None, :]  # [BT, BK]
    p_g = g + i_b * g_b + first * g_t + i_h * g_h + o_t[:, None] * g_t + d_k[None, :]
    p_out = out + i_b * out_b + first * out_t + i_h * out_h + o_t[:, None] * out_t + d_k[None, :]
    b_x = tl.load(p_g, mask=m_g, other=0.0).to(tl.float32)
    tl.store(p_out, log_decay(b_x + b_bias[None, :], b_a, lower_bound), mask=m_g)
    if beta is not None:
        if i_k == 0:
            p_beta = beta + i_b * beta_b + first * beta_t + i_h * beta_h + o_t * beta_t
            b_beta = tl.sigmoid(tl.load(p_beta, mask=o_t < n_t, other=0.0).to(tl.float32)) * beta_scale
            tl.store(beta_out + (i_b * T + first + o_t) * HV + i_h, b_beta, mask=o_t < n_t)


def layout(g, out, beta):
    """(programs, T, HV, the nine strides): what ``launch`` needs of shapes and strides; callers may keep it."""
    B, T, HV, _ = g.shape
    tiles = B * ((T + 0) // 1)
    beta_strides = (0, 0, 0) if beta is None else beta.stride()
    return tiles * HV * 1, T, HV, (*g.stride()[:3], *out.stride()[:3], *beta_strides)


def launch(
    g, A_log, dt_bias, lower_bound, out, beta, beta_out, beta_scale, *,
    kept=None, num_warps=1, num_stages=1,
):
    """Write ``out`` [B, T, HV, 128] fp32 and, unless beta is None, ``beta_out`` [B, T, HV] fp32 (contiguous).

    g [B, T, HV, 128] with unit stride in K; A_log [HV], dt_bias [HV, 128] contiguous, or None; lower_bound a float,
    None for the softplus form; beta [B, T, HV] raw, any strides, beta_scale 1.0 or 2.0.
    ``kept``: ``layout(...)`` of an earlier call with the same shapes and strides. Returns the compiled kernel, or None if
    there is nothing to do.
    """
    programs, T, HV, strides = kept or layout(g, out, beta)
    if not programs:
        return None
    return gate_kernel[(programs,)](
        g, A_log, dt_bias, out, beta, beta_out, lower_bound, beta_scale, T, *strides,
        HV=HV, num_warps=num_warps, num_stages=num_stages,
    )

# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: decode_step.py.j2
# variant:  decode_step__k128_v128_fp32__bv32
# inputs:   5e362dc9064ec16cbbf7f43e1de7858f2ebdd3ab652db0504e33e519bd4cf039

"""The fused decode step, K = 128, V = 128: convolution, L2 norm, gate, recurrence and gated RMSNorm in one launch.

One token a sequence. Each program owns one sequence and one q/k head with its value heads: it holds a whole state, in
4 tiles [BV, BK], because the norm needs all of V, and owns the head's channels of the convolution, so that their history
moves on exactly once. It reads the packed projection in place.
"""

import torch
import triton
import triton.language as tl

SPEC = {'family': 'decode_step', 'k': 128, 'v': 128, 'dtype': 'fp32'}
SCHEDULE = {'bv': 32}


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


@triton.jit
def split_decay(b_g):
    """exp(g) = high + low, to more digits than one fp32 has: near g = 0 high is 1 and low is expm1(g).

    Rounding 0.9999 to fp32 alone is off by 3e-8, always to the same side: 1e-4 after 4,096 steps.
    """
    b_slow = tl.abs(b_g) < 0.25
    b_p = 1 / 6 + b_g * (1 / 24 + b_g * (1 / 120 + b_g * (1 / 720)))
    b_low = b_g * (1.0 + b_g * (0.5 + b_g * b_p))
    return tl.where(b_slow, 1.0, tl.exp(b_g)), tl.where(b_slow, b_low, 0.0)


@triton.jit
def l2norm(b_x):
    return b_x * tl.rsqrt(tl.sum(b_x * b_x) + 1e-6)


@triton.jit
def delta_step(b_s, b_q, b_k, b_v, b_g, b_beta):
    """One token on a state tile [BV, BK]: (new tile, o of the tile's rows of V). All fp32; q carries the scale."""
    b_high, b_low = split_decay(b_g)
    b_s = b_s * b_high[None, :] + b_s * b_low[None, :]  # S <- diag(exp(g)) S
    b_u = (b_v - tl.sum(b_s * b_k[None, :], 1)) * b_beta
    b_s += b_k[None, :] * b_u[:, None]  # S <- S + beta k (v - S^T k)^T
    return b_s, tl.sum(b_s * b_q[None, :], 1)  # o = scale S^T q


@triton.jit
def load_window(p_x, p_line, line_c, first, d_c, m_c, keep, W: tl.constexpr):
    """The last W inputs of channels d_c, oldest first: [channels, W], W - 1 of the history's line and the new one."""
    d_w = tl.arange(0, 4)
    m_history = m_c[:, None] & (d_w < W - 1)[None, :] & keep
    b_history = tl.load(p_line + (first + d_w)[None, :] * line_c + d_c[:, None], mask=m_history, other=0).to(tl.float32)
    b_x = tl.load(p_x + d_c, mask=m_c, other=0).to(tl.float32)
    return tl.where((d_w == W - 1)[None, :], b_x[:, None], b_history)


@triton.jit
def convolve(b_window, weight, bias, d_c, m_c, W: tl.constexpr):
    """SiLU(sum_w weight[c, w] window[c, w] + bias[c]): [channels]."""
    d_w = tl.arange(0, 4)
    m_w = m_c[:, None] & (d_w < W)[None, :]
    b_y = tl.sum(b_window * tl.load(weight + d_c[:, None] * W + d_w[None, :], mask=m_w, other=0).to(tl.float32), 1)
    if bias is not None:
        b_y += tl.load(bias + d_c, mask=m_c, other=0).to(tl.float32)
    return b_y * tl.sigmoid(b_y)


@triton.jit
def store_window(b_window, p_line, line_c, d_c, m_c, live, W: tl.constexpr):
    """The newest W - 1 inputs are the history of the next step, from column 0 on."""
    d_w = tl.arange(0, 4)
    m_w = m_c[:, None] & ((d_w > 0) & (d_w < W))[None, :] & live
    p_next = p_line + (d_w - 1)[None, :] * line_c + d_c[:, None]
    tl.store(p_next, b_window.to(p_line.dtype.element_ty), mask=m_w)


# batch and slot counts differ from engine to engine, and step to step: no new binary for them
@triton.jit(do_not_specialize=["slots", "pad_slot", "beta_n", "index_n", "index_t"])
def decode_step_kernel(
    qkv, z, g, beta, o,  # a row a sequence: [2 * H * K + HV * V] before the convolution, [HV * V], [HV * K], [HV], [HV * V]
    conv_pool, conv_weight, conv_bias,  # [slots, LINE, channels], [channels, 4], [channels] or None
    pool,  # [slots, HV, 128, 128]
    state_indices, num_accepted, has_initial,  # [N] or [N, COLUMNS], [N] or None, [N] or None
    A_log, dt_bias, norm_weight, scale, lower_bound, eps, slots, pad_slot,
    qkv_n, z_n, g_n, beta_n, o_n, line_n, line_c, pool_n, index_n, index_t,
    H: tl.constexpr, HV: tl.constexpr,
    LINE: tl.constexpr,  # columns of a line of the convolution: 3 + speculative tokens
    COLUMNS: tl.constexpr,  # of the index table: 0 if it is [N]
    BETA_SCALE: tl.constexpr,
):
    K: tl.constexpr = 128
    V: tl.constexpr = 128
    BK: tl.constexpr = 128
    BV: tl.constexpr = 32
    W: tl.constexpr = 4
    i_h = tl.program_id(0) % H
    i_n = (tl.program_id(0) // H).to(tl.int64)
    d_k = tl.arange(0, BK)
    d_v = tl.arange(0, 128)
    m_k = d_k < K
    m_v = d_v < V

    # the history of the convolution is the slot in column 0, the state to start from that of the last accepted token
    i_line = tl.load(state_indices + i_n * index_n).to(tl.int64)
    i_s = i_line
    first = 0
    if num_accepted is not None:
        accepted = tl.maximum(tl.load(num_accepted + i_n), 1).to(tl.int32)
        first = tl.minimum(accepted, LINE - W + 2) - 1
        if COLUMNS > 0:
            i_s = tl.load(state_indices + i_n * index_n + (tl.minimum(accepted, COLUMNS) - 1) * index_t).to(tl.int64)
    # a slot that is no slot is padding: no access to the pools, output 0
    live = (i_s >= 0) & (i_s < slots) & (i_s != pad_slot) & (i_line >= 0) & (i_line < slots) & (i_line != pad_slot)
    keep = live
    if has_initial is not None:
        keep = live & (tl.load(has_initial + i_n) != 0)
    p_line = conv_pool + i_line * line_n
    p_x = qkv + i_n * qkv_n
    c_q = i_h * K + d_k
    c_k = H * K + c_q
    b_window_q = load_window(p_x, p_line, line_c, first, c_q, m_k, keep, W)
    b_window_k = load_window(p_x, p_line, line_c, first, c_k, m_k, keep, W)

    for i_g in range(HV // H):
        i_hv = i_h * (HV // H) + i_g
        c_v = 2 * H * K + i_hv * V + d_v
        # all loads come first, the state's in tiles of V
        d_v0 = 0 * BV + tl.arange(0, BV)
        d_s0 = i_hv * (K * V) + d_v0[:, None] * K + d_k[None, :]
        m_s0 = m_k[None, :] & (d_v0 < V)[:, None] & live
        b_s0 = tl.load(pool + i_s * pool_n + d_s0, mask=m_s0 & keep, other=0).to(tl.float32)
        d_v1 = 1 * BV + tl.arange(0, BV)
        d_s1 = i_hv * (K * V) + d_v1[:, None] * K + d_k[None, :]
        m_s1 = m_k[None, :] & (d_v1 < V)[:, None] & live
        b_s1 = tl.load(pool + i_s * pool_n + d_s1, mask=m_s1 & keep, other=0).to(tl.float32)
        d_v2 = 2 * BV + tl.arange(0, BV)
        d_s2 = i_hv * (K * V) + d_v2[:, None] * K + d_k[None, :]
        m_s2 = m_k[None, :] & (d_v2 < V)[:, None] & live
        b_s2 = tl.load(pool + i_s * pool_n + d_s2, mask=m_s2 & keep, other=0).to(tl.float32)
        d_v3 = 3 * BV + tl.arange(0, BV)
        d_s3 = i_hv * (K * V) + d_v3[:, None] * K + d_k[None, :]
        m_s3 = m_k[None, :] & (d_v3 < V)[:, None] & live
        b_s3 = tl.load(pool + i_s * pool_n + d_s3, mask=m_s3 & keep, other=0).to(tl.float32)
        b_window_v = load_window(p_x, p_line, line_c, first, c_v, m_v, keep, W)
        b_z = tl.load(z + i_n * z_n + i_hv * V + d_v, mask=m_v, other=0).to(tl.float32)
        b_scale = tl.load(norm_weight + d_v, mask=m_v, other=0).to(tl.float32) * tl.sigmoid(b_z)
        b_g = tl.load(g + i_n * g_n + i_hv * K + d_k, mask=m_k, other=0).to(tl.float32)
        b_beta = BETA_SCALE * tl.sigmoid(tl.load(beta + i_n * beta_n + i_hv).to(tl.float32))
        b_a = 1.0
        if A_log is not None:
            b_a = tl.exp(tl.load(A_log + i_hv).to(tl.float32))
        if dt_bias is not None:
            b_g += tl.load(dt_bias + i_hv * K + d_k, mask=m_k, other=0).to(tl.float32)
        b_g = log_decay(b_g, b_a, lower_bound)

        # convolution, L2 norm
        b_q = l2norm(convolve(b_window_q, conv_weight, conv_bias, c_q, m_k, W)) * scale
        b_k = l2norm(convolve(b_window_k, conv_weight, conv_bias, c_k, m_k, W))
        b_v = convolve(b_window_v, conv_weight, conv_bias, c_v, m_v, W)
        tl.debug_barrier()  # several threads may hold a channel: all have read its history before any writes it
        store_window(b_window_q, p_line, line_c, c_q, m_k, live, W)
        store_window(b_window_k, p_line, line_c, c_k, m_k, live, W)
        store_window(b_window_v, p_line, line_c, c_v, m_v, live, W)

        # recurrence; the state goes to the slot of column 0. Vectors along V are gathered tile by tile: a broadcast would
        # keep all of them, and what they were computed from, in the registers of every thread of a row
        b_square = tl.zeros([BV], tl.float32)
        b_v0 = tl.gather(b_v, d_v0, 0)
        b_s0, b_o0 = delta_step(b_s0, b_q, b_k, b_v0, b_g, b_beta)
        b_square += b_o0 * b_o0
        tl.store(pool + i_line * pool_n + d_s0, b_s0.to(pool.dtype.element_ty), mask=m_s0)
        b_v1 = tl.gather(b_v, d_v1, 0)
        b_s1, b_o1 = delta_step(b_s1, b_q, b_k, b_v1, b_g, b_beta)
        b_square += b_o1 * b_o1
        tl.store(pool + i_line * pool_n + d_s1, b_s1.to(pool.dtype.element_ty), mask=m_s1)
        b_v2 = tl.gather(b_v, d_v2, 0)
        b_s2, b_o2 = delta_step(b_s2, b_q, b_k, b_v2, b_g, b_beta)
        b_square += b_o2 * b_o2
        tl.store(pool + i_line * pool_n + d_s2, b_s2.to(pool.dtype.element_ty), mask=m_s2)
        b_v3 = tl.gather(b_v, d_v3, 0)
        b_s3, b_o3 = delta_step(b_s3, b_q, b_k, b_v3, b_g, b_beta)
        b_square += b_o3 * b_o3
        tl.store(pool + i_line * pool_n + d_s3, b_s3.to(pool.dtype.element_ty), mask=m_s3)
        # gated RMSNorm over V
        b_r = tl.rsqrt(tl.sum(b_square) / V + eps)
        b_o0 = tl.where(live, b_o0 * b_r * tl.gather(b_scale, d_v0, 0), 0.0)
        tl.store(o + i_n * o_n + i_hv * V + d_v0, b_o0.to(o.dtype.element_ty), mask=d_v0 < V)
        b_o1 = tl.where(live, b_o1 * b_r * tl.gather(b_scale, d_v1, 0), 0.0)
        tl.store(o + i_n * o_n + i_hv * V + d_v1, b_o1.to(o.dtype.element_ty), mask=d_v1 < V)
        b_o2 = tl.where(live, b_o2 * b_r * tl.gather(b_scale, d_v2, 0), 0.0)
        tl.store(o + i_n * o_n + i_hv * V + d_v2, b_o2.to(o.dtype.element_ty), mask=d_v2 < V)
        b_o3 = tl.where(live, b_o3 * b_r * tl.gather(b_scale, d_v3, 0), 0.0)
        tl.store(o + i_n * o_n + i_hv * V + d_v3, b_o3.to(o.dtype.element_ty), mask=d_v3 < V)
def strides(qkv, z, g, beta, o, conv_pool, pool, state_indices):
    """The 10 strides that the kernel takes, in elements; the same for all tensors of the same layout."""
    rows = [x.stride(0) for x in (qkv, z, g, beta, o)]
    return (*rows, conv_pool.stride(0), conv_pool.stride(1), pool.stride(0), *(*state_indices.stride(), 0)[:2])


def launch(
    qkv, z, g, beta, o, conv_pool, conv_weight, conv_bias, pool, state_indices, num_accepted, has_initial, A_log, dt_bias,
    norm_weight, scale, lower_bound, eps, *, heads, pad_slot=-1, beta_scale=1.0, layout=None,
    num_warps=8, num_stages=1,
):
    """Launch on the current device and stream.

    qkv [N, 2 * heads * 128 + HV * 128], z [N, HV * 128], g [N, HV * 128], beta [N, HV], rows
    contiguous; o [N, HV, 128], its last two dimensions contiguous; qkv, o fp32.
    conv_pool [slots, 3 + k, channels], channels contiguous; conv_weight [channels, 4]; pool [slots, HV,
    128, 128] fp32, bf16 or fp16, contiguous but for the first stride; state_indices [N] or [N, 1 + k], any strides;
    num_accepted, has_initial [N] or None; A_log [HV] or None; dt_bias [HV, 128] or None; norm_weight [128].
    layout: what ``strides`` gave, if kept.
    """
    N = qkv.shape[0]
    if N == 0:
        return
    decode_step_kernel[(N * heads,)](
        qkv, z, g, beta, o, conv_pool, conv_weight, conv_bias, pool, state_indices, num_accepted, has_initial,
        A_log, dt_bias, norm_weight, scale, lower_bound, eps, min(pool.shape[0], conv_pool.shape[0]), pad_slot,
        *(layout or strides(qkv, z, g, beta, o, conv_pool, pool, state_indices)),
        H=heads, HV=beta.shape[1], LINE=conv_pool.shape[1],
        COLUMNS=state_indices.shape[1] if state_indices.dim() == 2 else 0, BETA_SCALE=beta_scale,
        num_warps=num_warps, num_stages=num_stages,
    )

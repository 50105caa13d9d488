# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: decode_step.py.j2
# variant:  decode_step__k128_v128_fp16__bv32_regs128
# inputs:   3b7b692bcea8165426f5d351d1def2182fc5ab1b2688dd5665374fa9d00ad02e

"""The fused decode step, K = 128, V = 128: convolution, L2 norm, gate, recurrence and gated RMSNorm in one launch.

One token a sequence. Each program owns one sequence and one q/k head with its value heads: it holds a whole state, in
4 tiles [BV, BK], because the norm needs all of V, and owns the head's channels of the convolution, so that their history
moves on exactly once. It reads the packed projection in place.
"""

import torch
import triton
import triton.language as tl

SPEC = {'family': 'decode_step', 'k': 128, 'v': 128, 'dtype': 'fp16'}
SCHEDULE = {'bv': 32, 'regs': 128}


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
    BC: tl.constexpr = 128
    i_h = tl.program_id(0) % H
    i_n = (tl.program_id(0) // H).to(tl.int64)
    d_k = tl.arange(0, BK)
    d_v = tl.arange(0, 128)
    m_k = d_k < K
    m_v = d_v < V

    # The slots come from memory, and the pools' addresses from them: what does not depend on them is loaded first.
    # The history of the convolution is in the slot of column 0, the state to start from in that of the last accepted token.
    i_line = tl.load(state_indices + i_n * index_n).to(tl.int64)
    i_s = i_line
    first = 0
    if num_accepted is not None:
        accepted = tl.maximum(tl.load(num_accepted + i_n), 1).to(tl.int32)
        first = tl.minimum(accepted, LINE - 2) - 1
        if COLUMNS > 0:
            i_s = tl.load(state_indices + i_n * index_n + (tl.minimum(accepted, COLUMNS) - 1) * index_t).to(tl.int64)
    # a slot that is no slot is padding: no access to the pools, output 0
    live = (i_s >= 0) & (i_s < slots) & (i_s != pad_slot) & (i_line >= 0) & (i_line < slots) & (i_line != pad_slot)
    keep = live
    if has_initial is not None:
        keep = live & (tl.load(has_initial + i_n) != 0)
    p_line = conv_pool + i_line * line_n
    p_x = qkv + i_n * qkv_n

    for i_g in range(HV // H):
        i_hv = i_h * (HV // H) + i_g
        # all loads come first, those of the state, in tiles of V, before all others
        d_v0 = 0 * BV + tl.arange(0, BV)
        p_s0 = i_hv * (K * V) + d_v0[:, None] * K + d_k[None, :]
        m_s0 = m_k[None, :] & (d_v0 < V)[:, None] & live
        b_s0 = tl.load(pool + i_s * pool_n + p_s0, mask=m_s0 & keep, other=0, eviction_policy="evict_first")
        d_v1 = 1 * BV + tl.arange(0, BV)
        p_s1 = i_hv * (K * V) + d_v1[:, None] * K + d_k[None, :]
        m_s1 = m_k[None, :] & (d_v1 < V)[:, None] & live
        b_s1 = tl.load(pool + i_s * pool_n + p_s1, mask=m_s1 & keep, other=0, eviction_policy="evict_first")
        d_v2 = 2 * BV + tl.arange(0, BV)
        p_s2 = i_hv * (K * V) + d_v2[:, None] * K + d_k[None, :]
        m_s2 = m_k[None, :] & (d_v2 < V)[:, None] & live
        b_s2 = tl.load(pool + i_s * pool_n + p_s2, mask=m_s2 & keep, other=0, eviction_policy="evict_first")
        d_v3 = 3 * BV + tl.arange(0, BV)
        p_s3 = i_hv * (K * V) + d_v3[:, None] * K + d_k[None, :]
        m_s3 = m_k[None, :] & (d_v3 < V)[:, None] & live
        b_s3 = tl.load(pool + i_s * pool_n + p_s3, mask=m_s3 & keep, other=0, eviction_policy="evict_first")
        # q, k, v as one vector: the history, oldest first, the new input, and the weights
        d_c = tl.arange(0, 4 * BC)
        i_c = d_c // BC  # 0 for q, 1 for k, 2 for v
        d_c = d_c % BC
        m_c = (d_c < tl.where(i_c == 2, V, K)) & (i_c < 3)
        d_c += tl.where(i_c == 2, 2 * H * K + i_hv * V, i_c * (H * K) + i_h * K)
        b_x0 = tl.load(p_line + (first + 0) * line_c + d_c, mask=m_c & keep, other=0)
        b_x1 = tl.load(p_line + (first + 1) * line_c + d_c, mask=m_c & keep, other=0)
        b_x2 = tl.load(p_line + (first + 2) * line_c + d_c, mask=m_c & keep, other=0)
        b_x3 = tl.load(p_x + d_c, mask=m_c, other=0)
        b_w0 = tl.load(conv_weight + d_c * 4 + 0, mask=m_c, other=0)
        b_w1 = tl.load(conv_weight + d_c * 4 + 1, mask=m_c, other=0)
        b_w2 = tl.load(conv_weight + d_c * 4 + 2, mask=m_c, other=0)
        b_w3 = tl.load(conv_weight + d_c * 4 + 3, mask=m_c, other=0)
        b_g = tl.load(g + i_n * g_n + i_hv * K + d_k, mask=m_k, other=0).to(tl.float32)
        b_beta = tl.load(beta + i_n * beta_n + i_hv).to(tl.float32)
        b_a = 1.0
        if A_log is not None:
            b_a = tl.exp(tl.load(A_log + i_hv).to(tl.float32))
        if dt_bias is not None:
            b_g += tl.load(dt_bias + i_hv * K + d_k, mask=m_k, other=0).to(tl.float32)
        b_z = tl.load(z + i_n * z_n + i_hv * V + d_v, mask=m_v, other=0).to(tl.float32)
        b_norm = tl.load(norm_weight + d_v, mask=m_v, other=0).to(tl.float32)

        # convolution and SiLU
        b_c = b_x0.to(tl.float32) * b_w0.to(tl.float32)
        b_c += b_x1.to(tl.float32) * b_w1.to(tl.float32)
        b_c += b_x2.to(tl.float32) * b_w2.to(tl.float32)
        b_c += b_x3.to(tl.float32) * b_w3.to(tl.float32)
        if conv_bias is not None:
            b_c += tl.load(conv_bias + d_c, mask=m_c, other=0).to(tl.float32)
        b_c = b_c * tl.sigmoid(b_c)
        # the history moves up by one column, that of q and k with the last value head that reads it; several threads may
        # hold a channel: all have read it before any writes it
        m_c = m_c & live & ((i_c == 2) | (i_g == HV // H - 1))
        tl.debug_barrier()
        tl.store(p_line + 0 * line_c + d_c, b_x1.to(conv_pool.dtype.element_ty), mask=m_c)
        tl.store(p_line + 1 * line_c + d_c, b_x2.to(conv_pool.dtype.element_ty), mask=m_c)
        tl.store(p_line + 2 * line_c + d_c, b_x3.to(conv_pool.dtype.element_ty), mask=m_c)
        # Vectors are gathered into the layout of the state's tiles: a mere broadcast would have every warp compute them
        # from the start, and keep them, and what they were computed from, in the registers of each thread of a row
        b_q = tl.gather(b_c, d_k, 0)
        b_k = tl.gather(b_c, BC + d_k, 0)
        b_high, b_low = split_decay(log_decay(b_g, b_a, lower_bound))
        b_beta = BETA_SCALE * tl.sigmoid(b_beta)
        b_z = b_norm * tl.sigmoid(b_z)
        # 1 / |q|, 1 / |k|, once for each row of a tile: these sums stay within a warp
        b_rq = tl.rsqrt(tl.sum(tl.broadcast_to((b_q * b_q)[None, :], [BV, BK]), 1) + 1e-6) * scale
        b_rk = tl.rsqrt(tl.sum(tl.broadcast_to((b_k * b_k)[None, :], [BV, BK]), 1) + 1e-6)

        # recurrence; the state goes to the slot of column 0
        b_square = tl.zeros([BV], tl.float32)
        b_s = b_s0.to(tl.float32)  # [BV, BK]
        b_s = b_s * b_high[None, :] + b_s * b_low[None, :]  # S <- diag(exp(g)) S
        b_v = tl.gather(b_c, 2 * BC + d_v0, 0)
        b_u = (b_v - tl.sum(b_s * b_k[None, :], 1) * b_rk) * (b_beta * b_rk)
        b_s += b_k[None, :] * b_u[:, None]  # S <- S + beta k (v - S^T k)^T
        b_o0 = tl.sum(b_s * b_q[None, :], 1) * b_rq  # o = scale S^T q
        b_square += b_o0 * b_o0
        p_w = pool + i_line * pool_n + p_s0
        tl.store(p_w, b_s.to(pool.dtype.element_ty), mask=m_s0, eviction_policy="evict_first")
        b_s = b_s1.to(tl.float32)  # [BV, BK]
        b_s = b_s * b_high[None, :] + b_s * b_low[None, :]  # S <- diag(exp(g)) S
        b_v = tl.gather(b_c, 2 * BC + d_v1, 0)
        b_u = (b_v - tl.sum(b_s * b_k[None, :], 1) * b_rk) * (b_beta * b_rk)
        b_s += b_k[None, :] * b_u[:, None]  # S <- S + beta k (v - S^T k)^T
        b_o1 = tl.sum(b_s * b_q[None, :], 1) * b_rq  # o = scale S^T q
        b_square += b_o1 * b_o1
        p_w = pool + i_line * pool_n + p_s1
        tl.store(p_w, b_s.to(pool.dtype.element_ty), mask=m_s1, eviction_policy="evict_first")
        b_s = b_s2.to(tl.float32)  # [BV, BK]
        b_s = b_s * b_high[None, :] + b_s * b_low[None, :]  # S <- diag(exp(g)) S
        b_v = tl.gather(b_c, 2 * BC + d_v2, 0)
        b_u = (b_v - tl.sum(b_s * b_k[None, :], 1) * b_rk) * (b_beta * b_rk)
        b_s += b_k[None, :] * b_u[:, None]  # S <- S + beta k (v - S^T k)^T
        b_o2 = tl.sum(b_s * b_q[None, :], 1) * b_rq  # o = scale S^T q
        b_square += b_o2 * b_o2
        p_w = pool + i_line * pool_n + p_s2
        tl.store(p_w, b_s.to(pool.dtype.element_ty), mask=m_s2, eviction_policy="evict_first")
        b_s = b_s3.to(tl.float32)  # [BV, BK]
        b_s = b_s * b_high[None, :] + b_s * b_low[None, :]  # S <- diag(exp(g)) S
        b_v = tl.gather(b_c, 2 * BC + d_v3, 0)
        b_u = (b_v - tl.sum(b_s * b_k[None, :], 1) * b_rk) * (b_beta * b_rk)
        b_s += b_k[None, :] * b_u[:, None]  # S <- S + beta k (v - S^T k)^T
        b_o3 = tl.sum(b_s * b_q[None, :], 1) * b_rq  # o = scale S^T q
        b_square += b_o3 * b_o3
        p_w = pool + i_line * pool_n + p_s3
        tl.store(p_w, b_s.to(pool.dtype.element_ty), mask=m_s3, eviction_policy="evict_first")
        # gated RMSNorm over V
        b_r = tl.rsqrt(tl.sum(b_square) / V + eps)
        b_o0 = tl.where(live, b_o0 * b_r * tl.gather(b_z, d_v0, 0), 0.0)
        tl.store(o + i_n * o_n + i_hv * V + d_v0, b_o0.to(o.dtype.element_ty), mask=d_v0 < V)
        b_o1 = tl.where(live, b_o1 * b_r * tl.gather(b_z, d_v1, 0), 0.0)
        tl.store(o + i_n * o_n + i_hv * V + d_v1, b_o1.to(o.dtype.element_ty), mask=d_v1 < V)
        b_o2 = tl.where(live, b_o2 * b_r * tl.gather(b_z, d_v2, 0), 0.0)
        tl.store(o + i_n * o_n + i_hv * V + d_v2, b_o2.to(o.dtype.element_ty), mask=d_v2 < V)
        b_o3 = tl.where(live, b_o3 * b_r * tl.gather(b_z, d_v3, 0), 0.0)
        tl.store(o + i_n * o_n + i_hv * V + d_v3, b_o3.to(o.dtype.element_ty), mask=d_v3 < V)
def scalars(qkv, z, g, beta, o, conv_pool, pool, state_indices, scale, lower_bound, eps, pad_slot):
    """All that follows the pointers in the kernel's signature, up to its constants; the same for tensors of one layout."""
    rows = [x.stride(0) for x in (qkv, z, g, beta, o)]
    return (
        scale, lower_bound, eps, min(pool.shape[0], conv_pool.shape[0]), pad_slot, *rows,
        conv_pool.stride(0), conv_pool.stride(1), pool.stride(0), *(*state_indices.stride(), 0)[:2],
    )


def launch(
    qkv, z, g, beta, o, conv_pool, conv_weight, conv_bias, pool, state_indices, num_accepted, has_initial, A_log, dt_bias,
    norm_weight, scale, lower_bound, eps, *, heads, pad_slot=-1, beta_scale=1.0,
    num_warps=8, num_stages=1,
):
    """Launch on the current device and stream; returns the compiled kernel, or None if there is nothing to do.

    qkv [N, 2 * heads * 128 + HV * 128], z [N, HV * 128], g [N, HV * 128], beta [N, HV], rows
    contiguous; o [N, HV, 128], its last two dimensions contiguous; qkv, o fp16.
    conv_pool [slots, 3 + k, channels], channels contiguous; conv_weight [channels, 4]; pool [slots, HV,
    128, 128] fp32, bf16 or fp16, contiguous but for the first stride; state_indices [N] or [N, 1 + k], any strides;
    num_accepted, has_initial [N] or None; A_log [HV] or None; dt_bias [HV, 128] or None; norm_weight [128].
    """
    N = qkv.shape[0]
    if N == 0:
        return None
    return decode_step_kernel[(N * heads,)](
        qkv, z, g, beta, o, conv_pool, conv_weight, conv_bias, pool, state_indices, num_accepted, has_initial,
        A_log, dt_bias, norm_weight,
        *scalars(qkv, z, g, beta, o, conv_pool, pool, state_indices, scale, lower_bound, eps, pad_slot),
        H=heads, HV=beta.shape[1], LINE=conv_pool.shape[1],
        COLUMNS=state_indices.shape[1] if state_indices.dim() == 2 else 0, BETA_SCALE=beta_scale,
        num_warps=num_warps, num_stages=num_stages, maxnreg=128,
    )

# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: decode_step.py.j2
# variant:  decode_step__k128_v128_bf16__bv16_regs0_rows16
# inputs:   d5eeb7b0a547fd0e034b0a5206f624988af5378a4d118e6e320b28b16de58040

"""The fused decode step, K = 128, V = 128: convolution, norms, gate and recurrence in one launch.

One token a sequence, read where the packed projection lies. A program owns one tile [BV, BK] of a state, 16 of its
columns in V, and computes the convolution of its q and k itself.
What needs all programs of a sequence and q/k head, the norm over V and the history of q and k, which all of them read, is
done by the last of them to arrive; none waits.
"""

import torch
import triton
import triton.language as tl

SPEC = {'family': 'decode_step', 'k': 128, 'v': 128, 'dtype': 'bf16'}
SCHEDULE = {'bv': 16, 'regs': 0, 'rows': 16}


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
def pack(b_x, b_y):
    """Two fp32 vectors as one, so that they change their layout together."""
    return b_x.to(tl.uint32, bitcast=True).to(tl.uint64) | (b_y.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)


@triton.jit
def unpack(b_xy):
    return b_xy.to(tl.uint32).to(tl.float32, bitcast=True), (b_xy >> 32).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def three_sums(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def convolve(x0, x1, x2, x3, w, b_x):
    """SiLU of the convolution of channels: their inputs, oldest first, weights w [channels, 4], bias b_x."""
    w02, w13 = tl.split(tl.reshape(w, [w.shape[0], 2, 2]))
    w0, w2 = tl.split(w02)
    w1, w3 = tl.split(w13)
    b_x += x0.to(tl.float32) * w0.to(tl.float32)
    b_x += x1.to(tl.float32) * w1.to(tl.float32)
    b_x += x2.to(tl.float32) * w2.to(tl.float32)
    b_x += x3.to(tl.float32) * w3.to(tl.float32)
    return b_x * tl.sigmoid(b_x)


@triton.jit
def store_history(p_line, line_c, c, x1, x2, x3, mask):
    """The channels c of a line, moved up by one column."""
    tl.store(p_line + 0 * line_c + c, x1.to(p_line.dtype.element_ty), mask=mask)
    tl.store(p_line + 1 * line_c + c, x2.to(p_line.dtype.element_ty), mask=mask)
    tl.store(p_line + 2 * line_c + c, x3.to(p_line.dtype.element_ty), mask=mask)


@triton.jit
def step(b_s, b_v, b_q, b_k, b_high, b_low, b_rq, b_rk, b_qk, b_beta):
    """One token on a state tile [BV, BK]: (new tile, o of its columns of V).

    S <- diag(exp(g)) S, u = beta (v - S^T k), S <- S + k u^T, o = scale S^T q. q and k come without their factors, b_rq and
    b_rk, and beta with that of k. Both products are taken with the state before u, as S^T q + (k . q) u is the same: o does
    not wait for the new state.
    """
    b_s = b_s * b_high[None, :] + b_s * b_low[None, :]
    b_u = (b_v - tl.sum(b_s * b_k[None, :], 1) * b_rk) * b_beta
    b_o = (tl.sum(b_s * b_q[None, :], 1) + b_qk * b_u) * b_rq
    return b_s + b_k[None, :] * b_u[:, None], b_o


@triton.jit
def inverse_norm(b_y, b_eps):
    """1 / sqrt(mean of y^2 + eps), as [1]. The sum adds halves to halves: one order, however y lies in the threads."""
    b_r = tl.fma(b_y, b_y, b_eps)  # with eps, as the compiler may fuse a square alone with the first addition, or not
    b_r = tl.sum(tl.reshape(b_r, [2, 64]), 0)
    b_r = tl.sum(tl.reshape(b_r, [2, 32]), 0)
    b_r = tl.sum(tl.reshape(b_r, [2, 16]), 0)
    b_r = tl.sum(tl.reshape(b_r, [2, 8]), 0)
    b_r = tl.sum(tl.reshape(b_r, [2, 4]), 0)
    b_r = tl.sum(tl.reshape(b_r, [2, 2]), 0)
    b_r = tl.sum(tl.reshape(b_r, [2, 1]), 0)
    return tl.rsqrt(b_r / 128)


# batch and slot counts differ from engine to engine, and step to step: no new binary for them
@triton.jit(do_not_specialize=["slots", "pad_slot", "beta_n", "index_n", "index_t"])
def decode_step_kernel(
    qkv, z, g, beta, o,  # a row a sequence: [2 * H * K + HV * V] before the convolution, [HV * V], [HV * K], [HV], [HV * V]
    conv_pool, conv_weight, conv_bias,  # [slots, LINE, channels], [channels, 4], [channels] or None
    pool,  # [slots, HV, 128, 128]
    state_indices, num_accepted, has_initial,  # [N] or [N, COLUMNS], [N] or None, [N] or None
    A_log, dt_bias, norm_weight,
    arrivals,  # [N, H] zeros, zeros again at the end; None if a program is alone
    o_raw,  # [N, HV, V] fp32, o before its norm; None if a program has all of V
    scale, lower_bound, eps, slots, pad_slot,
    qkv_n, z_n, g_n, beta_n, o_n, line_n, line_c, pool_n, index_n, index_t,
    H: tl.constexpr, HV: tl.constexpr,
    LINE: tl.constexpr,  # columns of a line of the convolution: 3 + speculative tokens
    COLUMNS: tl.constexpr,  # of the index table: 0 if it is [N]
    BETA_SCALE: tl.constexpr,
):
    K: tl.constexpr = 128
    V: tl.constexpr = 128
    BK: tl.constexpr = 128
    BV: tl.constexpr = 16  # columns of V of a tile
    ROWS: tl.constexpr = 16  # ... of a program
    NP: tl.constexpr = 8
    GROUP: tl.constexpr = NP * (HV // H)  # programs of a sequence and q/k head
    i_v = tl.program_id(0) % NP * ROWS
    i_hv = tl.program_id(0) // NP % HV
    i_n = (tl.program_id(0) // (NP * HV)).to(tl.int64)
    i_h = i_hv // (HV // H)
    d_k = tl.arange(0, BK)
    d_r = tl.arange(0, ROWS)
    d_v = i_v + d_r
    m_k = d_k < K
    m_v = d_v < V

    # The slots come from memory, and the pools' addresses from them: what does not depend on them is loaded meanwhile.
    # The history of the convolution is in the slot of column 0, the state to start from in that of the last accepted token.
    i_line = tl.load(state_indices + i_n * index_n).to(tl.int64)
    i_s = i_line
    first = 0
    if num_accepted is not None:
        accepted = tl.maximum(tl.load(num_accepted + i_n), 1)
        first = tl.minimum(accepted, LINE - 2).to(tl.int32) - 1
        if COLUMNS > 0:
            column = tl.minimum(accepted, COLUMNS).to(tl.int32) - 1
            i_s = tl.load(state_indices + i_n * index_n + column * index_t).to(tl.int64)
    # a slot that is no slot is padding: no access to the pools, output 0
    live = (i_s >= 0) & (i_s < slots) & (i_s != pad_slot) & (i_line >= 0) & (i_line < slots) & (i_line != pad_slot)
    keep = live
    if has_initial is not None:
        keep = live & (tl.load(has_initial + i_n) != 0)

    # the new input of the channels of q, k and v, and the weights of their convolution
    c_q = i_h * K + d_k
    c_k = (H + i_h) * K + d_k
    c_v = 2 * H * K + i_hv * V + d_v
    d_w = tl.arange(0, 4)[None, :]
    x_q3 = tl.load(qkv + i_n * qkv_n + c_q, mask=m_k, other=0)
    w_q = tl.load(conv_weight + c_q[:, None] * 4 + d_w, mask=m_k[:, None], other=0)
    b_q = 0.0
    if conv_bias is not None:
        b_q = tl.load(conv_bias + c_q, mask=m_k, other=0).to(tl.float32)
    x_k3 = tl.load(qkv + i_n * qkv_n + c_k, mask=m_k, other=0)
    w_k = tl.load(conv_weight + c_k[:, None] * 4 + d_w, mask=m_k[:, None], other=0)
    b_k = 0.0
    if conv_bias is not None:
        b_k = tl.load(conv_bias + c_k, mask=m_k, other=0).to(tl.float32)
    x_v3 = tl.load(qkv + i_n * qkv_n + c_v, mask=m_v, other=0)
    w_v = tl.load(conv_weight + c_v[:, None] * 4 + d_w, mask=m_v[:, None], other=0)
    b_v = 0.0
    if conv_bias is not None:
        b_v = tl.load(conv_bias + c_v, mask=m_v, other=0).to(tl.float32)
    b_g = tl.load(g + i_n * g_n + i_hv * K + d_k, mask=m_k, other=0).to(tl.float32)
    b_beta = tl.load(beta + i_n * beta_n + i_hv).to(tl.float32)
    b_a = 1.0
    if A_log is not None:
        b_a = tl.exp(tl.load(A_log + i_hv).to(tl.float32))
    if dt_bias is not None:
        b_g += tl.load(dt_bias + i_hv * K + d_k, mask=m_k, other=0).to(tl.float32)
    tl.debug_barrier()  # all these loads go out before the first of those that wait for a slot

    # the state, and the history, oldest first
    d_v0 = i_v + 0 * BV + tl.arange(0, BV)
    d_s0 = i_hv * (K * V) + d_v0[:, None] * K + d_k[None, :]
    m_s0 = m_k[None, :] & (d_v0 < V)[:, None] & live
    p_s = pool + i_s * pool_n
    b_s0 = tl.load(p_s + d_s0, mask=m_s0 & keep, other=0, eviction_policy="evict_first")
    tl.debug_barrier()
    p_line = conv_pool + i_line * line_n
    x_q0 = tl.load(p_line + (first + 0) * line_c + c_q, mask=m_k & keep, other=0)
    x_q1 = tl.load(p_line + (first + 1) * line_c + c_q, mask=m_k & keep, other=0)
    x_q2 = tl.load(p_line + (first + 2) * line_c + c_q, mask=m_k & keep, other=0)
    x_k0 = tl.load(p_line + (first + 0) * line_c + c_k, mask=m_k & keep, other=0)
    x_k1 = tl.load(p_line + (first + 1) * line_c + c_k, mask=m_k & keep, other=0)
    x_k2 = tl.load(p_line + (first + 2) * line_c + c_k, mask=m_k & keep, other=0)
    x_v0 = tl.load(p_line + (first + 0) * line_c + c_v, mask=m_v & keep, other=0)
    x_v1 = tl.load(p_line + (first + 1) * line_c + c_v, mask=m_v & keep, other=0)
    x_v2 = tl.load(p_line + (first + 2) * line_c + c_v, mask=m_v & keep, other=0)
    # Vectors are gathered into the layout of the state's tiles: a mere broadcast would have every warp compute them from the
    # start
    b_q = convolve(x_q0, x_q1, x_q2, x_q3, w_q, b_q)
    b_k = convolve(x_k0, x_k1, x_k2, x_k3, w_k, b_k)
    b_v = convolve(x_v0, x_v1, x_v2, x_v3, w_v, b_v)
    b_q2, b_k2, b_qk = tl.reduce((b_q * b_q, b_k * b_k, b_q * b_k), 0, three_sums)
    b_rq = tl.rsqrt(b_q2 + 1e-6) * scale
    b_rk = tl.rsqrt(b_k2 + 1e-6)
    b_beta = BETA_SCALE * tl.sigmoid(b_beta) * b_rk
    b_high, b_low = split_decay(log_decay(b_g, b_a, lower_bound))
    b_q, b_k = unpack(tl.gather(pack(b_q, b_k), d_k, 0))
    b_high, b_low = unpack(tl.gather(pack(b_high, b_low), d_k, 0))

    # the recurrence; the new state goes to the slot of column 0
    p_w = pool + i_line * pool_n
    b_vi = tl.gather(b_v, 0 * BV + tl.arange(0, BV), 0)
    b_s, b_o = step(b_s0.to(tl.float32), b_vi, b_q, b_k, b_high, b_low, b_rq, b_rk, b_qk, b_beta)
    tl.store(o_raw + (i_n * HV + i_hv) * V + d_v0, b_o, mask=d_v0 < V)

    # Arrive: what this program's threads have read and written so far comes before what the last program does. It takes o
    # from the L2 cache, where the others have left it
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + i_n * H + i_h, 1, sem="acq_rel")
    tl.store(p_w + d_s0, b_s.to(pool.dtype.element_ty), mask=m_s0, eviction_policy="evict_first")
    # the history moves up by one column
    store_history(p_line, line_c, c_v, x_v1, x_v2, x_v3, m_v & live)
    if arrived == GROUP - 1:
        tl.store(arrivals + i_n * H + i_h, 0)
        store_history(p_line, line_c, c_q, x_q1, x_q2, x_q3, m_k & live)
        store_history(p_line, line_c, c_k, x_k1, x_k2, x_k3, m_k & live)
        # gated RMSNorm over V
        d_o = tl.arange(0, 128)
        m_o = d_o < V
        for i_g in range(HV // H):
            i_o = (i_h * (HV // H) + i_g) * V + d_o
            b_y = tl.load(o_raw + i_n * (HV * V) + i_o, mask=m_o, other=0, cache_modifier=".cg")
            b_z = tl.load(z + i_n * z_n + i_o, mask=m_o, other=0).to(tl.float32)
            b_w = tl.load(norm_weight + d_o, mask=m_o, other=0).to(tl.float32)
            b_y = b_y * inverse_norm(b_y, tl.where(m_o, eps, 0.0)) * (b_w * tl.sigmoid(b_z))
            tl.store(o + i_n * o_n + i_o, tl.where(live, b_y, 0.0).to(o.dtype.element_ty), mask=m_o)


def scalars(qkv, z, g, beta, o, conv_pool, pool, state_indices, scale, lower_bound, eps, pad_slot):
    """All that follows the pointers in the kernel's signature, up to its constants; the same for tensors of one layout."""
    rows = [x.stride(0) for x in (qkv, z, g, beta, o)]
    return (
        scale, lower_bound, eps, min(pool.shape[0], conv_pool.shape[0]), pad_slot, *rows,
        conv_pool.stride(0), conv_pool.stride(1), pool.stride(0), *(*state_indices.stride(), 0)[:2],
    )


def programs(N, HV):
    return N * HV * 8


def scratch(N, H, HV):
    """How many counters and fp32 values the programs of a launch share: arrivals, o_raw. None if each is alone."""
    return N * H, N * HV * 128


def launch(
    qkv, z, g, beta, o, conv_pool, conv_weight, conv_bias, pool, state_indices, num_accepted, has_initial, A_log, dt_bias,
    norm_weight, arrivals, o_raw, scale, lower_bound, eps, *, heads, pad_slot=-1, beta_scale=1.0,
    num_warps=4, num_stages=1,
):
    """Launch on the current device and stream; returns the compiled kernel, or None if there is nothing to do.

    qkv [N, 2 * heads * 128 + HV * 128], z [N, HV * 128], g [N, HV * 128], beta [N, HV], rows
    contiguous; o [N, HV, 128], its last two dimensions contiguous; qkv, o bf16.
    conv_pool [slots, 3 + k, channels], channels contiguous; conv_weight [channels, 4]; pool [slots, HV,
    128, 128] fp32, bf16 or fp16, contiguous but for the first stride; state_indices [N] or [N, 1 + k], any strides;
    num_accepted, has_initial [N] or None; A_log [HV] or None; dt_bias [HV, 128] or None; norm_weight [128].
    arrivals int32, zeros before the launch and after it, and o_raw fp32, of the sizes that ``scratch`` says, or None.
    No two launches that may run at the same time share these two.
    """
    N, HV = beta.shape
    if N == 0:
        return None
    return decode_step_kernel[(programs(N, HV),)](
        qkv, z, g, beta, o, conv_pool, conv_weight, conv_bias, pool, state_indices, num_accepted, has_initial,
        A_log, dt_bias, norm_weight, arrivals, o_raw,
        *scalars(qkv, z, g, beta, o, conv_pool, pool, state_indices, scale, lower_bound, eps, pad_slot),
        H=heads, HV=HV, LINE=conv_pool.shape[1], COLUMNS=state_indices.shape[1] if state_indices.dim() == 2 else 0,
        BETA_SCALE=beta_scale, num_warps=num_warps, num_stages=num_stages,
    )

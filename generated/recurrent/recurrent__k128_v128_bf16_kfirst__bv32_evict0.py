# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: recurrent.py.j2
# variant:  recurrent__k128_v128_bf16_kfirst__bv32_evict0
# inputs:   bf6937e9d310ffc4a70de28adf14156622388c8bca0ca905a60d832afc439610

"""Recurrent Kimi Delta Attention, K = 128, V = 128: T >= 1 tokens a sequence, the state in registers.

Each program owns a tile [BK, BV] of one sequence's and one value head's state: BV of its V columns, all of K. It reads
the tile once, walks through the tokens, and writes the tile back: to a new tensor, in place to its slot of a pool, or,
in speculative decode, after token t to the slot in column t of the index table.
"""

import torch
import triton
import triton.language as tl

SPEC = {'family': 'recurrent', 'k': 128, 'v': 128, 'dtype': 'bf16', 'k_first': True}
SCHEDULE = {'bv': 32, 'evict': 0}


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
    """One token on a state tile [BK, BV]: (new tile, o of the tile's rows of V). All fp32; q carries the scale."""
    b_high, b_low = split_decay(b_g)
    b_s = b_s * b_high[:, None] + b_s * b_low[:, None]  # S <- diag(exp(g)) S
    b_u = (b_v - tl.sum(b_s * b_k[:, None], 0)) * b_beta
    b_s += b_k[:, None] * b_u[None, :]  # S <- S + beta k (v - S^T k)^T
    return b_s, tl.sum(b_s * b_q[:, None], 0)  # o = scale S^T q


@triton.jit
def load_token(p_q, p_k, p_v, p_g, p_beta, m_k, m_v, more):
    """q, k, v, g, beta of one token; zeros, without access, if there is no such token."""
    b_q = tl.load(p_q, mask=m_k & more, other=0)
    b_k = tl.load(p_k, mask=m_k & more, other=0)
    b_v = tl.load(p_v, mask=m_v & more, other=0)
    b_g = tl.load(p_g, mask=m_k & more, other=0)
    return b_q, b_k, b_v, b_g, tl.load(p_beta, mask=more, other=0)


# batch, sequence and token counts differ from step to step: no new binary for them
@triton.jit(do_not_specialize=["T", "slots", "pad_slot", "beta_b", "beta_t", "beta_h", "index_n", "index_t"])
def recurrent_kernel(
    q, k, v, g, beta, A_log, dt_bias, o,
    h0, ht,  # states to read and to write, [N or slots, HV, 128, 128]; h0 None: zeros; ht None: not wanted
    cu_seqlens, state_indices, num_accepted, has_initial,  # [N+1], [N, COLUMNS], [N], [N]; each may be None
    scale, lower_bound, T, slots, pad_slot,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, o_b, o_t, o_h,
    h0_n, ht_n, index_n, index_t,
    H: tl.constexpr, HV: tl.constexpr,
    COLUMNS: tl.constexpr,  # of the index table: 0 if it is [N]
    ONE_TOKEN: tl.constexpr,  # T = 1 and no cu_seqlens: straight-line code
    RAW_GATE: tl.constexpr, L2NORM: tl.constexpr, BETA_SIGMOID: tl.constexpr, BETA_SCALE: tl.constexpr,
):
    K: tl.constexpr = 128
    V: tl.constexpr = 128
    BK: tl.constexpr = 128
    BV: tl.constexpr = 32
    NV: tl.constexpr = 4
    i_v = tl.program_id(0) % NV
    i_hv = tl.program_id(0) // NV % HV
    i_n = (tl.program_id(0) // (NV * HV)).to(tl.int64)
    i_h = i_hv // (HV // H)
    d_k = tl.arange(0, BK)
    d_v = i_v * BV + tl.arange(0, BV)
    m_k = d_k < K
    m_v = d_v < V

    # the state to start from: the sequence's own, or the slot that the index table names. Its address comes from memory,
    # so the first token's loads go out before it and the state's after it
    i_s = i_n
    m_s = m_k[:, None] & m_v[None, :]  # [BK, BV]
    if state_indices is not None:
        column = 0
        if COLUMNS > 0 and num_accepted is not None:
            column = tl.minimum(tl.maximum(tl.load(num_accepted + i_n), 1), COLUMNS).to(tl.int32) - 1
        i_s = tl.load(state_indices + i_n * index_n + column * index_t).to(tl.int64)
        live = (i_s >= 0) & (i_s < slots) & (i_s != pad_slot)  # else padding: no access to the pool, output 0
        m_s = m_s & live

    # the sequence's tokens, clamped to those that exist
    if ONE_TOKEN:
        n_t = 1
        i_b, bos = i_n, 0
    elif cu_seqlens is None:
        n_t = T
        i_b, bos = i_n, 0
    else:
        bos = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n), 0), T).to(tl.int64)
        n_t = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n + 1), bos), T).to(tl.int32) - bos.to(tl.int32)
        i_b = 0
    p_q = q + i_b * q_b + bos * q_t + i_h * q_h + d_k
    p_k = k + i_b * k_b + bos * k_t + i_h * k_h + d_k
    p_v = v + i_b * v_b + bos * v_t + i_hv * v_h + d_v
    p_g = g + i_b * g_b + bos * g_t + i_hv * g_h + d_k
    p_beta = beta + i_b * beta_b + bos * beta_t + i_hv * beta_h
    p_o = o + i_b * o_b + bos * o_t + i_hv * o_h + d_v
    x_q, x_k, x_v, x_g, x_beta = load_token(p_q, p_k, p_v, p_g, p_beta, m_k, m_v, n_t > 0)
    if RAW_GATE:
        b_a = 1.0
        if A_log is not None:
            b_a = tl.exp(tl.load(A_log + i_hv).to(tl.float32))
        if dt_bias is not None:
            b_bias = tl.load(dt_bias + i_hv * K + d_k, mask=m_k, other=0).to(tl.float32)

    d_s = i_hv * (K * V) + d_k[:, None] * V + d_v[None, :]
    if h0 is None:
        b_s = tl.zeros([BK, BV], tl.float32)
    elif has_initial is None:
        b_s = tl.load(h0 + i_s * h0_n + d_s, mask=m_s, other=0).to(tl.float32)
    else:
        m_initial = m_s & (tl.load(has_initial + i_n) != 0)
        b_s = tl.load(h0 + i_s * h0_n + d_s, mask=m_initial, other=0).to(tl.float32)

    tl.debug_barrier()  # all loads are on their way: the compiler would put off some of them till after the first norm
    for i_t in range(n_t):
        b_q, b_k, b_v = x_q.to(tl.float32), x_k.to(tl.float32), x_v.to(tl.float32)
        b_g, b_beta = x_g.to(tl.float32), x_beta.to(tl.float32)
        p_q += q_t
        p_k += k_t
        p_v += v_t
        p_g += g_t
        p_beta += beta_t
        x_q, x_k, x_v, x_g, x_beta = load_token(p_q, p_k, p_v, p_g, p_beta, m_k, m_v, i_t + 1 < n_t)  # the next one
        if L2NORM:
            b_q = l2norm(b_q)
            b_k = l2norm(b_k)
        if RAW_GATE:
            if dt_bias is not None:
                b_g += b_bias
            b_g = log_decay(b_g, b_a, lower_bound)
        if BETA_SIGMOID:
            b_beta = BETA_SCALE * tl.sigmoid(b_beta)
        b_s, b_o = delta_step(b_s, b_q * scale, b_k, b_v, b_g, b_beta)
        if state_indices is not None:
            b_o = tl.where(live, b_o, 0.0)
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_v)
        if COLUMNS > 0:  # token t leaves its state in column t; the state that goes on is not rounded
            column = tl.minimum(i_t, COLUMNS - 1)
            i_w = tl.load(state_indices + i_n * index_n + column * index_t).to(tl.int64)
            m_w = m_s & (i_w >= 0) & (i_w < slots) & (i_w != pad_slot)
            tl.store(ht + i_w * ht_n + d_s, b_s.to(ht.dtype.element_ty), mask=m_w)
        p_o += o_t

    if COLUMNS == 0 and ht is not None:
        if state_indices is not None and not ONE_TOKEN:
            m_s = m_s & (n_t > 0)  # a sequence without tokens leaves its slot alone
        tl.store(ht + i_s * ht_n + d_s, b_s.to(ht.dtype.element_ty), mask=m_s)


def scalars(q, k, v, g, beta, o, h0, ht, state_indices, scale, lower_bound, pad_slot):
    """All that follows the pointers in the kernel's signature, up to its constants; the same for tensors of one layout."""
    per_token = [stride for tensor in (q, k, v, g, beta, o) for stride in tensor.stride()[:3]]
    index = (0, 0) if state_indices is None else (*state_indices.stride(), 0)[:2]
    slots = 0 if ht is None else ht.shape[0]
    return (
        scale, lower_bound, q.shape[1], slots, pad_slot, *per_token,
        0 if h0 is None else h0.stride(0), 0 if ht is None else ht.stride(0), *index,
    )


def programs(N, HV):
    return N * HV * 4


def launch(
    q, k, v, g, beta, A_log, dt_bias, o, h0, ht, cu_seqlens, state_indices, num_accepted, has_initial, scale, lower_bound,
    *, pad_slot=-1, raw_gate=True, l2norm=True, beta_sigmoid=True, beta_scale=1.0,
    num_warps=2, num_stages=1,
):
    """Launch on the current device and stream; returns the compiled kernel, or None if there is nothing to do.

    q, k [B, T, H, 128], v, o [B, T, HV, 128], g [B, T, HV, 128], beta [B, T, HV], last dimensions
    contiguous (beta: any strides), q, k, v, o bf16; A_log [HV] or None, dt_bias [HV, 128] or None, fp32;
    h0, ht [N or slots, HV, 128, 128] fp32, or None, contiguous but for the
    first stride; cu_seqlens [N+1], or None: one sequence a batch row; state_indices [N] or [N, COLUMNS] integers, or None;
    num_accepted [N], has_initial [N], contiguous, or None; lower_bound None: softplus gate.
    """
    _, T, H, _ = q.shape
    HV = v.shape[2]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if N == 0:
        return None
    return recurrent_kernel[(programs(N, HV),)](
        q, k, v, g, beta, A_log, dt_bias, o, h0, ht, cu_seqlens, state_indices, num_accepted, has_initial,
        *scalars(q, k, v, g, beta, o, h0, ht, state_indices, scale, lower_bound, pad_slot),
        H=H, HV=HV, COLUMNS=state_indices.shape[1] if state_indices is not None and state_indices.dim() == 2 else 0,
        ONE_TOKEN=T == 1 and cu_seqlens is None, RAW_GATE=raw_gate, L2NORM=l2norm, BETA_SIGMOID=beta_sigmoid,
        BETA_SCALE=beta_scale, num_warps=num_warps, num_stages=num_stages,
    )

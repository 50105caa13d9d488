# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: prefill_prepare.py.j2
# variant:  prefill_prepare__c64_k128_v128_bf16__bk128
# inputs:   0908d2276f2e6e4bc001e08c2cffeab0726fe5355045dff13dc31c866196cf15

"""Prefill, first kernel: all of a chunk that does not depend on the state (KDA's chunk form).

One program is one chunk of C = 64 tokens of one value head. With G the inclusive sum of the log2 decays inside the chunk:
    Akk_ij = beta_i k_i.(k_j 2^(G_i - G_j)) for j < i      Aqk_ij = scale q_i.(k_j 2^(G_i - G_j)) for j <= i
    X = (I + Akk)^-1      w = X (beta 2^G k)      u = X (beta v)      qg = scale q 2^G      kg = k 2^(G_last - G)
Every sum of decays is a product with a constant 0/1 matrix (see ``matrices``), and refers to no row later than it may:
the outputs of a prefix are the same bits whatever follows it.
"""

import torch
import triton
import triton.language as tl

SPEC = {'family': 'prefill_prepare', 'chunk': 64, 'k': 128, 'v': 128, 'dtype': 'bf16'}
SCHEDULE = {'bk': 128}


def matrices(device) -> torch.Tensor:
    """[4, C, C]: the 0/1 matrices whose products with the gate are sums of decays; to be made once a device.

    0: j <= i, so G;  1: j > i, so G_last - G.
    2: levels s = 32. R is G of the last row of the lower half of a parent of 2s rows: G - R in the
    upper half, R - G in the lower one.
    3: leaf of 32 rows, G minus G of the leaf's first row.
    The gate is multiplied by 4096, to keep the bits of slow decays in half precision; the matrices by its inverse.
    """
    i = torch.arange(64, device=device)[:, None]
    j = torch.arange(64, device=device)[None, :]
    found = [j <= i, j > i]
    for s in [32]:
        middle = i // (2 * s) * (2 * s) + s  # first row of the upper half
        found.append(torch.where(i >= middle, (j >= middle) & (j <= i), (j > i) & (j < middle)))
    found.append((j > i // 32 * 32) & (j <= i))
    return (torch.stack(found) * 0.000244140625).to(torch.float16)


@triton.jit
def _log2_decay(b_g, p_bias, b_a, lower_bound, m_k):
    """[C, BK] raw gate -> log2 of the decay times 4096, <= 0. Padding rows come as -1e30 and give 0."""
    b_g = b_g.to(tl.float32)
    b_bias = tl.zeros([128], tl.float32)
    if p_bias is not None:
        b_bias = tl.load(p_bias, mask=m_k, other=0.0).to(tl.float32)
    # lower_bound * sigmoid(a x) = -s * s with s = rsqrt(c + c 2^(-a x log2 e)): no division
    c = -1.0 / (lower_bound * 5909.278887481194)
    b_a = tl.minimum(b_a * -1.4426950408889634, -1e-20)
    b_s = tl.rsqrt(c + c * tl.exp2(b_a * b_g + (b_a * b_bias)[None, :]))
    return -(b_s * b_s)


@triton.jit
def _strength(p_beta, m_r, beta_scale, SIGMOID_BETA: tl.constexpr):
    """[C] beta, 0 on padding rows."""
    b_beta = tl.load(p_beta, mask=m_r, other=0.0).to(tl.float32)
    if SIGMOID_BETA:
        b_beta = tl.rsqrt(1.0 + tl.exp2(b_beta * -1.4426950408889634))  # a root of the sigmoid: no division
        b_beta = beta_scale * (b_beta * b_beta)
    return tl.where(m_r, b_beta, 0.0)


@triton.jit
def _sums(p_matrix, b_gate):
    """[C, C] x [C, BK]: sums of decays over the rows that a matrix selects, in fp32."""
    return tl.dot(tl.load(p_matrix), b_gate)


# the window of chunks differs from step to step: no new binary for it
@triton.jit(do_not_specialize=["row_begin", "slot_base", "T"])
def prepare_kernel(
    q, k, v, g, beta,  # [.., H, K], [.., H, K], [.., HV, V], [.., HV, K], [.., HV] bf16 (g, beta: or fp32)
    A_log, dt_bias,  # [HV], [HV, K] fp32, or None
    chunk_table, matrices,  # [rows, 4] int32, [.., C, C]
    qg, kg, w, u, aqk, dec,  # [slots, HV, C, 128] x3, [slots, HV, C, 128], [slots, HV, C, C], [slots, HV, 128] fp32
    row_begin, slot_base, T, H, HV, lower_bound, scale, beta_scale,
    sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sg_t, sg_h, sbeta_t, sbeta_h,
    L2NORM: tl.constexpr, SIGMOID_BETA: tl.constexpr,
):
    C: tl.constexpr = 64
    BK: tl.constexpr = 128
    BV: tl.constexpr = 128
    i_hv = tl.program_id(0) % HV
    i_row = row_begin + tl.program_id(0) // HV
    i_h = i_hv // (HV // H)
    t_0 = tl.load(chunk_table + i_row * 4).to(tl.int64)
    if (t_0 < 0) | (t_0 >= T):  # past the end of a bounded table, or of the tokens
        return
    r = tl.arange(0, C)
    valid = tl.load(chunk_table + i_row * 4 + 1)  # rows of this sequence
    m_r = (r < valid) & (r < T - t_0)
    i_tile = (i_row - slot_base).to(tl.int64) * HV + i_hv
    ri = r[:, None]
    cj = tl.arange(0, C)[None, :]
    xor = ri ^ cj  # its highest bit is the level on which rows i and j meet
    o_cc = ri * C + cj

    b_a = 1.0
    if A_log is not None:
        b_a = tl.exp(tl.load(A_log + i_hv).to(tl.float32))

    d = tl.arange(0, BK)
    # raw tiles of the chunk, [C, BK]; padding rows: decay 1, q = k = 0
    m_d = m_r[:, None]
    o_ck = ri * 128 + d[None, :]
    b_g = tl.load(g + t_0 * sg_t + i_hv * sg_h + (ri * sg_t + d[None, :]), mask=m_d, other=-1e30)
    b_k = tl.load(k + t_0 * sk_t + i_h * sk_h + (ri * sk_t + d[None, :]), mask=m_d, other=0.0)

    # the gate, rounded once: every decay below is a sum of these same numbers
    p_bias = None if dt_bias is None else dt_bias + i_hv * 128 + d
    b_gate = _log2_decay(b_g, p_bias, b_a, lower_bound, d < 128).to(tl.float16)

    # k / |k|
    b_kf = b_k.to(tl.float32)
    if L2NORM:
        b_kf *= tl.rsqrt(tl.sum(b_kf * b_kf, 1) + 1e-6)[:, None]
    b_k = b_kf.to(tl.bfloat16)

    # dec = 2^G_last, kg = k 2^(G_last - G)
    tl.store(dec + i_tile * 128 + d, tl.exp2(tl.sum(b_gate.to(tl.float32), 0) * 0.000244140625))
    b_decay = tl.exp2(_sums(matrices + C * C + o_cc, b_gate)).to(tl.bfloat16)
    tl.store(kg + i_tile * (C * 128) + o_ck, b_k * b_decay)

    # scale q / |q|
    b_qf = tl.load(q + t_0 * sq_t + i_h * sq_h + (ri * sq_t + d[None, :]), mask=m_d, other=0.0).to(tl.float32)
    if L2NORM:
        b_qf *= tl.rsqrt(tl.sum(b_qf * b_qf, 1) + 1e-6)[:, None]
    b_q = (b_qf * scale).to(tl.bfloat16)

    # qg = scale q 2^G, kx = k 2^G
    b_decay = tl.exp2(_sums(matrices + o_cc, b_gate)).to(tl.bfloat16)
    tl.store(qg + i_tile * (C * 128) + o_ck, b_q * b_decay)
    b_kx = (b_k * b_decay).to(tl.float16)

    # leaf of 32 rows, reference R = G(first row) - 111: 2^(G_i - R) and 2^(R - G_j) stay within 2^+-113. Above the
    # diagonal their product may be infinite: those are removed by selection
    b_e = tl.full([C, BK], 111.0, tl.float32)
    b_e = tl.dot(tl.load(matrices + 3 * C * C + o_cc), b_gate, b_e)
    b_here = tl.exp2(b_e).to(tl.bfloat16)
    b_there = tl.trans(b_k * tl.exp2(-b_e).to(tl.bfloat16))
    b_dkk = tl.dot(b_k * b_here, b_there)  # [C, C]
    b_dqk = tl.dot(b_q * b_here, b_there)

    # level 32: 2^(G_i - R) in upper halves, 2^(R - G_j) in lower ones, R the lower half's last row: both <= 1
    b_half = tl.exp2(_sums(matrices + 2 * C * C + o_cc, b_gate)).to(tl.bfloat16)
    b_here = b_k * b_half
    b_there = tl.trans(b_here)
    b_dkk = tl.where(xor >= 32, tl.dot(b_here, b_there), b_dkk)
    b_dqk = tl.where(xor >= 32, tl.dot(b_q * b_half, b_there), b_dqk)

    # Aqk, and beta_i Akk strictly below the diagonal
    b_beta = _strength(beta + t_0 * sbeta_t + i_hv * sbeta_h + r * sbeta_t, m_r, beta_scale, SIGMOID_BETA)
    tl.store(aqk + i_tile * (C * C) + o_cc, tl.where(ri >= cj, b_dqk, 0.0).to(tl.bfloat16))
    b_l = tl.where(ri > cj, b_dkk * b_beta[:, None], 0.0).to(tl.float16)

    # X = (I + Akk)^-1 by the same levels: X <- X - X (Akk on level s) X, block forward substitution. Rows i and j meet on
    # level s where s <= i ^ j < 2 s, which is (i ^ j ^ s) < s
    b_x = tl.where(ri == cj, 1.0, 0.0) - tl.where(xor == 1, b_l.to(tl.float32), 0.0)
    b_xh = b_x.to(tl.float16)
    b_y = tl.dot(b_xh, tl.where((xor ^ 2) < 2, b_l, 0.0))
    b_x -= tl.dot(b_y.to(tl.float16), b_xh)
    b_xh = b_x.to(tl.float16)
    b_y = tl.dot(b_xh, tl.where((xor ^ 4) < 4, b_l, 0.0))
    b_x -= tl.dot(b_y.to(tl.float16), b_xh)
    b_xh = b_x.to(tl.float16)
    b_y = tl.dot(b_xh, tl.where((xor ^ 8) < 8, b_l, 0.0))
    b_x -= tl.dot(b_y.to(tl.float16), b_xh)
    b_xh = b_x.to(tl.float16)
    b_y = tl.dot(b_xh, tl.where((xor ^ 16) < 16, b_l, 0.0))
    b_x -= tl.dot(b_y.to(tl.float16), b_xh)
    b_xh = b_x.to(tl.float16)
    b_y = tl.dot(b_xh, tl.where((xor ^ 32) < 32, b_l, 0.0))
    b_x -= tl.dot(b_y.to(tl.float16), b_xh)

    # the table again: cheaper than to keep rows, masks and offsets in registers all through the inverse
    t_0 = tl.load(chunk_table + i_row * 4).to(tl.int64)
    valid = tl.load(chunk_table + i_row * 4 + 1)
    m_r = (r < valid) & (r < T - t_0)
    j = tl.arange(0, C)
    b_beta = _strength(beta + t_0 * sbeta_t + i_hv * sbeta_h + j * sbeta_t, (j < valid) & (j < T - t_0), beta_scale, SIGMOID_BETA)
    b_x *= b_beta[None, :]  # X diag(beta)
    b_xh = b_x.to(tl.float16)  # for w, whose rows nearly cancel where keys are alike: three bits more than bf16 has
    b_x = b_x.to(tl.bfloat16)

    # w = X (beta k 2^G)
    tl.store(w + i_tile * (C * 128) + o_ck, tl.dot(b_xh, b_kx).to(tl.bfloat16))

    # u = X (beta v)
    dv = tl.arange(0, BV)
    b_v = tl.load(v + t_0 * sv_t + i_hv * sv_h + (ri * sv_t + dv[None, :]), mask=m_r[:, None], other=0.0)
    tl.store(u + i_tile * (C * 128) + ri * 128 + dv[None, :], tl.dot(b_x, b_v).to(tl.bfloat16))


def launch(
    q, k, v, g, beta, A_log, dt_bias, chunk_table, matrices, qg, kg, w, u, aqk, dec, row_begin, row_end, slot_base, H, HV,
    lower_bound, scale, beta_scale, l2norm, sigmoid_beta, *, num_warps=4, num_stages=1,
):
    """Write qg, kg, w, u, aqk, dec of the chunk table's rows [row_begin, row_end), row r at slot r - slot_base.

    q, k [.., H, 128], v [.., HV, 128] bf16; g [.., HV, 128] and beta [.., HV] bf16 or fp32; last strides 1 (not beta's).
    chunk_table [rows, 4] int32: first token, valid rows, sequence, chunk; -1 past its end. matrices: ``matrices(device)``.
    qg, kg, w [slots, HV, 64, 128], u [slots, HV, 64, 128], aqk [slots, HV, 64, 64] bf16; dec [slots, HV, 128] fp32; contiguous.
    """
    prepare_kernel[((row_end - row_begin) * HV,)](
        q, k, v, g, beta, A_log, dt_bias, chunk_table, matrices, qg, kg, w, u, aqk, dec,
        row_begin, slot_base, q.shape[:-2].numel(), H, HV, lower_bound, scale, beta_scale,
        q.stride(-3), q.stride(-2), k.stride(-3), k.stride(-2), v.stride(-3), v.stride(-2), g.stride(-3), g.stride(-2),
        beta.stride(-2), beta.stride(-1),
        L2NORM=l2norm, SIGMOID_BETA=sigmoid_beta, num_warps=num_warps, num_stages=num_stages,
    )

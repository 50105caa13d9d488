# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: prefill_prepare_gluon.py.j2
# variant:  prefill_prepare__c64_k128_v128_bf16__gluon
# inputs:   b01e9743db83ba063909ab05a633ef6434573893dd7b613209bfdab5701dd252

"""Prefill, first kernel, for sm90: all that a chunk of one head can compute without the incoming state.

One program of 4 warps handles one (chunk, value head) in the wgmma accumulator layout; products take the left operand
from registers and the right one from six 16 KB shared slots, some reused in place as the steps go on:
  s_0  gate (raw, then fp16 log2 decay)      -> khat 2^b, right operand of w
  s_1  k -> khat 2^F                         -> Aqk and scratch of the inverse
  s_2  q -> qg                               -> w
  s_3  khat 2^F'                             -> scratch of the inverse
  s_4  kg                                    -> u
  s_5  v, right operand of u
b is the inclusive prefix sum of the gate in log2 units. The pair (i, j) takes its decay 2^(b_i - b_j) as 2^(b_i - R + c)
2^(R - b_j - c): R = 0 for rows i of the upper half, b_31 rounded to a whole number for the lower half, c a whole middle
of a half's range. No row refers to a later one, so results are causal to the bit. One product with a 0/-1 matrix gives
F = R - b - c for all rows; every other decay (2^b, that of kg, that of the upper rows as the lower half sees them) is 2^F
or 2^-F times a vector over the channels, and a power of two, exact in bf16, where it meets a rounded factor.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, mma_v2, tma, warpgroup_mma, warpgroup_mma_wait)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SPEC = {'family': 'prefill_prepare', 'chunk': 64, 'k': 128, 'v': 128, 'dtype': 'bf16'}
SCHEDULE = {'form': 'gluon'}

ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
ACC_C = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, ACC, 2))
LEFT_C = gl.constexpr(gl.DotOperandLayout(0, ACC_C, 2))
TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# Four 16x16 blocks, one a warp, as accumulators and operands of mma.sync.
ACC_16 = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8]))
LEFT_16 = gl.constexpr(gl.DotOperandLayout(0, ACC_16, 2))
RIGHT_16 = gl.constexpr(gl.DotOperandLayout(1, ACC_16, 2))
# The order in which `matrices` stores a constant matrix: 4 x 16 bytes a thread, already in LEFT.
STORED = gl.constexpr(gl.DistributedLinearLayout(
    reg_bases=[[1], [2], [4], [1024], [2048]], lane_bases=[[8], [16], [32], [64], [128]], warp_bases=[[256], [512]],
    block_bases=[], shape=[4096]))


# Triton 3.6 and later versions name these differently.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
view_as = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@gluon.jit
def fetch(tile, i_t, i_d, bar, slot):
    """Start the copy of one tile into a shared slot; ``bar`` flips when it has landed."""
    mbarrier.expect(bar, 16384)
    tma_load(tile, [i_t, i_d], bar, slot)


@gluon.jit
def emit(slot, tile, row):
    """Start the copy of a slot, just written by this program, to the rows of an intermediate that begin at ``row``."""
    fence_async_shared()
    tma_store(tile, [row, 0], slot)


@gluon.jit
def fill_past_end(slot, valid, value):
    """Overwrite the rows of a raw tile from ``valid`` on: they belong to the next sequence, or to nobody."""
    i = gl.arange(0, 64, gl.SliceLayout(1, ACC))[:, None]
    slot.store(gl.where(i < valid, slot.load(ACC), gl.full([64, 128], value, gl.bfloat16, ACC)))


@gluon.jit
def operand(x, layout: gl.constexpr):
    """An accumulator as the left operand of a product: the same registers, which ``assert_trivial`` proves."""
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def fp32_of(x):
    """bf16 to fp32, a pair in two instructions (the compiler takes three)."""
    return gl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], gl.float32, True, 2)


@gluon.jit
def fp16_of(x):
    """bf16 to fp16, a pair in three instructions."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 lo, hi; shl.b32 lo, $1, 16; and.b32 hi, $1, 0xffff0000; cvt.rn.f16x2.f32 $0, hi, lo; }",
        "=r,r", [x], gl.float16, True, 2)


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp2(x * -1.4426950408889634))


@gluon.jit
def load_prefix(p_prefix):
    """A constant matrix [C, C] as a left operand; its memory order is STORED."""
    m = gl.load(p_prefix + gl.arange(0, 4096, STORED))
    # bits (col 5 4, row 5 4, row 2 1 0, col 2 1, col 3, row 3, col 0) -> (row 5 4, row 3, row 2 1 0, col 5 4, col 3, col 2 1, col 0)
    m = m.reshape([4, 4, 8, 4, 2, 2, 2]).permute([1, 5, 2, 0, 4, 3, 6]).reshape([64, 64])
    return gl.convert_layout(m, LEFT, assert_trivial=True)


@gluon.jit
def multiply_16(a, b):
    """Four 16x16 products a b^T-of-the-transpose: ``b`` is given transposed, so that both operands are register views."""
    zero = gl.zeros([4, 16, 16], gl.float32, ACC_16)
    return mma_v2(operand(a, LEFT_16), operand(b.permute([0, 2, 1]), RIGHT_16), zero)


@gluon.jit
def invert_diagonal(b_l, same):
    """(I + L)^-1 of the four 16x16 diagonal blocks of a strictly lower L, by levels 1, 2, 4, 8, in registers of one warp each.

    X and its transpose go along together, so that no operand needs a shuffle. Returns fp32 [C, C], zero elsewhere.
    """
    l = gl.convert_layout(gl.sum(gl.where(same, b_l.to(gl.float32), 0.0).reshape([4, 16, 4, 16]), axis=2), ACC_16)
    lt = gl.convert_layout(l.permute([0, 2, 1]), ACC_16)
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, ACC_16)))[None, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, ACC_16)))[None, None, :]
    apart = (i ^ j) + gl.zeros([4, 16, 16], gl.int32, ACC_16)  # its highest bit tells the level of a pair
    one = gl.where(apart == 0, 1.0, 0.0)
    x = one - gl.where(apart == 1, l, 0.0)
    xt = one - gl.where(apart == 1, lt, 0.0)
    for level in gl.static_range(1, 4):  # X <- X - (X L_level) X
        xt_h = xt.to(gl.float16)
        lt_level = gl.where((apart >> level) == 1, lt, 0.0).to(gl.float16)
        y = multiply_16(x.to(gl.float16), lt_level).to(gl.float16)
        x -= multiply_16(y, xt_h)
        if level < 3:
            xt -= multiply_16(xt_h, y)
    x2 = gl.join(x.to(gl.float16), x.to(gl.float16))
    wide = gl.join(x2, x2).reshape([4, 16, 16, 4]).permute([0, 1, 3, 2]).reshape([64, 64])
    return gl.where(same, gl.convert_layout(wide, ACC_C), gl.zeros([64, 64], gl.float16, ACC_C)).to(gl.float32)


@gluon.jit
def invert(b_l, i, j, s_off, s_x, s_p):
    """X = (I + L)^-1 of a strictly lower fp16 L [C, C]: diagonal blocks D first, then all blocks below them in one go.

    P = D L_off is nilpotent of order 4 by blocks, so (I + P)^-1 D = (I - P)(I + P^2) D = (D - P D) + P^2 (D - P D).
    """
    zero = gl.zeros([64, 64], gl.float32, ACC_C)
    same = (i // 16) == (j // 16)
    x = invert_diagonal(b_l, same)
    s_off.store(gl.where(same, gl.zeros([64, 64], gl.float16, ACC_C), b_l))
    x_h = x.to(gl.float16)
    s_x.store(x_h)
    fence_async_shared()
    p = warpgroup_mma(operand(x_h, LEFT_C), s_off, zero, use_acc=False).to(gl.float16)
    s_p.store(p)
    p = operand(p, LEFT_C)
    fence_async_shared()
    x -= warpgroup_mma(p, s_x, zero, use_acc=False)
    p2 = warpgroup_mma(p, s_p, zero, use_acc=False).to(gl.float16)
    s_off.store(x.to(gl.float16))
    fence_async_shared()
    return x + warpgroup_mma(operand(p2, LEFT_C), s_off, zero, use_acc=False)


ACC_H = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]))
ACC_V = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16]))  # channels are rows
VECTOR = gl.constexpr(gl.SliceLayout(1, ACC_V))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT_3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
SUMS = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
# ACC with its rows as (half, row within it): what a pair of vectors [2, 1, K] is broadcast to without a move.
HALVES = gl.constexpr(gl.DistributedLinearLayout(
    reg_bases=[[0, 0, 1], [0, 8, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 0, 64]],
    lane_bases=[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
    warp_bases=[[0, 16, 0], [1, 0, 0]], block_bases=[], shape=[2, 32, 128]))


@gluon.jit
def by_half(s_pair):
    """A pair of vectors [2, K] as a tile [C, K]: the first in the rows of the upper half, the second in those of the lower."""
    pair = view_as(s_pair, s_pair.dtype, [2, 1, 128], FLAT_3).load(HALVES).broadcast_to([2, 32, 128])
    return gl.convert_layout(pair.reshape([64, 128]), ACC, assert_trivial=True)


@gluon.jit
def begin_product(b_rows, s_1, s_3):
    """Start rows (columns)^T of khat 2^F [C, C], and of khat 2^F' [C, 32]: the upper half as the lower rows see it."""
    zero = gl.zeros([64, 64], gl.float32, ACC_C)
    own = warpgroup_mma(b_rows, s_1.permute([1, 0]), zero, use_acc=False, is_async=True)
    zero = gl.zeros([64, 32], gl.float32, ACC_H)
    return own, warpgroup_mma(b_rows, s_3.slice(0, 32, dim=0).permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def end_product(own, across, is_lower):
    """Both put together: for the lower rows the columns of the upper half come from ``across``."""
    left, right = own.reshape([64, 2, 32]).permute([0, 2, 1]).split()
    left = gl.where(is_lower, across, gl.convert_layout(left, ACC_H, assert_trivial=True))
    both = gl.join(left, gl.convert_layout(right, ACC_H, assert_trivial=True))
    return gl.convert_layout(both.permute([0, 2, 1]).reshape([64, 64]), ACC_C, assert_trivial=True)


@gluon.jit(do_not_specialize=["row_begin", "slot_base", "T", "ALONE", "HV", "GROUP", "stride_beta_t", "stride_beta_h"])
def prepare_kernel(q, k, v, g, beta, A_log, dt_bias, chunk_table, prefix, qg, kg, w, u, aqk, dec,
                   row_begin, slot_base, T, ALONE, HV, GROUP, stride_beta_t, stride_beta_h, lower_bound, scale, beta_scale,
                   USE_L2NORM: gl.constexpr, USE_SIGMOID: gl.constexpr):
    pid = gl.program_id(0)
    i_h = pid % HV
    i_c = row_begin + pid // HV
    # first token, negative in the spare rows of a bounded table. A sequence alone is known to start at 0: its tiles are on
    # their way before the table has been read
    i_t = gl.load(chunk_table + 4 * i_c, mask=ALONE == 0, other=i_c * 64)
    if (i_t < 0) | (i_t >= T):
        return
    valid = gl.load(chunk_table + 4 * i_c + 1)  # tokens of this chunk: fewer than 64 at a sequence's end
    valid = gl.minimum(valid, T - i_t)          # whatever the device's boundaries say, there are T tokens
    s_0 = gl.allocate_shared_memory(gl.bfloat16, [64, 128], TILE)
    s_1 = gl.allocate_shared_memory(gl.bfloat16, [64, 128], TILE)
    s_2 = gl.allocate_shared_memory(gl.bfloat16, [64, 128], TILE)
    s_3 = gl.allocate_shared_memory(gl.bfloat16, [64, 128], TILE)
    s_4 = gl.allocate_shared_memory(gl.bfloat16, [64, 128], TILE)
    s_5 = gl.allocate_shared_memory(gl.bfloat16, [64, 128], TILE)
    g_landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(g_landed, count=1)
    mbarrier.init(k_landed, count=1)
    mbarrier.init(q_landed, count=1)
    mbarrier.init(v_landed, count=1)
    fence_async_shared()
    fetch(g, i_t, i_h * 128, g_landed, s_0)
    fetch(k, i_t, i_h // GROUP * 128, k_landed, s_1)
    fetch(q, i_t, i_h // GROUP * 128, q_landed, s_2)
    fetch(v, i_t, i_h * 128, v_landed, s_5)
    tile = (i_c - slot_base) * HV + i_h
    row = tile * 64
    b_prefix = load_prefix(prefix)
    s_sum = gl.allocate_shared_memory(gl.float16, [8, 64], TILE)   # row 0 adds up the upper half, row 1 the lower
    s_origin = gl.allocate_shared_memory(gl.float32, [2, 128], FLAT)  # vectors for the rows of each half: see below
    s_last = gl.allocate_shared_memory(gl.float32, [2, 128], FLAT)
    s_from = gl.allocate_shared_memory(gl.bfloat16, [2, 128], FLAT)
    s_across = gl.allocate_shared_memory(gl.bfloat16, [2, 128], FLAT)
    i_s = gl.arange(0, 8, gl.SliceLayout(1, SUMS))[:, None]
    i_r = gl.arange(0, 64, gl.SliceLayout(0, SUMS))[None, :]
    s_sum.store(gl.where(i_r // 32 == i_s, 1.0, 0.0).to(gl.float16))
    s_from.index(0).store(gl.full([128], 1.0, gl.bfloat16, VECTOR))
    i = gl.arange(0, 64, gl.SliceLayout(1, ACC_C))
    j = gl.arange(0, 64, gl.SliceLayout(0, ACC_C))
    p_beta = beta + i_t.to(gl.int64) * stride_beta_t + i_h * stride_beta_h
    past: gl.constexpr = -1e30 if USE_SIGMOID else 0.0
    b_beta_i = gl.load(p_beta + i * stride_beta_t, mask=i < valid, other=past).to(gl.float32)
    d = gl.arange(0, 128, gl.SliceLayout(0, ACC))
    slope = gl.to_tensor(-1.4426950408889634)
    if A_log is not None:
        slope = gl.exp(gl.load(A_log + i_h).to(gl.float32)) * -1.4426950408889634
    if dt_bias is not None:
        b_bias = gl.load(dt_bias + i_h * 128 + d).to(gl.float32) * slope
    else:
        b_bias = gl.zeros([128], gl.float32, gl.SliceLayout(0, ACC))
    if USE_SIGMOID:
        b_beta_i = sigmoid(b_beta_i) * beta_scale
    zero = gl.zeros([64, 128], gl.float32, ACC)

    # Gate: log2 decay = lower_bound log2(e) sigmoid(exp(A_log) (g + bias)), as minus the square of a reciprocal root.
    mbarrier.wait(g_landed, 0)
    if valid < 64:
        fill_past_end(s_0, valid, -1e30)
    a = -1.0 / (lower_bound * 1.4426950408889634)
    root = gl.rsqrt(gl.exp2(fp32_of(s_0.load(ACC)) * slope + b_bias[None, :]) * a + a)
    s_gate = view_as(s_0, gl.float16, [64, 128], TILE)
    s_gate.store((root * (root * -1.0)).to(gl.float16))  # a negation by 0 - x would be one instruction more
    fence_async_shared()
    zero_v = gl.zeros([128, 8], gl.float32, ACC_V)
    b_sums = warpgroup_mma(s_gate.permute([1, 0]), s_sum.permute([1, 0]), zero_v, use_acc=False, is_async=True)

    # khat = k / |k|
    mbarrier.wait(k_landed, 0)
    if valid < 64:
        fill_past_end(s_1, valid, 0.0)
    b_k = s_1.load(ACC)
    if USE_L2NORM:
        k_f = fp32_of(b_k)
        b_k = (k_f * gl.rsqrt(gl.sum(k_f * k_f, axis=1) + 1e-6)[:, None]).to(gl.bfloat16)

    # b_sums: the gate over each half by channel, b_31 and b_63 - b_31; and the vectors made of them
    c = (lower_bound * -23.083120654223414).to(gl.int32).to(gl.float32)  # whole: 2^c is exact in bf16
    b_sums = warpgroup_mma_wait(0, deps=[b_sums])
    i_s = gl.arange(0, 8, gl.SliceLayout(0, ACC_V))[None, :]
    b_upper = gl.sum(gl.where(i_s == 0, b_sums, 0.0), axis=1)
    b_lower = gl.sum(gl.where(i_s == 1, b_sums, 0.0), axis=1)
    b_r = (b_upper - 0.5).to(gl.int32).to(gl.float32)  # the lower half's R: whole, so that 2^R is exact in bf16
    b_r2 = (b_r * 0.5).to(gl.int32).to(gl.float32)
    s_from.index(1).store(gl.exp2(b_r).to(gl.bfloat16))         # 2^(b - R) -> 2^b of a lower row
    s_across.index(0).store(gl.exp2(b_r2).to(gl.bfloat16))      # both: F -> F' of an upper row; at once it could underflow
    s_across.index(1).store(gl.exp2(b_r - b_r2).to(gl.bfloat16))
    s_origin.index(0).store(gl.zeros([128], gl.float32, VECTOR) - c)
    s_origin.index(1).store(b_r - b_upper - c)
    b_r2 = gl.exp2((b_upper + b_lower + c) * 0.5)
    s_last.index(0).store(b_r2 * b_r2)                          # 2^F -> 2^(b_last - b), by halves of the rows
    s_last.index(1).store(gl.exp2(b_upper + b_lower - b_r + c))
    p_dec = dec + tile.to(gl.int64) * 128 + gl.arange(0, 128, VECTOR)
    gl.store(p_dec, gl.exp2(b_upper + b_lower))      # the chunk's decay

    # F = R - b - c: column factors 2^F, row factors 2^-F. kg = khat 2^(b_last - b); the columns of the upper half as the
    # rows of the lower see them: where those underflow, later rows of the channel weigh 2^15 times as much
    b_f = warpgroup_mma(b_prefix, s_gate, by_half(s_origin), use_acc=True)
    b_col = gl.exp2(b_f)
    b_row = gl.exp2(b_f * -1.0).to(gl.bfloat16)
    s_4.store(b_k * (b_col * by_half(s_last)).to(gl.bfloat16))
    emit(s_4, kg, row)
    b_kc = b_k * b_col.to(gl.bfloat16)
    s_1.store(b_kc)
    b_kc *= s_across.index(0).load(gl.SliceLayout(0, ACC))[None, :]
    s_3.store(b_kc * s_across.index(1).load(gl.SliceLayout(0, ACC))[None, :])

    # 2^b, exact multiples of the row factors; kx = khat 2^b waits in s_0 for w
    b_e = b_row * gl.exp2(-c).to(gl.bfloat16) * by_half(s_from)
    s_kx = view_as(s_0, gl.float16, [64, 128], TILE)
    s_kx.store(fp16_of(b_k * b_e))
    b_kr = operand(b_k * b_row, LEFT_C)

    # qhat = scale q / |q|, and qg = qhat 2^b
    mbarrier.wait(q_landed, 0)
    q_f = fp32_of(s_2.load(ACC))
    if USE_L2NORM:
        b_q = (q_f * (gl.rsqrt(gl.sum(q_f * q_f, axis=1) + 1e-6) * scale)[:, None]).to(gl.bfloat16)
    else:
        b_q = (q_f * scale).to(gl.bfloat16)
    s_2.store(b_q * b_e)
    emit(s_2, qg, row)

    # Aqk (j <= i) and L = beta_i Akk (j < i); what the upper triangle of a product overflows to goes by selection
    ri = i[:, None]
    cj = j[None, :]
    is_lower = gl.arange(0, 64, gl.SliceLayout(1, ACC_H))[:, None] >= 32
    b_qr = operand(b_q * b_row, LEFT_C)
    own_q, across_q = begin_product(b_qr, s_1, s_3)
    own_k, across_k = begin_product(b_kr, s_1, s_3)
    own_q, across_q, b_qr = warpgroup_mma_wait(2, deps=[own_q, across_q, b_qr])
    b_aqk = gl.where(ri >= cj, end_product(own_q, across_q, is_lower), 0.0).to(gl.bfloat16)
    own_k, across_k, b_kr = warpgroup_mma_wait(0, deps=[own_k, across_k, b_kr])
    b_l = gl.where(ri > cj, end_product(own_k, across_k, is_lower) * b_beta_i[:, None], 0.0).to(gl.float16)
    s_aqk = view_as(s_1, gl.bfloat16, [2, 64, 64], TILE).index(0)
    s_aqk.store(b_aqk)
    emit(s_aqk, aqk, row)

    # X = (I + L)^-1; then w = X beta kx, in fp16, as its rows nearly cancel where keys are alike, and u = X beta v
    b_beta_j = gl.convert_layout(b_beta_i, gl.SliceLayout(0, ACC_C))
    s_scratch = view_as(s_3, gl.float16, [2, 64, 64], TILE)
    s_p = view_as(s_1, gl.float16, [2, 64, 64], TILE).index(1)
    b_x = invert(b_l, ri, cj, s_scratch.index(0), s_scratch.index(1), s_p)
    b_x *= b_beta_j[None, :]
    b_w = warpgroup_mma(operand(b_x.to(gl.float16), LEFT), s_kx, zero, use_acc=False).to(gl.bfloat16)
    tma.store_wait(1)  # all but Aqk have left
    thread_barrier()
    s_2.store(b_w)
    emit(s_2, w, row)
    mbarrier.wait(v_landed, 0)
    if valid < 64:
        fill_past_end(s_5, valid, 0.0)
        fence_async_shared()
    s_4.store(warpgroup_mma(operand(b_x.to(gl.bfloat16), LEFT), s_5, zero, use_acc=False).to(gl.bfloat16))
    emit(s_4, u, row)
    tma.store_wait(0)
    s_1._keep_alive()  # until here: nothing may be placed over Aqk while it is copied
    mbarrier.invalidate(g_landed)
    mbarrier.invalidate(k_landed)
    mbarrier.invalidate(q_landed)
    mbarrier.invalidate(v_landed)
def matrices(device):
    """What ``launch`` takes as ``prefix``: M[i, j] = -1 where j <= i and both are rows of one half, else 0; fp16, in the order STORED."""
    half = -torch.ones(32, 32, dtype=torch.float16, device=device).tril()
    m = torch.block_diag(half, half)
    return m.reshape(4, 2, 8, 4, 2, 4, 2).permute(3, 0, 2, 5, 4, 1, 6).contiguous().view(-1)


def tiles_of(x, width):
    """The host descriptor of [64, 128] tiles of x [.., heads, width], its leading axes seen as one."""
    rows, heads, row_stride = x.numel() // (x.shape[-2] * width), x.shape[-2], x.stride(-3)
    return TensorDescriptor(x, [rows, heads * width], [row_stride, 1], [64, 128], TILE.value)


def rows_of(x):
    """The host descriptor of the [64, width] tiles of an intermediate [slots, HV, 64, width]."""
    width = x.shape[-1]
    return TensorDescriptor(x, [x.numel() // width, width], [width, 1], [64, width], TILE.value)


def launch(q, k, v, g, beta, A_log, dt_bias, chunk_table, prefix, qg, kg, w, u, aqk, dec, row_begin, row_end, slot_base,
           H, HV, lower_bound, scale, beta_scale, l2norm, sigmoid_beta,
           *, alone=False, num_warps=4, num_stages=1):
    """All that the rows [row_begin, row_end) of the chunk table can compute without the incoming state.

    q, k [.., H, 128], v [.., HV, 128], raw gate g [.., HV, 128] bf16, heads packed, row strides of 16 bytes' multiples;
    beta [.., HV] bf16 or fp32; A_log [HV] fp32 or None; dt_bias [HV, 128] fp32 or None; chunk_table int32 [rows, 4] =
    (first token, tokens, sequence, chunk in sequence); prefix = matrices(device). Writes qg, kg, w, u [slots, HV, 64, 128]
    and aqk [slots, HV, 64, 64] bf16, dec [slots, HV, 128] fp32; slot = row - slot_base. lower_bound in nats a token. alone: the
    table is that of one sequence, which starts at token 0.
    """
    if row_end > row_begin:
        return prepare_kernel[((row_end - row_begin) * HV,)](
            tiles_of(q, 128), tiles_of(k, 128), tiles_of(v, 128), tiles_of(g, 128), beta, A_log, dt_bias,
            chunk_table, prefix, *map(rows_of, (qg, kg, w, u, aqk)), dec, row_begin, slot_base, q.shape[:-2].numel(), alone, HV, HV // H,
            beta.stride(-2), beta.stride(-1), lower_bound, scale, beta_scale, l2norm, sigmoid_beta,
            num_warps=num_warps, num_stages=num_stages)

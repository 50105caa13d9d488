# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: prefill_prepare_levels.py.j2
# variant:  prefill_prepare__c64_k128_v128_bf16_softplus__levels
# inputs:   e692a1930adf0459316298905fb9fd707f753fd2cb79e578f740e29d33e71241

"""Prefill, first kernel, for sm90 and a gate without a bound: the decays of pairs of rows by levels, down to leaves of 8 rows.

One program of 4 warps handles one (chunk, value head) in the wgmma accumulator layout; products take the left operand
from registers and the right one from six 16 KB shared slots, some reused in place as the steps go on:
  s_0  gate (raw, then fp16 log2 decay)      -> khat f of level 16 -> Aqk and scratch of the inverse
  s_1  k                                     -> kx = khat 2^b, right operand of w
  s_2  q -> qg                               -> w
  s_3  gate of the leaves -> khat f of level 32 -> scratch of the inverse
  s_4  kg                                    -> u
  s_5  v, right operand of u
b is the inclusive prefix sum of the gate in log2 units. Rows i and j, whose numbers differ first in bit s, meet at R, the b
of the last row of the lower half of their parent of 2 s rows: 2^(b_i - b_j) = 2^(b_i - R) 2^(R - b_j). The exponents are
products of the gate with constant 0/1 matrices, so no sum refers to a later row than its pair: causal to the bit. Levels
below 16 touch the four 16x16 blocks on the diagonal only: one warp each, operands in registers. The pairs of a leaf of 8
rows share one R, 108 below the b of its first row; there a token's decay is taken as 2^-31 at least, so that both
factors stay within 2^+-109.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, mma_v2, tma, warpgroup_mma, warpgroup_mma_wait)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SPEC = {'family': 'prefill_prepare', 'chunk': 64, 'k': 128, 'v': 128, 'dtype': 'bf16', 'gate': 'softplus'}
SCHEDULE = {'form': 'levels'}

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


@gluon.jit
def block_products(b_k, b_q, b_columns):
    """The four 16x16 diagonal blocks of k columns^T and q columns^T, each by the warp that holds its rows."""
    zero = gl.zeros([4, 16, 16], gl.float32, ACC_16)
    right = operand(b_columns.reshape([4, 16, 128]).permute([0, 2, 1]), RIGHT_16)
    k, q = b_k.reshape([4, 16, 128]), b_q.reshape([4, 16, 128])
    return mma_v2(operand(k, LEFT_16), right, zero), mma_v2(operand(q, LEFT_16), right, zero)


@gluon.jit
def both_products(b_q, b_k, s_columns):
    """q columns^T and k columns^T [C, C], one beside the other."""
    zero = gl.zeros([64, 64], gl.float32, ACC_C)
    b_qk = warpgroup_mma(b_q, s_columns.permute([1, 0]), zero, use_acc=False, is_async=True)
    b_kk = warpgroup_mma(b_k, s_columns.permute([1, 0]), zero, use_acc=False, is_async=True)
    b_qk, b_kk, b_q, b_k = warpgroup_mma_wait(0, deps=[b_qk, b_kk, b_q, b_k])
    return b_qk, b_kk


@gluon.jit
def widen(b_blocks):
    """[4, 16, 16] -> fp32 [C, C] in ACC_C, with copies of a block beside it, from bf16."""
    x = b_blocks.to(gl.bfloat16)
    x2 = gl.join(x, x)
    wide = gl.join(x2, x2).reshape([4, 16, 16, 4]).permute([0, 1, 3, 2]).reshape([64, 64])
    return gl.convert_layout(wide, ACC_C)


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
    s_kk = gl.allocate_shared_memory(gl.float16, [4, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    s_qk = gl.allocate_shared_memory(gl.bfloat16, [4, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
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
    d = gl.arange(0, 128, gl.SliceLayout(0, ACC))
    slope = gl.exp(gl.load(A_log + i_h).to(gl.float32)) * -32.0
    if dt_bias is not None:
        b_bias = gl.load(dt_bias + i_h * 128 + d).to(gl.float32) * 1.4426950408889634
    else:
        b_bias = gl.zeros([128], gl.float32, gl.SliceLayout(0, ACC))
    zero = gl.zeros([64, 128], gl.float32, ACC)

    # Gate: log2 decay = -exp(A_log) (max(z, 0) + log2(1 + t)), z = x log2 e, t = 2^-|z|; log2(1 + t) / t by a polynomial.
    # Kept in fp16 as 32 times that, which the matrices undo: slow decays keep their bits.
    mbarrier.wait(g_landed, 0)
    if valid < 64:
        fill_past_end(s_0, valid, -1e30)
    b_z = fp32_of(s_0.load(ACC)) * 1.4426950408889634 + b_bias[None, :]
    b_t = gl.exp2(-gl.abs(b_z))
    b_p = b_t * 0.05965154990553856 + -0.22711944580078125
    b_p = b_p * b_t + 0.44189882278442383
    b_p = b_p * b_t + -0.7169874310493469
    b_p = b_p * b_t + 1.4426132440567017
    b_z = gl.maximum((b_p * b_t + gl.maximum(b_z, 0.0)) * slope, -5120.0)
    s_gate = view_as(s_0, gl.float16, [64, 128], TILE)
    s_gate.store(b_z.to(gl.float16))
    s_leaf = view_as(s_3, gl.float16, [64, 128], TILE)
    s_leaf.store(gl.maximum(b_z, -992.0).to(gl.float16))

    # khat = k / |k|, and kg = khat 2^(b_last - b)
    mbarrier.wait(k_landed, 0)
    if valid < 64:
        fill_past_end(s_1, valid, 0.0)
    b_k = s_1.load(ACC)
    if USE_L2NORM:
        k_f = fp32_of(b_k)
        b_k = (k_f * gl.rsqrt(gl.sum(k_f * k_f, axis=1) + 1e-6)[:, None]).to(gl.bfloat16)
    fence_async_shared()
    b_f = warpgroup_mma(0.03125 - b_prefix, s_gate, zero, use_acc=False)
    s_4.store(b_k * gl.exp2(b_f).to(gl.bfloat16))
    emit(s_4, kg, row)

    # 2^b: its last row is the chunk's decay; kx = khat 2^b waits in s_1 for w
    b_f = gl.exp2(warpgroup_mma(b_prefix, s_gate, zero, use_acc=False))
    i_k = gl.arange(0, 64, gl.SliceLayout(1, ACC))[:, None]
    p_dec = dec + tile.to(gl.int64) * 128 + d[None, :]
    gl.store(p_dec + i_k * 0, b_f, mask=i_k == 63)
    b_f = b_f.to(gl.bfloat16)
    s_kx = view_as(s_1, gl.float16, [64, 128], TILE)
    s_kx.store(fp16_of(b_k * b_f))

    # qhat = scale q / |q|, and qg = qhat 2^b
    mbarrier.wait(q_landed, 0)
    q_f = fp32_of(s_2.load(ACC))
    if USE_L2NORM:
        b_q = (q_f * (gl.rsqrt(gl.sum(q_f * q_f, axis=1) + 1e-6) * scale)[:, None]).to(gl.bfloat16)
    else:
        b_q = (q_f * scale).to(gl.bfloat16)
    s_2.store(b_q * b_f)
    emit(s_2, qg, row)

    # the blocks on the diagonal: leaves of 8 rows by factors 2^(b_i - R) and 2^(R - b_j), then level 8. What the upper
    # triangle of a product overflows to goes by selection
    i_16 = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, ACC_16)))[None, :, None]
    j_16 = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, ACC_16)))[None, None, :]
    apart = (i_16 ^ j_16) + gl.zeros([4, 16, 16], gl.int32, ACC_16)  # its highest bit tells the level of a pair
    b_m = load_prefix(prefix + 4096)
    b_f = warpgroup_mma(b_m, s_leaf, zero + 108.0, use_acc=True)
    b_m = load_prefix(prefix + 8192)
    b_col = b_k * gl.exp2(b_f * -1.0).to(gl.bfloat16)
    b_f = gl.exp2(b_f).to(gl.bfloat16)
    b_kk16, b_qk16 = block_products(b_k * b_f, b_q * b_f, b_col)
    # nobody reads these: the stores end the products before the next tile fills 64 registers
    s_kk.store(b_kk16.to(gl.float16))
    s_qk.store(b_qk16.to(gl.bfloat16))
    b_f = gl.exp2(warpgroup_mma(b_m, s_gate, zero, use_acc=False)).to(gl.bfloat16)
    b_m = load_prefix(prefix + 16384)
    b_kf = b_k * b_f
    kk, qk = block_products(b_kf, b_q * b_f, b_kf)
    b_kk16 = gl.where(apart >= 8, kk, b_kk16)
    b_qk16 = gl.where(apart >= 8, qk, b_qk16)
    s_kk.store(b_kk16.to(gl.float16))
    s_qk.store(b_qk16.to(gl.bfloat16))

    # levels 32 and 16: the whole tile
    b_f = warpgroup_mma(b_m, s_gate, zero, use_acc=False)
    b_m = load_prefix(prefix + 12288)
    b_f = gl.exp2(b_f).to(gl.bfloat16)
    b_kf = b_k * b_f
    s_3.store(b_kf)
    fence_async_shared()
    b_qk32, b_kk32 = both_products(operand(b_q * b_f, LEFT_C), operand(b_kf, LEFT_C), s_3)
    b_f = gl.exp2(warpgroup_mma(b_m, s_gate, zero, use_acc=False)).to(gl.bfloat16)
    b_kf = b_k * b_f
    s_0.store(b_kf)
    fence_async_shared()
    i = gl.arange(0, 64, gl.SliceLayout(1, ACC_C))
    j = gl.arange(0, 64, gl.SliceLayout(0, ACC_C))
    ri = i[:, None]
    cj = j[None, :]
    b_qk, b_kk = both_products(operand(b_q * b_f, LEFT_C), operand(b_kf, LEFT_C), s_0)
    b_qk = gl.where((ri ^ cj) >= 32, b_qk32, b_qk)
    b_kk = gl.where((ri ^ cj) >= 32, b_kk32, b_kk)

    # Aqk (j <= i) and L = beta_i Akk (j < i)
    p_beta = beta + i_t.to(gl.int64) * stride_beta_t + i_h * stride_beta_h
    past: gl.constexpr = -1e30 if USE_SIGMOID else 0.0
    b_beta = gl.load(p_beta + i * stride_beta_t, mask=i < valid, other=past).to(gl.float32)
    if USE_SIGMOID:
        b_beta = sigmoid(b_beta) * beta_scale
    same = (ri // 16) == (cj // 16)
    b_qk = gl.where(ri >= cj, gl.where(same, widen(b_qk16).to(gl.float32), b_qk), 0.0)
    b_kk = gl.where(ri > cj, gl.where(same, widen(b_kk16).to(gl.float32), b_kk) * b_beta[:, None], 0.0)
    b_l = b_kk.to(gl.float16)
    s_aqk = view_as(s_0, gl.bfloat16, [2, 64, 64], TILE).index(0)
    s_aqk.store(b_qk.to(gl.bfloat16))
    emit(s_aqk, aqk, row)

    # X = (I + L)^-1; then w = X beta kx, in fp16, as its rows nearly cancel where keys are alike, and u = X beta v
    b_beta_j = gl.convert_layout(b_beta, gl.SliceLayout(0, ACC_C))
    s_scratch = view_as(s_3, gl.float16, [2, 64, 64], TILE)
    s_p = view_as(s_0, gl.float16, [2, 64, 64], TILE).index(1)
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
    s_0._keep_alive()  # until here: nothing may be placed over Aqk while it is copied
    mbarrier.invalidate(g_landed)
    mbarrier.invalidate(k_landed)
    mbarrier.invalidate(q_landed)
    mbarrier.invalidate(v_landed)
def matrices(device):
    """[5, C * C] fp16, each in the order STORED, 1 / 32 where a row takes part in a sum: what ``launch`` takes as ``prefix``.

    First M[i, j] = (j <= i); then the rows between i and the first of its leaf; then for the levels s = 8, 16, 32 those
    between i and the middle of its parent of 2 s.
    """
    i = torch.arange(64, device=device)[:, None]
    j = torch.arange(64, device=device)[None, :]
    found = [j <= i, (j > i // 8 * 8) & (j <= i)]
    for s in (8, 16, 32):
        middle = i // (2 * s) * (2 * s) + s
        found.append(torch.where(i >= middle, (j >= middle) & (j <= i), (j > i) & (j < middle)))
    stored = [(m.half() * 0.03125).reshape(4, 2, 8, 4, 2, 4, 2).permute(3, 0, 2, 5, 4, 1, 6).reshape(-1) for m in found]
    return torch.stack(stored)


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

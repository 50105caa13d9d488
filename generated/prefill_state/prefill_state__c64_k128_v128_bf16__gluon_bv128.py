# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: prefill_state_gluon.py.j2
# variant:  prefill_state__c64_k128_v128_bf16__gluon_bv128
# inputs:   595ce826270a1c97fcae3ff1506324f407c5d6e16340a4b82c5330c0e0ef773e

"""Prefill, the state pass, for sm90: walks the chunks of one head of one sequence, 128 value channels a program.

The state h^T [BV, K] stays in fp32 accumulators. Per chunk, with h the incoming state:
  v' = u^T - h w^T        o^T = h qg^T + v' Aqk^T        h <- h 2^b_last + v' kg
One warp fetches tiles by TMA, num_stages chunks ahead; 8 warps compute. Products are asynchronous: v' is made from the first
while h qg^T runs, and o leaves through shared memory, in u's place, while v' kg runs. A launch covers a range of rows of
the chunk table and a range of segments, so the same kernel walks whole sequences, token windows, and the segments of a long
sequence side by side.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SPEC = {'family': 'prefill_state', 'chunk': 64, 'k': 128, 'v': 128, 'dtype': 'bf16'}
SCHEDULE = {'form': 'gluon', 'bv': 128}

ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 16]))
ACC_C = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, ACC, 2))
LEFT_C = gl.constexpr(gl.DotOperandLayout(0, ACC_C, 2))
TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
STATE = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))
TOKENS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # 16 bytes of a token a thread


# Triton 3.6 and later versions name these differently.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def is_padding(slot, pad_slot, pool_slots):
    return (slot < 0) | (slot == pad_slot) | (slot >= pool_slots)


@gluon.jit
def in_state(i_v, V_FIRST: gl.constexpr, layout: gl.constexpr):
    """Offsets of the tile h^T [BV, K] within one head's state, which is stored [V, K] or [K, V]."""
    i_d = gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]
    i_r = i_v * 128 + gl.arange(0, 128, gl.SliceLayout(1, layout))[:, None]
    return i_r * 128 + i_d if V_FIRST else i_d * 128 + i_r


@gluon.jit
def write_zeros(o, i_t, end, i_h, i_v, stride_o_t, stride_o_h):
    """o = 0 on all tokens of a padding sequence."""
    i_r = i_h * stride_o_h + i_v * 128 + gl.arange(0, 128, gl.SliceLayout(0, TOKENS))
    for at in range(0, (end - i_t).to(gl.int32), 64):
        t = i_t + at + gl.arange(0, 64, gl.SliceLayout(1, TOKENS))
        gl.store(o + t[:, None] * stride_o_t + i_r[None, :], gl.zeros([64, 128], gl.bfloat16, TOKENS), mask=(t < end)[:, None])


@gluon.jit
def fetch_tiles(maps, slots, full, empty, row, step, count, i_v, STAGES: gl.constexpr):
    """The fetching warp: keeps the tiles of the next STAGES chunks on their way."""
    qg, kg, w, u, aqk = maps
    s_qg, s_kg, s_w, s_u, s_aqk = slots
    for n in range(count):
        stage = n % STAGES
        mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, 73728)
        tma_load(w, [row, 0], bar, s_w.index(stage))
        tma_load(qg, [row, 0], bar, s_qg.index(stage))
        tma_load(u, [row, i_v * 128], bar, s_u.index(stage))
        tma_load(aqk, [row, 0], bar, s_aqk.index(stage))
        tma_load(kg, [row, 0], bar, s_kg.index(stage))
        row += step


@gluon.jit
def walk(b_h, b_dec, dec, dec_step, p_o, o_step, rows_left, slots, full, empty, lo, hi, count, STAGES: gl.constexpr):
    """Carry h^T through the chunks [lo, hi) of this program's ``count`` and write their outputs."""
    s_qg, s_kg, s_w, s_u, s_aqk = slots
    i_d = gl.arange(0, 128, gl.SliceLayout(0, ACC))
    i_t = gl.arange(0, 64, gl.SliceLayout(1, TOKENS))[:, None]
    zero = gl.zeros([128, 64], gl.float32, ACC_C)
    for n in range(lo, hi):
        stage = n % STAGES
        b_hb = gl.convert_layout(b_h.to(gl.bfloat16), LEFT_C, assert_trivial=True)
        # the decay of h comes before the products: while one runs, ptxas waits for all before it lets accumulators be read
        b_h = b_h * b_dec[None, :]
        mbarrier.wait(full.index(stage), n // STAGES & 1)
        # h w^T and h qg^T; v' = u^T - h w^T
        b_hw = warpgroup_mma(b_hb, s_w.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        b_o = warpgroup_mma(b_hb, s_qg.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        s_uo = s_u.index(stage).permute([1, 0])
        b_u = s_uo.load(ACC_C).to(gl.float32)
        dec += dec_step
        b_dec = gl.load(dec + i_d, mask=i_d < 128 * (count - 1 - n), other=1.0)  # 2^b_last of the next chunk
        b_hw = warpgroup_mma_wait(1, deps=[b_hw])
        b_vn = gl.convert_layout((b_u - b_hw).to(gl.bfloat16), LEFT, assert_trivial=True)
        # o^T = h qg^T + v' Aqk^T; h <- h 2^b_last + v' kg
        b_o = warpgroup_mma(b_vn, s_aqk.index(stage).permute([1, 0]), b_o, use_acc=True, is_async=True)
        b_h = warpgroup_mma(b_vn, s_kg.index(stage), b_h, use_acc=True, is_async=True)
        b_o, b_hb = warpgroup_mma_wait(1, deps=[b_o, b_hb])
        s_uo.store(b_o.to(gl.bfloat16))  # each warp where it has read u
        thread_barrier()
        gl.store(p_o, s_u.index(stage).load(TOKENS), mask=i_t < rows_left)
        p_o += o_step
        rows_left -= 64
        b_h, b_vn = warpgroup_mma_wait(0, deps=[b_h, b_vn])
        fence_async_shared()
        mbarrier.arrive(empty.index(stage), count=1)
    return b_h, b_dec, dec, p_o, rows_left


@gluon.jit
def carry_state(b_h, dec, dec_step, p_o, o_step, rows_left, slots, full, empty, count, first, ckpt_offsets, ckpt_slots, ckpt_pool,
                CKPTS, i_v, length, pad_slot, pool_slots, stride_ckpt, CKPT: gl.constexpr, V_FIRST: gl.constexpr, STAGES: gl.constexpr):
    """The computing warps: from the incoming to the outgoing h^T [BV, K]."""
    i_d = gl.arange(0, 128, gl.SliceLayout(0, ACC))
    b_dec = gl.load(dec + i_d, mask=i_d < 128 * count, other=1.0)
    if CKPT:
        # Stop at each wanted interior state: after token ckpt_offsets[n, p], into the slot beside it.
        here = count * 0
        for i_p in range(0, CKPTS + 1):
            at = gl.load(ckpt_offsets + i_p, mask=i_p < CKPTS, other=-1).to(gl.int32)
            wanted = gl.where(i_p < CKPTS, at // 64 - first, count)
            stop = gl.maximum(here, gl.minimum(wanted, count))
            b_h, b_dec, dec, p_o, rows_left = walk(
                b_h, b_dec, dec, dec_step, p_o, o_step, rows_left, slots, full, empty, here, stop, count, STAGES)
            here = stop
            reached = (wanted > 0) & (wanted == stop) & (at % 64 == 0) & (at <= length)
            slot = gl.load(ckpt_slots + i_p, mask=i_p < CKPTS, other=-1).to(gl.int32)
            if reached & (not is_padding(slot, pad_slot, pool_slots)):
                p_ckpt = ckpt_pool + slot.to(gl.int64) * stride_ckpt + in_state(i_v, V_FIRST, ACC)
                gl.store(p_ckpt, b_h.to(ckpt_pool.dtype.element_ty))  # all shared memory is taken: no other layout
    else:
        b_h, b_dec, dec, p_o, rows_left = walk(
            b_h, b_dec, dec, dec_step, p_o, o_step, rows_left, slots, full, empty, 0, count, count, STAGES)
    return (b_h,)


@gluon.jit(do_not_specialize=[
    "T", "row_begin", "row_end", "slot_base", "seg_begin", "seg_chunks", "mid_stride", "pad_slot", "pool_slots", "N", "HV", "CKPTS",
    "stride_read", "stride_write", "stride_at", "stride_ckpt_slots"])
def state_kernel(qg, kg, w, u, aqk, dec, o, cu_seqlens, chunk_offsets, T, row_begin, row_end, slot_base, seg_begin, seg_chunks,
                 h_in, read_slots, has_initial, h_out, write_slots, mid_in, mid_out, mid_stride, ckpt_offsets, ckpt_slots, ckpt_pool,
                 pad_slot, pool_slots, N, HV, stride_o_t, stride_o_h, stride_in, stride_in_h, stride_out, stride_out_h,
                 stride_ckpt, stride_ckpt_h, stride_read, stride_write, stride_at, stride_ckpt_slots, CKPTS,
                 V_FIRST: gl.constexpr, STAGES: gl.constexpr):
    pid = gl.program_id(0)
    i_v = pid % 1
    i_h = pid // 1 % HV
    i_n = pid // (1 * HV) % N
    i_s = seg_begin + pid // (1 * HV * N)
    c_0 = gl.load(chunk_offsets + i_n).to(gl.int32)      # the sequence's rows of the chunk table
    c_1 = gl.load(chunk_offsets + i_n + 1).to(gl.int32)
    bos = gl.minimum(gl.maximum(gl.load(cu_seqlens + i_n), 0), T).to(gl.int64)  # the tokens that exist
    eos = gl.minimum(gl.maximum(gl.load(cu_seqlens + i_n + 1), bos), T).to(gl.int64)
    slot_in = i_n
    slot_out = i_n
    is_padded = i_n < 0   # a padding sequence is neither read nor written, and its outputs are zero
    is_written = i_n >= 0
    if write_slots is not None:
        slot_out = gl.load(write_slots + i_n * stride_write).to(gl.int32)
        is_padded = is_padding(slot_out, pad_slot, pool_slots)
        is_written = not is_padded
    if read_slots is not None:
        slot_in = gl.load(read_slots + i_n * stride_read).to(gl.int32)
        is_padded = is_padding(slot_in, pad_slot, pool_slots)
    starts = not is_padded
    if has_initial is not None:
        starts = starts & (gl.load(has_initial + i_n) != 0)
    lo = gl.maximum(c_0 + i_s * seg_chunks, row_begin)   # this launch's rows of it
    hi = gl.minimum(gl.minimum(c_0 + (i_s + 1) * seg_chunks, c_1), row_end)
    is_empty = (c_0 == c_1) & (row_begin == 0) & (i_s == 0)  # such a sequence keeps its state
    is_live = ((lo < hi) | is_empty) & (not is_padded)
    i_t = bos + (lo - c_0) * 64
    if is_padded & (lo < hi):
        write_zeros(o, i_t, gl.minimum(i_t + (hi - lo) * 64, eos), i_h, i_v, stride_o_t, stride_o_h)
    count = gl.where(is_live, gl.maximum(hi - lo, 0), 0)

    # The incoming state: the sequence's own, or the one an earlier launch left here.
    mid = ((i_n * mid_stride + i_s).to(gl.int64) * HV + i_h) * 16384
    b_h = gl.zeros([128, 128], gl.float32, ACC)
    if mid_in is not None:
        if is_live & (lo > c_0):
            b_h = gl.convert_layout(gl.load(mid_in + mid + in_state(i_v, True, STATE)), ACC)
    if h_in is not None:
        if is_live & (lo <= c_0) & starts:
            p_in = h_in + slot_in.to(gl.int64) * stride_in + i_h * stride_in_h + in_state(i_v, V_FIRST, STATE)
            b_h = gl.convert_layout(gl.load(p_in).to(gl.float32), ACC)

    s_qg = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], TILE)
    s_kg = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], TILE)
    s_w = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], TILE)
    s_u = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], TILE)
    s_aqk = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())   # a stage's tiles are there
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())  # they are read, o has left
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    first = (lo - slot_base) * HV + i_h
    slots = (s_qg, s_kg, s_w, s_u, s_aqk)
    p_dec = dec + first.to(gl.int64) * 128
    i_r = i_h * stride_o_h + i_v * 128 + gl.arange(0, 128, gl.SliceLayout(0, TOKENS))[None, :]
    p_o = o + (i_t + gl.arange(0, 64, gl.SliceLayout(1, TOKENS)))[:, None] * stride_o_t + i_r
    CKPT: gl.constexpr = ckpt_pool is not None
    if CKPT:
        at_ckpt = ckpt_offsets + i_n * stride_at
        to_ckpt = ckpt_slots + i_n * stride_ckpt_slots
        pool = ckpt_pool + i_h * stride_ckpt_h
    else:  # None cannot be handed on
        at_ckpt, to_ckpt, pool = chunk_offsets, chunk_offsets, dec
    b_h = gl.warp_specialize([
        (carry_state, (b_h, p_dec, HV * 128, p_o, 64 * stride_o_t, (eos - i_t).to(gl.int32), slots, full, empty, count, lo - c_0,
                       at_ckpt, to_ckpt, pool, CKPTS, i_v, (eos - bos).to(gl.int32), pad_slot, pool_slots, stride_ckpt, CKPT,
                       V_FIRST, STAGES)),
        (fetch_tiles, ((qg, kg, w, u, aqk), slots, full, empty, first * 64, HV * 64, count, i_v, STAGES)),
    ], [1], [24])[0]

    # The outgoing state: the sequence's last, or one for a later launch.
    is_last = (hi >= c_1) | is_empty
    if h_out is not None:
        if is_live & is_last & is_written:
            p_out = h_out + slot_out.to(gl.int64) * stride_out + i_h * stride_out_h + in_state(i_v, V_FIRST, STATE)
            gl.store(p_out, gl.convert_layout(b_h, STATE).to(h_out.dtype.element_ty))
    if mid_out is not None:
        if is_live & (not is_last):
            gl.store(mid_out + mid + in_state(i_v, True, STATE), gl.convert_layout(b_h, STATE))


def rows_of(x, width):
    """The host descriptor of the [64, width] tiles of an intermediate [slots, HV, 64, channels]."""
    channels = x.shape[-1]
    return TensorDescriptor(x, [x.numel() // channels, channels], [channels, 1], [64, width], TILE.value)


def launch(qg, kg, w, u, aqk, dec, o, cu_seqlens, chunk_offsets, row_begin, row_end, slot_base, seg_begin, segs, seg_chunks,
           h_in, read_slots, has_initial, h_out, write_slots, mid_in, mid_out, mid_stride, ckpt_offsets, ckpt_slots, ckpt_pool,
           pad_slot, N, HV, v_first, *, num_warps=4, num_stages=3):
    """Outputs and states of the rows [row_begin, row_end) of the chunk table, for segments [seg_begin, seg_begin + segs).

    qg, kg, w [slots, HV, 64, 128], u [slots, HV, 64, 128], aqk [slots, HV, 64, 64] bf16, dec [slots, HV, 128] fp32 from
    prefill_prepare; o [.., HV, 128] bf16. A segment is seg_chunks chunks of one sequence. h_in, h_out: pools
    [slots, HV, 128, 128] (v_first) or [slots, HV, 128, 128], fp32 or bf16, or None; read_slots, write_slots int32 [N] or None
    (slot = sequence); a slot that is negative, pad_slot or not in the pool is padding. A sequence cut by the launch's range
    starts from mid_in[n * mid_stride + s] and ends in mid_out[same], fp32 [.., HV, 128, 128].
    ckpt_offsets [N, P] tokens (multiples of 64, ascending), ckpt_slots [N, P] int32 into ckpt_pool.
    """
    pool = h_in if read_slots is not None else h_out if write_slots is not None else ckpt_pool
    of = lambda x, *axes: [0 if x is None else x.stride(axis) for axis in axes]
    return state_kernel[(1 * HV * N * segs,)](
        rows_of(qg, 128), rows_of(kg, 128), rows_of(w, 128), rows_of(u, 128), rows_of(aqk, 64), dec, o,
        cu_seqlens, chunk_offsets, o.shape[:-2].numel(), row_begin, row_end, slot_base, seg_begin, seg_chunks, h_in,
        read_slots, has_initial, h_out, write_slots, mid_in, mid_out, mid_stride, ckpt_offsets, ckpt_slots, ckpt_pool, pad_slot,
        0 if pool is None else pool.shape[0], N, HV, *of(o, -3, -2), *of(h_in, 0, 1), *of(h_out, 0, 1),
        *of(ckpt_pool, 0, 1), *of(read_slots, 0), *of(write_slots, 0), *of(ckpt_offsets, 0), *of(ckpt_slots, 0),
        0 if ckpt_offsets is None else ckpt_offsets.shape[1], v_first, num_stages, num_warps=num_warps, num_stages=num_stages, maxnreg=168)

# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: conv_prefill.py.j2
# variant:  conv_prefill__bf16__bd128_bt16_rows4
# inputs:   ba237b373f374ff6fa96836f16eab03e28cf9d7935140fd42d66400cfb1f9ae7

"""Depthwise causal convolution of width 4 over packed sequences, with bias and SiLU, and the new conv state.

y[t, d] = act(bias[d] + sum_w weight[d, w] * x[t - 3 + w, d]), fp32 sums. A program takes one block of tokens of one
sequence and 128 channels; it walks down the tokens, 4 rows at a time, with the last 3 rows in registers.
"""

import torch
import triton
import triton.language as tl

SPEC = {'family': 'conv_prefill', 'dtype': 'bf16'}
SCHEDULE = {'bd': 128, 'bt': 16, 'rows': 4}
BD = tl.constexpr(128)


@triton.jit
def convolve(b_x0, b_x1, b_x2, b_x3, b_w0, b_w1, b_w2, b_w3, b_bias, SILU: tl.constexpr):
    """act(bias + sum_w weight_w x_w), oldest tap first. Each product is fused into the sum, in a fixed order: the result
    depends on neither the tile nor the compiler's choice of what to fuse."""
    b_y = b_bias
    b_y = tl.fma(b_x0.to(tl.float32), b_w0, b_y)
    b_y = tl.fma(b_x1.to(tl.float32), b_w1, b_y)
    b_y = tl.fma(b_x2.to(tl.float32), b_w2, b_y)
    b_y = tl.fma(b_x3.to(tl.float32), b_w3, b_y)
    if SILU:
        b_y = b_y / (1.0 + tl.exp2(b_y * -1.4426950408889634))
    return b_y


@triton.jit
def find_block(cu_seqlens, i_b, seqs, block_m):
    """(sequence, block in it) of program i_b without a table: sequence n owns the numbers from cu[n] // block_m + n on."""
    lo, hi = i_b * 0, seqs - 1
    while lo < hi:
        mid = (lo + hi + 1) // 2
        owns = (tl.load(cu_seqlens + mid) // block_m).to(tl.int32) + mid <= i_b
        lo = tl.where(owns, mid, lo)
        hi = tl.where(owns, hi, mid - 1)
    return lo, i_b - (tl.load(cu_seqlens + lo) // block_m).to(tl.int32) - lo


@triton.jit(do_not_specialize=["seqs", "tokens", "block_m", "slots", "pad_slot"])
def conv_prefill_kernel(
    x, weight, bias, out,                          # [B, T, D], [D, 4], [D] or None, [B, T, D]
    cu_seqlens, batch_ptr, block_ptr,              # [N + 1] or None; the schedule, int32 [programs], or None
    pool, cache_indices, has_initial_state,        # [slots, >= 3, D], [N], [N] bool, each may be None
    seqs, tokens, dim, block_m, slots, pad_slot,
    stride_xb, stride_xt, stride_ob, stride_ot, stride_wd, stride_ww, stride_ps, stride_pc, stride_ci,
    SILU: tl.constexpr,
    ROWWISE: tl.constexpr,                         # whether a channel's taps lie side by side in memory
    INITIAL: tl.constexpr,                         # whether old lines are read: those of has_initial_state, or all
    STAGES: tl.constexpr,                          # groups of 4 rows under way: being loaded, or summed
):
    n_d = tl.cdiv(dim, BD)
    i_b, i_d = tl.program_id(0) // n_d, tl.program_id(0) % n_d
    o_d = i_d * BD + tl.arange(0, BD)
    m_d = o_d < dim

    # [BD] fp32 each: the taps, oldest first.
    if ROWWISE:
        b_w = tl.load(weight + o_d[:, None] * stride_wd + tl.arange(0, 4)[None, :], mask=m_d[:, None], other=0.0).to(tl.float32)
        b_even, b_odd = tl.split(tl.reshape(b_w, [BD, 2, 2]))
        b_w0, b_w2 = tl.split(b_even)
        b_w1, b_w3 = tl.split(b_odd)
    else:
        b_w0 = tl.load(weight + o_d * stride_wd + 0 * stride_ww, mask=m_d, other=0.0).to(tl.float32)
        b_w1 = tl.load(weight + o_d * stride_wd + 1 * stride_ww, mask=m_d, other=0.0).to(tl.float32)
        b_w2 = tl.load(weight + o_d * stride_wd + 2 * stride_ww, mask=m_d, other=0.0).to(tl.float32)
        b_w3 = tl.load(weight + o_d * stride_wd + 3 * stride_ww, mask=m_d, other=0.0).to(tl.float32)
    if bias is None:
        b_bias = tl.zeros([BD], dtype=tl.float32)
    else:
        b_bias = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)

    # This program's sequence and its block of tokens there.
    if cu_seqlens is None:
        blocks = tl.cdiv(tokens, block_m)
        i_n, i_t = i_b // blocks, i_b % blocks
        length = tokens.to(tl.int64)
        p_x = x + i_n.to(tl.int64) * stride_xb
        p_o = out + i_n.to(tl.int64) * stride_ob
    else:
        if batch_ptr is None:
            i_n, i_t = find_block(cu_seqlens, i_b, seqs, block_m)
        else:
            i_n, i_t = tl.load(batch_ptr + i_b), tl.load(block_ptr + i_b)
            if (i_n < 0) | (i_n >= seqs):          # the unused end of a bounded schedule
                return
        bos = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n), 0), tokens).to(tl.int64)
        length = tl.minimum(tl.load(cu_seqlens + i_n + 1), tokens).to(tl.int64) - bos
        p_x = x + bos * stride_xt
        p_o = out + bos * stride_ot
    first = i_t.to(tl.int64) * block_m             # the block's first token, counted in its sequence
    rows = tl.minimum(length - first, block_m).to(tl.int32)
    if (rows <= 0) | (i_t < 0):
        return

    p_x += first * stride_xt + o_d
    p_o += first * stride_ot + o_d

    # A padding slot: nothing is read or written but zeros to the output.
    slot = i_n.to(tl.int64)
    if cache_indices is not None:
        slot = tl.load(cache_indices + slot * stride_ci).to(tl.int64)
        if (slot == pad_slot) | (slot < 0) | (slot >= slots):
            b_0 = tl.zeros([BD], dtype=out.dtype.element_ty)
            for _ in range(0, rows):
                tl.store(p_o, b_0, mask=m_d)
                p_o += stride_ot
            return

    # The 3 rows before the block, b_h1 the latest: of x, or of the cache line before the sequence's first token.
    b_h3 = tl.load(p_x - 3 * stride_xt, mask=m_d & (i_t > 0), other=0.0).to(tl.float32)
    b_h2 = tl.load(p_x - 2 * stride_xt, mask=m_d & (i_t > 0), other=0.0).to(tl.float32)
    b_h1 = tl.load(p_x - 1 * stride_xt, mask=m_d & (i_t > 0), other=0.0).to(tl.float32)
    if pool is not None:
        p_line = pool + slot * stride_ps + o_d
        if INITIAL:
            known = i_t == 0
            if has_initial_state is not None:
                known = known & tl.load(has_initial_state + i_n).to(tl.int1)
            b_g = tl.load(p_line + 0 * stride_pc, mask=m_d & known, other=0.0).to(tl.float32)
            b_h3 = tl.where(known, b_g, b_h3)
            b_g = tl.load(p_line + 1 * stride_pc, mask=m_d & known, other=0.0).to(tl.float32)
            b_h2 = tl.where(known, b_g, b_h2)
            b_g = tl.load(p_line + 2 * stride_pc, mask=m_d & known, other=0.0).to(tl.float32)
            b_h1 = tl.where(known, b_g, b_h1)
    # The new state, by the sequence's first block: the last 3 rows of (old line, x).
    if pool is not None:
        if i_t == 0:
            tl.debug_barrier()                     # every thread has read the old line
            last = length - 3        # the token that column 0 keeps; below 0: a row of the old line
            b_s = tl.load(p_x + last * stride_xt, mask=m_d & (last >= 0), other=0.0).to(tl.float32)
            b_s = tl.where(last == -1, b_h1, b_s)
            b_s = tl.where(last == -2, b_h2, b_s)
            tl.store(p_line + 0 * stride_pc, b_s.to(pool.dtype.element_ty), mask=m_d)
            last = length - 2        # the token that column 1 keeps; below 0: a row of the old line
            b_s = tl.load(p_x + last * stride_xt, mask=m_d & (last >= 0), other=0.0).to(tl.float32)
            b_s = tl.where(last == -1, b_h1, b_s)
            tl.store(p_line + 1 * stride_pc, b_s.to(pool.dtype.element_ty), mask=m_d)
            last = length - 1        # the token that column 2 keeps; below 0: a row of the old line
            b_s = tl.load(p_x + last * stride_xt, mask=m_d & (last >= 0), other=0.0).to(tl.float32)
            tl.store(p_line + 2 * stride_pc, b_s.to(pool.dtype.element_ty), mask=m_d)
    for i in tl.range(0, rows, 4, num_stages=STAGES):
        b_x0 = tl.load(p_x + 0 * stride_xt, mask=m_d & (i + 0 < rows), other=0.0)
        b_x1 = tl.load(p_x + 1 * stride_xt, mask=m_d & (i + 1 < rows), other=0.0)
        b_x2 = tl.load(p_x + 2 * stride_xt, mask=m_d & (i + 2 < rows), other=0.0)
        b_x3 = tl.load(p_x + 3 * stride_xt, mask=m_d & (i + 3 < rows), other=0.0)
        b_y = convolve(b_h3, b_h2, b_h1, b_x0, b_w0, b_w1, b_w2, b_w3, b_bias, SILU)
        tl.store(p_o + 0 * stride_ot, b_y.to(out.dtype.element_ty), mask=m_d & (i + 0 < rows))
        b_y = convolve(b_h2, b_h1, b_x0, b_x1, b_w0, b_w1, b_w2, b_w3, b_bias, SILU)
        tl.store(p_o + 1 * stride_ot, b_y.to(out.dtype.element_ty), mask=m_d & (i + 1 < rows))
        b_y = convolve(b_h1, b_x0, b_x1, b_x2, b_w0, b_w1, b_w2, b_w3, b_bias, SILU)
        tl.store(p_o + 2 * stride_ot, b_y.to(out.dtype.element_ty), mask=m_d & (i + 2 < rows))
        b_y = convolve(b_x0, b_x1, b_x2, b_x3, b_w0, b_w1, b_w2, b_w3, b_bias, SILU)
        tl.store(p_o + 3 * stride_ot, b_y.to(out.dtype.element_ty), mask=m_d & (i + 3 < rows))
        b_h3 = b_x1.to(tl.float32)
        b_h2 = b_x2.to(tl.float32)
        b_h1 = b_x3.to(tl.float32)
        p_x += 4 * stride_xt
        p_o += 4 * stride_ot


def launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    cu_seqlens: torch.Tensor | None, batch_ptr: torch.Tensor | None, block_ptr: torch.Tensor | None,
    pool: torch.Tensor | None, cache_indices: torch.Tensor | None, has_initial_state: torch.Tensor | None,
    seqs: int, tokens: int, programs: int, pad_slot: int = -1, *,
    silu: bool = True, initial: bool = True, block_m: int = 16,
    num_warps: int = 1, num_stages: int = 3,
):
    """Run the kernel on ``programs`` token blocks of ``block_m`` tokens.

    x, out [B, T, D] bf16, unit stride along D; weight [D, 4] and bias [D] of any float dtype; cu_seqlens [N + 1] with B = 1,
    or None for B sequences of ``tokens`` = T tokens. batch_ptr, block_ptr int32 [>= programs]: the schedule; None searches
    cu_seqlens instead, with programs = T // block_m + N. pool [slots, >= 3, D], unit stride along D, changed in place:
    the line of sequence n at cache_indices[n], or n; a slot that is pad_slot or outside the pool is padding. With
    ``initial`` the lines of has_initial_state [N] bool, or all, hold a history.
    """
    dim = x.shape[-1]
    grid = (programs * ((dim + 127) // 128),)
    conv_prefill_kernel[grid](
        x, weight, bias, out, cu_seqlens, batch_ptr, block_ptr, pool, cache_indices, has_initial_state,
        seqs, tokens, dim, block_m, 0 if pool is None else pool.shape[0], pad_slot,
        x.stride(0), x.stride(1), out.stride(0), out.stride(1), weight.stride(0), weight.stride(1),
        0 if pool is None else pool.stride(0), 0 if pool is None else pool.stride(1),
        0 if cache_indices is None else cache_indices.stride(0),
        SILU=silu, ROWWISE=weight.stride(1) == 1, INITIAL=initial, STAGES=num_stages, num_warps=num_warps, num_stages=num_stages,
    )

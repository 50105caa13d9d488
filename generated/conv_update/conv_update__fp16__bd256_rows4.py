# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: conv_update.py.j2
# variant:  conv_update__fp16__bd256_rows4
# inputs:   d2d52ed1c51de4045d95cb7557823aaa2a64e3794fbc04c0b9641585a60c04a0

"""One decode step of the depthwise causal convolution of width 4: bias, SiLU, and the cache line moved on in place.

y[t, d] = act(bias[d] + sum_w weight[d, w] * x[t - 3 + w, d]), fp32 sums, x continued to the left by the row's cache line.
A program takes all tokens of one row and 256 channels.
"""

import torch
import triton
import triton.language as tl

SPEC = {'family': 'conv_update', 'dtype': 'fp16'}
SCHEDULE = {'bd': 256, 'rows': 4}
BD = tl.constexpr(256)


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


@triton.jit(do_not_specialize=["columns", "slots", "pad_slot"])
def conv_update_kernel(
    x, weight, bias, out,                          # [N, T, D] or [tokens, D], [D, 4], [D] or None, as x
    query_start_loc, pool, cache_indices,          # [N + 1] or None; [slots, columns, D]; [N] or None
    has_initial_state, num_accepted,               # [N] bool, [N], each may be None
    tokens, dim, columns, slots, pad_slot,
    stride_xb, stride_xt, stride_ob, stride_ot, stride_wd, stride_ww, stride_ps, stride_pc, stride_ci, stride_na,
    SILU: tl.constexpr,
    ROWWISE: tl.constexpr,                         # whether a channel's taps lie side by side in memory
):
    n_d = tl.cdiv(dim, BD)
    i_n, i_d = (tl.program_id(0) // n_d).to(tl.int64), tl.program_id(0) % n_d
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

    # The row's tokens.
    if query_start_loc is None:
        rows = tokens
        p_x = x + i_n * stride_xb + o_d
        p_o = out + i_n * stride_ob + o_d
    else:
        bos = tl.minimum(tl.maximum(tl.load(query_start_loc + i_n), 0), tokens).to(tl.int64)
        rows = (tl.minimum(tl.load(query_start_loc + i_n + 1), tokens) - bos).to(tl.int32)
        p_x = x + bos * stride_xt + o_d
        p_o = out + bos * stride_ot + o_d
        if rows <= 0:
            return

    # A padding slot: nothing is read or written but zeros to the output.
    slot = i_n
    if cache_indices is not None:
        slot = tl.load(cache_indices + i_n * stride_ci).to(tl.int64)
        if (slot == pad_slot) | (slot < 0) | (slot >= slots):
            b_0 = tl.zeros([BD], dtype=out.dtype.element_ty)
            for _ in range(0, rows):
                tl.store(p_o, b_0, mask=m_d)
                p_o += stride_ot
            return
    p_line = pool + slot * stride_ps + o_d

    # The history, b_h1 the latest: 3 columns, from the one after the last step's accepted tokens.
    p_h = p_line
    if num_accepted is not None:
        accepted = tl.load(num_accepted + i_n * stride_na).to(tl.int32)
        accepted = tl.minimum(tl.maximum(accepted, 1), columns - 2)
        p_h += (accepted - 1) * stride_pc
    m_h = m_d
    if has_initial_state is not None:
        m_h = m_d & tl.load(has_initial_state + i_n).to(tl.int1)
    b_g3 = tl.load(p_h + 0 * stride_pc, mask=m_h, other=0.0).to(tl.float32)
    b_h3 = b_g3
    b_g2 = tl.load(p_h + 1 * stride_pc, mask=m_h, other=0.0).to(tl.float32)
    b_h2 = b_g2
    b_g1 = tl.load(p_h + 2 * stride_pc, mask=m_h, other=0.0).to(tl.float32)
    b_h1 = b_g1
    tl.debug_barrier()                             # every thread has read the old line

    # Token t goes to column shift + t of the line, and so does the history, whose latest row is t = -1.
    if num_accepted is None:
        shift = 3 - rows
    else:
        shift = 2
    for i in range(0, rows, 4):
        b_x0 = tl.load(p_x + 0 * stride_xt, mask=m_d & (i + 0 < rows), other=0.0).to(tl.float32)
        b_x1 = tl.load(p_x + 1 * stride_xt, mask=m_d & (i + 1 < rows), other=0.0).to(tl.float32)
        b_x2 = tl.load(p_x + 2 * stride_xt, mask=m_d & (i + 2 < rows), other=0.0).to(tl.float32)
        b_x3 = tl.load(p_x + 3 * stride_xt, mask=m_d & (i + 3 < rows), other=0.0).to(tl.float32)
        b_y = convolve(b_h3, b_h2, b_h1, b_x0, b_w0, b_w1, b_w2, b_w3, b_bias, SILU)
        tl.store(p_o + 0 * stride_ot, b_y.to(out.dtype.element_ty), mask=m_d & (i + 0 < rows))
        column = shift + i + 0
        m_s = m_d & (i + 0 < rows) & (column >= 0) & (column < columns)
        tl.store(p_line + column * stride_pc, b_x0.to(pool.dtype.element_ty), mask=m_s)
        b_y = convolve(b_h2, b_h1, b_x0, b_x1, b_w0, b_w1, b_w2, b_w3, b_bias, SILU)
        tl.store(p_o + 1 * stride_ot, b_y.to(out.dtype.element_ty), mask=m_d & (i + 1 < rows))
        column = shift + i + 1
        m_s = m_d & (i + 1 < rows) & (column >= 0) & (column < columns)
        tl.store(p_line + column * stride_pc, b_x1.to(pool.dtype.element_ty), mask=m_s)
        b_y = convolve(b_h1, b_x0, b_x1, b_x2, b_w0, b_w1, b_w2, b_w3, b_bias, SILU)
        tl.store(p_o + 2 * stride_ot, b_y.to(out.dtype.element_ty), mask=m_d & (i + 2 < rows))
        column = shift + i + 2
        m_s = m_d & (i + 2 < rows) & (column >= 0) & (column < columns)
        tl.store(p_line + column * stride_pc, b_x2.to(pool.dtype.element_ty), mask=m_s)
        b_y = convolve(b_x0, b_x1, b_x2, b_x3, b_w0, b_w1, b_w2, b_w3, b_bias, SILU)
        tl.store(p_o + 3 * stride_ot, b_y.to(out.dtype.element_ty), mask=m_d & (i + 3 < rows))
        column = shift + i + 3
        m_s = m_d & (i + 3 < rows) & (column >= 0) & (column < columns)
        tl.store(p_line + column * stride_pc, b_x3.to(pool.dtype.element_ty), mask=m_s)
        b_h3 = b_x1
        b_h2 = b_x2
        b_h1 = b_x3
        p_x += 4 * stride_xt
        p_o += 4 * stride_ot
    tl.store(p_line + (shift - 3) * stride_pc, b_g3.to(pool.dtype.element_ty), mask=m_d & (shift >= 3))
    tl.store(p_line + (shift - 2) * stride_pc, b_g2.to(pool.dtype.element_ty), mask=m_d & (shift >= 2))
    tl.store(p_line + (shift - 1) * stride_pc, b_g1.to(pool.dtype.element_ty), mask=m_d & (shift >= 1))
def launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    query_start_loc: torch.Tensor | None, pool: torch.Tensor, cache_indices: torch.Tensor | None,
    has_initial_state: torch.Tensor | None, num_accepted: torch.Tensor | None,
    seqs: int, pad_slot: int = -1, *,
    silu: bool = True, num_warps: int = 4, num_stages: int = 1,
):
    """Run one step of ``seqs`` rows.

    x, out [N, T, D] fp16, or [1, tokens, D] with query_start_loc [N + 1]; unit stride along D; out may be x. weight [D, 4]
    and bias [D] of any float dtype. pool [slots, columns, D], columns = 3 + k, changed in place: row n's line is
    cache_indices[n], or n; a slot that is pad_slot or outside the pool is padding. has_initial_state [N] bool: False
    takes zeros for the history. num_accepted [N]: speculative, the history starts at column accepted - 1 (clamped to
    0..k) and the line becomes the history without its oldest row, then all new tokens; without it the line's first
    3 columns are read and keep the last 3 inputs.
    """
    dim = x.shape[-1]
    grid = (seqs * ((dim + 255) // 256),)
    conv_update_kernel[grid](
        x, weight, bias, out, query_start_loc, pool, cache_indices, has_initial_state, num_accepted,
        x.shape[1], dim, pool.shape[1], pool.shape[0], pad_slot,
        x.stride(0), x.stride(1), out.stride(0), out.stride(1), weight.stride(0), weight.stride(1), pool.stride(0), pool.stride(1),
        0 if cache_indices is None else cache_indices.stride(0), 0 if num_accepted is None else num_accepted.stride(0),
        SILU=silu, ROWWISE=weight.stride(1) == 1, num_warps=num_warps, num_stages=num_stages,
    )

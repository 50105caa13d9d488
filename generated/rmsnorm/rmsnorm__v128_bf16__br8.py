# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: rmsnorm.py.j2
# variant:  rmsnorm__v128_bf16__br8
# inputs:   fc67dfc5981db7fdbc6825acdeb7ef9e9bbcfa5f0ec44dcc5f869836077233f4

"""RMSNorm over V = 128 times a weight times sigmoid of an output gate: what follows the recurrence in a KDA layer.

Each program takes BR rows; a row is one head of one token. One pass: a row is read once and kept in registers.
"""

import torch
import triton
import triton.language as tl

SPEC = {'family': 'rmsnorm', 'v': 128, 'dtype': 'bf16'}
SCHEDULE = {'br': 8}


@triton.jit(do_not_specialize=["rows"])
def rmsnorm_kernel(
    o, z, weight, out,  # [tokens, HV, V], [tokens, HV, V], [V], [tokens, HV, V]
    eps, rows,  # rows = tokens * HV
    o_t, o_h, z_t, z_h, out_t, out_h,
    HV: tl.constexpr,
):
    V: tl.constexpr = 128
    BR: tl.constexpr = 8
    BV: tl.constexpr = 128
    i_r = tl.program_id(0) * BR + tl.arange(0, BR)
    i_t = (i_r // HV).to(tl.int64)[:, None]
    i_h = (i_r % HV).to(tl.int64)[:, None]
    d_v = tl.arange(0, BV)
    m_v = d_v < V
    m_o = (i_r < rows)[:, None] & m_v[None, :]  # [BR, BV]

    b_o = tl.load(o + i_t * o_t + i_h * o_h + d_v[None, :], mask=m_o, other=0.0).to(tl.float32)
    b_z = tl.load(z + i_t * z_t + i_h * z_h + d_v[None, :], mask=m_o, other=0.0).to(tl.float32)
    b_w = tl.load(weight + d_v, mask=m_v, other=0.0).to(tl.float32)
    b_r = tl.rsqrt(tl.sum(b_o * b_o, 1) / V + eps)  # [BR]
    b_o = b_o * b_r[:, None] * b_w[None, :] * tl.sigmoid(b_z)
    tl.store(out + i_t * out_t + i_h * out_h + d_v[None, :], b_o.to(out.dtype.element_ty), mask=m_o)


def launch(
    o, z, weight, out, eps, *, rows, heads, strides,
    num_warps=1, num_stages=1,
):
    """Write ``out``: o, z, out of ``rows`` rows of 128 with unit stride, weight [128] contiguous; any float dtypes.

    Row r is head r % heads of token r // heads; ``strides`` holds the strides of a token and of a head in o, z and out.
    """
    if rows == 0:
        return
    rmsnorm_kernel[((rows + 7) // 8,)](
        o, z, weight, out, eps, rows, *strides, HV=heads, num_warps=num_warps, num_stages=num_stages,
    )

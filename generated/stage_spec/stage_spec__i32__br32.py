# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: stage_spec.py.j2
# variant:  stage_spec__i32__br32
# inputs:   eec44c26ae9bfad14299c04f40a4fd74bba6e72a341e49d39459bc010373475e

"""Staged metadata of speculative decode: what a captured graph reads, copied into its padded buffers in one launch.

The graph was captured for B requests; this step has S of them. Rows past S get what makes a kernel do nothing: the null
slot, the last real offset (a query of length 0), one accepted token.
"""

import triton
import triton.language as tl

SPEC = {'family': 'stage_spec', 'dtype': 'i32'}
SCHEDULE = {'br': 32}

ROWS = 32  # requests of one program


@triton.jit(
    do_not_specialize=["S", "B", "null_slot", "state_n", "state_c", "qsl_n", "accepted_n", "staged_n"],
    do_not_specialize_on_alignment=["state", "qsl", "accepted", "staged_state", "staged_qsl", "staged_accepted"],
)
def stage_spec_kernel(
    state, qsl, accepted,  # [>=S, >=C], [>=S+1], [>=S] int32, any strides
    staged_state, staged_qsl, staged_accepted,  # [B, C], [>=B+1], [>=B] int32, rows contiguous
    S, B, null_slot,
    state_n, state_c, qsl_n, accepted_n, staged_n,  # strides in elements
    COLUMNS: tl.constexpr,  # C
    ROWS: tl.constexpr,
):
    o_r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    # B + 1 offsets: row B, the one past the last request, has an offset only
    b_qsl = tl.load(qsl + tl.minimum(o_r, S) * qsl_n, mask=o_r <= B, other=0)
    tl.store(staged_qsl + o_r, b_qsl, mask=o_r <= B)
    b_accepted = tl.load(accepted + o_r * accepted_n, mask=o_r < S, other=1)
    tl.store(staged_accepted + o_r, b_accepted, mask=o_r < B)

    o_c = tl.arange(0, triton.next_power_of_2(COLUMNS))
    m_c = o_c[None, :] < COLUMNS
    p_state = state + o_r[:, None] * state_n + o_c[None, :] * state_c  # [ROWS, C]
    b_state = tl.load(p_state, mask=(o_r[:, None] < S) & m_c, other=null_slot)
    tl.store(staged_state + o_r[:, None] * staged_n + o_c[None, :], b_state, mask=(o_r[:, None] < B) & m_c)


def launch(
    state, qsl, accepted, staged_state, staged_qsl, staged_accepted, S, B, null_slot,
    state_n, state_c, qsl_n, accepted_n, staged_n,
    *, columns, num_warps=1, num_stages=1,
):
    """Stage S requests into buffers of B >= S rows; all int32, on one device.

    state [>=S, >=columns] with strides (state_n, state_c), qsl [>=S+1] with stride qsl_n, accepted [>=S] with stride
    accepted_n -> staged_state [B, columns] with stride (staged_n, 1), staged_qsl [>=B+1], staged_accepted [>=B].
    """
    stage_spec_kernel[(triton.cdiv(B + 1, ROWS),)](
        state, qsl, accepted, staged_state, staged_qsl, staged_accepted, S, B, null_slot,
        state_n, state_c, qsl_n, accepted_n, staged_n,
        COLUMNS=columns, ROWS=ROWS, num_warps=num_warps, num_stages=num_stages,
    )

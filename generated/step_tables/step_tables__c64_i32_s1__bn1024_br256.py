# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: step_tables.py.j2
# variant:  step_tables__c64_i32_s1__bn1024_br256
# inputs:   48dbbed8e7294b0555aa8f369e4f4fb523c63818baa56ccdbf9c15389eed587c

"""Step tables: which sequence, and which part of it, each program of a step works on.

A table lists the parts of all sequences, sequence-major: a sequence of L tokens has ceil(L / block) parts, and each row is
(sequence, part of that sequence). One launch, from one read of the boundaries, writes
 - the table of chunks of 64 tokens, its offsets, and what a prefill kernel wants to know of each chunk;
 - 1 schedule of the short convolution, of any block size.
The programs of all tables lie one after another on grid axis 0, and each owns 256 rows of one table: one long sequence
and many short ones are spread over the device alike. Rows past a table's true count are -1. Nothing is written past a
table's end, whatever the boundaries hold.
"""

import triton
import triton.language as tl

SPEC = {'family': 'step_tables', 'chunk': 64, 'dtype': 'i32', 'schedules': 1}
SCHEDULE = {'bn': 1024, 'br': 256}

ROWS = 256  # rows of a table that one program owns


@triton.jit
def _programs(n_rows, ROWS: tl.constexpr):
    return tl.maximum(tl.cdiv(n_rows, ROWS), 1)


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _locate(cu_seqlens, n_seqs, block, i_b, n_rows, count, offsets, ROWS: tl.constexpr):
    """(row, sequence, part) of the i_b-th block of rows, sequence and part -1 past the true count; [ROWS] each."""
    SEQS: tl.constexpr = 1024  # sequences read at a time
    r_0 = i_b * ROWS
    total = 0  # parts of the sequences read so far
    begun = 0  # sequences that begin before row r_0
    latest = 0  # the row on which the last of them begins
    b_begins = tl.zeros([ROWS], tl.int32)  # [ROWS] sequences that begin on this row
    for i_s in range(0, n_seqs, SEQS):
        o_s = i_s + tl.arange(0, SEQS)
        m_s = o_s < n_seqs
        b_bos = tl.load(cu_seqlens + o_s, mask=m_s, other=0)
        b_eos = tl.load(cu_seqlens + o_s + 1, mask=m_s, other=0)
        b_len = tl.maximum((b_eos - b_bos).to(tl.int32), 0)
        b_parts = (b_len + (block - 1)) // block  # [SEQS]
        b_first = total + tl.cumsum(b_parts, 0) - b_parts  # [SEQS] the row on which each sequence begins
        if offsets is not None:
            if i_b == 0:
                tl.store(offsets + o_s, tl.minimum(b_first, n_rows).to(tl.int64), mask=m_s)
        total += tl.sum(b_parts, 0)
        m_before = m_s & (b_first < r_0)
        begun += tl.sum(m_before.to(tl.int32), 0)
        latest = tl.maximum(latest, tl.max(tl.where(m_before, b_first, 0), 0))
        m_here = m_s & (b_first >= r_0) & (b_first < r_0 + ROWS)
        b_begins += tl.histogram(b_first - r_0, ROWS, mask=m_here)
    if i_b == 0:
        if offsets is not None:
            tl.store(offsets + n_seqs, tl.minimum(total, n_rows).to(tl.int64))
        if count is not None:
            tl.store(count, total)

    # a row belongs to the last sequence that begins on it or before it; the empty ones there begin earlier
    o_r = r_0 + tl.arange(0, ROWS)
    b_seq = begun + tl.cumsum(b_begins, 0) - 1
    b_part = o_r - tl.associative_scan(tl.where(b_begins > 0, o_r, latest), 0, _later)
    m_r = o_r < total
    return o_r.to(tl.int64), tl.where(m_r, b_seq, -1), tl.where(m_r, b_part, -1)


# the sizes differ from step to step: no new binary for them, nor for boundaries that start anywhere in a tensor
@triton.jit(
    do_not_specialize=["n_seqs", "n_chunks", "n_1", "block_1"],
    do_not_specialize_on_alignment=["cu_seqlens"],
)
def step_tables_kernel(
    cu_seqlens, n_seqs,  # [N+1] i32
    counts,  # [tables] int32: the true number of rows of each table; None: not wanted
    offsets, chunks, rows, n_chunks,  # [N+1] int64, [NT, 2] i32, [NT, 4] int32 or None
    seq_1, part_1, block_1, n_1,  # [n_1] int32, [n_1] int32
    ROWS: tl.constexpr,
):
    i_b = tl.program_id(0)
    if i_b < _programs(n_chunks, ROWS):
        o_r, b_seq, b_part = _locate(cu_seqlens, n_seqs, 64, i_b, n_chunks, counts, offsets, ROWS)
        m_r = o_r < n_chunks
        tl.store(chunks + o_r * 2, b_seq, mask=m_r)
        tl.store(chunks + o_r * 2 + 1, b_part, mask=m_r)
        if rows is not None:
            m_s = m_r & (b_seq >= 0)
            b_bos = tl.load(cu_seqlens + b_seq, mask=m_s, other=0).to(tl.int32) + b_part * 64
            b_eos = tl.load(cu_seqlens + b_seq + 1, mask=m_s, other=0).to(tl.int32)
            tl.store(rows + o_r * 4, tl.where(m_s, b_bos, -1), mask=m_r)
            tl.store(rows + o_r * 4 + 1, tl.where(m_s, tl.minimum(b_eos - b_bos, 64), -1), mask=m_r)
            tl.store(rows + o_r * 4 + 2, b_seq, mask=m_r)
            tl.store(rows + o_r * 4 + 3, b_part, mask=m_r)
    i_b -= _programs(n_chunks, ROWS)
    if (i_b >= 0) & (i_b < _programs(n_1, ROWS)):
        count = None if counts is None else counts + 1
        o_r, b_seq, b_part = _locate(cu_seqlens, n_seqs, block_1, i_b, n_1, count, None, ROWS)
        m_r = o_r < n_1
        tl.store(seq_1 + o_r, b_seq, mask=m_r)
        tl.store(part_1 + o_r, b_part, mask=m_r)
    i_b -= _programs(n_1, ROWS)


def launch(
    cu_seqlens, n_seqs, counts,
    offsets, chunks, rows, n_chunks,
    seq_1, part_1, block_1, n_1,
    *, num_warps=4, num_stages=1,
):
    """Write all tables of a step. All tensors are contiguous and on one device.

    cu_seqlens [n_seqs + 1] i32: boundaries, of which only the differences count (and rows' first token).
    counts     [2] int32 or None: the number of rows that each table should have.
    offsets    [n_seqs + 1] int64: the row of each sequence's first chunk, then the number of chunks; at most n_chunks.
    chunks     [n_chunks, 2] i32: (sequence, chunk in it).
    rows       [n_chunks, 4] int32 or None: (first token, valid tokens, sequence, chunk in it).
    seq_1, part_1 [n_1] int32: the sequence, and the block of block_1 tokens in it.
    """
    programs = (
        max(1, -(-n_chunks // ROWS))
        + max(1, -(-n_1 // ROWS))
    )
    step_tables_kernel[(programs,)](
        cu_seqlens, n_seqs, counts,
        offsets, chunks, rows, n_chunks,
        seq_1, part_1, block_1, n_1,
        ROWS=ROWS, num_warps=num_warps, num_stages=num_stages,
    )

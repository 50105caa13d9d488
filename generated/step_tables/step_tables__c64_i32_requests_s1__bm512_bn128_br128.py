# Rendered by kdagen: edit the template and run `kdagen render`, not this file.
# template: step_tables.py.j2
# variant:  step_tables__c64_i32_requests_s1__bm512_bn128_br128
# inputs:   d40e213be17862a44cfda8c6b7d2f7da78c6560e02f45e73dc7b48d19db07510

"""Step tables: which sequence, and which part of it, each program of a step works on.

A table lists the parts of all sequences, sequence-major: a sequence of L tokens has ceil(L / block) parts, and each row is
(sequence, part of that sequence). One launch, from one read of the boundaries, writes
 - the table of chunks of 64 tokens, its offsets, and what a prefill kernel wants to know of each chunk;
 - 1 schedule of the short convolution, of any block size;
 - boundaries, state slot and "has an initial state" of each request.
The programs of all tables lie one after another on grid axis 0, and each owns 128 rows of one table: one long sequence
and many short ones are spread over the device alike. Rows past a table's true count are -1. Nothing is written past a
table's end, whatever the boundaries hold.
"""

import triton
import triton.language as tl

SPEC = {'family': 'step_tables', 'chunk': 64, 'dtype': 'i32', 'requests': True, 'schedules': 1}
SCHEDULE = {'bm': 512, 'bn': 128, 'br': 128}

ROWS = 128  # rows of a table that one program owns


def reciprocal(block):
    """(factor, shift) with ceil(length / block) == (length * factor + 2**shift - 1) >> shift for 0 <= length < 2**31.

    block is from 1 to 2**30. 2**31 <= factor < 2**32, so that for Triton it is an int64 always.
    """
    shift = 31 + (block - 1).bit_length()
    return (1 << shift) // block, shift


FACTOR, SHIFT = map(tl.constexpr, reciprocal(64))


@triton.jit
def _programs(n_rows, ROWS: tl.constexpr):
    return tl.maximum(tl.cdiv(n_rows, ROWS), 1)


@triton.jit
def _maxima(a_1, b_1, a_2, b_2):
    return tl.maximum(a_1, a_2), tl.maximum(b_1, b_2)


@triton.jit
def _join(begins_a, row_a, begins_b, row_b):
    return begins_a + begins_b, tl.maximum(row_a, row_b)


@triton.jit
def _parts(cu_seqlens, n_seqs, factor, shift, o_s):
    """ceil(length / block) of sequences o_s without a division; 0 from n_seqs on."""
    m_s = o_s < n_seqs
    b_bos = tl.load(cu_seqlens + o_s, mask=m_s, other=0)
    b_eos = tl.load(cu_seqlens + o_s + 1, mask=m_s, other=0)
    b_len = tl.maximum((b_eos - b_bos).to(tl.int32), 0)
    shift = tl.cast(shift, tl.uint64)
    up = (tl.full([], 1, tl.uint64) << shift) - 1
    b_product = b_len.to(tl.uint32).to(tl.uint64) * tl.cast(factor, tl.uint32).to(tl.uint64)
    return ((b_product + up) >> shift).to(tl.int32)


@triton.jit
def _skip(cu_seqlens, n_seqs, factor, shift, r_0, SEQS: tl.constexpr, GROUP: tl.constexpr):
    """(sequences, parts) of the first groups of GROUP sequences, up to the first group that ends on row r_0 or later."""
    GROUPS: tl.constexpr = SEQS // GROUP
    o_g = tl.arange(0, GROUPS)
    seqs, total, n_before = 0, 0, GROUPS
    while (n_before == GROUPS) & (seqs < n_seqs):
        o_s = seqs + o_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        b_ends = total + tl.cumsum(tl.sum(_parts(cu_seqlens, n_seqs, factor, shift, o_s), 1), 0)  # [GROUPS]
        m_g = b_ends < r_0
        n_before, total_before = tl.reduce((tl.where(m_g, o_g + 1, 0), tl.where(m_g, b_ends, 0)), 0, _maxima)
        seqs, total = seqs + n_before * GROUP, tl.maximum(total, total_before)
    return seqs, total


@triton.jit
def _locate(cu_seqlens, n_seqs, factor, shift, i_b, n_rows, count, offsets, ROWS: tl.constexpr):
    """(row, sequence, part) of the i_b-th block of rows, [ROWS] each; sequence and part are -1 past the true count.

    A sequence begins on the row of its first part; an empty one, on the row of the next. Each program also writes the
    offsets of the sequences that begin on its rows; that of row ``total``, where a next one would begin, the last offset.
    """
    SEQS: tl.constexpr = 128  # sequences of one read
    r_0 = i_b * ROWS
    r_end = r_0 + ROWS
    if offsets is not None or count is not None:  # the last program takes those that begin past the table's end
        r_end = tl.where(r_end >= n_rows, 2147483647, r_end)
    i_s, total = 0, 0
    if n_seqs > SEQS:
        i_s, total = _skip(cu_seqlens, n_seqs, factor, shift, r_0, 512, 32)

    # how many sequences begin on each row, and on row r_0 or before it; the row on which the last of these begins. What is
    # read past the last sequence begins on row ``total``, whose sequence nobody asks for
    o_r = r_0 + tl.arange(0, ROWS)
    b_begins = tl.where(o_r == r_0, i_s, 0)
    latest = 0
    while (i_s < n_seqs) & (total < r_end):
        o_s = i_s + tl.arange(0, SEQS)
        b_parts = _parts(cu_seqlens, n_seqs, factor, shift, o_s)
        b_ends = total + tl.cumsum(b_parts, 0)
        b_first = b_ends - b_parts  # [SEQS] the row on which each begins
        b_begins += tl.histogram(tl.maximum(b_first - r_0, 0), ROWS, mask=b_first < r_0 + ROWS)
        total, b_latest = tl.reduce((b_ends, tl.where(b_first <= r_0, b_first, 0)), 0, _maxima)
        latest = tl.maximum(latest, b_latest)
        if offsets is not None:
            m_here = (o_s < n_seqs) & (b_first >= r_0) & (b_first < r_end)
            tl.store(offsets + o_s, tl.minimum(b_first, n_rows).to(tl.int64), mask=m_here)
        i_s += SEQS
    if offsets is not None or count is not None:
        if (total >= r_0) & (total < r_end):
            if offsets is not None:
                tl.store(offsets + n_seqs, tl.minimum(total, n_rows).to(tl.int64))
            if count is not None:
                tl.store(count, total)

    # a row belongs to the last sequence that begins on it or before it; the others that begin there are empty
    b_row = tl.where((b_begins > 0) & (o_r > r_0), o_r, latest)
    b_count, b_first = tl.associative_scan((b_begins, b_row), 0, _join)
    m_r = o_r < total
    return o_r.to(tl.int64), tl.where(m_r, b_count - 1, -1), tl.where(m_r, o_r - b_first, -1)


@triton.jit
def _requests(
    cu_seqlens, n_seqs, first, lens, lens_n, table, table_n, starts, slots, carries, first_carries, i_b,
    ROWS: tl.constexpr,
):
    """What the i_b-th ROWS requests bring along; all but ``carries`` of those from ``first`` on, counted from there."""
    o_s = i_b * ROWS + tl.arange(0, ROWS)
    m_s = o_s < n_seqs
    m_first = o_s >= first
    b_bos = tl.load(cu_seqlens + o_s, mask=o_s <= n_seqs, other=0)
    b_eos = tl.load(cu_seqlens + o_s + 1, mask=m_s, other=0)
    tl.store(starts + o_s - first, b_bos - tl.load(cu_seqlens + first), mask=m_first & (o_s <= n_seqs))
    b_slot = tl.load(table + o_s.to(tl.int64) * table_n, mask=m_s & m_first, other=0)
    tl.store(slots + o_s - first, b_slot, mask=m_s & m_first)
    b_carries = tl.load(lens + o_s.to(tl.int64) * lens_n, mask=m_s, other=0) > b_eos - b_bos
    tl.store(carries + o_s, b_carries, mask=m_s)
    tl.store(first_carries + o_s - first, b_carries, mask=m_s & m_first)


# the sizes differ from step to step: no new binary for them, nor for inputs that start anywhere in a tensor
@triton.jit(
    do_not_specialize=['n_seqs', 'n_chunks', 'n_1', 'factor_1', 'shift_1', 'base', 'first', 'lens_n', 'table_n'],
    do_not_specialize_on_alignment=['cu_seqlens', 'lens', 'table'],
)
def step_tables_kernel(
    cu_seqlens, n_seqs,  # [N+1] i32
    counts,  # [tables] int32: the true number of rows of each table; None: not wanted
    offsets, chunks, rows, n_chunks,  # [N+1] int64, [NT, 2] i32, [NT, 4] int32 or None
    seq_1, part_1, factor_1, shift_1, n_1,  # [n_1] int32 twice, ``reciprocal`` of the block size
    base, first,  # sequences that are left out of everything; further ones that the chunk table leaves out
    lens, lens_n, table, table_n,  # [base+N] and [base+N, any] i32 with the strides of their rows
    starts, slots, carries, first_carries,  # [N-first+1] and [N-first] i32, [N] and [N-first] bool
    ROWS: tl.constexpr,
):
    i_b = tl.program_id(0)
    cu_seqlens += base
    if i_b < _programs(n_chunks, ROWS):
        chunked, n_chunked, origin = cu_seqlens + first, n_seqs - first, tl.load(cu_seqlens + first).to(tl.int32)
        o_r, b_seq, b_part = _locate(chunked, n_chunked, FACTOR, SHIFT, i_b, n_chunks, counts, offsets, ROWS)
        m_r = o_r < n_chunks
        tl.store(chunks + o_r * 2, b_seq, mask=m_r)
        tl.store(chunks + o_r * 2 + 1, b_part, mask=m_r)
        if rows is not None:
            m_s = m_r & (b_seq >= 0)
            b_bos = tl.load(chunked + b_seq, mask=m_s, other=0).to(tl.int32) + b_part * 64
            b_eos = tl.load(chunked + b_seq + 1, mask=m_s, other=0).to(tl.int32)
            tl.store(rows + o_r * 4, tl.where(m_s, b_bos - origin, -1), mask=m_r)
            tl.store(rows + o_r * 4 + 1, tl.where(m_s, tl.minimum(b_eos - b_bos, 64), -1), mask=m_r)
            tl.store(rows + o_r * 4 + 2, b_seq, mask=m_r)
            tl.store(rows + o_r * 4 + 3, b_part, mask=m_r)
    i_b -= _programs(n_chunks, ROWS)
    # one schedule's programs after another's: this program's own is the last that begins at i_b or before it
    seq, part, factor, shift, n_rows = seq_1, part_1, factor_1, shift_1, n_1
    number, begin, end = 1, 0, _programs(n_1, ROWS)
    if (i_b >= 0) & (i_b < end):
        count = None if counts is None else counts + number
        o_r, b_seq, b_part = _locate(cu_seqlens, n_seqs, factor, shift, i_b - begin, n_rows, count, None, ROWS)
        m_r = o_r < n_rows
        tl.store(seq + o_r, b_seq, mask=m_r)
        tl.store(part + o_r, b_part, mask=m_r)
    i_b -= end
    if i_b >= 0:
        lens += base.to(tl.int64) * lens_n
        table += base.to(tl.int64) * table_n
        _requests(cu_seqlens, n_seqs, first, lens, lens_n, table, table_n, starts, slots, carries, first_carries, i_b, ROWS)


def launch(
    cu_seqlens, n_seqs, counts,
    offsets, chunks, rows, n_chunks,
    seq_1, part_1, block_1, n_1,
    base, first, lens, lens_n, table, table_n, starts, slots, carries, first_carries,
    *, num_warps=4, num_stages=1,
):
    """Write all tables of a step. All outputs are contiguous, and everything is on one device.

    cu_seqlens [base + n_seqs + 1] i32: boundaries; the first ``base`` sequences are left out of everything.
    counts     [2] int32 or None: the number of rows that each table should have.
    The chunk table (offsets, chunks, rows) leaves out ``first`` more sequences; its sequences and tokens count from there.
    offsets    [n_seqs + 1] int64: the row of each sequence's first chunk, then the number of chunks; at most n_chunks.
    chunks     [n_chunks, 2] i32: (sequence, chunk in it).
    rows       [n_chunks, 4] int32 or None: (first token, valid tokens, sequence, chunk in it).
    seq_1, part_1 [n_1] int32: the sequence, and the block of block_1 tokens in it.
    lens       [base + n_seqs], stride lens_n: tokens of each request after this step.
    table      [base + n_seqs, any], rows table_n apart: its first column is each request's state slot.
    starts     [n_seqs - first + 1], slots [n_seqs - first] i32: boundaries from 0, state slots.
    carries    [n_seqs] bool: the request had tokens before this step; first_carries [n_seqs - first]: of those from first on.
    """
    programs = (
        max(1, -(-n_chunks // ROWS))
        + max(1, -(-n_1 // ROWS))
        + n_seqs // ROWS + 1
    )
    return step_tables_kernel[(programs,)](
        cu_seqlens, n_seqs, counts,
        offsets, chunks, rows, n_chunks,
        seq_1, part_1, *reciprocal(block_1), n_1,
        base, first, lens, lens_n, table, table_n, starts, slots, carries, first_carries,
        ROWS=ROWS, num_warps=num_warps, num_stages=num_stages,
    )

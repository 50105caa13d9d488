"""The classification and the fields of a step, written as slowly and obviously as the policy can be said."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Row:
    index: int
    tokens: list[int]      # positions in the packed batch
    seq_len: int
    prefilling: bool
    drafts: int            # -1: not speculative
    slots: list[int]       # as the cache mode gives them, at least 1 + k
    accepted: int = 1

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def computed(self) -> int:
        return self.seq_len - self.length


@dataclass
class Expected:
    decodes: list[Row] = field(default_factory=list)
    prefills: list[Row] = field(default_factory=list)
    spec: list[Row] = field(default_factory=list)
    non_spec: list[Row] = field(default_factory=list)      # rows of the non-speculative tables, in order
    prefill_table: list[Row] = field(default_factory=list)  # rows of the prefill-only tables, in order

    @property
    def counts(self):
        total = lambda rows: sum(row.length for row in rows)
        return (len(self.prefills), total(self.prefills), len(self.decodes), total(self.decodes), len(self.spec),
                total(self.spec))


def make_rows(lens, seq_lens, prefilling, drafts, table, accepted) -> list[Row]:
    rows, start = [], 0
    for i, length in enumerate(lens):
        rows.append(Row(i, list(range(start, start + length)), seq_lens[i], bool(prefilling and prefilling[i]),
                        -1 if drafts is None else drafts[i], list(table[i]), 1 if accepted is None else accepted[i]))
        start += length
    return rows


def is_speculative(row: Row, k: int) -> bool:
    return k > 0 and 0 <= row.drafts <= k and row.length == row.drafts + 1


def is_first_chunk(row: Row) -> bool:
    return row.length > 0 and row.prefilling and row.computed <= 0


def classify(rows: list[Row], k: int, keep_decodes: bool = False) -> Expected:
    out = Expected()
    for row in rows:
        (out.spec if is_speculative(row, k) else out.non_spec).append(row)
    if not out.spec:
        prefill_began = False
        for row in rows:
            if row.length > 1 or is_first_chunk(row):
                prefill_began = True
            (out.prefills if prefill_began else out.decodes).append(row)
        out.prefill_table = list(out.prefills)
        while out.prefills and out.prefills[-1].length == 0:
            out.prefills.pop()
        return out
    active = [row for row in out.non_spec if row.length > 0]
    if keep_decodes and active and all(row.length == 1 and not is_first_chunk(row) for row in active):
        out.decodes = out.non_spec = active
        return out
    out.prefills = active
    if active:
        out.prefill_table = out.non_spec
    else:
        out.non_spec = []
    return out


def starts(rows: list[Row]) -> list[int]:
    out = [0]
    for row in rows:
        out.append(out[-1] + row.length)
    return out


def chunk_table(rows: list[Row], size: int) -> list[tuple[int, int]]:
    return [(n, t) for n, row in enumerate(rows) for t in range(-(-row.length // size))]


def tokens(rows: list[Row]) -> list[int]:
    return [token for row in rows for token in row.tokens]


def aligned_slots(table_row: list[int], seq_len: int, block_size: int, columns: int) -> list[int]:
    block = (seq_len - 1) // block_size if seq_len > 0 else 0
    return [table_row[min(block + j, len(table_row) - 1)] for j in range(columns)]

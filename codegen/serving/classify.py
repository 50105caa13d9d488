"""Which rows of a batch are decodes, prefills and speculative decodes: the newest policy of the serving stacks.

Works on host arrays alone, with a dozen numpy calls whatever the batch's size.

* A row is speculative if it has ``0 <= drafts <= num_spec`` and exactly ``drafts + 1`` new tokens. A row with zero drafts
  is speculative too: only that path starts from the accepted candidate's state.
* Without speculative rows, the batch is split at the first row that has more than one token or no state yet: decodes
  before it, prefills from it on. A one-token chunk of a prompt already begun is a decode; a one-token first chunk is a
  prefill. Rows without tokens at the end are no prefills; in a batch of decodes alone they count as decodes.
* Beside speculative rows, the others are all prefills if any of them is. One-token rows among them become prefills too,
  unless ``keep_decodes`` is set and every one of them is a true decode.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Classes(NamedTuple):
    """Counts of rows and tokens by class, and the speculative rows' mask (None where there are none)."""

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_spec_decodes: int
    num_spec_decode_tokens: int
    spec_mask: np.ndarray | None
    uniform_spec_length: int | None
    dense_decode: bool


def classify(starts: np.ndarray, seq_lens: np.ndarray, is_prefilling: np.ndarray | None, drafts: np.ndarray | None,
             num_spec: int, keep_decodes: bool = False) -> Classes:
    """The classes of a batch with boundaries ``starts`` [R+1]; ``seq_lens`` [R] may be upper bounds."""
    lens = starts[1:] - starts[:-1]
    if num_spec > 0 and drafts is not None:
        mask = (drafts >= 0) & (drafts <= num_spec) & (lens == drafts + 1)
        if np.logical_or.reduce(mask):
            return _beside_spec(lens, seq_lens, is_prefilling, mask, keep_decodes)
    return _without_spec(starts, lens, seq_lens, is_prefilling)


def _first_chunk(lens: np.ndarray, seq_lens: np.ndarray, is_prefilling: np.ndarray | None) -> np.ndarray | None:
    """Rows that have tokens but no state yet. Capture batches also have seq_len == query_len: they say so by None."""
    if is_prefilling is None or not np.logical_or.reduce(is_prefilling):
        return None
    return is_prefilling & (lens > 0) & (seq_lens <= lens)


def _without_spec(starts, lens, seq_lens, is_prefilling) -> Classes:
    rows, tokens = len(lens), int(starts[-1]) - int(starts[0])
    starts_prefill = lens > 1
    first = _first_chunk(lens, seq_lens, is_prefilling)
    if first is not None:
        starts_prefill |= first
    split = int(starts_prefill.argmax()) if rows else 0
    if rows == 0 or not starts_prefill[split]:
        dense = bool(lens[:tokens].all())  # no row has more than one token, so the first ones have one each
        return Classes(0, 0, rows, tokens, 0, 0, None, None, dense)
    decode_tokens = int(starts[split]) - int(starts[0])
    trailing = int((lens[::-1] > 0).argmax())
    return Classes(rows - split - trailing, tokens - decode_tokens, split, decode_tokens, 0, 0, None, None,
                   decode_tokens == split)


def _beside_spec(lens, seq_lens, is_prefilling, mask, keep_decodes) -> Classes:
    spec_lens = lens[mask]
    spec_rows, spec_tokens, longest = len(spec_lens), int(spec_lens.sum()), int(spec_lens.max())
    uniform = longest if spec_tokens == longest * spec_rows else None
    others = ~mask
    others &= lens > 0
    other_rows, other_tokens = int(np.count_nonzero(others)), int(lens.sum()) - spec_tokens
    if keep_decodes and other_rows and other_tokens == other_rows:
        first = _first_chunk(lens, seq_lens, is_prefilling)
        if first is None or not (first & others).any():
            return Classes(0, 0, other_rows, other_tokens, spec_rows, spec_tokens, mask, uniform, True)
    return Classes(other_rows, other_tokens, 0, 0, spec_rows, spec_tokens, mask, uniform, True)

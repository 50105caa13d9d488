"""Which rows of a batch are decodes, prefills and speculative decodes: the newest policy of the serving stacks.

Works on host arrays alone, with a dozen numpy calls whatever the batch's size. Where one position is as good as a whole
reduction, ``argmax`` finds it: it costs a third of ``any`` or ``max``.

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
    spec_leads: bool                 # the speculative rows come first, whatever follows them
    dense_decode: bool


def classify(starts: np.ndarray, lens: np.ndarray, seq_lens: np.ndarray, is_prefilling: np.ndarray | None,
             drafts: np.ndarray | None, num_spec: int, keep_decodes: bool = False) -> Classes:
    """The classes of a batch with boundaries ``starts`` [R+1] from 0 and lengths ``lens`` [R]; ``seq_lens`` [R] may be
    upper bounds."""
    if num_spec > 0 and drafts is not None and len(lens):
        mask = lens - drafts == 1
        mask &= drafts >= 0
        mask &= drafts <= num_spec
        if mask[mask.argmax()]:
            return _beside_spec(starts, lens, seq_lens, is_prefilling, mask, keep_decodes)
    return _without_spec(starts, lens, seq_lens, is_prefilling)


def _first_chunk(lens: np.ndarray, seq_lens: np.ndarray, is_prefilling: np.ndarray | None) -> np.ndarray | None:
    """Rows that have tokens but no state yet. Capture batches also have seq_len == query_len: they say so by None."""
    if is_prefilling is None or not len(lens) or not is_prefilling[is_prefilling.argmax()]:
        return None
    return is_prefilling & (lens > 0) & (seq_lens <= lens)


def _without_spec(starts, lens, seq_lens, is_prefilling) -> Classes:
    rows, tokens = len(lens), starts.item(-1)
    if rows == 0:
        return Classes(0, 0, 0, 0, 0, 0, None, None, False, True)
    several = lens > 1
    split = several.argmax().item()
    prefills = several.item(split)
    ones = split if prefills else rows  # rows of at most one token, of which the first first chunk splits the batch too
    first = None if is_prefilling is None else _first_chunk(lens[:ones], seq_lens[:ones], is_prefilling[:ones])
    if first is not None:
        at = first.argmax().item()
        if first.item(at):
            split, prefills = at, True
    if not prefills:  # no row has more than one token: the decodes are dense if the first ``tokens`` rows have one each
        dense = tokens == 0 or lens.item(lens[:tokens].argmin()) > 0
        return Classes(0, 0, rows, tokens, 0, 0, None, None, False, dense)
    decode_tokens = starts.item(split)
    trailing = 0 if lens.item(-1) else int((lens[::-1] > 0).argmax())
    return Classes(rows - split - trailing, tokens - decode_tokens, split, decode_tokens, 0, 0, None, None, False,
                   decode_tokens == split)


def _beside_spec(starts, lens, seq_lens, is_prefilling, mask, keep_decodes) -> Classes:
    spec_rows, tokens = int(np.count_nonzero(mask)), starts.item(-1)
    leads = spec_rows == len(mask) or mask.argmin() == spec_rows
    spec_lens = lens[:spec_rows] if leads else lens[mask]
    spec_tokens = starts.item(spec_rows) if leads else int(spec_lens.sum())
    longest = spec_lens.item(spec_lens.argmax())
    spec = spec_rows, spec_tokens, mask, longest if spec_tokens == longest * spec_rows else None, leads
    other_rows, other_tokens = 0, tokens - spec_tokens
    if other_tokens:
        other_rows = int(np.count_nonzero(lens)) - spec_rows
        if keep_decodes and other_tokens == other_rows:
            first = _first_chunk(lens, seq_lens, is_prefilling)
            if first is None or not (first & ~mask).any():
                return Classes(0, 0, other_rows, other_tokens, *spec, True)
    return Classes(other_rows, other_tokens, 0, 0, *spec, True)

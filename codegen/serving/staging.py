"""The persistent inputs of captured graphs, and the rule that keeps them from going stale.

A captured decode step reads its slots, boundaries and accepted counts from the same addresses at every replay.
``GraphStaging`` owns those buffers. After every step the following holds, so that a replay at the wrong moment cannot
touch a live request:

* rows that the latest step did not stage are padding: the reserved slot in every column, a repeated last boundary, one
  accepted token. A step of 4 requests after one of 32 pads the 28 rows left over; a step that stages nothing (prefill,
  mixed, or too large) pads all that an earlier step staged.
* each metadata carries the epoch of its staging, and ``require`` refuses to replay for one that is no longer the latest.

Padding is counted in requests. A kernel neither reads nor writes the reserved slot, and gives zeros for its rows.
"""

from __future__ import annotations

import torch

from kdagen.errors import KdagenError, refuse
from kdagen.ops.staging import stage
from kdagen.serving.batch import NULL_SLOT, KDAMetadata


class StaleGraphInput(KdagenError):
    """A graph was about to be replayed for a step that is not the one staged last."""


class GraphStaging:
    """Buffers for ``cap`` requests, ``cap = min(max_num_seqs * (1 + num_spec), max_capture_size)``.

    The capture size counts tokens, so a batch is staged where neither its requests nor its tokens exceed ``cap``.
    Buffers, int32 unless noted: ``decode_state`` [cap], ``decode_starts`` [cap+1]; ``spec_state`` [cap, 1+k],
    ``spec_starts`` [cap+1], ``spec_accepted`` [cap], ``spec_masks`` bool [cap], ``spec_tokens`` [cap*(1+k)].
    """

    def __init__(self, device, max_num_seqs: int, num_spec: int = 0, max_capture_size: int = 512):
        for name, value, least in (("max_num_seqs", max_num_seqs, 1), ("num_spec", num_spec, 0),
                                   ("max_capture_size", max_capture_size, 1)):
            if not isinstance(value, int) or value < least:
                refuse(name, value, f"an int of at least {least}")
        self.device = torch.device(device)
        self.columns = num_spec + 1
        self.cap = cap = min(max_num_seqs * self.columns, max_capture_size)
        new = lambda *shape, fill=0: torch.full(shape, fill, dtype=torch.int32, device=self.device)
        self.decode_state, self.decode_starts = new(cap, fill=NULL_SLOT), new(cap + 1)
        self.spec_state, self.spec_starts = new(cap, self.columns, fill=NULL_SLOT), new(cap + 1)
        self.spec_accepted = new(cap, fill=1)
        self.spec_masks = torch.zeros(cap, dtype=torch.bool, device=self.device)
        self.spec_tokens = torch.arange(cap * self.columns, dtype=torch.int32, device=self.device)
        self._no_tokens = self.spec_tokens[:0]
        self._ones, self._discarded, self._zeros = new(cap, fill=1), new(cap), new(cap + 1)
        self._decode_column = self.decode_state[:, None]  # the staging kernel takes tables
        self._decode_rows = self._spec_rows = self._masked = 0  # rows that are not padding now
        self._decode_views: dict[int, tuple] = {}  # by the number of rows: what a step's metadata holds
        self._spec_views: dict[int, tuple] = {}
        self._token_views: dict[int, torch.Tensor] = {}
        self.epoch = 0

    def fits(self, requests: int, tokens: int) -> bool:
        """Whether a batch can be staged: requests bound the buffers' rows, tokens the captured sizes."""
        return requests <= self.cap and tokens <= self.cap

    def check_bounds(self, requests: int, tokens: int) -> None:
        """Refuse a capture batch that the buffers cannot hold."""
        for name, value in (("requests", requests), ("num_actual_tokens", tokens)):
            if value > self.cap:
                refuse(f"capture batch: {name}", value, f"at most {self.cap}, the staging buffers' rows",
                       "Capture smaller batches, or make GraphStaging with a larger max_num_seqs or max_capture_size.")

    def stage_decode(self, metadata: KDAMetadata, table: torch.Tensor, starts: torch.Tensor, live: int) -> None:
        """Slots (the table's first column) and boundaries of the batch, whose first ``live`` rows have a token each."""
        rows = metadata.num_reqs
        span = max(rows, self._decode_rows)
        if span:
            stage(table, starts, self._ones, self._decode_column, self.decode_starts, self._discarded, live, span, NULL_SLOT)
        self._decode_rows = rows
        views = self._decode_views.get(rows)
        if views is None:
            views = self._decode_views[rows] = self.decode_state[:rows], self.decode_starts[:rows + 1]
        metadata.non_spec_state_indices_tensor, metadata.non_spec_query_start_loc = views
        metadata.staged = "decode"

    def stage_spec(self, metadata: KDAMetadata, table: torch.Tensor, starts: torch.Tensor, accepted: torch.Tensor,
                   spec_rows: int, tokens: int) -> None:
        """The first ``spec_rows`` rows speculate, the batch's others are padding; views of all R rows."""
        rows = metadata.num_reqs
        span = max(rows, self._spec_rows)
        stage(table, starts, accepted, self.spec_state, self.spec_starts, self.spec_accepted, spec_rows, span, NULL_SLOT)
        self._spec_rows = rows
        self._mask(spec_rows)
        views = self._spec_views.get(rows)
        if views is None:
            views = self._spec_views[rows] = (self.spec_state[:rows], self.spec_starts[:rows + 1], self.spec_accepted[:rows],
                                              self.spec_masks[:rows])
        (metadata.spec_state_indices_tensor, metadata.spec_query_start_loc, metadata.num_accepted_tokens,
         metadata.spec_sequence_masks) = views
        token_view = self._token_views.get(tokens)
        if token_view is None:
            token_view = self._token_views[tokens] = self.spec_tokens[:tokens]
        metadata.spec_token_indx = token_view
        metadata.non_spec_token_indx = self._no_tokens
        metadata.staged = "spec"

    def close_step(self, metadata: KDAMetadata) -> None:
        """Called once a step, after staging or not: pads what this step did not stage, and dates the metadata."""
        self.epoch += 1
        metadata.epoch = self.epoch
        if self._decode_rows and metadata.staged != "decode":
            stage(self._decode_column, self._zeros, self._ones, self._decode_column, self.decode_starts, self._discarded,
                  0, self._decode_rows, NULL_SLOT)
            self._decode_rows = 0
        if self._spec_rows and metadata.staged != "spec":
            stage(self.spec_state, self._zeros, self._ones, self.spec_state, self.spec_starts, self.spec_accepted,
                  0, self._spec_rows, NULL_SLOT)
            self._spec_rows = 0
            self._mask(0)

    def require(self, metadata: KDAMetadata) -> None:
        """Refuse a replay for a step whose inputs are not in the buffers now."""
        if metadata.staged is None:
            raise StaleGraphInput("metadata: got a step that was not staged (prefill, mixed or beyond the buffers), "
                                  "expected a staged decode. Run this step eagerly.")
        if metadata.epoch != self.epoch:
            raise StaleGraphInput(f"metadata: got the step of epoch {metadata.epoch}, expected epoch {self.epoch}, the one "
                                  "staged last. Build the step's metadata right before its replay.")

    def _mask(self, rows: int) -> None:
        """Only the entries that change are written: none, where successive steps have as many rows."""
        low, high = sorted((rows, self._masked))
        if low != high:
            self.spec_masks[low:high].fill_(rows > self._masked)
        self._masked = rows

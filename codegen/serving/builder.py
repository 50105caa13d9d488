"""From a batch to what the kernels need: one launch for the tables, one for staging, no synchronisation.

Everything that decides a shape or a class is computed on the host's copies in numpy. What the device needs of it goes
over in one transfer from fresh pinned memory; the rest are views and gathers of tensors that are on the device already.
"""

from __future__ import annotations

import numpy as np
import torch

from kdagen.errors import refuse
from kdagen.ops.metadata import step_tables
from kdagen.serving import checkpoints, checks
from kdagen.serving.batch import Batch, KDAMetadata, host_array, pack
from kdagen.serving.classify import Classes, classify
from kdagen.serving.staging import GraphStaging
from kdagen.spec import CHUNKS

CACHE_MODES = ("none", "all", "align")
CONV_BLOCK = 32  # tokens a program of kdagen.causal_conv1d takes; vLLM's kernels take 8


class KDAMetadataBuilder:
    """Builds the metadata of one engine step. One builder per KDA cache group and device.

    device: where the kernels run. num_spec: k, the most drafts a row may have; 0 turns speculation off. chunk_size: of the
    prefill kernels. conv_blocks: token block sizes of the conv kernels that get a schedule. cache_mode: how a row finds
    its slots: "none" and "all" take the first columns of the block table, "align" the 1+k columns from block
    ``(seq_len - 1) // block_size``. keep_decodes: leave one-token decodes decodes beside speculative rows, where every
    other row is one (by default they become prefills). staging: persistent graph inputs, or None for eager engines.
    checked: validate every batch (a few microseconds); False trusts the engine.
    """

    def __init__(self, device, num_spec: int = 0, *, chunk_size: int = 64, conv_blocks: tuple[int, ...] = (CONV_BLOCK,),
                 cache_mode: str = "none", block_size: int | None = None, keep_decodes: bool = False,
                 staging: GraphStaging | None = None, checked: bool = True):
        if cache_mode not in CACHE_MODES:
            refuse("cache_mode", repr(cache_mode), " or ".join(map(repr, CACHE_MODES)))
        if cache_mode == "align" and (block_size is None or block_size < 1):
            refuse("block_size", block_size, 'tokens of a cache block, a positive int, with cache_mode="align"')
        if chunk_size not in CHUNKS:
            refuse("chunk_size", chunk_size, f"one of {', '.join(map(str, CHUNKS))}")
        if not conv_blocks:
            refuse("conv_blocks", conv_blocks, f"at least one block size, such as ({CONV_BLOCK},)")
        if not isinstance(num_spec, int) or num_spec < 0:
            refuse("num_spec", num_spec, "the number of draft tokens a row may have, 0 or more")
        if staging is not None and (staging.columns != num_spec + 1 or staging.device != torch.device(device)):
            refuse("staging", f"buffers of {staging.columns} columns on {staging.device}",
                   f"{num_spec + 1} columns (1 + num_spec) on {device}")
        self.device = torch.device(device)
        self.num_spec = num_spec
        self.columns = num_spec + 1
        self.chunk_size = chunk_size
        self.conv_blocks = tuple(conv_blocks)
        self.cache_mode = cache_mode
        self.block_size = block_size
        self.keep_decodes = keep_decodes
        self.staging = staging
        self.checked = checked
        self._tokens = torch.empty(0, dtype=torch.int64, device=self.device)  # 0, 1, 2, ...; grows with the steps
        self._steps = torch.arange(self.columns, device=self.device) if cache_mode == "align" else None

    def build(self, batch: Batch, num_accepted_tokens: torch.Tensor | None = None,
              num_decode_draft_tokens_cpu=None) -> KDAMetadata:
        """The metadata of ``batch``.

        num_accepted_tokens [R] int32 on the device: tokens accepted at the step before, 1..1+k, bonus token included.
        num_decode_draft_tokens_cpu [R]: drafts of each row on the host, -1 for a row that is not speculative.
        Raises ArgumentError or ArgumentTypeError, naming the field, when the batch contradicts itself.
        """
        starts = host_array("query_start_loc_cpu", batch.query_start_loc_cpu)
        seq_lens = host_array("seq_lens_cpu_upper_bound", batch.seq_lens_cpu_upper_bound)
        prefilling, drafts = batch.is_prefilling_cpu, num_decode_draft_tokens_cpu
        if prefilling is not None:
            prefilling = host_array("is_prefilling_cpu", prefilling)
        if drafts is not None:
            drafts = host_array("num_decode_draft_tokens_cpu", drafts)
        if self.checked:
            checks.check_batch(self, batch, starts, seq_lens, prefilling, drafts, num_accepted_tokens)
        classes = classify(starts, seq_lens, prefilling, drafts, self.num_spec, self.keep_decodes)
        mask = classes.spec_mask
        metadata = KDAMetadata(
            len(starts) - 1, batch.num_actual_tokens, classes.num_prefills, classes.num_prefill_tokens,
            classes.num_decodes, classes.num_decode_tokens, classes.num_spec_decodes, classes.num_spec_decode_tokens,
            batch.seq_lens, batch.block_table, batch.query_start_loc)
        metadata.chunk_size = self.chunk_size
        metadata.dense_decode = classes.dense_decode
        if mask is None:
            self._plain(metadata, batch, starts, seq_lens, classes)
        else:
            if num_accepted_tokens is None:
                refuse("num_accepted_tokens", None, "an int32 tensor [R] on the device, because rows are speculative",
                       "Pass 1 for rows whose step before had no drafts.")
            metadata.spec_sequence_masks_cpu = mask
            metadata.uniform_spec_sequence_length = classes.uniform_spec_length
            if classes.num_prefills == 0 and classes.num_decodes == 0:
                self._pure_spec(metadata, batch, starts, mask, num_accepted_tokens, classes)
            else:
                leads = classes.num_prefills > 0 and np.logical_and.reduce(mask[:classes.num_spec_decodes])
                (self._leading_spec if leads else self._mixed)(metadata, batch, starts, seq_lens, mask, num_accepted_tokens)
        if self.staging is not None:
            self.staging.close_step(metadata)
        if classes.num_prefills and (batch.checkpoints or self.cache_mode == "align"):
            rows = np.arange(classes.num_decodes, len(starts) - 1) if mask is None else np.flatnonzero(~mask)
            metadata.checkpoint = checkpoints.plan(batch, metadata, rows, starts[1:] - starts[:-1], seq_lens,
                                                   self.block_size if self.cache_mode == "align" else None)
        return metadata

    def build_for_cudagraph_capture(self, batch: Batch) -> KDAMetadata:
        """The metadata of a capture batch: every row decodes, or speculates with ``query_len - 1`` drafts.

        Refused where the persistent buffers cannot hold the batch, or where it would not be staged.
        """
        if self.staging is None:
            refuse("staging", None, "a builder made with staging=GraphStaging(...)", "Graphs need persistent inputs.")
        self.staging.check_bounds(batch.num_reqs, batch.num_actual_tokens)
        starts = host_array("query_start_loc_cpu", batch.query_start_loc_cpu)
        accepted = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
        metadata = self.build(batch, accepted, starts[1:] - starts[:-1] - 1)
        if metadata.staged is None:
            refuse("capture batch", f"{metadata.num_prefills} prefills, {metadata.num_decodes} decodes and "
                   f"{metadata.num_spec_decodes} speculative rows", "only decodes, or only speculative rows",
                   f"Give every row one token, or 1 + drafts with drafts <= {self.num_spec}.")
        return metadata

    # -- the three kinds of batch ----------------------------------------------------------------------------------

    def _plain(self, metadata: KDAMetadata, batch: Batch, starts: np.ndarray, seq_lens: np.ndarray,
               classes: Classes) -> None:
        """No speculative rows: decodes first, then prefills."""
        rows, decodes, table, staging = metadata.num_reqs, classes.num_decodes, self._state_table(batch), self.staging
        metadata.non_spec_query_start_loc_cpu = starts
        if (staging is not None and classes.num_prefills == 0 and classes.dense_decode
                and staging.fits(rows, classes.num_decode_tokens)):
            staging.stage_decode(metadata, table, batch.query_start_loc, classes.num_decode_tokens)
            return
        metadata.non_spec_query_start_loc = batch.query_start_loc
        metadata.non_spec_state_indices_tensor = slots = table[:rows, 0]
        if classes.num_prefills == 0:
            return
        has_state = seq_lens > starts[1:] - starts[:-1]
        if decodes:
            metadata.has_initial_state, metadata.prefill_has_initial_state = self._suffix(
                metadata, table, starts, decodes, has_state, has_state[decodes:])
        else:
            metadata.has_initial_state, = pack(self.device, bools=(has_state,))
            metadata.prefill_query_start_loc, metadata.prefill_query_start_loc_cpu = batch.query_start_loc, starts
            metadata.prefill_state_indices, metadata.prefill_has_initial_state = slots, metadata.has_initial_state
        self._tables(metadata)

    def _pure_spec(self, metadata: KDAMetadata, batch: Batch, starts: np.ndarray, mask: np.ndarray,
                   accepted: torch.Tensor, classes: Classes) -> None:
        """Only speculative rows have tokens, whatever padding rows lie before, between and after them."""
        rows, spec_rows, staging = metadata.num_reqs, classes.num_spec_decodes, self.staging
        table, starts_device = self._state_table(batch), batch.query_start_loc
        if not mask[:spec_rows].all():  # padding rows lie before or between: gather, as if they trailed
            lens = (starts[1:] - starts[:-1])[mask]
            index, starts_device = pack(self.device, ints=(mask.nonzero()[0], _boundaries(lens)))
            table, accepted = table.index_select(0, index), accepted.index_select(0, index)
            staging = None  # its mask's rows would not be the batch's
        metadata.is_uniform_spec_decode = classes.uniform_spec_length == self.columns and spec_rows == rows
        tokens = min(spec_rows * self.columns, metadata.num_actual_tokens)
        if staging is not None and staging.fits(rows, metadata.num_spec_decode_tokens):
            staging.stage_spec(metadata, table, starts_device, accepted, spec_rows, tokens)
            return
        metadata.spec_query_start_loc = starts_device[:spec_rows + 1]
        metadata.spec_state_indices_tensor = table[:spec_rows, :self.columns]
        metadata.num_accepted_tokens = accepted[:spec_rows]
        metadata.spec_sequence_masks, = pack(self.device, bools=(mask,))
        metadata.spec_token_indx = torch.arange(tokens, dtype=torch.int32, device=self.device)
        metadata.non_spec_token_indx = metadata.spec_token_indx[:0]

    def _leading_spec(self, metadata: KDAMetadata, batch: Batch, starts: np.ndarray, seq_lens: np.ndarray,
                      mask: np.ndarray, accepted: torch.Tensor) -> None:
        """Speculative rows, then prefills, as schedulers order them: everything is a slice, nothing is gathered."""
        spec_rows, cut, end = metadata.num_spec_decodes, metadata.num_spec_decode_tokens, int(starts[-1])
        table, columns = self._state_table(batch), self.columns
        metadata.spec_leads = True
        metadata.spec_query_start_loc = batch.query_start_loc[:spec_rows + 1]
        metadata.spec_state_indices_tensor = table[:spec_rows, :columns]
        metadata.num_accepted_tokens = accepted[:spec_rows]
        if len(self._tokens) < end:
            self._tokens = torch.arange(1 << end.bit_length(), device=self.device)
        metadata.spec_token_indx = self._tokens[:cut]
        metadata.non_spec_token_indx = self._tokens[cut:end]
        has_state = seq_lens[spec_rows:] > starts[spec_rows + 1:] - starts[spec_rows:-1]
        metadata.has_initial_state, metadata.spec_sequence_masks = self._suffix(
            metadata, table, starts, spec_rows, has_state, mask)
        metadata.prefill_has_initial_state = metadata.has_initial_state
        metadata.non_spec_query_start_loc = metadata.prefill_query_start_loc
        metadata.non_spec_query_start_loc_cpu = metadata.prefill_query_start_loc_cpu
        metadata.non_spec_state_indices_tensor = metadata.prefill_state_indices
        self._tables(metadata)

    def _mixed(self, metadata: KDAMetadata, batch: Batch, starts: np.ndarray, seq_lens: np.ndarray, mask: np.ndarray,
               accepted: torch.Tensor) -> None:
        """Speculative rows among others in any order: rows and tokens are gathered by class."""
        lens = starts[1:] - starts[:-1]
        others = ~mask
        if metadata.num_decodes:
            others &= lens > 0  # so that token i of the decodes belongs to their row i
        spec_rows, other_rows = mask.nonzero()[0], others.nonzero()[0]
        of_token = np.repeat(mask, lens)
        other_lens = lens[other_rows]
        other_starts = _boundaries(other_lens)
        (metadata.spec_token_indx, metadata.non_spec_token_indx, spec_index, other_index, metadata.spec_query_start_loc,
         metadata.non_spec_query_start_loc, metadata.spec_sequence_masks, has_state) = pack(
            self.device, longs=(of_token.nonzero()[0], (~of_token).nonzero()[0]),
            ints=(spec_rows, other_rows, _boundaries(lens[spec_rows]), other_starts),
            bools=(mask, seq_lens[other_rows] > other_lens))
        table = self._state_table(batch)
        metadata.spec_state_indices_tensor = table[:, :self.columns].index_select(0, spec_index)
        metadata.num_accepted_tokens = accepted.index_select(0, spec_index)
        metadata.non_spec_state_indices_tensor = table[:, 0].index_select(0, other_index)
        metadata.non_spec_query_start_loc_cpu = other_starts
        if metadata.num_prefills:
            metadata.has_initial_state = metadata.prefill_has_initial_state = has_state
            metadata.prefill_query_start_loc = metadata.non_spec_query_start_loc
            metadata.prefill_query_start_loc_cpu = other_starts
            metadata.prefill_state_indices = metadata.non_spec_state_indices_tensor
            self._tables(metadata)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _suffix(self, metadata: KDAMetadata, table: torch.Tensor, starts: np.ndarray, first: int,
                *flags: np.ndarray) -> list[torch.Tensor]:
        """Boundaries (rebased to 0) and slots of the rows from ``first`` on; ``flags`` on the device, in the same transfer.

        Fresh tensors, not views: a view's address is aligned or not by the number of rows before it, and kernels are
        compiled for either.
        """
        rebased = starts[first:] - starts[first]
        metadata.prefill_query_start_loc_cpu = rebased
        metadata.prefill_query_start_loc, *there = pack(self.device, ints=(rebased,), bools=flags)
        metadata.prefill_state_indices = table[first:first + len(rebased) - 1, 0].clone()
        return there

    def _tables(self, metadata: KDAMetadata) -> None:
        """The grids of the convolution (all non-speculative rows) and of the chunk kernels (prefilled rows)."""
        boundaries, every_row = metadata.prefill_query_start_loc, metadata.non_spec_query_start_loc
        peeled = boundaries is not every_row
        tables = step_tables(boundaries, torch.from_numpy(metadata.prefill_query_start_loc_cpu), rows=True, checked=False,
                             chunk_size=self.chunk_size, blocks=() if peeled else self.conv_blocks)
        metadata.step_tables = tables
        metadata.chunk_indices, metadata.chunk_offsets = tables.chunk_indices, tables.chunk_offsets
        schedules = tables.schedules
        if peeled:  # the convolution also runs over the decodes, which the chunk table leaves out
            schedules = step_tables(every_row, torch.from_numpy(metadata.non_spec_query_start_loc_cpu), checked=False,
                                    chunk_size=self.chunk_size, blocks=self.conv_blocks).schedules
        metadata.nums_dict = schedules
        first = schedules[self.conv_blocks[0]]
        metadata.batch_ptr, metadata.token_chunk_offset_ptr = first["batch_ptr"], first["token_chunk_offset_ptr"]

    def _state_table(self, batch: Batch) -> torch.Tensor:
        """[R, at least 1+k] slots: the block table itself, or in "align" mode the columns of each row's last block."""
        if self.cache_mode != "align":
            return batch.block_table
        if batch.aligned_state_indices is not None:
            return batch.aligned_state_indices
        # clamp before the division: a row without tokens has seq_len 0, and -1 divides differently everywhere
        first = (batch.seq_lens - 1).clamp_(min=0).div_(self.block_size, rounding_mode="floor")
        columns = (first[:, None] + self._steps).clamp_(max=batch.block_table.shape[1] - 1)
        return batch.block_table[:len(first)].gather(1, columns)


def _boundaries(lens: np.ndarray) -> np.ndarray:
    """[N+1] int32 cumulative starts of N lengths."""
    starts = np.zeros(len(lens) + 1, np.int32)
    lens.cumsum(out=starts[1:], dtype=np.int32)
    return starts

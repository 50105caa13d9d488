"""From a batch to what the kernels need: one launch for a step with prefills, one for a staged step, no synchronisation.

Everything that decides a shape or a class is computed on the host's copies in numpy. In the orders that schedulers use
(decodes or speculative rows, then prefills) the device needs nothing of it but a few numbers, which are the launch's
arguments; in any other order, row and token numbers go over in one transfer from fresh pinned memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kdagen.errors import refuse
from kdagen.ops import _tables
from kdagen.ops._common import on_device
from kdagen.ops._lanes import Constants
from kdagen.ops._tables_source import view
from kdagen.ops.metadata import _write as write_tables
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
        if not isinstance(conv_blocks, Sequence) or not conv_blocks:
            refuse("conv_blocks", repr(conv_blocks), f"a sequence of at least one block size, such as ({CONV_BLOCK},)")
        if not isinstance(num_spec, int) or num_spec < 0:
            refuse("num_spec", num_spec, "the number of draft tokens a row may have, 0 or more")
        if staging is not None and (staging.columns != num_spec + 1 or staging.device != torch.device(device)):
            refuse("staging", f"buffers of {staging.columns} columns on {staging.device}",
                   f"{num_spec + 1} columns (1 + num_spec) on {device}")
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.num_spec = num_spec
        self.columns = num_spec + 1
        self.chunk_size = chunk_size
        self.conv_blocks = tuple(conv_blocks)
        self.cache_mode = cache_mode
        self.block_size = block_size
        self.keep_decodes = keep_decodes
        self.staging = staging
        self.checked = checked
        self._plan = _tables.plan(chunk_size, *conv_blocks)
        self._steps = torch.arange(self.columns, device=self.device) if cache_mode == "align" else None
        if self._steps is not None and self.cuda:  # steps may come on any stream: the one wait of a builder
            torch.cuda.current_stream(self.device).record_event().synchronize()

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
        lens = starts[1:] - starts[:-1]
        classes = classify(starts, lens, seq_lens, prefilling, drafts, self.num_spec, self.keep_decodes)
        mask = classes.spec_mask
        metadata = KDAMetadata(
            len(lens), batch.num_actual_tokens, classes.num_prefills, classes.num_prefill_tokens,
            classes.num_decodes, classes.num_decode_tokens, classes.num_spec_decodes, classes.num_spec_decode_tokens,
            batch.seq_lens, batch.block_table, batch.query_start_loc)
        metadata.chunk_size = self.chunk_size
        metadata.dense_decode = classes.dense_decode
        if mask is None:
            self._plain(metadata, batch, starts)
        else:
            if num_accepted_tokens is None:
                refuse("num_accepted_tokens", None, "an int32 tensor [R] on the device, because rows are speculative",
                       "Pass 1 for rows whose step before had no drafts.")
            metadata.spec_sequence_masks_cpu = mask
            metadata.uniform_spec_sequence_length = classes.uniform_spec_length
            if classes.num_prefills == 0 and classes.num_decodes == 0:
                self._pure_spec(metadata, batch, lens, num_accepted_tokens, classes)
            elif classes.num_prefills and classes.spec_leads:
                self._leading_spec(metadata, batch, starts, num_accepted_tokens)
            else:
                self._mixed(metadata, batch, lens, seq_lens, mask, num_accepted_tokens)
        if self.staging is not None:
            self.staging.close_step(metadata)
        if classes.num_prefills == 0:
            if batch.checkpoints:
                checkpoints.refuse_row(batch.checkpoints[0][0], [])
        elif batch.checkpoints or self.cache_mode == "align":
            rows = np.arange(classes.num_decodes, len(lens)) if mask is None else np.flatnonzero(~mask)
            metadata.checkpoint = checkpoints.plan(batch, metadata, rows, lens, seq_lens,
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

    def _plain(self, metadata: KDAMetadata, batch: Batch, starts: np.ndarray) -> None:
        """No speculative rows: decodes first, then prefills."""
        rows, decodes, table, staging = metadata.num_reqs, metadata.num_decodes, self._state_table(batch), self.staging
        metadata.non_spec_query_start_loc_cpu = starts
        if metadata.num_prefills == 0:
            if staging is not None and metadata.dense_decode and staging.fits(rows, metadata.num_decode_tokens):
                staging.stage_decode(metadata, table, batch.query_start_loc, metadata.num_decode_tokens)
                return
        else:
            self._prefills(metadata, batch, table, starts, 0, decodes)
        metadata.non_spec_query_start_loc = batch.query_start_loc
        metadata.non_spec_state_indices_tensor = view(table, (rows,), table.stride()[:1], 0)

    def _pure_spec(self, metadata: KDAMetadata, batch: Batch, lens: np.ndarray, accepted: torch.Tensor,
                   classes: Classes) -> None:
        """Only speculative rows have tokens, whatever padding rows lie before, between and after them."""
        rows, spec_rows, mask, staging = metadata.num_reqs, classes.num_spec_decodes, classes.spec_mask, self.staging
        table, starts_device = self._state_table(batch), batch.query_start_loc
        if not classes.spec_leads:  # padding rows lie before or between: gather, as if they trailed
            index, starts_device = pack(self.device, ints=(mask.nonzero()[0], _boundaries(lens[mask])))
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

    def _leading_spec(self, metadata: KDAMetadata, batch: Batch, starts: np.ndarray, accepted: torch.Tensor) -> None:
        """Speculative rows, then prefills, as schedulers order them: everything is a slice, nothing is gathered."""
        spec_rows, cut, rows = metadata.num_spec_decodes, metadata.num_spec_decode_tokens, metadata.num_reqs
        table, end = self._state_table(batch), cut + metadata.num_prefill_tokens
        with on_device(accepted):
            numbers, flags, half = _numbers(end, accepted), *_flags(rows, accepted)
        metadata.spec_leads = True
        metadata.spec_query_start_loc = view(batch.query_start_loc, (spec_rows + 1,), batch.query_start_loc.stride(), 0)
        metadata.spec_state_indices_tensor = view(table, (spec_rows, self.columns), table.stride(), 0)
        metadata.num_accepted_tokens = view(accepted, (spec_rows,), accepted.stride(), 0)
        metadata.spec_sequence_masks = view(flags, (rows,), (1,), half - spec_rows)
        metadata.spec_token_indx = view(numbers, (cut,), (1,), 0)
        metadata.non_spec_token_indx = view(numbers, (end - cut,), (1,), cut)
        self._prefills(metadata, batch, table, starts, spec_rows, 0)
        metadata.non_spec_query_start_loc = metadata.prefill_query_start_loc
        metadata.non_spec_query_start_loc_cpu = metadata.prefill_query_start_loc_cpu
        metadata.non_spec_state_indices_tensor = metadata.prefill_state_indices

    def _prefills(self, metadata: KDAMetadata, batch: Batch, table: torch.Tensor, starts: np.ndarray, base: int,
                  decodes: int) -> None:
        """Everything of the rows from ``base`` on, ``decodes`` rows of at most one token and then prefills, in one launch.

        The prefills' boundaries and slots are fresh tensors, not views: a view's address is aligned or not by the number of
        rows before it, and kernels are compiled for either. The convolution runs over the decodes too, the chunk kernels
        over the prefills alone.
        """
        cut, device_starts = base + decodes, batch.query_start_loc
        rebased = starts[cut:] - starts[cut] if cut else starts
        sizes = _tables.sizes_of(rebased, self._plan)
        if decodes:  # each of their tokens is one more program of the convolution
            sizes = [sizes[0], *(size + metadata.num_decode_tokens for size in sizes[1:])]
        if not device_starts.is_contiguous():
            device_starts = device_starts.contiguous()
        tables, requests = write_tables(
            device_starts, metadata.num_reqs - base, self._plan, sizes, True, False, False,
            (base, decodes, batch.seq_lens, batch.seq_lens.stride(0), table, table.stride(0)))
        metadata.prefill_query_start_loc_cpu = rebased
        metadata.prefill_query_start_loc, metadata.prefill_state_indices = requests.starts, requests.slots
        metadata.has_initial_state, metadata.prefill_has_initial_state = requests.carries, requests.first_carries
        self._set_tables(metadata, tables)

    def _mixed(self, metadata: KDAMetadata, batch: Batch, lens: np.ndarray, seq_lens: np.ndarray, mask: np.ndarray,
               accepted: torch.Tensor) -> None:
        """Speculative rows among others in any order: rows and tokens are gathered by class."""
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
            self._set_tables(metadata, step_tables(
                metadata.prefill_query_start_loc, torch.from_numpy(other_starts), rows=True, checked=False,
                chunk_size=self.chunk_size, blocks=self.conv_blocks))

    # -- parts -----------------------------------------------------------------------------------------------------

    def _set_tables(self, metadata: KDAMetadata, tables: _tables.StepTables) -> None:
        metadata.step_tables = tables
        metadata.chunk_indices, metadata.chunk_offsets = tables.chunk_indices, tables.chunk_offsets
        metadata.nums_dict = tables.schedules
        first = tables.schedules[self.conv_blocks[0]]
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


_constants = Constants(512)  # of all builders: made on the stream of one step, read on those of others


def _numbers(count: int, like: torch.Tensor) -> torch.Tensor:
    """0, 1, 2, ...: int64, at least ``count`` of them, on a tensor's device."""
    size = 1 << max(13, count.bit_length())  # few sizes, so that a step seldom is the first of its size
    return _constants.get(("numbers", size, like.get_device()), like, lambda: (torch.arange(size, device=like.device),))[0]


def _flags(count: int, like: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(bools: as many True and then as many False as the int says, which is at least ``count``) on a tensor's device."""
    half = 1 << max(9, count.bit_length())
    make = lambda: (torch.arange(2 * half, device=like.device) < half,)
    return _constants.get(("flags", half, like.get_device()), like, make)[0], half


def _boundaries(lens: np.ndarray) -> np.ndarray:
    """[N+1] int32 cumulative starts of N lengths."""
    starts = np.zeros(len(lens) + 1, np.int32)
    lens.cumsum(out=starts[1:], dtype=np.int32)
    return starts

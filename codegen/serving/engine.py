"""A small continuous-batching engine over one KDA layer, to show and to test how the parts of serving go together.

Its model is the layer between a random embedding and a random head; the next token is the head's largest logit. Requests
arrive, are prefilled in chunks beside the decodes of others, draft tokens from their own history, keep the drafts that
the model agrees with, and give their slots back. Every output vector is kept, so that ``verify`` can compare a request,
token by token, with the same sequence run alone and whole through the fp64 reference.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from kdagen.errors import refuse
from kdagen.serving import reference
from kdagen.serving.batch import NULL_SLOT, Batch, Checkpoint, KDAMetadata
from kdagen.serving.builder import KDAMetadataBuilder
from kdagen.serving.cache import KDACache
from kdagen.serving.graphs import DecodeGraphs
from kdagen.serving.layer import KDALayer


@dataclass
class Request:
    """A prompt, and how many tokens to generate after it. The rest is the engine's."""

    name: str
    prompt: list[int]
    new_tokens: int
    arrival: int = 0
    tokens: list[int] = field(default_factory=list)     # prompt and generated; the last generated one is not computed yet
    computed: int = 0                                    # tokens that are in the state
    accepted: int = 1                                    # of the step before, bonus token included
    slots: list[int] = field(default_factory=list)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)  # position -> [hidden]
    chunks: int = 0
    drafted: int = 0
    kept: int = 0
    reused: int = 0                                      # tokens whose state came from a kept prefix

    @property
    def prefilling(self) -> bool:
        return self.computed < len(self.prompt)

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= len(self.prompt) + self.new_tokens


@dataclass
class Row:
    """What a request does at one step: its new tokens, of which the last ``drafts`` are guesses (-1: no decode)."""

    request: Request
    tokens: list[int]
    drafts: int


class Engine:
    """Steps requests through a layer until all are finished.

    max_tokens: new tokens of a step; prompts are cut to fit. graphs: captured decode steps, or None. keep_prefixes: leave
    the state at a prompt's last chunk boundary for later prompts that begin alike.
    """

    def __init__(self, layer: KDALayer, cache: KDACache, builder: KDAMetadataBuilder, *, vocabulary: int = 8,
                 max_tokens: int = 64, graphs: DecodeGraphs | None = None, keep_prefixes: bool = False, seed: int = 0):
        self.layer, self.cache, self.builder, self.graphs = layer, cache, builder, graphs
        self.max_tokens, self.keep_prefixes = max_tokens, keep_prefixes
        generator = torch.Generator().manual_seed(seed)
        weight, hidden = layer.in_proj, layer.config.hidden
        make = lambda: torch.randn(vocabulary, hidden, generator=generator).to(weight.device, weight.dtype)
        self.embedding, self.head = make(), make()
        self.random = np.random.default_rng(seed)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished: list[Request] = []
        self.steps = self.replays = 0
        self._prefix_lengths: set[int] = set()

    def add(self, *requests: Request) -> None:
        for request in requests:
            if not request.prompt:
                refuse("prompt", f"no tokens ({request.name})", "a prompt of at least one token")
        self.waiting.extend(sorted(requests, key=lambda request: request.arrival))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> KDAMetadata | None:
        """Admit, schedule, run and sample once; the step's metadata, or None while nothing has arrived yet."""
        self._admit()
        rows = self._schedule()
        self.steps += 1
        if not rows:
            return None
        batch, accepted, drafts, kept = self._batch(rows)
        metadata = self.builder.build(batch, accepted, drafts)
        tokens = [token for row in rows for token in row.tokens]
        hidden = self.embedding[torch.tensor(tokens, device=self.embedding.device)]
        if metadata.staged and self.graphs is not None and batch.num_reqs in self.graphs.sizes:
            output = self.graphs.run(hidden, metadata)
            self.replays += 1
        else:
            output = self.layer(hidden, metadata, self.cache)
        best = (output @ self.head.T).argmax(-1).tolist()
        output = output.cpu()
        start = 0
        for row in rows:
            end = start + len(row.tokens)
            self._advance(row, output[start:end], best[start:end])
            start = end
        for prefix, slot in kept:
            self.cache.remember(prefix, slot)
            self._prefix_lengths.add(len(prefix))
        self._retire()
        return metadata

    def verify(self, request: Request) -> tuple[float, float]:
        """(largest, mean) relative error of a finished request's outputs against the whole sequence run alone."""
        tokens = request.tokens[:-1]  # the last one was sampled, not computed
        want = reference.forward(self.layer, self.embedding[torch.tensor(tokens, device=self.embedding.device)])
        missing = [p for p in range(request.reused, len(tokens)) if p not in request.outputs]
        if missing:
            return float("inf"), float("inf")
        errors = [float((request.outputs[p].double() - want[p]).norm() / want[p].norm())
                  for p in range(request.reused, len(tokens))]
        return max(errors), sum(errors) / len(errors)

    # -- one step --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        columns = self.builder.columns
        while self.waiting and self.waiting[0].arrival <= self.steps and self.cache.free_slots >= columns:
            request = self.waiting.popleft()
            request.tokens = list(request.prompt)
            request.slots = self.cache.allocate(columns)
            for length in sorted(self._prefix_lengths, reverse=True):
                if length < len(request.prompt) and self.cache.recall(tuple(request.prompt[:length]), request.slots[0]):
                    request.computed = request.reused = length
                    break
            self.running.append(request)

    def _schedule(self) -> list[Row]:
        """Decodes first, then chunks of prompts begun, then first chunks: the order that lets token ranges be slices."""
        budget, rows = self.max_tokens, []
        for request in self.running:
            if not request.prefilling and budget > 0:
                left = len(request.prompt) + request.new_tokens - len(request.tokens)
                count = min(self.builder.num_spec, left - 1, budget - 1)
                drafts = self._draft(request.tokens, int(self.random.integers(0, count + 1)) if count > 0 else 0)
                rows.append(Row(request, [request.tokens[-1], *drafts], len(drafts)))
                budget -= len(drafts) + 1
        prompts = [request for request in self.running if request.prefilling]
        for request in sorted(prompts, key=lambda request: request.computed == 0):
            count = min(budget, len(request.prompt) - request.computed)
            if count > 0:
                rows.append(Row(request, request.prompt[request.computed:request.computed + count], -1))
                budget -= count
        if self.builder.num_spec == 0:  # a one-token chunk of a prompt begun is a decode: it must stand among them
            rows.sort(key=lambda row: row.drafts < 0 and (len(row.tokens) > 1 or row.request.computed == 0))
        return rows

    def _draft(self, tokens: list[int], count: int) -> list[int]:
        """Guesses: what followed the same token before, or a random one."""
        known = dict(pairwise(tokens))
        drafts, last = [], tokens[-1]
        for _ in range(count):
            last = known.get(last, int(self.random.integers(len(self.embedding))))
            drafts.append(last)
        return drafts

    def _batch(self, rows: list[Row]):
        columns = self.builder.columns
        lens = [len(row.tokens) for row in rows]
        kept = self._prefixes(rows) if self.keep_prefixes else []
        size = len(rows)
        if self.graphs is not None and all(row.drafts >= 0 for row in rows):
            size = self.graphs.padded(size) or size
        padding = size - len(rows)
        table = [row.request.slots for row in rows] + [[NULL_SLOT] * columns] * padding
        seq_lens = [row.request.computed + count for row, count in zip(rows, lens)] + [0] * padding
        device = self.embedding.device
        batch = Batch.make(lens + [0] * padding, seq_lens, table, device=device,
                           is_prefilling=[row.request.prefilling for row in rows] + [False] * padding,
                           checkpoints=[wish for wish, _, _ in kept])
        accepted = drafts = None
        if self.builder.num_spec:
            accepted = torch.tensor([row.request.accepted for row in rows] + [1] * padding, dtype=torch.int32).to(device)
            drafts = np.array([row.drafts for row in rows] + [-1] * padding, np.int32)
        return batch, accepted, drafts, [(prefix, slot) for _, prefix, slot in kept]

    def _prefixes(self, rows: list[Row]):
        """(checkpoint, prefix, slot) of every prompt chunk that passes a chunk boundary, while slots are to spare."""
        out = []
        for number, row in enumerate(rows):
            request, chunk = row.request, self.builder.chunk_size
            offset = (len(row.tokens) - 1) // chunk * chunk
            spare = self.cache.free_slots > self.builder.columns
            if row.drafts < 0 and offset and len(row.tokens) > 1 and spare:
                slot, = self.cache.allocate(1)
                out.append((Checkpoint(number, offset, slot), tuple(request.prompt[:request.computed + offset]), slot))
        return out

    def _advance(self, row: Row, output: torch.Tensor, best: list[int]) -> None:
        request = row.request
        if row.drafts < 0:
            request.outputs.update({request.computed + i: vector for i, vector in enumerate(output)})
            request.computed += len(row.tokens)
            request.chunks += 1
            request.accepted = 1
            if not request.prefilling:
                request.tokens.append(best[-1])
            return
        agreed = 0
        while agreed < row.drafts and best[agreed] == row.tokens[agreed + 1]:
            agreed += 1
        request.outputs.update({request.computed + i: output[i] for i in range(agreed + 1)})
        request.tokens += [*row.tokens[1:agreed + 1], best[agreed]]
        request.computed += agreed + 1
        request.accepted = agreed + 1
        request.drafted += row.drafts
        request.kept += agreed

    def _retire(self) -> None:
        for request in [request for request in self.running if request.finished]:
            self.running.remove(request)
            self.cache.free(request.slots)
            self.finished.append(request)

"""Captured decode steps: one CUDA graph for each number of requests, all reading the staging buffers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch

from kdagen.errors import refuse
from kdagen.serving.batch import NULL_SLOT, Batch, KDAMetadata
from kdagen.serving.builder import KDAMetadataBuilder
from kdagen.serving.cache import KDACache
from kdagen.serving.layer import KDALayer


class DecodeGraphs:
    """Graphs of the layer's decode step for batches of ``sizes`` requests, 1 + num_spec tokens each.

    A batch is padded to the next size with requests of no tokens in the reserved slot. Graphs are captured with nothing
    but such requests, so capture touches no live state and may happen at any time.
    """

    def __init__(self, layer: KDALayer, cache: KDACache, builder: KDAMetadataBuilder, sizes: Sequence[int]):
        if builder.staging is None:
            refuse("builder", "one without staging", "KDAMetadataBuilder(..., staging=GraphStaging(...))")
        if not sizes or min(sizes) < 1:
            refuse("sizes", list(sizes), "numbers of requests to capture, each at least 1, such as [1, 2, 4, 8]")
        self.layer, self.cache, self.builder = layer, cache, builder
        self.sizes = sorted(sizes)
        self.columns = builder.columns
        tokens = self.sizes[-1] * self.columns
        weight = layer.in_proj
        self.input = torch.zeros(tokens, layer.config.hidden, dtype=weight.dtype, device=weight.device)
        self.output = torch.zeros_like(self.input)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = None
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            graph = self._graphs[size] = self._capture(size, pool)
            pool = graph.pool()

    def padded(self, requests: int) -> int | None:
        """The captured size that holds so many requests; None if there is none."""
        at = bisect_left(self.sizes, requests)
        return self.sizes[at] if at < len(self.sizes) else None

    def run(self, hidden: torch.Tensor, metadata: KDAMetadata) -> torch.Tensor:
        """Replay the graph of the metadata's size on ``hidden`` [T, hidden], T at most its tokens; a view of the output."""
        self.builder.staging.require(metadata)
        graph = self._graphs.get(metadata.num_reqs)
        if graph is None:
            refuse("metadata", f"{metadata.num_reqs} requests", f"one of the captured sizes {self.sizes}",
                   "Pad the batch: DecodeGraphs.padded gives the size.")
        tokens = metadata.num_reqs * self.columns
        if len(hidden) > tokens:
            refuse("hidden", f"{len(hidden)} tokens", f"at most {tokens} for {metadata.num_reqs} requests")
        self.input[:len(hidden)].copy_(hidden)
        graph.replay()
        return self.output[:len(hidden)]

    def _capture(self, size: int, pool) -> torch.cuda.CUDAGraph:
        tokens = size * self.columns
        lens = [self.columns] * size
        batch = Batch.make(lens, lens, np.full((size, self.columns), NULL_SLOT, np.int32), device=self.input.device)
        metadata = self.builder.build_for_cudagraph_capture(batch)
        step = lambda: self.output[:tokens].copy_(self.layer(self.input[:tokens], metadata, self.cache))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # compiles the kernels and makes the libraries' handles
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            step()
        return graph

"""Drives a layer through hand-written steps and compares every accepted token with the reference run alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kdagen.serving import Batch, KDAConfig, KDALayer, KDAMetadataBuilder, random_weights, reference


class Row(NamedTuple):
    """``count`` tokens of ``seq``; drafts None: prompt or plain decode, else ``accept`` of the 1+drafts are right."""

    seq: int
    count: int
    drafts: int | None = None
    accept: int = 1


def spec(seq, drafts, accept=1):
    return Row(seq, drafts + 1, drafts, accept)


PAD = Row(-1, 0)
BOUNDED = KDAConfig(24, 2, 16, lower_bound=-5.0, gate_rank=8)
SOFTPLUS = KDAConfig(24, 2, 16, gate_rank=8, output_gate_rank=8)


class Driver:
    """Sequences with fixed inputs; each owns 1+k slots of a pool whose every unwritten value is NaN."""

    def __init__(self, lengths, k=0, *, config=BOUNDED, device="cpu", dtype=torch.float32, seed=0, prefilling=True,
                 cache=None, spare=3, **options):
        self.layer = KDALayer(config, random_weights(config, dtype=dtype, device=device, seed=seed))
        generator = torch.Generator().manual_seed(seed + 1)
        self.inputs = [torch.randn(n, config.hidden, generator=generator).to(device, dtype) for n in lengths]
        self.wanted = [reference.forward(self.layer, x).cpu() for x in self.inputs]
        self.k, self.device, self.prefilling, self.dtype = k, device, prefilling, dtype
        self.cache = self.layer.new_cache(1 + len(lengths) * (k + 1) + spare, k, poison=True, zero="never", **(cache or {}))
        for pool in (self.cache.recurrent, self.cache.conv):
            pool[0] = 12345.0  # the reserved slot: whoever reads it is found out, whoever writes it too
        mixed = torch.randperm(len(lengths) * (k + 1), generator=generator).tolist()
        owned = self.cache.allocate(len(mixed))
        self.slots = [[owned[i] for i in mixed[n::len(lengths)]] for n in range(len(lengths))]
        self.builder = KDAMetadataBuilder(device, k, chunk_size=options.pop("chunk_size", 16), **options)
        self.computed, self.accepted = [0] * len(lengths), [1] * len(lengths)
        self.generator = generator
        self.worst = 0.0
        self.metadata = None

    def build(self, rows, pad_tokens=0, checkpoints=()):
        lens = [row.count for row in rows]
        live = lambda row: row.seq >= 0
        seq_lens = [self.computed[row.seq] + row.count if live(row) else 0 for row in rows]
        table = [self.slots[row.seq] if live(row) else [0] * (self.k + 1) for row in rows]
        flags = [live(row) and row.drafts is None and self.prefilling for row in rows]
        batch = Batch.make(lens, seq_lens, table, is_prefilling=flags, device=self.device, checkpoints=checkpoints,
                           num_actual_tokens=sum(lens) + pad_tokens)
        accepted = torch.tensor([self.accepted[row.seq] if live(row) else 1 for row in rows], dtype=torch.int32)
        drafts = np.array([-1 if row.drafts is None else row.drafts for row in rows], np.int32)
        return self.builder.build(batch, accepted.to(self.device) if self.k else None, drafts if self.k else None)

    def hidden(self, rows, pad_tokens=0):
        parts = [torch.full((0, self.layer.config.hidden), 0.0, device=self.device, dtype=self.dtype)]
        for row in rows:
            if row.seq < 0:
                continue
            right = row.count if row.drafts is None else row.accept
            start = self.computed[row.seq]
            wrong = torch.randn(row.count - right, self.layer.config.hidden, generator=self.generator)
            parts += [self.inputs[row.seq][start:start + right], wrong.to(self.device, self.dtype)]
        parts.append(torch.ones(pad_tokens, self.layer.config.hidden, device=self.device, dtype=self.dtype))
        return torch.cat(parts)

    def step(self, *rows, pad_tokens=0, checkpoints=(), run=None):
        self.metadata = self.build(rows, pad_tokens, checkpoints)
        hidden = self.hidden(rows, pad_tokens)
        output = (run or self.forward)(hidden, self.metadata)
        assert output.shape == hidden.shape
        start = 0
        for row in rows:
            if row.seq >= 0:
                right = row.count if row.drafts is None else row.accept
                self._compare(row.seq, output[start:start + right])
                self.computed[row.seq] += right
                self.accepted[row.seq] = 1 if row.drafts is None else right
            start += row.count
        assert not output[start:].any(), "tokens of padding give zeros"
        return output

    def forward(self, hidden, metadata):
        return self.layer(hidden, metadata, self.cache)

    def _compare(self, seq, output):
        want = self.wanted[seq][self.computed[seq]:self.computed[seq] + len(output)]
        errors = (output.detach().cpu().double() - want).norm(dim=1) / want.norm(dim=1)
        self.worst = max(self.worst, float("inf") if not torch.isfinite(errors).all() else float(errors.max()))

    def check(self, tolerance=1e-5):
        """All outputs right; the reserved slot and the slots of nobody as they were."""
        assert self.worst <= tolerance, self.worst
        nobody = list(self.cache._free)
        assert torch.isnan(self.cache.recurrent[nobody]).all() and torch.isnan(self.cache.conv[nobody]).all()
        for pool in (self.cache.recurrent, self.cache.conv):
            assert (pool[0] == pool.new_tensor(12345.0)).all(), "the reserved slot was written"

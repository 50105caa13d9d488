"""Benchmark of serving: host time of the metadata builder, and the whole layer's decode step under a CUDA graph.

Builder rows (``how`` = host): the batch is built on the GPU with torch's sync debug mode set to error, and its fields are
compared with the same batch's on the CPU (``error`` counts the fields that differ). Beside them stands a yardstick of the
machine: one ``torch.empty`` and one elementwise launch in the same loop.

Layer rows (``how`` = graph): in_proj, gate projections, fused decode step, out_proj of one rank, random bf16 weights,
fp32 states. States rotate over slots that overflow the L2 cache; weights are read whole at every step. ``floor_us`` is the
sum of the kernels' floors: bytes over the copy rate measured in the same run. ``error`` is the relative error of three
decoded tokens of every row against the fp64 reference.
"""

from __future__ import annotations

import numpy as np
import torch

from kdagen.serving import Batch, GraphStaging, KDAConfig, KDALayer, KDAMetadataBuilder, random_weights, reference

from .common import Budget, relative_error, row, sets_needed, time_graph, time_host

MODELS = {"Kimi-K3, H=12": KDAConfig.kimi_k3().shard(8), "Kimi-Linear, H=32": KDAConfig.kimi_linear()}
BATCHES = (1, 8, 32, 128)
TOLERANCE = 2e-2  # bf16: projection, convolution, norm and output each rounded once


def run(budget_s: float, *, peers: tuple[str, ...] = ()) -> list[dict]:
    """Rows of the builder, then of the layer, smallest batches first."""
    budget = Budget(budget_s)
    rows = [*_yardstick(), *(one for case in budget.over(BUILDS) for one in _build(case))]
    cases = [(name, batch) for batch in BATCHES for name in MODELS]
    layers: dict = {}
    for name, batch in budget.over(cases):
        if name not in layers:
            layers[name] = KDALayer(MODELS[name], random_weights(MODELS[name], device="cuda"))
        rows.append(_decode(name, layers[name], batch))
    return rows


# ---- the builder

BUILDS = {  # name -> (new tokens of each request, their drafts or None, requests that prefill)
    "decode, 256 requests": ([1] * 256, None, 0),
    "mixed, 248 decodes + 8 prefills": ([1] * 248 + [512] * 8, None, 8),
    "speculative, 256 requests x 4": ([4] * 256, [3] * 256, 0),
    "mixed, 248 speculative + 8 prefills": ([4] * 248 + [512] * 8, [3] * 248 + [-1] * 8, 8),
}


def _yardstick() -> list[dict]:
    x = torch.zeros(256, dtype=torch.int32, device="cuda")
    calls = (("torch.empty", "torch.empty", lambda: torch.empty(256, device="cuda")),
             ("torch.add", "torch.add of 256", lambda: torch.add(x, 1)))
    return [row("layer", "yardstick", op, what, time_host(call), how="host") for op, what, call in calls]


def _batch(name: str, device: str) -> tuple:
    lens, drafts, prefills = BUILDS[name]
    rows, columns = len(lens), 1 if drafts is None else 4
    table = (np.random.default_rng(0).permutation(rows * columns) + 1).reshape(rows, columns).astype(np.int32)
    flags = [i >= rows - prefills for i in range(rows)]
    seq_lens = [n if flag else n + 100 for n, flag in zip(lens, flags)]
    batch = Batch.make(lens, seq_lens, table, is_prefilling=flags, device=device)
    if drafts is None:
        return (batch,)
    return batch, torch.ones(rows, dtype=torch.int32, device=device), np.array(drafts, np.int32)


def _builder(name: str, device: str, checked: bool) -> KDAMetadataBuilder:
    k = 0 if BUILDS[name][1] is None else 3
    return KDAMetadataBuilder(device, k, staging=GraphStaging(device, 256, k, 1024), checked=checked)


def _build(name: str) -> list[dict]:
    lens = BUILDS[name][0]
    arguments, want = _batch(name, "cuda"), _builder(name, "cpu", True).build(*_batch(name, "cpu"))
    rows = []
    for checked in (True, False):
        builder = _builder(name, "cuda", checked)
        builder.build(*arguments)
        torch.cuda.synchronize()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = builder.build(*arguments)
            timing = time_of(lambda b=builder: b.build(*arguments))
        finally:
            torch.cuda.set_sync_debug_mode(before)
        tensors = [field for field in type(got).__dataclass_fields__ if isinstance(getattr(want, field), torch.Tensor)]
        wrong = sum(not torch.equal(getattr(got, field).cpu(), getattr(want, field)) for field in tensors)
        rows.append(row("layer", f"build: {name}", "KDAMetadataBuilder.build", "kdagen" if checked else "kdagen, unchecked",
                        timing, how="host", error=float(wrong), error_against="the same batch on the CPU", batch=len(lens),
                        tokens=sum(lens)))
    return rows


def time_of(call):
    """``time_host``; its own synchronisations between batches of calls are allowed, the calls' are not."""
    inside = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        return time_host(call)
    finally:
        torch.cuda.set_sync_debug_mode(inside)


# ---- the layer

def _decode(name: str, layer: KDALayer, batch: int) -> dict:
    config = layer.config
    state_bytes = config.heads * config.head_dim**2 * 4 * 2  # read and written
    line_bytes = 3 * config.P * (config.conv_width - 1) * 2 * 2
    pools = batch * (state_bytes + line_bytes)
    sets = min(sets_needed(pools), 8)
    cache = layer.new_cache(1 + sets * batch, zero="never")
    staging = [GraphStaging("cuda", batch) for _ in range(sets)]
    slots = torch.randperm(sets * batch).add_(1).reshape(sets, batch, 1).to("cuda", torch.int32)
    steps = []
    for buffers, table in zip(staging, slots):
        made = Batch.make([1] * batch, [9] * batch, table, device="cuda")
        steps.append(KDAMetadataBuilder("cuda", staging=buffers).build_for_cudagraph_capture(made))
    error = _check(layer, cache, steps[0], batch)
    if not error <= TOLERANCE:
        raise RuntimeError(f"{name}, batch {batch}: error {error:.2e} of the decode step is above {TOLERANCE}")
    cache.recurrent.normal_(std=0.1)
    hidden = [torch.randn(batch, config.hidden, device="cuda", dtype=torch.bfloat16) for _ in steps]
    timing = time_graph([lambda x=x, m=m: layer(x, m, cache) for x, m in zip(hidden, steps)])
    weights = sum(tensor.numel() * tensor.element_size() for tensor in layer.parameters())
    activations = batch * (2 * config.hidden + 2 * config.packed + 2 * 2 * config.P) * 2
    operations = 2 * batch * sum(t.numel() for name, t in layer.named_parameters() if name.endswith(("proj", "_b")))
    return row("layer", f"decode step, {name}, batch {batch}", "KDALayer", "kdagen", timing, how="graph",
               bytes_moved=weights + pools + activations, operations=operations, error=error, error_against="fp64 reference",
               batch=batch, heads=config.heads)


def _check(layer: KDALayer, cache, metadata, batch: int, tokens: int = 3) -> float:
    """Every row decodes the same few tokens from zero states."""
    cache.recurrent.zero_()
    cache.conv.zero_()
    sequence = torch.randn(tokens, layer.config.hidden, device="cuda", dtype=torch.bfloat16)
    want = reference.forward(layer, sequence, device="cuda")
    step = lambda x: layer(x.expand(batch, -1).contiguous(), metadata, cache)
    got = torch.stack([step(x) for x in sequence])  # [tokens, batch, hidden]
    return max(relative_error(got[:, i], want) for i in range(batch))

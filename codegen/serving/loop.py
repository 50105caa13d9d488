"""The demonstration: requests of mixed lengths through one layer with random weights, each checked against the reference."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from kdagen.serving.builder import KDAMetadataBuilder
from kdagen.serving.config import KDAConfig
from kdagen.serving.engine import Engine, Request
from kdagen.serving.graphs import DecodeGraphs
from kdagen.serving.layer import KDALayer, random_weights
from kdagen.serving.staging import GraphStaging

PROMPTS = (1, 2, 4, 5, 17, 63, 64, 65, 130, 200)  # one token, 1+k and its neighbours, chunk boundaries, several chunks
Progress = Callable[[int, int], None]


def tolerance(layer: KDALayer) -> float:
    """Largest relative error that one output vector may have.

    CPU path, fp32: computed in fp64, stored in fp32 between the steps. Kernels: fp32 prefill products are allowed 1e-3; in
    bf16 and fp16 projection, convolution and output are each rounded to 8 or 11 bits, and the error of a single vector is
    not averaged as a whole tensor's is.
    """
    weight = layer.in_proj
    if weight.dtype == torch.float32:
        return 2e-3 if weight.is_cuda else 1e-5
    return 5e-3 if weight.dtype == torch.float16 else 3e-2


def make_engine(*, device="cpu", dtype: torch.dtype | None = None, config: KDAConfig | None = None, num_spec: int = 3,
                max_requests: int = 4, max_tokens: int = 96, seed: int = 0, poison: bool = True, **options) -> Engine:
    """An engine with a random layer: small and fp32 on the CPU, K = V = 128 and bf16 with captured graphs on a GPU.

    Freed slots are filled with NaN (``poison``), so that an output that depends on one cannot go unnoticed.
    """
    gpu = torch.device(device).type == "cuda"
    if config is None:
        config = KDAConfig(512, 4, lower_bound=-5.0) if gpu else KDAConfig(32, 2, 16, lower_bound=-5.0, gate_rank=8)
    dtype = dtype or (torch.bfloat16 if gpu else torch.float32)
    layer = KDALayer(config, random_weights(config, dtype=dtype, device=device, seed=seed))
    cache = layer.new_cache(1 + max_requests * (num_spec + 1) + 4, num_spec, poison=poison)
    staging = GraphStaging(device, max_requests, num_spec)
    builder = KDAMetadataBuilder(device, num_spec, staging=staging, chunk_size=options.pop("chunk_size", 64 if gpu else 16))
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size < max_requests] + [max_requests]
    graphs = DecodeGraphs(layer, cache, builder, sizes) if gpu else None
    return Engine(layer, cache, builder, max_tokens=max_tokens, graphs=graphs, seed=seed, **options)


def make_requests(*, vocabulary: int = 8, prompts=PROMPTS, new_tokens: tuple[int, int] = (6, 20), gap: int = 2,
                  seed: int = 0) -> list[Request]:
    """Random prompts of the given lengths, one arriving every ``gap`` steps, each with a random count to generate."""
    random = np.random.default_rng(seed)
    return [Request(f"request {i}", random.integers(vocabulary, size=length).tolist(), int(random.integers(*new_tokens)),
                    arrival=i * gap) for i, length in enumerate(prompts)]


def run_demo(progress: Progress | None = None, *, device=None, seed: int = 0, num_spec: int = 3) -> list[dict]:
    """Run the loop, then check it: a row for each request and a last one for all of them.

    ``progress(done, total)`` counts tokens and is called after every step. Rows: request, prompt, generated, chunks,
    drafted, kept, error (the largest relative error of an output vector), tolerance, agrees.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    requests = make_requests(seed=seed)
    total = sum(len(request.prompt) + request.new_tokens for request in requests)
    with _cpu_path(device):
        engine = make_engine(device=device, seed=seed, num_spec=num_spec)
        engine.add(*requests)
        while engine.busy:
            engine.step()
            if progress is not None:
                progress(sum(len(request.tokens) for request in engine.running + engine.finished), total)
        errors = [engine.verify(request)[0] for request in requests]
    allowed = tolerance(engine.layer)
    rows = [_row(request.name, [request], error, allowed) for request, error in zip(requests, errors)]
    name = f"all, in {engine.steps} steps ({engine.replays} replayed graphs)"
    return [*rows, _row(name, requests, max(errors), allowed)]


def _row(name: str, requests: list[Request], error: float, allowed: float) -> dict:
    add = lambda value: sum(map(value, requests))
    generated = add(lambda r: len(r.tokens) - len(r.prompt))
    return {"request": name, "prompt": add(lambda r: len(r.prompt)), "generated": generated,
            "chunks": add(lambda r: r.chunks), "drafted": add(lambda r: r.drafted), "kept": add(lambda r: r.kept),
            "error": error, "tolerance": allowed, "agrees": error <= allowed}


def show(device=None, seed: int = 0) -> bool:
    """``run_demo`` with a progress bar and a closing table on the terminal; whether every request agrees."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from kdagen import cli

    with Progress(TextColumn("serving"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), transient=True) as bar:
        task = bar.add_task("serving")
        rows = run_demo(lambda done, total: bar.update(task, completed=done, total=total), device=device, seed=seed)
    columns = ["request", "prompt", "generated", "chunks", "drafted", "kept", "error"]
    table = [[*(row[name] for name in columns[:-1]), f"{row['error']:.1e}", "equal" if row["agrees"] else "DIFFERS"]
             for row in rows]
    cli.print_table("Requests served together, each against the fp64 reference run alone", [*columns, ""], table)
    return rows[-1]["agrees"]


@contextmanager
def _cpu_path(device) -> Iterator[None]:
    """On the CPU the ops take their plain torch path: the interpreter would need minutes for a loop like this."""
    before = os.environ.get("TRITON_INTERPRET")
    if torch.device(device).type == "cpu":
        os.environ["TRITON_INTERPRET"] = "0"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = before

"""The sweep's cases of the step's tables: integers, compared exactly."""

from __future__ import annotations

import torch

from kdagen import reference
from kdagen.ops import _tables
from kdagen.ops.metadata import _write, step_tables
from kdagen.ops.staging import stage_spec_decode_metadata
from kdagen.spec import Problem, Spec
from kdagen.tuning.cases import TORCH_DTYPES, Case, Random, case

CONV_BLOCKS = (8, 64, 16, 32, 128, 4, 2, 256, 512, 1024, 12, 20, 24, 40, 48, 56)


@case("step_tables")
class StepTables(Case):
    """Bounded mode, as a captured step uses it. All sizes are one load bucket: a batch of 256 sequences stands for them."""

    def problems(self, spec: Spec) -> list[Problem]:
        return [Problem(8192, 256, 1)]

    def inputs(self, spec: Spec, problem: Problem, seed: int, device: torch.device) -> dict:
        random = Random(seed, torch.device("cpu"))
        cuts = random.order(problem.tokens - 1)[: problem.seqs - 1].sort().values + 1
        edges = torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), problem.tokens)])
        inputs = {"cu_seqlens": edges.to(TORCH_DTYPES[spec.dtype]).to(device), "tokens": problem.tokens}
        if spec.requests:  # every other request is in its first chunk
            lens = edges.diff() + torch.arange(problem.seqs) % 2
            inputs |= {"first": problem.seqs // 2, "lens": lens.to(device, torch.int32),
                       "table": random.order(2 * problem.seqs).view(-1, 2).to(device, torch.int32)}
        return inputs

    def run(self, spec: Spec, inputs: dict) -> dict:
        blocks, out = CONV_BLOCKS[: spec.schedules], {}
        if spec.requests:
            edges, bound, first, lens, table = inputs.values()
            planned, n_seqs = _tables.plan(spec.chunk, *blocks), len(edges) - 1
            sizes, given = _tables.bounded_sizes(n_seqs, bound, planned), (0, first, lens, 1, table, 2)
            tables, requests = _write(edges, n_seqs, planned, sizes, True, True, False, given)
            out |= requests._asdict()
        elif spec.chunk:
            tables = step_tables(**inputs, chunk_size=spec.chunk, blocks=blocks, rows=True)
        else:
            edges, planned = inputs["cu_seqlens"], _tables.plan(None, *blocks)
            sizes = _tables.bounded_sizes(len(edges) - 1, inputs["tokens"], planned)
            tables = _write(edges, len(edges) - 1, planned, sizes, False, True)
        out["counts"] = tables.counts
        if spec.chunk:
            out |= {"indices": tables.chunk_indices, "offsets": tables.chunk_offsets}
        for block, schedule in tables.schedules.items():
            out |= {f"seq_{block}": schedule["batch_ptr"], f"part_{block}": schedule["token_chunk_offset_ptr"]}
        return out

    def oracle(self, spec: Spec, inputs: dict) -> dict:
        edges, bound = inputs["cu_seqlens"], inputs["tokens"]
        size = lambda block: -(-bound // block) + len(edges) - 1
        pad = lambda x, rows: torch.cat([x, x.new_full((rows - len(x), *x.shape[1:]), -1)])
        out, counts, chunked = {}, [], edges
        if spec.requests:
            first, carries = inputs["first"], inputs["lens"] > edges.diff()
            chunked = edges[first:] - edges[first]
            out |= {"starts": chunked, "slots": inputs["table"][first:, 0], "carries": carries,
                    "first_carries": carries[first:]}
        if spec.chunk:
            indices, offsets = reference.chunk_table(chunked, spec.chunk)
            out |= {"indices": pad(indices, size(spec.chunk)), "offsets": offsets}
            counts.append(len(indices))
        for block in CONV_BLOCKS[: spec.schedules]:
            table = reference.conv_schedule(edges, block)
            out |= {f"seq_{block}": pad(table["batch_ptr"], size(block)),
                    f"part_{block}": pad(table["token_chunk_offset_ptr"], size(block))}
            counts.append(table["tot"])
        return out | {"counts": torch.tensor(counts, dtype=torch.int32, device=edges.device)}

    def bytes_moved(self, spec: Spec, problem: Problem) -> float:
        return 4.0 * problem.seqs + 16.0 * problem.tokens / 64


@case("stage_spec")
class StageSpec(Case):
    """A step of speculative decode that fills half of its graph's rows; all sizes are one load bucket."""

    COLUMNS = 4

    def problems(self, spec: Spec) -> list[Problem]:
        return [Problem(256, 256, 1)]

    def inputs(self, spec: Spec, problem: Problem, seed: int, device: torch.device) -> dict:
        random, S = Random(seed, torch.device("cpu")), problem.seqs
        lengths = random.order(S) % self.COLUMNS + 1
        edges = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(torch.int32)])
        return {"state_indices": random.order(S * self.COLUMNS).view(S, self.COLUMNS).to(device),
                "query_start_loc": edges.to(device), "num_accepted_tokens": (random.order(S) % self.COLUMNS + 1).to(device)}

    def run(self, spec: Spec, inputs: dict) -> dict:
        S, device = len(inputs["num_accepted_tokens"]), inputs["state_indices"].device
        shapes = {"state_indices": (2 * S, self.COLUMNS), "query_start_loc": (2 * S + 1,), "num_accepted_tokens": (2 * S,)}
        staged = {f"staged_{name}": torch.empty(shape, dtype=torch.int32, device=device) for name, shape in shapes.items()}
        stage_spec_decode_metadata(**inputs, **staged, num_spec_decodes=S)
        return staged

    def oracle(self, spec: Spec, inputs: dict) -> dict:
        S = len(inputs["num_accepted_tokens"])
        found = reference.stage_spec_decode(*inputs.values(), 2 * S, self.COLUMNS, S, 0)
        return dict(zip(("staged_state_indices", "staged_query_start_loc", "staged_num_accepted_tokens"), found))

    def bytes_moved(self, spec: Spec, problem: Problem) -> float:
        return 4.0 * 3 * problem.seqs * (self.COLUMNS + 2)

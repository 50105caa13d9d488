"""The sweep's cases of the prefill families: the whole op, with one family's schedule pinned.

The kernels of prefill overlap, so the time that counts is that of the op; the other families run as dispatch picks them.
"""

from __future__ import annotations

import torch

from kdagen import reference
from kdagen.ops.metadata import step_tables
from kdagen.ops.prefill import chunk_kda
from kdagen.spec import DTYPES, Problem, Schedule, Spec
from kdagen.tuning import space
from kdagen.tuning.cases import TORCH_DTYPES, Case, Random, boundaries, case
from kdagen.tuning.cases_decode import gate_inputs

IN_KERNEL = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)


class Prefill(Case):
    """Packed prompts from given states, final states returned, tables made beforehand from the host's boundaries."""

    def problems(self, spec: Spec) -> list[Problem]:
        return space.prefill_problems()

    def inputs(self, spec: Spec, problem: Problem, seed: int, device: torch.device) -> dict:
        random, dtype = Random(seed, device), TORCH_DTYPES[spec.dtype]
        T, N, H, K, V = *problem, spec.k, spec.v
        edges = boundaries(problem)
        wide = lambda d: random.normal(1, T, H, d, dtype=dtype)
        inputs = {"q": wide(K), "k": wide(K), "v": wide(V), "g": wide(K), "beta": random.normal(1, T, H, dtype=dtype),
                  "initial_state": random.normal(N, H, V, K), "cu_seqlens": edges.to(device), "cu_seqlens_cpu": edges}
        inputs["tables"] = step_tables(inputs["cu_seqlens"], edges, chunk_size=spec.chunk, rows=True)
        gate = self.gate(spec)
        if gate == "log":
            inputs["g"] = torch.nn.functional.logsigmoid(inputs["g"].float()).to(dtype)
        else:
            inputs |= gate_inputs(random, H, K) | ({"lower_bound": None} if gate == "softplus" else {})
        return inputs

    def gate(self, spec: Spec) -> str:
        return "bounded"

    def run(self, spec: Spec, inputs: dict) -> dict:
        o, state = chunk_kda(**inputs, **IN_KERNEL, chunk_size=spec.chunk, output_final_state=True,
                             use_gate_in_kernel=self.gate(spec) != "log")
        return {"o": o, "state": state}

    def oracle(self, spec: Spec, inputs: dict) -> dict:
        inputs = {name: value for name, value in inputs.items() if name not in ("tables", "cu_seqlens_cpu")}
        o, state = reference.recurrent_kda(**inputs, **IN_KERNEL, output_final_state=True,
                                           use_gate_in_kernel=self.gate(spec) != "log")
        return {"o": o, "state": state}

    def bytes_moved(self, spec: Spec, problem: Problem) -> float:
        rows, size = problem.tokens * problem.heads, DTYPES[spec.dtype]
        inputs = rows * (3 * spec.k + 2 * spec.v + 1) * size
        return inputs + 2 * 4 * problem.seqs * problem.heads * spec.k * spec.v

    def checkable(self, spec: Spec, problem: Problem) -> Problem:
        seqs = min(problem.seqs, 3)
        return Problem(min(problem.tokens, 3 * spec.chunk * seqs + seqs), seqs, min(problem.heads, 4))

    def tolerance(self, spec: Spec, output: str) -> float:
        """Products of half precision: the accuracy that the op promises for random inputs."""
        return {"bf16": 6e-3, "fp16": 4e-3, "fp32": 1e-3}[spec.dtype]


@case("prefill_prepare")
class Prepare(Prefill):
    def redundant(self, spec: Spec, schedule: Schedule) -> str | None:
        if schedule.form and schedule.blocks:
            return f"the {schedule.form} form has no blocks: it is the same kernel without them"
        return None

    def gate(self, spec: Spec) -> str:
        return spec.gate


@case("prefill_state")
class State(Prefill):
    spacing = (0, 1)  # the default rule turns on the number of programs


@case("prefill_segments")
class Segments(Prefill):
    """Long sequences of few heads: the only ones that are cut into segments."""

    spacing = (0, 1)

    def problems(self, spec: Spec) -> list[Problem]:
        return [Problem(tokens, 1, heads) for heads in (12, 4, 8, 6, 16) for tokens in (8192, 32768, 2048, 65536, 16384)]

    def checkable(self, spec: Spec, problem: Problem) -> Problem:
        return Problem(min(problem.tokens, 1500), 1, min(problem.heads, 2))

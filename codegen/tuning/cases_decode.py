"""The sweep's cases of the decode families: recurrence, convolution, gate, norm, the fused step.

Inputs are those of serving: raw bounded gate, L2 norm and beta's sigmoid in the kernel, fp32 states in a pool, slots in
random order. ``problem`` counts what the op itself tells dispatch: for the convolution ``heads`` is channels, for gate and
norm ``tokens`` is rows (tokens x heads).
"""

from __future__ import annotations

import torch

from kdagen import reference
from kdagen.ops.conv import causal_conv1d, causal_conv1d_update
from kdagen.ops.decode import fused_recurrent_kda
from kdagen.ops.decode_step import kda_decode_step
from kdagen.ops.gate import kda_gate
from kdagen.ops.norm import gated_rmsnorm
from kdagen.spec import DTYPES, Problem, Spec
from kdagen.tuning import space
from kdagen.tuning.cases import TORCH_DTYPES, Case, Random, boundaries, case

STATE_TOLERANCE = 1e-5  # fp32 states: sums in another order than the oracle's
CHANNELS = tuple(3 * 128 * heads for heads in (32, 12, 96, 4))
ROWS = [1 << i for i in (15, 18, 10, 5, 20, 13, 17, 7, 16, 12, 19, 14, 11, 9, 8, 6, 21, 22)]


def gate_inputs(random: Random, heads: int, K: int) -> dict:
    return {"A_log": random.uniform(heads, low=0.0, high=2.0), "dt_bias": random.normal(heads, K, scale=0.5),
            "lower_bound": -5.0}


@case("recurrent")
class Recurrent(Case):
    """One token a sequence (or 4, as after drafts), in place on a pool of fp32 states."""

    in_place = ("state_pool",)

    def problems(self, spec: Spec) -> list[Problem]:
        plain = space.decode_problems()
        return plain + [Problem(4 * p.tokens, p.seqs, p.heads) for p in plain if p.seqs <= 256]

    def inputs(self, spec: Spec, problem: Problem, seed: int, device: torch.device) -> dict:
        random, dtype = Random(seed, device), TORCH_DTYPES[spec.dtype]
        N, T, H, K, V = problem.seqs, problem.tokens // problem.seqs, problem.heads, spec.k, spec.v
        inner = (K, V) if spec.k_first else (V, K)
        wide = lambda d: random.normal(N, T, H, d, dtype=dtype)
        return {"q": wide(K), "k": wide(K), "v": wide(V), "g": wide(K), "beta": random.normal(N, T, H, dtype=dtype),
                "state_pool": random.normal(N, H, *inner, dtype=self.state_dtype(spec)), "state_indices": random.order(N),
                **gate_inputs(random, H, K)}

    def state_dtype(self, spec: Spec) -> torch.dtype:
        if not spec.half_state:
            return torch.float32
        return torch.float16 if spec.dtype == "fp16" else torch.bfloat16

    def run(self, spec: Spec, inputs: dict) -> dict:
        o, _ = fused_recurrent_kda(
            **inputs, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            state_v_first=not spec.k_first)
        return {"o": o}

    def oracle(self, spec: Spec, inputs: dict) -> dict:
        inputs = dict(inputs)
        pool = inputs.pop("state_pool").double()
        o = reference.recurrent_kda_pool(
            *(inputs.pop(x) for x in ("q", "k", "v", "g", "beta")), pool, inputs.pop("state_indices"), **inputs,
            use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            state_v_first=not spec.k_first)
        return {"o": o, "state_pool": pool}

    def bytes_moved(self, spec: Spec, problem: Problem) -> float:
        states = 2 * (2 if spec.half_state else 4) * problem.seqs * problem.heads * spec.k * spec.v
        tokens = problem.tokens * problem.heads * (3 * spec.k + 2 * spec.v + 1) * DTYPES[spec.dtype]
        return states + tokens

    def checkable(self, spec: Spec, problem: Problem) -> Problem:
        T, N = problem.tokens // problem.seqs, min(problem.seqs, 5)
        return Problem(T * N, N, min(problem.heads, 8))

    def tolerance(self, spec: Spec, output: str) -> float:
        """States in half precision are rounded as the output is."""
        return STATE_TOLERANCE if output == "state_pool" and not spec.half_state else super().tolerance(spec, output)


@case("decode_step")
class DecodeStep(Case):
    """One token a sequence from a packed projection, in place on both pools."""

    in_place = ("conv_pool", "state_pool")

    def problems(self, spec: Spec) -> list[Problem]:
        return space.decode_problems()

    def inputs(self, spec: Spec, problem: Problem, seed: int, device: torch.device) -> dict:
        random, dtype = Random(seed, device), TORCH_DTYPES[spec.dtype]
        N, H, K, V = problem.seqs, problem.heads, spec.k, spec.v
        D = H * (2 * K + V)
        inner = (K, V) if spec.k_first else (V, K)
        sizes = [D, H * V, H * K, H]
        qkv, z, g, beta = random.normal(N, sum(sizes), dtype=dtype).split(sizes, dim=1)
        return {"qkv": qkv, "z": z, "g": g, "beta": beta, "conv_pool": random.normal(N, spec.width - 1, D, dtype=dtype),
                "conv_weight": random.normal(D, spec.width), "state_pool": random.normal(N, H, *inner),
                "state_indices": random.order(N), "norm_weight": random.uniform(V, low=0.5, high=1.5).to(dtype),
                **gate_inputs(random, H, K)}

    def run(self, spec: Spec, inputs: dict) -> dict:
        return {"y": kda_decode_step(**inputs, state_v_first=not spec.k_first)}

    def oracle(self, spec: Spec, inputs: dict) -> dict:
        inputs = dict(inputs)
        lines, pool = inputs.pop("conv_pool").double(), inputs.pop("state_pool").double()
        y = reference.kda_decode_step(
            *(inputs.pop(x) for x in ("qkv", "z", "g", "beta")), lines, inputs.pop("conv_weight"), pool,
            inputs.pop("state_indices"), inputs.pop("norm_weight"), heads=inputs["A_log"].shape[0], K=spec.k,
            state_v_first=not spec.k_first, **inputs)
        return {"y": y, "conv_pool": lines, "state_pool": pool}

    def bytes_moved(self, spec: Spec, problem: Problem) -> float:
        a_head = 2 * spec.k + spec.v
        states = 2 * 4 * problem.seqs * problem.heads * spec.k * spec.v
        tokens = problem.seqs * problem.heads * (a_head * (2 * spec.width - 1) + spec.k + 2 * spec.v) * DTYPES[spec.dtype]
        return states + tokens

    def checkable(self, spec: Spec, problem: Problem) -> Problem:
        N = min(problem.seqs, 5)
        return Problem(N, N, min(problem.heads, 8))

    def tolerance(self, spec: Spec, output: str) -> float:
        """The convolution's sums are fp32 throughout, so the states are right to fp32 too."""
        return STATE_TOLERANCE if output == "state_pool" else super().tolerance(spec, output)


@case("conv_prefill")
class ConvPrefill(Case):
    """Packed prompts with conv states in a pool, programs found from the boundaries; every other prompt continues."""

    in_place = ("conv_states",)

    def problems(self, spec: Spec) -> list[Problem]:
        return [Problem(tokens, min(4, max(1, tokens // 64)), channels)
                for channels, tokens in space.most_wanted(CHANNELS, space.TOKENS)]

    def inputs(self, spec: Spec, problem: Problem, seed: int, device: torch.device) -> dict:
        random, dtype, D = Random(seed, device), TORCH_DTYPES[spec.dtype], problem.heads
        return {"x": random.normal(1, problem.tokens, D, dtype=dtype), "weight": random.normal(D, spec.width),
                "cu_seqlens": boundaries(problem).to(device),
                "conv_states": random.normal(problem.seqs, spec.width - 1, D, dtype=dtype),
                "cache_indices": random.order(problem.seqs),
                "has_initial_state": torch.arange(problem.seqs, device=device) % 2 == 0}

    def run(self, spec: Spec, inputs: dict) -> dict:
        return {"y": causal_conv1d(**inputs)}

    def oracle(self, spec: Spec, inputs: dict) -> dict:
        slots, has = inputs["cache_indices"].long(), inputs["has_initial_state"]
        history = torch.where(has[:, None, None], inputs["conv_states"][slots].double(), 0.0)
        y, final = reference.causal_conv1d(inputs["x"], inputs["weight"], initial_state=history,
                                           cu_seqlens=inputs["cu_seqlens"], output_final_state=True)
        states = inputs["conv_states"].double()
        states[slots] = final
        return {"y": y, "conv_states": states}

    def bytes_moved(self, spec: Spec, problem: Problem) -> float:
        return 2 * problem.tokens * problem.heads * DTYPES[spec.dtype]

    def checkable(self, spec: Spec, problem: Problem) -> Problem:
        return Problem(min(problem.tokens, 300), min(problem.seqs, 3), problem.heads)


@case("conv_update")
class ConvUpdate(Case):
    """One token a row (or 4, with the rows' accepted counts), in place on a pool of conv lines."""

    in_place = ("conv_states",)

    def problems(self, spec: Spec) -> list[Problem]:
        plain = [Problem(batch, batch, channels) for channels, batch in space.most_wanted(CHANNELS, space.BATCHES)]
        return plain + [Problem(4 * p.tokens, p.seqs, p.heads) for p in plain if p.seqs <= 256]

    def inputs(self, spec: Spec, problem: Problem, seed: int, device: torch.device) -> dict:
        random, dtype, D = Random(seed, device), TORCH_DTYPES[spec.dtype], problem.heads
        N, T = problem.seqs, problem.tokens // problem.seqs
        inputs = {"x": random.normal(N, T, D, dtype=dtype), "weight": random.normal(D, spec.width),
                  "conv_states": random.normal(N, spec.width - 2 + T, D, dtype=dtype), "cache_indices": random.order(N)}
        if T > 1:
            inputs["num_accepted_tokens"] = (random.order(N) % T + 1).to(torch.int32)
        return inputs

    def run(self, spec: Spec, inputs: dict) -> dict:
        return {"y": causal_conv1d_update(**inputs)}

    def oracle(self, spec: Spec, inputs: dict) -> dict:
        pool = inputs["conv_states"].double()
        y = reference.causal_conv1d_update(inputs["x"], pool, inputs["weight"], state_indices=inputs["cache_indices"],
                                           num_accepted_tokens=inputs.get("num_accepted_tokens"))
        return {"y": y, "conv_states": pool}

    def bytes_moved(self, spec: Spec, problem: Problem) -> float:
        lines = 2 * problem.seqs * (spec.width - 2 + problem.tokens // problem.seqs)
        return (2 * problem.tokens + lines) * problem.heads * DTYPES[spec.dtype]

    def checkable(self, spec: Spec, problem: Problem) -> Problem:
        N = min(problem.seqs, 7)
        return Problem(N * (problem.tokens // problem.seqs), N, problem.heads)


@case("gate")
class Gate(Case):
    """The bounded gate with beta, over tokens of 32 heads; with a chunk, its cumulative sums."""

    HEADS = 32

    def problems(self, spec: Spec) -> list[Problem]:
        return [Problem(rows, 1, 1) for rows in ROWS if rows >= self.HEADS]

    def inputs(self, spec: Spec, problem: Problem, seed: int, device: torch.device) -> dict:
        random, dtype, H = Random(seed, device), TORCH_DTYPES[spec.dtype], self.HEADS
        T = problem.tokens // H
        return {"g": random.normal(1, T, H, spec.k, dtype=dtype), "beta": random.normal(1, T, H, dtype=dtype),
                **gate_inputs(random, H, spec.k)}

    def run(self, spec: Spec, inputs: dict) -> dict:
        decay, strength = kda_gate(**inputs, chunk_size=spec.chunk or None)
        return {"decay": decay, "strength": strength}

    def oracle(self, spec: Spec, inputs: dict) -> dict:
        decay = reference.kda_gate(*(inputs[name] for name in ("g", "A_log", "dt_bias", "lower_bound")))
        if spec.chunk:
            decay = reference.chunk_cumsum(decay, spec.chunk)
        return {"decay": decay, "strength": reference.kda_beta(inputs["beta"])}

    def bytes_moved(self, spec: Spec, problem: Problem) -> float:
        return problem.tokens * (spec.k + 1) * (DTYPES[spec.dtype] + 4)

    def checkable(self, spec: Spec, problem: Problem) -> Problem:
        return Problem(min(problem.tokens, 150 * self.HEADS), 1, 1)

    def tolerance(self, spec: Spec, output: str) -> float:
        return 1e-5  # fp32 outputs of exact inputs


@case("rmsnorm")
class RMSNorm(Case):
    """Rows of V with an output gate of the same layout, weight in fp32."""

    def problems(self, spec: Spec) -> list[Problem]:
        return [Problem(rows, 1, 1) for rows in ROWS]

    def inputs(self, spec: Spec, problem: Problem, seed: int, device: torch.device) -> dict:
        random, dtype = Random(seed, device), TORCH_DTYPES[spec.dtype]
        o, z = (random.normal(1, problem.tokens, 1, spec.v, dtype=dtype) for _ in range(2))
        return {"o": o, "z": z, "weight": random.uniform(spec.v, low=0.5, high=1.5)}

    def run(self, spec: Spec, inputs: dict) -> dict:
        return {"y": gated_rmsnorm(**inputs)}

    def oracle(self, spec: Spec, inputs: dict) -> dict:
        return {"y": reference.gated_rmsnorm(**inputs)}

    def bytes_moved(self, spec: Spec, problem: Problem) -> float:
        return 3 * problem.tokens * spec.v * DTYPES[spec.dtype]

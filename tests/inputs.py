"""Fresh random inputs for tests: ragged batches, the hard classes of gates and keys, and the error measure."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize


def relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    """norm(out - ref) / norm(ref) in fp64; infinite where out is not finite, so that a NaN can never pass."""
    out, ref = out.detach().double().cpu(), ref.detach().double().cpu()
    assert out.shape == ref.shape, f"{list(out.shape)} beside {list(ref.shape)}"
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    return float((out - ref).norm() / ref.norm().clamp(min=1e-30))


def ragged(rng: torch.Generator, sequences: int, longest: int, *, empties: int = 1) -> list[int]:
    """Lengths in 1..longest, ``empties`` of them 0, in random order."""
    lengths = torch.randint(1, longest + 1, (sequences,), generator=rng)
    lengths[torch.randperm(sequences, generator=rng)[:empties]] = 0
    return lengths.tolist()


def cu_seqlens(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """[N+1] boundaries of packed sequences."""
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


# Classes of inputs; gate(name) -> how g is made. Those in READY give the log decay itself, the others a raw gate.
READY = ("rand", "slow", "zero", "bound", "mask", "mixed", "equal")
RAW = ("softplus", "bounded")
CLASSES = READY + RAW


def log_decay(rng: torch.Generator, name: str, *shape: int) -> torch.Tensor:
    """Log decay [B, T, HV, K] fp32 (natural log) of a class in READY.

    rand: log sigmoid of a normal; slow: about -1e-4 a token; zero: no decay; bound: -5 on every token; mask: rand with
    some tokens at -1000; mixed: a token each of slow, rand, bound and mask at random; equal: about -1e-3.
    """
    rand = torch.nn.functional.logsigmoid(torch.randn(*shape, generator=rng))
    slow = -torch.rand(*shape, generator=rng) * 2e-4
    if name == "rand":
        return rand
    if name == "slow":
        return slow
    if name == "zero":
        return torch.zeros(*shape)
    if name == "bound":
        return torch.full(shape, -5.0)
    if name == "equal":
        return slow * 10
    kind = torch.randint(0, 4, (shape[0], shape[1], 1, 1), generator=rng)
    if name == "mask":
        return torch.where(kind == 3, -1000.0, rand)
    assert name == "mixed", name
    return torch.where(kind == 0, slow, torch.where(kind == 1, rand, torch.where(kind == 2, -5.0, -1000.0)))


def kda(
    rng: torch.Generator, name: str = "rand", *, B: int = 1, T: int = 70, H: int = 2, HV: int | None = None, K: int = 16,
    V: int | None = None, dtype: torch.dtype = torch.float32, sequences: int | None = None,
) -> tuple[dict, dict]:
    """(tensors, options) of a call: ``recurrent_kda(**tensors, **options)``.

    tensors: q, k, v, g, beta, initial_state [N, HV, V, K] (N = ``sequences`` or B); q, k, v of ``dtype``, g and beta
    too when raw, else fp32. options: the flags and gate parameters that the class needs. q and k are normalised in
    the kernel for raw classes and beforehand otherwise. ``equal`` has nearly equal keys and beta 0.993.
    """
    HV, V = HV or H, V or K
    q, k = (normalize(torch.randn(B, T, H, K, generator=rng), dim=-1) for _ in range(2))
    v = torch.randn(B, T, HV, V, generator=rng)
    beta = torch.sigmoid(torch.randn(B, T, HV, generator=rng))
    state = torch.randn(sequences or B, HV, V, K, generator=rng)
    options: dict = {}
    if name in READY:
        g = log_decay(rng, name, B, T, HV, K)
    else:
        g, beta = torch.randn(B, T, HV, K, generator=rng).to(dtype), torch.randn(B, T, HV, generator=rng).to(dtype)
        q, k = q * (1 + torch.rand(B, T, H, 1, generator=rng)), k * (1 + torch.rand(B, T, H, 1, generator=rng))
        options = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                       A_log=gate_parameter(rng, HV), dt_bias=torch.randn(HV, K, generator=rng))
        if name == "bounded":
            options["lower_bound"] = -5.0
    if name == "equal":
        one = normalize(torch.randn(B, 1, H, K, generator=rng), dim=-1)
        k = normalize(one + 0.02 * torch.randn(B, T, H, K, generator=rng), dim=-1)
        beta = torch.full_like(beta, 0.993)
    tensors = dict(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), g=g, beta=beta, initial_state=state)
    return tensors, options


def gate_parameter(rng: torch.Generator, HV: int) -> torch.Tensor:
    """A_log = log U(1, 16), as Kimi-Linear starts it: [HV] fp32."""
    return torch.log(1 + 15 * torch.rand(HV, generator=rng))


def sliced(rng: torch.Generator, x: torch.Tensor, extra: int = 8) -> torch.Tensor:
    """The same values as columns of a wider row-major matrix [B, T, more]: x [B, T, ...] with a larger token stride.

    What lies around x is NaN, so that a read outside of it shows.
    """
    B, T = x.shape[:2]
    width = x[0, 0].numel()
    wide = torch.full((B, T, width + 2 * extra), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., extra : extra + width] = x.reshape(B, T, width)
    return wide[..., extra : extra + width].unflatten(-1, x.shape[2:])


def host_us(call, attempts: int = 4) -> float:
    """Host time of a call on a device, in microseconds of an ordinary H200 host, where torch.empty takes 2.3.

    A slow or busy host slows both alike; the best of some attempts, each beside its own torch.empty.
    """
    from kdagen.tuning.timing import time_host

    empty = lambda: torch.empty(64, device="cuda")
    pairs = [(time_host(call, budget_ms=15).p20, time_host(empty, budget_ms=15).p20) for _ in range(attempts)]
    return min(mine / max(1.0, its / 2.3) for mine, its in pairs)

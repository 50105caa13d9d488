"""The gated RMSNorm op: what follows the recurrence in a KDA layer."""

from __future__ import annotations

from itertools import pairwise

import torch

from kdagen import dispatch
from kdagen import reference as oracle
from kdagen.errors import refuse
from kdagen.families.rmsnorm import MAX_V
from kdagen.ops._common import (
    DTYPE_NAMES,
    FLOATS,
    MEMO_ENTRIES,
    check_dtype,
    check_interpretable,
    check_number,
    check_tensors,
    check_within,
    on_device,
    register,
    runs_kernels,
    target_of,
)
from kdagen.ops._decode_checks import check_float, check_rows_contiguous, check_vector
from kdagen.spec import Problem, Spec

_MEMO = dispatch.memo("gated_rmsnorm")
_CHOICES = dispatch.memo("gated_rmsnorm choices")


def gated_rmsnorm(
    o: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
    checked: bool = True,
) -> torch.Tensor:
    """o / sqrt(mean(o^2) + eps) * weight * sigmoid(z) over the last dimension, in fp32 inside; o's shape and dtype.

    o, z [..., V] (usually [B, T, HV, V]) and weight [V], each of bf16, fp16 or fp32, V up to 4096. o, z and ``out`` (a
    buffer of o's shape, any float dtype; may be o itself) may be slices of wider tensors, read and written in place, as
    long as V has stride 1 and all dimensions but the last two can be walked with one stride, as in a slice of the
    columns of a projection. ``checked=False`` skips the checks of a call whose shapes, strides and dtypes are new.
    Not differentiable. Raises ArgumentError (a ValueError), ArgumentTypeError (a TypeError) or Unsupported.
    """
    if out is None:
        out = torch.empty(o.shape, dtype=o.dtype, device=o.device)
    run = _OP if torch.compiler.is_compiling() else _run
    run(o, z, weight, out, eps, checked)
    return out


def _run(o, z, weight, out, eps, checked):
    """The op itself: writes out."""
    try:
        key = (o.shape, o.stride(), o.dtype, o.get_device(), z.shape, z.stride(), z.dtype, z.get_device(), out.shape,
               out.stride(), out.dtype, out.get_device(), weight.shape, weight.stride(), weight.dtype, weight.get_device())
    except AttributeError:
        check_tensors(("o", "z", "weight", "out"), (o, z, weight, out))
        raise
    plan = _MEMO.get(key)
    if plan is None or not o.is_cuda:
        if checked:
            check_number("eps", eps)
            _check(o, z, weight, out)
        if not runs_kernels(o):
            return _cpu(o, z, weight, out, eps)
        if len(_MEMO) >= MEMO_ENTRIES:
            _MEMO.clear()
        plan = _MEMO[key] = _plan(o, z, out)
    launch, options = plan
    with on_device(o):
        launch(o, z, weight, out, float(eps), **options)


def _plan(o: torch.Tensor, z: torch.Tensor, out: torch.Tensor) -> tuple:
    """(launch, its keyword arguments): the chosen module, and how the three tensors are walked."""
    check_interpretable(o.dtype)
    V, rows = o.shape[-1], o.numel() // max(1, o.shape[-1])
    heads = o.shape[-2] if o.dim() > 1 else 1
    walks = [_walk(name, t, heads) for name, t in (("o", o), ("z", z), ("out", out))]
    if all(token == heads * head for token, head in walks):  # no gap between tokens: all rows are alike
        heads, walks = 1, [(head, 0) for _, head in walks]
    key = (o.dtype, V, rows.bit_length(), o.get_device())
    found = _CHOICES.get(key)
    if found is None:
        target = target_of(o.get_device())
        spec = Spec.make("rmsnorm", v=V, dtype=DTYPE_NAMES[o.dtype])
        # a power of two of rows stands for all of its bucket, so that the choice does not depend on who came first
        choice = dispatch.pick(spec, Problem(1 << rows.bit_length() >> 1, 1, 1), target)
        found = _CHOICES[key] = choice.module.launch, choice.schedule
    launch, schedule = found
    return launch, dict(rows=rows, heads=heads, strides=tuple(stride for walk in walks for stride in walk),
                        num_warps=schedule.warps, num_stages=schedule.stages)


def _walk(name: str, tensor: torch.Tensor, heads: int) -> tuple[int, int]:
    """(stride of a token, stride of a head); refuses leading dimensions that no single stride walks."""
    if tensor.dim() == 1 or tensor.numel() == 0:
        return tensor.shape[-1], tensor.shape[-1]
    head = tensor.stride(-2)
    leading = [(size, stride) for size, stride in zip(tensor.shape[:-2], tensor.stride()[:-2]) if size != 1]
    if not leading:
        return heads * head, head
    for (_, outer), (size, inner) in pairwise(leading):
        if outer != size * inner:
            refuse(name, f"strides {tuple(tensor.stride())} of shape {list(tensor.shape)}",
                   "leading dimensions that one stride can walk", f"Pass {name}.contiguous(), or slices of columns only.")
    return leading[-1][1], head


def _check(o, z, weight, out) -> None:
    if o.dim() == 0:
        refuse("o", "a scalar", "shape [..., V]")
    check_dtype("o", o, *FLOATS)
    check_float("z", z, o.device, *o.shape)
    check_float("out", out, o.device, *o.shape)
    check_vector("weight", weight, o.device, o.shape[-1], *FLOATS)
    for name, tensor in (("o", o), ("z", z), ("out", out)):
        check_rows_contiguous(name, tensor)
    check_within("o", o.shape[-1], MAX_V, "V")


@torch.no_grad()
def _cpu(o, z, weight, out, eps) -> None:
    """The CPU path: the oracle in fp64, rounded into out."""
    out.copy_(oracle.gated_rmsnorm(o, z, weight, eps))


_OP = register(
    "gated_rmsnorm(Tensor o, Tensor z, Tensor weight, Tensor(a!) out, float eps, bool checked) -> ()",
    _run,
    lambda *arguments: None,
)

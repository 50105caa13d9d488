"""The fused decode step: all that a KDA layer does between its projections for one token a sequence, in one launch."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch

from kdagen import dispatch
from kdagen import reference as oracle
from kdagen.errors import ArgumentTypeError, refuse
from kdagen.ops._again import Again, addresses, again, misaligned
from kdagen.ops._common import (
    DTYPE_NAMES,
    FLOATS,
    MEMO_ENTRIES,
    check_device,
    check_dtype,
    check_interpretable,
    check_number,
    check_shape,
    layouts,
    on_device,
    register,
    runs_kernels,
    target_of,
)
from kdagen.ops._decode_checks import (
    check_float,
    check_gate,
    check_head_dims,
    check_index_table,
    check_rows_contiguous,
    check_states,
    check_vector,
)
from kdagen.ops._scratch import NO_SCRATCH, scratch
from kdagen.spec import Problem, Spec

_MEMO = dispatch.memo("kda_decode_step")
_TENSORS = ("qkv", "z", "g", "beta", "out", "conv_pool", "conv_weight", "conv_bias", "state_pool", "state_indices",
            "num_accepted_tokens", "has_initial_state", "A_log", "dt_bias", "norm_weight")


CONSTANTS = (None,) * 5  # the kernel's constexpr arguments: the compiled kernel does not look at them


class Plan(NamedTuple):
    """What is known of all calls with the same shapes, strides, dtypes and flags: the arguments passed the checks."""

    launch: object          # the chosen module's launch
    options: dict           # its keyword arguments
    scale: float
    shared: tuple[int, int] | None  # counters and fp32 values of the scratch, if the launch has any
    repeat: Again | None    # the same launch with other addresses


def kda_decode_step(
    qkv: torch.Tensor,
    z: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    conv_pool: torch.Tensor,
    conv_weight: torch.Tensor,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    conv_bias: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    pad_slot: int = -1,
    scale: float | None = None,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
    checked: bool = True,
) -> torch.Tensor:
    """One decode step of a KDA layer, from packed projection to normed output [N, HV, V]; both pools change in place.

    Convolution and SiLU on q|k|v, L2 norm of q and k, gate, sigmoid of beta, the recurrence (``fused_recurrent_kda``), and
    RMSNorm over V times norm_weight times sigmoid(z): one token for each of N sequences.

    qkv [N, 2*H*K + HV*V]: q | k | v before the convolution (bf16, fp16 or fp32); z [N, HV*V]: output gate; g [N, HV*K]: raw
    gate; beta [N, HV]: raw strength; of any float dtype. They may be column slices of one projection: rows are read where
    they lie. H, HV, K and V follow from these shapes; HV is a multiple of H; K and V from 1 to 256.
    conv_weight [2*H*K + HV*V, W] for W = 2, 3, 4, contiguous; conv_bias [2*H*K + HV*V] or None; norm_weight [V].
    A_log [HV], dt_bias [HV, K] or [HV*K], lower_bound: as in fused_recurrent_kda (None: the softplus form).
    conv_pool [slots, W - 1 + k, 2*H*K + HV*V], channels contiguous: a slot's line holds the last W - 1 inputs, oldest first.
    state_pool [slots, HV, V, K] (``state_v_first``), else [slots, HV, K, V]; fp32, bf16 or fp16; slots may be padded.
    state_indices [N] or [N, 1+k], int32 or int64, any strides: the line and the new state are in the slot of column 0.
    num_accepted_tokens [N], of a previous speculative step, clamped to 1..1+k in the kernel: the history starts at column
    accepted - 1 of the line, the state is that of column accepted - 1 of the table.
    has_initial_state [N] bool: False starts from zeros and reads neither pool.
    A slot that is negative, equal to ``pad_slot``, or not in both pools is padding: neither pool is read or written for
    that row, and its output is zero.

    ``out``: a buffer [N, HV, V] of qkv's dtype. ``checked=False`` skips the checks of calls with new shapes; known ones are
    never checked again. Raises ArgumentError (a ValueError), ArgumentTypeError (a TypeError) or Unsupported.
    """
    if out is None:
        HV = beta.shape[-1]
        out = qkv.new_empty((qkv.shape[0], HV, z.shape[-1] // max(HV, 1)))
    arguments = (
        qkv, z, g, beta, out, conv_pool, conv_weight, conv_bias, state_pool, state_indices, num_accepted_tokens,
        has_initial_state, A_log, dt_bias, norm_weight, scale, lower_bound, eps, pad_slot, allow_neg_eigval, state_v_first,
        checked,
    )
    if torch.compiler.is_compiling():
        _OP(*arguments)
    else:
        _run(*arguments)
    return out


def _run(
    qkv, z, g, beta, out, conv_pool, conv_weight, conv_bias, pool, state_indices, num_accepted, has_initial, A_log, dt_bias,
    norm_weight, scale, lower_bound, eps, pad_slot, neg_eigval, v_first, checked,
) -> None:
    """The op itself: writes out and both pools."""
    tensors = (qkv, z, g, beta, out, conv_pool, conv_weight, conv_bias, pool, state_indices, num_accepted, has_initial,
               A_log, dt_bias, norm_weight)
    key = layouts(_TENSORS, tensors), scale, lower_bound, eps, pad_slot, neg_eigval, v_first
    plan = _MEMO.get(key)
    known = plan is not None and qkv.is_cuda
    if not known:
        arguments = (*tensors, scale, lower_bound, eps, pad_slot, neg_eigval, v_first)
        if checked:
            _check(*arguments)
        if not runs_kernels(qkv):
            return _cpu(*arguments)
        plan = _plan(*arguments)
    with on_device(qkv):
        own = NO_SCRATCH if plan.shared is None else scratch(qkv.device, qkv.get_device(), *plan.shared)
        if known and plan.repeat is not None:
            pointers = addresses(*tensors)
            if not misaligned(pointers) and plan.repeat.launch(pointers + own.addresses):
                return
        compiled = plan.launch(*tensors, own.counters, own.values, plan.scale, lower_bound, eps, pad_slot=pad_slot,
                               **plan.options)
    if known:
        return
    if len(_MEMO) >= MEMO_ENTRIES:
        _MEMO.clear()
    module = sys.modules[plan.launch.__module__]
    rest = module.scalars(
        qkv, z, g, beta, out, conv_pool, pool, state_indices, plan.scale, lower_bound, eps, pad_slot) + CONSTANTS
    pointers = addresses(*tensors) + own.addresses
    _MEMO[key] = plan._replace(repeat=again(compiled, qkv.get_device(), module.programs(*beta.shape), pointers, rest))


def _sizes(qkv, z, g, beta) -> tuple[int, int, int, int]:
    """(H, HV, K, V), as the columns of the four tensors imply; refuses columns that imply none."""
    HV = beta.shape[-1]
    for name, tensor, inner in (("z", z, "V"), ("g", g, "K")):
        if HV == 0 or tensor.shape[-1] == 0 or tensor.shape[-1] % HV:
            refuse(name, f"{tensor.shape[-1]} columns", f"HV * {inner} of them, with HV = {HV} columns of beta")
    K, V = g.shape[-1] // HV, z.shape[-1] // HV
    rest = qkv.shape[-1] - HV * V
    H = rest // (2 * K)
    if H < 1 or rest != 2 * H * K or HV % H:
        refuse("qkv", f"{qkv.shape[-1]} columns",
               f"2 * H * K + HV * V with K = {K}, V = {V}, HV = {HV} (from g, z and beta) and HV a multiple of H")
    return H, HV, K, V


def _plan(
    qkv, z, g, beta, out, conv_pool, conv_weight, conv_bias, pool, state_indices, num_accepted, has_initial, A_log, dt_bias,
    norm_weight, scale, lower_bound, eps, pad_slot, neg_eigval, v_first,
) -> Plan:
    check_interpretable(qkv.dtype)
    H, HV, K, V = _sizes(qkv, z, g, beta)
    spec = Spec.make("decode_step", k=K, v=V, dtype=DTYPE_NAMES[qkv.dtype], k_first=not v_first, width=conv_weight.shape[1])
    N, target = qkv.shape[0], target_of(qkv.get_device())
    choice = dispatch.pick(spec, Problem(N, N, HV), target)
    options = dict(
        heads=H, beta_scale=2.0 if neg_eigval else 1.0, num_warps=choice.schedule.warps, num_stages=choice.schedule.stages,
    )
    shared = choice.module.scratch(N, H, HV)
    return Plan(choice.module.launch, options, float(K**-0.5 if scale is None else scale), shared, None)


def _check(
    qkv, z, g, beta, out, conv_pool, conv_weight, conv_bias, pool, state_indices, num_accepted, has_initial, A_log, dt_bias,
    norm_weight, scale, lower_bound, eps, pad_slot, neg_eigval, v_first,
) -> None:
    if qkv.dim() != 2:
        refuse("qkv", f"shape {list(qkv.shape)}", "shape [N, 2*H*K + HV*V]: one token a sequence",
               "For more tokens call causal_conv1d_update, fused_recurrent_kda and gated_rmsnorm.")
    N, channels = qkv.shape
    device = qkv.device
    check_dtype("qkv", qkv, *FLOATS)
    check_rows_contiguous("qkv", qkv)
    for name, tensor, columns in (("z", z, "HV * V"), ("g", g, "HV * K"), ("beta", beta, "HV")):
        check_float(name, tensor, device, N, columns)
        check_rows_contiguous(name, tensor)
    _H, HV, K, V = _sizes(qkv, z, g, beta)
    check_head_dims("g", K, "z", V)
    check_number("scale", scale)
    check_number("eps", eps)
    check_float("out", out, device, N, HV, V)
    if out.dtype != qkv.dtype:
        refuse("out", str(out.dtype), f"the dtype of qkv, {qkv.dtype}", kind=ArgumentTypeError)
    if N and not out[0].is_contiguous():
        refuse("out", f"strides {tuple(out.stride())}", "a tensor contiguous but for its first dimension")
    if conv_weight.dim() != 2 or conv_weight.shape[0] != channels or conv_weight.shape[1] not in (2, 3, 4):
        refuse("conv_weight", f"shape {list(conv_weight.shape)}", f"shape [{channels}, W] with W = 2, 3 or 4")
    check_float("conv_weight", conv_weight, device, channels, "W")
    if not conv_weight.is_contiguous():
        refuse("conv_weight", f"strides {tuple(conv_weight.stride())}", "a contiguous tensor",
               "Pass conv_weight.contiguous().")
    check_vector("conv_bias", conv_bias, device, channels, *FLOATS)
    check_float("conv_pool", conv_pool, device, "slots", "W - 1 + k", channels)
    check_rows_contiguous("conv_pool", conv_pool)
    if conv_pool.shape[1] < conv_weight.shape[1] - 1:
        refuse("conv_pool", f"lines of {conv_pool.shape[1]} inputs", f"at least W - 1 = {conv_weight.shape[1] - 1}")
    check_states("state_pool", pool, device, "slots", *((HV, V, K) if v_first else (HV, K, V)))
    check_index_table(state_indices, num_accepted, has_initial, N, device)
    check_gate(A_log, dt_bias, lower_bound, HV, K, device)
    check_shape("norm_weight", norm_weight, V)
    check_vector("norm_weight", norm_weight, device, V, *FLOATS)
    check_device("norm_weight", norm_weight, device)


@torch.no_grad()
def _cpu(
    qkv, z, g, beta, out, conv_pool, conv_weight, conv_bias, pool, state_indices, num_accepted, has_initial, A_log, dt_bias,
    norm_weight, scale, lower_bound, eps, pad_slot, neg_eigval, v_first,
) -> None:
    """The CPU path: the oracle in fp64, its results rounded into out and the pools."""
    H, _HV, K, _V = _sizes(qkv, z, g, beta)
    slots = torch.where(state_indices < min(pool.shape[0], conv_pool.shape[0]), state_indices, -1)
    out.copy_(oracle.kda_decode_step(
        qkv, z, g, beta, conv_pool, conv_weight, pool, slots, norm_weight, heads=H, K=K, A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, conv_bias=conv_bias, num_accepted_tokens=num_accepted, has_initial_state=has_initial,
        pad_slot=pad_slot, scale=scale, allow_neg_eigval=neg_eigval, state_v_first=v_first, eps=eps))


def _fake(*arguments) -> None:
    if arguments[-1]:
        _check(*arguments[:-1])


_OP = register(
    "kda_decode_step_(Tensor qkv, Tensor z, Tensor g, Tensor beta, Tensor(a!) out, Tensor(b!) conv_pool, "
    "Tensor conv_weight, Tensor? conv_bias, Tensor(c!) state_pool, Tensor state_indices, Tensor? num_accepted_tokens, "
    "Tensor? has_initial_state, Tensor? A_log, Tensor? dt_bias, Tensor norm_weight, float? scale, float? lower_bound, "
    "float eps, int pad_slot, bool allow_neg_eigval, bool state_v_first, bool checked) -> ()", _run, _fake)

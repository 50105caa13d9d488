"""What the decode ops refuse, and in which words: shared by the recurrent op and the fused decode step."""

from __future__ import annotations

from itertools import pairwise

import torch

from kdagen.errors import ArgumentTypeError, refuse
from kdagen.families.recurrent import MAX_HEAD_DIM
from kdagen.ops._common import FLOATS, check_device, check_dtype, check_number, check_shape, check_tensors, check_within
from kdagen.spec import CHUNKS

INTEGERS = (torch.int32, torch.int64)


def check_rows_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose last dimension is not contiguous; all other strides are free."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        refuse(name, f"strides {tuple(tensor.stride())}", "a last dimension with stride 1", f"Pass {name}.contiguous().")


def check_float(name: str, tensor: torch.Tensor, device: torch.device, *shape: int | str) -> None:
    check_shape(name, tensor, *shape)
    check_dtype(name, tensor, *FLOATS)
    check_device(name, tensor, device)


def check_vector(name: str, tensor: torch.Tensor | None, device: torch.device, length: int, *dtypes: torch.dtype) -> None:
    """Refuse what is not None and not a contiguous vector of ``length``."""
    if tensor is None:
        return
    check_tensors((name,), (tensor,))
    check_shape(name, tensor, length)
    check_dtype(name, tensor, *dtypes)
    check_device(name, tensor, device)
    if length > 1 and tensor.stride(0) != 1:
        refuse(name, f"stride {tensor.stride(0)}", "a contiguous vector", f"Pass {name}.contiguous().")


def check_flags(A_log, dt_bias, lower_bound, raw_gate: bool, beta_sigmoid: bool, neg_eigval: bool) -> None:
    """Refuse what a flag that is off would silently ignore: gate parameters, and the doubling of beta's sigmoid."""
    if not raw_gate:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
            if value is not None:
                refuse(name, "a value", "None where g is the log decay itself",
                       "Pass use_gate_in_kernel=True for a raw gate.")
    if neg_eigval and not beta_sigmoid:
        refuse("allow_neg_eigval", "True without use_beta_sigmoid_in_kernel", "both",
               "Or pass beta already in (0, 2), with allow_neg_eigval=False.")


def check_gate(A_log, dt_bias, lower_bound, HV: int, K: int, device: torch.device) -> None:
    """Refuse gate parameters that are of no form of the gate (docs/kda.md: softplus, or bounded by lower_bound < 0)."""
    if lower_bound is None and A_log is None:
        refuse("A_log", "None", f"a tensor [{HV}] for the softplus gate", "Or pass lower_bound for the bounded gate.")
    check_number("lower_bound", lower_bound)
    if lower_bound is not None and not lower_bound < 0:
        refuse("lower_bound", lower_bound, "a negative number (Kimi-K3: -5), or None for the softplus gate")
    check_vector("A_log", A_log, device, HV, *FLOATS)
    if dt_bias is None:
        return
    if dt_bias.dim() == 2:
        check_shape("dt_bias", dt_bias, HV, K)
        if not dt_bias.is_contiguous():
            refuse("dt_bias", f"strides {tuple(dt_bias.stride())}", "a contiguous tensor", "Pass dt_bias.contiguous().")
        check_vector("dt_bias", dt_bias.reshape(-1), device, HV * K, *FLOATS)
    else:
        check_vector("dt_bias", dt_bias, device, HV * K, *FLOATS)


def check_states(name: str, states: torch.Tensor, device: torch.device, rows: int | str, *inner: int) -> None:
    """Refuse what is not [rows, *inner] float states, contiguous but for the first stride (padded slots are fine)."""
    check_float(name, states, device, rows, *inner)
    step = 1
    for size, stride in reversed(list(zip(states.shape, states.stride()))[1:]):
        if size > 1 and stride != step:
            refuse(name, f"strides {tuple(states.stride())}", "a tensor contiguous but for its first dimension",
                   f"Pass {name}.contiguous(), unless it must change in place.")
        step *= size


def check_index_table(state_indices, num_accepted_tokens, has_initial_state, N: int, device: torch.device) -> None:
    """Refuse a slot table that is not [N] or [N, 1+k] integers, and vectors beside it of another length."""
    if state_indices.dim() not in (1, 2) or state_indices.shape[0] != N or 0 in state_indices.shape[1:]:
        refuse("state_indices", f"shape {list(state_indices.shape)}", f"shape [{N}] or [{N}, 1 + speculative tokens]")
    check_dtype("state_indices", state_indices, *INTEGERS)
    check_device("state_indices", state_indices, device)
    check_vector("num_accepted_tokens", num_accepted_tokens, device, N, *INTEGERS)
    check_vector("has_initial_state", has_initial_state, device, N, torch.bool)


def check_boundaries(
    cu_seqlens: torch.Tensor, batch: int, tokens: int, device: torch.device, *, values: bool, name: str = "cu_seqlens",
) -> None:
    """Refuse boundaries of the wrong kind; with ``values`` also wrong ones, on the CPU only: a GPU would be waited for."""
    if batch != 1:
        refuse(name, f"a batch of {batch} rows", "packed sequences in one row (B = 1)",
               "Reshape [B, T, ...] to [1, B * T, ...].")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        refuse(name, f"shape {list(cu_seqlens.shape)}", "shape [N + 1]: the start, then the end of each sequence")
    check_vector(name, cu_seqlens, device, cu_seqlens.shape[0], *INTEGERS)
    if values and cu_seqlens.device.type == "cpu":
        edges = cu_seqlens.tolist()
        if edges[0] != 0 or edges[-1] != tokens or any(a > b for a, b in pairwise(edges)):
            refuse(name, edges if len(edges) <= 16 else f"{edges[:8]} ... {edges[-4:]}",
                   f"boundaries that start at 0, never decrease, and end at T = {tokens}")


def check_chunk_size(chunk_size: object, hint: str = "") -> None:
    """Refuse what is not one of the chunk sizes, such as the float 64.0."""
    if type(chunk_size) is not int or chunk_size not in CHUNKS:
        refuse("chunk_size", repr(chunk_size), f"one of {', '.join(map(str, CHUNKS))}{hint}")


def check_head_dims(k_name: str, K: int, v_name: str, V: int) -> None:
    """Refuse head dims that the kernels do not have."""
    check_within(k_name, K, MAX_HEAD_DIM, "K")
    check_within(v_name, V, MAX_HEAD_DIM, "V")


def check_qkv(q, k, v, g, beta) -> tuple[int, int, int, int, int, int]:
    """(B, T, H, K, HV, V) of a call; refuses shapes, dtypes, devices and strides that do not go together."""
    check_dtype("q", q, *FLOATS)
    if q.dim() != 4:
        check_shape("q", q, "B", "T", "H", "K")
    B, T, H, K = q.shape
    check_shape("k", k, B, T, H, K)
    if v.dim() != 4 or v.shape[:2] != q.shape[:2]:
        refuse("v", f"shape {list(v.shape)}", f"shape [{B}, {T}, HV, V], as q is {list(q.shape)}")
    HV, V = v.shape[2:]
    if H == 0 or HV % H:
        refuse("v", f"{HV} value heads", f"a multiple of the {H} heads of q", "Value head i uses q/k head i // (HV // H).")
    check_shape("g", g, B, T, HV, K)
    check_shape("beta", beta, B, T, HV)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            refuse(name, str(tensor.dtype), f"the dtype of q, {q.dtype}", kind=ArgumentTypeError)
    for name, tensor in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        check_dtype(name, tensor, *FLOATS)
        check_device(name, tensor, q.device)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("g", g)):
        check_rows_contiguous(name, tensor)
    check_head_dims("q", K, "v", V)
    return B, T, H, K, HV, V

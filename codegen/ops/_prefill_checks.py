"""What chunk_kda refuses, and in which words."""

from __future__ import annotations

import torch

from kdagen.errors import ArgumentTypeError, refuse
from kdagen.families.prefill_prepare import LOWEST_BOUND
from kdagen.ops._common import check_device, check_dtype, check_number, check_shape, kind_of
from kdagen.ops._decode_checks import (
    INTEGERS,
    check_boundaries,
    check_chunk_size,
    check_gate,
    check_qkv,
    check_rows_contiguous,
    check_states,
    check_vector,
)
from kdagen.ops._tables import exact_sizes, plan
from kdagen.ops.metadata import StepTables, check_host
from kdagen.spec import CHUNKS


def check_host_lengths(host: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """Refuse host boundaries that ``step_tables`` would refuse, where it is not called: on the CPU path."""
    check_host("cu_seqlens_cpu", host, cu_seqlens)
    exact_sizes("cu_seqlens_cpu", host, host.shape[0] - 1, plan(CHUNKS[0]), True)


def check_ends(host: torch.Tensor, cu_seqlens: torch.Tensor, tokens: int) -> None:
    """Refuse host boundaries that are not those of the tokens there are; the device's copy the kernels clamp to them."""
    try:
        edges = host.numpy()
        wrong = edges[0] != 0 or edges[-1] != tokens
    except (AttributeError, TypeError, ValueError, IndexError):  # no tensor, on a device, of other axes, empty
        check_host("cu_seqlens_cpu", host, cu_seqlens)
        raise
    if wrong:
        refuse("cu_seqlens_cpu", f"boundaries from {edges[0]} to {edges[-1]}",
               f"boundaries that start at 0, never decrease, and end at T = {tokens}")


def refuse_tables(tables: StepTables, sequences: int, chunk_size: int) -> None:
    """Say what is wrong with tables that are not those of a call."""
    if not isinstance(tables, StepTables):
        refuse("tables", kind_of(tables), "the StepTables of step_tables(..., rows=True)",
               kind=ArgumentTypeError)
    if tables.chunk_rows is None:
        refuse("tables", "StepTables without chunk_rows", "step_tables(..., rows=True)")
    refuse("tables", f"those of {tables.chunk_offsets.shape[0] - 1} sequences in chunks of {tables.chunk_size}",
           f"those of this call's {sequences} sequences in chunks of {chunk_size}",
           "Call step_tables(cu_seqlens, ..., chunk_size=chunk_size, rows=True).")


def check(
    q, k, v, g, beta, A_log, dt_bias, out, initial_state, final_state, state_pool, read_slots, write_slots, has_initial,
    ckpt_offsets, ckpt_slots, cu_seqlens, host, scale, lower_bound, pad_slot, chunk, max_workspace, raw_gate, v_first, N,
) -> None:
    """Refuse a call of a new layout: what tensors look like, never what a GPU's hold."""
    B, T, _, K, HV, V = check_qkv(q, k, v, g, beta)
    check_chunk_size(chunk)
    check_number("scale", scale)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta), ("out", out)):
        if B > 1 and T > 0 and tensor.stride(0) != T * tensor.stride(1):
            refuse(name, f"strides {tuple(tensor.stride())} of shape {list(tensor.shape)}",
                   f"a batch stride of T = {T} times the token stride {tensor.stride(1)}",
                   f"Pass {name}.contiguous(), or the sequences packed with cu_seqlens.")
    if B * T >= 1 << 31:
        refuse("q", f"{B * T} tokens", "fewer than 2^31 tokens")
    if raw_gate:
        check_gate(A_log, dt_bias, lower_bound, HV, K, q.device)
        if lower_bound is not None and lower_bound < LOWEST_BOUND:
            refuse("lower_bound", lower_bound, f"a number in [{LOWEST_BOUND}, 0)",
                   "For steeper gates pass the log decay itself, with use_gate_in_kernel=False.")
    check_shape("out", out, B, T, HV, V)
    check_dtype("out", out, q.dtype)
    check_device("out", out, q.device)
    check_rows_contiguous("out", out)
    if cu_seqlens is not None:
        check_boundaries(cu_seqlens, B, T, q.device, values=not q.is_cuda)
        if host is not None:
            check_host("cu_seqlens_cpu", host, cu_seqlens)
    inner = (HV, V, K) if v_first else (HV, K, V)
    if initial_state is not None:
        check_states("initial_state", initial_state, q.device, N, *inner)
        if read_slots is not None:
            refuse("initial_state", "a tensor beside read_slots", "None", "The pool's slots hold the initial states.")
    slots = {"read_slots": read_slots, "write_slots": write_slots, "checkpoint_slots": ckpt_slots}
    if state_pool is None:
        for name, tensor in slots.items():
            if tensor is not None:
                refuse("state_pool", f"None beside {name}", "a pool of states [slots, ...]")
    else:
        check_states("state_pool", state_pool, q.device, "slots", *inner)
        if all(tensor is None for tensor in slots.values()):
            refuse("state_pool", "a tensor without slots", "read_slots, write_slots or checkpoint_slots beside it")
    for name in ("read_slots", "write_slots"):
        if slots[name] is not None:
            check_shape(name, slots[name], N)
            check_dtype(name, slots[name], *INTEGERS)
            check_device(name, slots[name], q.device)
    check_vector("has_initial_state", has_initial, q.device, N, torch.bool)
    if (ckpt_offsets is None) != (ckpt_slots is None):
        refuse("checkpoint_offsets", "one of the two", "checkpoint_offsets and checkpoint_slots, or neither")
    if ckpt_offsets is not None:
        if ckpt_offsets.dim() not in (1, 2) or ckpt_offsets.shape[0] != N or ckpt_offsets.shape != ckpt_slots.shape:
            refuse("checkpoint_offsets",
                   f"shape {list(ckpt_offsets.shape)} beside checkpoint_slots {list(ckpt_slots.shape)}",
                   f"shape [{N}] or [{N}, P], both the same")
        for name, tensor in (("checkpoint_offsets", ckpt_offsets), ("checkpoint_slots", ckpt_slots)):
            check_dtype(name, tensor, *INTEGERS)
            check_device(name, tensor, q.device)
            if tensor.dim() == 2 and tensor.shape[1] > 1 and tensor.stride(1) != 1:
                refuse(name, f"strides {tuple(tensor.stride())}", "rows with stride 1", f"Pass {name}.contiguous().")
    if not isinstance(pad_slot, int):
        refuse("pad_slot", repr(pad_slot), "an int", kind=ArgumentTypeError)
    if max_workspace is not None and (not isinstance(max_workspace, int) or max_workspace < 1):
        refuse("max_workspace", repr(max_workspace), "a number of bytes, an int of at least 1, or None")

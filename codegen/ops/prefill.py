"""The prefill op: Kimi Delta Attention over whole sequences, in its chunk form."""

from __future__ import annotations

import os

import torch

from kdagen import dispatch
from kdagen.errors import refuse
from kdagen.ops import prefill_plan as planning
from kdagen.ops._common import (
    MEMO_ENTRIES,
    check_device,
    check_interpretable,
    check_shape,
    layouts,
    on_device,
    register,
    runs_kernels,
)
from kdagen.ops._decode_checks import check_flags
from kdagen.ops._prefill_checks import check, check_ends, check_host_lengths, refuse_tables
from kdagen.ops._prefill_cpu import run_oracle
from kdagen.ops.metadata import StepTables, step_tables
from kdagen.spec import Problem

BATCH_INVARIANT = os.environ.get("KDAGEN_BATCH_INVARIANT", "0") == "1"  # the default of chunk_kda's batch_invariant

_MEMO = dispatch.memo("chunk_kda")
_TENSORS = ("q", "k", "v", "g", "beta", "out", "initial_state", "final_state", "state_pool", "read_slots", "write_slots",
            "has_initial_state", "checkpoint_offsets", "checkpoint_slots", "cu_seqlens", "A_log", "dt_bias")


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_pool: torch.Tensor | None = None,
    read_slots: torch.Tensor | None = None,
    write_slots: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    checkpoint_offsets: torch.Tensor | None = None,
    checkpoint_slots: torch.Tensor | None = None,
    pad_slot: int = -1,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    tables: StepTables | None = None,
    chunk_size: int = 64,
    use_gate_in_kernel: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    out: torch.Tensor | None = None,
    batch_invariant: bool | None = None,
    max_workspace: int | None = None,
    checked: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi Delta Attention of whole sequences: (o [B, T, HV, V], final state or None).

    Per head, for each token: S <- diag(exp(g)) S;  S <- S + beta k (v - S^T k)^T;  o = scale S^T q.

    Tokens. q, k [B, T, H, K], v [B, T, HV, V] of one dtype (bf16, fp16, fp32); HV a multiple of H; K, V from 1 to 256.
    g [B, T, HV, K]: log decay (natural log, <= 0), or with ``use_gate_in_kernel`` the raw gate of
    -exp(A_log) * softplus(g + dt_bias), or, with ``lower_bound`` in [-5, 0), of
    lower_bound * sigmoid(exp(A_log) * (g + dt_bias)): A_log [HV] (None only with lower_bound: a factor 1), dt_bias [HV, K]
    or [HV * K] or None. beta [B, T, HV]: strength, or with ``use_beta_sigmoid_in_kernel`` its raw logit (times 2 after the
    sigmoid with ``allow_neg_eigval``). ``use_qk_l2norm_in_kernel``: x / sqrt(sum(x^2) + 1e-6) on q, k. ``scale``: K^-0.5 by
    default. q, k, v, g, beta may be slices of wider tensors (no copy is made), the last dimension of q, k, v, g contiguous,
    and with B > 1 the stride of the batch T times that of a token. ``out``: a buffer for o.

    Sequences. B sequences of T tokens, or ``cu_seqlens`` [N+1] (int32, int64): N packed ones, B = 1, from 0 to T. Nothing
    waits for the device: sizes come from ``cu_seqlens_cpu``, the host's copy, or from ``tables``, a step's
    ``step_tables(..., chunk_size=chunk_size, rows=True)``; with neither, a bound serves, and the call can be captured in a
    CUDA graph and replayed with other boundaries (as it can with tables in bounded mode). Tokens of no sequence: o is left
    as it is. The host's copy is checked in each call (beside tables: that it goes from 0 to T); boundaries on a GPU are
    clamped to 0..T in the kernels.
    A sequence alone starts at 0 (on sm90 its tokens are read from there on, whatever a GPU's boundaries say).

    States [N, HV, V, K] (``state_v_first``), else [N, HV, K, V]; fp32 inside the kernel. ``initial_state`` (fp32, bf16,
    fp16; zeros if None), and with ``output_final_state`` a new fp32 tensor; a sequence without tokens keeps its state. Or
    ``state_pool`` [slots, ...], changed in place: sequence n starts from slot ``read_slots``[n] (without read_slots: from
    initial_state, or zeros) and leaves its state in slot ``write_slots``[n] (without: in the returned tensor, if asked
    for). int32 or int64 [N], of any stride; one slot must not be written for two sequences, nor read for one and written
    for another. ``has_initial_state`` [N] bool: False starts from zeros and reads nothing. ``checkpoint_offsets``,
    ``checkpoint_slots`` [N] or [N, P]: the state after that many tokens of the sequence (a multiple of chunk_size, ascending
    in a row; others are passed over) also goes to that slot. A slot that is negative, ``pad_slot`` or past the pool is
    padding: never read, never written. A sequence whose read slot (without read_slots, its write slot) is padding has zero
    output, and with ``output_final_state`` a final state of zeros.

    ``batch_invariant`` (default: KDAGEN_BATCH_INVARIANT=1 in the environment at import): a sequence's results are the same
    bits whatever else is in the batch, and however many heads there are. ``max_workspace``: bytes for the intermediates,
    4 GiB by default; the results do not depend on it, except where it rules segments out (ops/prefill_plan.py).
    ``checked=False`` skips the checks of a call whose shapes, strides and dtypes are new; known ones are not checked again.

    Raises ArgumentError (a ValueError), ArgumentTypeError (a TypeError) or Unsupported. Not differentiable. Formula:
    arXiv 2510.26692.
    """
    if q.dim() != 4 or v.dim() != 4:
        check_shape("q", q, "B", "T", "H", "K")
        check_shape("v", v, "B", "T", "HV", "V")
    if checked:
        check_flags(A_log, dt_bias, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if out is None:
        out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    N, longest, chunk_offsets, chunk_rows = q.shape[0], -1, None, None
    if cu_seqlens is None:
        if tables is not None or cu_seqlens_cpu is not None:
            refuse("tables" if tables is not None else "cu_seqlens_cpu", "a value without cu_seqlens",
                   "None, or cu_seqlens beside it")
    else:
        if checked:
            check_device("cu_seqlens", cu_seqlens, q.device)
        N = cu_seqlens.shape[0] - 1
        if tables is None:
            if runs_kernels(q):
                bound = q.shape[0] * q.shape[1] if cu_seqlens_cpu is None else None
                tables = step_tables(cu_seqlens, cu_seqlens_cpu, chunk_size=chunk_size, tokens=bound, rows=True,
                                     checked=checked)
            elif checked and cu_seqlens_cpu is not None and not torch.compiler.is_compiling():
                check_host_lengths(cu_seqlens_cpu, cu_seqlens)
        if tables is not None:
            try:
                chunk_offsets, chunk_rows = tables.chunk_offsets, tables.chunk_rows
                fitting = chunk_rows is not None and tables.chunk_size == chunk_size and chunk_offsets.shape[0] == N + 1
            except AttributeError:
                fitting = False
            if not fitting:
                refuse_tables(tables, N, chunk_size)
        if checked and cu_seqlens_cpu is not None and not torch.compiler.is_compiling():
            check_ends(cu_seqlens_cpu, cu_seqlens, q.shape[1])
        if N == 1:
            longest = q.shape[1]
        elif cu_seqlens_cpu is not None and N * v.shape[-2] <= planning.SEGMENT_HEADS and not torch.compiler.is_compiling():
            longest = int(cu_seqlens_cpu.diff().max()) if N > 0 else 0
    final_state = None
    if output_final_state:
        if write_slots is not None:
            refuse("output_final_state", True, "False beside write_slots", "The final states go to the pool's slots.")
        inner = (v.shape[-1], q.shape[-1]) if state_v_first else (q.shape[-1], v.shape[-1])
        make = torch.empty if read_slots is None else torch.zeros  # the kernels do not write a padded row's
        final_state = make((max(N, 0), v.shape[-2], *inner), dtype=torch.float32, device=q.device)
    if batch_invariant is None:
        batch_invariant = BATCH_INVARIANT
    arguments = (
        q, k, v, g, beta, A_log, dt_bias, out, initial_state, final_state, state_pool, read_slots, write_slots,
        has_initial_state, checkpoint_offsets, checkpoint_slots, cu_seqlens, chunk_offsets, chunk_rows, scale, lower_bound,
        pad_slot, chunk_size, longest, max_workspace, use_gate_in_kernel, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, batch_invariant, checked,
    )
    if torch.compiler.is_compiling():
        _OP(*arguments)
    else:
        _run(*arguments, cu_seqlens_cpu)
    return out, final_state


def _run(
    q, k, v, g, beta, A_log, dt_bias, out, initial_state, final_state, state_pool, read_slots, write_slots, has_initial,
    ckpt_offsets, ckpt_slots, cu_seqlens, chunk_offsets, chunk_rows, scale, lower_bound, pad_slot, chunk, longest,
    max_workspace, raw_gate, l2norm, sigmoid_beta, neg_eigval, v_first, batch_invariant, checked, host=None,
) -> None:
    """The op itself: writes out, final_state, and slots of state_pool."""
    tensors = (q, k, v, g, beta, out, initial_state, final_state, state_pool, read_slots, write_slots, has_initial,
               ckpt_offsets, ckpt_slots, cu_seqlens, A_log, dt_bias)
    key = layouts(_TENSORS, tensors), lower_bound, chunk, raw_gate, v_first, batch_invariant
    kernels = _MEMO.get(key)
    B, T, H, K = q.shape
    HV, V = v.shape[-2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if kernels is None or not q.is_cuda:
        if checked:
            check(q, k, v, g, beta, A_log, dt_bias, out, initial_state, final_state, state_pool, read_slots, write_slots,
                  has_initial, ckpt_offsets, ckpt_slots, cu_seqlens, host, scale, lower_bound, pad_slot, chunk,
                  max_workspace, raw_gate, v_first, N)
        if not runs_kernels(q):
            return run_oracle(
                q, k, v, g, beta, A_log, dt_bias, out, initial_state, final_state, state_pool, read_slots, write_slots,
                has_initial, ckpt_offsets, ckpt_slots, cu_seqlens, scale, lower_bound, pad_slot, chunk, raw_gate, l2norm,
                sigmoid_beta, neg_eigval, v_first)
        check_interpretable(q.dtype)
        gate = "log" if not raw_gate else "softplus" if lower_bound is None else "bounded"
        # the load is known to a power of two, so that one bucket has one schedule whatever came first
        problem = planning.INVARIANT if batch_invariant else Problem(1 << max(0, (B * T).bit_length() - 1), N, HV)
        kernels = planning.choose(q, K, V, chunk, gate, problem, portable=g.dtype != q.dtype)
        if len(_MEMO) >= MEMO_ENTRIES:
            _MEMO.clear()
        _MEMO[key] = kernels
    if ckpt_offsets is not None and ckpt_offsets.dim() == 1:
        ckpt_offsets, ckpt_slots = ckpt_offsets[:, None], ckpt_slots[:, None]
    if longest < 0 and cu_seqlens is None:
        longest = T
    with on_device(q):
        if cu_seqlens is None:
            cu_seqlens, chunk_offsets, chunk_rows = planning.uniform_tables(B, T, chunk, q)
        planning.run(planning.Call(
            q, k, v, g, beta, A_log if raw_gate else None, dt_bias if raw_gate else None,
            -1.0 if lower_bound is None else float(lower_bound), float(K**-0.5 if scale is None else scale),
            2.0 if neg_eigval else 1.0, l2norm, sigmoid_beta, out, cu_seqlens, chunk_offsets, chunk_rows,
            -(-max(longest, 0) // chunk), state_pool if read_slots is not None else initial_state, read_slots, has_initial,
            state_pool if write_slots is not None else final_state, write_slots,
            ckpt_offsets, ckpt_slots, None if ckpt_offsets is None else state_pool, pad_slot, N, H, HV, v_first,
            batch_invariant, planning.DEFAULT_WORKSPACE if max_workspace is None else max_workspace, kernels))


def _fake(*arguments) -> None:
    return None


_OP = register(
    "chunk_kda(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor(a!) out, "
    "Tensor? initial_state, Tensor(b!)? final_state, Tensor(c!)? state_pool, Tensor? read_slots, Tensor? write_slots, "
    "Tensor? has_initial_state, Tensor? checkpoint_offsets, Tensor? checkpoint_slots, Tensor? cu_seqlens, "
    "Tensor? chunk_offsets, Tensor? chunk_rows, float? scale, float? lower_bound, int pad_slot, int chunk_size, "
    "SymInt longest, int? max_workspace, bool raw_gate, bool l2norm, bool sigmoid_beta, bool neg_eigval, bool v_first, "
    "bool batch_invariant, bool checked) -> ()",
    _run, _fake)

"""How a prefill call is run: the chosen modules, the workspace, windows of chunks, segments of long sequences.

Workspace, in bytes of a chunk and value head: C (3 KP + VP + C) elements of the inputs' dtype and KP fp32 (KP, VP: K, V
up to a power of two), 74,240 at C = 64, K = V = 128, bf16. A window is a range of rows of the chunk table; a larger
prefill takes several, one after another, with the state of the one sequence that a boundary cuts handed on in fp32. The
results are the same bits for any windows.

Segments: where the heads are too few to fill the device, a sequence is cut into segments whose maps are found side by side
(family prefill_segments). The cut changes the last bits of the results, so batch-invariant calls have none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kdagen import dispatch, families
from kdagen.families.prefill_prepare import padded
from kdagen.ops import prefill_sm90
from kdagen.ops._common import DTYPE_NAMES, target_of
from kdagen.ops._lanes import Constants
from kdagen.ops._tensor_maps import token_tiles
from kdagen.ops.metadata import step_tables
from kdagen.spec import Problem, Spec, Target, Variant

DEFAULT_WORKSPACE = 4 << 30       # bytes
INVARIANT = Problem(8192, 1, 32)  # the load that batch-invariant calls look their schedule up with
MAX_SEGMENTS = 16
SEGMENT_HEADS = 16                # above so many heads in all sequences, none is cut into segments
WHOLE = 1 << 30                   # chunks of the only segment of an uncut sequence

_portable = dispatch.memo("chunk_kda portable")
_matrices = Constants(256)
_uniform = Constants(1024)


class Kernels(NamedTuple):
    """The chosen schedule of prepare and state, as launch function and options; that of prefill_segments is on demand."""

    prepare: object
    prepare_options: dict
    prepare_module: object
    state: object
    state_options: dict
    segments_spec: Spec
    hopper: bool    # both have their sm90 forms, and ops/prefill_sm90.py can run them
    gate: str
    row_bytes: int  # workspace of one row of the chunk table
    chunk: int
    kp: int
    vp: int


class Call(NamedTuple):
    """One prefill: everything that the launches need, checked and with the choices made."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    lower_bound: float
    scale: float
    beta_scale: float
    l2norm: bool
    sigmoid_beta: bool
    out: torch.Tensor
    cu_seqlens: torch.Tensor
    chunk_offsets: torch.Tensor
    chunk_rows: torch.Tensor
    longest: int                # chunks of the longest sequence, 0 if the host does not know
    h_in: torch.Tensor | None
    read_slots: torch.Tensor | None
    has_initial: torch.Tensor | None
    h_out: torch.Tensor | None
    write_slots: torch.Tensor | None
    ckpt_offsets: torch.Tensor | None
    ckpt_slots: torch.Tensor | None
    ckpt_pool: torch.Tensor | None
    pad_slot: int
    N: int
    H: int
    HV: int
    v_first: bool
    batch_invariant: bool
    max_workspace: int
    kernels: Kernels


class Buffers(NamedTuple):
    """The intermediates of ``rows`` chunk rows; they mean the same to every form of every family."""

    qg: torch.Tensor   # [rows, HV, C, KP]
    kg: torch.Tensor
    w: torch.Tensor
    u: torch.Tensor    # [rows, HV, C, VP]
    aqk: torch.Tensor  # [rows, HV, C, C]
    dec: torch.Tensor  # [rows, HV, KP] fp32

    @classmethod
    def of(cls, call: Call, rows: int) -> Buffers:
        kernels, like = call.kernels, call.q
        C, KP, VP, HV = kernels.chunk, kernels.kp, kernels.vp, call.HV
        make = lambda *shape: torch.empty(shape, dtype=like.dtype, device=like.device)
        return cls(make(rows, HV, C, KP), make(rows, HV, C, KP), make(rows, HV, C, KP), make(rows, HV, C, VP),
                   make(rows, HV, C, C), torch.empty((rows, HV, KP), dtype=torch.float32, device=like.device))


def choose(q: torch.Tensor, K: int, V: int, chunk: int, gate: str, problem: Problem, *, portable: bool = False) -> Kernels:
    """The schedules of prepare and state for a load; what memos keep. ``portable``: not their sm90 forms, whose tensor
    maps want packed heads, a bf16 gate and addresses and strides of 16 bytes."""
    dtype, target = DTYPE_NAMES[q.dtype], target_of(q.get_device())
    sizes = dict(chunk=chunk, k=K, v=V, dtype=dtype)
    prepare, state = (_pick(spec, problem, target, portable) for spec in (
        Spec.make("prefill_prepare", **sizes, gate=gate), Spec.make("prefill_state", **sizes)))
    hopper = prepare.schedule.form != "" and state.schedule.form != ""
    options = lambda choice: {"num_warps": choice.schedule.warps, "num_stages": choice.schedule.stages}
    kp, vp = padded(K), padded(V)
    row_bytes = chunk * (3 * kp + vp + chunk) * q.element_size() + 4 * kp
    return Kernels(prepare.module.launch, options(prepare), prepare.module, state.module.launch, options(state),
                   Spec.make("prefill_segments", **sizes), hopper, gate, row_bytes, chunk, kp, vp)


def portable_of(call: Call) -> Kernels:
    """The portable kernels of a call whose tensors no tensor map can describe."""
    kernels = call.kernels
    key = (call.q.dtype, call.q.get_device(), kernels.gate, call.N, call.HV, call.batch_invariant)
    found = _portable.get(key)
    if found is None:
        problem = INVARIANT if call.batch_invariant else Problem(8192 * call.N, call.N, call.HV)
        found = _portable[key] = choose(call.q, call.q.shape[-1], call.out.shape[-1], kernels.chunk, kernels.gate, problem,
                                        portable=True)
    return found


def _pick(spec: Spec, problem: Problem, target: Target, portable: bool) -> dispatch.Choice:
    choice = dispatch.pick(spec, problem, target)
    if portable and choice.schedule.form:
        schedule = families.get(spec.family).default(spec, None, problem)  # the default for any target
        return dispatch.Choice(Variant(spec, schedule.source_key), schedule, "default")
    return choice


def matrices_of(module, like: torch.Tensor) -> torch.Tensor:
    """The constant matrices of a prepare module on a device, made once, ready for the current stream."""
    return _matrices.get((module.__name__, like.device), like, lambda: (module.matrices(like.device),))[0]


def uniform_tables(batch: int, tokens: int, chunk: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(cu_seqlens, chunk_offsets, chunk_rows) of a batch of equally long sequences, made once for each shape."""
    def make():
        edges = torch.arange(batch + 1, dtype=torch.int32)
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=like.device).mul_(tokens)
        tables = step_tables(cu_seqlens, edges.mul_(tokens), chunk_size=chunk, rows=True, checked=False)
        return cu_seqlens, tables.chunk_offsets, tables.chunk_rows

    return _uniform.get((batch, tokens, chunk, like.device), like, make)


def segments_of(call: Call) -> int:
    """How many segments a long sequence is cut into: 1 where the heads fill the device, or nothing is known of its length.

    A plain rule from measurements on the H200: about the root of the chunks, since the chain of maps grows by one step
    with each segment while the walk shrinks; fewer where more heads share the device.
    """
    heads, chunks = call.N * call.HV, call.longest
    if heads > SEGMENT_HEADS or chunks < 16 or call.batch_invariant:
        return 1
    rows = call.chunk_rows.shape[0]
    if rows * call.HV * call.kernels.row_bytes > call.max_workspace:
        return 1
    wanted = (0.6 * chunks) ** 0.5 * (1.0 if heads <= 4 else 0.75)
    return max(1, min(MAX_SEGMENTS, int(wanted + 0.5)))


def run(call: Call) -> None:
    """Launch the whole forward on the current stream; the caller has made the tensors' device the current one."""
    if call.N * call.HV == 0:
        return
    if not (call.kernels.hopper and prefill_sm90.run(call, matrices_of)):
        if call.kernels.hopper and any(token_tiles(x) is None for x in (call.q, call.k, call.v, call.g)):
            call = call._replace(kernels=portable_of(call))
        segments = segments_of(call)
        if segments > 1:
            run_segments(call, segments)
        else:
            run_windows(call)
    _matrices.settle()
    _uniform.settle()


def prepare(call: Call, buffers: Buffers, row_begin: int, row_end: int, slot_base: int) -> None:
    """The chunk-local half for a window of chunk rows."""
    if row_end > row_begin:
        kernels = call.kernels
        kernels.prepare(
            call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, call.chunk_rows,
            matrices_of(kernels.prepare_module, call.q), *buffers, row_begin, row_end, slot_base, call.H, call.HV,
            call.lower_bound, call.scale, call.beta_scale, call.l2norm, call.sigmoid_beta, **kernels.prepare_options)


def walk(call: Call, buffers: Buffers, window: tuple[int, int, int], segments: tuple[int, int, int], mid_in, mid_out,
         mid_stride: int) -> None:
    """The serial half: window = (first row, last row + 1, slot base), segments = (first, how many, chunks of each)."""
    call.kernels.state(
        *buffers, call.out, call.cu_seqlens, call.chunk_offsets, *window, *segments,
        call.h_in, call.read_slots, call.has_initial, call.h_out, call.write_slots, mid_in, mid_out, mid_stride,
        call.ckpt_offsets, call.ckpt_slots, call.ckpt_pool, call.pad_slot, call.N, call.HV, call.v_first,
        **call.kernels.state_options)


def run_windows(call: Call) -> None:
    """Window by window, each of as many rows of the chunk table as the workspace holds."""
    rows, kernels = call.chunk_rows.shape[0], call.kernels
    held = max(1, call.max_workspace // (kernels.row_bytes * call.HV))
    if rows <= held:
        buffers = Buffers.of(call, rows)
        prepare(call, buffers, 0, rows, 0)
        walk(call, buffers, (0, rows, 0), (0, 1, WHOLE), None, None, 0)
        return
    buffers = Buffers.of(call, held)
    # the state of the sequence that a boundary cuts; read from one, written to the other, in turns
    mids = torch.empty((2, 1, call.HV, kernels.vp, kernels.kp), dtype=torch.float32, device=call.q.device)
    for i, first in enumerate(range(0, rows, held)):
        last = min(first + held, rows)
        prepare(call, buffers, first, last, first)
        walk(call, buffers, (first, last, first), (0, 1, WHOLE), mids[i % 2], mids[(i + 1) % 2], 0)


def run_segments(call: Call, count: int) -> None:
    """Segment 0 is walked at once, as its start is known; the maps of the inner ones lead to the other starts."""
    kernels, device, dtype = call.kernels, call.q.device, call.q.dtype
    N, HV, KP, VP, rows = call.N, call.HV, kernels.kp, kernels.vp, call.chunk_rows.shape[0]
    length = -(-call.longest // count)
    count = -(-call.longest // length)
    problem = Problem(call.q.shape[0] * call.q.shape[1], N, HV)
    choice = _pick(kernels.segments_spec, problem, target_of(call.q.get_device()), True)
    options = {"num_warps": choice.schedule.warps, "num_stages": choice.schedule.stages}
    buffers = Buffers.of(call, rows)
    starts = torch.empty((N, count, HV, VP, KP), dtype=torch.float32, device=device)
    prepare(call, buffers, 0, rows, 0)
    walk(call, buffers, (0, rows, 0), (0, 1, length), None, starts[:, 1:], count)
    if count > 2:
        off = torch.empty_like(starts)
        p_hi = torch.empty((N, count, HV, KP, KP), dtype=dtype, device=device)
        p_lo = None if dtype == torch.float32 else torch.empty_like(p_hi)
        choice.module.launch_map(buffers.kg, buffers.w, buffers.u, buffers.dec, call.chunk_offsets, off, p_hi, p_lo,
                                 0, 1, count - 2, length, count, N, HV, **options)
        choice.module.launch_combine(starts, off, p_hi, p_lo, call.chunk_offsets, length, count, N, HV)
    walk(call, buffers, (0, rows, 0), (1, count - 1, length), starts, None, count)

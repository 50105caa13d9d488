"""Staging of speculative decode: what a captured graph reads, copied into the buffers that it was captured with."""

from __future__ import annotations

from functools import partial

import torch

from kdagen import dispatch
from kdagen.errors import refuse
from kdagen.launch import handle, knobs
from kdagen.ops._common import check_device, check_dtype, interpreting, on_device, register, target_of
from kdagen.spec import Problem, Spec

_MEMO = dispatch.memo("stage_spec")


def stage_spec_decode_metadata(
    state_indices: torch.Tensor, query_start_loc: torch.Tensor, num_accepted_tokens: torch.Tensor,
    staged_state_indices: torch.Tensor, staged_query_start_loc: torch.Tensor, staged_num_accepted_tokens: torch.Tensor,
    *, num_spec_decodes: int, null_slot: int = 0, checked: bool = True,
) -> None:
    """Copy the S = num_spec_decodes requests of a step into buffers of B rows, and fill the rest, in one launch.

    state_indices        [>=S, >=C] int32, any strides: state slots of each request's candidate tokens.
    query_start_loc      [>=S+1] int32: boundaries.
    num_accepted_tokens  [>=S] int32: tokens accepted in the step before, the bonus token included.
    staged_state_indices [B, C] int32: written; rows from S on get ``null_slot``.
    staged_query_start_loc      [>=B+1] int32: its first B+1 entries are written; those past S repeat the last offset.
    staged_num_accepted_tokens  [>=B] int32: its first B entries are written; those from S on get 1.

    B counts requests, never tokens: pass the buffers' first B rows, B being what the graph was captured for. S = 0 is
    legal and fills everything, so that a replay after another kind of batch finds nothing stale. No synchronisation; can
    be captured.

    Raises ArgumentError or ArgumentTypeError: dtype, device, shape, S outside 0..B, buffers too small.
    """
    arguments = (state_indices, query_start_loc, num_accepted_tokens, staged_state_indices, staged_query_start_loc,
                 staged_num_accepted_tokens, num_spec_decodes, null_slot, checked)
    if torch.compiler.is_compiling():
        _op(*arguments)
    else:
        _stage(*arguments)


def _check(state, qsl, accepted, staged_state, staged_qsl, staged_accepted, S: int) -> None:
    names = ("state_indices", "query_start_loc", "num_accepted_tokens", "staged_state_indices", "staged_query_start_loc",
             "staged_num_accepted_tokens")
    tensors = (state, qsl, accepted, staged_state, staged_qsl, staged_accepted)
    device = staged_state.device
    for name, tensor in zip(names, tensors):
        check_dtype(name, tensor, torch.int32)
        check_device(name, tensor, device)
        dims = 2 if name.endswith("state_indices") else 1
        if tensor.dim() != dims:
            refuse(name, f"shape {list(tensor.shape)}", f"{dims} dimension{'s' * (dims > 1)}")
        if name.startswith("staged") and tensor.numel() > 1 and tensor.stride(-1) != 1:
            refuse(name, f"strides {tensor.stride()}", "a buffer with contiguous rows")
    B, C = staged_state.shape
    if not 0 <= S <= B:
        refuse("num_spec_decodes", str(S), f"0 to {B}, the rows of staged_state_indices",
               "Rows are requests, not tokens; a batch larger than the buffers cannot use the graph.")
    if C < 1 or state.shape[1] < C or state.shape[0] < S:
        refuse("state_indices", f"shape {list(state.shape)}", f"at least {S} rows and {max(C, 1)} columns")
    leasts = (S + 1, S, B + 1, B)
    for name, tensor, least in zip(names[1:3] + names[4:], (qsl, accepted, staged_qsl, staged_accepted), leasts):
        if tensor.shape[0] < least:
            refuse(name, f"shape {list(tensor.shape)}", f"at least {least} entries for S = {S} requests and B = {B} rows")


def stage(state, qsl, accepted, staged_state, staged_qsl, staged_accepted, S: int, B: int, null_slot: int) -> None:
    """``stage_spec_decode_metadata`` into the buffers' first B rows, without checks."""
    index = staged_state.get_device()
    if index < 0 and not interpreting():
        staged_state[:S] = state[:S, :staged_state.shape[1]]
        staged_state[S:B] = null_slot
        staged_qsl[:S + 1] = qsl[:S + 1]
        staged_qsl[S + 1:B + 1] = qsl[S]
        staged_accepted[:S] = accepted[:S]
        staged_accepted[S:B] = 1
        return
    columns = staged_state.shape[1]
    launch = _MEMO.get((index, columns)) or _launcher(index, columns)
    with on_device(staged_state):
        launch(state, qsl, accepted, staged_state, staged_qsl, staged_accepted, S, B, null_slot, *state.stride(),
               qsl.stride(0), accepted.stride(0), staged_state.stride(0))


def _launcher(index: int, columns: int):
    """The picked variant's ``launch`` for buffers of so many columns; after the first call, without Triton's host time."""
    choice = dispatch.pick(Spec.make("stage_spec", dtype="i32"), Problem(1, 1, 1), target_of(index))
    module, options = choice.module, {"num_warps": choice.schedule.warps, "num_stages": choice.schedule.stages}
    through_triton = partial(module.launch, columns=columns, **options)
    if index < 0:  # not remembered: the interpreter may be turned off
        return through_triton
    rows, runtime, stream = module.ROWS, knobs.runtime, torch._C._cuda_getCurrentRawStream

    def first(*arguments):
        grid = (arguments[7] // rows + 1,)  # B + 1 rows
        found = handle(module.stage_spec_kernel.jit[grid](*arguments, COLUMNS=columns, ROWS=rows, **options))
        _, short, call, function, cooperative, pdl, packed = found

        def launch(state, qsl, accepted, staged_state, staged_qsl, staged_accepted, S, B, *numbers):
            if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:  # a profiler wants to see launches
                through_triton(state, qsl, accepted, staged_state, staged_qsl, staged_accepted, S, B, *numbers)
                return
            call(B // rows + 1, 1, 1, stream(index), function, cooperative, pdl, None, None, packed, None, None, None,
                 state.data_ptr(), qsl.data_ptr(), accepted.data_ptr(), staged_state.data_ptr(), staged_qsl.data_ptr(),
                 staged_accepted.data_ptr(), S, B, *numbers, columns, rows)

        _MEMO[index, columns] = launch if short else through_triton

    return first


def _stage(state, qsl, accepted, staged_state, staged_qsl, staged_accepted, S: int, null_slot: int, checked: bool) -> None:
    if checked:
        _check(state, qsl, accepted, staged_state, staged_qsl, staged_accepted, S)
    stage(state, qsl, accepted, staged_state, staged_qsl, staged_accepted, S, staged_state.shape[0], null_slot)


_op = register(
    "stage_spec_decode_metadata(Tensor state_indices, Tensor query_start_loc, Tensor num_accepted_tokens,"
    " Tensor(a!) staged_state_indices, Tensor(b!) staged_query_start_loc, Tensor(c!) staged_num_accepted_tokens,"
    " int num_spec_decodes, int null_slot, bool checked) -> ()", _stage, lambda *_: None)

"""The sm90 forms of prefill, launched: prebuilt tensor maps, token windows and segments side by side on streams.

``run`` does the launches of one ``chunk_kda`` call whose forms are ``gluon`` or ``levels`` (prepare) and ``gluon`` (state).
It differs from the portable sequence in host time and in overlap: the results are the same bits for any windows.
Nothing here waits for the device, and all of it can be captured in a graph. What is launched, on which streams and with
which events between them, says ``_prefill_cut.steps``; here it is bound to a call's addresses and done. A call that comes
again and again with the same addresses is replayed as a CUDA graph of its own (``_lanes.Bound``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from operator import or_

import torch

from kdagen import devices, dispatch, families
from kdagen.launch import knobs
from kdagen.ops import _prefill_cut as cutting
from kdagen.ops._lanes import Bound, Functions, Lanes, lanes
from kdagen.ops._prefill_cut import C, Combine, K, Maps, Plan, Prepare, Record, V, Wait, Walk, plan
from kdagen.ops._tensor_maps import MapKernel, kind, token_tiles
from kdagen.spec import Problem, Variant

BF16, FP32 = (torch.bfloat16, 2), (torch.float32, 4)
INPUTS = ("q", "k", "v", "g")
OUTPUTS = ("qg", "kg", "w", "u", "aqk")
WALKED = ("qg", "kg", "w", "u", "aqk")
MAPPED = ("kg", "w", "u")
MAP_BUFFERS = ("off", "p_hi", "p_lo")

MAX_LAYOUTS = 4096       # layouts of arguments that are remembered

_KERNELS = dispatch.memo("prefill_sm90")          # what Triton specialises on -> the compiled kernel
_LAYOUTS = dispatch.memo("prefill_sm90_layouts")  # shapes, strides, dtypes and scalars of a call -> its Layout


def run(call, matrices: Callable, cut: Plan | None = None) -> bool:
    """Do all launches of a ``prefill_plan.Call``; False, with nothing launched, if it is not for the sm90 forms.

    ``matrices(module, like)`` gives the prepare module's constants; ``cut`` overrides the plan (for tests and sweeps).
    """
    addresses = _addresses(call)
    bits = reduce(or_, addresses)
    alignment = 0 if bits & 15 == 0 else tuple([one & 15 for one in addresses])
    # The op chooses kernels once for each layout of its tensors: their identity stands for shapes, strides and dtypes.
    key = (id(call.kernels), alignment, call.N, call.H, call.HV, call.chunk_rows.shape[0], call.chunk_offsets.dtype,
           call.longest, call.scale, call.lower_bound, call.beta_scale, call.l2norm, call.sigmoid_beta, call.pad_slot,
           call.v_first, call.batch_invariant, call.max_workspace, cut)
    layout = _LAYOUTS.get(key)
    if layout is None:
        tiles = [token_tiles(x) for x in (call.q, call.k, call.v, call.g)]
        rows = call.chunk_rows.shape[0]
        if None in tiles or call.g.dtype != torch.bfloat16:
            return False
        if not rows or rows * call.HV * call.kernels.row_bytes > call.max_workspace:
            return False
        if len(_LAYOUTS) >= MAX_LAYOUTS:
            _LAYOUTS.clear()
        made = cut or plan(rows, call.longest, call.N, call.HV, segments=not call.batch_invariant)
        layout = _LAYOUTS[key] = Layout(call, made, tiles)
    prefix = matrices(call.kernels.prepare_module, call.q)
    # The workspace is the main stream's, which goes on, here and in a graph, after all work of the other streams: whatever
    # the allocator gives this memory to next comes after that.
    memory = torch.empty(layout.bytes, dtype=torch.uint8, device=call.q.device)
    lane, main = lanes(layout.device), torch._C._cuda_getCurrentRawStream(layout.device)
    key = (layout, main, memory.data_ptr(), prefix.data_ptr(), *addresses)
    bound = lane.calls.get(key)
    once = partial(Once, layout, call, memory, prefix, addresses)
    if bound is None or _hooked():
        functions = None if _hooked() else once().bind(lane)
        if functions is None:
            once().launch(lane)
            return True
        bound = Bound(functions)
        lane.keep(key, bound)
    bound.run(lane, lambda lane: once().bind(lane))
    return True


def _hooked() -> bool:
    """Whether a profiler watches Triton's launches: then they take Triton's own way."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


class Layout:
    """What is the same in all calls with the same shapes, strides, dtypes and scalars: the steps, buffers, arguments."""

    def __init__(self, call, cut: Plan, tiles: list[tuple]):
        self.cut, self.tiles, self.device = cut, [tile[1:] for tile in tiles], call.q.get_device()
        self.kernels, self.rows, self.HV, self.N = call.kernels, call.chunk_rows.shape[0], call.HV, call.N
        self.steps = cutting.steps(cut, self.rows)
        self.shapes = self._shapes()
        self.starts, self.bytes = {}, 0
        for name, (shape, (_, size)) in self.shapes.items():
            self.starts[name] = self.bytes
            self.bytes += math.prod(shape) * size
        states, strides = _states(call), _state_strides(call)
        tensors = (call.beta, call.A_log, call.dt_bias, call.chunk_rows, call.out, call.cu_seqlens, call.chunk_offsets,
                   *states)
        self.key = (self.device, call.l2norm, call.sigmoid_beta, call.v_first, call.kernels.prepare,
                    *call.kernels.prepare_options.values(), call.kernels.state, *call.kernels.state_options.values(),
                    *map(kind, tensors), *[x & 15 == 0 for x in strides])
        self.tokens = call.q.shape[:-2].numel()
        self.prepare_end = (0, self.tokens, int(self.N == 1), self.HV, self.HV // call.H, call.beta.stride(-2),
                            call.beta.stride(-1), call.lower_bound, call.scale, call.beta_scale, call.l2norm,
                            call.sigmoid_beta)
        self.walk_end = (call.pad_slot, _pool_slots(call), self.N, self.HV, *strides, call.v_first,
                         call.kernels.state_options["num_stages"])
        self.mid_stride = 0 if cut.form == "windows" else cut.segments
        self._segments = None

    def _shapes(self) -> dict:
        lead, states = (self.rows, self.HV), (self.N, self.cut.segments, self.HV)
        shapes = {name: ((*lead, C, K), BF16) for name in ("qg", "kg", "w", "u")}
        shapes |= {"aqk": ((*lead, C, C), BF16), "dec": ((*lead, K), FP32)}
        if self.cut.form == "windows":
            shapes["hs"] = ((1, 1, self.HV, V, K), FP32)
        elif self.cut.form == "segments":
            shapes |= {"hs": ((*states, V, K), FP32), "off": ((*states, V, K), FP32),
                       "p_hi": ((*states, K, K), BF16), "p_lo": ((*states, K, K), BF16)}
        return shapes

    def segments(self) -> tuple:
        """The module of maps and combine, and its options; looked up once."""
        if self._segments is None:
            problem = Problem(self.rows * C, self.N, self.HV)
            spec, target = self.kernels.segments_spec, devices.of_index(self.device)
            choice = dispatch.pick(spec, problem, target)
            if not choice.schedule.form:  # the portable map takes no descriptors
                schedule = families.get(spec.family).default(spec, target, problem)
                choice = dispatch.Choice(Variant(spec, schedule.source_key), schedule, "default")
            self._segments = choice.module, {"num_warps": choice.schedule.warps, "num_stages": choice.schedule.stages}
        return self._segments

    def kernel_key(self, step) -> tuple:
        """What tells apart the compiled kernels of steps."""
        if isinstance(step, Walk):
            return "walk", step.read is not None, step.write is not None, *self.key
        if isinstance(step, Prepare):
            return "prepare", *self.key
        module, options = self.segments()
        return type(step).__name__, module.__name__, *options.values(), *self.key


class Once:
    """One call of a layout: its tensors and their addresses.

    A kernel is looked up by what Triton specialises on and launched straight through the driver (``bind``). Where there is
    none yet, all launches go through the generated modules' ``launch``, which compiles (``launch``).
    """

    def __init__(self, layout: Layout, call, memory: torch.Tensor, prefix: torch.Tensor, addresses: list[int]):
        self.layout, self.call, self.memory, self.prefix = layout, call, memory, prefix
        self.base, self.prefix_at = memory.data_ptr(), prefix.data_ptr()
        self.inputs, self.beside, self.tables, self.states = (
            addresses[:4], addresses[4:8], addresses[8:11], addresses[11:])

    def bind(self, lane: Lanes) -> Functions | None:
        """The C functions that do this call, with their arguments; None where a kernel is not compiled yet."""
        bound = []
        for step in self.layout.steps:
            stream = lane.stream(step.on)
            if isinstance(step, Record):
                bound.append(lane.record(step.event, stream))
            elif isinstance(step, Wait):
                bound.append(lane.wait(step.event, stream))
            else:
                kernel = _KERNELS.get(self.layout.kernel_key(step))
                if kernel is None:
                    return None
                programs, arguments = FAST[type(step)](self, kernel, step)
                bound.append(kernel.launch(programs, stream.cuda_stream, arguments))
        return bound

    def launch(self, lane: Lanes) -> None:
        """Do the call the plain way; what that compiles is kept."""
        for step in self.layout.steps:
            stream = lane.stream(step.on)
            if isinstance(step, Record):
                lane.event(step.event).record(stream)
            elif isinstance(step, Wait):
                stream.wait_event(lane.event(step.event))
            else:
                with torch.cuda.stream(stream):
                    kernel = MapKernel.of(PLAIN[type(step)](self, step))
                if kernel is not None:
                    _KERNELS[self.layout.kernel_key(step)] = kernel

    # The intermediates

    def at(self, name: str, segment: int | None = 0) -> int:
        """The address of an intermediate, from a segment on; 0 for the segment None."""
        if segment is None:
            return 0
        shape, (_, size) = self.layout.shapes[name]
        return self.base + self.layout.starts[name] + (segment * math.prod(shape[2:]) * size if segment else 0)

    def tensor(self, name: str, segment: int | None = 0) -> torch.Tensor | None:
        """An intermediate, from a segment on; None for the segment None."""
        if segment is None:
            return None
        shape, (dtype, size) = self.layout.shapes[name]
        start = self.layout.starts[name]
        whole = self.memory[start:start + math.prod(shape) * size].view(dtype).view(shape)
        return whole[:, segment:] if segment else whole

    def tensors(self, *names: str) -> list[torch.Tensor]:
        return [self.tensor(name) for name in names]

    def maps(self, kernel: MapKernel, names: tuple[str, ...], first: int = 0) -> list:
        """The arguments for intermediates that are the kernel's descriptors ``first``, ``first`` + 1, .., and for dec."""
        rows, parts = self.layout.rows * self.layout.HV * C, []
        for index, name in enumerate(names, first):
            width = C if name == "aqk" else K
            parts += kernel.map(index, self.at(name), rows, width, width)
        return [*parts, self.at("dec")]

    # The launches: straight to the driver, (programs, arguments in signature order), and through the modules

    def fast_prepare(self, kernel: MapKernel, step: Prepare) -> tuple[int, tuple]:
        layout, inputs = self.layout, []
        for index, (start, tiles) in enumerate(zip(self.inputs, layout.tiles)):
            inputs += kernel.map(index, start, *tiles)
        return (step.end - step.begin) * layout.HV, (
            *inputs, *self.beside, self.prefix_at, *self.maps(kernel, OUTPUTS, len(INPUTS)), step.begin, *layout.prepare_end)

    def plain_prepare(self, step: Prepare):
        call, kernels = self.call, self.call.kernels
        return kernels.prepare(
            call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, call.chunk_rows, self.prefix,
            *self.tensors(*OUTPUTS, "dec"), step.begin, step.end, 0, call.H, call.HV, *self.layout.prepare_end[7:],
            alone=self.layout.N == 1, **kernels.prepare_options)

    def fast_walk(self, kernel: MapKernel, step: Walk) -> tuple[int, tuple]:
        layout, states = self.layout, self.states
        return V // kernel.box(WALKED.index("u")) * layout.HV * layout.N * step.count, (
            *self.maps(kernel, WALKED), *self.tables, layout.tokens, step.begin, step.end, 0, step.first, step.chunks,
            *states[:5], self.at("hs", step.read), self.at("hs", step.write), layout.mid_stride, *states[5:],
            *layout.walk_end)

    def plain_walk(self, step: Walk):
        call, states = self.call, _states(self.call)
        return call.kernels.state(
            *self.tensors(*WALKED, "dec"), call.out, call.cu_seqlens, call.chunk_offsets, step.begin, step.end, 0,
            step.first, step.count, step.chunks, *states[:5], self.tensor("hs", step.read), self.tensor("hs", step.write),
            self.layout.mid_stride, *states[5:], call.pad_slot, call.N, call.HV, call.v_first, **call.kernels.state_options)

    def fast_maps(self, kernel: MapKernel, step: Maps) -> tuple[int, tuple]:
        layout, cut = self.layout, self.layout.cut
        return (V + K) // kernel.box(MAPPED.index("u")) * layout.HV * layout.N * step.count, (
            *self.maps(kernel, MAPPED), self.tables[2], *[self.at(name) for name in MAP_BUFFERS], 0, step.first,
            cut.seg_chunks, cut.segments, layout.N, layout.HV, kernel.stages)

    def plain_maps(self, step: Maps):
        layout, cut = self.layout, self.layout.cut
        module, options = layout.segments()
        return module.launch_map(
            *self.tensors(*MAPPED, "dec"), self.call.chunk_offsets, *self.tensors(*MAP_BUFFERS), 0, step.first, step.count,
            cut.seg_chunks, cut.segments, layout.N, layout.HV, **options)

    # The chain's first segment counts as the kernel's number 1: with a longer head (and one sequence) all begins further on.

    def fast_combine(self, kernel: MapKernel, step: Combine) -> tuple[int, tuple]:
        layout, cut, shift = self.layout, self.layout.cut, step.first - 1
        return V // 64 * layout.HV * layout.N, (
            *[self.at(name, shift) for name in ("hs", *MAP_BUFFERS)], self.tables[2], cut.seg_chunks, cut.segments - shift,
            layout.HV, kernel.stages)

    def plain_combine(self, step: Combine):
        layout, cut, shift = self.layout, self.layout.cut, step.first - 1
        module, _ = layout.segments()
        return module.launch_combine(
            *[self.tensor(name, shift) for name in ("hs", *MAP_BUFFERS)], self.call.chunk_offsets, cut.seg_chunks,
            cut.segments - shift, layout.N, layout.HV)


FAST = {Prepare: Once.fast_prepare, Walk: Once.fast_walk, Maps: Once.fast_maps, Combine: Once.fast_combine}
PLAIN = {Prepare: Once.plain_prepare, Walk: Once.plain_walk, Maps: Once.plain_maps, Combine: Once.plain_combine}


def _addresses(call) -> list[int]:
    """Of all of a call's tensors, 0 for None: inputs, what goes beside them, tables, states."""
    return [0 if x is None else x.data_ptr() for x in (
        call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, call.chunk_rows, call.out, call.cu_seqlens,
        call.chunk_offsets, *_states(call))]


def _states(call) -> tuple:
    return (call.h_in, call.read_slots, call.has_initial, call.h_out, call.write_slots, call.ckpt_offsets, call.ckpt_slots,
            call.ckpt_pool)


def _pool_slots(call) -> int:
    pool = call.h_in if call.read_slots is not None else call.h_out if call.write_slots is not None else call.ckpt_pool
    return 0 if pool is None else pool.shape[0]


def _state_strides(call) -> tuple[int, ...]:
    """The state kernel's strides and the number of checkpoints, in signature order."""
    of = lambda x, axes: (0,) * axes if x is None else x.stride()[:axes]
    return (*call.out.stride()[-3:-1], *of(call.h_in, 2), *of(call.h_out, 2), *of(call.ckpt_pool, 2),
            *of(call.read_slots, 1), *of(call.write_slots, 1), *of(call.ckpt_offsets, 1), *of(call.ckpt_slots, 1),
            0 if call.ckpt_offsets is None else call.ckpt_offsets.shape[1])

"""The sm90 forms of prefill, launched: prebuilt tensor maps, token windows and segments side by side on streams.

``run`` does the launches of one ``chunk_kda`` call whose forms are ``gluon`` (prepare) and ``tma`` (state). It differs from
the portable sequence in host time and in overlap: however the rows are cut into windows, the results are the same bits.
Nothing here waits for the device, and all of it can be captured in a graph. Three ways to run, chosen by ``plan``:
  serial    prepare all rows, then the state pass;
  windows   one long sequence: the state pass of a window runs beside the prepare kernel of the next ones;
  segments  few heads: the maps of inner segments run beside the walk of the first one; then all others walk at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch

from kdagen import devices, dispatch, families
from kdagen.ops._prefill_cut import WHOLE, C, K, Plan, V, plan
from kdagen.ops._tensor_maps import MapKernel, address, kind, token_tiles
from kdagen.spec import Problem, Variant

BF16, FP32 = (torch.bfloat16, 2), (torch.float32, 4)
INPUTS = ("q", "k", "v", "g")
OUTPUTS = ("qg", "kg", "w", "u", "aqk")
WALKED = ("qg", "kg", "w", "u", "aqk")
MAPPED = ("kg", "w", "u")

MAX_LAYOUTS = 4096       # layouts of arguments that are remembered
MAX_FRAMES = 256         # workspace and input addresses that a layout remembers

_KERNELS = dispatch.memo("prefill_sm90")          # what Triton specialises on -> the compiled kernel
_LAYOUTS = dispatch.memo("prefill_sm90_layouts")  # shapes, strides, dtypes and scalars of a call -> its Layout


class Lanes:
    """The streams and events of one thread on one device, made once and used again by every call."""

    def __init__(self, device: int):
        self.side = torch.cuda.Stream(device)
        self.high = torch.cuda.Stream(device, priority=-5)  # the state pass: its programs are placed first
        self.events = [torch.cuda.Event() for _ in range(16)]


_LOCAL = threading.local()


def lanes(device: int) -> Lanes:
    found = _LOCAL.__dict__.get(device)
    if found is None:
        found = _LOCAL.__dict__[device] = Lanes(device)
    return found


def run(call, matrices: Callable, cut: Plan | None = None) -> bool:
    """Do all launches of a ``prefill_plan.Call``; False, with nothing launched, if it is not for the sm90 forms.

    ``matrices(module, like)`` gives the prepare module's constants; ``cut`` overrides the plan (for tests and sweeps).
    """
    now = Now(call)
    # The op chooses kernels once for each layout of its tensors: their identity stands for shapes, strides and dtypes.
    key = (id(call.kernels), now.alignment, call.N, call.H, call.HV, call.chunk_rows.shape[0], call.chunk_offsets.dtype,
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
        layout = Layout(call, made, tiles, matrices(call.kernels.prepare_module, call.q))
        if not torch.cuda.is_current_stream_capturing():  # else its constants may be this graph's own
            _LAYOUTS[key] = layout
    now.memory = torch.empty(layout.bytes, dtype=torch.uint8, device=call.q.device)
    now.base = now.memory.data_ptr()
    if layout.cut.form == "windows":
        _windows(layout, now, lanes(layout.device))
    elif layout.cut.form == "segments":
        _segments(layout, now, lanes(layout.device))
    else:
        stream = torch._C._cuda_getCurrentRawStream(layout.device)
        layout.prepare(now, stream, 0, layout.rows)
        layout.walk(now, stream, (0, layout.rows), (0, 1, WHOLE))
    return True


def _windows(layout: Layout, now: Now, lane: Lanes) -> None:
    """prepare(w) on two streams in turn, so that one fills the other's tail; walk(w) on a third, as soon as w is ready."""
    main, cuts, events = torch.cuda.current_stream(layout.device), layout.cut.cuts, iter(lane.events)
    start = next(events)
    start.record(main)
    lane.side.wait_event(start)
    for w in range(len(cuts) - 1):
        stream, ready = (lane.side if w % 2 else main), next(events)
        layout.prepare(now, stream.cuda_stream, cuts[w], cuts[w + 1])
        ready.record(stream)
        lane.high.wait_event(ready)
        layout.walk(now, lane.high.cuda_stream, cuts[w:w + 2], (0, 1, WHOLE), mid_in="hs", mid_out="hs")
    done = next(events)
    done.record(lane.high)
    main.wait_event(done)


def _segments(layout: Layout, now: Now, lane: Lanes) -> None:
    """Segment 0 walks beside the maps of the inner ones; their states are chained; then the others walk side by side."""
    window, count, seg_chunks = (0, layout.rows), layout.cut.segments, layout.cut.seg_chunks
    main = torch.cuda.current_stream(layout.device)
    stream, (ready, done) = main.cuda_stream, lane.events[:2]
    layout.prepare(now, stream, *window)
    ready.record(main)
    lane.high.wait_event(ready)
    layout.walk(now, lane.high.cuda_stream, window, (0, 1, seg_chunks), mid_out="hs", mid_stride=count, mid_shift=1)
    done.record(lane.high)
    if count > 2:
        layout.map_segments(now, stream)
    main.wait_event(done)
    if count > 2:
        layout.combine(now, stream)
    layout.walk(now, stream, window, (1, count - 1, seg_chunks), mid_in="hs", mid_stride=count)


class Now:
    """What changes from call to call: addresses."""

    __slots__ = ("alignment", "base", "beside", "call", "inputs", "memory", "states", "tables")

    def __init__(self, call):
        self.call = call
        self.inputs = call.q.data_ptr(), call.k.data_ptr(), call.v.data_ptr(), call.g.data_ptr()
        self.beside = call.beta.data_ptr(), address(call.A_log), address(call.dt_bias), call.chunk_rows.data_ptr()
        self.tables = call.out.data_ptr(), call.cu_seqlens.data_ptr(), call.chunk_offsets.data_ptr()
        self.states = tuple([None if x is None else x.data_ptr() for x in _states(call)])
        bits, everything = 0, (*self.inputs, *self.beside, *self.tables, *self.states)
        for one in everything:
            bits |= one or 0
        self.alignment = 0 if bits & 15 == 0 else tuple((one or 0) & 15 for one in everything)


class Layout:
    """What is the same in all calls with the same shapes, strides, dtypes and scalars: buffers, kernels, launch arguments.

    A kernel is looked up by what Triton specialises on and launched straight through the driver. Where there is none yet,
    the launch goes through the generated module's ``launch``, which compiles.
    """

    def __init__(self, call, cut: Plan, tiles: list[tuple], prefix: torch.Tensor):
        self.cut, self.tiles, self.device = cut, tiles, call.q.get_device()
        self.prefix, self.prefix_at = prefix, prefix.data_ptr()
        self.kernels, self.rows, self.HV, self.N = call.kernels, call.chunk_rows.shape[0], call.HV, call.N
        self.shapes = self._shapes()
        self.starts, self.bytes = {}, 0
        for name, (shape, (_, size)) in self.shapes.items():
            self.starts[name] = self.bytes
            self.bytes += math.prod(shape) * size
        self.made: dict = {}    # launch -> (kernel, the fixed end of its arguments)
        self.frames: dict = {}  # (launch, address) -> the arguments that stand for tiles there
        states, strides = _states(call), _state_strides(call)
        scalars = (call.l2norm, call.sigmoid_beta, call.v_first)
        tensors = (call.beta, call.A_log, call.dt_bias, call.chunk_rows, prefix, call.out, call.cu_seqlens,
                   call.chunk_offsets, *states)
        self.key = (self.device, *scalars, call.kernels.prepare, *call.kernels.prepare_options.values(), call.kernels.state,
                    *call.kernels.state_options.values(), *map(kind, tensors), *[x & 15 == 0 for x in strides])
        self.prepare_end = (0, self.HV, self.HV // call.H, call.beta.stride(-2), call.beta.stride(-1), call.lower_bound,
                            call.scale, call.beta_scale, call.l2norm, call.sigmoid_beta)
        self.walk_end = (call.pad_slot, _pool_slots(call), self.N, self.HV, *strides, call.v_first,
                         call.kernels.state_options["num_stages"])

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

    def at(self, now: Now, name: str | None, segment: int = 0) -> int | None:
        return None if name is None else now.base + self.starts[name] + segment * self.HV * V * K * 4

    def tensor(self, now: Now, name: str | None, segment: int = 0) -> torch.Tensor | None:
        """An intermediate as a tensor, from a segment on; for a launch that compiles."""
        if name is None:
            return None
        shape, (dtype, size) = self.shapes[name]
        start = self.starts[name]
        whole = now.memory[start:start + math.prod(shape) * size].view(dtype).view(shape)
        return whole[:, segment:] if segment else whole

    def frame(self, now: Now, kernel: MapKernel, names: tuple[str, ...], first: int = 0) -> tuple:
        """The arguments for intermediates that are the kernel's descriptors ``first``, ``first`` + 1, .., and for dec."""
        key = (names, first, now.base, id(kernel))
        found = self.frames.get(key)
        if found is None:
            if len(self.frames) >= MAX_FRAMES:
                self.frames.clear()
            rows, parts = self.rows * self.HV * C, []
            for index, name in enumerate(names, first):
                width = C if name == "aqk" else K
                parts += kernel.map(index, self.at(now, name), rows, width, width)
            found = self.frames[key] = (*parts, self.at(now, "dec"))
        return found

    def _input_maps(self, now: Now, kernel: MapKernel) -> tuple:
        found = self.frames.get(now.inputs)
        if found is None:
            parts = []
            for index, (start, tiles) in enumerate(zip(now.inputs, self.tiles)):
                parts += kernel.map(index, start, *tiles[1:])
            if len(self.frames) >= MAX_FRAMES:
                self.frames.clear()
            found = self.frames[now.inputs] = tuple(parts)
        return found

    def _compile(self, key: tuple, stream: int, launch: Callable, *args, **options) -> None:
        """The first launch of a kernel: the plain way, on the same stream; what it compiles is kept."""
        on = torch.cuda.ExternalStream(stream, device=self.device) if stream else torch.cuda.default_stream(self.device)
        with torch.cuda.stream(on):
            kernel = MapKernel.of(launch(*args, **options))
        if kernel is not None:
            _KERNELS[key] = kernel

    def _kernel(self, *name) -> MapKernel | None:
        kernel = self.made.get(name)
        if kernel is None:
            kernel = _KERNELS.get((*name, *self.key))
            if kernel is not None:
                self.made[name] = kernel
        return kernel

    def prepare(self, now: Now, stream: int, begin: int, end: int) -> None:
        """All of the chunk table's rows [begin, end) that needs no incoming state."""
        kernel = self._kernel("prepare")
        if kernel is None:
            call = now.call
            return self._compile(
                ("prepare", *self.key), stream, call.kernels.prepare, call.q, call.k, call.v, call.g, call.beta, call.A_log,
                call.dt_bias, call.chunk_rows, self.prefix, *[self.tensor(now, name) for name in (*OUTPUTS, "dec")],
                begin, end, 0, call.H, call.HV, *self.prepare_end[5:], **call.kernels.prepare_options)
        kernel.launch((end - begin) * self.HV, stream, (
            *self._input_maps(now, kernel), *now.beside, self.prefix_at, *self.frame(now, kernel, OUTPUTS, len(INPUTS)),
            begin, *self.prepare_end))

    def walk(self, now: Now, stream: int, window: tuple[int, int], segments: tuple[int, int, int], *,
             mid_in: str | None = None, mid_out: str | None = None, mid_stride: int = 0, mid_shift: int = 0) -> None:
        """The state over the rows of a window, for segments (first, how many, chunks of each)."""
        name = "walk", mid_in is not None, mid_out is not None
        kernel = self._kernel(*name)
        if kernel is None:
            call = now.call
            return self._compile(
                (*name, *self.key), stream, call.kernels.state, *[self.tensor(now, part) for part in (*WALKED, "dec")],
                call.out, call.cu_seqlens, call.chunk_offsets, *window, 0, *segments, *_states(call)[:5],
                self.tensor(now, mid_in), self.tensor(now, mid_out, mid_shift), mid_stride, *_states(call)[5:],
                call.pad_slot, call.N, call.HV, call.v_first, **call.kernels.state_options)
        first, how_many, seg_chunks = segments
        states = now.states
        kernel.launch(V // kernel.box(WALKED.index("u")) * self.HV * self.N * how_many, stream, (
            *self.frame(now, kernel, WALKED), *now.tables, *window, 0, first, seg_chunks, *states[:5],
            self.at(now, mid_in), self.at(now, mid_out, mid_shift), mid_stride, *states[5:], *self.walk_end))

    def _segments_choice(self):
        key = ("choice", *self.key, self.N * self.HV, self.cut)
        found = _KERNELS.get(key)
        if found is None:
            problem = Problem(self.rows * C, self.N, self.HV)
            spec, target = self.kernels.segments_spec, devices.of_index(self.device)
            choice = dispatch.pick(spec, problem, target)
            if not choice.schedule.form:  # the portable map takes no descriptors
                schedule = families.get(spec.family).default(spec, target, problem)
                choice = dispatch.Choice(Variant(spec, schedule.source_key), schedule, "default")
            options = {"num_warps": choice.schedule.warps, "num_stages": choice.schedule.stages}
            found = _KERNELS[key] = choice.module, options
        return found

    def map_segments(self, now: Now, stream: int) -> None:
        """The maps of all segments but the first and the last."""
        cut = self.cut
        kernel = self._kernel("map", cut)
        if kernel is None:
            module, options = self._segments_choice()
            return self._compile(
                ("map", cut, *self.key), stream, module.launch_map, *[self.tensor(now, name) for name in (*MAPPED, "dec")],
                now.call.chunk_offsets, *[self.tensor(now, name) for name in ("off", "p_hi", "p_lo")], 0, 1,
                cut.segments - 2, cut.seg_chunks, cut.segments, self.N, self.HV, **options)
        programs = (V + K) // kernel.box(MAPPED.index("u")) * self.HV * self.N * (cut.segments - 2)
        kernel.launch(programs, stream, (
            *self.frame(now, kernel, MAPPED), now.tables[2], self.at(now, "off"), self.at(now, "p_hi"), self.at(now, "p_lo"),
            0, 1, cut.seg_chunks, cut.segments, self.N, self.HV, kernel.stages))

    def combine(self, now: Now, stream: int) -> None:
        """The states at the starts of the segments, one after another."""
        cut, names = self.cut, ("hs", "off", "p_hi", "p_lo")
        kernel = self._kernel("combine", cut)
        if kernel is None:
            module, _ = self._segments_choice()
            return self._compile(
                ("combine", cut, *self.key), stream, module.launch_combine, *[self.tensor(now, name) for name in names],
                now.call.chunk_offsets, cut.seg_chunks, cut.segments, self.N, self.HV)
        kernel.launch(V // 64 * self.HV * self.N, stream, (
            *[self.at(now, name) for name in names], now.tables[2], cut.seg_chunks, cut.segments, self.HV, kernel.stages))


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

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
from typing import NamedTuple

import torch

from kdagen import devices, dispatch
from kdagen.ops._tensor_maps import MapKernel, address, kind, token_tiles
from kdagen.spec import Problem

C, K, V = 64, 128, 128   # all that the forms support
BF16, FP32 = (torch.bfloat16, 2), (torch.float32, 4)
WHOLE = 1 << 30          # chunks of the only segment of an uncut sequence
MIN_SEGMENT = 10         # chunks: shorter segments cost more in maps than they save
INPUTS = ("q", "k", "v", "g")
OUTPUTS = ("qg", "kg", "w", "u", "aqk")
WALKED = ("qg", "kg", "w", "u", "aqk")
MAPPED = ("kg", "w", "u")

_KERNELS = dispatch.memo("prefill_sm90")  # what Triton specialises on -> the compiled kernel


class Plan(NamedTuple):
    """How a call is cut: the row boundaries of its windows, or its segments."""

    form: str  # serial, windows or segments
    cuts: tuple[int, ...] = ()
    segments: int = 1
    seg_chunks: int = WHOLE


def plan(rows: int, longest: int, N: int, HV: int, *, segments: bool = True, sms: int = 132) -> Plan:
    """The cut of N sequences of ``rows`` chunks in all; ``longest``: chunks of the longest one, 0 if the host does not know.

    Measured on the H200: windows pay for one long sequence of 16 to 33 heads, or of 90 and more; segments up to 12 heads.
    """
    programs = N * HV
    if N == 1 and longest == rows and rows >= 64 and (16 <= programs <= 33 or programs >= 90):
        if programs >= 90:
            shares = (0.6, 0.8)
        elif rows >= 256:
            shares = (1 / 2, 4 / 6, 5 / 6)
        else:
            shares = (1 / 2, 3 / 4)
        return Plan("windows", (0, *(round(share * rows) for share in shares), rows))
    if segments and programs <= 12 and longest >= 2 * MIN_SEGMENT:
        # The others beside the first one: as many as walk at once, with two programs a head.
        count = max(2, min(1 + sms // (2 * programs), longest // MIN_SEGMENT))
        seg_chunks = -(-longest // count)
        return Plan("segments", (), -(-longest // seg_chunks), seg_chunks)
    return Plan("serial")


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
    kernels, rows = call.kernels, call.chunk_rows.shape[0]
    if rows * call.HV * kernels.row_bytes > call.max_workspace or not rows:
        return False
    tiles = [token_tiles(x) for x in (call.q, call.k, call.v, call.g)]
    if None in tiles:
        return False
    cut = cut or plan(rows, call.longest, call.N, call.HV, segments=not call.batch_invariant)
    device = call.q.get_device()
    work = Work(call, cut, tiles, device, matrices(kernels.prepare_module, call.q))
    if cut.form == "windows":
        _windows(work, cut, lanes(device))
    elif cut.form == "segments":
        _segments(work, cut, lanes(device))
    else:
        stream = torch._C._cuda_getCurrentRawStream(device)
        work.prepare(stream, 0, rows)
        work.walk(stream, (0, rows), (0, 1, WHOLE))
    return True


def _windows(work: Work, cut: Plan, lane: Lanes) -> None:
    """prepare(w) on two streams in turn, so that one fills the other's tail; walk(w) on a third, as soon as w is ready."""
    main, events = torch.cuda.current_stream(work.device), iter(lane.events)
    start = next(events)
    start.record(main)
    lane.side.wait_event(start)
    for w, window in enumerate(zip(cut.cuts[:-1], cut.cuts[1:])):
        stream, ready = (lane.side if w % 2 else main), next(events)
        work.prepare(stream.cuda_stream, *window)
        ready.record(stream)
        lane.high.wait_event(ready)
        work.walk(lane.high.cuda_stream, window, (0, 1, WHOLE), mid_in="hs", mid_out="hs")
    done = next(events)
    done.record(lane.high)
    main.wait_event(done)


def _segments(work: Work, cut: Plan, lane: Lanes) -> None:
    """Segment 0 walks beside the maps of the inner ones; their states are chained; then the others walk side by side."""
    window, count, seg_chunks = (0, work.rows), cut.segments, cut.seg_chunks
    main = torch.cuda.current_stream(work.device)
    stream, (ready, done) = main.cuda_stream, lane.events[:2]
    work.prepare(stream, *window)
    ready.record(main)
    lane.high.wait_event(ready)
    work.walk(lane.high.cuda_stream, window, (0, 1, seg_chunks), mid_out="hs", mid_stride=count, mid_shift=1)
    done.record(lane.high)
    if count > 2:
        work.map_segments(stream, 1, count - 2)
    main.wait_event(done)
    if count > 2:
        work.combine(stream)
    work.walk(stream, window, (1, count - 1, seg_chunks), mid_in="hs", mid_stride=count)


class Work:
    """One call: its intermediates, side by side in one allocation, and its launches.

    A launch looks its compiled kernel up by what Triton specialises on and goes to the driver with addresses and tensor
    maps. Where there is none yet, it goes through the generated module's ``launch``, which compiles.
    """

    def __init__(self, call, cut: Plan, tiles: list[tuple], device: int, prefix: torch.Tensor):
        self.call, self.cut, self.tiles, self.device, self.prefix = call, cut, tiles, device, prefix
        self.rows, HV = call.chunk_rows.shape[0], call.HV
        lead, states = (self.rows, HV), (call.N, cut.segments, HV)
        self.shapes = {name: ((*lead, C, K), BF16) for name in ("qg", "kg", "w", "u")}
        self.shapes |= {"aqk": ((*lead, C, C), BF16), "dec": ((*lead, K), FP32)}
        if cut.form == "windows":
            self.shapes["hs"] = ((1, 1, HV, V, K), FP32)
        elif cut.form == "segments":
            self.shapes |= {"hs": ((*states, V, K), FP32), "off": ((*states, V, K), FP32),
                            "p_hi": ((*states, K, K), BF16), "p_lo": ((*states, K, K), BF16)}
        self.starts, end = {}, 0
        for name, (shape, (_, size)) in self.shapes.items():
            self.starts[name] = end
            end += math.prod(shape) * size
        self.memory = torch.empty(end, dtype=torch.uint8, device=call.q.device)
        self.base = self.memory.data_ptr()
        self.key = ("prefill", device, call.l2norm, call.sigmoid_beta, call.v_first)
        self.fixed: dict[str, tuple] = {}

    def at(self, name: str | None) -> int | None:
        return None if name is None else self.base + self.starts[name]

    def tensor(self, name: str | None, skip: int = 0) -> torch.Tensor | None:
        """An intermediate as a tensor, for a launch that compiles; ``skip`` leaves out leading segments."""
        if name is None:
            return None
        shape, (dtype, size) = self.shapes[name]
        start = self.starts[name]
        whole = self.memory[start:start + math.prod(shape) * size].view(dtype).view(shape)
        return whole[:, skip:] if skip else whole

    def maps(self, kernel: MapKernel, names: tuple[str, ...], first: int = 0) -> list:
        """The launch arguments for intermediates that are the kernel's descriptors ``first``, ``first`` + 1, .."""
        rows, found = self.rows * self.call.HV * C, []
        for index, name in enumerate(names, first):
            width = C if name == "aqk" else K
            found += kernel.map(index, self.at(name), rows, width, width)
        return found

    def _compile(self, key: tuple, stream: int, launch: Callable, *args, **options) -> None:
        """The first launch of a kernel: the plain way, on the same stream; what it compiles is kept."""
        on = torch.cuda.ExternalStream(stream, device=self.device) if stream else torch.cuda.default_stream(self.device)
        with torch.cuda.stream(on):
            compiled = launch(*args, **options)
        kernel = MapKernel.of(compiled)
        if kernel is not None:
            _KERNELS[key] = kernel

    def prepare(self, stream: int, begin: int, end: int) -> None:
        """All of the chunk table's rows [begin, end) that needs no incoming state."""
        call = self.call
        fixed = self.fixed.get("prepare")
        if fixed is None:
            pointers = (call.beta, call.A_log, call.dt_bias, call.chunk_rows, self.prefix)
            key = (*self.key, call.kernels.prepare, *call.kernels.prepare_options.values(), *map(kind, pointers))
            kernel = _KERNELS.get(key)
            if kernel is None:
                return self._compile(
                    key, stream, call.kernels.prepare, call.q, call.k, call.v, call.g, *pointers,
                    *map(self.tensor, OUTPUTS), self.tensor("dec"), begin, end, 0, call.H, call.HV, call.lower_bound,
                    call.scale, call.beta_scale, call.l2norm, call.sigmoid_beta, **call.kernels.prepare_options)
            head = []
            for index, tiles in enumerate(self.tiles):
                head += kernel.map(index, *tiles)
            head += map(address, pointers)
            head += self.maps(kernel, OUTPUTS, len(INPUTS))
            tail = (0, call.HV, call.HV // call.H, call.beta.stride(-2), call.beta.stride(-1), call.lower_bound, call.scale,
                    call.beta_scale, call.l2norm, call.sigmoid_beta)
            fixed = self.fixed["prepare"] = kernel, (*head, self.at("dec")), tail
        kernel, head, tail = fixed
        kernel.launch((end - begin) * call.HV, stream, (*head, begin, *tail))

    def walk(self, stream: int, window: tuple[int, int], segments: tuple[int, int, int], *, mid_in: str | None = None,
             mid_out: str | None = None, mid_stride: int = 0, mid_shift: int = 0) -> None:
        """The state over the rows of a window, for segments (first, how many, chunks of each)."""
        call = self.call
        form = "walk", mid_in is not None, mid_out is not None
        fixed = self.fixed.get(form)
        if fixed is None:
            states = (call.h_in, call.read_slots, call.has_initial, call.h_out, call.write_slots)
            checkpoints = (call.ckpt_offsets, call.ckpt_slots, call.ckpt_pool)
            plain = (call.out, call.cu_seqlens, call.chunk_offsets)
            strides = [*call.out.stride()[-3:-1], *_strides(call.h_in, 2), *_strides(call.h_out, 2),
                       *_strides(call.ckpt_pool, 2)]
            key = (*self.key, form, call.kernels.state, *call.kernels.state_options.values(),
                   *map(kind, (*plain, *states, *checkpoints)), *[stride & 15 == 0 for stride in strides])
            kernel = _KERNELS.get(key)
            if kernel is None:
                return self._compile(
                    key, stream, call.kernels.state, *map(self.tensor, WALKED), self.tensor("dec"), *plain, *window, 0,
                    *segments, *states, self.tensor(mid_in), self.tensor(mid_out, mid_shift), mid_stride, *checkpoints,
                    call.pad_slot, call.N, call.HV, call.v_first, **call.kernels.state_options)
            head = (*self.maps(kernel, WALKED), self.at("dec"), *map(address, plain))
            count = 0 if call.ckpt_offsets is None else call.ckpt_offsets.shape[1]
            tail = (*map(address, checkpoints), call.pad_slot, call.N, call.HV, *strides,
                    *_strides(call.read_slots, 1), *_strides(call.write_slots, 1), *_strides(call.ckpt_offsets, 1),
                    *_strides(call.ckpt_slots, 1), count, call.v_first)
            tiles = V // kernel.box(WALKED.index("u"))
            fixed = self.fixed[form] = kernel, head, tuple(map(address, states)), tail, tiles
        kernel, head, states, tail, tiles = fixed
        first, how_many, seg_chunks = segments
        out = self.at(mid_out)
        if mid_shift:
            out += mid_shift * call.HV * V * K * 4
        kernel.launch(tiles * call.HV * call.N * how_many, stream,
                      (*head, *window, 0, first, seg_chunks, *states, self.at(mid_in), out, mid_stride, *tail))

    def _segments_choice(self):
        call = self.call
        key = ("choice", self.device, call.kernels.segments_spec, call.N * call.HV, self.cut.segments)
        found = _KERNELS.get(key)
        if found is None:
            problem = Problem(self.rows * C, call.N, call.HV)
            choice = dispatch.pick(call.kernels.segments_spec, problem, devices.of_index(self.device))
            options = {"num_warps": choice.schedule.warps, "num_stages": choice.schedule.stages}
            found = _KERNELS[key] = choice.module, options
        return found

    def map_segments(self, stream: int, first: int, how_many: int) -> None:
        """The maps of segments [first, first + how_many)."""
        call, cut = self.call, self.cut
        module, options = self._segments_choice()
        key = (*self.key, "map", module, kind(call.chunk_offsets))
        kernel = _KERNELS.get(key)
        sizes = (first, cut.seg_chunks, cut.segments, call.N, call.HV)
        if kernel is None:
            return self._compile(
                key, stream, module.launch_map, *map(self.tensor, MAPPED), self.tensor("dec"), call.chunk_offsets,
                self.tensor("off"), self.tensor("p_hi"), self.tensor("p_lo"), 0, first, how_many, *sizes[1:], **options)
        programs = (V + K) // kernel.box(MAPPED.index("u")) * call.HV * call.N * how_many
        made = (self.at("off"), self.at("p_hi"), self.at("p_lo"))
        kernel.launch(programs, stream, (
            *self.maps(kernel, MAPPED), self.at("dec"), address(call.chunk_offsets), *made, 0, *sizes))

    def combine(self, stream: int) -> None:
        """The states at the starts of the segments, one after another."""
        call, cut = self.call, self.cut
        module, _ = self._segments_choice()
        key = (*self.key, "combine", module, kind(call.chunk_offsets))
        kernel = _KERNELS.get(key)
        if kernel is None:
            return self._compile(
                key, stream, module.launch_combine, self.tensor("hs"), self.tensor("off"), self.tensor("p_hi"),
                self.tensor("p_lo"), call.chunk_offsets, cut.seg_chunks, cut.segments, call.N, call.HV)
        kernel.launch(V // 64 * call.HV * call.N, stream, (
            self.at("hs"), self.at("off"), self.at("p_hi"), self.at("p_lo"), address(call.chunk_offsets),
            cut.seg_chunks, cut.segments, call.HV))


def _strides(x: torch.Tensor | None, axes: int) -> tuple[int, ...]:
    return (0,) * axes if x is None else x.stride()[:axes]

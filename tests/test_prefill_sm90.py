"""The sm90 launch path without a GPU: the cut of a batch, the order of its steps, and fast launches as the plain ones."""

import inspect
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kdagen import loader
from kdagen.ops import _lanes, _tensor_maps, prefill_plan, prefill_sm90
from kdagen.ops import _prefill_cut as cutting
from kdagen.spec import Schedule, Spec, Variant

SIZES = dict(chunk=64, k=128, v=128, dtype="bf16")


@pytest.mark.parametrize("rows, longest, N, HV, form", [
    (128, 128, 1, 96, "windows"), (128, 128, 1, 32, "segments"), (512, 512, 1, 32, "segments"),
    (128, 128, 1, 16, "segments"),
    (128, 128, 2, 16, "serial"), (63, 63, 1, 24, "serial"),
    (128, 128, 1, 64, "serial"), (32, 32, 1, 32, "serial"),
    (31, 31, 1, 32, "serial"), (131, 48, 6, 32, "serial"), (128, 2, 64, 32, "serial"),
    (128, 128, 1, 12, "segments"), (32, 32, 1, 12, "serial"), (1024, 1024, 1, 8, "segments"), (1, 1, 1, 4, "serial"),
    (512, 0, 1, 32, "serial"), (128, 0, 1, 4, "serial"), (0, 0, 1, 4, "serial"),
])
def test_plan(rows, longest, N, HV, form):
    cut = prefill_sm90.plan(rows, longest, N, HV)
    assert cut.form == form
    if form == "windows" or cut.cuts:
        assert N == 1 and cut.cuts[0] == 0 and cut.cuts[-1] == rows and list(cut.cuts) == sorted(set(cut.cuts))
    if form == "segments":
        assert 1 <= cut.head < cut.segments
        assert (cut.segments - 1) * cut.seg_chunks < longest <= cut.segments * cut.seg_chunks, "a segment without chunks"


class Launcher:
    """As Triton 3.6's, around a C function that takes tensor maps, or takes none."""

    launch_cooperative_grid = launch_pdl = False
    global_scratch_size = profile_scratch_size = 0

    def __init__(self, launcher, wrapped):
        tensordesc_indices = {0}
        self.launch = (lambda *args: launcher(*args[tensordesc_indices.pop():])) if wrapped else launcher


Launcher.__name__ = "CudaLauncher"


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_drivers_function_is_found_behind_a_launcher(wrapped):
    seen = []
    types = {"q": "tensordesc<bf16[64, 32],Layout(x=[])>", "n": "i32"}
    compiled = SimpleNamespace(
        run=Launcher(partial(lambda *args: seen.append(args)), wrapped), function=7, packed_metadata=(4, 1, 99),
        metadata=SimpleNamespace(tensordesc_meta=[], num_stages=1), src=SimpleNamespace(signature=types))
    kernel = _tensor_maps.MapKernel.of(compiled)
    assert kernel.box(0) == 32
    launch, arguments = kernel.launch(5, 3, ("args",))
    assert not seen
    launch(*arguments)
    assert seen == [(5, 1, 1, 3, 7, False, False, None, None, (4, 1, 99), None, None, None, "args")]


def test_plan_of_a_batch_invariant_call_has_no_segments():
    forms = {prefill_sm90.plan(rows, rows, 1, HV, segments=False).form for rows in (20, 32, 128, 512) for HV in range(34)}
    assert forms == {"serial", "windows"}


def test_plan_never_has_an_empty_segment():
    for HV in range(1, 34):
        for longest in range(16, 2000, 7):
            cut = prefill_sm90.plan(longest, longest, 1, HV)
            if cut.form != "segments":
                continue
            assert 1 <= cut.head < cut.segments and list(cut.cuts) == sorted(set(cut.cuts))
            assert (cut.segments - 1) * cut.seg_chunks < longest <= cut.segments * cut.seg_chunks, (HV, longest)


class Device:
    """Carries out steps as a device might: on each stream in order, and after what its events say, no more.

    A state is the rows that went into it, in order. What a step reads must be written by a step that is surely over.
    """

    def __init__(self, cut, rows):
        self.cut, self.rows, self.outputs = cut, rows, {}
        self.known = {}     # stream -> the steps that are over before its next one begins
        self.events, self.launched = {}, set()
        self.written = {}   # buffer entry -> (step, value)

    def read(self, on, name):
        step, value = self.written[name]
        assert step in self.known[on], f"{name} is read before it is surely written"
        return value

    def write(self, on, number, name, value):
        if name in self.written:
            assert self.written[name][0] in self.known[on], f"{name} is written twice at once"
        self.written[name] = number, value

    def run(self):
        self.known["main"] = set()
        for number, step in enumerate(cutting.steps(self.cut, self.rows)):
            on = step.on
            if isinstance(step, cutting.Wait):
                self.known.setdefault(on, set()).update(self.events[step.event])
                continue
            mine = self.known[on]  # a KeyError: the stream has not waited for the caller's
            if isinstance(step, cutting.Record):
                self.events[step.event] = set(mine)
                continue
            mine.add(number)
            self.launched.add(number)
            getattr(self, type(step).__name__)(step, number)
        assert self.launched <= self.known["main"], "something may still run when the caller goes on"
        return self.outputs

    def Prepare(self, step, number):
        for row in range(step.begin, step.end):
            self.write(step.on, number, ("row", row), row)

    def Walk(self, step, number):
        for segment in range(step.first, step.first + step.count):
            lo = max(segment * step.chunks, step.begin)
            hi = min((segment + 1) * step.chunks, self.rows, step.end)
            if lo >= hi:
                continue
            state = () if lo == 0 else self.read(step.on, ("hs", step.read + segment))
            for row in range(lo, hi):
                assert row not in self.outputs
                self.outputs[row] = state
                state = (*state, self.read(step.on, ("row", row)))
            if hi < self.rows and step.write is not None:
                self.write(step.on, number, ("hs", step.write + segment), state)
            if hi == self.rows:
                self.outputs["state"] = state

    def Maps(self, step, number):
        length = self.cut.seg_chunks
        for segment in range(step.first, step.first + step.count):
            rows = range(segment * length, (segment + 1) * length)
            assert rows.stop < self.rows, "a map that the kernel leaves out"
            self.write(step.on, number, ("map", segment), tuple(self.read(step.on, ("row", row)) for row in rows))

    def Combine(self, step, number):
        shift, chunks = step.first - 1, -(-self.rows // self.cut.seg_chunks)
        last = min(self.cut.segments - shift, chunks) - 1
        state = self.read(step.on, ("hs", 1 + shift))
        for segment in range(1 + shift, last + shift):
            state = (*state, *self.read(step.on, ("map", segment)))
            self.write(step.on, number, ("hs", segment + 1), state)


CUTS = [
    (cutting.Plan("serial"), 7), (cutting.Plan("windows", (0, 7)), 7), (cutting.Plan("windows", (0, 4, 7)), 7),
    (cutting.Plan("windows", (0, 1, 2, 3, 4, 5)), 5), (cutting.Plan("segments", (), 2, 4), 7),
    (cutting.Plan("segments", (), 3, 3), 7), (cutting.Plan("segments", (), 7, 1), 7),
    (cutting.Plan("segments", (), 7, 1, 3), 7), (cutting.Plan("segments", (0, 3, 7), 7, 1, 3), 7),
    (cutting.Plan("segments", (0, 2, 4, 5, 7), 7, 1, 3), 7), (cutting.Plan("segments", (0, 1, 2, 3, 6), 2, 3), 6),
    (cutting.Plan("segments", (0, 5, 9, 20), 5, 4, 1), 20), (cutting.Plan("segments", (0, 5, 9, 19), 5, 4, 4), 19),
    (cutting.Plan("segments", (0, 6, 12), 6, 2, 5), 12),
]


@pytest.mark.parametrize("cut, rows", CUTS)
def test_steps_read_only_what_is_surely_written(cut, rows):
    outputs = Device(cut, rows).run()
    assert outputs.pop("state") == tuple(range(rows))
    assert outputs == {row: tuple(range(row)) for row in range(rows)}, "each row's incoming state: all rows before it"


@pytest.mark.parametrize("cut, rows", CUTS)
def test_no_event_can_be_left_out(cut, rows, monkeypatch):
    made = cutting.steps(cut, rows)
    for wait in (step for step in made if isinstance(step, cutting.Wait)):
        fewer = tuple(step for step in made if step is not wait)
        monkeypatch.setattr(cutting, "steps", lambda cut, rows, fewer=fewer: fewer)
        with pytest.raises((AssertionError, KeyError)):
            Device(cut, rows).run()
    waited = {step.event for step in made if isinstance(step, cutting.Wait)}
    assert {step.event for step in made if isinstance(step, cutting.Record)} == waited == set(range(len(waited)))


def test_every_plan_is_carried_out_in_order():
    for HV in (1, 2, 4, 5, 8, 12, 16, 24, 32, 96):
        for rows in (16, 20, 31, 32, 45, 64, 128, 131, 256, 512, 1000):
            cut = prefill_sm90.plan(rows, rows, 1, HV)
            assert Device(cut, rows).run()["state"] == tuple(range(rows)), cut


def test_batch_invariant_calls_have_no_segments():
    assert prefill_sm90.plan(128, 128, 1, 4, segments=False).form == "serial"


def test_tiles_that_a_tensor_map_describes():
    x = torch.zeros(2, 6, 4, 128, dtype=torch.bfloat16)
    assert _tensor_maps.token_tiles(x)[1:] == (12, 512, 512)
    wide = torch.zeros(1, 6, 3 * 512, dtype=torch.bfloat16)
    assert _tensor_maps.token_tiles(wide[..., 512:1024].unflatten(-1, (4, 128)))[1:] == (6, 512, 1536)
    assert _tensor_maps.token_tiles(x[:, :4]) is None, "a batch stride that is not T token strides"
    assert _tensor_maps.token_tiles(x.transpose(1, 2)) is None
    assert _tensor_maps.token_tiles(torch.zeros(1, 6, 516, dtype=torch.bfloat16)[..., :512].unflatten(-1, (4, 128))) is None
    assert _tensor_maps.token_tiles(wide[..., 4:516].unflatten(-1, (4, 128))) is None, "an address off 16 bytes"


class Recorder:
    """Stands for a jit kernel: binds the arguments as Triton would, and answers with something like a compiled kernel."""

    def __init__(self, kernel, seen):
        self.names, self.seen = list(inspect.signature(kernel.fn).parameters), seen

    def __getitem__(self, grid):
        def launch(*args, num_warps, num_stages):
            assert len(args) == len(self.names), f"{len(args)} arguments for {self.names}"
            self.seen.append((grid[0], [part for arg in args for part in self.expanded(arg)]))
            boxes = {n: f"tensordesc<bf16[64, {a.block_shape[-1]}]>" if hasattr(a, "block_shape") else "i32"
                     for n, a in zip(self.names, args)}
            return SimpleNamespace(
                src=SimpleNamespace(signature=boxes),
                metadata=SimpleNamespace(tensordesc_meta=[None] * 16, num_stages=num_stages),
                raw=lambda *a: self.seen.append((a[0], list(a[4:]))))

        return launch

    @staticmethod
    def expanded(arg):
        if hasattr(arg, "block_shape"):
            return [arg.base.data_ptr(), *arg.shape, *arg.strides]
        return [arg.data_ptr() if isinstance(arg, torch.Tensor) else 0 if arg is None else arg]


class Lanes(_lanes.Lanes):
    """Streams and events that do nothing; a graph calls its functions again."""

    def graph(self, bind):
        functions = bind(self)
        return SimpleNamespace(replay=lambda: [function(*arguments) for function, arguments in functions])

    def stream(self, name):
        return SimpleNamespace(cuda_stream=0, wait_event=lambda event: None)

    def event(self, index):
        return SimpleNamespace(record=lambda stream: None)

    def record(self, index, stream):
        return (lambda: None), ()

    wait = record


@pytest.fixture
def recorded(monkeypatch):
    """The sm90 modules with recorders for kernels; streams, maps and the driver's launcher replaced by nothing."""
    from triton.backends.nvidia import driver

    seen = []
    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda tiles, meta: [tiles.base, *tiles.shape, *tiles.strides])
    monkeypatch.setattr(_tensor_maps, "_raw_launcher", lambda compiled: (compiled.raw, ()))
    lane = Lanes(0)
    monkeypatch.setattr(prefill_sm90, "lanes", lambda device: lane)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(prefill_sm90, "_KERNELS", {})
    monkeypatch.setattr(prefill_sm90, "_LAYOUTS", {})

    def module(family, schedule):
        found = loader.load(Variant(Spec.make(family, **SIZES), schedule.source_key))
        for name in ("prepare_kernel", "state_kernel", "map_kernel", "combine_kernel"):
            kernel = getattr(found, name, None)
            if kernel is not None:
                monkeypatch.setattr(found, name, Recorder(getattr(kernel, "jit", kernel), seen))
        return found

    segments = module("prefill_segments", Schedule.make(form="tma", bm=64, warps=4, stages=3))
    choice = segments, {"num_warps": 4, "num_stages": 3}
    monkeypatch.setattr(prefill_sm90.Layout, "segments", lambda self: choice)
    prepare = module("prefill_prepare", Schedule.make(form="gluon", warps=4, stages=1))
    state = module("prefill_state", Schedule.make(form="gluon", bv=64, warps=4, stages=3))
    kernels = prefill_plan.Kernels(*[None] * len(prefill_plan.Kernels._fields))._replace(
        prepare=prepare.launch, prepare_options={"num_warps": 4, "num_stages": 1}, prepare_module=prepare,
        state=state.launch, state_options={"num_warps": 4, "num_stages": 3}, row_bytes=74240)
    return seen, kernels


@pytest.fixture
def call(recorded):
    """A small call, without pools."""
    kernels = recorded[1]
    T, H, HV = 300, 1, 2
    bf16 = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)
    i32 = lambda *shape: torch.zeros(shape, dtype=torch.int32)
    pool = torch.zeros(5, HV, 128, 128)
    return prefill_plan.Call(
        q=bf16(1, T, H, 128), k=bf16(1, T, H, 128), v=bf16(1, T, HV, 128), g=bf16(1, T, HV, 128), beta=bf16(1, T, HV),
        A_log=torch.zeros(HV), dt_bias=None, lower_bound=-5.0, scale=0.1, beta_scale=2.0, l2norm=True, sigmoid_beta=True,
        out=bf16(1, T, HV, 128), cu_seqlens=i32(2), chunk_offsets=i32(8).long(), chunk_rows=i32(5, 4), longest=5,
        h_in=pool, read_slots=None, has_initial=None, h_out=pool, write_slots=None, ckpt_offsets=None, ckpt_slots=None,
        ckpt_pool=None, pad_slot=-1, N=1, H=H, HV=HV, v_first=True, batch_invariant=False, max_workspace=1 << 30,
        kernels=kernels)


FORMS = {
    "serial": (prefill_sm90.Plan("serial"), 2), "windows": (prefill_sm90.Plan("windows", (0, 2, 4, 5)), 6),
    "segments": (prefill_sm90.Plan("segments", (), 3, 2), 5), "pool": (prefill_sm90.Plan("serial"), 2),
    "both": (prefill_sm90.Plan("segments", (0, 2, 4, 5), 5, 1, 2), 7),
}


@pytest.mark.parametrize("form", FORMS)
def test_fast_launches_pass_what_plain_launches_pass(recorded, call, form, monkeypatch):
    seen, _ = recorded
    cut, launches = FORMS[form]
    if form == "pool":
        slots = torch.zeros(4, 2, dtype=torch.int32)
        call = call._replace(read_slots=slots[:, 1], has_initial=torch.ones(1, dtype=torch.bool), write_slots=slots[:, 0],
                             ckpt_offsets=slots, ckpt_slots=slots, ckpt_pool=call.h_in)
    prefix = torch.zeros(4096, dtype=torch.float16)
    memory = torch.empty(1 << 24, dtype=torch.uint8)
    monkeypatch.setattr(torch, "empty", lambda *a, **o: memory)  # all calls get the same workspace
    for _ in range(_lanes.GRAPH_AT + 2):  # compiles; binds; is bound already, until it is a graph
        assert prefill_sm90.run(call, lambda module, like: prefix, cut)
    assert len(seen) == (_lanes.GRAPH_AT + 2) * launches
    plain, *others = (seen[i * launches:(i + 1) * launches] for i in range(_lanes.GRAPH_AT + 2))
    for number in range(launches):
        assert all(plain[number] == other[number] for other in others), f"launch {number}"
    assert [bound.graph is not None for bound in prefill_sm90.lanes(0).calls.values()] == [True]


def test_bound_calls_follow_the_addresses(recorded, call):
    seen, _ = recorded
    prefix = torch.zeros(4096, dtype=torch.float16)
    for _ in range(3):
        prefill_sm90.run(call, lambda module, like: prefix)
    del seen[:]
    other = call._replace(out=torch.zeros_like(call.out), h_out=torch.zeros_like(call.h_out))
    for one in (other, call, other):
        prefill_sm90.run(one, lambda module, like: prefix)
        arguments = [argument for _, arguments in seen for argument in arguments]
        assert one.out.data_ptr() in arguments and one.h_out.data_ptr() in arguments
        del seen[:]


def test_a_profilers_hook_gets_every_launch(recorded, call, monkeypatch):
    seen, kernels = recorded
    plain = []
    counted = kernels._replace(state=lambda *a, **o: plain.append(a) or kernels.state(*a, **o))
    prefix = torch.zeros(4096, dtype=torch.float16)
    go = partial(prefill_sm90.run, call._replace(kernels=counted), lambda module, like: prefix, prefill_sm90.Plan("serial"))
    go(), go()
    assert len(plain) == 1
    hook = SimpleNamespace(calls=[print])
    monkeypatch.setattr(prefill_sm90, "knobs", SimpleNamespace(
        runtime=SimpleNamespace(launch_enter_hook=hook, launch_exit_hook=SimpleNamespace(calls=[]))))
    go(), go()
    assert len(plain) == 3 and len(seen) == 8


def test_refuses_what_it_cannot_describe(recorded):
    seen, kernels = recorded
    x = torch.zeros(1, 64, 1, 129, dtype=torch.bfloat16)[..., :128]
    rows = torch.zeros(1, 4, dtype=torch.int32)
    call = prefill_plan.Call(*[None] * len(prefill_plan.Call._fields))._replace(
        q=x, k=x, v=x, g=x, beta=x, out=x, cu_seqlens=rows, chunk_offsets=rows, chunk_rows=rows, HV=1, max_workspace=1 << 30,
        kernels=kernels)
    assert None in [_tensor_maps.token_tiles(x)]
    assert not prefill_sm90.run(call, None)
    y = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16)
    assert not prefill_sm90.run(call._replace(q=y, k=y, v=y, g=y, max_workspace=10), None)
    assert not prefill_sm90.run(call._replace(q=y, k=y, v=y, g=y.float()), None)
    assert not seen


class Event:
    """An event that happens when told."""

    made = []

    def __init__(self):
        self.over, self.waits = False, 0
        self.made.append(self)

    def record(self):
        pass

    def query(self):
        return self.over

    def wait(self):
        self.waits += 1


def test_constants_are_waited_for_until_the_device_has_them(monkeypatch):
    capturing, calls = [False], []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "made", [])
    like, constants = SimpleNamespace(is_cuda=True, device=torch.device("cpu")), _lanes.Constants(2)
    get = partial(constants.get, like=like, make=lambda: calls.append(0) or (len(calls),))
    assert get("a") == (1,) and get("a") == (1,) and Event.made[0].waits == 1
    capturing[0] = True
    assert get("a") == (2,), "a capture cannot wait for it"
    assert get("b") == (3,), "nor keep what is its own"
    assert Event.made[0].waits == 1 and len(Event.made) == 1
    capturing[0] = False
    Event.made[0].over = True
    constants.settle()
    capturing[0] = True
    assert get("a") == (1,)
    capturing[0] = False
    assert get("b") == (4,) and get("c") == (5,) and get("c") == (6,), "past the limit all are new"
    assert get("a") == (1,) and Event.made[0].waits == 1


def test_constants_without_a_gpu():
    constants = _lanes.Constants(1)
    like = torch.zeros(1)
    first = constants.get("a", like, lambda: (torch.ones(2),))
    assert constants.get("a", like, lambda: (torch.zeros(2),)) is first

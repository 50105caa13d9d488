"""The sm90 launch path without a GPU: the cut of a batch, and that a fast launch passes what the plain launch passes."""

import inspect
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kdagen import loader
from kdagen.ops import _tensor_maps, prefill_plan, prefill_sm90
from kdagen.spec import Schedule, Spec, Variant

SIZES = dict(chunk=64, k=128, v=128, dtype="bf16")


@pytest.mark.parametrize("rows, longest, N, HV, form", [
    (128, 128, 1, 96, "windows"), (128, 128, 1, 32, "windows"), (512, 512, 1, 32, "windows"),
    (128, 128, 1, 64, "serial"), (32, 32, 1, 32, "windows"),
    (31, 31, 1, 32, "serial"), (131, 48, 6, 32, "serial"), (128, 2, 64, 32, "serial"),
    (128, 128, 1, 12, "segments"), (32, 32, 1, 12, "segments"), (1024, 1024, 1, 8, "segments"), (1, 1, 1, 4, "serial"),
    (512, 0, 1, 32, "serial"), (128, 0, 1, 4, "serial"), (0, 0, 1, 4, "serial"),
])
def test_plan(rows, longest, N, HV, form):
    cut = prefill_sm90.plan(rows, longest, N, HV)
    assert cut.form == form
    if form == "windows":
        assert cut.cuts[0] == 0 and cut.cuts[-1] == rows and list(cut.cuts) == sorted(set(cut.cuts))
    if form == "segments":
        assert cut.segments >= 2
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
    kernel.launch(5, 3, ("args",))
    assert seen == [(5, 1, 1, 3, 7, False, False, None, None, (4, 1, 99), None, None, None, "args")]


def test_plan_never_has_an_empty_segment():
    for HV in range(1, 13):
        for longest in range(20, 2000, 7):
            cut = prefill_sm90.plan(longest, longest, 1, HV)
            assert (cut.segments - 1) * cut.seg_chunks < longest <= cut.segments * cut.seg_chunks, (HV, longest)


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
        return [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg]


@pytest.fixture
def recorded(monkeypatch):
    """The sm90 modules with recorders for kernels; streams, maps and the driver's launcher replaced by nothing."""
    from triton.backends.nvidia import driver

    seen = []
    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda tiles, meta: [tiles.base, *tiles.shape, *tiles.strides])
    monkeypatch.setattr(_tensor_maps, "_raw_launcher", lambda compiled: (compiled.raw, ()))
    stream = SimpleNamespace(cuda_stream=0, wait_event=lambda event: None)
    lane = SimpleNamespace(side=stream, high=stream, events=[SimpleNamespace(record=lambda s: None)] * 16)
    monkeypatch.setattr(prefill_sm90, "lanes", lambda device: lane)

    def compile_only(self, key, stream, launch, *args, **options):
        prefill_sm90._KERNELS[key] = _tensor_maps.MapKernel.of(launch(*args, **options))

    monkeypatch.setattr(prefill_sm90.Layout, "_compile", compile_only)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
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
    monkeypatch.setattr(prefill_sm90.Layout, "_segments_choice", lambda self: choice)
    prepare = module("prefill_prepare", Schedule.make(form="gluon", warps=4, stages=1))
    state = module("prefill_state", Schedule.make(form="tma", bv=64, warps=4, stages=3))
    kernels = prefill_plan.Kernels(*[None] * len(prefill_plan.Kernels._fields))._replace(
        prepare=prepare.launch, prepare_options={"num_warps": 4, "num_stages": 1}, prepare_module=prepare,
        state=state.launch, state_options={"num_warps": 4, "num_stages": 3}, row_bytes=74240)
    return seen, kernels


@pytest.mark.parametrize("form", ["serial", "windows", "segments", "pool"])
def test_fast_launches_pass_what_plain_launches_pass(recorded, form, monkeypatch):
    seen, kernels = recorded
    T, H, HV = 300, 1, 2
    bf16 = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)
    i32 = lambda *shape: torch.zeros(shape, dtype=torch.int32)
    pool, slots, pooled = torch.zeros(5, HV, 128, 128), i32(4, 2), form == "pool"
    only = lambda x: x if pooled else None
    cuts = {"serial": prefill_sm90.Plan("serial"), "windows": prefill_sm90.Plan("windows", (0, 2, 4, 5)),
            "segments": prefill_sm90.Plan("segments", (), 3, 2), "pool": prefill_sm90.Plan("serial")}
    call = prefill_plan.Call(
        q=bf16(1, T, H, 128), k=bf16(1, T, H, 128), v=bf16(1, T, HV, 128), g=bf16(1, T, HV, 128), beta=bf16(1, T, HV),
        A_log=torch.zeros(HV), dt_bias=None, lower_bound=-5.0, scale=0.1, beta_scale=2.0, l2norm=True, sigmoid_beta=True,
        out=bf16(1, T, HV, 128), cu_seqlens=i32(2), chunk_offsets=i32(8).long(), chunk_rows=i32(5, 4), longest=5,
        h_in=pool, read_slots=only(slots[:, 1]), has_initial=only(torch.ones(1, dtype=torch.bool)), h_out=pool,
        write_slots=only(slots[:, 0]), ckpt_offsets=only(slots), ckpt_slots=only(slots), ckpt_pool=only(pool), pad_slot=-1,
        N=1, H=H, HV=HV, v_first=True, batch_invariant=False, max_workspace=1 << 30, kernels=kernels)
    prefix = torch.zeros(4096, dtype=torch.float16)
    memory = torch.empty(1 << 24, dtype=torch.uint8)
    monkeypatch.setattr(torch, "empty", lambda *a, **o: memory)  # both calls get the same workspace
    assert prefill_sm90.run(call, lambda module, like: prefix, cuts[form])
    prefill_sm90.run(call, lambda module, like: prefix, cuts[form])
    half = len(seen) // 2
    assert half == {"serial": 2, "windows": 6, "segments": 5, "pool": 2}[form]
    assert [programs for programs, _ in seen[:half]] == [programs for programs, _ in seen[half:]]
    for number, ((_, plain), (_, fast)) in enumerate(zip(seen[:half], seen[half:])):
        assert plain == fast, f"launch {number}"


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

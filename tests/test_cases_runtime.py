"""Compiler, tuning, distribution: registered ops, the device of a launch, dispatch that never tunes, rows with evidence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import cases
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

import kdagen
from inputs import cu_seqlens, kda
from kdagen import families, files, render, table
from kdagen.ops import _common, conv, decode, decode_step, gate, metadata, norm, prefill, staging
from kdagen.spec import Variant
from kdagen.tuning import cases as tuning_cases

# --- torch.compile --------------------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """The names of the project's ops that went through the dispatcher."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "kdagen":
            self.names.add(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", cases.CALLS)
def test_each_public_op_is_a_registered_op_with_a_fake(name, rng, cpu_path, monkeypatch):
    """What torch.compile would see of it is one op of the library, with a fake, whose results are the eager ones."""
    op, make = cases.CALLS[name]
    seed = int(torch.randint(2**31, (), generator=rng))
    eager, traced = (make(torch.Generator().manual_seed(seed)) for _ in range(2))
    op(**eager)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling()
    with Seen() as seen, torch.no_grad():
        op(**traced)
    assert len(seen.names - {"kdagen::step_tables"}) == 1 or seen.names == {"kdagen::step_tables"}, seen.names
    for found in seen.names:
        entry = torch._library.simple_registry.singleton.find(found.split(".")[0])
        assert entry.fake_impl.kernel is not None, found
    for key, tensor in cases.written(eager).items():
        torch.testing.assert_close(cases.written(traced)[key], tensor, rtol=0, atol=0, equal_nan=True)


def test_prefill_into_a_pool_and_decode_compile_into_one_graph(rng, cpu_path):
    """Pools and buffers changed in place inside the graph; states of their own and slots; the same bits as eager."""
    edges = cu_seqlens([18, 3])
    x, options = kda(rng, "bounded", T=21, H=1, HV=2, K=4, V=8, sequences=2)
    state, slots = x.pop("initial_state"), torch.tensor([3, 1])
    token = {name: t[:, :2].transpose(0, 1).contiguous() for name, t in x.items()}
    own = {name: t[:1] for name, t in token.items()}

    def step(pool, x, token):
        o, _ = kdagen.chunk_kda(**x, **options, cu_seqlens=edges, cu_seqlens_cpu=edges, state_pool=pool, read_slots=slots,
                                write_slots=slots, checkpoint_offsets=torch.tensor([[16], [0]]),
                                checkpoint_slots=torch.tensor([[0], [-1]]), chunk_size=16)
        p, _ = kdagen.fused_recurrent_kda(**token, **options, state_pool=pool, state_indices=slots)
        r, last = kdagen.fused_recurrent_kda(**own, **options, initial_state=pool[2:3].clone(), output_final_state=True)
        return o * 2, p, r, last + 1

    pools = [torch.randn(4, 2, 8, 4, generator=rng) for _ in range(1)]
    pools.append(pools[0].clone())
    pools[0][slots] = pools[1][slots] = state
    before = pools[0].clone()
    wanted = step(pools[0], x, token)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(pools[1], x, token)
    for a, b in zip(found, wanted):
        assert torch.equal(a, b)
    assert torch.equal(*pools) and not torch.equal(pools[0], before)


# --- the device of a launch -----------------------------------------------------------------------------------------------

MODULES = {"chunk_kda": prefill, "fused_recurrent_kda": decode, "causal_conv1d": conv, "causal_conv1d_update": conv,
           "kda_decode_step": decode_step, "kda_gate": gate, "gated_rmsnorm": norm, "stage_spec_decode_metadata": staging}


@pytest.mark.parametrize("name", [name for name in cases.CALLS if name.split(",")[0] in MODULES])
def test_each_op_launches_inside_the_guard_of_its_tensors(name, rng, monkeypatch):
    """Every kernel of the op starts while the guard of one of the call's tensors is open (the tables: the next test)."""
    op, make = cases.CALLS[name]
    call, held, launches = make(rng), [], []

    @contextmanager
    def guard(tensor):
        held.append(tensor)
        yield
        held.pop()

    run = interpreter.GridExecutor.__call__
    if name.startswith("chunk_kda"):  # its tables are made beforehand, so that only its own kernels count
        call["tables"] = kdagen.step_tables(call["cu_seqlens"], call["cu_seqlens"], chunk_size=16, rows=True)
    monkeypatch.setattr(MODULES[name.split(",")[0]], "on_device", guard)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__",
                        lambda self, *a, **k: (launches.append(list(held)), run(self, *a, **k))[1])
    op(**call)
    assert launches and all(launches), "a launch outside of the guard"
    assert all(guarded[0].device == torch.device("cpu") for guarded in launches)


@pytest.fixture
def two_devices(monkeypatch):
    """Device 0 is current; entering a guard is noted."""
    entered = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    return entered


def test_the_guard_goes_to_the_tensors_device(two_devices):
    on = lambda index: SimpleNamespace(is_cuda=True, get_device=lambda: index, device=f"cuda:{index}")
    for index, wanted in ((0, []), (1, ["cuda:1"])):
        two_devices.clear()
        with _common.on_device(on(index)):
            assert two_devices == wanted
    with _common.on_device(torch.zeros(1)):
        assert two_devices == ["cuda:1"], "nothing is entered for a CPU tensor"


def test_the_tables_are_written_on_the_device_of_the_boundaries(two_devices, monkeypatch):
    monkeypatch.setattr(metadata, "write", lambda boundaries, *arguments, **options: list(two_devices))
    on = lambda index: SimpleNamespace(get_device=lambda: index)
    assert metadata._write(on(1), 3, None, []) == [1]
    two_devices.clear()
    assert metadata._write(on(0), 3, None, []) == [] == metadata._write(on(-1), 3, None, [])


# --- tuning and distribution ----------------------------------------------------------------------------------------------

PICK = """
import json, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton"):
            raise ImportError(name)

sys.meta_path.insert(0, Block())
from kdagen import devices, dispatch, families
from kdagen.spec import Problem

found = []
for family in families.everyone():
    for spec in family.committed():
        for problem in (Problem(1, 1, 4), Problem(64, 64, 32), Problem(8192, 4, 12)):
            choice = dispatch.pick(spec, problem, devices.named("h200"))
            found.append([choice.variant.name, choice.schedule.warps, choice.schedule.stages, choice.how])
print(json.dumps([found, dispatch.digest(devices.named("h200")), sorted(m for m in sys.modules if "kdagen.tuning" in m)]))
"""


def picks(seed: str) -> list:
    environment = os.environ | {"PYTHONHASHSEED": seed}
    for name in ("KDAGEN_PIN", "KDAGEN_MODE"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, "-c", PICK], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_dispatch_cannot_tune_and_answers_alike_on_every_rank():
    """In processes with neither torch nor triton, so that nothing can be launched: the same choices, the same digest."""
    one, other = picks("1"), picks("2")
    assert one == other and len(one[0]) > 50
    assert one[2] == [], "dispatch reaches no module of the tuner"
    assert {how for *_, how in one[0]} >= {"default"}


def test_no_kernel_is_tuned_where_it_runs():
    """Neither the templates nor the ops know Triton's autotuner."""
    code = Path(_common.__file__).parent.parent
    sources = [*files.templates_dir().glob("*.j2"), *(code / "ops").glob("*.py"), *code.glob("*.py")]
    assert len(sources) > 30
    for path in sources:
        assert not re.search(r"triton\.(autotune|heuristics|testing)|do_bench", path.read_text()), path


def test_every_shipped_row_has_its_evidence():
    """Its error is a right kernel's, its repeats agreed to the bit, it is no slower than the default."""
    rows = [row for path in sorted((files.generated_dir() / "tuned").glob("*.jsonl")) for row in table.read(path)]
    assert rows
    for row in rows:
        case = tuning_cases.get(row.spec.family)
        assert 0 <= row.err <= max(case.tolerance(row.spec, name) for name in ("o", "y", "state")), row.variant
        assert row.repeat >= 20 and row.env["gpu"] and row.env["triton"], row.variant
        assert row.us <= row.default_us, row.variant  # equal: the default itself, which keeps a neighbour's row out


TABLES = ("step_tables", "stage_spec")  # as many rows as a batch has sequences or chunks


@pytest.mark.parametrize("name", [name for name in families.NAMES if name not in TABLES])
def test_base_offsets_are_64_bit_in_every_template(name):
    """Tensors of T * H * K > 2^31 elements, pools of many slots: the number of a program, token or slot is widened before
    it meets a stride. (That the products come out right: test_cases_memory.py.)"""
    family = families.get(name)
    for spec in list(family.committed())[:1]:
        for schedule in family.default_schedules(spec):
            text = render.render(Variant(spec, schedule.source_key)).text
            assert "tl.int64" in text or "gl.int64" in text or "ttgl.int64" in text, schedule

"""Every family's case runs its op under pinned schedules, agrees with its oracle, and notices a wrong kernel."""

import pytest
import torch

from kdagen import devices, dispatch, families
from kdagen.spec import Problem, Spec
from kdagen.tuning import cases, measure, space

SPECS = {
    "step_tables": Spec.make("step_tables", chunk=16, dtype="i32", schedules=1),
    "stage_spec": Spec.make("stage_spec", dtype="i32"),
    "conv_prefill": Spec.make("conv_prefill", dtype="fp32"),
    "conv_update": Spec.make("conv_update", dtype="fp16"),
    "gate": Spec.make("gate", chunk=16, k=32, dtype="fp32"),
    "rmsnorm": Spec.make("rmsnorm", v=32, dtype="fp32"),
    "recurrent": Spec.make("recurrent", k=16, v=32, dtype="fp32"),
    "decode_step": ("decode_step", dict(k=16, v=16, dtype="fp32")),
    "prefill_prepare": ("prefill_prepare", dict(chunk=16, k=32, v=16, dtype="fp32", gate="softplus")),
    "prefill_state": ("prefill_state", dict(chunk=16, k=16, v=16, dtype="fp32")),
    "prefill_segments": ("prefill_segments", dict(chunk=16, k=16, v=16, dtype="fp32")),
}
SIZES = {
    "step_tables": Problem(300, 7, 1), "stage_spec": Problem(9, 9, 1), "conv_prefill": Problem(40, 3, 96),
    "conv_update": Problem(12, 3, 96),
    "gate": Problem(32 * 5, 1, 1), "rmsnorm": Problem(37, 1, 1), "recurrent": Problem(6, 2, 1),
    "decode_step": Problem(2, 2, 2), "prefill_prepare": Problem(40, 2, 1), "prefill_state": Problem(40, 2, 1),
    "prefill_segments": Problem(16 * 17, 1, 1),
}
TUNABLE = cases.names()


def spec_of(name):
    made = SPECS[name]
    return made if isinstance(made, Spec) else Spec.make(made[0], **made[1])


def job(name, schedule, **more):
    spec = spec_of(name)
    variant = dispatch.Variant(spec, schedule.source_key).name
    return {"spec": spec.literal, "problem": list(SIZES[name]), "candidate": [variant, schedule.warps, schedule.stages],
            "seed": 5} | more


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(measure, "REPEATS", 1)
    measure._kept.clear()
    yield
    measure._kept.clear()


def test_every_family_has_a_case():
    assert sorted(families.NAMES) == sorted(TUNABLE)


@pytest.mark.parametrize("name", TUNABLE)
def test_schedules_pass_against_the_oracle(name):
    usable = [c.schedule for c in space.candidates(spec_of(name), devices.named("h200"), "3.6.0") if not c.refused
              and not c.schedule.form]
    assert usable, "the small Spec has at least its default"
    blocks = {schedule.source_key: schedule for schedule in usable}
    for schedule in [usable[0], list(blocks.values())[-1]]:
        found = measure.verify(job(name, schedule))
        assert found["repeat"] == 1
        assert 0 <= found["err"] <= max(cases.get(name).tolerance(spec_of(name), out) for out in ("o", "y", "state"))


@pytest.mark.parametrize("name", TUNABLE)
def test_a_wrong_or_unwritten_output_is_found(name, monkeypatch):
    case = cases.get(name)
    default = families.get(name).default(spec_of(name))
    run = case.run

    def changed(change):
        def wrapped(spec, inputs):
            outputs = dict(run(spec, inputs))
            last = list(outputs)[-1]
            outputs[last] = change(outputs[last].clone())
            return outputs
        return wrapped

    def one_element_off(x):
        x.view(-1)[0] += 1 if not x.is_floating_point() else 0.1 * x.norm() + 1
        return x

    def unwritten(x):
        x.view(-1)[-1] = float("nan") if x.is_floating_point() else 2**31 - 1
        return x

    for change in (one_element_off, unwritten):
        monkeypatch.setattr(case, "run", changed(change))
        with pytest.raises(measure.Wrong, match="relative error"):
            measure.verify(job(name, default))


def test_states_in_half_precision_are_a_spec_of_their_own(monkeypatch):
    spec = Spec.make("recurrent", k=16, v=16, dtype="fp16", half_state=True)
    monkeypatch.setitem(SPECS, "recurrent", spec)
    inputs = cases.get("recurrent").inputs(spec, SIZES["recurrent"], 1, torch.device("cpu"))
    assert inputs["state_pool"].dtype == torch.float16
    assert measure.verify(job("recurrent", families.get("recurrent").default(spec)))["err"] < 1e-3


@pytest.mark.parametrize("name", [name for name in TUNABLE if cases.get(name).in_place])
def test_in_place_inputs_are_left_alone_and_compared(name):
    case, spec = cases.get(name), spec_of(name)
    inputs = case.inputs(spec, SIZES[name], 3, torch.device("cpu"))
    before = {key: inputs[key].clone() for key in case.in_place}
    outputs = measure.run_on_copies(case, spec, inputs)
    for key in case.in_place:
        assert torch.equal(inputs[key], before[key]), "the sweep's own inputs changed"
        assert not torch.equal(outputs[key], before[key]), "the op wrote nothing"


@pytest.mark.parametrize("name", TUNABLE)
def test_inputs_are_random_and_seeded(name):
    case, spec = cases.get(name), spec_of(name)
    make = lambda seed: case.inputs(spec, SIZES[name], seed, torch.device("cpu"))
    one, again, other = make(1), make(1), make(2)
    tensors = [key for key, value in one.items() if isinstance(value, torch.Tensor)]
    assert all(torch.equal(one[key], again[key]) for key in tensors)
    assert any(not torch.equal(one[key], other[key]) for key in tensors)
    assert all(one[key].ne(0).any() for key in tensors)


@pytest.mark.parametrize("name", TUNABLE)
def test_serving_points_cover_the_shapes_once_a_bucket(name):
    for spec in families.get(name).committed():
        points = space.points_of(spec, cases.get(name).problems(spec))
        loads = [point.load for point in points]
        assert len(loads) == len(set(loads)) >= 1
        for point in points:
            assert cases.get(name).bytes_moved(spec, point.problem) > 0
            small = cases.get(name).checkable(spec, point.problem)
            assert small.tokens <= point.problem.tokens and small.seqs <= point.problem.seqs


def test_a_run_that_differs_from_the_first_is_found(monkeypatch):
    case, calls = cases.get("rmsnorm"), []
    run = case.run

    def drifting(spec, inputs):
        calls.append(1)
        y = run(spec, inputs)["y"]
        return {"y": y + (1e-7 if len(calls) == 4 else 0.0)}

    monkeypatch.setattr(measure, "REPEATS", 3)
    monkeypatch.setattr(case, "run", drifting)
    with pytest.raises(measure.Wrong, match="y of repeat 2 differs"):
        measure.verify(job("rmsnorm", families.get("rmsnorm").default(spec_of("rmsnorm"))))


def test_poisoned_memory_is_not_zero():
    with measure.poisoned():
        assert torch.empty(8).isnan().all()
        assert (torch.empty(8, dtype=torch.int32) == 2**31 - 1).all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("out, wanted, error", [
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), 0.0),
    (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0]), 4 / 3),
    (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 1.0]), float("inf")),
    (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32), 0.0),
    (torch.tensor([1, 3]), torch.tensor([1, 2]), float("inf")),
    (torch.zeros(2), torch.zeros(2), 0.0),
])
def test_difference(out, wanted, error):
    assert measure.difference(out, wanted) == pytest.approx(error)


def test_zero_of_another_sign_is_another_result():
    with pytest.raises(measure.Wrong):
        measure._same({"y": torch.zeros(2)}, {"y": -torch.zeros(2)}, "repeat 1")

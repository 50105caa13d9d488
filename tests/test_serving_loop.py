"""The continuous-batching loop on the CPU path: every request equals its sequence run alone, token by token."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kdagen.errors import ArgumentError
from kdagen.serving import KDAConfig, Request, reference
from kdagen.serving.loop import PROMPTS, make_engine, make_requests, run_demo, tolerance

pytestmark = pytest.mark.usefixtures("cpu_path")


def drain(engine, limit=400):
    seen = {"pure": 0, "mixed": 0, "prefill": 0, "decode": 0}
    while engine.busy and engine.steps < limit:
        metadata = engine.step()
        if metadata is not None:
            kind = ("mixed" if metadata.num_prefills else "pure") if metadata.num_spec_decodes else (
                "prefill" if metadata.num_prefills else "decode")
            seen[kind] += 1
    assert not engine.busy, f"not finished after {limit} steps"
    return seen


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_requests_served_together_equal_those_served_alone(k, gate, rng):
    config = KDAConfig(24, 2, 16, lower_bound=-5.0 if gate == "bounded" else None, gate_rank=8,
                       output_gate_rank=None if gate == "bounded" else 8)
    seed = int(torch.randint(2**31, (), generator=rng))
    engine = make_engine(config=config, num_spec=k, max_requests=3, max_tokens=24, seed=seed)
    requests = make_requests(prompts=(1, k + 1, k + 2, 16, 17, 50), new_tokens=(3, 8), gap=1, seed=seed)
    engine.add(*requests)
    seen = drain(engine)
    allowed = tolerance(engine.layer)
    for request in requests:
        assert len(request.tokens) == len(request.prompt) + request.new_tokens
        worst, _ = engine.verify(request)
        assert worst <= allowed, (request.name, worst)
    assert engine.cache.free_slots == engine.cache.slots - 1, "every slot came back"
    assert max(request.chunks for request in requests) > 1, "a prompt was cut"
    if k:
        assert seen["mixed"] and seen["pure"], seen
        assert any(request.kept < request.drafted for request in requests), "a draft was rejected"
    else:
        assert seen["prefill"] and seen["decode"], seen


def test_drafts_do_not_change_what_is_generated():
    """Speculation is an optimisation: the same tokens come out with and without it."""
    out = []
    for k in (0, 2):
        engine = make_engine(num_spec=k, max_requests=2, seed=5)
        requests = make_requests(prompts=(3, 20), new_tokens=(10, 11), seed=5)
        engine.add(*requests)
        drain(engine)
        out.append([request.tokens for request in requests])
    assert out[0] == out[1]


def test_kept_prefixes_are_reused():
    engine = make_engine(num_spec=1, max_requests=2, keep_prefixes=True, seed=7)
    prompt = make_requests(prompts=(40,), seed=7)[0].prompt
    first, second = Request("first", prompt, 3), Request("second", [*prompt[:36], 0, 1], 3, arrival=6)
    engine.add(first, second)
    drain(engine)
    assert first.reused == 0 and second.reused == 32  # the last boundary of 16-token chunks inside the shared part
    for request in (first, second):
        assert engine.verify(request)[0] <= tolerance(engine.layer)


def test_an_empty_prompt_is_refused():
    engine = make_engine()
    with pytest.raises(ArgumentError, match=r"prompt: got no tokens \(void\), expected a prompt of at least one token"):
        engine.add(Request("void", [], 3))
    assert not engine.busy


def test_a_missing_output_is_not_overlooked():
    engine = make_engine(num_spec=0, max_requests=1, seed=1)
    request, = make_requests(prompts=(5,), new_tokens=(3, 4), seed=1)
    engine.add(request)
    drain(engine)
    assert engine.verify(request)[0] <= tolerance(engine.layer)
    request.outputs[3] = request.outputs[3] * 1.001
    assert engine.verify(request)[0] > tolerance(engine.layer)
    del request.outputs[3]
    assert engine.verify(request)[0] == float("inf")


def test_the_demo_reports_each_request_and_its_progress():
    calls = []
    rows = run_demo(lambda done, total: calls.append((done, total)), device="cpu")
    assert [row["prompt"] for row in rows[:-1]] == list(PROMPTS)
    assert all(row["agrees"] for row in rows) and rows[-1]["kept"] > 0
    assert rows[-1]["generated"] == sum(row["generated"] for row in rows[:-1])
    assert calls[-1][0] == calls[-1][1] and [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_the_documented_example_runs():
    text = (Path(__file__).parent.parent / "docs" / "serving.md").read_text()
    scope: dict = {}
    exec(re.search(r"^```python\n(.*?)^```", text, re.M | re.S).group(1), scope)
    layer, device = scope["layer"], scope["device"]
    want = reference.forward(layer, scope["hidden"][:70])
    error = (scope["prompt_out"][:70].double().cpu() - want).norm() / want.norm()
    assert error <= (1e-5 if device == "cpu" else 2e-2)
    assert scope["token_out"].shape == (2, layer.config.hidden)

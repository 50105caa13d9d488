"""What all tests share: the interpreter where there is no GPU, a fresh seed a run, a cache folder of one's own."""

from __future__ import annotations

import os
import secrets

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # must be set before triton is imported

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # a worker a core: more threads would wait for each other

SEED = int(os.environ.get("KDAGEN_TEST_SEED") or secrets.randbits(31))


def pytest_report_header() -> str:
    return f"kdagen: inputs from KDAGEN_TEST_SEED={SEED}, {'GPU' if HAS_GPU else 'no GPU'}"


def pytest_collection_modifyitems(items) -> None:
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Variants rendered on demand go to a folder of this session (subprocesses of a test inherit it)."""
    with pytest.MonkeyPatch.context() as patch:
        if "KDAGEN_CACHE" not in os.environ:
            patch.setenv("KDAGEN_CACHE", str(tmp_path_factory.mktemp("kdagen-cache")))
        yield


def _seed(request) -> int:
    """A seed of the run and the test's own name, so that tests do not depend on each other's order."""
    name = sum((i + 1) * ord(c) for i, c in enumerate(request.node.nodeid))
    return (SEED + name) % 2**31


@pytest.fixture
def rng(request) -> torch.Generator:
    """CPU generator with a seed fresh in each run, printed when the test fails (rerun with KDAGEN_TEST_SEED)."""
    return torch.Generator().manual_seed(_seed(request))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections.append(("kdagen", f"inputs: rerun with KDAGEN_TEST_SEED={SEED}"))
    return report


@pytest.fixture
def cpu_path(monkeypatch):
    """Turns the interpreter off: ops on CPU tensors take their CPU path."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")

"""Scratch and constants that outlive a call: where they are allocated, and blocks of counters for captures without end.

CUDA is played by the CPU: streams are numbers, and a memory pool has, as torch says, the allocations of one thread.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from kdagen.ops import _lanes, _scratch
from kdagen.ops._lasting import lasting

DEVICE = SimpleNamespace(type="cuda", index=0)
LIKE = SimpleNamespace(is_cuda=True, device=DEVICE)


@pytest.fixture
def cuda(monkeypatch):
    """The current stream, the number of the capture that it is in, and the sizes allocated from this thread's pool."""
    state, me = SimpleNamespace(stream=7, capture=None, pool=[]), threading.get_ident()
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, query=lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state.stream, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: state.capture is not None, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capture is not None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state.stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    for name, plain in (("zeros", torch.zeros), ("empty", torch.empty)):
        def allocate(size, plain=plain, dtype=torch.float32, device=None):
            if threading.get_ident() == me:
                state.pool.append(size)
            return plain(size, dtype=dtype)

        monkeypatch.setattr(torch, name, allocate)
    monkeypatch.setattr(_scratch, "_capture_number", lambda stream: state.capture)
    monkeypatch.setattr(_scratch, "BLOCK", 8 * _scratch.LINE)
    for name in ("_blocks", "_streams", "_captures", "_low"):
        monkeypatch.setattr(_scratch, name, {})
    return state


def step(counters=32):
    return _scratch.scratch(DEVICE, 0, counters, 16)


def captured(cuda, number):
    cuda.capture = number
    try:
        return step().counters
    finally:
        cuda.capture = None


def in_block(part):
    return part.untyped_storage().data_ptr() == _scratch._blocks[0].memory.untyped_storage().data_ptr()


def test_a_block_is_renewed_once_captures_have_used_half_of_it(cuda):
    step()
    parts = [captured(cuda, number) for number in range(4)]
    first = _scratch._blocks[0]
    step()
    assert _scratch._blocks[0] is first, "half is left"
    parts.append(captured(cuda, 4))
    same = step()
    assert _scratch._blocks[0] is not first and same is step(), "the stream's own scratch is as large as before"
    assert in_block(captured(cuda, 5)) and captured(cuda, 4) is parts[4] and not in_block(parts[4])
    for number in range(6, 40):
        parts.append(captured(cuda, number))
        step()
    assert len({part.data_ptr() for part in parts}) == len(parts) == len(_scratch._captures) - 1


def test_another_threads_calls_do_not_renew_it(cuda):
    """A capture of this thread may be under way, in which nobody may wait for an event."""
    step()
    for number in range(5):
        captured(cuda, number)
    first = _scratch._blocks[0]
    other = threading.Thread(target=step)
    other.start()
    other.join()
    assert _scratch._blocks[0] is first
    step()
    assert _scratch._blocks[0] is not first


def test_a_block_that_is_used_up_leaves_counters_of_the_graphs_own(cuda):
    step()
    parts = [captured(cuda, number) for number in range(10)]
    assert [in_block(part) for part in parts] == [True] * 8 + [False] * 2
    assert len(_scratch._captures) == 8


def test_what_outlives_a_call_is_not_in_the_callers_pool(cuda):
    step()
    step(4 * _scratch.LINE)
    constants = _lanes.Constants(1)
    constants.get("kept", LIKE, lambda: (torch.zeros(3),))
    assert cuda.pool == []
    constants.get("past the limit", LIKE, lambda: (torch.zeros(5),))
    captured(cuda, 1)
    assert cuda.pool == [5, 16], "a call's own memory may be in it, and a capture's values are"


def test_an_error_of_the_making_comes_through(cuda):
    with pytest.raises(ZeroDivisionError):
        lasting(DEVICE, lambda: 1 / 0)

"""Constants for any stream when threads meet: nothing is lost, and all get the same tensors."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from kdagen.ops import _lanes

LIKE = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))


class Event:
    """An event that is over, unless told otherwise; ``asked`` runs while the device is asked for it."""

    over, asked = True, staticmethod(lambda: None)

    def __init__(self):
        self.waits = 0

    def record(self):
        pass

    def query(self):
        self.asked()
        return self.over

    def wait(self):
        self.waits += 1


@pytest.fixture(autouse=True)
def events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)


def meanwhile(work) -> threading.Thread:
    """``work()`` on another thread, which has 0.2 s to come through before this one goes on."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.2)
    return thread


def test_a_constant_made_while_another_thread_settles_is_not_lost(monkeypatch):
    constants, threads = _lanes.Constants(4), []
    constants.get("a", LIKE, lambda: ("a",))
    monkeypatch.setattr(Event, "asked", staticmethod(
        lambda: threads or threads.append(meanwhile(lambda: constants.get("b", LIKE, lambda: ("b",))))))
    constants.settle()
    threads[0].join()
    assert [made.tensors for made in constants._pending] == [("b",)]
    constants.settle()
    assert not constants._pending and constants.get("b", LIKE, pytest.fail) == ("b",)


def test_two_threads_that_make_the_same_constant_get_the_same_tensors(monkeypatch):
    """The slower one waits for the event of the quicker one's: a graph may keep the address of either's."""
    constants = _lanes.Constants(4)
    monkeypatch.setattr(Event, "over", False)

    def slow():
        meanwhile(lambda: constants.get("a", LIKE, lambda: ("quick",))).join()
        return ("slow",)

    assert constants.get("a", LIKE, slow) == ("quick",)
    assert [made.event.waits for made in constants._pending] == [1]

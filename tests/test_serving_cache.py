"""Slots: who owns them, what a fresh one holds, and prefixes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdagen.errors import ArgumentError, ArgumentTypeError
from kdagen.serving import CacheFull, KDACache


def make(slots=6, **options):
    return KDACache(slots, 2, 4, 8, 5, num_spec=1, conv_dtype=torch.float32, **options)


def test_shapes_and_bytes():
    cache = make(state_dtype=torch.bfloat16)
    assert cache.recurrent.shape == (6, 2, 8, 4) and cache.conv.shape == (6, 4, 5)
    assert cache.bytes == 6 * (2 * 8 * 4 * 2 + 4 * 5 * 4)


def test_fresh_slots_are_zero_whatever_they_held():
    cache = make(poison=True)
    slots = cache.allocate(3)
    cache.recurrent[slots] = 7.0
    cache.free(slots)
    assert torch.isnan(cache.recurrent[slots]).all() and torch.isnan(cache.conv[slots]).all()
    again = cache.allocate(3)
    assert not cache.recurrent[again].any() and not cache.conv[again].any()


def test_without_zeroing_a_slot_keeps_its_poison():
    cache = make(poison=True, zero="never")
    slot, = cache.allocate()
    assert torch.isnan(cache.recurrent[slot]).all()


def test_allocation_touches_nothing_but_its_slots():
    cache = make()
    held = cache.allocate(2)
    cache.recurrent[held], cache.recurrent[0] = 3.0, 5.0
    cache.free(cache.allocate(3))
    assert (cache.recurrent[held] == 3).all() and (cache.recurrent[0] == 5).all()


def test_a_full_cache_says_so_and_allocates_nothing():
    cache = make()
    with pytest.raises(CacheFull, match="6, expected at most 5"):
        cache.allocate(6)
    assert cache.free_slots == 5


@pytest.mark.parametrize("slots", [[0], [3, 3], [4]])
def test_wrong_frees_are_refused(slots):
    cache = make()
    assert sorted(cache.allocate(3)) == [1, 2, 3]
    with pytest.raises(ArgumentError, match="allocated"):
        cache.free(slots)
    assert cache.free_slots == 2


def test_prefixes_are_recalled_and_forgotten_oldest_first():
    cache = make()
    a, b = cache.allocate(2)
    cache.recurrent[a], cache.conv[a], cache.recurrent[b] = 1.0, 1.0, 2.0
    cache.remember("a", a)
    cache.remember("b", b)
    target, = cache.allocate()
    assert cache.recall("a", target) and (cache.recurrent[target] == 1).all() and (cache.conv[target] == 1).all()
    assert not cache.recall("c", target)
    assert cache.free_slots == 4
    cache.allocate(3)  # one more than the slots without a prefix: "b", recalled longer ago than "a", goes
    assert not cache.recall("b", target) and cache.recall("a", target)


def test_a_prefix_kept_twice_gives_the_first_slot_back():
    cache = make()
    first, second = cache.allocate(2)
    cache.remember("p", first)
    cache.remember("p", second)
    assert cache.free_slots == 5
    with pytest.raises(ArgumentError, match="allocated"):
        cache.remember("q", second)


def test_refusals():
    with pytest.raises(ArgumentError, match="slots"):
        make(1)
    with pytest.raises(ArgumentError, match="zero"):
        make(zero="sometimes")
    for name in ("state_dtype", "conv_dtype"):
        with pytest.raises(ArgumentTypeError, match=f"{name}: got torch.float64, expected torch.bfloat16 or"):
            KDACache(6, 2, 4, 8, 5, **{name: torch.float64})


@pytest.mark.parametrize("count", [-1, 1.5])
def test_counts_that_are_none_are_refused(count):
    with pytest.raises(ArgumentError, match=f"count: got {count}, expected a number of slots"):
        make().allocate(count)


@pytest.mark.parametrize("slot", [0, 6, 99, -1])
def test_slots_that_nobody_may_copy_are_refused(slot):
    cache = make()
    kept, target = cache.allocate(2)
    cache.remember("p", kept)
    before = cache.recurrent.clone()
    for call, name in ((lambda: cache.copy(slot, target), "source"), (lambda: cache.copy(target, slot), "target"),
                       (lambda: cache.recall("p", slot), "target"), (lambda: cache.recall("unknown", slot), "target")):
        with pytest.raises(ArgumentError, match=f"{name}: got {slot}, expected a slot, 1 to 5"):
            call()
    assert torch.equal(cache.recurrent, before)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "give", "keep"]), st.integers(0, 4)), max_size=30))
def test_no_slot_has_two_owners(actions):
    cache, owned = make(9), []
    for action, n in actions:
        if action == "take" and n <= cache.free_slots:
            owned += cache.allocate(n)
        elif action == "give" and owned:
            cache.free([owned.pop(n % len(owned))])
        elif action == "keep" and owned:
            cache.remember(n, owned.pop(n % len(owned)))
        assert len(set(owned)) == len(owned) and 0 not in owned
        assert len(owned) + cache.free_slots == cache.slots - 1

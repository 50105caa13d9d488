"""The fast launch path's keys: they tell apart everything that Triton compiles differently. No GPU needed."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from inputs import kda
from kdagen import chunk_kda
from kdagen.launch import FastKernel, InterpretedKernel, make_binder


def kernel(p_x, p_y, n, step, scale, BLOCK, FLAG=False):
    """A stand-in with the shape of a jit function; it is never compiled."""


@pytest.fixture
def jit():
    kernel.__annotations__ = {}
    made = JITFunction(kernel, do_not_specialize=["n"])
    for param in made.params:
        if param.name.isupper():
            param.__dict__["is_constexpr"] = True
    return made


def bind(jit, args, kwargs, found=None):
    """(key, what was launched or missed) of one call."""
    keys, calls = [], []
    launch = found and ("compiled", True, lambda *values: calls.append(values), "function", False, False, "packed")
    get = lambda key: (keys.append(key), launch)[1]
    binder = make_binder(jit, args, kwargs, get, lambda *missed: calls.append(missed))
    binder.__globals__["raw_stream"] = lambda device: "stream"
    returned = binder((2, 3), *args, **kwargs)
    assert returned == ("compiled" if found and not knobs.runtime.launch_enter_hook.calls else None)
    return keys[0], calls[0]


def key(jit, *args, **kwargs):
    return bind(jit, args, kwargs)[0]


def tensor(dtype=torch.float32, offset=0):
    return torch.zeros(64, dtype=dtype)[offset:]


def test_values_are_in_signature_order_with_pointers_as_integers(jit):
    x, y = tensor(), tensor()
    _, launched = bind(jit, (x, y, 5, 7, 0.5), {"BLOCK": 16, "num_warps": 4}, found=True)
    assert launched[:5] == (2, 3, 1, "stream", "function")
    assert launched[-7:] == (x.data_ptr(), y.data_ptr(), 5, 7, 0.5, 16, False)


def test_a_miss_gets_the_call_as_it_was_made(jit):
    args, kwargs = (tensor(), None, 5, 7, 0.5), {"BLOCK": 16, "num_warps": 4}
    made, (missed_key, grid, missed_args, missed_kwargs) = bind(jit, args, kwargs)
    assert (missed_key, grid, missed_kwargs) == (made, (2, 3), kwargs)
    assert all(a is b for a, b in zip(missed_args, args))


def test_hooked_launches_go_through_triton(jit, monkeypatch):
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [lambda metadata: None])
    _, missed = bind(jit, (tensor(), None, 5, 7, 0.5), {"BLOCK": 16}, found=True)
    assert missed[0] is None, "a hooked launch must not be remembered as a miss"


@pytest.mark.parametrize("change", [
    dict(p_x=tensor(torch.float16)), dict(p_x=tensor(offset=1)), dict(p_y=None), dict(step=1), dict(step=16),
    dict(step=2**40), dict(BLOCK=32), dict(FLAG=True), dict(num_warps=8), dict(num_stages=3), dict(n=2**40),
])
def test_what_changes_the_kernel_changes_the_key(jit, change):
    base = dict(p_x=tensor(), p_y=tensor(), n=5, step=7, scale=0.5, BLOCK=16, num_warps=4)
    assert key(jit, **base) != key(jit, **base | change)


@pytest.mark.parametrize("change", [dict(n=1), dict(n=16), dict(scale=0.25), dict(step=9), dict(p_x=tensor())])
def test_what_does_not_change_the_kernel_keeps_the_key(jit, change):
    base = dict(p_x=tensor(), p_y=tensor(), n=5, step=7, scale=0.5, BLOCK=16, num_warps=4)
    assert key(jit, **base) == key(jit, **base | change)


def test_the_device_is_part_of_the_key(jit):
    args, seen = (tensor(), tensor(), 5, 7, 0.5), []
    for device in (0, 1):
        binder = make_binder(jit, args, {"BLOCK": 16}, seen.append, lambda *missed: None)
        binder.__globals__["current_device"] = lambda device=device: device
        binder((1,), *args, BLOCK=16)
    assert seen[0] != seen[1]


def test_keys_agree_with_tritons_own_specialisation(jit):
    """Whenever Triton's key differs between two argument lists, so does ours."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    xs = [tensor(), tensor(offset=1), tensor(torch.bfloat16), None]
    steps = [0, 1, 2, 16, 17, 2**31 - 1, 2**31, 2**40, -16, -(2**31)]
    ours, theirs = [], []
    for x, step in itertools.product(xs, steps):
        ours.append(key(jit, p_x=x, p_y=None, n=3, step=step, scale=0.5, BLOCK=16))
        theirs.append(tuple(native_specialize_impl(backend, value, False, True, True) for value in (x, step)))
    for (a, ta), (b, tb) in itertools.combinations(zip(ours, theirs), 2):
        assert ta == tb or a != b, (a, b, ta, tb)


def test_a_kernel_object_is_indexable_by_its_grid(jit):
    assert callable(FastKernel(jit)[(1,)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter was not on when the kernels were made")
def test_interpreted_launches_hide_numpys_warnings_and_nothing_else_does(rng):
    tensors, options = kda(rng, "bounded", T=70, H=1, K=16)
    before = np.geterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        chunk_kda(**tensors, **options)
        assert np.geterr() == before
        with pytest.raises(RuntimeWarning):
            np.exp2(np.float32(1000))


def test_an_interpreted_kernel_gives_what_the_kernel_returns():
    class Kernel:
        fn = "its function"

        def __getitem__(self, grid):
            return lambda *args, **kwargs: (grid, args, kwargs, np.geterr()["over"])

    kernel = InterpretedKernel(Kernel())
    assert kernel[(2,)](1, BLOCK=4) == ((2,), (1,), {"BLOCK": 4}, "ignore") and kernel.fn == "its function"

"""Launching a compiled Triton kernel for a few microseconds of host time.

``JITFunction.run`` binds, specialises and hashes every argument at each call. ``FastKernel`` stands in its place in a
loaded module: once per list of argument types it writes a small function that computes Triton's specialisation key for
exactly those types, finds the compiled kernel of that key, and launches it. A miss goes the ordinary way, through Triton;
so does every launch while a profiler has hooked Triton's launches.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch

try:
    from triton import knobs
    from triton.runtime.jit import JITFunction
except ImportError:  # the CPU path launches nothing
    knobs = JITFunction = None


class FastKernel:
    """``FastKernel(jit)[grid](*args, **kwargs)`` launches what ``jit[grid](*args, **kwargs)`` would."""

    __slots__ = ("_binders", "_compiled", "jit")

    def __init__(self, jit: JITFunction):
        self.jit = jit
        self._binders: dict = {}
        self._compiled: dict = {}

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            types = (*map(type, args), *kwargs)
            binder = self._binders.get(types)
            if binder is None:
                binder = self._binders[types] = make_binder(self.jit, args, kwargs, self._compiled.get, self._miss)
            return binder(grid, *args, **kwargs)

        return launch

    def _miss(self, key, grid, args, kwargs):
        """Compile and launch through Triton; remember how to launch it the short way."""
        compiled = self.jit[grid](*args, **kwargs)
        if key is not None and compiled is not None:
            self._compiled[key] = handle(compiled)
        return compiled


class InterpretedKernel:
    """``InterpretedKernel(kernel)[grid](*args, **kwargs)``: a launch in Triton's interpreter, without numpy's warnings.

    A kernel overflows, and multiplies what overflowed, in lanes that a select drops: on a GPU in silence.
    """

    __slots__ = ("kernel",)

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        import numpy as np  # as Triton's interpreter itself does

        def launch(*args, **kwargs):
            with np.errstate(all="ignore"):
                return self.kernel[grid](*args, **kwargs)

        return launch

    def __getattr__(self, name: str):
        return getattr(self.kernel, name)


class Handle(NamedTuple):
    """How to launch a compiled kernel.

    ``short``: ``call`` is Triton 3.6's C function itself, without the Python around it that only allocates scratch memory:
    ``call(x, y, z, stream, function, cooperative, pdl, None, None, packed, None, None, None, *values)``. Otherwise it is
    Triton's launcher: ``call(x, y, z, stream, function, packed, None, None, None, *values)``.
    """

    compiled: object
    short: bool
    call: object
    function: int
    cooperative: bool
    pdl: bool
    packed: tuple


def handle(compiled) -> Handle:
    """The Handle of what ``jit[grid](...)`` returned."""
    outer = compiled.run
    short = (type(outer).__name__ == "CudaLauncher" and not hasattr(outer, "kernel_signature")
             and not outer.global_scratch_size and not outer.profile_scratch_size)
    if short:
        options = outer.launch_cooperative_grid, outer.launch_pdl
        return Handle(compiled, True, outer.launch, compiled.function, *options, compiled.packed_metadata)
    return Handle(compiled, False, outer, compiled.function, False, False, compiled.packed_metadata)


def make_binder(jit: JITFunction, args: tuple, kwargs: dict, get, miss):
    """``bind(grid, *args, **kwargs)``: launch for arguments of exactly these types, and return the compiled kernel.

    ``get(key)`` gives a Handle, or None, and then ``miss(key, grid, args, kwargs)`` is called. The key tells
    apart all that Triton compiles differently: dtype and 16-byte alignment of tensors, value 1 and divisibility by 16 and
    width of integers, every constexpr and option, the device.
    """
    names = [param.name for param in jit.params]
    given = dict(zip(names, args)) | {name: value for name, value in kwargs.items() if name in names}
    options = [name for name in kwargs if name not in names]
    setup, key, values = [], ["device", *options], []
    scope = {"get": get, "miss": miss, "runtime": knobs.runtime,
             "current_device": getattr(torch._C, "_cuda_getDevice", lambda: -1),
             "raw_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None)}
    for param in jit.params:
        name = param.name
        if name not in given:  # left at its default
            scope[f"default_{name}"] = param.default
            values.append(f"default_{name}")
            continue
        value = given[name]
        if param.is_constexpr:
            key.append(name)
            values.append(name)
        elif isinstance(value, torch.Tensor):
            setup.append(f"p_{name} = {name}.data_ptr()")
            key += [f"{name}.dtype", f"p_{name} & 15 == 0"]
            values.append(f"p_{name}")
        elif isinstance(value, bool) or value is None or isinstance(value, float):
            if not isinstance(value, float):
                key.append(name)
            values.append(name)
        elif isinstance(value, int):
            key.append(f"-2147483648 <= {name} <= 2147483647")
            if not param.do_not_specialize:
                key += [f"{name} == 1", f"{name} & 15 == 0"]
            values.append(name)
        else:  # a tensor descriptor: its dtype, block and layout are part of the type
            key += [f"{name}.base.dtype", f"tuple({name}.block_shape)", f"getattr({name}, 'layout', None)"]
            values.append(name)
    values = ", ".join(values)
    source = f"""
def bind(grid, {', '.join([*names[:len(args)], *kwargs])}):
    device = current_device()
    {'; '.join(setup) or 'pass'}
    key = ({', '.join(key)},)
    found = get(key)
    if found is None or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
        return miss(key if found is None else None, grid, ({''.join(f'{name}, ' for name in names[:len(args)])}),
                    dict({', '.join(f'{name}={name}' for name in kwargs)}))
    compiled, short, call, function, cooperative, pdl, packed = found
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    if short:
        call(x, y, z, raw_stream(device), function, cooperative, pdl, None, None, packed, None, None, None, {values})
    else:
        call(x, y, z, raw_stream(device), function, packed, None, None, None, {values})
    return compiled
"""
    exec(source, scope)
    return scope["bind"]


def accelerate(module: ModuleType, names: set[str]) -> ModuleType:
    """Put a FastKernel in the place of each named jit function of a module that dispatch has just loaded.

    Under TRITON_INTERPRET=1 they are no JITFunctions: an InterpretedKernel takes their place.
    """
    for name in names:
        kernel = getattr(module, name)
        if isinstance(kernel, JITFunction):
            setattr(module, name, FastKernel(kernel))
        elif not isinstance(kernel, (FastKernel, InterpretedKernel)):
            setattr(module, name, InterpretedKernel(kernel))
    return module

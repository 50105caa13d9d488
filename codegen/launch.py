"""Launching a compiled Triton kernel for a few microseconds of host time.

``JITFunction.run`` binds, specialises and hashes every argument at each call. ``FastKernel`` stands in its place in a
loaded module: it writes, once per argument shape, a small function that computes Triton's specialisation key for exactly
those argument types, and keeps the compiled kernel of each key. A miss goes the ordinary way, through Triton.
"""

from __future__ import annotations

from types import ModuleType

import torch
from triton import knobs
from triton.runtime.jit import JITFunction


class FastKernel:
    """``FastKernel(jit)[grid](*args, **kwargs)`` launches what ``jit[grid](*args, **kwargs)`` would."""

    __slots__ = ("_binders", "_compiled", "jit")

    def __init__(self, jit: JITFunction):
        self.jit = jit
        self._binders: dict = {}
        self._compiled: dict = {}

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            return self.launch(grid, args, kwargs)

        return launch

    def launch(self, grid, args, kwargs):
        shape = (*map(type, args), *kwargs)
        binder = self._binders.get(shape)
        if binder is None:
            binder = self._binders[shape] = _make_binder(self.jit, args, kwargs)
        device = torch._C._cuda_getDevice()
        key, values = binder(device, *args, **kwargs)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self.jit[grid](*args, **kwargs)
            self._compiled[key] = compiled
            return compiled
        if len(grid) < 3:
            grid = (*grid, 1, 1)
        runtime = knobs.runtime
        stream = torch._C._cuda_getCurrentRawStream(device)
        enter = runtime.launch_enter_hook
        metadata = None if enter is None else compiled.launch_metadata(grid, stream, *values)
        compiled.run(grid[0], grid[1], grid[2], stream, compiled.function, compiled.packed_metadata, metadata,
                     enter, runtime.launch_exit_hook, *values)
        return compiled


def _make_binder(jit: JITFunction, args: tuple, kwargs: dict):
    """``bind(device, *args, **kwargs) -> (key, values)`` for arguments of exactly these types.

    ``key`` tells apart all that Triton would compile differently; ``values`` are the launch arguments in signature order.
    """
    names = [param.name for param in jit.params]
    given = dict(zip(names, args)) | {name: value for name, value in kwargs.items() if name in names}
    options = [name for name in kwargs if name not in names]
    setup, key, values = [], ["device", *options], []
    scope: dict = {}
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
            setup.append(f"    p_{name} = {name}.data_ptr()")
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
    order = [*names[:len(args)], *kwargs]
    source = "\n".join([f"def bind(device, {', '.join(order)}):", *setup,
                        f"    return ({', '.join(key)},), ({', '.join(values)},)"])
    exec(source, scope)
    return scope["bind"]


def accelerate(module: ModuleType, names: set[str]) -> ModuleType:
    """Put a FastKernel in the place of each named jit function of a module that dispatch has just loaded."""
    for name in names:
        kernel = getattr(module, name)
        if isinstance(kernel, JITFunction):
            setattr(module, name, FastKernel(kernel))
    return module

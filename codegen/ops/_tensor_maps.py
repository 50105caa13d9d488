"""Launching kernels whose tiles come through TMA descriptors, without encoding a descriptor at each launch.

Triton encodes every host descriptor of every launch anew (about 2 us each; a prefill call has up to 60). A ``MapKernel``
keeps a compiled kernel with the tensor maps it has met, keyed by address and shape, and calls the driver's launcher with
them. Where this Triton's launcher is not of the known build, ``MapKernel.of`` answers None and callers launch the plain way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kdagen.launch import handle

MAX_MAPS = 8192  # maps a kernel remembers (each 128 bytes); then it forgets all


class Address(int):
    """A device address where Triton expects a tensor."""

    def data_ptr(self) -> int:
        return int(self)


class Tiles(NamedTuple):
    """What the driver reads of a host descriptor."""

    base: Address
    shape: list[int]
    strides: list[int]
    padding: str = "zero"


def kind(x: torch.Tensor | None) -> tuple | None:
    """What Triton specialises a pointer on."""
    return None if x is None else (x.dtype, x.data_ptr() & 15 == 0)


def token_tiles(x: torch.Tensor) -> tuple[int, int, int, int] | None:
    """(address, rows, columns, row stride) of [.., T, heads, width] seen as a matrix; None if a tensor map cannot be it."""
    shape, stride = x.shape, x.stride()
    rows, heads, width = shape[-3:]
    if stride[-1] != 1 or (heads > 1 and stride[-2] != width) or stride[-3] % 8:
        return None
    if len(shape) == 4 and shape[0] > 1:
        if stride[0] != rows * stride[-3]:
            return None
        rows *= shape[0]
    address = x.data_ptr()
    return None if address & 15 or not rows else (address, rows, heads * width, stride[-3])


def _raw_launcher(compiled):
    """The driver's C function behind a compiled kernel's launcher, and the arguments that stay the same; or None."""
    known = handle(compiled)
    if not known.short:
        return None
    raw, names = known.call, getattr(getattr(known.call, "__code__", None), "co_freevars", None)
    if names is not None:  # Triton's wrapper, which encodes descriptors at each launch
        if "launcher" not in names:
            return None
        raw = raw.__closure__[names.index("launcher")].cell_contents
    return raw, (known.function, known.cooperative, known.pdl, None, None, known.packed, None, None, None)


class MapKernel:
    """A compiled kernel, its tensor maps, and the shortest way to launch it."""

    __slots__ = ("_boxes", "_fixed", "_maps", "_meta", "_raw", "stages")

    def __init__(self, compiled, raw, fixed):
        self._raw, self._fixed, self._meta, self._maps = raw, fixed, compiled.metadata.tensordesc_meta, {}
        self.stages = compiled.metadata.num_stages
        types = [kind for kind in compiled.src.signature.values() if isinstance(kind, str) and kind.startswith("tensordesc")]
        self._boxes = [int(kind.split("[", 1)[1].split("]", 1)[0].split(",")[-1]) for kind in types]

    @classmethod
    def of(cls, compiled) -> MapKernel | None:
        found = None if compiled is None else _raw_launcher(compiled)  # None: a hook kept Triton from compiling
        return None if found is None else cls(compiled, *found)

    def map(self, index: int, address: int, rows: int, columns: int, stride: int) -> tuple:
        """The launch arguments that stand for the kernel's ``index``-th descriptor: the tensor map, shape and strides."""
        key = (index, address, rows, columns, stride)
        found = self._maps.get(key)
        if found is None:
            from triton.backends.nvidia.driver import make_tensordesc_arg

            if len(self._maps) >= MAX_MAPS:
                self._maps.clear()
            tiles = Tiles(Address(address), [rows, columns], [stride, 1])
            found = self._maps[key] = tuple(make_tensordesc_arg(tiles, self._meta[index]))
        return found

    def box(self, index: int) -> int:
        """Columns of the kernel's ``index``-th descriptor tile."""
        return self._boxes[index]

    def launch(self, programs: int, stream: int, args: tuple) -> tuple[Callable, tuple]:
        """(function, arguments) that launch ``programs`` programs on a raw stream, as often as they are called; args in
        signature order, each descriptor as ``map`` gives it."""
        return self._raw, (programs, 1, 1, stream, *self._fixed, *args)

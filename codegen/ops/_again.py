"""Launching once more what was launched with the same shapes, strides, dtypes and flags: only addresses are new.

``FastKernel`` (codegen/launch.py) computes Triton's specialisation key of every argument at each launch. An op that
remembers its calls by their layout knows that key already, as long as all addresses are multiples of 16 bytes: ``Again``
goes straight to Triton's C function, and says so when it cannot.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

import torch

from kdagen.launch import handle

ALIGNMENT = 15  # Triton tells addresses apart by their lowest four bits


class Again:
    """A compiled kernel with its grid and all arguments behind the pointers, in signature order.

    What was None at compile time is a constant of the kernel: in its place any value does, such as the address 0.
    """

    __slots__ = ("call", "cooperative", "device", "function", "grid", "hooks", "packed", "pdl", "rest", "stream")

    def __init__(self, compiled, device: int, grid: int, rest: tuple):
        found = handle(compiled)
        self.call, self.function, self.packed = found.call, found.function, found.packed
        self.cooperative, self.pdl = found.cooperative, found.pdl
        self.device, self.grid, self.rest = device, grid, rest
        from triton import knobs

        self.hooks = knobs.runtime
        self.stream = torch._C._cuda_getCurrentRawStream

    def launch(self, pointers: list[int]) -> bool:
        """Launch on the current stream of the device; False, without a launch, while a profiler hooks launches."""
        if self.hooks.launch_enter_hook.calls or self.hooks.launch_exit_hook.calls:
            return False
        self.call(self.grid, 1, 1, self.stream(self.device), self.function, self.cooperative,
                  self.pdl, None, None, self.packed, None, None, None, *pointers, *self.rest)
        return True


def again(compiled, device: int, grid: int, pointers: list[int], rest: tuple) -> Again | None:
    """How to repeat this launch, or None where that takes Triton's own way (another backend, odd addresses)."""
    if compiled is None or not hasattr(compiled, "run") or misaligned(pointers) or not handle(compiled).short:
        return None
    return Again(compiled, device, grid, rest)


def addresses(*tensors: torch.Tensor | None) -> list[int]:
    """The tensors' addresses, 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def misaligned(pointers: list[int]) -> int:
    """Not 0 if any address is no multiple of 16."""
    return reduce(or_, pointers) & ALIGNMENT

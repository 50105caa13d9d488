"""Tensors that are kept for later calls, allocated outside of any memory pool that the caller is in.

``torch.cuda.use_mem_pool``, and torch.compile while it warms its CUDA graphs up (mode "reduce-overhead"), have the current
thread allocate from a private pool. A tensor kept from there dangles: torch.compile gives the memory of its pool away again
after a call, whoever still holds some (https://github.com/pytorch/pytorch/pull/177854; torch 2.14 refuses the call). Torch
does not say which pool is in use, but only the thread that entered one allocates from it (of use_mem_pool this is
documented; of torch.compile it is so in torch 2.11 to 2.13). So what is kept is made on another thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def lasting(device: torch.device, make: Callable[[], T]) -> T:
    """What ``make()`` returns, called on another thread, with this one's current stream of ``device`` as its own.

    A thread costs about a tenth of a millisecond, so this is for what is made once. Not for a capture: the thread is not
    in it. On the CPU just ``make()``.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def made() -> T:
        with torch.cuda.stream(stream):  # and its device
            return make()

    with ThreadPoolExecutor(1, "kdagen-lasting") as thread:
        return thread.submit(made).result()

"""What a capture of a CUDA graph forbids: to this thread, and, as torch captures by default, to all others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def permitted() -> Iterator[None]:
    """Allows this thread what else is forbidden while another one captures, and would break that one's capture: to ask for
    an event, to make a graph. What is done here takes no part in a capture."""
    mode, exchange = ctypes.c_int(2), _exchange()  # relaxed
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def own_stream(device: int, priority: int) -> torch.cuda.Stream:
    """A new stream that nobody else has: torch.cuda.Stream() gives out the same 32 again and again."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        status = ctypes.CDLL("libcuda.so.1").cuStreamCreateWithPriority(ctypes.byref(handle), 1, priority)  # 1: not blocking
    if status:
        raise RuntimeError(f"kdagen: cuStreamCreateWithPriority failed with CUresult {status}")
    return torch.cuda.ExternalStream(handle.value, device=device)


@cache
def _exchange() -> Callable:
    """The driver's function that swaps this thread's capture mode for another."""
    library, function = (("libamdhip64.so", "hipThreadExchangeStreamCaptureMode") if torch.version.hip
                         else ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode"))
    try:
        return getattr(ctypes.CDLL(library), function)
    except OSError:  # no device
        return lambda mode: None


def is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()

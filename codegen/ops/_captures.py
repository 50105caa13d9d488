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
    exchange = driver("cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode") or (lambda mode: None)
    mode = ctypes.c_int(2)  # relaxed
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def own_stream(device: int, priority: int) -> torch.cuda.Stream:
    """A new stream that nobody else has: torch.cuda.Stream() gives out the same 32 again and again."""
    handle, create = ctypes.c_void_p(), driver("cuStreamCreateWithPriority", "hipStreamCreateWithPriority")
    with torch.cuda.device(device):
        status = create(ctypes.byref(handle), 1, priority)  # 1: not blocking
    if status:
        raise RuntimeError(f"kdagen: cuStreamCreateWithPriority failed with CUresult {status}")
    return torch.cuda.ExternalStream(handle.value, device=device)


@cache
def driver(cuda: str, hip: str) -> Callable | None:
    """The driver's function of this name, or None: there is no device, or its driver has no such function."""
    library, name = ("libamdhip64.so", hip) if torch.version.hip else ("libcuda.so.1", cuda)
    try:
        return getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError):
        return None


def is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()

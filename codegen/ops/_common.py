"""What the public ops share: registration, argument checks, the choice of path, the device guard."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from numbers import Real

import torch

from kdagen import devices
from kdagen.errors import ArgumentTypeError, Unsupported, refuse
from kdagen.spec import Target

LIBRARY = torch.library.Library("kdagen", "DEF")
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
               torch.int32: "i32", torch.int64: "i64"}
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def register(schema: str, implementation: Callable, fake: Callable):
    """Define ``kdagen::<schema>`` with one implementation for every device and a fake; return the op.

    Ops are defined by ``Library.define`` and ``impl``: a call through ``torch.library.custom_op`` costs three times as
    much. Public functions call the implementation directly in eager mode, and the op under ``torch.compile``.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kdagen::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.kdagen, name).default


MEMO_ENTRIES = 4096  # layouts of arguments that an op remembers; more than any engine has


def layouts(names: tuple[str, ...], tensors: tuple) -> tuple:
    """All that checks look at, cheap to compute and to hash: the key by which a call is remembered as right.

    What is neither None nor a tensor is refused by its name.
    """
    try:
        return tuple([None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors])
    except AttributeError:
        check_tensors(names, tensors)
        raise


def target_of(index: int) -> Target:
    """The Target of a tensor's ``get_device()``; -1, the CPU under the interpreter, counts as an H200."""
    return devices.of_index(index) if index >= 0 else devices.named("h200")


def interpreting() -> bool:
    """Whether Triton runs its CPU interpreter (TRITON_INTERPRET=1, or another word that Triton takes for yes)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def runs_kernels(tensor: torch.Tensor) -> bool:
    """True where a tensor's op is a Triton launch (a GPU, or the interpreter), False where it is the CPU path."""
    return tensor.is_cuda or interpreting()


_NO_GUARD = nullcontext()


def on_device(tensor: torch.Tensor):
    """Context that makes the tensor's device the current one; free where it already is."""
    if not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice():
        return _NO_GUARD
    return torch.cuda.device(tensor.device)


def kind_of(value: object) -> str:
    """``a list``, ``an int``: how a refusal names a value of the wrong kind."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeio' else 'a'} {name}"


def check_tensors(names: tuple[str, ...], values: tuple, kind: str = "a torch.Tensor") -> None:
    """Refuse, by its name, the first value that is neither None nor a tensor.

    Ops call it once an attribute that every tensor has was missing: a call of tensors alone does not pay for it.
    """
    for name, value in zip(names, values):
        if value is not None and not isinstance(value, torch.Tensor):
            refuse(name, kind_of(value), kind, kind=ArgumentTypeError)


def check_number(name: str, value: object) -> None:
    """Refuse what is neither None nor a real number (torch.compile's symbols count as numbers)."""
    if value is not None and not isinstance(value, (Real, torch.SymFloat, torch.SymInt)):
        refuse(name, repr(value) if isinstance(value, str) else kind_of(value), "a number", kind=ArgumentTypeError)


def check_within(name: str, size: int, most: int, what: str) -> None:
    """Refuse a size that no kernel takes, on the CPU path as well."""
    if not 1 <= size <= most:
        refuse(name, f"{what} = {size}", f"{what} from 1 to {most}", kind=Unsupported)


def check_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        refuse(name, str(tensor.dtype), " or ".join(map(str, dtypes)), kind=ArgumentTypeError)


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    try:
        same = tensor.device == device
    except AttributeError:
        same = False
    if not same:
        check_tensors((name,), (tensor,))
        refuse(name, f"a tensor on {tensor.device}", f"one on {device}", f"Move it: {name}.to({str(device)!r}).",
               kind=ArgumentTypeError)


def check_shape(name: str, tensor: torch.Tensor, *shape: int | str) -> None:
    """Refuse a tensor whose shape is not ``shape``; an axis of any size is given by its name."""
    if tensor.dim() != len(shape) or any(not isinstance(want, str) and want != got
                                         for want, got in zip(shape, tensor.shape)):
        refuse(name, f"shape {list(tensor.shape)}", f"shape [{', '.join(map(str, shape))}]")


def check_interpretable(dtype: torch.dtype) -> None:
    """Refuse bf16 under the interpreter, where its arithmetic is silently wrong."""
    if dtype == torch.bfloat16 and interpreting():
        refuse("dtype", "torch.bfloat16 under TRITON_INTERPRET=1",
               "float16 or float32 (the interpreter computes bf16 wrongly)",
               "Unset TRITON_INTERPRET for the CPU path, or cast the inputs.", kind=ArgumentTypeError)

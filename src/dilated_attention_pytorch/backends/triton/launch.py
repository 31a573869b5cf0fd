"""Calling compiled kernels directly: Triton's own dispatcher takes longer than a kernel over a short sequence runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# By all that Triton specialises a kernel on: the kernel (held, as its id is in the key), what was compiled, and the values
# of its constants in the order of parameters.
_compiled: dict[tuple[Any, ...], tuple[Any, Any, tuple[Any, ...]]] = {}
_MOST = 4096  # then forget all: what was compiled stays with Triton


def launch(
    kernel: Any, programs: int, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], constants: dict[str, Any]
) -> None:
    """``kernel[(programs,)](*tensors, *numbers, **constants)``, in the order of the kernel's parameters.

    The first call with these numbers goes through Triton, which may compile; later ones call what it found. Of tensors,
    Triton distinguishes the type and whether they start at a multiple of 16 bytes.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    places = [x.data_ptr() % 16 == 0 for x in tensors]
    key = (id(kernel), device, numbers, *constants.items(), *places, *[x.dtype for x in tensors])
    found = _compiled.get(key)
    if found is not None:
        _, compiled, values = found
        compiled[(programs, 1, 1)](*tensors, *numbers, *values)
        return
    compiled = kernel[(programs,)](*tensors, *numbers, **constants)
    if compiled is None:  # the interpreter compiles nothing
        return
    if len(_compiled) >= _MOST:
        _compiled.clear()
    names = kernel.arg_names[len(tensors) + len(numbers) :]
    _compiled[key] = kernel, compiled, tuple(constants[name] for name in names)

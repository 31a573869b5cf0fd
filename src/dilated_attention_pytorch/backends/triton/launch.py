"""Calling compiled kernels directly: Triton's own dispatcher takes longer than a kernel over a short sequence runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# By what Triton specialises a kernel on: the kernel (held, as its id is in the key), what was compiled, and the values of
# its constants in the order of parameters.
_compiled: dict[tuple[Any, ...], tuple[Any, Any, tuple[Any, ...]]] = {}


def _specialisation(x: Tensor | float) -> Any:
    """What Triton distinguishes of an argument: of an integer whether it is 1, a multiple of 16, longer than 32 bits."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int):
        return 1 if x == 1 else (x % 16 == 0, -(2**31) <= x < 2**31)
    return float


def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """``kernel[(programs,)](*arguments, **constants)``, where constants come last among the kernel's parameters.

    The first call goes through Triton, which compiles the kernel; later ones of the same kind call what it compiled.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    key = (id(kernel), device, *constants.items(), *map(_specialisation, arguments))
    found = _compiled.get(key)
    if found is not None:
        _, compiled, values = found
        compiled[(programs, 1, 1)](*arguments, *values)
        return
    compiled = kernel[(programs,)](*arguments, **constants)
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[key] = kernel, compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])

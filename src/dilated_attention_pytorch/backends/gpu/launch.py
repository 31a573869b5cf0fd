"""Calling compiled kernels directly: Triton's own dispatcher takes longer than a kernel over a short sequence runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from triton.runtime import driver

# A product and a sum as one instruction. Triton's default up to 3.9, which warns that it will change: softmax needs it.
FUSED = {"enable_fp_fusion": True}


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """``kernel[(programs,)](*tensors, *tables, *numbers, **constants)`` for any tensors, in the order of parameters."""

    kernel: Any
    programs: int
    tables: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    constants: dict[str, Any]
    # By all that Triton specialises a kernel on besides: what was compiled, and its arguments behind the tensors.
    compiled: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=dict)

    def first(self, kind: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> None:
        """Launch through Triton, which may compile, and keep what it found."""
        arguments = (*tensors, *self.tables, *self.numbers)
        compiled = self.kernel[(self.programs,)](*arguments, **self.constants, **FUSED)
        if compiled is None:  # the interpreter compiles nothing
            return
        values = (self.constants[name] for name in self.kernel.arg_names[len(arguments) :])
        addresses = (table.data_ptr() for table in self.tables)
        self.compiled[kind] = compiled[(self.programs, 1, 1)], (*addresses, *self.numbers, *values)


def launch(calls: Iterable[Call], tensors: tuple[Tensor, ...]) -> None:
    """Launch kernels over the same tensors, one after the other.

    Of tensors, Triton distinguishes the type and whether they start at a multiple of 16 bytes. Compiled kernels get
    addresses: of a tensor they would ask for its address and then ask the driver whose that is.
    """
    addresses = [x.data_ptr() for x in tensors]
    device = tensors[0].device
    stream = None if device.type != "cuda" else driver.active.get_current_stream(device.index)
    kind = (device, *[address % 16 == 0 for address in addresses], *[x.dtype for x in tensors])
    for call in calls:
        found = call.compiled.get(kind)
        if found is None:
            call.first(kind, tensors)
        else:
            run, values = found
            run(*addresses, *values, stream=stream)


# Of launches without tables of their own, by all that makes them: the call holds the kernel, whose id is in the key.
_calls: dict[tuple[Any, ...], Call] = {}
_MOST = 4096  # then forget all: what was compiled stays with Triton


def launch_one(
    kernel: Any, programs: int, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], constants: dict[str, Any]
) -> None:
    """``kernel[(programs,)](*tensors, *numbers, **constants)``; the first of equal ones goes through Triton."""
    key = (id(kernel), programs, numbers, *constants.items())
    call = _calls.get(key)
    if call is None:
        if len(_calls) >= _MOST:
            _calls.clear()
        call = _calls[key] = Call(kernel, programs, (), numbers, constants)
    launch((call,), tensors)

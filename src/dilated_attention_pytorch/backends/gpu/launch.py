"""Compiled kernels called directly: Triton's own dispatcher takes longer than a kernel over a short sequence runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver

# A product and a sum as one instruction, which softmax needs. Triton up to 3.9 warns that this default will change.
FUSED = {"enable_fp_fusion": True}
_compiling_only: ContextVar[bool] = ContextVar("_compiling_only", default=False)


def compile_side_by_side(call: Callable[[], object]) -> None:
    """Make a call in which ``launch`` compiles kernels and launches none. At its end all are compiled.

    They are compiled in threads: Triton's passes do not hold Python's lock, and the assembler is a process.
    """

    def inside() -> None:
        with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads):
            _compiling_only.set(True)
            call()

    # In a context of its own, because Triton 3.6 does not leave its mode if a compilation fails.
    copy_context().run(inside)


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """How many programs of a GPU run at the same time; the interpreter has two."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@dataclass(frozen=True, slots=True, eq=False)
class KernelLaunch:
    """``kernel[(programs,)](*tensors, *changing, *tables, *numbers, **constants)``, in the order of parameters.

    It serves any tensors, and any values of ``changing`` numbers of one type in the kernel.
    """

    kernel: Any
    programs: int
    tables: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    constants: dict[str, Any]
    # The compiled kernel and its arguments behind the tensors, by everything else that Triton specialises a kernel on.
    compiled: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=dict)

    def compile(self, tensors: tuple[Tensor, ...], changing: tuple[int, ...]) -> None:
        """Let Triton compile the kernel for ``first``, inside of ``compile_side_by_side``."""
        arguments = (*tensors, *changing, *self.tables, *self.numbers)
        self.kernel.warmup(*arguments, grid=(self.programs,), **self.constants, **FUSED)

    def first(self, kind: tuple[Any, ...], tensors: tuple[Tensor, ...], changing: tuple[int, ...]) -> None:
        """Launch through Triton, which may compile, and keep the compiled kernel."""
        arguments = (*tensors, *changing, *self.tables, *self.numbers)
        compiled = self.kernel[(self.programs,)](*arguments, **self.constants, **FUSED)
        if compiled is None:  # the interpreter compiles nothing
            return
        values = (self.constants[name] for name in self.kernel.arg_names[len(arguments) :])
        addresses = (table.data_ptr() for table in self.tables)
        self.compiled[kind] = compiled[(self.programs, 1, 1)], (*addresses, *self.numbers, *values)


def launch(launches: tuple[KernelLaunch, ...], tensors: tuple[Tensor, ...], changing: tuple[int, ...] = ()) -> None:
    """Launch kernels over the same tensors, one after the other. Those that are new are compiled side by side.

    Triton specialises on the type of a tensor, on whether it starts at a multiple of 16 bytes, and on whether a number is 1
    or a multiple of 16. Compiled kernels get addresses: given a tensor, they would ask for its address and then ask the
    driver which device owns it.
    """
    addresses = [x.data_ptr() for x in tensors]
    device = tensors[0].device
    stream = None if device.type != "cuda" else driver.active.get_current_stream(device.index)
    numbers = [x == 1 or 16 * (x % 16 == 0) for x in changing]
    kind = (device, *[address % 16 == 0 for address in addresses], *[x.dtype for x in tensors], *numbers)
    found = [one.compiled.get(kind) for one in launches]
    new = [one for one, known in zip(launches, found, strict=True) if known is None] if None in found else []
    if _compiling_only.get():
        for one in new:
            one.compile(tensors, changing)
        return
    if len(new) > 1 and stream is not None:  # the interpreter compiles nothing
        compile_side_by_side(partial(launch, tuple(new), tensors, changing))
    for one, known in zip(launches, found, strict=True):
        if known is None:
            one.first(kind, tensors, changing)
        else:
            run, values = known
            run(*addresses, *changing, *values, stream=stream)


class _LaunchCache:
    """Launches without tables, by kernel and arguments. The oldest goes when a new one finds no room."""

    def __init__(self, maxsize: int) -> None:
        self.maxsize = maxsize
        self._launches: dict[tuple[Any, ...], KernelLaunch] = {}

    def __len__(self) -> int:
        return len(self._launches)

    def find(self, kernel: Any, programs: int, numbers: tuple[float, ...], constants: dict[str, Any]) -> KernelLaunch:
        """The launch with these arguments. It holds the kernel, so no other kernel gets the identity in the key."""
        # Not the kernel itself: Triton's hash of a kernel is that of its source, which takes longer than the rest.
        key = (id(kernel), programs, numbers, *constants.items())
        found = self._launches.get(key)
        if found is None:
            if len(self._launches) >= self.maxsize:
                self._launches.pop(next(iter(self._launches)), None)
            found = self._launches[key] = KernelLaunch(kernel, programs, (), numbers, constants)
        return found

    def cache_clear(self) -> None:
        """Forget all launches. Compiled kernels stay with Triton."""
        self._launches.clear()


launch_cache = _LaunchCache(maxsize=4096)


def launch_one(
    kernel: Any, programs: int, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], constants: dict[str, Any],
    changing: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """``kernel[(programs,)](*tensors, *changing, *numbers, **constants)``; the first of equal launches uses Triton."""
    launch((launch_cache.find(kernel, programs, numbers, constants),), tensors, changing)

"""Measurements of a call: its time, and the memory that it allocates."""

from __future__ import annotations

import math
import os
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Without this, the profiler announces each start on stderr. It reads the variable when it is first used.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# Parts of the messages of errors that are not of their own type.
_NO_MEMORY = ("can't allocate memory", "out of memory", "bad_alloc", "cannot allocate memory")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(call: Callable[[], Any], device: torch.device, repeats: int = 3) -> float:
    """The median wall-clock time of ``repeats`` calls after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class Spread:
    """The times of a call in several turns, in seconds."""

    median: float
    least: float
    most: float
    turns: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread:
        """The spread of the times of turns.

        >>> Spread.of([0.3, 0.1, 0.2])
        Spread(median=0.2, least=0.1, most=0.3, turns=3)
        """
        return Spread(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def turn_seconds(call: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """The mean time of a call in a turn that lasts about ``seconds``. It has at least one call.

    On a GPU, calls are queued one after the other, as in training, after as many that are not counted. Attention brings
    an H200 to its power limit of 700 W. Its clock is then 7 to 20 % below that of the first milliseconds. Kernels are
    compared in that state, which needs at least 0.4 seconds of calls before. On a CPU, no call is left out, so the
    caller makes one before the first turn.
    """
    if device.type == "cuda":
        return _queued_seconds(call, device, seconds)
    count, start = 0, time.perf_counter()
    while True:
        call()
        count += 1
        passed = time.perf_counter() - start
        if passed >= seconds:
            return passed / count


def _queued_seconds(call: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """The mean time of calls that are queued, by events.

    A call that is longer than the turn is its own warm-up: one call that is not counted, and one that is.
    """
    once = median_seconds(call, device, 1)
    if once >= seconds > 0.0:
        return once
    calls = max(3, math.ceil(seconds / once))
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for event in (start, stop):
        for _ in range(calls):
            call()
        event.record(torch.cuda.current_stream(device))
    _synchronize(device)
    return float(start.elapsed_time(stop)) / 1e3 / calls


def peak_extra_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The largest memory that the call had allocated at a time, its result included.

    On a CPU, the profiler counts every allocation of PyTorch's allocator. The result is too low for a call that frees
    tensors made before it. On the meta device, the bytes of the tensors that would be allocated are counted.
    """
    if device.type == "meta":
        counted = _MetaBytes()
        with counted:
            result = call()
        del result
        return counted.peak
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    del result
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    changes = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    in_use = peak = 0
    for event in sorted(changes, key=lambda e: e.start_ns()):
        in_use += event.nbytes()
        peak = max(peak, in_use)
    return peak


def device_memory(device: torch.device) -> int | None:
    """The bytes of memory of a GPU, or those of the machine that this process may use; None where they are not known."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([memory, *(limit for limit, _ in _container_memory())])


def available_memory() -> int | None:
    """The bytes that new processes can use without swapping, within the limit of a container; None if not known."""
    lines = _lines(Path("/proc/meminfo"))
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if not free:
        return None
    return max(0, min([*free, *(limit - used for limit, used in _container_memory())]))


def _container_memory() -> list[tuple[int, int]]:
    """The limit of a container and what is used of it, in bytes, if there is one."""
    root = Path("/sys/fs/cgroup")
    names = (
        ("memory.max", "memory.current"),  # of cgroups of version 2, and of version 1
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    )
    found = ((_lines(root / limit), _lines(root / used)) for limit, used in names)
    return [(int(limit[0]), int(used[0])) for limit, used in found if limit and used and limit[0].isdigit()]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


class _MetaBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors on the meta device that are made inside, as long as they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.in_use = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            self._count(x, 0)  # made before, or known already
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            self._count(x, 1)
        return result

    def _count(self, x: Any, factor: int) -> None:
        if not isinstance(x, Tensor) or not x.is_meta:
            return
        storage = x.untyped_storage()
        key, size = storage._cdata, factor * storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.in_use += size
            self.peak = max(self.peak, self.in_use)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.in_use -= size


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that memory was not enough. That of a CPU is a RuntimeError like others.

    >>> lacks_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory")), lacks_memory(RuntimeError("no kernel"))
    (True, False)
    """
    text = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(x in text for x in _NO_MEMORY)

"""Measurements of a call: its time, and the memory that it allocates."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# Without this, the profiler announces each start on stderr. It reads the variable when it is first used.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


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


def peak_extra_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The largest memory that the call had allocated at a time, its result included.

    On a CPU, the profiler counts every allocation of PyTorch's allocator. The result is too low for a call that frees
    tensors made before it.
    """
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
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(memory, int(text)) if text.isdigit() else memory

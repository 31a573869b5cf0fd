"""Processes for tests of several ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

# Importing PyTorch takes a rank 3 seconds. So one process does it, without threads and devices, and ranks are forks of it.
multiprocessing.set_forkserver_preload(["torch.distributed", "dilated_attention_pytorch", "pytest", "hypothesis"])


def start(work: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """``work(rank, *arguments)`` in so many processes; raises what one of them raises."""
    mp.start_processes(work, arguments, nprocs=ranks, start_method="forkserver")

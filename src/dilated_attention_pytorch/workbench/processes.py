"""Processes of one machine that form a group, and what they send to the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_POLL_S = 0.2
Send = Callable[[Any], None]


class ProcessError(RuntimeError):
    """A process of a group that has failed."""


def rank_device(device: torch.device, world: int, rank: int) -> torch.device:
    """The device of a rank, with its number: a GPU of its own if there are enough, else the given one."""
    if device.type != "cuda":
        return device
    return torch.device("cuda", rank if _enough_gpus(world) else device.index or 0)


def _enough_gpus(world: int) -> bool:
    return torch.cuda.device_count() >= world


def run_ranks(world: int, device: torch.device, function: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Call ``function(rank, device, send, *arguments)`` in ``world`` processes, and yield what they send.

    The processes form the default group: gloo, and NCCL beside it if every rank has a GPU of its own. On a CPU each has
    one thread. They ignore Ctrl-C. They end when the iterator is closed, or when this process is killed. A ProcessError
    says why one has failed.
    """
    context = mp.get_context("spawn")
    sent = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(
                target=_run, args=(rank, world, device, f"{folder}/store", sent, function, arguments), daemon=True
            )
            for rank in range(world)
        ]
        try:
            with _interrupts_blocked():
                for process in started:
                    process.start()
            running = world
            while running:
                try:
                    kind, content = sent.get(timeout=_POLL_S)
                except queue.Empty:
                    codes = [x.exitcode for x in started if x.exitcode]
                    if codes:
                        raise ProcessError(f"a process of {world} ended with exit code {codes[0]}") from None
                    continue
                if kind == "failed":
                    raise ProcessError(content)
                if kind == "ended":
                    running -= 1
                else:
                    yield content
            for process in started:
                process.join()
        finally:
            for process in started:
                if process.is_alive():
                    process.kill()  # a wait of gloo cannot be interrupted
                if process.pid is not None:
                    process.join()
            sent.close()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Start processes with Ctrl-C blocked inside of this context. It would interrupt their import of PyTorch."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # an interrupt in between is delivered now


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(
    rank: int, world: int, device: torch.device, store: str, sent: Any, function: Callable[..., None], arguments: Any
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    own = rank_device(device, world, rank)
    if own.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(own)
    backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" and _enough_gpus(world) else "gloo"
    try:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
        function(rank, own, lambda content: sent.put(("content", content)), *arguments)
        dist.barrier()  # no rank closes its connections while another one still waits
    except (RuntimeError, ValueError, OSError) as error:
        sent.put(("failed", f"rank {rank} of {world}: {type(error).__name__}: {' '.join(str(error).split())}"))
        return
    dist.destroy_process_group()
    sent.put(("ended", rank))

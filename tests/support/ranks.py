"""Rank processes for tests. They live as long as the test run, because a start takes longer than most tests.

    def check(group, case): ...             runs in every rank; ``group`` is the process group of the test

    def test_case(on_ranks, case):
        on_ranks(3, check, case)            fails with the traceback of each rank that failed

Each call initialises a new default process group in the same processes. A failed call ends all processes of the pool,
and the next call starts new ones. A test that stalls or kills ranks uses a pool of its own: ``with Pool() as pool``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

# Imports take 5 seconds of a rank's time. One process does them without starting threads, and ranks are forks of it.
# With a GPU it leaves out what may initialise CUDA, which must not happen before a fork.
PRELOAD = ["torch.distributed", "dilated_attention_pytorch", "pytest", "hypothesis"]
if not torch.cuda.is_available():
    PRELOAD += ["torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.nn.parallel", "torch.testing"]
    PRELOAD += ["dilated_attention_pytorch.nn", "dilated_attention_pytorch.distributed"]
    # What compiled models and interpreted kernels import.
    PRELOAD += ["networkx", "torch._functorch.aot_autograd", "triton.experimental.gluon"]
    PRELOAD += ["dilated_attention_pytorch.backends.gpu.portable"]
multiprocessing.set_forkserver_preload(PRELOAD)
_CONTEXT = multiprocessing.get_context("forkserver")
LIMIT_S = 300.0  # a call that takes longer hangs
GRACE_S = 3.0  # after a rank has failed, for the reports of the others


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """A fixed seed, and NaN in memory from ``torch.empty``, so that an element that nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    # torch.manual_seed formats the stack three times for devices that are not there, which takes as long as a small test.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _run(rank: int, job: bytes) -> None:
    """One call in one rank. The group of the last call is destroyed here, when no rank uses it any more."""
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    function, arguments, store, world, spare, timeout_s = pickle.loads(job)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world + spare, timeout=timeout)
    group = dist.new_group(list(range(spare, world + spare))) if spare else dist.group.WORLD
    if rank >= spare:
        with fresh():
            function(group, *arguments)


def _serve(rank: int, pipe: Connection) -> None:
    with contextlib.suppress(EOFError):  # the pool was closed
        while True:
            job = pipe.recv_bytes()
            faulthandler.dump_traceback_later(LIMIT_S)
            try:
                _run(rank, job)
                report = ""
            except BaseException:  # noqa: BLE001  whatever it is, the test shows it
                report = traceback.format_exc()
            faulthandler.cancel_dump_traceback_later()
            pipe.send(report)


class Pool:
    """Processes that are ranks 0, 1, 2, ... of the groups of one call after another."""

    def __init__(self) -> None:
        self._processes: dict[int, tuple[multiprocessing.process.BaseProcess, Connection]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self._stores = itertools.count()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_processes()
        self._folder.cleanup()

    def end_processes(self) -> None:
        for process, pipe in self._processes.values():
            process.kill()
            process.join()
            pipe.close()
        self._processes.clear()

    def _process(self, rank: int) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        if rank not in self._processes:
            here, there = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, there), daemon=True)
            process.start()
            there.close()
            self._processes[rank] = process, here
        return self._processes[rank]

    def run(
        self,
        world: int,
        function: Callable[..., None],
        *arguments: Any,
        spare: int = 0,
        leaving: Collection[int] = (),
        timeout_s: float = 120.0,
    ) -> None:
        """``function(group, *arguments)`` in every rank of a group of size ``world``.

        With ``spare`` ranks the group is not the default group: it begins at that rank of a larger one. Ranks in
        ``leaving`` must end their process with code 0. ``timeout_s`` is the timeout of the process group.
        """
        __tracebackhide__ = True
        store = f"{self._folder.name}/{next(self._stores)}"
        job = pickle.dumps((function, arguments, store, world, spare, timeout_s))
        waiting = {}
        for rank in range(world + spare):
            process, pipe = self._process(rank)
            pipe.send_bytes(job)
            waiting[pipe] = rank, process
        reports: list[str] = []
        deadline = time.monotonic() + LIMIT_S
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank, process = waiting.pop(pipe)
                try:
                    report = pipe.recv()
                    if rank in leaving:
                        report += "the process did not end"
                except (EOFError, ConnectionResetError):
                    process.join()
                    pipe.close()
                    del self._processes[rank]
                    expected = rank in leaving and process.exitcode == 0
                    report = "" if expected else f"the process ended with code {process.exitcode}"
                if report:
                    reports.append(f"rank {rank} of {world + spare}: {report}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if waiting:
            reports.append(f"ranks {', '.join(str(rank) for rank, _ in waiting.values())} did not finish")
        if reports:
            self.end_processes()
            pytest.fail("\n".join(reports), pytrace=False)

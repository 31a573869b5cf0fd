"""Processes that form a group on this machine: Ctrl-C while they start, and the end of the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")

# The ranks send their numbers and then wait for what does not happen.
PROGRAM = """
import os, signal, threading

import torch

from dilated_attention_pytorch.workbench.processes import run_ranks


def work(rank, device, send):
    send(os.getpid())
    threading.Event().wait()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    for pid in run_ranks(2, torch.device("cpu"), work):
        print(pid, flush=True)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition) -> bool:
    end = time.monotonic() + 60.0
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@contextmanager
def started(tmp_path) -> Iterator[subprocess.Popen]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    # A session of its own: Ctrl-C reaches all processes of it, as in a terminal.
    with subprocess.Popen(
        [sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_ranks_end_when_their_parent_is_killed(tmp_path):
    with started(tmp_path) as process:
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        assert all(map(is_alive, ranks))
        process.kill()
        assert wait_for(lambda: not any(map(is_alive, ranks)))


def blocks_interrupts(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    blocked = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:"))
    return bool(blocked >> (signal.SIGINT - 1) & 1)


def test_ranks_begin_with_interrupts_blocked(tmp_path):
    """While they import PyTorch, they cannot ignore Ctrl-C yet. The process that starts them is interrupted as usual."""
    with started(tmp_path) as process:
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        assert all(map(blocks_interrupts, ranks))
        assert not blocks_interrupts(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert errors.count("KeyboardInterrupt") == 1
    assert wait_for(lambda: not any(map(is_alive, ranks)))

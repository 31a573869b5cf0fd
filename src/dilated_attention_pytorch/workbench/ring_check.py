"""A check of sharded attention: two processes over gloo on this machine, against the definition."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from dilated_attention_pytorch.workbench.backend_checks import NAMES, ExactnessCheck, tolerance
from dilated_attention_pytorch.workbench.children import command_line, describe_exit, last_line

WORLD = 2
_PROGRAM = "from dilated_attention_pytorch.workbench.ring_rank import main; main()"


def check_ring(limit_s: float) -> ExactnessCheck:
    """Run two ranks on the CPU. The errors are the largest of both ranks; a rank that fails or hangs is a problem."""
    start, allowed = time.monotonic(), tolerance(torch.float32)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        store = str(Path(folder, "store"))
        ranks = []
        for rank in range(WORLD):
            command = command_line(_PROGRAM, str(rank), str(WORLD), store, str(limit_s))
            ranks.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    start_new_session=True,
                )
            )  # fmt: skip
            stack.callback(_end, ranks[-1])
        told, problem = [], None
        for rank, process in enumerate(ranks):
            try:
                stdout, stderr = process.communicate(timeout=max(0.0, start + limit_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                problem = problem or f"rank {rank} has not finished within {limit_s:g} s"
                break
            if process.returncode != 0:
                problem = problem or f"rank {rank} {describe_exit(process.returncode)}: {last_line(stderr)}"
                continue
            told.append(json.loads(last_line(stdout)))
    seconds = time.monotonic() - start
    if problem is not None:
        return ExactnessCheck((), allowed, seconds, problem)
    return ExactnessCheck(tuple((name, max(x[name] for x in told)) for name in NAMES), allowed, seconds)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()

"""A check of sharded attention: two processes over gloo on this machine, against the definition."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dilated_attention_pytorch.api import attention
from dilated_attention_pytorch.distributed import shard_sequence
from dilated_attention_pytorch.workbench.children import command_line, describe_exit, last_line
from dilated_attention_pytorch.workbench.exactness import NAMES, PATTERN, ExactnessCheck, Example, compare, tolerance

WORLD = 2
_PROGRAM = "from dilated_attention_pytorch.workbench.ring_check import main; main()"


def check_ring(limit_s: float) -> ExactnessCheck:
    """Run two ranks on the CPU. The errors are the largest of both ranks; a rank that fails or hangs is a problem."""
    start, allowed = time.monotonic(), tolerance(torch.float32)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        store = str(Path(folder, "store"))
        ranks = []
        for rank in range(WORLD):
            command = command_line(_PROGRAM, str(rank), store, str(limit_s))
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


def main() -> None:
    """One rank. The arguments are its number, the file by which the ranks meet, and the limit in seconds."""
    rank, store, limit_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    address = Path(store).as_uri()
    limit = timedelta(seconds=limit_s)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD, timeout=limit)
    group = dist.group.WORLD
    assert group is not None
    example = Example.make(torch.float32)
    query, key, value = inputs = [shard_sequence(x, group).requires_grad_() for x in example.inputs]

    def shard(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 4:
            return shard_sequence(x, group)
        return shard_sequence(x.transpose(1, 2), group).transpose(1, 2)  # lse has positions last

    out, lse = attention(query, key, value, PATTERN, is_causal=True, group=group, return_lse=True)
    grads = torch.autograd.grad((out, lse), inputs, (shard(example.dout), shard(example.dlse)))
    errors = dict(compare((out, lse, *grads), [shard(x) for x in example.expected]))
    dist.destroy_process_group()
    print(json.dumps(errors))

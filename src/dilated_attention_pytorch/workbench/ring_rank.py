"""The program of a rank in ``check_ring``. Importing it imports the compiler of PyTorch, which takes seconds."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dilated_attention_pytorch.api import attention
from dilated_attention_pytorch.distributed import shard_sequence
from dilated_attention_pytorch.workbench.backend_checks import PATTERN, Example, compare


def main() -> None:
    """Run one rank, and print its errors as JSON.

    The arguments are its number, the number of ranks, the file by which they meet, and the limit in seconds.
    """
    rank, world, store, limit_s = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=Path(store).as_uri(), rank=int(rank), world_size=int(world),
        timeout=timedelta(seconds=float(limit_s)),
    )  # fmt: skip
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

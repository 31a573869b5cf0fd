"""One text over several processes: dilated attention of a sharded sequence, next to one device.

    torchrun --nproc-per-node 4 examples/ring.py [--tokens 8192] [--backend nccl] [--check]

Each rank takes its rows of a real text (the Python standard library's sources), attends with the others, forward and
backward, and prints the largest difference from one device, the bytes it received and the memory it took.

``--check`` runs a self-test of about a minute instead, and prints a report (see ``ring_check.py``).
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from ring_check import check

from dilated_attention_pytorch import Dilated, attention
from dilated_attention_pytorch.cli.demo import embed, standard_library
from dilated_attention_pytorch.distributed import Shards, gather_sequence, local_device, shard_sequence
from dilated_attention_pytorch.distributed.schedules import DilatedSchedule
from dilated_attention_pytorch.measure import peak_extra_bytes

LAYOUT = "zigzag"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--backend", default="gloo", help="nccl takes a GPU for every rank")
    parser.add_argument("--check", action="store_true", help="run the self-test and print a report for an issue")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.check:
        sys.exit(check(options.backend))
    dist.init_process_group(options.backend)
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = local_device()
        torch.cuda.set_device(device)
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    pattern = Dilated([1024, 4096, options.tokens], [1, 4, 16])
    whole = embed(standard_library(options.tokens), device, torch.float32)
    mine = [shard_sequence(x, group, layout=LAYOUT).requires_grad_() for x in whole]

    def step() -> list[torch.Tensor]:
        out = attention(*mine, pattern, is_causal=True, group=group, layout=LAYOUT)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), mine)]

    memory = peak_extra_bytes(step, device)
    gathered = [gather_sequence(x, group, layout=LAYOUT).detach() for x in step()]

    inputs = [x.requires_grad_() for x in whole]
    out = attention(*inputs, pattern, is_causal=True)
    expected = [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]
    errors = [float((a - e).norm() / e.norm()) for a, e in zip(gathered, expected, strict=True)]

    shards = Shards.even(options.tokens, world, LAYOUT)
    schedule = DilatedSchedule(pattern, shards, whole[1].shape[2], is_causal=True)
    row_bytes = whole[1][0, 0].numel() * 2 * 4  # of keys and values
    received, dense = (rows * row_bytes for rows in (schedule.received_rows(rank), options.tokens - shards.rows(rank)))
    lines: list[str | None] = [None] * world
    own = mine[0].numel() * 4
    dist.all_gather_object(
        lines,
        f"rank {rank}: {shards.rows(rank):,} tokens, received {received / 2**20:.2f} MiB forward (a dense ring: "
        f"{dense / 2**20:.2f}), took {memory / own:.1f} x the memory of its queries",
        group=group,
    )
    if rank == 0:
        print("\n".join(map(str, lines)))
        names = ("out", "dq", "dk", "dv")
        print("difference from one device: " + ", ".join(f"{n} {e:.1e}" for n, e in zip(names, errors, strict=True)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""How evenly are lists of blocks spread over the multiprocessors of a GPU? By counting: no GPU is needed.

    python benchmarks/blocks_balance.py

The masks are random as in blocks_gpu.py: 65,536 tokens in blocks of 128, 16 heads, 132 multiprocessors. Long lists of a
head come first, as in the tables. The output is the load of the most loaded multiprocessor over the mean: for items
that are assigned round-robin, and for items that the next free multiprocessor takes.
"""

from __future__ import annotations

import argparse
import heapq

import torch

BLOCKS, HEADS, MULTIPROCESSORS = 512, 16, 132


def lengths(density: float) -> list[int]:
    """Of all lists, in the order of items."""
    mask = torch.rand(BLOCKS, BLOCKS, generator=torch.Generator().manual_seed(0)) < density
    mask |= torch.eye(BLOCKS, dtype=torch.bool)
    return sorted(mask.sum(1).tolist(), reverse=True) * HEADS


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("density  in turns  as they come")
    for density in (0.05, 0.1, 0.25):
        items = lengths(density)
        in_turns = [sum(items[i::MULTIPROCESSORS]) for i in range(MULTIPROCESSORS)]
        taken = [0] * MULTIPROCESSORS
        for length in items:
            heapq.heapreplace(taken, taken[0] + length)
        mean = sum(items) / MULTIPROCESSORS
        print(f"{density:7} {max(in_turns) / mean:9.4f} {max(taken) / mean:13.4f}")


if __name__ == "__main__":
    main()

"""Does the order in which a kernel walks its tiles matter? Time, and how often reads hit the L2 cache.

    PYTHONPATH=src python3 benchmarks/tile_order.py [--out FILE]
    PYTHONPATH=src ncu --kernel-name regex:block_forward --metrics lts__t_sector_hit_rate.pct,dram__bytes_read.sum \
        python3 benchmarks/tile_order.py --once

The forward kernel over block lists takes its query blocks in the order of a table, so any order can be given to it: as they
lie, along a Hilbert curve over a square of them, or at random. ``--once`` launches each case once, for the profiler.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from gpu import GPU, milliseconds

from dilated_attention_pytorch import BlockSparse, Hilbert, SparsePatternConfig
from dilated_attention_pytorch.backends.hopper import block_run
from dilated_attention_pytorch.blocks import call as block_call
from dilated_attention_pytorch.blocks import ops as block_ops

BLOCK, HEADS, HEAD_DIM = 128, 16, 64
CASES = {
    "window of 2,048, 262,144 tokens": (2**18, SparsePatternConfig("local_window", 2048 / 2**18, block_size=BLOCK)),
    "dense, 65,536 tokens": (2**16, SparsePatternConfig("local_window", 1.0, block_size=BLOCK)),
}


def orders(blocks: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "as they lie": torch.arange(blocks),
        "Hilbert": Hilbert.line(blocks).positions,
        "random": torch.randperm(blocks, generator=generator),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for name, (n, config) in CASES.items():
        q, k, v = (torch.randn((1, n, HEADS, HEAD_DIM), device=GPU, dtype=torch.bfloat16) for _ in range(3))
        arguments = block_call.list_arguments(q, k, BlockSparse.from_config(config), None, None, False, 1.0)
        table, _ = block_ops.block_tables(q, k, *arguments)
        in_place = table.rows[table.rows[:, 1].argsort()]  # by query block
        for order, positions in orders(n // BLOCK).items():
            walked = replace(table, rows=in_place[positions.to(GPU)].contiguous())

            def call(walked=walked, q=q, k=k, v=v):
                return block_run.forward(walked, q, k, v, block_size=BLOCK, is_causal=False, scale=0.125)

            if options.once:
                call()
                torch.cuda.synchronize()
                continue
            rows.append({"case": name, "order": order, "ms": milliseconds(call, 15)})
            print(f"{name:34s} {order:12s} {rows[-1]['ms']:8.3f} ms", flush=True)
    if options.out:
        report = {
            "command": "PYTHONPATH=src python3 benchmarks/tile_order.py",
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "rows": rows,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How long does it take to make the lists of block-sparse patterns, and the tables that kernels read, for a million
tokens?

    python benchmarks/blocks_plan.py [--out FILE]

The times are milliseconds of one thread of the processor, the least of seven, so that
other load on the machine counts little. Lists and tables are made once for a shape and cached; the table by key block
is made with the first backward.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dilated_attention_pytorch import SparsePatternConfig
from dilated_attention_pytorch.backends.gpu.block_tables import BlockTables
from dilated_attention_pytorch.plan.problem import BlockRule, Problem

TOKENS, BLOCK_SIZE = 2**20, 128
SETTINGS: dict[str, dict[str, Any]] = {
    "local_window": {},
    "global_local": {},
    "dilated_sparse": {"segment_lengths": [4096, 65536, 2**20], "dilation_rates": [1, 4, 16]},
    "hierarchical": {},
}


def milliseconds(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(7):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    blocks = TOKENS // BLOCK_SIZE
    print("pattern          ratio     entries  lists ms  by query ms  by key ms")
    for kind, of_kind in SETTINGS.items():
        for ratio in (1 / 512, 0.01, 0.1):
            config = SparsePatternConfig(kind, ratio, BLOCK_SIZE, **of_kind)
            made = config.lists(0, blocks, True)
            problem = Problem(BlockRule(BLOCK_SIZE, config), True, 1, TOKENS, TOKENS, 1, 1)
            (span,) = problem.spans()
            tables = BlockTables(problem, [(span, made)], torch.device("cpu"))
            row = {
                "pattern_type": kind,
                "sparsity_ratio": ratio,
                "entries": int(made.counts.sum()),
                "lists_ms": max(milliseconds(lambda c=config, x=x: c.lists(0, blocks, x)) for x in (False, True)),
                "by_query_ms": milliseconds(partial(BlockTables.by_query.func, tables)),
                "by_key_ms": milliseconds(partial(BlockTables.by_key.func, tables)),
            }
            rows.append(row)
            print(
                f"{kind:15s} {ratio:7.4f} {row['entries']:11,} {row['lists_ms']:9.1f} {row['by_query_ms']:12.1f} "
                f"{row['by_key_ms']:10.1f}"
            )
    report = {
        "command": "python benchmarks/blocks_plan.py",
        "tokens": TOKENS,
        "block_size": BLOCK_SIZE,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The command ``bench``. What it does is imported when it runs, because the imports take seconds."""

from __future__ import annotations

import inspect
from typing import Any

from dilated_attention_pytorch.cli.bench_options import BenchOptions


def bench(**options: Any) -> None:
    """Measure attention on this machine: time, rate and memory, with the error beside every speed.

    Each method is first compared with the definition in float64. A method that is wrong gets no time, and the exit
    code is 1. The methods of a suite then take turns. Times are medians over turns.

    \b
    Suites:
      single     LongNet's patterns by each backend, beside dense attention
      ring       2 and 4 processes that share a sequence, beside one
      sparse     block-sparse patterns by density, beside dense attention
      streaming  chunks and single tokens through DilatedKVCache
      peers      PyTorch's kernels, FlexAttention, the authors' method and other libraries

    \b
    Examples:
      dilated-attention bench
      dilated-attention bench peers --tokens 8k --causal
      dilated-attention bench single sparse --json before.json
      dilated-attention bench single sparse --compare before.json --tolerance 5
    """
    from dilated_attention_pytorch.cli.bench_run import run_bench

    run_bench(BenchOptions(**options))


bench.__signature__ = inspect.signature(BenchOptions, eval_str=True)  # type: ignore[attr-defined]

"""The command ``bench``: its options. What it does is imported when it runs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

_SUITES = "single, ring, sparse, streaming, peers"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options as they are given. Typer reads the fields."""

    suites: Annotated[list[str] | None, typer.Argument(help=f"{_SUITES}. By default single.")] = None
    tokens: Annotated[str | None, typer.Option(help="Of each sequence, such as 65536 or 64k. By default by suite.")] = None
    heads: Annotated[int | None, typer.Option(help="The number of heads. By default by suite.")] = None
    head_dim: Annotated[int | None, typer.Option(help="The size of a head. By default by suite.")] = None
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. By default bfloat16, float32 on a CPU.")
    ] = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:NUMBER. By default the GPU, if any.")] = None
    causal: Annotated[bool, typer.Option("--causal", help="A token sees itself and earlier tokens only.")] = False
    only: Annotated[str | None, typer.Option(help="Settings and methods of the tables, separated by commas.")] = None
    turns: Annotated[int | None, typer.Option(help="Times of each call. By default 5 on a GPU, 3 on a CPU.")] = None
    seconds: Annotated[float | None, typer.Option(help="Of a turn. By default 0.4 on a GPU, 0.1 on a CPU.")] = None
    compare: Annotated[Path | None, typer.Option(help="A file of --json of an earlier run to compare with.")] = None
    tolerance: Annotated[float, typer.Option(help="Percent by which a figure may grow with --compare.")] = 10.0
    json: Annotated[str | None, typer.Option(help="A file for all figures, or - for standard output.")] = None
    plot: Annotated[Path | None, typer.Option(help="A .png or .svg file: the rates of all rows.")] = None
    quiet: Annotated[bool, typer.Option("--quiet", help="Print neither progress nor tables.")] = False


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

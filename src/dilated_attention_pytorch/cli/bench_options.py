"""The options of the command ``bench``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

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

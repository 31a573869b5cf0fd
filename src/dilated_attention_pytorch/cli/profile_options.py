"""The options of the command ``profile``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """The options as they are given. Typer reads the fields."""

    tokens: Annotated[str | None, typer.Option(help="Of the call, such as 64k. By default 8192, on a GPU 256Ki.")] = None
    heads: Annotated[int | None, typer.Option(help="The number of heads of the call. The default is 8.")] = None
    head_dim: Annotated[int | None, typer.Option(help="The size of a head of the call. The default is 64.")] = None
    segment_lengths: Annotated[
        str | None, typer.Option(help="The pattern: integers separated by commas. By default 2048 * 4**i.")
    ] = None
    dilation_rates: Annotated[str | None, typer.Option(help="As many integers as segment lengths.")] = None
    causal: Annotated[bool, typer.Option("--causal", help="A token sees itself and earlier tokens only.")] = False
    backward: Annotated[bool, typer.Option("--backward", help="Profile the backward of the call as well.")] = False
    backend: Annotated[str | None, typer.Option(help="Of the call. By default the library chooses.")] = None
    preset: Annotated[str | None, typer.Option(help="Profile a training step of this decoder: tiny, small, ...")] = None
    context: Annotated[str | None, typer.Option(help="The tokens of the training step. The default is 1024.")] = None
    ranks: Annotated[int | None, typer.Option(help="Processes that share the sequence. The default is 1.")] = None
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. By default bfloat16, float32 on a CPU.")
    ] = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:NUMBER. By default the GPU, if any.")] = None
    top: Annotated[int, typer.Option(help="How many operators are listed.")] = 10
    trace: Annotated[Path | None, typer.Option(help="A .json file for Perfetto or chrome://tracing.")] = None
    json: Annotated[str | None, typer.Option(help="A file for all figures, or - for standard output.")] = None
    plot: Annotated[Path | None, typer.Option(help="A .png or .svg file: memory and operators over time.")] = None
    quiet: Annotated[bool, typer.Option("--quiet", help="Print neither progress nor tables.")] = False

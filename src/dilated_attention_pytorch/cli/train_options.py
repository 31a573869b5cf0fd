"""The options of the commands ``train`` and ``score``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """The options as they are given. Typer reads the fields."""

    data: Annotated[list[Path] | None, typer.Argument(help="Files, folders. By default Python's standard library.")] = None
    preset: Annotated[str | None, typer.Option(help="Of the model. By default small on a GPU, tiny on a CPU.")] = None
    context: Annotated[int | None, typer.Option(help="Tokens of a window. By default 65_536, 1_024 on a CPU.")] = None
    steps: Annotated[int | None, typer.Option(help="By default 1_000 on a GPU, 100 on a CPU.")] = None
    batch: Annotated[int | None, typer.Option(help="Windows of a step. By default 4 on a GPU, 2 on a CPU.")] = None
    accumulate: Annotated[int, typer.Option(help="Shares of the batch that are computed one after another.")] = 1
    lr: Annotated[float, typer.Option(help="The largest learning rate.")] = 1e-3
    warm_up: Annotated[int, typer.Option(help="Steps in which the learning rate grows.")] = 20
    clip: Annotated[float, typer.Option(help="The largest norm of the gradients.")] = 1.0
    dropout: Annotated[float | None, typer.Option(help="By default that of the preset.")] = None
    tokens: Annotated[str, typer.Option(help="bytes, bases (FASTA), or auto, which decides by the names.")] = "auto"
    held_out: Annotated[float, typer.Option(help="The share of the tokens, at the end, that is only evaluated.")] = 0.05
    evaluate_every: Annotated[int, typer.Option(help="Steps between two evaluations of held-out windows.")] = 50
    segment_lengths: Annotated[str | None, typer.Option(help="Another pattern: integers separated by commas.")] = None
    dilation_rates: Annotated[str | None, typer.Option(help="As many integers as segment lengths.")] = None
    recompute: Annotated[bool, typer.Option("--recompute", help="Compute activations again in the backward.")] = False
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16. By default bfloat16 on a GPU.")] = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:NUMBER. By default the GPU, if any.")] = None
    seed: Annotated[int, typer.Option(help="Of the parameters, the order of windows and dropout.")] = 0
    sequence_ranks: Annotated[int, typer.Option(help="With torchrun: ranks that share each window.")] = 1
    out: Annotated[Path, typer.Option(help="The folder of checkpoints, log and picture. A run in it goes on.")] = Path(
        "train-output"
    )
    every: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 50
    keep: Annotated[int, typer.Option(help="The number of checkpoints that are kept.")] = 2
    json: Annotated[str | None, typer.Option(help="A file for all figures, or - for standard output.")] = None
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Draw no picture of the losses.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Print neither progress nor the table.")] = False


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """The options as they are given. Typer reads the fields."""

    model: Annotated[Path, typer.Argument(help="The folder of a training run, or of save_pretrained.")]
    data: Annotated[list[Path], typer.Argument(help="Files and folders, read as one sequence.")]
    tokens: Annotated[str, typer.Option(help="bytes, bases (FASTA), or auto: those of the run.")] = "auto"
    chunk: Annotated[int | None, typer.Option(help="Tokens per call. By default 65_536 on a GPU, 4_096 on a CPU.")] = None
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16. By default bfloat16 on a GPU.")] = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:NUMBER. By default the GPU, if any.")] = None
    cache: Annotated[Path | None, typer.Option(help="A folder for unpacked files. By default a temporary one.")] = None
    bins: Annotated[int, typer.Option(help="Equal ranges of the file whose means are reported.")] = 1000
    log_probabilities: Annotated[Path | None, typer.Option(help="A file for a float32 number per token, in nats.")] = None
    json: Annotated[str | None, typer.Option(help="A file for all figures, or - for standard output.")] = None
    plot: Annotated[Path | None, typer.Option(help="A .png or .svg file: bits per token along the file.")] = None
    quiet: Annotated[bool, typer.Option("--quiet", help="Print neither progress nor the table.")] = False

"""The commands of ``dilated-attention`` and what they print: progress, table and numbers."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from dilated_attention_pytorch import __version__
from dilated_attention_pytorch.cli.bench import bench
from dilated_attention_pytorch.cli.demo import HEAD_DIM, HEADS, Row, Settings, choose_device, make_settings, measure
from dilated_attention_pytorch.cli.doctor import doctor
from dilated_attention_pytorch.cli.maxlen import maxlen
from dilated_attention_pytorch.cli.outputs import Outputs, check_file, device_name, make_folder, save_picture, versions
from dilated_attention_pytorch.cli.plan import plan
from dilated_attention_pytorch.cli.profile import profile
from dilated_attention_pytorch.cli.show_commands import show
from dilated_attention_pytorch.cli.stream import stream
from dilated_attention_pytorch.cli.streams import interruptible
from dilated_attention_pytorch.cli.train import score, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Errors are plain text, because panels are hard to read in a log.
app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dilated-attention {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Exact dilated attention over very long sequences."""


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Use shorter texts: 20 seconds instead of two minutes.")] = False,
    causal: Annotated[bool, typer.Option("--causal", help="A token sees itself and earlier tokens only.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:NUMBER. By default the GPU, if any.")] = None,
    output: Annotated[Path, typer.Option(help="The folder for the two pictures.")] = Path("demo-output"),
    max_tokens: Annotated[int | None, typer.Option(help="The length of the longest text, if the time allows it.")] = None,
    json: Annotated[str | None, typer.Option(help="A file for all figures, or - for standard output.")] = None,
) -> None:
    """Run dilated attention on a real text of growing length, next to dense attention, and check the result.

    \b
    Examples:
      dilated-attention demo --quick
      dilated-attention demo --causal --max-tokens 32768 --json demo.json
    """
    # Other commands run without matplotlib. It comes first, so that a missing package is reported before the measurements.
    from dilated_attention_pytorch.cli.pictures import pattern_picture, scaling_picture

    outputs = Outputs(json)
    try:
        settings = make_settings(quick=quick, is_causal=causal, device=choose_device(device), max_tokens=max_tokens)
        outputs.check()
    except ValueError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from None
    paths = (output / "pattern.png", output / "scaling.png")
    for path in paths:
        _check_output(path, "folder")
    console = outputs.console()
    title = _title(settings)
    console.print(f"{title}\nText: the sources of Python {platform.python_version()}'s standard library, a token per byte.")
    rows: list[Row] = []
    try:
        with interruptible(), _progress(console, rows) as step:
            for row in measure(settings, step):
                rows.append(row)
    except KeyboardInterrupt:
        _print_results(console, rows)
        finished = f"{len(rows)} of {len(settings.lengths)} lengths are finished"
        typer.echo(f"Interrupted: {finished}, no picture was drawn.", err=True)
        raise typer.Exit(130) from None
    except torch.OutOfMemoryError:
        # The shorter lengths are complete, so their results are shown.
        reason = f"{settings.device} has too little memory for more"
    else:
        reason = f"it would take more than the demo's {settings.budget_s:.0f} s"
    _print_results(console, rows)
    if left_out := settings.lengths[len(rows) :]:
        console.print(f"Left out: {', '.join(f'{tokens:,}' for tokens in left_out)} tokens, since {reason}.")
    outputs.write(_figures(settings, rows))
    if not rows:
        raise typer.Exit(1)
    for path, figure in zip(paths, (pattern_picture(is_causal=causal), scaling_picture(rows, title)), strict=True):
        _save(console, figure, path, "folder")


app.command()(doctor)
app.command()(plan)
app.command()(bench)
app.command()(profile)
app.command()(maxlen)
app.add_typer(show, name="show")
app.command()(stream)
app.command()(train)
app.command()(score)


def _check_output(path: Path, kind: str) -> None:
    with _reported(path, kind):
        make_folder(path.parent)
        check_file(path)


def _save(console: Console, figure: Figure, path: Path, kind: str) -> None:
    try:
        with _reported(path, kind), interruptible():
            make_folder(path.parent)
            save_picture(figure, path)
    except KeyboardInterrupt:
        typer.echo(f"Interrupted: {path} was not written.", err=True)
        raise typer.Exit(130) from None
    console.print(f"Picture: {path}", soft_wrap=True)  # a line break would not belong to the name


@contextlib.contextmanager
def _reported(path: Path, kind: str) -> Iterator[None]:
    """Turn an error of the operating system about ``path`` into one sentence and exit code 1."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        typer.echo(f"{path} could not be written: {reason}; choose another {kind} with --output.", err=True)
        raise typer.Exit(1) from None


def _title(settings: Settings) -> str:
    lengths, rates = (", ".join(map(str, x)) for x in (settings.pattern.segment_lengths, settings.pattern.dilation_rates))
    device = ("the " * (settings.device.type == "cpu")) + device_name(settings.device)
    return (
        f"Dilated attention, segment lengths {lengths}, rates {rates}{', causal' if settings.is_causal else ''}\n"
        f"{HEADS} heads of size {HEAD_DIM}, {str(settings.dtype).removeprefix('torch.')} on {device}"
    )


def _figures(settings: Settings, rows: Sequence[Row]) -> dict[str, Any]:
    """Everything that was measured, for JSON."""
    return {
        "versions": versions(),
        "device": device_name(settings.device),
        "segment_lengths": settings.pattern.segment_lengths,
        "dilation_rates": settings.pattern.dilation_rates,
        "is_causal": settings.is_causal,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "rows": [asdict(row) for row in rows],
    }


def _print_results(console: Console, rows: Sequence[Row]) -> None:
    if not rows:
        return
    table = _table(rows)
    console.print()
    # A cell that is cut off would be a wrong number. A table that is too wide is left to the terminal to wrap.
    needed = console.measure(table, options=console.options.update(max_width=1000)).maximum
    Console(highlight=False, stderr=console.stderr, width=max(console.width, needed)).print(table)
    console.print()
    console.print("Measured: time, tokens/s, and MiB, which is memory beyond the inputs.")
    console.print("Computed: error, the largest relative error of a sample of rows against float64.")
    if any(row.dense_measured for row in rows):
        console.print("Measured: dense, the time of PyTorch's dense attention, where it has no ~.")
    if not all(row.dense_measured for row in rows):
        console.print("Predicted: dense with ~, from its operations, which grow with the square of the tokens.")


def _seconds_text(seconds: float) -> str:
    """Format a time with three digits: ``0.61 ms``, ``61.2 ms``, ``61.2 s``, ``1,230 s``."""
    value, unit = (seconds * 1e3, "ms") if seconds < 1.0 else (seconds, "s")
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def _table(rows: Sequence[Row]) -> Table:
    """The table of results for 60 columns, one line per length. A predicted time of dense attention has a ``~``."""
    result = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("tokens", "time", "tokens/s", "MiB", "error", "dense"):
        result.add_column(name, justify="right", no_wrap=True, style="bold" if name in ("tokens", "time") else "")
    for row in rows:
        dense = ("" if row.dense_measured else "~") + _seconds_text(row.dense_seconds)
        rate, memory = f"{row.tokens / row.seconds:,.0f}", f"{row.extra_bytes / 2**20:,.1f}"
        result.add_row(f"{row.tokens:,}", _seconds_text(row.seconds), rate, memory, f"{row.error:.1e}", dense)
    return result


@contextlib.contextmanager
def _progress(console: Console, rows: Sequence[Row]) -> Iterator[Callable[[str, float], None]]:
    """Show the rows so far above a live bar. The yielded function takes the next step and the fraction done.

    If the output is not a terminal that can redraw lines, each step is a line on standard error instead.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        plain = Console(stderr=True, soft_wrap=True)
        yield lambda step, done: plain.print(f"{done:4.0%}  {step}", highlight=False)
        return
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn(), TimeElapsedColumn(), expand=True
    )
    task = bar.add_task("", total=1.0)
    with Live(get_renderable=lambda: Group(_table(rows), bar), console=console, refresh_per_second=4, transient=True):
        yield lambda step, done: bar.update(task, description=step, completed=done)

"""The commands of ``dilated-attention``."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console

from dilated_attention_pytorch.cli import report
from dilated_attention_pytorch.cli.demo import HEAD_DIM, HEADS, Row, Settings, choose_device, make_settings, measure
from dilated_attention_pytorch.cli.show import ORDERS, make_order, make_view

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Errors are plain text, because panels are hard to read in a log.
app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def _commands() -> None:
    """Exact dilated attention over very long sequences."""


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Use shorter texts: 20 seconds instead of two minutes.")] = False,
    causal: Annotated[bool, typer.Option("--causal", help="A token sees itself and earlier tokens only.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:NUMBER. By default the GPU, if any.")] = None,
    output: Annotated[Path, typer.Option(help="The folder for the two pictures.")] = Path("demo-output"),
    max_tokens: Annotated[int | None, typer.Option(help="The length of the longest text, if the time allows it.")] = None,
) -> None:
    """Run dilated attention on a real text of growing length, next to dense attention, and check the result."""
    # Other commands run without matplotlib. It comes first, so that a missing package is reported before the measurements.
    from dilated_attention_pytorch.cli import pictures

    try:
        settings = make_settings(quick=quick, is_causal=causal, device=choose_device(device), max_tokens=max_tokens)
    except ValueError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from None
    console = Console(highlight=False, soft_wrap=True)
    title = _title(settings)
    console.print(f"{title}\nText: the sources of Python {platform.python_version()}'s standard library, a token per byte.")
    rows: list[Row] = []
    try:
        with report.progress(console, rows) as step:
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
    if not rows:
        raise typer.Exit(1)
    _save(console, pictures.pattern_picture(is_causal=causal), output / "pattern.png", "folder")
    _save(console, pictures.scaling_picture(rows, title), output / "scaling.png", "folder")


@app.command()
def show(
    order: Annotated[str, typer.Option(help=f"{', '.join(ORDERS)}. zigzag and striped depend on --ranks.")] = "hilbert",
    grid: Annotated[str, typer.Option(help="HEIGHTxWIDTH of the tokens.")] = "64x64",
    segment_lengths: Annotated[str | None, typer.Option(help="The pattern: integers separated by commas.")] = None,
    dilation_rates: Annotated[str | None, typer.Option(help="As many integers as segment lengths.")] = None,
    query: Annotated[str | None, typer.Option(help="ROW,COLUMN of the query to show.")] = None,
    ranks: Annotated[int | None, typer.Option(help="The number of ranks of zigzag and striped. The default is 4.")] = None,
    output: Annotated[Path, typer.Option(help="The PNG file for the picture.")] = Path("order.png"),
) -> None:
    """Draw an order of the tokens of a grid, its segments against row-major ones, and what one query sees."""
    from dilated_attention_pytorch.cli import pictures

    try:
        view = make_view(grid, segment_lengths, dilation_rates, query)
        orders = {order: make_order(order, view, ranks), "row-major": make_order("row-major", view, None)}
    except ValueError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from None
    console = Console(highlight=False, soft_wrap=True)
    length = view.pattern.segment_lengths[0]
    console.print(f"{view.height} x {view.width} tokens, segments of {length:,}: mean perimeter of the bounding box")
    for name, drawn in orders.items():
        console.print(f"  {name:<9}  {view.perimeter(drawn):10,.1f}")
    _save(console, pictures.order_picture(orders, view), output, "file")


def _save(console: Console, figure: Figure, path: Path, kind: str) -> None:
    from dilated_attention_pytorch.cli import pictures

    try:
        pictures.save(figure, path)
    except OSError as error:
        reason = error.strerror or str(error)
        typer.echo(f"{path} could not be written: {reason}; choose another {kind} with --output.", err=True)
        raise typer.Exit(1) from None
    console.print(f"Picture: {path}")


def _title(settings: Settings) -> str:
    lengths, rates = (", ".join(map(str, x)) for x in (settings.pattern.segment_lengths, settings.pattern.dilation_rates))
    cpu = f"the CPU with {torch.get_num_threads()} threads"
    device = cpu if settings.device.type == "cpu" else torch.cuda.get_device_name(settings.device)
    return (
        f"Dilated attention, segment lengths {lengths}, rates {rates}{', causal' if settings.is_causal else ''}\n"
        f"{HEADS} heads of size {HEAD_DIM}, {str(settings.dtype).removeprefix('torch.')} on {device}"
    )


def _print_results(console: Console, rows: Sequence[Row]) -> None:
    if not rows:
        return
    console.print(report.table(rows))
    console.print("error: largest relative error of a sample of rows against float64")
    if not all(row.dense_measured for row in rows):
        console.print("~ predicted, not measured: the time of dense attention grows with the square of the tokens")

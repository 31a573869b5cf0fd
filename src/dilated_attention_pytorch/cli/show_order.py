"""The command ``show order``: an order of the tokens of a grid, and what one query sees along it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dilated_attention_pytorch.cli.outputs import Outputs
from dilated_attention_pytorch.cli.show import ORDERS, View, make_order, make_view
from dilated_attention_pytorch.cli.show_views import reported
from dilated_attention_pytorch.orders.order import Order

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEXT_SIDE = 16  # the places of larger grids do not fit a terminal


@dataclass(frozen=True, slots=True)
class OrderOptions:
    """An order over a grid."""

    order: Annotated[str, typer.Option(help=f"{', '.join(ORDERS)}. zigzag and striped depend on --ranks.")] = "hilbert"
    grid: Annotated[str, typer.Option(help="HEIGHTxWIDTH of the tokens.")] = "64x64"
    segment_lengths: Annotated[str | None, typer.Option(help="The pattern: integers separated by commas.")] = None
    dilation_rates: Annotated[str | None, typer.Option(help="As many integers as segment lengths.")] = None
    query: Annotated[str | None, typer.Option(help="ROW,COLUMN of the query to show.")] = None
    ranks: Annotated[int | None, typer.Option(help="The number of ranks of zigzag and striped. The default is 4.")] = None
    json: Annotated[str | None, typer.Option(help="A file for all figures, or - for standard output.")] = None
    plot: Annotated[Path | None, typer.Option(help="The picture: a .png, .svg or .pdf file.")] = None
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no text.")] = False


def show_order(options: OrderOptions) -> None:
    """Print the places of the tokens, and how compact segments are against row-major ones."""
    outputs = Outputs(options.json, options.plot, options.quiet)
    with reported():
        outputs.check()
        view = make_view(options.grid, options.segment_lengths, options.dilation_rates, options.query)
        orders = {
            options.order: make_order(options.order, view, options.ranks), "row-major": make_order("row-major", view, None)
        }  # fmt: skip
    outputs.draw(lambda: _picture(orders, view))
    length = view.pattern.segment_lengths[0]
    console = outputs.console()
    if max(view.height, view.width) <= _TEXT_SIDE:
        places = orders[options.order].places.view(view.height, view.width).tolist()
        console.print("\n".join(" ".join(f"{place:3}" for place in row) for row in places), soft_wrap=True)
    console.print(f"{view.height} x {view.width} tokens, segments of {length:,}: mean perimeter of the bounding box")
    perimeters = {name: view.perimeter(order) for name, order in orders.items()}
    for name, perimeter in perimeters.items():
        console.print(f"  {name:<9}  {perimeter:10,.1f}")
    outputs.write({
        "grid": [view.height, view.width], "segment_length": length, "mean_perimeters": perimeters,
        "order": orders[options.order].positions.tolist(),
    })  # fmt: skip


def _picture(orders: dict[str, Order], view: View) -> Figure:
    from dilated_attention_pytorch.cli.pictures import order_picture  # imports matplotlib

    return order_picture(orders, view)

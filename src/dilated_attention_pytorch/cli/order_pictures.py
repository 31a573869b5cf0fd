"""The picture of ``show``: the curve of an order, its segments and what one query sees, next to row-major order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from dilated_attention_pytorch.cli.show import View
from dilated_attention_pytorch.orders.order import Order

_QUERY, _BORDER, _END = "#c8551b", "#33475b", "#b01030"
_FIRST, _LAST = "o", "s"  # markers
_SEGMENTS = ListedColormap(["#dce8f4", "#a9c9e6", "#f0e2c8", "#cfe3cd"])
# Colours of branches: the first branch is the darkest, and branches after the sixth share a colour.
_BRANCHES = ("#123f7a", "#3f86c6", "#8dbb72", "#bb8fc4", "#e0b04c", "#8a8a8a")
_NOTHING = "#f4f4f4"
_PANEL = 4.0  # inches of a panel's width


def order_picture(orders: Mapping[str, Order], view: View) -> Figure:
    """A figure with a row of three panels for each order."""
    panel_height = min(2 * _PANEL, max(1.2, _PANEL * view.height / view.width))
    figure = Figure(figsize=(3 * _PANEL, len(orders) * (panel_height + 0.3) + 0.8), layout="constrained")
    rows = figure.subplots(len(orders), 3, squeeze=False)
    for (name, order), (curve, segments, seen) in zip(orders.items(), rows, strict=True):
        _draw_curve(curve, view.cells(order))
        curve.set_title(f"{name}: the order of the tokens")
        _draw_segments(segments, view, order)
        segments.set_title(f"segments of {view.pattern.segment_lengths[0]:,}: mean perimeter {view.perimeter(order):,.1f}")
        found = view.seen(order)
        _draw_seen(seen, found, view.query)
        seen.set_title(f"one query sees {int((found >= 0).sum()):,} of {found.numel():,}")
        for axes in (curve, segments, seen):
            # Cell edges are at integers.
            axes.set(xlim=(0, view.width), ylim=(view.height, 0), aspect="equal", xticks=[], yticks=[])
    handles: list[Artist] = [
        Patch(color=_branch_colour(i), label=f"segment {w:,}, rate {r}") for i, (w, r) in enumerate(view.pattern.branches)
    ]
    handles += [
        Line2D(
            [], [], linestyle="none", marker="o", color=_QUERY, markerfacecolor="none", markeredgewidth=2, label="query"
        ),
        Line2D([], [], linestyle="none", marker=_FIRST, color=_END, label="first token"),
        Line2D([], [], linestyle="none", marker=_LAST, color=_END, label="last token"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle(f"{view.height} x {view.width} tokens")
    return figure


def _branch_colour(branch: int) -> str:
    return _BRANCHES[min(branch, len(_BRANCHES) - 1)]


def _draw_curve(axes: Axes, cells: Tensor) -> None:
    """Draw a line through the centres of the cells, from dark to light."""
    points = cells.flip(-1).double() + 0.5
    lines = LineCollection(
        torch.stack((points[:-1], points[1:]), 1).tolist(), cmap="viridis", linewidth=_line_width(cells), capstyle="round"
    )
    lines.set_array(torch.arange(len(points) - 1).numpy())
    axes.add_collection(lines)
    for point, marker in ((points[0], _FIRST), (points[-1], _LAST)):
        axes.plot(*point.tolist(), marker, color=_END, markersize=6, clip_on=False, zorder=3)


def _line_width(cells: Tensor) -> float:
    """A quarter of a cell, at most 2 points."""
    longest = int(cells.max()) + 1
    return min(2.0, 0.25 * 72 * _PANEL / longest)


def _draw_segments(axes: Axes, view: View, order: Order) -> None:
    segments = view.segments(order)
    axes.imshow(
        segments.numpy() % _SEGMENTS.N, cmap=_SEGMENTS, vmin=-0.5, vmax=_SEGMENTS.N - 0.5,
        extent=(0, view.width, view.height, 0), interpolation="nearest",
    )  # fmt: skip
    _draw_borders(axes, segments)
    row, column = view.query
    rows, columns = (segments == segments[row, column]).nonzero().unbind(-1)
    top, left = int(rows.min()), int(columns.min())
    box = (int(columns.max()) + 1 - left, int(rows.max()) + 1 - top)
    axes.add_patch(Rectangle((left, top), *box, fill=False, edgecolor=_QUERY, linewidth=2, clip_on=False, zorder=4))
    _draw_query(axes, view.query)


def _draw_borders(axes: Axes, segments: Tensor) -> None:
    """Draw lines between neighbouring cells of different segments."""
    above = (segments[1:] != segments[:-1]).nonzero()  # (row, column): between row and row + 1
    beside = (segments[:, 1:] != segments[:, :-1]).nonzero()
    across = [((x, y + 1), (x + 1, y + 1)) for y, x in above.tolist()]
    down = [((x + 1, y), (x + 1, y + 1)) for y, x in beside.tolist()]
    axes.add_collection(LineCollection(across + down, colors=_BORDER, linewidth=0.7, capstyle="projecting"))


def _draw_seen(axes: Axes, found: Tensor, query: tuple[int, int]) -> None:
    branches = int(found.max()) + 1
    colours = ListedColormap([_NOTHING, *map(_branch_colour, range(branches))])
    height, width = found.shape
    axes.imshow(
        found.numpy(), cmap=colours, vmin=-1.5, vmax=branches - 0.5, extent=(0, width, height, 0), interpolation="nearest"
    )
    _draw_query(axes, query)


def _draw_query(axes: Axes, query: tuple[int, int]) -> None:
    row, column = query
    axes.plot(
        column + 0.5, row + 0.5, "o", color=_QUERY, markerfacecolor="none", markersize=9, markeredgewidth=2, clip_on=False,
        zorder=5,
    )  # fmt: skip

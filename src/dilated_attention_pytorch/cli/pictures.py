"""The two pictures of the demo and the picture of ``show``. Without pyplot, there is no global state and no window."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from torch import Tensor

from dilated_attention_pytorch.cli.demo import Row
from dilated_attention_pytorch.cli.show import View
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.dilated import Dilated

_DILATED, _DENSE, _REFERENCE = "#1f5fa8", "#c8551b", "#777777"
_QUERY, _BORDER, _END, _NOTHING = "#c8551b", "#33475b", "#b01030", "#f4f4f4"
# Colours of segments. The last one is that of the query's segment.
_OWN_SEGMENT = "#f2a77c"
_SEGMENTS = ListedColormap(
    ["#dce8f4", "#8fb8de", "#f3e3b0", "#9fcf9b", "#dcc6e6", "#7fc9c4", "#c9c9c9", "#e9f2d0", _OWN_SEGMENT]
)
_FORMATS = (".png", ".svg", ".pdf")
# Colours of branches: the first branch is the darkest, and branches after the sixth share a colour.
_BRANCHES = ("#123f7a", "#3f86c6", "#8dbb72", "#bb8fc4", "#e0b04c", "#8a8a8a")
_PANEL = 4.0  # inches of a panel's width
_THINNEST = 0.8  # inches of the shorter side of a panel
_WIDE = 3  # a grid that is this many times as wide as high has its panels below one another
_FIRST, _LAST = "o", "s"  # markers
_RING: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "color": _QUERY,
    "markerfacecolor": "none",
    "markeredgewidth": 2,
}


def pattern_picture(*, is_causal: bool) -> Figure:
    """The pairs that meet in a small example, one panel per head. The colour is the number of branches of a pair."""
    tokens, heads, pattern = 32, 4, Dilated([8, 16, 32], [1, 2, 4])
    branches = len(pattern.branches)
    colours = ListedColormap(["#ffffff", "#b5d0ea", "#5b94cb", "#123f7a"])
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, heads, sharey=True)
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    for head, axes in enumerate(panels):
        count = pattern.multiplicity(i, j, key_head=head, key_heads=heads, is_causal=is_causal)
        image = axes.pcolormesh(
            count.numpy(), cmap=colours, norm=BoundaryNorm([k - 0.5 for k in range(branches + 2)], branches + 1),
            edgecolors="#e4e4e4", linewidth=0.3,
        )  # fmt: skip
        axes.set(title=f"head {head}", xlabel="key position", aspect="equal", xlim=(0, tokens), ylim=(tokens, 0))
        for axis in (axes.xaxis, axes.yaxis):  # a label is at the centre of its cell
            axis.set_ticks([k + 0.5 for k in range(0, tokens, 8)], labels=range(0, tokens, 8))
    panels[0].set_ylabel("query position")
    bar = figure.colorbar(
        image, ax=panels, ticks=range(branches + 1), label="branches in which the pair meets", pad=0.01, shrink=0.83
    )
    bar.minorticks_off()
    lengths, rates = (", ".join(map(str, x)) for x in (pattern.segment_lengths, pattern.dilation_rates))
    causal = ", causal" if is_causal else ""
    figure.suptitle(f"Dilated attention: {tokens} tokens, segment lengths {lengths}, dilation rates {rates}{causal}")
    return figure


def scaling_picture(rows: Sequence[Row], title: str) -> Figure:
    """Time and extra memory against the number of tokens, on logarithmic axes."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    time, memory = figure.subplots(1, 2)
    figure.suptitle(title)
    tokens = [row.tokens for row in rows]

    time.plot(tokens, [row.seconds for row in rows], "o-", color=_DILATED, label="dilated attention, measured")
    measured, predicted = ([row for row in rows if row.dense_measured == wanted] for wanted in (True, False))
    if predicted:  # the line starts at the last measured point, so that it has no gap
        predicted = measured[-1:] + predicted
    for points, style, kind in ((measured, "s-", "measured"), (predicted, "--", "predicted")):
        if points:
            x, y = [row.tokens for row in points], [row.dense_seconds for row in points]
            time.plot(x, y, style, color=_DENSE, label=f"dense attention, {kind}")
    time.set(title="Time of one forward pass", ylabel="seconds, logarithmic axis")

    memory.plot(
        tokens, [row.extra_bytes / 2**20 for row in rows], "o-", color=_DILATED, label="dilated attention, measured"
    )
    memory.plot(tokens, [row.output_bytes / 2**20 for row in rows], ":", color=_REFERENCE, label="size of the output")
    memory.set(title="Memory beyond the inputs", ylabel="MiB, logarithmic axis")

    for axes in (time, memory):
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="tokens, logarithmic axis")
        axes.xaxis.set(major_locator=LogLocator(2), major_formatter=FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.yaxis.set(
            major_locator=LogLocator(10, subs=(1.0, 2.0, 5.0)), major_formatter=FuncFormatter(lambda y, _: f"{y:g}")
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper left")
    return figure


def _panel_size(view: View) -> tuple[float, float]:
    """Width and height of a panel in inches. Cells are squares, unless a side of the panel would be too thin to read."""
    width = 3 * _PANEL if view.width >= _WIDE * view.height else _PANEL
    height = min(2 * _PANEL, width * view.height / view.width)
    return max(_THINNEST, height * view.width / view.height), max(_THINNEST, height)


def order_picture(orders: Mapping[str, Order], view: View) -> Figure:
    """A figure with three panels for each order: side by side, or below one another if the grid is wide."""
    width, height = _panel_size(view)
    columns = 1 if view.width >= _WIDE * view.height else 3
    lines = len(orders) * 3 // columns
    figure = Figure(figsize=(3 * _PANEL, lines * (height + 0.3) + 0.8), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).reshape(len(orders), 3)
    cell = 72 * min(width / view.width, height / view.height)  # points of the shorter side of a cell
    for (name, order), (curve, segments, seen) in zip(orders.items(), panels, strict=True):
        _draw_curve(curve, view.cells(order), cell)
        curve.set_title(f"{name}: the order of the tokens")
        _draw_segments(segments, view, order, cell)
        segments.set_title(f"segments of {view.pattern.segment_lengths[0]:,}: mean perimeter {view.perimeter(order):,.1f}")
        found = view.seen(order)
        _draw_seen(seen, found, view.query)
        seen.set_title(f"one query sees {int((found >= 0).sum()):,} of {found.numel():,}")
        for axes in (curve, segments, seen):
            # Cell edges are at integers.
            axes.set(xlim=(0, view.width), ylim=(view.height, 0), aspect="auto", xticks=[], yticks=[])
            axes.set_box_aspect(height / width)
    handles: list[Artist] = [
        Patch(color=_branch_colour(i), label=f"segment {w:,}, rate {r}") for i, (w, r) in enumerate(view.pattern.branches)
    ]
    handles.append(Patch(color=_OWN_SEGMENT, label="segment of the query"))
    handles.append(Line2D([], [], **_RING, label="query"))
    for name, marker in (("first", _FIRST), ("last", _LAST)):
        handles.append(Line2D([], [], linestyle="none", marker=marker, color=_END, label=f"{name} token"))
    figure.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False, columnspacing=1.4)
    stretched = height * view.width / (width * view.height)
    note = "" if 0.99 < stretched < 1.01 else f", cells drawn {max(stretched, 1 / stretched):.1f} times as "
    note += ("high as wide" if stretched > 1 else "wide as high") if note else ""
    figure.suptitle(f"{view.height} x {view.width} tokens{note}")
    return figure


def _branch_colour(branch: int) -> str:
    return _BRANCHES[min(branch, len(_BRANCHES) - 1)]


def _draw_curve(axes: Axes, cells: Tensor, cell: float) -> None:
    """Draw a line through the centres of the cells, from dark to light."""
    points = cells.flip(-1).double() + 0.5
    steps = torch.stack((points[:-1], points[1:]), 1).tolist()
    lines = LineCollection(steps, cmap="viridis", linewidth=min(2.0, cell / 4), capstyle="round")
    lines.set_array(torch.arange(len(points) - 1).numpy())
    axes.add_collection(lines)
    for point, marker in ((points[0], _FIRST), (points[-1], _LAST)):
        axes.plot(*point.tolist(), marker, color=_END, markersize=6, clip_on=False, zorder=3)


def _draw_segments(axes: Axes, view: View, order: Order, cell: float) -> None:
    segments = view.segments(order)
    row, column = view.query
    own = segments == segments[row, column]
    colours = segment_colours(segments, _SEGMENTS.N - 1).masked_fill(own, _SEGMENTS.N - 1)
    axes.imshow(
        colours.numpy(), cmap=_SEGMENTS, vmin=-0.5, vmax=_SEGMENTS.N - 0.5,
        extent=(0, view.width, view.height, 0), interpolation="nearest",
    )  # fmt: skip
    _draw_borders(axes, segments, min(0.7, cell / 10))
    rows, columns = own.nonzero().unbind(-1)
    top, left = int(rows.min()), int(columns.min())
    box = (int(columns.max()) + 1 - left, int(rows.max()) + 1 - top)
    axes.add_patch(Rectangle((left, top), *box, fill=False, edgecolor=_QUERY, linewidth=2, clip_on=False, zorder=4))
    _draw_query(axes, view.query)


def segment_colours(segments: Tensor, colours: int) -> Tensor:
    """A colour from 0 to ``colours - 1`` for the segment of each cell; segments that touch differ if colours suffice.

    Segments get their colours in the order of their first cells, row by row. Each takes the colour that was used least
    recently among those that no neighbour has.
    """
    pairs = torch.cat((
        torch.stack((segments[1:], segments[:-1]), -1).flatten(0, 1),
        torch.stack((segments[:, 1:], segments[:, :-1]), -1).flatten(0, 1),
    ))  # fmt: skip
    neighbours: dict[int, set[int]] = {}
    for a, b in set(map(tuple, pairs[pairs[:, 0] != pairs[:, 1]].tolist())):
        neighbours.setdefault(a, set()).add(b)
        neighbours.setdefault(b, set()).add(a)
    recent = list(range(colours))  # the least recently used colour is first
    chosen: dict[int, int] = {}
    for segment in dict.fromkeys(segments.flatten().tolist()):
        taken = {chosen[other] for other in neighbours.get(segment, ()) if other in chosen}
        colour = next((c for c in recent if c not in taken), recent[0])
        recent.remove(colour)
        recent.append(colour)
        chosen[segment] = colour
    return torch.tensor([chosen[segment] for segment in segments.flatten().tolist()]).view_as(segments)


def _draw_borders(axes: Axes, segments: Tensor, linewidth: float) -> None:
    """Draw lines between neighbouring cells of different segments."""
    above = (segments[1:] != segments[:-1]).nonzero()  # (row, column): between row and row + 1
    beside = (segments[:, 1:] != segments[:, :-1]).nonzero()
    across = [((x, y + 1), (x + 1, y + 1)) for y, x in above.tolist()]
    down = [((x + 1, y), (x + 1, y + 1)) for y, x in beside.tolist()]
    axes.add_collection(LineCollection(across + down, colors=_BORDER, linewidth=linewidth, capstyle="projecting"))


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
    axes.plot(column + 0.5, row + 0.5, **_RING, markersize=9, clip_on=False, zorder=5)


def check_name(path: Path, option: str = "--output") -> None:
    """Raise a ValueError if the name of a file does not end like that of a picture."""
    if path.suffix.lower() not in _FORMATS and not path.is_dir():
        raise ValueError(f"{option} must be a picture, a name that ends in {', '.join(_FORMATS)}, got {str(path)!r}")


def check_path(path: Path) -> None:
    """Make the folder of a picture and raise an OSError if the picture could not be written there."""
    _make_folder(path.parent)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    unfinished = _unfinished(path)
    try:
        unfinished.write_bytes(b"x")
    finally:
        unfinished.unlink(missing_ok=True)


def save(figure: Figure, path: Path) -> None:
    """Write a picture in the format of its name. ``path`` never holds an incomplete picture."""
    _make_folder(path.parent)
    unfinished = _unfinished(path)
    try:
        figure.savefig(unfinished, format=path.suffix[1:].lower(), dpi=150)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        # "File exists" would not explain the error.
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")

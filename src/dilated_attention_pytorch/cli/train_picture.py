"""The pictures of ``train`` and ``score``: losses over the steps, and bits per token along a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

_TRAINING, _HELD_OUT = "#1f5fa8", "#c8551b"


def _axes(figure: Figure, xlabel: str) -> Axes:
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel="bits per token")
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    return axes


def loss_picture(lines: Sequence[dict[str, Any]], title: str) -> Figure:
    """The losses of a log, in bits per token."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = _axes(figure, "steps")
    axes.set_title(title, fontsize=10)
    axes.plot([x["step"] for x in lines], [x["loss"] / math.log(2) for x in lines], color=_TRAINING, label="training")
    held_out = [(x["step"], x["held_out_loss"] / math.log(2)) for x in lines if x["held_out_loss"] is not None]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color=_HELD_OUT, label="held out")
    axes.legend(frameon=False)
    return figure


def score_picture(positions: Sequence[float], bits: Sequence[float], title: str) -> Figure:
    """Bits per token along a file."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = _axes(figure, "position")
    axes.set_title(title, fontsize=10)
    axes.plot(positions, bits, color=_TRAINING, linewidth=0.7)
    return figure

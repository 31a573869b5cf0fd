"""The picture of ``stream``: tokens per second and memory over the position."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dilated_attention_pytorch.streaming import StreamPoint

_RATE, _MEMORY = "#1f5fa8", "#c8551b"


def stream_picture(points: Sequence[StreamPoint], title: str) -> Figure:
    """Two panels, one below the other. A rate is that of the tokens between two recorded points."""
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    figure.suptitle(title)
    rate, memory = figure.subplots(2, 1, sharex=True)
    pairs = [(a, b) for a, b in pairwise(points) if b.seconds > a.seconds]
    rates = [(b.position - a.position) / (b.seconds - a.seconds) for a, b in pairs]
    rate.plot([(a.position + b.position) / 2 for a, b in pairs], rates, ".-", color=_RATE)
    rate.set(ylabel="tokens per second", ylim=(0, None))
    memory.plot([x.position for x in points], [x.memory_bytes / 2**20 for x in points], ".-", color=_MEMORY)
    memory.set(ylabel="memory, MiB", xlabel="position", ylim=(0, None))
    for axes in (rate, memory):
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    return figure

"""The picture of ``plan``: time, memory of a rank and bytes over the number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dilated_attention_pytorch.cli.plan_tables import bytes_text, seconds_text
from dilated_attention_pytorch.workbench.plan import ScalePoint

_TIME, _MEMORY, _BYTES = "#1f5fa8", "#c8551b", "#3a7d44"


def plan_picture(points: Sequence[ScalePoint], title: str, memory: int) -> Figure:
    """Three panels with logarithmic axes. A dashed line is the time divided by the GPUs, and the memory of a GPU."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    figure.suptitle(title, fontsize=10)
    gpus = [x.gpus for x in points]
    time, room, sent = figure.subplots(1, 3)
    time.plot(gpus, [x.seconds for x in points], ".-", color=_TIME)
    time.plot(gpus, [points[0].seconds * gpus[0] / x for x in gpus], "--", color="#888888", label="in proportion")
    time.set(title="time", ylabel="seconds")
    room.plot(gpus, [x.memory for x in points], ".-", color=_MEMORY)
    room.axhline(memory, linestyle="--", color="#888888", label="of a GPU")
    room.set(title="memory of a rank")
    several = [x for x in points if x.received]
    sent.plot([x.gpus for x in several], [x.received for x in several], ".-", color=_BYTES)
    sent.set(title="received by a rank, forward of a layer")
    for axes, text in ((time, seconds_text), (room, bytes_text), (sent, bytes_text)):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("GPUs")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        if axes is not sent:  # what a rank receives changes little
            axes.set_yscale("log")
            axes.yaxis.set(major_locator=LogLocator(10, numticks=8), minor_formatter=NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _, text=text: text(x)))
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    sent.set_ylim(bottom=0)
    for axes in (time, room):
        axes.legend(frameon=False, fontsize=8)
    return figure

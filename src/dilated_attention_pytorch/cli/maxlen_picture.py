"""The picture of ``maxlen``: memory and time over the length of all tries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dilated_attention_pytorch.workbench.maxlen import TryResult, TrySettings

_COLOURS = {"dilated": "#1f5fa8", "dense": "#c8551b"}
_LIMIT = "#8a8a8a"


def maxlen_picture(found: Mapping[str, Sequence[TryResult]], settings: TrySettings) -> Figure:
    """Two panels with logarithmic axes. Tries that ran are dots; a cross at the top is a length that did not run."""
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    what = f"preset {settings.preset}" if settings.preset else f"{settings.heads} x {settings.head_dim}"
    figure.suptitle(f"{'forward and backward' if settings.train else 'forward'}, {what}, {settings.dtype}")
    memory, seconds = figure.subplots(2, 1, sharex=True)
    for method, tries in found.items():
        ran = sorted((x for x in tries if x.ran), key=lambda x: x.tokens)
        if not tries:
            continue
        kept = [x for x in ran if x.memory_bytes]
        colour = _COLOURS[method]
        memory.plot(
            [x.tokens for x in kept], [(x.memory_bytes or 0) / 2**20 for x in kept], "o-", color=colour, label=method
        )
        seconds.plot([x.tokens for x in ran], [x.seconds for x in ran], "o-", color=colour, label=method)
        for axes in (memory, seconds):
            _crosses(axes, [x for x in tries if not x.ran], colour)
    if settings.memory is not None:
        memory.axhline(settings.memory / 2**20, color=_LIMIT, linestyle="--", linewidth=1, label="limit")
    seconds.axhline(settings.seconds, color=_LIMIT, linestyle="--", linewidth=1, label="limit")
    memory.set_ylabel("memory, MiB")
    seconds.set(ylabel="time, s", xlabel="tokens")
    for axes in (memory, seconds):
        axes.set(xscale="log", yscale="log")
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    return figure


def _crosses(axes: Axes, failed: Sequence[TryResult], colour: str) -> None:
    """Mark lengths that did not run at the upper end of a panel."""
    for x in failed:
        axes.plot(x.tokens, 0.97, "x", color=colour, transform=axes.get_xaxis_transform(), clip_on=False)
    if failed:
        x = min(failed, key=lambda x: x.tokens)
        axes.annotate(
            x.outcome, (x.tokens, 0.97), xycoords=axes.get_xaxis_transform(), xytext=(0, 7), textcoords="offset points",
            fontsize=7, color=colour, ha="center",
        )  # fmt: skip

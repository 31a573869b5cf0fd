"""The picture of ``profile``: memory by component over time, and when the longest operators ran."""

from __future__ import annotations

from matplotlib.figure import Figure

from dilated_attention_pytorch.workbench.profile_values import ProfileResult

_COLORS = ("#1f5fa8", "#c8551b", "#3c8d40", "#8a5fb0", "#b59f1e", "#4fa3b8", "#a03050", "#777777")
_MESSAGES = "messages in flight"


def profile_picture(result: ProfileResult, title: str) -> Figure:
    """Two panels, one below the other, with one axis of time. Tensors that were made before the call are grey."""
    lanes = list(dict.fromkeys(_lane(span.name) for span in result.spans))
    figure = Figure(figsize=(10, 4.4 + 0.3 * len(lanes)), layout="constrained")
    figure.suptitle(title)
    memory, timeline = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, max(0.8, 0.3 * len(lanes))))
    curve, base = result.memory, sum(size for _, size in result.made_before) / 2**20
    times = [1e3 * x for x in curve.seconds]
    names = [*(name for name, _ in result.made_before), *curve.names]
    before = [[size / 2**20] * len(times) for _, size in result.made_before]
    sizes = [[row[i] / 2**20 for row in curve.sizes] for i in range(len(curve.names))]
    greys = ["#e2e2e2", "#d0d0d0", "#bdbdbd"]
    colors = [greys[i % 3] for i in range(len(before))] + [_COLORS[i % len(_COLORS)] for i in range(len(sizes))]
    if times:
        memory.stackplot(times, *before, *sizes, labels=names, colors=colors, step="post", linewidth=0)
        memory.axhline(base + curve.peak_bytes / 2**20, color="#444444", linewidth=0.8, linestyle=":")
        memory.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8, reverse=True)
    memory.set(ylabel="memory, MiB", ylim=(0, None))
    for y, lane in enumerate(lanes):
        spans = [(1e3 * x.start, 1e3 * x.seconds) for x in result.spans if _lane(x.name) == lane]
        timeline.broken_barh(spans, (y - 0.4, 0.8), color="#c8551b" if lane == _MESSAGES else "#1f5fa8", linewidth=0)
    timeline.set_yticks(range(len(lanes)), [_short(x) for x in lanes], fontsize=8)
    timeline.set(xlabel="milliseconds, with the profiler")
    timeline.set_title("the longest operators, with the operators that they call; on a GPU the longest kernels", fontsize=9)
    timeline.invert_yaxis()
    for axes in (memory, timeline):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _lane(name: str) -> str:
    return _MESSAGES if name.startswith(("gloo:", "nccl:")) or "ncclDevKernel" in name else name


def _short(name: str) -> str:
    """A name for an axis: the end of an operator's name says more than its namespace."""
    name = name.removeprefix("aten::")
    return name if len(name) <= 36 else f"{name[:17]}...{name[-16:]}"

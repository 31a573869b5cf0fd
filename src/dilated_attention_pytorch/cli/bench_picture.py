"""The picture of ``bench``: the rate of each row as a bar, with its range over the turns."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from dilated_attention_pytorch.workbench.bench_values import BOTH, BenchRow

_FORWARD, _BOTH, _PREDICTED = "#1f5fa8", "#c8551b", "#b8b8b8"


def bench_picture(rows: Sequence[BenchRow], title: str) -> Figure:
    """One panel per suite, in tokens per second."""
    timed = [row for row in rows if row.time is not None]
    suites = list(dict.fromkeys(row.suite for row in timed)) or [""]
    counts = [max(1, sum(row.suite == suite for row in timed)) for suite in suites]
    figure = Figure(figsize=(9, 1.2 + 0.32 * sum(counts) + 0.5 * len(suites)), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(len(suites), 1, squeeze=False, height_ratios=counts)[:, 0]
    for axes, suite in zip(panels, suites, strict=True):
        own = [row for row in timed if row.suite == suite]
        for y, row in enumerate(own):
            assert row.time is not None
            rate, slow, fast = (row.tokens / x for x in (row.time.median, row.time.most, row.time.least))
            color = _PREDICTED if row.status == "predicted" else _BOTH if row.direction == BOTH else _FORWARD
            axes.barh(y, rate, 0.7, color=color, xerr=[[rate - slow], [fast - rate]], ecolor="#444444")
        labels = [f"{row.setting}, {row.method}, {row.direction}" for row in own]
        axes.set_yticks(range(len(own)), labels, fontsize=8)
        axes.set(title=suite, xlabel="tokens per second", xlim=(0, None))
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    return figure

"""The two pictures of the demo. They do not use pyplot, so there is no global state and no window."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dilated_attention_pytorch.cli.demo import Row
from dilated_attention_pytorch.patterns.dilated import Dilated

_DILATED, _DENSE, _REFERENCE = "#1f5fa8", "#c8551b", "#777777"


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
        # A label is at the centre of its cell.
        axes.set_xticks([k + 0.5 for k in range(0, tokens, 8)], labels=range(0, tokens, 8))
        axes.set_yticks([k + 0.5 for k in range(0, tokens, 8)], labels=range(0, tokens, 8))
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

    time.plot(tokens, [row.seconds for row in rows], "o-", color=_DILATED, label="dilated attention")
    measured = [row for row in rows if row.dense_measured]
    if measured:
        time.plot(
            [r.tokens for r in measured],
            [r.dense_seconds for r in measured],
            "s-",
            color=_DENSE,
            label="dense attention, measured",
        )
    if len(measured) < len(rows):
        # The line starts at the last measured point, so that it has no gap.
        predicted = measured[-1:] + [row for row in rows if not row.dense_measured]
        time.plot(
            [r.tokens for r in predicted], [r.dense_seconds for r in predicted], "--", color=_DENSE,
            label="dense attention, predicted",
        )  # fmt: skip
    time.set(title="Time of one forward pass", ylabel="seconds")

    memory.plot(tokens, [row.extra_bytes / 2**20 for row in rows], "o-", color=_DILATED, label="dilated attention")
    memory.plot(tokens, [row.output_bytes / 2**20 for row in rows], ":", color=_REFERENCE, label="the output")
    memory.set(title="Memory beyond the inputs", ylabel="MiB")

    for axes in (time, memory):
        _logarithmic(axes)
        axes.legend(frameon=False, loc="upper left")
    return figure


def _logarithmic(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_locator(LogLocator(2))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write a PNG file. ``path`` never holds an incomplete picture."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        # "File exists" would not explain the error.
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from None
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(unfinished, format="png", dpi=150)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)

"""The pictures of concepts.md, drawn from what the library computes.

python docs/pictures.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dilated_attention_pytorch import BlockSparse, Dilated, SparsePatternConfig, attention_weights
from dilated_attention_pytorch.distributed import Shards

HERE = Path(__file__).parent
COLOURS = ("#123f7a", "#3f86c6", "#8dbb72", "#e0b04c")
NOTHING, BORDER, SENT = "#f1f1f1", "#33475b", "#c8551b"


def cells(axes: Axes, colours: list[str], row: float) -> None:
    """One row of cells, one for each position."""
    for position, colour in enumerate(colours):
        axes.add_patch(Rectangle((position, row), 1, 0.9, facecolor=colour, edgecolor="white", linewidth=0.6))


def finish(axes: Axes, tokens: int, rows: int, title: str) -> None:
    """Limits and labels of an axis of positions."""
    axes.set(xlim=(-0.1, tokens + 0.1), ylim=(rows + 0.05, -0.15), title=title, xticks=[0.5, tokens - 0.5])
    axes.set_xticklabels([0, tokens - 1])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def segments() -> Figure:
    """Which rows each head reads in each branch of a small pattern."""
    pattern, tokens, heads = Dilated([4, 8, 16], [1, 2, 4]), 16, 4
    figure = Figure(figsize=(9, 2.5), layout="constrained")
    for axes, (w, r) in zip(figure.subplots(1, len(pattern.branches), sharey=True), pattern.branches, strict=True):
        for head in range(heads):
            first = pattern.offset(head, heads, r)
            cells(axes, [COLOURS[head] if i % w % r == first else NOTHING for i in range(tokens)], head)
        for border in range(0, tokens + 1, w):
            axes.axvline(border, color=BORDER, linewidth=1.6)
        finish(axes, tokens, heads, f"w = {w}, r = {r}")
        axes.set(yticks=[head + 0.45 for head in range(heads)], xlabel="position")
        axes.set_yticklabels([f"head {head}" for head in range(heads)])
    return figure


def traffic() -> Figure:
    """The rows of one branch that cross ranks: those that a head reads."""
    tokens, ranks, (w, r) = 32, 4, (32, 4)
    figure = Figure(figsize=(9, 1.9), layout="constrained")
    axes = figure.subplots()
    for head in range(2):
        cells(axes, [SENT if i % w % r == head % r else NOTHING for i in range(tokens)], head)
    for rank, (chunk,) in enumerate(Shards.of([tokens // ranks] * ranks, "contiguous").chunks):
        axes.add_patch(Rectangle((chunk.start, -0.08), len(chunk), 2.06, fill=False, edgecolor=BORDER, linewidth=1.6))
        axes.text(chunk.start + len(chunk) / 2, -0.25, f"rank {rank}", ha="center")
    finish(axes, tokens, 2, "")
    axes.set(ylim=(2.05, -0.8), yticks=[0.45, 1.45], xlabel=f"position; rows that travel in the branch w = {w}, r = {r}")
    axes.set_yticklabels(["head 0", "head 1"])
    return figure


def blocks() -> Figure:
    """The blocks that four rules choose, a quarter of all blocks."""
    block, tokens = 16, 512
    rules: dict[str, dict[str, Any]] = {
        "local_window": {},
        "global_local": {"global_tokens": 2 * block},
        "dilated_sparse": {"segment_lengths": [128, 512], "dilation_rates": [1, 4]},
        "hierarchical": {"local_window_size": 2 * block},
    }
    query = torch.zeros(1, tokens, 1, 8)
    figure = Figure(figsize=(9, 2.7), layout="constrained")
    for axes, (name, options) in zip(figure.subplots(1, len(rules), sharey=True), rules.items(), strict=True):
        config = SparsePatternConfig(name, sparsity_ratio=0.25, block_size=block, **options)
        rows = list(range(0, tokens, block))
        weights = attention_weights(query, query, BlockSparse.from_config(config), query_rows=rows)[0, 0, :, ::block]
        axes.imshow(weights > 0, cmap="Blues", vmin=0, vmax=1.2, interpolation="none")
        axes.set(title=name, xlabel="key block", xticks=[], yticks=[])
    figure.axes[0].set_ylabel("query block")
    return figure


def main() -> None:
    """Write each picture beside this file."""
    rcParams["svg.hashsalt"] = "pictures"  # the same bytes in every run
    for make in (segments, traffic, blocks):
        make().savefig(HERE / f"concepts_{make.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()

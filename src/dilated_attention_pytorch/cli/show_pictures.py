"""The pictures of ``show pattern``, ``segments``, ``blocks`` and ``ring``."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dilated_attention_pytorch.workbench.ring_view import RingView
from dilated_attention_pytorch.workbench.views import BlocksView, PatternView

_READ, _COUNTS = "#1f5fa8", ["#ffffff", "#b5d0ea", "#5b94cb", "#123f7a"]
_PANELS = 4  # panels of a line
_LABELLED = 16  # more ranks or steps have no labels in their cells
_GRID = 64  # cells of more tokens have no borders


def multiplicity_picture(view: PatternView) -> Figure:
    """The number of branches in which positions meet, a panel for each head."""
    columns = min(_PANELS, view.key_heads)
    lines = -(-view.key_heads // columns)
    figure = Figure(figsize=(3 * columns + 0.9, 3.2 * lines + 0.5), layout="constrained")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    branches = len(view.pattern.branches)
    shades = [_COUNTS[min(m, 1) + round(max(0, m - 1) * 2 / max(1, branches - 1))] for m in range(branches + 1)]
    norm = BoundaryNorm([m - 0.5 for m in range(branches + 2)], branches + 1)
    for head, axes in enumerate(panels.flat):
        if head >= view.key_heads:
            axes.set_axis_off()
            continue
        counts = view.multiplicity(head).numpy()
        if view.tokens <= _GRID:
            border = {"edgecolors": "#e4e4e4", "linewidth": 0.3}
            image = axes.pcolormesh(counts, cmap=ListedColormap(shades), norm=norm, **border)
        else:  # a mesh of a million cells takes seconds, and megabytes of an .svg file
            extent = (0, view.tokens, view.tokens, 0)
            image = axes.imshow(counts, cmap=ListedColormap(shades), norm=norm, extent=extent, interpolation="nearest")
        axes.set(title=f"head {head}", aspect="equal", xlim=(0, view.tokens), ylim=(view.tokens, 0))
    figure.supxlabel("key position")
    figure.supylabel("query position")
    bar = figure.colorbar(image, ax=panels, ticks=range(branches + 1), label="branches in which the pair meets")
    bar.minorticks_off()
    figure.suptitle(_title(view))
    return figure


def segments_picture(view: PatternView) -> Figure:
    """The rows that each head reads, a panel for each branch. Lines are the ends of segments."""
    branches = view.pattern.branches
    height = max(0.9, 0.16 * view.key_heads)
    figure = Figure(figsize=(11, (height + 0.55) * len(branches) + 0.8), layout="constrained")
    panels = figure.subplots(len(branches), 1, sharex=True, squeeze=False)[:, 0]
    for branch, (axes, (length, rate)) in enumerate(zip(panels, branches, strict=True)):
        reads = torch.stack([view.reads(branch, head) for head in range(view.key_heads)])
        border = {"edgecolors": "#e4e4e4", "linewidth": 0.3} if view.tokens <= _GRID else {}
        axes.pcolormesh(reads.numpy(), cmap=ListedColormap(["#ffffff", _READ]), vmin=0, vmax=1, **border)
        for end in range(0, view.tokens + 1, length):
            axes.axvline(end, color="#b01030", linewidth=1.2)
        axes.set(
            title=f"segment length {length:,}, dilation rate {rate}", ylabel="head", ylim=(view.key_heads, 0),
            xlim=(0, view.tokens),
        )  # fmt: skip
        heads = range(0, view.key_heads, max(1, view.key_heads // 8))
        axes.set_yticks([head + 0.5 for head in heads], labels=map(str, heads))
    panels[-1].set_xlabel("position")
    figure.suptitle(_title(view))
    return figure


def blocks_picture(view: BlocksView) -> Figure:
    """The blocks that are computed."""
    figure = Figure(figsize=(6.2, 6.4), layout="constrained")
    axes = figure.subplots()
    size = view.blocks
    # Blocks that no query sees are grey, so that causality is told apart from the pattern.
    seen = torch.ones(size, size).tril() if view.is_causal else torch.ones(size, size)
    axes.imshow(
        (seen + view.mask()).numpy(), cmap=ListedColormap(["#dddddd", "#ffffff", _READ]), vmin=0, vmax=2,
        extent=(0, size, size, 0), interpolation="nearest",
    )  # fmt: skip
    axes.set(xlabel=f"key block of {view.config.block_size}", ylabel="query block")
    kinds = [(_READ, "computed"), ("#ffffff", "left out")] + ([("#dddddd", "later")] if view.is_causal else [])
    figure.legend(
        handles=[Patch(facecolor=color, edgecolor="#777777", label=name) for color, name in kinds],
        loc="outside lower center", ncols=3, frameon=False,
    )  # fmt: skip
    share = f"{view.computed / view.visible:.1%} of the visible blocks"
    figure.suptitle(f"{view.config.pattern_type}, {view.tokens:,} tokens: {share}")
    return figure


def ring_picture(view: RingView) -> Figure:
    """The steps of all ranks as a timeline: the colour is the number of pairs, the label is the rank that sent the rows."""
    ranks, steps = len(view.ranks), view.steps
    figure = Figure(figsize=(min(16, 2.6 + 0.75 * steps), min(10, 1.9 + 0.42 * ranks)), layout="constrained")
    axes = figure.subplots()
    pairs = torch.tensor(view.pairs(), dtype=torch.float64)
    # Messages have far fewer pairs than a rank's own rows, so small numbers get most of the colours.
    norm = PowerNorm(0.4, vmin=0, vmax=max(1.0, float(pairs.max())))
    image = axes.pcolormesh(pairs.numpy(), cmap="Blues", norm=norm)
    axes.set(ylim=(ranks, 0), xlabel="step", ylabel="rank")
    if ranks <= _LABELLED and steps <= 2 * _LABELLED:
        axes.set_yticks([rank + 0.5 for rank in range(ranks)], labels=map(str, range(ranks)))
        axes.set_xticks([step + 0.5 for step in range(steps)], labels=["own", *map(str, range(1, steps))])
        _label(axes, view, float(pairs.max()))
    figure.colorbar(image, label="query-key pairs of the step")
    causal = ", causal" if view.is_causal else ""
    figure.suptitle(f"{ranks} ranks, {view.layout}{causal}: even work {view.balance():.0%}")
    return figure


def _label(axes: Axes, view: RingView, most: float) -> None:
    for rank, steps in enumerate(view.ranks):
        for number, step in enumerate(steps):
            if step.source is not None:
                color = "white" if step.pairs > 0.3 * most else "black"
                axes.text(
                    number + 0.5, rank + 0.5, f"from {step.source}", ha="center", va="center", fontsize=7, color=color
                )


def _title(view: PatternView) -> str:
    lengths, rates = (", ".join(map(str, x)) for x in (view.pattern.segment_lengths, view.pattern.dilation_rates))
    causal = ", causal" if view.is_causal else ""
    return f"{view.tokens:,} tokens, segment lengths {lengths}, dilation rates {rates}{causal}"

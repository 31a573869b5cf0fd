"""The commands ``show pattern``, ``segments``, ``blocks`` and ``ring``: what they print, write and draw."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from dilated_attention_pytorch.cli.outputs import Outputs, end, parse_count, parse_integers
from dilated_attention_pytorch.cli.progress import show_progress
from dilated_attention_pytorch.cli.show_options import BlocksOptions, PatternOptions, RingOptions
from dilated_attention_pytorch.cli.streams import interruptible
from dilated_attention_pytorch.patterns.blocks import SparsePatternConfig
from dilated_attention_pytorch.patterns.dilated import OFFSET_RULES, Dilated
from dilated_attention_pytorch.workbench.views import BlocksView, PatternView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dilated_attention_pytorch.workbench.ring_view import RingStep, RingView

_TEXT_TOKENS = 64  # longer lines are not legible
_TEXT_BLOCKS = 128
_TEXT_RANKS = 16
_GAP = 8  # columns between two heads


def show_pattern(options: PatternOptions) -> None:
    """Print how often positions meet, a table for each head."""

    def text(view: PatternView, console: Console) -> None:
        width = 2 * view.tokens - 1
        beside = max(1, (console.width + _GAP) // (width + _GAP))
        for first in range(0, view.key_heads, beside):
            heads = range(first, min(first + beside, view.key_heads))
            console.print((" " * _GAP).join(f"head {head}".ljust(width) for head in heads).rstrip(), soft_wrap=True)
            for line in zip(*(view.text(head).splitlines() for head in heads), strict=True):
                console.print((" " * _GAP).join(line), soft_wrap=True)
            console.print()
        console.print(_caption(view, "A number counts the branches in which a query (row) and a key (column) meet."))

    def figures(view: PatternView) -> dict[str, Any]:
        return {"multiplicity": [view.multiplicity(head).tolist() for head in range(view.key_heads)]}

    def picture(view: PatternView) -> Figure:
        from dilated_attention_pytorch.cli.show_pictures import multiplicity_picture  # imports matplotlib

        return multiplicity_picture(view)

    _show_dilated(options, text, figures, picture)


def show_segments(options: PatternOptions) -> None:
    """Print which rows each head reads in each branch."""

    def text(view: PatternView, console: Console) -> None:
        for branch, (length, rate) in enumerate(view.pattern.branches):
            console.print(f"segment length {length:,}, dilation rate {rate}")
            for head in range(view.key_heads):
                console.print(f"  head {head:<3} {view.segments_text(branch, head)}", soft_wrap=True)
        console.print(_caption(view, "A head reads the rows with a #. A bar ends a segment."))

    def figures(view: PatternView) -> dict[str, Any]:
        branches, heads = range(len(view.pattern.branches)), range(view.key_heads)
        reads = [[view.reads(b, h).nonzero().flatten().tolist() for h in heads] for b in branches]
        offsets = [[view.pattern.offset(h, view.key_heads, r) for h in heads] for r in view.pattern.dilation_rates]
        return {"rows_by_branch_and_head": reads, "offsets_by_branch_and_head": offsets}

    def picture(view: PatternView) -> Figure:
        from dilated_attention_pytorch.cli.show_pictures import segments_picture  # imports matplotlib

        return segments_picture(view)

    _show_dilated(options, text, figures, picture)


def show_blocks(options: BlocksOptions) -> None:
    """Print which blocks a block-sparse pattern computes."""
    outputs = Outputs(options.json, options.plot, options.quiet)
    with reported():
        outputs.check()
        view = BlocksView(_config(options), parse_count("--tokens", options.tokens), options.causal)
    console = outputs.console()
    if not options.quiet:
        if view.blocks <= _TEXT_BLOCKS:
            console.print(view.text(), soft_wrap=True)
        else:
            console.print(f"{view.blocks:,} blocks are too many for text; draw them with --plot FILE.")
        console.print(f"{view.computed:,} of {view.visible:,} visible blocks, {view.computed / view.visible:.1%}")
    outputs.write({
        "config": view.config.spec, "tokens": view.tokens, "is_causal": view.is_causal, "computed": view.computed,
        "visible": view.visible, "key_blocks": [row.nonzero().flatten().tolist() for row in view.mask()],
    })  # fmt: skip
    outputs.draw(lambda: _blocks_picture(view))


def show_ring(options: RingOptions) -> None:
    """Print what each rank of a sharded sequence sends, receives and computes, step by step."""
    from dilated_attention_pytorch.workbench.ring_view import RingSizes, RingView  # imports torch.distributed

    outputs = Outputs(options.json, options.plot, options.quiet)
    console = outputs.console()
    with reported():
        outputs.check()
        key_heads = options.heads if options.key_heads is None else options.key_heads
        sizes = RingSizes(parse_count("--tokens", options.tokens), options.heads, key_heads, options.head_dim)
        with _ring_progress(options.ranks, console, quiet=options.quiet) as report:
            view = RingView.of(
                _dilated(options), sizes, options.ranks, layout=options.layout, is_causal=options.causal,
                bucket_size=options.bucket_size, report=report,
            )  # fmt: skip
    if not options.quiet:
        if options.ranks <= _TEXT_RANKS:
            console.print(_ring_table(view))
        else:
            console.print(f"{options.ranks:,} ranks are too many for text; draw them with --plot FILE.")
        received = max(sum(step.received_bytes for step in steps) for steps in view.ranks)
        messages = max(sum(step.source is not None for step in steps) for steps in view.ranks)
        size = f"{received / 2**20:,.2f} MiB in bfloat16"
        console.print(f"A rank receives at most {size}, and at most {messages:,} message(s).")
        console.print(f"The mean rank computes {view.balance():.1%} of what the busiest one does.")
    ranks = [{"rows": rows, "steps": [asdict(x) for x in steps]} for rows, steps in zip(view.rows, view.ranks, strict=True)]
    outputs.write({
        "layout": view.layout, "is_causal": view.is_causal, "sizes": asdict(sizes), "balance": view.balance(),
        "ranks": ranks,
    })  # fmt: skip
    outputs.draw(lambda: _ring_picture(view))


@contextlib.contextmanager
def _ring_progress(ranks: int, console: Console, *, quiet: bool) -> Iterator[Callable[[int], object]]:
    """The progress over many ranks, which take up to a minute. Few ranks need none."""
    quiet = quiet or ranks <= _TEXT_RANKS
    try:
        with interruptible(), show_progress(console, ranks, "rank {:,}", quiet=quiet) as report:
            yield lambda done: report(done, f"of {ranks:,}".__str__)
    except KeyboardInterrupt:
        end("Interrupted: nothing was written.", 130)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn an option that is not valid into one sentence and exit code 2."""
    try:
        yield
    except (TypeError, ValueError) as error:
        end(error, 2)


def _show_dilated(
    options: PatternOptions,
    text: Callable[[PatternView, Console], None],
    figures: Callable[[PatternView], dict[str, Any]],
    picture: Callable[[PatternView], Figure],
) -> None:
    outputs = Outputs(options.json, options.plot, options.quiet)
    with reported():
        outputs.check()
        view = PatternView(_dilated(options), options.tokens, options.heads, options.causal)
    console = outputs.console()
    if not options.quiet:
        if view.tokens <= _TEXT_TOKENS:
            text(view, console)
        else:
            console.print(f"{view.tokens:,} tokens are too many for text; draw them with --plot FILE.")
    outputs.write({"pattern": view.pattern.spec, "tokens": view.tokens, "is_causal": view.is_causal} | figures(view))
    outputs.draw(lambda: picture(view))


def _blocks_picture(view: BlocksView) -> Figure:
    from dilated_attention_pytorch.cli.show_pictures import blocks_picture  # imports matplotlib

    return blocks_picture(view)


def _ring_picture(view: RingView) -> Figure:
    from dilated_attention_pytorch.cli.show_pictures import ring_picture  # imports matplotlib

    return ring_picture(view)


def _dilated(options: PatternOptions | RingOptions) -> Dilated:
    lengths = parse_integers("--segment-lengths", options.segment_lengths)
    rates = parse_integers("--dilation-rates", options.dilation_rates)
    rule = options.offsets in OFFSET_RULES
    return Dilated(lengths, rates, options.offsets if rule else parse_integers("--offsets", options.offsets))


def _config(options: BlocksOptions) -> SparsePatternConfig:
    if (options.segment_lengths is None) != (options.dilation_rates is None):
        raise ValueError("--segment-lengths and --dilation-rates describe branches pairwise: give both or neither")
    branches: dict[str, Sequence[int]] = {}
    if options.segment_lengths is not None and options.dilation_rates is not None:
        branches["segment_lengths"] = parse_integers("--segment-lengths", options.segment_lengths)
        branches["dilation_rates"] = parse_integers("--dilation-rates", options.dilation_rates)
    return SparsePatternConfig(options.pattern, options.ratio, options.block_size, **branches)  # type: ignore[arg-type]


def _caption(view: PatternView, meaning: str) -> str:
    lengths, rates = (", ".join(map(str, x)) for x in (view.pattern.segment_lengths, view.pattern.dilation_rates))
    causal = ", causal" if view.is_causal else ""
    return f"{view.tokens} tokens, segment lengths {lengths}, dilation rates {rates}{causal}. {meaning}"


def _ring_table(view: RingView) -> Table:
    """A line for each rank and step."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name, justify in (("rank", "right"), ("step", "left"), ("sends", "left"), ("receives", "left"), ("pairs", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for rank, steps in enumerate(view.ranks):
        for number, step in enumerate(steps):
            last = number == len(steps) - 1
            first = f"{rank}" if number == 0 else ""
            table.add_row(first, step.name, *_ends(step), f"{step.pairs:,}" if step.pairs else "-", end_section=last)
    return table


def _ends(step: RingStep) -> tuple[str, str]:
    sends = "" if step.target is None else f"{step.sent_bytes / 2**20:,.2f} MiB to {step.target}"
    receives = "" if step.source is None else f"{step.received_bytes / 2**20:,.2f} MiB from {step.source}"
    return sends, receives

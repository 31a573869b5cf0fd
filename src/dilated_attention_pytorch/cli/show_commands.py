"""The group of commands ``show``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer

from dilated_attention_pytorch.cli.show_options import BlocksOptions, PatternOptions, RingOptions
from dilated_attention_pytorch.cli.show_order import OrderOptions, show_order
from dilated_attention_pytorch.cli.show_views import show_blocks, show_pattern, show_ring, show_segments

show = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Print or draw patterns, orders and rings.")


def _add(name: str, kind: type, run: Callable[[Any], None], description: str, *examples: str) -> None:
    """Add a command whose options are the fields of ``kind``."""

    def command(**options: Any) -> None:
        run(kind(**options))

    command.__signature__ = inspect.signature(kind, eval_str=True)  # type: ignore[attr-defined]
    lines = "\n".join(f"  dilated-attention show {name} {example}".rstrip() for example in examples)
    show.command(name, help=f"{description}\n\n\b\nExamples:\n{lines}")(command)


_add(
    "pattern", PatternOptions, show_pattern, "How often two positions meet, for each head.",
    "", "--tokens 32 --segment-lengths 8,32 --dilation-rates 1,4 --causal --plot pattern.png",
)  # fmt: skip
_add(
    "segments", PatternOptions, show_segments, "Which rows each head reads in each branch.",
    "", "--tokens 256 --segment-lengths 64,256 --dilation-rates 1,4 --plot segments.png",
)  # fmt: skip
_add(
    "blocks", BlocksOptions, show_blocks, "Which blocks a block-sparse pattern computes.",
    "--pattern hierarchical --tokens 8k --causal",
    "--pattern global_local --tokens 64k --ratio 0.05 --plot blocks.png",
)  # fmt: skip
_add(
    "order", OrderOptions, show_order, "An order of the tokens of a grid, its segments, and what one query sees.",
    "--order hilbert --grid 8x8", "--order hilbert --grid 64x64 --plot order.png",
)  # fmt: skip
_add(
    "ring", RingOptions, show_ring, "What each rank of a sharded sequence sends, receives and computes, step by step.",
    "--ranks 4", "--ranks 8 --tokens 1M --layout zigzag --causal --plot ring.png",
)  # fmt: skip

"""The options of ``show pattern``, ``segments``, ``blocks`` and ``ring`` as they are given. Typer reads the fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dilated_attention_pytorch.patterns.blocks import PATTERN_TYPES

_Json = Annotated[str | None, typer.Option("--json", help="A file for all figures, or - for standard output.")]
_Plot = Annotated[Path | None, typer.Option(help="The picture: a .png, .svg or .pdf file.")]
_Quiet = Annotated[bool, typer.Option("--quiet", help="Print no text.")]
_Causal = Annotated[bool, typer.Option("--causal", help="A token sees itself and earlier tokens only.")]
_Lengths = Annotated[str, typer.Option(help="The segment lengths of the branches, separated by commas.")]
_Rates = Annotated[str, typer.Option(help="As many dilation rates as segment lengths.")]
_Offsets = Annotated[str, typer.Option(help="interleaved, blocked, or one integer per head, separated by commas.")]


@dataclass(frozen=True, slots=True)
class PatternOptions:
    """A dilated pattern over a few tokens."""

    tokens: Annotated[int, typer.Option(help="The length of the sequence.")] = 16
    heads: Annotated[int, typer.Option(help="The number of key heads.")] = 4
    segment_lengths: _Lengths = "4,8,16"
    dilation_rates: _Rates = "1,2,4"
    offsets: _Offsets = "interleaved"
    causal: _Causal = False
    json: _Json = None
    plot: _Plot = None
    quiet: _Quiet = False


@dataclass(frozen=True, slots=True)
class BlocksOptions:
    """A block-sparse pattern."""

    pattern: Annotated[str, typer.Option(help=f"{', '.join(PATTERN_TYPES[:-1])}.")] = "hierarchical"
    tokens: Annotated[str, typer.Option(help="The length of the sequence, such as 4096 or 64k.")] = "4096"
    ratio: Annotated[float, typer.Option(help="The fraction of the visible blocks that is computed.")] = 0.1
    block_size: Annotated[int, typer.Option(help="Positions of a block: a power of two from 16 to 256.")] = 128
    segment_lengths: Annotated[str | None, typer.Option(help="Of dilated_sparse, in tokens.")] = None
    dilation_rates: Annotated[str | None, typer.Option(help="Of dilated_sparse, in blocks.")] = None
    causal: _Causal = False
    json: _Json = None
    plot: _Plot = None
    quiet: _Quiet = False


@dataclass(frozen=True, slots=True)
class RingOptions:
    """A sequence that ranks share."""

    tokens: Annotated[str, typer.Option(help="The length of the whole sequence, such as 65536 or 1M.")] = "65536"
    ranks: Annotated[int, typer.Option(help="The number of ranks.")] = 4
    heads: Annotated[int, typer.Option(help="The number of query heads.")] = 8
    key_heads: Annotated[int | None, typer.Option(help="The number of key heads. By default that of query heads.")] = None
    head_dim: Annotated[int, typer.Option(help="The size of a head.")] = 64
    segment_lengths: _Lengths = "2048,16384,65536"
    dilation_rates: _Rates = "1,8,32"
    offsets: _Offsets = "interleaved"
    layout: Annotated[str, typer.Option(help="contiguous or zigzag.")] = "contiguous"
    bucket_size: Annotated[int | None, typer.Option(help="Rows of a message. By default those of a CPU.")] = None
    causal: _Causal = False
    json: _Json = None
    plot: _Plot = None
    quiet: _Quiet = False

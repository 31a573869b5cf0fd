"""Block-sparse patterns: which blocks of positions meet. They are frozen and hashable; patterns with lists, by identity."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import rules
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.patterns.lists import BlockLists

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# The settings that only one type of pattern reads.
_READ_BY = {
    "local_window_size": "hierarchical",
    "global_tokens": "global_local",
    "segment_lengths": "dilated_sparse",
    "dilation_rates": "dilated_sparse",
}
PATTERN_TYPES = ("local_window", "global_local", "dilated_sparse", "hierarchical", "adaptive")
BLOCK_SIZES = (16, 32, 64, 128, 256)


def check_block_size(block_size: Any) -> None:
    """Raise if blocks of this size are not supported."""
    if not isinstance(block_size, int) or block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be a power of two from 16 to 256, got {block_size!r}; 128 suits most sequences")


def check_ratio(name: str, ratio: Any) -> None:
    """Raise if this is not a fraction of blocks."""
    if isinstance(ratio, bool) or not isinstance(ratio, float | int) or not 0.0 < ratio <= 1.0:
        raise ValueError(f"{name} is the fraction of blocks computed, 0 < ratio <= 1, got {ratio!r}; 0.1 computes 10 %")


@dataclass(frozen=True)
class SparsePatternConfig:
    """Which key blocks a query block reads: ``max(1, ceil(sparsity_ratio * v))`` of the ``v`` blocks that it sees.

    A query block always reads its own block. The pattern type decides which blocks it reads next. "Nearest" is by distance
    in blocks; of two blocks at the same distance, the earlier one is nearer.

    * ``"local_window"``: the nearest blocks.
    * ``"global_local"``: the blocks that hold the first ``global_tokens`` tokens, then the nearest blocks. The query blocks
      that hold those tokens read everything they see.
    * ``"dilated_sparse"``: alternates over branches (``segment_lengths``, ``dilation_rates``). A branch has the blocks of
      the same segment at multiples of the rate in blocks, nearest first. A segment has ``ceil(length / block_size)``
      blocks. When no branch has blocks left, the nearest blocks follow.
    * ``"hierarchical"``: alternates over levels, nearest blocks first. Level 0 has every block within ``local_window_size``
      tokens, which is w = ``ceil(local_window_size / block_size)`` blocks, at least 2. Level l has the blocks at distances
      from ``w * 2**(l-1)`` to below ``w * 2**l`` that are multiples of ``2**l``. When no level has blocks left, the nearest
      blocks follow.
    * ``"adaptive"``: for each sample and head, the blocks with the highest products of mean query and mean key. The choice
      is not differentiated.

    ``sparsity_ratio`` is the fraction of blocks **computed**, rounded to a denominator of at most a million.

    >>> SparsePatternConfig("local_window", 0.1).block_size
    128
    """

    pattern_type: str
    sparsity_ratio: float
    block_size: int = 128
    local_window_size: int = 512  # tokens to each side, read by "hierarchical"
    global_tokens: int = 64  # read by "global_local"
    segment_lengths: Sequence[int] = ()  # tokens, read by "dilated_sparse"
    dilation_rates: Sequence[int] = ()  # blocks, read by "dilated_sparse"
    # The configuration as one string, for operator schemas; ``from_spec`` reads it. It is a field because compilers with
    # dynamic shapes cannot format numbers.
    spec: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.pattern_type not in PATTERN_TYPES:
            raise ValueError(
                f"pattern_type must be one of {', '.join(map(repr, PATTERN_TYPES))}, got {self.pattern_type!r}; for a mask "
                "of your own use BlockSparse.custom(mask, block_size=...)"
            )
        check_ratio("sparsity_ratio", self.sparsity_ratio)
        object.__setattr__(self, "sparsity_ratio", float(self.sparsity_ratio))
        check_block_size(self.block_size)
        for name in ("local_window_size", "global_tokens"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} counts tokens: it must be an integer, at least 1, got {count!r}")
        for name in ("segment_lengths", "dilation_rates"):
            values = getattr(self, name)
            object.__setattr__(self, name, tuple(values) if isinstance(values, list | tuple) else values)
        if self.segment_lengths or self.dilation_rates:
            branches = Dilated(self.segment_lengths, self.dilation_rates)
            object.__setattr__(self, "segment_lengths", branches.segment_lengths)
            object.__setattr__(self, "dilation_rates", branches.dilation_rates)
        for name, reader in _READ_BY.items():
            if reader != self.pattern_type and getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"{name} is read by {reader!r} only, got {name}={getattr(self, name)} for {self.pattern_type!r}, "
                    "whose blocks follow from sparsity_ratio; leave it out"
                )
        lengths, rates = (",".join(map(str, x)) for x in (self.segment_lengths, self.dilation_rates))
        sizes = f"{self.block_size}|{self.local_window_size}|{self.global_tokens}"
        object.__setattr__(self, "spec", f"{self.pattern_type}|{self.sparsity_ratio!r}|{sizes}|{lengths}|{rates}")

    @property
    def ratio(self) -> Fraction:
        """``sparsity_ratio`` as an exact fraction, from which budgets are computed."""
        return Fraction(repr(self.sparsity_ratio)).limit_denominator(10**6)

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_spec(spec: str) -> SparsePatternConfig:
        """The configuration that ``spec`` describes."""
        kind, ratio, block_size, window, tokens, lengths, rates = spec.split("|")
        branches = ([int(x) for x in values.split(",") if x] for values in (lengths, rates))
        return SparsePatternConfig(kind, float(ratio), int(block_size), int(window), int(tokens), *branches)

    def rows(
        self, first: int, blocks: int, is_causal: bool, device: torch.device | str = "cpu", stop: int | None = None
    ) -> rules.Rows:
        """The query blocks ``first .. stop - 1`` of ``blocks``, and their budgets; ``stop`` defaults to ``blocks``."""
        return rules.Rows.of(self.ratio, first, blocks, is_causal, device, stop)

    def lists(self, first: int, blocks: int, is_causal: bool, stop: int | None = None) -> BlockLists:
        """The lists of the query blocks ``first .. stop - 1`` of a sequence of ``blocks`` blocks.

        ``stop`` defaults to ``blocks``. An ``"adaptive"`` pattern has no lists, because its choice depends on the tensors.

        >>> SparsePatternConfig("local_window", 0.5).lists(2, 4, is_causal=True).indices.tolist()
        [1, 2, 2, 3]
        """
        size, rows = self.block_size, self.rows(first, blocks, is_causal, stop=stop)
        if self.pattern_type == "local_window":
            runs = rules.local_window(rows)
        elif self.pattern_type == "global_local":
            runs = rules.global_local(rows, min(blocks, math.ceil(self.global_tokens / size)))
        elif self.pattern_type == "hierarchical":
            # A window of blocks + 1 or more holds the whole sequence.
            runs = rules.hierarchical(rows, max(2, min(blocks + 1, math.ceil(self.local_window_size / size))))
        else:
            assert self.pattern_type == "dilated_sparse"
            segments = [min(blocks, math.ceil(length / size)) for length in self.segment_lengths]
            runs = rules.dilated_sparse(rows, tuple(zip(segments, self.dilation_rates, strict=True)))
        counts, indices = rules.expand(runs)
        return BlockLists.packed(counts.long().view(1, 1, -1), indices, size, blocks, first)


@dataclass(frozen=True)
class BlockSparse:
    """Block-sparse attention: of two blocks of ``block_size`` positions, all pairs meet or none.

    The last block of a sequence may be shorter. With ``is_causal``, a query block does not read later blocks, and its own
    block is causal inside. With an ``order`` as well, blocks are those of the ordered sequence, and causality compares
    original positions. The lists are then those of the call that is not causal. A row sees the listed keys whose original
    positions are not larger than its own.

    >>> pattern = BlockSparse.from_config(SparsePatternConfig("local_window", 0.25, block_size=16))
    >>> BlockSparse.custom(torch.eye(4, dtype=torch.bool), block_size=64).block_size
    64
    """

    config: SparsePatternConfig | None = None  # None if lists are given
    block_size: int = 0
    given: BlockLists | None = None
    given_causal: BlockLists | None = None  # the lists of a causal call
    only_causal: bool = False  # the lists are those of a causal mask
    # The configuration as one string, for operators. Given lists are passed to them as tensors.
    spec: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        of_config = isinstance(self.config, SparsePatternConfig) and self.block_size == self.config.block_size
        if not of_config and not isinstance(self.given, BlockLists):
            raise TypeError(
                "a block-sparse pattern is made by BlockSparse.from_config(SparsePatternConfig(...)), "
                "BlockSparse.custom(mask) or BlockSparse.from_flex(block_mask), not by BlockSparse(...)"
            )
        object.__setattr__(self, "spec", f"mask|{self.block_size}" if self.config is None else self.config.spec)

    @staticmethod
    def from_config(config: SparsePatternConfig) -> BlockSparse:
        """The pattern that a configuration describes, for any length."""
        if not isinstance(config, SparsePatternConfig):
            raise TypeError(f"config must be a SparsePatternConfig, got {type(config).__name__}")
        rates = sorted(config.dilation_rates)
        if config.pattern_type == "dilated_sparse" and not rates:
            raise ValueError(
                "pattern_type 'dilated_sparse' needs segment_lengths and dilation_rates, got none; write for example "
                "SparsePatternConfig('dilated_sparse', 0.1, segment_lengths=[4096, 8192], dilation_rates=[1, 2])"
            )
        if any(b % a for a, b in pairwise(rates)):
            got = f"got {tuple(rates)}; use for example 1, 2, 4"
            raise ValueError(f"the sorted dilation_rates of 'dilated_sparse' must divide one another, {got}")
        return BlockSparse(config, config.block_size)

    @staticmethod
    def custom(mask: Tensor, *, block_size: int = 128) -> BlockSparse:
        """The pattern of a boolean mask of blocks, (query blocks, key blocks) or (query heads, query blocks, key blocks).

        Block ``b`` holds the positions ``b * block_size`` and following, so a sequence of M positions has
        ``ceil(M / block_size)`` key blocks. With fewer queries than keys, the mask has either the query blocks that hold
        queries, or all of them. The result of a query block without a key block is 0 (lse -inf).
        """
        check_block_size(block_size)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            got = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask must be a boolean tensor, got {got}; use torch.as_tensor(mask).bool()")
        if mask.dim() not in (2, 3) or 0 in mask.shape or mask.shape[-2] > mask.shape[-1]:
            raise ValueError(
                "mask must be (query blocks, key blocks) or (query heads, query blocks, key blocks), with at most as many "
                f"query blocks as key blocks and at least one: got {tuple(mask.shape)}"
            )
        if mask.is_meta:
            raise ValueError("mask must have values to make lists from, got one on the meta device; make it on the CPU")
        return BlockSparse._of_mask(mask, block_size)

    @staticmethod
    def from_flex(block_mask: BlockMask) -> BlockSparse:
        """The pattern of a FlexAttention ``BlockMask`` for as many queries as keys.

        Every block must be full, or all blocks on the diagonal must be causal inside and all others full. A pattern with
        causal blocks needs ``is_causal=True``. The ``mask_mod`` is evaluated on partial blocks to find out.
        """
        from dilated_attention_pytorch.patterns.flex import read_block_mask  # imports FlexAttention

        mask_shqk, block_size, is_causal = read_block_mask(block_mask)
        check_block_size(block_size)
        return BlockSparse._of_mask(mask_shqk, block_size, is_causal)

    @staticmethod
    def _of_mask(mask: Tensor, block_size: int, only_causal: bool = False) -> BlockSparse:
        # A mask with fewer query blocks than key blocks has the last query blocks.
        first = mask.shape[-1] - mask.shape[-2]
        return BlockSparse(None, block_size, *BlockLists.pair_from_mask(mask, block_size, first), only_causal)

    @property
    def is_adaptive(self) -> bool:
        """Whether the choice of blocks depends on the tensors."""
        return self.config is not None and self.config.pattern_type == "adaptive"

    @property
    def digest(self) -> str:
        """The pattern as a short string, which ranks compare. Given lists are represented by a hash."""
        return _digest(self) if self.config is None else self.config.spec

    def check_call(self, batch: int, n: int, m: int, heads: int, *, is_causal: bool, packed: bool) -> None:
        """Raise if the pattern cannot serve ``n`` queries over ``m`` positions."""
        if self.given is None:
            return
        samples, mask_heads, rows = self.given.counts.shape
        if packed:
            raise ValueError(
                "a mask of blocks belongs to one sequence, so it excludes cu_seqlens; call once for each document, or "
                "build the pattern with BlockSparse.from_config, which fits any length"
            )
        if self.only_causal and not is_causal:
            raise ValueError("this BlockMask is causal on its diagonal: pass is_causal=True, got is_causal=False")
        if samples not in (1, batch) or mask_heads not in (1, heads):
            serves = f"{samples} sample(s) and {mask_heads} query head(s) (1 serves any number)"
            raise ValueError(f"the mask is for {serves}, got {batch} and {heads}")
        keys, size = self.given.key_blocks, self.block_size
        touched = keys - (m - n) // size
        if keys != -(-m // size) or rows not in (keys, touched):
            raise ValueError(
                f"the mask of this pattern has {rows} x {keys} blocks of {size}: got {n} queries and {m} keys, which are "
                f"{-(-m // size) - (m - n) // size} x {-(-m // size)} blocks; build a mask for this length"
            )


@lru_cache(maxsize=32)
def _digest(pattern: BlockSparse) -> str:
    shapes, content = [], hashlib.sha256()
    for lists in (pattern.given, pattern.given_causal):
        assert lists is not None
        shapes.append("x".join(map(str, (*lists.counts.shape, lists.key_blocks))))
        for x in (lists.counts.contiguous(), lists.starts.contiguous(), lists.indices.cpu()):
            content.update(ctypes.string_at(x.data_ptr(), x.nbytes) if x.numel() else b"")  # works without NumPy
    which = " causal" if pattern.only_causal else ""
    return f"mask {shapes[0]} of blocks of {pattern.block_size}{which}, {content.hexdigest()[:16]}"

"""Block patterns by distance between ranks: dense inside a rank, sparser inside a node, sparsest between nodes.

The key blocks that a query block sees form three tiers: those of its own rank, of the other ranks of its node, and of other
nodes. A rule gives the number of blocks that a query block reads of each tier. It reads the nearest ones, and of two at the
same distance the earlier one. A block belongs to the rank that holds its first position.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns.blocks import BlockSparse, check_block_size, check_ratio
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.shards import Shards

TIER_PATTERNS = ("hierarchical", "node_local", "bandwidth_aware", "adaptive_load_balanced")
_BYTES = ("node_bytes", "inter_node_bytes")
_AT_ONCE = 256  # query blocks whose distances to all blocks of a tier exist at the same time, with branches


@dataclass(frozen=True)
class DistributedSparseConfig:
    """Which key blocks a query block reads, by where they are: in its own rank, in its node, in other nodes.

    A query block that sees ``v`` blocks, of which ``v_t`` are in a tier, wants ``ceil(density_t * v_t)`` blocks of the
    tier: its own block first, then the nearest. It gets at most ``max(1, ceil(sparsity_ratio * v))`` blocks of all tiers.
    If it wants more, every tier gets its share of that number, rounded down, and the nearer tiers get the remainder. In
    ``"adaptive_load_balanced"``, the limit holds for all query blocks together.

    * ``"hierarchical"``: this rule.
    * ``"node_local"``: this rule, with nothing from other nodes.
    * ``"bandwidth_aware"``: a rank fetches the blocks of its node and of other nodes that are nearest to its own blocks, as
      many as ``node_bytes`` and ``inter_node_bytes`` allow. Its query blocks want all of them.
    * ``"adaptive_load_balanced"``: all ranks compute the same number of blocks, as far as they see so many (early ranks may
      not, under a causal mask). The sum of all limits is shared evenly over ranks, and evenly over the query blocks of each
      rank. A query block shares its number over the tiers in proportion to what it wants.

    Args:
        sparsity_ratio: the most blocks computed of those visible.
        pattern_type: one of the above.
        local_sparsity, global_sparsity, inter_node_sparsity: densities of the three tiers. The defaults are ``4 *``,
            ``1 *`` and ``0.5 * sparsity_ratio``, at most 1.
        block_size: positions, a power of two from 16 to 256.
        node_size: ranks per node, which have consecutive numbers in the group. The default is the environment variable
            ``LOCAL_WORLD_SIZE``, which torchrun sets, or 1.
        segment_lengths, dilation_rates: branches, in tokens and in blocks. With them, a query block sees only the blocks
            of the same segment at multiples of the rate, of any branch. A segment has ``ceil(length / block_size)`` blocks.
            Without them, it sees every block.
        node_bytes, inter_node_bytes: for ``"bandwidth_aware"``, the bytes of keys and values that a rank may receive in a
            forward for each sample, from its node and from other nodes. They hold for shards of whole blocks; a block that
            two ranks share costs extra. The defaults follow from the densities of the tiers.

    >>> DistributedSparseConfig(sparsity_ratio=0.05, pattern_type="hierarchical").densities
    (Fraction(1, 5), Fraction(1, 20), Fraction(1, 40))
    """

    sparsity_ratio: float = 0.1
    pattern_type: str = "hierarchical"
    local_sparsity: float | None = None
    global_sparsity: float | None = None
    inter_node_sparsity: float | None = None
    block_size: int = 128
    node_size: int | None = None
    node_bytes: int | None = None
    inter_node_bytes: int | None = None
    segment_lengths: Sequence[int] = ()
    dilation_rates: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.pattern_type not in TIER_PATTERNS:
            known = ", ".join(map(repr, TIER_PATTERNS))
            others = "patterns that do not know of ranks are in SparsePatternConfig"
            raise ValueError(f"pattern_type must be one of {known}, got {self.pattern_type!r}; {others}")
        check_ratio("sparsity_ratio", self.sparsity_ratio)
        for name in ("local_sparsity", "global_sparsity", "inter_node_sparsity"):
            if getattr(self, name) is not None:
                check_ratio(name, getattr(self, name))
        check_block_size(self.block_size)
        for name in ("node_size", *_BYTES):
            value, least = getattr(self, name), int(name == "node_size")
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be an integer, at least {least}, or None, got {value!r}")
        if self.pattern_type == "node_local" and self.inter_node_sparsity is not None:
            got = f"got inter_node_sparsity={self.inter_node_sparsity}; leave it out, or use 'hierarchical'"
            raise ValueError(f"'node_local' reads nothing of other nodes, {got}")
        for name in _BYTES:
            value = getattr(self, name)
            if self.pattern_type != "bandwidth_aware" and value is not None:
                raise ValueError(f"{name} is read by 'bandwidth_aware' only, got {value} for {self.pattern_type!r}")
        if self.segment_lengths or self.dilation_rates:
            branches = Dilated(self.segment_lengths, self.dilation_rates)
            object.__setattr__(self, "segment_lengths", branches.segment_lengths)
            object.__setattr__(self, "dilation_rates", branches.dilation_rates)
        else:
            object.__setattr__(self, "segment_lengths", ())
            object.__setattr__(self, "dilation_rates", ())

    @property
    def densities(self) -> tuple[Fraction, Fraction, Fraction]:
        """The densities of the three tiers as fractions."""
        ratio = _fraction(self.sparsity_ratio)
        given = self.local_sparsity, self.global_sparsity, self.inter_node_sparsity
        usual = (min(Fraction(1), factor * ratio) for factor in (4, 1, Fraction(1, 2)))
        local, node, between = (u if x is None else _fraction(x) for x, u in zip(given, usual, strict=True))
        return local, node, Fraction(0) if self.pattern_type == "node_local" else between

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """The blocks of a segment and the rate in blocks, of each branch; empty if a query block sees every block.

        >>> DistributedSparseConfig(segment_lengths=[4096, 8192], dilation_rates=[1, 2]).branches
        ((32, 1), (64, 2))
        """
        pairs = zip(self.segment_lengths, self.dilation_rates, strict=True)
        return tuple((-(-length // self.block_size), rate) for length, rate in pairs)

    def pattern(self, shards: Shards, *, token_bytes: int | None = None) -> BlockSparse:
        """The pattern for these shards. One device computes the same with it.

        ``token_bytes`` is the number of bytes of keys and values of one position, ``2 * key heads * head size * element
        size``. It is needed if the configuration counts bytes.

        >>> from dilated_attention_pytorch.distributed import Shards
        >>> config = DistributedSparseConfig(0.5, local_sparsity=1.0, global_sparsity=0.25, block_size=16, node_size=2)
        >>> config.pattern(Shards.of([32, 32, 32], "contiguous")).given.mask()[0, 0].int().tolist()[0]
        [1, 1, 1, 0, 0, 0]
        """
        if token_bytes is None and any(getattr(self, name) is not None for name in _BYTES):
            size = "the bytes of the keys and values of one position: 2 * key heads * head size * element size"
            raise ValueError(f"node_bytes and inter_node_bytes need token_bytes, {size}")
        node_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.node_size is None else self.node_size
        return _pattern(self, shards, node_size, token_bytes)


def _fraction(ratio: float) -> Fraction:
    return Fraction(repr(float(ratio))).limit_denominator(10**6)


@lru_cache(maxsize=32)
def _pattern(config: DistributedSparseConfig, shards: Shards, node_size: int, token_bytes: int | None) -> BlockSparse:
    plain, causal = (_lists(config, shards, node_size, token_bytes, is_causal) for is_causal in (False, True))
    return BlockSparse(None, config.block_size, plain, causal)


@dataclass(frozen=True, slots=True)
class _RankBlocks:
    """The query blocks of a rank and the tiers of their key blocks: numbers of blocks, ascending."""

    tiers: tuple[Tensor, ...]  # of this rank, of the others of its node, and of other nodes
    is_causal: bool
    branches: tuple[tuple[int, int], ...] = ()  # blocks of a segment and rate; a query block sees all blocks without

    @property
    def queries(self) -> Tensor:
        """(Q,): the blocks of this rank."""
        return self.tiers[0]

    def met(self, queries: Tensor, blocks: Tensor) -> Tensor:
        """(Q, K): which of these blocks each of these query blocks sees in a branch."""
        i, j = queries.unsqueeze(1), blocks.unsqueeze(0)
        seen = torch.zeros(len(queries), len(blocks), dtype=torch.bool, device="cpu")
        for segment, rate in self.branches:
            seen |= (i // segment == j // segment) & ((i - j) % rate == 0)
        return seen & (j <= i) if self.is_causal else seen

    def counted(self, blocks: Tensor) -> Tensor:
        """(Q,): how many of these blocks each query block sees in a branch."""
        return torch.cat([self.met(part, blocks).sum(1) for part in _parts(self.queries)])

    def visible(self) -> Tensor:
        """(3, Q): how many blocks of each tier a query block sees."""
        if self.branches:
            return torch.stack([self.counted(tier) for tier in self.tiers])
        if self.is_causal:
            return torch.stack([torch.searchsorted(tier, self.queries, right=True) for tier in self.tiers])
        return torch.tensor([[len(tier)] for tier in self.tiers], device="cpu").expand(3, len(self.queries))

    def visible_of_all(self, blocks: int) -> Tensor:
        """(Q,): how many blocks of the sequence a query block sees, also if the tiers lack some of them."""
        if self.branches:
            return self.counted(torch.arange(blocks, device="cpu"))
        return self.queries + 1 if self.is_causal else torch.full_like(self.queries, blocks)

    def fetched(self, config: DistributedSparseConfig, token_bytes: int | None) -> _RankBlocks:
        """The same with only those blocks of other ranks that the numbers of bytes allow."""
        own, *others = self.tiers
        found = []
        for tier, density, name in zip(others, config.densities[1:], _BYTES, strict=True):
            seen = tier[tier < self.queries[-1]] if self.is_causal else tier
            if self.branches:
                parts = [self.met(part, seen).any(0, keepdim=True) for part in _parts(self.queries)]
                seen = seen[torch.cat(parts).any(0)]
            count, budget = math.ceil(density * len(seen)), getattr(config, name)
            if budget is not None and token_bytes is not None:
                count = budget // (token_bytes * config.block_size)
            after = torch.searchsorted(own, seen)
            before = seen - own[(after - 1).clamp(min=0)]
            behind = own[after.clamp(max=len(own) - 1)] - seen
            far = int(own[-1] + seen[-1]) + 1 if len(seen) else 0  # larger than any distance
            distance = torch.minimum(torch.where(after > 0, before, far), torch.where(after < len(own), behind, far))
            found.append(seen[distance.sort(stable=True).indices[:count]].sort().values)
        return replace(self, tiers=(own, *found))


def _rank_blocks(
    config: DistributedSparseConfig, shards: Shards, node_size: int, is_causal: bool
) -> Iterator[_RankBlocks]:  # fmt: skip
    size = config.block_size
    owner = torch.empty(-(-shards.length // size), dtype=torch.int64, device="cpu")
    for rank, chunks in enumerate(shards.chunks):
        for chunk in chunks:
            owner[-(-chunk.start // size) : -(-chunk.stop // size)] = rank
    for rank in range(shards.world_size):
        mine, node = owner == rank, owner // node_size == rank // node_size
        own, near, far = (x.nonzero().squeeze(1) for x in (mine, node & ~mine, ~node))
        if len(own):
            yield _RankBlocks((own, near, far), is_causal, config.branches)


def _lists(
    config: DistributedSparseConfig, shards: Shards, node_size: int, token_bytes: int | None, is_causal: bool
) -> BlockLists:
    size, blocks = config.block_size, -(-shards.length // config.block_size)
    ranks = list(_rank_blocks(config, shards, node_size, is_causal))
    if config.pattern_type == "bandwidth_aware":
        ranks = [rank.fetched(config, token_bytes) for rank in ranks]
    visible_of_all = [rank.visible_of_all(blocks) for rank in ranks]
    budgets = [_ceil(_fraction(config.sparsity_ratio), visible).clamp_(min=1) for visible in visible_of_all]
    if balanced := config.pattern_type == "adaptive_load_balanced":
        budgets = _evened(budgets, visible_of_all)
    entries = [torch.zeros(0, dtype=torch.int64, device="cpu")]
    for rank, budget in zip(ranks, budgets, strict=True):
        visible = rank.visible()
        wanted = torch.stack([_ceil(d, v) for d, v in zip(config.densities, visible, strict=True)])
        if config.pattern_type == "bandwidth_aware":
            wanted[1:] = visible[1:]
        wanted[0].clamp_(min=1)
        taken = _shared(budget, wanted, visible if balanced else wanted)
        for tier, v, count in zip(rank.tiers, visible, taken, strict=True):
            if rank.branches:
                entries.append(_nearest_met(rank, tier, count, blocks))
            else:
                entries.append(_nearest(tier, rank.queries, v, count, blocks))
    entry = torch.cat(entries).sort().values  # by query block, then by key block
    counts = torch.bincount(entry // max(1, blocks), minlength=blocks)
    return BlockLists.packed(counts.view(1, 1, -1), (entry % max(1, blocks)).to(torch.int32), size, blocks)


def _ceil(ratio: Fraction, count: Tensor) -> Tensor:
    return -(-count * ratio.numerator // ratio.denominator)


def _shared(budget: Tensor, wanted: Tensor, most: Tensor) -> Tensor:
    """(3, Q): how many blocks of a budget (Q,) each tier gets, at most ``most``.

    >>> _shared(torch.tensor([4]), torch.tensor([[4], [3], [1]]), torch.tensor([[4], [3], [1]])).flatten().tolist()
    [3, 1, 0]
    """
    total = wanted.sum(0)
    taken = torch.minimum(budget * wanted // total, most)
    taken[0].clamp_(min=1)
    left = torch.minimum(budget, most.sum(0)) - taken.sum(0)
    for tier, limit in zip(taken, most, strict=True):
        more = torch.minimum(left, limit - tier)
        tier += more
        left -= more
    return taken


def _evened(budgets: list[Tensor], visible: list[Tensor]) -> list[Tensor]:
    """The sum of all budgets, shared evenly over ranks and their query blocks: at least one each, at most those visible."""
    sums = [len(v) for v in visible], [int(v.sum()) for v in visible]
    least, most = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in sums)
    shares = _levelled(sum(int(x.sum()) for x in budgets), least, most)
    return [_levelled(int(share), torch.ones_like(v), v) for share, v in zip(shares, visible, strict=True)]


def _levelled(total: int, least: Tensor, most: Tensor) -> Tensor:
    """A total as shares that are as even as their bounds allow. The first shares take a remainder, one each.

    >>> _levelled(13, torch.tensor([1, 1, 6, 1]), torch.tensor([9, 1, 9, 9])).tolist()
    [3, 1, 6, 3]
    """
    low, high = 0, total
    while low < high:
        middle = (low + high + 1) // 2
        fits = int(torch.full_like(most, middle).clamp(least, most).sum()) <= total
        low, high = (middle, high) if fits else (low, middle - 1)
    shares = torch.full_like(most, low).clamp(least, most)
    growing = ((least <= low) & (low < most)).nonzero().squeeze(1)
    shares[growing[: total - int(shares.sum())]] += 1
    return shares


def _nearest(tier: Tensor, queries: Tensor, visible: Tensor, count: Tensor, blocks: int) -> Tensor:
    """The ``count`` nearest of the first ``visible`` blocks of a tier, for every query block: ``query * blocks + key``.

    These blocks are a window of the tier. Bisection finds its start.
    """
    low, high = torch.zeros_like(count), visible - count
    last = max(0, len(tier) - 1)
    for _ in range(len(tier).bit_length() if len(tier) else 0):
        middle = (low + high) // 2
        ahead = tier[(middle + count).clamp(max=last)] - queries
        later = (low < high) & (queries - tier[middle.clamp(max=last)] > ahead)
        low, high = torch.where(later, middle + 1, low), torch.where(later | (low >= high), high, middle)
    row = torch.arange(len(queries), device="cpu").repeat_interleave(count)
    number = torch.arange(len(row), device="cpu") - (count.cumsum(0) - count)[row] + low[row]
    return queries[row] * blocks + tier[number]


def _parts(x: Tensor) -> list[Tensor]:
    return [x[start : start + _AT_ONCE] for start in range(0, len(x), _AT_ONCE)]


def _nearest_met(rank: _RankBlocks, tier: Tensor, count: Tensor, blocks: int) -> Tensor:
    """The ``count`` nearest blocks of a tier that a query block sees in a branch: ``query * blocks + key``."""
    entries = []
    for queries, most in zip(_parts(rank.queries), _parts(count), strict=True):
        distance = 2 * (queries.unsqueeze(1) - tier).abs() + (tier > queries.unsqueeze(1))  # of two, the earlier is nearer
        distance.masked_fill_(~rank.met(queries, tier), 2 * blocks)
        nearest = tier[distance.argsort(1)]
        taken = torch.arange(len(tier), device="cpu") < most.unsqueeze(1)
        entries.append((queries.unsqueeze(1) * blocks + nearest)[taken])
    return torch.cat(entries)

"""What a call would do and why, without doing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilated_attention_pytorch import backends, operators
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.call import Call, make_call
from dilated_attention_pytorch.lengths import Lengths
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.lists import lists_of
from dilated_attention_pytorch.plan.problem import Problem

if TYPE_CHECKING:  # importing it imports torch.distributed
    from dilated_attention_pytorch.distributed.simulate import ShardedTraffic


@dataclass(frozen=True, slots=True)
class BlockCount:
    """The blocks of a block-sparse call, of all samples and query heads together."""

    size: int  # positions
    computed: int
    visible: int  # what dense attention would compute

    @property
    def density(self) -> float:
        """The share that is computed."""
        return self.computed / self.visible if self.visible else 0.0

    def __str__(self) -> str:
        return f"{self.computed:,} blocks of {self.size} x {self.size}, {self.density:.3%} of those visible"


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of ``explain``; ``print`` it."""

    backend: str
    kernel: str
    refused: tuple[tuple[str, tuple[str, ...]], ...]  # backends asked before, each with its reasons
    sequences: int
    families: int  # 0 for a block-sparse pattern, whose tiles are its blocks
    tiles: int
    pairs: int  # query-key pairs over all query heads
    dense_pairs: int  # of dense attention over the same sequences
    forward_flops: int
    sharding: ShardedTraffic | None = None
    blocks: BlockCount | None = None  # of a block-sparse pattern

    def __str__(self) -> str:
        share = self.pairs / self.dense_pairs if self.dense_pairs else 0.0
        tiles = f"{self.families} families, {self.tiles:,} dense tiles" if self.blocks is None else str(self.blocks)
        lines = [
            f"backend   {self.backend}: {self.kernel}",
            *(f"not       {name}: {reason}" for name, reasons in self.refused for reason in reasons),
            f"plan      {self.sequences} sequence(s), {tiles}",
            f"work      {self.forward_flops / 1e9:,.3f} GFLOP forward, {share:.3%} of the pairs of dense attention",
        ]
        return "\n".join([*lines, *([] if self.sharding is None else [str(self.sharding)])])


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated | BlockSparse,
    *,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    lengths: Lengths | None = None,
    cu_seqlens: Lengths | None = None,
    backend: str = "auto",
    order: Order | None = None,
    world_size: int | None = None,
    layout: str | None = None,
) -> Explanation:
    """Which backend and kernel ``attention`` would use for these arguments, why not others, and how much work it is.

    The pairs are those computed: under an order, causality hides some of them afterwards. With ``world_size``, the
    explanation also says what so many ranks would send one another, and which backends would compute a rank's rows. The
    ranks then have even shards of these tensors in the ``layout`` of ``attention``, and exact mixing gradients. The backend
    of the first line is that of one device. An adaptive pattern chooses its blocks from these tensors.

    >>> import torch
    >>> q = torch.empty(1, 65536, 8, 64)
    >>> print(explain(q, q, q, Dilated([2048, 4096], [1, 2]), is_causal=True))
    backend   sdpa: CPU flash
    plan      1 sequence(s), 3 families, 384 dense tiles
    work      206.259 GFLOP forward, 4.690% of the pairs of dense attention
    >>> print(explain(q, q, q, Dilated([2048, 65536], [1, 16]), world_size=8).sharding)
    shards    8 rank(s), contiguous: ring, 14.00 MiB to a rank, which waits 7 time(s)
    own rows  sdpa; rows of others sdpa

    Of the blocks that each of 512 query blocks sees, a tenth, rounded up; half of its own block:

    >>> from dilated_attention_pytorch import SparsePatternConfig
    >>> window = BlockSparse.from_config(SparsePatternConfig("local_window", 0.1))
    >>> print(explain(q, q, q, window, is_causal=True, world_size=8))
    backend   sdpa: CPU flash
    plan      1 sequence(s), 106,912 blocks of 128 x 128, 10.176% of those visible
    work      439.899 GFLOP forward, 10.002% of the pairs of dense attention
    shards    8 rank(s), contiguous: ring, 22.00 MiB to a rank, which waits 7 time(s)
    own rows  sdpa; rows of others sdpa
    """
    if layout is not None and world_size is None:
        raise ValueError(f"layout says how a sequence is sharded over ranks: got layout={layout!r} without world_size")
    call, inputs = make_call(
        query, key, value, pattern, is_causal=is_causal, dropout_p=dropout_p, lengths=lengths, cu_seqlens=cu_seqlens,
        backend=backend, order=order,
    )  # fmt: skip
    request = Request.of(call)
    chosen = backends.choose(backend, request)
    asked = backends.candidates(backend, request)
    problem, options = operators.problem_and_options(call, inputs.query, inputs.key)
    counts = _count_tiles(call, problem) if isinstance(pattern, Dilated) else _count_blocks(call, problem, options.chosen)
    sharding = None
    if world_size is not None:
        from dilated_attention_pytorch.distributed.simulate import describe_sharding  # imports torch.distributed

        sharding = describe_sharding(call, inputs[:2], world_size, layout or "contiguous")
    return Explanation(
        backend=chosen.name,
        kernel=chosen.kernel_name(request),
        refused=tuple((one.name, tuple(one.why_not(request))) for one in asked[: asked.index(chosen)]),
        sequences=counts.sequences,
        families=counts.families,
        tiles=counts.tiles,
        pairs=counts.pairs,
        dense_pairs=counts.dense_pairs,
        forward_flops=4 * call.head_dim * counts.pairs,
        sharding=sharding,
        blocks=counts.blocks,
    )


@dataclass(slots=True)
class _Counts:
    sequences: int = 0
    families: int = 0
    tiles: int = 0
    pairs: int = 0
    dense_pairs: int = 0
    blocks: BlockCount | None = None


def _count_tiles(call: Call, problem: Problem) -> _Counts:
    counts = _Counts()
    for span, plan in problem.plans():
        samples = span.samples.stop - span.samples.start
        counts.sequences += samples
        counts.families += len(plan.families)
        counts.tiles += samples * sum(f.tiles * len(f.key_heads) for f in plan.families)
        counts.pairs += samples * plan.pairs * problem.heads_per_key
        counts.dense_pairs += samples * problem.heads * _dense_pairs(plan.queries, len(plan.keys), call.is_causal)
    return counts


def _count_blocks(call: Call, problem: Problem, chosen: Tensor | None) -> _Counts:
    counts, visible, heads = _Counts(), 0, problem.heads
    # Lists are counted on the host; only the choice of an adaptive pattern is read from the device.
    for span, lists in lists_of(problem, chosen, torch.device("cpu")):
        samples, (list_samples, list_heads, query_blocks) = span.samples.stop - span.samples.start, lists.counts.shape
        copies = samples // list_samples * (heads // list_heads)
        counts.sequences += samples
        counts.tiles += copies * int(lists.counts.sum())
        counts.pairs += copies * lists.pairs(span.positions, span.length, call.plan_is_causal)
        counts.dense_pairs += samples * heads * _dense_pairs(span.positions, span.length, call.is_causal)
        blocks = range(lists.first, lists.first + query_blocks)
        visible += samples * heads * _dense_pairs(blocks, lists.key_blocks, call.plan_is_causal)
    counts.blocks = BlockCount(problem.blocks.block_size, counts.tiles, visible)
    return counts


def _dense_pairs(queries: range, keys: int, is_causal: bool) -> int:
    """Pairs of dense attention, for queries at these positions or blocks."""
    n = len(queries)
    return n * (queries.start + 1) + n * (n - 1) // 2 if is_causal else n * keys

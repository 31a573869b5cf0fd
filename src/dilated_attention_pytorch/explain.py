"""What a call would do and why, without doing it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilated_attention_pytorch import backends, operators
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.backends.targets import is_fake, without_fakes
from dilated_attention_pytorch.call import Call, make_call
from dilated_attention_pytorch.lengths import Lengths
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.counts import count, has_values, real_tensors
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import Inputs, Options

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
    rows: int = 0  # pairs of a row and a query head, without the rows of padding
    empty_rows: int | None = 0  # those of them that meet no key and get zeros; None if unknown
    warnings: tuple[str, ...] = ()

    @property
    def backward_flops(self) -> int:
        """A backward computes five products of each tile, a forward two."""
        return self.forward_flops * 5 // 2

    @property
    def empty_share(self) -> float | None:
        """The share of pairs of a row and a query head that meet no key; None if unknown."""
        return None if self.empty_rows is None else self.empty_rows / max(1, self.rows)

    def __str__(self) -> str:
        share = self.pairs / self.dense_pairs if self.dense_pairs else 0.0
        tiles = f"{self.families} families, {self.tiles:,} dense tiles" if self.blocks is None else str(self.blocks)
        lines = [
            f"backend   {self.backend}: {self.kernel}",
            *(f"not       {name}: {reason}" for name, reasons in self.refused for reason in reasons),
            f"plan      {self.sequences} sequence(s), {tiles}",
            f"work      {self.forward_flops / 1e9:,.3f} GFLOP forward, {share:.3%} of the pairs of dense attention",
        ]
        if self.empty_share:
            lines.append(f"zeros     {self.empty_share:.3%} of the (row, head) pairs meet no key: their output is 0")
        lines += [] if self.sharding is None else [str(self.sharding)]
        return "\n".join([*lines, *(f"warning   {text}" for text in self.warnings)])


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated | BlockSparse,
    *,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    lengths: Lengths | None = None,
    starts: Lengths | None = None,
    cu_seqlens: Lengths | None = None,
    backend: str = "auto",
    order: Order | None = None,
    world_size: int | None = None,
    layout: str | None = None,
    device: str | torch.device | None = None,
) -> Explanation:
    """Which backend and kernel ``attention`` would use for these arguments, why not others, and how much work it is.

    The pairs are those computed: under an order, causality hides some of them afterwards. With ``world_size``, the
    explanation also says what so many ranks would send one another, and which backends would compute a rank's rows. The
    bytes of a forward and of a backward are those of the rank that receives most. A rank waits for each message that it
    receives. The ranks have even shards of these tensors in the ``layout`` of ``attention``, and exact mixing gradients.
    The backend of the first line is that of one device. An adaptive pattern chooses its blocks from these tensors, and the
    means that ranks exchange to choose are counted.

    ``device`` asks for another device than that of the tensors, for example ``"cpu"``, ``"cuda"`` (this machine's),
    ``"cuda:h200"``, ``"cuda:sm90"`` or ``"cuda:9.0"``. Tensors may be on the meta device, or fake: only their shapes and
    types are read. Without values, an adaptive pattern is counted with the nearest blocks.

    >>> import torch
    >>> q = torch.empty(1, 65536, 8, 64)
    >>> print(explain(q, q, q, Dilated([2048, 4096], [1, 2]), is_causal=True))
    backend   sdpa: CPU flash
    plan      1 sequence(s), 3 families, 384 dense tiles
    work      206.259 GFLOP forward, 4.690% of the pairs of dense attention
    >>> print(explain(q, q, q, Dilated([2048, 65536], [1, 16]), world_size=8).sharding)
    shards    8 rank(s), contiguous: ring, 14.00 MiB to a rank, which waits 7 time(s); 28.00 MiB in a backward
    own rows  sdpa; rows of others sdpa

    In this pattern, every head has either the even rows or the odd ones. A terabyte on the meta device takes no memory:

    >>> q = torch.empty(1, 2**30, 8, 64, device="meta", dtype=torch.bfloat16)
    >>> print(explain(q, q, q, Dilated([2**30], [2]), device="cuda:h200"))
    backend   hopper: warp-specialised kernels over launch tables
    plan      1 sequence(s), 2 families, 8 dense tiles
    work      590,295,810,358.706 GFLOP forward, 25.000% of the pairs of dense attention
    zeros     50.000% of the (row, head) pairs meet no key: their output is 0

    Of the blocks that each of 512 query blocks sees, a tenth, rounded up; half of its own block:

    >>> from dilated_attention_pytorch import SparsePatternConfig
    >>> q = torch.empty(1, 65536, 8, 64)
    >>> window = BlockSparse.from_config(SparsePatternConfig("local_window", 0.1))
    >>> print(explain(q, q, q, window, is_causal=True, world_size=8))
    backend   sdpa: CPU flash
    plan      1 sequence(s), 106,912 blocks of 128 x 128, 10.176% of those visible
    work      439.899 GFLOP forward, 10.002% of the pairs of dense attention
    shards    8 rank(s), contiguous: ring, 22.00 MiB to a rank, which waits 1 time(s); 41.00 MiB in a backward
    own rows  sdpa; rows of others sdpa
    """
    if layout is not None and world_size is None:
        raise ValueError(f"layout says how a sequence is sharded over ranks: got layout={layout!r} without world_size")
    for name, x in (("lengths", lengths), ("starts", starts), ("cu_seqlens", cu_seqlens)):
        if isinstance(x, Tensor) and not has_values(x):
            kind = "fake tensor" if is_fake(x) else "tensor on the meta device"
            raise ValueError(f"{name} must have values to plan with, got a {kind}; pass a list of integers")
    with real_tensors():
        tensors, target = without_fakes(Inputs(query, key, value), device)
        call, inputs = make_call(
            *tensors, pattern, is_causal=is_causal, dropout_p=dropout_p, lengths=lengths, starts=starts,
            cu_seqlens=cu_seqlens, backend=backend,
            order=order if order is None or tensors[0] is query else order.to(tensors[0].device),
        )  # fmt: skip
        if call.order is not None and call.permutes and isinstance(pattern, BlockSparse) and pattern.is_adaptive:
            inputs = Inputs(*map(call.order.permute, inputs))  # blocks are chosen from the ordered rows
        request = Request.of(call, target)
        call = call if target is None else replace(call, device=target.device)
        chosen = backends.choose(backend, request)
        asked = backends.candidates(backend, request)
        problem, options = operators.problem_and_options(call, inputs.query, inputs.key, backend=chosen.name)
        counts = count(problem, options.chosen, options.positions)
        blocks = None
        if isinstance(pattern, BlockSparse):
            blocks = BlockCount(pattern.block_size, counts.tiles, counts.visible_blocks)
        sharding = None
        if world_size is not None:
            from dilated_attention_pytorch.distributed.simulate import describe_sharding  # imports torch.distributed

            sharding = describe_sharding(call, request, inputs[:2], world_size, layout or "contiguous")
        return Explanation(
            backend=chosen.name,
            kernel=chosen.kernel_name(request),
            refused=tuple((one.name, tuple(one.why_not(request))) for one in asked[: asked.index(chosen)]),
            sequences=counts.sequences,
            families=counts.families,
            tiles=counts.tiles,
            pairs=counts.pairs,
            dense_pairs=_dense_pairs(call, problem),
            forward_flops=4 * call.head_dim * counts.pairs,
            sharding=sharding,
            blocks=blocks,
            rows=counts.rows,
            empty_rows=counts.empty_rows,
            warnings=tuple(_warnings(call, options)),
        )


def _dense_pairs(call: Call, problem: Problem) -> int:
    """Pairs of dense attention over the same sequences."""
    pairs = 0
    for span in problem.spans():
        n, samples = len(span.positions), int(span.samples.stop - span.samples.start)
        seen = n * (span.positions.start + 1) + n * (n - 1) // 2 if call.is_causal else n * span.length
        pairs += samples * problem.heads * seen
    return pairs


def _warnings(call: Call, options: Options) -> Iterator[str]:
    """What is allowed and probably not meant."""
    if call.keys <= 128 and call.key_heads > max(64, 4 * call.keys):
        yield (
            f"{call.key_heads} heads with {call.keys} positions each look like tensors of shape (B, H, N, D), but the "
            "shape must be (B, N, H, D); pass q.transpose(1, 2)"
        )
    if options.chosen is not None and not has_values(options.chosen):
        yield (
            "an adaptive pattern chooses its blocks by values, which these tensors do not have: the figures are those of "
            "the nearest blocks"
        )

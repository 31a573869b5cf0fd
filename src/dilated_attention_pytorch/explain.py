"""What a call would do and why, without doing it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch import backends, ops
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.blocks import call as block_call
from dilated_attention_pytorch.blocks.ops import block_lists
from dilated_attention_pytorch.checks import check_call, check_options, check_order, check_pattern, check_qkv
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.sequences import host_cu_seqlens, host_lengths


@dataclass(frozen=True, slots=True)
class Sharding:
    """What ranks would send one another in a forward, if each had an equal share of the sequence."""

    world_size: int
    layout: str
    transport: str  # that transport="auto" takes
    bytes: int  # to the rank that receives most
    waits: int  # one after the other
    own_rows: str  # the backend of a rank's queries with its own keys
    other_rows: str  # and with those of other ranks

    def __str__(self) -> str:
        ranks = f"shards    {self.world_size} rank(s), {self.layout}: "
        own = f"own rows  {self.own_rows}"
        if not self.bytes:
            return f"{ranks}nothing is sent\n{own}"
        sent = f"{self.transport}, {self.bytes / 2**20:,.2f} MiB to a rank, which waits {self.waits} time(s)"
        return f"{ranks}{sent}\n{own}; rows of others {self.other_rows}"


@dataclass(frozen=True, slots=True)
class Blocks:
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
    backward: str  # the backend of the gradients
    refused: tuple[tuple[str, tuple[str, ...]], ...]  # backends asked before, each with its reasons
    sequences: int
    families: int  # 0 for a block-sparse pattern, whose tiles are its blocks
    tiles: int
    pairs: int  # query-key pairs over all query heads
    dense_pairs: int  # of dense attention over the same sequences
    forward_flops: int
    sharding: Sharding | None = None
    blocks: Blocks | None = None  # of a block-sparse pattern
    why_backward: str = ""  # if it is another backend than the forward's

    def __str__(self) -> str:
        share = self.pairs / self.dense_pairs if self.dense_pairs else 0.0
        lines = [f"backend   {self.backend}: {self.kernel}"]
        if self.backward != self.backend:
            lines.append(f"backward  {self.backward}: {self.why_backward}")
        lines += [f"not       {name}: {reason}" for name, reasons in self.refused for reason in reasons]
        tiles = f"{self.families} families, {self.tiles:,} dense tiles" if self.blocks is None else str(self.blocks)
        lines += [
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
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    order: Order | None = None,
    world_size: int | None = None,
    layout: str | None = None,
) -> Explanation:
    """Which backend and kernel ``attention`` would use for these arguments, why not others, and how much work it is.

    The pairs are those computed: under an order, causality hides some of them afterwards. With ``world_size``, also
    what that many ranks would send one another if they shared these tensors evenly, in the ``layout`` of ``attention``
    (contiguous by default), and which backends would compute a rank's rows (with exact mixing gradients); the backend of
    the first line is that of one device. An adaptive pattern chooses its blocks from these tensors.

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
    if not isinstance(pattern, BlockSparse):
        check_pattern(pattern)
    check_qkv(query, key, value)
    check_options(None, dropout_p, "exact")
    check_call(query, key, is_causal, None, lengths, cu_seqlens)
    if layout is not None and world_size is None:
        raise ValueError(f"layout says how a sequence is sharded over ranks: got layout={layout!r} without world_size")
    if order is not None:
        check_order(order, query, key, lengths, cu_seqlens)
    ordered_causal = block_call.causal_by_position(pattern, order, is_causal)
    if isinstance(pattern, BlockSparse):
        return _explain_blocks(
            query, key, pattern, Request.of(query, dropout_p, ordered_causal), is_causal, lengths, cu_seqlens, backend,
            world_size, layout or "contiguous",
        )  # fmt: skip
    request = Request.of(query, dropout_p, ordered_causal)
    chosen = backends.choose(backend, request)
    refused = []
    for name in backends.candidates(backend, request):
        if name == chosen:
            break
        refused.append((name, tuple(backends.why_not(name, request))))
    problem = Problem.of(query, key, pattern.spec, is_causal and not ordered_causal, lengths, cu_seqlens)
    told = backends.for_operator(backend, chosen, request)
    used, backward = (backends.fastest(told, problem, query, backward=some) for some in (False, True))
    if used != chosen:
        refused.append((chosen, (backends.length_rule(problem, query, backward=False),)))
    why_backward = ""
    if used != backward:
        reason = backends.why_not_stock(problem, query, backward=True) or backends.length_rule(
            problem, query, backward=True
        )
        why_backward = f"{ops.kernel_name(backward, query)}; {reason}"
    plans = problem.plans()
    samples = [span.samples.stop - span.samples.start for span, _ in plans]
    group = problem.heads // problem.key_heads
    pairs = sum(count * plan.pairs * group for count, (_, plan) in zip(samples, plans, strict=True))
    dense = sum(
        count * problem.heads * _seen(plan.queries, len(plan.keys), is_causal)
        for count, (_, plan) in zip(samples, plans, strict=True)
    )
    return Explanation(
        backend=used,
        kernel=ops.kernel_name(used, query),
        backward=backward,
        refused=tuple(refused),
        sequences=sum(samples),
        families=sum(len(plan.families) for _, plan in plans),
        tiles=sum(
            count * f.tiles * len(f.key_heads) for count, (_, p) in zip(samples, plans, strict=True) for f in p.families
        ),
        pairs=pairs,
        dense_pairs=dense,
        forward_flops=4 * query.shape[-1] * pairs,
        sharding=None
        if world_size is None
        else _sharding(query, problem, world_size, layout or "contiguous", request, backend, used),
        why_backward=why_backward,
    )


def _seen(queries: range, keys: int, is_causal: bool) -> int:
    """Pairs of dense attention, for queries at these positions or blocks."""
    n = len(queries)
    return n * (queries.start + 1) + n * (n - 1) // 2 if is_causal else n * keys


def _sharding(
    query: Tensor, problem: Problem, world_size: int, layout: str, request: Request, backend: str, one_device: str
) -> Sharding:
    from dilated_attention_pytorch.distributed import heads, local, ring  # imports torch.distributed
    from dilated_attention_pytorch.distributed.cost import choose_transport, waits
    from dilated_attention_pytorch.distributed.route import default_bucket_size
    from dilated_attention_pytorch.shards import Shards

    if problem.queries != problem.keys:
        raise ValueError(
            f"a shard has as many queries as keys, got {problem.queries} and {problem.keys}; leave out world_size"
        )
    if problem.pattern.torchscale_padding:
        raise ValueError("a sharded sequence has no torchscale_padding; leave it out, or leave out world_size")
    shards = Shards.even(problem.keys, world_size, layout)
    bucket_size = default_bucket_size(shards, query.device.type)
    reasons = heads.why_not(problem.pattern, problem.keys, problem.key_heads, world_size, request.dropout_p, None, None)
    costs = ring.traffic(
        problem.pattern, shards, problem.batch, problem.heads, query.shape[-1], query.element_size(), problem.lengths,
        problem.cu_seqlens, problem.is_causal, problem.key_heads, bucket_size, not reasons,
    )  # fmt: skip
    transport = choose_transport(costs)
    received = costs.bytes if transport != "ulysses" else costs.ulysses_bytes or 0
    own = others = one_device  # if heads are exchanged, each rank has whole sequences
    if transport != "ulysses":
        others = local.stock_backend(backend, request)
        own = local.fused_backend(backend, request, problem.pattern, shards, detached=False) or others
    return Sharding(world_size, layout, transport, received, waits(transport, costs), own, others)


def _explain_blocks(
    query: Tensor,
    key: Tensor,
    pattern: BlockSparse,
    request: Request,
    is_causal: bool,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str,
    world_size: int | None,
    layout: str,
) -> Explanation:
    (batch, n, heads, head_dim), m, size = query.shape, key.shape[1], pattern.block_size
    pattern.check_call(batch, n, m, heads, is_causal=is_causal, packed=cu_seqlens is not None)
    chosen = block_call.choose(backend, request, size, n, m)
    candidates = backends.candidates(backend, request)
    refused = [(name, tuple(block_call.why_not(name, request, size, n, m))) for name in candidates]
    by_place = is_causal and not request.ordered
    # Lists are counted on the host; only a choice by content reads tensors.
    q, k = (x if pattern.is_adaptive else torch.empty(1).expand(x.shape) for x in (query, key))
    arguments = block_call.list_arguments(q, k, pattern, lengths, cu_seqlens, by_place, head_dim**-0.5)
    sequences = computed = visible = pairs = dense = 0
    for span, lists in block_lists(q, k, *arguments):
        samples, (list_samples, list_heads, query_blocks) = span.samples.stop - span.samples.start, lists.counts.shape
        sequences += samples
        copies = samples // list_samples * (heads // list_heads)
        computed += copies * int(lists.counts.sum())
        pairs += copies * lists.pairs(span.positions, span.length, by_place)
        blocks = range(lists.first, lists.first + query_blocks)
        visible += samples * heads * _seen(blocks, lists.key_blocks, by_place)
        dense += samples * heads * _seen(span.positions, span.length, is_causal)
    sharding = None
    if world_size is not None:
        sharding = _block_sharding(
            query, key, pattern, by_place, lengths, cu_seqlens, world_size, layout, request, backend
        )  # fmt: skip
    return Explanation(
        backend=chosen,
        kernel=ops.kernel_name(chosen, query, "block lists"),
        backward=chosen,
        refused=tuple(refused[: candidates.index(chosen)]),
        sequences=sequences,
        families=0,
        tiles=computed,
        pairs=pairs,
        dense_pairs=dense,
        forward_flops=4 * head_dim * pairs,
        sharding=sharding,
        blocks=Blocks(size, computed, visible),
    )


def _block_sharding(
    query: Tensor,
    key: Tensor,
    pattern: BlockSparse,
    is_causal: bool,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    world_size: int,
    layout: str,
    request: Request,
    backend: str,
) -> Sharding:
    from dilated_attention_pytorch.distributed import local  # imports torch.distributed
    from dilated_attention_pytorch.distributed.block_ring import costs_of
    from dilated_attention_pytorch.distributed.block_work import static_work
    from dilated_attention_pytorch.distributed.cost import choose_transport, waits
    from dilated_attention_pytorch.shards import Shards

    (batch, n, heads, head_dim), (m, key_heads) = query.shape, key.shape[1:3]
    if n != m:
        raise ValueError(f"a shard has as many queries as keys, got {n} and {m}; leave out world_size")
    if pattern.is_adaptive and (lengths is not None or cu_seqlens is not None):
        raise ValueError(
            "what an adaptive pattern sends follows from the content of each sequence: leave out world_size, or explain "
            "one sequence at a time, without lengths and cu_seqlens"
        )
    shards = Shards.even(m, world_size, layout)
    work = static_work(
        block_call.as_chosen(query, key, pattern, is_causal, head_dim**-0.5),
        shards,
        0,
        (batch, heads, key_heads),
        torch.device("cpu"),
        is_causal=is_causal,
        lengths=host_lengths(lengths, m),
        cu_seqlens=host_cu_seqlens(cu_seqlens, m),
    )
    costs = costs_of(work, shards, query, key_heads)
    transport = choose_transport(costs)
    others = local.stock_backend(backend, request)
    own = local.fused_backend(backend, request, pattern, shards, detached=False) or others
    return Sharding(world_size, layout, transport, costs.bytes, waits(transport, costs), own, others)

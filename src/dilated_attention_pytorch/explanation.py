"""What a call would do and why, without doing it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dilated_attention_pytorch import backends, ops
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.checks import check_call, check_options, check_order, check_pattern, check_qkv
from dilated_attention_pytorch.orders import Identity, Order
from dilated_attention_pytorch.patterns import Dilated
from dilated_attention_pytorch.problem import Problem


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
class Explanation:
    """The answer of ``explain``; ``print`` it."""

    backend: str
    kernel: str
    backward: str  # the backend of the gradients
    refused: tuple[tuple[str, tuple[str, ...]], ...]  # backends asked before, each with its reasons
    sequences: int
    families: int
    tiles: int
    pairs: int  # query-key pairs over all query heads
    dense_pairs: int  # of dense attention over the same sequences
    forward_flops: int
    sharding: Sharding | None = None

    def __str__(self) -> str:
        share = self.pairs / self.dense_pairs if self.dense_pairs else 0.0
        lines = [f"backend   {self.backend}: {self.kernel}"]
        if self.backward != self.backend:
            lines.append(f"backward  {self.backward}")
        lines += [f"not       {name}: {reason}" for name, reasons in self.refused for reason in reasons]
        lines += [
            f"plan      {self.sequences} sequence(s), {self.families} families, {self.tiles:,} dense tiles",
            f"work      {self.forward_flops / 1e9:,.3f} GFLOP forward, {share:.3%} of the pairs of dense attention",
        ]
        return "\n".join([*lines, *([] if self.sharding is None else [str(self.sharding)])])


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated,
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
    the first line is that of one device. Block-sparse patterns are not explained.

    >>> import torch
    >>> q = torch.empty(1, 65536, 8, 64)
    >>> print(explain(q, q, q, Dilated([2048, 4096], [1, 2]), is_causal=True))
    backend   sdpa: CPU flash
    plan      1 sequence(s), 3 families, 384 dense tiles
    work      206.259 GFLOP forward, 4.690% of the pairs of dense attention
    >>> print(explain(q, q, q, Dilated([2048, 65536], [1, 16]), world_size=8).sharding)
    shards    8 rank(s), contiguous: ring, 14.00 MiB to a rank, which waits 7 time(s)
    own rows  sdpa; rows of others sdpa
    """
    check_pattern(pattern)
    check_qkv(query, key, value)
    check_options(None, dropout_p, "exact")
    check_call(query, key, is_causal, None, lengths, cu_seqlens)
    if layout is not None and world_size is None:
        raise ValueError(f"layout says how a sequence is sharded over ranks: got layout={layout!r} without world_size")
    ordered_causal = False
    if order is not None:
        check_order(order, query, key, lengths, cu_seqlens)
        ordered_causal = is_causal and not isinstance(order, Identity)
    request = Request.of(query, dropout_p, ordered_causal)
    chosen = backends.choose(backend, request)
    refused = []
    for name in backends.candidates(backend, request):
        if name == chosen:
            break
        refused.append((name, tuple(backends.why_not(name, request))))
    problem = Problem.of(query, key, pattern.spec, is_causal and not ordered_causal, lengths, cu_seqlens)
    used = backward = chosen
    if backends.for_operator(backend, chosen) == "auto":
        used, backward = (backends.fastest(problem, query, backward=some) for some in (False, True))
        if used != chosen:
            refused.append((chosen, ("slower for kernel calls as large as these",)))
    plans = problem.plans()
    samples = [span.samples.stop - span.samples.start for span, _ in plans]
    group = problem.heads // problem.key_heads
    pairs = sum(count * plan.pairs * group for count, (_, plan) in zip(samples, plans, strict=True))
    dense = 0
    for count, (_, plan) in zip(samples, plans, strict=True):
        first, n, m = plan.queries.start, len(plan.queries), len(plan.keys)
        seen = n * (first + 1) + n * (n - 1) // 2 if is_causal else n * m
        dense += count * problem.heads * seen
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
    )


def _sharding(
    query: Tensor, problem: Problem, world_size: int, layout: str, request: Request, backend: str, one_device: str
) -> Sharding:
    from dilated_attention_pytorch.distributed import heads, local, ring  # imports torch.distributed
    from dilated_attention_pytorch.distributed.cost import choose_transport, waits
    from dilated_attention_pytorch.distributed.route import default_bucket_size
    from dilated_attention_pytorch.distributed.shards import Shards

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

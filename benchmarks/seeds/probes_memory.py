"""Checks of memory and of messages. Memory is measured, or that of the same allocations on the meta device."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from dilated_attention_pytorch import (
    BlockSparse,
    Dilated,
    DistributedSparseConfig,
    Sharding,
    SparsePatternConfig,
    attention,
    explain,
)
from dilated_attention_pytorch.distributed import RankMemory, Shards, shard_sequence, simulate_ring
from dilated_attention_pytorch.distributed.wire import Wire
from dilated_attention_pytorch.measure import peak_extra_bytes
from seeds.measure import Case, Ranks, inputs, largest_difference
from seeds.outcome import Outcome, of_error, of_ratio, together

GIB = 2**30
CPU = torch.device("cpu")
BRANCHES = Dilated([2048, 8192, 65536, 2**30], [1, 2, 8, 64])


def _meta(tokens: int, heads: int = 8, head_dim: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(1, tokens, heads, head_dim, dtype=dtype, device="meta")


def rank_bytes(tokens: int, pattern: Dilated | BlockSparse, world: int) -> int:
    """The memory of the rank that needs most for a forward, with its q, k and v, of 8 heads of 64 float32 numbers."""
    x = _meta(tokens)
    if world == 1:
        return 3 * x.nbytes + peak_extra_bytes(lambda: attention(x, x, x, pattern), torch.device("meta"))
    return max(_all(m) for m in simulate_ring(x, x, x, pattern, world, device="cpu")[2])


def _all(memory: RankMemory) -> int:
    return memory.query + memory.key_value + memory.buffers + memory.partials


def components(ranks: Ranks) -> Outcome:
    """query, keys and values, buffers and partial results of 2 ranks by simulate_ring, 512 tokens, 4 heads of 32 numbers"""
    del ranks
    case = Case(512, Dilated([128, 512], [1, 1]), heads=4, head_dim=32)
    whole = 512 * 4 * 32 * 4
    *_, memory = simulate_ring(*inputs(case, 0, 1), case.pattern, 2, bucket_size=128)
    shown = ", ".join(f"{name} {getattr(memory[0], name):,}" for name in ("query", "key_value", "buffers", "partials"))
    halves = all(m.query == whole // 2 and m.key_value == whole for m in memory)
    return Outcome(halves, f"bytes of rank 0: {shown}; of one device: query {whole:,}, key_value {2 * whole:,}")


def one_process(ranks: Ranks) -> Outcome:
    """simulate_ring on one device, chunks of K and V one after the other, against attention on one device"""
    del ranks
    case = Case(4096, Dilated([512, 4096], [1, 4]), heads=4, head_dim=16)
    qkv = inputs(case, 0, 1)
    out, *_ = simulate_ring(*qkv, case.pattern, 4)
    return of_error(largest_difference(out, attention(*qkv, case.pattern)), "4 simulated ranks")


def by_ranks(ranks: Ranks) -> Outcome:
    """memory per rank for 1, 2, 4 and 8 ranks, 237,568 tokens, times the ranks, over that of one device"""
    del ranks
    one = rank_bytes(237_568, BRANCHES, 1)
    found = [world * rank_bytes(237_568, BRANCHES, world) / one for world in (2, 4, 8)]
    return together(*(of_ratio(x, f"{n} ranks", most=1.25) for n, x in zip((2, 4, 8), found, strict=True)))


def by_length(ranks: Ranks) -> Outcome:
    """memory of one device at 16,384 tokens and at 16 times as many: 16 is linear, 256 is that of all scores"""
    del ranks
    return of_ratio(
        rank_bytes(262_144, BRANCHES, 1) / rank_bytes(16_384, BRANCHES, 1), "16 x the tokens, memory x", most=17
    )


def longest_by_memory(ranks: Ranks) -> Outcome:
    """the most tokens whose forward needs at most 8 GB, the memory of a GTX 1080, by bisection, on 1 and on 2 ranks"""
    del ranks
    found = []
    for world in (1, 2):
        low, high = 1, 4096  # in units of 1,024 tokens
        while high - low > 1:
            middle = (low + high) // 2
            fits = rank_bytes(1024 * middle, BRANCHES, world) <= 8 * 10**9
            low, high = (middle, high) if fits else (low, middle)
        found.append(1024 * low)
    shown = f"1 device: {found[0]:,} tokens, 2 ranks: {found[1]:,}"
    return together(
        of_ratio(found[1] / found[0], f"{shown}; ratio", least=1.9),
        of_ratio(found[0] / 237_568, "1 device over 237,568:", least=1),
    )


def one_segment_of_475136(ranks: Ranks) -> Outcome:
    """memory of each of 2 ranks for 475,136 tokens in one segment, over that of one device for 237,568, by simulate_ring"""
    del ranks
    two, one = (rank_bytes(n, Dilated([n], [2]), world) for n, world in ((475_136, 2), (237_568, 1)))
    return of_ratio(two / one, f"{two / 1e9:.2f} GB over {one / 1e9:.2f} GB:", most=1.25)


def plain_scores(ranks: Ranks) -> Outcome:
    """memory of 65,536 tokens against the scores of plain attention, 8 heads x N x N x 4 bytes"""
    del ranks
    ours, scores = rank_bytes(65_536, BRANCHES, 1), 8 * 65_536**2 * 4
    return of_ratio(
        scores / ours, f"{ours / 1e9:.2f} GB; the scores, {scores / 1e9:.0f} GB, are larger by a factor of", least=100
    )


def a_billion(ranks: Ranks) -> Outcome:
    """memory and traffic of 2**30 tokens on 4,096 ranks, w = 2048 * 4**i, r = 4**i, bfloat16, planned without a device"""
    del ranks
    start, x = time.perf_counter(), _meta(2**30, dtype=torch.bfloat16)
    pattern = Dilated([2048 * 4**i for i in range(11)], [4**i for i in range(11)])
    sharding = explain(x, x, x, pattern, world_size=4096).sharding
    assert sharding is not None
    shard = 3 * x.nbytes // 4096
    return together(
        of_ratio(shard / GIB, "q, k and v of a rank, GiB", most=1),
        of_ratio(sharding.bytes / shard, f"{sharding.bytes / 2**20:.0f} MiB received, of that", most=1),
        of_ratio(time.perf_counter() - start, "planned in seconds", most=60),
    )


def _again(group: dist.ProcessGroup | None, case: Case) -> list[int]:
    mine = inputs(case, 0, 1) if group is None else inputs(case, dist.get_rank(group), dist.get_world_size(group))
    return [peak_extra_bytes(lambda: attention(*mine, case.pattern, group=group), CPU) for _ in range(6)]


def no_growth(ranks: Ranks) -> Outcome:
    """the peak memory of six equal calls in a row, on one device and on 2 ranks: none exceeds the second by 1 %"""
    case = Case(8192, Dilated([1024, 8192], [1, 4]), heads=4, head_dim=32)
    peaks = [_again(None, case), *ranks.run(2, _again, case)]
    return Outcome(
        all(max(p[2:]) <= 1.01 * p[1] for p in peaks),
        f"largest over second call: {max(max(p[2:]) / p[1] for p in peaks):.4f}",
    )


# Messages.
class _Recorder:
    """Counts the bytes of messages and keeps the order of their starts and ends."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.received = 0
        self._start = Wire.start

    def __enter__(self) -> _Recorder:
        recorder, original = self, self._start

        def start(wire: Wire, sends: Any, receives: Any, after: Any) -> Any:
            wait = original(wire, sends, receives, after)
            count = sum(x.rows.numel() * x.rows.element_size() for x in receives)
            recorder.received += count
            if not count:
                return wait
            number = sum(x.startswith("start") for x in recorder.events)
            recorder.events.append(f"start {number}")

            def ended() -> None:
                wait()
                recorder.events.append(f"end {number}")

            return ended

        Wire.start = start  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Wire.start = self._start  # type: ignore[method-assign]


def _recorded(
    group: dist.ProcessGroup, case: Case, options: dict[str, Any], backward: bool
) -> tuple[list[str], int, list[int]]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    mine = [x.clone().requires_grad_(backward) for x in inputs(case, rank, world)]
    sharding = Sharding(group, **{"bucket_size": case.bucket_size, "transport": "ring", **options})
    (rows,) = Shards.even(case.tokens, world, "contiguous").chunks[rank]
    with _Recorder() as recorder:
        out = attention(*mine, case.pattern, is_causal=case.is_causal, group=sharding)
        if backward:
            recorder.received = 0
            out.sum().backward()
    return recorder.events, recorder.received, [rows.start, rows.stop]


def positions_of_ranks(ranks: Ranks) -> Outcome:
    """512 tokens, one dense segment: the positions of 2 ranks, and the bytes of K and V that each receives"""
    case = Case(512, Dilated([512], [1]), heads=4, head_dim=32, bucket_size=128)
    (_, first, rows0), (_, second, rows1) = ranks.run(2, _recorded, case, {}, False)
    half = 2 * 256 * 4 * 32 * 4
    right = [rows0, rows1] == [[0, 256], [256, 512]] and first == second == half
    return Outcome(right, f"positions {rows0} and {rows1}, {first:,} and {second:,} bytes, half of K and V is {half:,}")


def buckets(ranks: Ranks) -> Outcome:
    """512 tokens on 2 ranks in buckets of 128 rows: the number of messages, and buffers over those of one message"""
    case = Case(512, Dilated([512], [1]), heads=4, head_dim=32, bucket_size=64)
    (events, *_), _ = ranks.run(2, _recorded, case, {}, False)
    messages = sum(x.startswith("start") for x in events)
    small, large = (
        simulate_ring(*inputs(case, 0, 1), case.pattern, 2, bucket_size=rows)[2][0].buffers for rows in (64, 256)
    )
    return Outcome(
        messages == 4 and small < large, f"{messages} messages of 64 rows, buffers {small:,} bytes, not {large:,}"
    )


def overlapped(ranks: Ranks) -> Outcome:
    """8 messages to a rank: whether each is under way before the one before it has arrived and is computed with"""
    case = Case(1024, Dilated([1024], [1]), heads=2, head_dim=16, bucket_size=64)
    (events, *_), _ = ranks.run(2, _recorded, case, {}, False)
    count = sum(x.startswith("start") for x in events)
    ahead = sum(events.index(f"start {i + 1}") < events.index(f"end {i}") for i in range(count - 1))
    return Outcome(
        count == 8 and ahead == count - 1, f"{ahead} of {count - 1} started before the end of the message before"
    )


def dilation_sends_less(ranks: Ranks) -> Outcome:
    """bytes received per rank for one segment of 4,096 tokens on 2 ranks with rates 1, 2, 4 and 8, over those of rate 1"""
    found = []
    for rate in (1, 2, 4, 8):
        case = Case(4096, Dilated([4096], [rate]), heads=8, head_dim=16)
        found.append(max(received for _, received, _ in ranks.run(2, _recorded, case, {}, False)))
    shares = [x / found[0] for x in found]
    return Outcome(shares == [1.0, 0.5, 0.25, 0.125], "shares " + ", ".join(f"{x:.3f}" for x in shares))


def compressed(ranks: Ranks) -> Outcome:
    """bytes of a backward on 2 ranks with gradients of K and V in bfloat16 (comm_dtype), over those in float32"""
    case = Case(1024, Dilated([1024], [1]), heads=2, head_dim=16)
    full, half = (
        max(received for _, received, _ in ranks.run(2, _recorded, case, {"comm_dtype": dtype}, True))
        for dtype in (torch.float32, torch.bfloat16)
    )
    return of_ratio(half / full, f"{half:,} of {full:,} bytes:", most=0.8)


def tiers(ranks: Ranks) -> Outcome:
    """hierarchical DistributedSparseConfig, 8 ranks on 2 nodes: density of blocks in a rank, in its node, in other nodes"""
    del ranks
    shards = Shards.even(8 * 4096, 8, "contiguous")
    config = DistributedSparseConfig(sparsity_ratio=0.1, pattern_type="hierarchical", node_size=4)
    given = config.pattern(shards).given
    assert given is not None
    mask = given.mask()[0, 0].double().view(8, 32, 8, 32).mean((1, 3))
    rank, node = torch.arange(8), torch.arange(8) // 4
    same_rank, same_node = rank[:, None] == rank, node[:, None] == node
    inside, near, far = (float(mask[x].mean()) for x in (same_rank, same_node & ~same_rank, ~same_node))
    return Outcome(inside > near > far > 0.0, f"densities {inside:.2f}, {near:.2f}, {far:.2f}")


def _even(group: dist.ProcessGroup, case: Case) -> int:
    mine = inputs(case, dist.get_rank(group), dist.get_world_size(group))
    return sum(x.nbytes for x in mine) + peak_extra_bytes(lambda: attention(*mine, case.pattern, group=group), CPU)


def equal_memory(ranks: Ranks) -> Outcome:
    """memory of each of 2 ranks for 16,384 tokens, smaller over larger; the report's two GPUs had 96 MB and 8 MB"""
    first, second = ranks.run(2, _even, Case(16384, Dilated([1024, 4096], [1, 4])))
    text = f"{first / 1e6:.0f} MB and {second / 1e6:.0f} MB:"
    return of_ratio(min(first, second) / max(first, second), text, least=0.95)


def _blocks(group: dist.ProcessGroup, pattern: BlockSparse) -> tuple[float, bool]:
    case = Case(1000, pattern, heads=2, head_dim=16)
    qkv = inputs(case, 0, 1)
    expected = attention(*(x.double() for x in qkv), pattern, backend="reference")
    mine = [shard_sequence(x, group) for x in qkv]
    out = attention(*mine, pattern, group=group)
    return largest_difference(out, shard_sequence(expected, group)), out.shape == mine[0].shape


def block_patterns(ranks: Ranks) -> Outcome:
    """5 block patterns on 2 and 3 ranks, 1,000 tokens; every row against the reference in float64, and the output shape"""
    branches = {"segment_lengths": [256, 1000], "dilation_rates": [1, 2]}
    configs = [SparsePatternConfig("dilated_sparse", 0.3, block_size=32, **branches)]
    configs += [SparsePatternConfig(kind, 0.3, block_size=32) for kind in ("hierarchical", "local_window", "global_local")]
    errors, shapes = [], True
    for world in (2, 3):
        tier = DistributedSparseConfig(0.3, block_size=32).pattern(Shards.even(1000, world, "contiguous"))
        for pattern in (*map(BlockSparse.from_config, configs), tier):
            found = ranks.run(world, _blocks, pattern)
            errors.append(max(error for error, _ in found))
            shapes &= all(same for _, same in found)
    return together(of_error(max(errors), "5 patterns"), Outcome(shapes, "shapes as those of the input"))


PROBES = (
    components, one_process, by_ranks, by_length, longest_by_memory, one_segment_of_475136, plain_scores, a_billion,
    no_growth, positions_of_ranks, buckets, overlapped, dilation_sends_less, compressed, tiers, equal_memory,
    block_patterns,
)  # fmt: skip

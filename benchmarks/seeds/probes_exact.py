"""Checks of results on ranks: against the definition in float64, or against one device. Each makes one outcome."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch import Dilated, Sharding, attention
from dilated_attention_pytorch.distributed import Shards, gather_sequence, shard_sequence
from seeds.measure import WORLDS, Case, Ranks, definition, inputs, largest_difference, on_one, on_ranks
from seeds.outcome import Outcome, of_error

SMALL = {"heads": 3, "head_dim": 16}
RATES = Dilated([32, 96, 4096], [1, 3, 7])  # 32 % 3 and 96 % 7 are not 0, offsets of the 3 heads differ


def worst(errors: list[dict[str, Any]]) -> float:
    """The largest error; a result that is not finite counts as infinite."""
    return max(x["error"] if x["finite"] else float("inf") for x in errors)


def indices(ranks: Ranks) -> Outcome:
    """8,192 tokens on 2 ranks, rates 1 to 16, segments inside and across shards; rows against the definition"""
    patterns = [Dilated([w], [r]) for w in (1000, 4096, 8192) for r in (1, 2, 3, 8, 16)]
    errors = [on_ranks(ranks, 2, Case(8192, pattern, heads=4, head_dim=16))[0] for pattern in patterns]
    return of_error(worst(errors), f"{len(patterns)} patterns")


def odd_lengths(ranks: Ranks) -> Outcome:
    """lengths 1, 2, 3, 17, 63, 65, 257, 509 on 2 ranks; every row against the definition"""
    lengths = (1, 2, 3, 17, 63, 65, 257, 509)
    errors = [on_ranks(ranks, 2, Case(n, RATES, **SMALL))[0] for n in lengths]
    return of_error(worst(errors), f"{len(lengths)} lengths")


def prime_ranks(ranks: Ranks) -> Outcome:
    """509 tokens on 1, 2, 3, 5 and 7 ranks, causal and not; every row against the definition"""
    errors = [
        on_ranks(ranks, world, Case(509, RATES, is_causal=causal, **SMALL))[0]
        for world in WORLDS
        for causal in (False, True)
    ]
    return of_error(worst(errors), f"{', '.join(map(str, WORLDS))} ranks")


def not_divisible(ranks: Ranks) -> Outcome:
    """4,096, 4,097, 5,000 and 6,001 tokens on 2 ranks with segments of 4,096 tokens; rows against the definition"""
    pattern, lengths = Dilated([2048, 4096], [1, 2]), (4096, 4097, 5000, 6001)
    errors = [on_ranks(ranks, 2, Case(n, pattern, heads=4, head_dim=16))[0] for n in lengths]
    return of_error(worst(errors), f"{len(lengths)} lengths")


def causal(ranks: Ranks) -> Outcome:
    """causal calls on 2 and 3 ranks, 1,000 tokens, all segments across shards; rows against the definition"""
    pattern = Dilated([100, 1000], [1, 2])
    errors = [on_ranks(ranks, world, Case(1000, pattern, is_causal=True, **SMALL))[0] for world in (2, 3)]
    return of_error(worst(errors), "2 and 3 ranks")


def irregular_calls(ranks: Ranks) -> Outcome:
    """12 combinations of lengths, heads, head sizes and bucket sizes on 2 ranks: no NaN, rows against the definition"""
    cases = [
        Case(n, Dilated([w, n], [1, r]), heads=heads, head_dim=d, bucket_size=bucket)
        for (n, w, r) in ((96, 7, 5), (384, 128, 2), (777, 256, 4))
        for (heads, d, bucket) in ((1, 8, 16), (2, 40, 100), (8, 64, None), (5, 24, 7))
    ]
    return of_error(worst([on_ranks(ranks, 2, case)[0] for case in cases]), f"{len(cases)} configurations")


# The following run their own functions on the ranks and compare there.
def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _lse(group: dist.ProcessGroup, case: Case) -> float:
    mine = inputs(case, dist.get_rank(group), dist.get_world_size(group))
    out, lse = attention(*mine, case.pattern, is_causal=case.is_causal, group=group, return_lse=True)
    expected_out, expected_lse = definition(case)
    (rows,) = Shards.even(case.tokens, dist.get_world_size(group), "contiguous").chunks[dist.get_rank(group)]
    own = slice(rows.start, rows.stop)
    return max(largest_difference(out, expected_out[:, own]), largest_difference(lse, expected_lse[:, :, own]))


def log_sums(ranks: Ranks) -> Outcome:
    """out and lse of every row on 2 and 3 ranks against the definition, 500 tokens, causal and not"""
    cases = [Case(500, RATES, is_causal=causal, **SMALL) for causal in (False, True)]
    return of_error(max(max(ranks.run(world, _lse, case)) for world in (2, 3) for case in cases), "out and lse")


def _uneven(group: dist.ProcessGroup, rows: list[int]) -> float:
    n, rank = sum(rows), dist.get_rank(group)
    qkv = [_random(1, n, 3, 16, seed=i) for i in range(3)]
    start = sum(rows[:rank])
    mine = [x[:, start : start + rows[rank]] for x in qkv]
    out = attention(*mine, RATES, group=group)
    expected = attention(*(x.double() for x in qkv), RATES, backend="reference")
    return largest_difference(out, expected[:, start : start + rows[rank]])


def uneven_shards(ranks: Ranks) -> Outcome:
    """shards of 0, 100, 1, 57 and 342 rows on 5 ranks; every row against the reference in float64"""
    return of_error(max(ranks.run(5, _uneven, [0, 100, 1, 57, 342])), "5 ranks")


def _gradients(group: dist.ProcessGroup, how: str) -> float:
    """The largest error of gradients on a rank against those of the reference on one device in float64."""
    qkv, dout = [_random(1, 300, 4, 16, seed=i) for i in range(3)], _random(1, 300, 4, 16, seed=3)
    pattern = Dilated([64, 300], [1, 3])
    whole = [x.double().requires_grad_() for x in qkv]
    expected = torch.autograd.grad(attention(*whole, pattern, is_causal=True, backend="reference"), whole, dout.double())
    mine = [shard_sequence(x, group).requires_grad_() for x in qkv]
    own = shard_sequence(dout, group)

    def call(*tensors: Tensor) -> Tensor:
        return attention(*tensors, pattern, is_causal=True, group=group)

    if how == "checkpoint":
        checkpoint(call, *mine, use_reentrant=False).backward(own)
    elif how == "accumulate":  # two micro-batches, whose gradients add up
        for share in (0.25, 0.75):
            call(*mine).backward(share * own)
    else:
        call(*mine).backward(own)
    return max(largest_difference(x.grad, shard_sequence(e, group)) for x, e in zip(mine, expected, strict=True))


def gradients(ranks: Ranks) -> Outcome:
    """dq, dk and dv on 2 and 3 ranks, every row against the reference in float64"""
    return of_error(max(max(ranks.run(world, _gradients, "plain")) for world in (2, 3)), "dq, dk, dv")


def checkpointing(ranks: Ranks) -> Outcome:
    """gradients on 2 ranks through torch.utils.checkpoint against the reference in float64"""
    return of_error(max(ranks.run(2, _gradients, "checkpoint")), "dq, dk, dv")


def accumulation(ranks: Ranks) -> Outcome:
    """gradients of two backwards on 2 ranks, added up, against the reference in float64"""
    return of_error(max(ranks.run(2, _gradients, "accumulate")), "dq, dk, dv")


def _extreme(group: dist.ProcessGroup) -> float:
    """Large scores, large and tiny values, and rows that meet no key: the error relative to the largest value."""
    worst = 0.0
    for scale, values in ((1.0, 1e30), (1e4, 1.0), (1e-30, 1e-30)):
        q, k, v = (_random(1, 200, 2, 16, seed=i) for i in range(3))
        q, v = scale * q, values * v
        pattern = Dilated([50, 200], [4, 8])  # 2 of 4 rows have no head, so most rows meet nobody
        expected = attention(*(x.double() for x in (q, k, v)), pattern, is_causal=True, backend="reference")
        out = attention(*(shard_sequence(x, group) for x in (q, k, v)), pattern, is_causal=True, group=group)
        worst = max(worst, largest_difference(out, shard_sequence(expected, group)) / float(v.abs().max()))
    return worst


def extreme_values(ranks: Ranks) -> Outcome:
    """scores of 1e4, values of 1e30 and 1e-30, and rows without keys on 2 ranks against the reference in float64"""
    # A score of 1e4 has an error of 1e4 * 2**-24 of its own, whatever the method.
    return of_error(max(ranks.run(2, _extreme)), "relative to the largest value", 1e-3)


def _types(group: dist.ProcessGroup) -> list[float]:
    qkv = [_random(1, 200, 2, 16, seed=i) for i in range(3)]
    pattern, found = Dilated([50, 200], [1, 2]), []
    for dtype in (torch.float32, torch.bfloat16):
        rounded = [x.to(dtype) for x in qkv]
        expected = attention(*(x.double() for x in rounded), pattern, backend="reference")
        out = attention(*(shard_sequence(x, group) for x in rounded), pattern, group=group)
        found.append(largest_difference(out, shard_sequence(expected, group)))
    return found


def float32_is_better(ranks: Ranks) -> Outcome:
    """the errors of float32 and of bfloat16 on 2 ranks against the reference in float64"""
    single, half = (max(x) for x in zip(*ranks.run(2, _types), strict=True))
    return Outcome(single <= half / 100, f"float32 {single:.0e}, bfloat16 {half:.0e}")


def _many_calls(group: dist.ProcessGroup, count: int) -> float:
    q = shard_sequence(_random(1, 700, 2, 16), group).requires_grad_()
    results = []
    for _ in range(count):
        out = attention(q, q, q, Dilated([128, 700], [1, 4]), is_causal=True, group=Sharding(group, bucket_size=64))
        (gradient,) = torch.autograd.grad(out.square().sum(), q)
        results.append((out.detach(), gradient))
    return max(largest_difference(x, y) for result in results for x, y in zip(result, results[0], strict=True))


def many_calls(ranks: Ranks) -> Outcome:
    """100 forwards and backwards in a row on 2 and on 5 ranks, buckets of 64 rows: all end, with the same bits"""
    difference = max(max(ranks.run(world, _many_calls, 100)) for world in (2, 5))
    return Outcome(difference == 0.0, f"200 calls ended, largest difference between them {difference:g}")


def _heads(group: dist.ProcessGroup) -> float:
    qkv = [_random(1, 501, 4, 16, seed=i) for i in range(3)]
    pattern = Dilated([501], [1])
    expected = attention(*(x.double() for x in qkv), pattern, backend="reference")
    mine = [shard_sequence(x, group) for x in qkv]
    out = attention(*mine, pattern, group=Sharding(group, transport="ulysses"))
    return largest_difference(gather_sequence(out, group), expected)


def exchanged_heads(ranks: Ranks) -> Outcome:
    """heads exchanged instead of rows (transport "ulysses") on 2 ranks; every row against the reference in float64"""
    return of_error(max(ranks.run(2, _heads)), "2 ranks")


def one_device(ranks: Ranks) -> Outcome:
    """8 patterns on one device, every row of 509 tokens against the definition"""
    del ranks
    cases = [Case(509, Dilated([w], [r]), **SMALL) for w in (64, 509) for r in (1, 2, 3, 8)]
    return of_error(worst([on_one(case)[0] for case in cases]), f"{len(cases)} patterns")


def scheme_of_the_report(ranks: Ranks) -> Outcome:
    """the recommended loop over chunks of K and V, written in plain PyTorch with merged lse, against 2 ranks"""
    case = Case(400, Dilated([400], [1]), **SMALL)
    q, k, v = inputs(case, 0, 1)
    parts = []
    for step in range(2):
        chunk = slice(200 * step, 200 * step + 200)
        scores = torch.einsum("bihd,bjhd->bhij", q, k[:, chunk]) * case.head_dim**-0.5
        parts.append((torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v[:, chunk]), scores.logsumexp(-1)))
    weights = torch.stack([lse for _, lse in parts]).softmax(0).transpose(2, 3).unsqueeze(-1)
    loop = sum(w * out for w, (out, _) in zip(weights, parts, strict=True))
    _, reports = on_ranks(ranks, 2, case)
    rows = {i: row for report in reports for i, row in report["rows"].items()}
    return of_error(largest_difference(torch.stack([rows[i] for i in sorted(rows)], 1), loop), "400 tokens")


PROBES = (
    one_device, indices, odd_lengths, prime_ranks, not_divisible, uneven_shards, causal, log_sums, irregular_calls,
    gradients, checkpointing, accumulation, extreme_values, float32_is_better, many_calls, exchanged_heads,
    scheme_of_the_report,
)  # fmt: skip

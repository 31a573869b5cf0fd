"""Which sequences a rank holds, and what all ranks of a dilated call send one another, counted over arrays.

Every rank needs two numbers that depend on all ranks: how many messages a round has, and the most bytes that a rank
receives. Only sequences that several ranks hold contribute. A *chunk* here is what one rank holds of one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.sequences import Span, spans
from dilated_attention_pytorch.shards import Shards

_AT_A_TIME = 2**22  # pairs of holdings that are compared at a time


def held_spans(problem: Problem, shards: Shards, rank: int) -> list[Span]:
    """The sequences of which a rank holds rows, in order. The time does not depend on the others."""
    fields = problem.batch, problem.queries, problem.keys, problem.lengths, problem.cu_seqlens
    held = (span for chunk in shards.chunks[rank] for span in spans(*fields, chunk, problem.starts))
    found = {(span.samples.start, span.keys.start): span for span in held}
    return [span for _, span in sorted(found.items())]


def is_one_sequence(problem: Problem) -> bool:
    """Whether all samples are one sequence each, of the same rows."""
    return problem.cu_seqlens is None and all(len(set(x or ())) <= 1 for x in (problem.lengths, problem.starts))


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of all sequences that several ranks hold, by sequence and position; every tensor is (chunks,)."""

    sequence: Tensor
    samples: Tensor
    start: Tensor  # positions of the sequence
    stop: Tensor
    rank: Tensor
    world: int

    @staticmethod
    def of(problem: Problem, shards: Shards) -> Chunks:
        """The chunks of a problem of the whole sequence."""
        if problem.cu_seqlens is not None:
            ends = _integers(problem.cu_seqlens)
            first, last, samples = ends[:-1], ends[1:], torch.full_like(ends[1:], problem.batch)
        else:
            spans = [(s.keys.start, s.keys.stop, s.samples.stop - s.samples.start) for s in problem.spans()]
            first, last, samples = _integers(spans).view(-1, 3).t().contiguous()
        held_start, held_stop, rank = _held(shards)
        # The chunks from ``begin`` to before ``end`` hold a sequence.
        begin = torch.searchsorted(held_start, first, right=True) - 1
        end = torch.searchsorted(held_start, last)
        crossing = ((end - begin > 1) & (last > first)).nonzero().squeeze(1)
        begin, counts = _at(begin, crossing), _at(end - begin, crossing)
        sequence = torch.repeat_interleave(crossing, counts)
        chunk = torch.repeat_interleave(begin - counts.cumsum(0) + counts, counts) + _arange(len(sequence))
        first, last = _at(first, sequence), _at(last, sequence)
        start = torch.maximum(_at(held_start, chunk), first) - first
        stop = torch.minimum(_at(held_stop, chunk), last) - first
        return Chunks(sequence, _at(samples, sequence), start, stop, _at(rank, chunk), shards.world_size)

    @property
    def reach(self) -> int:
        """The largest distance between two ranks that hold a sequence."""
        low, high = _extremes(self.rank, self.sequence)
        return int((high - low).max()) if len(high) else 0

    def most_others(self, *, is_causal: bool) -> int:
        """An upper bound on what a rank reads from others: rows times samples of its sequences, the earlier if causal."""
        _, length = _extremes(self.stop, self.sequence)
        others = self.start if is_causal else _at(length, self.sequence) - (self.stop - self.start)
        return int(_by_rank(self.rank, others * self.samples, self.world).max())


@dataclass(frozen=True, slots=True)
class Holdings:
    """What ranks hold of segments that several of them share, by segment and position; every tensor is (holdings,).

    Those without rows that any head reads are left out.
    """

    segment: Tensor  # ascending numbers
    samples: Tensor
    rank: Tensor
    rows: Tensor  # the most rows that a head reads, which is the size of a message
    first: Tensor  # the offsets of the branch that read any row: ``count`` of them from this one on, cyclically
    count: Tensor
    offsets: Tensor  # the number of different offsets of the branch
    distance: Tensor  # between the first and the last rank of the segment

    def __getitem__(self, at: Tensor) -> Holdings:
        return Holdings(*(_at(getattr(self, field.name), at) for field in fields(self)))

    @staticmethod
    def of(problem: Problem, shards: Shards) -> Holdings:
        """The holdings of all branches. Inside a chunk, segments are not shared: only its first and last one may be."""
        chunks, pattern, heads = Chunks.of(problem, shards), problem.dilated, problem.key_heads
        branches = [x for x in range(len(pattern.branches)) if problem.branch in (None, x)]
        w, r = (_integers(x)[branches, None, None] for x in (pattern.segment_lengths, pattern.dilation_rates))
        ends = torch.stack((chunks.start, chunks.stop - 1), 1)
        number = ends // w  # (branches, chunks, 2)
        exists = torch.ones(number.shape, dtype=torch.bool, device="cpu")
        exists[..., 1] = number[..., 1] > number[..., 0]
        at = exists.flatten().nonzero().squeeze(1)
        branch = torch.repeat_interleave(_arange(len(branches)), exists.sum((1, 2)))
        chunk, number = (at >> 1) - branch * len(ends), _at(number.flatten(), at)
        segment = _consecutive(branch, _at(chunks.sequence, chunk), number)
        low, high = _extremes(_at(chunks.rank, chunk), segment)
        distance = _at(high - low, segment)
        shared = distance.nonzero().squeeze(1)
        branch, chunk, number, segment, distance = (_at(x, shared) for x in (branch, chunk, number, segment, distance))
        w, r = _at(w.flatten(), branch), _at(r.flatten(), branch)
        start = (_at(chunks.start, chunk) - number * w).clamp_(min=0)
        length = torch.minimum(_at(chunks.stop, chunk) - number * w, w) - start
        # Every offset reads ``length // r`` rows. Those in the cyclic interval from ``begin`` to ``end`` read one more.
        begin = start % r
        end = begin + length % r
        rates = [pattern.dilation_rates[x] for x in branches]
        offsets = [sorted({pattern.offset(g, heads, rate) for g in range(heads)}) for rate in rates]
        counts = _at(_integers([len(own) for own in offsets]), branch)
        if isinstance(pattern.offsets, str):  # 0, 1, 2, ...
            first = torch.minimum(begin, counts)
            more = torch.minimum(end, counts) - first + torch.minimum((end - r).clamp_(min=0), counts)
        else:
            first, more = _offsets_within(offsets, rates, branch, begin, end)
        first = torch.where(first == counts, 0, first)
        count = torch.where(length >= r, counts, more)
        rows = length // r + (more > 0)
        found, samples, rank = rows.nonzero().squeeze(1), _at(chunks.samples, chunk), _at(chunks.rank, chunk)
        return Holdings(segment, samples, rank, rows, first, count, counts, distance)[found]

    def received(self, world: int, *, is_causal: bool) -> Tensor:
        """By rank: the rows times samples that it receives."""
        partial = torch.zeros(int(self.segment[-1]) + 1 if len(self.rank) else 0, dtype=torch.bool, device="cpu")
        partial[_at(self.segment, (self.count < self.offsets).nonzero().squeeze(1))] = True
        different = _at(partial, self.segment)  # not every holding of the segment has rows of all heads
        total = _by_rank(*self._received_by_all(self.rows * ~different, is_causal), world)
        own = self[different.nonzero().squeeze(1)]
        for target, source in own.pairs(is_causal=is_causal):
            total += _by_rank(_at(own.rank, target), _at(own.rows * own.samples, source), world)
        return total

    def _received_by_all(self, rows: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        """Ranks, and what they receive of one segment each, if every rank reads these rows of every other."""
        order, pair, segment = *self._by_segment_and_rank(), _consecutive(self.segment)
        last = _at(order, _last_of(pair))
        own = torch.zeros_like(last).index_add_(0, pair, _at(rows, order))
        ends = rows.cumsum(0)
        in_segment = _at(segment, last)
        before = _at(_at(ends - rows, _first_of(segment)), in_segment)
        seen = last if is_causal else _at(_last_of(segment), in_segment)
        return _at(self.rank, last), (_at(ends, seen) - before - own) * _at(self.samples, last)

    def _by_segment_and_rank(self) -> tuple[Tensor, Tensor]:
        """An order of the holdings, and numbers of the pairs of a segment and a rank in that order."""
        order = _argsort(self.segment * (int(self.rank.max()) + 1 if len(self.rank) else 1) + self.rank)
        return order, _consecutive(_at(self.segment, order), _at(self.rank, order))

    def pairs(self, *, is_causal: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Holdings whose rank receives, and the holding that it receives, each once for a rank; some at a time."""
        if not len(self.rank):
            return
        segment = _consecutive(self.segment)
        starts = _first_of(segment)
        sizes = torch.diff(starts, append=_integers([len(segment)]))[segment]
        order, pair = self._by_segment_and_rank()
        earlier = torch.full_like(order, -1)  # the holding of the same rank and segment before this one
        repeated = (pair[1:] == pair[:-1]).nonzero().squeeze(1)
        earlier[order[repeated + 1]] = order[repeated]
        ends = sizes.cumsum(0)
        for begin, end in pairwise(_bounds(ends, _AT_A_TIME)):
            size = sizes[begin:end]
            target = torch.repeat_interleave(_arange(end - begin) + begin, size)
            base = starts[segment[begin:end]] - size.cumsum(0) + size
            source = torch.repeat_interleave(base, size) + _arange(len(target))
            read = (self.rank[target] != self.rank[source]) & self._reads(target, source, is_causal)
            before = earlier[target]
            while bool((before >= 0).any()):
                read &= (before < 0) | ~self._reads(before, source, is_causal)
                before = torch.where(before < 0, -1, earlier[before])
            found = read.nonzero().squeeze(1)
            yield target[found], source[found]

    def _reads(self, target: Tensor, source: Tensor, is_causal: bool) -> Tensor:
        """Whether a head of the target sees rows of the source, both of one segment."""
        distance, offsets = self.first[source] - self.first[target], self.offsets[target]
        common = (distance % offsets < self.count[target]) | (-distance % offsets < self.count[source])
        return common & (source <= target) if is_causal else common


def _offsets_within(
    offsets: list[list[int]], rates: list[int], branch: Tensor, begin: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """The number of offsets of a branch below ``begin``, and from there to ``end``, which may be beyond the rate.

    >>> first, count = _offsets_within([[0, 3]], [8], torch.tensor([0]), torch.tensor([2]), torch.tensor([9]))
    >>> first.item(), count.item()  # 3 and 8
    (1, 2)
    """
    # The offsets of all branches as one ascending list; those of a branch twice, so that no interval is cut.
    far, twice = 2 * max(rates), [0]
    ascending: list[int] = []
    for number, (own, rate) in enumerate(zip(offsets, rates, strict=True)):
        ascending += [number * far + turn + offset for turn in (0, rate) for offset in own]
        twice.append(len(ascending))
    first, stop = (torch.searchsorted(_integers(ascending), branch * far + x) for x in (begin, end))
    return first - _at(_integers(twice), branch), stop - first


def messages_by_round(holdings: Holdings, world: int, bucket_size: int) -> tuple[int, ...]:
    """For rounds 1, 2, ...: a bound on the messages of any rank, which is the same number on every rank.

    The bound is exact if the holdings of a segment are equal. Two ranks that share a segment are at most as far from each
    other as its first and last rank. Its rows therefore count in the rounds up to that distance, and in as many last ones.
    """
    exists = torch.zeros(world, dtype=torch.int64, device="cpu").index_fill_(0, holdings.distance, 1)
    distances = exists.nonzero().squeeze(1)  # few: those of a branch are often equal
    number, count = _at(exists.cumsum(0) - 1, holdings.distance), len(distances)
    rows = _by_rank(holdings.rank * count + number, holdings.rows, world * count).view(world, count)
    most = rows.flip(1).cumsum(1).amax(0).flip(0) if count else rows.new_zeros(0)  # that travel as far as each distance
    t = _arange(world)[1:]
    nearest = torch.searchsorted(distances, torch.minimum(t, world - t))
    messages = -(-torch.cat((most, most.new_zeros(1))) // bucket_size)
    return tuple(_at(messages, nearest).tolist())


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """What each rank of a call sends and receives in a forward: rows times samples and key heads, and messages."""

    received: tuple[int, ...]
    sent: tuple[int, ...]
    messages: tuple[int, ...]  # that a rank receives


def dilated_traffic(problem: Problem, shards: Shards, bucket_size: int) -> RankTraffic:
    """The exact traffic of all ranks. It takes memory for a number per pair of ranks."""
    world, holdings = shards.world_size, Holdings.of(problem, shards)
    rows = torch.zeros(world * world, dtype=torch.int64, device="cpu")  # by target and source
    received, sent = (torch.zeros(world, dtype=torch.int64, device="cpu") for _ in range(2))
    for target, source in holdings.pairs(is_causal=problem.is_causal):
        own, to, by = holdings.rows[source], holdings.rank[target], holdings.rank[source]
        elements = own * holdings.samples[source] * problem.key_heads
        received.index_add_(0, to, elements)
        sent.index_add_(0, by, elements)
        rows.index_add_(0, to * world + by, own)
    messages = (-(-rows // bucket_size)).view(world, world).sum(1)
    return RankTraffic(tuple(received.tolist()), tuple(sent.tolist()), tuple(messages.tolist()))


@lru_cache(maxsize=8)  # three numbers for each chunk
def _held(shards: Shards) -> tuple[Tensor, ...]:
    """Start, stop and rank of the chunks that are not empty, by position."""
    return _integers(shards.held).view(-1, 4)[:, :3].t().contiguous().unbind(0)


def _integers(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _arange(count: int) -> Tensor:
    return torch.arange(count, device="cpu")


def _at(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]``, in a fifth of the time."""
    return x.index_select(0, index)


def _argsort(keys: Tensor) -> Tensor:
    """A stable order by keys, which are in order already if shards are contiguous."""
    return _arange(len(keys)) if bool((keys[1:] >= keys[:-1]).all()) else torch.argsort(keys, stable=True)


def _consecutive(*keys: Tensor) -> Tensor:
    """Numbers 0, 1, ... of runs of equal keys.

    >>> _consecutive(torch.tensor([5, 5, 3, 3]), torch.tensor([1, 1, 1, 2])).tolist()
    [0, 0, 1, 2]
    """
    differs = torch.zeros(len(keys[0]), dtype=torch.bool, device="cpu")
    for key in keys:
        differs[1:] |= key[1:] != key[:-1]
    return differs.cumsum(0)


def _first_of(group: Tensor) -> Tensor:
    """The index of the first element of each run of equal numbers."""
    starts = torch.ones(len(group), dtype=torch.bool, device="cpu")
    starts[1:] = group[1:] != group[:-1]
    return starts.nonzero().squeeze(1)


def _last_of(group: Tensor) -> Tensor:
    """The index of the last element of each run of equal numbers."""
    ends = torch.ones(len(group), dtype=torch.bool, device="cpu")
    ends[:-1] = group[1:] != group[:-1]
    return ends.nonzero().squeeze(1)


def _extremes(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """By group: the smallest and the largest value; values are not negative."""
    shape = (int(group.max()) + 1 if len(group) else 0,)
    low, high = (torch.full(shape, x, dtype=torch.int64, device="cpu") for x in (2**62, 0))
    return low.scatter_reduce_(0, group, values, "amin"), high.scatter_reduce_(0, group, values, "amax")


def _bounds(ends: Tensor, most: int) -> list[int]:
    """Cut a list into runs with a sum of at most ``most``, or of one element; ``ends`` has running sums.

    >>> _bounds(torch.tensor([3, 5, 9, 10]), 5)
    [0, 2, 4]
    """
    bounds = [0]
    while bounds[-1] < len(ends):
        done = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        bounds.append(max(bounds[-1] + 1, int(torch.searchsorted(ends, done + most, right=True))))
    return bounds


def _by_rank(rank: Tensor, values: Tensor, world: int) -> Tensor:
    return torch.zeros(world, dtype=torch.int64, device="cpu").index_add_(0, rank, values)

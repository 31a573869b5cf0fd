"""Schedules: pattern x shards -> what every rank sends, receives and computes. Plain integers, without torch.

A branch whose segments lie inside of the shards sends nothing. Of a segment that several ranks hold, each rank needs from
the others the rows that the branch's heads read, ``1 / r`` of them, and if causal only the earlier ones. Which ranks share
which segments is stored once for all ranks (a group per shared segment), so that the schedules of thousands of ranks are as
many small tuples; the transfers of one rank are made from it when asked for.

Rounds: in round ``t`` every rank sends to the rank ``t`` after it and receives from the rank ``t`` before it, so that all
ranks agree on the order of messages whatever their shards are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate

from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.tiles import Plan, compile_plan
from dilated_attention_pytorch.shards import Shards


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank holds of a segment: consecutive positions."""

    rank: int
    positions: range
    rows: int  # the most that any head reads of them: rows of a message
    heads: int  # which key heads read any of them, as bits: all of them, unless the piece is shorter than the rate


@dataclass(frozen=True, slots=True)
class Group:
    """A segment of a branch that several ranks hold, in the order of positions."""

    branch: int
    pieces: tuple[Piece, ...]
    sums: dict[int, tuple[int, ...]] = field(repr=False)  # by heads: rows of the first n pieces that share one of them

    def number(self, position: int) -> int:
        """Which piece holds a position."""
        return bisect_right(self.pieces, position, key=lambda piece: piece.positions.start) - 1

    def needed(self, own: list[Piece], other: Piece, is_causal: bool) -> bool:
        """Whether some head of a rank with these pieces sees keys of another's piece."""
        return any(
            mine.heads & other.heads and not (is_causal and other.positions.start > mine.positions.start) for mine in own
        )


@dataclass(frozen=True, slots=True)
class Transfer:
    """Keys and values of a piece on their way to a rank; gradients take the way back."""

    source: int
    target: int
    branch: int
    positions: range
    rows: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who needs what from whom, for all ranks.

    16 positions on two ranks, a branch of segments of 4 and one of 16 with rate 4: only the second crosses, and each rank
    receives the 2 rows per head that the other has of it.

    >>> schedule = make_schedule(Dilated([4, 16], [1, 4]), Shards.of([8, 8], "contiguous"), key_heads=4, is_causal=False)
    >>> list(schedule.receives(0))
    [Transfer(source=1, target=0, branch=1, positions=range(8, 16), rows=2)]
    >>> schedule.bytes(0, head_dim=64, element_size=2)  # 2 rows x 4 heads x 64 x (key, value) x 2 bytes
    2048
    """

    pattern: Dilated
    shards: Shards
    key_heads: int
    is_causal: bool
    groups: tuple[Group, ...]
    groups_of: tuple[tuple[int, ...], ...] = field(repr=False)  # by rank: numbers of groups
    branch: int | None = None  # only this one of the pattern's branches, if not None

    def only(self, branch: int) -> Schedule:
        """The same schedule for one branch alone."""
        numbers = tuple(tuple(n for n in some if self.groups[n].branch == branch) for some in self.groups_of)
        return replace(self, groups_of=numbers, branch=branch)

    @property
    def active_groups(self) -> Iterator[Group]:
        """The groups of the branches that count."""
        return (group for group in self.groups if self.branch in (None, group.branch))

    def local(self, rank: int) -> Iterator[tuple[int, int, Plan]]:
        """Tiles of a rank's own queries and keys: chunk of the queries, chunk of the keys, plan."""
        chunks = self.shards.chunks[rank]
        for a, queries in enumerate(chunks):
            for b, keys in enumerate(chunks):
                plan = self._plan(queries, keys)
                if plan.families:
                    yield a, b, plan

    def receives(self, rank: int) -> Iterator[Transfer]:
        """What a rank needs from others, by group and position."""
        for group in (self.groups[number] for number in self.groups_of[rank]):
            own = [piece for piece in group.pieces if piece.rank == rank]
            for piece in group.pieces:
                if piece.rank != rank and group.needed(own, piece, self.is_causal):
                    yield Transfer(piece.rank, rank, group.branch, piece.positions, piece.rows)

    def sends(self, rank: int) -> Iterator[Transfer]:
        """What others need from a rank, by group, position and target."""
        for group in (self.groups[number] for number in self.groups_of[rank]):
            by_rank: dict[int, list[Piece]] = {}
            for piece in group.pieces:
                by_rank.setdefault(piece.rank, []).append(piece)
            for piece in by_rank[rank]:
                for target, own in by_rank.items():
                    if target != rank and group.needed(own, piece, self.is_causal):
                        yield Transfer(rank, target, group.branch, piece.positions, piece.rows)

    def rounds(self, rank: int) -> Iterator[tuple[int, tuple[Transfer, ...], tuple[Transfer, ...]]]:
        """Round, sends and receives of a rank, without the rounds in which it has none. Both ends agree on the order."""
        world = self.shards.world_size
        by_round: dict[int, tuple[list[Transfer], list[Transfer]]] = {}
        for side, transfers in enumerate((self.sends(rank), self.receives(rank))):
            for transfer in transfers:
                by_round.setdefault((transfer.target - transfer.source) % world, ([], []))[side].append(transfer)
        for number in sorted(by_round):
            sends, receives = by_round[number]
            yield number, tuple(sends), tuple(receives)

    def remote(self, transfer: Transfer) -> Iterator[tuple[int, Plan]]:
        """The tiles of a transfer at its target: chunk of the queries, plan of the transfer's branch."""
        for a, queries in enumerate(self.shards.chunks[transfer.target]):
            plan = self._plan(queries, transfer.positions).of_branch(transfer.branch)
            if plan.families:
                yield a, plan

    def bytes(self, rank: int, *, head_dim: int, element_size: int, batch: int = 1) -> int:
        """Bytes of keys and values that a rank receives in a forward."""
        rows = 0
        for group in (self.groups[number] for number in self.groups_of[rank]):
            segment = range(group.pieces[0].positions.start, group.pieces[-1].positions.stop)
            own = [
                group.number(max(chunk.start, segment.start))
                for chunk in self.shards.chunks[rank]
                if chunk and chunk.start < segment.stop and segment.start < chunk.stop
            ]
            own = [i for i in own if group.pieces[i].rows]
            heads = {group.pieces[i].heads for i in own}
            if len(heads) == 1:  # in the time of a search, not of a sum over thousands of ranks
                sums = group.sums[heads.pop()]
                rows += sums[max(own) + 1 if self.is_causal else -1] - sum(group.pieces[i].rows for i in own)
            elif heads:
                mine = [group.pieces[i] for i in own]
                others = (piece for piece in group.pieces if piece.rank != rank)
                rows += sum(piece.rows for piece in others if group.needed(mine, piece, self.is_causal))
        return rows * self.key_heads * head_dim * 2 * element_size * batch

    def _plan(self, queries: range, keys: range) -> Plan:
        plan = compile_plan(
            self.pattern, self.shards.length, self.key_heads, is_causal=self.is_causal, queries=queries, keys=keys
        )
        return plan if self.branch is None else plan.of_branch(self.branch)


def _piece(rank: int, positions: range, segment: int, rate: int, offsets: tuple[int, ...]) -> Piece:
    """What a rank holds of the segment that starts at ``segment``.

    Positions 1 to 3 of a segment at rate 2: the head of offset 0 reads one of them, the head of offset 1 two.

    >>> _piece(5, range(1, 4), 0, 2, (0, 1))
    Piece(rank=5, positions=range(1, 4), rows=2, heads=3)
    """
    first, stop = positions.start - segment, positions.stop - segment
    rows = {o: max(0, -(-(stop - o) // rate)) - max(0, -(-(first - o) // rate)) for o in set(offsets)}
    heads = sum(1 << g for g, o in enumerate(offsets) if rows[o])
    return Piece(rank, positions, max(rows.values()), heads)


@lru_cache(maxsize=64)
def make_schedule(pattern: Dilated, shards: Shards, key_heads: int, *, is_causal: bool) -> Schedule:
    """The schedule of a sequence: every rank makes the same one."""
    pattern.check_key_heads(key_heads)
    held = sorted((chunk.start, chunk.stop, rank) for rank, chunks in enumerate(shards.chunks) for chunk in chunks if chunk)
    starts = [start for start, _, _ in held]
    groups: list[Group] = []
    groups_of: list[list[int]] = [[] for _ in range(shards.world_size)]
    for branch, (w, r) in enumerate(pattern.branches):
        offsets = tuple(pattern.offset(g, key_heads, r) for g in range(key_heads))
        # Only segments that hold the start of a chunk, or begin inside of one and end outside, have several holders.
        for number in sorted({start // w for start in starts if start % w}):
            segment = range(number * w, min((number + 1) * w, shards.length))
            index = bisect_right(starts, segment.start) - 1
            pieces = []
            while index < len(held) and held[index][0] < segment.stop:
                start, stop, rank = held[index]
                positions = range(max(start, segment.start), min(stop, segment.stop))
                pieces.append(_piece(rank, positions, segment.start, r, offsets))
                index += 1
            if len({piece.rank for piece in pieces}) > 1:
                for rank in {piece.rank for piece in pieces}:
                    groups_of[rank].append(len(groups))
                sums = {
                    heads: tuple(accumulate((piece.rows if piece.heads & heads else 0 for piece in pieces), initial=0))
                    for heads in {piece.heads for piece in pieces}
                }
                groups.append(Group(branch, tuple(pieces), sums))
    return Schedule(pattern, shards, key_heads, is_causal, tuple(groups), tuple(map(tuple, groups_of)))

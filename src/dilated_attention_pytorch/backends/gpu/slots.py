"""Slots: the rows of an ordered call, sorted inside of the tiles of each branch, as lists that kernels read.

The order decides which rows share a tile, and the original positions decide which of them see one another. A tile whose
rows are sorted by position is an ordinary causal tile, which no kernel needs to mask by position. The slots of a head are
the rows of its first tile, sorted, then those of the next. A branch (w, r) is the branch (ceil(w / r), 1) of its slots.

Worked example: places 0 to 5 of the order have the positions 3, 0, 2, 1, 5, 4. The branch is w = 4, r = 2. A head with
offset 0 has the places 0 and 2 in one tile and place 4 in the next. Its slots are the places 2, 0, 4.

All heads have as many slots. Where a head has fewer rows in a segment than another head, the last slot of the segment is
empty. Heads of the same offset share a list of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dilated_attention_pytorch.backends.gpu.tables import keep_for_device
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import RowOrder


@dataclass(frozen=True, slots=True)
class BranchSlots:
    """The slots of one branch. Lists of rows have an entry for each sample, or one for all samples."""

    problem: Problem  # causal, over slots
    rows: Tensor  # (B or 1, lists, slots) int32: the row of the inputs in each slot, or -1
    places: Tensor  # the same for the place of this row in the ordered sequence, or 0; dropout counts places
    lists: Tensor  # (G,) int32: the list of each head


@dataclass(frozen=True, slots=True, eq=False)
class RowSlots:
    """The slots of all branches of a problem."""

    branches: tuple[BranchSlots, ...]
    sizes: Tensor  # (branches, 2) int64: the slots of all samples in branches before, and the slots of the branch
    slots: Tensor  # (branches, B or 1, N) int32: the slot of each row
    owners: Tensor  # (branches, B or 1, N) int32: the list that has the row, or -1
    lists: Tensor  # (branches, G) int32: the list of each head

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The memory of all lists."""
        own = (x for b in self.branches for x in (b.rows, b.places, b.lists))
        return self.sizes, self.slots, self.owners, self.lists, *own


class _KeptSlots:
    """Slots by the tensor of positions, as long as it lives: an order serves all layers and steps of a model.

    An order has those of its last problems. Positions that were changed in place have new ones.
    """

    def __init__(self, per_order: int) -> None:
        self.per_order = per_order
        self._of_orders: Any = WeakIdKeyDictionary()  # dicts of (version of the positions, slots) by problem

    def __len__(self) -> int:
        return sum(len(kept) for kept in self._of_orders.values())

    def find(self, problem: Problem, order: RowOrder) -> RowSlots | None:
        """The slots of an equal problem."""
        version, found = self._of_orders.get(order.positions, {}).get((problem, order.moved), (None, None))
        return found if version == order.positions._version else None

    def keep(self, problem: Problem, order: RowOrder, found: RowSlots) -> None:
        """Keep slots for later calls."""
        kept: dict[Any, Any] = self._of_orders.setdefault(order.positions, {})
        kept.pop((problem, order.moved), None)
        if len(kept) >= self.per_order:
            del kept[next(iter(kept))]
        kept[problem, order.moved] = order.positions._version, found

    def cache_clear(self) -> None:
        """Forget the slots of all orders."""
        self._of_orders.clear()


kept_slots = _KeptSlots(per_order=4)


def find_slots(problem: Problem, order: RowOrder) -> RowSlots:
    """The slots of a causal problem under an order, made at its first call with these positions.

    Tensors made under ``torch.inference_mode`` do not count their changes, so each call sorts their rows again.
    """
    counted = not order.positions.is_inference()
    found = kept_slots.find(problem, order) if counted else None
    if found is None:
        found = make_slots(problem, order)
        if order.positions.is_cuda and torch.cuda.is_current_stream_capturing():
            return found  # its memory belongs to the graph
        if counted:
            kept_slots.keep(problem, order, found)
    keep_for_device(found, found.tensors)
    return found


class _Sequences(NamedTuple):
    """The sequence of each place: (1, N), or (B, N) if samples have lengths."""

    number: Tensor  # of the document, else 0
    begin: Tensor  # the first place
    length: Tensor
    inside: Tensor  # False behind the end of a sample, or of all documents


def _sequences(problem: Problem, device: torch.device) -> _Sequences:
    assert problem.starts is None, "calls with starts have no order"
    n = problem.queries
    places = torch.arange(n, device=device).unsqueeze(0)
    zero = torch.zeros_like(places)
    if problem.lengths is not None:
        lengths = _on_device(problem.lengths, device).unsqueeze(1)
        inside = places < lengths
        return _Sequences(zero, torch.where(inside, 0, lengths), torch.where(inside, lengths, n - lengths), inside)
    if problem.cu_seqlens is not None:
        bounds = _on_device((*problem.cu_seqlens, n), device)  # behind the documents is a further sequence
        number = torch.searchsorted(bounds[:-1], places, right=True) - 1
        begin = bounds[number]
        return _Sequences(number, begin, bounds[number + 1] - begin, places < problem.cu_seqlens[-1])
    return _Sequences(zero, zero, zero + n, places >= 0)


def make_slots(problem: Problem, order: RowOrder) -> RowSlots:
    """``find_slots`` without a cache."""
    positions = order.positions.long()
    positions = positions if positions.dim() == 2 else positions.unsqueeze(0)
    if problem.lengths is not None:
        positions = positions.expand(problem.batch, -1)
    sequences = _sequences(problem, positions.device)
    every = torch.arange(problem.queries, device=positions.device)
    by_position = _scattered(positions, every)
    branches, slots, owners = [], [], []
    for branch in range(len(problem.dilated.branches)):
        own, slot, owner = _sort(problem, branch, sequences, by_position, positions if order.moved else None)
        branches.append(own)
        slots.append(slot)
        owners.append(owner)
    counts = [own.problem.queries for own in branches]
    before = accumulate((problem.batch * count for count in counts[:-1]), initial=0)
    return RowSlots(
        tuple(branches), _on_device(list(zip(before, counts, strict=True)), positions.device),
        torch.stack(slots), torch.stack(owners), torch.stack([own.lists for own in branches]),
    )  # fmt: skip


def _sort(
    problem: Problem, branch: int, sequences: _Sequences, by_position: Tensor, positions: Tensor | None
) -> tuple[BranchSlots, Tensor, Tensor]:
    """The slots of a branch, and for each row of the inputs its slot and its owner. Rows are places without positions."""
    w, rate = problem.dilated.branches[branch]
    w = max(1, min(w, problem.queries))
    over_slots, (number, begin, length, inside) = _over_slots(problem, branch), sequences
    slots, offsets = over_slots.queries, _offsets(problem, rate)
    inner = torch.arange(problem.queries, device=by_position.device) - begin
    in_segment = inner % w
    rest = torch.clamp(length - inner + in_segment, max=w)  # the length of the segment
    # Sorting moves places within their segment: by phase, and by position if they have the same phase.
    phase = (in_segment % rate).expand(by_position.shape)
    tile = (begin + inner - in_segment) * min(w, rate) + phase
    places = by_position.gather(1, tile.gather(1, by_position).argsort(dim=1, stable=True))
    phase = phase.gather(1, places)
    before = phase * (rest // rate) + torch.minimum(phase, rest % rate)  # places of smaller phases in the segment
    slot = inner // w * -(-w // rate) + in_segment - before
    if over_slots.cu_seqlens is not None:
        slot = slot + _on_device((*over_slots.cu_seqlens, slots), slot.device)[number]
    own_list = [-1] * min(w, rate)
    for i, offset in enumerate(offsets):
        if offset < len(own_list):  # else no segment has a row of this offset
            own_list[offset] = i
    owner = torch.where(inside, _on_device(own_list, slot.device)[phase], -1)

    targets = torch.where(owner >= 0, owner * slots + slot, len(offsets) * slots)  # the last is for rows that no head has

    def listed(x: Tensor, empty: int) -> Tensor:
        lists = x.new_full((x.shape[0], len(offsets) * slots + 1), empty).scatter_(1, targets, x)
        return lists[:, :-1].reshape(-1, len(offsets), slots).to(torch.int32)

    rows = places if positions is None else positions.gather(1, places)
    heads = [offsets.index(problem.dilated.offset(g, problem.key_heads, rate)) for g in range(problem.key_heads)]
    own = BranchSlots(over_slots, listed(rows, -1), listed(places, 0), _on_device(heads, slot.device).to(torch.int32))
    return own, _scattered(rows, slot).to(torch.int32), _scattered(rows, owner).to(torch.int32)


def _offsets(problem: Problem, rate: int) -> list[int]:
    """The different offsets of heads in branches of this rate."""
    return sorted({problem.dilated.offset(g, problem.key_heads, rate) for g in range(problem.key_heads)})


def _over_slots(problem: Problem, branch: int) -> Problem:
    """The problem of a branch on its slots."""
    w, rate = problem.dilated.branches[branch]
    w = max(1, min(w, problem.queries))

    def count(n: int) -> int:
        """The slots of a sequence."""
        return n // w * -(-w // rate) + -(-(n % w) // rate)

    lengths, bounds = problem.lengths, problem.cu_seqlens
    slots = count(problem.queries)
    if lengths is not None:
        lengths = tuple(map(count, lengths))
        slots = max(lengths, default=0)
    if bounds is not None:
        bounds = tuple(accumulate((count(stop - start) for start, stop in pairwise(bounds)), initial=0))
        slots = bounds[-1]
    branches = len(problem.dilated.branches)
    return replace(
        problem, pattern=Dilated([-(-w // rate)] * branches, [1] * branches), branch=branch,
        queries=max(1, slots), keys=max(1, slots), lengths=lengths, cu_seqlens=bounds,
    )  # fmt: skip


def _on_device(numbers: Sequence[Any], device: torch.device) -> Tensor:
    # Pageable memory is staged at once, without waiting for the GPU.
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def _scattered(index: Tensor, values: Tensor) -> Tensor:
    """``found`` with ``found[b, index[b, i]] = values[b, i]``, for a permutation of each row."""
    return torch.empty_like(index).scatter_(1, index, values.expand(index.shape))

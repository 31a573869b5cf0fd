"""Who may touch shared memory when: the happens-before order of a program's threads, by vector clocks.

A thread's clock says how much of every other thread it knows to be done. Arriving at a barrier leaves what one knows there,
waiting for it takes up what all who arrived have left. An access to shared memory that conflicts with another one has to
know of that one, however threads happen to run: so one run shows what could go wrong in any.

What happens behind a thread's back is late on purpose. Rows that are loaded (``Copy``) are known only through the barrier
that they complete. Operands of products and rows that are added to memory are read until one has waited for that
(``done_reading``). And what a thread stores is not seen by products and additions before a fence (``fence``).

Programs that add to the same rows in global memory are put in order alike, by counters that are released and acquired.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

_LOCK = threading.Lock()
_numbers = itertools.count()
_here = threading.local()  # actor, clock, stores without a fence since, products under way


def begin(known: dict[int, int] | None = None) -> None:
    """As a thread that knows what the one who started it knew."""
    _here.actor = next(_numbers)
    _here.clock = {**(known or {}), _here.actor: 1}
    _here.unfenced, _here.products = [], []


def known() -> dict[int, int]:
    return dict(_here.clock)


def take_up(clock: dict[int, int]) -> None:
    for actor, time in clock.items():
        _here.clock[actor] = max(time, _here.clock.get(actor, 0))


def leave(clock: dict[int, int], copies: tuple[Copy, ...] = ()) -> None:
    """Into the clock of a barrier; what the thread does from now on is not in it."""
    for actor, time in (*_here.clock.items(), *((copy.actor, 1) for copy in copies)):
        clock[actor] = max(time, clock.get(actor, 0))
    _here.clock[_here.actor] += 1


def fence() -> None:
    """What this thread has stored is seen by products and additions from now on."""
    for store in _here.unfenced:
        store.fenced = True
    _here.unfenced.clear()


@dataclass
class _Access:
    actor: int
    time: int
    fenced: bool = True

    def is_known(self) -> bool:
        return _here.clock.get(self.actor, 0) >= self.time


class Copy(_Access):
    """Rows on their way into shared memory."""

    def __init__(self):
        super().__init__(next(_numbers), 1)


class Memory:
    """What was done with an allocation, by its cells."""

    def __init__(self):
        self.written: dict[int, _Access] = {}
        self.read: dict[int, dict[int, _Access]] = {}

    def reads(self, cells, *, by_fence: bool = False) -> None:
        """Now, and known to be over with the thread's clock; ``by_fence``: not by the thread itself."""
        with _LOCK:
            for cell in cells:
                store = self.written.get(cell)
                assert store is not None, "read before it is written"
                assert store.is_known(), "read while it may still be written"
                assert store.fenced or not by_fence, "no fence between a store and what reads it"
                self.read.setdefault(cell, {})[_here.actor] = _Access(_here.actor, _here.clock[_here.actor])

    def is_over(self, cells) -> None:
        """What was written there is known to be done."""
        with _LOCK:
            for cell in cells:
                store = self.written.get(cell)
                assert store is None or store.is_known(), "written twice at the same time"

    def writes(self, cells, copy: Copy | None = None) -> None:
        """Now, or (``copy``) from now on."""
        under_way = (x for operands in _here.products for x in operands)
        own = any(memory is self and set(cells) & set(others) for memory, others in under_way)
        assert not own, "written while an own product may still read it"
        with _LOCK:
            store = copy or _Access(_here.actor, _here.clock[_here.actor], fenced=False)
            if copy is None:
                _here.unfenced.append(store)
            for cell in cells:
                before = self.written.get(cell)
                assert before is None or before.is_known(), "written twice at the same time"
                assert all(x.is_known() for x in self.read.pop(cell, {}).values()), "written while it may still be read"
                self.written[cell] = store


def start_product(operands) -> None:
    """Shared memory that a product begins to read: (memory, cells) of each operand there."""
    for memory, cells in operands:
        memory.reads(cells, by_fence=True)
    _here.products.append(operands)


def done_reading(pending: int) -> None:
    """All but so many of this thread's products are done."""
    done = _here.products[: len(_here.products) - pending]
    for operands in done:
        for memory, cells in operands:
            memory.reads(cells, by_fence=True)
    del _here.products[: len(done)]


def end() -> None:
    assert not _here.products, "products that nobody waited for"

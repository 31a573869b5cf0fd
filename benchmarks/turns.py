"""What adding in a fixed order would cost, simulated: items of a tile that add to the same rows of dq, one after the other.

    python benchmarks/turns.py

An item goes through the blocks of query rows of its tile; to each it adds when the item before it has, and goes on while up
to two additions are under way. Programs take items as they come free. Times in microseconds; printed is the time of all
over that of additions in any order: item after item of a tile, and with several tiles in turns, for turns of two lengths.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

PROGRAMS = 132
START = 4.0  # until the first block of an item is computed
# Tiles of all heads, items of a tile, blocks of query rows, time of a block.
SETTINGS = {
    "tiles of 1024, D = 48": (128 * 16, 8, 16, 1.35),
    "tiles of 2048, D = 64": (64 * 12, 16, 32, 1.2),
    "tiles of 2896, D = 48": (45 * 16, 23, 46, 1.35),
    "tiles of 8192, D = 48": (16 * 16, 64, 128, 1.35),
}
TURNS = ((1.0, 0.7), (1.5, 1.2))  # until an addition is done, until the next item knows


def order(tiles: int, items: int, together: int) -> Iterator[tuple[int, int]]:
    """Tile and item of each in the order in which they are taken."""
    for first in range(0, tiles, together):
        for item in range(items):
            for tile in range(first, min(first + together, tiles)):
                yield tile, item


def item_end(start: float, before: list[float] | None, blocks: int, step: float, turn: tuple[float, float]) -> list[float]:
    """When the next item knows of each addition of one that starts now; ``before``: when this one knows of each."""
    computed, last, known, ended = start + START, start, [], []
    for block in range(blocks):
        computed += step * random.uniform(0.8, 1.2)
        if block >= 2:
            computed = max(computed, ended[block - 2])
        begin = max(computed, last + 0.4, before[block] if before else 0.0)
        if block:  # the one before is known to be done when this one is under way
            known[-1] = max(ended[-1], begin) + turn[1]
            ended[-1] = max(ended[-1], begin)
        last = begin
        ended.append(begin + turn[0])
        known.append(begin + turn[0] + turn[1])
    return known


def time(
    tiles: int, items: int, blocks: int, step: float, together: int, turn: tuple[float, float], ordered: bool
) -> float:  # fmt: skip
    """Of all items."""
    random.seed(0)
    free = [0.0] * PROGRAMS
    before: dict[int, list[float]] = {}
    for tile, item in order(tiles, items, together):
        known = item_end(heapq.heappop(free), before.get(tile) if ordered and item else None, blocks, step, turn)
        before[tile] = known
        heapq.heappush(free, known[-1] - turn[1])
    return max(free)


def main() -> None:
    for name, setting in SETTINGS.items():
        items = setting[1]
        together = -(-2 * PROGRAMS // items)
        for turn in TURNS:
            alone, in_turns = (time(*setting, w, turn, True) / time(*setting, w, turn, False) for w in (1, together))
            print(f"{name}, turns of {sum(turn):.1f}: {alone:.2f}, {together} tiles in turns {in_turns:.3f}")


if __name__ == "__main__":
    main()

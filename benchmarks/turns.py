"""What adding in a fixed order costs (hopper/turns.py), simulated: items of a tile add to the same rows of dq in turns.

    python benchmarks/turns.py

An item goes through the blocks of query rows of its tile. It adds to the first of each chunk when the item before it has
passed it on, which that does once its next chunk has begun, and goes on while up to four additions are under way. Programs
take items as they come free, in the order of turns.find_turn. Printed is the time of all over that of additions in any
order, for two guesses of how long an addition and passing it on take, in microseconds.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

PROGRAMS = 132
START, END = 4.0, 1.0  # until the first block of an item is computed, and after its last
PLACES, CHUNK, TOGETHER = 4, 4, 264  # as in joint.py and turns.py
# Tiles of all heads, items of a tile, blocks of query rows, time of a block.
SETTINGS = {
    "D = 64, tiles of 2048": (64 * 12, 16, 32, 1.45),
    "D = 48, tiles of 8192": (16 * 16, 64, 128, 1.25),
    "gigapath, rate 1": (128 * 16, 8, 16, 1.25),
    "gigapath, rate 2": (362, 23, 46, 1.25),
    "gigapath, rate 4": (64, 64, 128, 1.25),
    "gigapath, rate 8": (16, 128, 256, 1.25),
    "gigapath, rate 16": (16, 64, 128, 1.25),
}
TURNS = ((1.0, 0.7), (1.5, 1.2))  # until an addition is done, until the next item knows


def order(tiles: int, items: int) -> Iterator[tuple[int, int]]:
    """Tile and turn of each item in the order in which they are taken."""
    windows = max(tiles // -(-TOGETHER // items), 1)
    first = 0
    for window in range(windows):
        width = tiles // windows + (window < tiles % windows)
        for turn in range(items):
            for tile in range(first, first + width):
                yield tile, turn
        first += width


def item_end(
    start: float, before: list[float] | None, blocks: int, step: float, turn: tuple[float, float]
) -> tuple[list[float], float]:
    """When the next item knows of each chunk of one that starts now, and when it ends; ``before``: when this one knows."""
    computed, begun, done, read = start + START, start, start, []
    known = [0.0] * -(-blocks // CHUNK)
    for block in range(blocks):
        computed += step * random.uniform(0.85, 1.15)
        if block >= PLACES:
            computed = max(computed, read[block - PLACES])
        begun = max(computed, begun + 0.2)
        if before and block % CHUNK == 0:
            begun = max(begun, before[block // CHUNK])
        if block and block % CHUNK == 0:
            known[block // CHUNK - 1] = begun = max(done, begun) + turn[1]
        read.append(begun + 0.5)
        done = begun + turn[0]
    known[-1] = done + turn[1]
    return known, done + END


def time(tiles: int, items: int, blocks: int, step: float, turn: tuple[float, float], ordered: bool) -> float:
    """Of all items."""
    random.seed(0)
    free = [0.0] * PROGRAMS
    before: dict[int, list[float]] = {}
    for tile, number in order(tiles, items):
        known = before.get(tile) if ordered and number else None
        before[tile], end = item_end(heapq.heappop(free), known, blocks, step, turn)
        heapq.heappush(free, end)
    return max(free)


def main() -> None:
    for name, setting in SETTINGS.items():
        found = [time(*setting, turn, True) / time(*setting, turn, False) for turn in TURNS]
        print(f"{name}: {found[0]:.3f} to {found[1]:.3f}", flush=True)


if __name__ == "__main__":
    main()

"""Which persistent program computes which items of a launch, so that all of them have about as many rows to read.

Persistent programs take every ``programs``-th item. The items of causal tiles differ in length, and a launch ends with its
slowest program. With 132 programs, 65,536 tokens, rate 12 and segments of 32,768, that one reads 44 % above the average.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.tables import FAMILY_COLUMNS

# Longer launches have so many items for each program that lengths average out.
MOST_ITEMS = 2**14
# Items of so many rounds are dealt out together. They are of neighbouring tiles, whose rows are in the cache.
ROUNDS = 4
# An order that saves less than this fraction of the time is not used.
LEAST_GAIN = 0.02


def item_rows(table: Tensor, items: int, block: int, by_keys: bool, programs: int) -> Tensor:
    """How many rows of the other side each item reads, with ``block`` more for its start and end.

    The blocks of a tile are those of ``primitives.locate`` for so many persistent programs.
    """
    columns = {name: table[:, i] for i, name in enumerate(FAMILY_COLUMNS)}
    first = columns["first_program"]
    counts = torch.diff(first, append=first.new_tensor([items]))
    wanted = [columns[name] for name in ("first_program", "q_rows", "k_rows", "causal")]
    first, q_rows, k_rows, causal = torch.stack(wanted).repeat_interleave(counts, 1, output_size=items)
    index = torch.arange(items, device="cpu") - first
    blocks = ((k_rows if by_keys else q_rows) + block - 1) // block
    tile, round_tiles = index // blocks, (programs // blocks).clamp(min=1)
    count = (index + tile + torch.where(round_tiles % blocks == 0, tile // round_tiles, 0)) % blocks
    if by_keys:
        read = torch.where(causal != 0, q_rows - count * block, q_rows)
    else:
        read = torch.where(causal != 0, torch.minimum((blocks - count) * block, k_rows), k_rows)
    return read + block


def balanced_order(rows: Tensor, programs: int) -> Tensor | None:
    """The items in the order in which programs take every ``programs``-th; None if theirs is as good.

    The items of some rounds are sorted by length. Programs take them in turns, from the first to the last and back.

    >>> balanced_order(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), programs=2).tolist()
    [7, 6, 4, 5, 3, 2, 0, 1]
    """
    items, window = len(rows), ROUNDS * programs
    windows = -(-items // window)
    padded = torch.nn.functional.pad(rows, (0, windows * window - items), value=-1)
    order = padded.view(windows, window).argsort(dim=1, descending=True, stable=True)
    order += torch.arange(windows, device="cpu").unsqueeze(1) * window
    rounds = order.view(windows * ROUNDS, programs)  # those of padding are behind all others
    turns = torch.arange(items // programs, device="cpu")
    turns = turns + turns // ROUNDS
    # The last of the full rounds goes back: a round that is not full then begins with the program that has least.
    backwards = torch.nonzero((turns - turns[-1]) % 2 == 0).flatten()
    rounds[backwards] = rounds[backwards].flip(1)
    order = order.flatten()[:items]
    longest = [_longest(x, programs) for x in (rows, rows[order])]
    return order if longest[1] < (1 - LEAST_GAIN) * longest[0] else None


def _longest(rows: Tensor, programs: int) -> int:
    """The rows of the program that has most."""
    rounds = -(-len(rows) // programs)
    padded = torch.nn.functional.pad(rows, (0, rounds * programs - len(rows)))
    return int(padded.view(rounds, programs).sum(0).max())

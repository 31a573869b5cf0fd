"""Block-sparse attention once more: the documented rules one block at a time, attention by loops over positions."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from oracle import M32, plain_word


def nearest(i: int, blocks) -> list[int]:
    return sorted(blocks, key=lambda j: (abs(j - i), j))


def budget(ratio: str, visible: int) -> int:
    return max(1, math.ceil(Fraction(ratio) * visible))


def choose(kind: str, ratio: str, i: int, n: int, causal: bool, **options) -> list[int]:
    """The key blocks of query block i, in the order in which the documented rule takes them."""
    visible = range(i + 1) if causal else range(n)
    count = budget(ratio, len(visible))
    order = [i]
    take = lambda blocks: order.extend(j for j in blocks if j not in order)  # noqa: E731
    if kind == "global_local":
        if i < options["global_blocks"]:
            return list(visible)
        take(range(options["global_blocks"]))
    elif kind == "dilated_sparse":
        candidates = [
            nearest(i, [j for j in visible if j != i and j // w == i // w and (j - i) % r == 0])
            for w, r in options["branches"]
        ]
        for turn in range(n):
            for blocks in candidates:
                take(blocks[turn : turn + 1])
    elif kind == "hierarchical":
        w = options["window"]
        ranges = [(0, w, 1)] + [(w * 2 ** (x - 1), w * 2**x, 2**x) for x in range(1, 20)]
        levels = [
            nearest(i, [j for j in visible if j != i and low <= abs(j - i) < high and abs(j - i) % step == 0])
            for low, high, step in ranges
        ]
        for turn in range(n):
            for blocks in levels:
                take(blocks[turn : turn + 1])
    take(nearest(i, visible))
    return order[:count]


def adaptive(q: Tensor, k: Tensor, ratio: str, size: int, scale: float, causal: bool) -> Tensor:
    """Boolean (B, H, query blocks, key blocks) for queries that are the last positions."""
    (batch, n, heads, _), (m, key_heads) = q.shape, k.shape[1:3]
    blocks, first = math.ceil(m / size), (m - n) // size
    table = torch.zeros(batch, heads, blocks - first, blocks, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            keys = [k[b, j * size : (j + 1) * size, h // (heads // key_heads)].mean(0) for j in range(blocks)]
            for i in range(first, blocks):
                start, stop = max(0, i * size - (m - n)), (i + 1) * size - (m - n)
                mean = q[b, start:stop, h].mean(0)
                visible = range(i + 1) if causal else range(blocks)
                score = {j: scale * float(mean @ keys[j]) for j in visible}
                order = sorted(visible, key=lambda j: (j != i, -score[j], j))
                for j in order[: budget(ratio, len(visible))]:
                    table[b, h, i - first, j] = True
    return table


def attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, size: int, *, causal=False, scale=None, positions=None,
              dropout=None):  # fmt: skip
    """``(out, lse)``, differentiable; ``table`` broadcasts to (B, H, query blocks, key blocks).

    With ``positions`` (B, N), the rows lie in another order, and causal is by these. ``dropout`` is p, seed, and the sample
    and the row of tokens that come first.
    """
    (batch, n, heads, d), (m, key_heads) = q.shape, k.shape[1:3]
    first, scale = (m - n) // size, d**-0.5 if scale is None else scale
    table = table.expand(batch, heads, *table.shape[-2:])
    rows, lses = [], []
    for b in range(batch):
        time = range(m) if positions is None else positions[b].tolist()
        for h in range(heads):
            g, blocks = h // (heads // key_heads), table[b, h].tolist()
            for a in range(n):
                i = a + m - n
                named = [j for j in range(m) if blocks[i // size - first][j // size]]
                seen = [j for j in named if not causal or time[j] <= time[i]]
                if not seen:
                    rows.append(q[b, a, h] * 0.0)
                    lses.append(torch.tensor(-math.inf, dtype=q.dtype))
                    continue
                s = scale * (k[b, seen, g] @ q[b, a, h])
                weights = s.softmax(0)
                if dropout is not None:
                    p, seed, sample, row = dropout
                    kept = [plain_word(seed, b + sample, h, 0, i + row, j + row) >= int(p * M32) for j in seen]
                    weights = weights * torch.tensor(kept) / (1 - p)
                rows.append(weights @ v[b, seen, g])
                lses.append(s.logsumexp(0))
    return torch.stack(rows).view(batch, heads, n, d).transpose(1, 2), torch.stack(lses).view(batch, heads, n)

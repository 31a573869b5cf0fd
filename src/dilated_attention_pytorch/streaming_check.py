"""Which rows of a stream are checked, and the definition of attention for them in float64, from inputs that are made again.

Nothing of the library's attention is used here: a row of a head is one softmax over the keys of all its branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.streaming_rows import CHOICE, KEY, QUERY, VALUE, head_rows, word

Branches = Sequence[tuple[int, int]]  # segment length and rate
_SPECIAL = 2**29


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A row of the results against the definition, over all heads."""

    position: int
    error: float  # of the head with the largest one, see ``check_row``
    keys: int  # of the head with the most, counted once per branch
    passed: bool


def tolerance(dtype: torch.dtype) -> float:
    """The largest error of a checked row.

    In half precision, a kernel rounds each weight before it multiplies a value, and it rounds the result. Each rounding is
    wrong by at most half an epsilon. Errors of weights are independent, as are the values, which have mean 0. So the errors
    add up like the terms themselves, by their squares. Together they are expected below ``0.5 * sqrt(2)`` epsilons of the
    root of the sum of squares. The tolerance is 2 epsilons, 0.0156 for bfloat16. Rows of up to four keys, whose errors may
    all have one direction, cannot exceed it either.

    In float32 and float64, sums of products dominate: of D products in a score, and of thousands of keys. The tolerance is
    64 epsilons, 7.6e-6 for float32.
    """
    return (2 if dtype.itemsize == 2 else 64) * torch.finfo(dtype).eps


def checked_positions(tokens: int, rows: int, branches: Branches, heads: int, seed: int) -> tuple[int, ...]:
    """At most ``rows`` positions, ascending.

    Up to five eighths are the first and the last one, 2**29 if there is one, and ends and starts of segments of branches.
    The others are random by the seed. Few positions belong to a branch with a large rate. So each of the others is moved to
    a row of a random head in a branch, and the branches take turns.
    """
    chosen = [0, tokens - 1, _SPECIAL]
    for w, r in reversed(branches):
        last_head = (heads - 1) % r
        for end in (tokens // w * w, w):
            chosen += [end - r + last_head, end]  # the last row of a head in a segment sees all of its rows
    positions = [p for p in dict.fromkeys(chosen) if 0 <= p < tokens][: max(2, rows * 5 // 8)]
    count = min(rows, tokens)
    found = dict.fromkeys(positions[:count])
    counter = 0
    while len(found) < count:
        high, low, head = (word(seed, CHOICE, 3 * counter + i) for i in range(3))
        position = (high << 32 | low) % tokens
        w, r = branches[counter % len(branches)]
        own = position - position % w % r + head % heads % r
        # After many attempts every position is as good as another one, so that short streams end too.
        found[own if own < min(tokens, position // w * w + w) and counter < 4 * rows else position] = None
        counter += 1
    return tuple(sorted(found))


def head_keys(position: int, head: int, branches: Branches) -> Tensor:
    """The positions of the keys of a row of a head, int64; a key that it meets in two branches is there twice.

    >>> head_keys(9, 1, [(4, 1), (16, 4)]).tolist()
    [8, 9, 1, 5, 9]
    """
    found = []
    for w, r in branches:
        offset = head % r
        if position % w % r == offset:
            found.append(torch.arange(position // w * w + offset, position + 1, r, device="cpu"))
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")


def check_row(out: Tensor, position: int, branches: Branches, seed: int, limit: float) -> CheckedRow:
    """Compare the results ``out`` (H, D) of a position with the definition.

    The error of a head is the norm of the difference, divided by the expected norm of the result. Values are random with
    mean 0. So the latter is the root of the sum of the squared norms of the terms ``weight * value``.
    """
    heads, d = shape = out.shape[0], out.shape[1]
    here, actual = torch.tensor([position], device="cpu"), out.to("cpu", torch.float64)
    errors, most = [], 0
    for head in range(heads):
        keys = head_keys(position, head, branches)
        most = max(most, len(keys))
        query = head_rows(seed, QUERY, here, head, shape)[0]
        scores = head_rows(seed, KEY, keys, head, shape) @ query * d**-0.5
        terms = scores.softmax(0).unsqueeze(-1) * head_rows(seed, VALUE, keys, head, shape)
        difference = (actual[head] - terms.sum(0)).norm()
        errors.append(float(difference / terms.norm() if len(keys) else difference))
    error = max(errors, key=lambda x: (x != x, x))  # NaN is the largest
    return CheckedRow(position, error, most, error <= limit)

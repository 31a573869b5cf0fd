"""``lengths``, ``starts`` and ``cu_seqlens``: as users pass them, as tensors, and as integers on the host."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

Lengths = Tensor | Sequence[int]


def index_tensor(name: str, x: Lengths | None) -> Tensor | None:
    """The tensor that the user passed, or a tensor on the CPU with the integers of a list or tuple.

    >>> index_tensor("lengths", (5, 3))
    tensor([5, 3])
    """
    if x is None or isinstance(x, Tensor):
        return x
    try:
        values = [index(value) for value in x]
    except TypeError:
        raise TypeError(f"{name} must be integers, as a tensor, a tuple or a list, got {x!r}") from None
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _check_values(name: str, x: Tensor) -> None:
    if x.is_meta:
        raise ValueError(f"{name} must have values to plan with, got a tensor on the meta device; pass a list of integers")


def few(values: Sequence[int]) -> str:
    """The values, or the first of them, for a message."""
    return str([*values]) if len(values) <= 16 else f"{[*values[:16]]} and {len(values) - 16} more"


def host_lengths(lengths: Tensor | None, m: int, n: int | None = None) -> tuple[int, ...] | None:
    """The lengths as integers, checked for ``m`` keys and ``n`` queries. Reading a tensor on a GPU synchronises with it."""
    if lengths is None:
        return None
    _check_values("lengths", lengths)
    values = [int(x) for x in lengths.tolist()]
    if values and (min(values) < 0 or max(values) > m):
        raise ValueError(f"lengths must lie between 0 and the {m} positions of the sequence, got {few(values)}")
    if values and n is not None and n < m and min(values) < m:
        raise ValueError(
            f"fewer queries than keys are the last positions of the keys, so samples cannot be shorter than the {m} keys: "
            f"got {n} queries and lengths {few(values)}; call once for each sample, with key[b:b+1, "
            ":length], or put the padding in front of samples and pass starts"
        )
    return tuple(values)


def host_samples(
    starts: Tensor | None, lengths: Tensor | None, m: int, n: int | None = None
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Starts and lengths as integers, checked for ``m`` keys and ``n`` queries. Samples with starts have lengths.

    >>> host_samples(torch.tensor([4, 0]), None, m=9)
    ((4, 0), (5, 9))
    """
    if starts is None:
        return None, host_lengths(lengths, m, n)
    _check_values("starts", starts)
    first = tuple(int(x) for x in starts.tolist())
    if first and (min(first) < 0 or max(first) > m):
        raise ValueError(f"starts must lie between 0 and the {m} positions of the sequence, got {few(first)}")
    if lengths is None:
        return first, tuple(m - start for start in first)
    values = host_lengths(lengths, m) or ()
    if any(start + length > m for start, length in zip(first, values, strict=True)):
        raise ValueError(
            f"sample b is the key rows starts[b] to starts[b] + lengths[b] - 1, so their sum can be at most the {m} keys: "
            f"got starts {few(first)} and lengths {few(values)}; leave out lengths if samples go to the end of the rows"
        )
    return first, values


def host_cu_seqlens(cu_seqlens: Tensor | None, m: int) -> tuple[int, ...] | None:
    """The document boundaries as integers, checked. Reading a tensor on a GPU synchronises with it."""
    if cu_seqlens is None:
        return None
    _check_values("cu_seqlens", cu_seqlens)
    values = [int(x) for x in cu_seqlens.tolist()]
    if values != sorted(values) or values[0] != 0 or values[-1] != m:
        raise ValueError(
            f"cu_seqlens must rise from 0 to the {m} positions of the sequence (document d is rows cu_seqlens[d] to "
            f"cu_seqlens[d + 1]), got {few(values)}"
        )
    return tuple(values)

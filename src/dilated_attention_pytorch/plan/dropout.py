"""Which attention weights dropout keeps: a hash of the seed and of global numbers, the same in every backend.

All arithmetic is modulo 2**32 on integers held in int64, so that it can be written in any kernel language. A pair is
kept if ``word(seed, b, h, branch, i, j) >= floor(p * 2**32)``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

_MASK = 0xFFFFFFFF


def mix(x: Any) -> Any:
    """The 32-bit finaliser of MurmurHash3: every input bit reaches every output bit.

    >>> hex(mix(1))
    '0x514e28b7'
    """
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def words(seed: Any, sample: Any, head: Any, branch: int, i: Any, j: Any) -> Any:
    """One 32-bit word per pair; every argument may be an integer or a tensor, broadcast against the others.

    ``i`` and ``j`` are positions in the row of tokens as the caller passed it, ``head`` is the query head.
    """
    stream = mix(mix(seed & _MASK) + ((seed >> 32) & _MASK))
    stream = mix(mix(mix(stream + sample) + head) + branch)
    # A row has two words, so that rows of different heads with the same first word drop different keys.
    row = mix(stream + (i * 0x9E3779B1 & _MASK))
    other = mix(stream ^ 0x7F4A7C15) + (i * 0x2C1B3C6D & _MASK)
    # The rest is computed for every pair, so it decides about the speed of kernels.
    x = row ^ (j * 0x85157AF5 & _MASK)
    x = ((x ^ (x >> 16)) * 0x85EBCA6B + other) & _MASK
    return ((x ^ (x >> 15)) * 0xC2B2AE35) & _MASK


def threshold(p: float) -> int:
    """Pairs whose word is below this are dropped."""
    return int(p * 2**32)


@dataclass(frozen=True, slots=True)
class Dropout:
    """The dropout of a call, and the first sample, row and head of the tensors in the caller's batch."""

    p: float
    seed: Any  # an integer, or a tensor of one
    first_sample: int = 0
    first_row: int = 0
    first_head: int = 0

    def at(self, first_sample: int, first_row: int, first_head: int = 0) -> Dropout:
        """The same for tensors that start at this sample, row and query head."""
        return replace(self, first_sample=first_sample, first_row=first_row, first_head=first_head)

    def factors(self, sample: Any, head: Any, branch: int, i: Any, j: Any) -> Any:
        """The factors of the weights of pairs, in float64: ``1 / (1 - p)`` for a pair that is kept, otherwise 0."""
        sample, head = sample + self.first_sample, head + self.first_head
        word = words(self.seed, sample, head, branch, i + self.first_row, j + self.first_row)
        return (word >= threshold(self.p)).double() / (1.0 - self.p)

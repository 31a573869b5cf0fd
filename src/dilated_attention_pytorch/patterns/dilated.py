"""Dilated patterns: which positions meet. They are frozen and hashable, and independent of torch, length and device.

All formulas use ``//``, ``%`` and comparisons only, so that a position may be a Python integer, a NumPy array or a torch
tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

_MOST = 2**40  # more positions than any tensor has; products with strides fit 64 bits
OFFSET_RULES = ("interleaved", "blocked")


def _integers(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, str | bytes | set | frozenset | dict) or not hasattr(values, "__iter__"):
        example = "'interleaved', 'blocked' or [0, 1, 2, 3]" if name == "offsets" else "[2048, 4096]"
        raise TypeError(f"{name} must be a list of integers, got {values!r}; write for example {name}={example}")
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise TypeError(f"{name} must hold integers only, got {values!r}") from None


@dataclass(frozen=True, slots=True)
class Dilated:
    """LongNet's dilated attention: branches ``(w, r)`` of segment length and dilation rate.

    In a branch, key head ``g`` has the rows ``i`` with ``(i mod w) mod r == o``, where ``o = offset(g, G, r)``. Two of
    these rows meet if they are in the same segment (``i // w == j // w``). The multiplicity of a pair is the number of
    branches in which it meets. Attention is one softmax over all pairs, weighted by their multiplicity.

    ``offsets`` is ``"interleaved"`` (the paper: ``g mod r``), ``"blocked"`` (the authors' code: ``g // ceil(G / r)``) or
    one integer per key head. The integer is taken modulo the rate of each branch.

    ``torchscale_padding=True`` reproduces checkpoints that were trained with the authors' code, which pads segments with
    zero keys if it is not causal. Their effect on the softmax is computed; no tensor is padded.

    >>> pattern = Dilated([4, 8], [1, 2])
    >>> [pattern.multiplicity(2, j, key_head=0, key_heads=2) for j in range(8)]
    [2, 1, 2, 1, 1, 0, 1, 0]
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    offsets: str | tuple[int, ...] = "interleaved"
    torchscale_padding: bool = False
    # The pattern as one string, for operator schemas and result files; ``from_spec`` reads it back.
    spec: str = field(init=False, compare=False, repr=False)

    def __init__(
        self, segment_lengths: Sequence[int], dilation_rates: Sequence[int], offsets: str | Sequence[int] = "interleaved",
        torchscale_padding: bool = False,
    ) -> None:  # fmt: skip
        assign = object.__setattr__
        assign(self, "segment_lengths", _integers("segment_lengths", segment_lengths))
        assign(self, "dilation_rates", _integers("dilation_rates", dilation_rates))
        assign(self, "offsets", offsets if isinstance(offsets, str) else _integers("offsets", offsets))
        assign(self, "torchscale_padding", torchscale_padding)
        self._validate()
        values = (self.segment_lengths, self.dilation_rates, self.offsets)
        texts = (x if isinstance(x, str) else ",".join(map(str, x)) for x in values)
        assign(self, "spec", "|".join(("dilated", *texts, "torchscale_padding" if torchscale_padding else "")))

    def _validate(self) -> None:
        lengths, rates = self.segment_lengths, self.dilation_rates
        if len(lengths) != len(rates) or not lengths:
            raise ValueError(
                "segment_lengths and dilation_rates describe branches pairwise and need the same number of entries, at "
                f"least one: got {len(lengths)} segment lengths {lengths} and {len(rates)} rates {rates}"
            )
        for name, values in (("segment_lengths", lengths), ("dilation_rates", rates)):
            if min(values) < 1:
                raise ValueError(f"{name} must be positive, got {values}; dense attention is segment length N with rate 1")
            if max(values) > _MOST:
                raise ValueError(f"{name} must be at most 2**40, got {values}; the sequence's length makes one segment")
        if not isinstance(self.torchscale_padding, bool):
            raise TypeError(f"torchscale_padding must be True or False, got {self.torchscale_padding!r}")
        if isinstance(self.offsets, str):
            if self.offsets not in OFFSET_RULES:
                raise ValueError(f"offsets must be one of {OFFSET_RULES} or one integer per key head, got {self.offsets!r}")
        elif not all(0 <= offset < max(rates) for offset in self.offsets) or not self.offsets:
            raise ValueError(
                f"explicit offsets must hold one integer per key head with 0 <= offset < {max(rates)} (the largest rate; "
                f"each branch takes them modulo its own rate), got {self.offsets}"
            )

    def without_padding(self) -> Dilated:
        """The same pattern by the definition, without the zero keys of ``torchscale_padding``."""
        return Dilated(self.segment_lengths, self.dilation_rates, self.offsets)

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """The pairs (segment length, dilation rate)."""
        return tuple(zip(self.segment_lengths, self.dilation_rates, strict=True))

    def check_key_heads(self, key_heads: int) -> None:
        """Raise if the pattern cannot serve this number of key heads."""
        if not isinstance(self.offsets, str) and len(self.offsets) != key_heads:
            raise ValueError(
                f"explicit offsets need one integer per key head: got {len(self.offsets)} offsets {self.offsets} for "
                f"{key_heads} key heads; use offsets='interleaved' for a pattern that fits any number"
            )

    def offset(self, key_head: int, key_heads: int, rate: int) -> int:
        """The first row, within each segment, of a key head in a branch of this rate."""
        if self.offsets == "interleaved":
            return key_head % rate
        if self.offsets == "blocked":
            return key_head // -(-key_heads // rate)
        return int(self.offsets[key_head]) % rate

    def meets(self, branch: int, i: Any, j: Any, *, key_head: int, key_heads: int) -> Any:
        """Whether positions ``i`` and ``j`` meet in one branch (causality not considered)."""
        w, r = self.branches[branch]
        o = self.offset(key_head, key_heads, r)
        return (i // w == j // w) & (i % w % r == o) & (j % w % r == o)

    def multiplicity(self, i: Any, j: Any, *, key_head: int, key_heads: int, is_causal: bool = False) -> Any:
        """The number of branches in which ``i`` and ``j`` meet. With ``is_causal``, it is 0 for ``j > i``."""
        met = (self.meets(b, i, j, key_head=key_head, key_heads=key_heads) for b in range(len(self.branches)))
        count: Any = sum(x * 1 for x in met)
        return count * (j <= i) if is_causal else count

    def zero_keys(self, branch: int, i: Any, length: int, *, key_head: int, key_heads: int) -> Any:
        """The number of zero keys that position ``i`` sees in one branch of a sequence of this length.

        The authors' code pads every segment to ``ceil(S / r) * r`` rows with ``S = min(w, length)``. A head sees the padded
        rows at its own offset.
        """
        w, r = self.branches[branch]
        o = self.offset(key_head, key_heads, r)
        padded_rows = -(-min(w, length) // r)  # rows of this head after padding
        first = i // w * w
        # The real rows of the segment are min(w, length - first). This form also works for arrays.
        real = w - (first + w - length) * (first + w > length)
        own_rows = (real - o + r - 1) // r
        missing = padded_rows - own_rows * (own_rows > 0)
        return missing * (missing > 0) * (i % w % r == o)

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_spec(spec: str) -> Dilated:
        """The pattern that ``spec`` describes: lengths, rates, offsets and padding.

        >>> Dilated([4, 8], [1, 2], offsets=[0, 1]).spec
        'dilated|4,8|1,2|0,1|'
        """
        _, *texts, padding = spec.split("|")
        values: list[Any] = [x if x in OFFSET_RULES else [int(number) for number in x.split(",")] for x in texts]
        lengths, rates, offsets = values
        return Dilated(lengths, rates, offsets, padding == "torchscale_padding")

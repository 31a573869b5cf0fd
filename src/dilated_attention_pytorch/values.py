"""The tensors and options that travel together through a call.

Shape letters, in all files: B batch, N query rows, M key rows, H query heads, G key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dilated_attention_pytorch.plan.dropout import Dropout


class Inputs(NamedTuple):
    """Query, key and value, or their gradients."""

    query: Tensor  # (B, N, H, D)
    key: Tensor  # (B, M, G, D)
    value: Tensor  # (B, M, G, D)

    def rows_contiguous(self) -> Inputs:
        """Kernels read rows of D consecutive elements; tensors with other strides are copied."""
        return Inputs(rows_contiguous(self.query), rows_contiguous(self.key), rows_contiguous(self.value))


class Results(NamedTuple):
    """The output and the logarithm of the softmax denominators."""

    out: Tensor  # (B, N, H, D)
    lse: Tensor  # (B, H, N), natural logarithm, float32 or float64


class Saved(NamedTuple):
    """What a backward reads besides the inputs: the results and their gradients."""

    out: Tensor  # (B, N, H, D)
    lse: Tensor  # (B, H, N)
    dout: Tensor  # (B, N, H, D)
    dlse: Tensor | None = None  # (B, H, N); None if the caller did not use lse


class RowOrder(NamedTuple):
    """An order by which a backend sorts rows itself: a row sees only rows of no larger position."""

    positions: Tensor  # (N,) or (B, N): the original position at each place of the ordered sequence
    moved: bool  # the rows of the call are at their original positions, else at their places


@dataclass(frozen=True, slots=True)
class Options:
    """What a backend has to know about a call besides its problem."""

    scale: float
    dropout: Dropout | None = None
    positions: Tensor | None = None  # (B, N) int32: a row sees only rows of no larger position (causal under an order)
    order: RowOrder | None = None  # the same, for a backend that sorts rows itself
    places: Tensor | None = None  # (B, G, N) int32: what dropout counts, by head, instead of the rows of the tensors
    detach_mixing: bool = False  # the mixing weights of branches are constants in the backward
    chosen: Tensor | None = None  # (B, H, query blocks, width) int32: the key blocks that an adaptive pattern chose


def rows_contiguous(x: Tensor) -> Tensor:
    """The same tensor with consecutive elements in a row."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()

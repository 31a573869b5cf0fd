"""The algebra of partial attention results ``(out, lse)``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def merge_lse(lse: Tensor, partial_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The weight of the second of two sums of exponentials, and the logarithm of both together.

    On a CPU, ``sigmoid`` and ``logaddexp`` compute the last elements of a tensor with other instructions. So the bits of a
    sample would depend on how many samples there are. ``logsigmoid`` has the same bits everywhere.

    >>> merge_lse(torch.tensor([0.0, 2.0]), torch.tensor([0.0, -torch.inf]))
    (tensor([0.5000, 0.0000]), tensor([0.6931, 2.0000]))
    """
    # The difference of two -inf would be NaN. A partial result of lse -inf has weight 0.
    difference = partial_lse - lse.clamp_min(torch.finfo(lse.dtype).min)
    weight = logsigmoid(difference).exp_()
    return weight, torch.maximum(lse, partial_lse) - logsigmoid(difference.abs_())


def merge_(out: Tensor, lse: Tensor, partial_out: Tensor, partial_lse: Tensor) -> None:
    """Merge a partial result into ``(out, lse)`` in place; ``out`` has one more, last dimension than ``lse``.

    Two partial softmaxes over disjoint sets of keys merge exactly: with ``a = sigmoid(lse2 - lse1)`` the result is
    ``(out1 + a * (out2 - out1), logaddexp(lse1, lse2))``. The neutral element is ``(0, -inf)``.

    >>> out, lse = torch.zeros(1, 2), torch.tensor([-torch.inf])
    >>> merge_(out, lse, torch.tensor([[1.0, 2.0]]), torch.tensor([0.5])); out, lse
    (tensor([[1., 2.]]), tensor([0.5000]))
    """
    weight, total = merge_lse(lse, partial_lse)
    out.lerp_(partial_out.to(out.dtype), weight.to(out.dtype).unsqueeze(-1))
    lse.copy_(total)

"""The algebra of partial attention results ``(out, lse)``."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, partial_out: Tensor, partial_lse: Tensor) -> None:
    """Merge a partial result into ``(out, lse)`` in place; ``out`` has one more, last dimension than ``lse``.

    Two partial softmaxes over disjoint sets of keys merge exactly: with ``a = sigmoid(lse2 - lse1)`` the result is
    ``(out1 + a * (out2 - out1), logaddexp(lse1, lse2))``. The neutral element is ``(0, -inf)``.

    >>> out, lse = torch.zeros(1, 2), torch.tensor([-torch.inf])
    >>> merge_(out, lse, torch.tensor([[1.0, 2.0]]), torch.tensor([0.5])); out, lse
    (tensor([[1., 2.]]), tensor([0.5000]))
    """
    # The difference of two -inf would be NaN. A partial result of lse -inf has weight 0.
    weight = (partial_lse - lse.clamp_min(torch.finfo(lse.dtype).min)).sigmoid_()
    out.lerp_(partial_out.to(out.dtype), weight.to(out.dtype).unsqueeze(-1))
    torch.logaddexp(lse, partial_lse, out=lse)

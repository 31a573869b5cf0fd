"""The algebra of partial attention results ``(out, lse)``.

Two partial softmaxes over disjoint sets of keys merge exactly: with ``a = sigmoid(lse2 - lse1)`` the result is
``(out1 + a * (out2 - out1), logaddexp(lse1, lse2))``. The neutral element is ``(0, -inf)``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which partial results are merged, and of lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into ``(out, lse)`` in place; ``out`` has one more, last dimension than ``lse``.

    >>> out, lse = torch.zeros(1, 2), torch.tensor([-torch.inf])
    >>> merge_(out, lse, torch.tensor([[1.0, 2.0]]), torch.tensor([0.5])); out, lse
    (tensor([[1., 2.]]), tensor([0.5000]))
    """
    weight = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0)
    out.lerp_(part_out.to(out.dtype), weight.to(out.dtype).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))

"""Operators under ``torch.vmap``: the entries of the mapped dimension become samples of one larger batch.

A call over S entries of the mapped dimension with B samples each is one call with S * B samples. Where an argument does not
permit that, the operator runs once per entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class BatchRule(NamedTuple):
    """How an argument of an operator depends on the samples of the batch."""

    dims: int = 0  # of a tensor whose first dimension is samples; 0 if there is no such dimension
    one_serves_all: bool = False  # the first dimension may be 1 for any number of samples
    by_number: bool = False  # the effect depends on the number of a sample, so batches cannot be joined

    def joins(self, mapped: bool, x: Any) -> bool:
        """Whether the argument permits one call for all entries."""
        if self.by_number:
            return x is None
        # A mapped tensor may lack the dimension of samples: each entry then serves its own samples.
        return not mapped or (self.dims > 0 and x.dim() - 1 in (self.dims, self.dims - 1))

    def joined(self, mapped: bool, x: Any, size: int, batch: int) -> Any:
        """The argument for ``size`` entries of ``batch`` samples; a mapped dimension is the first one."""
        if not isinstance(x, Tensor) or self.dims == 0:
            return x
        has_samples = x.dim() - int(mapped) == self.dims
        if not mapped:
            if not has_samples or (self.one_serves_all and x.shape[0] == 1):
                return x
            x = x.unsqueeze(0)
        elif not has_samples:
            x = x.unsqueeze(1)
        return x.expand(size, batch, *x.shape[2:]).flatten(0, 1)


def map_operator(
    call: Callable[..., Any], rules: Sequence[BatchRule], size: int, dims: Sequence[int | None], inputs: Sequence[Any]
) -> tuple[Any, Any]:
    """The results of all ``size`` entries with their mapped dimensions, as a rule of vmap returns them.

    ``dims`` holds the mapped dimension of each input, or None. The first input has a dimension of samples.
    """
    mapped = [dim is not None for dim in dims]
    leading = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(inputs, dims, strict=True)]
    arguments = list(zip(rules, mapped, leading, strict=True))
    if all(rule.joins(is_mapped, x) for rule, is_mapped, x in arguments):
        batch = leading[0].shape[1 if mapped[0] else 0]
        results = call(*(rule.joined(is_mapped, x, size, batch) for rule, is_mapped, x in arguments))
        if isinstance(results, Tensor):
            return results.reshape(size, batch, *results.shape[1:]), 0
        return tuple(x.reshape(size, batch, *x.shape[1:]) for x in results), (0,) * len(results)
    entries = [call(*(x[s] if is_mapped else x for _, is_mapped, x in arguments)) for s in range(size)]
    if isinstance(entries[0], Tensor):
        return torch.stack(entries), 0
    results = tuple(torch.stack(own) for own in zip(*entries, strict=True))
    return results, (0,) * len(results)

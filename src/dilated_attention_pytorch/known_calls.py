"""Calls of sizes that were made before: their backend and the arguments of their operator.

Most programs call attention again and again with tensors of the same sizes. Checking the arguments, choosing a backend and
collecting the arguments of the operator is then a third of what a small call costs on the host. All of it is decided by the
sizes and types of the tensors and by a few options: the kind of the call. A call with further options has no kind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dilated_attention_pytorch.operators import OperatorArguments
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.values import Inputs

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
Kind = tuple[Any, ...]


def kind_of(inputs: Inputs, pattern: Any, is_causal: Any, scale: Any, mixing_gradient: Any, backend: Any) -> Kind | None:
    """What decides everything about a call without further options and dropout; None if it is not of this kind.

    Types are compared exactly: ``1`` and ``True`` are equal, but only one of them is accepted.
    """
    if type(pattern) is not Dilated or type(is_causal) is not bool or type(scale) not in (float, type(None)):
        return None
    if type(mixing_gradient) is not str or type(backend) is not str or torch.compiler.is_compiling():
        return None
    if forward_ad._current_level >= 0:
        return None
    kind: list[Any] = [pattern, is_causal, scale, mixing_gradient, backend]
    for x in inputs:
        if type(x) not in _PLAIN_TYPES or x.is_nested or x.layout is not torch.strided:
            return None
        kind += (x.shape, x.dtype, x.device)
    device = inputs.query.device.type
    if device == "meta" or torch.is_autocast_enabled(device):
        return None
    return tuple(kind)


class _KnownCalls:
    """Arguments of the operator by the kind of a call. The oldest goes when a new one finds no room."""

    def __init__(self, maxsize: int) -> None:
        self.maxsize = maxsize
        self._arguments: dict[Kind, OperatorArguments] = {}

    def __len__(self) -> int:
        return len(self._arguments)

    def find(self, kind: Kind) -> OperatorArguments | None:
        """The arguments of an equal call."""
        return self._arguments.get(kind)

    def keep(self, kind: Kind, arguments: OperatorArguments) -> None:
        """Keep the arguments of a call that has passed all checks."""
        if len(self._arguments) >= self.maxsize:
            self._arguments.pop(next(iter(self._arguments)), None)
        self._arguments[kind] = arguments

    def cache_clear(self) -> None:
        """Forget all calls."""
        self._arguments.clear()


known_calls = _KnownCalls(maxsize=256)

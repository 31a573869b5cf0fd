"""Backends that run the execution loop over a tile kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.execute import loop
from dilated_attention_pytorch.execute.loop import TileKernel
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import Inputs, Options, Results, Saved


@dataclass(frozen=True)
class StockBackend:
    """A tile kernel, chosen by the request, inside the execution loop."""

    name: str
    why_not: Callable[[Request], list[str]]
    kernel: Callable[[Request], TileKernel]

    def kernel_name(self, request: Request) -> str:
        """What computes the tiles of a request."""
        return self.kernel(request).name

    def forward(self, problem: Problem, inputs: Inputs, options: Options) -> Results:
        """The attention of a problem."""
        return loop.forward(problem, inputs, options, self.kernel(Request.like(inputs.query)))

    def backward(self, problem: Problem, inputs: Inputs, saved: Saved, options: Options) -> Inputs:
        """The gradients of query, key and value, given the merged results."""
        return loop.backward(problem, inputs, saved, options, self.kernel(Request.like(inputs.query)))

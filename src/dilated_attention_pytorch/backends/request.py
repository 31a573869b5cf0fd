"""Requests, by which a backend says whether it can serve a call; what backends have in common; those of stock kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.targets import Target, capability_of
from dilated_attention_pytorch.call import Call
from dilated_attention_pytorch.execute import loop
from dilated_attention_pytorch.execute.loop import TileKernel
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import Inputs, Options, Results, Saved


@dataclass(frozen=True, slots=True)
class Request:
    """The properties of a call that do not depend on the length, so that one compiled graph serves all lengths."""

    device: str  # "cpu", "cuda", ...
    capability: tuple[int, int]  # of a CUDA device, else (0, 0)
    dtype: torch.dtype
    head_dim: int
    dropout_p: float = 0.0
    masks_by_position: bool = False  # causal under an order
    block_size: int | None = None  # of a block-sparse pattern
    square: bool = True  # of a block-sparse pattern: as many queries as keys
    described: bool = False  # the device is described, so what this machine has installed does not count

    @staticmethod
    def of(call: Call, target: Target | None = None) -> Request:
        """The request of a call, on the device of its tensors or on another one."""
        blocks = call.pattern if isinstance(call.pattern, BlockSparse) else None
        target = Target(call.device, capability_of(call.device)) if target is None else target
        return Request(
            device=target.device.type, capability=target.capability, dtype=call.dtype, head_dim=call.head_dim,
            dropout_p=call.dropout_p, masks_by_position=call.masks_by_position,
            block_size=None if blocks is None else blocks.block_size,
            square=blocks is None or call.queries == call.keys, described=target.described,
        )  # fmt: skip

    @staticmethod
    def like(query: Tensor) -> Request:
        """The request of tiles of this query tensor, by which a stock kernel is chosen."""
        return Request(query.device.type, capability_of(query.device), query.dtype, query.shape[-1])


class Backend(Protocol):
    """One way to compute attention. ``backends.find`` gives the object of a name."""

    @property
    def name(self) -> str:
        """The name by which ``attention(backend=...)`` asks for it."""

    def why_not(self, request: Request, /) -> list[str]:
        """The reasons why the backend cannot serve a request; an empty list if it can."""

    def kernel_name(self, request: Request) -> str:
        """What computes the tiles of a request, for ``explain``."""

    def forward(self, problem: Problem, inputs: Inputs, options: Options) -> Results:
        """The attention of a problem."""

    def backward(self, problem: Problem, inputs: Inputs, saved: Saved, options: Options) -> Inputs:
        """The gradients of query, key and value, given the merged results."""


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


DROPOUT_REASON = (
    "dropout is not supported (dropout_p = {p}); use backend='triton' on a GPU, backend='eager' elsewhere, or dropout_p=0"
)
ORDER_REASON = (
    "is_causal under an order masks pairs by their original positions, which this backend cannot; use backend='eager', or "
    "for a Dilated pattern on a GPU backend='auto'"
)

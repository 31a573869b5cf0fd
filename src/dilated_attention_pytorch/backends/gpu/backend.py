"""What the two backends over tables share: the choice between launch tables and block lists, and detached mixing.

Importing this module does not import triton. Rows of all tensors have consecutive elements.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import Inputs, Options, Results, Upstream


class TableKernels(Protocol):
    """A module that launches kernels over one kind of tables."""

    def forward(self, problem: Problem, inputs: Inputs, options: Options, out: Tensor | None = None) -> Results:
        """The attention of a problem, written to ``out`` if it is given."""

    def backward(
        self, problem: Problem, inputs: Inputs, results: Results, upstream: Upstream, options: Options,
        grads: Inputs | None = None,
    ) -> Inputs:  # fmt: skip
        """The gradients of query, key and value, written to ``grads`` if these are given."""


class TableBackend:
    """A backend whose kernels read launch tables for dilated patterns and block lists for block-sparse ones."""

    name: str
    kernels_are: str  # for explain

    def kernels(self, *, dilated: bool) -> TableKernels:
        """The kernels over launch tables, or over block lists. Importing them imports triton."""
        raise NotImplementedError

    def kernel_name(self, request: Request) -> str:
        """What computes the tiles of a request."""
        return f"{self.kernels_are} kernels over {'launch tables' if request.block_size is None else 'block lists'}"

    def forward(self, problem: Problem, inputs: Inputs, options: Options, out: Tensor | None = None) -> Results:
        """The attention of a problem.

        ``out`` is written if it is given: contiguous, of any floating-point type. Rows that no tile has do not change.
        """
        kernels = self.kernels(dilated=isinstance(problem.pattern, Dilated))
        with torch.cuda.device_of(inputs.query):  # type: ignore[no-untyped-call]  # Triton launches on the current device
            return kernels.forward(problem, inputs, options, out)

    def backward(
        self, problem: Problem, inputs: Inputs, results: Results, upstream: Upstream, options: Options,
        grads: Inputs | None = None,
    ) -> Inputs:  # fmt: skip
        """The gradients of query, key and value, given the merged results; written to ``grads`` if these are given."""
        dilated = isinstance(problem.pattern, Dilated)
        kernels = self.kernels(dilated=dilated)
        with torch.cuda.device_of(inputs.query):  # type: ignore[no-untyped-call]
            if dilated and options.detach_mixing and len(problem.dilated.branches) > 1:
                assert grads is None, "the gradients of branches are summed in memory of their own"
                return _detached_gradients(kernels, problem, inputs, results, upstream, options)
            return kernels.backward(problem, inputs, results, upstream, options, grads)


def _detached_gradients(
    kernels: TableKernels, problem: Problem, inputs: Inputs, results: Results, upstream: Upstream, options: Options
) -> Inputs:
    """The gradients with constant mixing weights: delta comes from the output of each branch, which is computed again."""
    sums: list[Tensor] = []
    for branch in range(len(problem.dilated.branches)):
        one = problem.of_branch(branch)
        own = Results(kernels.forward(one, inputs, options).out, results.lse)
        grads = kernels.backward(one, inputs, own, upstream, options)
        sums = [x + y.float() for x, y in zip(sums, grads, strict=True)] if sums else [y.float() for y in grads]
    return Inputs(*(x.to(inputs.query.dtype) for x in sums))

"""What the two backends over tables share: the choice between launch tables and block lists, and detached mixing.

Importing this module does not import triton. Rows of all tensors have consecutive elements.
"""

from __future__ import annotations

from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import Inputs, Options, Results, Saved

if TYPE_CHECKING:
    from dilated_attention_pytorch.backends.gpu.portable import RowStatistics  # it imports triton


class TableBackend:
    """A backend whose kernels read launch tables for dilated patterns and block lists for block-sparse ones."""

    name: str
    kernels_are: str  # for explain

    def __init__(self) -> None:
        self._trained: set[tuple[object, ...]] = set()  # kinds of calls whose backward was compiled beside their forward

    def kernels(self, *, dilated: bool) -> ModuleType:
        """The module with ``forward`` and ``backward`` over launch tables, or over block lists. It imports triton."""
        raise NotImplementedError

    def kernel_name(self, request: Request) -> str:
        """What computes the tiles of a request."""
        return f"{self.kernels_are} kernels over {'launch tables' if request.block_size is None else 'block lists'}"

    def forward(self, problem: Problem, inputs: Inputs, options: Options, given: Results | None = None) -> Results:
        """The attention of a problem.

        ``given`` results are written if there are any: both contiguous, ``out`` of any floating-point type, ``lse`` in
        float32. Rows that no tile has do not change. The tiles of a ``RunningProblem`` are merged into given results.
        """
        # A leaf requires gradients under torch.no_grad() too. The output of an operation does not: a backward may follow.
        if given is None and inputs.query.is_cuda and any(x.requires_grad and not x.is_leaf for x in inputs):
            self.compile_for_training(problem, inputs, options)
        return self._forward(problem, inputs, options, given)

    def _forward(self, problem: Problem, inputs: Inputs, options: Options, given: Results | None) -> Results:
        with torch.cuda.device_of(inputs.query):  # type: ignore[no-untyped-call]  # Triton launches on the current device
            if given is None and _is_last_row(problem, options):
                from dilated_attention_pytorch.backends.gpu import decoding  # it imports triton

                return decoding.last_row(problem.dilated, inputs, options.scale)
            kernels = self.kernels(dilated=isinstance(problem.pattern, Dilated))
            if options.order is not None:
                from dilated_attention_pytorch.backends.gpu import sorted_rows  # it imports triton

                return sorted_rows.forward(kernels, problem, inputs, options)
            results: Results = kernels.forward(problem, inputs, options, given)
        return results

    def backward(
        self, problem: Problem, inputs: Inputs, saved: Saved, options: Options, grads: Inputs | None = None
    ) -> Inputs:
        """The gradients of query, key and value, given the merged results; written to ``grads`` if these are given."""
        dilated = isinstance(problem.pattern, Dilated)
        kernels = self.kernels(dilated=dilated)
        with torch.cuda.device_of(inputs.query):  # type: ignore[no-untyped-call]
            if options.order is not None:
                from dilated_attention_pytorch.backends.gpu import sorted_rows  # it imports triton

                return sorted_rows.backward(kernels, problem, inputs, saved, options)
            statistics: RowStatistics
            if dilated and options.detach_mixing and len(problem.dilated.branches) > 1:
                statistics = _statistics_by_branch(kernels, problem, inputs, saved, options)
            else:
                statistics = kernels.row_statistics(saved, options)
            found: Inputs = kernels.gradients(problem, inputs, saved.dout, statistics, options, grads)
        return found

    def compile_for_training(self, problem: Problem, inputs: Inputs, options: Options) -> None:
        """Compile the backward beside the forward, at the first of the calls that use the same kernels.

        Side by side they take as long as the slowest of them. The first backward would compile its own after that. It does
        so if there is not enough memory for gradients now.
        """
        query, pattern = inputs.query, problem.pattern
        sizes = type(pattern), query.dtype, query.shape[-1], problem.heads_per_key == 1, problem.is_causal
        extras = options.dropout is None, options.order is None, options.detach_mixing
        branches = len(pattern.branches) if isinstance(pattern, Dilated) else 1
        kind = (*sizes, *extras, min(2, branches) if options.order is None else branches)
        if kind in self._trained or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        self._trained.add(kind)
        with suppress(torch.OutOfMemoryError):
            self.compile(problem, inputs, options)

    def compile(
        self, problem: Problem, inputs: Inputs, options: Options, *, backward: bool = True, uses_lse: bool = False
    ) -> None:
        """Compile the kernels of a forward, and of a backward, side by side. None of them runs.

        ``uses_lse``: the backward has a gradient of lse as well.
        """
        from dilated_attention_pytorch.backends.gpu.launch import compile_side_by_side  # it imports triton

        def both() -> None:
            out, lse = self._forward(problem, inputs, options, None)
            if backward:
                saved = Saved(out, lse, torch.empty_like(out), torch.empty_like(lse) if uses_lse else None)
                self.backward(problem, inputs, saved, options)

        compile_side_by_side(both)

    def row_statistics(self, problem: Problem, saved: Saved, options: Options) -> RowStatistics:
        """What the backward reads of each query row, for several calls of ``gradients`` with the same queries."""
        kernels = self.kernels(dilated=isinstance(problem.pattern, Dilated))
        with torch.cuda.device_of(saved.out):  # type: ignore[no-untyped-call]
            statistics: RowStatistics = kernels.row_statistics(saved, options)
        return statistics

    def gradients(
        self, problem: Problem, inputs: Inputs, dout: Tensor, statistics: RowStatistics, options: Options,
        grads: Inputs | None = None,
    ) -> Inputs:  # fmt: skip
        """``backward`` with statistics. The gradients of a ``RunningProblem`` are added to ``grads``."""
        kernels = self.kernels(dilated=isinstance(problem.pattern, Dilated))
        with torch.cuda.device_of(inputs.query):  # type: ignore[no-untyped-call]
            found: Inputs = kernels.gradients(problem, inputs, dout, statistics, options, grads)
        return found


def _is_last_row(problem: Problem, options: Options) -> bool:
    """Whether a problem is one query at the end of whole sequences, which the decoding kernel computes."""
    if problem.queries != 1 or not isinstance(problem.pattern, Dilated) or problem.pattern.torchscale_padding:
        return False
    usual = problem.branch is None and options.dropout is None and options.order is None
    is_whole = problem.lengths is None and problem.starts is None and problem.cu_seqlens is None
    return usual and is_whole and type(problem) is Problem and problem.batch > 0 and problem.heads > 0


def _statistics_by_branch(
    kernels: ModuleType, problem: Problem, inputs: Inputs, saved: Saved, options: Options
) -> RowStatistics:
    """What the backward reads with constant mixing weights: delta comes from each branch's output, computed again."""
    branches = len(problem.dilated.branches)
    deltas = saved.lse.new_empty((branches, *saved.lse.shape))
    shifts = None
    for branch in range(branches):
        out = kernels.forward(problem.of_branch(branch), inputs, options).out
        found: RowStatistics = kernels.row_statistics(saved._replace(out=out), options)
        del out  # before the next branch allocates its own
        deltas[branch] = found.delta
        if found.shifts is not None:
            shifts = found.shifts.new_empty((branches, *found.shifts.shape)) if shifts is None else shifts
            shifts[branch] = found.shifts
    return found._replace(delta=deltas, shifts=shifts)

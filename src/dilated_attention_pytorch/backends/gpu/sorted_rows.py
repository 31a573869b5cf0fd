"""Causal calls under an order: every branch is computed on rows that are sorted inside of its tiles.

``slots.py`` says how rows are sorted. Branches sort them differently, so each is a call of its own:

1. copy the rows of q, k and v (and dout) into the slots of the branch (``move_kernel``);
2. run the ordinary kernels.

At the end, the results of all branches are merged by row (``merge_kernel``). An empty slot has rows and statistics of 0: no
other slot sees it, and it adds 0 to the gradients of others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.kernels.sorted_rows import merge_kernel, move_kernel
from dilated_attention_pytorch.backends.gpu.launch import launch_one
from dilated_attention_pytorch.backends.gpu.portable import RowStatistics, padded
from dilated_attention_pytorch.backends.gpu.slots import BranchSlots, RowSlots, find_slots
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import Inputs, Options, Results, Saved

_ELEMENTS = 4096  # of a program
_Kernels = Any  # the module ``run`` of a backend


def constants_of(d: int) -> dict[str, int]:
    """The constants of both kernels for rows of ``d`` elements."""
    block_d = padded(d)
    return {"D": d, "BLOCK_D": block_d, "BLOCK": triton.next_power_of_2(max(1, _ELEMENTS // block_d))}


def _stride_b(lists: Tensor, dim: int) -> int:
    """The stride of lists between samples, 0 if all samples share them."""
    return lists.stride(dim) if lists.shape[dim] > 1 else 0


def _sorted(branch: BranchSlots, x: Tensor) -> Tensor:
    """Rows (B, N, H, D) in slots, (B, slots, H, D)."""
    batch, _, heads, d = x.shape
    return _move(branch, x, x.new_empty((batch, branch.problem.queries, heads, d)))


def _sorted_numbers(branch: BranchSlots, x: Tensor) -> Tensor:
    """Numbers of rows, (B, H, N) or (B, H, N, words), in slots."""
    found = x.new_empty((*x.shape[:2], branch.problem.queries, *x.shape[3:]))
    _move(branch, *(y.view(*y.shape[:3], *(y.shape[3:] or (1,))).transpose(1, 2) for y in (x.contiguous(), found)))
    return found


def _move(branch: BranchSlots, x: Tensor, y: Tensor) -> Tensor:
    """Copy rows (B, N, H, D) into slots ``y``."""
    batch, slots, heads, d = y.shape
    constants = constants_of(d)
    blocks = -(-slots // constants["BLOCK"])
    group = heads // branch.lists.shape[0]
    strides = *x.stride()[:3], *y.stride()[:3], _stride_b(branch.rows, 0)
    tensors = x, y, branch.rows, branch.lists
    launch_one(move_kernel, batch * heads * blocks, tensors, (*strides, slots, heads, group, blocks), constants)
    return y


def _empty(found: RowSlots, like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Memory for rows of all slots, and (B, slots, H, D) of it for each branch. Several branches have float32."""
    batch, _, heads, d = like.shape
    slots = [branch.problem.queries for branch in found.branches]
    counts = [batch * each * heads for each in slots]
    dtype = like.dtype if len(counts) == 1 else torch.float32
    memory = torch.empty((sum(counts), d), dtype=dtype, device=like.device)
    return memory, [x.view(batch, each, heads, d) for x, each in zip(torch.split(memory, counts), slots, strict=True)]


def _merged(found: RowSlots, parts: Tensor, like: Tensor, parts_lse: Tensor | None = None) -> Results:
    """The results of all branches by row, in the shape and type of ``like``. Without ``parts_lse`` they are added."""
    batch, n, heads, d = like.shape
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    lse = torch.empty((batch, heads, n), dtype=torch.float32, device=like.device) if parts_lse is not None else out
    if out.numel():
        constants = constants_of(d) | {"BRANCHES": len(found.branches), "HAS_LSE": parts_lse is not None}
        blocks = -(-n // constants["BLOCK"])
        tensors = parts, parts if parts_lse is None else parts_lse, out, lse
        lists = found.sizes, found.slots, found.owners, found.lists
        strides = found.slots.stride(0), _stride_b(found.slots, 1)
        numbers = (*strides, n, heads, heads // found.lists.shape[1], blocks)
        launch_one(merge_kernel, batch * heads * blocks, (*tensors, *lists), numbers, constants)
    return Results(out, lse)


def _slots(problem: Problem, options: Options) -> RowSlots:
    assert options.order is not None
    return find_slots(problem, options.order)


def _options(branch: BranchSlots, options: Options) -> Options:
    """The options of the call of a branch. Only dropout needs to know the places of rows."""
    if options.dropout is None:
        return replace(options, order=None)
    places = branch.places.index_select(1, branch.lists).expand(branch.problem.batch, -1, -1)
    return replace(options, order=None, places=places.contiguous())


def forward(kernels: _Kernels, problem: Problem, inputs: Inputs, options: Options) -> Results:
    """The attention of a causal problem under an order."""
    found, query = _slots(problem, options), inputs.query
    parts, outs = _empty(found, query)
    parts_lse = torch.empty(parts.shape[0], dtype=torch.float32, device=query.device)
    lses = torch.split(parts_lse, [out.shape[:3].numel() for out in outs])
    for branch, out, lse in zip(found.branches, outs, lses, strict=True) if query.numel() else ():
        results = Results(out, lse.view(out.shape[0], out.shape[2], out.shape[1]))
        own = Inputs(*(_sorted(branch, x) for x in inputs))
        kernels.forward(branch.problem, own, _options(branch, options), results)
        del own  # before the next branch copies its rows
    return _merged(found, parts, query, parts_lse)


def backward(kernels: _Kernels, problem: Problem, inputs: Inputs, saved: Saved, options: Options) -> Inputs:
    """The gradients of a causal problem under an order, given the merged results."""
    found = _slots(problem, options)
    detached = options.detach_mixing and len(found.branches) > 1
    statistics = None if detached else kernels.row_statistics(saved, options)
    parts, by_tensor = zip(*(_empty(found, x) for x in inputs), strict=True)
    for branch, *grads in zip(found.branches, *by_tensor, strict=True) if inputs.query.numel() else ():
        own, dout = Inputs(*(_sorted(branch, x) for x in inputs)), _sorted(branch, saved.dout)
        own_options = _options(branch, options)
        if statistics is None:
            in_slots = _statistics_of_branch(kernels, branch, own, saved._replace(dout=dout), own_options)
        else:
            lse, delta, shifts = statistics
            in_slots = RowStatistics(
                _sorted_numbers(branch, lse), _sorted_numbers(branch, delta),
                None if shifts is None else _sorted_numbers(branch, shifts),
            )  # fmt: skip
        kernels.gradients(branch.problem, own, dout, in_slots, own_options, Inputs(*grads))
        del own, dout, in_slots  # before the next branch copies its rows
    return Inputs(*(_merged(found, x, like).out for x, like in zip(parts, inputs, strict=True)))


def _statistics_of_branch(
    kernels: _Kernels, branch: BranchSlots, inputs: Inputs, saved: Saved, options: Options
) -> RowStatistics:
    """With constant mixing weights, delta comes from the branch's own output, which is computed again."""
    dlse = None if saved.dlse is None else _sorted_numbers(branch, saved.dlse)
    out = kernels.forward(branch.problem, inputs, options).out
    found: RowStatistics = kernels.row_statistics(Saved(out, _sorted_numbers(branch, saved.lse), saved.dout, dlse), options)
    return found

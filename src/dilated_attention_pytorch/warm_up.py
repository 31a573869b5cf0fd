"""Compilation before the first call, so that training starts at its full speed."""

from __future__ import annotations

import time
from typing import Unpack

import torch
from torch import Tensor

from dilated_attention_pytorch import backends, operators
from dilated_attention_pytorch.backends.gpu.backend import TableBackend
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.call import AttentionOptions, make_call
from dilated_attention_pytorch.jagged import is_jagged
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated


def warm_up(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated | BlockSparse,
    *,
    backward: bool = True,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> float:
    """Compile what ``attention`` with these arguments needs, and its ``backward``. Return the seconds that it took.

    The kernels of both are compiled side by side, one thread each, and none of them runs. Without it, the first eager call
    whose inputs a module made, with gradients, does the same. In compiled modules the first backward compiles its own
    kernels. Triton keeps compiled kernels on the disk, so a later process loads them. Values of the tensors do not matter,
    but sizes, types and strides do. The memory is that of a call. Backends of PyTorch's operators compile nothing.

    Args:
        backward: compile the backward as well. Leave it out for inference.
        return_lse: the backward has a gradient of lse.
        options: the other options of ``attention``. A sharded call (``group``) has tiles of other sizes, which its first
            call compiles, so ``group`` is refused.

    >>> q = torch.empty(1, 1000, 8, 64)
    >>> warm_up(q, q, q, Dilated([256, 512], [1, 2]), is_causal=True) < 60
    True
    """
    if options.get("group") is not None:
        raise ValueError(
            "warm_up compiles the kernels of one device, got group: a sharded call compiles those of its own tiles at its "
            "first call; leave group out"
        )
    if is_jagged(query, key, value):
        raise ValueError("warm_up takes rectangular tensors, got nested ones; pass their rows packed, with cu_seqlens")
    start = time.perf_counter()
    call, inputs = make_call(query, key, value, pattern, **options)
    chosen = backends.choose(call.backend, Request.of(call))
    seed = torch.zeros((), dtype=torch.int64, device=call.device) if call.dropout_p else None
    problem, how = operators.problem_and_options(call, inputs.query, inputs.key, seed, chosen.name)
    if isinstance(chosen, TableBackend):
        chosen.compile(problem, inputs.rows_contiguous(), how, backward=backward, uses_lse=return_lse)
    return time.perf_counter() - start

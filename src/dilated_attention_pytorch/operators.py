"""The custom operators: schema, fake, backward operator and autograd, so that compilers see one opaque node.

One pair of operators serves dilated and block-sparse patterns. The pattern travels as a string, and given or chosen block
lists as tensors. The plan is made when the operator runs, so nothing in a compiled graph depends on the length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import backends
from dilated_attention_pytorch.backends.reference import REFERENCE
from dilated_attention_pytorch.backends.request import Backend
from dilated_attention_pytorch.call import Call
from dilated_attention_pytorch.dispatch import define_operator, with_gradient
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.patterns.blocks import BlockSparse, SparsePatternConfig
from dilated_attention_pytorch.plan.dropout import Dropout
from dilated_attention_pytorch.plan.lists import choose, chosen_shape, find_rule
from dilated_attention_pytorch.plan.problem import Problem, find_problem
from dilated_attention_pytorch.plan.sequences import host_cu_seqlens, host_lengths
from dilated_attention_pytorch.values import Inputs, Options, Results, Upstream, rows_contiguous

_OPTIONAL_TENSORS = 7  # lengths, cu_seqlens, seed, positions, indices, starts, counts
_CONSTANTS = 6  # pattern, is_causal, scale, dropout_p, detach_mixing, backend


# Optional tensors: lengths and cu_seqlens, or indices, starts and counts of block lists.
_Optional = tuple[Tensor | None, ...]


def _problem(
    query: Tensor, key: Tensor, sequences: _Optional, lists: _Optional, spec: str, is_causal: bool
) -> Problem:  # fmt: skip
    """The problem that the arguments of an operator pose."""
    (batch, n, heads, _), (m, key_heads) = query.shape, key.shape[1:3]
    lengths, cu_seqlens = sequences
    pattern = spec if spec.startswith("dilated|") else find_rule(spec, lists, m)
    host = host_lengths(lengths, m), host_cu_seqlens(cu_seqlens, m)
    return find_problem(pattern, is_causal, batch, n, m, heads, key_heads, *host)


def _options(
    query: Tensor, seed: Tensor | None, positions: Tensor | None, lists: _Optional, constants: tuple[Any, ...]
) -> Options:  # fmt: skip
    scale, dropout_p, detach_mixing = constants
    indices, starts, _ = lists
    rows = None
    if positions is not None:  # as kernels read it: one row of positions for each sample, in 32 bits
        rows = positions.to(torch.int32).expand(query.shape[:2]).contiguous()
    return Options(
        scale=scale,
        dropout=Dropout(dropout_p, seed) if dropout_p > 0.0 else None,
        positions=rows,
        detach_mixing=detach_mixing,
        chosen=indices if starts is None else None,
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    positions: Tensor | None,
    indices: Tensor | None,
    starts: Tensor | None,
    counts: Tensor | None,
    pattern: str,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    detach_mixing: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))``.

    ``positions`` (N,) or (B, N): each row sees only rows of no larger position. ``indices``, ``starts`` and ``counts`` are
    given block lists; ``indices`` without the others is the choice of an adaptive pattern.
    """
    inputs, lists = Inputs(query, key, value).rows_contiguous(), (indices, starts, counts)
    problem = _problem(query, key, (lengths, cu_seqlens), lists, pattern, is_causal)
    options = _options(query, seed, positions, lists, (scale, dropout_p, detach_mixing))
    out, lse = backends.find(backend).forward(problem, inputs, options)
    return out, lse


def _attend_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, n, heads, _d = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty((batch, heads, n), dtype=accumulate_dtype(query.dtype))


def _attend_backward(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    positions: Tensor | None,
    indices: Tensor | None,
    starts: Tensor | None,
    counts: Tensor | None,
    pattern: str,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    detach_mixing: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` from the merged ``out`` and ``lse``: the ordinary backward of each tile is its exact share."""
    inputs, lists = Inputs(query, key, value).rows_contiguous(), (indices, starts, counts)
    problem = _problem(query, key, (lengths, cu_seqlens), lists, pattern, is_causal)
    options = _options(query, seed, positions, lists, (scale, dropout_p, detach_mixing))
    upstream = Upstream(rows_contiguous(dout), dlse)
    dq, dk, dv = backends.find(backend).backward(problem, inputs, Results(out, lse), upstream, options)
    return dq, dk, dv


def _attend_backward_fake(
    dout: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, optional = inputs[:3], inputs[3 : 3 + _OPTIONAL_TENSORS]
    ctx.constants = inputs[3 + _OPTIONAL_TENSORS :]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output, *optional)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * (_OPTIONAL_TENSORS + _CONSTANTS)
    if dout is None and dlse is None:
        return (None, None, None, *none)
    query, key, value, out, lse, *optional = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    return *call_attend_backward(dout, dlse, query, key, value, out, lse, *optional, *ctx.constants), *none


def _no_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "second derivatives of this backend are not supported; backend='reference' has them, for short sequences"
    )


def _choose_blocks(
    query: Tensor,
    key: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    pattern: str,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """The key blocks that an adaptive pattern chooses, (B, H, query blocks, width).

    An operator of its own, whose result the backward reads: a compiler may compute the same values in another order, and a
    second choice from these might differ.
    """
    problem = _problem(query, key, (lengths, cu_seqlens), (None, None, None), pattern, is_causal)
    return choose(problem, query, key, scale)


def _choose_blocks_fake(
    query: Tensor,
    key: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    pattern: str,
    is_causal: bool,
    scale: float,
) -> Tensor:
    documents = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = chosen_shape(SparsePatternConfig.from_spec(pattern), query, key.shape[1], documents)
    return query.new_empty(shape, dtype=torch.int32)


attend = define_operator("attend", _attend, _attend_fake)
attend_backward = define_operator("attend_backward", _attend_backward, _attend_backward_fake)
choose_blocks = define_operator("choose_blocks", _choose_blocks, _choose_blocks_fake)
call_attend = with_gradient(attend, _attend, _backward, _setup_context)
call_attend_backward = with_gradient(attend_backward, _attend_backward, _no_second_derivative)


def drawn_seed(call: Call) -> Tensor | None:
    """The seed of dropout as a tensor, drawn from the generator of the query's device if the caller gave none."""
    if call.dropout_p == 0.0:
        return None
    if call.seed is None:
        return torch.randint(0, 2**62, (), dtype=torch.int64, device=call.device)
    return torch.as_tensor(call.seed, dtype=torch.int64, device=call.device)


def list_tensors(call: Call, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The block lists of a call as tensors: given ones, or the choice of an adaptive pattern."""
    pattern = call.pattern
    if not isinstance(pattern, BlockSparse):
        return None, None, None
    given = pattern.given_causal if call.plan_is_causal else pattern.given
    if given is not None:
        return given.indices, given.starts, given.counts
    if pattern.is_adaptive:
        sequences = call.lengths, call.cu_seqlens
        choice = choose_blocks(query.detach(), key.detach(), *sequences, pattern.spec, call.plan_is_causal, call.scale)
        return choice, None, None
    return None, None, None


def problem_and_options(call: Call, query: Tensor, key: Tensor, seed: Tensor | None = None) -> tuple[Problem, Options]:
    """The problem of a call and its options as backends read them, outside of an operator."""
    lists, spec = list_tensors(call, query, key), call.plan_pattern.spec
    problem = _problem(query, key, (call.lengths, call.cu_seqlens), lists, spec, call.plan_is_causal)
    positions = call.order.positions if call.order is not None and call.masks_by_position else None
    return problem, _options(query, seed, positions, lists, (call.scale, call.dropout_p, call.detach_mixing))


def run(call: Call, inputs: Inputs, backend: Backend) -> Results:
    """Compute a call on one device; the rows of the inputs are in its order."""
    seed = drawn_seed(call)
    if backend is REFERENCE:
        problem, options = problem_and_options(call, inputs.query, inputs.key, seed)
        return backend.forward(problem, inputs, options)
    positions = call.order.positions if call.order is not None and call.masks_by_position else None
    out, lse = call_attend(
        *inputs, call.lengths, call.cu_seqlens, seed, positions, *list_tensors(call, inputs.query, inputs.key),
        call.plan_pattern.spec, call.plan_is_causal, call.scale, call.dropout_p, call.detach_mixing, backend.name,
    )  # fmt: skip
    return Results(out, lse)

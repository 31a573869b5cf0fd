"""The custom operators: schema, fake, backward operator and autograd, so that compilers see one opaque node.

One pair of operators serves dilated and block-sparse patterns. The pattern travels as a string, and given or chosen block
lists as tensors. The plan is made when the operator runs, so nothing in a compiled graph depends on the length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch import backends
from dilated_attention_pytorch.backends.reference import REFERENCE
from dilated_attention_pytorch.backends.request import Backend
from dilated_attention_pytorch.batching import BatchRule
from dilated_attention_pytorch.call import Call
from dilated_attention_pytorch.dispatch import define_operator, under_transforms, with_gradient
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.lengths import host_cu_seqlens, host_samples
from dilated_attention_pytorch.patterns.blocks import BlockSparse, SparsePatternConfig
from dilated_attention_pytorch.plan.counts import count_pairs, has_values
from dilated_attention_pytorch.plan.dropout import Dropout
from dilated_attention_pytorch.plan.lists import choose, chosen_shape, find_rule
from dilated_attention_pytorch.plan.problem import Problem, find_problem
from dilated_attention_pytorch.values import Inputs, Options, Results, RowOrder, Saved, rows_contiguous


def sorts_rows(backend: str) -> bool:
    """Whether a backend computes causal calls under an order on rows that it sorts itself."""
    return backend in ("hopper", "triton")


def moves_rows(call: Call, backend: str) -> bool:
    """Whether a backend puts the rows of a call in order itself, and its results back."""
    return call.permutes and call.masks_by_position and sorts_rows(backend)


class OperatorArguments(NamedTuple):
    """What both operators get besides query, key and value, in the order of their schema."""

    lengths: Tensor | None
    cu_seqlens: Tensor | None
    seed: Tensor | None
    positions: Tensor | None  # (N,) or (B, N): each row sees only rows of no larger position
    indices: Tensor | None  # of given block lists; without starts and counts: the choice of an adaptive pattern
    starts: Tensor | None
    counts: Tensor | None
    pattern: str
    is_causal: bool
    scale: float
    dropout_p: float
    detach_mixing: bool
    moves_rows: bool  # the backend puts the rows in order itself, and its results back
    backend: str
    sample_starts: Tensor | None = None  # what users call starts; those above are of block lists

    @staticmethod
    def of(call: Call, inputs: Inputs, seed: Tensor | None, backend: str) -> OperatorArguments:
        """The arguments of a call; an adaptive pattern chooses its blocks here."""
        positions = call.order.positions if call.order is not None and call.masks_by_position else None
        is_causal = call.is_causal if sorts_rows(backend) else call.plan_is_causal
        return OperatorArguments(
            call.lengths, call.cu_seqlens, seed, positions, *_list_tensors(call, inputs), call.plan_pattern.spec,
            is_causal, call.scale, call.dropout_p, call.detach_mixing, moves_rows(call, backend), backend, call.starts,
        )  # fmt: skip

    def problem(self, query: Tensor, key: Tensor) -> Problem:
        """The problem that the arguments pose for these tensors."""
        (batch, n, heads, _), (m, key_heads) = query.shape, key.shape[1:3]
        lists = self.indices, self.starts, self.counts
        pattern = self.pattern if self.pattern.startswith("dilated|") else find_rule(self.pattern, lists, m)
        starts, lengths = host_samples(self.sample_starts, self.lengths, m, n)
        sequences = lengths, host_cu_seqlens(self.cu_seqlens, m), None, starts
        return find_problem(pattern, self.is_causal, batch, n, m, heads, key_heads, *sequences)

    def options(self, query: Tensor) -> Options:
        """The options of a backend."""
        positions = order = None
        if self.positions is not None and sorts_rows(self.backend):
            order = RowOrder(self.positions, self.moves_rows)
        elif self.positions is not None:  # as masks are made: one row of positions for each sample, in 32 bits
            positions = self.positions.to(torch.int32).expand(query.shape[:2]).contiguous()
        return Options(
            scale=self.scale, positions=positions, order=order, detach_mixing=self.detach_mixing,
            dropout=Dropout(self.dropout_p, self.seed) if self.dropout_p > 0.0 else None,
            chosen=self.indices if self.starts is None else None,
        )  # fmt: skip


_SCHEMA = (
    "Tensor? lengths, Tensor? cu_seqlens, Tensor? seed, Tensor? positions, Tensor? indices, Tensor? starts, "
    "Tensor? counts, str pattern, bool is_causal, float scale, float dropout_p, bool detach_mixing, "
    "bool moves_rows, str backend, Tensor? sample_starts=None"
)
_FORWARD_SCHEMA = f"(Tensor query, Tensor key, Tensor value, {_SCHEMA}) -> (Tensor, Tensor)"
_BACKWARD_SCHEMA = (
    "(Tensor dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"{_SCHEMA}) -> (Tensor, Tensor, Tensor)"
)
_OPTIONAL_TENSORS = 7  # of OperatorArguments; the constants follow, and behind these one more tensor
# How the arguments depend on the samples of a batch, for torch.vmap.
_ROWS, _LSE, _LENGTHS, _SAME = BatchRule(dims=4), BatchRule(dims=3), BatchRule(dims=1), BatchRule()
_LISTS = BatchRule(dims=3, one_serves_all=True)
_RULES = {"lengths": _LENGTHS, "seed": BatchRule(by_number=True), "positions": BatchRule(dims=2)}
_RULES |= {"indices": BatchRule(dims=4), "starts": _LISTS, "counts": _LISTS, "sample_starts": _LENGTHS}
_CHOICE_RULES = (_ROWS, _ROWS, _LENGTHS, _SAME, _SAME, _SAME, _SAME, _LENGTHS)  # of choose_blocks
_ARGUMENT_RULES = tuple(_RULES.get(name, _SAME) for name in OperatorArguments._fields)


def _attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))``; ``rest`` are ``OperatorArguments``."""
    inputs, arguments = Inputs(query, key, value).rows_contiguous(), OperatorArguments(*rest)
    backend = backends.find(arguments.backend)
    out, lse = backend.forward(arguments.problem(query, key), inputs, arguments.options(query))
    return out, lse


def _attend_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, n, heads, _d = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty((batch, heads, n), dtype=accumulate_dtype(query.dtype))


def _attend_backward(dout: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` from the merged ``out`` and ``lse``: the ordinary backward of each tile is its exact share."""
    query, key, value, out, lse = rest[:5]
    inputs, arguments = Inputs(query, key, value).rows_contiguous(), OperatorArguments(*rest[5:])
    saved, backend = Saved(out, lse, rows_contiguous(dout), dlse), backends.find(arguments.backend)
    dq, dk, dv = backend.backward(arguments.problem(query, key), inputs, saved, arguments.options(query))
    return dq, dk, dv


def _attend_backward_fake(
    dout: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *arguments, sample_starts = inputs[3:]
    ctx.constants = arguments[_OPTIONAL_TENSORS:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, *arguments[:_OPTIONAL_TENSORS], sample_starts)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * len(OperatorArguments._fields)
    if dout is None and dlse is None:
        return (None, None, None, *none)
    *saved, sample_starts = ctx.saved_tensors  # query, key, value, out, lse and the optional tensors
    dout = torch.zeros_like(saved[3]) if dout is None else dout
    return *call_attend_backward(dout, dlse, *saved, *ctx.constants, sample_starts), *none


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Nothing is needed to refuse a derivative."""


def _no_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "second derivatives of this backend are not supported; backend='reference' has them, for short sequences"
    )


def _choose_blocks(
    query: Tensor, key: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None,
    pattern: str, is_causal: bool, scale: float, sample_starts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The key blocks that an adaptive pattern chooses, (B, H, query blocks, width).

    An operator of its own, whose result the backward reads: a compiler may compute the same values in another order, and a
    second choice from these might differ.
    """
    optional = lengths, cu_seqlens, None, None, None, None, None
    arguments = OperatorArguments(*optional, pattern, is_causal, scale, 0.0, False, False, "", sample_starts)
    return choose(arguments.problem(query, key), query, key, scale)


def _choose_blocks_fake(
    query: Tensor, key: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, pattern: str, is_causal: bool,
    scale: float, sample_starts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    documents = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    config, shifted = SparsePatternConfig.from_spec(pattern), sample_starts is not None
    shape = chosen_shape(config, query, key.shape[1], documents, shifted=shifted)
    return query.new_empty(shape, dtype=torch.int32)


def _flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, out_val: Any = None) -> int:
    """The FLOPs of a forward for ``FlopCounterMode``: 4 D for each pair that the plan computes.

    PyTorch counts its own attention alike, but causal tiles as full ones. Without values, lengths are those of the tensors.
    """
    arguments = OperatorArguments(*rest)
    sequences = arguments.lengths, arguments.cu_seqlens, arguments.sample_starts
    if any(isinstance(x, Tensor) and not has_values(x) for x in sequences):
        arguments = arguments._replace(lengths=None, cu_seqlens=None, sample_starts=None)
    problem = arguments.problem(query, key)
    return 4 * query.shape[-1] * count_pairs(problem, arguments.indices if arguments.starts is None else None)


def _backward_flops(dout: Tensor, dlse: Tensor | None, *rest: Any, out_val: Any = None) -> int:
    """The FLOPs of a backward: 10 D for each pair, because it computes five products where the forward computes two."""
    query, key, value, _, _, *arguments = rest
    return _flops(query, key, value, *arguments) * 5 // 2


def _mark_choice(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.mark_non_differentiable(output)


def _no_gradient(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    """A choice of blocks is not differentiated."""
    return (None,) * len(_CHOICE_RULES)


attend = define_operator("attend", _attend, _attend_fake, _FORWARD_SCHEMA)
attend_backward = define_operator("attend_backward", _attend_backward, _attend_backward_fake, _BACKWARD_SCHEMA)
choose_blocks = define_operator("choose_blocks", _choose_blocks, _choose_blocks_fake)
call_attend = with_gradient(attend, _attend, _backward, _setup_context, (_ROWS, _ROWS, _ROWS, *_ARGUMENT_RULES), _flops)
call_attend_backward = with_gradient(
    attend_backward, _attend_backward, _no_second_derivative, _save_nothing,
    (_ROWS, _LSE, _ROWS, _ROWS, _ROWS, _ROWS, _LSE, *_ARGUMENT_RULES), _backward_flops,
)  # fmt: skip
call_choose_blocks = under_transforms(choose_blocks, _no_gradient, _mark_choice, _CHOICE_RULES)


def _drawn_seed(call: Call) -> Tensor | None:
    """The seed of dropout as a tensor, drawn from the generator of the query's device if the caller gave none."""
    if call.dropout_p == 0.0:
        return None
    if call.seed is None:
        return torch.randint(0, 2**62, (), dtype=torch.int64, device=call.device)
    return torch.as_tensor(call.seed, dtype=torch.int64, device=call.device)


def _list_tensors(call: Call, inputs: Inputs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The block lists of a call as tensors: given ones, or the choice of an adaptive pattern."""
    pattern, is_causal = call.pattern, call.plan_is_causal
    if isinstance(pattern, BlockSparse):
        given = pattern.given_causal if is_causal else pattern.given
        if given is not None:
            return given.indices, given.starts, given.counts
        if pattern.is_adaptive:
            tensors = inputs.query.detach(), inputs.key.detach(), call.lengths, call.cu_seqlens
            return call_choose_blocks(*tensors, pattern.spec, is_causal, call.scale, call.starts), None, None
    return None, None, None


def problem_and_options(
    call: Call, query: Tensor, key: Tensor, seed: Tensor | None = None, backend: str = ""
) -> tuple[Problem, Options]:
    """The problem of a call and its options as backends read them, outside of an operator."""
    arguments = OperatorArguments.of(call, Inputs(query, key, key), seed, backend)
    return arguments.problem(query, key), arguments.options(query)


def run(call: Call, inputs: Inputs, backend: Backend) -> Results:
    """Compute a call on one device. The rows of the inputs are in its order, unless the backend ``moves_rows``."""
    if backend is REFERENCE:
        problem, options = problem_and_options(call, inputs.query, inputs.key, _drawn_seed(call))
        return backend.forward(problem, inputs, options)
    return Results(*call_attend(*inputs, *OperatorArguments.of(call, inputs, _drawn_seed(call), backend.name)))

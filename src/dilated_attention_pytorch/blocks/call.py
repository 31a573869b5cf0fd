"""``attention`` with a block-sparse pattern: check, choose, call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import backends, ops
from dilated_attention_pytorch.backends import hopper, reference
from dilated_attention_pytorch.backends.request import ORDER_REASON, Request
from dilated_attention_pytorch.blocks import ops as block_ops
from dilated_attention_pytorch.checks import (
    autocast,
    check_call,
    check_no_forward_derivative,
    check_options,
    check_order,
    check_qkv,
    rows_in_order,
)
from dilated_attention_pytorch.execute.merge import accumulate_dtype
from dilated_attention_pytorch.orders.order import Identity, Order
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.plan.dropout import Dropout
from dilated_attention_pytorch.plan.sequences import Span


def causal_by_position(pattern: Dilated | BlockSparse, order: Order | None, is_causal: bool) -> bool:
    """Whether causality goes by original position; raise if the pattern has a causality of its own."""
    if not is_causal or order is None or isinstance(order, Identity):
        return False
    if isinstance(pattern, BlockSparse) and pattern.only_causal:
        raise ValueError(
            "this BlockMask is causal by places of the ordered sequence, is_causal under an order goes by original "
            "positions; leave out the order, or make the BlockMask without the causal part"
        )
    return True


def prepare_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: int | Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    mixing_gradient: str,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """What ``checks.prepare`` is for dilated patterns; whether the pattern fits the length is not checked here."""
    query, key, value = autocast(query, key, value)
    check_qkv(query, key, value)
    check_options(scale, dropout_p, mixing_gradient)
    check_call(query, key, is_causal, seed, lengths, cu_seqlens)
    if mixing_gradient != "exact":
        raise ValueError(
            "mixing_gradient='detached' is about branches of Dilated; block-sparse attention is one softmax: leave it out"
        )
    return query, key, value, query.shape[-1] ** -0.5 if scale is None else float(scale)


def why_not(name: str, request: Request, block_size: int, n: int, m: int) -> list[str]:
    """The reasons why a backend cannot serve a block-sparse call of n queries over m keys."""
    reasons = backends.why_not(name, request)
    if name == "hopper":
        reasons = reasons + hopper.why_not_blocks(block_size, n, m)
    if name == "triton" and request.ordered:  # its kernels for dilated patterns can
        reasons = [*reasons, ORDER_REASON]
    return reasons


def choose(backend: str, request: Request, block_size: int, n: int, m: int) -> str:
    """The name of the backend to use, see ``backends.choose``."""
    backends.check_name(backend)
    if backend != "auto":
        reasons = why_not(backend, request, block_size, n, m)
        if reasons:
            raise ValueError("no backend can serve this call:\n" + "\n".join(f"  {backend}: {x}" for x in reasons))
        return backend
    # Without words: compilers cannot format lengths that they do not know.
    others = [] if block_size in hopper.BLOCK_SIZES and n == m else ["hopper"]
    if request.ordered:
        others.append("triton")
    served = (name for name in backends.candidates(backend, request) if name not in others)
    return next(name for name in served if not backends.why_not(name, request))


def list_arguments(
    query: Tensor,
    key: Tensor,
    pattern: BlockSparse,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Any, ...]:
    """What operators are told about blocks: lengths, cu_seqlens, indices, starts, counts, spec, block size, is_causal."""
    given = pattern.given_causal if is_causal else pattern.given
    lists: tuple[Tensor | None, ...] = (None, None, None)
    if given is not None:
        lists = (given.indices, given.starts, given.counts)
    elif pattern.is_adaptive:
        options = (lengths, cu_seqlens, pattern.spec, pattern.block_size, is_causal, scale)
        lists = (block_ops.choose_blocks(query.detach(), key.detach(), *options), None, None)
    return (lengths, cu_seqlens, *lists, pattern.spec, pattern.block_size, is_causal)


def as_chosen(query: Tensor, key: Tensor, pattern: BlockSparse, is_causal: bool, scale: float) -> BlockSparse:
    """The pattern; an adaptive one as the mask of blocks that it chooses for these tensors and this causality."""
    if not pattern.is_adaptive:
        return pattern
    ((_, lists),) = block_ops.block_lists(query, key, *list_arguments(query, key, pattern, None, None, is_causal, scale))
    return BlockSparse("", pattern.block_size, lists, lists)


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: BlockSparse,
    *,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: int | Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    mixing_gradient: str,
    backend: str,
    order: Order | None,
    ordered: bool | None,
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))``; see ``attention``."""
    query, key, value, used_scale = prepare_blocks(
        query, key, value, is_causal=is_causal, scale=scale, dropout_p=dropout_p, seed=seed, lengths=lengths,
        cu_seqlens=cu_seqlens, mixing_gradient=mixing_gradient,
    )  # fmt: skip
    (batch, n, heads, _), m = query.shape, key.shape[1]
    pattern.check_call(batch, n, m, heads, is_causal=is_causal, packed=cu_seqlens is not None)
    in_order = rows_in_order(order, ordered, sharded=False)
    if order is not None:
        check_order(order, query, key, lengths, cu_seqlens)
    by_position = causal_by_position(pattern, order, is_causal)
    chosen = choose(backend, Request.of(query, dropout_p, by_position), pattern.block_size, n, m)
    if chosen != "reference":
        check_no_forward_derivative(query, key, value)
    if order is not None and not in_order:
        query, key, value = order.permute(query), order.permute(key), order.permute(value)
    positions = order.positions if order is not None and by_position else None
    used_seed = ops.drawn_seed(seed, dropout_p, query)
    # Rows of any place may have earlier positions: the lists are then those of the call that is not causal.
    arguments = list_arguments(query, key, pattern, lengths, cu_seqlens, is_causal and not by_position, used_scale)
    if chosen == "reference":
        lists = block_ops.block_lists(query, key, *arguments)
        dropout = Dropout(dropout_p, used_seed) if dropout_p > 0.0 else None
        out, lse = _reference(query, key, value, lists, is_causal, used_scale, positions, dropout)
    else:
        optional = positions, used_seed
        out, lse = block_ops.call_attend_blocks(query, key, value, *optional, *arguments, used_scale, dropout_p, chosen)
    return (out, lse) if order is None or in_order else (order.unpermute(out), order.unpermute(lse, dim=2))


def _met(lists: BlockLists, i: Tensor, length: int, is_causal: bool, positions: Tensor | None = None) -> Tensor:
    """Boolean (S, L, rows, length): which of the positions ``i`` meet which positions of a sequence.

    In another order, ``positions`` are what causality goes by, and ``i`` all places: see ``reference.weights``.
    """
    size, j = lists.block_size, torch.arange(length, device=i.device)
    met = lists.mask()[:, :, i // size - lists.first][..., j // size]
    return met & reference.allowed_pairs(i[:, None], j, is_causal, positions)


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lists: list[tuple[Span, BlockLists]],
    is_causal: bool,
    scale: float,
    positions: Tensor | None,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor]:
    (batch, n, heads, _), device = query.shape, query.device
    # Selected, so that the result belongs to the graph even if every sequence is empty.
    never = torch.zeros((), dtype=torch.bool, device=device)
    out = torch.where(never, query + key.sum() + value.sum(), 0.0)
    lse = torch.full((batch, heads, n), -torch.inf, dtype=accumulate_dtype(query.dtype), device=device)
    for span, some in lists:
        i = torch.arange(span.positions.start, span.positions.stop, device=device)
        met = _met(some, i, span.length, is_causal, positions)
        rows, columns = (span.samples, span.queries), (span.samples, span.keys)
        placed = dropout and dropout.at(span.samples.start, span.keys.start)
        part, part_lse = reference.attend_blocks(query[rows], key[columns], value[columns], met, scale, placed)
        out[rows] = part
        lse[span.samples, :, span.queries] = part_lse
    return out, lse


def block_attention_weights(
    query: Tensor,
    key: Tensor,
    pattern: BlockSparse,
    rows: Tensor,
    *,
    is_causal: bool,
    scale: float,
    lengths: Tensor | None,
) -> Tensor:
    """The weights of checked query rows, (B, H, rows, M); see ``attention_weights``."""
    (batch, n, heads, _), m = query.shape, key.shape[1]
    pattern.check_call(batch, n, m, heads, is_causal=is_causal, packed=False)
    arguments = list_arguments(query, key, pattern, lengths, None, is_causal, scale)
    compute = accumulate_dtype(query.dtype)
    result = torch.zeros((batch, heads, len(rows), m), dtype=compute, device=query.device)
    for span, lists in block_ops.block_lists(query, key, *arguments):
        inside = rows < span.queries.stop
        met = _met(lists, rows[inside] + span.positions.start, span.length, is_causal)
        q, k = query[span.samples][:, rows[inside]].to(compute), key[span.samples, span.keys].to(compute)
        weights, _ = reference.block_weights(q, k, met, scale)
        result[span.samples, :, inside.nonzero().squeeze(1), : span.length] = weights.to(compute)
    return result

"""The custom operators of block-sparse attention; ``ops.py`` has those of dilated attention.

The pattern travels as a string, from which lists are made when the operator runs, or as lists: tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import ops
from dilated_attention_pytorch.backends.gpu.block_tables import BlockTable, PackedLists
from dilated_attention_pytorch.backends.gpu.tables import keep_for_device
from dilated_attention_pytorch.execute import listed as block_tiles
from dilated_attention_pytorch.patterns import rules
from dilated_attention_pytorch.patterns.blocks import SparsePatternConfig
from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.plan.dropout import Dropout
from dilated_attention_pytorch.plan.sequences import Span, host_cu_seqlens, host_lengths, spans


@lru_cache(maxsize=32)
def _static_lists(spec: str, first: int, blocks: int, is_causal: bool, device: torch.device) -> BlockLists:
    return SparsePatternConfig.from_spec(spec).lists(first, blocks, is_causal).to(device)


@lru_cache(maxsize=32)
def _rows(spec: str, first: int, blocks: int, is_causal: bool, device: torch.device) -> rules.Rows:
    return SparsePatternConfig.from_spec(spec).rows(first, blocks, is_causal).to(device)


def _spans(query: Tensor, key: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None) -> list[Span]:
    (batch, n), m = query.shape[:2], key.shape[1]
    return list(spans(batch, n, m, host_lengths(lengths, m), host_cu_seqlens(cu_seqlens, m)))


def _blocks(span: Span, block_size: int) -> tuple[int, int]:
    """The first query block of a span, and the number of key blocks."""
    return span.positions.start // block_size, -(-span.length // block_size)


def block_lists(
    query: Tensor,
    key: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    indices: Tensor | None,
    starts: Tensor | None,
    counts: Tensor | None,
    spec: str,
    block_size: int,
    is_causal: bool,
) -> list[tuple[Span, BlockLists]]:
    """The sequences of a batch, each with its lists.

    ``indices``, ``starts`` and ``counts`` are those of a mask; ``indices`` alone what ``choose_blocks`` returns.
    """
    found, row = [], 0
    for span in _spans(query, key, lengths, cu_seqlens):
        first, blocks = _blocks(span, block_size)
        if starts is not None and counts is not None and indices is not None:
            last = -(-key.shape[1] // block_size)
            lists = BlockLists(counts, starts, indices, block_size, last, last - counts.shape[2])
            lists = lists.part(first, blocks).of_samples(span.samples).to(query.device)
        elif indices is not None:
            budget = SparsePatternConfig.from_spec(spec).rows(first, blocks, is_causal).budget.long()
            lists = _chosen(indices, span.samples, row, budget, block_size, blocks, first)
            row += blocks if cu_seqlens is not None else 0
        else:
            lists = _static_lists(spec, first, blocks, is_causal, query.device)
        found.append((span, lists))
    return found


def _chosen(
    indices: Tensor, samples: slice, row: int, budget: Tensor, block_size: int, blocks: int, first: int
) -> BlockLists:
    """The lists of some samples, from row ``row`` on, in a table (B, H, rows, width)."""
    batch, heads, rows, width = indices.shape
    starts = torch.arange(batch * heads * rows).view(batch, heads, rows) * width
    some = starts[samples, :, row : row + len(budget)]
    return BlockLists(budget.expand(some.shape), some, indices.flatten(), block_size, blocks, first)


@dataclass(frozen=True, slots=True)
class _Like:
    """What lists ask of a tensor, in its place: tables are kept longer than tensors should be."""

    shape: torch.Size
    device: torch.device


@dataclass(frozen=True)
class _Blocks:
    """Everything that decides about the lists of a call. Equal ones share their tables."""

    shapes: tuple[tuple[int, ...], ...]  # of query and key, without the head size
    lengths: tuple[int, ...] | None
    cu_seqlens: tuple[int, ...] | None
    given: tuple[int, ...]  # the identities of a mask's tensors, which live as long as this
    rule: tuple[str, int, bool]  # spec, block size, is_causal
    device: torch.device
    arguments: tuple[Any, ...] = field(compare=False)  # of block_lists

    @staticmethod
    def of(query: Tensor, key: Tensor, *arguments: Any) -> _Blocks:
        """The lists of ``block_lists(query, key, *arguments)``."""
        lengths, cu_seqlens, indices, starts, counts, *rule = arguments
        lists = (indices, starts, counts)
        if starts is None and indices is not None:  # only the shape of what was chosen decides
            lists = (torch.empty(indices.shape, dtype=indices.dtype, device="meta"), None, None)
        shapes = _Like(query.shape, query.device), _Like(key.shape, key.device)
        return _Blocks(
            shapes=(tuple(query.shape[:3]), tuple(key.shape[:3])),
            lengths=host_lengths(lengths, key.shape[1]),
            cu_seqlens=host_cu_seqlens(cu_seqlens, key.shape[1]),
            given=() if starts is None else tuple(map(id, lists)),
            rule=tuple(rule),
            device=query.device,
            arguments=(*shapes, lengths, cu_seqlens, *lists, *rule),
        )


@lru_cache(maxsize=32)
def _packed(blocks: _Blocks) -> PackedLists:
    (batch, n, _), (_, m, _) = blocks.shapes
    return PackedLists.of(block_lists(*blocks.arguments), batch, n, m, blocks.rule[1])


@lru_cache(maxsize=32)
def _packed_on_device(blocks: _Blocks) -> PackedLists:
    return _packed(blocks).to(blocks.device)


@lru_cache(maxsize=32)
def _by_query(blocks: _Blocks) -> BlockTable:
    return _packed(blocks).by_query().to(blocks.device)


@lru_cache(maxsize=32)
def _by_key(blocks: _Blocks) -> BlockTable:
    # Not on the device: what is kept must be complete for every stream.
    return _packed(blocks).to(torch.device("cpu")).by_key().to(blocks.device)


def block_tables(
    query: Tensor, key: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, indices: Tensor | None, *rest: Any
) -> tuple[BlockTable, Callable[[], BlockTable]]:
    """The lists of ``block_lists`` as kernels read them, by query block and, when called for, by key block.

    Made once, but for what depends on the content of tensors: the choice of an adaptive pattern, and its transposition.
    """
    blocks = _Blocks.of(query, key, lengths, cu_seqlens, indices, *rest)
    by_query = _by_query(blocks)
    keep_for_device(by_query, by_query.tensors)
    if indices is None or blocks.given:

        def kept() -> BlockTable:
            table = _by_key(blocks)
            keep_for_device(table, table.tensors)
            return table

        return by_query, kept
    chosen = indices.flatten()

    def transposed() -> BlockTable:
        packed = _packed_on_device(blocks)
        keep_for_device(packed, (packed.key_rows, packed.counts, packed.starts, packed.blocks, packed.columns))
        return replace(packed, indices=chosen).by_key()

    return replace(by_query, indices=chosen), transposed


def _kernels(backend: str) -> Any:
    """The module that launches the kernels of a backend; importing it imports triton."""
    return importlib.import_module(f"dilated_attention_pytorch.backends.{backend}.block_run")


def _dropout_of_kernels(backend: str, dropout_p: float, seed: Tensor | None) -> dict[str, Any]:
    """The further arguments of kernels that have dropout."""
    assert backend == "triton" or dropout_p == 0.0, "refused by why_not"
    return {"dropout_p": dropout_p, "seed": seed} if backend == "triton" else {}


def _choose_blocks(
    query: Tensor,
    key: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    spec: str,
    block_size: int,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """The key blocks that an adaptive pattern chooses, (B, H, query blocks, most of a block), see ``rules.adaptive``.

    Documents have their query blocks one after the other.
    """
    chosen = torch.zeros(_chosen_shape(query, key, cu_seqlens, spec, block_size), dtype=torch.int32, device=query.device)
    row = 0
    for span in _spans(query, key, lengths, cu_seqlens):
        first, blocks = _blocks(span, block_size)
        q, k = query[span.samples, span.queries], key[span.samples, span.keys]
        rows = _rows(spec, first, blocks, is_causal, query.device)
        some = rules.adaptive(q, k, rows, first, block_size, scale, chosen.shape[-1])
        chosen[span.samples, :, row : row + blocks - first] = some
        row += blocks if cu_seqlens is not None else 0
    return chosen


def _chosen_shape(query: Tensor, key: Tensor, cu_seqlens: Tensor | None, spec: str, block_size: int) -> tuple[int, ...]:
    (batch, n, heads, _), m = query.shape, key.shape[1]
    ratio = SparsePatternConfig.from_spec(spec).ratio
    blocks = -(-m // block_size)
    rows = blocks - (m - n) // block_size
    if cu_seqlens is not None:  # each document may have a short block
        rows = n // block_size + cu_seqlens.shape[0] - 1
    return batch, heads, rows, 1 + blocks * ratio.numerator // ratio.denominator


def _choose_blocks_fake(
    query: Tensor,
    key: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    spec: str,
    block_size: int,
    is_causal: bool,
    scale: float,
) -> Tensor:
    return query.new_empty(_chosen_shape(query, key, cu_seqlens, spec, block_size), dtype=torch.int32)


def _attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor | None,
    seed: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    indices: Tensor | None,
    starts: Tensor | None,
    counts: Tensor | None,
    spec: str,
    block_size: int,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))`` of a block-sparse pattern.

    With ``positions`` (N,) or (B, N), each row sees only rows whose positions are not larger than its own.
    """
    arguments = (lengths, cu_seqlens, indices, starts, counts, spec, block_size, is_causal)
    if backend in ("hopper", "triton"):
        assert positions is None, "refused before"
        query, key, value = map(ops.rows_contiguous, (query, key, value))
        by_query, _ = block_tables(query, key, *arguments)
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # Triton launches on the current device
            result: tuple[Tensor, Tensor] = _kernels(backend).forward(
                by_query, query, key, value,
                block_size=block_size, is_causal=is_causal, scale=scale, **_dropout_of_kernels(backend, dropout_p, seed),
            )  # fmt: skip
        return result
    lists = block_lists(query, key, *arguments)
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "kernel": ops.tile_kernel(backend, query)}
    options["dropout"] = Dropout(dropout_p, seed) if dropout_p > 0.0 else None
    return block_tiles.forward(lists, query, key, value, positions=ops.row_positions(positions, query), **options)


def _attend_blocks_backward(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    positions: Tensor | None,
    seed: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    indices: Tensor | None,
    starts: Tensor | None,
    counts: Tensor | None,
    spec: str,
    block_size: int,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` from the merged ``out`` and ``lse``."""
    arguments = (lengths, cu_seqlens, indices, starts, counts, spec, block_size, is_causal)
    if backend in ("hopper", "triton"):
        assert positions is None, "refused before"
        query, key, value, dout = map(ops.rows_contiguous, (query, key, value, dout))
        by_query, by_key = block_tables(query, key, *arguments)
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            grads: tuple[Tensor, Tensor, Tensor] = _kernels(backend).backward(
                by_query, by_key, dout, dlse, query, key, value, out, lse,
                block_size=block_size, is_causal=is_causal, scale=scale, **_dropout_of_kernels(backend, dropout_p, seed),
            )  # fmt: skip
        return grads
    lists = block_lists(query, key, *arguments)
    tensors = (dout, dlse, query, key, value, out, lse)
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "kernel": ops.tile_kernel(backend, query)}
    options["dropout"] = Dropout(dropout_p, seed) if dropout_p > 0.0 else None
    return block_tiles.backward(lists, *tensors, positions=ops.row_positions(positions, query), **options)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *optional = inputs[:10]
    ctx.constants = inputs[10:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, *output, *optional)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, *optional = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 16
    if dout is None:
        dout = torch.zeros_like(out)
    grads = call_attend_blocks_backward(dout, dlse, query, key, value, out, lse, *optional, *ctx.constants)
    return (*grads, *(None,) * 13)


choose_blocks = ops.define_operator("choose_blocks", _choose_blocks, _choose_blocks_fake)
attend_blocks = ops.define_operator("attend_blocks", _attend_blocks, ops.attend_fake)
attend_blocks_backward = ops.define_operator("attend_blocks_backward", _attend_blocks_backward, ops.attend_backward_fake)
call_attend_blocks = ops.with_gradient(attend_blocks, _attend_blocks, _backward, _setup_context)
call_attend_blocks_backward = ops.with_gradient(attend_blocks_backward, _attend_blocks_backward, ops.no_second_derivative)

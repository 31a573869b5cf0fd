"""The operators of a cache: compilers see one opaque node that changes the tensors of the cache.

The choice between single tokens and chunks is made here, and so is that of the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.eager import EAGER
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.backends.sdpa import SDPA
from dilated_attention_pytorch.dispatch import define_operator
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.execute.chunk import chunk
from dilated_attention_pytorch.execute.loop import TileKernel
from dilated_attention_pytorch.execute.step import CacheTensors, append_, step
from dilated_attention_pytorch.lengths import host_lengths
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.held import HeldRows
from dilated_attention_pytorch.values import Inputs, Results

# Chunks of at most this many tokens are computed one token after the other, without a device synchronisation.
MOST_STEPS = 8


def attend(
    held: HeldRows, storage: CacheTensors, inputs: Inputs, lengths: Tensor | None, scale: float
) -> Results:  # fmt: skip
    """The attention of a chunk, which is appended. Nothing is changed if an error is raised."""
    n, (positions, counts) = inputs.key.shape[1], _on_host(held, storage, inputs.key, lengths)
    if n > MOST_STEPS:
        at = positions or storage.tokens_seen.tolist(), counts or (n,) * len(inputs.key)
        results = chunk(held, storage, inputs.rows_contiguous(), at, scale, stock_kernel_of(inputs.query))
        append_(held, storage, inputs.key, inputs.value, lengths)
        return results
    lengths = None if lengths is None else lengths.to(inputs.key.device)
    tokens = []
    for i in range(n):
        valid = None if lengths is None else lengths > i
        tokens.append(step(held, storage, inputs.query[:, i], inputs.key[:, i], inputs.value[:, i], valid, scale))
    if not tokens:
        return Results(*_attend_fake(*inputs))
    return Results(torch.stack([out for out, _ in tokens], 1), torch.stack([lse for _, lse in tokens], 2))


def append(held: HeldRows, storage: CacheTensors, key: Tensor, value: Tensor, lengths: Tensor | None) -> None:
    """Append a chunk. Nothing is changed if an error is raised."""
    _on_host(held, storage, key, lengths)
    append_(held, storage, key, value, lengths)


def _on_host(
    held: HeldRows, storage: CacheTensors, key: Tensor, lengths: Tensor | None
) -> tuple[Sequence[int] | None, Sequence[int] | None]:
    """The positions and lengths of the samples, as far as they are read; raise if they are not valid.

    Few tokens on a GPU are not checked, because reading a tensor there is a device synchronisation.
    """
    n, most, many = key.shape[1], held.max_tokens, key.shape[1] > MOST_STEPS
    counts = None
    if lengths is not None and (many or lengths.device.type == "cpu"):
        counts = host_lengths(lengths, n)
    if most is None or not (many or key.device.type == "cpu"):
        return None, counts
    positions = storage.tokens_seen.tolist()
    for sample, (before, more) in enumerate(zip(positions, counts or (n,) * len(key), strict=True)):
        if before + more > most:
            raise ValueError(
                f"the cache was made for at most max_tokens = {most} tokens per sample: sample {sample} has {before}, "
                f"got {more} more; make the cache with a larger max_tokens, or reset the sample"
            )
    return positions, counts


def stock_kernel_of(query: Tensor) -> TileKernel:
    """The stock kernel for tiles of this query."""
    request = Request.like(query)
    return (EAGER if SDPA.why_not(request) else SDPA).kernel(request)


_STATE = "Tensor(a!) keys, Tensor(b!) values, Tensor(c!) tokens_seen, Tensor(d!) rolled_back, Tensor table, Tensor branch"
_HELD = "str pattern, int? max_tokens, int max_rollback"


def _attend_operator(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lengths, storage, (pattern, max_tokens, max_rollback, scale) = rest[0], CacheTensors(*rest[1:7]), rest[7:]
    held = HeldRows.of(Dilated.from_spec(pattern), key.shape[2], max_tokens, max_rollback)
    out, lse = attend(held, storage, Inputs(query, key, value), lengths, scale)
    return out, lse


def _attend_fake(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, n, heads, _d = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty((batch, heads, n), dtype=accumulate_dtype(query.dtype))


def _append_operator(key: Tensor, value: Tensor, *rest: Any) -> None:
    lengths, storage, (pattern, max_tokens, max_rollback) = rest[0], CacheTensors(*rest[1:7]), rest[7:]
    held = HeldRows.of(Dilated.from_spec(pattern), key.shape[2], max_tokens, max_rollback)
    append(held, storage, key, value, lengths)


def _append_fake(*_: Any) -> None:
    """Nothing is returned."""


attend_cached = define_operator(
    "attend_cached", _attend_operator, _attend_fake,
    f"(Tensor query, Tensor key, Tensor value, Tensor? lengths, {_STATE}, {_HELD}, float scale) -> (Tensor, Tensor)",
)  # fmt: skip
append_cached = define_operator(
    "append_cached", _append_operator, _append_fake,
    f"(Tensor key, Tensor value, Tensor? lengths, {_STATE}, {_HELD}) -> ()",
)  # fmt: skip


def run_attend(
    held: HeldRows, storage: CacheTensors, inputs: Inputs, lengths: Tensor | None, scale: float
) -> Results:  # fmt: skip
    """``attend``, through the operator if a compiler traces the call."""
    if torch.compiler.is_compiling():
        constants = held.pattern.spec, held.max_tokens, held.max_rollback
        return Results(*attend_cached(*inputs, lengths, *storage, *constants, scale))
    return attend(held, storage, inputs, lengths, scale)


def run_append(held: HeldRows, storage: CacheTensors, key: Tensor, value: Tensor, lengths: Tensor | None) -> None:
    """``append``, through the operator if a compiler traces the call."""
    if torch.compiler.is_compiling():
        constants = held.pattern.spec, held.max_tokens, held.max_rollback
        append_cached(key, value, lengths, *storage, *constants)
    else:
        append(held, storage, key, value, lengths)

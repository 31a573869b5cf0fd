"""The operators of a cache: compilers see one opaque node that changes the tensors of the cache.

The choice between single tokens and chunks is made here, and so is that of the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.backends import choose, stock_kernel
from dilated_attention_pytorch.backends.gpu import chunks as fused
from dilated_attention_pytorch.backends.gpu.backend import TableBackend
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.backends.sdpa import SDPA
from dilated_attention_pytorch.backends.targets import capability_of
from dilated_attention_pytorch.backends.triton.backend import TRITON
from dilated_attention_pytorch.dispatch import define_operator
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.execute import step
from dilated_attention_pytorch.execute.chunk import AttendSamples, attend_chunk, chunk, held_rows
from dilated_attention_pytorch.execute.step import CacheTensors
from dilated_attention_pytorch.lengths import host_lengths
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.held import HeldRows
from dilated_attention_pytorch.values import Inputs, Results

# Chunks of at most this many tokens are computed one token after the other, without a device synchronisation.
MOST_STEPS = 8


class HostPositions:
    """The positions of the samples as far as the host knows them, so that chunks need no device synchronisation.

    Replays of a CUDA graph change positions without the host. So the host never knows those of a cache that was captured.
    """

    def __init__(self, known: list[int] | None = None) -> None:
        self.known = known
        self._is_captured = False

    def read(self, storage: CacheTensors) -> list[int]:
        """The positions, which are read from the device if they are not known."""
        if self.known is not None:
            return self.known
        found: list[int] = storage.tokens_seen.tolist()
        self.known = None if self._is_captured else found
        return found

    def forget(self) -> None:
        """Note that positions change on the device."""
        self.known = None

    def add(self, counts: Sequence[int] | None, device: torch.device) -> None:
        """Note that tokens were appended. ``counts`` is None if the host does not know how many."""
        self._is_captured |= device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.known is None or counts is None or self._is_captured:
            self.known = None
        else:
            self.known = [position + count for position, count in zip(self.known, counts, strict=True)]


def attend(
    held: HeldRows, storage: CacheTensors, inputs: Inputs, lengths: Tensor | None, scale: float, host: HostPositions
) -> Results:
    """The attention of a chunk, which is appended. Nothing is changed if an error is raised."""
    n, counts = inputs.key.shape[1], _checked_counts(held, storage, inputs.key, lengths, host)
    if n > MOST_STEPS:
        assert counts is not None
        at, kernel = (host.read(storage), counts), _chunk_kernel(held, storage, inputs.query, scale)
        results = chunk(inputs.rows_contiguous(), at, kernel)
        _single_tokens(inputs.key).append_(held, storage, inputs.key, inputs.value, lengths)
    else:
        results = _attend_tokens(held, storage, inputs, lengths, scale)
    host.add(counts, inputs.key.device)
    return results


def _attend_tokens(
    held: HeldRows, storage: CacheTensors, inputs: Inputs, lengths: Tensor | None, scale: float
) -> Results:  # fmt: skip
    """The attention of few tokens, one after the other."""
    attend_token = _single_tokens(inputs.key).step
    lengths = None if lengths is None else lengths.to(inputs.key.device)
    tokens, n = [], inputs.key.shape[1]
    for i in range(n):
        valid = None if lengths is None else lengths > i
        token = inputs if n == 1 else Inputs(*(x[:, i : i + 1] for x in inputs))
        tokens.append(Results(*attend_token(held, storage, *token, valid, scale)))
    if n == 1:
        return tokens[0]
    if n == 0:
        return Results(*_attend_fake(*inputs))
    return Results(torch.cat([x.out for x in tokens], 1), torch.cat([x.lse for x in tokens], 2))


def append(
    held: HeldRows, storage: CacheTensors, key: Tensor, value: Tensor, lengths: Tensor | None, host: HostPositions
) -> None:
    """Append a chunk. Nothing is changed if an error is raised."""
    counts = _checked_counts(held, storage, key, lengths, host)
    _single_tokens(key).append_(held, storage, key, value, lengths)
    host.add(counts, key.device)


def _checked_counts(
    held: HeldRows, storage: CacheTensors, key: Tensor, lengths: Tensor | None, host: HostPositions
) -> Sequence[int] | None:
    """The tokens of each sample, or None if they are not read; raise if they are not valid.

    Few tokens on a GPU are not checked, because reading a tensor there is a device synchronisation.
    """
    n, most, many = key.shape[1], held.max_tokens, key.shape[1] > MOST_STEPS
    counts: Sequence[int] | None = (n,) * len(key)
    if lengths is not None:
        counts = host_lengths(lengths, n) if many or lengths.device.type == "cpu" else None
    if most is None or counts is None or not (many or key.device.type == "cpu"):
        return counts
    for sample, (before, more) in enumerate(zip(host.read(storage), counts, strict=True)):
        if before + more > most:
            raise ValueError(
                f"the cache was made for at most max_tokens = {most} tokens per sample: sample {sample} has {before}, "
                f"got {more} more; make the cache with a larger max_tokens, or reset the sample"
            )
    return counts


def _chunk_kernel(held: HeldRows, storage: CacheTensors, query: Tensor, scale: float) -> AttendSamples:
    """What computes the chunks of queries like this one."""
    request = Request.like(query)
    backend = choose("auto", request)
    if isinstance(backend, TableBackend):
        return lambda samples, position, inputs: fused.attend_chunk(
            held, storage, samples, position, inputs, scale, backend
        )
    kernel = stock_kernel("eager" if SDPA.why_not(request) else "sdpa", request)

    def attend_samples(samples: Sequence[int], position: int, inputs: Inputs) -> Results:
        rows = [held_rows(branch, storage, samples, position) for branch in held.branches]
        return attend_chunk(held, position, inputs, rows, scale, kernel)

    return attend_samples


def _single_tokens(key: Tensor) -> ModuleType:
    """The module that computes single tokens and appends: in one launch where Triton kernels are possible."""
    return _tokens_module(key.device, key.dtype, key.shape[-1])


@lru_cache(maxsize=64)
def _tokens_module(device: torch.device, dtype: torch.dtype, head_dim: int) -> ModuleType:
    if device.type != "cuda" or TRITON.why_not(Request(device.type, capability_of(device), dtype, head_dim)):
        return step
    from dilated_attention_pytorch.backends.gpu import decoding  # it imports triton

    return decoding


_STATE = (
    "Tensor(a!) keys, Tensor(b!) values, Tensor(c!) tokens_seen, Tensor(d!) rolled_back, Tensor table, Tensor branch, "
    "Tensor(e!) arrived"
)
_HELD = "str pattern, int? max_tokens, int max_rollback"


def _attend_operator(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lengths, storage, (pattern, max_tokens, max_rollback, scale) = rest[0], CacheTensors(*rest[1:8]), rest[8:]
    held = HeldRows.of(Dilated.from_spec(pattern), key.shape[2], max_tokens, max_rollback)
    out, lse = attend(held, storage, Inputs(query, key, value), lengths, scale, HostPositions())
    return out, lse


def _attend_fake(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, n, heads, _d = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty((batch, heads, n), dtype=accumulate_dtype(query.dtype))


def _append_operator(key: Tensor, value: Tensor, *rest: Any) -> None:
    lengths, storage, (pattern, max_tokens, max_rollback) = rest[0], CacheTensors(*rest[1:8]), rest[8:]
    held = HeldRows.of(Dilated.from_spec(pattern), key.shape[2], max_tokens, max_rollback)
    append(held, storage, key, value, lengths, HostPositions())


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
    held: HeldRows, storage: CacheTensors, inputs: Inputs, lengths: Tensor | None, scale: float, host: HostPositions
) -> Results:
    """``attend``, through the operator if a compiler traces the call."""
    if torch.compiler.is_compiling():
        constants = held.pattern.spec, held.max_tokens, held.max_rollback
        host.forget()
        return Results(*attend_cached(*inputs, lengths, *storage, *constants, scale))
    return attend(held, storage, inputs, lengths, scale, host)


def run_append(
    held: HeldRows, storage: CacheTensors, key: Tensor, value: Tensor, lengths: Tensor | None, host: HostPositions
) -> None:
    """``append``, through the operator if a compiler traces the call."""
    if torch.compiler.is_compiling():
        constants = held.pattern.spec, held.max_tokens, held.max_rollback
        host.forget()
        append_cached(key, value, lengths, *storage, *constants)
    else:
        append(held, storage, key, value, lengths, host)

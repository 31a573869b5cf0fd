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

    Replays of a CUDA graph change positions without the host. So the positions of a cache that was captured are read from
    the device for every chunk.
    """

    def __init__(self, known: list[int] | None = None) -> None:
        self.known = known
        self._is_untracked = False

    def read(self, storage: CacheTensors) -> list[int]:
        """The positions, which are read from the device if they are not known."""
        if self.known is not None:
            return self.known
        found: list[int] = storage.tokens_seen.tolist()
        self.known = None if self._is_untracked else found
        return found

    def forget(self) -> None:
        """Note that positions change on the device."""
        self._is_untracked |= torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        self.known = None

    def start_again(self, batch: int) -> None:
        """Note that all samples begin again at position 0."""
        self.forget()
        self.known = None if self._is_untracked else [0] * batch

    def stop_tracking(self) -> None:
        """Note that positions change without the host from now on: a compiled call may be captured in a CUDA graph."""
        self._is_untracked = True
        self.known = None

    def take(self) -> list[int] | None:
        """What is known before tokens are appended. Nothing is known until ``add``, also if an error is raised."""
        known, self.known = self.known, None
        return known

    def add(self, known: list[int] | None, counts: Sequence[int] | None, most: int | None, device: torch.device) -> None:
        """Note that tokens were appended to known positions, to ``most`` tokens. ``counts`` are None if not known."""
        self._is_untracked |= device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if known is None or counts is None or self._is_untracked:
            return
        added = [position + count for position, count in zip(known, counts, strict=True)]
        self.known = added if most is None else [min(position, most) for position in added]


def attend(
    held: HeldRows, storage: CacheTensors, inputs: Inputs, lengths: Tensor | None, scale: float, host: HostPositions
) -> Results:
    """The attention of a chunk, which is appended. A call that is refused changes nothing."""
    n, device = inputs.key.shape[1], inputs.key.device
    if n > MOST_STEPS and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"chunks of more than {MOST_STEPS} tokens have tables for their position, which a CUDA graph would keep: got "
            f"{n} tokens while a graph is captured; capture steps of at most {MOST_STEPS} tokens"
        )
    counts = _checked_counts(held, storage, inputs.key, lengths, host)
    positions = host.read(storage) if n > MOST_STEPS else ()
    known = host.take()
    if n > MOST_STEPS:
        assert counts is not None
        at, kernel = (positions, counts), _chunk_kernel(held, storage, inputs.query, scale)
        results = chunk(inputs.rows_contiguous(), at, kernel)
        _single_tokens(inputs.key).append_(held, storage, inputs.key, inputs.value, lengths)
    else:
        results = _attend_tokens(held, storage, inputs, lengths, scale)
    host.add(known, counts, held.max_tokens, device)
    return results


def _attend_tokens(
    held: HeldRows, storage: CacheTensors, inputs: Inputs, lengths: Tensor | None, scale: float
) -> Results:  # fmt: skip
    """The attention of few tokens, one after the other."""
    attend_token = _single_tokens(inputs.key).step
    lengths = None if lengths is None else lengths.to(inputs.key.device, non_blocking=True)
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
    """Append a chunk. A call that is refused changes nothing."""
    counts = _checked_counts(held, storage, key, lengths, host)
    known = host.take()
    _single_tokens(key).append_(held, storage, key, value, lengths)
    host.add(known, counts, held.max_tokens, key.device)


def _checked_counts(
    held: HeldRows, storage: CacheTensors, key: Tensor, lengths: Tensor | None, host: HostPositions
) -> Sequence[int] | None:
    """The tokens of each sample, or None if they are not read; raise if they are not valid.

    Few tokens on a GPU are not checked, because reading a tensor there is a device synchronisation.
    """
    n, most, many = key.shape[1], held.max_tokens, key.shape[1] > MOST_STEPS
    counts: Sequence[int] | None = (n,) * key.shape[0]
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
    kernel = stock_kernel("eager" if SDPA.why_not(request) else "sdpa", request)

    def attend_samples(samples: Sequence[int], position: int, inputs: Inputs) -> Results:
        if isinstance(backend, TableBackend) and fused.can_attend(held, position, inputs.key.shape[1]):
            return fused.attend_chunk(held, storage, samples, position, inputs, scale, backend)
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
        host.stop_tracking()
        return Results(*attend_cached(*inputs, lengths, *storage, *constants, scale))
    return attend(held, storage, inputs, lengths, scale, host)


def run_append(
    held: HeldRows, storage: CacheTensors, key: Tensor, value: Tensor, lengths: Tensor | None, host: HostPositions
) -> None:
    """``append``, through the operator if a compiler traces the call."""
    if torch.compiler.is_compiling():
        constants = held.pattern.spec, held.max_tokens, held.max_rollback
        host.stop_tracking()
        append_cached(key, value, lengths, *storage, *constants)
    else:
        append(held, storage, key, value, lengths, host)

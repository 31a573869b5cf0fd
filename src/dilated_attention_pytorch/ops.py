"""The custom operators: schema, fake, backward operator and autograd, so that compilers see one opaque node.

The pattern travels as a string and the tile kernel is chosen when the operator runs: the graph knows neither.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.backends import eager, sdpa
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.patterns import Dilated
from dilated_attention_pytorch.plan import Plan, compile_plan
from dilated_attention_pytorch.spans import Span, host_cu_seqlens, host_lengths, spans
from dilated_attention_pytorch.tiles import TileKernel, backward_, forward_

_BACKENDS = {"sdpa": sdpa.kernel, "eager": eager.kernel}


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which partial results are merged, and of lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _plans(
    query: Tensor, key: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, pattern: str, is_causal: bool
) -> list[tuple[Span, Plan]]:
    batch, n, m = query.shape[0], query.shape[1], key.shape[1]
    found = spans(batch, n, m, host_lengths(lengths, m), host_cu_seqlens(cu_seqlens, m))
    decoded = Dilated.from_spec(pattern)
    return [
        (span, compile_plan(decoded, span.length, key.shape[2], is_causal=is_causal, queries=span.positions))
        for span in found
    ]


def _tile_kernel(backend: str, query: Tensor) -> TileKernel:
    return _BACKENDS[backend](Request.of(query, dropout_p=0.0))


def _rows_contiguous(x: Tensor) -> Tensor:
    """Kernels read rows of D consecutive elements; other layouts (rare) are copied once."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _forward(
    plans: list[tuple[Span, Plan]], query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: TileKernel
) -> tuple[Tensor, Tensor]:
    """Accumulated ``out (B, N, H, D)`` and ``lse (B, N, H)``, both in the accumulation type."""
    dtype = accumulate_dtype(query.dtype)
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    lse_bnh = torch.full(query.shape[:-1], -torch.inf, dtype=dtype, device=query.device)
    for span, plan in plans:
        q = query[span.samples, span.queries]
        k, v = (x[span.samples, span.keys] for x in (key, value))
        rows = (span.samples, span.queries)
        forward_(plan, q, k, v, out[rows], lse_bnh[rows], scale=scale, kernel=kernel)
    return out, lse_bnh


@torch.library.custom_op("dilated_attention::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    pattern: str,
    is_causal: bool,
    scale: float,
    detach_mixing: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))`` of a dilated pattern."""
    query, key, value = map(_rows_contiguous, (query, key, value))
    plans = _plans(query, key, lengths, cu_seqlens, pattern, is_causal)
    out, lse_bnh = _forward(plans, query, key, value, scale, _tile_kernel(backend, query))
    return out.to(query.dtype), lse_bnh.transpose(1, 2).contiguous()


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, n, heads, _d = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty((batch, heads, n), dtype=accumulate_dtype(query.dtype))


@torch.library.custom_op("dilated_attention::attend_backward", mutates_args=())
def attend_backward(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    pattern: str,
    is_causal: bool,
    scale: float,
    detach_mixing: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` from the merged ``out`` and ``lse``: each tile's ordinary backward is its exact share."""
    query, key, value, dout = map(_rows_contiguous, (query, key, value, dout))
    plans = _plans(query, key, lengths, cu_seqlens, pattern, is_causal)
    kernel = _tile_kernel(backend, query)
    dtype = accumulate_dtype(query.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (query, key, value))
    lse_bnh = lse.transpose(1, 2).contiguous()
    dlse_bnh = None if dlse is None else dlse.transpose(1, 2).contiguous()
    # With constant mixing weights, delta comes from the branch's own output, which is computed again.
    branches = range(len(Dilated.from_spec(pattern).branches)) if detach_mixing else (None,)
    for branch in branches:
        some = plans if branch is None else [(span, plan.of_branch(branch)) for span, plan in plans]
        branch_out = out if branch is None else _forward(some, query, key, value, scale, kernel)[0].to(query.dtype)
        for span, plan in some:
            rows, columns = (span.samples, span.queries), (span.samples, span.keys)
            backward_(
                plan,
                dout[rows],
                None if dlse_bnh is None else dlse_bnh[rows],
                query[rows],
                key[columns],
                value[columns],
                branch_out[rows],
                lse_bnh[rows],
                (dq[rows], dk[columns], dv[columns]),
                scale=scale,
                kernel=kernel,
            )
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


@attend_backward.register_fake
def _(dout: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, lengths, cu_seqlens, *ctx.constants = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, *output, lengths, cu_seqlens)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, lengths, cu_seqlens = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 10
    if dout is None:
        dout = torch.zeros_like(out)
    grads = attend_backward(dout, dlse, query, key, value, out, lse, lengths, cu_seqlens, *ctx.constants)
    return (*grads, *(None,) * 7)


attend.register_autograd(_backward, setup_context=_setup_context)

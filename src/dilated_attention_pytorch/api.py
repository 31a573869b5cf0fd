"""The public functions: check the arguments, choose a backend, call it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dilated_attention_pytorch import backends, ops
from dilated_attention_pytorch.backends import reference
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.merge import accumulate_dtype
from dilated_attention_pytorch.patterns import Dilated
from dilated_attention_pytorch.spans import host_cu_seqlens, host_lengths, spans

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INDEX_DTYPES = (torch.int32, torch.int64)


def check_qkv(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise if these are not tensors of attention."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, sequence, heads, head size), got {x.dim()} dimensions: {tuple(x.shape)}"
            )
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}; use .to()"
        )
    if query.dtype not in _DTYPES:
        raise TypeError(f"the dtype must be one of {', '.join(map(str, _DTYPES))}, got {query.dtype}; convert with .to()")
    if not query.device == key.device == value.device:
        raise ValueError(f"query, key and value must be on one device, got {query.device}, {key.device} and {value.device}")
    if key.shape != value.shape:
        raise ValueError(f"key and value must have the same shape, got {tuple(key.shape)} and {tuple(value.shape)}")
    (batch, n, heads, head_dim), (key_batch, m, key_heads, key_head_dim) = query.shape, key.shape
    if batch != key_batch:
        raise ValueError(f"query and key must have the same batch size, got {batch} and {key_batch}")
    if head_dim != key_head_dim or head_dim == 0:
        raise ValueError(f"query and key must have the same head size, at least 1, got {head_dim} and {key_head_dim}")
    if key_heads == 0 or heads == 0 or heads % key_heads:
        raise ValueError(
            f"the query heads must be a multiple of the key heads (grouped-query attention), at least 1: got {heads} query "
            f"heads and {key_heads} key heads"
        )
    if n > m:
        raise ValueError(
            f"query rows are the last positions of the sequence, so there can be at most as many as keys: got {n} "
            f"queries and {m} keys"
        )


def check_pattern(pattern: Dilated) -> None:
    """Raise if this is no pattern."""
    if not isinstance(pattern, Dilated):
        raise TypeError(f"pattern must be a Dilated, got {type(pattern).__name__}; write Dilated([2048, 4096], [1, 2])")


def _check_no_forward_derivative(*tensors: Tensor) -> None:
    """Operators without a forward-mode formula would drop the tangent in silence."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):  # type: ignore[no-untyped-call]
        raise NotImplementedError("forward-mode derivatives need backend='reference' (short sequences)")


def _check_index_vector(name: str, x: Tensor | None, entries: int | None, device: torch.device) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of integers, got {type(x).__name__}; use torch.tensor({name})")
    if x.dtype not in _INDEX_DTYPES or x.dim() != 1:
        hint = "; the lengths of a mask are mask.sum(-1)" if x.dtype == torch.bool else ""
        raise ValueError(f"{name} must be one-dimensional int32 or int64, got {x.dim()} dimensions of {x.dtype}{hint}")
    if entries is not None and x.shape[0] != entries:
        raise ValueError(f"{name} must have one entry per sample: got {x.shape[0]} entries for a batch of {entries}")
    if x.device != device and x.device.type != "cpu":
        raise ValueError(f"{name} must be on the device of query ({device}) or on the CPU, got {x.device}")


def check_options(scale: float | None, dropout_p: float, mixing_gradient: str) -> None:
    """Raise if an option that does not depend on tensors is not one ``attention`` takes."""
    if isinstance(scale, Tensor) or not isinstance(scale, float | int | None):
        raise TypeError(
            f"scale must be a number, got {type(scale).__name__}; multiply the query by a learned scale instead"
        )
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if not isinstance(dropout_p, float | int):
        raise TypeError(f"the dropout probability must be a number, got {dropout_p!r}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"the dropout probability p must satisfy 0 <= p < 1, got {dropout_p}")
    if mixing_gradient not in ("exact", "detached"):
        raise ValueError(f"mixing_gradient must be 'exact' or 'detached', got {mixing_gradient!r}")


def check_call(
    query: Tensor,
    key: Tensor,
    is_causal: bool,
    seed: int | Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raise if these arguments do not fit one another."""
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be True or False, got {is_causal!r}; other masks are not supported")
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.is_floating_point():
            raise ValueError(f"seed must be one integer, got a tensor of shape {tuple(seed.shape)} and {seed.dtype}")
    elif seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**63):
        raise ValueError(f"seed must be an integer of 64 bits, got {seed!r}")
    _check_index_vector("lengths", lengths, query.shape[0], query.device)
    _check_index_vector("cu_seqlens", cu_seqlens, None, query.device)
    if cu_seqlens is None:
        return
    if lengths is not None:
        raise ValueError("lengths (padded samples) and cu_seqlens (packed documents) exclude one another; pass one")
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"cu_seqlens needs as many queries as keys, got {query.shape[1]} and {key.shape[1]}; decode one document at a "
            "time instead"
        )
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens needs at least two entries, 0 and the total, got {cu_seqlens.shape[0]}")


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast does to the inputs of ``scaled_dot_product_attention``."""
    if not all(isinstance(x, Tensor) for x in tensors):
        return tensors  # refused below
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    seed: int | Tensor | None = ...,
    lengths: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    mixing_gradient: str = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    seed: int | Tensor | None = ...,
    lengths: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    mixing_gradient: str = ...,
    backend: str = ...,
    return_lse: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mixing_gradient: str = "exact",
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the pairs of a pattern: ``out_i = sum_j m(i,j) exp(s_ij - lse_i) v_j``.

    ``s_ij = scale * q_i . k_j``, ``m`` is the pattern's multiplicity and ``lse_i = log sum_j m(i,j) exp(s_ij)``.

    Args:
        query: (B, N, H, D); row ``a`` is position ``a + M - N``, so with ``N < M`` the queries are the last positions.
        key, value: (B, M, G, D) with ``H % G == 0``; query head ``h`` reads key head ``h // (H // G)``.
        pattern: which positions meet, for example ``Dilated([2048, 4096], [1, 2])``.
        is_causal: a position sees itself and earlier ones only.
        scale: of the scores; ``D ** -0.5`` by default.
        dropout_p: probability of dropping a weight. Whether ``(sample, head, i, j, branch)`` is kept depends on ``seed``
            and those numbers alone. The backends ``triton`` and ``reference`` support it.
        seed: of dropout; drawn from PyTorch's generator of the query's device if None.
        lengths: (B,), the valid positions at the front of each sample. Its result is what it would be alone; rows behind
            are 0 (lse -inf). On a GPU this waits for the device.
        cu_seqlens: (documents + 1,), boundaries of documents packed into each row of tokens, each as if alone. On a GPU
            this waits for the device.
        mixing_gradient: ``"exact"``, or ``"detached"`` to treat the weights of the branches as constants as the paper
            authors' code does.
        backend: ``"auto"`` (the first of the following that can), ``"hopper"``, ``"triton"``, ``"sdpa"``, ``"eager"`` or
            ``"reference"``.
        return_lse: return ``(out, lse)`` with lse (B, H, N), float32 (float64 for float64 inputs), differentiable.

    Returns:
        (B, N, H, D), exactly 0 (lse -inf) in rows that meet nobody.

    >>> q, k, v = torch.randn(3, 1, 1000, 8, 64).unbind(0)
    >>> attention(q, k, v, Dilated([256, 512], [1, 2]), is_causal=True).shape
    torch.Size([1, 1000, 8, 64])
    """
    check_pattern(pattern)
    query, key, value = _autocast(query, key, value)
    check_qkv(query, key, value)
    check_options(scale, dropout_p, mixing_gradient)
    check_call(query, key, is_causal, seed, lengths, cu_seqlens)
    pattern.check_key_heads(key.shape[2])
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    chosen = backends.choose(backend, Request.of(query, dropout_p))
    if chosen != "reference":
        _check_no_forward_derivative(query, key, value)
    detach = mixing_gradient == "detached"
    used_seed = _seed(seed, dropout_p, query)
    if chosen == "reference":
        out, lse = _reference(
            query, key, value, pattern, lengths, cu_seqlens,
            is_causal=is_causal, scale=scale, dropout_p=dropout_p, seed=used_seed, detach_mixing=detach,
        )  # fmt: skip
    else:
        out, lse = ops.attend(
            query, key, value, lengths, cu_seqlens, used_seed, pattern.spec, is_causal, scale, dropout_p, detach, chosen
        )
    return (out, lse) if return_lse else out


def _seed(seed: int | Tensor | None, dropout_p: float, query: Tensor) -> Tensor | None:
    if dropout_p == 0.0:
        return None
    if seed is None:
        return torch.randint(0, 2**62, (), dtype=torch.int64, device=query.device)
    return torch.as_tensor(seed, dtype=torch.int64, device=query.device)


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    if lengths is None and cu_seqlens is None:
        return reference.attend(query, key, value, pattern, **options, first_sample=0, first_row=0)
    (batch, n, heads, _), m = query.shape, key.shape[1]
    # Sequences of their own are computed on their own: a NaN in one cannot reach another through 0 * NaN.
    # (selected, so that the result belongs to the graph even if every sequence is empty)
    never = torch.zeros((), dtype=torch.bool, device=query.device)
    out = torch.where(never, query, 0.0)
    lse = torch.full((batch, heads, n), -torch.inf, dtype=accumulate_dtype(query.dtype), device=query.device)
    for span in spans(batch, n, m, host_lengths(lengths, m), host_cu_seqlens(cu_seqlens, m)):
        part, part_lse = reference.attend(
            query[span.samples, span.queries],
            key[span.samples, span.keys],
            value[span.samples, span.keys],
            pattern,
            **options,
            first_sample=span.samples.start,
            first_row=span.keys.start,
        )
        out[span.samples, span.queries] = part
        lse[span.samples, :, span.queries] = part_lse
    return out, lse


def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    offsets: str | Sequence[int] = "interleaved",
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mixing_gradient: str = "exact",
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """LongNet's dilated attention: ``attention`` with the pattern ``Dilated(segment_lengths, dilation_rates, offsets)``.

    >>> q, k, v = torch.randn(3, 1, 1000, 8, 64).unbind(0)
    >>> dilated_attention(q, k, v, segment_lengths=[256, 512], dilation_rates=[1, 2]).shape
    torch.Size([1, 1000, 8, 64])
    """
    return attention(
        query,
        key,
        value,
        Dilated(segment_lengths, dilation_rates, offsets),
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout_p,
        seed=seed,
        lengths=lengths,
        cu_seqlens=cu_seqlens,
        mixing_gradient=mixing_gradient,
        backend=backend,
        return_lse=return_lse,
    )


def attention_weights(
    query: Tensor,
    key: Tensor,
    pattern: Dilated,
    query_rows: Sequence[int] | Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """The attention weights of chosen query rows, (B, H, rows, M), in memory proportional to the length.

    ``query_rows`` are row numbers of ``query``, negative ones counted from its end. A pair that meets in several branches
    has the sum of its weights; a row that meets nobody, or lies behind ``lengths``, has zeros.

    >>> q, k = torch.randn(2, 1, 1000, 8, 64).unbind(0)
    >>> attention_weights(q, k, Dilated([256, 512], [1, 2]), query_rows=[0, 999]).sum(-1).allclose(torch.tensor(1.0))
    True
    """
    check_pattern(pattern)
    check_qkv(query, key, key)
    check_options(scale, 0.0, "exact")
    check_call(query, key, is_causal, None, lengths, None)
    pattern.check_key_heads(key.shape[2])
    n, m = query.shape[1], key.shape[1]
    if not isinstance(query_rows, Tensor | list | tuple | range):
        raise TypeError(f"query_rows must be a list or tensor of row numbers, got {query_rows!r}")
    rows = torch.as_tensor(query_rows, device=query.device)
    if rows.numel() == 0:
        rows = rows.to(torch.int64)
    if rows.dtype not in _INDEX_DTYPES:
        raise TypeError(f"query_rows must be integers, got {rows.dtype}; a mask becomes row numbers by mask.nonzero()")
    if rows.dim() != 1 or (rows.numel() and (int(rows.min()) < -n or int(rows.max()) >= n)):
        raise ValueError(f"query_rows must be a list of row numbers from {-n} to {n - 1}, got {query_rows}")
    rows = torch.where(rows < 0, rows + n, rows)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    compute = accumulate_dtype(query.dtype)
    result = torch.zeros((query.shape[0], query.shape[2], len(rows), m), dtype=compute, device=query.device)
    for span in spans(query.shape[0], n, m, host_lengths(lengths, m), None):
        inside = rows < span.queries.stop
        positions = rows[inside] + span.positions.start
        q, k = query[span.samples][:, rows[inside]].to(compute), key[span.samples, span.keys].to(compute)
        part, _ = reference.weights(q, k, pattern, positions, length=span.length, is_causal=is_causal, scale=scale)
        result[span.samples, :, inside.nonzero().squeeze(1), : span.length] = part.to(compute)
    return result

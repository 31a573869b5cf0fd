"""The public functions: check the arguments, choose a backend, call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from dilated_attention_pytorch import backends, ops
from dilated_attention_pytorch.backends import reference
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.blocks.call import block_attention, block_attention_weights
from dilated_attention_pytorch.checks import (
    INDEX_DTYPES,
    check_call,
    check_no_forward_derivative,
    check_no_sharding,
    check_options,
    check_order,
    check_pattern,
    check_qkv,
    prepare,
    rows_in_order,
)
from dilated_attention_pytorch.execute.merge import accumulate_dtype
from dilated_attention_pytorch.orders.order import Identity, Order
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.sequences import host_cu_seqlens, host_lengths, spans

if TYPE_CHECKING:  # a process without a group never imports torch.distributed
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from dilated_attention_pytorch.shards import Shards


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated | BlockSparse,
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
    group: ProcessGroup | DeviceMesh | None = ...,
    layout: str | Shards = ...,
    bucket_size: int | None = ...,
    transport: str = ...,
    comm_dtype: torch.dtype | None = ...,
    order: Order | None = ...,
    ordered: bool | None = ...,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated | BlockSparse,
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
    group: ProcessGroup | DeviceMesh | None = ...,
    layout: str | Shards = ...,
    bucket_size: int | None = ...,
    transport: str = ...,
    comm_dtype: torch.dtype | None = ...,
    order: Order | None = ...,
    ordered: bool | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated | BlockSparse,
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
    group: ProcessGroup | DeviceMesh | None = None,
    layout: str | Shards = "contiguous",
    bucket_size: int | None = None,
    transport: str = "auto",
    comm_dtype: torch.dtype | None = None,
    order: Order | None = None,
    ordered: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the pairs of a pattern: ``out_i = sum_j m(i,j) exp(s_ij - lse_i) v_j``.

    ``s_ij = scale * q_i . k_j``, ``m`` is the pattern's multiplicity and ``lse_i = log sum_j m(i,j) exp(s_ij)``.

    Args:
        query: (B, N, H, D); row ``a`` is position ``a + M - N``, so with ``N < M`` the queries are the last positions.
        key, value: (B, M, G, D) with ``H % G == 0``; query head ``h`` reads key head ``h // (H // G)``.
        pattern: which positions meet, for example ``Dilated([2048, 4096], [1, 2])``; or a ``BlockSparse``, which has
            no mixing gradients, and runs on ``"sdpa"`` and ``"eager"`` with ``group``; ``"hopper"`` takes
            blocks of 128 and 256 with ``N == M``.
        is_causal: a position sees itself and earlier ones only.
        scale: of the scores; ``D ** -0.5`` by default.
        dropout_p: probability of dropping a weight. Whether ``(sample, head, i, j, branch)`` is kept depends on ``seed``
            and those numbers alone (branch 0 for a ``BlockSparse``). The backends ``triton``, ``eager`` and ``reference``
            support it.
        seed: of dropout; drawn from PyTorch's generator of the query's device if None.
        lengths: (B,), the valid positions at the front of each sample. Its result is what it would be alone; rows behind
            are 0 (lse -inf). On a GPU this waits for the device.
        cu_seqlens: (documents + 1,), boundaries of documents packed into each row of tokens, each as if alone. On a GPU
            this waits for the device.
        mixing_gradient: ``"exact"``, or ``"detached"`` to treat the weights of the branches as constants as the paper
            authors' code does.
        backend: ``"auto"`` (the first of the following that can, or a faster one: see ``explain``), ``"hopper"``,
            ``"triton"``, ``"sdpa"``, ``"eager"`` or ``"reference"``. With ``group``, ``"hopper"`` and ``"triton"`` compute
            a rank's own queries with its own keys, stock operators those with keys of others; ``"auto"`` takes
            ``"hopper"`` so for patterns of several branches (contiguous shards, no dropout, exact mixing gradients, no
            causal order), else stock operators for all.
        return_lse: return ``(out, lse)`` with lse (B, H, N), float32 (float64 for float64 inputs), differentiable.
        group: a process group, or a device mesh of one dimension or with one named ``"cp"``, over whose ranks the sequence
            is sharded: the tensors are this rank's rows, the result is theirs, ``lengths`` and ``cu_seqlens`` count
            positions of the whole sequence. Shards may have any lengths. Every rank must call, with the same arguments;
            without ``seed``, the first rank draws it.
        layout: how the shards lie in the sequence: ``"contiguous"``, in the order of ranks, or ``"zigzag"``, where each
            rank has an early and a late half, which evens causal work (see ``distributed.shard_sequence``). Or
            ``distributed.Shards``, by which every rank knows the rows of all: ranks then compare their arguments only at
            the first call with them, and a rank that refuses its own arguments is waited for until the group's timeout.
        bucket_size: with ``group``, rows per message, per key head and sample; by default a sixteenth of the longest
            shard, at least 512 (on a GPU 16,384). Two messages each way exist at a time. Not for ``BlockSparse``: there,
            the rows that a rank reads of another are one message.
        transport: with ``group``, ``"ring"`` (one message under way while one is computed with), ``"allgather"`` (all
            messages at once, in memory for all of them), ``"ulysses"`` (heads instead of rows, for one dense segment) or
            ``"auto"`` (by ``distributed.cost``).
        comm_dtype: with ``group``, the type in which gradients of keys and values travel; by default float32 (float64
            for float64 inputs).
        order: an order of the positions, for example ``Hilbert.grid(height, width)``: the pattern sees the ordered
            sequence, ``is_causal`` means the original positions, and rows come in and go out in the original order. The
            result is that of ``order.permute`` on the inputs, the pattern, and ``order.unpermute`` on the results; dropout
            counts places of the ordered sequence. If causal, ``"triton"`` (not for a ``BlockSparse``), ``"eager"`` and
            ``"reference"`` serve it. Not with ``lengths`` or ``cu_seqlens``, and only with ``N == M``.
        ordered: the rows of query, key and value already lie in ``order``, and those of the results do: a model orders its
            embeddings once, by ``order.permute`` or ``distributed.shard_sequence(order=...)``, and no layer moves a row.
            With ``group`` it is always so (None means True, False is refused): tensors are the rank's slice of the ordered
            sequence, because no rank can move the rows of others. Without, None means False.

    Returns:
        (B, N, H, D), exactly 0 (lse -inf) in rows that meet nobody.

    >>> q, k, v = torch.randn(3, 1, 1000, 8, 64).unbind(0)
    >>> attention(q, k, v, Dilated([256, 512], [1, 2]), is_causal=True).shape
    torch.Size([1, 1000, 8, 64])

    A picture of 40 x 25 patches, row by row: along a Hilbert curve every segment is a compact part of it.

    >>> from dilated_attention_pytorch import Hilbert
    >>> order = Hilbert.grid(40, 25)
    >>> out = attention(q, k, v, Dilated([256, 512], [1, 2]), order=order)
    >>> ordered = attention(*map(order.permute, (q, k, v)), Dilated([256, 512], [1, 2]))
    >>> order.unpermute(ordered).equal(out)
    True

    A model applies the order once, at its embedding, and says so; causality still goes by original position.

    >>> ordered = attention(*map(order.permute, (q, k, v)), Dilated([256], [1]), is_causal=True, order=order, ordered=True)
    >>> order.unpermute(ordered).equal(attention(q, k, v, Dilated([256], [1]), is_causal=True, order=order))
    True
    """
    if group is not None:
        from dilated_attention_pytorch.distributed.ring import ring_attention  # imports torch.distributed

        # Its arguments are checked together with those of the other ranks.
        out, sharded_lse = ring_attention(
            query, key, value, pattern, group=group, layout=layout, bucket_size=bucket_size, transport=transport,
            comm_dtype=comm_dtype, is_causal=is_causal, scale=scale, dropout_p=dropout_p, seed=seed, lengths=lengths,
            cu_seqlens=cu_seqlens, mixing_gradient=mixing_gradient, backend=backend, return_lse=return_lse, order=order,
            ordered=ordered,
        )  # fmt: skip
        return out if sharded_lse is None or not return_lse else (out, sharded_lse)
    if isinstance(pattern, BlockSparse):
        check_no_sharding(layout=layout, bucket_size=bucket_size, transport=transport, comm_dtype=comm_dtype)
        out, block_lse = block_attention(
            query, key, value, pattern, is_causal=is_causal, scale=scale, dropout_p=dropout_p, seed=seed, lengths=lengths,
            cu_seqlens=cu_seqlens, mixing_gradient=mixing_gradient, backend=backend, order=order, ordered=ordered,
        )  # fmt: skip
        return (out, block_lse) if return_lse else out
    query, key, value, used_scale = prepare(
        query, key, value, pattern, is_causal=is_causal, scale=scale, dropout_p=dropout_p, seed=seed, lengths=lengths,
        cu_seqlens=cu_seqlens, mixing_gradient=mixing_gradient,
    )  # fmt: skip
    check_no_sharding(layout=layout, bucket_size=bucket_size, transport=transport, comm_dtype=comm_dtype)
    in_order = rows_in_order(order, ordered, sharded=False)
    if order is not None:
        check_order(order, query, key, lengths, cu_seqlens)
        order = None if isinstance(order, Identity) else order
    ordered_causal = order is not None and is_causal
    request = Request.of(query, dropout_p, ordered_causal)
    chosen = backends.choose(backend, request)
    if chosen != "reference":
        check_no_forward_derivative(query, key, value)
    detach = mixing_gradient == "detached"
    used_seed = ops.drawn_seed(seed, dropout_p, query)
    positions = order.positions if order is not None and is_causal else None
    if order is not None and not in_order:
        query, key, value = order.permute(query), order.permute(key), order.permute(value)
    if chosen == "reference":
        out, lse = _reference(
            query, key, value, pattern, lengths, cu_seqlens,
            is_causal=is_causal, scale=used_scale, dropout_p=dropout_p, seed=used_seed, detach_mixing=detach,
            positions=positions,
        )  # fmt: skip
    else:
        if positions is not None:
            # The tiles are whole and masked by position. Padding lies behind every position: causality hides it.
            pattern, is_causal = pattern.without_padding(), False
        out, lse = ops.call_attend(
            query, key, value, lengths, cu_seqlens, used_seed, positions, pattern.spec, is_causal, used_scale, dropout_p,
            detach, backends.for_operator(backend, chosen, request),
        )  # fmt: skip
    if order is not None and not in_order:
        out, lse = order.unpermute(out), order.unpermute(lse, dim=2) if return_lse else lse
    return (out, lse) if return_lse else out


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
    out = torch.where(never, query + key.sum() + value.sum(), 0.0)
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
    group: ProcessGroup | DeviceMesh | None = None,
    layout: str | Shards = "contiguous",
    bucket_size: int | None = None,
    transport: str = "auto",
    comm_dtype: torch.dtype | None = None,
    order: Order | None = None,
    ordered: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """LongNet's dilated attention: ``attention`` with the pattern ``Dilated(segment_lengths, dilation_rates, offsets)``.

    >>> q, k, v = torch.randn(3, 1, 1000, 8, 64).unbind(0)
    >>> dilated_attention(q, k, v, segment_lengths=[256, 512], dilation_rates=[1, 2]).shape
    torch.Size([1, 1000, 8, 64])
    """
    try:
        pattern = Dilated(segment_lengths, dilation_rates, offsets)
    except (ValueError, TypeError) as mistake:
        if group is not None:
            from dilated_attention_pytorch.distributed.agreement import refuse  # imports torch.distributed

            refuse(group, layout, mistake)
        raise
    return attention(
        query,
        key,
        value,
        pattern,
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout_p,
        seed=seed,
        lengths=lengths,
        cu_seqlens=cu_seqlens,
        mixing_gradient=mixing_gradient,
        backend=backend,
        return_lse=return_lse,
        group=group,
        layout=layout,
        bucket_size=bucket_size,
        transport=transport,
        comm_dtype=comm_dtype,
        order=order,
        ordered=ordered,
    )


def attention_weights(
    query: Tensor,
    key: Tensor,
    pattern: Dilated | BlockSparse,
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
    if not isinstance(pattern, BlockSparse):
        check_pattern(pattern)
    check_qkv(query, key, key)
    check_options(scale, 0.0, "exact")
    check_call(query, key, is_causal, None, lengths, None)
    if not isinstance(pattern, BlockSparse):
        pattern.check_key_heads(key.shape[2])
    n, m = query.shape[1], key.shape[1]
    if not isinstance(query_rows, Tensor | list | tuple | range):
        raise TypeError(f"query_rows must be a list or tensor of row numbers, got {query_rows!r}")
    rows = torch.as_tensor(query_rows, device=query.device)
    if rows.numel() == 0:
        rows = rows.to(torch.int64)
    if rows.dtype not in INDEX_DTYPES:
        raise TypeError(f"query_rows must be integers, got {rows.dtype}; a mask becomes row numbers by mask.nonzero()")
    if rows.dim() != 1 or (rows.numel() and (int(rows.min()) < -n or int(rows.max()) >= n)):
        raise ValueError(f"query_rows must be a list of row numbers from {-n} to {n - 1}, got {query_rows}")
    rows = torch.where(rows < 0, rows + n, rows)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    if isinstance(pattern, BlockSparse):
        return block_attention_weights(query, key, pattern, rows, is_causal=is_causal, scale=scale, lengths=lengths)
    compute = accumulate_dtype(query.dtype)
    result = torch.zeros((query.shape[0], query.shape[2], len(rows), m), dtype=compute, device=query.device)
    for span in spans(query.shape[0], n, m, host_lengths(lengths, m), None):
        inside = rows < span.queries.stop
        positions = rows[inside] + span.positions.start
        q, k = query[span.samples][:, rows[inside]].to(compute), key[span.samples, span.keys].to(compute)
        part, _ = reference.weights(q, k, pattern, positions, length=span.length, is_causal=is_causal, scale=scale)
        result[span.samples, :, inside.nonzero().squeeze(1), : span.length] = part.to(compute)
    return result

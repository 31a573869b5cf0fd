"""The public functions: build a ``Call``, choose a backend, run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Unpack, overload

import torch
from torch import Tensor

from dilated_attention_pytorch import backends, operators
from dilated_attention_pytorch.backends.reference import REFERENCE
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.call import (
    AttentionOptions,
    Sharding,
    as_sharding,
    check_no_forward_derivative,
    make_call,
)
from dilated_attention_pytorch.dtypes import INDEX_DTYPES
from dilated_attention_pytorch.jagged import is_jagged, pack, unpack
from dilated_attention_pytorch.known_calls import kind_of, known_calls
from dilated_attention_pytorch.lengths import Lengths
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.values import Inputs

if TYPE_CHECKING:  # a process without a group never imports torch.distributed
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


Pattern = Dilated | BlockSparse


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, *, return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    lengths: Lengths | None = None,
    starts: Lengths | None = None,
    cu_seqlens: Lengths | None = None,
    mixing_gradient: str = "exact",
    backend: str = "auto",
    return_lse: bool = False,
    order: Order | None = None,
    ordered: bool | None = None,
    group: ProcessGroup | DeviceMesh | Sharding | None = None,
    layout: str | Shards | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the pairs of a pattern: ``out_i = sum_j m(i,j) exp(s_ij - lse_i) v_j``.

    ``s_ij = scale * q_i . k_j``, ``m`` is the pattern's multiplicity and ``lse_i = log sum_j m(i,j) exp(s_ij)``.

    Args:
        query: (B, N, H, D); row ``a`` is position ``a + M - N``, so with ``N < M`` the queries are the last positions.
            Query, key and value may also be jagged nested tensors (B, sequence, H, D) of ``torch.nested``. Each sequence
            gets the result of a call of its own, and the results are nested likewise.
        key, value: (B, M, G, D) with ``H % G == 0``; query head ``h`` reads key head ``h // (H // G)``.
        pattern: which positions meet, for example ``Dilated([2048, 4096], [1, 2])``, or a ``BlockSparse``. A
            ``BlockSparse`` has no mixing gradients, and with ``group`` it runs on ``"sdpa"`` and ``"eager"``. For it,
            ``"hopper"`` takes blocks of 128 and 256 with ``N == M``.
        is_causal: a position sees itself and earlier ones only.
        scale: of the scores; ``D ** -0.5`` by default.
        dropout_p: probability of dropping a weight. Whether ``(sample, head, i, j, branch)`` is kept depends on ``seed``
            and those numbers alone (branch 0 for a ``BlockSparse``). The backends ``triton``, ``eager`` and ``reference``
            support it.
        seed: of dropout; drawn from PyTorch's generator of the query's device if None.
        lengths: (B,), the number of valid positions at the front of each sample, as a list, a tuple or a tensor. The result
            of a sample is what a call with this sample alone would give; rows behind its length are 0 (lse -inf). A tensor
            on a GPU costs one device synchronisation per call, every other form none. With ``N < M``, a sample shorter than
            the keys is refused, unless ``starts`` are given.
        starts: (B,), the first key row of each sample, in the same forms: padding in front. Sample ``b`` is the key rows
            ``starts[b]`` to ``starts[b] + lengths[b] - 1``, or to the end without ``lengths``. Its positions, also those of
            segments, blocks and dropout, count from ``starts[b]``. The result of a sample is what a call with these rows
            alone would give. Rows outside are 0 (lse -inf) and are not read. Any lengths go with ``N < M``: query row ``a``
            is key row ``a + M - N``, inside the sample or outside. Not with ``cu_seqlens`` and orders.
        cu_seqlens: (documents + 1,), boundaries of documents packed into each row of tokens, in the same forms. Each
            document gets the result of a call of its own.
        mixing_gradient: ``"exact"``, or ``"detached"`` to treat the weights of the branches as constants as the paper
            authors' code does.
        backend: ``"auto"`` takes the first of ``"hopper"``, ``"triton"``, ``"sdpa"``, ``"eager"`` and ``"reference"`` that
            can serve the call; ``explain`` says which and why. With ``group``, ``"hopper"`` and ``"triton"`` compute a
            rank's own queries with its own keys, and stock operators those with keys of other ranks. ``"auto"`` does so
            with ``"hopper"`` for patterns of several branches (contiguous shards, no dropout, exact mixing gradients, no
            causal order). Otherwise stock operators compute everything.
        return_lse: return ``(out, lse)`` with lse (B, H, N), float32 (float64 for float64 inputs), differentiable.
        group: a process group, a device mesh, or a ``Sharding``, over whose ranks the sequence is sharded. The tensors are
            this rank's rows, and so is the result. ``lengths``, ``starts`` and ``cu_seqlens`` count rows of the whole
            sequence.
            Shards may have any lengths. Every rank must call, with the same arguments. Without ``seed``, the first rank
            draws it. ``Sharding`` has the further options of how rows travel.
        layout: short for ``Sharding(group, layout)``: ``"contiguous"`` (the default), ``"zigzag"`` or
            ``distributed.Shards``.
        order: an order of the positions, for example ``Hilbert.grid(height, width)``: the pattern sees the ordered
            sequence, ``is_causal`` means the original positions, and rows come in and go out in the original order. The
            result is that of ``order.permute`` on the inputs, the pattern, and ``order.unpermute`` on the results. Dropout
            counts places of the ordered sequence. If causal, ``"hopper"`` and ``"triton"`` (not for a ``BlockSparse``),
            ``"eager"`` and ``"reference"`` serve it. With ``lengths`` or ``cu_seqlens``, the order keeps the rows of a
            sample or document together (``Hilbert.coordinates(coords, lengths=lengths)``, ``Order.padded``,
            ``Order.packed``, ``order.within``). Only with ``N == M``.
        ordered: the rows of query, key and value are in ``order`` already, and those of the results will be. A model orders
            its embeddings once, by ``order.permute`` or ``distributed.shard_sequence(order=...)``, and no layer moves a
            row. With ``group`` this is always so (None means True, False is refused): tensors are the rank's slice of the
            ordered sequence, because no rank can move the rows of others. Without ``group``, None means False.

    Returns:
        (B, N, H, D), exactly 0 (lse -inf) in rows that meet no key.

    >>> q, k, v = torch.randn(3, 1, 1000, 8, 64).unbind(0)
    >>> attention(q, k, v, Dilated([256, 512], [1, 2]), is_causal=True).shape
    torch.Size([1, 1000, 8, 64])

    A picture of 40 x 25 patches, row by row: along a Hilbert curve every segment is a compact region of it.

    >>> from dilated_attention_pytorch import Hilbert
    >>> order = Hilbert.grid(40, 25)
    >>> out = attention(q, k, v, Dilated([256, 512], [1, 2]), order=order)
    >>> ordered = attention(*map(order.permute, (q, k, v)), Dilated([256, 512], [1, 2]))
    >>> order.unpermute(ordered).equal(out)
    True

    A model applies the order once, at its embedding, and passes ``ordered=True``. Causality compares original positions.

    >>> ordered = attention(*map(order.permute, (q, k, v)), Dilated([256], [1]), is_causal=True, order=order, ordered=True)
    >>> order.unpermute(ordered).equal(attention(q, k, v, Dilated([256], [1]), is_causal=True, order=order))
    True

    Two slides of 900 and 1,000 tiles, padded: each has its own order and its own length.

    >>> coords, lengths = torch.randint(0, 100, (2, 1000, 2)), [900, 1000]
    >>> order = Hilbert.coordinates(coords, lengths=lengths)
    >>> tiles = torch.randn(2, 1000, 8, 64)
    >>> attention(tiles, tiles, tiles, Dilated([256, 512], [1, 2]), order=order, lengths=lengths).shape
    torch.Size([2, 1000, 8, 64])

    Two prompts of 300 and 1,000 tokens, padded in front, and one decoding step for both:

    >>> q, k, v = torch.randn(3, 2, 1000, 8, 64).unbind(0)
    >>> prompt = attention(q, k, v, Dilated([256, 512], [1, 2]), is_causal=True, starts=[700, 0])
    >>> step = attention(q[:, -1:], k, v, Dilated([256, 512], [1, 2]), is_causal=True, starts=[700, 0])
    >>> torch.testing.assert_close(step, prompt[:, -1:])
    """
    kind = None
    further = seed, lengths, starts, cu_seqlens, order, ordered, group, layout
    if type(dropout_p) is float and dropout_p == 0.0 and all(x is None for x in further):
        kind = kind_of(Inputs(query, key, value), pattern, is_causal, scale, mixing_gradient, backend)
        known = None if kind is None else known_calls.find(kind)
        if known is not None:
            out, lse = operators.call_attend(query, key, value, *known)
            return (out, lse) if return_lse else out
    options: AttentionOptions = {
        "is_causal": is_causal, "scale": scale, "dropout_p": dropout_p, "seed": seed, "lengths": lengths,
        "starts": starts, "cu_seqlens": cu_seqlens, "mixing_gradient": mixing_gradient, "backend": backend, "order": order,
        "ordered": ordered, "group": group, "layout": layout,
    }  # fmt: skip
    if group is not None:
        from dilated_attention_pytorch.distributed.ring import sharded_attention  # imports torch.distributed

        # It builds the call: a mistake of one rank is reported to the others.
        out, sharded_lse = sharded_attention(query, key, value, pattern, return_lse=return_lse, **options)
        return (out, sharded_lse) if return_lse and sharded_lse is not None else out
    if is_jagged(query, key, value):
        return _jagged_attention(Inputs(query, key, value), pattern, options, return_lse)
    call, inputs = make_call(query, key, value, pattern, return_lse=return_lse, **options)
    chosen = backends.choose(call.backend, Request.of(call))
    if chosen is not REFERENCE:
        check_no_forward_derivative(inputs)
    if order is None or not call.permutes or operators.moves_rows(call, chosen.name):
        out, lse = operators.run(call, inputs, chosen)
    else:
        out, lse = operators.run(call, Inputs(*map(order.permute, inputs)), chosen)
        out, lse = order.unpermute(out), order.unpermute(lse, dim=2) if return_lse else lse
    if kind is not None and chosen is not REFERENCE:
        known_calls.keep(kind, operators.OperatorArguments.of(call, inputs, None, chosen.name))
    return (out, lse) if return_lse else out


def _jagged_attention(
    inputs: Inputs, pattern: Pattern, options: AttentionOptions, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """``attention`` of nested tensors: their sequences are packed documents."""
    for name in ("lengths", "starts", "cu_seqlens"):
        if options.get(name) is not None:
            raise ValueError(f"nested tensors hold the lengths of their sequences, got {name} as well; leave it out")
    packed, offsets = pack(**inputs._asdict())
    options["cu_seqlens"] = offsets
    result = attention(*Inputs(*packed), pattern, return_lse=return_lse, **options)
    if isinstance(result, Tensor):
        return unpack(result, offsets)
    out, lse = result
    return unpack(out, offsets), unpack(lse, offsets, dim=2)


def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    offsets: str | Sequence[int] = "interleaved",
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """LongNet's dilated attention: ``attention`` with the pattern ``Dilated(segment_lengths, dilation_rates, offsets)``.

    The further options are those of ``attention``.

    >>> q, k, v = torch.randn(3, 1, 1000, 8, 64).unbind(0)
    >>> dilated_attention(q, k, v, segment_lengths=[256, 512], dilation_rates=[1, 2]).shape
    torch.Size([1, 1000, 8, 64])
    """
    try:
        pattern = Dilated(segment_lengths, dilation_rates, offsets)
    except (ValueError, TypeError) as mistake:
        sharding = as_sharding(options.get("group"), options.get("layout"))
        if sharding is not None:
            from dilated_attention_pytorch.distributed.agreement import refuse  # imports torch.distributed

            refuse(sharding, mistake)
        raise
    return attention(query, key, value, pattern, return_lse=return_lse, **options)


def attention_weights(
    query: Tensor,
    key: Tensor,
    pattern: Pattern,
    query_rows: Sequence[int] | Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    lengths: Lengths | None = None,
    starts: Lengths | None = None,
) -> Tensor:
    """The attention weights of chosen query rows, (B, H, rows, M), in memory proportional to the length.

    ``query_rows`` are row numbers of ``query``; negative ones are counted from its end. A pair that meets in several
    branches has the sum of its weights. A row that meets no key, or is behind ``lengths`` or before
    ``starts``, has zeros.

    >>> q, k = torch.randn(2, 1, 1000, 8, 64).unbind(0)
    >>> attention_weights(q, k, Dilated([256, 512], [1, 2]), query_rows=[0, 999]).sum(-1).allclose(torch.tensor(1.0))
    True
    """
    call, inputs = make_call(query, key, key, pattern, is_causal=is_causal, scale=scale, lengths=lengths, starts=starts)
    n = call.queries
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
    problem, options = operators.problem_and_options(call, inputs.query, inputs.key)
    return REFERENCE.row_weights(problem, inputs, rows, options)

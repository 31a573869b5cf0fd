"""Which rows of a batch are samples or documents: the mask function makes it once per forward, and every layer reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils import logging

from dilated_attention_pytorch.cache_operators import MOST_STEPS
from dilated_attention_pytorch.call import Sharding
from dilated_attention_pytorch.integrations.transformers.reading import (
    ODD_MASK,
    Breaks,
    Documents,
    HostRows,
    Samples,
    Sizes,
    read_documents,
    read_documents_operator,
    read_host,
    read_rows_operator,
)
from dilated_attention_pytorch.lengths import Lengths

logger = logging.get_logger(__name__)

_LOCAL_LAYERS = (
    "Layers with a sliding window or with chunks keep their own mask: sdpa computes them, and other layers are dilated."
)
_ONLY_LOCAL_LAYERS = (
    "No layer of this model is dilated: all of them have a sliding window or chunks, and sdpa computes them. For dilated "
    "attention set config.sliding_window to None."
)


class Chunk(NamedTuple):
    """The rows of a forward that a cache appends: for each sample the number, and the order with padding behind."""

    lengths: Lengths
    source: Tensor | None  # (B, N): row ``i`` of the chunk is row ``source[b, i]``; None if no sample has padding in front
    inverse: Tensor | None


class ForwardRows:
    """The rows of one forward, read once: the result of the mask function, which reaches every layer unchanged.

    Args:
        batch: samples.
        queries: rows of the queries. They are the last rows.
        total: rows of this forward and of those before it in the cache.
        keys: rows of the key tensor. A static cache has more than ``total``.
        is_causal: whether the mask is causal.
        mask: (B, total) bool, False for padding. None if there is no padding.
        breaks: where documents begin, if the mask function knows it.
    """

    ndim = 0  # not a padding mask, which has two dimensions
    sharding: Sharding | None = None  # if the rows are those of one rank

    def __init__(
        self, batch: int, queries: int, total: int, keys: int, is_causal: bool, mask: Tensor | None = None,
        breaks: Breaks | None = None,
    ) -> None:  # fmt: skip
        self.batch, self.queries, self.total, self.keys = batch, queries, total, keys
        self.is_causal, self.mask, self._breaks = is_causal, mask, breaks
        self._source: tuple[Tensor | None, Tensor | None] | None = None
        self._read: tuple[Samples | None, Documents | None] = None, None
        self._host: HostRows | None = None
        self._chunks: dict[torch.device, Chunk | None] = {}
        self._tail: Tensor | None = None
        self.is_compared = False  # the rows before this forward were compared with those that the cache has seen

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the mask."""
        return self.batch, self.total

    @property
    def past(self) -> int:
        """The rows of earlier forwards."""
        return self.total - self.queries

    def contiguous(self) -> ForwardRows:
        """The object itself. Generation with a static cache calls this method of masks."""
        return self

    def checked(self, mask_function: Callable[..., Tensor], local_size: int | None) -> ForwardRows:
        """The rows of a forward whose mask was made before, for layers with this mask function."""
        return self

    def read(
        self, position_ids: Tensor | None = None, cu_seqlens: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Samples | None, Documents | None]:  # fmt: skip
        """Samples with padding, or documents, or neither. At least one of the two is None.

        All layers of a model pass the same tensors. So the values are read on the host once per forward.
        """
        source = position_ids, None if cu_seqlens is None else cu_seqlens[0]
        if self._source is None or self._source[0] is not source[0] or self._source[1] is not source[1]:
            self._read = self._documents(*cu_seqlens) if cu_seqlens is not None else self._samples(position_ids)
            self._source = source
        return self._read

    def chunk(self, device: torch.device) -> Chunk | None:
        """What a cache on this device appends; None if all rows are valid."""
        if self.mask is None:
            return None
        if device not in self._chunks:
            self._chunks[device] = _device_chunk(self, device) if self.stays_on_device else _host_chunk(self, device)
        return self._chunks[device]

    def extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Starts and lengths of all samples."""
        if self._host is None:
            self._host = read_host(self._sizes, self.mask, None)
        return self._host[:2]

    def tail(self, most: int) -> Tensor | None:
        """Whether the last rows of this forward are valid, (B, rows) for at most ``most`` rows; None without a mask."""
        if self.mask is not None and self._tail is None:
            self._tail = self.mask[:, max(self.past, self.total - most) :].clone()
        return self._tail

    @property
    def stays_on_device(self) -> bool:
        """Whether a cache takes the mask without a device synchronisation."""
        return self.mask is not None and self.mask.device.type != "cpu" and self.queries <= MOST_STEPS

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.batch, self.queries, self.total)

    def _breaks_of(self, position_ids: Tensor | None) -> Breaks | None:
        if self.queries <= 1:
            return None
        if position_ids is None or position_ids.dim() != 2:
            return self._breaks
        return Breaks((position_ids.diff(dim=-1) != 1).expand(self.batch, -1), None)

    def _samples(self, position_ids: Tensor | None) -> tuple[Samples | None, Documents | None]:
        breaks = self._breaks_of(position_ids)
        if self.mask is None and breaks is None:
            return None, None
        if torch.compiler.is_compiling():
            begins, is_regular = (None, None) if breaks is None else breaks
            found = read_rows_operator(self.mask, begins, is_regular, *self._sizes)
            return Samples(*found.unbind(0)), None
        self._host = starts, lengths, bounds = read_host(self._sizes, self.mask, breaks)
        is_full = min(lengths, default=0) == self.total
        if bounds is not None:
            return None, Documents(bounds, None if is_full else self.mask)
        return None if is_full else Samples(starts, lengths), None

    def _documents(self, query: Tensor, key: Tensor) -> tuple[None, Documents]:
        compiling = torch.compiler.is_compiling()
        if self.mask is not None and (compiling or min(self.extents()[1], default=0) < self.total):
            raise ValueError(
                "cu_seq_lens_q (packed documents) and an attention_mask with padding exclude one another; leave out the "
                "mask, or let the padding be a document"
            )
        if self.past:
            raise ValueError(
                f"cu_seq_lens_q needs as many queries as keys: got {self.queries} rows behind {self.past} rows of a cache. "
                "Packed documents have no cache; pass use_cache=False"
            )
        return None, Documents(read_documents_operator(query, key) if compiling else read_documents(query, key), None)


class LocalRows:
    """The mask of layers with a sliding window or with chunks, which sdpa computes, and the rows of the forward."""

    ndim = 0  # not a padding mask, which has two dimensions

    def __init__(self, mask: Tensor | None, rows: ForwardRows) -> None:
        self.mask, self.rows = mask, rows

    def contiguous(self) -> LocalRows:
        """The object itself. Generation with a static cache calls this method of masks."""
        return self


def dilated_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | ForwardRows | LocalRows | None = None,
    **options: Any,
) -> ForwardRows | LocalRows:
    """The mask function of ``attn_implementation="dilated"``: it makes the ``ForwardRows`` of a forward.

    Layers with a local mask (a sliding window, or chunks) get the mask of sdpa. Masks that are neither causal nor
    bidirectional nor of packed documents are refused.

    >>> mask = torch.tensor([[False, True, True], [True, True, True]])
    >>> dilated_mask(2, 3, 3, attention_mask=mask).read()[0]
    Samples(starts=(1, 0), lengths=(2, 3))
    """
    if isinstance(attention_mask, ForwardRows):
        return attention_mask.checked(mask_function, options.get("local_size"))
    if isinstance(attention_mask, LocalRows):
        return attention_mask
    is_traced = isinstance(q_offset, Tensor) and torch.compiler.is_compiling()  # its value is not known
    if options.get("local_size") is not None:
        logger.warning_once(_LOCAL_LAYERS if _has_other_layers(options.get("config")) else _ONLY_LOCAL_LAYERS)
        mask = sdpa_mask(
            batch_size, q_length, kv_length, cast(int, q_offset), kv_offset, mask_function=mask_function,
            attention_mask=attention_mask, **options,
        )  # fmt: skip
        total = q_length if is_traced else int(q_offset) + q_length
        padding = None if attention_mask is None or is_traced else attention_mask[:, :total]
        return LocalRows(mask, ForwardRows(batch_size, q_length, total, kv_length, True, padding))
    if is_traced:
        raise RuntimeError(
            "dilated attention plans with the number of rows in the cache, which a static cache holds in a tensor: it is "
            "right in eager mode only. Do not compile the model, or use DilatedCache or DynamicCache"
        )
    total, is_causal = int(q_offset) + q_length, mask_function is not bidirectional_mask_function
    if kv_offset != 0 or not (is_causal or kv_length == total):
        raise ValueError(
            f"dilated attention is self-attention over all rows from the first one: got {q_length} queries from row "
            f"{total - q_length} on and {kv_length} keys from row {kv_offset} on. Cross-attention and caches that drop "
            'their first rows have no dilated form; call model.set_attn_implementation("sdpa")'
        )
    mask = None if attention_mask is None else attention_mask[:, :total]
    if mask is not None and mask.shape[1] < total:
        raise ValueError(
            f"attention_mask must cover the rows of this forward and those in the cache, {total} in all: got "
            f"{mask.shape[1]}; append ones for the new tokens"
        )
    breaks = None
    if is_causal and mask_function is not causal_mask_function:
        if options.get("use_vmap") or total != q_length:
            raise ValueError(ODD_MASK)
        breaks = _breaks_by(mask_function, batch_size, q_length, options.get("device")) if q_length > 1 else None
    return ForwardRows(batch_size, q_length, total, kv_length, is_causal, mask, breaks)


def _has_other_layers(config: Any) -> bool:
    """Whether a model with a sliding window or chunks has layers without them. Mistral's config does not list layers."""
    return "full_attention" in (getattr(config, "layer_types", None) or ())


def _breaks_by(mask_function: Callable[..., Any], batch: int, n: int, device: torch.device | None) -> Breaks:
    """Where documents begin by a mask function: rows that do not see the row before them.

    The mask is that of documents if no row sees the next one, and each one sees the first row of its document.
    """
    sample, i = torch.arange(batch, device=device).unsqueeze(1), torch.arange(n, device=device).unsqueeze(0)
    head, before, row = torch.zeros_like(sample), i[:, :-1], i[:, 1:]
    begins = ~mask_function(sample, head, row, before).expand(batch, n - 1)
    first = torch.where(begins, row, 0).cummax(-1).values
    sees_first, sees_next = mask_function(sample, head, row, first), mask_function(sample, head, before, row)
    return Breaks(begins, sees_first.all() & ~sees_next.any())


def _host_chunk(rows: ForwardRows, device: torch.device) -> Chunk | None:
    """The chunk of a cache by integers on the host."""
    firsts, counts = [], []
    for start, length in zip(*rows.extents(), strict=True):
        first, stop = (min(max(x - rows.past, 0), rows.queries) for x in (start, start + length))
        counts.append(stop - first)
        firsts.append(first if stop > first else 0)
    if min(counts, default=0) == rows.queries:
        return None
    if not any(firsts):
        return Chunk(tuple(counts), None, None)
    return Chunk(tuple(counts), *_rolled(torch.tensor(firsts, device=device), rows.queries))


def _device_chunk(rows: ForwardRows, device: torch.device) -> Chunk:
    """The chunk of a cache by tensors, without a device synchronisation.

    Masked rows are left out, wherever they are: a hole cannot be refused without reading the mask.
    """
    assert rows.mask is not None
    valid = rows.mask[:, rows.past :].to(device, non_blocking=True)
    counts, n = valid.sum(1), rows.queries
    if n <= 1:
        return Chunk(counts, None, None)
    row = torch.arange(n, device=device)
    source = torch.where(valid, row, row + n).argsort(1)  # valid rows first, in their order
    return Chunk(counts, source, source.argsort(1))


def _rolled(firsts: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Rows in an order in which row ``firsts[b]`` is the first one of sample ``b``, and the order that takes it back."""
    row = torch.arange(n, device=firsts.device)
    return (row + firsts.unsqueeze(1)) % n, (row - firsts.unsqueeze(1)) % n

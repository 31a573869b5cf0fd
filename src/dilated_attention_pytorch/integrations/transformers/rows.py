"""Which rows of a batch are samples or documents: the mask function makes it once per forward, and every layer reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils import logging

from dilated_attention_pytorch.cache_operators import MOST_STEPS
from dilated_attention_pytorch.dispatch import define_operator
from dilated_attention_pytorch.lengths import Lengths, few

logger = logging.get_logger(__name__)


class Samples(NamedTuple):
    """The first key row of each sample, and its number of rows."""

    starts: Lengths
    lengths: Lengths


class Documents(NamedTuple):
    """Packed documents: boundaries in the rows of all samples, and the rows that are not padding."""

    cu_seqlens: Lengths
    valid: Tensor | None  # (B, N), or None if there is no padding


class Chunk(NamedTuple):
    """The rows of a forward that a cache appends: for each sample the number, and the order with padding behind."""

    lengths: Lengths
    index: Tensor | None  # (B, N): row ``i`` of the chunk is row ``index[b, i]``; None if no sample has padding in front
    inverse: Tensor | None


class LocalRows:
    """The mask of layers with a sliding window or with chunks, which sdpa computes."""

    ndim = 0  # not a padding mask, which has two dimensions

    def __init__(self, mask: Tensor | None) -> None:
        self.mask = mask

    def contiguous(self) -> LocalRows:
        """The object itself. Generation with a static cache calls this method of masks."""
        return self


class Breaks(NamedTuple):
    """Where documents begin: (B, N - 1) bool for row ``i + 1``, and whether the mask is that of documents, () bool."""

    begins: Tensor
    is_regular: Tensor | None


class Rows:
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

    def __init__(
        self, batch: int, queries: int, total: int, keys: int, is_causal: bool, mask: Tensor | None = None,
        breaks: Breaks | None = None,
    ) -> None:  # fmt: skip
        self.batch, self.queries, self.total, self.keys = batch, queries, total, keys
        self.is_causal, self.mask, self._breaks = is_causal, mask, breaks
        self._source: tuple[Tensor | None, Tensor | None] | None = None
        self._read: tuple[Samples | None, Documents | None] = None, None
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

    def contiguous(self) -> Rows:
        """The object itself. Generation with a static cache calls this method of masks."""
        return self

    def read(
        self, position_ids: Tensor | None = None, cu_seqlens: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Samples | None, Documents | None]:  # fmt: skip
        """Samples with padding, or documents, or neither. At least one of the two is None.

        All layers of a model pass the same tensors. So the values are read on the host once per forward.
        """
        source = position_ids, None if cu_seqlens is None else cu_seqlens[0]
        if self._source is None or self._source[0] is not source[0] or self._source[1] is not source[1]:
            read = _read_compiled if torch.compiler.is_compiling() else _read
            self._read = read(self, self._breaks_of(position_ids), cu_seqlens)
            self._source = source
        return self._read

    def chunk(self, device: torch.device) -> Chunk | None:
        """What a cache on this device appends; None if all rows are valid."""
        if self.mask is None:
            return None
        if device not in self._chunks:
            self._chunks[device] = (_device_chunk if self._stays_on_device else _host_chunk)(self, device)
        return self._chunks[device]

    def seen(self) -> list[int] | None:
        """The valid rows of each sample before this forward; None if there is no mask, or if it is not read."""
        if self.mask is None or self._stays_on_device:
            return None
        starts, lengths = _samples(self.mask)
        return [min(max(self.past - start, 0), n) for start, n in zip(starts, lengths, strict=True)]

    def tail(self, most: int) -> Tensor | None:
        """Whether the last rows of this forward are valid, (B, rows) for at most ``most`` rows; None without a mask."""
        if self.mask is not None and self._tail is None:
            self._tail = self.mask[:, max(self.past, self.total - most) :].clone()
        return self._tail

    @property
    def _stays_on_device(self) -> bool:
        """Whether a cache takes the mask without a device synchronisation."""
        return self.mask is not None and self.mask.device.type != "cpu" and self.queries <= MOST_STEPS

    def _breaks_of(self, position_ids: Tensor | None) -> Breaks | None:
        if self.queries <= 1:
            return None
        if position_ids is None or position_ids.dim() != 2:
            return self._breaks
        return Breaks((position_ids.diff(dim=-1) != 1).expand(self.batch, -1), None)


def dilated_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | Rows | LocalRows | None = None,
    **options: Any,
) -> Rows | LocalRows:
    """The mask function of ``attn_implementation="dilated"``: it makes the ``Rows`` of a forward.

    Layers with a local mask (a sliding window, or chunks) get the mask of sdpa. Masks that are neither causal nor
    bidirectional nor of packed documents are refused.

    >>> mask = torch.tensor([[False, True, True], [True, True, True]])
    >>> dilated_mask(2, 3, 3, attention_mask=mask).read()[0]
    Samples(starts=(1, 0), lengths=(2, 3))
    """
    if isinstance(attention_mask, Rows | LocalRows):
        return attention_mask
    if options.get("local_size") is not None:
        logger.warning_once(
            "Layers with a sliding window or with chunks keep their own mask: they are computed by sdpa, and only the other "
            "layers are dilated."
        )
        return LocalRows(
            sdpa_mask(
                batch_size, q_length, kv_length, q_offset, kv_offset, mask_function=mask_function,
                attention_mask=attention_mask, **options,
            )
        )  # fmt: skip
    if isinstance(q_offset, Tensor) and torch.compiler.is_compiling():
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
    rows = Rows(batch_size, q_length, total, kv_length, is_causal, mask)
    if mask_function is causal_mask_function or not is_causal:
        return rows
    if options.get("use_vmap") or total != q_length:
        raise ValueError(_ODD_MASK)
    if q_length > 1:
        rows._breaks = _breaks_of(mask_function, batch_size, q_length, options.get("device"))
    return rows


_ODD_MASK = (
    "dilated attention takes causal masks, bidirectional masks, padding and packed documents: got another mask function "
    "(or_mask_function, and_mask_function or block_sequence_ids), which a pattern cannot honour; call "
    'model.set_attn_implementation("sdpa")'
)


def _breaks_of(mask_function: Callable[..., Tensor], batch: int, n: int, device: torch.device | None) -> Breaks:
    """Where documents begin by a mask function: rows that do not see the row before them.

    The mask is that of documents if no row sees the next one, and each one sees the first row of its document.
    """
    sample, i = torch.arange(batch, device=device).unsqueeze(1), torch.arange(n, device=device).unsqueeze(0)
    head, before, row = torch.zeros_like(sample), i[:, :-1], i[:, 1:]
    begins = ~mask_function(sample, head, row, before).expand(batch, n - 1)
    first = torch.where(begins, row, 0).cummax(-1).values
    sees_first, sees_next = mask_function(sample, head, row, first), mask_function(sample, head, before, row)
    return Breaks(begins, sees_first.all() & ~sees_next.any())


def _samples(mask: Tensor) -> tuple[list[int], list[int]]:
    """Starts and lengths of the samples of a mask (B, M); raise for a mask with holes. One device synchronisation."""
    total = mask.shape[1]
    row = torch.arange(total, device=mask.device)
    if total == 0:
        return [0] * len(mask), [0] * len(mask)
    first, stop = torch.where(mask, row, total).amin(1), torch.where(mask, row + 1, 0).amax(1)
    firsts, stops, counts = torch.stack((first, stop, mask.sum(1))).tolist()
    for sample, (start, end, count) in enumerate(zip(firsts, stops, counts, strict=True)):
        if count and end - start != count:
            raise ValueError(
                f"attention_mask must have the padding of a sample in front of it or behind it, because positions of the "
                f"pattern count from its first row: sample {sample} has {end - start - count} masked rows between rows "
                f'{start} and {end - 1}; move the padding, or call model.set_attn_implementation("sdpa")'
            )
    return [start if count else 0 for start, count in zip(firsts, counts, strict=True)], counts


def _read(
    rows: Rows, breaks: Breaks | None, cu_seqlens: tuple[Tensor, Tensor] | None
) -> tuple[Samples | None, Documents | None]:  # fmt: skip
    samples = None
    if rows.mask is not None:
        starts, lengths = _samples(rows.mask)
        samples = None if min(lengths, default=0) == rows.total else Samples(tuple(starts), tuple(lengths))
    if cu_seqlens is not None:
        _check_alone(rows, samples)
        return None, Documents(tuple(_equal_documents(*cu_seqlens).tolist()), None)
    bounds = None if breaks is None else _bounds(rows, breaks, samples)
    if bounds is None:
        return samples, None
    return None, Documents(bounds, None if samples is None or rows.mask is None else rows.mask)


def _bounds(rows: Rows, breaks: Breaks, samples: Samples | None) -> tuple[int, ...] | None:
    """The boundaries of documents in the rows of all samples; None if every sample is one document."""
    begins = breaks.begins
    if rows.mask is not None and samples is not None:
        valid = rows.mask[:, rows.past :]
        begins = begins & valid[:, 1:] & valid[:, :-1]
    if breaks.is_regular is not None and not bool(breaks.is_regular):
        raise ValueError(_ODD_MASK)
    found = begins.nonzero().tolist()
    if not found:
        return None
    if rows.past:
        raise ValueError(
            f"position_ids must go up by one in each sample if there are earlier rows in a cache: got {rows.queries} rows "
            f"behind {rows.past}, with a jump at row {found[0][1] + 1} of sample {found[0][0]}. Packed documents have no "
            "cache; pass use_cache=False"
        )
    n = rows.queries
    bounds = {*range(0, rows.batch * n + 1, n), *(b * n + i + 1 for b, i in found)}
    if samples is not None:  # padding is a document of its own, whose results are not used
        for b, (start, length) in enumerate(zip(*samples, strict=True)):
            bounds |= {b * n + start, b * n + start + length}
    return tuple(sorted(bounds))


def _check_alone(rows: Rows, samples: Samples | None) -> None:
    """Raise if there is something beside ``cu_seq_lens_q``."""
    if samples is not None:
        raise ValueError(
            "cu_seq_lens_q (packed documents) and an attention_mask with padding exclude one another; leave out the mask, "
            "or let the padding be a document"
        )
    if rows.past:
        raise ValueError(
            f"cu_seq_lens_q needs as many queries as keys: got {rows.queries} rows behind {rows.past} rows of a cache. "
            "Packed documents have no cache; pass use_cache=False"
        )


def _equal_documents(query: Tensor, key: Tensor) -> Tensor:
    """The boundaries of documents on the host; raise if those of queries and keys differ."""
    on_host = query.cpu()
    if key is not query and not on_host.equal(key.cpu()):
        raise ValueError(
            f"self-attention has the same documents for queries and keys: got cu_seq_lens_q {few(on_host.tolist())} and "
            f"cu_seq_lens_k {few(key.tolist())}; leave out cu_seq_lens_k"
        )
    return on_host.clone() if on_host is query else on_host


def _host_chunk(rows: Rows, device: torch.device) -> Chunk | None:
    """The chunk of a cache by integers on the host."""
    assert rows.mask is not None
    firsts, counts = [], []
    for start, length in zip(*_samples(rows.mask), strict=True):
        first, stop = (min(max(x - rows.past, 0), rows.queries) for x in (start, start + length))
        counts.append(stop - first)
        firsts.append(first if stop > first else 0)
    if min(counts, default=0) == rows.queries:
        return None
    if not any(firsts):
        return Chunk(tuple(counts), None, None)
    return Chunk(tuple(counts), *_rolled(torch.tensor(firsts, device=device), rows.queries))


def _device_chunk(rows: Rows, device: torch.device) -> Chunk:
    """The chunk of a cache by tensors, without a device synchronisation."""
    assert rows.mask is not None
    valid = rows.mask[:, rows.past :].to(device, non_blocking=True)
    counts, n = valid.sum(1), rows.queries
    if n <= 1:
        return Chunk(counts, None, None)
    return Chunk(counts, *_rolled(torch.where(valid, torch.arange(n, device=device), n).amin(1), n))


def _rolled(firsts: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Rows in an order in which row ``firsts[b]`` is the first one of sample ``b``, and the order that takes it back."""
    row = torch.arange(n, device=firsts.device)
    return (row + firsts.unsqueeze(1)) % n, (row - firsts.unsqueeze(1)) % n


def _read_rows(
    mask: Tensor | None, begins: Tensor | None, is_regular: Tensor | None, batch: int, queries: int, total: int
) -> Tensor:  # fmt: skip
    """Starts and lengths, (2, B) on the CPU, for compilers; raise if there are packed documents."""
    rows = Rows(batch, queries, total, total, True, mask)
    samples, documents = _read(rows, None if begins is None else Breaks(begins, is_regular), None)
    if documents is not None:
        raise ValueError(
            "a compiled model cannot find packed documents in position_ids, because their number is not known when it is "
            "compiled: pass cu_seq_lens_q and cu_seq_lens_k (DataCollatorWithFlattening(return_flash_attn_kwargs=True))"
        )
    return torch.tensor(samples or ((0,) * batch, (total,) * batch), dtype=torch.int64, device="cpu")


def _read_rows_fake(
    mask: Tensor | None, begins: Tensor | None, is_regular: Tensor | None, batch: int, queries: int, total: int
) -> Tensor:  # fmt: skip
    return torch.empty(2, batch, dtype=torch.int64, device="cpu")


def _documents_fake(query: Tensor, key: Tensor) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device="cpu")


read_rows = define_operator(
    "read_rows", _read_rows, _read_rows_fake,
    "(Tensor? mask, Tensor? begins, Tensor? is_regular, SymInt batch, SymInt queries, SymInt total) -> Tensor",
)  # fmt: skip
equal_documents = define_operator("equal_documents", _equal_documents, _documents_fake)


def _read_compiled(
    rows: Rows, breaks: Breaks | None, cu_seqlens: tuple[Tensor, Tensor] | None
) -> tuple[Samples | None, Documents | None]:  # fmt: skip
    """``_read`` in a compiled model: operators read values, once per forward, and give tensors on the CPU."""
    if cu_seqlens is not None:
        if rows.mask is not None:
            raise ValueError("a compiled model takes cu_seq_lens_q without attention_mask; leave out the mask")
        _check_alone(rows, None)
        return None, Documents(equal_documents(*cu_seqlens), None)
    if rows.mask is None and breaks is None:
        return None, None
    begins, is_regular = (None, None) if breaks is None else breaks
    starts, lengths = read_rows(rows.mask, begins, is_regular, rows.batch, rows.queries, rows.total).unbind(0)
    return Samples(starts, lengths), None

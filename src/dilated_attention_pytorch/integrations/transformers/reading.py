"""Values of masks, positions and boundaries as integers on the host: one device synchronisation in the usual case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.dispatch import define_operator
from dilated_attention_pytorch.lengths import Lengths, few

ODD_MASK = (
    "dilated attention takes causal masks, bidirectional masks, padding and packed documents: got another mask function "
    "(or_mask_function, and_mask_function or block_sequence_ids), which a pattern cannot honour; call "
    'model.set_attn_implementation("sdpa")'
)


class Sizes(NamedTuple):
    """Samples, rows of the queries, and rows of this forward with those before it in a cache."""

    batch: int
    queries: int
    total: int

    @property
    def past(self) -> int:
        """The rows of earlier forwards."""
        return self.total - self.queries


class Samples(NamedTuple):
    """The first key row of each sample, and its number of rows."""

    starts: Lengths
    lengths: Lengths


class Documents(NamedTuple):
    """Packed documents: boundaries in the rows of all samples, and the rows that are not padding."""

    cu_seqlens: Lengths
    valid: Tensor | None  # (B, N), or None if there is no padding


class Breaks(NamedTuple):
    """Where documents begin: (B, N - 1) bool for row ``i + 1``, and whether the mask is that of documents, () bool."""

    begins: Tensor
    is_regular: Tensor | None


class HostRows(NamedTuple):
    """Starts and lengths of all samples, and the boundaries of documents, or None if every sample is one document."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    bounds: tuple[int, ...] | None


def read_host(sizes: Sizes, mask: Tensor | None, breaks: Breaks | None) -> HostRows:
    """Read a mask (B, total) and breaks; raise for masks with holes, and for documents behind a cache."""
    begins, numbers = None, []
    if breaks is not None:
        begins = breaks.begins
        if mask is not None:
            mask = mask.to(begins.device)  # layers of one model may be on several devices
            valid = mask[:, sizes.past :]
            begins = begins & valid[:, 1:] & valid[:, :-1]
        is_odd = begins.new_zeros(()) if breaks.is_regular is None else ~breaks.is_regular
        numbers = [torch.stack((begins.any(), is_odd)).long()]
    if mask is not None:
        numbers = [*_extents(mask), *numbers]
    values = torch.cat(numbers).tolist() if numbers else []  # the device synchronisation
    if mask is None:
        starts, lengths = [0] * sizes.batch, [sizes.total] * sizes.batch
    else:
        b = sizes.batch
        starts, lengths = _checked_extents(values[:b], values[b : 2 * b], values[2 * b : 3 * b])
    if begins is None:
        return HostRows(tuple(starts), tuple(lengths), None)
    is_packed, is_odd = values[-2:]
    if is_odd:
        raise ValueError(ODD_MASK)
    bounds = _bounds(sizes, begins.nonzero().tolist(), starts, lengths) if is_packed else None
    return HostRows(tuple(starts), tuple(lengths), bounds)


def _extents(mask: Tensor) -> list[Tensor]:
    """The first valid row of each sample, the row behind the last one, and the number of valid rows."""
    total, count = mask.shape[1], mask.sum(1)
    if total == 0:
        return [count] * 3
    row = torch.arange(total, device=mask.device)
    return [torch.where(mask, row, total).amin(1), torch.where(mask, row + 1, 0).amax(1), count]


def _checked_extents(firsts: list[int], stops: list[int], counts: list[int]) -> tuple[list[int], list[int]]:
    for sample, (first, stop, count) in enumerate(zip(firsts, stops, counts, strict=True)):
        if count and stop - first != count:
            raise ValueError(
                "attention_mask must have the padding of a sample in front of it or behind it, because positions of the "
                f"pattern count from its first row: sample {sample} has {stop - first - count} masked rows between rows "
                f'{first} and {stop - 1}; move the padding, or call model.set_attn_implementation("sdpa")'
            )
    return [first if count else 0 for first, count in zip(firsts, counts, strict=True)], counts


def _bounds(sizes: Sizes, found: list[list[int]], starts: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """The boundaries of documents in the rows of all samples. Padding is a document, whose results are not used."""
    if sizes.past:
        raise ValueError(
            f"position_ids must go up by one in each sample if there are earlier rows in a cache: got {sizes.queries} rows "
            f"behind {sizes.past}, with a jump at row {found[0][1] + 1} of sample {found[0][0]}. Packed documents have no "
            "cache; pass use_cache=False"
        )
    n = sizes.queries
    bounds = {*range(0, sizes.batch * n + 1, n), *(b * n + i + 1 for b, i in found)}
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        bounds |= {b * n + start, b * n + start + length}
    return tuple(sorted(bounds))


def read_documents(query: Tensor, key: Tensor) -> Tensor:
    """The boundaries of documents on the host; raise if those of queries and keys differ."""
    on_host = query.cpu()
    if key is not query and not on_host.equal(key.cpu()):
        raise ValueError(
            f"self-attention has the same documents for queries and keys: got cu_seq_lens_q {few(on_host.tolist())} and "
            f"cu_seq_lens_k {few(key.tolist())}; leave out cu_seq_lens_k"
        )
    return on_host.clone() if on_host is query else on_host


def _read_rows(
    mask: Tensor | None, begins: Tensor | None, is_regular: Tensor | None, batch: int, queries: int, total: int
) -> Tensor:  # fmt: skip
    """Starts and lengths, (2, B) on the CPU, for compilers; raise if there are packed documents."""
    breaks = None if begins is None else Breaks(begins, is_regular)
    starts, lengths, bounds = read_host(Sizes(batch, queries, total), mask, breaks)
    if bounds is not None:
        raise ValueError(
            "a compiled model cannot find packed documents in position_ids, because their number is not known when it is "
            "compiled: pass cu_seq_lens_q and cu_seq_lens_k (DataCollatorWithFlattening(return_flash_attn_kwargs=True))"
        )
    return torch.tensor((starts, lengths), dtype=torch.int64, device="cpu")


def _read_rows_fake(
    mask: Tensor | None, begins: Tensor | None, is_regular: Tensor | None, batch: int, queries: int, total: int
) -> Tensor:  # fmt: skip
    return torch.empty(2, batch, dtype=torch.int64, device="cpu")


def _read_documents_fake(query: Tensor, key: Tensor) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device="cpu")


# Compilers see operators with results on the CPU. Values are read when the operators run.
read_rows_operator = define_operator(
    "read_rows", _read_rows, _read_rows_fake,
    "(Tensor? mask, Tensor? begins, Tensor? is_regular, SymInt batch, SymInt queries, SymInt total) -> Tensor",
)  # fmt: skip
read_documents_operator = define_operator("read_documents", read_documents, _read_documents_fake)

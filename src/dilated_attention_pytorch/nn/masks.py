"""The masks of ``nn.MultiheadAttention`` as ``is_causal``, ``lengths`` and ``starts``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.checks import as_bool

WAY_OUT = (
    "use is_causal=True for causal attention, key_padding_mask or lengths for padding, and the pattern for everything else "
    "(BlockSparse.custom takes a mask of blocks)"
)


def is_causal_mask(mask: Any, is_causal: bool, sizes: tuple[int, ...]) -> bool:
    """Whether an ``attn_mask`` is causal. Raise if it is not, unless it hides no pair and ``is_causal`` is False.

    ``sizes`` are (samples * query heads, queries, keys). The queries are the last positions of the keys, so that the
    causal mask of queries and keys is ``torch.ones(queries, keys).triu(keys - queries + 1)``.
    """
    _check_mask("attn_mask", mask)
    is_causal = as_bool("is_causal", is_causal)
    if tuple(mask.shape) not in (sizes, sizes[1:]):
        raise ValueError(
            f"attn_mask must be (queries, keys) = {sizes[1:]} or (batch * heads, queries, keys) = {sizes}, got "
            f"{tuple(mask.shape)}"
        )
    if not is_causal and not bool(mask.any()):
        return False
    hidden: Any = True if mask.dtype == torch.bool else -torch.inf
    causal = torch.full(sizes[1:], hidden, dtype=mask.dtype, device=mask.device).triu_(sizes[2] - sizes[1] + 1)
    if torch.equal(mask, causal.expand(mask.shape)):
        return True
    if is_causal:
        raise ValueError(
            "is_causal=True with an attn_mask says that the mask is causal, got a mask that is not True (or -inf) above "
            f"the diagonal and False (or 0) elsewhere; leave out attn_mask, or {WAY_OUT}"
        )
    raise ValueError(
        "attn_mask must be causal, or hide nothing (all False, or all 0), because the pattern decides which positions "
        f"meet; got a mask that hides other pairs or adds a bias; {WAY_OUT}"
    )


def samples_of_mask(mask: Any, shape: tuple[int, ...]) -> tuple[Tensor | None, Tensor]:
    """The starts and lengths (batch,), on the host, that a ``key_padding_mask`` of this shape describes.

    The shape is (batch, keys), or (keys,) for one sample. Starts are None if no sample has padding in front.

    >>> samples_of_mask(torch.tensor([[True, True, False, False], [False, False, False, True]]), (2, 4))
    (tensor([2, 0]), tensor([2, 3]))
    """
    _check_mask("key_padding_mask", mask)
    if tuple(mask.shape) != shape:
        dims = "(batch, keys)" if len(shape) == 2 else "(keys,) without a batch dimension"
        raise ValueError(f"key_padding_mask must be {dims} = {shape}, got {tuple(mask.shape)}")
    padding = mask if mask.dtype == torch.bool else mask == -torch.inf
    lengths = (~padding).sum(-1).reshape(-1)
    in_front = padding.long().cumprod(-1).sum(-1).reshape(-1)
    starts = torch.where(lengths > 0, in_front, 0)
    rows, first = torch.arange(shape[-1], device=mask.device), starts.unsqueeze(-1)
    outside = (rows < first) | (rows >= first + lengths.unsqueeze(-1))
    holes = (padding != outside).any(-1)
    biased = torch.zeros_like(holes) if mask.dtype == torch.bool else (~padding & (mask != 0)).any(-1).reshape(-1)
    table: Tensor = torch.stack([starts, lengths, holes.long(), biased.long()]).cpu()  # one device synchronisation
    starts, lengths, holes, biased = table.unbind(0)
    if bool(biased.any()):
        raise ValueError("a floating-point key_padding_mask must hold 0 (keep) and -inf (ignore) only")
    if bool(holes.any()):
        raise ValueError(
            "key_padding_mask must mark padding (True) before and behind the tokens of samples only: patterns count their "
            f"positions; samples {holes.nonzero().squeeze(1).tolist()} have padding between tokens, move it to an end"
        )
    return starts if bool(starts.any()) else None, lengths


def _check_mask(name: str, mask: Any) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(mask).__name__}; use torch.tensor(mask)")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} must be bool or floating-point, got {mask.dtype}; use mask.bool() if 1 means hidden")
    if mask.requires_grad:
        raise ValueError(f"{name} gets no gradient here, got one that requires it; add a learned bias to the embeddings")

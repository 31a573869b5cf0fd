"""Other implementations of dilated attention, for comparison: the method of the paper's authors, and FlexAttention."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch._functorch.config
from torch import Tensor

from dilated_attention_pytorch import Dilated


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]


def authors(q: Tensor, k: Tensor, v: Tensor, pattern: Dilated, is_causal: bool = False) -> Tensor:
    """The steps of the paper authors' code: pad, gather each head's rows, flash attention, scatter, weigh the branches.

    Rows that padding adds are attended to, and the weights of the branches have no gradient, as in their code.
    """
    batch, n, heads, d = q.shape
    outs, lses = [], []
    for w, r in pattern.branches:
        w = min(w, n)
        segments, rows = math.ceil(n / w), math.ceil(w / r)
        offsets = torch.tensor([pattern.offset(h, heads, r) for h in range(heads)], device=q.device)
        index = offsets[:, None] + r * torch.arange(rows, device=q.device)  # (heads, rows)

        def gather(x: Tensor) -> Tensor:
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, segments * w - n)).view(batch * segments, w, heads, d)  # noqa: B023
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows * r - w)).transpose(1, 2)  # noqa: B023
            return x.gather(2, index[None, :, :, None].expand(batch * segments, -1, -1, d))  # noqa: B023

        out, lse = _flash(gather(q), gather(k), gather(v), is_causal)
        places = index[None, :, :, None].expand(batch * segments, -1, -1, d)
        out = torch.zeros(batch * segments, heads, rows * r, d, dtype=q.dtype, device=q.device).scatter(2, places, out)
        full = torch.full((batch * segments, heads, rows * r), -1e8, dtype=torch.float32, device=q.device)
        lse = full.scatter(2, places[..., 0], lse.detach().float())
        outs.append(out[:, :, :w].transpose(1, 2).reshape(batch, segments * w, heads, d)[:, :n])
        lses.append(lse[:, :, :w].transpose(1, 2).reshape(batch, segments * w, heads)[:, :n])
    weights = torch.stack(lses).softmax(0).to(q.dtype)
    return sum(out * weight.unsqueeze(-1) for out, weight in zip(outs, weights, strict=True))


@lru_cache(maxsize=4)
def _flex_mask(pattern: Dilated, heads: int, n: int, is_causal: bool):
    from torch.nn.attention.flex_attention import create_block_mask

    def multiplicity(h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        total = torch.zeros_like(i + j)
        for w, r in pattern.branches:
            offset = h % r  # interleaved
            total = total + ((i // w == j // w) & (i % w % r == offset) & (j % w % r == offset)).to(total.dtype)
        return total * (i >= j) if is_causal else total

    mask = create_block_mask(lambda b, h, i, j: multiplicity(h, i, j) > 0, None, heads, n, n, device="cuda", _compile=True)
    return mask, lambda score, b, h, i, j: score + torch.log(multiplicity(h, i, j).to(score.dtype))


@lru_cache(maxsize=1)
def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    torch._functorch.config.donated_buffer = False  # backwards are measured again and again, of one forward
    return torch.compile(flex_attention, dynamic=False)


def flex(q: Tensor, k: Tensor, v: Tensor, pattern: Dilated, is_causal: bool = False) -> Tensor:
    """One FlexAttention call with the logarithm of the multiplicity added to the scores.

    It skips blocks of 128 x 128 that nobody needs, so a dilated branch costs it r times as much.
    """
    assert pattern.offsets == "interleaved"
    shape, widest = q.shape, max(pattern.segment_lengths)
    if shape[1] % widest == 0 and all(widest % w == 0 for w in pattern.segment_lengths):
        # Longest segments are samples of their own: a mask of a million tokens would have 2**26 blocks for each head.
        q, k, v = (x.reshape(-1, widest, *shape[2:]) for x in (q, k, v))
    mask, score_mod = _flex_mask(pattern, q.shape[2], q.shape[1], is_causal)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    return _compiled_flex()(*heads_first, block_mask=mask, score_mod=score_mod).transpose(1, 2).reshape(shape)


METHODS = {"authors": authors, "flex": flex}

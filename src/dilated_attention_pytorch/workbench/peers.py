"""Other implementations of attention, as methods of the benchmark, each with the problem that it solves."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.workbench.bench_values import BenchMethod, BenchProblem, Neighborhood

_STOCK = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_DENSE = "dense attention of the whole sequence"


def peer_methods(problem: BenchProblem, whole: BenchProblem, *, compile_on_cpu: bool) -> list[BenchMethod]:
    """Methods for a dilated problem, and for dense attention of the same length.

    FlexAttention runs on a CPU only if ``compile_on_cpu``, because its compilations take minutes there.
    """
    assert isinstance(problem.pattern, Dilated)
    on_cpu = problem.device.type == "cpu"
    slow = "its compilations take minutes on a CPU; ask for it by --only flex" if on_cpu and not compile_on_cpu else ""
    # The authors' code attends to the keys that padding adds, and gives the weights of branches no gradient.
    authors_problem = replace(
        problem, pattern=replace(problem.pattern, torchscale_padding=True), mixing_gradient="detached"
    )
    window = min(2048, max(2, whole.tokens // 4))
    near = replace(whole, name="neighborhood", pattern=Neighborhood(window, 1))
    found = [
        BenchMethod("authors", authors_problem, "dilated attention, zero keys, detached weights", _authors, peer=True),
        # FlexAttention has no backward on a CPU, and NATTEN uses it there.
        BenchMethod("flex", problem, "dilated attention", _flex, peer=True, backward=not on_cpu, refused=slow),
    ]
    for name, kernel in _STOCK.items():
        found.append(BenchMethod(f"sdpa {name}", whole, _DENSE, partial(_stock, kernel=kernel), peer=True))
    for name, run, target, computes, backward in (
        ("flash_attn", _flash_attn, whole, _DENSE, True),
        ("xformers", _xformers, whole, _DENSE, True),
        ("natten", _natten, near, f"the {window:,} nearest keys", not on_cpu),
    ):
        missing = importlib.util.find_spec(name) is None
        refused = f"{name} is not installed" if missing else ""
        found.append(BenchMethod(name, target, computes, run, peer=True, backward=backward, refused=refused))
    return found


def _stock(problem: BenchProblem, q: Tensor, k: Tensor, v: Tensor, *, kernel: SDPBackend) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(kernel):
        return scaled_dot_product_attention(q, k, v, is_causal=problem.is_causal).transpose(1, 2)


def _flash_attn(problem: BenchProblem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """flash-attn 2: tensors are (B, N, H, D)."""
    out: Tensor = importlib.import_module("flash_attn").flash_attn_func(q, k, v, causal=problem.is_causal)
    return out


def _xformers(problem: BenchProblem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """xFormers: tensors are (B, N, H, D)."""
    ops = importlib.import_module("xformers.ops")
    mask = ops.LowerTriangularMask() if problem.is_causal else None
    out: Tensor = ops.memory_efficient_attention(q, k, v, attn_bias=mask)
    return out


def _natten(problem: BenchProblem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """NATTEN 0.20 or newer: tensors are (B, N, H, D)."""
    pattern = problem.pattern
    assert isinstance(pattern, Neighborhood)
    if q.device.type == "cpu":  # NATTEN uses FlexAttention there, which refuses tensors that require gradients
        q, k, v = (x.detach() for x in (q, k, v))
    natten = importlib.import_module("natten")
    out: Tensor = natten.na1d(q, k, v, kernel_size=pattern.size, dilation=pattern.dilation, is_causal=problem.is_causal)
    return out


def _authors(problem: BenchProblem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert isinstance(problem.pattern, Dilated)
    return authors(q, k, v, problem.pattern, problem.is_causal)


def _flex(problem: BenchProblem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert isinstance(problem.pattern, Dilated)
    return flex(q, k, v, problem.pattern, problem.is_causal)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return out, lse


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
        places = index[None, :, :, None].expand(batch * segments, -1, -1, d)
        padding = segments * w - n, rows * r - w

        def gather(x: Tensor, w: int = w, places: Tensor = places, padding: tuple[int, int] = padding) -> Tensor:
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding[0])).view(-1, w, heads, d)
            return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding[1])).transpose(1, 2).gather(2, places)

        out, lse = _flash(gather(q), gather(k), gather(v), is_causal)
        out = torch.zeros(batch * segments, heads, rows * r, d, dtype=q.dtype, device=q.device).scatter(2, places, out)
        full = torch.full((batch * segments, heads, rows * r), -1e8, dtype=torch.float32, device=q.device)
        lse = full.scatter(2, places[..., 0], lse.detach().float())
        outs.append(out[:, :, :w].transpose(1, 2).reshape(batch, segments * w, heads, d)[:, :n])
        lses.append(lse[:, :, :w].transpose(1, 2).reshape(batch, segments * w, heads)[:, :n])
    weights = torch.stack(lses).softmax(0).to(q.dtype)
    return torch.stack([out * weight.unsqueeze(-1) for out, weight in zip(outs, weights, strict=True)]).sum(0)


@lru_cache(maxsize=4)
def _flex_mask(pattern: Dilated, shape: tuple[int, int], is_causal: bool, device: str) -> tuple[Any, Callable[..., Tensor]]:
    from torch.nn.attention.flex_attention import create_block_mask

    def multiplicity(h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        total = torch.zeros_like(i + j)
        for w, r in pattern.branches:
            offset = h % r  # interleaved
            total = total + ((i // w == j // w) & (i % w % r == offset) & (j % w % r == offset)).to(total.dtype)
        return total * (i >= j) if is_causal else total

    heads, n = shape
    mask = create_block_mask(
        lambda b, h, i, j: multiplicity(h, i, j) > 0, None, heads, n, n, device=device, _compile=device == "cuda"
    )
    return mask, lambda score, b, h, i, j: score + torch.log(multiplicity(h, i, j).to(score.dtype))


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._functorch.config.donated_buffer = False  # backwards are measured again and again, of one forward
    return torch.compile(flex_attention, dynamic=False)


def flex(q: Tensor, k: Tensor, v: Tensor, pattern: Dilated, is_causal: bool = False) -> Tensor:
    """One FlexAttention call with the logarithm of the multiplicity added to the scores.

    It skips blocks of 128 x 128 that nobody needs, so a dilated branch costs it r times as much.
    """
    if pattern.offsets != "interleaved":
        raise ValueError(f"flex has offsets that are interleaved, got {pattern.offsets!r}; use another method")
    shape, widest = q.shape, max(pattern.segment_lengths)
    if shape[1] % widest == 0 and all(widest % w == 0 for w in pattern.segment_lengths):
        # Longest segments are samples of their own: a mask of a million tokens would have 2**26 blocks for each head.
        q, k, v = (x.reshape(-1, widest, *shape[2:]) for x in (q, k, v))
    mask, score_mod = _flex_mask(pattern, (q.shape[2], q.shape[1]), is_causal, q.device.type)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out: Tensor = _compiled_flex()(*heads_first, block_mask=mask, score_mod=score_mod).transpose(1, 2).reshape(shape)
    return out

"""What the tests of block-sparse attention share: patterns for blocks of 16, inputs, comparison."""

from __future__ import annotations

import torch

import block_oracle
import oracle
from dilated_attention_pytorch import BlockSparse, Order, SparsePatternConfig

SIZE = 16
KINDS = ["local_window", "global_local", "dilated_sparse", "hierarchical"]
OPTIONS = {
    "hierarchical": {"local_window_size": 33},
    "global_local": {"global_tokens": 20},
    "dilated_sparse": {"segment_lengths": (40, 96), "dilation_rates": (1, 2)},
}


def config(kind, ratio=0.4, **more):
    return SparsePatternConfig(kind, ratio, block_size=SIZE, **{**OPTIONS.get(kind, {}), **more})


def table_of(kind, ratio, first, n, causal):
    """Boolean (query blocks, key blocks), by the slow rule."""
    options = {"global_blocks": min(n, 2), "branches": ((min(n, 3), 1), (min(n, 6), 2)), "window": 3}
    table = torch.zeros(n - first, n, dtype=torch.bool)
    for i in range(first, n):
        table[i - first, block_oracle.choose(kind, ratio, i, n, causal, **options)] = True
    return table


def random_inputs(b, n, m, heads, key_heads, d, dtype=torch.float64):
    shapes = ((b, n, heads, d), (b, m, key_heads, d), (b, m, key_heads, d))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def with_grads(call, inputs, dout, dlse):
    out, lse = call(*inputs)
    grads = oracle.grads((out, lse), inputs, (dout, dlse))
    return [x.detach() for x in (out, lse, *grads)]


def positions_met(table, size, n, m, causal):
    """Boolean (..., n, m), of a table (..., query blocks, key blocks)."""
    i, j = torch.arange(m - n, m), torch.arange(m)
    met = table[..., i // size - (m - n) // size, :][..., j // size]
    return met & (j <= i[:, None]) if causal else met


def plain(met, factors=None):
    """Eager dense attention in the type of its inputs, masked: the yardstick of rounding. Weights times factors."""

    def call(q, k, v):
        group = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(group, 2) for x in (k, v))
        hidden, empty = ~met.to(q.device), ~met.any(-1).to(q.device)
        s = torch.einsum("bnhd,bmhd->bhnm", q, k) * q.shape[-1] ** -0.5
        s = s.masked_fill(hidden & ~empty[..., None], -torch.inf)
        p = s.softmax(-1).masked_fill(empty[..., None], 0.0)
        p = p if factors is None else p * factors.to(p)
        lse = s.float().logsumexp(-1) if s.dtype != torch.float64 else s.logsumexp(-1)
        return torch.einsum("bhnm,bmhd->bnhd", p, v), lse.masked_fill(empty, -torch.inf)

    return call


def assert_same(actual, expected, tolerance=1e-10):
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def random_order(n, batch=0):
    return Order.from_permutation(torch.stack([torch.randperm(n) for _ in range(batch)]) if batch else torch.randperm(n))


def pattern_of(kind, n, heads):
    """A pattern and its table, None if that depends on the content."""
    blocks = -(-n // SIZE)
    if kind in ("mask", "masks"):
        table = torch.rand((heads, blocks, blocks) if kind == "masks" else (blocks, blocks)) < 0.4
        return BlockSparse.custom(table, block_size=SIZE), table
    return BlockSparse.from_config(config(kind)), None if kind == "adaptive" else table_of(kind, "0.4", 0, blocks, False)


def ordered_attention(q, k, v, table, order, causal, scale=None):
    """Rows put in order by indexing, the lists of the call that is not causal, and back."""
    batch, positions = torch.arange(q.shape[0])[:, None], order.positions.expand(q.shape[0], -1)
    q, k, v = (x[batch, positions] for x in (q, k, v))
    if table is None:
        used = q.shape[-1] ** -0.5 if scale is None else scale
        table = block_oracle.adaptive(q.detach(), k.detach(), "0.4", SIZE, used, False)
    out, lse = block_oracle.attention(q, k, v, table, SIZE, causal=causal, scale=scale, positions=positions)
    back = batch, positions.argsort(-1)
    return out[back], lse.transpose(1, 2)[back].transpose(1, 2)

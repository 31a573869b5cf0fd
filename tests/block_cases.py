"""What the tests of block-sparse attention share: patterns for blocks of 16, inputs, comparison."""

from __future__ import annotations

import torch

import block_oracle
import oracle
from dilated_attention_pytorch import SparsePatternConfig

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


def assert_same(actual, expected, tolerance=1e-10):
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")

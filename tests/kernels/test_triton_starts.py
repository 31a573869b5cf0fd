"""The Triton kernels with samples that have padding in front: interpreted here, compiled on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import block_oracle
import oracle
from block_cases import SIZE, config, table_of
from dilated_attention_pytorch import BlockSparse, Dilated, attention
from oracle import assert_same, random_inputs, with_grads
from starts_cases import LENGTHS, ROWS, STARTS, by_itself, poisoned

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def compare(attend, pattern, n, starts, lengths, *, heads=2, key_heads=1, **options):
    """All five results against ``attend`` on each sample in float64, with NaN in all rows outside."""
    inputs = random_inputs(len(starts), n, ROWS, heads, key_heads, 16)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(len(starts), heads, n)
    expected = with_grads(by_itself(attend, starts, lengths), inputs, dout, dlse)
    call = lambda *x: attention(  # noqa: E731
        *x, pattern, starts=starts, lengths=lengths, backend="triton", return_lse=True, **options
    )
    on_device = [x.detach().to(DEVICE, torch.float32).requires_grad_() for x in poisoned(inputs, starts, lengths)]
    actual = [x.cpu() for x in with_grads(call, on_device, dout.to(DEVICE), dlse.to(DEVICE))]
    assert_same(actual, expected, 2e-5)


# With rates 2 and 4 no branch has all rows.
@pytest.mark.parametrize(
    ("rates", "n", "causal"),
    [
        ([1, 3], 70, False),
        ([1, 3], 70, True),
        ([1, 3], 30, False),
        ([1, 3], 30, True),
        ([1, 3], 1, True),
        ([2, 4], 70, True),
        ([2, 4], 30, False),
    ],
)
def test_dilated(rates, n, causal):
    """30 queries are more than some samples have rows."""
    pattern = Dilated([24, 64], rates)
    attend = lambda _, *x: oracle.attention(*x, pattern, is_causal=causal)  # noqa: E731
    compare(attend, pattern, n, STARTS[1:6], LENGTHS[1:6], is_causal=causal)


@pytest.mark.parametrize(
    ("kind", "n", "causal"),
    [
        ("local_window", 70, False),
        ("local_window", 70, True),
        ("hierarchical", 30, False),
        ("hierarchical", 30, True),
        ("adaptive", 70, True),
        ("adaptive", 2, False),
    ],
)
def test_blocks(kind, n, causal):
    def attend(_, q, k, v):
        first, blocks = (k.shape[1] - q.shape[1]) // SIZE, -(-k.shape[1] // SIZE)
        if kind == "adaptive":
            table = block_oracle.adaptive(q.detach(), k.detach(), "0.4", SIZE, q.shape[-1] ** -0.5, causal)
        else:
            table = table_of(kind, "0.4", first, blocks, causal)
        return block_oracle.attention(q, k, v, table, SIZE, causal=causal)

    compare(attend, BlockSparse.from_config(config(kind)), n, (0, 13, 53, 50), (70, 50, 17, 5), is_causal=causal)


@pytest.mark.parametrize(
    ("pattern", "n"),
    [
        (Dilated([24, 64], [1, 3]), 70),
        (Dilated([24, 64], [1, 3]), 20),
        (BlockSparse.from_config(config("local_window")), 20),
    ],
)
def test_dropout_counts_from_the_start_of_the_sample(pattern, n):
    """The reference is compared with the hash of dropout in unit/test_starts.py."""
    inputs = [x.to(DEVICE).detach().requires_grad_() for x in random_inputs(3, n, ROWS, 2, 1, 16, torch.float32)]
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(3, 2, n, device=DEVICE)
    options = {"is_causal": True, "dropout_p": 0.3, "seed": 2**40 + 7, "starts": [0, 17, 50], "lengths": [70, 40, 13]}
    both = [
        with_grads(
            lambda *x, backend=backend: attention(*x, pattern, backend=backend, return_lse=True, **options),
            inputs, dout, dlse,
        )
        for backend in ("triton", "reference")
    ]  # fmt: skip
    assert_same(*both, 2e-5)

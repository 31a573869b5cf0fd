"""Memory beyond the inputs, as counted by PyTorch's allocator."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import BlockSparse, Dilated, SparsePatternConfig, attention
from dilated_attention_pytorch.measure import peak_extra_bytes

CPU = torch.device("cpu")

pytestmark = pytest.mark.slow


def test_the_meter_itself():
    assert peak_extra_bytes(lambda: torch.ones(1000) + torch.ones(1000), CPU) >= 3 * 4000
    assert peak_extra_bytes(lambda: [torch.ones(1000) for _ in range(1)], CPU) < 6000


@pytest.mark.parametrize("causal", [False, True])
def test_forward_needs_the_output_lse_and_at_most_one_more_buffer(causal):
    """A sequence long enough that the limit on partial results is the proportional one (an eighth of the output)."""
    q, k, v = torch.randn(3, 1, 16384, 4, 512).unbind(0)
    pattern = Dilated([64, 256], [1, 4])
    out_bytes, lse_bytes = q.numel() * 4, q.numel() // 512 * 4
    extra = peak_extra_bytes(lambda: attention(q, k, v, pattern, is_causal=causal), CPU)
    assert extra <= 1.5 * out_bytes + 4 * lse_bytes


def test_half_precision_forward_adds_one_float32_buffer():
    """Small heads keep this affordable: half precision is slow on most CPUs."""
    q, k, v = torch.randn(3, 1, 2**16, 2, 256).to(torch.float16).unbind(0)
    extra = peak_extra_bytes(lambda: attention(q, k, v, Dilated([16], [4])), CPU)
    assert extra <= q.numel() * (2 + 4 + 1.5)


def test_nothing_grows_with_the_number_of_branches():
    q, k, v = torch.randn(3, 1, 2**15, 4, 256).unbind(0)
    one = peak_extra_bytes(lambda: attention(q, k, v, Dilated([64], [1])), CPU)
    six = peak_extra_bytes(lambda: attention(q, k, v, Dilated([64] * 6, [1] * 6)), CPU)
    assert six <= 1.01 * one


@pytest.mark.parametrize("kind", ["local_window", "adaptive"])
def test_block_sparse_attention_gathers_a_part_at_a_time(kind):
    """All scores would be 1 GiB, all gathered keys of a fiftieth of them 80 MiB."""
    q, k, v = torch.randn(3, 1, 2**14, 1, 64).unbind(0)
    pattern = BlockSparse.from_config(SparsePatternConfig(kind, 0.02, block_size=64))
    assert peak_extra_bytes(lambda: attention(q, k, v, pattern), CPU) <= q.numel() * 4 + 7 * 2**20 * 4

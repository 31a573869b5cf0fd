"""The bits of a sample do not depend on what other samples of the batch hold, in every backend on a GPU.

Not in ``sdpa``: the backward of cuDNN adds up dq in an order that varies from run to run.
"""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import BlockSparse, Dilated, attention
from neighbours import check_bits_of_a_sample

pytestmark = pytest.mark.gpu
PATTERNS = {
    "parts": Dilated([512, 1024, 4096], [1, 2, 4]),
    "short tiles": Dilated([128], [1]),
    "one branch": Dilated([4096], [1]),  # gradients at once
    "blocks": BlockSparse.custom(torch.ones(32, 32, dtype=torch.bool).tril(), block_size=128),
}


@pytest.mark.parametrize("backend", ["auto", "triton", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", PATTERNS)
def test_the_bits_of_a_sample_are_its_own(name, dtype, backend):
    """Programs of persistent kernels take items of all samples."""
    check_bits_of_a_sample(
        lambda *x: attention(*x, PATTERNS[name], backend=backend, return_lse=True),
        n=4096, heads=12, head_dim=64, device="cuda", dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [48, 128])
def test_head_sizes(head_dim, causal):
    check_bits_of_a_sample(
        lambda *x: attention(*x, PATTERNS["parts"], is_causal=causal, return_lse=True),
        n=4096, heads=8, head_dim=head_dim, device="cuda", dtype=torch.bfloat16,
    )  # fmt: skip

"""The two examples of block-sparse modules as they were printed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import block_oracle
from dilated_attention_pytorch import Attention, MultiheadDilatedAttention
from dilated_attention_pytorch.distributed import Shards, gather_sequence, shard_sequence

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

DATA_PARALLEL = """\
import torch.nn as nn
from dilated_attention_pytorch.block_sparse_ring_dilated_attention import (
    BlockSparseRingDilatedAttention,
    SparsePatternConfig
)

# Create model
model = BlockSparseRingDilatedAttention(
    segment_lengths=[4096, 8192],
    dilation_rates=[1, 2],
    sparse_config=SparsePatternConfig(
        pattern_type="dilated_sparse",
        sparsity_ratio=0.1
    )
)

# Wrap in DataParallel
model = nn.DataParallel(model)
model = model.cuda()

# Use normally - PyTorch handles distribution
output = model(inputs)
"""

DISTRIBUTED = """\
from dilated_attention_pytorch.block_sparse_ring_distributed_dilated_attention import (
    BlockSparseRingDistributedDilatedAttention,
    DistributedSparseConfig
)

# Configure distributed settings
config = DistributedSparseConfig(
    sparsity_ratio=0.05,
    pattern_type="hierarchical"
)

# Create distributed model
model = BlockSparseRingDistributedDilatedAttention(
    embed_dim=512,
    num_heads=8,
    segment_lengths=[4096, 8192],
    dilation_rates=[1, 2],
    distributed_config=config
)
"""


@pytest.mark.parametrize("device", DEVICES)
def test_data_parallel(device):
    """Dense attention of PyTorch, with the mask that the slow rule chooses, has the same output."""
    inputs = torch.randn(2, 1500, 4, 8, device=device)
    names = {"inputs": inputs}
    exec(DATA_PARALLEL if device == "cuda" else DATA_PARALLEL.replace("model = model.cuda()\n", ""), names)
    blocks = torch.arange(1500) // 128
    table = torch.zeros(12, 12, dtype=torch.bool)
    for i in range(12):
        table[i, block_oracle.choose("dilated_sparse", "0.1", i, 12, False, branches=((12, 1), (12, 2)))] = True
    assert int(table.sum()) == 24
    met, (x,) = table[blocks][:, blocks], (inputs.cpu().double().transpose(1, 2),)
    expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=met).transpose(1, 2)
    assert names["output"].device.type == device
    torch.testing.assert_close(names["output"].cpu().double(), expected, rtol=1e-5, atol=1e-5)
    assert not list(names["model"].parameters())


def check_distributed(group, device: str) -> None:
    names = {}
    exec(DISTRIBUTED, names)
    torch.manual_seed(0)
    n, model = 8320, names["model"].to(device)  # the last of 65 blocks is in other segments
    one = MultiheadDilatedAttention(512, 8, [4096], [1])
    config = replace(names["config"], segment_lengths=[4096, 8192], dilation_rates=[1, 2])
    pattern = config.pattern(Shards.even(n, 2, "contiguous"))
    assert not pattern.given.mask()[0, 0, :64, 64:].any()
    one.attention = Attention(pattern)
    model.load_state_dict(one.state_dict())
    x = torch.randn(1, n, 512)
    part = shard_sequence(x.to(device), group)
    out, weights = model(part, part, part, is_causal=True)
    assert weights is None
    whole = gather_sequence(out, group)
    torch.testing.assert_close(whole.cpu(), one(x, x, x, is_causal=True)[0], rtol=1e-4, atol=1e-4)
    # What docs/block_sparse.md has for ranks; tests/unit/test_block_explain.py runs the rest of the page.
    page = (Path(__file__).parents[2] / "docs" / "block_sparse.md").read_text().split("## Across ranks")[1]
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(re.sub(r"^dist\.(init|destroy)_process_group\(.*\)\n", "", code, flags=re.MULTILINE), names)
    again, _ = names["module"](names["x"], names["x"], names["x"], is_causal=True)
    assert torch.equal(names["out"], again)
    assert names["out"].shape == names["x"].shape == (1, 500, 512)


@pytest.mark.parametrize("device", DEVICES)
def test_distributed(on_ranks, device):
    """Two ranks have the rows of one device."""
    on_ranks(2, check_distributed, device)

"""``FlopCounterMode`` counts the plan's FLOPs, compared with the oracles' pairs and with PyTorch's own formulas."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import block_oracle
import oracle
import programs
from block_cases import SIZE, config, positions_met, random_order, table_of
from dilated_attention_pytorch import BlockSparse, Dilated, MultiheadDilatedAttention, attention, explain

DILATED = Dilated([8, 20, 64], [1, 2, 3])
D = 8


def counted(pattern, n, m, batch=2, heads=4, key_heads=2, **options):
    """FLOPs of the forward and of the backward, and those that explain gives."""
    q = torch.randn(batch, n, heads, D, requires_grad=True)
    k, v = (torch.randn(batch, m, key_heads, D, requires_grad=True) for _ in range(2))
    with FlopCounterMode(display=False) as forward:
        out, lse = attention(q, k, v, pattern, return_lse=True, **options)
    with FlopCounterMode(display=False) as backward:
        (out.sum() + torch.where(lse.isfinite(), lse, 0.0).sum()).backward()
    assert q.grad is not None
    options.pop("mixing_gradient", None)
    told = explain(q, k, v, pattern, **options)
    found = forward.get_total_flops(), backward.get_total_flops()
    assert found == (told.forward_flops, told.backward_flops)
    return found


def pairs(n, m, causal, lengths=None, documents=None, batch=2):
    """The pairs of DILATED over 4 query heads and 2 key heads, by the oracle."""
    sequences = [(n, m)] * batch
    if lengths is not None:
        sequences = [(length - (m - n), length) for length in lengths]
    if documents is not None:
        sequences = [(stop - start,) * 2 for start, stop in pairwise(documents)] * batch
    return sum(int(oracle.multiplicities(DILATED, a, b, 4, 2, causal).sum()) for a, b in sequences if a > 0)


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("n", "m", "options"),
    [
        (50, 50, {}),
        (17, 50, {}),
        (50, 50, {"lengths": [50, 13]}),
        (50, 50, {"documents": [0, 11, 11, 50]}),
        (50, 50, {"mixing_gradient": "detached"}),
    ],
)
def test_dilated(n, m, options, causal, backend):
    tensors = {"lengths": "lengths", "documents": "cu_seqlens"}
    more = {tensors[name]: torch.tensor(x) for name, x in options.items() if name in tensors}
    more |= {name: x for name, x in options.items() if name not in tensors}
    expected = pairs(n, m, causal, options.get("lengths"), options.get("documents"))
    assert counted(DILATED, n, m, is_causal=causal, backend=backend, **more) == (4 * D * expected, 10 * D * expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["hierarchical", "mask", "masks", "adaptive"])
def test_blocks(kind, causal):
    torch.manual_seed(3)
    q, k = torch.randn(2, 75, 4, D), torch.randn(2, 75, 2, D)
    if kind == "hierarchical":
        pattern, table = BlockSparse.from_config(config(kind)), table_of(kind, "0.4", 0, 5, causal)
    elif kind == "adaptive":
        pattern = BlockSparse.from_config(config(kind))
        table = block_oracle.adaptive(q, k, "0.4", SIZE, D**-0.5, causal)
    else:
        table = torch.rand((4, 5, 5) if kind == "masks" else (5, 5)) < 0.5
        pattern = BlockSparse.custom(table, block_size=SIZE)
    expected = int(positions_met(table.expand(2, 4, 5, 5), SIZE, 75, 75, causal).sum())
    q.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        attention(q, k, k, pattern, is_causal=causal).sum().backward()
    assert counter.get_total_flops() == 14 * D * expected
    assert explain(q, k, k, pattern, is_causal=causal).forward_flops == 4 * D * expected


def test_one_dense_segment_counts_like_pytorch():
    """Also grouped-query attention. PyTorch counts causal attention as if every pair were computed, we do not."""
    theirs = sdpa_flop_count((2, 4, 40, D), (2, 4, 40, D), (2, 4, 40, D))
    theirs_backward = sdpa_backward_flop_count(*[(2, 4, 40, D)] * 4)
    assert counted(Dilated([40], [1]), 40, 40) == (theirs, theirs_backward)
    causal = counted(Dilated([40], [1]), 40, 40, is_causal=True)
    assert causal == (4 * D * 2 * 4 * 40 * 41 // 2, 10 * D * 2 * 4 * 40 * 41 // 2)


def test_orders_transforms_and_modules():
    q = torch.randn(2, 50, 4, D)
    whole = 4 * D * 2 * int(oracle.multiplicities(DILATED, 50, 50, 4, 4, False).sum())
    with FlopCounterMode(display=False) as counter:  # causality under an order masks pairs that are computed
        attention(q, q, q, DILATED, is_causal=True, order=random_order(50))
    assert counter.get_total_flops() == whole
    with FlopCounterMode(display=False) as counter:
        torch.vmap(lambda x: attention(x, x, x, DILATED))(q[:, None])
    assert counter.get_total_flops() == whole
    module = MultiheadDilatedAttention(4 * D, 4, [8, 20, 64], [1, 2, 3])
    x = torch.randn(2, 50, 4 * D)
    with FlopCounterMode(display=False) as counter:
        module(x, x, x)
    projections = 4 * 2 * 2 * 50 * (4 * D) ** 2
    assert counter.get_total_flops() == whole + projections
    assert "attend" in str(counter.get_flop_counts())


def test_fake_tensors():
    """Lengths without values are those of the tensors, and adaptive patterns count as the nearest blocks."""
    x = torch.randn(2, 64, 4, D)
    adaptive, window = (BlockSparse.from_config(config(kind)) for kind in ("adaptive", "local_window"))
    for pattern, like in ((DILATED, DILATED), (adaptive, window)):
        expected = explain(x, x, x, like).forward_flops
        with FakeTensorMode(), FlopCounterMode(display=False) as counter:
            fake = torch.empty(2, 64, 4, D)
            attention(fake, fake, fake, pattern)
        assert counter.get_total_flops() == expected
        attention(x, x, x, pattern)  # no cache holds a fake tensor
        meta = x.to("meta")
        with FlopCounterMode(display=False) as counter:
            attention(meta, meta, meta, pattern)
        assert counter.get_total_flops() == expected


def test_the_package_may_be_imported_first(tmp_path):
    """It does not import the counter, which imports triton. Still, the first call inside the first mode counts."""
    code = """
import sys, torch
from dilated_attention_pytorch import Dilated, attention
assert "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
q = torch.randn(1, 16, 2, 8, requires_grad=True)
with FlopCounterMode(display=False) as counter:
    attention(q, q, q, Dilated([8], [1])).sum().backward()
assert counter.get_total_flops() == 14 * 8 * 2 * 2 * 8 * 8, counter.get_flop_counts()
"""
    result = programs.run(code, folder=tmp_path)
    assert result.returncode == 0, result.stderr

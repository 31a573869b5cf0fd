"""What ``explain`` and ``simulate_ring`` say about rows without keys, layouts, and devices that are not here."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import oracle
from block_cases import SIZE, config, positions_met, random_order
from dilated_attention_pytorch import BlockSparse, Dilated, SparsePatternConfig, attention, explain
from dilated_attention_pytorch.backends.targets import GPUS
from dilated_attention_pytorch.distributed import simulate_ring


def empty(pattern, n, m, heads, key_heads, causal):
    """Pairs of a row and a head that meet no key, by the oracle."""
    return int((oracle.multiplicities(pattern, n, m, heads, key_heads, causal).sum(-1) == 0).sum())


branches = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 7)), min_size=1, max_size=4)


@given(branches, st.integers(1, 60), st.integers(0, 60), st.sampled_from([1, 2, 3]), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_empty_rows(own, m, fewer, key_heads, blocked, causal):
    pattern = Dilated([w for w, _ in own], [r for _, r in own], "blocked" if blocked else "interleaved")
    n = max(1, m - fewer)
    q, k = torch.empty(2, n, 2 * key_heads, 4), torch.empty(2, m, key_heads, 4)
    told = explain(q, k, k, pattern, is_causal=causal)
    assert told.empty_rows == 2 * empty(pattern, n, m, 2 * key_heads, key_heads, causal)
    assert told.rows == 2 * n * 2 * key_heads
    assert ("zeros" in str(told)) == (told.empty_rows > 0)


def test_empty_rows_of_sequences():
    """Rows behind lengths are not counted; zeros of the output are what is said."""
    pattern = Dilated([10, 30], [2, 3])
    q, k = torch.randn(3, 40, 4, 8), torch.randn(3, 40, 2, 8)
    lengths = torch.tensor([40, 7, 0])
    told = explain(q, k, k, pattern, lengths=lengths)
    assert told.empty_rows == sum(empty(pattern, n, n, 4, 2, False) for n in (40, 7))
    assert told.rows == 4 * 47
    out = attention(q, k, k, pattern, lengths=lengths)
    zeros = int((out[0] == 0).all(-1).sum() + (out[1, :7] == 0).all(-1).sum())
    assert zeros == told.empty_rows
    told = explain(q, k, k, pattern, cu_seqlens=torch.tensor([0, 13, 13, 40]))
    assert told.empty_rows == 3 * (empty(pattern, 13, 13, 4, 2, False) + empty(pattern, 27, 27, 4, 2, False))
    assert told.rows == 3 * 4 * 40


def test_half_of_the_rows():
    q = torch.empty(1, 64, 8, 16)
    told = explain(q, q, q, Dilated([64], [2]))
    assert told.empty_share == 0.5
    assert "zeros     50.000% of the (row, head) pairs meet no key: their output is 0" in str(told)
    assert explain(q, q, q, Dilated([64, 8], [2, 1])).empty_share == 0.0


def test_long_sequences_are_counted_at_once():
    far = torch.empty(1, 2**30, 8, 16, device="meta")
    told = explain(far, far, far, Dilated([2048 * 4**i for i in range(9)], [2 * 2**i for i in range(9)]))
    assert told.empty_share == 0.5  # rate 2 contains the others
    # Rates that do not divide their segments: 3 of the 6 rows of a period, and one row more in the last segment.
    told = explain(far, far, far, Dilated([2**30, 3], [2, 2], [0] * 8))
    period = [i for i in range(6) if i % 2 and (i % 3) % 2]
    expected = 2**30 // 6 * len(period) + sum(i < 2**30 % 6 for i in period)
    assert told.empty_rows == 8 * expected
    # Coprime segments repeat only after a thousand million rows: the share is not known, and nothing is printed.
    told = explain(far, far, far, Dilated([1001, 1003, 1007], [2, 3, 5]))
    assert told.empty_rows is None
    assert told.empty_share is None
    assert "zeros" not in str(told)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("n", [75, 30])
def test_empty_rows_of_masks(n, by_head, causal):
    first = (75 - n) // SIZE
    table = torch.rand((4, 5 - first, 5) if by_head else (5 - first, 5)) < 0.2
    pattern = BlockSparse.custom(table, block_size=SIZE)
    q, k = torch.randn(2, n, 4, 8), torch.randn(2, 75, 2, 8)
    met = positions_met(table.expand(4, 5 - first, 5), SIZE, n, 75, causal)
    told = explain(q, k, k, pattern, is_causal=causal)
    assert told.empty_rows == 2 * int((~met.any(-1)).sum())
    out = attention(q, k, k, pattern, is_causal=causal)
    assert told.empty_rows == int((out == 0).all(-1).sum())
    assert explain(q, k, k, BlockSparse.from_config(config("adaptive")), is_causal=causal).empty_rows == 0
    if n == 75:
        told = explain(q, k, k, pattern, is_causal=causal, lengths=torch.tensor([75, 20]))
        short = positions_met(table.expand(4, 5, 5)[:, :2, :2], SIZE, 20, 20, causal)
        assert told.empty_rows == int((~met.any(-1)).sum()) + int((~short.any(-1)).sum())


@pytest.mark.parametrize("batch", [0, 2])
def test_empty_rows_of_masks_under_an_order(batch):
    """Causality by position hides keys that the lists have."""
    q = torch.randn(2, 75, 4, 8)
    pattern, order = BlockSparse.custom(torch.rand(4, 5, 5) < 0.3, block_size=SIZE), random_order(75, batch)
    told = explain(q, q, q, pattern, is_causal=True, order=order)
    out = attention(q, q, q, pattern, is_causal=True, order=order, backend="reference")
    assert told.empty_rows == int((out == 0).all(-1).sum()) > 0


def test_layouts():
    heads_first = torch.empty(2, 8, 1024, 64)
    (text,) = explain(heads_first, heads_first, heads_first, Dilated([8], [1])).warnings
    assert "1024 heads with 8 positions each look like tensors of shape (B, H, N, D)" in text
    assert "must be (B, N, H, D); pass q.transpose(1, 2)" in text
    right = heads_first.transpose(1, 2)
    assert explain(right, right, right, Dilated([8], [1])).warnings == ()
    decoding = explain(right[:, -1:], right, right, Dilated([8], [1]))  # one query of 8 heads
    assert decoding.warnings == ()


@pytest.mark.parametrize("described", ["cuda:h200", "cuda:H100", "cuda:sm90", "cuda:sm_90", "cuda:9.0"])
def test_descriptions(described):
    far = torch.empty(1, 4096, 8, 64, device="meta", dtype=torch.bfloat16)
    pattern = Dilated([512, 4096], [1, 4])
    told = explain(far, far, far, pattern, device=described, world_size=4)
    assert told.backend == "hopper"
    assert (told.sharding.own_rows, told.sharding.other_rows) == ("hopper", "hopper")
    near = torch.empty(1, 4096, 8, 64, dtype=torch.bfloat16)
    assert explain(near, near, near, pattern, device=described, world_size=4) == told
    on_cpu = explain(near, near, near, pattern)
    assert on_cpu.backend == "sdpa"
    assert explain(far, far, far, pattern, device="cpu") == on_cpu
    assert explain(near, near, near, pattern, device=torch.device("cpu")) == on_cpu
    with FakeTensorMode():
        fake = torch.empty(1, 4096, 8, 64, dtype=torch.bfloat16)
        assert explain(fake, fake, fake, pattern) == on_cpu
        assert explain(fake, fake, fake, pattern, device=described, world_size=4) == told
    assert explain(fake, fake, fake, pattern) == on_cpu  # outside of the mode


def test_other_gpus():
    far = torch.empty(1, 256, 2, 64, device="meta", dtype=torch.bfloat16)
    chosen = {name: explain(far, far, far, Dilated([64], [1]), device=f"cuda:{name}").backend for name in GPUS}
    assert chosen == {name: "hopper" if x[0] == 9 else "triton" if x[0] >= 8 else "eager" for name, x in GPUS.items()}


def test_devices_that_do_not_exist():
    x = torch.empty(1, 16, 2, 8)
    with pytest.raises(ValueError, match=r"sm90 or 9.0\) or with one of v100, .*h200.*; got 'cuda:h9000'"):
        explain(x, x, x, Dilated([8], [1]), device="cuda:h9000")
    with pytest.raises(ValueError, match=r"one of v100, .*h200.*; got 'cuda:4090'"):
        explain(x, x, x, Dilated([8], [1]), device="cuda:4090")
    with pytest.raises(ValueError, match="got 'toaster'"):
        explain(x, x, x, Dilated([8], [1]), device="toaster")
    with pytest.raises(TypeError, match="string such as 'cuda:h200', got int"):
        explain(x, x, x, Dilated([8], [1]), device=3)
    with pytest.raises(ValueError, match="got device='cuda:h200' for tensors on cpu; pass tensors on the meta device"):
        simulate_ring(x, x, x, Dilated([8], [1]), 2, device="cuda:h200")
    lengths = torch.tensor([3], device="meta")
    with pytest.raises(ValueError, match="lengths must have values to plan with, got a tensor on the meta device"):
        explain(x.to("meta"), x.to("meta"), x.to("meta"), Dilated([8], [1]), lengths=lengths)
    with FakeTensorMode():
        fake, lengths = torch.empty(1, 16, 2, 8), torch.tensor([3])
        with pytest.raises(ValueError, match="lengths must have values to plan with, got a fake tensor"):
            explain(fake, fake, fake, Dilated([8], [1]), lengths=lengths)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU on a machine without one")
def test_no_gpu_here():
    x = torch.empty(1, 16, 2, 8, device="meta")
    with pytest.raises(ValueError, match="which has none; describe one by device='cuda:h200'"):
        explain(x, x, x, Dilated([8], [1]), device="cuda")


@pytest.mark.parametrize("kind", ["local_window", "mask", "adaptive"])
def test_blocks_without_values(kind):
    table = torch.rand(5, 5) < 0.5
    pattern = BlockSparse.custom(table, block_size=SIZE) if kind == "mask" else BlockSparse.from_config(config(kind))
    x = torch.randn(2, 80, 2, 8)
    expected, told = explain(x, x, x, pattern), explain(x.to("meta"), x.to("meta"), x.to("meta"), pattern, device="cpu")
    assert told.forward_flops == expected.forward_flops  # whole blocks: the choice of an adaptive pattern does not matter
    assert told.blocks == expected.blocks
    assert [("nearest blocks" in text) for text in told.warnings] == [True] * (kind == "adaptive")
    with FakeTensorMode():
        fake = torch.empty(2, 80, 2, 8)
        assert explain(fake, fake, fake, pattern) == told
    assert explain(x, x, x, pattern) == expected  # no cache holds a fake tensor
    if kind == "adaptive":
        with pytest.raises(ValueError, match="chooses its blocks by values"):
            explain(x.to("meta"), x.to("meta"), x.to("meta"), pattern, world_size=2)


@pytest.mark.parametrize("pattern", [Dilated([256, 2048], [1, 4]), BlockSparse.from_config(config("local_window", 1 / 32))])
@pytest.mark.parametrize("causal", [False, True])
def test_simulated_memory_without_values(pattern, causal):
    """Everything but the scratch memory of the CPU's kernel is the same as with values."""
    x = torch.randn(1, 2048, 4, 16)
    *_, expected = simulate_ring(x, x, x, pattern, 4, is_causal=causal)
    far = x.to("meta")
    out, lse, found = simulate_ring(far, far, far, pattern, 4, is_causal=causal, device="cpu")
    assert (out.shape, out.dtype, out.is_meta) == (x.shape, x.dtype, True)
    assert lse.shape == (1, 4, 2048)
    for a, b in zip(found, expected, strict=True):
        assert (a.rank, a.rows, a.query, a.key_value, a.buffers, a.received) == (
            b.rank, b.rows, b.query, b.key_value, b.buffers, b.received)  # fmt: skip
        assert a.partials >= 512 * 4 * 17 * 4  # output and lse
        assert a.partials <= b.partials <= 2 * a.partials
    with FakeTensorMode():
        fake = torch.empty(1, 2048, 4, 16)
        out, lse, again = simulate_ring(fake, fake, fake, pattern, 4, is_causal=causal)
        assert type(out) is type(lse) is type(fake)
    assert again == found
    assert simulate_ring(x, x, x, pattern, 4, is_causal=causal)[2][0].received == expected[0].received


@pytest.mark.parametrize("device", [None, "cuda:h200", "cuda:a100", "cuda:t4"])
def test_simulated_memory_of_gpus(device):
    """Never negative, at least output and lse, and on a GPU messages are larger."""
    x = torch.empty(1, 2**16, 8, 64, device="meta", dtype=torch.bfloat16)
    _, _, memory = simulate_ring(x, x, x, Dilated([2048, 2**16], [1, 32]), 8, device=device)
    for one in memory:
        assert min(astuple(one)[1:7]) > 0
        assert astuple(one)[7:] == (0, None, None, None)  # not adaptive, no backward
        assert one.rows == 2**13
        assert one.query == 2**13 * 8 * 64 * 2
        assert one.partials >= 2**13 * 8 * (64 + 1) * 4
        assert one.partials < 4 * 2**13 * 8 * 64 * 4


@pytest.mark.parametrize("device", ["cpu", "cuda:h200", "cuda:a100"])
def test_simulated_backward_of_gpus(device):
    """Gradients take more than results, and their messages are float32. Fused kernels do not run on the meta device."""
    x = torch.empty(1, 2**14, 8, 64, device="meta", dtype=torch.bfloat16)
    _, _, memory = simulate_ring(x, x, x, Dilated([2048, 2**14], [1, 4]), 8, device=device, backward=True)
    for one in memory:
        assert one.grad_received == 3 * one.received  # keys and values in 2 bytes, gradients in 4
        assert one.grad_buffers == 3 * one.buffers
        if device == "cuda:h200":
            assert one.grad_partials is None
        else:
            assert one.grad_partials >= 3 * 2**11 * 8 * 64 * 4  # in the accumulation type


def test_memory_of_half_precision_and_negative_scales():
    """The results as returned are counted beside those in float32, and the query with the other sign."""
    query = 1024 * 2 * 16
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for scale in (0.3, -0.3):
            x = torch.empty(1, 4096, 2, 16, device="meta", dtype=dtype)
            *_, memory = simulate_ring(x, x, x, Dilated([512, 4096], [1, 4]), 4, scale=scale, device="cpu", backward=True)
            found[dtype, scale] = memory[1].partials, memory[1].grad_partials
            assert memory[1].partials >= query * 4 + 2 * 1024 * 2 * 4 + (query * 2 if dtype == torch.bfloat16 else 0)
    for dtype, itemsize in ((torch.float32, 4), (torch.bfloat16, 2)):
        for negative, positive in zip(found[dtype, -0.3], found[dtype, 0.3], strict=True):
            assert negative - positive == query * itemsize


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("pattern", [Dilated([8], [1]), BlockSparse.from_config(config("local_window", 0.5))])
def test_ranks_without_rows(pattern, layout):
    """More ranks than rows, and no rows at all. In the zigzag layout, a rank with one row has one chunk."""
    x = torch.randn(1, 5, 2, 8)
    out, _, memory = simulate_ring(x, x, x, pattern, 8, layout=layout, backward=True)
    torch.testing.assert_close(out, attention(x, x, x, pattern))
    assert [one.rows for one in memory] == [1] * 5 + [0] * 3
    row = 2 * 2 * 8 * 4
    assert [one.received for one in memory] == [4 * row] * 5 + [0] * 3
    assert [one.grad_received for one in memory] == [8 * row] * 5 + [0] * 3
    assert all(astuple(one)[2:] == (0,) * 9 for one in memory[5:])
    sharding = explain(x, x, x, pattern, world_size=8, layout=layout).sharding
    assert (sharding.bytes, sharding.backward_bytes, sharding.waits) == (4 * row, 8 * row, 4)
    none = x[:, :0]
    assert explain(none, none, none, pattern, world_size=3, layout=layout).sharding.bytes == 0
    assert [one.received for one in simulate_ring(none, none, none, pattern, 3, layout=layout, backward=True)[2]] == [0] * 3


def test_waits_are_messages_that_arrive():
    """A window reads its neighbours: two messages, for any number of ranks."""
    x = torch.empty(1, 4096, 2, 8)
    window = BlockSparse.from_config(config("local_window", 0.1))
    for world in (3, 8, 16):
        assert explain(x, x, x, window, world_size=world).sharding.waits == 2
    # 16 ranks of 256 rows: segments of 8 ranks at rate 2, so 128 rows from each of the 7 others.
    sharding = explain(x, x, x, Dilated([2048], [2]), world_size=16).sharding
    assert (sharding.transport, sharding.waits, sharding.bytes) == ("ring", 7, 7 * 128 * 2 * 2 * 8 * 4)


def test_explain_thousands_of_ranks():
    far = torch.empty(1, 2**25, 8, 64, device="meta", dtype=torch.bfloat16)
    rates = [4**i for i in range(8)]
    told = explain(far, far, far, Dilated([2048 * r for r in rates], rates), world_size=4096, device="cuda:h200")
    assert told.sharding.bytes < told.sharding.backward_bytes == 3 * told.sharding.bytes
    far, window = far[:, : 2**20], BlockSparse.from_config(SparsePatternConfig("local_window", 4e-2))
    # 328 of 8,192 blocks, so 164 blocks to each side: those of 3 ranks.
    assert explain(far, far, far, window, world_size=128, device="cuda:h200").sharding.waits == 6


def test_adaptive_blocks_are_chosen_from_ordered_rows():
    q, k = torch.randn(2, 2, 75, 4, 8).unbind(0)
    pattern, order = BlockSparse.from_config(config("adaptive")), random_order(75, 2)
    expected = explain(order.permute(q), order.permute(k), k, pattern)
    assert explain(q, k, k, pattern, order=order).pairs == expected.pairs

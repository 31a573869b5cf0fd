"""Mistakes and values that new users pass: each is refused with the rule, the values and the way out, or it works."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dilated_attention_pytorch import (
    BlockSparse,
    Dilated,
    DilatedAttention,
    Hilbert,
    Identity,
    MultiheadDilatedAttention,
    Order,
    SparsePatternConfig,
    Striped,
    ZigZag,
    attention,
    explain,
)
from dilated_attention_pytorch.distributed import Shards, simulate_ring

PATTERN = Dilated([8, 16], [1, 2])


def tensors(dtype=torch.float32):
    return [torch.randn(2, 20, 2, 4, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Order(),
        lambda: Order(torch.tensor([0, 0])),
        lambda: Hilbert(),
        lambda: Order("x"),
        lambda: Order(positions=torch.tensor([0, 0])),
    ],
)
def test_orders_are_made_by_their_factories(make):
    with pytest.raises(
        TypeError, match=r"an order is made by Hilbert\.grid\(height, width\), .*Order\.from_permutation\(p\)"
    ):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: BlockSparse(),
        lambda: BlockSparse(SparsePatternConfig("local_window", 0.1)),
        lambda: BlockSparse(torch.ones(4, 4, dtype=torch.bool)),
    ],
)
def test_block_patterns_are_made_by_their_factories(make):
    with pytest.raises(TypeError, match=r"made by BlockSparse\.from_config\(.* BlockSparse\.custom\(mask\) or"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Hilbert.grid(2**30, 2**30),
        lambda: Hilbert.grid(2**20, 2**10, 2**20),
        lambda: Hilbert.line(2**50),
        lambda: Hilbert.segments(2**50, 4),
        lambda: Identity(2**50),
        lambda: ZigZag(2**50, 2),
        lambda: Striped(2**50, 2),
    ],
)
def test_sizes_that_no_memory_holds(make):
    with pytest.raises(ValueError, match=r"needs about [\d,]+ GiB, the device has [\d,]+ GiB; order shorter sequences"):
        make()


def test_permutations():
    for value in (None, "x", [[1, 0], [0]]):
        with pytest.raises(TypeError, match="a permutation is a tensor or a list of integers, got "):
            Order.from_permutation(value)
    with pytest.raises(TypeError, match="dim must be an integer, got 'x'"):
        Identity(4).permute(torch.zeros(1, 4), dim="x")
    with pytest.raises(ValueError, match="must have values, got one on the meta device; pass device='cpu'"):
        Order.from_permutation([1, 0], device="meta")
    assert Order.from_permutation(np.array([1, 0])).positions.tolist() == [1, 0]
    assert Identity(4).permute(torch.arange(4)[None], dim=np.int64(1)).tolist() == [[0, 1, 2, 3]]
    jagged = torch.nested.nested_tensor([torch.zeros(3, 2), torch.zeros(2, 2)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"coordinates must be a dense tensor; of a nested one, .* Order\.packed\("):
        Hilbert.coordinates(jagged)
    with pytest.raises(TypeError, match="an order moves rows of dense tensors; pass a nested tensor and the order to"):
        Identity(3).permute(jagged)


@pytest.mark.parametrize("world_size", [0, -1, 1.5, True])
def test_world_sizes(world_size):
    q, k, v = tensors()
    for call in (
        lambda: explain(q, k, v, PATTERN, world_size=world_size),
        lambda: simulate_ring(q, k, v, PATTERN, world_size),
        lambda: Shards.even(20, world_size, "contiguous"),
        lambda: ZigZag(20, world_size),
        lambda: Striped(20, world_size),
    ):
        with pytest.raises((ValueError, TypeError), match=f"world_size must be .*, got {world_size}"):
            call()
    assert Shards.even(20, np.int64(2), "contiguous") == Shards.even(20, 2, "contiguous")
    assert ZigZag(20, np.int64(2)) == ZigZag(20, 2)


def test_groups():
    for call in (
        lambda: attention(*tensors(), PATTERN, group="x"),
        lambda: DilatedAttention([8], [1], group="x"),
        lambda: attention(*tensors(), PATTERN, group=3),
    ):
        with pytest.raises(
            TypeError, match=r"group must be a ProcessGroup, a DeviceMesh or a Sharding, got ('x'|3); call tor"
        ):
            call()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.uint8])
def test_types_under_autocast(dtype):
    q, k, v = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for inputs in ((q.to(dtype), k, v), (q, k, v.to(dtype))):
            with pytest.raises(TypeError, match=f"must have one of the dtypes .*, got {dtype}; convert it with .to"):
                attention(*inputs, PATTERN)
        assert attention(q, k, v, PATTERN).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["sparse", "csr", "mkldnn"])
def test_layouts(kind):
    q, _, v = tensors()
    other = {"sparse": q.to_sparse, "csr": q[0, :, 0].to_sparse_csr, "mkldnn": q.to_mkldnn}[kind]()
    with pytest.raises(TypeError, match=r"key must be a dense tensor, got one that is torch\.\w+; use x\.to_dense\(\)"):
        attention(q, other, v, PATTERN)
    module, x = MultiheadDilatedAttention(8, 2, [8], [1]), torch.randn(2, 20, 8)
    other = {"sparse": x.to_sparse, "csr": x[0].to_sparse_csr, "mkldnn": x.to_mkldnn}[kind]()
    with pytest.raises(TypeError, match=r"query must be a dense tensor, got one that is torch\.\w+; use x\.to_dense\(\)"):
        module(other, other, other)


def test_numbers_of_numpy():
    inputs = tensors()
    expected = attention(*inputs, PATTERN, scale=0.25, is_causal=True)
    for scale in (np.float32(0.25), np.float64(0.25), np.float16(0.25)):
        assert attention(*inputs, PATTERN, scale=scale, is_causal=np.True_).equal(expected)
    ints = attention(*inputs, PATTERN, scale=1.0, dropout_p=np.float32(0.5), seed=3)
    assert attention(*inputs, PATTERN, scale=np.int64(1), dropout_p=0.5, seed=3).equal(ints)
    assert DilatedAttention([8, 16], [1, 2], scale=np.float32(0.25))(*inputs, is_causal=np.bool_(True)).equal(expected)
    for lengths in ([20, 7], (20, 7), np.array([20, 7]), torch.tensor([20, 7], dtype=torch.int32)):
        assert attention(*inputs, PATTERN, lengths=lengths).equal(
            attention(*inputs, PATTERN, lengths=torch.tensor([20, 7]))
        )


def test_a_mask_is_not_printed():
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    with pytest.raises(
        TypeError, match=r"^is_causal must be True or False, got Tensor of shape \(20, 20\); other masks are"
    ):
        attention(*tensors(), PATTERN, is_causal=mask)
    with pytest.raises(
        TypeError, match=r"^is_causal must be True or False, got ndarray of shape \(20, 20\); other masks are"
    ):
        attention(*tensors(), PATTERN, is_causal=mask.numpy())


def test_lengths_of_fewer_queries_than_keys():
    q, k, v = tensors()
    with pytest.raises(
        ValueError, match=r"shorter than the 20 keys: got 5 queries and lengths \[20, 9\]; call once for each"
    ):
        attention(q[:, -5:], k, v, PATTERN, lengths=[20, 9])
    assert attention(q[:, -5:], k, v, PATTERN, lengths=[20, 20]).equal(attention(q[:, -5:], k, v, PATTERN))

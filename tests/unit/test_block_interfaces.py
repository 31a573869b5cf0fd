"""Block-sparse attention with FlexAttention's masks, PyTorch's compilers, and as a module."""

from __future__ import annotations

import re

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention

from block_cases import SIZE, config, random_inputs
from dilated_attention_pytorch import (
    BlockSparse,
    BlockSparseRingDilatedAttention,
    SparsePatternConfig,
    attention,
    operators,
)
from dilated_attention_pytorch.call import make_call

BACKENDS = ["reference", "sdpa", "eager"]


def flex_blocks(n):
    """A mask_mod that is constant on blocks, by a random table."""
    table = torch.rand(2, 4, -(-n // 128), -(-n // 128)) < 0.5
    table |= torch.eye(table.shape[-1], dtype=torch.bool)
    return table, lambda b, h, i, j: table[b, h, i // 128, j // 128]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [512, 700])
def test_against_flex_attention(n, causal):
    """PyTorch's own block-sparse attention with the same BlockMask; dense on a CPU, so the blocks are its mask_mod's."""
    table, blocks = flex_blocks(n)
    mod = blocks if not causal else lambda b, h, i, j: blocks(b, h, i, j) & (j <= i)
    block_mask = flex_attention.create_block_mask(mod, 2, 4, n, n, device="cpu")
    q, k, v = (x.detach() for x in random_inputs(2, n, n, 4, 4, 16, torch.float32))
    pattern = BlockSparse.from_flex(block_mask)
    assert pattern.given is not None
    assert torch.equal(pattern.given.mask(), table.tril() if causal else table)
    expected = flex_attention.flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=block_mask)
    for backend in BACKENDS:
        out = attention(q, k, v, pattern, is_causal=causal, backend=backend)
        torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_flex_lists_without_a_mask_mod():
    counts, indices = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    pattern = BlockSparse.from_flex(flex_attention.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64))
    assert pattern.block_size == 64
    assert pattern.given.mask()[0, 0].tolist() == [[False, True], [True, True]]


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (lambda b, h, i, j: (i - j).abs() <= 100, "got 10 other block(s), the first one query block 0, key block 0"),
        (lambda b, h, i, j: (j <= i) | (i >= 256), "all blocks on the diagonal must be causal and none may be above it"),
    ],
)
def test_flex_masks_that_are_no_blocks(mod, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BlockSparse.from_flex(flex_attention.create_block_mask(mod, None, None, 512, 512, device="cpu"))


def test_flex_full_block_on_a_causal_diagonal_at_the_end():
    """Lists by hand may call a short block full; where it has one position, that is the same as causal."""
    counts, indices = torch.tensor([[[1, 0]]], dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    full = torch.tensor([[[0, 2]]], dtype=torch.int32)

    def read(n):
        causal = lambda b, h, i, j: j <= i  # noqa: E731
        made = flex_attention.BlockMask.from_kv_blocks(
            counts, indices, full, indices, BLOCK_SIZE=128, mask_mod=causal, seq_lengths=(n, n)
        )
        return BlockSparse.from_flex(made)

    assert read(129).only_causal
    for n in (130, 200, 256):
        with pytest.raises(ValueError, match="got full ones too"):
            read(n)


def test_flex_causal_needs_is_causal():
    causal = flex_attention.create_block_mask(lambda b, h, i, j: j <= i, None, None, 256, 256, device="cpu")
    q = torch.zeros(1, 256, 2, 8)
    with pytest.raises(ValueError, match="pass is_causal=True"):
        attention(q, q, q, BlockSparse.from_flex(causal))
    with pytest.raises(ValueError, match="blocks of 128 x 64"):
        BlockSparse.from_flex(
            flex_attention.create_block_mask(
                lambda b, h, i, j: j <= i, None, None, 256, 256, device="cpu", BLOCK_SIZE=(128, 64)
            )
        )
    with pytest.raises(TypeError, match="must be a BlockMask of FlexAttention, got Tensor"):
        BlockSparse.from_flex(q)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hierarchical", "adaptive", "mask"])
def test_opcheck(kind):
    pattern = BlockSparse.custom(torch.rand(4, 4) < 0.5, block_size=SIZE) if kind == "mask" else None
    pattern = pattern or BlockSparse.from_config(config(kind))
    q, k, v = random_inputs(2, 50, 50, 4, 2, 8)
    lengths = torch.tensor([50, 21])
    call, given = make_call(q, k, v, pattern, lengths=lengths, is_causal=True, scale=0.3)
    arguments = operators.OperatorArguments.of(call, given, None, "sdpa")
    torch.library.opcheck(operators.attend, (q, k, v, *arguments))
    if kind == "adaptive":
        torch.library.opcheck(operators.choose_blocks, (q.detach(), k.detach(), lengths, None, pattern.spec, True, 0.3))
    dropping = arguments._replace(seed=torch.tensor(5), dropout_p=0.4, backend="eager")
    torch.library.opcheck(operators.attend, (q, k, v, *dropping))
    out, lse = operators.attend(q, k, v, *arguments)
    saved = [x.detach() for x in (q, k, v, out, lse)]
    for dlse in (None, torch.randn_like(lse)):
        torch.library.opcheck(operators.attend_backward, (torch.randn_like(out), dlse, *saved, *arguments))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dilated_sparse", "adaptive", "mask"])
def test_compile_serves_new_lengths_with_one_graph(kind):
    mask = BlockSparse.custom(torch.rand(4, 4) < 0.5, block_size=SIZE)
    pattern = mask if kind == "mask" else BlockSparse.from_config(config(kind))

    def layer(q, k, v):
        return attention(q * 2, k, v, pattern, is_causal=True).sin()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    lengths = (50, 60) if kind == "mask" else (50, 64, 100)
    compiled(*random_inputs(2, 50, 50, 4, 2, 8))
    graphs = counter.frame_count
    for n in lengths:
        inputs = random_inputs(2, n, n, 4, 2, 8)
        out, expected = compiled(*inputs), layer(*inputs)
        torch.testing.assert_close(out, expected)
        dout = torch.randn_like(out)
        for a, e in zip(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(expected, inputs, dout), strict=True):
            torch.testing.assert_close(a, e)
    assert counter.frame_count == graphs


def test_module_options():
    from dilated_attention_pytorch import block_sparse_ring_dilated_attention as long_name

    assert long_name.BlockSparseRingDilatedAttention is BlockSparseRingDilatedAttention
    assert long_name.SparsePatternConfig is SparsePatternConfig
    q, k, v = (x.detach() for x in random_inputs(2, 75, 75, 4, 2, 8))
    module = BlockSparseRingDilatedAttention([40, 96], [1, 2], SparsePatternConfig("dilated_sparse", 0.4, block_size=16))
    expected = attention(q, k, v, BlockSparse.from_config(config("dilated_sparse")), is_causal=True)
    assert torch.equal(module(q, k, v, is_causal=True), expected)
    assert torch.equal(module(q, k, v, True), expected)
    lengths = torch.tensor([75, 20])
    assert torch.equal(module(q, k, v, True, lengths=lengths)[0], expected[0])
    assert torch.equal(module(q), module(q, q, q))
    assert "dilated_sparse" in repr(module)
    local = BlockSparseRingDilatedAttention(sparse_config=config("local_window"))
    assert torch.equal(local(q, k, v), attention(q, k, v, BlockSparse.from_config(config("local_window"))))
    with pytest.raises(ValueError, match="value without key"):
        module(q, None, v)
    with pytest.raises(ValueError, match="the SparsePatternConfig has the branches"):
        BlockSparseRingDilatedAttention([64], [1], config("dilated_sparse"))
    with pytest.raises(TypeError, match="must be a SparsePatternConfig, got dict"):
        BlockSparseRingDilatedAttention([64], [1], {"sparsity_ratio": 0.1})

"""Block-sparse attention against loops over positions, the rules one block at a time, and FlexAttention."""

from __future__ import annotations

import functools
import random
import re

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention

import block_oracle
import oracle
from dilated_attention_pytorch import (
    BlockSparse,
    BlockSparseRingDilatedAttention,
    SparsePatternConfig,
    attention,
    attention_weights,
    block_call,
    block_ops,
)

BACKENDS = ["reference", "sdpa", "eager"]
SIZE = 16
OPTIONS = {
    "hierarchical": {"local_window_size": 33},
    "global_local": {"global_tokens": 20},
    "dilated_sparse": {"segment_lengths": (40, 96), "dilation_rates": (1, 2)},
}
KINDS = ["local_window", "global_local", "dilated_sparse", "hierarchical"]


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


def compare(pattern, table, inputs, *, causal, backends=BACKENDS, scale=None, **options):
    q = inputs[0]
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[0], q.shape[2], q.shape[1], dtype=q.dtype)
    expected = with_grads(
        lambda *x: block_oracle.attention(*x, table, SIZE, causal=causal, scale=scale), inputs, dout, dlse
    )
    options |= {"is_causal": causal, "scale": scale, "return_lse": True}
    for backend in backends:
        call = functools.partial(attention, pattern=pattern, backend=backend, **options)
        assert_same(with_grads(call, inputs, dout, dlse), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rules_by_enumeration(kind, causal):
    """Every list of every short sequence: the documented rule, the budget, the own block, ascending, the same again."""
    for ratio in ("0.01", "0.07", "0.2", "0.5", "0.9", "1.0"):
        for n in (1, 2, 3, 4, 5, 7, 12, 29, 50):
            for first in {0, n // 2, n - 1}:
                lists = config(kind, float(ratio)).lists(first, n, causal)
                assert torch.equal(lists.mask()[0, 0], table_of(kind, ratio, first, n, causal)), (ratio, n, first)
                again = config(kind, float(ratio)).lists(first, n, causal)
                assert torch.equal(lists.indices, again.indices)
                for q, entries in enumerate(lists.indices.split(lists.counts.flatten().tolist())):
                    i = first + q
                    assert i in entries
                    assert (entries.diff() > 0).all()
                    if kind != "global_local" or i >= 2:
                        assert len(entries) == block_oracle.budget(ratio, i + 1 if causal else n)


@pytest.mark.parametrize("causal", [False, True])
def test_branches_in_any_order_and_of_any_reach(causal):
    rng = random.Random(0)
    for _ in range(60):
        rates = [rng.choice([1, 2, 4, 12]) for _ in range(rng.randint(1, 4))]
        lengths = [rng.randint(1, 40 * SIZE) for _ in rates]
        ratio, n = rng.choice(["0.05", "0.3", "0.7"]), rng.randint(1, 40)
        made = config("dilated_sparse", float(ratio), segment_lengths=lengths, dilation_rates=rates).lists(0, n, causal)
        branches = [(min(n, -(-w // SIZE)), r) for w, r in zip(lengths, rates, strict=True)]
        for i, entries in enumerate(made.indices.split(made.counts.flatten().tolist())):
            chosen = block_oracle.choose("dilated_sparse", ratio, i, n, causal, branches=branches)
            assert entries.tolist() == sorted(chosen), (branches, n, i)


def test_levels_of_any_window():
    for window in (1, 16, 17, 48, 80, 400):
        for ratio in ("0.1", "0.35", "0.8"):
            made = config("hierarchical", float(ratio), local_window_size=window).lists(0, 70, False)
            for i, entries in enumerate(made.indices.split(made.counts.flatten().tolist())):
                chosen = block_oracle.choose("hierarchical", ratio, i, 70, False, window=max(2, -(-window // SIZE)))
                assert entries.tolist() == sorted(chosen), (window, ratio, i)


def test_worked_on_in_groups_of_query_blocks(monkeypatch):
    from dilated_attention_pytorch import block_rules

    whole = {kind: config(kind).lists(3, 40, True) for kind in KINDS}
    monkeypatch.setattr(block_rules, "_AT_A_TIME", 7)
    for kind in KINDS:
        assert torch.equal(config(kind).lists(3, 40, True).indices, whole[kind].indices)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(64, 64), (75, 75), (5, 75), (40, 75), (1, 64), (9, 9)])
@pytest.mark.parametrize("kind", KINDS)
def test_static_patterns(kind, n, m, causal):
    table = table_of(kind, "0.4", (m - n) // SIZE, -(-m // SIZE), causal)
    inputs = random_inputs(2, n, m, 4, 2, 4)
    compare(BlockSparse.from_config(config(kind)), table, inputs, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(64, 64), (75, 75), (30, 75)])
def test_adaptive(n, m, causal):
    inputs = random_inputs(2, n, m, 4, 2, 4)
    for scale in (0.5, -0.7):
        table = block_oracle.adaptive(*(x.detach() for x in inputs[:2]), "0.4", SIZE, scale, causal)
        pattern = BlockSparse.from_config(config("adaptive"))
        compare(pattern, table, inputs, causal=causal, scale=scale)


def test_adaptive_takes_the_earlier_of_equals_and_its_own():
    q = torch.zeros(1, 6 * SIZE, 1, 4)
    weights = attention_weights(q, q, BlockSparse.from_config(config("adaptive")), [5 * SIZE])
    assert (weights[0, 0, 0].view(6, SIZE).sum(1) > 0).tolist() == [True, True, False, False, False, True]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [None, 4])
def test_masks(heads, causal):
    """Random masks, for all heads and for each, with query blocks that read nothing."""
    for n, m in ((64, 64), (75, 75), (40, 75)):
        blocks = -(-m // SIZE)
        rows = blocks - (m - n) // SIZE
        mask = torch.rand(*(() if heads is None else (heads,)), blocks, blocks) < 0.5
        mask[..., blocks - 2, :] = False
        inputs = random_inputs(2, n, m, 4, 2, 4)
        table = mask[..., blocks - rows :, :]
        compare(BlockSparse.custom(mask, block_size=SIZE), table, inputs, causal=causal)
        if n < m:  # the rows of the queries alone
            compare(BlockSparse.custom(table, block_size=SIZE), table, inputs, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_in_many_calls(causal, monkeypatch):
    """The bounds on gathered elements, forced on a short sequence."""
    from dilated_attention_pytorch import tiles

    for limit in (1, 4 * SIZE * 4, 2 * 4 * SIZE * 4 * 2):
        monkeypatch.setattr(tiles, "part_limit", lambda query, limit=limit: limit)
        mask = torch.rand(4, 6, 6) < 0.8
        for some in (mask, mask[0]):
            inputs = random_inputs(2, 90, 90, 4, 2, 4)
            compare(BlockSparse.custom(some, block_size=SIZE), some, inputs, causal=causal, backends=["sdpa", "eager"])


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_that_do_not_count(causal, monkeypatch):
    """Where reading block numbers would wait for a device, special blocks are computed everywhere, weight 0."""
    from dilated_attention_pytorch import block_tiles

    monkeypatch.setattr(block_tiles, "_host_reads", lambda x: False)
    for n, m in ((64, 64), (75, 75), (40, 75), (9, 9)):
        blocks = -(-m // SIZE)
        mask = torch.rand(4, blocks, blocks) < 0.5
        inputs = random_inputs(2, n, m, 4, 2, 4)
        table = mask[:, (m - n) // SIZE :]
        compare(BlockSparse.custom(mask, block_size=SIZE), table, inputs, causal=causal, backends=["sdpa", "eager"])


@pytest.mark.parametrize("kind", [*KINDS, "adaptive", "mask"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_samples_are_what_they_are_alone(backend, causal, kind):
    lengths = torch.tensor([75, 0, 41, 41])
    mask = torch.rand(5, 5) < 0.6
    pattern = BlockSparse.custom(mask, block_size=SIZE) if kind == "mask" else BlockSparse.from_config(config(kind))
    for n in (75, 50):
        inputs = random_inputs(4, n, 75, 4, 2, 4)
        dout, dlse = torch.randn_like(inputs[0]), torch.randn(4, 4, n, dtype=torch.float64)

        def alone(q, k, v, n=n):
            outs, lses = [], []
            for b, length in enumerate(lengths.tolist()):
                rows = max(0, length - (75 - n))
                some = pattern
                if kind == "mask":
                    corner = mask[: -(-max(length, 1) // SIZE), : -(-max(length, 1) // SIZE)]
                    some = BlockSparse.custom(corner, block_size=SIZE)
                out, lse = torch.zeros_like(q[b : b + 1]), torch.full((1, 4, n), -torch.inf, dtype=q.dtype)
                if rows:
                    got = attention(
                        q[b : b + 1, :rows], k[b : b + 1, :length], v[b : b + 1, :length], some, is_causal=causal,
                        backend="reference", return_lse=True,
                    )  # fmt: skip
                    out, lse = torch.cat((got[0], out[:, rows:]), 1), torch.cat((got[1], lse[..., rows:]), 2)
                outs.append(out)
                lses.append(lse)
            return torch.cat(outs), torch.cat(lses)

        expected = with_grads(alone, inputs, dout, dlse)
        call = lambda *x: attention(  # noqa: E731
            *x, pattern, is_causal=causal, lengths=lengths, backend=backend, return_lse=True
        )
        assert_same(with_grads(call, inputs, dout, dlse), expected)


@pytest.mark.parametrize("kind", [*KINDS, "adaptive"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents_are_what_they_are_alone(backend, kind):
    cu_seqlens = torch.tensor([0, 37, 37, 69, 100])
    pattern, inputs = BlockSparse.from_config(config(kind)), random_inputs(2, 100, 100, 4, 2, 4)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, 4, 100, dtype=torch.float64)

    def alone(q, k, v):
        parts = [
            attention(q[:, a:b], k[:, a:b], v[:, a:b], pattern, is_causal=True, backend="reference", return_lse=True)
            for a, b in ((0, 37), (37, 69), (69, 100))
        ]
        return torch.cat([x for x, _ in parts], 1), torch.cat([x for _, x in parts], 2)

    expected = with_grads(alone, inputs, dout, dlse)
    call = lambda *x: attention(  # noqa: E731
        *x, pattern, is_causal=True, cu_seqlens=cu_seqlens, backend=backend, return_lse=True
    )
    assert_same(with_grads(call, inputs, dout, dlse), expected)


@pytest.mark.parametrize("scale", [-0.6, 0.0])
def test_any_scale(scale):
    table = table_of("local_window", "0.4", 0, 4, True)
    pattern = BlockSparse.from_config(config("local_window"))
    compare(pattern, table, random_inputs(1, 50, 50, 2, 1, 4), causal=True, scale=scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_tensors(backend):
    for kind in ("local_window", "adaptive"):
        for b, n, m in ((0, 20, 20), (2, 0, 0), (2, 0, 20)):
            q, k, v = random_inputs(b, n, m, 2, 2, 4)
            out, lse = attention(q, k, v, BlockSparse.from_config(config(kind)), backend=backend, return_lse=True)
            assert out.shape == q.shape
            assert lse.shape == (b, 2, n)
            torch.autograd.grad(out.sum(), (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype):
    q, k, v = (x.detach() for x in random_inputs(1, 75, 75, 4, 2, 8))
    pattern = BlockSparse.from_config(config("local_window"))
    expected = attention(q, k, v, pattern, backend="reference")
    for backend in BACKENDS:
        out = attention(q.to(dtype), k.to(dtype), v.to(dtype), pattern, backend=backend)
        assert out.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_strided_inputs():
    qkv = torch.randn(2, 75, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    pattern = BlockSparse.from_config(config("local_window"))
    out = attention(*qkv.unbind(2), pattern)
    (grad,) = torch.autograd.grad(out.sin().sum(), qkv)
    expected = attention(*qkv.unbind(2), pattern, backend="reference")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sin().sum(), qkv)[0])


def test_weights_of_rows():
    q, k, v = (x.detach() for x in random_inputs(2, 40, 75, 4, 2, 4))
    lengths = torch.tensor([75, 50])
    for kind in ("hierarchical", "adaptive"):
        pattern = BlockSparse.from_config(config(kind))
        rows = [0, 7, 39]
        weights = attention_weights(q, k, pattern, rows, is_causal=True, lengths=lengths)
        out = attention(q, k, v, pattern, is_causal=True, lengths=lengths)[:, rows]
        torch.testing.assert_close(torch.einsum("bhnm,bmhd->bnhd", weights, v.repeat_interleave(2, 2)), out)


def test_transposed_lists():
    mask = torch.rand(2, 3, 5, 7) < 0.4
    from dilated_attention_pytorch.block_lists import BlockLists

    lists = BlockLists.from_mask(mask, 64)
    assert torch.equal(lists.transposed().mask(), mask.transpose(-1, -2))
    assert torch.equal(lists.transposed().transposed().indices, lists.indices)


def test_static_lists_are_made_once():
    block_ops._static_lists.cache_clear()
    q, k, v = random_inputs(1, 64, 64, 2, 2, 4)
    for _ in range(3):
        attention(q, k, v, BlockSparse.from_config(config("hierarchical"))).sum().backward()
    assert block_ops._static_lists.cache_info().misses == 1


def test_patterns_are_equal_by_what_they_say():
    assert BlockSparse.from_config(config("adaptive")) == BlockSparse.from_config(config("adaptive"))
    assert len({BlockSparse.from_config(config(kind)) for kind in KINDS * 2}) == len(KINDS)
    mask = BlockSparse.custom(torch.eye(3).bool(), block_size=16)
    assert hash(mask) == hash(mask)
    for kind in KINDS:
        assert SparsePatternConfig.from_spec(config(kind).spec) == config(kind)


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
        (lambda b, h, i, j: (j <= i) | (i >= 256), "all blocks on the diagonal are causal and none lies behind it"),
    ],
)
def test_flex_masks_that_are_no_blocks(mod, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BlockSparse.from_flex(flex_attention.create_block_mask(mod, None, None, 512, 512, device="cpu"))


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"pattern_type": "spiral"},
            "one of 'local_window', 'global_local', 'dilated_sparse', 'hierarchical', 'adaptive', got 's",
        ),
        ({"pattern_type": "custom"}, "use BlockSparse.custom(mask, block_size=...)"),
        ({"sparsity_ratio": 0.0}, "0 < ratio <= 1, got 0.0"),
        ({"sparsity_ratio": 1.5}, "0 < ratio <= 1, got 1.5"),
        ({"sparsity_ratio": float("nan")}, "0 < ratio <= 1, got nan"),
        ({"sparsity_ratio": "0.1"}, "0 < ratio <= 1, got '0.1'"),
        ({"block_size": 100}, "a power of two from 16 to 256, got 100"),
        ({"block_size": 512}, "a power of two from 16 to 256, got 512"),
        ({"block_size": 8}, "a power of two from 16 to 256, got 8"),
        ({"local_window_size": 256}, "local_window_size is read by 'hierarchical' alone"),
        ({"pattern_type": "global_local", "global_tokens": 0}, "at least 1, got 0"),
        ({"pattern_type": "dilated_sparse"}, "needs segment_lengths and dilation_rates, got none"),
        (
            {"pattern_type": "dilated_sparse", "segment_lengths": [64, 128], "dilation_rates": [2, 3]},
            "must divide one another, got (2, 3)",
        ),
        ({"pattern_type": "dilated_sparse", "segment_lengths": [64], "dilation_rates": [1, 2]}, "got 1 segment lengths"),
    ],
)
def test_bad_configurations(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BlockSparse.from_config(SparsePatternConfig(**{"pattern_type": "local_window", "sparsity_ratio": 0.1, **arguments}))


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(3, 3), TypeError, "must be a boolean tensor, got a tensor of torch.float32"),
        ([[True]], TypeError, "must be a boolean tensor, got list"),
        (torch.ones(3).bool(), ValueError, "(query heads, query blocks, key blocks), with at most"),
        (torch.ones(3, 2).bool(), ValueError, "got (3, 2)"),
        (torch.ones(0, 2).bool(), ValueError, "got (0, 2)"),
    ],
)
def test_bad_masks(mask, error, message):
    with pytest.raises(error, match=re.escape(message)):
        BlockSparse.custom(mask, block_size=16)


@pytest.mark.parametrize(
    ("pattern", "options", "message"),
    [
        (torch.ones(3, 3), {}, "has 3 x 3 blocks of 16: got 75 queries and 75 keys, which are 5 x 5 blocks"),
        (torch.ones(4, 5), {}, "has 4 x 5 blocks of 16: got 75 queries and 75 keys, which are 5 x 5 blocks"),
        (torch.ones(3, 5, 5), {}, "for 1 sample(s) and 3 query head(s) (1 serves any number), got 2 and 4"),
        (torch.ones(5, 5), {"cu_seqlens": torch.tensor([0, 75])}, "it excludes cu_seqlens"),
        (None, {"dropout_p": 0.1}, "has no dropout, got dropout_p=0.1"),
        (None, {"mixing_gradient": "detached"}, "is one softmax"),
        (None, {"group": "cp"}, "runs on one device so far"),
        (None, {"backend": "triton"}, "triton: its kernels read tile families, not block lists"),
        (None, {"backend": "hopper"}, "hopper: its kernels read tile families, not block lists"),
        (None, {"backend": "magic"}, "backend must be one of"),
        (None, {"layout": "zigzag"}, "without group"),
    ],
)
def test_bad_calls(pattern, options, message):
    q = torch.zeros(2, 75, 4, 8)
    made = BlockSparse.from_config(config("local_window"))
    if pattern is not None:
        made = BlockSparse.custom(pattern.bool(), block_size=16)
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(q, q, q, made, **options)


@pytest.mark.parametrize("kind", ["hierarchical", "adaptive", "mask"])
def test_opcheck(kind):
    pattern = BlockSparse.custom(torch.rand(4, 4) < 0.5, block_size=SIZE) if kind == "mask" else None
    pattern = pattern or BlockSparse.from_config(config(kind))
    q, k, v = random_inputs(2, 50, 50, 4, 2, 8)
    lengths = torch.tensor([50, 21])
    arguments = block_call._arguments(q, k, pattern, lengths, None, True, 0.3)
    torch.library.opcheck(block_ops.attend_blocks, (q, k, v, *arguments, 0.3, "sdpa"))
    if kind == "adaptive":
        chosen = (q.detach(), k.detach(), lengths, None, pattern.spec, SIZE, True, 0.3)
        torch.library.opcheck(block_ops.choose_blocks, chosen)
    out, lse = block_ops.attend_blocks(q, k, v, *arguments, 0.3, "sdpa")
    saved = [x.detach() for x in (q, k, v, out, lse)]
    for dlse in (None, torch.randn_like(lse)):
        torch.library.opcheck(
            block_ops.attend_blocks_backward, (torch.randn_like(out), dlse, *saved, *arguments, 0.3, "sdpa")
        )


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


def test_module():
    """The code of the report, as printed but for the device."""
    from dilated_attention_pytorch.block_sparse_ring_dilated_attention import (
        BlockSparseRingDilatedAttention as Module,
    )
    from dilated_attention_pytorch.block_sparse_ring_dilated_attention import SparsePatternConfig as Config

    model = Module(
        segment_lengths=[4096, 8192],
        dilation_rates=[1, 2],
        sparse_config=Config(pattern_type="dilated_sparse", sparsity_ratio=0.1),
    )
    model = nn.DataParallel(model)
    if torch.cuda.is_available():
        model = model.cuda()
    inputs = torch.randn(2, 300, 4, 8)
    output = model(inputs)
    assert output.shape == inputs.shape
    assert not list(model.parameters())
    assert (Module, Config) == (BlockSparseRingDilatedAttention, SparsePatternConfig)


def test_module_options():
    q, k, v = (x.detach() for x in random_inputs(2, 75, 75, 4, 2, 8))
    module = BlockSparseRingDilatedAttention([40, 96], [1, 2], SparsePatternConfig("dilated_sparse", 0.4, block_size=16))
    expected = attention(q, k, v, BlockSparse.from_config(config("dilated_sparse")), is_causal=True)
    assert torch.equal(module(q, k, v, is_causal=True), expected)
    assert torch.equal(module(q, k, v, True), expected)
    lengths = torch.tensor([75, 20])
    assert torch.equal(module(q, k, v, True, lengths=lengths)[0], expected[0])
    assert torch.equal(module(q), module(q, q, q))
    assert "dilated_sparse" in repr(module)
    local = BlockSparseRingDilatedAttention([40], [1], config("local_window"))
    assert torch.equal(local(q, k, v), attention(q, k, v, BlockSparse.from_config(config("local_window"))))
    with pytest.raises(ValueError, match="value without key"):
        module(q, None, v)
    with pytest.raises(ValueError, match="sparse_config has the branches"):
        BlockSparseRingDilatedAttention([64], [1], config("dilated_sparse"))
    with pytest.raises(TypeError, match="must be a SparsePatternConfig, got dict"):
        BlockSparseRingDilatedAttention([64], [1], {"sparsity_ratio": 0.1})

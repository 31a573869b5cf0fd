"""The Triton kernels over block lists in float32 through the public function: interpreted here, compiled on a GPU.

The interpreter takes about a tenth of a second for a program, so heads are few and blocks many only where they matter.
"""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

import block_oracle
from block_cases import OPTIONS, assert_same, random_inputs, with_grads
from dilated_attention_pytorch import BlockSparse, SparsePatternConfig, attention
from dilated_attention_pytorch.backends.gpu import block_tables
from dilated_attention_pytorch.backends.gpu.block_tables import find_block_tables
from dilated_attention_pytorch.call import make_call
from dilated_attention_pytorch.operators import problem_and_options
from dilated_attention_pytorch.plan.lists import lists_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(b, n, m, heads, key_heads, d):
    made = random_inputs(b, n, m, heads, key_heads, d, torch.float32)
    return [x.detach().to(DEVICE).requires_grad_() for x in made]


def results(call, tensors, dout, dlse):
    return [x.cpu().double() for x in with_grads(call, tensors, dout.to(tensors[0]), dlse.to(tensors[0]))]


def check(pattern, table, tensors, causal, *, size, scale=None, dropout=None, **options):
    """All five results against loops over positions in float64; ``dropout`` is p and seed."""
    q = tensors[0]
    dout, dlse = torch.randn(q.shape), torch.randn(q.shape[0], q.shape[2], q.shape[1])
    doubles = [x.detach().cpu().double().requires_grad_() for x in tensors]
    placed = None if dropout is None else (*dropout, 0, 0)
    slow = lambda *x: block_oracle.attention(  # noqa: E731
        *x, table, size, causal=causal, scale=scale, dropout=placed
    )
    expected = with_grads(slow, doubles, dout.double(), dlse.double())
    options |= {"is_causal": causal, "scale": scale, "backend": "triton", "return_lse": True}
    if dropout is not None:
        options |= {"dropout_p": dropout[0], "seed": dropout[1]}
    call = lambda *x: attention(*x, pattern, **options)  # noqa: E731
    actual = results(call, tensors, dout, dlse)
    assert_same(actual, expected, 2e-5)
    return actual


def random_mask(*shape):
    """With a block that reads nothing and one that nobody reads."""
    mask = torch.rand(shape) < 0.6
    mask[..., -2, :] = False
    mask[..., :, 0] = False
    return mask


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("size", "n", "m"),
    [
        (16, 48, 48),  # whole blocks
        (32, 90, 90),  # the last block is short
        (64, 70, 185),  # decoding: the first block begins late, the last one is short
        (128, 1, 300),  # one query
        (256, 140, 140),  # tiles are parts of blocks
        (256, 40, 300),  # and begin late
    ],
)
def test_block_sizes(size, n, m, causal):
    blocks, first = -(-m // size), (m - n) // size
    mask = random_mask(blocks, blocks) if size < 128 else torch.ones(blocks, blocks, dtype=torch.bool)
    check(BlockSparse.custom(mask, block_size=size), mask[first:], inputs(1, n, m, 1, 1, 16), causal, size=size)


def test_late_and_short_at_once():
    """One block, which begins before the first query and ends behind the last: diagonal, cut and late together."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    for size in (64, 256):
        check(BlockSparse.custom(mask, block_size=size), mask, inputs(1, 9, 40, 1, 1, 16), True, size=size)


@pytest.mark.parametrize("head_dim", [8, 24, 80, 256])
def test_head_sizes(head_dim):
    mask = torch.tensor([[True, False], [True, True]])
    check(BlockSparse.custom(mask, block_size=32), mask, inputs(1, 50, 50, 1, 1, head_dim), True, size=32)


def test_masks_by_head_grouped_queries_and_layouts():
    mask, tensors = random_mask(4, 3, 3), inputs(1, 90, 90, 4, 2, 16)
    expected = check(BlockSparse.custom(mask, block_size=32), mask, tensors, True, size=32)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    out = attention(*strided, BlockSparse.custom(mask, block_size=32), is_causal=True, backend="triton")
    torch.testing.assert_close(out.cpu().double(), expected[0])


def test_masks_by_sample():
    """As FlexAttention's masks have them."""
    mask = random_mask(2, 2, 2, 2)
    mask[:, :, 0] = True
    pattern = BlockSparse._of_mask(mask, 32)
    check(pattern, mask, inputs(2, 60, 60, 2, 1, 16), False, size=32)


@pytest.mark.parametrize("scale", [-0.6, 0.0])
def test_any_scale(scale):
    mask = torch.ones(2, 2, dtype=torch.bool)
    check(BlockSparse.custom(mask, block_size=32), mask, inputs(1, 40, 40, 1, 1, 16), True, size=32, scale=scale)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("size", "n", "m"), [(32, 50, 70), (256, 20, 40)])
def test_dropout(size, n, m, causal):
    """The weights of the rule: two samples, grouped heads with masks of their own, queries that begin late."""
    blocks, first = -(-m // size), (m - n) // size
    mask = torch.ones(2, blocks, blocks, dtype=torch.bool)
    mask[0, -1, 0] = blocks == 1
    pattern, tensors = BlockSparse.custom(mask, block_size=size), inputs(2, n, m, 2, 1, 16)
    check(pattern, mask[:, first:], tensors, causal, size=size, dropout=(0.3, 2**40 + 7))


def test_dropout_counts_rows_of_the_batch():
    """Packed documents and padded samples: the reference, which tests compare with loops, has the same."""
    pattern = BlockSparse.from_config(SparsePatternConfig("local_window", 0.5, block_size=16))
    tensors = inputs(2, 40, 40, 1, 1, 16)
    dout, dlse = torch.randn(tensors[0].shape), torch.randn(2, 1, 40)
    doubles = [x.detach().cpu().double().requires_grad_() for x in tensors]
    for options in ({"cu_seqlens": torch.tensor([0, 17, 40])}, {"lengths": torch.tensor([40, 21])}):
        options |= {"is_causal": True, "dropout_p": 0.4, "seed": 11, "return_lse": True}
        slow, fast = (lambda *x, b=b, o=options: attention(*x, pattern, backend=b, **o) for b in ("reference", "triton"))
        expected = with_grads(slow, doubles, dout.double(), dlse.double())
        assert_same(results(fast, tensors, dout, dlse), expected, 2e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_adaptive(causal):
    """Lists by sample and head, whose transposition is made from indices that only the device knows."""
    tensors = inputs(2, 40, 70, 2, 1, 16)
    table = block_oracle.adaptive(*(x.detach().cpu().double() for x in tensors[:2]), "0.6", 32, 0.25, causal)
    pattern = BlockSparse.from_config(SparsePatternConfig("adaptive", 0.6, block_size=32))
    check(pattern, table, tensors, causal, size=32)


@pytest.mark.parametrize("kind", ["local_window", "global_local", "adaptive"])
@pytest.mark.parametrize("padded", [True, False])
def test_sequences_of_their_own(kind, padded):
    """Padded samples and packed documents, in one launch: what each is alone."""
    pattern = BlockSparse.from_config(SparsePatternConfig(kind, 0.5, block_size=16, **OPTIONS.get(kind, {})))
    if padded:
        tensors, options = inputs(4, 50, 50, 1, 1, 16), {"lengths": torch.tensor([50, 0, 9, 33])}
        parts = [(b, slice(0, x), slice(0, x)) for b, x in enumerate([50, 0, 9, 33])]
    else:
        tensors, options = inputs(1, 50, 50, 1, 1, 16), {"cu_seqlens": torch.tensor([0, 17, 17, 34, 50])}
        parts = [(0, slice(a, b), slice(a, b)) for a, b in ((0, 17), (17, 34), (34, 50))]
    batch, n = tensors[0].shape[:2]
    dout, dlse = torch.randn(tensors[0].shape), torch.randn(batch, 1, n)

    def alone(q, k, v):
        out, lse = q * 0.0 + (k * 0.0).sum() + (v * 0.0).sum(), torch.full((batch, 1, n), -torch.inf, dtype=q.dtype)
        for b, rows, keys in parts:
            if rows.stop > rows.start:
                some = (q[b : b + 1, rows], k[b : b + 1, keys], v[b : b + 1, keys])
                got = attention(*some, pattern, is_causal=True, backend="reference", return_lse=True)
                out[b, rows], lse[b, :, rows] = got[0][0], got[1][0]
        return out, lse

    doubles = [x.detach().cpu().double().requires_grad_() for x in tensors]
    expected = with_grads(alone, doubles, dout.double(), dlse.double())
    call = lambda *x: attention(*x, pattern, is_causal=True, backend="triton", return_lse=True, **options)  # noqa: E731
    assert_same(results(call, tensors, dout, dlse), expected, 2e-5)


def test_empty_tensors():
    for kind in ("local_window", "adaptive"):
        pattern = BlockSparse.from_config(SparsePatternConfig(kind, 0.5, block_size=16))
        for b, n, m in ((0, 20, 20), (2, 0, 0), (2, 0, 20)):
            q, k, v = inputs(b, n, m, 2, 2, 16)
            out, lse = attention(q, k, v, pattern, backend="triton", return_lse=True)
            assert (out.shape, lse.shape) == (q.shape, (b, 2, n))
            assert all(not x.any() for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("causal", [False, True])
def test_nan_reaches_the_rows_that_meet_it(causal):
    """A query its own row, a key all rows that see it: out and lse."""
    pattern = BlockSparse.custom(torch.tensor([[1, 0], [1, 1]]).bool(), block_size=32)
    q, k, v = (x.detach() for x in inputs(1, 60, 60, 1, 1, 16))
    with_query, with_key = q.clone(), k.clone()
    with_query[:, 7, :, 3] = torch.nan
    with_key[:, 40, :, 3] = torch.nan
    readers = range(40, 60) if causal else range(32, 60)
    for queries, keys, rows in ((with_query, k, [7]), (q, with_key, [*readers])):
        out, lse = attention(queries, keys, v, pattern, is_causal=causal, backend="triton", return_lse=True)
        assert lse[0, 0].isnan().nonzero().flatten().tolist() == rows
        assert out[0, :, 0].isnan().all(-1).nonzero().flatten().tolist() == rows


def test_bit_for_bit():
    mask, tensors = random_mask(2, 3, 3), inputs(1, 70, 70, 2, 1, 16)
    dout, dlse = torch.randn(tensors[0].shape), torch.randn(1, 2, 70)
    pattern = BlockSparse.custom(mask, block_size=32)
    call = lambda *x: attention(*x, pattern, is_causal=True, backend="triton", return_lse=True)  # noqa: E731
    first, second = (results(call, tensors, dout, dlse) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rows_further_apart_than_32_bits_reach(monkeypatch):
    """As in test_triton.py: 64-bit offsets on a small tensor."""
    from dilated_attention_pytorch.backends.gpu import portable

    tensors, pattern = inputs(1, 40, 40, 1, 1, 16), BlockSparse.custom(torch.ones(2, 2).bool(), block_size=32)
    narrow = attention(*tensors, pattern, backend="triton")
    original = portable.tile_constants
    monkeypatch.setattr(portable, "tile_constants", lambda *x: original(*x) | {"WIDE": True})
    out = attention(*tensors, pattern, backend="triton")
    assert torch.equal(out, narrow)
    torch.autograd.grad(out.sum(), tensors)


def entries(table, row, head):
    """The list of a row and a head of a table of blocks."""
    number = int(row[6] + head * row[7])
    start = int(table.starts[number])
    return table.indices[start : start + int(table.counts[number])].tolist()


@pytest.mark.parametrize("case", ["lengths", "cu_seqlens", "decoding", "adaptive", "mask", "mask, by the host"])
def test_tables(case, monkeypatch):
    """By enumeration: every block once, longest lists first, both tables the pairs of blocks that the lists have."""
    q, k = torch.randn(3, 70 if case == "decoding" else 100, 2, 8), torch.randn(3, 100, 2, 8)
    kind = "adaptive" if case == "adaptive" else "hierarchical"
    pattern = BlockSparse.from_config(SparsePatternConfig(kind, 0.4, block_size=16))
    if case.startswith("mask"):
        pattern = BlockSparse.custom(random_mask(2, 7, 7), block_size=16)
    if case == "mask, by the host":  # as lists with many entries
        monkeypatch.setattr(block_tables, "_MOST_ON_DEVICE", 0)
    lengths = torch.tensor([100, 0, 33]) if case in ("lengths", "adaptive", "mask") else None
    cu_seqlens = torch.tensor([0, 40, 40, 81, 100]) if case == "cu_seqlens" else None
    call, _ = make_call(q, k, k, pattern, is_causal=True, scale=0.3, lengths=lengths, cu_seqlens=cu_seqlens)
    problem, options = problem_and_options(call, q, k)
    tables = find_block_tables(problem, q.device, options.chosen)
    by_query, by_key = tables.for_queries(options.chosen), tables.for_keys(options.chosen)
    expected = set()
    for span, lists in lists_of(problem, options.chosen, q.device):
        for s in range(span.samples.start, span.samples.stop):
            mask = lists.of_samples(slice(s - span.samples.start, s - span.samples.start + 1)).mask().expand(1, 2, -1, -1)
            for _, h, i, j in mask.nonzero().tolist():
                expected.add((s, span.keys.start, h, i + lists.first, j))
    pairs = [
        (int(r[0]), int(r[4]), h, int(r[1]), j) for r in by_query.rows for h in (0, 1) for j in entries(by_query, r, h)
    ]
    assert len(set(pairs)) == len(pairs)
    assert set(pairs) == expected
    pairs = [(int(r[0]), int(r[4]), h, i, int(r[1])) for r in by_key.rows for h in (0, 1) for i in entries(by_key, r, h)]
    assert len(set(pairs)) == len(pairs)
    assert set(pairs) == expected
    for table in (by_query, by_key):
        longest = [(int(r[0]), -max(len(entries(table, r, h)) for h in (0, 1))) for r in table.rows]
        assert longest == sorted(longest)
        assert all(x == sorted(x) for x in (entries(table, r, h) for r in table.rows for h in (0, 1)))


def test_tables_are_made_once(monkeypatch):
    """For a rule and for a mask; for an adaptive pattern all but what depends on the content."""
    patterns = [
        BlockSparse.from_config(SparsePatternConfig("local_window", 0.5, block_size=32)),
        BlockSparse.from_config(SparsePatternConfig("adaptive", 0.5, block_size=32)),
        BlockSparse.custom(torch.ones(1, 1).bool(), block_size=32),
    ]
    tensors = inputs(1, 20, 20, 1, 1, 16)
    transposed = block_tables.transposed_entries
    monkeypatch.setattr(block_tables, "transposed_entries", lambda *x: transpositions.append(x) or transposed(*x))
    for pattern in patterns:
        block_tables._tables.cache_clear()
        transpositions: list[object] = []
        for _ in range(2):
            attention(*tensors, pattern, backend="triton").sum().backward()
        assert block_tables._tables.cache_info().misses == 1
        assert len(transpositions) == (2 if pattern.is_adaptive else 1)


def test_refusals():
    x, pattern = torch.zeros(1, 40, 1, 16, device=DEVICE), BlockSparse.custom(torch.ones(2, 2).bool(), block_size=32)
    with pytest.raises(ValueError, match=re.escape("triton: Triton kernels take torch.float32")):
        attention(x.double(), x.double(), x.double(), pattern, backend="triton")
    wide = torch.zeros(1, 40, 1, 264, device=DEVICE)
    with pytest.raises(ValueError, match="head sizes up to 256, got 264"):
        attention(wide, wide, wide, pattern, backend="triton")

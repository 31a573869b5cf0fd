"""Samples with padding in front (``starts``): each has the results and the gradients that it has by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap
from torch.utils.flop_counter import FlopCounterMode

import block_oracle
import oracle
from block_cases import KINDS, SIZE, config, table_of
from dilated_attention_pytorch import (
    BlockSparse,
    Dilated,
    Hilbert,
    Identity,
    attention,
    attention_weights,
    dilated_attention,
    explain,
)
from oracle import M32, assert_same, plain_word, random_inputs, with_grads
from starts_cases import LENGTHS, ROWS, STARTS, by_itself, poisoned, query_rows

BACKENDS = ["reference", "sdpa", "eager"]
PATTERN = Dilated([16, 24, 1000], [1, 3, 4])


def compare(attend, pattern, inputs, starts, lengths, *, backends=BACKENDS, tolerance=1e-10, **options):
    """All five results of every backend against ``attend`` on each sample, with NaN in all rows outside."""
    q = inputs[0]
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[0], q.shape[2], q.shape[1], dtype=q.dtype)
    expected = with_grads(by_itself(attend, starts, lengths), inputs, dout, dlse)
    for backend in backends:
        call = lambda *x, backend=backend: attention(  # noqa: E731
            *x, pattern, starts=starts, lengths=lengths, backend=backend, return_lse=True, **options
        )
        actual = with_grads(call, poisoned(inputs, starts, lengths), dout, dlse)
        assert_same(actual, expected, tolerance)
        for name, x in zip(("out", "dq"), (actual[0], actual[2]), strict=True):
            for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                outside = torch.ones(q.shape[1], dtype=torch.bool)
                outside[query_rows(start, length, q.shape[1], inputs[1].shape[1])] = False
                assert not x[b, outside].any(), f"{name} of padding is exactly 0"
                assert (actual[1][b, :, outside] == -torch.inf).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [70, 30, 1])
def test_dilated(n, causal):
    """30 queries are more than some samples have rows; one query is a decoding step."""
    attend = lambda _, *x: oracle.attention(*x, PATTERN, is_causal=causal)  # noqa: E731
    compare(attend, PATTERN, random_inputs(8, n, ROWS, 6, 3, 8), STARTS, LENGTHS, is_causal=causal)


@settings(max_examples=40)
@given(data=st.data(), causal=st.booleans())
def test_any_pattern_and_any_samples(data, causal):
    draw = data.draw
    branches = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5)), min_size=1, max_size=3))
    m, batch = draw(st.integers(0, 24)), draw(st.integers(0, 4))
    n = draw(st.one_of(st.just(m), st.integers(0, m)))
    starts = draw(st.lists(st.integers(0, m), min_size=batch, max_size=batch))
    lengths = [draw(st.integers(0, m - start)) for start in starts]
    key_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    offsets = draw(st.sampled_from(["interleaved", "blocked"]))
    pattern = Dilated([w for w, _ in branches], [r for _, r in branches], offsets, draw(st.booleans()))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    inputs = random_inputs(batch, n, m, key_heads * group, key_heads, draw(st.integers(1, 5)))
    attend = lambda _, *x: oracle.attention(*x, pattern, is_causal=causal)  # noqa: E731
    compare(attend, pattern, inputs, starts, lengths, is_causal=causal)


def block_attend(kind, mask, causal):
    """The results of a sample by loops over positions. Its blocks count from its first row."""

    def attend(_, q, k, v):
        n, m = q.shape[1], k.shape[1]
        first, blocks = (m - n) // SIZE, -(-m // SIZE)
        if kind == "adaptive":
            table = block_oracle.adaptive(q.detach(), k.detach(), "0.4", SIZE, q.shape[-1] ** -0.5, causal)
        elif kind == "mask":
            table = mask[first:blocks, :blocks]
        else:
            table = table_of(kind, "0.4", first, blocks, causal)
        return block_oracle.attention(q, k, v, table, SIZE, causal=causal)

    return attend


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "kind"), [(70, "hierarchical"), (30, "dilated_sparse"), (2, "local_window"), (70, "mask"),
                                         (30, "mask"), (70, "adaptive"), (30, "adaptive"), (2, "adaptive")])  # fmt: skip
def test_blocks(kind, n, causal):
    """Two queries in two blocks, 15 and 16 of sample 2, are more query blocks than the rows of the batch have."""
    starts, lengths = (0, 13, 53, 70, 50), (70, 57, 17, 0, 5)
    mask = torch.rand(5, 5) < 0.6
    pattern = BlockSparse.custom(mask, block_size=SIZE) if kind == "mask" else BlockSparse.from_config(config(kind))
    inputs = random_inputs(5, n, ROWS, 2, 1, 4)
    compare(block_attend(kind, mask, causal), pattern, inputs, starts, lengths, is_causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_every_rule(kind):
    inputs = random_inputs(2, 40, 40, 2, 2, 4)
    compare(block_attend(kind, None, True), BlockSparse.from_config(config(kind)), inputs, (7, 0), (33, 30), is_causal=True)


def test_forms_and_defaults():
    """Lists, tuples and tensors of both types mean the same. Without lengths, samples go to the end."""
    q, k, v = random_inputs(3, 12, 40, 2, 2, 4)
    attend = lambda **options: attention(q, k, v, PATTERN, is_causal=True, **options)  # noqa: E731
    expected = attend(starts=[5, 40, 30], lengths=[35, 0, 10])
    for starts in ((5, 40, 30), torch.tensor([5, 40, 30]), torch.tensor([5, 40, 30], dtype=torch.int32)):
        assert torch.equal(attend(starts=starts), expected)
    assert torch.equal(dilated_attention(q, k, v, [16, 24, 1000], [1, 3, 4], is_causal=True, starts=[5, 40, 30]), expected)
    assert torch.equal(attend(starts=[0, 0, 0]), attend())
    # Queries are the last rows, also of samples that end before: what lengths without starts leave open.
    short = attend(starts=[0, 0, 0], lengths=[40, 33, 28])
    assert torch.equal(short[0], attend()[0])
    assert torch.equal(short[1:2, :5], attention(q[1:2, :5], k[1:2, :33], v[1:2, :33], PATTERN, is_causal=True))
    assert not short[1, 5:].any()
    assert not short[2].any()


def test_a_decoding_step_is_the_last_row_of_the_prompt():
    q, k, v = random_inputs(3, 50, 50, 4, 2, 8)
    prompt = attention(q, k, v, PATTERN, is_causal=True, starts=[30, 0, 49])
    for n in (1, 7):
        step = attention(q[:, -n:], k, v, PATTERN, is_causal=True, starts=[30, 0, 49])
        torch.testing.assert_close(step, prompt[:, -n:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [40, 9])
def test_detached_mixing(n):
    """The backward computes the output of each branch again."""
    inputs, pattern = random_inputs(3, n, 40, 4, 2, 4), Dilated([8, 32], [1, 2])
    attend = lambda _, *x: attention(*x, pattern, mixing_gradient="detached", backend="reference", return_lse=True)  # noqa: E731
    compare(attend, pattern, inputs, (0, 11, 35), (40, 25, 5), mixing_gradient="detached")


def dropped(q, k, v, b, p, seed, table=None):
    """Attention of sample b with dropout, by loops over positions from 0; PATTERN, or a table of blocks."""
    if table is not None:
        return block_oracle.attention(q, k, v, table, SIZE, causal=True, dropout=(p, seed, b, 0))
    (_, n, heads, d), m = q.shape, k.shape[1]
    lse = oracle.attention(q, k, v, PATTERN, is_causal=True)[1]
    rows = []
    for h in range(heads):
        g = h // (heads // k.shape[2])
        for i in range(m - n, m):
            total = q[0, i - (m - n), h] * 0.0
            for j in range(i + 1):
                weight = (d**-0.5 * (q[0, i - (m - n), h] @ k[0, j, g]) - lse[0, h, i - (m - n)]).exp() / (1 - p)
                for number, (w, r) in enumerate(PATTERN.branches):
                    kept = plain_word(seed, b, h, number, i, j) >= int(p * M32)
                    if kept and oracle.met_in((w, r), oracle.offset(PATTERN.offsets, g, k.shape[2], r), i, j):
                        total = total + weight * v[0, j, g]
            rows.append(total)
    return torch.stack(rows).view(1, heads, n, d).transpose(1, 2), lse


@pytest.mark.parametrize("n", [24, 10])
@pytest.mark.parametrize("blocks", [False, True])
def test_dropout_counts_from_the_start_of_the_sample(n, blocks):
    pattern, table = PATTERN, None
    if blocks:
        pattern, table = BlockSparse.custom(torch.ones(2, 2, dtype=torch.bool), block_size=SIZE), torch.ones(2, 2).bool()

    def attend(b, q, k, v):
        first, count = (k.shape[1] - q.shape[1]) // SIZE, -(-k.shape[1] // SIZE)
        return dropped(q, k, v, b, 0.4, 2**40 + 7, None if table is None else table[first:count, :count])

    inputs = random_inputs(3, n, 24, 2, 1, 4)
    options = {"is_causal": True, "dropout_p": 0.4, "seed": 2**40 + 7, "backends": ["reference", "eager"]}
    compare(attend, pattern, inputs, (0, 7, 20), (24, 14, 4), **options)


@pytest.mark.parametrize("n", [50, 20])
@pytest.mark.parametrize("blocks", [False, True])
def test_weights(n, blocks):
    """Their products with the values are the rows of the output, and keys outside of samples have none."""
    starts, lengths = [0, 21, 45, 50], [50, 20, 5, 0]
    pattern = BlockSparse.from_config(config("local_window")) if blocks else PATTERN
    q, k, v = random_inputs(4, n, 50, 4, 2, 4)
    rows = [0, n // 2, n - 9, -1]
    options = {"is_causal": True, "starts": starts, "lengths": lengths}
    weights = attention_weights(*poisoned((q, k, v), starts, lengths)[:2], pattern, rows, **options)
    out = attention(q, k, v, pattern, **options)[:, rows]
    torch.testing.assert_close(torch.einsum("bhnm,bmhd->bnhd", weights, v.repeat_interleave(2, 2)), out)
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        assert not weights[b, ..., :start].any()
        assert not weights[b, ..., start + length :].any()


@pytest.mark.parametrize("n", [50, 20])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_counted(n, causal):
    starts, lengths = [0, 21, 45, 50], [50, 20, 5, 0]
    q, k, v = random_inputs(4, n, 50, 4, 2, 4)
    own = [query_rows(start, length, n, 50) for start, length in zip(starts, lengths, strict=True)]
    sizes = [(rows.stop - rows.start, length) for rows, length in zip(own, lengths, strict=True)]
    sizes = [(a, b) for a, b in sizes if a]
    pairs = sum(int(oracle.multiplicities(PATTERN, a, b, 4, 2, causal).sum()) for a, b in sizes)
    dense = sum(4 * sum(min(b, i + 1) if causal else b for i in range(b - a, b)) for a, b in sizes)
    told = explain(q, k, v, PATTERN, is_causal=causal, starts=starts, lengths=lengths)
    assert (told.sequences, told.pairs, told.dense_pairs) == (len(sizes), pairs, dense)
    assert told.rows == 4 * sum(a for a, _ in sizes)
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, PATTERN, is_causal=causal, starts=starts, lengths=lengths)
    assert counter.get_total_flops() == told.forward_flops == 4 * 4 * pairs
    meta = [x.to("meta") for x in (q, k, v)]
    assert explain(*meta, PATTERN, is_causal=causal, starts=starts, lengths=lengths).pairs == pairs
    assert attention(*meta, PATTERN, starts=torch.tensor(starts, device="meta")).shape == q.shape


@pytest.mark.parametrize("pattern", [PATTERN, BlockSparse.from_config(config("adaptive"))])
def test_transforms(pattern):
    """Starts that differ by entry of the mapped dimension, under a gradient as well."""
    q, k, v = torch.randn(3, 3, 2, 40, 2, 4, dtype=torch.float64).unbind(0)
    q = q[:, :, 25:]
    starts = torch.tensor([[0, 30], [40, 17], [21, 22]])
    loss = lambda q, k, v, x: attention(q, k, v, pattern, starts=x, is_causal=True).sin().sum()  # noqa: E731
    found = vmap(grad(loss, (0, 1, 2)))(q, k, v, starts)
    for s, x in enumerate(starts):
        inputs = [t[s].clone().requires_grad_() for t in (q, k, v)]
        out = attention(*inputs, pattern, starts=x, is_causal=True, backend="reference")
        expected = torch.autograd.grad(out.sin().sum(), inputs)
        torch.testing.assert_close(tuple(t[s] for t in found), expected, rtol=1e-11, atol=1e-11)


def test_independent_of_the_rest_of_the_batch():
    q, k, v = random_inputs(3, 20, 40, 4, 2, 8, torch.float32)
    together = attention(q, k, v, PATTERN, starts=[3, 17, 30], lengths=[37, 20, 5], return_lse=True)
    for b, start, length in ((0, 3, 37), (1, 17, 20), (2, 30, 5)):
        own = slice(b, b + 1)
        one = attention(q[own], k[own], v[own], PATTERN, starts=[start], lengths=[length], return_lse=True)
        assert all(torch.equal(a, e[own]) for a, e in zip(one, together, strict=True))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"starts": [20, -1]}, ValueError, "starts must lie between 0 and the 20 positions of the sequence, got [20, -1]"),
        ({"starts": torch.tensor([0, 21])}, ValueError, "starts must lie between 0 and the 20 positions"),
        (
            {"starts": [4, 0], "lengths": [17, 20]},
            ValueError,
            "at most the 20 keys: got starts [4, 0] and lengths [17, 20]",
        ),
        ({"starts": [4, 0], "lengths": [-1, 20]}, ValueError, "lengths must lie between 0 and the 20 positions"),
        ({"starts": [0]}, ValueError, "starts must have one entry per sample: got 1 entries for a batch of 2"),
        ({"starts": torch.zeros(2, 1, dtype=torch.int64)}, ValueError, "starts must be one-dimensional int32 or int64"),
        ({"starts": torch.zeros(2)}, ValueError, "int32 or int64, got 1 dimensions of torch.float32"),
        ({"starts": [0, 2.5]}, TypeError, "starts must be integers, as a tensor, a tuple or a list, got [0, 2.5]"),
        ({"starts": 3}, TypeError, "starts must be integers, as a tensor, a tuple or a list, got 3"),
        (
            {"starts": [0, 0], "cu_seqlens": [0, 20]},
            ValueError,
            "starts (padded samples) and cu_seqlens (packed documents)",
        ),
        (
            {"starts": [0, 0], "order": Hilbert.grid(4, 5)},
            ValueError,
            "move the padding behind the samples and pass lengths",
        ),
        ({"starts": torch.tensor([0, 0], device="meta")}, ValueError, "starts must be on the device of query (cpu)"),
    ],
)
def test_refused(options, error, message):
    q = torch.randn(2, 20, 2, 4)
    with pytest.raises(error) as raised:
        attention(q, q, q, PATTERN, **options)
    assert message in str(raised.value)


def test_more_refusals():
    q, k = torch.randn(2, 4, 2, 4), torch.randn(2, 40, 2, 4)
    with pytest.raises(ValueError, match=r"put the padding in front of samples and pass starts"):
        attention(q, k, k, PATTERN, lengths=[40, 30])
    late = BlockSparse.custom(torch.ones(1, 3, dtype=torch.bool), block_size=SIZE)
    with pytest.raises(ValueError, match=r"got 1 x 3 blocks; build one of 3 x 3"):
        attention(q, k, k, late, starts=[0, 3])
    jagged = torch.nested.nested_tensor([torch.randn(3, 2, 4), torch.randn(5, 2, 4)], layout=torch.jagged)
    with pytest.raises(ValueError, match="nested tensors hold the lengths of their sequences, got starts as well"):
        attention(jagged, jagged, jagged, PATTERN, starts=[0, 0])
    with pytest.raises(ValueError, match="starts must have values to plan with, got a tensor on the meta device"):
        explain(q, k, k, PATTERN, starts=torch.tensor([0, 0], device="meta"))
    same = attention(k, k, k, PATTERN, starts=[4, 9])
    assert torch.equal(attention(k, k, k, PATTERN, starts=[4, 9], order=Identity(40)), same)

"""Modules with samples that have padding in front: ``starts``, and masks of ``nn.MultiheadAttention`` that say so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import Dilated, DilatedAttention, Hilbert, MultiheadDilatedAttention, attention

pytestmark = pytest.mark.slow

STARTS, LENGTHS = [6, 0, 17, 0, 3], [14, 20, 3, 11, 9]  # in front, none, in front, behind, on both sides
PADDING = torch.tensor([[not a <= i < a + n for i in range(20)] for a, n in zip(STARTS, LENGTHS, strict=True)])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_masks_mean_what_they_mean_to_pytorch(batch_first, causal):
    """One dense segment: rows of tokens and their weights are those of PyTorch, and rows of padding are without weights."""
    theirs = nn.MultiheadAttention(16, 2, batch_first=batch_first, dtype=torch.float64)
    ours = MultiheadDilatedAttention(16, 2, [64], [1], batch_first=batch_first, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 20, 16, dtype=torch.float64)
    given = x if batch_first else x.transpose(0, 1)
    hidden = torch.ones(20, 20, dtype=torch.bool).triu(1) if causal else None
    # Rows of padding in front see no key if causal, which is NaN in PyTorch. They are not compared.
    expected, weights = theirs(given, given, given, key_padding_mask=PADDING, attn_mask=hidden)
    for mask in (PADDING, torch.zeros(5, 20, dtype=torch.float64).masked_fill(PADDING, -torch.inf)):
        out, own = ours(given, given, given, key_padding_mask=mask, attn_mask=hidden, need_weights=True)
        rows = [y if batch_first else y.transpose(0, 1) for y in (out, expected)]
        torch.testing.assert_close(rows[0][~PADDING], rows[1][~PADDING])
        torch.testing.assert_close(own[~PADDING], weights[~PADDING])
        assert not own[PADDING].any()
    same, _ = ours(given, given, given, starts=STARTS, lengths=torch.tensor(LENGTHS), is_causal=causal)
    assert torch.equal(same, out)


def test_one_sample_and_one_row():
    module = MultiheadDilatedAttention(16, 2, [4, 8], [1, 2], dtype=torch.float64)
    x = torch.randn(5, 20, 16, dtype=torch.float64)
    out, _ = module(x, x, x, key_padding_mask=PADDING, is_causal=True)
    for b, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        own = x[b : b + 1, start : start + length]
        torch.testing.assert_close(out[b : b + 1, start : start + length], module(own, own, own, is_causal=True)[0])
        single, _ = module(x[b], x[b], x[b], key_padding_mask=PADDING[b], is_causal=True)
        torch.testing.assert_close(single, out[b])
    # A decoding step: the mask is that of the keys.
    ends = [b for b in range(5) if STARTS[b] + LENGTHS[b] == 20]
    step, _ = module(x[ends, -1:], x[ends], x[ends], key_padding_mask=PADDING[ends], is_causal=True)
    torch.testing.assert_close(step, out[ends, -1:])
    found = module.attention_map(x, x, [19], starts=STARTS, lengths=LENGTHS)
    _, all_weights = module(x, x, x, key_padding_mask=PADDING, need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(found[:, :, 0], all_weights[:, :, 19])


def test_attention_module():
    x = torch.randn(2, 30, 4, 8)
    out = DilatedAttention([8, 16], [1, 2])(x[:, -4:], x, x, is_causal=True, starts=[11, 29])
    assert torch.equal(out, attention(x[:, -4:], x, x, Dilated([8, 16], [1, 2]), is_causal=True, starts=[11, 29]))


def test_all_padding_and_no_keys():
    module = MultiheadDilatedAttention(16, 2, [4], [1], bias=False)
    x = torch.randn(2, 6, 16)
    mask = torch.ones(2, 6, dtype=torch.bool)
    assert not module(x, x, x, key_padding_mask=mask)[0].any()
    mask[1, 2:4] = False
    out, _ = module(x, x, x, key_padding_mask=mask)
    assert not out[0].any()
    torch.testing.assert_close(out[1:, 2:4], module(*[x[1:, 2:4]] * 3)[0])
    empty = x[:, :0]
    assert module(empty, empty, empty, key_padding_mask=mask[:, :0])[0].shape == (2, 0, 16)


def test_refused():
    module = MultiheadDilatedAttention(16, 2, [4, 8], [1, 2])
    x = torch.randn(2, 20, 16)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[1, :3] = True
    mask[0, 5] = True
    with pytest.raises(ValueError, match=r"samples \[0\] have padding between tokens, move it to an end"):
        module(x, x, x, key_padding_mask=mask)
    mask[0, 5] = False
    with pytest.raises(ValueError, match="key_padding_mask and lengths or starts say the same thing"):
        module(x, x, x, key_padding_mask=mask, starts=[0, 3])
    with pytest.raises(ValueError, match="an order keeps padding behind samples, so it does not go with starts"):
        module(x, x, x, key_padding_mask=mask, order=Hilbert.grid(4, 5))
    nested = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged)
    with pytest.raises(ValueError, match="got starts beside it; leave them out"):
        module(nested, nested, nested, starts=[0, 0])

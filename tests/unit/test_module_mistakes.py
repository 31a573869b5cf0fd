"""Options and inputs that modules refuse: the rule, the values and the way out."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import MultiheadDilatedAttention


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_first": "no"}, TypeError, "batch_first must be True or False, got 'no'"),
        ({"bias": "x"}, TypeError, "bias must be True or False, got 'x'"),
        ({"bias": None}, TypeError, "bias must be True or False, got None"),
        ({"layer_norm": 1}, TypeError, "layer_norm must be True or False, got 1"),
        ({"dtype": torch.int32}, TypeError, "the weights must have a floating-point dtype, got torch.int32"),
        ({"layer_norm_eps": -1}, ValueError, "layer_norm_eps must be positive and finite, got -1; leave it out for the"),
        ({"layer_norm_eps": 0.0}, ValueError, "layer_norm_eps must be positive and finite, got 0.0"),
        ({"layer_norm_eps": "x"}, TypeError, "layer_norm_eps must be a number, got 'x'; leave it out for the default"),
        ({"layer_norm_eps": None}, TypeError, "layer_norm_eps must be a number, got None"),
        ({"gamma_init": float("nan")}, ValueError, "gamma_init must be positive and finite, got nan"),
        ({"gamma_init": True}, TypeError, "gamma_init must be a number, got True"),
        ({"kdim": 0}, ValueError, "kdim must be an integer, at least 1, got 0"),
        ({"vdim": 0}, ValueError, "vdim must be an integer, at least 1, got 0"),
        ({"vdim": 8.0}, TypeError, "vdim must be an integer, at least 1, got 8.0"),
        ({"embed_dim": 32.0}, TypeError, "embed_dim must be an integer, at least 1, got 32.0"),
        ({"embed_dim": "32"}, TypeError, "embed_dim must be an integer, at least 1, got '32'"),
        ({"embed_dim": None}, TypeError, "embed_dim must be an integer, at least 1, got None"),
        ({"embed_dim": 0}, ValueError, "embed_dim must be an integer, at least 1, got 0"),
        ({"num_heads": 0}, ValueError, "num_heads must be an integer, at least 1, got 0"),
        ({"num_heads": True}, TypeError, "num_heads must be an integer, at least 1, got True"),
        ({"num_kv_heads": -1}, ValueError, "num_kv_heads must be an integer, at least 1, got -1"),
        ({"group": "x"}, TypeError, "group must be .* got 'x'"),
        ({"group": 1}, TypeError, "group must be .* got 1"),
        ({"group": [0, 1]}, TypeError, r"group must be .* got \[0, 1\]"),
        ({"group": object}, TypeError, "group must be .* got <class 'object'>"),
    ],
)
def test_options_of_the_wrong_kind(options, error, message):
    with pytest.raises(error, match=message):
        MultiheadDilatedAttention(
            **{"embed_dim": 32, "num_heads": 4, "segment_lengths": [8], "dilation_rates": [2]} | options
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 30}, "embed_dim must be a positive multiple of num_heads, got embed_dim=30, num_heads=4"),
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
        ({"dropout_p": 1.0}, "0 <= dropout_p < 1"),
        ({"backend": "cuda"}, "backend must be one of 'auto'"),
        ({"offsets": [0, 1]}, "one integer per key head"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        MultiheadDilatedAttention(
            **{"embed_dim": 32, "num_heads": 4, "segment_lengths": [8], "dilation_rates": [2]} | options
        )


def test_bad_inputs():
    module = MultiheadDilatedAttention(32, 4, [8, 16], [1, 2])
    x = torch.randn(2, 20, 32)
    with pytest.raises(ValueError, match=r"key must be \(batch, sequence, 32\)"):
        module(x, x[..., :5], x)
    holes = torch.zeros(2, 20, dtype=torch.bool)
    holes[1, 5] = True
    with pytest.raises(ValueError, match=r"samples \[1\] have padding between tokens"):
        module(x, x, x, key_padding_mask=holes)
    with pytest.raises(ValueError, match=r"\(batch, keys\) = \(2, 20\), got \(1, 20\)$"):
        module(x, x, x, key_padding_mask=holes[:1])
    for mask, got in ((holes, r"\(2, 20\)"), (holes[0, :5], r"\(5,\)"), (holes[:1], r"\(1, 20\)")):
        with pytest.raises(ValueError, match=rf"must be \(keys,\) without a batch dimension = \(20,\), got {got}$"):
            module(x[0], x[0], x[0], key_padding_mask=mask)
    with pytest.raises(ValueError, match=r"samples \[0\] have padding between tokens"):
        module(x[0], x[0], x[0], key_padding_mask=holes[1])
    with pytest.raises(ValueError, match="key_padding_mask gets no gradient here"):
        module(x, x, x, key_padding_mask=torch.zeros(2, 20, requires_grad=True))
    with pytest.raises(TypeError, match="bool or floating-point"):
        module(x, x, x, key_padding_mask=holes.int())
    with pytest.raises(TypeError, match=r"key_padding_mask must be a torch.Tensor, got list"):
        module(x, x, x, key_padding_mask=holes.tolist())
    with pytest.raises(ValueError, match=r"0 \(keep\) and -inf"):
        module(x, x, x, key_padding_mask=holes.float())
    with pytest.raises(ValueError, match="pass one of them"):
        module(x, x, x, key_padding_mask=~holes.any() & holes, lengths=torch.tensor([20, 20]))
    long = torch.zeros(1, 9000, 32)
    with pytest.raises(ValueError, match=r"use attention_map\(query_rows=...\)"):
        module(long, long, long, need_weights=True)

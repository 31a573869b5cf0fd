"""Rotary positions and xPos: against complex numbers in float64, the authors' formula, and far from the origin."""

from __future__ import annotations

import pytest
import torch

import model_oracle
from dilated_attention_pytorch import LongNetConfig, LongNetDecoder
from dilated_attention_pytorch.models.positions import XPOS_WINDOW, check_xpos, rotation

SIZES = {"embed_dim": 32, "num_layers": 1, "num_heads": 2, "ffn_dim": 8, "vocab_size": 5}


def config(positions="xpos", segments=(4096, 32768), **changes):
    values = {"segment_lengths": segments, "dilation_rates": (1,) * len(segments), "positions": positions}
    return LongNetConfig(**SIZES | values | changes)


def authors_xpos(x, scale_base=512, downscale=False):
    """XPOS.forward of the authors' code for x (rows, length, D), in the type of x. Positions are those of the sequence."""
    length, head_dim = x.shape[1:]
    scale = (torch.arange(0, head_dim, 2).to(x) + 0.4 * head_dim) / (1.4 * head_dim)
    low = -length // 2
    scale = scale ** (torch.arange(low, length + low, 1).to(x) / scale_base)[:, None]
    half = scale.shape[1]
    frequencies = 1.0 / (10000 ** (torch.arange(0, half).to(x) / half))
    angles = torch.einsum("i,j->ij", torch.arange(0, length, dtype=x.dtype), frequencies)
    scale = 1 / scale if downscale else scale
    sin, cos = ((t * scale).repeat_interleave(2, 1) for t in (angles.sin(), angles.cos()))
    turned = torch.stack((-x[:, :, 1::2], x[:, :, ::2]), -1).flatten(-2)
    return x * cos + turned * sin


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_are_those_of_the_authors_where_theirs_are_finite(dtype):
    own, n = config(), 65_000  # two windows
    q, k = torch.randn(2, 2, n, 16, dtype=torch.float64)
    turn = rotation(own, torch.arange(n), dtype)
    mine = [f(x.to(dtype).transpose(0, 1)[None])[0].double() for f, x in ((turn.query, q), (turn.key, k))]
    theirs = [authors_xpos(x, downscale=down).transpose(0, 1) for x, down in ((q, False), (k, True))]
    assert all(x.isfinite().all() for x in (*mine, *theirs))
    for window in (slice(0, 32768), slice(32768, n)):  # of positions that can meet
        rows = torch.randint(0, n - 32768, (2, 400)) + window.start
        scores = [(q[rows[0]] * k[rows[1]]).sum(-1) for q, k in (mine, theirs)]
        lengths = [x.unflatten(-1, (-1, 2)).norm(dim=-1) for x in theirs]  # of the pairs that are turned
        size = (lengths[0][rows[0]] * lengths[1][rows[1]]).sum(-1)
        assert ((scores[0] - scores[1]).abs() / size).max() < (1e-6 if dtype == torch.float32 else 1e-9)
    # In float32, theirs overflows from 74,000 positions on.
    assert not authors_xpos(k[:, :1].float().expand(-1, 74_000, -1), downscale=True).isfinite().all()


@pytest.mark.parametrize("positions", ["rotary", "xpos"])
def test_positions_past_ten_million(positions):
    """Scores depend on distances only. In float32, positions above 2**24 are not exact, and angles lose 7 digits."""
    own = config(positions, (64, 128))
    start = 128 * 2**24  # 2,147,483,648
    near = rotation(own, torch.arange(128), torch.float32)
    far = rotation(own, torch.arange(start, start + 128), torch.float32)
    q, k = torch.randn(2, 1, 128, 2, 16)
    scores = [torch.einsum("bihd,bjhd->hij", turn.query(q), turn.key(k)) for turn in (near, far)]
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-5, atol=2e-5)
    where = torch.tensor([10_000_001, 2**24 + 1])
    turned = rotation(own, where, torch.float64).query(q[:, :2].double())[0]
    exact = model_oracle.xpos(q[0, :2], own, where, 0)
    if positions == "rotary":
        torch.testing.assert_close(turned, exact, rtol=1e-8, atol=1e-8)
    assert turned.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_window_stays_finite(dtype):
    """Also for a pair in which causality hides the key: kernels may compute its score before they mask it."""
    n = 4096 if dtype == torch.float16 else XPOS_WINDOW
    own = config(segments=(n,))
    check_xpos(own, None, dtype)
    turn = rotation(own, torch.arange(10 * n, 11 * n), dtype)
    q, k = (4 * torch.ones(1, n, 1, 16, dtype=dtype) for _ in range(2))
    q, k = turn.query(q), turn.key(k)
    assert q.isfinite().all()
    assert k.isfinite().all()
    assert (q[0, 0, 0].float() @ k[0, -1, 0].float()).isfinite()


def test_what_is_beyond_the_bound_raises():
    long = config(segments=(4096, 65536))
    check_xpos(long, 32768, torch.float32)
    with pytest.raises(ValueError, match=r"xPos in torch.float32 covers 32,768 positions .*: got 32,769 positions"):
        check_xpos(long, 32769, torch.float32)
    with pytest.raises(ValueError, match="got any number of positions"):
        check_xpos(config(segments=(1000, 32768)), None, torch.float32)  # least common multiple 4,096,000
    with pytest.raises(ValueError, match="covers 4,096 positions"):
        check_xpos(config(), None, torch.float16)
    check_xpos(config("rotary", (65536,)), None, torch.float16)
    model = LongNetDecoder(long, device="meta")
    with pytest.raises(ValueError, match=r"shorter sequences \(max_tokens of new_caches, "):
        model.new_caches(1)
    assert len(model.new_caches(1, max_tokens=100)) == 1


def test_segments_that_do_not_nest_share_a_window():
    """Segments of 4 and 6 overlap: pairs that meet in either have one origin, in windows of 12."""
    own = config(segments=(4, 6), xpos_scale_base=8.0, num_heads=2)
    model = LongNetDecoder(own, dtype=torch.float64)
    model_oracle.perturb(model)
    tokens = torch.randint(0, 5, (1, 40))
    expected = model_oracle.forward(model_oracle.weights(model), own, tokens[0], causal=True)
    torch.testing.assert_close(model.features(tokens)[0], expected, rtol=1e-9, atol=1e-9)


def test_half_precision_is_turned_in_float32():
    own = config("rotary", (64,))
    x, turn = torch.randn(1, 5, 2, 16).bfloat16(), rotation(own, torch.arange(5) + 70_000, torch.bfloat16)
    exact = model_oracle.xpos(x[0], own, torch.arange(5) + 70_000, 0)
    assert turn.query(x).dtype == torch.bfloat16
    torch.testing.assert_close(turn.query(x)[0], exact.bfloat16(), rtol=8e-3, atol=1e-6)

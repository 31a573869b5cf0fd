"""Sums in fixed point, interpreted here, compiled on a GPU: results, bounds, and tensors for which they do not do."""

from __future__ import annotations

import importlib.util

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(b=2, n=150, m=200, heads=4, key_heads=2, d=24):
    """dout, q, k and v."""
    torch.manual_seed(0)
    shapes = (b, n, heads, d), (b, n, heads, d), (b, m, key_heads, d), (b, m, key_heads, d)
    return [torch.randn(shape, device=DEVICE) for shape in shapes]


def gradients(dout, q, k, v, parts):
    """What each of ``parts`` pieces of the keys gives to dq, (parts, B, H, N, D), float64, without the scale; and delta."""
    group = q.shape[2] // k.shape[2]
    dout, q = (x.double().transpose(1, 2) for x in (dout, q))
    k, v = (x.double().transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    dp = dout @ v.mT
    delta = (weights * dp).sum(-1)
    ds = weights * (dp - delta[..., None])
    pieces = zip(ds.split(-(-k.shape[2] // parts), -1), k.split(-(-k.shape[2] // parts), 2), strict=True)
    return torch.stack([a @ b for a, b in pieces]), delta.float()


def added_up(pieces, resolution, order):
    """As the kernel does: rounded to quanta, piece by piece, and added as 32-bit integers that may overflow on the way."""
    counts = torch.zeros(pieces.shape[1:], dtype=torch.int32, device=pieces.device)
    for i in order:
        counts += (pieces[i].float() * resolution[..., None]).round().to(torch.int32)
    return counts


def finished(dout, q, k, v, pieces, delta, order, scale=0.25):
    from dilated_attention_pytorch.backends.triton import fixed_point

    resolution, unfit = fixed_point.resolution(dout, k, v, delta)
    counts = added_up(pieces, resolution, order)
    result = torch.full_like(q, torch.nan)
    fixed_point.finish(counts, resolution, unfit, scale, result)
    return result, bool(unfit)


def test_sums_of_any_order():
    x = tensors()
    pieces, delta = gradients(*x, parts=7)
    result, unfit = finished(*x, pieces, delta, range(7))
    assert not unfit
    expected = 0.25 * pieces.sum(0).transpose(1, 2)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-7 * float(expected.abs().max()))
    again, _ = finished(*x, pieces, delta, [5, 0, 3, 6, 1, 4, 2])
    assert torch.equal(result, again)


def test_layouts_of_the_tensors():
    x = tensors()
    pieces, delta = gradients(*x, parts=2)
    strided = [torch.stack((y, torch.full_like(y, torch.nan)), 3).flatten(2, 3)[:, :, ::2] for y in x]
    assert not strided[0].is_contiguous()
    results = [finished(dout, x[1], k, v, pieces, delta, range(2))[0] for dout, _, k, v in (x, strided)]
    assert torch.equal(*results)


def test_the_bound_is_reached_and_fits():
    """Two keys, opposite values along dout, opposite elements of keys: nothing is larger for these norms."""
    dout, q, k, v = (torch.zeros(1, 2, 1, 16, device=DEVICE) for _ in range(4))
    dout[:, :, :, 3] = 5.0
    k[0, :, 0, 7] = torch.tensor([3.0, -3.0])
    v[0, :, 0, 3] = torch.tensor([2.0, -2.0])
    pieces, delta = gradients(dout, q, k, v, parts=1)
    assert float(pieces.abs().max()) == 5 * 2 * 3  # |dout| max |v| max |k|; delta is 0
    result, unfit = finished(dout, q, k, v, pieces, delta, range(1), scale=1.0)
    assert not unfit
    assert torch.equal(result.double(), pieces[0].transpose(1, 2))


def test_sums_that_overflow_on_the_way():
    from dilated_attention_pytorch.backends.triton import fixed_point

    dout, q, k, v = tensors(b=1, n=4, m=8, heads=1, key_heads=1)
    pieces, delta = gradients(dout, q, k, v, parts=1)
    resolution, unfit = fixed_point.resolution(dout, k, v, delta)
    large = (2.0**30 / resolution.double())[..., None].expand_as(pieces)
    several = torch.cat([large, large, large, pieces, -large, -large, -large])
    counts = added_up(several, resolution, range(7))
    assert torch.equal(counts, added_up(pieces, resolution, range(1)))
    assert not torch.equal(counts, added_up(several, resolution, range(3)))
    assert not bool(unfit)


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e10, 1e17])
def test_tensors_of_any_size(size):
    """The norms are computed without squares that overflow or vanish."""
    dout, q, k, v = tensors(b=1, n=40, m=40)
    dout = dout * size
    pieces, delta = gradients(dout, q, k, v, parts=3)
    result, unfit = finished(dout, q, k, v, pieces, delta, range(3))
    assert not unfit
    expected = 0.25 * pieces.sum(0).transpose(1, 2)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-7 * float(expected.abs().max()))


def test_rows_of_any_size():
    """Each row has its own quantum."""
    dout, q, k, v = tensors(b=1, n=60, m=100)
    dout = dout * torch.logspace(-12, 6, 60, device=DEVICE)[None, :, None, None]
    pieces, delta = gradients(dout, q, k, v, parts=3)
    result, _ = finished(dout, q, k, v, pieces, delta, range(3))
    expected = 0.25 * pieces.sum(0).transpose(1, 2)
    errors = (result.double() - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert float(errors.max()) < 1e-5


def test_rows_without_gradient():
    dout, q, k, v = tensors(b=1)
    dout[:, 10:20] = 0.0
    pieces, delta = gradients(dout, q, k, v, parts=2)
    result, unfit = finished(dout, q, k, v, pieces, delta, range(2))
    assert not unfit
    assert torch.equal(result[:, 10:20], torch.zeros_like(result[:, 10:20]))


def test_padding_is_no_reason():
    dout, q, k, v = tensors(m=400)
    for x in (k, v):
        x[:, 257:] = 0.0  # of a block of 128 rows one row is left, of another none
    pieces, delta = gradients(dout, q, k, v, parts=2)
    assert not finished(dout, q, k, v, pieces, delta, range(2))[1]


@pytest.mark.parametrize("which", ["dout", "key", "value", "delta"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_does_not_do(which, bad):
    dout, q, k, v = tensors()
    pieces, delta = gradients(dout, q, k, v, parts=2)
    {"dout": dout, "key": k, "value": v, "delta": delta}[which][-1, -1, -1] = bad
    result, unfit = finished(dout, q, k, v, pieces, delta, range(2))
    assert unfit
    assert bool(result.isnan().all()), "nothing is written"


@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize(("factor", "expected"), [(20.0, False), (1e3, True)])
def test_a_row_that_is_much_larger_than_others(which, factor, expected):
    dout, q, k, v = tensors()
    pieces, delta = gradients(dout, q, k, v, parts=2)
    {"key": k, "value": v}[which][0, 77, 1] *= factor
    assert finished(dout, q, k, v, pieces, delta, range(2))[1] == expected


def test_rows_that_are_much_smaller_than_others():
    """128 rows that follow one another: others may see only these."""
    dout, q, k, v = tensors(m=400)
    pieces, delta = gradients(dout, q, k, v, parts=2)
    v[1, 128:256, 0] *= 1e-3
    assert finished(dout, q, k, v, pieces, delta, range(2))[1]

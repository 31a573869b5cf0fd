"""The slide encoder against the published formulas written out, batches, refusals and attention maps."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
import torch

import model_oracle
import oracle
from dilated_attention_pytorch import Hilbert, Order
from dilated_attention_pytorch.models.slide_batch import grid_positions
from slide_cases import (
    CONFIG,
    COUNTS,
    ENCODER,
    model_of,
    nested,
    oracle_embedding,
    oracle_states,
    padded,
    position_of,
    slides,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_the_published_formulas(pooling):
    model = model_of(CONFIG.replace(pooling=pooling))
    for tiles, coordinates in slides():
        expected = oracle_embedding(model, tiles, coordinates)
        actual = model(tiles[None], coordinates[None])
        torch.testing.assert_close(actual[0], expected, rtol=1e-10, atol=1e-10)
        every = model(tiles[None], coordinates[None], all_layer_embed=True)
        assert len(every) == 3  # the input and two layers
        for number, found in enumerate(every):
            expected = oracle_embedding(model, tiles, coordinates, number)
            torch.testing.assert_close(found[0], expected, rtol=1e-10, atol=1e-10)
        assert (every[-1] - actual).abs().max() > 0.1  # without encoder.layer_norm


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_the_authors_steps(pooling):
    """Their table, their gathers and scatters, and their weights of branches, as the benchmark repeats them.

    GELU is computed in float32 there, also for float64.
    """
    theirs = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "gigapath_gpu.py"))["AuthorsEncoder"]
    model = model_of(CONFIG.replace(pooling=pooling))
    for tiles, coordinates in slides((33, 64, 101)):
        expected = theirs(model)(tiles[None], coordinates[None])
        torch.testing.assert_close(model(tiles[None], coordinates[None]), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("order", [None, True])
def test_batches_are_each_slide_by_itself(pooling, order):
    model, samples = model_of(CONFIG.replace(pooling=pooling)), slides()
    separate = torch.cat([model(tiles[None], points[None], order=order) for tiles, points in samples])
    tiles, coordinates = padded(samples)
    for lengths in (COUNTS, list(COUNTS), torch.tensor(COUNTS)):
        together = model(tiles, coordinates, lengths=lengths, order=order)
        torch.testing.assert_close(together, separate, rtol=1e-10, atol=1e-10)
    jagged = nested(samples)
    torch.testing.assert_close(model(*jagged, order=order), separate, rtol=1e-10, atol=1e-10)
    layers = model(*jagged, all_layer_embed=True, order=order)
    for number, found in enumerate(model(tiles, coordinates, lengths=COUNTS, all_layer_embed=True, order=order)):
        torch.testing.assert_close(found, layers[number], rtol=1e-10, atol=1e-10)
    same = [(tiles, points) for tiles, points in slides((20, 20))]
    dense = model(*padded(same), order=order)
    torch.testing.assert_close(dense, model(*nested(same), order=order), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dense, model(*padded(same), lengths=(20, 20), order=order), rtol=0, atol=0)


def test_orders_move_tiles_and_keep_cls_in_front():
    model, ((tiles, coordinates), second, _) = model_of(), slides()
    cells = coordinates // 256
    curve = Hilbert.coordinates(cells).positions
    moved = oracle_embedding(model, tiles[curve], coordinates[curve])
    actual = model(tiles[None], coordinates[None], order=True)
    torch.testing.assert_close(actual[0], moved, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model(tiles[None], coordinates[None], order=Hilbert.coordinates(cells)), actual)
    assert (actual - model(tiles[None], coordinates[None])).abs().max() > 1e-3
    flip = Order.padded([Order.from_permutation(range(33)[::-1]), Order.from_permutation(range(12)[::-1])])
    samples = [(tiles, coordinates), second]
    both = model(*padded(samples), lengths=(33, 12), order=flip)
    for b, (own, points) in enumerate(samples):
        torch.testing.assert_close(both[b], oracle_embedding(model, own.flip(0), points.flip(0)), rtol=1e-10, atol=1e-10)
    packed = Order.packed([Order.from_permutation(range(33)[::-1]), Order.from_permutation(range(12)[::-1])])
    torch.testing.assert_close(model(*nested(samples), order=packed), both)
    with pytest.raises(ValueError, match=r"order.within\(lengths=lengths\)"):
        model(*padded(samples), lengths=(33, 12), order=Order.from_permutation(range(33)[::-1]))
    with pytest.raises(ValueError, match=r"order.within\(cu_seqlens=cu_seqlens\)"):
        model(*nested(samples), order=Order.from_permutation(range(45)[::-1]))
    with pytest.raises(TypeError, match="order must be an Order, got str"):
        model(tiles[None], coordinates[None], order="hilbert")


def layer_by_hand(model, states, layer):
    """Queries, keys and values (heads, n, D) of a layer, and what its attention gives to CLS with these."""
    w = model_oracle.weights(model)
    here = f"encoder.layers.{layer}."
    own = {name.removeprefix(here): x for name, x in w.items() if name.startswith(here)}
    h = model_oracle.norm(states, own, "self_attn_layer_norm", 1e-5)
    return [model_oracle.linear(h, own, f"self_attn.{n}_proj").reshape(len(h), 4, 4).transpose(0, 1) for n in "qkv"]


@pytest.mark.parametrize("layer", [0, 1, -1])
@pytest.mark.parametrize("order", [None, True])
def test_attention_maps_are_the_weights_of_cls(layer, order):
    """Row 0 of attention with the identity matrix as values is the row of weights."""
    model, samples = model_of(), slides()
    expected = []
    for tiles, coordinates in samples:
        curve = Hilbert.coordinates(coordinates // 256).positions if order else torch.arange(len(tiles))
        states = oracle_states(model, tiles[curve], coordinates[curve], layer % 2)
        q, k, _ = (x.transpose(0, 1)[None] for x in layer_by_hand(model, states, layer % 2))
        identity = torch.eye(len(states), dtype=torch.float64)[None, :, None].expand(1, -1, 4, -1)
        wide = torch.nn.functional.pad(q, (0, len(states) - 4)), torch.nn.functional.pad(k, (0, len(states) - 4))
        if len(states) < 4:
            wide, identity = (q, k), torch.nn.functional.pad(identity, (0, 4 - len(states)))
        weights = oracle.attention(*wide, identity, ENCODER.pattern, scale=0.5)[0][0, 0][:, 1 : len(states)]  # head size 4
        expected.append(torch.empty_like(weights).index_copy_(1, curve, weights))
    for (tiles, coordinates), one in zip(samples, expected, strict=True):
        options = {"layer": layer, "order": order}
        each = model.attention_map(tiles[None], coordinates[None], average_heads=False, **options)
        torch.testing.assert_close(each[0], one, rtol=1e-9, atol=1e-12)
        mean = model.attention_map(tiles[None], coordinates[None], **options)
        torch.testing.assert_close(mean[0], one.mean(0), rtol=1e-9, atol=1e-12)
    tiles, coordinates = padded(samples)
    maps = model.attention_map(tiles, coordinates, lengths=COUNTS, average_heads=False, layer=layer, order=order)
    assert maps.shape == (3, 4, 33)
    for b, n in enumerate(COUNTS):
        torch.testing.assert_close(maps[b, :, :n], expected[b], rtol=1e-9, atol=1e-12)
        assert not maps[b, :, n:].any()
    for each in (True, False):
        jagged = model.attention_map(*nested(samples), average_heads=not each, layer=layer, order=order)
        for found, one in zip(jagged.unbind(), expected, strict=True):
            torch.testing.assert_close(found, one if each else one.mean(0), rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="layer must be the number of a layer, from -2 to 1, got 2"):
        model.attention_map(tiles, coordinates, lengths=COUNTS, layer=2)


def test_positions_are_the_rows_of_the_table():
    """Corner cells of the published grid in float32, by Python's functions."""
    points = [(0.0, 0.0), (255.9, 256.0), (999 * 256 + 255, 0), (513, 999 * 256 + 1)]
    cells = (torch.tensor(points, dtype=torch.float64) / 256).floor()
    expected = torch.tensor([position_of(x, y, 768) for x, y in points], dtype=torch.float64).float()
    actual = grid_positions(cells, 768)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=6e-8)
    assert (actual == expected).float().mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float64])
def test_dtypes_of_coordinates(dtype):
    model, ((tiles, coordinates), *_) = model_of(), slides()
    expected = model(tiles[None], coordinates[None])
    assert model(tiles[None], coordinates[None].to(dtype)).equal(expected)
    assert model.float()(tiles[None].bfloat16(), coordinates[None].to(dtype)).dtype == torch.float32


def test_parameters_in_half_precision():
    model, ((tiles, coordinates), *_) = model_of(dtype=torch.float32), slides(dtype=torch.float32)
    expected = model(tiles[None], coordinates[None])
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(tiles[None], coordinates[None])
    torch.testing.assert_close(mixed.float(), expected, rtol=0.05, atol=0.1)
    half = model.bfloat16()(tiles[None], coordinates[None])
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.1, atol=0.2)


def changed(coordinates, tile, value):
    coordinates = coordinates.double().clone()
    coordinates[0, tile] = torch.tensor(value, dtype=torch.float64)
    return coordinates


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda c: changed(c, 3, [math.nan, 0]), r"must be finite, those of tile 3 of slide 0 are \[nan, 0.0\]"),
        (lambda c: changed(c, 3, [0, math.inf]), r"must be finite, those of tile 3 of slide 0 are \[0.0, inf\]"),
        (lambda c: changed(c, 0, [-1, 9]), r"not be negative, tile 0 of slide 0 is in the cell \(-1, 0\); subtract"),
        (lambda c: changed(c, 32, [12800, 9]), r"0 <= x, y < 12,800: tile 32 of slide 0 is in the cell \(50, 0\)\. Pass"),
        (lambda c: c + 12800, r"grid of 50 x 50 cells of 256 pixels.*\(33 tiles of this slide are not\)"),
        (lambda c: c // 256, r"all 33 tiles of slide 0 are in the cell \(0, 0\)\. Multiply grid indices by tile_size=256"),
        (lambda c: c * 0 + 600, r"all 33 tiles of slide 0 are in the cell \(2, 2\)"),
    ],
)
def test_coordinates_that_are_refused(change, error):
    model, ((tiles, coordinates), second, _) = model_of(), slides()
    wrong = change(coordinates[None])
    for call in (model, model.attention_map):
        with pytest.raises(ValueError, match=error + r".*check_coordinates=False leaves this check out"):
            call(tiles[None], wrong)
    # The second slide of a batch is named, in both forms.
    both = [second, (tiles, wrong[0])]
    both = [(own, points.double()) for own, points in both]
    with pytest.raises(ValueError, match=error.replace("slide 0", "slide 1").replace("of this slide 1", "of this slide")):
        model(*nested(both))
    n = torch.stack([torch.nn.functional.pad(points, (0, 0, 0, 33 - len(points)), value=-1.0) for _, points in both])
    with pytest.raises(ValueError, match="slide 1"):
        model(padded(both)[0], n, lengths=(12, 33))
    model(tiles[None], wrong, check_coordinates=False)


def test_coordinates_are_read_once(monkeypatch):
    """The check reads values once for a whole batch, and not at all if it is left out."""
    model, ((tiles, coordinates), *_) = model_of(), slides()
    reads = []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "nonzero"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, f=original: (reads.append(x), f(x))[1])
    for check, count in ((False, 0), (True, 1)):
        reads.clear()
        model(tiles.expand(3, -1, -1), coordinates.expand(3, -1, -1), check_coordinates=check)
        assert len(reads) == count


def test_a_single_tile_is_a_slide():
    model, (*_, (tiles, coordinates)) = model_of(), slides()
    assert model(tiles[None], coordinates[None]).isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "error"),
    [
        ((torch.ones(5, 6), torch.ones(5, 2)), {}, ValueError, r"\(slides, tiles, 6\), got \(5, 6\); add the batch"),
        (
            (torch.ones(1, 5, 7), torch.ones(1, 5, 2)),
            {},
            ValueError,
            r"\(slides, tiles, 6\), got \(1, 5, 7\)",
        ),
        ((torch.ones(1, 5, 6), torch.ones(1, 4, 2)), {}, ValueError, r"got \(1, 4, 2\) for tiles \(1, 5, 6\)"),
        ((torch.ones(1, 5, 6), torch.ones(1, 5, 3)), {}, ValueError, r"one \(x, y\) for each tile"),
        ((torch.ones(1, 5, 6).long(), torch.ones(1, 5, 2)), {}, TypeError, "floating-point embeddings, got torch.int64"),
        ((torch.ones(1, 5, 6), torch.ones(1, 5, 2).half()), {}, TypeError, "float16; 16 bits do not hold"),
        ((torch.ones(1, 5, 6), torch.ones(1, 5, 2).bool()), {}, TypeError, "integers, float32 or float64, got torch.bool"),
        ((torch.ones(1, 5, 6), [[0, 0]]), {}, TypeError, "coordinates must be a torch.Tensor, got list"),
        ((torch.ones(1, 0, 6), torch.ones(1, 0, 2)), {}, ValueError, "at least one tile, got tiles of shape"),
        ((torch.ones(2, 5, 6), torch.ones(2, 5, 2)), {"lengths": [5, 0]}, ValueError, r"slides of \[5, 0\] tiles"),
        ((torch.ones(2, 5, 6), torch.ones(2, 5, 2)), {"lengths": [5]}, ValueError, "got 1 entries for a batch of 2"),
        ((torch.ones(2, 5, 6), torch.ones(2, 5, 2)), {"lengths": [5, 6]}, ValueError, "between 0 and the 5 positions"),
    ],
)
def test_arguments_that_are_refused(arguments, options, kind, error):
    with pytest.raises(kind, match=error):
        model_of(dtype=torch.float32)(*arguments, **options)


def test_nested_tensors_that_are_refused():
    model, samples = model_of(), slides()
    tiles, coordinates = nested(samples)
    with pytest.raises(ValueError, match="got lengths as well"):
        model(tiles, coordinates, lengths=COUNTS)
    with pytest.raises(TypeError, match="must all be jagged nested tensors if one is, coordinates is not"):
        model(tiles, padded(samples)[1])


def test_gradients_reach_every_parameter_and_the_tiles():
    model, samples = model_of(CONFIG.replace(pooling="mean")), slides((21, 9))
    (tiles, coordinates), direction = padded(samples, 0.0), torch.randn(2, 16, dtype=torch.float64)
    tiles.requires_grad_()
    (model(tiles, coordinates, lengths=(21, 9)) * direction).sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in model.parameters())
    assert tiles.grad[0].any(-1).all()
    assert not tiles.grad[1, 9:].any()
    step = torch.randn_like(tiles)
    with torch.no_grad():
        change = [(model(tiles + e * step, coordinates, lengths=(21, 9)) * direction).sum() for e in (1e-5, -1e-5)]
    torch.testing.assert_close((tiles.grad * step).sum(), (change[0] - change[1]) / 2e-5, rtol=1e-6, atol=1e-8)


def test_training_drops_paths_by_slide():
    model = model_of(CONFIG.replace(encoder=ENCODER.replace(dropout=0.0, drop_path=0.9))).train()
    (sample,) = slides((9,))
    torch.manual_seed(0)
    found = model(*nested([sample] * 40))
    kinds = found.detach().round(decimals=8).unique(dim=0)
    assert 1 < len(kinds) <= 4  # both paths of the last layer, each kept or dropped for a whole slide

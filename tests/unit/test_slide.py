"""The slide encoder against the published formulas written out, batches, refusals, attention maps, and checkpoints."""

from __future__ import annotations

import io
import math
import pickle
import runpy
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import model_oracle
import oracle
from dilated_attention_pytorch import Hilbert, LongNetConfig, Order, SlideConfig, SlideEncoder
from dilated_attention_pytorch.models.slide_batch import grid_positions

pytestmark = pytest.mark.slow

ENCODER = LongNetConfig(
    embed_dim=16, num_layers=2, num_heads=4, ffn_dim=24, segment_lengths=(8, 20, 64), dilation_rates=(1, 2, 4),
    offsets="blocked", torchscale_padding=True, positions="none", dropout=0.25, drop_path=0.1,
)  # fmt: skip
CONFIG = SlideConfig(encoder=ENCODER, in_chans=6, slide_ngrids=50)
COUNTS = (33, 12, 1)


def model_of(config=CONFIG, dtype=torch.float64):
    torch.manual_seed(0)
    model = SlideEncoder(config, dtype=dtype).eval()
    model_oracle.perturb(model)
    return model


def slides(counts=COUNTS, dtype=torch.float64):
    """Tiles and pixel coordinates of slides, tiles not aligned to cells."""
    torch.manual_seed(1)
    return [(torch.randn(n, 6, dtype=dtype), torch.randint(0, 50 * 256, (n, 2))) for n in counts]


def padded(samples, value=math.nan):
    n = max(len(tiles) for tiles, _ in samples)
    tiles = torch.full((len(samples), n, 6), value, dtype=samples[0][0].dtype)
    coordinates = torch.full((len(samples), n, 2), -7)
    for b, (own, points) in enumerate(samples):
        tiles[b, : len(own)], coordinates[b, : len(own)] = own, points
    return tiles, coordinates


def nested(samples):
    tiles = torch.nested.nested_tensor([x for x, _ in samples], layout=torch.jagged)
    coordinates = torch.nested.nested_tensor([x for _, x in samples], layout=torch.jagged)
    return tiles, coordinates


def position_of(x: float, y: float, width: int) -> list[float]:
    """The row of the authors' table: index = gx * side + gy, and their ``meshgrid`` puts gy into the first half."""
    row = []
    for cell in (math.floor(y / 256), math.floor(x / 256)):
        angles = [cell / 10000 ** (k / (width // 4)) for k in range(width // 4)]
        row += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return row


def oracle_states(model, tiles, coordinates, layers=None):
    """The states (n + 1, E) behind so many layers, with ``encoder.layer_norm`` if it is all of them (None)."""
    w = model_oracle.weights(model)
    config = model.config.encoder
    width = config.embed_dim
    positions = torch.tensor([position_of(*point, width) for point in coordinates.tolist()], dtype=torch.float64).float()
    x = tiles.double() @ w["patch_embed.proj.weight"].T + w["patch_embed.proj.bias"] + positions.double()
    x = torch.cat((w["cls_token"][0], x))
    own = {name.removeprefix("encoder."): t for name, t in w.items() if name.startswith("encoder.")}
    if layers is not None:
        config = config.replace(num_layers=layers, final_norm=False) if layers else None
    return x if config is None else model_oracle.forward(own, config, x, causal=False)


def oracle_embedding(model, tiles, coordinates, layers=None):
    w, states = model_oracle.weights(model), oracle_states(model, tiles, coordinates, layers)
    pooled = states[0] if model.config.pooling == "cls" else states[1:].mean(0)
    return model_oracle.norm(pooled, w, "norm", 1e-6)


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


@pytest.mark.parametrize(
    ("width", "tensors", "parameters"), [(768, 247, 86_330_880), (1024, 487, 304_134_144), (1536, 247, 342_531_072)]
)
def test_published_sizes(width, tensors, parameters):
    model = SlideEncoder(SlideConfig.gigapath(width), device="meta")
    state = model.state_dict()
    assert (len(state), sum(x.numel() for x in model.parameters())) == (tensors, parameters)
    assert not list(model.buffers())
    assert state["cls_token"].shape == (1, 1, width)
    assert state["patch_embed.proj.weight"].shape == (width, 1536)
    assert {"encoder.layer_norm.bias", "norm.weight", "encoder.layers.0.self_attn.inner_attn_ln.weight"} <= state.keys()
    assert (model.norm.eps, model.encoder.layer_norm.eps) == (1e-6, 1e-5)
    config = model.config.encoder
    assert (config.num_heads, config.dropout, config.drop_path, config.attention_dropout) == (16, 0.25, 0.1, 0.0)
    assert config.pattern.branches == ((1024, 1), (5792, 2), (32768, 4), (185363, 8), (1048576, 16))
    assert (config.offsets, config.torchscale_padding, config.positions) == ("blocked", True, "none")


def test_segments_by_the_size_of_slides():
    """``np.power(2, np.linspace(10, int(log2((max_wsi_size // tile_size) ** 2)), 5)).astype(int)``."""
    assert SlideConfig.gigapath(768, max_wsi_size=131072).encoder.segment_lengths == (1024, 4096, 16384, 65536, 262144)
    assert SlideConfig.gigapath(768, tile_size=512).encoder.segment_lengths == (1024, 4096, 16384, 65536, 262144)
    assert SlideConfig.gigapath(768, max_wsi_size=200000).encoder.segment_lengths == (1024, 4870, 23170, 110217, 524288)
    assert SlideConfig.gigapath(768, dropout=0.0).encoder.dropout == 0.0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: CONFIG.replace(pooling="max"), "pooling must be one of 'cls', 'mean', got 'max'"),
        (lambda: CONFIG.replace(tile_size=0), "tile_size must be an integer, at least 1, got 0"),
        (lambda: CONFIG.replace(norm_eps=0.0), "norm_eps must be a positive number, got 0.0"),
        (lambda: CONFIG.replace(tiles=1), "SlideConfig has no fields tiles; its fields are encoder, in_chans"),
        (lambda: CONFIG.replace(encoder=ENCODER.replace(positions="rotary")), "has positions='none', got 'rotary'"),
        (lambda: CONFIG.replace(encoder=ENCODER.replace(vocab_size=9)), "has vocab_size=None, got 9"),
        (lambda: CONFIG.replace(encoder=ENCODER.replace(embed_dim=18, num_heads=3)), "a multiple of 4, got 18"),
        (lambda: SlideConfig.gigapath(512), "embed_dim must be one of 768, 1024, 1536, got 512"),
        (lambda: SlideConfig.gigapath(768, max_wsi_size=100), "max_wsi_size must be an integer, at least 256, got 100"),
        (lambda: SlideConfig.from_dict({"pooling": "cls"}), "needs the fields encoder; missing: encoder"),
    ],
)
def test_configurations_that_are_refused(call, error):
    with pytest.raises(ValueError, match=error):
        call()


def test_configurations_of_other_types():
    with pytest.raises(TypeError, match="encoder must be a LongNetConfig, got dict"):
        SlideConfig(encoder={})
    with pytest.raises(TypeError, match="config must be a SlideConfig, got LongNetConfig"):
        SlideEncoder(ENCODER)


def test_folders(tmp_path):
    model, ((tiles, coordinates), *_) = model_of(), slides()
    model.save_pretrained(tmp_path)
    again = SlideEncoder.from_pretrained(tmp_path).eval()
    assert again.config == model.config
    assert again(tiles[None], coordinates[None]).equal(model(tiles[None], coordinates[None]))


def checkpoint(model, path, **entries):
    torch.save({"model": model.state_dict(), **entries}, path)
    return path


@pytest.mark.parametrize("form", ["pth", "legacy", "plain", "safetensors", "wrapped"])
def test_files_of_weights(form, tmp_path):
    model, ((tiles, coordinates), *_) = model_of(dtype=torch.float32), slides(dtype=torch.float32)
    state, path = model.state_dict(), tmp_path / "slide_encoder.pth"
    if form == "pth":
        torch.save({"model": state, "args": Namespace(lr=0.1), "epoch": 3}, path)
    elif form == "legacy":
        torch.save({"model": state}, path, _use_new_zipfile_serialization=False)
    elif form == "plain":
        torch.save(state, path)
    elif form == "wrapped":
        names = {name: f"module.{name.replace('layers.1.', 'layers.1._fsdp_wrapped_module.')}" for name in state}
        torch.save({"model": {names[name]: x for name, x in state.items()}}, path)
    else:
        path = tmp_path / "slide_encoder.safetensors"
        save_file({name: x.clone() for name, x in state.items()}, path)
    loaded = SlideEncoder.from_gigapath(path, config=CONFIG).eval()
    assert loaded(tiles[None], coordinates[None]).equal(model(tiles[None], coordinates[None]))
    mean = SlideEncoder.from_gigapath(path, config=CONFIG, pooling="mean", dtype=torch.float64).eval()
    expected = oracle_embedding(mean, tiles, coordinates)
    torch.testing.assert_close(mean(tiles[None], coordinates[None])[0], expected, rtol=1e-10, atol=1e-10)
    assert loaded.training is False
    assert all(x.requires_grad for x in loaded.parameters())


def test_the_published_architecture_is_found_by_shapes(tmp_path):
    """Tensors of one number that are expanded: a file of the full shapes that is small."""
    shapes = {name: x.shape for name, x in SlideEncoder(SlideConfig.gigapath(1024), device="meta").state_dict().items()}
    state = {name: torch.zeros((), dtype=torch.bfloat16).expand(shape) for name, shape in shapes.items()}
    del state["encoder.layers.23.ffn.fc1.bias"], state["norm.weight"]
    state["extra"], state["encoder.layers.0.ffn.fc2.bias"] = torch.zeros(3), torch.zeros(5)
    torch.save({"model": state}, tmp_path / "slide.pth")
    with pytest.raises(ValueError, match=r"slide.pth does not have the tensors of this SlideEncoder") as caught:
        SlideEncoder.from_gigapath(tmp_path / "slide.pth")
    assert str(caught.value).splitlines()[1:] == [
        "  missing: encoder.layers.23.ffn.fc1.bias (4096,)",
        "  missing: norm.weight (1024,)",
        "  unexpected: extra (3,)",
        "  misshapen: encoder.layers.0.ffn.fc2.bias is (5,), the model has (1024,)",
    ]


def test_files_that_are_refused(tmp_path):
    model, path = model_of(dtype=torch.float32), tmp_path / "slide.pth"
    with pytest.raises(ValueError, match=r"width, one of 768, 1024, 1536; it has cls_token \(1, 1, 16\), patch_embed.proj"):
        SlideEncoder.from_gigapath(checkpoint(model, path))
    with pytest.raises(FileNotFoundError, match=r"there is no file .*absent.pth"):
        SlideEncoder.from_gigapath(tmp_path / "absent.pth", config=CONFIG)
    whole = checkpoint(model, path).read_bytes()
    legacy = io.BytesIO()
    torch.save({"model": model.state_dict()}, legacy, _use_new_zipfile_serialization=False)
    for content in (whole[:-1], whole[: len(whole) // 2], whole[:30], b"", b"<html>", legacy.getvalue()[:-100]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"slide.pth is not a complete file .*\({len(content):,} bytes\)"):
            SlideEncoder.from_gigapath(path, config=CONFIG)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"slide\.safetensors is not a valid safetensors file"):
        SlideEncoder.from_gigapath(path.rename(tmp_path / "slide.safetensors"), config=CONFIG)
    torch.save({"model": model.state_dict(), "code": CONFIG}, path)
    with pytest.raises(ValueError, match=r"slide.pth holds Python objects besides tensors, which are not unpickled"):
        SlideEncoder.from_gigapath(path, config=CONFIG)
    path.write_bytes(pickle.dumps({"model": print}, protocol=2))
    with pytest.raises(ValueError, match=r"slide.pth holds Python objects besides tensors"):
        SlideEncoder.from_gigapath(path, config=CONFIG)
    for content, held in (
        ({"state": {}}, "it holds the entries state"),
        ([1], "it holds list"),
        ({}, "it holds no entries"),
    ):
        torch.save(content, path)
        with pytest.raises(ValueError, match=f"slide.pth must hold tensors by name, .* under 'model'; {held}"):
            SlideEncoder.from_gigapath(path, config=CONFIG)

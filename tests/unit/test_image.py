"""LongViT against its formulas written out, positions of other sizes, and checkpoints of its authors."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file

import model_oracle
from dilated_attention_pytorch import ImageConfig, LongNetConfig, LongViT

pytestmark = pytest.mark.slow

ENCODER = LongNetConfig(
    embed_dim=16, num_layers=2, num_heads=4, ffn_dim=24, segment_lengths=(4, 16), dilation_rates=(1, 2),
    offsets="blocked", torchscale_padding=True, positions="none", final_norm=False,
)  # fmt: skip
CONFIG = ImageConfig(encoder=ENCODER, image_size=24, patch_size=4, num_classes=3)


def model_of(config=CONFIG, dtype=torch.float64):
    torch.manual_seed(0)
    model = LongViT(config, dtype=dtype).eval()
    model_oracle.perturb(model)
    with torch.no_grad():
        model.model.pos_embed.normal_()
    return model


def cubic(t: float) -> float:
    """The kernel of bicubic interpolation with a = -0.75."""
    t, a = abs(t), -0.75
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def axis(old: int, new: int, scale: float) -> torch.Tensor:
    """The weights (new, old) along one axis; the border is repeated."""
    weights = torch.zeros(new, old, dtype=torch.float64)
    for i in range(new):
        at = (i + 0.5) / scale - 0.5
        for j in range(math.floor(at) - 1, math.floor(at) + 3):
            weights[i, min(max(j, 0), old - 1)] += cubic(at - j)
    return weights


def resized(positions, rows, columns, extra):
    side = math.isqrt(positions.shape[1])
    grid = positions.double().reshape(side, side, -1)
    first = axis(side, rows, (rows + extra) / side)
    second = axis(side, columns, (columns + extra) / side)
    return torch.einsum("iy,jx,yxe->ije", first, second, grid).flatten(0, 1)


def oracle_features(model, image, positions):
    w, p = model_oracle.weights(model), model.config.patch_size
    rows, columns = (size // p for size in image.shape[1:])
    kernel = w["model.patch_embed.proj.weight"].flatten(1)
    corners = [(i, j) for i in range(0, p * rows, p) for j in range(0, p * columns, p)]
    patches = [kernel @ image[:, i : i + p, j : j + p].double().flatten() for i, j in corners]
    x = torch.stack(patches) + w["model.patch_embed.proj.bias"] + positions
    own = {name.removeprefix("model.encoder."): t for name, t in w.items()}
    states = model_oracle.forward(own, model.config.encoder, x, causal=False)
    return model_oracle.norm(states.mean(0), w, "fc_norm", 1e-5)


@pytest.mark.parametrize(("height", "width"), [(24, 24), (16, 36), (36, 16), (48, 48), (12, 12)])
def test_the_published_formulas(height, width):
    model, image = model_of(), torch.randn(2, 3, height, width, dtype=torch.float64)
    own = model.model.pos_embed.detach()
    positions = own[0] if (height, width) == (24, 24) else resized(own, height // 4, width // 4, 0.1)
    expected = torch.stack([oracle_features(model, one, positions) for one in image])
    torch.testing.assert_close(model.features(image), expected, rtol=1e-10, atol=1e-10)
    logits = expected @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(image), logits, rtol=1e-10, atol=1e-10)


def test_published_sizes():
    model = LongViT(ImageConfig.longvit(1024, num_classes=3), device="meta")
    state = model.state_dict()
    assert (len(state), sum(x.numel() for x in model.parameters())) == (247, 22_914_819)
    assert state["model.pos_embed"].shape == (1, 1024, 384)
    assert state["model.patch_embed.proj.weight"].shape == (384, 3, 32, 32)
    assert {"fc_norm.bias", "head.weight", "model.encoder.layers.11.self_attn.inner_attn_ln.weight"} <= state.keys()
    assert not any("layer_norm" in name and "layers" not in name for name in state)  # no norm behind the last layer
    assert not list(model.buffers())


@pytest.mark.parametrize(
    ("image_size", "segments"),
    [
        (1024, (64, 128, 256, 512, 1024)), (512, (64, 128, 256, 512, 1024)),
        (4096, (1024, 2048, 4096, 8192, 16384)), (8192, (1024, 4096, 8192, 16384, 65536)),
        (16384, (1024, 4096, 16384, 65536, 262144)), (32768, (1024, 4096, 32768, 262144, 1048576)),
    ],
)  # fmt: skip
def test_segments_by_image_size(image_size, segments):
    config = ImageConfig.longvit(image_size)
    assert (config.encoder.segment_lengths, config.encoder.dilation_rates) == (segments, (1, 2, 4, 8, 16))
    assert (config.encoder.num_heads, config.encoder.head_dim, config.side) == (16, 24, image_size // 32)


def published(classes=2, side=4):
    """The tensors of a checkpoint for images of ``32 * side`` pixels. Most are one number, so files are small."""
    torch.manual_seed(0)
    meta = LongViT(ImageConfig.longvit(32 * side, num_classes=classes), device="meta").state_dict()
    state = {name: torch.randn(()).expand(x.shape) for name, x in meta.items()}
    return state | {name: torch.randn(meta[name].shape) for name in ("model.pos_embed", "head.weight", "fc_norm.weight")}


def test_a_checkpoint(tmp_path):
    path, state = tmp_path / "longvit.pth", published()
    torch.save({"module": {f"module.{name}": x for name, x in state.items()}, "epoch": 1}, path)
    model = LongViT.from_checkpoint(path)
    assert model.config == ImageConfig.longvit(128, num_classes=2)
    assert all(x.equal(state[name]) for name, x in model.state_dict().items())
    own = model_of(dtype=torch.float32).state_dict()
    save_file(own, tmp_path / "own.safetensors")
    again = LongViT.from_checkpoint(tmp_path / "own.safetensors", config=CONFIG, dtype=torch.bfloat16)
    assert all(x.equal(own[name].bfloat16()) for name, x in again.state_dict().items())
    larger = LongViT.from_checkpoint(path, image_size=192)
    assert larger.config == ImageConfig.longvit(192, num_classes=2)
    expected = resized(state["model.pos_embed"], 6, 6, 0)  # by the number of patches: nothing is added at loading
    found = larger.model.pos_embed[0]
    assert found.dtype == torch.float32
    assert found.equal(found.half().float())  # the authors' code rounds here
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)
    assert LongViT.from_checkpoint(path, image_size=4096).config.encoder.segment_lengths[0] == 1024


def test_a_checkpoint_of_pretraining(tmp_path):
    path, state = tmp_path / "dino.pth", published()
    backbone = {name.replace("model.", "module.backbone.", 1): x for name, x in state.items() if name.startswith("model.")}
    torch.save({"teacher": backbone | {"module.head.mlp.0.weight": torch.ones(3, 3)}, "student": {}}, path)
    with pytest.raises(ValueError, match=r"dino.pth has no head.weight; pass num_classes for a new head, or num_classes=0"):
        LongViT.from_checkpoint(path)
    for classes in (0, 5):
        model = LongViT.from_checkpoint(path, num_classes=classes)
        assert model.model.pos_embed.equal(state["model.pos_embed"])
        assert model.fc_norm.weight.eq(1).all()
        assert not model.fc_norm.bias.any()
        images = torch.randn(1, 3, 64, 96)
        assert model.eval()(images).shape == (1, classes or 384)
    assert model.head.weight.std() > 0.01
    # The head of a file with another number of classes is replaced, and one with the same number is not.
    torch.save(state, path)
    same, other = (LongViT.from_checkpoint(path, num_classes=n) for n in (2, 4))
    assert same.head.weight.equal(state["head.weight"])
    assert other.head.weight.shape == (4, 384)
    assert other.fc_norm.weight.equal(state["fc_norm.weight"])


def test_checkpoints_that_are_refused(tmp_path):
    path, state = tmp_path / "longvit.pth", published()
    wrong = {name: x for name, x in state.items() if name != "fc_norm.bias"}
    wrong |= {"model.encoder.layer_norm.weight": torch.ones(384), "head.bias": torch.zeros(3)}
    torch.save({"model": wrong}, path)
    with pytest.raises(ValueError, match=r"longvit.pth does not have the tensors of this LongViT") as caught:
        LongViT.from_checkpoint(path)
    assert str(caught.value).splitlines()[1:] == [
        "  missing: fc_norm.bias (384,)",
        "  unexpected: model.encoder.layer_norm.weight (384,)",
        "  misshapen: head.bias is (3,), the model has (2,)",
    ]
    torch.save(state | {"model.pos_embed": torch.zeros(1, 15, 384)}, path)
    with pytest.raises(ValueError, match=r"model.pos_embed must be \(1, side \* side, width\).*got \(1, 15, 384\)"):
        LongViT.from_checkpoint(path)
    with pytest.raises(ValueError, match=r"misshapen: model.pos_embed is \(1, 15, 384\), the model has \(1, 16, 384\)"):
        LongViT.from_checkpoint(path, image_size=128)
    with pytest.raises(ValueError, match="leave out these arguments, or the config"):
        LongViT.from_checkpoint(path, config=CONFIG, image_size=128)
    torch.save({"head.weight": torch.zeros(2, 384)}, path)
    with pytest.raises(ValueError, match=r"longvit.pth is not a LongViT: it has no model.pos_embed"):
        LongViT.from_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"longvit.pth is not a complete file"):
        LongViT.from_checkpoint(path)


@pytest.mark.parametrize(
    ("images", "kind", "error"),
    [
        (torch.zeros(1, 3, 24, 26), ValueError, "multiples of the patch size 4, got 24 x 26; crop or pad"),
        (torch.zeros(1, 3, 0, 24), ValueError, "positive multiples of the patch size 4, got 0 x 24"),
        (torch.zeros(1, 1, 24, 24), ValueError, r"\(batch, 3, height, width\), got \(1, 1, 24, 24\)"),
        (torch.zeros(3, 24, 24), ValueError, r"got \(3, 24, 24\)"),
        (torch.zeros(1, 3, 24, 24, dtype=torch.uint8), TypeError, "floating-point tensor, got torch.uint8; scale"),
        ([], TypeError, "floating-point tensor, got list"),
    ],
)
def test_images_that_are_refused(images, kind, error):
    with pytest.raises(kind, match=error):
        model_of()(images)


@pytest.mark.parametrize(
    ("call", "kind", "error"),
    [
        (lambda: CONFIG.replace(image_size=25), ValueError, "image_size must be a multiple of patch_size, got 25 and 4"),
        (lambda: CONFIG.replace(num_classes=-1), ValueError, "num_classes must be an integer, at least 0"),
        (lambda: ImageConfig.longvit("1024"), TypeError, "image_size must be an integer"),
        (
            lambda: ImageConfig.from_dict({}),
            ValueError,
            "needs the fields encoder, image_size; missing: enc",
        ),
        (lambda: LongViT(ENCODER), TypeError, "config must be an ImageConfig, got LongNetConfig"),
    ],
)
def test_configurations_that_are_refused(call, kind, error):
    with pytest.raises(kind, match=error):
        call()


def test_folders_and_gradients(tmp_path):
    model, images = model_of(), torch.randn(2, 3, 16, 24, dtype=torch.float64)
    model.save_pretrained(tmp_path)
    again = LongViT.from_pretrained(tmp_path).eval()
    assert again.config == model.config
    assert again(images).equal(model(images))
    direction = torch.randn(2, 3, dtype=torch.float64)
    (model(images) * direction).sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in model.parameters())
    step, weight = torch.randn_like(model.model.pos_embed), model.model.pos_embed
    gradient, change = weight.grad, []
    with torch.no_grad():
        for e in (1e-5, -2e-5):
            weight += e * step
            change.append((model(images) * direction).sum())
    torch.testing.assert_close((gradient * step).sum(), (change[0] - change[1]) / 2e-5, rtol=1e-6, atol=1e-8)

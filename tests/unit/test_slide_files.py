"""Slide encoders: published sizes, configurations, folders and checkpoints."""

from __future__ import annotations

import io
import os
import pickle
from argparse import Namespace

import pytest
import torch
from safetensors.torch import save_file

from dilated_attention_pytorch import SlideConfig, SlideEncoder
from slide_cases import CONFIG, ENCODER, model_of, oracle_embedding, slides

pytestmark = pytest.mark.slow


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
    for code, name in ((print, "print"), (os.system, r"\w+\.system")):
        path.write_bytes(pickle.dumps({"model": code}, protocol=2))
        with pytest.raises(ValueError, match=rf"slide.pth holds Python objects .* run code: \S*{name}\. If"):
            SlideEncoder.from_gigapath(path, config=CONFIG)
    for content, held in (
        ({"state": {}}, "it holds the entries state"),
        ([1], "it holds list"),
        ({}, "it holds no entries"),
    ):
        torch.save(content, path)
        with pytest.raises(ValueError, match=f"slide.pth must hold tensors by name, .* under 'model'; {held}"):
            SlideEncoder.from_gigapath(path, config=CONFIG)

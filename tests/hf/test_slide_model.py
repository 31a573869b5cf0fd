"""The slide encoder for transformers against ``SlideEncoder``."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModel

from dilated_attention_pytorch import LongNetConfig, SlideConfig, SlideEncoder
from dilated_attention_pytorch.integrations.transformers import LongNetSlideModel, SlidePreTrainedConfig
from hf_longnet import perturb

COORDINATES = 256 * torch.randint(0, 400, (2, 60, 2), generator=torch.Generator().manual_seed(0))
TILES = torch.randn(2, 60, 24, generator=torch.Generator().manual_seed(1))


def slide(pooling="cls", **changes):
    small = {"embed_dim": 32, "num_layers": 2, "ffn_dim": 48, "num_heads": 4, "segment_lengths": (8, 16, 64)}
    encoder = LongNetConfig.preset("gigapath-12x768", **small | {"dilation_rates": (1, 2, 4)} | changes)
    torch.manual_seed(0)
    return perturb(SlideEncoder(SlideConfig(encoder=encoder, in_chans=24, pooling=pooling))).eval()


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_folders_serve_both_worlds(tmp_path, pooling):
    plain = slide(pooling)
    plain.save_pretrained(tmp_path / "a")
    model = AutoModel.from_pretrained(tmp_path / "a")
    assert type(model) is LongNetSlideModel
    assert AutoConfig.from_pretrained(tmp_path / "a").slide == plain.config
    options = {"lengths": [60, 33]}
    expected = plain(TILES, COORDINATES, **options)
    assert model(TILES, COORDINATES, **options).pooler_output.equal(expected)
    assert not torch.allclose(expected, plain(TILES, COORDINATES), atol=1e-3)  # a control: lengths have an effect
    assert model(TILES, COORDINATES, order=True).pooler_output.equal(plain(TILES, COORDINATES, order=True))
    assert model.attention_map(TILES, COORDINATES, **options).equal(plain.attention_map(TILES, COORDINATES, **options))
    every = model(TILES, COORDINATES, all_layer_embed=True, **options)
    assert every.pooler_output.equal(expected)
    other = plain(TILES, COORDINATES, all_layer_embed=True, **options)
    assert all(a.equal(b) for a, b in zip(every.layer_embeddings, other, strict=True))
    assert model(TILES, COORDINATES, return_dict=False, **options)[0].equal(expected)

    model.save_pretrained(tmp_path / "b", max_shard_size="20KB")
    again = SlideEncoder.from_pretrained(tmp_path / "b").eval()
    assert again.config == plain.config
    assert all(x.equal(y) for x, y in zip(again.parameters(), plain.parameters(), strict=True))
    assert again(TILES, COORDINATES, **options).equal(expected)


def test_the_initialisation_is_that_of_this_library():
    torch.manual_seed(0)
    plain = SlideEncoder(SlideConfig.gigapath(768, num_layers=1))
    model = LongNetSlideModel(SlidePreTrainedConfig.of(plain.config))
    for (name, x), y in zip(model.named_parameters(), plain.parameters(), strict=True):
        a, b = x.detach(), y.detach()
        assert float(a.std()) == pytest.approx(float(b.std()), rel=0.1, abs=1e-3), name
        assert float(a.mean()) == pytest.approx(float(b.mean()), abs=5e-3), name


def test_gradients_with_checkpointing():
    plain = slide(dropout=0.1, drop_path=0.3)
    model = in_slide(plain).train()
    found = []
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(1)
        model(TILES, COORDINATES, lengths=[60, 20]).pooler_output.square().sum().backward()
        found.append([x.grad.clone() for x in model.parameters()])
    assert model.encoder.layers.gradient_checkpointing
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    plain.train().zero_grad()
    torch.manual_seed(1)
    plain(TILES, COORDINATES, lengths=[60, 20]).square().sum().backward()
    assert all(a.equal(x.grad) for a, x in zip(found[0], plain.parameters(), strict=True))


def in_slide(plain):
    model = LongNetSlideModel(SlidePreTrainedConfig.of(plain.config))
    model.load_state_dict(plain.state_dict())
    return model


def test_what_is_refused(tmp_path):
    plain = slide()
    plain.save_pretrained(tmp_path)
    rule = "LongNetSlideModel computes dilated attention only"
    with pytest.raises(ValueError, match=rule):
        AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    with pytest.raises(ValueError, match=rule):
        AutoModel.from_config(AutoConfig.from_pretrained(tmp_path), attn_implementation="eager")
    model = AutoModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rule):
        model.set_attn_implementation("sdpa")
    for name in ("attention_mask", "output_hidden_states"):
        with pytest.raises(TypeError, match=f"does not take the arguments {name}"):
            model(TILES, COORDINATES, **{name: True})
    with pytest.raises(ValueError, match="a slide must have at least one tile"):
        model(TILES, COORDINATES, lengths=[0, 60])
    with pytest.raises(ValueError, match="architecture must be 'SlideEncoder'"):
        SlidePreTrainedConfig.of(plain.config, architecture="LongNetEncoder")
    with pytest.raises(ValueError, match="pooling must be one of"):
        SlidePreTrainedConfig(**plain.config.to_dict() | {"pooling": "max"})


def test_layers_on_several_devices(tmp_path):
    plain = slide()
    plain.save_pretrained(tmp_path / "a")
    devices = {"cls_token": "cpu", "patch_embed": "cpu", "encoder": "disk", "norm": "cpu"}
    model = AutoModel.from_pretrained(tmp_path / "a", device_map=devices, offload_folder=tmp_path / "b")
    found = model(TILES, COORDINATES, lengths=[60, 33]).pooler_output
    torch.testing.assert_close(found, plain(TILES, COORDINATES, lengths=[60, 33]))

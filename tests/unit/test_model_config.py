"""Configurations: every error, presets with the published numbers of parameters, and JSON."""

from __future__ import annotations

import json

import pytest

from dilated_attention_pytorch import Dilated, LongNetConfig, LongNetDecoder, LongNetEncoder
from dilated_attention_pytorch.models.presets import PRESETS
from model_cases import SIZES


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"embed_dim": 0}, "embed_dim must be an integer, at least 1, got 0"),
        ({"embed_dim": 15}, "embed_dim must be a multiple of num_heads, got 15 and 4"),
        ({"num_layers": 2.0}, "num_layers must be an integer, at least 1, got 2.0"),
        ({"num_layers": None}, "num_layers must be an integer"),
        ({"num_heads": True}, "num_heads must be an integer, at least 1, got True"),
        ({"ffn_dim": -3}, "ffn_dim must be an integer, at least 1, got -3"),
        ({"vocab_size": 0}, "vocab_size must be an integer, at least 1, got 0"),
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
        ({"segment_lengths": (4,)}, "need the same number of entries"),
        ({"segment_lengths": "[4]"}, "segment_lengths must be a list of integers"),
        ({"dilation_rates": (1, 0)}, "dilation_rates must be positive"),
        ({"offsets": "random"}, "offsets must be one of"),
        ({"offsets": (0, 1)}, "explicit offsets need one integer per key head: got 2 offsets"),
        ({"torchscale_padding": 1}, "torchscale_padding must be True or False, got 1"),
        ({"activation": "relu"}, "activation must be one of 'gelu', 'swiglu', got 'relu'"),
        ({"positions": "alibi"}, "positions must be one of 'rotary', 'xpos', 'none', got 'alibi'"),
        ({"rotary_base": 0}, "rotary_base must be positive, got 0.0"),
        ({"rotary_base": 10**400}, "rotary_base must be finite, got an integer that a float cannot hold"),
        ({"xpos_scale_base": -1}, "xpos_scale_base must be positive"),
        ({"dropout": 1.0}, "dropout is a probability, 0 <= dropout < 1, got 1.0"),
        ({"attention_dropout": -0.1}, "attention_dropout is a probability"),
        ({"activation_dropout": "0.1"}, "activation_dropout must be a number, got str"),
        ({"drop_path": float("nan")}, "drop_path must be finite"),
        ({"drop_path": None}, "drop_path must be a number, got None"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps must be positive"),
        ({"sub_norm": "yes"}, "sub_norm must be True or False, got 'yes'"),
        ({"final_norm": None}, "final_norm must be True or False"),
        ({"tie_embeddings": 0}, "tie_embeddings must be True or False"),
        ({"checkpoint_layers": 1}, "checkpoint_layers must be True or False"),
        ({"num_heads": 16}, "so the head size must be even: got 1 = 16 / 16"),
    ],
)
def test_every_field_is_checked(changes, error):
    with pytest.raises((ValueError, TypeError), match=error):
        LongNetConfig(**SIZES | changes)


def test_json_gives_the_same_configuration_back():
    changes = {"offsets": [0, 1, 2, 0], "dropout": 0.1, "num_kv_heads": 4, "checkpoint_layers": True}
    config = LongNetConfig(**SIZES | changes)
    again = LongNetConfig.from_json(config.to_json())
    assert again == config
    assert hash(again) == hash(config)
    assert json.loads(config.to_json()) == config.to_dict()
    assert config.pattern == Dilated([4, 12], [1, 3], [0, 1, 2, 0])
    assert config.replace(dropout=0.0).dropout == 0.0


def test_fields_that_are_unknown_or_missing_are_listed():
    with pytest.raises(ValueError, match="LongNetConfig has no fields width, layers; its fields are embed_dim, num_layers"):
        LongNetConfig.from_dict(SIZES | {"width": 3, "layers": 4})
    for text in ("{", "[" * 100_000, '{"embed_dim": ' + "1" * 5000 + "}"):
        with pytest.raises(ValueError, match="a configuration must be JSON"):
            LongNetConfig.from_json(text)
    with pytest.raises(ValueError, match="has no fields width"):
        LongNetConfig(**SIZES).replace(width=3)
    with pytest.raises(ValueError, match="missing: num_heads, dilation_rates"):
        LongNetConfig.from_dict({name: SIZES[name] for name in ("embed_dim", "num_layers", "ffn_dim", "segment_lengths")})
    with pytest.raises(TypeError, match="a dictionary of its fields, got list"):
        LongNetConfig.from_json("[]")
    with pytest.raises(ValueError, match="must be JSON"):
        LongNetConfig.from_json("{")
    with pytest.raises(ValueError, match="there is no preset 'huge'; presets are longnet-base"):
        LongNetConfig.preset("huge")


# Parameters of GigaPath and LongViT without their embeddings of tiles and patches, pooling norms and heads.
OUTSIDE = {
    "gigapath-12x768": 86_330_880 - (1536 * 768 + 768 + 768 + 2 * 768),
    "gigapath-24x1024": 304_134_144 - (1536 * 1024 + 1024 + 1024 + 2 * 1024),
    "gigapath-12x1536": 342_531_072 - (1536 * 1536 + 1536 + 1536 + 2 * 1536),
    "longvit-1024": 22_914_819 - (1024 * 384 + 3 * 32 * 32 * 384 + 384 + 2 * 384 + 3 * 384 + 3),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    config = LongNetConfig.preset(name)
    model = (LongNetDecoder if config.vocab_size else LongNetEncoder)(config, device="meta")
    parameters = sum(x.numel() for x in model.parameters())
    if name in OUTSIDE:
        assert parameters == OUTSIDE[name]
    assert LongNetConfig.from_json(config.to_json()) == config
    assert 35e6 < sum(x.numel() for x in LongNetDecoder(LongNetConfig.preset("small"), device="meta").parameters()) < 45e6
    assert LongNetConfig.preset(name, dropout=0.5).dropout == 0.5

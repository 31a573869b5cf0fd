"""Checkpoints of the authors' code: options, prefixes, and tensors with the names that it gives them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import model_oracle
from dilated_attention_pytorch import LongNetConfig, LongNetDecoder, LongNetEncoder
from dilated_attention_pytorch.models.torchscale import integers_of, stripped

DATA = Path(__file__).parents[1] / "data"
# What ``vars(EncoderConfig(...))`` holds for the vectors.
ENCODER = {
    "encoder_embed_dim": 32, "encoder_attention_heads": 4, "encoder_ffn_embed_dim": 64, "encoder_layers": 2,
    "encoder_normalize_before": True, "normalize_output": True, "activation_fn": "gelu", "dropout": 0.0,
    "drop_path_rate": 0.1, "no_scale_embedding": True, "layernorm_embedding": False, "moe_freq": 0, "rel_pos_buckets": 0,
    "max_rel_pos": 0, "deepnorm": False, "subln": True, "multiway": False, "vocab_size": -1, "layernorm_eps": 1e-5,
    "xpos_rel_pos": False, "flash_attention": True, "segment_length": "[16,64]", "dilated_ratio": "[1,2]",
}  # fmt: skip
DECODER = {
    "decoder_embed_dim": 16, "decoder_attention_heads": 2, "decoder_ffn_embed_dim": 24, "decoder_layers": 2,
    "decoder_normalize_before": True, "vocab_size": 11, "xpos_rel_pos": True, "xpos_scale_base": 512,
    "segment_length": "[4, 16]", "dilated_ratio": [1, 2], "share_decoder_input_output_embed": True,
}  # fmt: skip


def golden():
    tensors = load_file(DATA / "encoder.safetensors")
    return {name[2:]: x for name, x in tensors.items() if name.startswith("w.")}, tensors["x"], tensors["y"]


@pytest.mark.parametrize("form", [dict, lambda args: Namespace(**args)])
def test_the_authors_encoder(form):
    weights, x, y = golden()
    wrapped = {f"module.{name.replace('layers.1.', 'layers.1._fsdp_wrapped_module.')}": t for name, t in weights.items()}
    wrapped = {name.replace("ffn.", "ffn._checkpoint_wrapped_module."): t for name, t in wrapped.items()}
    model = LongNetEncoder.from_torchscale(wrapped, form(ENCODER)).eval()
    torch.testing.assert_close(model(x), y, rtol=1e-5, atol=1e-5)
    config = model.config
    assert (config.drop_path, config.offsets, config.torchscale_padding, config.positions) == (0.1, "blocked", True, "none")


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_with_xpos_buffers(tied):
    config = LongNetConfig(
        embed_dim=16, num_layers=2, num_heads=2, ffn_dim=24, vocab_size=11, segment_lengths=(4, 16), dilation_rates=(1, 2),
        offsets="blocked", positions="xpos", tie_embeddings=tied,
    )  # fmt: skip
    model = LongNetDecoder(config, dtype=torch.float64)
    model_oracle.perturb(model)
    weights = model_oracle.weights(model)
    scale = (torch.arange(0, 8, 2) + 0.4 * 8) / (1.4 * 8)
    stored = weights | {f"layers.{i}.self_attn.xpos.scale": scale for i in range(2)}
    if tied:  # the authors' code stores both
        stored["output_projection.weight"] = stored["embed_tokens.weight"].clone()
    args = DECODER | {"share_decoder_input_output_embed": tied}
    loaded = LongNetDecoder.from_torchscale(stored, args)
    assert loaded.config == config
    tokens = torch.randint(0, 11, (1, 30))
    features = model_oracle.forward(weights, config, tokens[0], causal=True)
    head = weights["embed_tokens.weight" if tied else "output_projection.weight"]
    torch.testing.assert_close(loaded(tokens)[0], features @ head.T, rtol=1e-9, atol=1e-9)
    stored["layers.1.self_attn.xpos.scale"] = scale + 0.1
    with pytest.raises(ValueError, match=r"xpos.scale is not the scale of xPos for a head size of 8"):
        LongNetDecoder.from_torchscale(stored, args)
    with pytest.raises(ValueError, match="args say xpos_rel_pos=False"):
        LongNetDecoder.from_torchscale(stored, args | {"xpos_rel_pos": False})


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"deepnorm": True}, "no LongNet with deepnorm=True; it needs deepnorm=False"),
        ({"encoder_normalize_before": False}, r"encoder_normalize_before=False \(post-norm\)"),
        ({"rel_pos_buckets": 32}, r"rel_pos_buckets=32 \(relative position buckets\)"),
        ({"moe_freq": 2}, r"moe_freq=2 \(mixture of experts\)"),
        ({"multiway": True}, "multiway=True"),
        ({"layernorm_embedding": True}, "layernorm_embedding=True"),
        ({"no_scale_embedding": False}, "no_scale_embedding=False"),
        ({"activation_fn": "relu"}, "activation_fn='relu'"),
        ({"layernorm_eps": 0}, "layer_norm_eps must be positive"),
        ({"xpos_scale_base": 0}, "xpos_scale_base must be positive"),
        ({"segment_length": None}, "need segment_length"),
        ({"encoder_layers": None, "dilated_ratio": ""}, "need encoder_layers, dilated_ratio"),
        ({"segment_length": "[2**4, 64]"}, "never evaluated"),
        ({"segment_length": "__import__('os').system('true')"}, "never evaluated"),
        ({"segment_length": "{16, 64}"}, "segment_length must be a list of integers"),
        ({"segment_length": "[np.int64(16)]"}, "never evaluated"),
    ],
)
def test_options_that_are_refused_by_name(changes, error):
    weights, _, _ = golden()
    with pytest.raises(ValueError, match=error):
        LongNetEncoder.from_torchscale(weights, ENCODER | changes)


def test_tensors_that_are_missing_raise():
    weights, _, _ = golden()
    del weights["layers.1.ffn.fc1.bias"]
    with pytest.raises(ValueError, match=r"the state dict does not have .*\n  missing: layers.1.ffn.fc1.bias \(64,\)"):
        LongNetEncoder.from_torchscale(weights, ENCODER)
    with pytest.raises(TypeError, match=r'checkpoint\["model"\]'):
        LongNetEncoder.from_torchscale({"model": weights}, ENCODER)
    with pytest.raises(TypeError, match="a state dict holds tensors by name, got str"):
        LongNetEncoder.from_torchscale("encoder.pt", ENCODER)
    with pytest.raises(TypeError, match=r"subln must be True or False, got 'no'$"):
        LongNetEncoder.from_torchscale(weights, ENCODER | {"subln": "no"})
    with pytest.raises(ValueError, match="two tensors named a"):
        stripped({"a": torch.ones(1), "module.a": torch.ones(1)})
    assert integers_of("segment_length", (1, 2)) == [1, 2]

"""Mistakes of users of models raise, and numbers do not depend on PyTorch's default dtype."""

from __future__ import annotations

import json
import struct

import pytest
import torch

from dilated_attention_pytorch import LongNetConfig, LongNetDecoder, LongNetEncoder
from dilated_attention_pytorch.models.positions import rotation
from dilated_attention_pytorch.models.safetensors import read_safetensors, write_safetensors
from dilated_attention_pytorch.models.sampling import Sampling

SIZES = {"embed_dim": 16, "num_heads": 2, "ffn_dim": 16, "segment_lengths": (8,), "dilation_rates": (1,)}
CONFIG = LongNetConfig(num_layers=2, vocab_size=11, **SIZES)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_xpos_does_not_depend_on_the_default_dtype(default):
    """The formula of the authors' code in float64, from the middle of a window of 8 positions."""
    config = LongNetConfig(num_layers=1, positions="xpos", xpos_scale_base=7.0, **SIZES)
    torch.set_default_dtype(default)
    try:
        found = rotation(config, torch.arange(8), torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)
    base = (torch.arange(0, 8, 2, dtype=torch.float64) + 0.4 * 8) / (1.4 * 8)
    exponents = (torch.arange(8, dtype=torch.float64) - 4) / torch.tensor(7.0, dtype=torch.float64)
    expected = base ** exponents[:, None]
    torch.testing.assert_close(found.decay.reshape(expected.shape), expected, rtol=1e-15, atol=0)


def jagged(*lengths):
    return torch.nested.nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)


def test_nested_targets_have_the_lengths_of_the_tokens():
    model = LongNetDecoder(CONFIG)
    model.loss(jagged(3, 5), jagged(3, 5))
    with pytest.raises(ValueError, match=r"lengths of the tokens, \[3, 5\], got \[5, 3\]"):
        model.loss(jagged(3, 5), jagged(5, 3))
    with pytest.raises(ValueError, match=r"lengths of the tokens, \[3, 5\], got \(1, 8\)"):
        model.loss(jagged(3, 5), torch.arange(8)[None])


def test_a_reduction_needs_targets():
    with pytest.raises(ValueError, match="needs targets"):
        LongNetDecoder(CONFIG)(torch.zeros(1, 4, dtype=torch.int64), reduction="sum")


def test_every_layer_has_its_own_cache():
    model = LongNetDecoder(CONFIG).eval()
    caches = model.new_caches(1)
    with torch.no_grad(), pytest.raises(ValueError, match="the same cache for several layers"):
        model(torch.zeros(1, 4, dtype=torch.int64), caches=[caches[0]] * 2)
    assert caches[0].tokens_seen.tolist() == [0]


def test_a_small_temperature_is_greedy():
    torch.manual_seed(0)
    model = LongNetDecoder(CONFIG).eval()
    greedy = model.generate([[3, 4]], max_new_tokens=6).tokens
    assert greedy.unique().tolist() != [0]
    for temperature in (1e-46, 1e-300):
        assert torch.equal(model.generate([[3, 4]], max_new_tokens=6, temperature=temperature).tokens, greedy)


def test_a_large_penalty_is_finite():
    """A logit of 0 times infinity would be NaN, which argmax takes for the largest."""
    logits, occurred = torch.tensor([[0.0, -1.0, 1e-3]]), torch.tensor([[True, True, False]])
    assert Sampling(repetition_penalty=1e300).choose(logits, occurred, None).tolist() == [2]


@pytest.mark.parametrize(
    "header",
    [b"[" * 100_000, b'{"x":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'],
    ids=["nested", "long integer"],
)
def test_headers_that_json_does_not_read(tmp_path, header):
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(ValueError, match=r"x\.safetensors is not a valid safetensors file"):
        read_safetensors(file)


def test_sizes_beyond_64_bits(tmp_path):
    header = json.dumps({"x": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match="the shape of x must be a list of sizes"):
        read_safetensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize(("dtype", "message"), [(torch.float64, "several dtypes"), (torch.int64, "other than")])
def test_tensors_of_other_dtypes(tmp_path, dtype, message):
    model = LongNetEncoder(CONFIG)
    model.save_pretrained(tmp_path)
    state = {**model.state_dict()}
    state["layer_norm.weight"] = state["layer_norm.weight"].to(dtype)
    write_safetensors(tmp_path / "model.safetensors", state, {})
    with pytest.raises(ValueError, match=rf"model\.safetensors has tensors of .*{message}"):
        LongNetEncoder.from_pretrained(tmp_path)
    if dtype.is_floating_point:
        loaded = LongNetEncoder.from_pretrained(tmp_path, dtype=torch.float64)
        assert {x.dtype for x in loaded.parameters()} == {torch.float64}
    with pytest.raises(ValueError, match="dtype must be one of"):
        LongNetEncoder.from_pretrained(tmp_path, dtype=torch.int64)


def test_a_nested_config(tmp_path):
    LongNetEncoder(CONFIG).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json: "):
        LongNetEncoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("args", [{"subln": "False"}, {"vocab_size": "many"}])
def test_options_of_torchscale_have_types(args):
    given = {"encoder_embed_dim": 16, "encoder_attention_heads": 2, "encoder_ffn_embed_dim": 16, "encoder_layers": 2}
    given |= {"segment_length": "[8]", "dilated_ratio": "[1]"}
    with pytest.raises(TypeError, match=next(iter(args))):
        LongNetEncoder.from_torchscale({}, given | args)
    with pytest.raises(TypeError, match="args must be a dictionary"):
        LongNetEncoder.from_torchscale({}, [1])

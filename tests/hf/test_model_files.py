"""Folders of LongNet models: this library's classes and those for transformers read what the other one wrote."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from dilated_attention_pytorch import LongNetConfig, LongNetDecoder, LongNetEncoder
from dilated_attention_pytorch.integrations.transformers import (
    LongNetForCausalLM,
    LongNetForMaskedLM,
    LongNetModel,
    LongNetPreTrainedConfig,
)
from hf_longnet import KINDS, VOCABULARY, config, decoder, encoder, in_transformers, perturb

TOKENS = torch.randint(0, VOCABULARY, (2, 41), generator=torch.Generator().manual_seed(0))


def same_weights(one, other, without=()):
    a, b = one.state_dict(), other.state_dict()
    for name in (a.keys() | b.keys()) - set(without):
        assert a[name].dtype == b[name].dtype, name
        assert a[name].equal(b[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_goes_to_transformers_and_back(tmp_path, kind):
    plain = decoder(kind)
    plain.save_pretrained(tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert type(model) is LongNetForCausalLM
    assert not model.training
    same_weights(plain, model, ["output_projection.weight"] if plain.config.tie_embeddings else [])
    assert (model.output_projection.weight is model.embed_tokens.weight) == plain.config.tie_embeddings
    logits = plain(TOKENS)
    assert model(TOKENS).logits.equal(logits)
    assert not any(True for _ in model.buffers())  # from_pretrained would fill buffers of a constructor with garbage

    model.save_pretrained(tmp_path / "b")
    saved = safetensors.torch.load_file(tmp_path / "b" / "model.safetensors")
    assert ("output_projection.weight" in saved) != plain.config.tie_embeddings
    again = LongNetDecoder.from_pretrained(tmp_path / "b").eval()
    assert again.config == plain.config
    same_weights(plain, again)
    assert again(TOKENS).equal(logits)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "b")(TOKENS).logits.equal(logits)

    body = AutoModel.from_pretrained(tmp_path / "b")  # the base model of a decoder is causal
    assert type(body) is LongNetModel
    assert body(TOKENS).last_hidden_state.equal(plain.features(TOKENS))


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_goes_to_transformers_and_back(tmp_path, kind):
    plain = encoder(kind)
    plain.save_pretrained(tmp_path / "a")
    model = AutoModel.from_pretrained(tmp_path / "a")
    states = plain(TOKENS)
    assert model(TOKENS).last_hidden_state.equal(states)
    assert not model(TOKENS).last_hidden_state.equal(decoder(kind).features(TOKENS))
    model.save_pretrained(tmp_path / "b")
    again = LongNetEncoder.from_pretrained(tmp_path / "b").eval()
    same_weights(plain, again)
    assert again(TOKENS).equal(states)
    if plain.config.tie_embeddings:
        masked = AutoModelForMaskedLM.from_pretrained(tmp_path / "a")
        assert type(masked) is LongNetForMaskedLM
        assert masked(TOKENS).logits.equal(states @ plain.embed_tokens.weight.T)
        masked.save_pretrained(tmp_path / "c")
        assert LongNetEncoder.from_pretrained(tmp_path / "c").eval()(TOKENS).equal(states)
    else:  # a head that no file has is not drawn silently
        with pytest.raises(ValueError, match=r"missing: output_projection.weight \(50, 32\)"):
            AutoModelForMaskedLM.from_pretrained(tmp_path / "a")


def test_a_new_model_has_the_initialisation_of_this_library(tmp_path):
    torch.manual_seed(0)
    model = LongNetForCausalLM(LongNetPreTrainedConfig.of(config("untied", embed_dim=128, ffn_dim=512)))
    plain = LongNetDecoder(config("untied", embed_dim=128, ffn_dim=512))
    for (name, x), y in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert x.shape == y.shape, name
        assert float(x.detach().std()) == pytest.approx(float(y.detach().std()), rel=0.15, abs=0.02), name
        assert float(x.detach().mean()) == pytest.approx(float(y.detach().mean()), abs=0.03), name
    perturb(model).save_pretrained(tmp_path)
    again = LongNetForCausalLM.from_pretrained(tmp_path)
    same_weights(model, again)
    assert again(TOKENS).logits.equal(model.eval()(TOKENS).logits)


def test_sharded_files(tmp_path):
    plain = decoder("untied")
    in_transformers(plain, LongNetForCausalLM).save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path)(TOKENS).logits.equal(plain(TOKENS))
    again = LongNetDecoder.from_pretrained(tmp_path).eval()
    same_weights(plain, again)

    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text()
    for change, reason in (
        (lambda x: x["weight_map"].update({"embed_tokens.weight": "../secret.safetensors"}), "files of its own folder"),
        (lambda x: x["weight_map"].update({"embed_tokens.weight": "other.safetensors"}), "files that are not there"),
        (lambda x: x["weight_map"].update({"layer_norm.weight": x["weight_map"]["embed_tokens.weight"]}), "these differ"),
        (lambda x: x.pop("weight_map"), "must have a 'weight_map'"),
    ):
        values = json.loads(text)
        change(values)
        index.write_text(json.dumps(values))
        with pytest.raises((ValueError, FileNotFoundError), match=reason):
            LongNetDecoder.from_pretrained(tmp_path)
    index.write_text(text)
    (tmp_path / files[1]).unlink()
    with pytest.raises(FileNotFoundError, match=files[1]):
        LongNetDecoder.from_pretrained(tmp_path)


@pytest.fixture
def folder(tmp_path):
    decoder("untied").save_pretrained(tmp_path)
    return tmp_path


def rewritten(folder, change):
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path, {"format": "pt"})


def test_missing_unexpected_and_misshapen_tensors_raise_and_are_listed(folder):
    def change(tensors):
        del tensors["layers.1.ffn.fc1.bias"], tensors["layer_norm.weight"]
        tensors["layers.0.strange"] = torch.ones(2)
        tensors["layers.0.ffn.fc2.weight"] = torch.ones(3, 5)

    rewritten(folder, change)
    for load in (AutoModelForCausalLM.from_pretrained, LongNetForCausalLM.from_pretrained, LongNetDecoder.from_pretrained):
        with pytest.raises(ValueError, match="does not have the tensors of this LongNet") as error:
            load(folder)
        for line in (
            "missing: layers.1.ffn.fc1.bias (48,)", "missing: layer_norm.weight (32,)", "unexpected: layers.0.strange",
            "misshapen: layers.0.ffn.fc2.weight is (3, 5), the model has (32, 48)",
        ):  # fmt: skip
            assert line in str(error.value)
    with pytest.raises(ValueError, match=r"missing: layer_norm\.weight") as error:
        LongNetForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)
    assert "misshapen" not in str(error.value)


def test_misshapen_tensors_are_drawn_if_that_is_asked_for(folder):
    rewritten(folder, lambda x: x.update({"layers.0.ffn.fc2.weight": torch.ones(3, 5)}))
    model, report = LongNetForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True, output_loading_info=True)
    assert report["mismatched_keys"]
    drawn = model.layers[0].ffn.fc2
    assert 0.02 < float(drawn.weight.detach().std()) < 1.0
    same_weights(decoder("untied"), model, ["layers.0.ffn.fc2.weight"])  # the bias of that module included


def test_a_truncated_file_raises(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"(?i)safetensor|incomplete"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_tied_head_that_differs_raises(tmp_path):
    plain = decoder("tied")
    plain.save_pretrained(tmp_path)
    rewritten(tmp_path, lambda x: x.update({"output_projection.weight": x["embed_tokens.weight"].clone()}))
    assert AutoModelForCausalLM.from_pretrained(tmp_path)(TOKENS).logits.equal(plain(TOKENS))
    rewritten(tmp_path, lambda x: x.update({"output_projection.weight": 2 * x["embed_tokens.weight"]}))
    with pytest.raises(ValueError, match=r"differing: output_projection\.weight and embed_tokens.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    rewritten(tmp_path, lambda x: x.pop("embed_tokens.weight"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).embed_tokens.weight.equal(2 * plain.embed_tokens.weight)


def test_the_config_has_the_fields_of_both_worlds(tmp_path):
    own = {field.name: field.default for field in fields(LongNetConfig)}
    theirs = {field.name: field.default for field in fields(LongNetPreTrainedConfig)}
    assert {name: theirs[name] for name in own} == own
    made = LongNetPreTrainedConfig.of(config(offsets=(1, 0)), eos_token_id=3)
    made.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read) is LongNetPreTrainedConfig
    assert read.longnet == made.longnet == config(offsets=(1, 0))
    assert (read.hidden_size, read.num_hidden_layers, read.num_key_value_heads, read.eos_token_id) == (32, 2, 2, 3)
    assert read.dilated_attention == {"segment_lengths": [8, 16, 64], "dilation_rates": [1, 2, 4], "offsets": [1, 0]}


def test_configs_that_are_refused():
    values = config().to_dict()
    for change, error, reason in (
        ({"segment_length": [4]}, ValueError, "has no fields segment_length; its fields are embed_dim"),
        ({"dropout": 2}, ValueError, "dropout is a probability"),
        ({"embed_dim": 33}, ValueError, "must be a multiple of num_heads"),
        ({"architecture": "Llama"}, ValueError, "architecture must be 'LongNetDecoder' or 'LongNetEncoder', got 'Llama'"),
        ({"embed_dim": "a"}, TypeError, "embed_dim"),
    ):
        with pytest.raises(error, match=reason):
            LongNetPreTrainedConfig(**{**values, **change})
    with pytest.raises(TypeError, match="embed_dim"):
        LongNetPreTrainedConfig()
    with pytest.raises(ValueError, match="LongNetForCausalLM has the modules of a LongNetDecoder"):
        LongNetForCausalLM(LongNetPreTrainedConfig(**values, architecture="LongNetEncoder"))
    with pytest.raises(ValueError, match="LongNetForMaskedLM has the modules of a LongNetEncoder"):
        LongNetForMaskedLM(LongNetPreTrainedConfig(**values))
    with pytest.raises(ValueError, match="needs a vocabulary"):
        LongNetForCausalLM(LongNetPreTrainedConfig(**{**values, "vocab_size": None}))


def test_this_library_reads_a_closed_set_of_foreign_keys(folder):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    assert values["model_type"] == "longnet"
    known = {
        "architectures": ["LongNetForCausalLM"], "transformers_version": "5.17.0", "dtype": "float32", "use_cache": False,
        "bos_token_id": 1, "eos_token_id": [2], "pad_token_id": None,
    }  # fmt: skip
    path.write_text(json.dumps(values | known))
    LongNetDecoder.from_pretrained(folder)
    for strange in ("quantization_config", "rope_scaling", "segment_length"):
        path.write_text(json.dumps(values | known | {strange: {}}))
        with pytest.raises(ValueError, match=f"has no fields {strange}"):
            LongNetDecoder.from_pretrained(folder)
    path.write_text(json.dumps(values | {"model_type": "llama"}))
    with pytest.raises(ValueError, match="model_type of a LongNetDecoder is 'longnet', got 'llama'"):
        LongNetDecoder.from_pretrained(folder)
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="is of a LongNetDecoder; load it with LongNetDecoder"):
        LongNetEncoder.from_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    same_weights(LongNetDecoder.from_pretrained(folder, dtype=dtype), model)
    model.save_pretrained(folder / "b")
    same_weights(LongNetDecoder.from_pretrained(folder / "b"), model)
    assert AutoModelForCausalLM.from_pretrained(folder / "b").dtype == dtype  # that of the files


def test_an_encoder_of_embeddings(tmp_path):
    plain = encoder(vocab_size=None)
    plain.save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path)
    x = torch.randn(2, 20, 32)
    assert model(inputs_embeds=x).last_hidden_state.equal(plain(x))
    with pytest.raises(TypeError, match="has no vocabulary"):
        model(TOKENS)


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", "flex_attention"])
def test_another_attention_implementation_is_refused(folder, name):
    rule = rf"computes dilated attention only, attn_implementation='dilated': got '{name}'. Leave attn_implementation out"
    for auto in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(ValueError, match=rule):
            auto.from_pretrained(folder, attn_implementation=name)
        with pytest.raises(ValueError, match=rule):
            auto.from_config(AutoConfig.from_pretrained(folder), attn_implementation=name)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="dilated")
    assert model.config._attn_implementation == "dilated"
    for asked in (name, {"": name}, {"decoder": name}):
        with pytest.raises(ValueError, match=rule):
            model.set_attn_implementation(asked)
    model.set_attn_implementation("dilated")
    model(TOKENS)
    model.config._attn_implementation = name
    with pytest.raises(ValueError, match=rule):
        model(TOKENS)

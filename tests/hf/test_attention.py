"""``attn_implementation="dilated"`` in models of transformers, against the dense formula of the definition."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM, BloomConfig, BloomForCausalLM
from transformers.masking_utils import AttentionMaskInterface

import hf_models
import oracle
import programs
from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.integrations.transformers import MOST_WEIGHTS, apply, pattern_of, register, remove
from hf_models import PATTERN, RATES, SEGMENTS, assert_layers_close, dilated, error, run, tokens

MODELS = hf_models.DECODERS | hf_models.ENCODERS


@pytest.fixture(autouse=True)
def _oracles():
    """Names of the dense formula, for the pattern of the tests."""
    for causal in (False, True):
        AttentionInterface.register(f"oracle_{causal}", hf_models.Oracle(PATTERN, causal))
    yield
    for causal in (False, True):
        del AttentionInterface._global_mapping[f"oracle_{causal}"]


def inputs_of(name, n=41):
    if name != "vit":
        return tokens(2, n)
    return torch.randn(2, 3, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MODELS)
def test_models_compute_the_definition(name):
    model, x = dilated(MODELS[name]()), inputs_of(name)
    found = run(model, x)
    model.set_attn_implementation(f"oracle_{name in hf_models.DECODERS}")
    exact = run(model, x)
    assert_layers_close(found, exact)
    # Whatever is wrong about the pattern is seen: other offsets, a branch less, a branch twice, dense attention.
    heads = 2 if name in ("llama", "qwen3", "mistral") else 4
    for segments, rates, offsets in (
        (SEGMENTS, RATES, [1, 0, 1, 0][:heads]),
        (SEGMENTS[:2], RATES[:2], "interleaved"),
        ([*SEGMENTS, 16], [*RATES, 2], "interleaved"),
        (*hf_models.FULL, "interleaved"),
    ):
        assert error(run(apply(model, segments, rates, offsets=offsets), x), exact) > 0.01


@pytest.mark.parametrize("name", MODELS)
def test_one_segment_is_dense_attention(name):
    model, x = MODELS[name](), inputs_of(name)
    model.set_attn_implementation("sdpa")
    dense = run(model, x)
    assert_layers_close(run(apply(model, *hf_models.FULL), x), dense)


def test_gradients_are_those_of_the_definition():
    model, x = dilated(hf_models.gpt2()), tokens(2, 30)
    grads = []
    for implementation in ("dilated", "oracle_True"):
        model.set_attn_implementation(implementation)
        loss = model(x, labels=x).loss
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    for found, exact in zip(*grads, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)


def test_a_decoder_can_be_bidirectional():
    model, x = dilated(hf_models.llama()), tokens(2, 41)
    causal = run(model, x)
    model.config.is_causal = False
    found = run(model, x, use_cache=False)
    model.set_attn_implementation("oracle_False")
    assert_layers_close(found, run(model, x, use_cache=False))
    assert error(found, causal) > 0.1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_dropout(reentrant):
    model, x = dilated(hf_models.llama(attention_dropout=0.3)), tokens(2, 30)
    model.train()

    def step(seed):
        torch.manual_seed(seed)
        loss = model(x, labels=x, use_cache=False).loss
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    loss, grads = step(1)
    other, _ = step(2)
    assert abs(loss.item() - other.item()) > 1e-3  # dropout acts
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:  # gradients by .backward() only
        torch.manual_seed(1)
        again = model(x, labels=x, use_cache=False).loss
        again.backward()
        repeated = [p.grad for p in model.parameters()]
    else:
        again, repeated = step(1)
    assert again.equal(loss)
    for a, b in zip(repeated, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_the_pattern_is_saved_and_the_name_is_not(tmp_path):
    model = dilated(hf_models.llama(), offsets=[1, 0])
    model.save_pretrained(tmp_path)
    entry = {"segment_lengths": SEGMENTS, "dilation_rates": RATES, "offsets": [1, 0]}
    assert json.loads((tmp_path / "config.json").read_text())["dilated_attention"] == entry
    x, options = tokens(2, 41), {"dtype": torch.float64}
    expected = run(model, x)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="dilated", **options)
    assert pattern_of(again.config) == Dilated(SEGMENTS, RATES, [1, 0])
    # Not the same bits: the rounding of products on a CPU may depend on the addresses of weights.
    assert_layers_close(run(again, x), expected)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert dense.config._attn_implementation == "sdpa"
    assert error(run(dense, x), expected) > 0.01
    dense.set_attn_implementation("dilated")  # what was loaded without the name
    assert_layers_close(run(dense, x), expected)
    base = AutoModel.from_pretrained(tmp_path, attn_implementation="dilated", **options)
    assert_layers_close(run(base, x), expected)


def test_remove_restores_a_model(tmp_path):
    model, x = hf_models.llama(), tokens(2, 41)
    before, expected, config = run(model, x), dict(model.state_dict()), model.config.to_dict()
    assert apply(model, [8], [1]) is model
    assert dilated(model).config._attn_implementation == "dilated"
    assert all(value.equal(expected[name]) for name, value in model.state_dict().items())
    assert remove(model) is model
    assert model.config.to_dict() == config
    assert_layers_close(run(model, x), before, 0.0)
    with pytest.raises(ValueError, match=r"remove undoes apply.* LlamaForCausalLM.*set_attn_implementation"):
        remove(model)
    # A pattern that was there before stays.
    model.config.dilated_attention = {"segment_lengths": [4], "dilation_rates": [1]}
    assert remove(dilated(model)).config.dilated_attention == {"segment_lengths": [4], "dilation_rates": [1]}


def test_a_saved_entry_is_an_argument_of_apply():
    entry = {"segment_lengths": [8, 16], "dilation_rates": [1, 2], "offsets": "blocked", "torchscale_padding": True}
    model = apply(hf_models.llama(), **entry)
    assert model.config.dilated_attention == entry
    assert pattern_of(model.config) == Dilated([8, 16], [1, 2], "blocked", torchscale_padding=True)


def test_a_model_inside_another_one_by_itself():
    model = hf_models.llama()
    apply(model.model, [8], [1])  # it shares the config with the model around it
    assert model.config._attn_implementation == "dilated"
    remove(model.model)
    assert model.config._attn_implementation == "sdpa"


def test_another_name():
    register("longnet")
    try:
        model, x, mask = dilated(hf_models.llama()), tokens(2, 30), torch.ones(2, 30)
        mask[0, :9] = 0  # without a mask function of the same name, attention would get no mask
        expected = run(model, x, attention_mask=mask)
        model.set_attn_implementation("longnet")
        assert_layers_close(run(model, x, attention_mask=mask), expected, 0.0)
        assert error(run(model, x), expected) > 0.1
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            del interface._global_mapping["longnet"]
    for name in ("sdpa", "eager"):
        with pytest.raises(ValueError, match="name of another attention implementation"):
            register(name)


@pytest.mark.parametrize(
    ("entry", "error_type", "message"),
    [
        (None, ValueError, r"LlamaConfig has no 'dilated_attention'; write config.dilated_attention = .* apply\("),
        ([8, 16], TypeError, r"must be a dict, got \[8, 16\]"),
        ({"segment_lengths": [8]}, ValueError, r"missing \['dilation_rates'\]"),
        ({"segment_lengths": [8], "dilation_rates": [1], "rate": 1}, ValueError, r"unknown \['rate'\]"),
        ({"segment_lengths": [8], "dilation_rates": [1, 2]}, ValueError, "same number of entries"),
        ({"segment_lengths": 8, "dilation_rates": [1]}, TypeError, "segment_lengths must be a list"),
    ],
)
def test_patterns_of_configs_are_checked(entry, error_type, message):
    model = hf_models.llama()
    model.set_attn_implementation("dilated")
    model.config.dilated_attention = entry
    with pytest.raises(error_type, match=message):
        model(tokens(1, 9))


def test_the_library_does_not_import_transformers(tmp_path):
    code = "import sys, dilated_attention_pytorch.integrations; assert 'transformers' not in sys.modules"
    result = programs.run(code, folder=tmp_path)
    assert result.returncode == 0, result.stderr


def test_apply_refuses_what_is_no_model_of_transformers():
    with pytest.raises(TypeError, match="PreTrainedModel of transformers, got Linear"):
        apply(torch.nn.Linear(2, 2), [8], [1])
    bloom = BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=1))
    with pytest.raises(ValueError, match=r"BloomForCausalLM does not call its attention through.*AttentionInterface"):
        apply(bloom, [8], [1])
    with pytest.raises(ValueError, match="same number of entries"):
        apply(hf_models.llama(), [8], [1, 2])


def dense_weights(q, k, pattern, causal):
    """(B, H, N, M) by the formula of the definition."""
    heads, key_heads = q.shape[2], k.shape[2]
    count = oracle.multiplicities(pattern, q.shape[1], k.shape[1], heads, key_heads, causal)
    k = k.repeat_interleave(heads // key_heads, 2)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * q.shape[-1] ** -0.5 + count.log()
    return scores.softmax(-1).nan_to_num(0.0)


class WithWeights(hf_models.Oracle):
    def __call__(self, module, query, key, *args, **kwargs):
        out, _ = super().__call__(module, query, key, *args, **kwargs)
        return out, dense_weights(query.transpose(1, 2), key.transpose(1, 2), self.pattern, self.causal)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_output_attentions_are_the_weights(name):
    model, x = dilated(MODELS[name]()), tokens(2, 41)
    causal = name == "llama"
    with torch.no_grad():
        found = model(x, output_attentions=True).attentions
    AttentionInterface.register(f"oracle_{causal}", WithWeights(PATTERN, causal))
    model.set_attn_implementation(f"oracle_{causal}")
    with torch.no_grad():
        exact = model(x, output_attentions=True).attentions
    assert_layers_close(found, exact)
    assert found[0].shape == (2, 4, 41, 41)
    torch.testing.assert_close(found[0].sum(-1), torch.ones(2, 4, 41, dtype=torch.float64))


def test_output_attentions_of_padding_and_documents():
    model, x = dilated(hf_models.llama()), tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :7] = 0
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        found = model(x, attention_mask=mask, position_ids=positions, output_attentions=True).attentions
        single = model(x[:1, 7:], output_attentions=True).attentions
        packed = torch.cat((torch.arange(13), torch.arange(7))).unsqueeze(0)
        documents = model(x[:1], position_ids=packed, output_attentions=True).attentions
        first, second = (model(y, output_attentions=True).attentions for y in (x[:1, :13], x[:1, 13:]))
    for a, b, c, d, e in zip(found, single, documents, first, second, strict=True):
        torch.testing.assert_close(a[:1, :, 7:, 7:], b, rtol=1e-10, atol=1e-12)
        assert not a[0, :, :7].any()
        assert not a[0, :, :, :7].any()
        torch.testing.assert_close(c[:, :, :13, :13], d, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(c[:, :, 13:, 13:], e, rtol=1e-10, atol=1e-12)
        assert not c[:, :, 13:, :13].any()


def test_output_attentions_have_a_largest_size(monkeypatch):
    assert MOST_WEIGHTS == 2**26
    module = "dilated_attention_pytorch.integrations.transformers.attention"
    monkeypatch.setattr(f"{module}.MOST_WEIGHTS", 4 * 9 * 9)
    model = dilated(hf_models.llama())
    assert model(tokens(1, 9), output_attentions=True).attentions[1].shape == (1, 4, 9, 9)
    with pytest.raises(ValueError, match=r"at most 324 weights of a layer, got 1 x 4 x 10 x 10 = 400; .*attention_weights"):
        model(tokens(1, 10), output_attentions=True)


def test_explicit_offsets_need_one_entry_per_key_head():
    model = apply(hf_models.llama(), SEGMENTS, RATES, offsets=[0, 1, 2, 3])
    with pytest.raises(ValueError, match="key head"):
        model(tokens(1, 9))

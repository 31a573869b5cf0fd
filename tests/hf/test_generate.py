"""``generate()`` with ``DilatedCache``, with ``DynamicCache``, and without a cache: the same tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import hf_models
from dilated_attention_pytorch import DilatedKVCache
from dilated_attention_pytorch.integrations.transformers import DilatedCache, apply
from hf_models import PATTERN, dilated, tokens

NEW = 16
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request):
    return dilated(hf_models.DECODERS[request.param]())


def by_hand(model, x, new=NEW):
    """Greedy tokens of one prompt by whole forwards without a cache."""
    for _ in range(new):
        with torch.no_grad():
            x = torch.cat((x, model(x, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return x


@pytest.fixture(scope="module")
def expected(model):
    return by_hand(model, tokens(1, 13))


def padded(lengths):
    n = max(lengths)
    x, mask = tokens(len(lengths), n), torch.zeros(len(lengths), n, dtype=torch.int64)
    for b, m in enumerate(lengths):
        mask[b, n - m :] = 1
    return x * mask, mask


def test_greedy(model, expected):
    x = tokens(1, 13)
    assert model.generate(x, use_cache=False, **GREEDY).equal(expected)
    assert model.generate(x, **GREEDY).equal(expected)
    cache = DilatedCache(model.config)
    assert model.generate(x, past_key_values=cache, **GREEDY).equal(expected)
    assert isinstance(cache.layers[0].kv, DilatedKVCache)
    assert cache.nbytes == 2 * DilatedKVCache.max_nbytes(PATTERN, 1, *key_sizes(model), dtype=torch.float64)
    assert len(set(expected[0, 13:].tolist())) > 8  # not one token again and again
    apply(model, [4, 64], [1, 8])
    try:  # another pattern gives other tokens
        other = model.generate(x, past_key_values=DilatedCache(model.config), **GREEDY)
        assert other.equal(by_hand(model, x))
        assert not other.equal(expected)
    finally:
        dilated(model)


def key_sizes(model):
    return (2, 8) if model.config.model_type == "llama" else (4, 8)


def test_left_padding(model):
    lengths = [30, 1]
    x, mask = padded(lengths)
    expected = [by_hand(model, x[b : b + 1, 30 - n :])[0, n:] for b, n in enumerate(lengths)]
    for cache in (None, DynamicCache(config=model.config), DilatedCache(model.config)):
        found = model.generate(x, attention_mask=mask, past_key_values=cache, **GREEDY)
        assert [row.tolist() for row in found[:, 30:]] == [row.tolist() for row in expected]


def test_prefill_in_chunks(model):
    x, mask = padded([40, 17])
    expected = model.generate(x, attention_mask=mask, use_cache=False, **GREEDY)
    for make in (DynamicCache, DilatedCache):
        found = model.generate(
            x, attention_mask=mask, past_key_values=make(config=model.config), prefill_chunk_size=7, **GREEDY
        )
        assert found.equal(expected)


def test_beams(model):
    x, mask = padded([20, 9])
    options = {"attention_mask": mask, "max_new_tokens": 15, "num_beams": 3, "do_sample": False, "length_penalty": 0.0}
    expected = model.generate(x, **options)
    assert model.generate(x, past_key_values=DilatedCache(model.config), **options).equal(expected)
    assert not expected.equal(model.generate(x, **options | {"num_beams": 1}))


def test_sampling(model):
    x = tokens(2, 13)
    options = {"max_new_tokens": NEW, "do_sample": True, "temperature": 2.0, "num_return_sequences": 2}

    def sampled(seed, cache=None):
        torch.manual_seed(seed)
        return model.generate(x, past_key_values=cache, **options)

    assert sampled(1, DilatedCache(model.config)).equal(sampled(1))
    assert not sampled(2).equal(sampled(1))


def test_continuing_from_a_returned_cache(model):
    x, more = tokens(2, 13), tokens(2, 5, seed=1)
    cache = DilatedCache(model.config)
    output = model.generate(x, past_key_values=cache, return_dict_in_generate=True, **GREEDY)
    assert output.past_key_values is cache
    prompt = torch.cat((output.sequences, more), 1)
    mask = torch.ones_like(prompt)  # generate() takes tokens with the number of the padding token for padding
    found = model.generate(prompt, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert found.equal(model.generate(prompt, attention_mask=mask, use_cache=False, **GREEDY))


def looping_prompt():
    """A prompt that repeats itself, so that prompt lookup proposes tokens."""
    return tokens(1, 6).repeat(1, 5)


@pytest.mark.parametrize("n", [3, 12])
def test_prompt_lookup(model, n, monkeypatch):
    """Proposed tokens that are wrong are taken back by ``crop``."""
    crops = []
    crop = DilatedCache.crop
    monkeypatch.setattr(DilatedCache, "crop", lambda self, count: (crops.append(int(count)), crop(self, count))[1])
    x = looping_prompt()
    expected = by_hand(model, x)
    found = model.generate(x, past_key_values=DilatedCache(model.config), prompt_lookup_num_tokens=n, **GREEDY)
    assert found.equal(expected)
    assert min(crops) < 0


@pytest.mark.parametrize("same", [True, False])
def test_assisted_decoding(model, expected, same):
    """The assistant proposes tokens one by one. It has a cache of its own."""
    x, assistant = tokens(1, 13), dilated(hf_models.llama(num_hidden_layers=1)) if not same else model
    assistant.generation_config = GenerationConfig(num_assistant_tokens=6, num_assistant_tokens_schedule="constant")
    found = model.generate(x, past_key_values=DilatedCache(model.config), assistant_model=assistant, **GREEDY)
    assert found.equal(expected)


def test_a_rollback_that_is_too_far():
    model = dilated(hf_models.llama())
    cache = DilatedCache(model.config, max_rollback=1)
    with pytest.raises(ValueError, match=r"max_rollback = 1 tokens.*make DilatedCache"):
        model.generate(looping_prompt(), past_key_values=cache, prompt_lookup_num_tokens=10, **GREEDY)


def test_long_generation_in_bounded_memory():
    model = dilated(hf_models.llama(num_hidden_layers=1, max_position_embeddings=1024))
    cache, sizes = DilatedCache(model.config), set()
    x = tokens(1, 10)
    expected = model.generate(x, max_new_tokens=90, do_sample=False)
    hook = model.register_forward_hook(lambda *_: sizes.add(cache.nbytes))
    found = model.generate(x, past_key_values=cache, max_new_tokens=90, do_sample=False)
    hook.remove()
    assert found.equal(expected)
    assert len(sizes) == 1
    assert int(cache.layers[0].kv.rows_held.max()) <= sum(-(-w // r) for w, r in PATTERN.branches)

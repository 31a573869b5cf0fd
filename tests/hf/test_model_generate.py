"""``generate`` of LongNetForCausalLM: against this library's own generation, no cache, and single samples."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from dilated_attention_pytorch import LongNetDecoder
from dilated_attention_pytorch.integrations.transformers import (
    DilatedCache,
    DilatedCacheLayer,
    LongNetForCausalLM,
    LongNetPreTrainedConfig,
    modeling,
)
from hf_longnet import KINDS, VOCABULARY, config, decoder, in_transformers, ragged

LENGTHS = [50, 9, 1]
NEW = 20  # the first sample goes beyond the end of a segment of 64 tokens


@pytest.fixture(scope="module")
def pair():
    plain = decoder()
    return plain, in_transformers(plain, LongNetForCausalLM)


def greedy(model, ids, **options):
    return model.generate(ids, **{"do_sample": False, "max_new_tokens": NEW, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_this_library(kind):
    plain = decoder(kind)
    model = in_transformers(plain, LongNetForCausalLM)
    samples, batch, mask = ragged(LENGTHS)
    expected = plain.generate(samples, max_new_tokens=NEW).tokens
    found = greedy(model, batch, attention_mask=mask, return_dict_in_generate=True)
    assert found.sequences[:, batch.shape[1] :].equal(expected)
    assert all(isinstance(layer, DilatedCacheLayer) for layer in found.past_key_values.layers)
    if kind == "tied":
        for sample, own in zip(samples, expected, strict=True):
            assert greedy(model, sample[None])[0, len(sample) :].equal(own)
    assert greedy(model, batch, attention_mask=mask, use_cache=False)[:, batch.shape[1] :].equal(expected)


def test_controls(pair):
    """Another pattern, and a missing mask, give other tokens: the comparisons can fail."""
    plain, model = pair
    _, batch, mask = ragged(LENGTHS)
    expected = greedy(model, batch, attention_mask=mask)
    assert all(len({*own.tolist()}) >= 5 for own in expected[:, -NEW:])
    assert not greedy(model, batch, attention_mask=torch.ones_like(mask)).equal(expected)
    other = LongNetDecoder(config(offsets=(1, 0))).eval()
    other.load_state_dict(plain.state_dict())
    assert not greedy(in_transformers(other, LongNetForCausalLM), batch, attention_mask=mask).equal(expected)


@pytest.mark.parametrize("chunk", [7, 8])
def test_prompts_in_chunks(pair, chunk):
    _, model = pair
    _, batch, mask = ragged([70, 50, 3])
    expected = greedy(model, batch, attention_mask=mask)
    assert greedy(model, batch, attention_mask=mask, prefill_chunk_size=chunk).equal(expected)


def test_prompts_have_a_bound_by_default(pair, monkeypatch):
    _, model = pair
    assert modeling.CHUNK == 65536
    _, batch, mask = ragged([70, 50, 3])
    first = greedy(model, batch, attention_mask=mask, return_dict_in_generate=True)
    monkeypatch.setattr(modeling, "CHUNK", 16)
    rows = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert greedy(model, batch, attention_mask=mask).equal(first.sequences)
    assert rows[:6] == [16, 16, 16, 16, 6, 1]
    # The same for tokens behind a cache, as all tokens and by themselves.
    more = torch.cat([first.sequences, batch], 1)
    longer = torch.cat([mask, mask.new_ones(3, 90)], 1)
    whole = greedy(model, more, attention_mask=longer, use_cache=False)
    for tokens in (more, more[:, 89:]):
        cache = copy.deepcopy(first.past_key_values)
        rows.clear()
        found = greedy(model, tokens, attention_mask=longer, past_key_values=cache)
        assert found[:, -NEW:].equal(whole[:, -NEW:])
        assert rows[:6] == [16, 16, 16, 16, 7, 1]
    hook.remove()


def test_beams_against_no_cache(pair):
    _, model = pair
    _, batch, mask = ragged(LENGTHS)
    options = {"attention_mask": mask, "max_new_tokens": 12, "num_beams": 3, "num_return_sequences": 2}
    cached = greedy(model, batch, **options)
    assert cached.equal(greedy(model, batch, use_cache=False, **options))
    assert not cached[::2].equal(greedy(model, batch, attention_mask=mask, max_new_tokens=12))


def test_sampling_against_no_cache(pair):
    _, model = pair
    _, batch, mask = ragged(LENGTHS)
    found, options = [], {"attention_mask": mask, "max_new_tokens": 20}
    for option in ({}, {"use_cache": False}, {"prefill_chunk_size": 5}):
        torch.manual_seed(7)
        found.append(greedy(model, batch, do_sample=True, top_k=20, temperature=1.3, **options, **option))
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])
    assert not found[0].equal(greedy(model, batch, **options))


def test_continuing_from_a_returned_cache(pair):
    _, model = pair
    _, batch, mask = ragged(LENGTHS)
    whole = greedy(model, batch, attention_mask=mask)
    first = greedy(model, batch, attention_mask=mask, max_new_tokens=9, return_dict_in_generate=True)
    longer = torch.cat([mask, mask.new_ones(3, 9)], 1)
    second = greedy(
        model, first.sequences, attention_mask=longer, past_key_values=first.past_key_values, max_new_tokens=NEW - 9
    )  # fmt: skip
    assert second.equal(whole)


@pytest.mark.parametrize("cache", [lambda c: DilatedCache(c), lambda c: DynamicCache(config=c), lambda c: None])
def test_assisted_decoding(pair, cache):
    _, model = pair
    _, batch, _ = ragged([23])
    # The prompt repeats itself, so that candidates from it are taken.
    prompt = batch.repeat(1, 3)
    expected = greedy(model, prompt)
    assert greedy(model, prompt, prompt_lookup_num_tokens=4, past_key_values=cache(model.config)).equal(expected)
    assistant = in_transformers(decoder(num_layers=1, seed=4), LongNetForCausalLM)
    assert greedy(model, prompt, assistant_model=assistant, past_key_values=cache(model.config)).equal(expected)


def test_embeddings_as_prompts(pair):
    plain, model = pair
    samples, batch, mask = ragged(LENGTHS)
    embeddings = model.embed_tokens(batch)
    expected = plain.generate(samples, max_new_tokens=NEW).tokens
    assert greedy(model, None, inputs_embeds=embeddings, attention_mask=mask).equal(expected)


def test_an_end_of_a_sequence(pair):
    plain, model = pair
    samples, batch, mask = ragged(LENGTHS)
    tokens = plain.generate(samples, max_new_tokens=NEW).tokens
    end = int(tokens[0, 5])
    expected = plain.generate(samples, max_new_tokens=NEW, eos=end)
    found = greedy(model, batch, attention_mask=mask, eos_token_id=end, pad_token_id=end)[:, batch.shape[1] :]
    assert found.equal(expected.tokens)


def test_generation_options_are_saved_with_the_model(tmp_path, pair):
    plain, _ = pair
    made = LongNetPreTrainedConfig.of(plain.config, eos_token_id=5, pad_token_id=0)
    model = LongNetForCausalLM(made)
    assert model.generation_config.eos_token_id == 5
    model.save_pretrained(tmp_path)
    assert LongNetForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id == 5
    assert LongNetDecoder.from_pretrained(tmp_path).config == plain.config


@torch.no_grad()
def test_memory_of_the_cache_does_not_grow(pair):
    _, model = pair
    cache = DilatedCache(model.config)
    for _ in range(3):
        model(torch.randint(0, VOCABULARY, (2, 500)), past_key_values=cache)
        sizes = [layer.kv.nbytes for layer in cache.layers]
        assert sizes == sizes[:1] * 2
    bound = 2 * (8 + 8 + 16) * 2 * 2 * 8 * 4  # keys and values, rows, samples, key heads, head size, bytes
    assert sizes[0] < 6 * bound  # max_rollback=32 needs 32 + 16 + 8 rows more

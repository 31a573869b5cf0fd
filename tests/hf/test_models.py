"""LongNet models for transformers: states, logits and losses against this library's own models, and single samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, DynamicCache, LlamaConfig, StaticCache

from dilated_attention_pytorch import LongNetDecoder
from dilated_attention_pytorch.integrations.transformers import (
    DilatedCache,
    LongNetForCausalLM,
    LongNetForMaskedLM,
    LongNetModel,
    LongNetPreTrainedConfig,
    apply,
)
from hf_longnet import KINDS, VOCABULARY, config, decoder, encoder, in_transformers, ragged

LENGTHS = [41, 17, 33, 1]


def double(kind="tied", **changes):
    plain = decoder(kind, **changes).double()
    return plain, in_transformers(plain, LongNetForCausalLM)


def tokens(*shape, seed=3):
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_sample_is_as_if_by_itself(kind, left):
    plain, model = double(kind)
    samples, batch, mask = ragged(LENGTHS, left=left)
    for given in (mask, mask.bool(), mask.float()):
        logits = model(batch, attention_mask=given).logits
        for own, valid, sample in zip(logits, mask.bool(), samples, strict=True):
            torch.testing.assert_close(own[valid], plain(sample[None])[0], rtol=0, atol=1e-12)
            assert not own[~valid].any()
    if left:  # a control. Causal tokens do not see padding behind them, so that the mask has no effect there.
        assert not torch.allclose(model(batch).logits[1][mask[1].bool()], plain(samples[1][None])[0], atol=1e-3)


@pytest.mark.parametrize("left", [True, False])
def test_padding_of_an_encoder(left):
    plain = encoder().double()
    samples, batch, mask = ragged(LENGTHS, left=left)
    states = in_transformers(plain, LongNetModel)(batch, attention_mask=mask).last_hidden_state
    logits = in_transformers(plain, LongNetForMaskedLM)(batch, attention_mask=mask).logits
    for i, (valid, sample) in enumerate(zip(mask.bool(), samples, strict=True)):
        alone = plain(sample[None])[0]
        torch.testing.assert_close(states[i][valid], alone, rtol=0, atol=1e-12)
        torch.testing.assert_close(logits[i][valid], alone @ plain.embed_tokens.weight.T, rtol=0, atol=1e-12)


def packed(samples, form):
    """Documents of one row, or of two rows with the same number of tokens each."""
    ids = torch.cat(samples)[None]
    if form == "cu_seq_lens":
        bounds = torch.tensor([0, *torch.tensor([len(x) for x in samples]).cumsum(0)], dtype=torch.int32)
        return ids, {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 41, "max_length_k": 41}
    positions = torch.cat([torch.arange(len(x)) for x in samples])[None]
    if form == "position_ids":
        return ids, {"position_ids": positions}
    return ids.view(2, -1), {"position_ids": positions.view(2, -1)}


@pytest.mark.parametrize("form", ["position_ids", "cu_seq_lens", "two rows"])
def test_packed_documents(form):
    plain, model = double()
    lengths = [10, 20, 5, 25] if form == "two rows" else LENGTHS
    samples, _, _ = ragged(lengths)
    ids, options = packed(samples, form)
    logits = model(ids, **options, output_hidden_states=True)
    assert logits.hidden_states[1].shape == (*ids.shape, 32)
    for own, sample in zip(logits.logits.flatten(0, 1).split(lengths), samples, strict=True):
        torch.testing.assert_close(own, plain(sample[None])[0], rtol=0, atol=1e-12)
    if form == "position_ids":
        batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": x.tolist()} for x in samples])
        found = model(**{name: x for name, x in batch.items() if name != "labels"})
        assert found.logits.equal(logits.logits)


def test_gradients_of_packed_documents():
    """The test of flash-linear-attention: the gradients of a packed row are the sums of those of its documents."""
    _, model = double()
    samples, _, _ = ragged([20, 5, 33])
    ids, options = packed(samples, "cu_seq_lens")
    options = {name: x for name, x in options.items() if not name.startswith("max")}
    weights = torch.randn(1, ids.shape[1], VOCABULARY, dtype=torch.float64)
    parameters = list(model.parameters())
    found = torch.autograd.grad((model(ids, **options).logits * weights).sum(), parameters)
    single = [model(x[None]).logits for x in samples]
    exact = torch.autograd.grad((torch.cat(single, 1) * weights).sum(), parameters)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_packed_documents_with_padding():
    plain, model = double()
    first, second = ragged([12, 9])[0], ragged([15], seed=5)[0]
    ids = torch.stack([torch.cat(first), F.pad(second[0], (6, 0))])
    mask = torch.ones(2, 21)
    mask[1, :6] = 0
    positions = torch.stack([torch.cat([torch.arange(12), torch.arange(9)]), F.pad(torch.arange(15), (6, 0))])
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    expected = torch.cat([plain(x[None])[0] for x in (*first, *second)])
    torch.testing.assert_close(logits[mask.bool()], expected, rtol=0, atol=1e-12)
    assert not logits[1, :6].any()


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states(kind):
    plain = encoder(kind)
    model = in_transformers(plain, LongNetModel)
    ids = tokens(2, 30)
    last, every = plain(ids, return_all_layers=True)
    output = model(ids, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert all(a.equal(b) for a, b in zip(output.hidden_states, [*every[:-1], last], strict=True))
    assert model(ids).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == 3
    as_tuple = model(ids, return_dict=False)
    assert as_tuple[0].equal(last)


def test_embeddings_and_kept_logits():
    plain, model = double()
    ids = tokens(2, 30)
    logits = plain(ids)
    assert model(inputs_embeds=model.embed_tokens(ids)).logits.equal(logits)
    torch.testing.assert_close(model(ids, logits_to_keep=1).logits, logits[:, -1:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([3, 7])).logits, logits[:, [3, 7]])
    with pytest.raises(ValueError, match="one of the two: got both"):
        model(ids, inputs_embeds=model.embed_tokens(ids))
    with pytest.raises(ValueError, match="one of the two: got neither"):
        model()


def test_the_loss_is_the_shifted_cross_entropy():
    plain, model = double()
    ids = tokens(3, 40)
    labels = ids.masked_fill(torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) < 0.3, -100)
    expected = F.cross_entropy(plain(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    output = model(ids, labels=labels)
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(output.logits, plain(ids))
    short = model(ids, labels=labels, skip_logits=True)
    assert short.loss.equal(output.loss)
    assert short.logits is None
    count = (labels[:, 1:] != -100).sum()
    for number in (7, torch.tensor(7)):
        torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=number).loss, expected * count / 7)
    with pytest.raises(ValueError, match="skip_logits=True returns the loss only, which needs labels"):
        model(ids, skip_logits=True)
    with pytest.raises(ValueError, match=r"one token id for each token, \(3, 40\), got \(3, 39\)"):
        model(ids, labels=labels[:, 1:])


@pytest.mark.parametrize("left", [True, False])
def test_padding_does_not_count_in_the_loss(left):
    plain, model = double()
    samples, batch, mask = ragged(LENGTHS, left=left)
    losses = [plain.loss(x[None, :-1], x[None, 1:], reduction="sum") for x in samples if len(x) > 1]
    total, count = torch.stack(losses).sum(), sum(len(x) - 1 for x in samples)
    labels = batch.masked_fill(mask == 0, -100)
    torch.testing.assert_close(model(batch, attention_mask=mask, labels=labels).loss, total / count)


def test_the_loss_of_masked_tokens():
    plain = encoder().double()
    model = in_transformers(plain, LongNetForMaskedLM)
    ids = tokens(2, 40)
    labels = torch.where(torch.arange(40) % 5 == 0, ids, -100)
    expected = F.cross_entropy((plain(ids) @ plain.embed_tokens.weight.T).flatten(0, 1), labels.flatten())
    output = model(ids, labels=labels)
    torch.testing.assert_close(output.loss, expected)
    assert model(ids, labels=labels, skip_logits=True).loss.equal(output.loss)


@pytest.mark.parametrize(("kind", "left"), [(kind, True) for kind in KINDS] + [("tied", False)])
def test_a_quarter_and_then_one_token_at_a_time(kind, left):
    """The test of flash-linear-attention: a padded batch with a cache against each sample by itself."""
    plain, model = double(kind)
    lengths = [68, 49, 65] if left else [68, 68, 68]
    samples, batch, mask = ragged(lengths, left=left)
    most, cache, found = 68, None, []
    with torch.no_grad():
        for start, stop in ((0, most // 4), *((i, i + 1) for i in range(most // 4, most))):
            output = model(
                batch[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True
            )  # fmt: skip
            cache = output.past_key_values
            found.append(output.logits)
    assert isinstance(cache, DilatedCache)
    assert cache.get_seq_length() == most
    logits = torch.cat(found, 1)
    for own, valid, sample in zip(logits, mask.bool(), samples, strict=True):
        torch.testing.assert_close(own[valid], plain(sample[None])[0], rtol=0, atol=1e-12)
    whole = model(batch, attention_mask=mask).logits
    torch.testing.assert_close(logits, whole, rtol=0, atol=1e-12)
    changed = batch.clone()
    changed[:, -3] = (changed[:, -3] + 1) % VOCABULARY  # a control: earlier tokens have an effect
    assert not torch.allclose(model(changed, attention_mask=mask).logits[:, -1], whole[:, -1], atol=1e-6)


@torch.no_grad()
def test_chunks_of_any_length_with_padding_inside_them():
    plain, model = double()
    samples, batch, mask = ragged([60, 13, 44, 2])
    cache, found, start = DynamicCache(config=model.config), [], 0
    for size in (7, 30, 1, 3, 19):
        options = {"attention_mask": mask[:, : start + size], "past_key_values": cache}
        found.append(model(batch[:, start : start + size], **options, output_hidden_states=True))
        start += size
    logits = torch.cat([x.logits for x in found], 1)
    for own, valid, sample in zip(logits, mask.bool(), samples, strict=True):
        torch.testing.assert_close(own[valid], plain(sample[None])[0], rtol=0, atol=1e-12)
        assert not own[~valid].any()
    states = torch.cat([x.hidden_states[1] for x in found], 1)
    whole = model(batch, attention_mask=mask, output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(states, whole, rtol=0, atol=1e-12)
    # Later tokens need no mask, because the cache knows the position of each sample.
    more = tokens(4, 5)
    step = model(more, past_key_values=cache).logits
    alone = plain(torch.cat([samples[1], more[1]])[None])[0, -5:]
    torch.testing.assert_close(step[1], alone, rtol=0, atol=1e-12)


def test_masks_and_caches_that_are_refused():
    _, model = double()
    ids, mask = tokens(2, 12), torch.ones(2, 12)
    mask[0, 5] = 0
    for option in ({}, {"use_cache": True}):
        with torch.no_grad(), pytest.raises(ValueError, match="sample 0 has 1 masked rows between rows 0 and 11"):
            model(ids, attention_mask=mask, **option)
    for shape in ((2, 11), (2, 1, 12, 12), (3, 12)):
        with pytest.raises(ValueError, match=r"attention_mask must be \(batch, tokens\)"):
            model(ids, attention_mask=torch.ones(shape))
    cache = DilatedCache(model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match=r"with those in the cache, \(2, 13\), got \(2, 1\)"):
            model(ids[:, :1], attention_mask=torch.ones(2, 1), past_key_values=cache)
        with pytest.raises(ValueError, match="one sequence per sample, got packed documents"):
            model(ids, position_ids=torch.tensor([[0, 1, 2, 3] * 3] * 2), past_key_values=DilatedCache(model.config))
    with pytest.raises(ValueError, match="a cache has no gradients"):
        model(ids, use_cache=True)
    for strange in (DynamicCache(), StaticCache(config=config_of_llama(), max_cache_len=20)):
        with pytest.raises(ValueError, match=r"has a DilatedCacheLayer for each of its 2 layers.*DilatedCache\(model"):
            model(ids, past_key_values=strange)
    body = in_transformers(encoder(), LongNetModel)
    with pytest.raises(ValueError, match="a cache is for causal attention, and this model is a LongNetEncoder"):
        body(ids, use_cache=True)
    dropping = LongNetForCausalLM(LongNetPreTrainedConfig.of(config(attention_dropout=0.1))).train()
    with torch.no_grad(), pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        dropping(ids, use_cache=True)


def config_of_llama():
    return LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY)


def test_arguments_that_are_refused():
    _, model = double()
    ids = tokens(1, 8)
    with pytest.raises(ValueError, match="output_attentions=True needs weights for all pairs"):
        model(ids, output_attentions=True)
    with pytest.raises(TypeError, match="LongNetForCausalLM does not take the arguments token_type_ids, head_mask"):
        model(ids, token_type_ids=ids, head_mask=ids, cache_position=None)
    with pytest.raises(ValueError, match="a number or a vector"):
        model(ids, logits_to_keep=torch.ones(1, 8, dtype=torch.bool))


def test_embeddings_can_be_resized(tmp_path):
    for kind in ("tied", "untied"):
        model = in_transformers(decoder(kind), LongNetForCausalLM)
        model.resize_token_embeddings(VOCABULARY + 7)
        assert model.config.vocab_size == VOCABULARY + 7
        ids = torch.tensor([[VOCABULARY + 6, 3, 4]])
        logits = model(ids).logits
        assert logits.shape[-1] == VOCABULARY + 7
        model.save_pretrained(tmp_path / kind)
        assert LongNetDecoder.from_pretrained(tmp_path / kind).eval()(ids).equal(logits)


def test_a_config_that_changes_under_a_model_is_refused():
    """The layers would keep their pattern, and the cache would have another one."""
    _, model = double()
    ids = tokens(1, 8)
    with pytest.raises(ValueError, match="the pattern of a LongNet is in segment_lengths"):
        apply(model, segment_lengths=[4], dilation_rates=[1])
    model(ids)
    model.config.segment_lengths = [8, 16, 32]
    with pytest.raises(ValueError, match="other values of segment_lengths than the config has now"):
        model(ids)


def test_values_that_are_passed_to_from_pretrained(tmp_path):
    plain, ids = decoder(), tokens(1, 40)
    plain.save_pretrained(tmp_path)
    changed = {"segment_lengths": [8, 40], "dilation_rates": [1, 1]}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **changed)
    other = LongNetDecoder(plain.config.replace(segment_lengths=(8, 40), dilation_rates=(1, 1))).eval()
    other.load_state_dict(plain.state_dict())
    assert model(ids).logits.equal(other(ids))
    assert not model(ids).logits.equal(plain(ids))

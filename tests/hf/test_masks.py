"""Padding, packed documents, sliding windows and static caches: each sample as if it were the only one."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    DataCollatorWithFlattening,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    StaticCache,
)
from transformers.utils import logging

import hf_models
from dilated_attention_pytorch.integrations.transformers import apply
from dilated_attention_pytorch.integrations.transformers.rows import ForwardRows, dilated_mask
from hf_models import (
    FULL,
    PACKED,
    VOCABULARY,
    assert_layers_close,
    dilated,
    documents,
    error,
    padded,
    positions_of,
    run,
    tokens,
)

LENGTHS = [41, 17, 1, 30]
MODELS = {name: hf_models.DECODERS[name] for name in ("llama", "qwen3", "gpt2")} | {"bert": hf_models.bert}


def neox():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return hf_models._ready(GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCABULARY, **sizes)))


def assert_samples(found, model, x, rows, tolerance=1e-11):
    """Every sample is what it is by itself, and padding is exactly 0."""
    for b, r in enumerate(rows):
        assert_layers_close([y[b : b + 1, r] for y in found], run(model, x[b : b + 1, r]), tolerance)
        for y in found:
            rest = y[b].clone()
            rest[r] = 0
            assert not rest.any()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name, side):
    model = dilated(MODELS[name]())
    x, mask, rows = padded(side, LENGTHS)
    # BERT numbers all rows from 0, and GPT-2 without position_ids too.
    more = {"position_ids": positions_of(mask)}
    found = run(model, x, attention_mask=mask, **more)
    assert_samples(found, model, x, rows)
    unmasked = run(model, x, **more) if name == "bert" else run(model, x)
    assert (side == "right" and name != "bert") or error(found, unmasked) > 0.1


def test_left_padding_without_position_ids():
    """Rotary positions are relative, and the pattern counts from the first valid row."""
    model = dilated(hf_models.llama())
    x, mask, rows = padded("left", LENGTHS)
    assert_samples(run(model, x, attention_mask=mask), model, x, rows, 1e-5)  # rotary angles are float32


def test_padding_on_both_sides():
    model = dilated(hf_models.llama())
    x, mask = tokens(2, 40), torch.zeros(2, 40, dtype=torch.int64)
    mask[0, 5:31] = 1
    mask[1, 9:] = 1
    found = run(model, x, attention_mask=mask, position_ids=positions_of(mask))
    assert_samples(found, model, x, [slice(5, 31), slice(9, 40)])


def test_an_empty_sample_is_zero():
    model = dilated(hf_models.llama())
    x, mask, rows = padded("left", [12, 0])
    assert_samples(run(model, x, attention_mask=mask, position_ids=positions_of(mask)), model, x[:1], rows[:1])
    assert all(not y[1].any() for y in run(model, x, attention_mask=mask))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_mask_of_ones_is_no_mask(side):
    model, x = dilated(hf_models.llama()), tokens(2, 41)
    assert_layers_close(run(model, x, attention_mask=torch.ones(2, 41)), run(model, x), 0.0)


def slices(lengths):
    stops = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(stop - n, stop) for stop, n in zip(stops, lengths, strict=True)]


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("make", [hf_models.llama, hf_models.qwen3, hf_models.gpt2, neox])
def test_packed_position_ids(make, use_cache):
    """Each document as if it were alone, also with a cache, where stock implementations do not look for documents."""
    model, x = dilated(make()), tokens(1, sum(PACKED))
    found = run(model, x, position_ids=documents(PACKED), use_cache=use_cache)
    for r in slices(PACKED):
        assert_layers_close([y[:, r] for y in found], run(model, x[:, r]), 1e-11)
    assert error(found, run(model, x)) > 0.1


def test_packed_rows_of_a_batch():
    model, lengths = dilated(hf_models.llama()), ([9, 1, 20, 11], [41], [40, 1])
    x, positions = tokens(3, 41), torch.cat([documents(n) for n in lengths])
    for more in ({}, {"use_cache": False}, {"attention_mask": torch.ones(3, 41)}):
        found = run(model, x, position_ids=positions, **more)
        for b, row in enumerate(lengths):
            for r in slices(row):
                assert_layers_close([y[b : b + 1, r] for y in found], run(model, x[b : b + 1, r]), 1e-11)


def test_packed_rows_with_padding():
    model, x = dilated(hf_models.llama()), tokens(2, 30)
    mask = torch.ones(2, 30, dtype=torch.int64)
    mask[0, 25:] = 0
    mask[1, :4] = 0
    positions = torch.stack(
        (
            torch.cat((torch.arange(15), torch.arange(10), torch.zeros(5, dtype=torch.int64))),
            torch.cat((torch.ones(4, dtype=torch.int64), torch.arange(26))),
        )
    )
    found = run(model, x, attention_mask=mask, position_ids=positions)
    for b, r in ((0, slice(0, 15)), (0, slice(15, 25)), (1, slice(4, 30))):
        assert_layers_close([y[b : b + 1, r] for y in found], run(model, x[b : b + 1, r]), 1e-11)
    assert all(not y[0, 25:].any() and not y[1, :4].any() for y in found)


def test_cu_seq_lens():
    model, x = dilated(hf_models.llama()), tokens(1, sum(PACKED))
    bounds = torch.tensor([0, *torch.tensor(PACKED).cumsum(0).tolist()], dtype=torch.int32)
    longest = {"max_length_q": max(PACKED), "max_length_k": max(PACKED)}
    positions = documents(PACKED)
    expected = run(model, x, position_ids=positions)
    found = run(model, x, position_ids=positions, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds.clone(), **longest)
    assert_layers_close(found, expected, 0.0)
    other = torch.tensor([0, 20, sum(PACKED)], dtype=torch.int32)  # the bounds decide, not the positions
    assert error(run(model, x, position_ids=positions, cu_seq_lens_q=other, cu_seq_lens_k=other), expected) > 0.1
    with pytest.raises(ValueError, match=r"same documents for queries and keys: got cu_seq_lens_q \[0, 9, 10, 30, 41\]"):
        model(x, cu_seq_lens_q=bounds, cu_seq_lens_k=other)
    mask = torch.ones(1, 41, dtype=torch.int64)
    mask[0, -1] = 0
    with pytest.raises(ValueError, match="exclude one another; leave out the mask"):
        model(x, attention_mask=mask, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)


@pytest.mark.parametrize("flash_kwargs", [False, True])
def test_the_flattening_collator(flash_kwargs):
    model, lengths = dilated(hf_models.llama()), [9, 1, 20, 11]
    samples = [tokens(1, n, seed=n)[0] for n in lengths]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=flash_kwargs)
    batch = dict(collator([{"input_ids": x.tolist()} for x in samples]))
    assert ("cu_seq_lens_q" in batch) == flash_kwargs
    found = run(model, **batch)
    for x, r in zip(samples, slices(lengths), strict=True):
        assert_layers_close([y[:, r] for y in found], run(model, x.unsqueeze(0)), 1e-11)


def test_documents_do_not_continue_from_a_cache():
    model, cache = dilated(hf_models.llama()), DynamicCache(config=hf_models.llama().config)
    run(model, tokens(1, 9), past_key_values=cache)
    with pytest.raises(ValueError, match=r"go up by one in each sample.*got 6 rows behind 9, with a jump at row 3"):
        model(tokens(1, 6), past_key_values=cache, position_ids=documents([3, 3]))


def reads(model, x, **more):
    """How often a forward reads values of tensors on the host."""
    count = 0

    class Counter(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            nonlocal count
            names = ("tolist", "item", "__bool__", "__int__", "nonzero", "__index__", "equal", "cpu")
            count += getattr(func, "__name__", "") in names
            return func(*args, **(kwargs or {}))

    with Counter():
        run(model, x, **more)
    return count


@pytest.mark.parametrize("kind", ["none", "padding", "positions", "cu_seq_lens"])
def test_values_are_read_once_per_forward(kind):
    """The number of reads does not depend on the number of layers."""
    x, mask, _ = padded("left", LENGTHS)
    bounds = torch.tensor([0, 20, 41])
    more = {
        "none": {},
        "padding": {"attention_mask": mask},
        "positions": {"position_ids": torch.cat([documents([20, 21])] * 4)},
        "cu_seq_lens": {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds},
    }[kind]
    x = x[:1] if kind == "cu_seq_lens" else x
    few, many = (reads(dilated(hf_models.llama(num_hidden_layers=n)), x, **more) for n in (1, 5))
    assert many == few
    assert few == {"none": 1, "padding": 1, "positions": 3, "cu_seq_lens": 1}[kind]


def test_the_mask_function_returns_what_it_made():
    """Generation with a static cache passes masks through the function twice."""
    rows = dilated_mask(2, 3, 3)
    assert dilated_mask(2, 3, 3, attention_mask=rows) is rows
    assert rows.contiguous() is rows
    assert rows.shape == (2, 3)


# ---- layers with a sliding window


def gemma3(window=12):
    config = Gemma3TextConfig(
        **hf_models._sizes(num_hidden_layers=4), head_dim=8, sliding_window=window, query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    return hf_models._ready(Gemma3ForCausalLM(config))


def hybrid_qwen3(window=12):
    return hf_models.qwen3(
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=window,
        layer_types=["full_attention", "sliding_attention"] * 2,
    )


def sliding_mistral():
    return hf_models.mistral(sliding_window=12)


@pytest.mark.parametrize("make", [gemma3, hybrid_qwen3, sliding_mistral])
def test_sliding_layers_are_computed_by_sdpa(make):
    model = make()
    model.set_attn_implementation("sdpa")
    x, mask, rows = padded("left", [41, 30])
    more = {"attention_mask": mask, "position_ids": positions_of(mask)}
    dense = [y[b : b + 1, r] for y in run(model, x, **more) for b, r in enumerate(rows)]
    apply(model, *FULL)
    found = [y[b : b + 1, r] for y in run(model, x, **more) for b, r in enumerate(rows)]
    assert_layers_close(found, dense, 1e-11)
    sliding = make is sliding_mistral
    pattern = [y[b : b + 1, r] for y in run(dilated(model), x, **more) for b, r in enumerate(rows)]
    assert (error(pattern, dense) > 0.1) != sliding


@pytest.mark.parametrize("make", [gemma3, hybrid_qwen3])
def test_a_cache_of_hybrid_models(make):
    model, x = dilated(make()), tokens(2, 41)
    whole, cache = run(model, x, use_cache=False), DynamicCache(config=model.config)
    chunks = [run(model, y, past_key_values=cache) for y in (x[:, :20], x[:, 20:40], x[:, 40:])]
    joined = [torch.cat([c[i] for c in chunks], 1) for i in range(4)]
    assert_layers_close(joined, whole, 1e-6)  # rotary angles are float32


@pytest.mark.parametrize("make", [gemma3, hybrid_qwen3])
@pytest.mark.parametrize("window", [12, 4096])
def test_documents_in_hybrid_models(make, window):
    """Layers with a sliding window keep documents apart too, with and without a cache."""
    model, x = dilated(make(window)), tokens(1, sum(PACKED))
    bounds = torch.tensor([0, *torch.tensor(PACKED).cumsum(0).tolist()])
    for more in (
        {"position_ids": documents(PACKED), "use_cache": False},
        {"position_ids": documents(PACKED)},
        {"position_ids": documents(PACKED), "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds},
    ):
        found = run(model, x, **more)
        for r in slices(PACKED):
            assert_layers_close([y[:, r] for y in found], run(model, x[:, r]), 1e-11)


def modern_bert(window=8):
    config = ModernBertConfig(
        **hf_models._sizes(num_hidden_layers=3), global_attn_every_n_layers=3, local_attention=window,
        attention_dropout=0.0, embedding_dropout=0.0, mlp_dropout=0.0,
    )  # fmt: skip
    return hf_models._ready(ModernBertModel(config))


def test_bidirectional_sliding_layers():
    model, x = modern_bert(), tokens(2, 41)
    model.set_attn_implementation("sdpa")
    dense = run(model, x)
    assert_layers_close(run(apply(model, *FULL), x), dense, 1e-11)
    assert error(run(dilated(model), x), dense) > 0.01


@pytest.mark.parametrize("window", [8, 4096])
def test_documents_in_bidirectional_sliding_layers(window):
    model, x = dilated(modern_bert(window)), tokens(1, sum(PACKED))
    bounds = torch.tensor([0, *torch.tensor(PACKED).cumsum(0).tolist()])
    found = run(model, x, position_ids=documents(PACKED), cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    for r in slices(PACKED):
        assert_layers_close([y[:, r] for y in found], run(model, x[:, r]), 1e-11)


def test_sliding_layers_warn_once(monkeypatch):
    messages = []
    logger = logging.get_logger("dilated_attention_pytorch.integrations.transformers.rows")
    type(logger).warning_once.cache_clear()
    monkeypatch.setattr(logger, "warning", lambda message, *_: messages.append(message))
    model = dilated(hybrid_qwen3())
    for seed in range(3):
        run(model, tokens(1, 20, seed))
    assert len(messages) == 1
    assert "sdpa computes them, and other layers are dilated" in messages[0]
    run(dilated(sliding_mistral()), tokens(1, 20))
    assert "No layer of this model is dilated" in messages[1]


# ---- static caches


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("make", [hf_models.llama, hybrid_qwen3])
def test_a_static_cache_in_eager_mode(make, side):
    """Its keys have more rows than there are tokens."""
    model = dilated(make())
    x, mask, _ = padded("left", [30, 18])
    more = {} if side is None else {"attention_mask": mask}
    options = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True}
    dynamic = model.generate(x, **more, **options)
    static = model.generate(x, cache_implementation="static", **more, **options)
    assert static.equal(dynamic)
    other = apply(model, [4, 64], [1, 8]).generate(x, **more, **options)
    assert not other.equal(dynamic)
    # the same by hand, before norms
    cache = StaticCache(config=dilated(model).config, max_cache_len=64)
    chunks = [run(model, y, past_key_values=cache) for y in (x[:, :20], x[:, 20:21], x[:, 21:])]
    joined = [torch.cat([c[i] for c in chunks], 1) for i in range(len(chunks[0]))]
    assert_layers_close(joined, run(model, x, use_cache=False), 1e-5)


def test_rows_without_values_are_not_read():
    assert ForwardRows(2, 1, 40, 40, True).read(torch.zeros(2, 1)) == (None, None)

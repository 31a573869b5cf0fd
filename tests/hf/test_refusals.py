"""What dilated attention cannot honour is refused by name, and nothing is swallowed."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2Model,
    GptOssConfig,
    GptOssForCausalLM,
    MusicgenDecoderConfig,
    MusicgenForCausalLM,
    StaticCache,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)
from transformers.masking_utils import bidirectional_mask_function, create_causal_mask

import hf_models
from dilated_attention_pytorch.integrations.transformers import DilatedCache, apply
from dilated_attention_pytorch.integrations.transformers.attention import dilated_attention_forward
from dilated_attention_pytorch.integrations.transformers.rows import dilated_mask
from hf_models import VOCABULARY, dilated, run, tokens

WAY_OUT = r"set_attn_implementation\(.sdpa.\)"


def attend(q=None, k=None, v=None, mask=None, **kwargs):
    """The attention function by itself, in a layer of a Llama."""
    layer = dilated(hf_models.llama()).model.layers[0].self_attn
    q = torch.randn(1, 4, 9, 8) if q is None else q
    k, v = (torch.randn(1, 2, 9, 8) if x is None else x for x in (k, v))
    return dilated_attention_forward(layer, q, k, v, mask, **kwargs)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias", "cache", "head_mask", "block_indices", "anything"])
def test_arguments_are_refused_by_name(name):
    assert attend(**{name: None})[0].shape == (1, 9, 4, 8)
    for given in (50.0, torch.zeros(4), False):
        with pytest.raises(ValueError, match=rf"does not support the argument '{name}'.*{WAY_OUT}"):
            attend(**{name: given})


@pytest.mark.parametrize(
    "kwargs",
    [
        {
            "use_cache": True,
            "output_hidden_states": True,
            "output_router_logits": False,
            "num_items_in_batch": torch.tensor(9),
        },
        {
            "max_length_q": 9,
            "max_length_k": 9,
            "deterministic": False,
            "cache_position": torch.arange(9),
            "sliding_window": None,
        },
    ],
)
def test_arguments_that_say_nothing_about_attention(kwargs):
    torch.manual_seed(0)
    expected = attend()[0]
    torch.manual_seed(0)
    assert attend(**kwargs)[0].equal(expected)


def test_capped_scores_of_gemma2():
    config = Gemma2Config(**hf_models._sizes(), head_dim=8, attn_logit_softcapping=20.0, sliding_window=4096)
    with pytest.raises(ValueError, match="'softcap', capped scores"):
        dilated(Gemma2ForCausalLM(config).eval())(tokens(1, 9))


def test_sinks_of_gpt_oss():
    """Layers with a sliding window too: sdpa would ignore the sinks."""
    for kind in ("full_attention", "sliding_attention"):
        config = GptOssConfig(
            **hf_models._sizes(num_hidden_layers=1),
            head_dim=8,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=[kind],
        )
        with pytest.raises(ValueError, match="'s_aux', attention sinks"):
            dilated(GptOssForCausalLM(config).eval())(tokens(1, 9))


T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}


def test_position_bias_of_t5():
    with pytest.raises(ValueError, match="'position_bias', a bias of positions"):
        dilated(T5EncoderModel(T5Config(**T5)).eval())(tokens(1, 9))
    entry = {"segment_lengths": [8], "dilation_rates": [1]}
    config = T5Config(**T5, dilated_attention=entry, attn_implementation="dilated")
    model = T5ForConditionalGeneration(config).eval()
    with pytest.raises(ValueError, match="'position_bias'"):
        model(input_ids=tokens(1, 9), decoder_input_ids=tokens(1, 9))


def test_cross_attention():
    x, states = tokens(1, 9), torch.randn(1, 9, 32)  # as many queries as keys: sizes do not tell
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    bart = dilated(BartModel(BartConfig(**sizes, **heads)).eval())
    bert = dilated(BertModel(BertConfig(**hf_models._sizes(is_decoder=True, add_cross_attention=True))).eval())
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, add_cross_attention=True)
    gpt2 = dilated(GPT2Model(config).eval())
    # Its config does not say that it has cross-attention. Its layers say that they are of a decoder.
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_codebooks": 1}
    config = MusicgenDecoderConfig(**sizes, num_attention_heads=4, ffn_dim=48)
    musicgen = dilated(MusicgenForCausalLM(config).eval())
    for name, model, more in (
        ("BartAttention", bart, {"decoder_input_ids": x}),
        ("BertCrossAttention", bert, {"encoder_hidden_states": states}),
        ("GPT2Attention", gpt2, {"encoder_hidden_states": states}),
        ("MusicgenAttention", musicgen, {"encoder_hidden_states": states}),
    ):
        with pytest.raises(ValueError, match=f"self-attention, and {name} is cross-attention.*{WAY_OUT}"):
            model(x, **more)
    # Without another sequence the same models are computed.
    assert gpt2(x).last_hidden_state.isfinite().all()
    assert musicgen(x).logits.isfinite().all()
    assert bert(x).last_hidden_state.isfinite().all()
    assert bart.encoder(x).last_hidden_state.isfinite().all()


def test_masks_of_cross_attention_are_refused():
    with pytest.raises(ValueError, match="got 9 queries from row 0 on and 12 keys from row 0 on"):
        dilated_mask(1, 9, 12, mask_function=bidirectional_mask_function)
    with pytest.raises(ValueError, match="and 9 keys from row 3 on"):
        dilated_mask(1, 9, 9, 3, 3)


def test_masks_of_pairs():
    model, x = dilated(hf_models.llama()), tokens(1, 9)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=rf"two dimensions \(batch, rows\), got \(1, 1, 9, 9\).*{WAY_OUT}"):
        model(x, attention_mask=mask)
    with pytest.raises(ValueError, match="two dimensions"):
        attend(mask=torch.ones(1, 9))


@pytest.mark.parametrize("hole", [[3], [1, 2, 7]])
def test_masks_with_holes(hole):
    model, x = dilated(hf_models.llama()), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, -1] = 0
    run(model, x, attention_mask=mask)
    mask[1, hole] = 0
    message = f"sample 1 has {len(hole)} masked rows between rows 0 and 8; move the padding"
    with pytest.raises(ValueError, match=message):
        model(x, attention_mask=mask)


def test_a_mask_that_is_too_short():
    model = dilated(hf_models.llama())
    cache = model(tokens(2, 9)).past_key_values
    with pytest.raises(ValueError, match="10 in all: got 1; append ones"):
        model(tokens(2, 1), past_key_values=cache, attention_mask=torch.ones(2, 1))


def test_other_mask_functions():
    model, embeds = dilated(hf_models.llama()), torch.zeros(1, 9, 32)
    arguments = {"config": model.config, "inputs_embeds": embeds, "attention_mask": None, "past_key_values": None}
    for name in ("or_mask_function", "and_mask_function"):
        with pytest.raises(ValueError, match="another mask function"):
            create_causal_mask(**arguments, **{name: lambda b, h, q, k: q > k - 2})
    blocks = torch.tensor([[-1, -1, 0, 0, 0, -1, -1, -1, -1]])
    rows = create_causal_mask(**arguments, block_sequence_ids=blocks)
    with pytest.raises(ValueError, match="another mask function"):
        rows.read()


def test_another_head_size_of_values():
    with pytest.raises(ValueError, match="same head size of keys and values, got 8 and 4"):
        attend(v=torch.randn(1, 2, 9, 4))
    config = DeepseekV3Config(
        **hf_models._sizes(num_hidden_layers=1, num_key_value_heads=4), kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    )  # fmt: skip
    model = dilated(DeepseekV3ForCausalLM(config).eval())
    with pytest.raises(ValueError, match="same head size of keys and values, got 12 and 8"):
        model(tokens(1, 9))
    # Versions differ in what they cache: keys and values, or what they are computed from.
    with pytest.raises((ValueError, RuntimeError), match=r"same head size, got 12 and 8|the operation 'linear' on them"):
        model(tokens(1, 9), past_key_values=DilatedCache(model.config))


def test_a_window_without_its_mask():
    with pytest.raises(ValueError, match="LlamaAttention has sliding_window=16, but its mask has none"):
        attend(sliding_window=16)


def test_a_mask_of_the_other_kind():
    rows = dilated_mask(1, 9, 9, mask_function=bidirectional_mask_function)
    assert attend(mask=rows, is_causal=False)[0].shape == (1, 9, 4, 8)
    with pytest.raises(
        ValueError, match="mask of the layer LlamaAttention is bidirectional, but its is_causal says causal"
    ):
        attend(mask=rows)


def test_keys_that_the_mask_was_not_made_for():
    rows = dilated_mask(1, 9, 9)
    with pytest.raises(RuntimeError, match="mask is of 9 queries and 9 keys, got 9 queries and 12 keys"):
        attend(k=torch.randn(1, 2, 12, 8), v=torch.randn(1, 2, 12, 8), mask=rows)


def test_layers_without_a_config():
    with pytest.raises(ValueError, match="config of the attention layer, but Identity has none"):
        dilated_attention_forward(torch.nn.Identity(), *torch.randn(3, 1, 2, 9, 8).unbind(0), None)


def test_weights_of_sliding_layers():
    model = apply(hf_models.mistral(sliding_window=4), [8], [1])
    with pytest.raises(ValueError, match="layers with a sliding window are computed by sdpa, which has none"):
        model(tokens(1, 9), output_attentions=True)


def test_static_caches_in_compiled_models():
    model = dilated(hf_models.llama(num_hidden_layers=1))
    cache = StaticCache(config=model.config, max_cache_len=32)
    run(model, tokens(1, 9), past_key_values=cache)
    fast = torch.compile(model, fullgraph=True, backend="eager")
    try:
        with pytest.raises(Exception, match="right in eager mode only"):
            run(fast, tokens(1, 1), past_key_values=cache)
    finally:
        torch._dynamo.reset()
    run(model, tokens(1, 1), past_key_values=cache)

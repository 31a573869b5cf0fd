"""Tiny transformers models in float64, and what their attention layers compute, before a norm rounds it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTModel,
)

import oracle
from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.integrations.transformers import apply

# Two key heads, rates 1, 2 and 4: other offsets, a dropped branch or a doubled branch change the result.
SEGMENTS, RATES = [8, 16, 64], [1, 2, 4]
PATTERN = Dilated(SEGMENTS, RATES)
FULL = [4096], [1]
VOCABULARY = 64
PACKED = [9, 1, 20, 11]  # lengths of packed documents


def _sizes(**more):
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": None,
    }  # fmt: skip
    return sizes | more


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    """Float64, evaluation mode, weights large enough that attention is not uniform, no vector of zeros or ones."""
    model = model.double().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for x in model.parameters():
            noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            x.copy_(x + 0.3 * noise if x.dim() < 2 else 0.3 * noise)
    return model


def llama(**more) -> LlamaForCausalLM:
    return _ready(LlamaForCausalLM(LlamaConfig(**_sizes(**more))))


def qwen3(**more) -> Qwen3ForCausalLM:
    return _ready(Qwen3ForCausalLM(Qwen3Config(**_sizes(head_dim=8, **more))))


def mistral(**more) -> MistralForCausalLM:
    return _ready(MistralForCausalLM(MistralConfig(**_sizes(**{"sliding_window": None} | more))))


def gpt2(**more) -> GPT2LMHeadModel:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _ready(GPT2LMHeadModel(GPT2Config(**sizes | tokens | no_dropout | more)))


def bert(**more) -> BertModel:
    sizes = _sizes(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return _ready(BertModel(BertConfig(**sizes | more), add_pooling_layer=False))


def vit(**more) -> ViTModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return _ready(ViTModel(ViTConfig(**sizes, image_size=24, patch_size=4, **more), add_pooling_layer=False))


DECODERS = {"llama": llama, "qwen3": qwen3, "mistral": mistral, "gpt2": gpt2}
ENCODERS = {"bert": bert, "vit": vit}


def dilated(model: PreTrainedModel, **options) -> PreTrainedModel:
    """The model with the pattern of the tests."""
    return apply(model, SEGMENTS, RATES, **options)


def tokens(batch: int, n: int, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, n), generator=torch.Generator().manual_seed(seed))


def padded(side: str, lengths: list[int]) -> tuple[Tensor, Tensor, list[slice]]:
    """Tokens, the mask, and the rows of each sample."""
    n = max(lengths)
    x, mask = tokens(len(lengths), n), torch.zeros(len(lengths), n, dtype=torch.int64)
    rows = [slice(n - m, n) if side == "left" else slice(0, m) for m in lengths]
    for b, r in enumerate(rows):
        mask[b, r] = 1
    return x, mask, rows


def positions_of(mask: Tensor) -> Tensor:
    """Positions that count from the first row of each sample."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def documents(lengths: list[int]) -> Tensor:
    """Positions of packed documents, (1, N)."""
    return torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)


def projections(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The output projections of the attention layers. Their inputs are what attention computed."""
    names = ("self_attn.o_proj", "attn.c_proj", "attention.output.dense", "attention.o_proj", "attention.dense", "attn.Wo")
    found = [module for name, module in model.named_modules() if name.endswith(names)]
    assert found, "no output projection has a known name"
    return found


@contextlib.contextmanager
def attention_outputs(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """The results of all attention layers (B, N, H * D), in the order of the calls."""
    seen: list[Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for m in projections(model)]
    yield seen
    for hook in hooks:
        hook.remove()


def run(model: PreTrainedModel, inputs: Tensor | None = None, **more) -> list[Tensor]:
    """The results of all attention layers for these inputs."""
    arguments = {} if inputs is None else {model.main_input_name: inputs}
    with torch.no_grad(), attention_outputs(model) as seen:
        model(**arguments, **more)
    return seen


class Oracle:
    """An attention function of transformers with the dense formula of the definition: no library code, no padding."""

    def __init__(self, pattern, causal: bool) -> None:
        self.pattern, self.causal = pattern, causal

    def __call__(self, module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        assert dropout == 0.0
        out, _ = oracle.attention(q, k, v, self.pattern, is_causal=self.causal, scale=scaling)
        return out, None


def assert_layers_close(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    assert len(actual) == len(expected) > 0
    for layer, (a, e) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance, msg=lambda m, n=layer: f"layer {n}: {m}")


def error(actual: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - e).abs().max()) for a, e in zip(actual, expected, strict=True))

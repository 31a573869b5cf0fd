"""Small LongNet models."""

from __future__ import annotations

from typing import Any

import torch

import model_oracle
from dilated_attention_pytorch import LongNetConfig, LongNetDecoder

VOCABULARY = 11
SIZES: dict[str, Any] = {
    "embed_dim": 16,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_dim": 24,
    "segment_lengths": (4, 12),
    "dilation_rates": (1, 3),
}


def make_decoder(**changes: Any) -> LongNetDecoder:
    """A decoder in float64 with segments of 4 and 12 positions, and every parameter perturbed."""
    sizes = SIZES | {"vocab_size": VOCABULARY, "tie_embeddings": False}
    torch.manual_seed(5)
    model = LongNetDecoder(LongNetConfig(**sizes | changes), dtype=torch.float64)
    model_oracle.perturb(model)
    with torch.no_grad():  # so that the most probable token changes from step to step
        model.embed_tokens.weight.mul_(2)
        model.layer_norm.bias.zero_()
        for layer in model.layers:
            layer.self_attn.q_proj.weight.mul_(6)
            layer.self_attn.out_proj.weight.mul_(4)
    return model.eval()


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random token ids."""
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))

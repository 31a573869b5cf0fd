"""Small LongNet models in both worlds, with the same parameters."""

from __future__ import annotations

import torch
from torch import nn

from dilated_attention_pytorch import LongNetConfig, LongNetDecoder, LongNetEncoder

VOCABULARY = 50
SIZES = {
    "embed_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "vocab_size": VOCABULARY,
    "segment_lengths": (8, 16, 64), "dilation_rates": (1, 2, 4),
}  # fmt: skip
KINDS = {
    "tied": {},
    "untied": {"tie_embeddings": False},
    "xpos": {"positions": "xpos", "num_kv_heads": 4, "offsets": "blocked"},
    "swiglu": {"activation": "swiglu", "positions": "none", "sub_norm": False, "final_norm": False},
}


def config(kind: str = "tied", **changes) -> LongNetConfig:
    return LongNetConfig(**SIZES | KINDS[kind] | changes)


def perturb(model: nn.Module) -> nn.Module:
    """Change every vector of parameters: norms that do nothing, and biases of 0, hide mistakes."""
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() == 1:
                x.add_(0.3 * torch.randn_like(x))
    return model


def decoder(kind: str = "tied", seed: int = 2, **changes) -> LongNetDecoder:
    """A decoder whose tokens depend on attention. A new one repeats a token soon, whatever attention computes."""
    torch.manual_seed(seed)
    model = perturb(LongNetDecoder(config(kind, **changes))).eval()
    with torch.no_grad():
        for layer in model.layers:
            for name, factor in (("q_proj", 3.0), ("k_proj", 3.0), ("out_proj", 4.0)):
                getattr(layer.self_attn, name).weight.mul_(factor)
    return model


def encoder(kind: str = "tied", seed: int = 0, **changes) -> LongNetEncoder:
    torch.manual_seed(seed)
    return perturb(LongNetEncoder(config(kind, **changes))).eval()


def in_transformers(plain: nn.Module, cls: type, dtype: torch.dtype | None = None) -> nn.Module:
    """The model for transformers with the parameters of a plain one, by way of its state dict."""
    made = cls.config_class.of(plain.config, architecture=type(plain).__name__)
    model = cls(made)
    model.to(next(plain.parameters()).dtype if dtype is None else dtype)
    report = model.load_state_dict(plain.state_dict(), strict=False)
    tied = {"output_projection.weight"} if getattr(made, "tie_embeddings", False) else set()
    assert set(report.missing_keys) <= tied
    assert set(report.unexpected_keys) <= {"output_projection.weight"}
    return model.eval()


def ragged(lengths: list[int], seed: int = 1, left: bool = True) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Samples, their padded batch and its mask. Padding holds other ids."""
    generator = torch.Generator().manual_seed(seed)
    samples = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths]
    most = max(lengths)
    batch = torch.randint(0, VOCABULARY, (len(lengths), most), generator=generator)
    mask = torch.zeros(len(lengths), most, dtype=torch.int64)
    for row, own, sample in zip(batch, mask, samples, strict=True):
        at = slice(most - len(sample), most) if left else slice(0, len(sample))
        row[at], own[at] = sample, 1
    return samples, batch, mask

"""The fields of published LongNet models, and of two small decoders for training."""

from __future__ import annotations

from typing import Any

_RATES = (1, 2, 4, 8, 16)
# The authors' code has blocked offsets and lets zero keys into the softmax; their checkpoints need both.
_AUTHORS: dict[str, Any] = {"offsets": "blocked", "torchscale_padding": True, "positions": "none", "num_heads": 16}


def _gigapath(num_layers: int, embed_dim: int) -> dict[str, Any]:
    # prov-gigapath 09d8e87, gigapath/torchscale/model/LongNetConfig.py: layers, widths and 16 heads. Its slide encoder sets
    # dropout and drop path, and computes segments as int(2 ** linspace(10, log2((262144 / 256) ** 2), 5)).
    return _AUTHORS | {
        "embed_dim": embed_dim, "num_layers": num_layers, "ffn_dim": 4 * embed_dim, "dropout": 0.25, "drop_path": 0.1,
        "segment_lengths": (1024, 5792, 32768, 185363, 1048576), "dilation_rates": _RATES,
    }  # fmt: skip


def _longvit(*segment_lengths: int) -> dict[str, Any]:
    # LongViT (arXiv 2312.03558; torchscale examples/longvit): patches of 32 pixels, no norm behind the last layer.
    return _AUTHORS | {
        "embed_dim": 384, "num_layers": 12, "ffn_dim": 1536, "final_norm": False,
        "segment_lengths": segment_lengths, "dilation_rates": _RATES,
    }  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    # LongNet (arXiv 2307.02486), section 4.1: 12 layers, width 768, 12 heads, xPos, tokenizer cl100k_base.
    "longnet-base": {
        "embed_dim": 768, "num_layers": 12, "num_heads": 12, "ffn_dim": 3072, "vocab_size": 100277, "positions": "xpos",
        "segment_lengths": (2048, 4096, 8192, 16384, 32768), "dilation_rates": (1, 2, 4, 6, 12),
    },
    "gigapath-12x768": _gigapath(12, 768),
    "gigapath-24x1024": _gigapath(24, 1024),
    "gigapath-12x1536": _gigapath(12, 1536),
    # LongViT by the width and height of the image in pixels.
    "longvit-1024": _longvit(64, 128, 256, 512, 1024),
    "longvit-4096": _longvit(1024, 2048, 4096, 8192, 16384),
    "longvit-8192": _longvit(1024, 4096, 8192, 16384, 65536),
    "longvit-16384": _longvit(1024, 4096, 16384, 65536, 262144),
    "longvit-32768": _longvit(1024, 4096, 32768, 262144, 1048576),
    # Decoders of this library over bytes, with one more token that separates documents. "small" has 38 M parameters and
    # 2,048 keys per head and segment in every branch, up to 1,048,576 tokens of context.
    "tiny": {
        "embed_dim": 64, "num_layers": 2, "num_heads": 4, "ffn_dim": 256, "vocab_size": 257,
        "segment_lengths": (64, 256, 1024), "dilation_rates": (1, 4, 16),
    },
    "small": {
        "embed_dim": 512, "num_layers": 12, "num_heads": 8, "ffn_dim": 2048, "vocab_size": 257,
        "segment_lengths": (2048, 8192, 32768, 131072, 1048576), "dilation_rates": (1, 4, 16, 64, 512),
    },
}  # fmt: skip

"""Small LongNet models."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "embed_dim": 16,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_dim": 24,
    "segment_lengths": (4, 12),
    "dilation_rates": (1, 3),
}

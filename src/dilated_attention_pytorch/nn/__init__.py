"""Modules."""

from dilated_attention_pytorch.nn.dilated import DilatedAttention
from dilated_attention_pytorch.nn.multihead import MultiheadDilatedAttention

__all__ = ["DilatedAttention", "MultiheadDilatedAttention"]

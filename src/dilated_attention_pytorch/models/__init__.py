"""LongNet models: encoder and decoder, their configuration, and files."""

from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.decoder import LongNetDecoder
from dilated_attention_pytorch.models.encoder import LongNetEncoder

__all__ = ["LongNetConfig", "LongNetDecoder", "LongNetEncoder"]

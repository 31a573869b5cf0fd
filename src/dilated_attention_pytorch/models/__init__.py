"""LongNet models: encoder and decoder, encoders of slides and images, their configurations, and files."""

from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.decoder import LongNetDecoder
from dilated_attention_pytorch.models.encoder import LongNetEncoder
from dilated_attention_pytorch.models.image import ImageConfig, LongViT
from dilated_attention_pytorch.models.slide import SlideConfig, SlideEncoder

__all__ = ["ImageConfig", "LongNetConfig", "LongNetDecoder", "LongNetEncoder", "LongViT", "SlideConfig", "SlideEncoder"]

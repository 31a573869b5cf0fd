"""LongNet for Hugging Face transformers: ``attn_implementation="dilated"``, a cache of a fixed size, and LongNet models.

It needs the extra ``hf`` (``transformers>=5.17``). Importing it registers the attention implementation ``"dilated"``, and
LongNet models in the Auto classes.
"""

from dilated_attention_pytorch.integrations.transformers.attention import MOST_WEIGHTS
from dilated_attention_pytorch.integrations.transformers.auto import register_models
from dilated_attention_pytorch.integrations.transformers.cache import DilatedCache, DilatedCacheLayer
from dilated_attention_pytorch.integrations.transformers.config import LongNetPreTrainedConfig, SlidePreTrainedConfig
from dilated_attention_pytorch.integrations.transformers.convert import apply, register, remove
from dilated_attention_pytorch.integrations.transformers.modeling import (
    LongNetForCausalLM,
    LongNetForMaskedLM,
    LongNetModel,
)
from dilated_attention_pytorch.integrations.transformers.pattern import pattern_of
from dilated_attention_pytorch.integrations.transformers.slide import LongNetSlideModel

__all__ = [
    "MOST_WEIGHTS", "DilatedCache", "DilatedCacheLayer", "LongNetForCausalLM", "LongNetForMaskedLM", "LongNetModel",
    "LongNetPreTrainedConfig", "LongNetSlideModel", "SlidePreTrainedConfig", "apply", "pattern_of", "register",
    "register_models", "remove",
]  # fmt: skip

register()
register_models()

"""LongNet attention for Hugging Face transformers: ``attn_implementation="dilated"`` and a cache of a fixed size.

It needs the extra ``hf`` (``transformers>=5.17``). Importing it registers the attention implementation ``"dilated"``.
"""

from dilated_attention_pytorch.integrations.transformers.apply import apply, register, remove
from dilated_attention_pytorch.integrations.transformers.attention import MOST_WEIGHTS
from dilated_attention_pytorch.integrations.transformers.cache import DilatedCache, DilatedCacheLayer
from dilated_attention_pytorch.integrations.transformers.pattern import pattern_of

__all__ = ["MOST_WEIGHTS", "DilatedCache", "DilatedCacheLayer", "apply", "pattern_of", "register", "remove"]

register()

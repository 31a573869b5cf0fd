"""Dilated attention over very long sequences, exact on every device."""

import sys

if sys.argv[:1] == ["-m"] and __name__ in sys.orig_argv:  # ``python -m`` imports the package before ``__main__``
    from dilated_attention_command import end_on_interrupt

    end_on_interrupt()

from dilated_attention_pytorch.api import attention, attention_weights, dilated_attention
from dilated_attention_pytorch.cache import DilatedKVCache
from dilated_attention_pytorch.caches import clear_caches
from dilated_attention_pytorch.call import Sharding
from dilated_attention_pytorch.explain import Explanation, explain
from dilated_attention_pytorch.models import (
    ImageConfig,
    LongNetConfig,
    LongNetDecoder,
    LongNetEncoder,
    LongViT,
    SlideConfig,
    SlideEncoder,
)
from dilated_attention_pytorch.nn import (
    Attention,
    BlockSparseRingDilatedAttention,
    BlockSparseRingDistributedDilatedAttention,
    DilatedAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
)
from dilated_attention_pytorch.orders.kinds import Hilbert, Identity, Striped, ZigZag
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.blocks import BlockSparse, SparsePatternConfig
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.patterns.tiers import DistributedSparseConfig
from dilated_attention_pytorch.warm_up import warm_up

__all__ = [
    "Attention",
    "BlockSparse",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingDistributedDilatedAttention",
    "Dilated",
    "DilatedAttention",
    "DilatedKVCache",
    "DistributedSparseConfig",
    "Explanation",
    "Hilbert",
    "Identity",
    "ImageConfig",
    "LongNetConfig",
    "LongNetDecoder",
    "LongNetEncoder",
    "LongViT",
    "MultiheadDilatedAttention",
    "Order",
    "RingDilatedAttention",
    "Sharding",
    "SlideConfig",
    "SlideEncoder",
    "SparsePatternConfig",
    "Striped",
    "ZigZag",
    "attention",
    "attention_weights",
    "clear_caches",
    "dilated_attention",
    "explain",
    "warm_up",
]
__version__ = "0.1.0"

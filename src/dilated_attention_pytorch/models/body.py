"""What all LongNet models have in common: the embedding, the layers and the last norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention_pytorch.call import Sharding
from dilated_attention_pytorch.dtypes import DTYPES
from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.layers import LayerStack
from dilated_attention_pytorch.models.sequences import ModelRows, RowOptions, sequence_rows


class LongNetBody:
    """The modules of a LongNet and what they compute, for a class that is also a ``torch.nn.Module``.

    Parameters have the names of the authors' code: ``embed_tokens``, ``layers.{i}.self_attn.q_proj`` and so on, and
    ``layer_norm``. A subclass says where its sizes are.
    """

    embed_tokens: nn.Embedding | None
    layers: LayerStack
    layer_norm: nn.LayerNorm | None
    training: bool
    sharding: Sharding | None = None

    @property
    def sizes(self) -> LongNetConfig:
        """The sizes and options of this model."""
        raise NotImplementedError

    def add_modules(self, **factory: Any) -> None:
        """Make the embedding, the layers and the last norm. ``factory`` has the device and the dtype of parameters."""
        config = self.sizes
        vocabulary = config.vocab_size
        self.embed_tokens = None if vocabulary is None else nn.Embedding(vocabulary, config.embed_dim, **factory)
        self.layers = LayerStack(config, **factory)
        norm = nn.LayerNorm(config.embed_dim, config.layer_norm_eps, **factory) if config.final_norm else None
        self.layer_norm = norm

    def embed(self, x: Tensor) -> Tensor:
        """The embeddings (B, N, E) of token ids (B, N), or embeddings as they are."""
        width = self.sizes.embed_dim
        if x.dtype in DTYPES:
            if x.dim() != 3 or x.shape[-1] != width:
                raise ValueError(f"embeddings must be (batch, sequence, {width}), got {tuple(x.shape)}")
            return x
        if self.embed_tokens is None:
            raise TypeError(
                f"this model has no vocabulary, so it takes embeddings (batch, sequence, {width}): got {x.dtype}; set "
                "vocab_size in the config for token ids"
            )
        if x.dtype not in (torch.int64, torch.int32) or x.dim() != 2:
            raise ValueError(f"token ids must be (batch, sequence), int64 or int32, got {tuple(x.shape)} of {x.dtype}")
        embedded: Tensor = self.embed_tokens(x)
        return embedded

    def rows_of(self, x: Tensor, rows: RowOptions) -> ModelRows:
        """What the layers have to know about the rows of ``x``."""
        return sequence_rows(self.sizes, x, rows, self.sharding, self.training, attention_dtype(self.layers))

    def enter(self, embeddings: Tensor, rows: ModelRows) -> Tensor:
        """The states in front of the first layer."""
        return F.dropout(rows.zero_padding(embeddings), self.sizes.dropout, self.training)

    def leave(self, states: Tensor, rows: ModelRows) -> Tensor:
        """The result from the states behind the last layer."""
        return rows.zero_padding(states if self.layer_norm is None else self.layer_norm(states))


def attention_dtype(layers: nn.Module) -> torch.dtype:
    """The dtype in which layers compute queries: autocast's if it is enabled, else that of the parameters."""
    weight = next(layers.parameters())
    device = weight.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return weight.dtype

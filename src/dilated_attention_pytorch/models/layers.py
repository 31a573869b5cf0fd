"""The layer of LongNet: pre-norm with sub-LN, with the parameter names of the authors' code."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch.api import attention
from dilated_attention_pytorch.call import AttentionOptions
from dilated_attention_pytorch.lengths import Lengths
from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.sequences import ModelRows


class ChunkCache(Protocol):
    """What a layer needs of a cache: ``DilatedKVCache`` has it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, lengths: Lengths | None) -> Tensor:
        """Append a chunk, and return the attention of its tokens over all tokens so far."""
        ...


class LongNetAttention(nn.Module):
    """Dilated self-attention with projections, and a norm in front of the last one."""

    def __init__(self, config: LongNetConfig, **factory: Any) -> None:
        super().__init__()
        self.config, self.pattern = config, config.pattern
        width, key_width = config.embed_dim, config.key_heads * config.head_dim
        self.k_proj = nn.Linear(width, key_width, **factory)
        self.v_proj = nn.Linear(width, key_width, **factory)
        self.q_proj = nn.Linear(width, width, **factory)
        self.out_proj = nn.Linear(width, width, **factory)
        self.inner_attn_ln = nn.LayerNorm(width, config.layer_norm_eps, **factory) if config.sub_norm else None

    def forward(self, x: Tensor, rows: ModelRows, is_causal: bool, cache: ChunkCache | None = None) -> Tensor:
        """Attend (B, N, E) over itself, or over a cache that the chunk is appended to."""
        shape = (-1, self.config.head_dim)
        query, key, value = (project(x).unflatten(-1, shape) for project in (self.q_proj, self.k_proj, self.v_proj))
        if rows.rotation is not None:
            query, key = rows.rotation.query(query), rows.rotation.key(key)
        if cache is None:
            dropout_p = self.config.attention_dropout if self.training else 0.0
            options: AttentionOptions = {**rows.options, "is_causal": is_causal, "dropout_p": dropout_p}
            out = attention(query, key, value, self.pattern, **options)
        else:
            out = cache.attend(query, key, value, lengths=rows.options.get("lengths"))
        out = out.flatten(-2)
        if self.inner_attn_ln is not None:
            out = self.inner_attn_ln(out)
        result: Tensor = self.out_proj(out)
        return result


def _in_float32(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``activation(x.float()).to(x.dtype)``.

    PyTorch's operators for CUDA compute every element like that. They keep ``x`` for the backward and no float32 copy.
    Those for CPUs have approximations in half precision.
    """
    if x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return activation(x)
    return activation(x.float()).to(x.dtype)


class FeedForward(nn.Module):
    """Two projections with GELU between them, or three with SwiGLU, and a norm in front of the last one.

    Activations are computed in float32 and the result is converted back, as in the authors' code.
    """

    def __init__(self, config: LongNetConfig, **factory: Any) -> None:
        super().__init__()
        width, inner, bias = config.embed_dim, config.ffn_dim, config.activation == "gelu"
        self.activation_dropout = config.activation_dropout
        self.fc1 = nn.Linear(width, inner, bias, **factory)
        self.fc2 = nn.Linear(inner, width, bias, **factory)
        self.gate = None if bias else nn.Linear(width, inner, False, **factory)
        self.ffn_layernorm = nn.LayerNorm(inner, config.layer_norm_eps, **factory) if config.sub_norm else None

    def forward(self, x: Tensor) -> Tensor:
        """Each row (…, E) by itself."""
        inner = self.fc1(x)
        inner = _in_float32(F.gelu, inner) if self.gate is None else _in_float32(F.silu, inner) * self.gate(x)
        inner = F.dropout(inner, self.activation_dropout, self.training)
        if self.ffn_layernorm is not None:
            inner = self.ffn_layernorm(inner)
        result: Tensor = self.fc2(inner)
        return result


class LongNetLayer(nn.Module):
    """``x + attention(norm(x))``, then ``x + ffn(norm(x))``; ``final_layer_norm`` is the norm in front of the second."""

    def __init__(self, config: LongNetConfig, **factory: Any) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.self_attn = LongNetAttention(config, **factory)
        self.self_attn_layer_norm = nn.LayerNorm(config.embed_dim, config.layer_norm_eps, **factory)
        self.ffn = FeedForward(config, **factory)
        self.final_layer_norm = nn.LayerNorm(config.embed_dim, config.layer_norm_eps, **factory)

    def forward(
        self, x: Tensor, rows: ModelRows, is_causal: bool, paths: Tensor | None = None, cache: ChunkCache | None = None
    ) -> Tensor:
        """The next states (B, N, E). ``paths`` holds the factors of both residual paths."""
        x = self._add(x, self.self_attn(self.self_attn_layer_norm(x), rows, is_causal, cache), paths, 0)
        return self._add(x, self.ffn(self.final_layer_norm(x)), paths, 1)

    def _add(self, x: Tensor, change: Tensor, paths: Tensor | None, number: int) -> Tensor:
        change = F.dropout(change, self.dropout, self.training)
        return x + change if paths is None else x + change * paths[number].to(change.dtype)


class LayerStack(nn.ModuleList):
    """The layers of a model, with checkpointing of their activations.

    Attributes:
        gradient_checkpointing: whether the activations of layers are recomputed in the backward.
        checkpoint_every: the distance of the layers for which this is done; 1 for all layers.
        checkpoint_function: is called with a layer and its arguments.
    """

    def __init__(self, config: LongNetConfig, **factory: Any) -> None:
        super().__init__(LongNetLayer(config, **factory) for _ in range(config.num_layers))
        self.gradient_checkpointing = config.checkpoint_layers
        self.checkpoint_every = 1
        # The state of the generators is restored, so that dropout is the same again.
        self.checkpoint_function: Callable[..., Any] = partial(checkpoint, use_reentrant=False)

    def run(self, number: int, x: Tensor, rows: ModelRows, is_causal: bool, cache: ChunkCache | None = None) -> Tensor:
        """The states behind layer ``number``."""
        layer = self[number]
        arguments = x, rows, is_causal, None if rows.paths is None else rows.paths[number], cache
        recomputed = self.gradient_checkpointing and number % self.checkpoint_every == 0 and torch.is_grad_enabled()
        states: Tensor = self.checkpoint_function(layer, *arguments) if recomputed and cache is None else layer(*arguments)
        return states


def reset_parameters(model: nn.Module, config: LongNetConfig) -> None:
    """PyTorch's own initialisation, and MAGNETO's scale where there are sub-norms, as in the authors' code."""
    for name, module in model.named_modules():
        reset_module(name, module, config)


def reset_module(name: str, module: nn.Module, config: LongNetConfig) -> None:
    """Draw the parameters of one module of a model, by its name there."""
    if isinstance(module, nn.Linear | nn.LayerNorm):
        module.reset_parameters()
    if isinstance(module, nn.Embedding) or (isinstance(module, nn.Linear) and name == "output_projection"):
        nn.init.normal_(module.weight, std=config.embed_dim**-0.5)
    if config.sub_norm and isinstance(module, nn.Linear) and name.endswith(("fc1", "fc2", "out_proj", "v_proj")):
        for parameter in module.parameters():
            parameter.data.mul_(math.sqrt(math.log(2 * config.num_layers)))

"""What LongNet models for transformers have in common: the states of all tokens from what a forward gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache

from dilated_attention_pytorch.integrations.transformers.cache import DilatedCache, DilatedCacheLayer
from dilated_attention_pytorch.integrations.transformers.config import ENCODER, LongNetPreTrainedConfig
from dilated_attention_pytorch.integrations.transformers.pretrained import DilatedPreTrainedModel
from dilated_attention_pytorch.integrations.transformers.rows import ForwardRows
from dilated_attention_pytorch.lengths import Lengths
from dilated_attention_pytorch.models.body import LongNetBody, attention_dtype
from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.layers import LongNetLayer, reset_module
from dilated_attention_pytorch.models.positions import check_xpos, rotation
from dilated_attention_pytorch.models.sequences import ModelRows
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.values import Inputs

# Arguments of models that say how results are returned, or what the tensors say themselves.
_WITHOUT_EFFECT = ("max_length_q", "max_length_k", "output_router_logits")


class Context(NamedTuple):
    """The arguments of a forward besides its tokens."""

    attention_mask: Tensor | None
    position_ids: Tensor | None
    cu_seq_lens: tuple[Tensor, Tensor] | None
    cache: Cache | None
    output_hidden_states: bool


class States(NamedTuple):
    """What the layers compute."""

    last: Tensor  # (B, N, E), behind the last norm
    valid: Tensor | None  # (B, N): False for padding; None without padding
    every: tuple[Tensor, ...] | None  # in front of the first layer and behind each layer


class LayerChunk:
    """The cache of one layer for one forward, as ``LongNetAttention`` calls it."""

    def __init__(self, layer: Any, pattern: Dilated, rows: ForwardRows) -> None:
        self.layer, self.pattern, self.rows = layer, pattern, rows

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, lengths: Lengths | None) -> Tensor:
        """Append a chunk, and return the attention of its tokens over all tokens so far."""
        assert lengths is None  # the rows have them
        inputs = Inputs(*(x.transpose(1, 2) for x in (query, key, value)))
        out: Tensor = self.layer.attend(inputs, self.pattern, self.rows, None)
        return out


class LongNetPreTrainedModel(LongNetBody, DilatedPreTrainedModel):
    """What all LongNet models for transformers have in common."""

    config: LongNetPreTrainedConfig
    config_class = LongNetPreTrainedConfig
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    def __init__(self, config: LongNetPreTrainedConfig) -> None:
        super().__init__(config)
        self.add_modules()

    @property
    def sizes(self) -> LongNetConfig:
        """The sizes and options of this model."""
        return self.config.longnet

    def initialise(self, name: str, module: nn.Module) -> None:
        """Draw the parameters of a module by its name in this model."""
        reset_module(name, module, self.sizes)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens; None for a model without a vocabulary."""
        return self.embed_tokens  # type: ignore[return-value]

    def new_cache(self, past_key_values: Cache | None, use_cache: bool | None) -> Cache | None:
        """The cache of a forward: the given one, a new one if ``use_cache`` is True, or None."""
        if past_key_values is None and not use_cache:
            return None
        if not self.config.is_causal:
            raise ValueError(
                f"a cache is for causal attention, and this model is a {ENCODER}: got past_key_values or use_cache=True; "
                "leave them out"
            )
        if past_key_values is None:
            return DilatedCache(self.config)
        layers = past_key_values.layers if isinstance(past_key_values, Cache) else []
        if len(layers) != self.config.num_layers or not all(isinstance(x, DilatedCacheLayer) for x in layers):
            kinds = sorted({type(x).__name__ for x in layers})
            raise ValueError(
                f"the cache of a LongNet has a DilatedCacheLayer for each of its {self.config.num_layers} layers: got a "
                f"{type(past_key_values).__name__} with {len(layers)} layers of {kinds}; pass DilatedCache(model.config), "
                "or leave past_key_values out, and generate makes it"
            )
        return past_key_values

    def states_of(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, context: Context) -> States:
        """The states of all tokens. The mask is read once."""
        self.check_implementation()
        self._check_config()
        given = [x for x in (input_ids, inputs_embeds) if x is not None]
        if len(given) != 1:
            raise ValueError(f"pass input_ids or inputs_embeds, one of the two: got {'both' if given else 'neither'}")
        x = self.embed(given[0])
        cache = context.cache
        rows = _rows_of(x, context, self.config.is_causal)
        if cache is not None:
            return self._run(x, self._cached_rows(x, rows, context), rows, context)
        samples, documents = rows.read(context.position_ids, context.cu_seq_lens)
        if documents is None:
            call = self.rows_of(x, {} if samples is None else {"starts": samples.starts, "lengths": samples.lengths})
            return self._run(x, call, rows, context)
        flat = x.reshape(1, -1, x.shape[-1])
        call = self.rows_of(flat, {"cu_seqlens": documents.cu_seqlens})
        if documents.valid is not None:
            call = replace(call, valid=documents.valid.reshape(1, -1, 1))
        found = self._run(flat, call, rows, context)
        every = None if found.every is None else tuple(one.view(x.shape) for one in found.every)
        return States(found.last.view(x.shape), documents.valid, every)

    def _check_config(self) -> None:
        """Raise if the config is not that with which the layers were made, except for the size of the vocabulary."""
        layer, sizes = self.layers[0], self.sizes
        assert isinstance(layer, LongNetLayer)
        made = layer.self_attn.config
        if sizes != made and sizes.replace(vocab_size=made.vocab_size) != made:
            names = [name for name, x in made.to_dict().items() if x != sizes.to_dict()[name]]
            raise ValueError(
                f"the layers were made with other values of {', '.join(names)} than the config has now; make a new model "
                "with the config, or pass the values to from_pretrained"
            )

    def _cached_rows(self, x: Tensor, rows: ForwardRows, context: Context) -> ModelRows:
        """The rows of a chunk: the positions of each sample go on from those that the cache has seen."""
        assert context.cache is not None
        config, dtype = self.sizes, attention_dtype(self.layers)
        if self.training and (config.attention_dropout or config.drop_path):
            raise ValueError("a cache has no dropout of attention and no drop-path; call model.eval() first")
        packed = rows.mask is None and rows.queries > 1 and rows.read(context.position_ids)[1] is not None
        if packed or context.cu_seq_lens is not None:
            raise ValueError(
                "a cache continues one sequence per sample, got packed documents; pass use_cache=False, or documents as "
                "samples with padding"
            )
        check_xpos(config, rows.total, dtype)
        first, chunk = context.cache.layers[0], rows.chunk(x.device)
        index = torch.arange(rows.queries, device=x.device)
        if chunk is not None and chunk.inverse is not None:
            index = chunk.inverse  # the number of a row among those of its sample
        kv = first.kv if isinstance(first, DilatedCacheLayer) else None
        positions = index.expand(rows.batch, -1) if kv is None else index + kv.tokens_seen.to(x.device).unsqueeze(1)
        valid = None if rows.mask is None else rows.mask[:, rows.past :].unsqueeze(-1)
        return ModelRows({}, rotation(config, positions, dtype), valid, None)

    def _run(self, x: Tensor, call: ModelRows, rows: ForwardRows, context: Context) -> States:
        pattern, caches = self.sizes.pattern, None if context.cache is None else context.cache.layers
        states = self.enter(x, call)
        every = [states] if context.output_hidden_states else []
        for number in range(len(self.layers)):
            chunk = None if caches is None else LayerChunk(caches[number], pattern, rows)
            states = self.layers.run(number, states, call, self.config.is_causal, chunk)
            if context.output_hidden_states:
                every.append(call.zero_padding(states))
        last = self.leave(states, call)
        found = (*every[:-1], last) if context.output_hidden_states else None
        return States(last, None if call.valid is None else call.valid.squeeze(-1), found)


def _rows_of(x: Tensor, context: Context, is_causal: bool) -> ForwardRows:
    """The rows of a forward, with its mask checked."""
    batch, n = x.shape[:2]
    total = n + (0 if context.cache is None else context.cache.get_seq_length())
    mask = context.attention_mask
    if mask is not None:
        if mask.shape != (batch, total):
            raise ValueError(
                f"attention_mask must be (batch, tokens) with those in the cache, {(batch, total)}, got "
                f"{tuple(mask.shape)}; pass the padding mask of the tokenizer, with ones appended for new tokens. A mask "
                "for pairs of tokens has no dilated form"
            )
        mask = mask.to(x.device, torch.bool)
    return ForwardRows(batch, n, total, total, is_causal, mask)


def document_bounds(query: Tensor | None, key: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The boundaries of documents in queries and in keys, if one of them is given."""
    first = key if query is None else query
    return None if first is None else (first, first if key is None else key)


def asks_for_states(model: LongNetPreTrainedModel, output_hidden_states: bool | None) -> bool:
    """Whether a forward returns the states of all layers."""
    return bool(model.config.output_hidden_states if output_hidden_states is None else output_hidden_states)


def kept_rows(states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The states whose logits are computed."""
    if isinstance(logits_to_keep, Tensor):
        if logits_to_keep.dim() != 1:
            raise ValueError(f"logits_to_keep must be a number or a vector of them, got {tuple(logits_to_keep.shape)}")
        return states[:, logits_to_keep]
    return states[:, -logits_to_keep:] if logits_to_keep else states


def check_kwargs(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse arguments that the model cannot honour."""
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True needs weights for all pairs of tokens, which dilated attention does not compute; call "
            "dilated_attention_pytorch.attention_weights(query, key, pattern, rows) for single rows"
        )
    given = [name for name, x in kwargs.items() if x is not None and x is not False and name not in _WITHOUT_EFFECT]
    if given:
        raise TypeError(f"{type(model).__name__} does not take the arguments {', '.join(given)}; leave them out")

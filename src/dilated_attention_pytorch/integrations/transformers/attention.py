"""The attention function of ``attn_implementation="dilated"``, and what it refuses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dilated_attention_pytorch.api import attention, attention_weights
from dilated_attention_pytorch.integrations.transformers.cache import ChunkKeys
from dilated_attention_pytorch.integrations.transformers.pattern import pattern_of
from dilated_attention_pytorch.integrations.transformers.reading import Documents, Samples
from dilated_attention_pytorch.integrations.transformers.rows import ForwardRows, LocalRows
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.values import Inputs

# The most weights of one layer that ``output_attentions=True`` returns: B * H * N * M numbers, 256 MiB in float32.
MOST_WEIGHTS = 2**26
# Arguments of models that reach attention, but say nothing about it.
_OF_MODELS = {
    "use_cache", "output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch", "logits_to_keep",
    "shift_labels", "cache_position", "max_length_q", "max_length_k", "deterministic",
}  # fmt: skip
_OF_ATTENTION = {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "output_attentions", "sliding_window"}
_REASONS = {
    "softcap": "capped scores",
    "s_aux": "attention sinks",
    "position_bias": "a bias of positions",
    "cache": "a paged cache (continuous batching)",
    "head_mask": "a mask of heads",
}
_WAY_OUT = 'call model.set_attn_implementation("sdpa") or "eager" for this model'


def dilated_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ForwardRows | LocalRows | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Dilated attention with the pattern of ``module.config``, as transformers calls attention functions.

    Args:
        module: the attention layer. Its ``config.dilated_attention`` holds the pattern.
        query: (B, H, N, D).
        key, value: (B, G, M, D), with the rows of the cache.
        attention_mask: what ``dilated_mask`` returned. Tensors are refused: they are masks of four dimensions.
        dropout: probability of dropping a weight; 0 in evaluation mode.
        scaling: of the scores; ``D ** -0.5`` by default.
        is_causal: ``module.is_causal`` by default.
        **kwargs: ``position_ids`` and ``cu_seq_lens_q`` of packed documents, and ``output_attentions``. Other
            arguments that are not None are refused by name.

    Returns:
        The result (B, N, H, D), exactly 0 in padding rows, and the weights (B, H, N, M) or None. The weights are those
        before dropout.
    """
    _check_arguments(kwargs)
    if isinstance(attention_mask, LocalRows):
        return _local_attention(module, Inputs(query, key, value), attention_mask, dropout, scaling, is_causal, kwargs)
    causal = _is_causal(module, is_causal)
    rows = _rows_of(query, key, attention_mask, causal)
    _check_self_attention(module, rows, causal, kwargs.get("sliding_window"))
    pattern, outputs_weights = pattern_of(_config_of(module)), bool(kwargs.get("output_attentions"))
    cu_seqlens = _cu_seqlens(kwargs)
    if isinstance(key, ChunkKeys):
        _check_cache_call(rows, kwargs.get("position_ids"), cu_seqlens, dropout, outputs_weights)
        return key.layer.attend(Inputs(query, key.rows, value), pattern, rows, scaling), None
    _check_keys(query, key, value, rows)
    inputs = Inputs(*(x.transpose(1, 2) for x in (query, key[:, :, : rows.total], value[:, :, : rows.total])))
    samples, documents = rows.read(kwargs.get("position_ids"), cu_seqlens)
    if documents is None:
        options: dict[str, Any] = {} if samples is None else samples._asdict()
        out = attention(
            *inputs, pattern, is_causal=causal, scale=scaling, dropout_p=float(dropout), group=rows.sharding, **options
        )
    else:
        flat = (x.reshape(1, -1, *x.shape[2:]) for x in inputs)
        out = attention(
            *Inputs(*flat), pattern, is_causal=causal, scale=scaling, dropout_p=float(dropout),
            cu_seqlens=documents.cu_seqlens, group=rows.sharding,
        ).view_as(inputs.query)  # fmt: skip
        if documents.valid is not None:
            out = out.masked_fill(~documents.valid[..., None, None].to(out.device), 0.0)
    if not outputs_weights:
        return out, None
    return out, _weights(inputs, pattern, samples, documents, causal, scaling)


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _config_of(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    if config is None:
        raise ValueError(
            f"dilated attention reads its pattern from the config of the attention layer, but {type(module).__name__} has "
            f"none; {_WAY_OUT}"
        )
    return config


def _check_arguments(kwargs: dict[str, Any]) -> None:
    """Raise for arguments that would change the result and that a pattern does not know."""
    for name, given in kwargs.items():
        if given is not None and name not in _OF_MODELS and name not in _OF_ATTENTION:
            reason = f", {_REASONS[name]}" if name in _REASONS else ""
            raise ValueError(f"dilated attention does not support the argument {name!r}{reason}; {_WAY_OUT}")


def _rows_of(query: Tensor, key: Tensor, mask: ForwardRows | Tensor | None, causal: bool) -> ForwardRows:
    """What the mask function returned, or rows without padding for a model that makes no mask."""
    if isinstance(mask, ForwardRows):
        return mask
    if mask is not None:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else mask
        raise ValueError(
            f"dilated attention takes an attention_mask of two dimensions (batch, rows), got {shape}; pass the padding "
            f"mask of the tokenizer. A mask for pairs of positions has no dilated form: {_WAY_OUT}"
        )
    m = key.shape[2] if not isinstance(key, ChunkKeys) else key.layer.get_seq_length() + key.shape[2]
    return ForwardRows(query.shape[0], query.shape[2], m, m, causal)


def _check_self_attention(module: nn.Module, rows: ForwardRows, causal: bool, sliding_window: int | None) -> None:
    """Raise for cross-attention, and where the mask does not fit the layer."""
    config, name = getattr(module, "config", None), type(module).__name__
    both = getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False)
    decodes = getattr(module, "is_decoder", both)  # self-attention of a decoder is causal
    crosses = getattr(module, "is_cross_attention", False) or "CrossAttention" in name
    if crosses or (not causal and (rows.past or decodes)):
        raise ValueError(
            f"dilated attention is self-attention, and {name} is cross-attention: its keys are of another sequence, so "
            f"positions do not meet in segments; {_WAY_OUT}"
        )
    if sliding_window is not None:
        raise ValueError(
            f"the layer {name} has sliding_window={sliding_window}, but its mask has none; {_WAY_OUT}, or set "
            "config.sliding_window to None"
        )
    if rows.is_causal != causal:
        words = ("bidirectional", "causal")
        raise ValueError(
            f"the mask of the layer {name} is {words[rows.is_causal]}, but its is_causal says {words[causal]}; pass "
            f"is_causal to the model, or {_WAY_OUT}"
        )


def _check_keys(query: Tensor, key: Tensor, value: Tensor, rows: ForwardRows) -> None:
    """Raise if the tensors are not those that the mask was made for."""
    if value.shape != key.shape:
        raise ValueError(
            f"dilated attention needs the same head size of keys and values, got {key.shape[-1]} and {value.shape[-1]} "
            f"(key {tuple(key.shape)}, value {tuple(value.shape)}); {_WAY_OUT}"
        )
    m = key.shape[2]
    if m == rows.total and query.shape[2] == rows.queries:
        return
    if query.shape[2] != rows.queries or m != rows.keys:
        raise RuntimeError(
            f"the mask is of {rows.queries} queries and {rows.keys} keys, got {query.shape[2]} queries and {m} keys: this "
            "is cross-attention, or the cache changed between the mask and the layer. If the cache is a DilatedCache, its "
            f"keys must reach attention as they are; {_WAY_OUT}"
        )
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"dilated attention plans with the number of rows, {rows.total} of the {m} of a static cache, which changes "
            "with every token: static caches are right in eager mode only. Pass disable_compile=True to "
            "generate, or use DilatedCache or DynamicCache"
        )


def _check_cache_call(
    rows: ForwardRows, position_ids: Tensor | None, cu_seqlens: tuple[Tensor, Tensor] | None, dropout: float, weights: bool
) -> None:
    """Raise for what a ``DilatedCache`` cannot do."""
    if weights:
        raise ValueError(
            "DilatedCache drops keys that no later position meets, so output_attentions=True has nothing to compute "
            "weights from; pass a DynamicCache, or use_cache=False"
        )
    if dropout:
        raise ValueError(f"DilatedCache has no dropout, got dropout={dropout}; call model.eval(), or pass use_cache=False")
    packed = not rows.stays_on_device and rows.read(position_ids)[1] is not None
    if packed or cu_seqlens is not None:
        raise ValueError(
            "DilatedCache continues one sequence per sample, got packed documents; pass use_cache=False, or documents as "
            "samples with padding"
        )


def _cu_seqlens(kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The boundaries of documents in queries and in keys; if one of them is given, it holds for both."""
    given = [x for x in (kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")) if x is not None]
    return (given[0], given[-1]) if given else None


def _local_attention(
    module: nn.Module, inputs: Inputs, rows: LocalRows, dropout: float, scaling: float | None, is_causal: bool | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:  # fmt: skip
    """sdpa for a layer with a sliding window or with chunks."""
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True needs weights of every layer, and layers with a sliding window are computed by sdpa, "
            'which has none; call model.set_attn_implementation("eager")'
        )
    mask, cu_seqlens = rows.mask, _cu_seqlens(kwargs)
    if cu_seqlens is not None or not torch.compiler.is_compiling():  # compiled models have documents in the mask
        _, documents = rows.rows.read(kwargs.get("position_ids"), cu_seqlens)
        if documents is not None:
            inside = _same_documents(inputs, documents, kwargs.get("sliding_window"))
            whole = inside.tril() if _is_causal(module, is_causal) else inside  # for a window longer than the sequence
            mask = whole if mask is None else inside & mask
    out, _ = sdpa_attention_forward(
        module, *inputs, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )  # fmt: skip
    return out, None


def _same_documents(inputs: Inputs, documents: Documents, window: int | None) -> Tensor:
    """Whether rows are of the same document, (B, 1, N, N). Stock masks have no documents if there is a cache."""
    (batch, _, n, _), m = inputs.query.shape, inputs.key.shape[2]
    if window is None or m != n:
        raise ValueError(
            f"layers with chunks, and layers with a cache, have no packed documents: got {n} queries, {m} keys and "
            f"sliding_window={window}; pass use_cache=False, or {_WAY_OUT}"
        )
    device = inputs.query.device
    bounds = torch.as_tensor(documents.cu_seqlens, device=device, dtype=torch.int64)
    number = torch.bucketize(torch.arange(batch * n, device=device), bounds[1:], right=True).view(batch, 1, n)
    return number.unsqueeze(-1) == number.unsqueeze(-2)


def _weights(
    inputs: Inputs, pattern: Dilated, samples: Samples | None, documents: Documents | None, causal: bool,
    scaling: float | None,
) -> Tensor:  # fmt: skip
    """The weights of all rows, (B, H, N, M)."""
    (batch, n, heads, _), m = inputs.query.shape, inputs.key.shape[1]
    if batch * heads * n * m > MOST_WEIGHTS:
        raise ValueError(
            f"output_attentions=True returns at most {MOST_WEIGHTS:,} weights of a layer, got {batch} x {heads} x {n} x "
            f"{m} = {batch * heads * n * m:,}; pass shorter sequences, or compute single "
            "rows by attention_weights(query, key, pattern, query_rows)"
        )
    if documents is None:
        options: dict[str, Any] = {} if samples is None else samples._asdict()
        return attention_weights(inputs.query, inputs.key, pattern, range(n), is_causal=causal, scale=scaling, **options)
    weights = inputs.query.new_zeros(batch, heads, n, n)
    bounds = torch.as_tensor(documents.cu_seqlens).tolist()
    for start, stop in pairwise(bounds):
        b, first = divmod(start, n)
        if start == stop or (documents.valid is not None and not bool(documents.valid[b, first])):
            continue
        rows = slice(first, first + stop - start)
        query, key = inputs.query[b : b + 1, rows], inputs.key[b : b + 1, rows]
        weights[b, :, rows, rows] = attention_weights(
            query, key, pattern, range(stop - start), is_causal=causal, scale=scaling
        )[0]
    return weights

"""Checks of a cache's arguments: every error gives the rule, the values and a way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.checks import check_index_vector, check_inputs, check_tensors
from dilated_attention_pytorch.dtypes import DTYPES, INDEX_DTYPES
from dilated_attention_pytorch.execute.step import CacheTensors
from dilated_attention_pytorch.integers import as_integer
from dilated_attention_pytorch.lengths import Lengths, few, index_tensor
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.held import HeldRows

TENSORS = ("keys", "values", "tokens_seen", "rolled_back")  # of a state dict, and the first ones of CacheTensors


def check_chunk(query: Tensor | None, key: Tensor, value: Tensor, keys: Tensor) -> None:
    """Raise if these are not the tensors of a chunk for a cache with these ``keys`` (B, G, rows, D)."""
    tensors = key if query is None else query, key, value
    check_tensors(*tensors)
    check_inputs(*tensors)
    (batch, heads, _, head_dim), n = keys.shape, key.shape[1]
    if key.shape != (batch, n, heads, head_dim):
        raise ValueError(
            f"key and value of this cache are ({batch}, n, {heads}, {head_dim}): batch size, tokens, key heads, head size; "
            f"got {tuple(key.shape)}"
        )
    if query is not None and query.shape[1] != n:
        raise ValueError(
            f"a chunk has a query for every key: got {query.shape[1]} queries and {n} keys; append(key, value) takes "
            "keys without queries"
        )
    if key.dtype != keys.dtype:
        raise TypeError(f"this cache holds {keys.dtype}, got {key.dtype}; use .to({keys.dtype})")
    if key.device != keys.device:
        raise ValueError(f"this cache is on {keys.device}, got tensors on {key.device}; use cache.to(device)")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError(
            "a cache has no gradients, got tensors that require them; call it under torch.no_grad(), or detach them"
        )


def sample_vector(name: str, x: Lengths, keys: Tensor, most: int | None = None) -> Tensor:
    """One integer per sample, from 0 to ``most``. The upper bound of values on a GPU is not checked."""
    vector = index_tensor(name, x)
    assert vector is not None
    check_index_vector(name, vector, len(keys), keys.device)
    if vector.device.type == "cpu":
        values = vector.tolist()
        if min(values) < 0 or (most is not None and max(values) > most):
            rule = "at least 0" if most is None else f"from 0 to {most}"
            raise ValueError(f"{name} must be integers {rule}, got {few(values)}")
    return vector


def sample_numbers(samples: int | Sequence[int] | Sequence[bool] | Tensor, keys: Tensor) -> Tensor:
    """Numbers of samples on the device of the cache, from an integer, integers or a mask."""
    batch = len(keys)
    rule = f"samples must be an integer from 0 to {batch - 1}, a list of them or a mask ({batch},), got {samples!r}"
    try:
        index = torch.as_tensor(samples)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(rule) from None
    if index.numel() == 0 and not isinstance(samples, Tensor):
        index = index.to(torch.int64)
    if index.dtype == torch.bool and index.shape == (batch,):
        return index.nonzero().squeeze(1).to(keys.device)
    if index.dtype not in INDEX_DTYPES:
        raise TypeError(rule)
    if index.dim() > 1 or (index.numel() and (int(index.min()) < 0 or int(index.max()) >= batch)):
        raise ValueError(rule)
    return index.reshape(-1).to(keys.device, torch.int64)


def keys_nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The bytes of a tensor."""
    total = dtype.itemsize
    for size in shape:
        total *= size
    return total


def cache_sizes(
    pattern: Any, batch_size: int, num_kv_heads: int, head_dim: int, *,
    dtype: torch.dtype | None, max_tokens: int | None, max_rollback: int,
) -> tuple[HeldRows, tuple[int, int, int, int], torch.dtype]:  # fmt: skip
    """The rows of a cache, the shape (B, G, rows, D) of its keys and their dtype; every argument is checked."""
    if isinstance(pattern, BlockSparse):
        raise TypeError(
            "DilatedKVCache holds the open segments of a Dilated pattern. A BlockSparse has no segments after which rows "
            "can be forgotten: keep all keys, and call attention(query, key, value, pattern, is_causal=True)"
        )
    if not isinstance(pattern, Dilated):
        raise TypeError(f"pattern must be a Dilated, got {type(pattern).__name__}; write Dilated([2048, 4096], [1, 2])")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPES))} or None, got {dtype!r}")
    batch, heads = as_integer("batch_size", batch_size, 1), as_integer("num_kv_heads", num_kv_heads, 1)
    most = None if max_tokens is None else as_integer("max_tokens", max_tokens, 1)
    held = HeldRows.of(pattern, heads, most, as_integer("max_rollback", max_rollback, 0))
    return held, (batch, heads, held.rows, as_integer("head_dim", head_dim, 1)), dtype


def checked_state(state: Mapping[str, Any], own: dict[str, Any], storage: CacheTensors) -> dict[str, Tensor]:
    """The tensors of a state; raise if it is not one of a cache like this."""
    expected = {*own, *TENSORS}
    if state.keys() != expected:
        raise ValueError(
            f"a state of a cache has the entries {', '.join(sorted(expected))}: missing "
            f"{sorted(expected - state.keys())}, unexpected {sorted(map(str, state.keys() - expected))}"
        )
    differing = [f"{name} is {state[name]!r}, here {value!r}" for name, value in own.items() if state[name] != value]
    if differing:
        raise ValueError(f"the state is of another cache: {'; '.join(differing)}; make a cache of the same kind")
    tensors = {name: state[name] for name in TENSORS}
    for (name, x), like in zip(tensors.items(), storage, strict=False):
        if not isinstance(x, Tensor) or x.shape != like.shape or x.dtype != like.dtype:
            got = f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else repr(x)
            raise ValueError(f"{name} of the state must be {tuple(like.shape)} of {like.dtype}, got {got}")
    seen, back = tensors["tokens_seen"].tolist(), tensors["rolled_back"].tolist()
    most, most_back = own["max_tokens"], own["max_rollback"]
    if min(seen) < 0 or (most is not None and max(seen) > most) or min(back) < 0 or max(back) > most_back:
        raise ValueError(
            f"tokens_seen must be at least 0 and at most max_tokens = {most}, rolled_back at most max_rollback = "
            f"{most_back}, got {few(seen)} and {few(back)}"
        )
    return tensors

"""Bad input: every message gives the rule, the values and the way out, before anything is computed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.dilated import Dilated

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)


def check_qkv(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise if these are not tensors of attention."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, sequence, heads, head size), got {x.dim()} dimensions: {tuple(x.shape)}"
            )
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}; use .to()"
        )
    if query.dtype not in DTYPES:
        raise TypeError(f"the dtype must be one of {', '.join(map(str, DTYPES))}, got {query.dtype}; convert with .to()")
    if not query.device == key.device == value.device:
        raise ValueError(f"query, key and value must be on one device, got {query.device}, {key.device} and {value.device}")
    if key.shape != value.shape:
        raise ValueError(f"key and value must have the same shape, got {tuple(key.shape)} and {tuple(value.shape)}")
    (batch, n, heads, head_dim), (key_batch, m, key_heads, key_head_dim) = query.shape, key.shape
    if batch != key_batch:
        raise ValueError(f"query and key must have the same batch size, got {batch} and {key_batch}")
    if head_dim != key_head_dim or head_dim == 0:
        raise ValueError(f"query and key must have the same head size, at least 1, got {head_dim} and {key_head_dim}")
    if key_heads == 0 or heads == 0 or heads % key_heads:
        raise ValueError(
            f"the query heads must be a multiple of the key heads (grouped-query attention), at least 1: got {heads} query "
            f"heads and {key_heads} key heads"
        )
    if n > m:
        raise ValueError(
            f"query rows are the last positions of the sequence, so there can be at most as many as keys: got {n} "
            f"queries and {m} keys"
        )


def check_pattern(pattern: Dilated) -> None:
    """Raise if this is no pattern; callers serve a ``BlockSparse`` before they ask."""
    if not isinstance(pattern, Dilated):
        raise TypeError(
            f"pattern must be a Dilated or a BlockSparse, got {type(pattern).__name__}; write Dilated([2048, 4096], "
            "[1, 2]), BlockSparse.from_config(SparsePatternConfig(...)) or DistributedSparseConfig(...).pattern(shards)"
        )


def check_no_forward_derivative(*tensors: Tensor) -> None:
    """Operators without a forward-mode formula would drop the tangent in silence."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):  # type: ignore[no-untyped-call]
        raise NotImplementedError("forward-mode derivatives need backend='reference' (short sequences)")


def _check_index_vector(name: str, x: Tensor | None, entries: int | None, device: torch.device) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of integers, got {type(x).__name__}; use torch.tensor({name})")
    if x.dtype not in INDEX_DTYPES or x.dim() != 1:
        hint = "; the lengths of a mask are mask.sum(-1)" if x.dtype == torch.bool else ""
        raise ValueError(f"{name} must be one-dimensional int32 or int64, got {x.dim()} dimensions of {x.dtype}{hint}")
    if entries is not None and x.shape[0] != entries:
        raise ValueError(f"{name} must have one entry per sample: got {x.shape[0]} entries for a batch of {entries}")
    if x.device != device and x.device.type != "cpu":
        raise ValueError(f"{name} must be on the device of query ({device}) or on the CPU, got {x.device}")


def check_is_order(order: Order) -> None:
    """Raise if this is no order."""
    if not isinstance(order, Order):
        raise TypeError(f"order must be an Order, got {type(order).__name__}; write Order.from_permutation(p) for your own")


def rows_in_order(order: Order | None, ordered: bool | None, sharded: bool) -> bool:
    """Whether rows already lie in the order; raise if that does not go with the other arguments."""
    if not isinstance(ordered, bool | None):
        raise TypeError(f"ordered must be True, False or None, got {ordered!r}; pass the order itself as order")
    if order is None:
        if ordered:
            raise ValueError("ordered=True says that rows already lie in an order: pass that order as order")
        return False
    if sharded and ordered is False:
        raise ValueError(
            "with group, tensors are a rank's slice of the ordered sequence, because no rank can move the rows of others: "
            "order once, by shard_sequence(x, group, order=order), and leave out ordered=False"
        )
    return sharded or bool(ordered)


def check_order(
    order: Order,
    query: Tensor,
    key: Tensor,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    sharded: bool = False,
) -> None:
    """Raise if this is no order of the positions of these tensors, or of a sequence of which they are a shard."""
    check_is_order(order)
    if lengths is not None or cu_seqlens is not None:
        raise ValueError(
            "an order is of a whole sequence, so lengths and cu_seqlens do not go with it; call once for each sequence, "
            "with its own order"
        )
    if not sharded and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"an order needs as many queries as keys, got {query.shape[1]} and {key.shape[1]}; decode without an order"
        )
    if not sharded and len(order) != key.shape[1]:
        raise ValueError(f"the order is over {len(order)} positions, got a sequence of {key.shape[1]}")
    batch = order.positions.shape[:-1]
    if batch and batch[0] != query.shape[0]:
        raise ValueError(f"the order is for {batch[0]} samples, got a batch of {query.shape[0]}")
    if order.device != query.device:
        raise ValueError(f"the order is on {order.device} and query on {query.device}; use order.to({str(query.device)!r})")


def check_options(scale: float | None, dropout_p: float, mixing_gradient: str) -> None:
    """Raise if an option that does not depend on tensors is not one ``attention`` takes."""
    if isinstance(scale, Tensor) or not isinstance(scale, float | int | None):
        raise TypeError(
            f"scale must be a number, got {type(scale).__name__}; multiply the query by a learned scale instead"
        )
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if not isinstance(dropout_p, float | int):
        raise TypeError(f"the dropout probability must be a number, got {dropout_p!r}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"the dropout probability p must satisfy 0 <= p < 1, got {dropout_p}")
    if mixing_gradient not in ("exact", "detached"):
        raise ValueError(f"mixing_gradient must be 'exact' or 'detached', got {mixing_gradient!r}")


def check_call(
    query: Tensor,
    key: Tensor,
    is_causal: bool,
    seed: int | Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raise if these arguments do not fit one another."""
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be True or False, got {is_causal!r}; other masks are not supported")
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.is_floating_point():
            raise ValueError(f"seed must be one integer, got a tensor of shape {tuple(seed.shape)} and {seed.dtype}")
    elif seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**63):
        raise ValueError(f"seed must be an integer of 64 bits, got {seed!r}")
    _check_index_vector("lengths", lengths, query.shape[0], query.device)
    _check_index_vector("cu_seqlens", cu_seqlens, None, query.device)
    if cu_seqlens is None:
        return
    if lengths is not None:
        raise ValueError("lengths (padded samples) and cu_seqlens (packed documents) exclude one another; pass one")
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"cu_seqlens needs as many queries as keys, got {query.shape[1]} and {key.shape[1]}; decode one document at a "
            "time instead"
        )
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens needs at least two entries, 0 and the total, got {cu_seqlens.shape[0]}")


def check_no_sharding(*, layout: Any, bucket_size: Any, transport: Any, comm_dtype: Any) -> None:
    """Raise if an argument that says how rows travel was passed without a group."""
    passed = {"layout": (layout, "contiguous"), "bucket_size": (bucket_size, None), "transport": (transport, "auto")}
    for name, (given, default) in {**passed, "comm_dtype": (comm_dtype, None)}.items():
        if given != default:
            raise ValueError(f"{name} says how a sequence is sharded over a group: got {name}={given!r} without group")


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast does to the inputs of ``scaled_dot_product_attention``."""
    if not all(isinstance(x, Tensor) for x in tensors):
        return tensors  # refused below
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated,
    *,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: int | Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    mixing_gradient: str,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Query, key, value and scale as they are computed with, after all checks that do not depend on the backend."""
    check_pattern(pattern)
    query, key, value = autocast(query, key, value)
    check_qkv(query, key, value)
    check_options(scale, dropout_p, mixing_gradient)
    check_call(query, key, is_causal, seed, lengths, cu_seqlens)
    pattern.check_key_heads(key.shape[2])
    return query, key, value, query.shape[-1] ** -0.5 if scale is None else float(scale)

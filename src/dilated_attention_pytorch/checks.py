"""Checks of single arguments: every error gives the rule, the values and a way out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.dtypes import DTYPES, INDEX_DTYPES
from dilated_attention_pytorch.lengths import few
from dilated_attention_pytorch.orders.kinds import Identity
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.values import Inputs

_LARGEST = sys.float_info.max


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise if these are not dense tensors of floating-point numbers."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout == torch.jagged:
            raise TypeError(
                f"{name} is a jagged nested tensor: attention and modules take one if query, key and value all are, on one "
                "device; elsewhere pass x.values().unsqueeze(0) and cu_seqlens=x.offsets()"
            )
        if x.layout != torch.strided or x.is_nested:
            kind, way_out = ("nested with strides", "x.to_padded_tensor(0.0), or torch.nested with layout=torch.jagged")
            if not x.is_nested:
                kind, way_out = str(x.layout), "x.to_dense()"
            raise TypeError(f"{name} must be a dense tensor, got one that is {kind}; use {way_out}")
        if x.dtype not in DTYPES:
            known = ", ".join(map(str, DTYPES))
            raise TypeError(f"{name} must have one of the dtypes {known}, got {x.dtype}; convert it with .to()")


def check_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise if these are not tensors of attention."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, sequence, heads, head size), got {x.dim()} dimensions: {tuple(x.shape)}"
            )
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}; use .to()"
        )
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
            f"queries and {m} keys; for cross-attention over fewer keys use scaled_dot_product_attention"
        )


def check_pattern(pattern: Any) -> None:
    """Raise if this is not a pattern."""
    if not isinstance(pattern, Dilated | BlockSparse):
        raise TypeError(
            f"pattern must be a Dilated or a BlockSparse, got {type(pattern).__name__}; write Dilated([2048, 4096], "
            "[1, 2]), BlockSparse.from_config(SparsePatternConfig(...)) or DistributedSparseConfig(...).pattern(shards)"
        )


def as_number(name: str, value: Any) -> float | None:
    """A finite number as Python's own float or int; None stays None. NumPy's numbers are accepted."""
    if value is None:
        return None
    if not isinstance(value, float | int) and (isinstance(value, Tensor) or not isinstance(value, Real)):
        hint = "; multiply the query by a learned scale instead" if name == "scale" else ""
        raise TypeError(f"{name} must be a number, got {type(value).__name__}{hint}")
    number: float = value if isinstance(value, float | int) else float(value)
    if not abs(number) <= _LARGEST:  # a comparison, which compilers trace for symbolic numbers
        got = "an integer that a float cannot hold" if isinstance(number, int) else value
        raise ValueError(f"{name} must be finite, got {got}")
    return number


def as_bool(name: str, value: Any) -> bool:
    """True or False, also from NumPy's own."""
    if isinstance(value, bool):
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    got = f"{type(value).__name__} of shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)
    hint = (
        "; other masks are not supported, because the pattern decides which positions meet (BlockSparse.custom takes a "
        "mask of blocks)"
    )
    raise TypeError(f"{name} must be True or False, got {got}{hint if name == 'is_causal' else ''}")


def check_seed(seed: Any) -> None:
    """Raise if this is not a seed of dropout."""
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.is_floating_point():
            raise ValueError(f"seed must be one integer, got a tensor of shape {tuple(seed.shape)} and {seed.dtype}")
    elif seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**63):
        raise ValueError(f"seed must be an integer of 64 bits, got {seed!r}")


def check_index_vector(name: str, x: Tensor | None, entries: int | None, device: torch.device) -> None:
    """Raise if this is not a vector of integers, with one entry per sample if ``entries`` is the batch size."""
    if x is None:
        return
    if x.dtype not in INDEX_DTYPES or x.dim() != 1:
        hint = "; the lengths of a mask are mask.sum(-1)" if x.dtype == torch.bool else ""
        raise ValueError(f"{name} must be one-dimensional int32 or int64, got {x.dim()} dimensions of {x.dtype}{hint}")
    if entries is not None and x.shape[0] != entries:
        raise ValueError(f"{name} must have one entry per sample: got {x.shape[0]} entries for a batch of {entries}")
    if x.device != device and x.device.type != "cpu":
        raise ValueError(f"{name} must be on the device of query ({device}) or on the CPU, got {x.device}")


def check_is_order(order: Any) -> None:
    """Raise if this is not an order."""
    if not isinstance(order, Order):
        raise TypeError(f"order must be an Order, got {type(order).__name__}; write Order.from_permutation(p) for your own")


def rows_in_order(order: Order | None, ordered: bool | None, sharded: bool) -> bool:
    """Whether rows are in the order already; raise if ``ordered`` does not go with the other arguments."""
    if not isinstance(ordered, bool | None):
        raise TypeError(f"ordered must be True, False or None, got {ordered!r}; pass the order itself as order")
    if order is None:
        if ordered:
            raise ValueError("ordered=True says that rows are in an order already: pass that order as order")
        return False
    if sharded and ordered is False:
        raise ValueError(
            "with group, tensors are a rank's slice of the ordered sequence, because no rank can move the rows of others: "
            "order once, by shard_sequence(x, group, order=order), and leave out ordered=False"
        )
    return sharded or bool(ordered)


def _ends_inside(name: str, values: Sequence[int], n: int) -> bool:
    """Whether a sample or document of a sequence of ``n`` positions ends before it."""
    return any(x != n and not (x == 0 and name == "cu_seqlens") for x in values)


def check_order_keeps(order: Order, lengths: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raise if the order moves rows between the samples or documents that these tensors on the host describe."""
    if isinstance(order, Identity):
        return
    n = len(order)
    for name, kept, given in (("lengths", order.lengths, lengths), ("cu_seqlens", order.cu_seqlens, cu_seqlens)):
        if given is None:
            if kept is not None and _ends_inside(name, kept, n):
                raise ValueError(f"the order keeps the padding or the documents of {name}={few(kept)}: pass them as {name}")
        elif torch.compiler.is_compiling():
            torch._assert_async(_agrees(name, kept, given, n), f"the order was made for other {name}")
        elif type(given) is not Tensor or given.is_meta:
            continue  # without values
        elif kept is None and _ends_inside(name, given.tolist(), n):
            raise ValueError(
                f"this order moves rows over the whole sequence, but {name} says that samples or documents end inside; "
                f"use order.within({name}={name}), Hilbert.coordinates(coords, lengths=...), Order.padded or Order.packed"
            )
        elif kept is not None and tuple(given.tolist()) != kept:
            raise ValueError(f"the order was made for {name}={few(kept)}, got {few(given.tolist())}; make one for these")


def check_order_without_starts(order: Order, starts: Tensor | None) -> None:
    """Raise if an order moves rows of samples with padding in front: its places count from the first row."""
    if starts is not None and not isinstance(order, Identity):
        raise ValueError(
            f"an order keeps padding behind samples, so it does not go with starts: got {type(order).__name__} and starts; "
            "move the padding behind the samples and pass lengths, with an order made for them"
        )


def _agrees(name: str, kept: tuple[int, ...] | None, given: Tensor, n: int) -> Tensor:
    """The same comparison for compilers, which have no values: a tensor that is True."""
    if kept is None:
        whole = given == n
        return (whole | (given == 0) if name == "cu_seqlens" else whole).all()
    if given.shape[0] != len(kept):
        return torch.zeros((), dtype=torch.bool, device="cpu")
    return (given == torch.tensor(kept, device="cpu")).all()


def check_order(order: Order, inputs: Inputs, *, sharded: bool) -> None:
    """Raise if this is not an order of the rows of these tensors, or of a sequence of which they are a shard."""
    query, keys = inputs.query, inputs.key.shape[1]
    if not sharded and query.shape[1] != keys:
        raise ValueError(
            f"an order needs as many queries as keys, got {query.shape[1]} and {keys}; decode without an order"
        )
    if not sharded and len(order) != keys:
        raise ValueError(f"the order is over {len(order)} positions, got a sequence of {keys}")
    batch = order.positions.shape[:-1]
    if batch and batch[0] != query.shape[0]:
        raise ValueError(f"the order is for {batch[0]} samples, got a batch of {query.shape[0]}")
    if order.device != query.device:
        raise ValueError(f"the order is on {order.device} and query on {query.device}; use order.to({str(query.device)!r})")

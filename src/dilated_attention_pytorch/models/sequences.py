"""The rows of a call: which positions they have, which are padding, and what attention has to know about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from dilated_attention_pytorch.call import AttentionOptions, Sharding
from dilated_attention_pytorch.checks import check_index_vector, check_is_order, check_order_without_starts
from dilated_attention_pytorch.jagged import is_jagged, pack
from dilated_attention_pytorch.lengths import Lengths, index_tensor
from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.positions import Rotation, check_xpos, rotation
from dilated_attention_pytorch.orders.order import Order

if TYPE_CHECKING:  # a process without a group never imports torch.distributed
    from dilated_attention_pytorch.models.ranks import Shard


class RowOptions(TypedDict, total=False):
    """What a caller says about the rows of a batch, see ``attention``."""

    lengths: Lengths | None
    starts: Lengths | None
    cu_seqlens: Lengths | None
    order: Order | None


@dataclass(frozen=True, slots=True, eq=False)
class ModelRows:
    """The rows (B, N) of a call, as all layers need them."""

    options: AttentionOptions  # of ``attention``, except for dropout
    rotation: Rotation | None
    valid: Tensor | None  # (B, N, 1): False for padding; None without padding
    paths: Tensor | None  # (layers, 2, B or 1, 1 or N, 1): factors of the residual paths, 0 for those that are dropped

    def zero_padding(self, x: Tensor) -> Tensor:
        """``x`` with zeros in padding rows. Whatever they held, also NaN, has no effect."""
        if self.valid is None:
            return x
        return torch.where(self.valid.to(x.device), x, torch.zeros((), dtype=x.dtype, device=x.device))

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> ModelRows:
        """The rows for a layer on this device. Programs that distribute layers over devices call it."""
        turn = None if self.rotation is None else self.rotation.to(device, non_blocking)
        valid, paths = (x if x is None else x.to(device, non_blocking=non_blocking) for x in (self.valid, self.paths))
        return ModelRows(self.options, turn, valid, paths)


def unpacked(x: Tensor, rows: RowOptions) -> tuple[Tensor, RowOptions, Tensor | None]:
    """A dense tensor, its rows, and the offsets of the nested tensor that it was, if any."""
    if not isinstance(x, Tensor):
        raise TypeError(f"the input of a model must be a torch.Tensor, got {type(x).__name__}")
    if not is_jagged(x):
        if x.is_nested:
            raise TypeError("the input is a nested tensor with strides; make it with layout=torch.jagged")
        return x, rows, None
    given = [name for name in ("lengths", "starts", "cu_seqlens") if rows.get(name) is not None]
    if given:
        raise ValueError(f"nested tensors hold the lengths of their sequences, got {', '.join(given)}; leave it out")
    (dense,), offsets = pack(x=x)
    return dense, {**rows, "cu_seqlens": offsets}, offsets


def sequence_rows(
    config: LongNetConfig, x: Tensor, rows: RowOptions, sharding: Sharding | None, training: bool, dtype: torch.dtype
) -> ModelRows:
    """What the layers have to know about the rows of ``x`` (B, N, ...), or about this rank's rows of a sharded sequence."""
    if sharding is None:
        return _make(config, x, rows, None, training, dtype)
    from dilated_attention_pytorch.models.ranks import agreed_shard  # imports torch.distributed

    def arguments() -> dict[str, Any]:
        return {**_on_host(x, rows), "config": config.to_json(), "batch": len(x), "training": training}

    draws = training and config.drop_path > 0.0
    seed = int(torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu")) if draws else 0
    return _make(config, x, rows, agreed_shard(sharding, x, arguments, seed), training, dtype)


def cached_rows(config: LongNetConfig, x: Tensor, lengths: Lengths | None, seen: Tensor, dtype: torch.dtype) -> ModelRows:
    """The rows of a chunk for caches. Sample ``b`` has seen ``seen[b]`` tokens, and its positions go on from there.

    ``lengths`` are the numbers of tokens at the front of each sample in this chunk. ``seen`` stays on its device.
    """
    index = torch.arange(x.shape[1], device=x.device)
    own = index_tensor("lengths", lengths)
    valid = None
    if own is not None:
        valid = (index < own.to(x.device, non_blocking=True).unsqueeze(1)).unsqueeze(-1)
    return ModelRows({"lengths": own}, rotation(config, index + seen.unsqueeze(1), dtype), valid, None)


def _on_host(x: Tensor, rows: RowOptions) -> RowOptions:
    """Lengths, starts and documents as tensors on the host: a GPU is read once per forward, not once per layer."""
    host: dict[str, Any] = {"order": rows.get("order")}
    for name in ("lengths", "starts", "cu_seqlens"):
        own = index_tensor(name, rows.get(name))  # type: ignore[arg-type]
        check_index_vector(name, own, None if name == "cu_seqlens" else len(x), x.device)
        host[name] = own if own is None or own.device.type in ("cpu", "meta") else own.to("cpu")
    if host["cu_seqlens"] is not None:
        for name in ("lengths", "starts"):
            if host[name] is not None:
                raise ValueError(f"{name} (padded samples) and cu_seqlens (packed documents) exclude one another; pass one")
    if host["order"] is not None:
        check_is_order(host["order"])
        check_order_without_starts(host["order"], host["starts"])
    return host  # type: ignore[return-value]


def _make(
    config: LongNetConfig, x: Tensor, rows: RowOptions, shard: Shard | None, training: bool,
    dtype: torch.dtype,
) -> ModelRows:  # fmt: skip
    host, device = _on_host(x, rows), x.device
    lengths, starts, cu_seqlens, order = (host.get(name) for name in ("lengths", "starts", "cu_seqlens", "order"))
    options: AttentionOptions = {"lengths": lengths, "starts": starts, "cu_seqlens": cu_seqlens, "order": order}  # type: ignore[typeddict-item]
    index, length = torch.arange(x.shape[1], device=device), x.shape[1]
    if shard is not None:
        index, length = shard.positions, shard.length
        options["group"] = shard.sharding
    elif order is not None:
        options["ordered"] = True
    check_xpos(config, length, dtype)
    to = _mover(device)
    places, document, positions = index, None, index
    if isinstance(order, Order):
        positions = order.positions.index_select(-1, index) if len(order) == length else index
    if isinstance(cu_seqlens, Tensor):
        bounds = to(cu_seqlens)
        document = torch.bucketize(positions, bounds, right=True).sub_(1).clamp_(0, len(bounds) - 2)
        positions = positions - bounds[document]
    valid = None
    if isinstance(starts, Tensor) or isinstance(lengths, Tensor):
        first = to(starts).unsqueeze(1) if isinstance(starts, Tensor) else 0
        valid = places >= first
        if isinstance(lengths, Tensor):
            valid = valid & (places < first + to(lengths).unsqueeze(1))
        positions = (positions - first).clamp(min=0)
        valid = valid.expand(len(x), -1).unsqueeze(-1)
    paths = _paths(config, x, document, cu_seqlens, None if shard is None else shard.seed) if training else None
    return ModelRows(options, rotation(config, positions, dtype), valid, paths)


def _mover(device: torch.device) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(device, torch.int64, non_blocking=True)


def _paths(
    config: LongNetConfig, x: Tensor, document: Tensor | None, cu_seqlens: Any, seed: int | None
) -> Tensor | None:  # fmt: skip
    """The factors of both residual paths of every layer: a path is dropped for a whole sample, or a whole document.

    The ranks of a sharded sequence draw the same numbers, because a sample has rows on all of them.
    """
    if config.drop_path == 0.0:
        return None
    samples = len(x) if document is None else len(cu_seqlens) - 1
    shape = (config.num_layers, 2, samples)
    if seed is None:
        uniform = torch.rand(shape, device=x.device)
    else:
        uniform = torch.rand(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(x.device)
    keep = 1.0 - torch.linspace(0.0, config.drop_path, config.num_layers, device=x.device).view(-1, 1, 1)
    factors = (uniform < keep) / keep
    if document is None:
        return factors[..., None, None]
    return factors[..., document].unsqueeze(-1) if document.dim() > 1 else factors[:, :, None, document, None]

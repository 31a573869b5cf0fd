"""``Call`` and ``Sharding``: everything that a call of ``attention`` means, checked once at the entrance.

An error gives the rule, the values and a way out, before anything is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dilated_attention_pytorch.checks import (
    as_bool,
    as_number,
    check_index_vector,
    check_inputs,
    check_is_order,
    check_order,
    check_order_keeps,
    check_order_without_starts,
    check_pattern,
    check_seed,
    check_tensors,
    rows_in_order,
)
from dilated_attention_pytorch.dtypes import DTYPES
from dilated_attention_pytorch.lengths import Lengths, index_tensor
from dilated_attention_pytorch.orders.kinds import Identity
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.shards import Shards, check_layout
from dilated_attention_pytorch.values import Inputs

if TYPE_CHECKING:  # a process without a group never imports torch.distributed
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

BACKENDS = ("auto", "hopper", "triton", "sdpa", "eager", "reference")
TRANSPORTS = ("auto", "ring", "allgather", "ulysses")
MIXING_GRADIENTS = ("exact", "detached")


@dataclass(frozen=True, slots=True)
class Sharding:
    """Over which ranks a sequence is sharded, and how rows travel between them. ``attention`` takes it as ``group``.

    Args:
        group: a process group, or a device mesh of one dimension or with a dimension named ``"cp"``. Modules take None
            for all ranks of the job.
        layout: how the shards lie in the sequence. ``"contiguous"`` is the order of ranks. In ``"zigzag"``, each rank has
            an early and a late half, which balances causal work. ``distributed.Shards`` gives the rows of every rank: the
            ranks then compare their arguments only at the first call with them.
        bucket_size: rows per message, per key head and sample. The default is a sixteenth of the longest shard, at least
            512, and on a GPU at least 16,384. Two messages exist in each direction at a time. Block-sparse patterns
            refuse it, because all rows that a rank reads from another are one message.
        transport: ``"ring"`` keeps one message under way while it computes with another. ``"allgather"`` starts all
            messages at once and holds all of them in memory. ``"ulysses"`` exchanges heads instead of rows, for one dense
            segment. ``"auto"`` chooses by the model in ``distributed.cost``.
        comm_dtype: the type in which gradients of keys and values travel. The default is float32, or float64 for float64
            inputs.
    """

    group: ProcessGroup | DeviceMesh | None
    layout: str | Shards = "contiguous"
    bucket_size: int | None = None
    transport: str = "auto"
    comm_dtype: torch.dtype | None = None

    def check(self) -> None:
        """Raise if an option is not valid. The constructor does not, so that a call can report the error to all ranks."""
        rows = self.bucket_size
        if not isinstance(self.layout, Shards):
            check_layout(self.layout)
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise ValueError(f"bucket_size is a number of rows, at least 1, or None, got {rows!r}")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(map(repr, TRANSPORTS))}, got {self.transport!r}")
        if self.comm_dtype is not None and self.comm_dtype not in DTYPES:
            raise TypeError(f"comm_dtype must be one of {', '.join(map(str, DTYPES))} or None, got {self.comm_dtype!r}")

    def check_pattern(self, pattern: Dilated | BlockSparse) -> None:
        """Raise if sharded calls do not serve this pattern with these options."""
        if isinstance(pattern, Dilated):
            if pattern.torchscale_padding:  # every tile of a row would count its zero keys
                raise ValueError("a sharded sequence has no torchscale_padding; use a pattern without it, or one device")
            return
        if self.bucket_size is not None:
            raise ValueError(
                "all rows that a rank reads from another are one message for a block-sparse pattern, so it has no "
                f"bucket_size: got {self.bucket_size}; leave it out"
            )
        if self.transport == "ulysses":
            raise ValueError(
                "transport='ulysses' exchanges heads for one dense segment only, got a block-sparse pattern; use 'auto', "
                "'ring' or 'allgather'"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        """The same object: a process group cannot be copied, nor elsewhere in the model that is copied."""
        memo[id(self.group)] = self.group
        return self


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of ``attention``, which documents them."""

    is_causal: bool
    scale: float | None
    dropout_p: float
    seed: int | Tensor | None
    lengths: Lengths | None
    starts: Lengths | None
    cu_seqlens: Lengths | None
    mixing_gradient: str
    backend: str
    order: Order | None
    ordered: bool | None
    group: ProcessGroup | DeviceMesh | Sharding | None
    layout: str | Shards | None


class CallOptions(AttentionOptions, total=False):
    """``AttentionOptions`` and the one option that decides about the type of the result."""

    return_lse: bool


@dataclass(frozen=True, slots=True)
class Call:
    """One call of ``attention``: pattern, sizes and options, all of them checked."""

    pattern: Dilated | BlockSparse
    batch: int
    queries: int  # rows of the query tensor: of this rank, if the sequence is sharded
    keys: int
    heads: int
    key_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    is_causal: bool = False
    scale: float = 1.0
    dropout_p: float = 0.0
    seed: int | Tensor | None = None
    lengths: Tensor | None = field(default=None, compare=False)  # on the host
    starts: Tensor | None = field(default=None, compare=False)  # on the host
    cu_seqlens: Tensor | None = field(default=None, compare=False)  # on the host
    mixing_gradient: str = "exact"
    backend: str = "auto"
    return_lse: bool = False
    order: Order | None = field(default=None, compare=False)
    in_order: bool = False  # the rows of the tensors are in the order already
    sharding: Sharding | None = None

    @property
    def masks_by_position(self) -> bool:
        """Whether causality compares original positions, because the rows are in another order."""
        return self.is_causal and self.order is not None and not isinstance(self.order, Identity)

    @property
    def plan_is_causal(self) -> bool:
        """Whether a plan over ordered rows is causal. Under an order, tiles are whole and masked by position."""
        return self.is_causal and not self.masks_by_position

    @property
    def plan_pattern(self) -> Dilated | BlockSparse:
        """The pattern that is planned: causality by position hides torchscale's padding, which is behind every row."""
        hidden = self.masks_by_position and isinstance(self.pattern, Dilated)
        return self.pattern.without_padding() if hidden and isinstance(self.pattern, Dilated) else self.pattern

    @property
    def permutes(self) -> bool:
        """Whether the call has to put its rows in order and its results back."""
        return self.order is not None and not self.in_order and not isinstance(self.order, Identity)

    @property
    def detach_mixing(self) -> bool:
        """Whether the mixing weights of branches are constants in the backward."""
        return self.mixing_gradient == "detached"


def as_sharding(
    group: ProcessGroup | DeviceMesh | Sharding | None, layout: str | Shards | None
) -> Sharding | None:  # fmt: skip
    """The sharding that the arguments ``group`` and ``layout`` describe; None for a call on one device."""
    if isinstance(group, Sharding):
        if layout is not None:
            raise ValueError(f"layout is a field of Sharding: got layout={layout!r} beside {group!r}; pass it there")
        return group
    if group is not None:
        check_group(group)
        return Sharding(group, "contiguous" if layout is None else layout)
    if layout is not None and layout != "contiguous":
        raise ValueError(f"layout says how a sequence is sharded over a group: got layout={layout!r} without group")
    return None


def check_group(group: Any) -> None:
    """Raise if this is not something over whose ranks a sequence can be sharded."""
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(group, ProcessGroup | DeviceMesh):
        raise TypeError(
            f"group must be a ProcessGroup, a DeviceMesh or a Sharding, got {group!r}; call "
            "torch.distributed.init_process_group() first, on a rank that is a member"
        )


def check_backend(backend: str) -> None:
    """Raise if there is no backend of this name."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")


def check_options(options: AttentionOptions) -> tuple[Sharding | None, bool]:
    """Raise if an option that does not depend on tensors is not valid; modules check theirs at construction.

    Return the sharding, and whether rows are in the order already.
    """
    as_number("scale", options.get("scale"))
    dropout_p = as_number("dropout_p", options.get("dropout_p", 0.0))
    if dropout_p is None or not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must satisfy 0 <= dropout_p < 1, got {dropout_p}")
    if options.get("mixing_gradient", "exact") not in MIXING_GRADIENTS:
        raise ValueError(f"mixing_gradient must be 'exact' or 'detached', got {options['mixing_gradient']!r}")
    check_backend(options.get("backend", "auto"))
    sharding, order = as_sharding(options.get("group"), options.get("layout")), options.get("order")
    if sharding is not None:
        sharding.check()
    if order is not None:
        check_is_order(order)
    return sharding, rows_in_order(order, options.get("ordered"), sharding is not None)


def make_call(
    query: Tensor, key: Tensor, value: Tensor, pattern: Dilated | BlockSparse, **options: Unpack[CallOptions]
) -> tuple[Call, Inputs]:
    """Check all arguments of ``attention``; return the call, and the tensors in the type that autocast asks for."""
    check_pattern(pattern)
    check_tensors(query, key, value)
    inputs = _autocast(query, key, value)
    check_inputs(*inputs)
    sharding, in_order = check_options(options)
    (batch, queries, heads, head_dim), (_, keys, key_heads, _) = inputs.query.shape, inputs.key.shape
    scale, seed, order = as_number("scale", options.get("scale")), options.get("seed"), options.get("order")
    check_seed(seed)
    lengths, cu_seqlens = _sequences(options.get("lengths"), options.get("cu_seqlens"), inputs)
    starts = _starts(options.get("starts"), cu_seqlens, inputs)
    if order is not None:
        check_order_without_starts(order, starts)
        check_order(order, inputs, sharded=sharding is not None)
        check_order_keeps(order, lengths, cu_seqlens)
    call = Call(
        pattern=pattern,
        batch=batch,
        queries=queries,
        keys=keys,
        heads=heads,
        key_heads=key_heads,
        head_dim=head_dim,
        dtype=inputs.query.dtype,
        device=inputs.query.device,
        is_causal=as_bool("is_causal", options.get("is_causal", False)),
        scale=head_dim**-0.5 if scale is None else float(scale),
        dropout_p=as_number("dropout_p", options.get("dropout_p", 0.0)) or 0.0,
        seed=seed,
        lengths=lengths,
        starts=starts,
        cu_seqlens=cu_seqlens,
        mixing_gradient=options.get("mixing_gradient", "exact"),
        backend=options.get("backend", "auto"),
        return_lse=options.get("return_lse", False),
        order=order,
        in_order=in_order,
        sharding=sharding,
    )
    _check_pattern_of_call(call)
    return call, inputs


def _check_pattern_of_call(call: Call) -> None:
    pattern = call.pattern
    if call.sharding is not None:
        call.sharding.check_pattern(pattern)
    if isinstance(pattern, Dilated):
        pattern.check_key_heads(call.key_heads)
        return
    if call.detach_mixing:
        raise ValueError(
            "mixing_gradient='detached' is about branches of Dilated; block-sparse attention is one softmax: leave it out"
        )
    if call.masks_by_position and pattern.only_causal:
        raise ValueError(
            "this BlockMask is causal by places of the ordered sequence, is_causal under an order goes by original "
            "positions; leave out the order, or make the BlockMask without the causal part"
        )
    if call.sharding is None:  # the length of a sharded sequence is not known yet
        check_blocks_fit(call, call.queries, call.keys)


def check_blocks_fit(call: Call, queries: int, keys: int) -> None:
    """Raise if the pattern is a mask of blocks that does not fit a sequence of this length."""
    if isinstance(call.pattern, BlockSparse):
        call.pattern.check_call(
            call.batch, queries, keys, call.heads, is_causal=call.is_causal, packed=call.cu_seqlens is not None
        )
        given = call.pattern.given
        if call.starts is not None and given is not None and given.query_blocks < given.key_blocks:
            raise ValueError(
                "blocks count from starts[b], so queries can be in any block, and a mask needs all query blocks: got "
                f"{given.query_blocks} x {given.key_blocks} blocks; build one of {given.key_blocks} x {given.key_blocks}"
            )


def check_no_forward_derivative(inputs: Inputs) -> None:
    """Raise for forward-mode derivatives: operators without a forward-mode formula would drop the tangent silently."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in inputs):  # type: ignore[no-untyped-call]
        raise NotImplementedError("forward-mode derivatives need backend='reference' (short sequences)")


def _sequences(
    lengths: Lengths | None, cu_seqlens: Lengths | None, inputs: Inputs
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Both as tensors on the host, checked but for their values."""
    lengths, cu_seqlens = index_tensor("lengths", lengths), index_tensor("cu_seqlens", cu_seqlens)
    query, key = inputs.query, inputs.key
    check_index_vector("lengths", lengths, query.shape[0], query.device)
    check_index_vector("cu_seqlens", cu_seqlens, None, query.device)
    if cu_seqlens is not None:
        if lengths is not None:
            raise ValueError("lengths (padded samples) and cu_seqlens (packed documents) exclude one another; pass one")
        if query.shape[1] != key.shape[1]:
            raise ValueError(
                f"cu_seqlens needs as many queries as keys, got {query.shape[1]} and {key.shape[1]}; decode one "
                "document at a time instead"
            )
        if cu_seqlens.shape[0] < 2:
            raise ValueError(f"cu_seqlens needs at least two entries, 0 and the total, got {cu_seqlens.shape[0]}")
    return _on_host(lengths), _on_host(cu_seqlens)


def _starts(starts: Lengths | None, cu_seqlens: Tensor | None, inputs: Inputs) -> Tensor | None:
    """The starts as a tensor on the host, checked but for its values."""
    if starts is None:
        return None
    starts = index_tensor("starts", starts)
    check_index_vector("starts", starts, inputs.query.shape[0], inputs.query.device)
    if cu_seqlens is not None:
        raise ValueError(
            "starts (padded samples) and cu_seqlens (packed documents) exclude one another; pass one: padding between "
            "documents can be a document of its own"
        )
    return _on_host(starts)


def _on_host(x: Tensor | None) -> Tensor | None:
    """The same values on the host: the one device synchronisation of a call whose lengths are on a GPU."""
    return x if x is None or x.device.type in ("cpu", "meta") else x.to("cpu")


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> Inputs:
    """What autocast does to the inputs of ``scaled_dot_product_attention``."""
    inputs = Inputs(query, key, value)
    device = query.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return inputs
    dtype = torch.get_autocast_dtype(device)
    return Inputs(*(x if x.dtype == torch.float64 else x.to(dtype) for x in inputs))

"""Multi-head block-sparse attention on a sharded sequence, by patterns that know of ranks and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilated_attention_pytorch.api import attention
from dilated_attention_pytorch.backends import check_name
from dilated_attention_pytorch.checks import check_options
from dilated_attention_pytorch.nn.projected import ProjectedAttention
from dilated_attention_pytorch.nn.sharded import ShardedModule
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.patterns.tiers import DistributedSparseConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from dilated_attention_pytorch.shards import Shards


class TierAttention(ShardedModule):
    """``attention`` by the pattern that a ``DistributedSparseConfig`` gives for the shards of a call."""

    def __init__(
        self,
        config: DistributedSparseConfig,
        attention_dropout: float,
        softmax_scale: float | None,
        backend: str,
        group: ProcessGroup | DeviceMesh | None,
        layout: str | Shards,
        transport: str,
        comm_dtype: torch.dtype | None,
        order: Order | None,
        ordered: bool | None,
    ) -> None:
        from dilated_attention_pytorch.distributed.ring import check_sharding  # imports torch.distributed

        check_sharding(layout, None, transport, comm_dtype)
        super().__init__(group, layout, None, transport, comm_dtype, order, ordered)
        check_name(backend)
        check_options(softmax_scale, attention_dropout, "exact")
        if not isinstance(config, DistributedSparseConfig):
            raise TypeError(f"distributed_config must be a DistributedSparseConfig, got {type(config).__name__}")
        self.config = config
        self.attention_dropout = attention_dropout
        self.softmax_scale = softmax_scale
        self.backend = backend

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, *, lengths: Tensor | None = None
    ) -> Tensor:
        """Attend this rank's (B, n, H, D) over all ranks' (B, n, G, D) and return (B, n, H, D)."""
        sharding = self.sharding("BlockSparseRingDilatedAttention")
        out: Tensor = attention(
            query, key, value, self.pattern(key, sharding["group"]), is_causal=is_causal, scale=self.softmax_scale,
            dropout_p=self.attention_dropout if self.training else 0.0, lengths=lengths, backend=self.backend,
            order=self.order, ordered=self.ordered, **sharding,
        )  # fmt: skip
        return out

    def pattern(self, key: Tensor, group: ProcessGroup | DeviceMesh) -> BlockSparse:
        """The pattern for the rows that the ranks have in this call, which they tell one another."""
        from dilated_attention_pytorch.distributed.agreement import shards_of_call

        shards = shards_of_call(group, key.shape[1], self.layout)
        return self.config.pattern(shards, token_bytes=2 * key.shape[2] * key.shape[3] * key.element_size())

    def extra_repr(self) -> str:
        """The configuration, for ``print(module)``."""
        options = f"layout={self.layout!r}, transport={self.transport!r}, backend={self.backend!r}"
        return f"{self.config}, attention_dropout={self.attention_dropout}, {options}{self._order_repr()}"


class BlockSparseRingDistributedDilatedAttention(ProjectedAttention):
    """Multi-head attention on a sequence that is sharded over ranks, with fewer blocks the farther away they are.

    Called like ``MultiheadDilatedAttention``, with this rank's rows of query, key and value, and returns ``(out, None)``:
    its rows of what one device would compute with ``distributed_config.pattern(shards)``. Parameters are those of every
    rank alike: sum (or average, as DDP does) their gradients over the ranks.

    Args:
        embed_dim: size of an embedding, split evenly over the heads.
        num_heads: query heads.
        segment_lengths, dilation_rates: checked as branches of a pattern; the patterns of ``distributed_config`` follow
            from the ranks and have no branches, so they do not depend on them.
        distributed_config: the pattern; by default ``DistributedSparseConfig()``.
        dropout, num_kv_heads, bias, layer_norm, layer_norm_eps, gamma_init, batch_first, kdim, vdim: see
            ``MultiheadDilatedAttention``; the group's first rank draws the seed of dropout.
        softmax_scale, backend, group, layout, transport, comm_dtype: see ``attention``; the group is by default all ranks
            of the job.
        order, ordered: the order in which the whole sequence was sharded, see ``RingDilatedAttention``.

    >>> config = DistributedSparseConfig(sparsity_ratio=0.05, pattern_type="hierarchical")
    >>> module = BlockSparseRingDistributedDilatedAttention(512, 8, [4096, 8192], [1, 2], distributed_config=config)
    >>> sum(p.numel() for p in module.parameters())
    1051648
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        distributed_config: DistributedSparseConfig | None = None,
        *,
        dropout: float = 0.0,
        num_kv_heads: int | None = None,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        batch_first: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        softmax_scale: float | None = None,
        backend: str = "auto",
        group: ProcessGroup | DeviceMesh | None = None,
        layout: str | Shards = "contiguous",
        transport: str = "auto",
        comm_dtype: torch.dtype | None = None,
        order: Order | None = None,
        ordered: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        Dilated(segment_lengths, dilation_rates)
        config = DistributedSparseConfig() if distributed_config is None else distributed_config
        attend = TierAttention(
            config, dropout, softmax_scale, backend, group, layout, transport, comm_dtype, order, ordered
        )
        super().__init__(
            attend, embed_dim, num_heads, sharded=True, num_kv_heads=num_kv_heads, bias=bias, layer_norm=layer_norm,
            layer_norm_eps=layer_norm_eps, gamma_init=gamma_init, batch_first=batch_first, kdim=kdim, vdim=vdim,
            device=device, dtype=dtype,
        )  # fmt: skip

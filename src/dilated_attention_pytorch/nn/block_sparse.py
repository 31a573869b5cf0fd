"""Block-sparse attention as a module without parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dilated_attention_pytorch.api import attention
from dilated_attention_pytorch.backends import check_name
from dilated_attention_pytorch.checks import check_no_sharding, check_options
from dilated_attention_pytorch.nn.sharded import ShardedModule
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.blocks import BlockSparse, SparsePatternConfig
from dilated_attention_pytorch.patterns.dilated import Dilated

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from dilated_attention_pytorch.shards import Shards


class BlockSparseRingDilatedAttention(ShardedModule):
    """``attention`` with a block-sparse pattern.

    Args:
        segment_lengths, dilation_rates: the branches of the pattern ``"dilated_sparse"``, segments in tokens and rates in
            blocks. The other patterns have no branches and do not depend on them.
        sparse_config: the pattern; by default ``"dilated_sparse"`` with a tenth of the blocks.
        attention_dropout: ``dropout_p`` of ``attention``, in training only.
        softmax_scale, backend: ``scale`` and ``backend`` of ``attention``.
        group: ranks over which the sequence is sharded, see ``attention``: query, key and value are then this rank's rows,
            ``lengths`` and ``cu_seqlens`` count positions of the whole sequence. One device by default.
        layout, transport, comm_dtype: with ``group``, how rows travel, see ``attention``.
        order, ordered: an order of the positions, and whether rows already lie in it (with ``group`` they always do), see
            ``attention``. It fixes the length, moves with the module and is no part of its state.

    >>> config = SparsePatternConfig("dilated_sparse", sparsity_ratio=0.5, block_size=64)
    >>> attend = BlockSparseRingDilatedAttention([256, 512], [1, 2], config)
    >>> attend(torch.randn(1, 1000, 8, 64)).shape
    torch.Size([1, 1000, 8, 64])
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        sparse_config: SparsePatternConfig | None = None,
        *,
        attention_dropout: float = 0.0,
        softmax_scale: float | None = None,
        backend: str = "auto",
        group: ProcessGroup | DeviceMesh | None = None,
        layout: str | Shards = "contiguous",
        transport: str = "auto",
        comm_dtype: torch.dtype | None = None,
        order: Order | None = None,
        ordered: bool | None = None,
    ) -> None:
        if group is None:
            check_no_sharding(layout=layout, bucket_size=None, transport=transport, comm_dtype=comm_dtype)
        else:
            from dilated_attention_pytorch.distributed.ring import check_sharding  # imports torch.distributed

            check_sharding(layout, None, transport, comm_dtype)
        super().__init__(group, layout, None, transport, comm_dtype, order, ordered, sharded=group is not None)
        check_name(backend)
        check_options(softmax_scale, attention_dropout, "exact")
        config = SparsePatternConfig("dilated_sparse", 0.1) if sparse_config is None else sparse_config
        if not isinstance(config, SparsePatternConfig):
            raise TypeError(f"sparse_config must be a SparsePatternConfig, got {type(config).__name__}")
        branches = Dilated(segment_lengths, dilation_rates)
        if config.pattern_type == "dilated_sparse":
            given = Dilated(config.segment_lengths, config.dilation_rates) if config.segment_lengths else branches
            if given != branches:
                raise ValueError(
                    f"sparse_config has the branches {given.branches}, the module {branches.branches}; leave out those"
                )
            config = replace(config, segment_lengths=branches.segment_lengths, dilation_rates=branches.dilation_rates)
        self.sparse_config = config
        self.pattern = BlockSparse.from_config(config)
        self.attention_dropout = attention_dropout
        self.softmax_scale = softmax_scale
        self.backend = backend

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        is_causal: bool = False,
        *,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Attend (B, N, H, D) over (B, M, G, D), by default the queries themselves, and return (B, N, H, D).

        ``value`` is ``key`` by default.
        """
        arguments = query, key, value
        key, value = _keys(*arguments) if self.group is None else self.or_refuse(_keys, *arguments)
        sharding: dict[str, Any] = {} if self.group is None else self.sharding()
        out: Tensor = attention(
            query,
            key,
            value,
            self.pattern,
            is_causal=is_causal,
            scale=self.softmax_scale,
            dropout_p=self.attention_dropout if self.training else 0.0,
            lengths=lengths,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
            order=self.order,
            ordered=self.ordered,
            **sharding,
        )
        return out

    def extra_repr(self) -> str:
        """The pattern, for ``print(module)``."""
        options = (
            f"attention_dropout={self.attention_dropout}, softmax_scale={self.softmax_scale}, backend={self.backend!r}"
        )
        return f"{self.sparse_config}, {options}{self._order_repr()}"


def _keys(query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """Key and value, of which both or the value may be left out."""
    if key is None and value is not None:
        raise ValueError("value without key: pass both, or neither for the queries themselves")
    key = query if key is None else key
    return key, key if value is None else value

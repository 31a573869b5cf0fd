"""Dilated attention over a sharded sequence as a module without parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilated_attention_pytorch.api import attention
from dilated_attention_pytorch.backends import check_name
from dilated_attention_pytorch.checks import check_options
from dilated_attention_pytorch.nn.sharded import ShardedModule
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.dilated import Dilated

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from dilated_attention_pytorch.shards import Shards


class RingDilatedAttention(ShardedModule):
    """``attention`` over a sequence that is sharded over the ranks of a group: each rank passes and gets its own rows.

    Args:
        segment_lengths, dilation_rates, offsets: the pattern, see ``Dilated``.
        group: see ``attention``; by default all ranks of the job.
        bucket_size, layout, transport, comm_dtype: how rows travel, see ``attention``.
        attention_dropout: ``dropout_p`` of ``attention``, in training only; the seed is drawn by the group's first rank.
        softmax_scale, mixing_gradient, backend: ``scale``, ``mixing_gradient`` and ``backend`` of ``attention``.
        order: the order in which ``distributed.shard_sequence(..., order=order)`` sharded the whole sequence: tensors are
            this rank's slice of the ordered sequence, and stay so. It moves with the module and is no part of its state.
        ordered: None or True, as nothing else is possible.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        group: ProcessGroup | DeviceMesh | None = None,
        bucket_size: int | None = None,
        layout: str | Shards = "contiguous",
        transport: str = "auto",
        comm_dtype: torch.dtype | None = None,
        attention_dropout: float = 0.0,
        offsets: str | Sequence[int] = "interleaved",
        softmax_scale: float | None = None,
        mixing_gradient: str = "exact",
        backend: str = "auto",
        order: Order | None = None,
        ordered: bool | None = None,
    ) -> None:
        from dilated_attention_pytorch.distributed.ring import check_sharding  # imports torch.distributed

        check_sharding(layout, bucket_size, transport, comm_dtype)
        super().__init__(group, layout, bucket_size, transport, comm_dtype, order, ordered)
        check_name(backend)
        self.pattern = Dilated(segment_lengths, dilation_rates, offsets)
        check_options(softmax_scale, attention_dropout, mixing_gradient)
        self.attention_dropout = attention_dropout
        self.backend = backend
        self.softmax_scale = softmax_scale
        self.mixing_gradient = mixing_gradient

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        *,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Attend this rank's (B, n, H, D) over all ranks' (B, n, G, D) and return (B, n, H, D)."""
        out: Tensor = attention(
            query, key, value, self.pattern, is_causal=is_causal, scale=self.softmax_scale,
            dropout_p=self.attention_dropout if self.training else 0.0, lengths=lengths, cu_seqlens=cu_seqlens,
            mixing_gradient=self.mixing_gradient, backend=self.backend, order=self.order, ordered=self.ordered,
            **self.sharding("DilatedAttention"),
        )  # fmt: skip
        return out

    def extra_repr(self) -> str:
        """The pattern, for ``print(module)``."""
        return (
            f"segment_lengths={self.pattern.segment_lengths}, dilation_rates={self.pattern.dilation_rates}, "
            f"offsets={self.pattern.offsets!r}, layout={self.layout!r}, "
            f"bucket_size={self.bucket_size}, transport={self.transport!r}, attention_dropout={self.attention_dropout}"
            + self._order_repr()
        )

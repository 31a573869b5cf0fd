"""``LongNetEncoder``: a stack of LongNet layers over embeddings or tokens, not causal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import torch
from torch import Tensor

from dilated_attention_pytorch.call import Sharding, as_sharding
from dilated_attention_pytorch.checks import check_is_order
from dilated_attention_pytorch.jagged import unpack
from dilated_attention_pytorch.lengths import Lengths
from dilated_attention_pytorch.models.body import LongNetBody
from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.files import Pretrained
from dilated_attention_pytorch.models.layers import reset_parameters
from dilated_attention_pytorch.models.sequences import unpacked
from dilated_attention_pytorch.models.torchscale import from_torchscale
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.shards import Shards

if TYPE_CHECKING:  # a process without a group never imports torch.distributed
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class LongNetBase(LongNetBody, Pretrained):
    """What encoder and decoder have in common."""

    model_type = "longnet"
    config: LongNetConfig

    def __init__(
        self, config: LongNetConfig, *, group: ProcessGroup | DeviceMesh | Sharding | None = None,
        layout: str | Shards | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """The parameters are on the meta device. A subclass ends with ``materialise``."""
        if not isinstance(config, LongNetConfig):
            raise TypeError(f"config must be a LongNetConfig, got {type(config).__name__}; see LongNetConfig.preset")
        super().__init__(config)
        self.sharding = as_sharding(group, layout)
        if self.sharding is not None:
            self.sharding.check()
            self.sharding.check_pattern(config.pattern)
        self.add_modules(device="meta", dtype=dtype)

    @property
    def sizes(self) -> LongNetConfig:
        """The configuration."""
        return self.config

    def reset_parameters(self) -> None:
        """Draw new parameters, as the constructor does."""
        reset_parameters(self, self.config)


class LongNetEncoder(LongNetBase):
    """LongNet's encoder: pre-norm layers with sub-LN and dilated attention that is not causal.

    Args:
        config: sizes and options.
        group, layout: see ``attention``. The inputs are this rank's rows, and positions are those of the whole sequence.
        order: see ``attention``. Rows are moved once, in front of the first layer, and back behind the last one. With
            ``group`` they are this rank's rows of the ordered sequence already. Rotary positions are the original ones.
        device, dtype: of the parameters.

    >>> config = LongNetConfig(
    ...     embed_dim=32, num_layers=2, num_heads=4, ffn_dim=64, segment_lengths=(16, 64), dilation_rates=(1, 2)
    ... )
    >>> model = LongNetEncoder(config)
    >>> model(torch.randn(2, 100, 32), lengths=[100, 60]).shape
    torch.Size([2, 100, 32])
    """

    def __init__(
        self, config: LongNetConfig, *, group: ProcessGroup | DeviceMesh | Sharding | None = None,
        layout: str | Shards | None = None, order: Order | None = None, device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, group=group, layout=layout, dtype=dtype)
        if order is not None:
            check_is_order(order)
        self.order: Order | None = None
        self.materialise(device)
        self.order = order

    @overload
    def forward(
        self, x: Tensor, *, lengths: Lengths | None = ..., starts: Lengths | None = ..., cu_seqlens: Lengths | None = ...,
        order: Order | None = ..., return_all_layers: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, x: Tensor, *, lengths: Lengths | None = ..., starts: Lengths | None = ..., cu_seqlens: Lengths | None = ...,
        order: Order | None = ..., return_all_layers: bool,
    ) -> Tensor | tuple[Tensor, list[Tensor]]: ...  # fmt: skip
    def forward(
        self, x: Tensor, *, lengths: Lengths | None = None, starts: Lengths | None = None,
        cu_seqlens: Lengths | None = None, order: Order | None = None, return_all_layers: bool = False,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Encode embeddings (B, N, E), or token ids (B, N) if the config has a vocabulary.

        Args:
            x: embeddings or ids, dense, or a jagged nested tensor (B, sequence, E) or (B, sequence). The result is nested
                likewise.
            lengths, starts, cu_seqlens: see ``attention``. Positions count from the start of each sample or document.
            order: instead of that of the constructor.
            return_all_layers: return ``(out, states)``. The states are those in front of the first layer and behind each
                layer, without the last norm.

        Returns:
            (B, N, E), 0 in padding rows. Padding rows have no effect on others, whatever they hold.
        """
        order = self.order if order is None else order
        x, rows, offsets = unpacked(
            x, {"lengths": lengths, "starts": starts, "cu_seqlens": cu_seqlens, "order": order}
        )  # fmt: skip
        embeddings = self.embed(x)
        call = self.rows_of(embeddings, rows)
        moves = order is not None and self.sharding is None
        if order is not None and moves:
            embeddings = order.permute(embeddings)
        states = [self.enter(embeddings, call)]
        for number in range(len(self.layers)):
            after = self.layers.run(number, states[-1], call, False)
            states = [*states, after] if return_all_layers else [after]
        out = self.leave(states[-1], call)

        def back(x: Tensor) -> Tensor:
            x = order.unpermute(x) if order is not None and moves else x
            return x if offsets is None else unpack(x, offsets)

        return (back(out), [back(call.zero_padding(x)) for x in states]) if return_all_layers else back(out)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.order is not None:
            self.order = self.order.to(fn(self.order.positions).device)
        return self

    @classmethod
    def from_torchscale(cls, state_dict: Mapping[str, Tensor], args: Any, **options: Any) -> Self:
        """The encoder with the weights of the authors' code.

        Args:
            state_dict: its tensors. The prefixes of DDP and fairscale are removed.
            args: an ``EncoderConfig`` of the authors' code, or a dictionary of its fields. Strings such as
                ``"[2048,4096]"`` are parsed and never evaluated. Options that would change results and that this model does
                not have raise. Options of other parts of that code are not read.
            options: ``group``, ``layout``, ``order``, ``device`` and ``dtype`` of the model.
        """
        config, tensors = from_torchscale("encoder", state_dict, args)
        return cls.from_tensors(config, tensors, "the state dict", **options)

"""Dilated attention as a module without parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dilated_attention_pytorch.api import attention
from dilated_attention_pytorch.backends import check_name
from dilated_attention_pytorch.checks import check_options
from dilated_attention_pytorch.nn.ordered import OrderedModule
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.dilated import Dilated


class DilatedAttention(OrderedModule):
    """``dilated_attention`` with its pattern and options fixed; dropout acts in training only.

    The arguments are those of ``Dilated`` and ``attention``; ``softmax_scale`` and ``attention_dropout`` are ``scale`` and
    ``dropout_p``. An ``order`` fixes the length of the sequence and moves with the module; it is no part of its state. With
    ``ordered=True`` the rows already lie in it, as in a model that ordered its embeddings once.

    >>> import torch
    >>> attend = DilatedAttention(segment_lengths=[256, 512], dilation_rates=[1, 2])
    >>> q, k, v = torch.randn(3, 1, 1000, 8, 64).unbind(0)
    >>> attend(q, k, v, is_causal=True).shape
    torch.Size([1, 1000, 8, 64])
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        offsets: str | Sequence[int] = "interleaved",
        backend: str = "auto",
        *,
        torchscale_padding: bool = False,
        mixing_gradient: str = "exact",
        order: Order | None = None,
        ordered: bool | None = None,
    ) -> None:
        super().__init__(order, ordered, sharded=False)
        check_name(backend)
        self.pattern = Dilated(segment_lengths, dilation_rates, offsets, torchscale_padding)
        check_options(softmax_scale, attention_dropout, mixing_gradient)
        self.softmax_scale = softmax_scale
        self.attention_dropout = attention_dropout
        self.backend = backend
        self.mixing_gradient = mixing_gradient

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, *, lengths: Tensor | None = None
    ) -> Tensor:
        """Attend (B, N, H, D) over (B, M, G, D) and return (B, N, H, D)."""
        return attention(
            query,
            key,
            value,
            self.pattern,
            is_causal=is_causal,
            scale=self.softmax_scale,
            dropout_p=self.attention_dropout if self.training else 0.0,
            lengths=lengths,
            mixing_gradient=self.mixing_gradient,
            backend=self.backend,
            order=self.order,
            ordered=self.ordered,
        )

    def extra_repr(self) -> str:
        """The pattern, for ``print(module)``."""
        return (
            f"segment_lengths={self.pattern.segment_lengths}, dilation_rates={self.pattern.dilation_rates}, "
            f"offsets={self.pattern.offsets!r}, attention_dropout={self.attention_dropout}, backend={self.backend!r}"
            + self._order_repr()
        )

"""What modules with an order have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

from dilated_attention_pytorch.checks import check_is_order, rows_in_order
from dilated_attention_pytorch.orders.order import Order


class OrderedModule(nn.Module):
    """A module that holds an order, or none; see ``attention`` for ``order`` and ``ordered``.

    The order fixes the length of the sequence and moves with the module. It follows from the arguments, so it is no part of
    the module's state.
    """

    def __init__(self, order: Order | None, ordered: bool | None, *, sharded: bool) -> None:
        super().__init__()
        if order is not None:
            check_is_order(order)
        rows_in_order(order, ordered, sharded)
        self.order = order
        self.ordered = ordered

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.order is not None:
            self.order = self.order.to(fn(self.order.positions).device)
        return self

    def _order_repr(self) -> str:
        return "" if self.order is None else f", order={self.order!r}, ordered={self.ordered}"

"""What modules over a sharded sequence have in common: the group and how rows travel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from dilated_attention_pytorch.nn.ordered import OrderedModule
from dilated_attention_pytorch.orders.order import Order

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from dilated_attention_pytorch.shards import Shards

T = TypeVar("T")


class ShardedModule(OrderedModule):
    """A module of a rank; ``group``, ``layout``, ``bucket_size``, ``transport`` and ``comm_dtype`` are ``attention``'s.

    ``sharded=False`` says that it serves one device, so that rows need not lie in the order.
    """

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh | None,
        layout: str | Shards,
        bucket_size: int | None,
        transport: str,
        comm_dtype: torch.dtype | None,
        order: Order | None = None,
        ordered: bool | None = None,
        *,
        sharded: bool = True,
    ) -> None:
        super().__init__(order, ordered, sharded=sharded)
        self.group = group
        self.layout = layout
        self.bucket_size = bucket_size
        self.transport = transport
        self.comm_dtype = comm_dtype

    def sharding(self, alone: str = "a module without group") -> dict[str, Any]:
        """The arguments for ``attention``: the group, by default all ranks, and how rows travel.

        ``alone`` is what serves one device, for the error without a group.
        """
        import torch.distributed as dist

        group = dist.group.WORLD if self.group is None else self.group
        if group is None:
            raise RuntimeError(
                "a sequence that is sharded over ranks needs a process group: start with torchrun and call "
                f"torch.distributed.init_process_group(), or use {alone} on one device"
            )
        return {
            "group": group, "layout": self.layout, "bucket_size": self.bucket_size, "transport": self.transport,
            "comm_dtype": self.comm_dtype,
        }  # fmt: skip

    def or_refuse(self, prepare: Callable[..., T], *arguments: Any) -> T:
        """``prepare(*arguments)``, before the ranks compare theirs; if it raises, the others are told and raise as well.

        A RuntimeError is PyTorch's for a projection that does not fit its input.
        """
        try:
            return prepare(*arguments)
        except (ValueError, TypeError, RuntimeError) as mistake:
            import torch.distributed as dist

            from dilated_attention_pytorch.distributed.agreement import refuse

            group = dist.group.WORLD if self.group is None else self.group
            if group is not None:
                refuse(group, self.layout, mistake)
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy over the same ranks: a process group cannot be copied."""
        memo[id(self.group)] = self.group
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

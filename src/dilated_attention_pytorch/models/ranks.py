"""What the ranks of a sharded sequence exchange in a model besides attention. It is imported only if there is a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch.call import Sharding
from dilated_attention_pytorch.distributed.agreement import Arguments, agree, comparable, reporting
from dilated_attention_pytorch.distributed.groups import resolve_group
from dilated_attention_pytorch.distributed.sequence import rows_of
from dilated_attention_pytorch.distributed.watch import watch_of
from dilated_attention_pytorch.shards import Shards


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """This rank's rows of a sequence."""

    sharding: Sharding  # with the shards of all ranks
    positions: Tensor  # (N,): of this rank's rows in the sequence
    length: int  # of the whole sequence
    seed: int  # the same on all ranks


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the exchange is not traced
def agreed_shard(sharding: Sharding, x: Tensor, arguments: Callable[[], Mapping[str, Any]], seed: int) -> Shard:
    """The rows of this rank. The ranks compare their arguments once per forward; layers then know the rows of all ranks.

    ``arguments`` checks those of this rank. If it raises, so do the other ranks.
    """
    sharding = _with_group(sharding)
    group, layout = resolve_group(sharding.group), sharding.layout
    with reporting(sharding):
        values = arguments() | {"layout": layout}  # type: ignore[operator]
        named = tuple((name, comparable(value)) for name, value in values.items())
    every = [x.shape[1]]
    if dist.get_world_size(group) > 1:
        every, seed = agree(group, Arguments("a LongNet model", named), x.shape[1], seed)
    shards = layout if isinstance(layout, Shards) else Shards.of(every, layout)
    rows = rows_of(shards, dist.get_rank(group), x.device)
    if len(rows) != x.shape[1]:
        raise ValueError(f"layout gives this rank a shard of {len(rows)} rows, its input has {x.shape[1]}")
    return Shard(replace(sharding, layout=shards), rows, shards.length, seed)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def mean_share(own_sum: Tensor, count: Tensor, sharding: Sharding) -> Tensor:
    """This rank's sum, times the number of ranks, divided by the counts of all ranks. The mean over ranks is the mean."""
    group = resolve_group(_with_group(sharding).group)
    total, watch = count.clone(), watch_of(group)
    with watch.turn("the number of targets"), watch.waiting("add up the targets of all"):
        dist.all_reduce(total, group=group)
    return own_sum * dist.get_world_size(group) / total


def _with_group(sharding: Sharding) -> Sharding:
    """The sharding, over all ranks of the job if it has no group."""
    if sharding.group is not None:
        return sharding
    if dist.group.WORLD is None:
        raise RuntimeError(
            "a sharded sequence needs a process group: start with torchrun and call torch.distributed."
            "init_process_group(), or leave out group on one device"
        )
    return replace(sharding, group=dist.group.WORLD)

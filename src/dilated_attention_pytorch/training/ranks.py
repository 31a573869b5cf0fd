"""The ranks of a training run: a mesh of data and sequence, and what they agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainRanks:
    """This rank among all of them. The batch is distributed over ``data``, and each window over ``sequence``."""

    rank: int = 0
    world: int = 1
    data: int = 1
    data_rank: int = 0
    mesh: DeviceMesh | None = None  # of all ranks, in one dimension
    group: dist.ProcessGroup | None = None  # the ranks that share windows

    @staticmethod
    def make(sequence: int, device: torch.device) -> TrainRanks:
        """The ranks of the default process group, if it is initialised, else one rank."""
        if not dist.is_initialized():
            if sequence != 1:
                raise ValueError(f"sequence_ranks is {sequence}, and there is one process; start it with torchrun")
            return TrainRanks()
        world = dist.get_world_size()
        if world % sequence:
            raise ValueError(f"the number of ranks must be a multiple of sequence_ranks, got {world} and {sequence}")
        mesh = init_device_mesh(device.type, (world // sequence, sequence), mesh_dim_names=("data", "sequence"))
        group = mesh.get_group("sequence") if sequence > 1 else None
        flat = init_device_mesh(device.type, (world,), mesh_dim_names=("all",))
        return TrainRanks(dist.get_rank(), world, world // sequence, mesh.get_local_rank("data"), flat, group)

    def share(self, windows: list[int]) -> list[int]:
        """The windows of this rank."""
        count = len(windows) // self.data
        return windows[self.data_rank * count : (self.data_rank + 1) * count]

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def first_then_others(self, make: Callable[[], T]) -> T:
        """Call ``make`` on the first rank, and then on the others. If the first raises a RuntimeError, all raise it."""
        made: list[T] = []
        error: list[RuntimeError | None] = [None]
        if self.rank == 0:
            try:
                made.append(make())
            except RuntimeError as problem:
                error[0] = problem
        if self.world > 1:
            dist.broadcast_object_list(error, src=0)
        if error[0] is not None:
            raise error[0]
        return made[0] if made else make()

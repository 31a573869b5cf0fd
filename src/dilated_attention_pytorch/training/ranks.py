"""The ranks of a training run: a mesh of data and sequence, and what they agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dilated_attention_pytorch.streaming import CheckpointError
from dilated_attention_pytorch.training.checkpoint import SaveError
from dilated_attention_pytorch.training.files import DataError

T = TypeVar("T")
# What one rank may raise and the others raise again: the first type that fits. All of them are made of a sentence.
_RAISED = (DataError, SaveError, CheckpointError, OSError, ValueError, TypeError, RuntimeError)


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
        """Call ``make`` on the first rank, and then on the others. If the first raises an error, all raise it.

        The other ranks get the type and the text, because an exception with other arguments may not be picklable.
        """
        if self.world == 1:
            return make()
        found: list[tuple[int, str] | None] = [None]
        if self.rank == 0:
            try:
                made = make()
            except (OSError, ValueError, RuntimeError, TypeError) as problem:
                found[0] = _description(problem)
                dist.broadcast_object_list(found, src=0)
                raise
            dist.broadcast_object_list(found, src=0)
            return made
        dist.broadcast_object_list(found, src=0)
        if found[0] is not None:
            number, text = found[0]
            raise _RAISED[number](text)
        return make()


def _description(problem: Exception) -> tuple[int, str]:
    """The number of the type that the other ranks raise, and its text."""
    number = next(i for i, kind in enumerate(_RAISED) if isinstance(problem, kind))
    text = str(problem)
    return number, text if type(problem) is _RAISED[number] else f"{type(problem).__name__}: {text}"

"""Process groups: the group of a call, the device of a rank, and errors of PyTorch's communication in plain words."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_TOO_FEW_GPUS = (
    "NCCL wants a GPU for every rank. Start as many ranks as there are GPUs (torchrun --nproc-per-node) and give each "
    "its own (torch.cuda.set_device(local_device())), or call init_process_group('gloo'), which sends through host memory"
)


def resolve_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The process group over whose ranks a sequence is sharded."""
    if isinstance(group, DeviceMesh):
        names = group.mesh_dim_names or ()
        if group.ndim == 1:
            return group.get_group()
        if "cp" in names:
            return group.get_group("cp")
        raise ValueError(
            f"a device mesh must have one dimension or one named 'cp' (context parallel), got {group.ndim} dimensions "
            f"named {names}; pass mesh['name']"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a ProcessGroup or a DeviceMesh, got {group!r}; call init_process_group() first, on "
            "a rank that is a member"
        )
    return group


def backend_for(device: str, group: dist.ProcessGroup) -> str | None:
    """The backend of a group for tensors of a device, ``"nccl"`` for example, or None."""
    pairs = (entry.split(":", 1) for entry in dist.get_backend_config(group).split(","))
    return dict(pairs).get(device)


def local_device() -> torch.device:
    """The device of this rank, started by torchrun: a GPU of its own, or the CPU on a machine without GPUs.

    With more ranks than GPUs it raises an error. Ranks may share a GPU over gloo: pass ``cuda:0`` yourself.

    Rank 3 of 8 on a machine with 8 GPUs gets ``cuda:3``.
    """
    gpus, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if gpus and ranks > gpus:
        raise RuntimeError(f"{ranks} ranks on a machine with {gpus} GPU(s). {_TOO_FEW_GPUS}")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpus else torch.device("cpu")


def failure(what: str, error: RuntimeError) -> RuntimeError:
    """The error to raise in place of one of PyTorch's, with what failed and what to do."""
    if "Duplicate GPU" in str(error):
        return RuntimeError(f"two ranks share a GPU. {_TOO_FEW_GPUS} ({what})")
    return RuntimeError(
        f"{what}: {error}. A rank may have died or stalled longer than the group's timeout. No result was returned; once "
        "all ranks have called destroy_process_group() and init_process_group() again, the call can be repeated"
    )


@contextlib.contextmanager
def naming(task: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Give an error of PyTorch's communication the name of the task that failed."""
    try:
        yield
    except RuntimeError as error:
        raise failure(f"rank {dist.get_rank(group)} could not {task}", error) from error

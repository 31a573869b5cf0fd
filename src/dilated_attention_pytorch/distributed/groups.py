"""Process groups and the device of a rank."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch.call import check_group

Group = dist.ProcessGroup | DeviceMesh
TOO_FEW_GPUS = (
    "NCCL wants a GPU for every rank. Start as many ranks as there are GPUs (torchrun --nproc-per-node) and give each "
    "its own (torch.cuda.set_device(local_device())), or call init_process_group('gloo'), which sends through host memory"
)


def resolve_group(group: Group | None) -> dist.ProcessGroup:
    """The process group over whose ranks a sequence is sharded."""
    if isinstance(group, DeviceMesh):
        names = group.mesh_dim_names or ()
        if group.ndim == 1:
            return group.get_group()
        if "cp" in names:
            return group.get_group("cp")
        got = f"got {group.ndim} dimensions named {names}; pass mesh['name']"
        raise ValueError(f"a device mesh must have one dimension or one named 'cp' (context parallel), {got}")
    check_group(group)
    assert isinstance(group, dist.ProcessGroup)
    return group


def backend_for(device: str, group: dist.ProcessGroup) -> str | None:
    """The backend of a group for tensors of a device, ``"nccl"`` for example, or None."""
    return dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(",")).get(device)


def local_device() -> torch.device:
    """The device of this rank, started by torchrun: a GPU of its own, or the CPU on a machine without GPUs.

    With more ranks than GPUs it raises an error. Ranks may share a GPU over gloo: pass ``cuda:0`` yourself.

    Rank 3 of 8 on a machine with 8 GPUs gets ``cuda:3``.
    """
    gpus, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if gpus and ranks > gpus:
        raise RuntimeError(f"{ranks} ranks on a machine with {gpus} GPU(s). {TOO_FEW_GPUS}")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpus else torch.device("cpu")

"""Devices by description, so that ``explain`` and ``simulate_ring`` answer for GPUs that this machine does not have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dilated_attention_pytorch import hardware
from dilated_attention_pytorch.values import Inputs

# Compute capabilities of GPUs by name.
GPUS = {name: gpu.capability for name, gpu in hardware.GPUS.items()}


@dataclass(frozen=True, slots=True)
class Target:
    """The device for which a question is asked."""

    device: torch.device
    capability: tuple[int, int]  # of a CUDA device, else (0, 0)
    described: bool = False  # by a name or a number: this machine may not have it


def find_target(device: str | torch.device) -> Target:
    """The target that a device or a description names.

    >>> find_target("cuda:h200").capability, find_target("cuda:sm90").capability, find_target("cuda:9.0").capability
    ((9, 0), (9, 0), (9, 0))
    """
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device must be a torch.device or a string such as 'cuda:h200', got {type(device).__name__}")
    kind, _, name = str(device).partition(":")
    number = re.fullmatch(r"sm_?(\d+)(\d)|(\d+)\.(\d)", name.lower())
    if kind == "cuda" and number is not None:
        major, minor = (int(x) for x in number.groups() if x is not None)
        return Target(torch.device("cuda"), (major, minor), described=True)
    if kind == "cuda" and name.lower() in GPUS:
        return Target(torch.device("cuda"), GPUS[name.lower()], described=True)
    try:
        found = None if name.isdigit() and int(name) > 127 else torch.device(device)  # which takes 4090 for another number
    except RuntimeError:
        found = None
    if found is None:
        raise ValueError(
            f"device must be one of this machine, such as 'cpu' or 'cuda:0', or a description: 'cuda:' with a compute "
            f"capability (sm90 or 9.0) or with one of {', '.join(GPUS)}; got {str(device)!r}"
        )
    return Target(found, capability_of(found))


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device of this machine; (0, 0) for other devices."""
    if device.type != "cuda":
        return 0, 0
    if device.index is None or torch.compiler.is_compiling():  # the current device; compilers do not see caches
        return _read_capability(device)
    return _capability(device)


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    """The same, read once. PyTorch asks the driver for the number of devices, and goes through 20 functions."""
    return _read_capability(device)


def _read_capability(device: torch.device) -> tuple[int, int]:
    if not torch.cuda.is_available():
        raise ValueError(
            f"device {str(device)!r} is a GPU of this machine, which has none; describe one by device='cuda:h200' or "
            "device='cuda:sm90'"
        )
    return torch.cuda.get_device_capability(device)


def without_fakes(inputs: Inputs, device: str | torch.device | None) -> tuple[Inputs, Target | None]:
    """The tensors, and the target that is asked for. Fake tensors become meta tensors, and their device is the target.

    The target is None if it is the device of the tensors.
    """
    target, fakes = None if device is None else find_target(device), [x for x in inputs if is_fake(x)]
    if not fakes:
        return inputs, target
    target = find_target(fakes[0].device) if target is None else target
    return Inputs(*(_on_meta(x) if isinstance(x, Tensor) else x for x in inputs)), target


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def is_fake(x: object) -> bool:
    """Whether this is a tensor of a ``FakeTensorMode``."""
    return isinstance(x, FakeTensor)

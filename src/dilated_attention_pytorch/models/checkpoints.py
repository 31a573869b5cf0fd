"""Files of other people's checkpoints: tensors by name, from safetensors files and from those of ``torch.save``."""

from __future__ import annotations

import os
import pickle
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.models.safetensors import read_safetensors
from dilated_attention_pytorch.models.torchscale import stripped


def read_checkpoint(file: str | os.PathLike[str], entries: tuple[str, ...] = ("model",)) -> dict[str, Tensor]:
    """The tensors of a file, without the prefixes of DDP and fairscale in their names.

    A file with the suffix ``.safetensors`` is read by this library. Every other file is read by
    ``torch.load(weights_only=True)``, which runs no code of the file. It holds tensors by name, or a dictionary with
    such a dictionary in one of ``entries``. A file that is truncated or not valid raises a ValueError with its name.
    """
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.suffix == ".safetensors":
        return stripped(read_safetensors(path)[0])
    found = _load(path)
    for entry in entries:
        if isinstance(found, Mapping) and isinstance(found.get(entry), Mapping):
            return stripped(found[entry])
    if not isinstance(found, Mapping) or not found or not all(isinstance(x, Tensor) for x in found.values()):
        content = f"the entries {', '.join(map(str, found))}" if isinstance(found, Mapping) else type(found).__name__
        known = " or ".join(map(repr, entries))
        raise ValueError(f"{path} must hold tensors by name, or a dictionary of them under {known}; it holds {content}")
    return stripped(found)


def _load(path: Path) -> Any:
    # Files of this format can be mapped: tensors are read when they are used, and are not copied before.
    mapped = zipfile.is_zipfile(path)
    try:
        with torch.serialization.safe_globals([Namespace]):  # the arguments of a training script, which hold no code
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (RuntimeError, ValueError, KeyError, EOFError, UnicodeDecodeError, pickle.UnpicklingError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if "GLOBAL" in str(error):
            raise ValueError(
                f"{path} holds Python objects besides tensors, which are not unpickled because that can run code: "
                f"{lines[-1]}. If you trust it, load it with torch.load(weights_only=False) and save its state dict"
            ) from None
        size, reason = path.stat().st_size, lines[0] if lines else type(error).__name__
        raise ValueError(
            f"{path} is not a complete file of torch.save ({size:,} bytes): {reason}. Copy or download it again"
        ) from None

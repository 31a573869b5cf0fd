"""Files of other people's checkpoints: tensors by name, from safetensors files and from those of ``torch.save``."""

from __future__ import annotations

import os
import pickle
import re
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
        names = ", ".join(map(str, found)) if isinstance(found, Mapping) else ""
        content = f"the entries {names}" if names else "no entries" if isinstance(found, Mapping) else type(found).__name__
        known = " or ".join(map(repr, entries))
        raise ValueError(f"{path} must hold tensors by name, or a dictionary of them under {known}; it holds {content}")
    return stripped(found)


def _load(path: Path) -> Any:
    # The directory of an archive is at its end. An archive can be mapped: tensors are read when they are used.
    mapped = zipfile.is_zipfile(path)
    with path.open("rb") as file:
        if file.read(4) == b"PK\x03\x04" and not mapped:
            raise _incomplete(path, "it is an archive without a directory, so it is truncated")
    try:
        with torch.serialization.safe_globals([Namespace]):  # the arguments of a training script, which hold no code
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (RuntimeError, ValueError, KeyError, EOFError, UnicodeDecodeError, pickle.UnpicklingError) as error:
        # The long message of torch.load advises to unpickle anything; the reason is behind these words.
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise ValueError(
                f"{path} holds Python objects besides tensors, which are not unpickled because that can run code: "
                f"{found[1]}. If you trust it, load it with torch.load(weights_only=False) and save its state dict"
            ) from None
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0] or type(error).__name__
        raise _incomplete(path, reason) from None


def _incomplete(path: Path, reason: str) -> ValueError:
    size = path.stat().st_size
    return ValueError(f"{path} is not a complete file of torch.save ({size:,} bytes): {reason}. Copy or download it again")

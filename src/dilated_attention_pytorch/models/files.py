"""Models in folders: ``config.json`` and ``model.safetensors``. Classes for transformers read and write the same files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.dtypes import DTYPES
from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.safetensors import read_safetensors, write_beside, write_safetensors

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_CLASS, _TYPE = "architecture", "model_type"
# What transformers writes into a config besides the fields of a model. It does not change what a model computes.
_OF_TRANSFORMERS = (
    "architectures", "transformers_version", "dtype", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


class Pretrained(nn.Module):
    """A model with a config that can be saved to a folder and loaded from it.

    A subclass takes its config, ``device`` and further options. ``config_type`` has ``to_dict`` and ``from_dict``. The
    constructor makes all parameters on the meta device, and ends with ``materialise``. ``model_type`` is the name of the
    family in transformers, by which its ``AutoConfig`` finds a class.
    """

    config_type: Any = LongNetConfig
    model_type: str | None = None

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def materialise(self, device: torch.device | str | int | None) -> None:
        """Draw parameters on this device, or on PyTorch's default device."""
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type != "meta":
            self.to_empty(device=device)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters, as the constructor does."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write ``config.json`` and ``model.safetensors``. Each file is complete before it gets its name."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: _whole(x) for name, x in self.state_dict().items()}
        write_safetensors(folder / WEIGHTS, tensors, {"format": "pt"})
        family = {} if self.model_type is None else {_TYPE: self.model_type}
        text = json.dumps({_CLASS: type(self).__name__} | family | self.config.to_dict(), indent=2) + "\n"
        write_beside(folder / CONFIG, lambda file: _write(file, text))

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], *, device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None, **options: Any,
    ) -> Self:  # fmt: skip
        """The model that ``save_pretrained`` wrote. Nothing is unpickled, and every tensor must be there.

        Args:
            folder: with ``config.json`` and ``model.safetensors``. The tensors may also be in several files, which
                ``model.safetensors.index.json`` lists, as transformers writes them.
            device, dtype: of the parameters; PyTorch's default device and the dtypes of the file if None.
            options: further arguments of the constructor, for example ``group``.
        """
        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            raise FileNotFoundError(f"{folder} has no {CONFIG}; save_pretrained writes {CONFIG} and {WEIGHTS}")
        try:
            values = json.loads((folder / CONFIG).read_text("utf-8"))
            own = cls._without_foreign(values) if isinstance(values, dict) else cls.__name__
            config = cls.config_type.from_dict(values)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{folder / CONFIG}: {error}") from None
        if own != cls.__name__:
            raise ValueError(f"{folder / CONFIG} is of a {own}; load it with {own}.from_pretrained")
        tensors, source = _tensors(folder)
        return cls.from_tensors(config, tensors, source, device=device, dtype=dtype, **options)

    @classmethod
    def _without_foreign(cls, values: dict[str, Any]) -> str:
        """Remove what is not a field of the config, and return the name of the class."""
        family = values.pop(_TYPE, cls.model_type)
        if family != cls.model_type:
            raise ValueError(f"the {_TYPE} of a {cls.__name__} is {cls.model_type!r}, got {family!r}")
        for name in _OF_TRANSFORMERS:
            values.pop(name, None)
        name = values.pop(_CLASS, cls.__name__)
        return str(name)

    @classmethod
    def from_tensors(
        cls, config: Any, tensors: Mapping[str, Tensor], source: str, *,
        device: torch.device | str | int | None = None, dtype: torch.dtype | None = None, **options: Any,
    ) -> Self:  # fmt: skip
        """The model with these parameters. ``source`` names where they are from, for errors."""
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
        make: Any = cls  # a subclass takes a device
        model: Self = make(config, device="meta", **options)
        tensors = model.adapt(dict(tensors))
        check_tensors_of(model, tensors, source)
        _check_dtypes(tensors, source, dtype)
        device = torch.get_default_device() if device is None else device
        own = {name: x.to(device, dtype if x.is_floating_point() else None, copy=True) for name, x in tensors.items()}
        model.load_state_dict(own, assign=True)
        return model

    def adapt(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors under the names that this model has."""
        return tensors


def _tensors(folder: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors of a folder, and the file that holds or lists them."""
    if (folder / WEIGHTS).is_file():
        return read_safetensors(folder / WEIGHTS)[0], str(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(
            f"{folder} has no {WEIGHTS}, and no {INDEX}, which lists several files; save_pretrained writes {WEIGHTS}"
        )
    try:
        listed = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
        files = sorted({*listed.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / INDEX} must have a 'weight_map' with the file of each tensor: {error!r}") from None
    strange = [str(name) for name in files if not isinstance(name, str) or Path(name).name != name]
    if strange:
        raise ValueError(f"{folder / INDEX} must list files of its own folder by their names, got {', '.join(strange)}")
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{folder / INDEX} lists files that are not there: {', '.join(absent)}; copy them again")
    tensors: dict[str, Tensor] = {}
    for name in files:
        found, _ = read_safetensors(folder / name)
        expected = {tensor for tensor, file in listed.items() if file == name}
        if found.keys() != expected:
            different = ", ".join(sorted(found.keys() ^ expected))
            raise ValueError(f"{folder / name} must hold the tensors that {INDEX} lists for it; these differ: {different}")
        tensors |= found
    return tensors, str(folder / INDEX)


def check_tensors_of(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise unless these are the tensors of the model: all that are missing, unexpected or misshapen are listed."""
    needed = model.state_dict()
    problems = [f"missing: {name} {tuple(needed[name].shape)}" for name in needed if name not in tensors]
    problems += [f"unexpected: {name} {tuple(tensors[name].shape)}" for name in tensors if name not in needed]
    problems += [
        f"misshapen: {name} is {tuple(tensors[name].shape)}, the model has {tuple(x.shape)}"
        for name, x in needed.items()
        if name in tensors and tensors[name].shape != x.shape
    ]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"{source} does not have the tensors of this {type(model).__name__}:\n{lines}")


def _check_dtypes(tensors: Mapping[str, Tensor], source: str, dtype: torch.dtype | None) -> None:
    """Raise unless all tensors have one dtype in which a model computes, or can be converted to ``dtype``."""
    if wrong := [f"{name} is {x.dtype}" for name, x in tensors.items() if x.dtype not in DTYPES]:
        known = ", ".join(map(str, DTYPES))
        raise ValueError(f"{source} has tensors of dtypes other than {known}: {'; '.join(wrong)}")
    by_dtype = {x.dtype: name for name, x in tensors.items()}
    if dtype is None and len(by_dtype) > 1:
        examples = ", ".join(f"{name} is {own}" for own, name in by_dtype.items())
        raise ValueError(f"{source} has tensors of several dtypes: {examples}; pass dtype, to which all are converted")


def _whole(x: Tensor) -> Tensor:
    """The values of a parameter, gathered from all ranks if it is sharded (FSDP2)."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _write(file: Any, text: str) -> None:
    file.write(text.encode())

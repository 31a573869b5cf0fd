"""Files of tensors in the format of the ``safetensors`` package, without a dependency.

A file is the length of its header (8 bytes, little-endian), the header in JSON, and the data of all tensors without gaps.
Nothing in a file is executed. Every number of the header is checked before data is read. Files of this library have the
SHA-256 of their data in the metadata, under ``sha256``, so that a changed byte is an error and not a wrong weight.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import torch
from torch import Tensor

_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "C64": "complex64", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
DTYPES_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, own) for name, own in _NAMES.items() if hasattr(torch, own)}
NAMES_BY_DTYPE = {dtype: name for name, dtype in DTYPES_BY_NAME.items()}
_MOST_HEADER = 100_000_000  # bytes, the limit of the safetensors package
_CHECKSUM, _UNKNOWN = "sha256", "0" * 64


def write_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors to a file. It appears under its name when it is complete: no other program sees half of it."""
    header: dict[str, Any] = {"__metadata__": {**metadata, _CHECKSUM: _UNKNOWN}}
    # Larger elements first, so that every tensor is aligned to its own.
    named = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    start = 0
    for name, x in named:
        if x.dtype not in NAMES_BY_DTYPE:
            known = ", ".join(str(dtype) for dtype in NAMES_BY_DTYPE)
            raise TypeError(f"safetensors files hold the dtypes {known}; {name} has {x.dtype}")
        if x.is_meta or x.layout != torch.strided or name == "__metadata__":
            raise ValueError(f"safetensors files hold dense tensors with values, {name} is {x.layout} on {x.device}")
        header[name] = {"dtype": NAMES_BY_DTYPE[x.dtype], "shape": list(x.shape), "data_offsets": [start, start + x.nbytes]}
        start += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(file: BinaryIO) -> None:
        file.write(struct.pack("<Q", len(text)) + text)
        checksum = hashlib.sha256()
        for _, x in named:
            whole = x.detach().to("cpu").contiguous()  # the name keeps its memory until it is written
            file.write(_bytes(whole))
            checksum.update(_bytes(whole))
        # The checksum has the length of what stood for it. The metadata are the first entry of the header.
        file.seek(8 + text.index(f'"{_CHECKSUM}":"{_UNKNOWN}"'.encode()) + len(f'"{_CHECKSUM}":"'))
        file.write(checksum.hexdigest().encode())

    write_beside(Path(path), write)


def write_beside(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file beside ``path``, flush it to the disk, and rename it. On an error the old file stays as it was."""
    beside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with beside.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _bytes(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview((ctypes.c_char * x.nbytes).from_address(x.data_ptr())) if x.nbytes else memoryview(b"")


def read_safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file and its metadata, without the checksum. The file is mapped into memory.

    A file that is truncated, not valid, or has other data than its checksum says raises a ValueError with its name. Files
    of other programs have no checksum, and their tensors are read when they are used.
    """
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if len(first) < 8 or length > min(size - 8, _MOST_HEADER):
            raise _broken(path, f"it has {size:,} bytes, its header should have {length:,}; it is truncated")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # also of names that occur twice, and of integers that are too long
        raise _broken(path, f"its header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise _broken(path, f"its header must be a JSON object, got {type(header).__name__}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise _broken(path, "its metadata must be strings by name")
    checksum = metadata.pop(_CHECKSUM, None)
    entries = {name: _entry(path, name, entry) for name, entry in header.items()}
    _check_data(path, entries, size - 8 - length)
    if size == 8 + length:  # no tensor has elements
        empty = {name: torch.empty(shape, dtype=dtype, device="cpu") for name, (dtype, shape, _, _) in entries.items()}
        return empty, metadata
    mapped: Any = torch.UntypedStorage.from_file(str(path), False, size)
    data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(mapped)[8 + length :]
    if checksum is not None and hashlib.sha256(_bytes(data)).hexdigest() != checksum:
        raise _broken(path, "its data have another checksum than the one that was written with them; they have changed")
    tensors = {}
    for name, (dtype, shape, start, stop) in entries.items():
        own = data[start:stop]
        own = own if (8 + length + start) % dtype.itemsize == 0 else own.clone()  # views need aligned memory
        tensors[name] = own.view(dtype).reshape(shape)
    return tensors, metadata


class _RepeatedNameError(ValueError):
    """A name that occurs twice in an object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise _RepeatedNameError(f"these names occur twice: {', '.join(repeated)}")
    return dict(pairs)


def _broken(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} is not a valid safetensors file: {reason}. Copy or download it again")


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**63


def _entry(path: Path, name: str, entry: Any) -> tuple[torch.dtype, list[int], int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _broken(path, f"the entry of {name} must have dtype, shape and data_offsets, got {entry!r}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES_BY_NAME:
        known = ", ".join(DTYPES_BY_NAME)
        raise ValueError(f"{path}: {name} has the dtype {dtype!r}; this version of PyTorch reads {known}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise _broken(path, f"the shape of {name} must be a list of sizes, got {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)) or offsets[0] > offsets[1]:
        raise _broken(path, f"the data_offsets of {name} must be two positions in the data, got {offsets!r}")
    nbytes = math.prod(shape) * DTYPES_BY_NAME[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise _broken(path, f"{name} has {offsets[1] - offsets[0]:,} bytes, its shape {shape} of {dtype} needs {nbytes:,}")
    return DTYPES_BY_NAME[dtype], shape, offsets[0], offsets[1]


def _check_data(path: Path, entries: dict[str, tuple[torch.dtype, list[int], int, int]], size: int) -> None:
    """Raise unless the tensors cover the data without gaps and overlaps."""
    end, before = 0, "the header"
    for name, (_, _, start, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if start != end:
            kind = "overlaps with" if start < end else "leaves a gap behind"
            raise _broken(path, f"{name} begins at byte {start:,} and {kind} {before}, which ends at {end:,}")
        end, before = stop, name
    if end != size:
        state = "it is truncated" if end > size else "there is more behind them"
        raise _broken(path, f"its tensors need {end:,} bytes of data, it has {size:,}; {state}")

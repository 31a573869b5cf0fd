"""Files of text or bases as memory-mapped tokens, and fingerprints that show whether a file has changed.

A plain text file is mapped directly. A gzip file is decompressed once, and a FASTA file is translated once to one byte per
base. The results are files in a cache folder, named by the fingerprint of their source, and are mapped like plain text.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor

KINDS = ("bytes", "bases")
VOCABULARIES = {"bytes": 256, "bases": 5}
BASES = "ACGTN"
_FASTA = (".fa", ".fna", ".fasta", ".ffn", ".fas")
_GZIP = b"\x1f\x8b"
_BLOCK = 2**16  # bytes of a sampled block
_SAMPLES = 64  # blocks of a large file that a fingerprint reads
_CHUNK = 2**24
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}  # installed packages differ between machines

# Letters of bases, in upper or lower case. Every letter that is not a base is N, and so are gaps.
_OTHER = bytes(x for x in range(256) if chr(x).isascii() and (chr(x).isalpha() or chr(x) in "*-"))
_TOKEN = bytes.maketrans(_OTHER + b"ACGTacgt", b"\x04" * len(_OTHER) + b"\x00\x01\x02\x03" * 2)
_SPACE = b" \t\r\n"


class DataError(RuntimeError):
    """A data file that cannot be read, or that is not the file of an earlier run."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """The tokens of a file, and where its documents begin."""

    path: str
    fingerprint: str
    tokens: Tensor  # (tokens,), uint8, mapped
    documents: tuple[int, ...]  # the first token of each

    def __len__(self) -> int:
        return len(self.tokens)


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turn errors about a file into one sentence."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path} could not be read: {reason}; repair the file, or leave it out") from error


def standard_library() -> list[Path]:
    """The sources of Python's standard library, sorted."""
    return _below(Path(sysconfig.get_path("stdlib")), ".py")


def _below(folder: Path, suffix: str = "") -> list[Path]:
    found = []
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        found += [Path(directory, name) for name in sorted(names) if name.endswith(suffix)]
    return found


def list_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files of ``paths`` in their order. A folder is all files below it, sorted. No path is the standard library."""
    if not paths:
        return standard_library()
    found: list[Path] = []
    for path in map(Path, paths):
        below = _below(path) if path.is_dir() else [path]
        if not below:
            raise DataError(f"{path} is a folder without files; name a folder with files, or a file")
        found += below
    return found


def kind_of(files: Sequence[Path]) -> str:
    """``"bases"`` if all names are those of FASTA files, such as ``x.fa`` or ``x.fna.gz``, and ``"bytes"`` if none is."""
    names = [str(path).lower().removesuffix(".gz") for path in files]
    fasta = [name.endswith(_FASTA) for name in names]
    if any(fasta) and not all(fasta):
        other = files[fasta.index(False)]
        raise DataError(f"FASTA files and other files have different tokens: got {files[fasta.index(True)]} and {other}")
    return "bases" if all(fasta) and files else "bytes"


def fingerprint(path: Path) -> str:
    """The size of a file and a hash of its content: of all of it up to 4 MiB, else of 64 blocks at equal distances."""
    with _reported(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256()
        if size <= _BLOCK * _SAMPLES:
            digest.update(file.read())
        else:
            for i in range(_SAMPLES):
                file.seek((size - _BLOCK) * i // (_SAMPLES - 1))
                digest.update(file.read(_BLOCK))
    return f"{size}-{digest.hexdigest()[:24]}"


def open_file(path: Path, kind: str, cache: Path) -> DataFile:
    """Map the tokens of a file. What has to be decompressed or translated is written into the folder ``cache`` once."""
    mark = fingerprint(path)
    with _reported(path), path.open("rb") as file:
        packed = file.read(2) == _GZIP
    if kind == "bytes" and not packed:
        return DataFile(str(path), mark, _map(path), (0,))
    stem = cache / f"{path.name}-{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]}-{mark}-{kind}"
    tokens, index = stem.with_name(stem.name + ".tokens"), stem.with_name(stem.name + ".json")
    if not (index.exists() and tokens.exists()):
        _translate(path, kind, (tokens, index))
    return DataFile(str(path), mark, _map(tokens), tuple(json.loads(index.read_text())))


def _map(path: Path) -> Tensor:
    with _reported(path):
        size = path.stat().st_size
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _translate(path: Path, kind: str, targets: tuple[Path, Path]) -> None:
    """Write the tokens and the documents of a file. Names appear when their content is complete."""
    tokens, index = targets
    unfinished = tokens.with_name(f".{tokens.name}.{os.getpid()}")
    try:
        try:
            tokens.parent.mkdir(parents=True, exist_ok=True)
            target = unfinished.open("wb")
        except OSError as error:
            raise DataError(f"{tokens} could not be written: {error.strerror}; choose another folder") from error
        with target:
            documents = _write_tokens(path, kind, target)
        os.replace(unfinished, tokens)
        unfinished.write_text(json.dumps(documents))
        os.replace(unfinished, index)
    finally:
        unfinished.unlink(missing_ok=True)


def _write_tokens(path: Path, kind: str, target: IO[bytes]) -> list[int]:
    with _reported(path), path.open("rb") as raw:
        packed = raw.read(2) == _GZIP
        raw.seek(0)
        source = cast(IO[bytes], gzip.open(raw) if packed else raw)  # noqa: SIM115  "with" closes raw
        if kind == "bases":
            return _write_bases(path, source, target)
        while block := source.read(_CHUNK):
            target.write(block)
    return [0]


def _write_bases(path: Path, source: IO[bytes], target: IO[bytes]) -> list[int]:
    documents: list[int] = []
    count = 0
    for number, line in enumerate(source, 1):
        if line.startswith((b">", b";")):
            if line.startswith(b">") and (not documents or documents[-1] < count):  # a record without bases is no document
                documents.append(count)
            continue
        if not documents:
            if not line.strip():
                continue
            raise DataError(
                f"{path} is not a FASTA file: line {number} comes before the first header, a line that begins with >"
            )
        bases = line.translate(None, _SPACE)
        if left := bases.translate(None, _OTHER):
            raise DataError(f"{path} is not a FASTA file: line {number} contains {left[:8]!r}, which is no letter")
        target.write(bases.translate(_TOKEN))
        count += len(bases)
    return [start for start in documents if start < count]

"""Files of text or bases as tokens on disk, and fingerprints that show whether a file has changed.

A plain text file is read directly. A gzip file is decompressed once, and a FASTA file is translated once to one byte per
base. The results are files in a cache folder, named by the fingerprint of their source, and are read like plain text.
Files are read by system calls and not mapped: a file that becomes shorter is an error and does not end the process.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import json
import os
import stat
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

KINDS = ("bytes", "bases")
VOCABULARIES = {"bytes": 256, "bases": 5}
BASES = "ACGTN"
_FASTA = (".fa", ".fna", ".fasta", ".ffn", ".fas")
_GZIP = b"\x1f\x8b"
_BLOCK = 2**16  # bytes of a sampled block
_SAMPLES = 64  # blocks of a large file that a fingerprint reads
_WHOLE = 2**28  # bytes of a file up to which a fingerprint reads all of it
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
    stored: str  # the file with one byte per token: ``path``, or an unpacked file
    tokens: int
    documents: tuple[int, ...]  # the first token of each; a file without tokens has no document

    def __len__(self) -> int:
        return self.tokens

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill a buffer with the tokens from ``start`` on. Raise a DataError if the file has become too short."""
        stored = Path(self.stored)
        with _reported(stored), stored.open("rb", buffering=0) as file:
            file.seek(start)
            done = 0
            while done < len(buffer):
                if not (count := file.readinto(buffer[done:])):
                    raise DataError(
                        f"{stored} had {self.tokens} tokens when it was opened, and now ends at token {start + done}; "
                        "restore the file and start the command again"
                    )
                done += count


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


def _below(folder: Path, suffix: str = "", leave_out: Path | None = None) -> list[Path]:
    found = []
    hidden = None if leave_out is None else leave_out.resolve()
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in set(folders) - _LEFT_OUT if Path(directory, name).resolve() != hidden)
        found += [Path(directory, name) for name in sorted(names) if name.endswith(suffix)]
    return found


def list_files(paths: Sequence[str | Path], leave_out: Path | None = None) -> list[Path]:
    """The files of ``paths`` in their order. A folder is all files below it, sorted. No path is the standard library.

    ``leave_out`` is the folder of a run. If it lies below a folder of ``paths``, its files are not listed.
    """
    if not paths:
        return standard_library()
    found: list[Path] = []
    for path in map(Path, paths):
        if leave_out is not None and path.is_dir() and path.resolve() == leave_out.resolve():
            raise DataError(f"{path} is the folder of the run, and its files are not data; keep data in another folder")
        below = _below(path, leave_out=leave_out) if path.is_dir() else [path]
        if not below:
            raise DataError(f"{path} is a folder without files; name a folder with files, or a file")
        found += below
    return found


def kind_of(files: Sequence[Path]) -> str:
    """The kind of tokens by the names of files: ``"bases"`` for FASTA files, and ``"bytes"`` for others.

    FASTA files have names such as ``x.fa`` or ``x.fna.gz``. A mixture of both raises a ``DataError``.
    """
    names = [str(path).lower().removesuffix(".gz") for path in files]
    fasta = [name.endswith(_FASTA) for name in names]
    if any(fasta) and not all(fasta):
        other = files[fasta.index(False)]
        raise DataError(
            f"FASTA files and other files have different tokens: got {files[fasta.index(True)]} and {other}; name files of "
            "one format, or read all of them as bytes (--tokens bytes)"
        )
    return "bases" if all(fasta) and files else "bytes"


def fingerprint(path: Path) -> str:
    """The size of a file and a hash of its content: of all of it up to 256 MiB, else of 64 blocks at equal distances."""
    with _reported(path):
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe waits
            raise DataError(f"{path} is not a regular file; write what it gives into a file")
    with _reported(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256()
        if size <= _WHOLE:
            digest = hashlib.file_digest(file, "sha256")
        else:
            for i in range(_SAMPLES):
                file.seek((size - _BLOCK) * i // (_SAMPLES - 1))
                digest.update(file.read(_BLOCK))
    return f"{size}-{digest.hexdigest()[:24]}"


def open_file(path: Path, kind: str, cache: Path) -> DataFile:
    """The tokens of a file. What has to be decompressed or translated is written into the folder ``cache`` once."""
    mark = fingerprint(path)
    with _reported(path), path.open("rb") as file:
        packed = file.read(2) == _GZIP
        size = os.fstat(file.fileno()).st_size
    if kind == "bytes" and not packed:
        return DataFile(str(path), mark, str(path), size, (0,) if size else ())
    stem = cache / f"{path.name}-{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]}-{mark}-{kind}"
    tokens, index = stem.with_name(stem.name + ".tokens"), stem.with_name(stem.name + ".json")
    documents = _unpacked(tokens, index)
    if documents is None:
        documents = _unpack(path, kind, (tokens, index))
    return DataFile(str(path), mark, str(tokens), tokens.stat().st_size, tuple(documents))


def _unpacked(tokens: Path, index: Path) -> list[int] | None:
    """The documents of an unpacked file. None if it does not exist, or if it or its index is damaged."""
    try:
        found, size = json.loads(index.read_bytes()), tokens.stat().st_size
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("tokens") != size or found.get("fingerprint") != fingerprint(tokens):
        return None
    starts = found.get("documents")
    if not isinstance(starts, list) or not all(type(start) is int for start in starts):
        return None
    bounds = [*starts, size]  # starts ascend from 0 on, and every document has tokens
    valid = bounds[0] == 0 and all(a < b for a, b in itertools.pairwise(bounds))
    return starts if valid else None


def _unpack(path: Path, kind: str, targets: tuple[Path, Path]) -> list[int]:
    """Write the tokens and the index of a file, and return its documents. Names appear when their content is durable."""
    tokens, index = targets
    unfinished = tokens.with_name(f".{tokens.name}.{os.getpid()}")
    documents: list[int] = []
    count = 0
    try:
        tokens.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as target:
            for block in _blocks(path, kind, documents):
                count += target.write(block)
            _make_durable(target)
        os.replace(unfinished, tokens)
        documents = [start for start in documents if start < count]
        with unfinished.open("wb") as target:
            found = {"tokens": count, "documents": documents, "fingerprint": fingerprint(tokens)}
            target.write(json.dumps(found).encode())
            _make_durable(target)
        os.replace(unfinished, index)
    except OSError as error:
        raise DataError(
            f"{tokens} could not be written: {error.strerror or error}; free space on its disk, or choose another folder "
            "(train: --out, score: --cache)"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return documents


def _make_durable(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _blocks(path: Path, kind: str, documents: list[int]) -> Iterator[bytes]:
    """The tokens of a file. ``documents`` gets the first token of each document, also of a last one without tokens."""
    with _reported(path), path.open("rb") as raw:
        packed = raw.read(2) == _GZIP
        raw.seek(0)
        source = cast(IO[bytes], gzip.open(raw) if packed else raw)  # noqa: SIM115  "with" closes raw
        if kind == "bases":
            yield from _bases(path, source, documents)
            return
        documents.append(0)
        while block := source.read(_CHUNK):
            yield block


def _bases(path: Path, source: IO[bytes], documents: list[int]) -> Iterator[bytes]:
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
        yield bases.translate(_TOKEN)
        count += len(bases)

"""The tokens of all files as one sequence, and the windows of it that each step reads.

The windows of a step follow from the seed and the step, so that a run that goes on reads what an uninterrupted run reads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.training.files import (
    KINDS,
    VOCABULARIES,
    DataError,
    DataFile,
    fingerprint,
    kind_of,
    list_files,
    open_file,
)

IGNORED = -100  # the target of a position that does not count
_PER_EPOCH = 4  # permutations that are kept in memory


def derived_seed(*numbers: int | str) -> int:
    """A seed that follows from numbers and names, from 0 to 2**63 - 1. It is the same on every machine."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Corpus:
    """Files one after another as one sequence of tokens: bytes, or bases of FASTA files, where A C G T N are 0 to 4."""

    def __init__(self, files: Sequence[DataFile], kind: str) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        self.files, self.kind = tuple(files), kind
        self.ends = tuple(accumulate(map(len, self.files)))
        firsts = (0, *self.ends[:-1])
        self.documents = [first + start for file, first in zip(self.files, firsts, strict=True) for start in file.documents]
        self._marks = [_stamp(Path(file.path)) for file in self.files]

    @classmethod
    def of(cls, paths: Sequence[str | Path], cache: Path, kind: str = "auto", leave_out: Path | None = None) -> Corpus:
        """Open files and folders, or the standard library's sources. ``cache`` is the folder for unpacked files.

        Files below ``leave_out``, the folder of a run, are not data.
        """
        files = list_files(paths, leave_out)
        kind = kind_of(files) if kind == "auto" else kind
        return cls([open_file(path, kind, cache) for path in files], kind)

    @property
    def vocabulary(self) -> int:
        """The number of tokens that exist."""
        return VOCABULARIES[self.kind]

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens ``start`` to ``stop`` as uint8, in memory of their own."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} are not within 0 and {len(self)}")
        found = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        buffer = memoryview((ctypes.c_ubyte * len(found)).from_address(found.data_ptr())).cast("B")
        number = bisect_right(self.ends, start)
        position = start
        while position < stop:
            file, first = self.files[number], self.ends[number] - len(self.files[number])
            until = min(stop, self.ends[number])
            if until > position:
                file.read_into(buffer[position - start : until - start], position - first)
            position, number = until, number + 1
        return found

    def pair(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """``count`` tokens and the token after each, as int64. The first token of a document is not a target."""
        tokens = self.read(start, start + count + 1).long()
        targets = tokens[1:].clone()
        for index in range(bisect_left(self.documents, start + 1), bisect_right(self.documents, start + count)):
            targets[self.documents[index] - start - 1] = IGNORED
        return tokens[:-1], targets

    def ignored(self, start: int, count: int) -> int:
        """How many targets of ``pair`` do not count."""
        return bisect_right(self.documents, start + count) - bisect_left(self.documents, start + 1)

    def targets(self, starts: Sequence[int], count: int) -> int:
        """How many targets of the windows of ``count`` tokens at ``starts`` count. Raise a DataError if it is none."""
        counted = sum(count - self.ignored(start, count) for start in starts)
        if starts and not counted:
            raise DataError(
                f"the first token of a document is not a target, and no other token is in {len(starts)} windows of {count} "
                f"tokens: the first begins at {self.where(starts[0])}; use longer documents, or a longer context"
            )
        return counted

    def where(self, position: int) -> str:
        """The file of a token, and its number in that file."""
        number = bisect_right(self.ends, position)
        return f"{self.files[number].path} token {position - self.ends[number] + len(self.files[number])}"

    def fingerprints(self) -> dict[str, str]:
        """The path of each file and its fingerprint."""
        return {file.path: file.fingerprint for file in self.files}

    def compare(self, earlier: Mapping[str, str]) -> None:
        """Raise a DataError if the files are not those of an earlier run."""
        now = self.fingerprints()
        for path, mark in earlier.items():
            if path not in now:
                raise DataError(f"{path} was read by the run that goes on, and is missing now; restore it")
            if now[path] != mark:
                raise DataError(
                    f"{path} has changed since the run began: its fingerprint was {mark} and is {now[path]}; restore the "
                    "file, or begin a new run in another folder"
                )
        if new := [path for path in now if path not in earlier]:
            raise DataError(
                f"{new[0]} was not read by the run that goes on; leave it out, or begin a new run in another folder"
            )
        if list(now) != list(earlier):
            raise DataError("the files have another order than in the run that goes on; name them in the same order")

    def check_unchanged(self) -> None:
        """Raise a DataError if a file has another size or time of change than when it was opened."""
        for file, mark in zip(self.files, self._marks, strict=True):
            path = Path(file.path)
            if _stamp(path) != mark and (not path.exists() or fingerprint(path) != file.fingerprint):
                raise DataError(f"{path} has changed while the run read it; restore the file and start the command again")


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of ``context`` tokens over the tokens ``first`` to ``last``, in an order that follows from the seed.

    Sample ``k`` of a run is in epoch ``k // per_epoch``. The windows of an epoch begin at multiples of ``context`` minus a
    shift. Windows that would begin before ``first`` or end behind ``last`` are moved inside. The seed and the epoch
    determine the shift and a permutation of the windows. Every target is read in each epoch.
    """

    first: int
    last: int
    context: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.last - self.first <= self.context:
            raise DataError(
                f"a window needs {self.context + 1} tokens, the context and one more, got {self.last - self.first}; use a "
                "shorter context, or more data"
            )

    @property
    def per_epoch(self) -> int:
        """The number of windows in which every target is read."""
        return math.ceil((self.last - self.first - 1) / self.context) + 1

    def start(self, sample: int) -> int:
        """The first token of a sample."""
        epoch, index = divmod(sample, self.per_epoch)
        shift, permutation = _epoch(self.seed, epoch, self.per_epoch, self.context)
        start = self.first + int(permutation[index]) * self.context - shift
        return min(max(start, self.first), self.last - 1 - self.context)

    def starts(self, step: int, batch: int) -> list[int]:
        """The first tokens of the ``batch`` samples of a step. Steps count from 0."""
        return [self.start(step * batch + i) for i in range(batch)]

    def spread(self, count: int) -> list[int]:
        """The first tokens of at most ``count`` windows at equal distances, from the first to the last."""
        span = self.last - self.first - 1 - self.context
        count = min(count, 1 + span // self.context)
        return [self.first + span * i // max(1, count - 1) for i in range(count)]


@functools.lru_cache(maxsize=_PER_EPOCH)
def _epoch(seed: int, epoch: int, windows: int, context: int) -> tuple[int, Tensor]:
    generator = torch.Generator("cpu").manual_seed(derived_seed("windows", seed, epoch))
    shift = int(torch.randint(context, (), generator=generator, device="cpu"))
    return shift, torch.randperm(windows, generator=generator, device="cpu")


def split(corpus: Corpus, context: int, held_out: float, seed: int) -> tuple[Windows, Windows | None]:
    """Windows for training, and windows of the last tokens, the share ``held_out`` of all; None if it is 0."""
    if not len(corpus):
        raise DataError("the files contain no tokens; name files with content")
    kept = round(len(corpus) * held_out)
    if held_out > 0:
        kept = max(kept, context + 1)
    if len(corpus) - kept <= context:
        share = f", of which the held-out share {held_out:g} takes at least one window" if held_out > 0 else ""
        smaller = ", a held-out share of 0" if held_out > 0 else ""
        raise DataError(
            f"a window needs {context + 1} tokens, the context and one more: the files contain {len(corpus)} tokens{share}"
            f"; use a shorter context{smaller}, or more data"
        )
    training = Windows(0, len(corpus) - kept, context, seed)
    return training, Windows(len(corpus) - kept, len(corpus), context, seed) if held_out > 0 else None


def batch_of(corpus: Corpus, starts: Sequence[int], context: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, each (windows, context)."""
    pairs = [corpus.pair(start, context) for start in starts]
    return torch.stack([tokens for tokens, _ in pairs]), torch.stack([targets for _, targets in pairs])


def description(corpus: Corpus) -> dict[str, Any]:
    """What a report says of the data."""
    return {"kind": corpus.kind, "files": len(corpus.files), "tokens": len(corpus), "documents": len(corpus.documents)}

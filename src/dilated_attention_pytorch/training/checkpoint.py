"""Checkpoints of a run: complete, or not there.

A checkpoint is a folder of torch.distributed.checkpoint with one more file, ``state.json``. It is written under a name that
begins with a dot, made durable, and renamed. A process that ends at any moment leaves the checkpoints before it complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dilated_attention_pytorch.streaming import CheckpointError

_FORMAT = 1
_STATE = "state.json"
_NAME = "step-{:09d}"


class SaveError(RuntimeError):
    """A checkpoint that could not be written. The earlier ones are still there."""


def _first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _agree(error: str | None) -> str | None:
    """What the first rank found, on every rank."""
    if not dist.is_initialized():
        return error
    found = [error]
    dist.broadcast_object_list(found, src=0)
    return found[0]


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Hide the warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        yield


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != _STATE}


def _make_durable(path: Path) -> None:
    if os.name != "posix" and path.is_dir():
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class Checkpoints:
    """The checkpoints in a folder. All ranks see the same folder and call each method together."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending."""
        if not self.folder.is_dir():
            return []
        names = [path.name.removeprefix("step-") for path in self.folder.glob("step-*")]
        return sorted(int(name) for name in names if name.isdecimal() and self._complete(int(name)))

    def path(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self.folder / _NAME.format(step)

    def last(self) -> Path | None:
        """The folder of the last complete checkpoint."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def _complete(self, step: int) -> bool:
        try:
            return bool(self.state(step)["files"] == _sizes(self.path(step)))
        except (OSError, CheckpointError):
            return False

    def state(self, step: int) -> dict[str, Any]:
        """What ``save`` was given beside the tensors, and the sizes of the files."""
        path = self.path(step) / _STATE
        try:
            state = json.loads(path.read_text())
        except ValueError as error:
            raise CheckpointError(
                f"{path} is not complete: {error}; delete its folder to go on from the one before"
            ) from error
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise CheckpointError(f"{path} is not a checkpoint in format {_FORMAT}; use another folder")
        return state

    def prepare(self) -> None:
        """Make the folder, and remove what an interrupted run left unfinished."""
        error = None
        if _first_rank():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                for path in self.folder.glob(".step-*"):
                    shutil.rmtree(path)
            except OSError as problem:
                error = f"{self.folder} could not be written: {problem.strerror or problem}; choose another folder"
        if (error := _agree(error)) is not None:
            raise SaveError(error)

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write a checkpoint and remove the oldest ones. If it cannot be written, the others stay as they are."""
        target = self.path(step)
        unfinished = target.with_name(f".{target.name}.unfinished")
        error = None
        try:
            with _one_process():
                save(tensors, storage_writer=FileSystemWriter(unfinished, sync_files=True))
        except (OSError, RuntimeError, CheckpointException) as problem:
            error = _reason(problem)
        if _first_rank():
            try:
                if error is None:
                    self._finish(unfinished, target, {"format": _FORMAT, "step": step, "files": _sizes(unfinished)} | state)
            except OSError as problem:
                error = _reason(problem)
            if error is not None:
                shutil.rmtree(unfinished, ignore_errors=True)
        if (error := _agree(error)) is not None:
            last = self.last()
            kept = "there is no earlier one" if last is None else f"the last good one is {last}"
            raise SaveError(f"the checkpoint of step {step} could not be written: {error}; {kept}")

    def _finish(self, unfinished: Path, target: Path, state: dict[str, Any]) -> None:
        path = unfinished / _STATE
        with path.open("w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        _make_durable(unfinished)
        if target.exists():  # one that is not complete
            self._remove(target)
        unfinished.rename(target)
        _make_durable(self.folder)
        for step in self.steps()[: -self.keep]:
            self._remove(self.path(step))

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint. First its name is changed, so that no half of it is found."""
        hidden = path.with_name(f".{path.name}.removed")
        path.rename(hidden)
        shutil.rmtree(hidden)

    def load(self, step: int, tensors: dict[str, Tensor], *, together: bool = True) -> None:
        """Fill tensors, which may be sharded over other ranks than those that were saved.

        With ``together=False`` one rank fills whole tensors, and the others do not take part.
        """
        path = self.path(step)
        try:
            with _one_process():
                load(tensors, storage_reader=FileSystemReader(path), no_dist=not together)
        except (OSError, RuntimeError, ValueError, CheckpointException) as problem:
            raise CheckpointError(
                f"{path} could not be read: {_reason(problem)}; delete it to go on from the one before"
            ) from problem


def _reason(problem: BaseException) -> str:
    """The error of the operating system that is behind a problem, or the first line of the problem."""
    failures = getattr(problem, "failures", None)
    if failures:
        problem = next(iter(failures.values()))[0]
    seen: BaseException | None = problem
    while seen is not None:
        if isinstance(seen, OSError):
            return seen.strerror or str(seen)
        seen = seen.__cause__ or seen.__context__
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]

"""Checkpoints of a run: complete, or not there.

A checkpoint is a folder of torch.distributed.checkpoint with one more file, ``state.json``, which has the size and the hash
of each of the others. A folder whose files differ from them is damaged and is not used.

A checkpoint is written under a name that begins with a dot, made durable, and renamed. A process that ends at any moment
leaves the checkpoints before it complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dilated_attention_pytorch.streaming import CheckpointError

T = TypeVar("T")
_FORMAT = 1
_STATE = "state.json"
_NAME = "step-{:09d}"
_TYPES = {"step": int, "files": dict, "hashes": dict, "settings": dict, "data": dict}  # of what every state has


class SaveError(RuntimeError):
    """A checkpoint or a folder that could not be written. Earlier checkpoints are still there."""


def _first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _agree(value: T) -> T:
    """What the first rank found, on every rank."""
    if not dist.is_initialized():
        return value
    found = [value]
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


def _hashes(folder: Path) -> dict[str, str]:
    found = {}
    for name in _sizes(folder):
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()
    return found


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
        self._intact: dict[int, bool] = {}  # of the steps whose hashes were compared

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending. Only ``newest`` and ``load`` compare hashes."""
        return [
            step for step in self._found() if self._intact.get(step, True) and self._problem(step, hashes=False) is None
        ]

    def _found(self) -> list[int]:
        """The steps of all folders, ascending."""
        names = {path.name for path in self.folder.glob("step-*")} if self.folder.is_dir() else set()
        steps = (int(name[5:]) for name in names if name[5:].isdecimal())
        return sorted(step for step in steps if self.path(step).name in names)

    def path(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self.folder / _NAME.format(step)

    def last(self) -> Path | None:
        """The folder of the last complete checkpoint."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def newest(self) -> int | None:
        """The step of the last intact checkpoint, or None if there is no folder. Its hashes are compared.

        A warning names the damaged folders that are skipped. If all are damaged, a CheckpointError names them.
        """
        chosen: int | None = None
        damaged: list[tuple[int, str]] = []
        if _first_rank():
            for step in reversed(self._found()):
                problem = self._problem(step, hashes=True)
                if problem is None:
                    chosen = step
                    break
                damaged.append((step, problem))
        chosen, damaged = _agree((chosen, damaged))
        self._intact |= {step: False for step, _ in damaged}
        names = "; ".join(f"{self.path(step)} ({problem})" for step, problem in damaged)
        if chosen is not None:
            self._intact[chosen] = True
            if damaged and _first_rank():
                warnings.warn(f"damaged checkpoints are not used: {names}. The run uses {self.path(chosen)}.", stacklevel=2)
        elif damaged:
            raise CheckpointError(
                f"every checkpoint is damaged: {names}. Restore one of them from a copy, or delete these folders to begin "
                "at step 0."
            )
        return chosen

    def _problem(self, step: int, *, hashes: bool) -> str | None:
        """Why a checkpoint cannot be used; None if it can. Comparing hashes reads all of it."""
        path = self.path(step)
        try:
            state, sizes = self.state(step), _sizes(path)
            found = _hashes(path) if hashes and state["files"] == sizes else state["hashes"]
        except OSError as error:
            return f"{error.filename or path} could not be read: {error.strerror or error}"
        except CheckpointError as error:
            return str(error)
        for expected, actual, what in ((state["files"], sizes, "size"), (state["hashes"], found, "content")):
            for name in {**expected, **actual}:
                if name not in expected or name not in actual:
                    return f"the file {name} is {'missing' if name in expected else 'not one of the checkpoint'}"
                if expected[name] != actual[name]:
                    return f"the {what} of {name} has changed"
        return None

    def state(self, step: int) -> dict[str, Any]:
        """What ``save`` was given beside the tensors, and the sizes and hashes of the files."""
        path = self.path(step) / _STATE
        try:
            state = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not complete: {error}") from error
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise CheckpointError(f"{path} is not a checkpoint in format {_FORMAT}")
        for name, kind in _TYPES.items():
            if not isinstance(state.get(name), kind):
                raise CheckpointError(f"{path} is not complete: {name} must be of type {kind.__name__}")
        if state["step"] != step:
            raise CheckpointError(
                f"{path} is the state of step {state['step']}, and the folder has the name of step {step}"
            )
        settings = state["settings"]
        if not (isinstance(settings.get("model"), dict) and isinstance(settings.get("kind"), str)):
            raise CheckpointError(f"{path} is not complete: the settings must have a model and a kind of tokens")
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
                    files = {"files": _sizes(unfinished), "hashes": _hashes(unfinished)}
                    self._finish(unfinished, step, {"format": _FORMAT, "step": step} | files | state)
            except OSError as problem:
                error = _reason(problem)
            if error is not None:
                shutil.rmtree(unfinished, ignore_errors=True)
        if (error := _agree(error)) is not None:
            last = self.last()
            kept = "there is no earlier one" if last is None else f"the last good one is {last}"
            raise SaveError(f"the checkpoint of step {step} could not be written: {error}; {kept}")
        self._intact[step] = True

    def _finish(self, unfinished: Path, step: int, state: dict[str, Any]) -> None:
        path, target = unfinished / _STATE, self.path(step)
        with path.open("w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        _make_durable(unfinished)
        if target.exists():  # one that is not complete
            self._remove(target)
        unfinished.rename(target)
        self._intact[step] = True
        _make_durable(self.folder)
        for old in self.steps()[: -self.keep]:
            self._remove(self.path(old))

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint. First its name is changed, so that no half of it is found."""
        hidden = path.with_name(f".{path.name}.removed")
        path.rename(hidden)
        shutil.rmtree(hidden)

    def load(self, step: int, tensors: dict[str, Tensor], *, together: bool = True) -> None:
        """Fill tensors, which may be sharded over other ranks than those that were saved. A damaged checkpoint is refused.

        With ``together=False`` one rank fills whole tensors, and the others do not take part.
        """
        path = self.path(step)
        if not self._intact.get(step, False):
            error = self._problem(step, hashes=True) if not together or _first_rank() else None
            error = _agree(error) if together else error
            if error is not None:
                raise CheckpointError(f"{path} is damaged: {error}; delete it to use the one before")
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

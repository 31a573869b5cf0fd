"""A lock on the folder of a run, so that two processes do not write into it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import ModuleType

from dilated_attention_pytorch.training.checkpoint import SaveError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None

_NAME = "run.lock"


class FolderLock:
    """A lock that the kernel releases when the process ends.

    It does nothing where ``fcntl`` is missing, and on file systems without locks.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder and lock it. Raise a SaveError if another run has locked it."""
        path = folder / _NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
        except OSError as problem:
            raise SaveError(
                f"{folder} could not be written: {problem.strerror or problem}; choose another folder"
            ) from problem
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().decode(errors="replace").strip()
            self._file.close()
            raise SaveError(_sentence(folder, owner)) from None
        except OSError:  # the file system has no locks
            return
        with contextlib.suppress(OSError):  # a full disk; the number is only for the sentence
            self._file.truncate(0)
            self._file.write(b"%d\n" % os.getpid())

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


def _sentence(folder: Path, owner: str) -> str:
    if owner == str(os.getpid()):
        return f"{folder} is in use by another Trainer of this process; call its close(), or use another folder"
    return f"{folder} is in use by another run, process {owner or 'unknown'}; wait until it ends, or use another folder"

"""Python processes of the workbench: their command line, and the last thing that one has said."""

from __future__ import annotations

import json
import os
import signal
import sys

_WITH_PATH = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "


def command_line(program: str, *arguments: str) -> list[str]:
    """The command line of a process that runs a program of one line. It imports from where this process imports."""
    paths = json.dumps([os.path.abspath(path) for path in sys.path])
    # -P keeps the folder of the caller from the path if it is not in the path of this process.
    return [sys.executable, "-P", "-c", _WITH_PATH + program, paths, *arguments]


def describe_exit(code: int) -> str:
    """How a process ended, in words.

    >>> describe_exit(-9), describe_exit(3)
    ('ended by SIGKILL', 'ended with exit code 3')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"ended by {names.get(-code, f'signal {-code}')}"


def last_line(text: str) -> str:
    """The last line that is not empty; of a Python traceback, this is the error."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")

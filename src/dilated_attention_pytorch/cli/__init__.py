"""The command ``dilated-attention``. It imports its extras when it runs, so that the library does not need them."""

from __future__ import annotations

import signal
import sys

from dilated_attention_pytorch.cli.streams import guard_streams, say_error
from dilated_attention_pytorch.measure import lacks_memory

_EXTRAS = ("typer", "rich", "matplotlib")


def main() -> int:
    """Run the command and return its exit code. Errors from outside the program are one sentence, without a traceback.

    The codes are 0 for success, 1 for an error of the operating system, 2 for wrong options, 130 for Ctrl-C and 141 if the
    reader of the output has closed it.
    """
    try:
        guard_streams()
        code = _run()
        sys.stdout.flush()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything is done: only the interpreter has to end
    return code


def _run() -> int:
    try:
        from dilated_attention_pytorch.cli.app import app

        app()
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRAS:
            raise
        say_error(
            f"This command needs {name}, which is not installed: run pip install '.[cli,plot]' in a clone of the "
            f"repository, or pip install {' '.join(_EXTRAS)}"
        )
        return 1
    except OSError as error:
        say_error(f"Stopped by an error of the operating system: {error}")
        return 1
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        say_error(f"Stopped: there is too little memory, use smaller sizes: {str(error).partition(chr(10))[0]}")
        return 1
    except KeyboardInterrupt:
        say_error("Interrupted.")
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0

"""The command ``dilated-attention``. It imports its extras when it runs, so that the library does not need them."""

from __future__ import annotations

import os
import sys

_EXTRAS = ("typer", "rich", "matplotlib")


def main() -> None:
    """Run the command. Errors from outside the program end it with one sentence and an exit code, without a traceback."""
    try:
        from dilated_attention_pytorch.cli.app import app

        app()
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRAS:
            raise
        message = f"This command needs {name}, which is not installed: pip install 'dilated-attention-pytorch[cli,plot]'"
        _fail(message, 1)
    except OSError as error:
        # The usual cause is a standard output that cannot be written. Python must not write to it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"Stopped by an error of the operating system: {error}", 1)
    except KeyboardInterrupt:
        _fail("Interrupted.", 130)


def _fail(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)

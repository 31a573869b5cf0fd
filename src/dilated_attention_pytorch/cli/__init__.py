"""The command line ``dilated-attention``. Its extras are imported when it runs, so the library does without them."""

from __future__ import annotations

import os
import sys

_EXTRAS = ("typer", "rich", "matplotlib")


def main() -> None:
    """Run the command line; what goes wrong outside the program is one sentence and an exit code, never a traceback."""
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
        # Mostly a standard output that cannot be written; Python must not try once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"Stopped by an error of the operating system: {error}", 1)
    except KeyboardInterrupt:
        _fail("Interrupted.", 130)


def _fail(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)

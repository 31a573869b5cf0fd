"""Entry point of the command ``dilated-attention``.

This module is outside of the package, because importing the package imports PyTorch, which takes seconds. Ctrl-C ends the
command with one sentence during these imports too. With ``python -m``, the package itself calls ``end_on_interrupt`` first.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def _stop(signal_number: int, frame: FrameType | None) -> None:
    """End the process at once. Commands replace this handler while they have something to clean up."""
    try:
        os.write(2, b"Interrupted.\n")
    finally:
        os._exit(130)


def end_on_interrupt() -> None:
    """Let Ctrl-C end the process with one sentence, unless something else handles it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell starts background jobs without Ctrl-C
        signal.signal(signal.SIGINT, _stop)


def main() -> None:
    """Run the command."""
    end_on_interrupt()
    try:
        from dilated_attention_pytorch.cli import main as run
    except (ImportError, OSError) as error:  # such as a shared library of PyTorch that is missing
        sys.exit(_describe(error))
    sys.exit(run())


def _describe(error: ImportError | OSError) -> str:
    """Why the package cannot be imported, and the way out."""
    import importlib.metadata

    named = "dilated-attention-pytorch"  # another project, whose package has the same import name
    found = [x for x in importlib.metadata.distributions() if (x.metadata["Name"] or "").lower().replace("_", "-") == named]
    if found:
        return (
            f"dilated_attention_pytorch cannot be imported: {error}. {named} {found[0].version} is installed, another "
            f"project with the same import name. Run pip uninstall {named} dilated-attention, then install this one."
        )
    return (
        f"dilated_attention_pytorch cannot be imported: {error}. If a part of PyTorch is missing, install PyTorch again; "
        "otherwise install dilated-attention again."
    )

"""A process that compiles kernels without a GPU, for tests that look at the result. See compile_kernels.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TextIO

SHARED_LIMIT = 232_448  # bytes per block on sm_90
OTHER_SHARED_LIMIT = 101_376  # the least that another GPU has: 99 KiB for a block of an RTX 30, 40 or 50
_SCRIPT = Path(__file__).parent / "compile_kernels.py"


@lru_cache
def _compiler(machine_code: bool) -> tuple[subprocess.Popen, TextIO]:
    """A process that compiles until this one ends, and its errors: its start takes as long as a compilation."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if not machine_code:
        environment["TRITON_DISABLE_LINE_INFO"] = "1"  # saves a fifteenth of the time
    command = [sys.executable, "-W", "ignore", _SCRIPT, "machine-code" if machine_code else "ptx"]
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True), errors


def compiled(cases: list[list], capability: int = 90, *, machine_code: bool = False) -> list[dict]:
    """What each kernel uses, in the order of the cases."""
    process, errors = _compiler(machine_code)
    answers = []
    for case in cases:
        print(json.dumps([capability, *case]), file=process.stdin, flush=True)
        answers.append(process.stdout.readline())
        if not answers[-1]:
            _compiler.cache_clear()
            process.wait()
            errors.seek(0)
            raise AssertionError(f"{case}: {errors.read()}")
    return [json.loads(answer) for answer in answers]

"""A patch of Triton's interpreter that saves a third of its time.

Whenever a kernel calls a function, the interpreter goes through all names of ``triton.language`` and replaces functions.
They have already been replaced when the kernel was launched. The patch leaves out the second replacement.

It applies to the versions of Triton it was written for. With any other version the interpreter stays as it is.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

OLDEST, NEWEST = (3, 6), (3, 9)
_plain_call = InterpretedFunction.__call__


def applies(version: str) -> bool:
    """Whether the patch was written for a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST


@cache
def _languages(function: Callable[..., Any]) -> list[ModuleType]:
    """The modules whose functions are replaced, as a function sees them: ``triton.language`` or its core."""
    return [x for x in function.__globals__.values() if x is tl or x is tl.core]


def _call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    if any(tl.core.is_builtin(language.arange) for language in _languages(self.fn)):
        return _plain_call(self, *args, **kwargs)
    return self.rewrite()(*args, **kwargs)


def install(version: str = triton.__version__) -> None:
    if applies(version):
        InterpretedFunction.__call__ = _call


@contextlib.contextmanager
def not_installed() -> Iterator[None]:
    before = InterpretedFunction.__call__
    InterpretedFunction.__call__ = _plain_call
    try:
        yield
    finally:
        InterpretedFunction.__call__ = before

"""Triton's interpreter, a third faster: importing this changes it.

Whenever a kernel calls a function, the interpreter looks through all names of ``triton.language`` and puts its own
functions in their place, where they have been since the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

call_and_replace = InterpretedFunction.__call__


@cache
def languages(function: Callable[..., Any]) -> list[ModuleType]:
    """What a function calls by the names that are replaced: the language, or its core, from functions of its own."""
    return [x for x in function.__globals__.values() if x is tl or x is tl.core]


def call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    if any(tl.core.is_builtin(language.arange) for language in languages(self.fn)):
        return call_and_replace(self, *args, **kwargs)
    return self.rewrite()(*args, **kwargs)


InterpretedFunction.__call__ = call

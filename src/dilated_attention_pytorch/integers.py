"""Integers as users pass them."""

from __future__ import annotations

from operator import index
from typing import Any


def as_integer(name: str, value: Any, least: int | None = None) -> int:
    """The value as a Python integer, also from NumPy's integers; raise if it is not one, or below ``least``.

    >>> as_integer("world_size", 2, 1)
    2
    """
    rule = f"{name} must be an integer" + ("" if least is None else f", at least {least}")
    if isinstance(value, bool):
        raise TypeError(f"{rule}, got {value!r}")
    try:
        number = value if isinstance(value, int) else index(value)  # compilers trace symbolic integers as they are
    except TypeError:
        raise TypeError(f"{rule}, got {value!r}") from None
    if least is not None and number < least:
        raise ValueError(f"{rule}, got {value!r}")
    return number

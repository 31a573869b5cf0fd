"""A cache of plans that is bounded in bytes."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Generic, ParamSpec, Protocol, TypeVar

Given = ParamSpec("Given")


class Sized(Protocol):
    """A plan that knows its size."""

    @property
    def bytes(self) -> int:
        """About how much memory the plan takes."""


Result = TypeVar("Result", bound=Sized)


class BoundedCache(Generic[Given, Result]):
    """A decorator like ``functools.lru_cache``. The oldest results go when all together take more than ``limit`` bytes.

    The newest result stays in any case, so that a large plan is not made for every call.
    """

    limit = 2**26

    def __init__(self, function: Callable[Given, Result]) -> None:
        self.__wrapped__, self.__doc__ = function, function.__doc__
        self._results: dict[object, tuple[Result, int]] = {}  # the oldest first
        self._lock = Lock()

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """The result of the function, possibly of an earlier call."""
        key = args, tuple(sorted(kwargs.items()))
        with self._lock:
            found = self._results.pop(key, None)
            if found is not None:
                self._results[key] = found  # the newest again
                return found[0]
        result = self.__wrapped__(*args, **kwargs)
        with self._lock:
            self._results[key] = result, result.bytes
            while len(self._results) > 1 and self.bytes > self.limit:
                del self._results[next(iter(self._results))]
        return result

    @property
    def bytes(self) -> int:
        """About how much memory all results take."""
        return sum(size for _, size in self._results.values())

    def cache_clear(self) -> None:
        """Forget all results."""
        with self._lock:
            self._results.clear()

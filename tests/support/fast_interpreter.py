"""Patches of Triton's interpreter that save more than half of its time.

* Whenever a kernel calls a function, the interpreter goes through all names of ``triton.language`` and replaces functions.
  They have already been replaced when the kernel was launched. The patch leaves out the second replacement.
* Every sum and product of integers is computed once more in 64 bits for an assertion that only the debug mode makes. The
  patch computes it in that mode only.
* A table of NumPy's types is made for every look at it. The patch keeps what was found.
* Every tensor and every type of a block makes its shape anew. The patch makes each shape once.

They apply to the versions of Triton they were written for. With any other version the interpreter stays as it is.
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
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

OLDEST, NEWEST = (3, 6), (3, 9)
_plain_call = InterpretedFunction.__call__
# Other versions may have no such functions.
_plain_check = getattr(TritonSemantic, "binary_op_sanitize_overflow_impl", None)
_plain_type = getattr(interpreter, "_get_np_dtype", None)
_plain_block, _plain_tensor, _plain_value = tl.block_type.__init__, tl.tensor.__init__, tl.core._unwrap_if_constexpr
_shapes: dict[tuple[int, ...], tuple[Any, int, str]] = {}  # of types of blocks: shape, number of elements, text
_tensor_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}  # shape and number of elements, as constants of a kernel
_VALUES = (int, float, bool, str, type(None), tl.tensor, tl.dtype)


def applies(version: str) -> bool:
    """Whether the patches were written for a version."""
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


def _check(self: TritonSemantic, *args: Any) -> None:
    if self.builder.options.debug:
        _plain_check(self, *args)


@cache
def _type_of_element(element: Any) -> Any:
    return _plain_type(element)


def _type(tt_dtype: Any) -> Any:
    element = tt_dtype.element_ty if isinstance(tt_dtype, tl.block_type) else tt_dtype
    return _plain_type(element) if isinstance(element, tl.pointer_type) else _type_of_element(element)


def _value(x: Any) -> Any:
    return x.value if type(x) is tl.constexpr else x if type(x) in _VALUES else _plain_value(x)


def _block(self: tl.block_type, element_ty: Any, shape: Any) -> None:
    sizes = tuple(map(_value, shape))
    if sizes not in _shapes:
        _plain_block(self, element_ty, shape)
        _shapes[sizes] = self.shape, self.numel, str(self.shape)
    self.element_ty = element_ty
    self.shape, self.numel, text = _shapes[sizes]
    self.name = f"<{text}, {element_ty}>"


def _tensor(self: tl.tensor, handle: Any, type: Any) -> None:
    sizes = tuple(type.shape) if type.is_block() else ()
    if sizes not in _tensor_shapes:
        _plain_tensor(self, handle, type)
        _tensor_shapes[sizes] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _tensor_shapes[sizes]


def _use(call: Any, check: Any, np_dtype: Any, block: Any, tensor: Any, value: Any) -> None:
    InterpretedFunction.__call__ = call
    TritonSemantic.binary_op_sanitize_overflow_impl = check
    interpreter._get_np_dtype = np_dtype
    tl.block_type.__init__, tl.tensor.__init__, tl.core._unwrap_if_constexpr = block, tensor, value


def install(version: str = triton.__version__) -> None:
    if applies(version):
        _use(_call, _check, _type, _block, _tensor, _value)


def _uninstall() -> None:
    _use(_plain_call, _plain_check, _plain_type, _plain_block, _plain_tensor, _plain_value)


@contextlib.contextmanager
def not_installed() -> Iterator[None]:
    before = InterpretedFunction.__call__
    _uninstall()
    try:
        yield
    finally:
        _uninstall()
        if before is not _plain_call:
            install()

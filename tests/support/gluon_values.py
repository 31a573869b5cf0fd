"""What Gluon kernels compute with, on a CPU: integers with their bits, tensors, pointers, memory; see gluon_on_cpu."""

from __future__ import annotations

import operator
import types

import numpy as np

from gluon_races import Memory, done_reading, start_product

NUMBERS = {"int32": np.int32, "int64": np.int64, "uint32": np.uint32, "uint64": np.uint64}


class Int(int):
    """A scalar integer that knows how many bits it has, and does not overflow."""

    bits: int

    def __new__(cls, value, bits=32):
        low, high = -(2 ** (bits - 1)), 2**bits  # unsigned ones, too
        assert low <= value < high, f"{value} has more than {bits} bits"
        made = super().__new__(cls, value)
        made.bits = bits
        return made

    def to(self, kind):
        if kind.startswith("float"):
            return float(self)
        bits = int(kind[-2:])
        return Int(int(self), bits)


def _bits(*numbers):
    return max(getattr(x, "bits", 32 if abs(int(x)) < 2**31 else 64) for x in numbers)


def _integer_operation(name):
    operation = getattr(int, name)

    def apply(a, b):
        if not isinstance(b, int):  # an array, a pointer, a float
            return NotImplemented
        if name in ("__floordiv__", "__mod__"):
            assert a >= 0, "Triton rounds towards 0"
            assert b > 0
        bits = _bits(a, b)
        found = operation(int(a), int(b))
        assert bits > 32 or -(2**31) <= found < 2**31, f"{int(a)} and {int(b)} by {name}: {found} has more than 32 bits"
        return Int(found, bits)

    return apply


_BOTH_WAYS = ("add", "sub", "mul", "and", "or", "xor")
for _name in (*_BOTH_WAYS, *(f"r{x}" for x in _BOTH_WAYS), "floordiv", "mod", "rshift", "lshift"):
    setattr(Int, f"__{_name}__", _integer_operation(f"__{_name}__"))


class Value(np.ndarray):
    """A tensor in registers. Nothing is changed in place: other names may stand for the same array."""

    type = types.SimpleNamespace(layout=None)

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        plain = [x.view(np.ndarray) if isinstance(x, Value) else int(x) if isinstance(x, Int) else x for x in inputs]
        return value(getattr(ufunc, method)(*plain, **options))

    def to(self, kind):
        return self.astype(NUMBERS.get(kind, np.float32), copy=False)

    def permute(self, order):
        return self.transpose(order)

    def split(self):
        return self[..., 0], self[..., 1]


for _name in ("add", "sub", "mul", "or", "and"):
    _operator = getattr(operator, {"or": "or_", "and": "and_"}.get(_name, _name))
    setattr(Value, f"__i{_name}__", lambda a, b, _operator=_operator: _operator(a, b))


def value(array):
    return np.asarray(array).view(Value)


class Pointer:
    """Some elements of a flat tensor."""

    def __init__(self, memory, offset, element):
        self.memory, self.offset, self.dtype = memory, offset, types.SimpleNamespace(element_ty=element)

    def __add__(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        offset = self.offset + (int(other) if isinstance(other, int) else other.astype(np.int64))
        return Pointer(self.memory, offset, self.dtype.element_ty)

    def to(self, _kind):
        return Int(self.offset, 64)

    def places(self, mask):
        """Of the elements that count, which have to exist."""
        found = np.asarray(self.offset)[mask]
        assert ((found >= 0) & (found < len(self.memory))).all(), "outside of the tensor"
        return found


CELL_COLUMNS = 64  # groups of warps write no fewer columns of a block of rows


class Shared:
    """Shared memory. Accesses are told apart by *cells*: 64 columns of blocks of rows, or single numbers."""

    def __init__(self, array, dtype, memory, cells):
        self.array, self.shape, self.dtype, self.memory, self.cells = array, array.shape, dtype, memory, cells

    @staticmethod
    def allocated(array, dtype):
        each = max(1, array.shape[2] // CELL_COLUMNS) if array.ndim == 3 else array[0].size
        cells = np.arange(len(array) * each).reshape(len(array), each)
        return Shared(array, dtype, Memory(), cells)

    def _view(self, array, cells=None):
        return Shared(array, self.dtype, self.memory, self.cells if cells is None else cells)

    def index(self, i):
        return self._view(self.array[int(i)], self.cells[int(i)])

    def permute(self, order):
        return self._view(self.array.transpose(order))

    def slice(self, start, length, dim):
        assert dim == 1
        assert self.array.ndim == 2
        cells = self.cells[start // CELL_COLUMNS : -(-(start + length) // CELL_COLUMNS)]
        return self._view(self.array[:, start : start + length], cells)

    def reshaped(self, _kind, shape, _layout):
        shape = [int(x) for x in shape]
        return self._view(self.array.reshape(shape), self.cells.reshape(shape))

    @property
    def touched(self):
        """Memory and cells, as races.py takes them."""
        return self.memory, self.cells.ravel().tolist()

    def load(self, _layout):
        memory, cells = self.touched
        memory.reads(cells)
        return value(self.array.copy())

    def store(self, x, copy=None):
        """By the thread itself, or by a copy that it has asked for."""
        assert x.shape == self.array.shape
        memory, cells = self.touched
        memory.writes(cells, copy)
        self.array[...] = x


def load(pointer, mask=True, other=0):
    memory = pointer.memory
    if not isinstance(pointer.offset, np.ndarray):
        found = memory[pointer.places(())] if mask else other
        return float(found) if memory.dtype == np.float32 else Int(int(found), 8 * memory.itemsize)
    mask = np.broadcast_to(mask, pointer.offset.shape)
    found = np.full(mask.shape, other, memory.dtype)
    found[mask] = memory[pointer.places(mask)]
    return value(found)


def store(pointer, x, mask):
    mask = np.broadcast_to(mask, pointer.offset.shape)
    pointer.memory[pointer.places(mask)] = np.broadcast_to(x, mask.shape)[mask]


def product(a, b, sums, use_acc=True, is_async=True):
    start_product([x.touched for x in (a, b) if isinstance(x, Shared)])
    if not is_async:
        done_reading(0)
    a, b = (x.array if isinstance(x, Shared) else x for x in (a, b))
    found = np.asarray(a) @ np.asarray(b)
    return value(found + sums if use_acc else found)


def where(condition, a, b):
    if any(isinstance(x, np.ndarray) for x in (condition, a, b)):
        plain = [int(x) if isinstance(x, Int) else x for x in (condition, a, b)]
        return value(np.where(*plain))
    chosen = a if condition else b
    return Int(int(chosen), _bits(a, b)) if isinstance(a, int) and isinstance(b, int) else chosen


def of_two(array_function, scalar_function, a, b):
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return array_function(*(int(x) if isinstance(x, Int) else x for x in (a, b)))
    return Int(scalar_function(a, b), _bits(a, b))


def reduced(function, x, axis):
    found = function(x, axis=axis)
    return found if found.shape else Int(int(found), 64)

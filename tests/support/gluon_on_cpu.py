"""Gluon kernels on a CPU: their own Python source, with NumPy arrays for tensors and threads for groups of warps.

Triton's interpreter runs the portable kernels, not those in Gluon. Here a kernel is its function with other globals: ``gl``
is a namespace of fakes, barriers are counted, rows come and go as the tensor memory accelerator would bring them.

What shows: wrong indices, masks, orders and counts, waiting for what does not happen (an error after a minute), 32-bit
integers that overflow, addresses outside of a tensor, shared memory that is read before it is written (NaN), or that is
read and written by groups that no barrier has put in order (gluon_races). What does not: layouts, registers, rounding (all
floats have 32 bits), and the order of what is done to global memory, but for sums that programs add to in turns.

    installed(monkeypatch, programs=3, element="bfloat16")
    attention(q, k, v, pattern, backend="hopper")
"""

from __future__ import annotations

import threading
import time
import types
from functools import partial
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon._runtime import GluonJITFunction

import gluon_races as races
from dilated_attention_pytorch.backends.gpu import portable
from dilated_attention_pytorch.backends.gpu.launch import KernelLaunch
from dilated_attention_pytorch.backends.hopper import block_run, run
from dilated_attention_pytorch.backends.hopper.backend import HopperBackend
from gluon_values import NUMBERS, Int, Pointer, Shared, load, of_two, product, reduced, store, value, where

LONGEST_WAIT = 60.0  # seconds that a launch may take


class Program:
    """What the threads of a program share, and whether any thread of the launch has failed."""

    def __init__(self, number, programs, launch):
        self.number, self.programs, self.launch = number, programs, launch


class Launch:
    def __init__(self):
        self.lock, self.errors, self.began = threading.Lock(), [], time.monotonic()
        self.released: dict[int, dict[int, int]] = {}  # what programs knew who left a counter as it is
        self.added_to = races.Memory()  # by row; kernels add to one tensor

    def check(self):
        """Raise if waiting is in vain."""
        assert not self.errors, "another thread has failed"
        assert time.monotonic() < self.began + LONGEST_WAIT, "waited for what does not happen"


_here = threading.local()  # program; additions and copies under way


class Barrier:
    """Completes a phase after so many arrivals."""

    def __init__(self, count):
        self.count = self.left = count
        self.phase, self.changed = 0, threading.Condition()
        self.clocks = [{}, {}]  # of the last even and the last odd phase

    def wait(self, phase):
        with self.changed:
            while not self.changed.wait_for(lambda: self.phase != int(phase), 0.5):
                _here.program.launch.check()
            races.take_up(self.clocks[int(phase)])

    def arrive(self, count, copies=()):
        with self.changed:
            assert self.left >= count, "more arrivals than the barrier counts"
            if self.left == self.count:
                self.clocks[self.phase] = {}
            races.leave(self.clocks[self.phase], copies)
            self.left -= count
            if not self.left:
                self.left, self.phase = self.count, self.phase ^ 1
                self.changed.notify_all()


class Barriers:
    def __init__(self, number):
        self.of = [None] * number

    def index(self, i):
        return self, int(i)


class _Anything:
    """A layout."""

    def __getattr__(self, _name):
        return self

    def __call__(self, *_, **__):
        return self


class _Mbarrier:
    MBarrierLayout = type("MBarrierLayout", (), {})

    @staticmethod
    def init(at, count):
        at[0].of[at[1]] = Barrier(count)

    @staticmethod
    def wait(at, phase):
        at[0].of[at[1]].wait(phase)

    @staticmethod
    def arrive(at, count=1, pred=True, copies=()):
        if pred:
            at[0].of[at[1]].arrive(count, copies)

    @staticmethod
    def expect(_at, _bytes):
        """The one who loads arrives, when the rows are there."""


def _allocate(kind, shape, layout):
    if isinstance(layout, _Mbarrier.MBarrierLayout):
        return Barriers(shape[0])
    shape = [int(x) for x in shape]
    empty = np.full(shape, -(2**40)) if kind in NUMBERS else np.full(shape, np.nan, np.float32)
    return Shared.allocated(empty, kind)


def _atomic_add(pointer, x, sem):
    launch = _here.program.launch
    launch.check()
    with launch.lock:
        before = Int(int(pointer.memory[pointer.offset]))
        pointer.memory[pointer.offset] += x
        if sem == "acquire":
            races.take_up(launch.released.get(pointer.offset, {}))
    if x == 0:
        threading.Event().wait(2e-4)  # it asks again and again
    return before


def _atomic_xchg(pointer, x, sem, mask=True):
    launch = _here.program.launch
    with launch.lock:
        if sem == "release":
            races.leave(launch.released.setdefault(pointer.offset, {}))
        if mask:
            pointer.memory[pointer.offset] = int(x)


class _Descriptor:
    block_type = types.SimpleNamespace(nbytes=0)

    def __init__(self, pointer, shape, strides, block, _layout):
        self.pointer, self.shape, self.step, self.block = pointer, shape, strides[0], block

    def part(self, first, column):
        """The elements of a block that exist: where they lie in it, and in memory."""
        rows = np.arange(max(first, 0), min(first + self.block[0], self.shape[0]))
        columns = np.arange(max(column, 0), min(column + self.block[1], self.shape[1]))
        at = self.pointer + value(rows[:, None] * int(self.step) + columns)
        return np.ix_(rows - first, columns - column), at.places(...)


def _tma_load(desc, coordinates, full, smem):
    inside, at = desc.part(*map(int, coordinates))
    block = np.zeros(desc.block, np.float32)
    block[inside] = desc.pointer.memory[at]
    copy = races.Copy()
    smem.store(block, copy)
    _Mbarrier.arrive(full, copies=(copy,))


def _rows_added_to(desc, coordinates):
    _, at = desc.part(*map(int, coordinates))
    return at[:, 0].tolist() if at.size else []


def _tma_add(desc, coordinates, smem):
    _here.program.launch.added_to.is_over(_rows_added_to(desc, coordinates))
    _here.additions.append([desc, coordinates, smem, None])


def _wait_additions(pending, read):
    """Rows are read, and added, as late as they may be."""
    additions = _here.additions
    done = additions[: len(additions) - pending]
    for addition in done:
        if addition[3] is None:
            memory, cells = addition[2].touched
            memory.reads(cells, by_fence=True)
            addition[3] = addition[2].array.copy()
    if not read:
        for desc, coordinates, _, block in done:
            inside, at = desc.part(*map(int, coordinates))
            _here.program.launch.added_to.writes(_rows_added_to(desc, coordinates))
            desc.pointer.memory[at] += block[inside]
        del additions[: len(done)]


def _copy_elements(smem, pointer):
    _here.copies.append(races.Copy())
    smem.store(load(pointer), _here.copies[-1])


def _arrive_with_copies(at, increment_count):
    """All 32 threads of the producer arrive when what they have copied is there."""
    _Mbarrier.arrive(at, 32, copies=tuple(_here.copies))
    _here.copies.clear()


def _wait_products(pending, deps):
    races.done_reading(pending)
    return deps[0] if len(deps) == 1 else deps


def _warp_specialize(parts, _warps, _registers):
    """A thread for each part; none ends with additions under way."""
    program, known = _here.program, races.known()

    def work(function, arguments):
        _here.program, _here.additions, _here.copies = program, [], []
        races.begin(known)
        try:
            with np.errstate(all="ignore"):
                function(*arguments)
            assert not _here.additions, "additions that nobody waited for"
            races.end()
        except BaseException as error:  # noqa: BLE001  raised by the one who launches
            program.launch.errors.append(error)

    _run_threads([partial(work, *part) for part in parts])


def _run_threads(calls):
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _refuse(condition, message=""):
    assert condition, message


GL = types.SimpleNamespace(
    **{name: name for name in ("int16", "int32", "int64", "uint32", "uint64", "float16", "float32", "bfloat16")},
    **{name: _Anything() for name in ("BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "NVMMASharedLayout",
       "DotOperandLayout", "NVMMADistributedLayout", "DistributedLinearLayout")},
    constexpr=lambda x: x,
    static_range=range,
    static_assert=_refuse,
    program_id=lambda _axis: Int(_here.program.number),
    num_programs=lambda _axis: Int(_here.program.programs),
    warp_specialize=_warp_specialize,
    allocate_shared_memory=_allocate,
    load=load,
    store=store,
    atomic_add=_atomic_add,
    atomic_xchg=_atomic_xchg,
    arange=lambda start, stop, _layout: value(np.arange(start, stop)),
    full=lambda shape, x, kind, _layout: value(np.full(shape, x, NUMBERS.get(kind, np.float32))),
    zeros_like=lambda x: value(np.zeros_like(x)),
    convert_layout=lambda x, _layout, assert_trivial=False: x,
    where=where,
    maximum=partial(of_two, np.maximum, max),
    minimum=partial(of_two, np.minimum, min),
    sum=partial(reduced, np.sum),
    max=partial(reduced, np.max),
    exp2=np.exp2,
    log2=np.log2,
    join=lambda a, b: value(np.stack((a, b), -1)),
    inline_asm_elementwise=lambda *_, **__: None,
)  # fmt: skip
# In place of what modules of kernels import or define under these names.
FAKES = {
    "gl": GL,
    "tl": GL,
    "mbarrier": _Mbarrier,
    "tma": types.SimpleNamespace(make_tensor_descriptor=_Descriptor),
    "async_copy": types.SimpleNamespace(mbarrier_arrive=_arrive_with_copies),
    "tma_load": _tma_load,
    "tma_add": _tma_add,
    "wait_additions": _wait_additions,
    "copy_elements": _copy_elements,
    "reshaped": Shared.reshaped,
    "warpgroup_mma": product,
    "warpgroup_mma_wait": _wait_products,
    "fence_async_shared": races.fence,
    "_prefetch": lambda *_: None,
    # A launch begins when the one before is done.
    "gdc_launch_dependents": lambda: None,
    "gdc_wait": lambda: None,
    "range": lambda *bounds: map(Int, range(*bounds)),
}
_functions: dict[Any, types.FunctionType] = {}


def on_cpu(function):
    """The function of a kernel, or of what a kernel calls, with fakes for globals."""
    function = function.fn
    if function not in _functions:
        made = types.FunctionType(function.__code__, {}, function.__name__, function.__defaults__, function.__closure__)
        _functions[function] = made  # before its globals, which may hold it again
        made.__globals__.update(_namespace(function))
    return _functions[function]


def _namespace(function):
    found = {}
    for name, x in function.__globals__.items():
        if isinstance(x, gluon_language.constexpr):
            found[name] = x.value
        elif hasattr(x, "fn") and callable(x):
            found[name] = on_cpu(x)
        else:
            found[name] = x
    return found | FAKES


def _flat(tensor, element):
    """A pointer to a tensor's first element."""
    storage = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    flat = tensor.detach().as_strided((storage,), (1,))
    # NumPy has no bfloat16; kernels only read such tensors.
    return Pointer(flat.float().numpy() if flat.dtype == torch.bfloat16 else flat.numpy(), 0, element)


def _launch(call, tensors, element):
    launch, function = Launch(), on_cpu(call.kernel)
    names = call.kernel.arg_names
    inputs = {"Q", "K", "V", "DOUT"}
    arguments: list[Any] = []
    for name, x in zip(names, (*tensors, *call.tables, *call.numbers), strict=False):
        if isinstance(x, torch.Tensor):
            arguments.append(_flat(x, element if name in inputs else str(x.dtype).removeprefix("torch.")))
        else:
            arguments.append(x if isinstance(x, float) else Int(x, 32 if abs(x) < 2**31 else 64))
    constants = {name: call.constants[name] for name in names if name in call.constants}

    def work(number):
        _here.program = Program(number, call.programs, launch)
        races.begin()
        try:
            function(*arguments, **constants)
        except BaseException as error:  # noqa: BLE001  raised below
            launch.errors.append(error)

    _run_threads([partial(work, number) for number in range(call.programs)])
    if launch.errors:
        # What the others say follows from the first one.
        raise launch.errors[0]


def installed(monkeypatch, *, programs: int, element: str) -> list[str]:
    """Let backend="hopper" serve float32 tensors on a CPU, by so many programs, as if the inputs were of this type.

    Returns the names of the kernels that are launched, as they are.
    """
    through_triton, launched = KernelLaunch.first, []

    def first(call, kind, tensors, changing):
        if isinstance(call.kernel, GluonJITFunction):
            launched.append(call.kernel.fn.__name__)
            _launch(call, tensors, element)
        else:
            through_triton(call, kind, tensors, changing)

    monkeypatch.setattr(KernelLaunch, "first", first)
    monkeypatch.setattr(portable, "_DELTA_ROWS", 512)  # a program of Triton's interpreter takes 25 ms, however many rows
    for module in (run, block_run):
        monkeypatch.setattr(module, "multiprocessors", lambda _device: programs)
    monkeypatch.setattr(HopperBackend, "why_not", lambda _self, _request: [])
    return launched

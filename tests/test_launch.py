"""Compiled kernels called directly: only where Triton itself would call the same one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no build for this platform")

from dilated_attention_pytorch.backends.triton.launch import Call, launch, launch_one


class Kernel:
    """Stands for a kernel; notes what is compiled and what is called."""

    arg_names = ("X", "n", "scale", "BLOCK", "FLAG")

    def __init__(self) -> None:
        self.compiled, self.called = [], []

    def __getitem__(self, grid):
        def first_call(*values, **constants):
            self.compiled.append((grid, values, constants))
            return Compiled(self, len(self.compiled))

        return first_call


class Compiled:
    def __init__(self, kernel, name) -> None:
        self.kernel, self.name = kernel, name

    def __getitem__(self, grid):
        return lambda *values: self.kernel.called.append((self.name, grid, values))


def test_later_calls_go_to_what_the_first_compiled():
    kernel, x = Kernel(), torch.zeros(64)
    constants = {"num_warps": 4, "FLAG": True, "BLOCK": 32}  # options are no parameters; constants in any order
    launch_one(kernel, 3, (x,), (32, 0.5), constants)
    launch_one(kernel, 3, (x[4:],), (32, 0.5), constants)
    assert [grid for grid, *_ in kernel.compiled] == [(3,)]
    assert kernel.called == [(1, (3, 1, 1), (x[4:].data_ptr(), 32, 0.5, 32, True))]


def test_calls_over_tables_go_over_the_same_tensors():
    kernel, x, tables = Kernel(), torch.zeros(64), torch.zeros(2, 64)
    kernel.arg_names = ("X", "TABLE", "n", "BLOCK")
    calls = [Call(kernel, 3 + i, (tables[i],), (7,), {"BLOCK": 32}) for i in range(2)]
    launch(calls, (x,))
    assert [(grid, [y.data_ptr() for y in values[:2]]) for grid, values, _ in kernel.compiled] == [
        ((3 + i,), [x.data_ptr(), tables[i].data_ptr()]) for i in range(2)
    ]
    assert not kernel.called
    launch(calls, (x[4:],))
    assert kernel.called == [(1 + i, (3 + i, 1, 1), (x[4:].data_ptr(), tables[i].data_ptr(), 7, 32)) for i in range(2)]


def test_what_triton_may_tell_apart_is_compiled_apart():
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    kernel, x = Kernel(), torch.zeros(64)
    constants = {"num_warps": 4, "FLAG": True, "BLOCK": 32}
    for tensor in (x, x[1:], x[4:], x.half(), x.half()[4:]):
        for number in (0, 1, -1, 16, 17, 2**31 - 1, 2**31, 2**40):
            launch_one(kernel, 3, (tensor,), (number, 0.5), constants)
            kinds = tuple(native_specialize_impl(CUDABackend, x, False, True, True) for x in (tensor, number))
            launch_one(kernel, 3, (tensor,), (number, 0.5), constants)
            name = kernel.called[-1][0]
            _, (tensor_then, number_then, _), _ = kernel.compiled[name - 1]
            then = tuple(native_specialize_impl(CUDABackend, x, False, True, True) for x in (tensor_then, number_then))
            assert then == kinds
    before = len(kernel.compiled)
    launch_one(kernel, 3, (x,), (16, 0.5), constants | {"BLOCK": 64})
    launch_one(kernel, 3, (x,), (16, 0.5), constants | {"num_warps": 8})
    assert len(kernel.compiled) == before + 2

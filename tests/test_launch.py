"""Compiled kernels called directly: only what Triton itself would call for the same arguments."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no build for this platform")

from dilated_attention_pytorch.backends.triton import launch as launching


def arguments():
    numbers = [0, 1, -1, 2, 15, 16, -16, 17, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 2**40 + 1]
    store = torch.zeros(64)
    tensors = [store, store[1:], store[4:], store.half(), store.half()[4:], store.int()]
    return [*numbers, 0.0, 1.0, 1.5, *tensors]


def test_arguments_that_triton_tells_apart_are_told_apart():
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    for x, y in itertools.product(arguments(), repeat=2):
        triton_same = [native_specialize_impl(CUDABackend, a, False, True, True) for a in (x, y)]
        if launching._specialisation(x) == launching._specialisation(y):
            assert triton_same[0] == triton_same[1], (x, y)


class Kernel:
    """Stands for a kernel; notes what is compiled and what is called."""

    arg_names = ("X", "n", "scale", "BLOCK", "FLAG")

    def __init__(self) -> None:
        self.compiled, self.called = [], []

    def __getitem__(self, grid):
        def first_call(*values, **constants):
            self.compiled.append((grid, values, constants))
            name = len(self.compiled)
            return Compiled(self, name)

        return first_call


class Compiled:
    def __init__(self, kernel, name) -> None:
        self.kernel, self.name = kernel, name

    def __getitem__(self, grid):
        return lambda *values: self.kernel.called.append((self.name, grid, values))


def test_later_calls_of_a_kind_go_to_what_the_first_compiled():
    kernel, x = Kernel(), torch.zeros(64)
    constants = {"num_warps": 4, "FLAG": True, "BLOCK": 32}  # options are no parameters; constants in any order
    launching.launch(kernel, 3, (x, 32, 0.5), constants)
    launching.launch(kernel, 5, (x[4:], 48, 2.0), constants)
    assert [grid for grid, *_ in kernel.compiled] == [(3,)]
    ((name, grid, values),) = kernel.called
    assert (name, grid) == (1, (5, 1, 1))
    assert values[1:] == (48, 2.0, 32, True)
    for other in ((x[1:], 32, 0.5), (x, 33, 0.5), (x, 1, 0.5), (x, 2**33, 0.5), (x.half(), 32, 0.5)):
        launching.launch(kernel, 3, other, constants)
    launching.launch(kernel, 3, (x, 32, 0.5), constants | {"BLOCK": 64})
    launching.launch(kernel, 3, (x, 32, 0.5), constants | {"num_warps": 8})
    assert len(kernel.compiled) == 8
    assert len(kernel.called) == 1
    launching.launch(kernel, 3, (x, 32, 0.5), constants | {"BLOCK": 64})
    assert kernel.called[-1][0] == 7

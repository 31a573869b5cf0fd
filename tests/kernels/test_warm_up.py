"""Compilation before the first call: everything is compiled, nothing runs, and the first call compiles nothing more."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")

# Triton compiles for a GPU that is not there. Its driver cannot load a kernel, so a launch raises an AttributeError.
DRIVER = """
import json, re, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

class Driver:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Driver())
"""
# Compilation ends after its first stage, because these tests ask only which kernels are compiled, and when. The further
# stages take nine tenths of the time, and test_compiled.py runs them.
FIRST_STAGE = """
all_stages = CUDABackend.add_stages

def add_first_stage(self, stages, *rest):
    all_stages(self, stages, *rest)
    for name in [name for name in stages if name != "ttir"]:
        del stages[name]
    stages["cubin"] = without_machine_code

def without_machine_code(module, metadata):
    metadata.update(name=re.search(r"tt.func public @(\\w+)", str(module))[1], shared=0)
    return b""

CUDABackend.add_stages = add_first_stage
"""
PROGRAM = (
    DRIVER
    + FIRST_STAGE
    + """
from dilated_attention_pytorch import BlockSparse, Dilated, Hilbert, operators
from dilated_attention_pytorch.backends.triton.backend import TRITON
from dilated_attention_pytorch.call import make_call
from dilated_attention_pytorch.values import Saved

compiled, steps = [], []
triton.knobs.compilation.listener = lambda *, metadata, **_: compiled.append(metadata["name"])
q = torch.empty(1, 256, 2, 16, dtype=torch.bfloat16)
ordered = {"is_causal": True, "order": Hilbert.grid(16, 16)}
blocks = BlockSparse.custom(torch.ones(4, 4).bool(), block_size=64)
for pattern, options in ((Dilated([64, 256], [1, 2]), {}), (blocks, {}), (Dilated([64, 256], [1, 2]), ordered)):
    call, inputs = make_call(q, q, q, pattern, **options)
    problem, how = operators.problem_and_options(call, q, q, None, "triton")
    for backward in (False, True, True):
        TRITON.compile(problem, inputs, how, backward=backward)
        steps.append(sorted(compiled))
        compiled.clear()
    for run in (
        lambda: TRITON.forward(problem, inputs, how),
        lambda: TRITON.backward(problem, inputs, Saved(q, torch.empty(1, 2, 256), q), how),
    ):
        try:
            run()
        except AttributeError:
            steps.append(sorted(compiled))
print(json.dumps(steps))
"""
)
# The same with inputs that need gradients, which say that they are on a GPU.
TRAINED = (
    PROGRAM.partition("compiled, steps")[0]
    + """
class OnGpu(torch.Tensor):
    is_cuda = True

compiled, steps = [], []
triton.knobs.compilation.listener = lambda *, metadata, **_: compiled.append(metadata["name"])
for d, warm in ((16, True), (32, False)):
    q = torch.empty(1, 256, 2, d, dtype=torch.bfloat16, requires_grad=True).as_subclass(OnGpu)
    plain = q.as_subclass(torch.Tensor).detach()
    call, _ = make_call(plain, plain, plain, Dilated([64, 256], [1, 2]))
    problem, how = operators.problem_and_options(call, plain, plain)
    if warm:
        TRITON.compile(problem, Inputs(q, q, q), how)
    for run in (
        lambda: TRITON.forward(problem, Inputs(q, q, q), how),
        lambda: TRITON.backward(problem, Inputs(plain, plain, plain), Saved(plain, torch.empty(1, 2, 256), plain), how),
    ):
        try:
            run()
        except AttributeError:
            steps.append(sorted(compiled))
            compiled.clear()
print(json.dumps(steps))
"""
).replace("import Saved", "import Inputs, Saved")
# One kernel of two cannot be compiled. Then the first one is compiled again, with other arguments, and by itself.
BROKEN = (
    DRIVER
    + """
import triton.language as tl
from dilated_attention_pytorch.backends.gpu.launch import KernelLaunch, compile_side_by_side, launch

@triton.jit
def add_kernel(X, N, BLOCK: tl.constexpr):
    tl.store(X + tl.arange(0, BLOCK), 1.0)

@triton.jit
def broken_kernel(X, N, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 0, "this kernel is broken")

x = torch.zeros(64)
good, broken = (KernelLaunch(kernel, 1, (), (64,), {"BLOCK": 16}) for kernel in (add_kernel, broken_kernel))
try:
    compile_side_by_side(lambda: launch((good, broken), (x,)))
except triton.CompilationError as error:
    print("this kernel is broken" in str(error))
compile_side_by_side(lambda: launch((KernelLaunch(add_kernel, 1, (), (64,), {"BLOCK": 32}),), (x,)))
add_kernel.warmup(x, 64, BLOCK=64, grid=(1,))
names = [k.metadata.name for cache in add_kernel.device_caches.values() for k in cache[0].values()]
print(len(names) >= 2, set(names))  # Triton 3.6 does not keep the kernel that was compiled beside the broken one
"""
)


def run(program: str, folder) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    path = folder / "program.py"  # Triton reads the source of kernels
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", path], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everything_is_compiled_and_nothing_runs(tmp_path):
    steps = json.loads(run(PROGRAM, tmp_path))
    dilated, blocks, ordered = steps[:5], steps[5:10], steps[10:]
    # Two launches of each kernel: partial results of rate 2, and rate 1 with these.
    assert dilated == [["forward_kernel"] * 2, ["delta_kernel", *["dkv_kernel"] * 2, *["dq_kernel"] * 2], [], [], []]
    # delta was compiled before.
    assert blocks == [["block_forward_kernel"], ["block_dkv_kernel", "block_dq_kernel"], [], [], []]
    # Both branches have one launch of each kernel, the one over 256 slots and the other over 128.
    # The backward merges sums without lse, and moves numbers of rows. delta was compiled before.
    forward, backward = ["forward_kernel"], ["dkv_kernel", "dq_kernel"]
    assert ordered == [[*forward, "merge_kernel", "move_kernel"], [*backward, "merge_kernel", "move_kernel"], [], [], []]


def test_first_forward_with_gradients_compiles_the_backward(tmp_path):
    """Also where ``warm_up`` has compiled it, inside of which nothing is compiled side by side again."""
    backward = ["delta_kernel", *["dkv_kernel"] * 2, *["dq_kernel"] * 2, *["forward_kernel"] * 2]
    assert json.loads(run(TRAINED, tmp_path)) == [backward, [], backward, []]


def test_a_compilation_that_fails_leaves_nothing_behind(tmp_path):
    assert run(BROKEN, tmp_path).splitlines() == ["True", "True {'add_kernel'}"]

"""What a product of the tensor cores costs by its width and by where its left side lies.

    PYTHONPATH=src python3 benchmarks/products_gpu.py

Cycles of 1,980 MHz for 64 rows by N columns by 16, one to three groups of four warps on a multiprocessor that do nothing
else; ideal is N / 2. Short enough that the clock does not fall.
"""
# ruff: noqa: N803, N806 (names of matrices)

from __future__ import annotations

import torch
from gpu import milliseconds
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from dilated_attention_pytorch.backends.hopper.kernels.common import product_layout

ROUNDS = 2000
MULTIPROCESSORS = 132


@gluon.jit
def products_kernel(OUT, rounds, N: gl.constexpr, K: gl.constexpr, HELD: gl.constexpr):
    L: gl.constexpr = product_layout(N)
    W: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    a_smem = gl.allocate_shared_memory(gl.bfloat16, [64, K], gl.NVMMASharedLayout.get_default_for([64, K], gl.bfloat16))
    b_smem = gl.allocate_shared_memory(gl.bfloat16, [K, N], gl.NVMMASharedLayout.get_default_for([K, N], gl.bfloat16))
    a_smem.store(gl.full([64, K], 0.5, gl.bfloat16, W))
    b_smem.store(gl.full([K, N], 0.5, gl.bfloat16, W))
    fence_async_shared()
    acc = gl.full([64, N], 0.0, gl.float32, L)
    if HELD:
        a = a_smem.load(gl.DotOperandLayout(0, L, 2))
        for _ in range(rounds):
            for _i in gl.static_range(4):
                acc = warpgroup_mma(a, b_smem, acc, is_async=True)
            acc, a = warpgroup_mma_wait(0, deps=(acc, a))
    else:
        for _ in range(rounds):
            for _i in gl.static_range(4):
                acc = warpgroup_mma(a_smem, b_smem, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
    gl.store(OUT + gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(1, L)), gl.sum(acc, 1))


def main() -> None:
    out = torch.zeros(MULTIPROCESSORS * 3 * 64, device="cuda")
    print(f"{'left side':14s} {'N':>4s} {'ideal':>6s}  one, two, three groups")
    for held in (True, False):
        for n in (16, 32, 64, 128):
            cycles = []
            for groups in (1, 2, 3):
                call = lambda n=n, held=held, groups=groups: products_kernel[(MULTIPROCESSORS * groups,)](  # noqa: E731
                    out, ROUNDS, n, 64, held, num_warps=4
                )
                cycles.append(milliseconds(call) * 1.98e6 / (ROUNDS * 4 * 4 * groups))
            where = "registers" if held else "shared memory"
            print(f"{where:14s} {n:4d} {n / 2:6.1f}  " + ", ".join(f"{x:.1f}" for x in cycles), flush=True)


if __name__ == "__main__":
    main()

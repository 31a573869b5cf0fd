"""Small calls of all attention kernels, forward and backward, for NVIDIA's sanitizer; on a Hopper GPU.

PYTHONPATH=src compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py hopper triton
"""

from __future__ import annotations

import sys

import torch

from dilated_attention_pytorch import BlockSparse, Dilated, SparsePatternConfig, attention
from dilated_attention_pytorch.backends.gpu import launch_plan
from dilated_attention_pytorch.backends.hopper import configs, run


def call(pattern: Dilated | BlockSparse, backend: str, head_dim: int, is_causal: bool, dtype=torch.bfloat16) -> None:
    q, k, v = (torch.randn(1, 320, 2, head_dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    out, lse = attention(q, k, v, pattern, is_causal=is_causal, backend=backend, return_lse=True)
    torch.autograd.grad(out.float().sum() + lse.sum(), (q, k, v))
    torch.cuda.synchronize()
    print(backend, type(pattern).__name__, head_dim, "causal" if is_causal else "full", dtype, flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    blocks = BlockSparse.from_config(SparsePatternConfig("local_window", 0.5, block_size=128))
    for name in sys.argv[1:]:
        for size in (64, 128):
            call(Dilated([128, 256], [1, 2]), name, size, is_causal=size == 64)
            call(blocks, name, size, is_causal=size == 128)
        call(Dilated([96, 192], [2, 4]), name, 64, is_causal=False)  # a launch of its own adds up parts
        # Partial results of one head after the other in the same memory.
        launch_plan.PARTIAL_ELEMENTS, whole = 1, launch_plan.PARTIAL_ELEMENTS
        call(Dilated([96, 192], [1, 3]), name, 64, is_causal=True)
        launch_plan.PARTIAL_ELEMENTS = whole
    if "triton" in sys.argv:
        call(Dilated([128, 256], [1, 2]), "triton", 256, is_causal=False)
        call(blocks, "triton", 256, is_causal=True)
        for size in (64, 128, 256):
            call(Dilated([128, 256], [1, 2]), "triton", size, is_causal=size == 64, dtype=torch.float32)
            call(blocks, "triton", size, is_causal=size == 128, dtype=torch.float32)
    run.joint_config = lambda problem, head_dim: configs.configs(head_dim).joint  # at once, of so few rows too
    for head_dim in (48, 128):
        for is_causal in (False, True):
            call(Dilated([160, 320], [1, 2]), "hopper", head_dim, is_causal)

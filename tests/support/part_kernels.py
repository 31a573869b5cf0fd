"""A kernel that copies parts, for test_triton.py, which must do without Triton where there is none."""

import triton
import triton.language as tl

from dilated_attention_pytorch.backends.gpu.kernels.primitives import load_parts


@triton.jit
def copy_parts(PARTS, OUT, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Three of four rows."""
    n, d = tl.arange(0, 4), tl.arange(0, BLOCK_D)
    rows = load_parts(PARTS, n, n < 3, D, BLOCK_D, True)
    tl.store(OUT + n[:, None] * BLOCK_D + d[None, :], rows)

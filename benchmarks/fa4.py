"""FlashAttention-4 on the work of a call of ``cliffs.py --fa4``, for comparison.

Tiles are its batch, and its backward over tiles is deterministic, as ours is. Its backward over block lists is not: that
mode also needs lists that order the writes. All blocks of a list are full, so no mask is evaluated.

Its packages are for Linux, and are imported only by the functions that need them. Wheels that are unpacked into a folder
are found with ``PYTHONPATH=FOLDER:FOLDER/nvidia_cutlass_dsl/dsl_packages``. Hopper needs ``CUTE_DSL_ARCH=sm_90a`` too.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import torch
from torch import Tensor

PACKAGES = "flash-attn-4, nvidia-cutlass-dsl[cu13], quack-kernels, apache-tvm-ffi, torch-c-dlpack-ext and einops"
ROWS = ("tiles 2048 ", "tiles 16384 ", "blocks D=")  # beginnings of names of calls
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def version() -> str:
    """The version of FlashAttention-4, or the end of the program if it cannot be imported."""
    try:
        import flash_attn.cute  # noqa: F401

        return importlib.metadata.version("flash-attn-4")
    except ImportError as error:
        why = " ".join(str(error).split())
        raise SystemExit(f"--fa4 needs the packages {PACKAGES}, which cannot be imported: {why}") from None


def over_tiles(inputs: list[Tensor], tile: int, is_causal: bool) -> tuple[Run, list[Tensor]]:
    """Attention over tiles of a sequence, and its inputs. Their memory is that of ``inputs``."""
    from flash_attn.cute import flash_attn_func

    # Views that are leaves: the forward then writes what a backward needs in all calls, and one kernel is compiled.
    tiles = [x.detach().reshape(-1, tile, *x.shape[2:]).requires_grad_() for x in inputs]
    return lambda q, k, v: flash_attn_func(q, k, v, causal=is_causal, deterministic=True)[0], tiles


def over_blocks(inputs: list[Tensor], mask: Tensor, block: int) -> tuple[Run, list[Tensor]]:
    """Attention over the kept blocks of a mask, which all heads share, and its inputs."""
    from flash_attn.cute import flash_attn_func

    heads = inputs[0].shape[2]
    forward, backward = (block_lists(x, heads, block) for x in (mask, mask.t()))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, block_sparse_tensors=forward, block_sparse_tensors_bwd=backward)[0]

    return run, inputs


def block_lists(mask: Tensor, heads: int, block: int) -> tuple:
    """The kept blocks of every row of a mask, as full blocks. No block is partial."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    counts = mask.sum(-1, dtype=torch.int32)
    indices = mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    lists = (torch.zeros_like(counts), torch.zeros_like(indices), counts, indices)
    return BlockSparseTensorsTorch(*(x.expand(1, heads, *x.shape).contiguous() for x in lists), block_size=(block, block))

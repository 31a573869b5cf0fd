"""cuDNN's block-sparse attention as a method of the benchmark: the package ``nvidia-cudnn-frontend``, forward only."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.workbench.bench_values import BenchProblem


def why_not(problem: BenchProblem) -> str:
    """Why cuDNN's frontend cannot serve a problem; empty if it may."""
    if importlib.util.find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend is not installed"
    if problem.device.type != "cuda" or problem.dtype.itemsize != 2:
        return "it needs a GPU and half precision"
    return ""


def packed_mask(problem: BenchProblem) -> Tensor:
    """The mask as cuDNN reads it, (B, H, query blocks, bytes): key block ``j`` is bit ``j % 8`` of byte ``j // 8``."""
    assert isinstance(problem.pattern, BlockSparse)
    lists = problem.pattern.given_causal if problem.is_causal else problem.pattern.given
    assert lists is not None
    mask = lists.mask()
    mask = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8))
    values = 2 ** torch.arange(8, device=mask.device)
    bits = (mask.view(*mask.shape[:-1], -1, 8) * values).sum(-1).to(torch.uint8)
    return bits.expand(problem.batch, problem.heads, -1, -1).contiguous()


@lru_cache(maxsize=4)
def _graph(problem: BenchProblem) -> tuple[Any, Any, tuple[Any, ...], Tensor, Tensor]:
    """The graph of a problem with its handle, its tensors (q, k, v, mask, out), the mask, and a workspace."""
    cudnn = importlib.import_module("cudnn")
    element = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[problem.dtype]
    handle, mask = cudnn.create_handle(), packed_mask(problem)
    graph = cudnn.pygraph(
        io_data_type=element, intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )  # fmt: skip
    n, heads, d = problem.tokens, problem.heads, problem.head_dim
    shape, strides = (problem.batch, heads, n, d), (n * heads * d, d, heads * d, 1)  # of a (B, N, H, D) tensor
    q, k, v = (graph.tensor(name=name, dim=shape, stride=strides, data_type=element) for name in "qkv")
    blocks = graph.tensor(name="mask", dim=tuple(mask.shape), stride=mask.stride(), data_type=cudnn.data_type.UINT8)
    out, _ = graph.sdpa(
        name="sdpa", q=q, k=k, v=v, generate_stats=False, attn_scale=d**-0.5, block_mask=blocks,
        diagonal_band_right_bound=0 if problem.is_causal else None,
    )  # fmt: skip
    out.set_output(True).set_dim(shape).set_stride(strides)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=problem.device)
    return graph, handle, (q, k, v, blocks, out), mask, workspace


def cudnn_blocks(problem: BenchProblem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Block-sparse attention by cuDNN: tensors are (B, N, H, D)."""
    cudnn = importlib.import_module("cudnn")
    graph, handle, names, mask, workspace = _graph(problem)
    stream = torch.cuda.current_stream().cuda_stream if q.is_cuda else 0
    cudnn.set_stream(handle=handle, stream=stream)
    out = torch.empty_like(q)
    graph.execute(dict(zip(names, (q, k, v, mask, out), strict=True)), workspace, handle=handle)
    return out

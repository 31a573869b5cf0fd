"""The adapter of cuDNN's frontend, with a module in its place that has the names, layouts and bits of its documentation."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from dilated_attention_pytorch import BlockSparse, attention
from dilated_attention_pytorch.workbench import peers_cudnn
from dilated_attention_pytorch.workbench.bench_values import BenchProblem

N, HEADS, D = 1_300, 2, 16  # 11 blocks, which are two bytes


class GraphTensor:
    """A tensor of a graph: the methods return it, as those of cuDNN do."""

    def __init__(self, **given) -> None:
        self.__dict__ |= given

    def set_output(self, value):
        assert value
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self


class Graph:
    """Computes what it is asked for. Tiles of 128 x 128 have a bit each, the lowest bit of a byte first."""

    def __init__(self, *, io_data_type, intermediate_data_type, compute_data_type, handle) -> None:
        self.steps, self.handle = [], handle

    def tensor(self, *, name, dim, stride, data_type):
        return GraphTensor(name=name, dim=dim, stride=stride, data_type=data_type)

    def sdpa(self, *, name, q, k, v, generate_stats, attn_scale, block_mask, diagonal_band_right_bound):
        self.call = q, k, v, block_mask, attn_scale, diagonal_band_right_bound == 0
        self.out = GraphTensor()
        return self.out, None

    def __getattr__(self, name):
        if name in ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"):
            return lambda *_: self.steps.append(name)
        raise AttributeError(name)

    def get_workspace_size(self):
        return 1

    def execute(self, tensors, workspace, handle):
        assert len(self.steps) == 5
        assert handle is self.handle
        *names, scale, is_causal = self.call
        q, k, v, bits = (tensors[x].as_strided(x.dim, x.stride) for x in names)
        assert bits.dtype == torch.uint8
        mask = (bits[..., None] & (1 << torch.arange(8))) != 0
        mask = mask.flatten(-2).repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, : q.shape[2], : k.shape[2]]
        mask = mask & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if is_causal else mask
        scores = (q.float() @ k.float().mT * scale).masked_fill(~mask, float("-inf"))
        tensors[self.out].as_strided(self.out.dim, self.out.stride).copy_(scores.softmax(-1) @ v.float())


@pytest.fixture
def _cudnn(monkeypatch):
    types = SimpleNamespace(BFLOAT16=1, HALF=2, FLOAT=3, UINT8=4)
    module = SimpleNamespace(
        data_type=types, pygraph=Graph, create_handle=object, set_stream=lambda *, handle, stream: None,
        heur_mode=SimpleNamespace(A=0, FALLBACK=1),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cudnn", module)
    yield
    peers_cudnn._graph.cache_clear()


@pytest.mark.usefixtures("_cudnn")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("by_head", [False, True])
def test_what_cudnn_is_asked_for(causal, by_head):
    blocks = -(-N // 128)
    mask = (torch.rand(*((HEADS,) if by_head else ()), blocks, blocks) < 0.5) | torch.eye(blocks, dtype=torch.bool)
    pattern, cpu = BlockSparse.custom(mask, block_size=128), torch.device("cpu")
    problem = BenchProblem("blocks", pattern, N, HEADS, D, torch.float16, cpu, causal, batch=2)
    q, k, v = (torch.randn(2, N, HEADS, D, dtype=torch.float16) for _ in range(3))
    found = peers_cudnn.cudnn_blocks(problem, q, k, v)
    expected = attention(q.float(), k.float(), v.float(), pattern, is_causal=causal)
    torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=2e-3)


def test_why_not():
    pattern = BlockSparse.custom(torch.ones(2, 2).bool(), block_size=128)
    problem = BenchProblem("blocks", pattern, 256, 2, 16, torch.bfloat16, torch.device("cuda"))
    assert peers_cudnn.why_not(problem) == "nvidia-cudnn-frontend is not installed"

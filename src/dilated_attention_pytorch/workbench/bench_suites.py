"""The suites on one device: which problems and methods each of them has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch.api import attention
from dilated_attention_pytorch.backends import BACKENDS
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.backends.targets import Target, capability_of
from dilated_attention_pytorch.cache import DilatedKVCache
from dilated_attention_pytorch.call import make_call
from dilated_attention_pytorch.patterns.blocks import BlockSparse, SparsePatternConfig
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.workbench.bench import BenchGroup, BenchPrediction
from dilated_attention_pytorch.workbench.bench_values import BenchMethod, BenchProblem, BenchSettings, Neighborhood
from dilated_attention_pytorch.workbench.peers import peer_methods
from dilated_attention_pytorch.workbench.peers_cudnn import cudnn_blocks
from dilated_attention_pytorch.workbench.peers_cudnn import why_not as why_not_cudnn

PAPER = Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
WIDE = Dilated([2048, 8192, 32768, 131072, 524288], [1, 4, 16, 64, 256])
GIGAPATH = Dilated([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])
SHORT = Dilated([1024, 2048, 4096, 8192], [1, 2, 4, 8])
Sizes3 = tuple[int, int, int]  # tokens, heads, head size
# By kind of device. Those of a CPU take about a minute on two cores.
SINGLE: dict[str, dict[str, tuple[Dilated, Sizes3]]] = {
    "cpu": {"short": (SHORT, (8192, 8, 64))},
    "cuda": {
        "paper": (PAPER, (2**20, 12, 64)),
        "wide": (WIDE, (2**19, 16, 128)),
        "gigapath": (GIGAPATH, (2**17, 16, 48)),
    },
}
SPARSE: dict[str, Sizes3] = {"cpu": (4096, 8, 64), "cuda": (2**16, 16, 64)}
STREAMING: dict[str, tuple[Dilated, Sizes3]] = {
    "cpu": (Dilated([2048, 8192], [1, 4]), (16384, 8, 64)),
    "cuda": (PAPER, (2**20, 12, 64)),
}
PEERS: dict[str, tuple[Dilated, Sizes3]] = {
    "cpu": (Dilated([512, 1024, 2048], [1, 2, 4]), (2048, 8, 64)),
    "cuda": (PAPER, (2**15, 12, 64)),
}
_BLOCK = 128
_STEPS = 16  # tokens of a streaming check that are decoded one by one


def groups_of(suite: str, settings: BenchSettings) -> list[BenchGroup]:
    """The groups of a suite whose methods take turns. Raise a ValueError if ``only`` names nothing."""
    make = {"single": _single, "sparse": _sparse, "streaming": _streaming, "peers": _peers}[suite]
    found = list(make(settings))
    only = set(settings.only)
    if only:
        _check_only(only, {x for methods, dense in found for y in (*methods, *_dense(dense)) for x in _names(y)})
        found = [
            ([x for x in methods if only & _names(x)], dense if dense and only & _names(dense.method) else None)
            for methods, dense in found
        ]
    return [BenchGroup(suite, settings, methods, dense) for methods, dense in found if methods or dense]


def _check_only(only: set[str], names: set[str]) -> None:
    if not only & names:
        raise ValueError(
            f"--only takes settings and methods separated by commas, got {', '.join(sorted(only))}; there are "
            f"{', '.join(sorted(names))}"
        )


def _names(method: BenchMethod) -> set[str]:
    return {method.problem.name, method.name}


def _dense(prediction: BenchPrediction | None) -> list[BenchMethod]:
    return [] if prediction is None else [prediction.method]


Found = Iterator[tuple[list[BenchMethod], BenchPrediction | None]]


def run_attention(problem: BenchProblem, q: Tensor, k: Tensor, v: Tensor, *, backend: str) -> Tensor:
    """The attention of a problem by a backend of this library."""
    pattern = problem.pattern
    assert not isinstance(pattern, Neighborhood)
    return attention(q, k, v, pattern, is_causal=problem.is_causal, backend=backend)


def run_dense(problem: BenchProblem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's dense attention by the kernel that it chooses."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=problem.is_causal).transpose(1, 2)


def own_methods(problem: BenchProblem, computes: str) -> list[BenchMethod]:
    """A method for each backend except ``reference``, which needs memory by the square of the tokens."""
    found = []
    for backend in BACKENDS:
        if backend.name != "reference":
            run = partial(run_attention, backend=backend.name)
            found.append(BenchMethod(backend.name, problem, computes, run, refused=refusal(problem, backend.name)))
    return found


def refusal(problem: BenchProblem, name: str) -> str:
    """Why a backend cannot serve a problem, in one line; empty if it can."""
    assert not isinstance(problem.pattern, Neighborhood)
    if name == "triton" and problem.device.type == "cpu":
        return "its kernels need a GPU"  # the interpreter of Triton serves tests on a CPU
    like = torch.empty(problem.shape, dtype=problem.dtype, device="meta")
    call, _ = make_call(like, like, like, problem.pattern, is_causal=problem.is_causal)
    request = Request.of(call, Target(problem.device, capability_of(problem.device)))
    return "; ".join(next(x for x in BACKENDS if x.name == name).why_not(request))


def _single(settings: BenchSettings) -> Found:
    for name, (pattern, sizes) in SINGLE[settings.device.type].items():
        problem = settings.problem(name, pattern, sizes)
        tile = pattern.segment_lengths[0] // pattern.dilation_rates[0]
        tiles = BenchProblem(
            name, Dilated([tile], [1]), tile, problem.heads, problem.head_dim, problem.dtype, problem.device,
            problem.is_causal, batch=max(1, problem.tokens // tile),
        )  # fmt: skip
        whole = BenchProblem(
            name, Dilated([problem.tokens], [1]), problem.tokens, problem.heads, problem.head_dim, problem.dtype,
            problem.device, problem.is_causal,
        )  # fmt: skip
        methods = own_methods(problem, "dilated attention")
        methods.append(BenchMethod("dense tiles", tiles, f"dense attention of tiles of {tile:,} tokens", run_dense))
        dense = BenchMethod("dense", whole, "dense attention of the whole sequence", run_dense)
        yield methods, BenchPrediction(dense, "dense tiles")


def _random_blocks(problem: BenchProblem, density: float) -> BlockSparse:
    blocks = -(-problem.tokens // _BLOCK)
    random = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)) < density
    mask = random | torch.eye(blocks, dtype=torch.bool)
    return BlockSparse.custom((mask.tril() if problem.is_causal else mask).to(problem.device), block_size=_BLOCK)


def _sparse(settings: BenchSettings) -> Found:
    sizes = SPARSE[settings.device.type]
    methods = []
    like = settings.problem("", Dilated([_BLOCK], [1]), sizes)
    patterns = {f"random {density:g}": _random_blocks(like, density) for density in (0.05, 0.1, 0.25)}
    for kind in ("local_window", "hierarchical"):
        patterns[f"{kind} 0.1"] = BlockSparse.from_config(SparsePatternConfig(kind, 0.1, block_size=_BLOCK))
    for name, pattern in patterns.items():
        methods += own_methods(settings.problem(name, pattern, sizes), f"blocks of {_BLOCK}")
    whole = settings.problem("dense", Dilated([like.tokens], [1]), sizes)
    yield [*methods, BenchMethod("dense", whole, "dense attention of the whole sequence", run_dense)], None


def _streaming(settings: BenchSettings) -> Found:
    pattern, sizes = STREAMING[settings.device.type]
    problem = settings.problem("stream", pattern, sizes)
    # A cache is always causal.
    problem = BenchProblem(
        "stream", pattern, problem.tokens, problem.heads, problem.head_dim, problem.dtype, problem.device, True
    )
    chunk = max(1, problem.tokens // (8 if settings.device.type == "cpu" else 16))
    computes = "causal dilated attention"
    yield (
        [
            BenchMethod("one call", problem, computes, partial(run_attention, backend="auto"), backward=False),
            BenchMethod(
                f"chunks of {chunk:,}", problem, computes, partial(_in_chunks, chunk=chunk), backward=False
            ),
            BenchMethod(
                "step", problem, f"{computes} of one token", _in_steps, backward=False, prepare=_steps, call_tokens=1
            ),
        ],
        None,
    )  # fmt: skip


def _cache_of(problem: BenchProblem) -> DilatedKVCache:
    assert isinstance(problem.pattern, Dilated)
    return DilatedKVCache(
        problem.pattern, problem.batch, problem.heads, problem.head_dim, dtype=problem.dtype, device=problem.device
    )


def _in_chunks(problem: BenchProblem, q: Tensor, k: Tensor, v: Tensor, *, chunk: int) -> Tensor:
    size = min(chunk, max(1, problem.tokens // 3))  # a small problem has several chunks as well
    return _attend_in(
        _cache_of(problem), (q, k, v), [min(size, problem.tokens - at) for at in range(0, problem.tokens, size)]
    )


def _attend_in(cache: DilatedKVCache, inputs: Sequence[Tensor], sizes: list[int]) -> Tensor:
    """The results of chunks of these sizes."""
    chunks = zip(*(torch.split(x, sizes, 1) for x in inputs), strict=True)
    return torch.cat([cache.attend(*chunk) for chunk in chunks], 1)


def _in_steps(problem: BenchProblem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A prompt, and steps of one token at the end."""
    prompt = max(0, problem.tokens - _STEPS)
    return _attend_in(_cache_of(problem), (q, k, v), [prompt] * (prompt > 0) + [1] * (problem.tokens - prompt))


def _steps(inputs: Sequence[Tensor], problem: BenchProblem) -> Callable[[], Any]:
    """A call of one decoding step behind the whole sequence. The position grows with each call."""
    cache = _cache_of(problem)
    token = [x[:, :1].detach().clone() for x in inputs]
    with torch.no_grad():
        cache.append(*(x.detach() for x in inputs[1:3]))
    return lambda: cache.attend(*token)


def _peers(settings: BenchSettings) -> Found:
    pattern, sizes = PEERS[settings.device.type]
    problem = settings.problem("dilated", pattern, sizes)
    whole = settings.problem("dense", Dilated([problem.tokens], [1]), sizes)
    own = partial(run_attention, backend="auto")
    ours = [
        BenchMethod("this library", problem, "dilated attention", own),
        BenchMethod("this library", whole, "dense attention, as one segment", own),
    ]
    blocks = settings.problem("random blocks 0.1", _random_blocks(problem, 0.1), sizes)
    computes = f"blocks of {_BLOCK}"
    ours.append(BenchMethod("this library", blocks, computes, own))
    refused = why_not_cudnn(blocks)
    cudnn = BenchMethod("cudnn blocks", blocks, computes, cudnn_blocks, backward=False, refused=refused, peer=True)
    yield [*ours, cudnn, *peer_methods(problem, whole, compile_on_cpu="flex" in settings.only)], None

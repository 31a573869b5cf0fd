"""The memory of a rank by component: of a forward, and of a forward with its backward.

The formulas follow the tensors that the executors allocate. Sizes of partial results come from the launch plans of real
calls, and those of messages from schedules. Nothing is fitted. Memory that the allocator keeps without need, and that of
the CUDA context, is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from dilated_attention_pytorch.backends.gpu.launch_plan import PARTIAL_ELEMENTS, partial_rows
from dilated_attention_pytorch.backends.hopper.configs import joint_config
from dilated_attention_pytorch.distributed.own_rows import OwnRows
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.workbench.plan_ranks import RankWork
from dilated_attention_pytorch.workbench.plan_settings import PlanSettings

TABLES = ("hopper", "triton")  # backends with kernels over launch tables


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes of one rank at the moment when it has most."""

    query: int = 0
    key: int = 0
    value: int = 0
    out: int = 0
    lse: int = 0
    partials: int = 0  # partial results, sums in float32 and statistics of rows
    buffers: int = 0  # of messages, both directions
    gradients: int = 0  # of the output and of query, key and value
    weights: int = 0
    weight_gradients: int = 0
    optimizer: int = 0
    activations: int = 0  # of layers, without their attention

    @property
    def total(self) -> int:
        """All together."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def extra(self) -> int:
        """What a call allocates: everything but its inputs and the gradient that it is given."""
        return self.total - self.query - self.key - self.value


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of the tensors of a rank."""

    query: int
    key: int
    rows: int  # rows of queries: samples times heads times positions
    element: int
    sum_element: int

    @property
    def query_sums(self) -> int:
        return self.query // self.element * self.sum_element

    @property
    def key_sums(self) -> int:
        return self.key // self.element * self.sum_element


def _sizes(settings: PlanSettings, rows: int) -> _Sizes:
    element = settings.torch_dtype.itemsize
    each = settings.batch * rows * settings.head_dim * element
    return _Sizes(
        each * settings.heads, each * settings.key_heads, settings.batch * rows * settings.heads, element,
        accumulate_dtype(settings.torch_dtype).itemsize,
    )  # fmt: skip


def _problem(settings: PlanSettings, work: RankWork) -> Problem:
    """The own rows of a rank with its own keys."""
    assert isinstance(settings.pattern, Dilated)
    n = settings.tokens
    whole = Problem(settings.pattern, settings.is_causal, settings.batch, n, n, settings.heads, settings.key_heads)
    if settings.gpus == 1:
        return whole
    if work.transport == "ulysses":
        share = -(-settings.key_heads // settings.gpus)
        return replace(whole, heads=share * whole.heads_per_key, key_heads=share)
    return OwnRows.of(whole, Shards.even(n, settings.gpus, settings.layout), work.rank)


def attention_memory(settings: PlanSettings, work: RankWork, backend: str, *, backward: bool) -> MemoryParts:
    """The most that a rank has at a time during one call, its inputs included.

    A backward has the saved results of the forward as well, and the gradient of the output that it is given.
    """
    s = _sizes(settings, work.rows)
    lse = s.rows * s.sum_element
    partials, gradients = (_backward if backward else _forward)(settings, work, backend, s)
    if backward:
        gradients += s.query  # that it is given
    return MemoryParts(
        query=s.query, key=s.key, value=s.key, out=s.query, lse=lse, partials=partials,
        buffers=_buffers(settings, work, s, backward), gradients=gradients,
    )  # fmt: skip


def _buffers(settings: PlanSettings, work: RankWork, s: _Sizes, backward: bool) -> int:
    """Messages of keys and values in both directions; in a backward also their gradients in the type of sums."""
    if work.transport == "ulysses":  # what is received and sent, as whole tensors
        return 2 * (s.query + 2 * s.key)
    if work.transport == "allgather":
        both = work.received + work.sent
    else:  # two in each direction
        both = 4 * 2 * work.message_rows * settings.head_dim * s.element
    return both + backward * both * s.sum_element // s.element


def _stock_partial(settings: PlanSettings, work: RankWork, s: _Sizes) -> int:
    """The elements of a partial result of stock kernels: their limits are those of execute/loop.py and of executors."""
    elements = s.query // s.element
    limit = max(2**20, elements // 8) if settings.gpus == 1 else max(2**18, elements // 16)
    largest = max((int(t.q_rows * t.count) for t in (*work.own, *work.remote)), default=0) * settings.head_dim
    return min(limit, largest)


def _message_partial_rows(settings: PlanSettings, work: RankWork) -> int:
    """Rows of partial results of one message: every crossing branch has those of its queries."""
    rows = sum(work.crossing) * settings.heads * settings.batch
    return min(rows, PARTIAL_ELEMENTS // settings.head_dim)


def _forward(settings: PlanSettings, work: RankWork, backend: str, s: _Sizes) -> tuple[int, int]:
    """Bytes of partial results and sums beyond out and lse, and none of gradients."""
    ring = settings.gpus > 1 and work.transport != "ulysses"
    rounded = s.query_sums if s.element < s.sum_element else 0  # sums that are rounded to the result
    if backend not in TABLES:
        partial = _stock_partial(settings, work, s) * s.element
        # Sums and lse by position. lse is copied at the end, when the last partial result is gone.
        return rounded + max(partial + partial // settings.head_dim, s.rows * s.sum_element), 0
    if not isinstance(settings.pattern, Dilated):
        return (rounded if ring else 0), 0
    rows = partial_rows(_problem(settings, work), by_keys=False, head_dim=settings.head_dim)
    if not ring:
        return rows * (settings.head_dim + 1) * 4, 0
    partial = max(rows, _message_partial_rows(settings, work)) * (settings.head_dim + 1) * 4
    return (max(partial, s.query) + s.query_sums - s.query if rounded else partial), 0


def _backward(settings: PlanSettings, work: RankWork, backend: str, s: _Sizes) -> tuple[int, int]:
    """Bytes of partial results, sums and statistics, and of the gradients of query, key and value."""
    gradients, sums = s.query + 2 * s.key, s.query_sums + 2 * s.key_sums
    ring = settings.gpus > 1 and work.transport != "ulysses"
    if backend not in TABLES:
        partial = 3 * _stock_partial(settings, work, s) * s.element
        rounded = sums if s.element < s.sum_element else 0
        return rounded + max(partial, 0) + s.rows * s.sum_element, gradients
    statistics = s.rows * (4 + 32 * (backend == "hopper"))
    if not isinstance(settings.pattern, Dilated):
        return statistics + (sums if ring else 0), gradients
    problem, d = _problem(settings, work), settings.head_dim
    joint = backend == "hopper" and joint_config(problem, d) is not None
    by_keys = 2 * d * 4 * partial_rows(problem, by_keys=True, head_dim=d)
    by_queries = 0 if joint else d * 4 * partial_rows(problem, by_keys=False, head_dim=d)
    if joint:
        statistics += s.rows * 4  # counters
    if ring:
        extra = max(by_keys + (s.query_sums if joint else 0), by_queries)
        extra = max(extra, _message_partial_rows(settings, work) * 2 * d * 4)
        # At the end, sums are rounded to gradients.
        return statistics + sums + max(extra - gradients, 0), gradients
    if joint:  # partial results are freed before dq is allocated
        return statistics + s.query_sums + max(by_keys - s.query, 0), gradients
    return statistics + max(by_keys, by_queries - 2 * s.key), gradients


def parameters(config: LongNetConfig) -> int:
    """The parameters of a decoder or encoder, those of norms and biases included.

    >>> parameters(LongNetConfig.preset("small", vocab_size=256))
    38022144
    """
    e, key, f = config.embed_dim, config.key_heads * config.head_dim, config.ffn_dim
    attention = 2 * (e * e + e) + 2 * (e * key + key)
    ffn = 2 * e * f + e + f if config.activation == "gelu" else 3 * e * f
    norms = 4 * e + (2 * (e + f) if config.sub_norm else 0)
    tables = (config.vocab_size or 0) * e * (1 if config.tie_embeddings else 2)
    return config.num_layers * (attention + ffn + norms) + tables + (2 * e if config.final_norm else 0)


def model_memory(settings: PlanSettings, work: RankWork, backend: str) -> MemoryParts:
    """The most that a rank has at a time in a training step, or in a forward without gradients.

    Every rank has all weights. They are float32 in training, with autocast to the type of the settings, and Adam keeps two
    more numbers for each. Without training they are in the type of the settings.
    """
    config = settings.model
    assert config is not None
    count, n, e = parameters(config), settings.batch * work.rows, settings.torch_dtype.itemsize
    width, inner = config.embed_dim, config.ffn_dim
    if not settings.train:
        call = attention_memory(settings, work, backend, backward=False)
        # The states in front of the layer and inside, their norm, and in the feed-forward network two inner tensors.
        ffn = n * e * (3 * width + 2 * inner)
        attention = n * e * 2 * width + call.total
        if ffn >= attention:
            return MemoryParts(weights=count * e, activations=ffn)
        return replace(call, weights=count * e, activations=n * e * 2 * width)
    master = max(4, e)  # residual states and norms are float32 under autocast
    # Saved for the backward of a layer: inputs of three norms, of products (the input of query, key and value three times),
    # and of the activation. Attention saves query, key and value after the rotation, out and lse.
    products = width * (3 if e == master else 5) + 2 * inner
    norms = 3 * width + inner
    layer = n * (norms * master + products * e)
    call = attention_memory(settings, work, backend, backward=True)
    saved = call.query + call.key + call.value + call.out + call.lse
    every = config.num_layers
    states = every * n * width * master if config.checkpoint_layers else (every - 1) * (layer + saved)
    # The widest moment of a backward is that of the norm in front of the second projection: the gradients of its output, of
    # its input and of the states, without the input of the projection, which is free by then. Or it is that of attention,
    # when the tensors of the feed-forward network are gone.
    widest = n * (inner * (2 * master - e) + width * master)
    freed = n * (inner * (master + 2 * e))
    beside = call.total - saved + n * width * master
    activations = states + layer + max(widest, beside - freed - call.gradients)
    attention_moment = beside >= widest + freed
    parts = call if attention_moment else replace(call, partials=0, buffers=0, gradients=0)
    if attention_moment:
        activations = states + layer - freed + n * width * master
    return replace(
        parts, weights=count * master, weight_gradients=count * master, optimizer=2 * count * master,
        activations=activations,
    )  # fmt: skip

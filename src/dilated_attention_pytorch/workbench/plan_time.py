"""The time of a rank: a model of few constants, fitted on some H200 measurements and checked on the others.

A program computes items of 128 rows of a tile. An item takes a fixed time, and a time per query-key pair: products at a
share of the peak of matrix products, and exponentials at the rate of the special function units. On other GPUs both follow
from the table of ``hardware``. ``benchmarks/plan_check.py`` prints predicted against measured times, and docs/planning.md
says which rows the constants were fitted on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dilated_attention_pytorch.backends.hopper.configs import joint_config
from dilated_attention_pytorch.hardware import Link
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.workbench.plan_memory import TABLES, parameters
from dilated_attention_pytorch.workbench.plan_ranks import RankWork, Tiles
from dilated_attention_pytorch.workbench.plan_settings import PlanSettings

ITEM = 128  # query rows, or key rows, that a program computes at a time
CLOCK = 1.83e9  # Hz, of the GPU on which the times of items were fitted


@dataclass(frozen=True, slots=True)
class KernelRates:
    """How fast the kernels of a backend are. Times of items are seconds of one multiprocessor."""

    matmul: float  # share of the peak of matrix products
    forward_exponentials: float  # per pair
    backward_exponentials: float
    forward_item: float
    joint_item: float  # of the kernel of all gradients, by three groups of warps
    wide_joint_item: float  # by two groups, at head sizes above 64
    separate_item: float  # of the kernels of dq and of dk and dv, together


# The forward overlaps exponentials with products, so that less than one per pair is seen. A backward also computes delta.
HOPPER = KernelRates(0.9, 0.68, 1.8, 3.2e-6, 5.7e-6, 14e-6, 14e-6)
# Without warps that only load, and with three products for one of float32.
PORTABLE = KernelRates(0.3, 0.68, 1.8, 3.2e-6, 5.7e-6, 14e-6, 14e-6)
LAUNCH_S = 6e-6  # of a kernel behind another one
HOST_S = {False: 160e-6, True: 810e-6}  # of the host for a call: results/h200_dispatch.json
BANDWIDTH = 0.8  # the share of the memory bandwidth that elementwise operators reach
LINEAR = 0.7  # the share of the peak of matrix products that linear layers reach
LINK = 0.8  # the share of a link's bandwidth that long messages reach


@dataclass(frozen=True, slots=True)
class TimeParts:
    """Seconds of one forward, backward or training step of a rank. ``total`` is less than the sum where parts overlap."""

    compute: float = 0.0  # own queries with own keys
    remote: float = 0.0  # own queries with keys of other ranks
    memory: float = 0.0  # passes over memory beside tiles
    linear: float = 0.0  # matrix products of layers
    communication: float = 0.0
    exposed: float = 0.0  # communication that no computation hides

    @property
    def total(self) -> float:
        """What the rank needs."""
        return self.compute + self.remote + self.memory + self.linear + self.exposed


def _added(parts: Iterable[tuple[float, TimeParts]]) -> TimeParts:
    found = TimeParts()
    for factor, x in parts:
        found = TimeParts(
            *(a + factor * b for a, b in zip(_fields(found), _fields(x), strict=True)),
        )
    return found


def _fields(x: TimeParts) -> tuple[float, ...]:
    return x.compute, x.remote, x.memory, x.linear, x.communication, x.exposed


def _tile_seconds(tiles: tuple[Tiles, ...], settings: PlanSettings, per_pair: float, item: float) -> float:
    """The time of tiles: their pairs, their items, and half an item's time at the end of each launch."""
    gpu, seconds = settings.machine.gpu, 0.0
    for x in tiles:
        # A causal item computes the whole block on the diagonal.
        pairs = x.q_rows * (x.q_rows + min(ITEM, x.q_rows)) / 2 if x.causal else x.q_rows * x.k_rows
        seconds += pairs * x.count * per_pair
        seconds += math.ceil(x.q_rows / ITEM) * x.count * item * CLOCK / gpu.clock / gpu.multiprocessors
    lengths = {x.k_rows for x in tiles if x.count}
    tail = sum(min(ITEM, length) * length * per_pair * gpu.multiprocessors / 2 for length in lengths)
    return seconds + min(tail, seconds) + LAUNCH_S * len(lengths)


def _per_pair(settings: PlanSettings, rates: KernelRates, products: int, exponentials: float) -> float:
    """Seconds of a pair; heads are padded to a power of two."""
    gpu = settings.machine.gpu
    head_dim = max(16, 1 << (settings.head_dim - 1).bit_length())
    return products * head_dim / (rates.matmul * gpu.matmul(settings.dtype)) + exponentials / gpu.exponentials


def is_joint(settings: PlanSettings, backend: str) -> bool:
    """Whether one kernel computes all gradients of the whole problem."""
    if backend != "hopper" or not isinstance(settings.pattern, Dilated):
        return False
    n = settings.tokens
    problem = Problem(settings.pattern, settings.is_causal, settings.batch, n, n, settings.heads, settings.key_heads)
    return joint_config(problem, settings.head_dim) is not None


def attention_seconds(settings: PlanSettings, work: RankWork, backend: str, *, backward: bool) -> TimeParts:
    """A forward, or a backward without its forward."""
    machine, rates = settings.machine, HOPPER if backend == "hopper" else PORTABLE
    elements = settings.batch * work.rows * settings.heads * settings.head_dim
    size, passes = settings.torch_dtype.itemsize, 0.0
    if backward:
        joint = is_joint(settings, backend)
        joint_item = rates.joint_item if settings.head_dim <= 64 else rates.wide_joint_item
        products, item = (10, joint_item) if joint else (14, rates.separate_item)
        per_pair = _per_pair(settings, rates, products, rates.backward_exponentials)
        # delta reads out and its gradient. Sums of dq are filled with 0 and rounded. Statistics of a row are 32 bytes.
        passes = elements * (2 * size + (8 + size if joint else 0)) + elements / settings.head_dim * 32
    else:
        per_pair, item = _per_pair(settings, rates, 4, rates.forward_exponentials), rates.forward_item
        if backend in TABLES and _only_adds(settings):
            passes = elements * (4 + size)  # a launch that only adds partial results
    factor = machine.backward_factor if backward else machine.forward_factor
    own, remote = (factor * _tile_seconds(x, settings, per_pair, item) for x in (work.own, work.remote))
    if settings.gpus > 1 and work.transport != "ulysses":  # sums in float32 are rounded at the end
        passes += elements * (4 + size) * (3 if backward else 1)
    memory = factor * passes / (BANDWIDTH * machine.gpu.bandwidth)
    sent = communication_seconds(settings, work, backward=backward)
    # A ring computes with a message while the next one travels. All messages of an allgather start before the own tiles.
    hidden = {"ring": remote, "allgather": own, "ulysses": 0.0, None: 0.0}[work.transport]
    return TimeParts(own, remote, memory, 0.0, sent, max(0.0, sent - hidden))


def _only_adds(settings: PlanSettings) -> bool:
    return isinstance(settings.pattern, Dilated) and 1 not in settings.pattern.dilation_rates


def communication_seconds(settings: PlanSettings, work: RankWork, *, backward: bool) -> float:
    """The time of all messages of a rank, one after the other: inside the node by its link, between nodes by the other."""
    if work.transport is None or not work.received:
        return 0.0
    received = work.backward_received if backward else work.received
    near = received * work.received_near / work.received
    inside, between = settings.machine.inside, settings.machine.between
    seconds = near / (LINK * inside.bandwidth) + (received - near) / (LINK * between.bandwidth)
    far: Link = between if near < received else inside
    return seconds + work.messages * (2 if backward else 1) * far.latency


def model_seconds(settings: PlanSettings, work: RankWork, backend: str) -> TimeParts:
    """A forward of all layers, or a training step: forward, backward, and the sum of gradients over ranks."""
    config, machine = settings.model, settings.machine
    assert config is not None
    n, layers = settings.batch * work.rows, config.num_layers
    recomputed = settings.train and config.checkpoint_layers
    forwards = 1 + int(recomputed)
    calls = [(float(layers * forwards), attention_seconds(settings, work, backend, backward=False))]
    if settings.train:
        calls.append((float(layers), attention_seconds(settings, work, backend, backward=True)))
    attention = _added(calls)
    table = 0 if config.tie_embeddings else (config.vocab_size or 0) * config.embed_dim
    products = 2 * (parameters(config) - table) * n * (forwards + 2 * settings.train)
    linear = products / (LINEAR * machine.gpu.matmul(settings.dtype))
    bytes_moved = layers * n * _elementwise(config, settings) * (forwards + 2.5 * settings.train)
    memory = bytes_moved / (BANDWIDTH * machine.gpu.bandwidth)
    if settings.train:  # Adam reads and writes weights, gradients and two moments
        memory += 7 * 4 * parameters(config) / (BANDWIDTH * machine.gpu.bandwidth)
    reduced = 0.0
    if settings.train and settings.gpus > 1:
        link = machine.inside if settings.gpus <= machine.gpus_per_node else machine.between
        reduced = 2 * 4 * parameters(config) * (settings.gpus - 1) / settings.gpus / (LINK * link.bandwidth)
    return TimeParts(
        attention.compute, attention.remote, attention.memory + memory, linear,
        attention.communication + reduced, attention.exposed + reduced,
    )  # fmt: skip


def _elementwise(config: LongNetConfig, settings: PlanSettings) -> float:
    """Bytes that the elementwise operators of a layer read and write for a token of a forward.

    Counted in the code of the layer. Under autocast, norms are float32 and their inputs and outputs are converted: 28 bytes
    for a feature of the feed-forward network and 130 for one of the states, of which rotary positions take 60. Without it,
    operators in one type read and write 6 and 20 numbers.
    """
    width, inner, element = config.embed_dim, config.ffn_dim, settings.torch_dtype.itemsize
    if settings.train and element < 4:
        return 28.0 * inner + (130.0 if config.positions != "none" else 70.0) * width
    return element * (6.0 * inner + (20.0 if config.positions == "none" else 40.0) * width)

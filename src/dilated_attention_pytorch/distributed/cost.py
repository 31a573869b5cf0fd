"""Which transport ``"auto"`` takes: a small model of bytes, messages and memory. Plain numbers, without torch."""

from __future__ import annotations

from dataclasses import dataclass

TRANSPORTS = ("auto", "ring", "allgather", "ulysses")
LATENCY_S = 50e-6  # of a message that is waited for, with what it costs to post it and to compute with it
BYTES_PER_S = 10e9
MEMORY_SHARE = 1 / 8  # of a rank's own queries, keys, values and output that messages may take


@dataclass(frozen=True, slots=True)
class Costs:
    """A call's traffic on the rank that has most of it, the same numbers on every rank.

    ``ulysses_bytes`` is None where heads cannot be exchanged.
    """

    bytes: int  # of keys and values that a forward receives
    messages: int
    shard_bytes: int  # queries, keys, values and output of the longest shard
    ulysses_bytes: int | None


def choose_transport(costs: Costs) -> str:
    """The transport of least time, ``messages waited for one by one * 50 us + bytes / (10 GB/s)``.

    * ring: waits for every message; memory for two each way.
    * allgather: waits once; memory for all messages, sent and received, which grows with the ranks, so that it is taken
      only where they stay below an eighth of the rank's own tensors.
    * ulysses: waits twice; memory for one more shard, however many ranks there are.

    Sparse branches bring 1 MiB in 7 messages to a rank with tensors of 32 MiB; a dense segment brings 56 MiB in 112, or
    28 MiB if heads are exchanged instead; with as many query as key heads on two ranks that saves nothing:

    >>> choose_transport(Costs(bytes=2**20, messages=7, shard_bytes=32 * 2**20, ulysses_bytes=None))
    'allgather'
    >>> choose_transport(Costs(bytes=56 * 2**20, messages=112, shard_bytes=32 * 2**20, ulysses_bytes=None))
    'ring'
    >>> choose_transport(Costs(bytes=56 * 2**20, messages=112, shard_bytes=32 * 2**20, ulysses_bytes=28 * 2**20))
    'ulysses'
    >>> choose_transport(Costs(bytes=8 * 2**20, messages=1, shard_bytes=32 * 2**20, ulysses_bytes=8 * 2**20))
    'ring'
    """
    seconds = {"ring": _seconds("ring", costs.bytes, costs)}
    if 2 * costs.bytes <= MEMORY_SHARE * costs.shard_bytes:
        seconds["allgather"] = _seconds("allgather", costs.bytes, costs)
    if costs.ulysses_bytes is not None:
        seconds["ulysses"] = _seconds("ulysses", costs.ulysses_bytes, costs)
    return min(seconds, key=lambda name: seconds[name])


def waits(transport: str, costs: Costs) -> int:
    """How often a rank waits for messages, one after the other."""
    return {"ring": costs.messages, "allgather": min(1, costs.messages), "ulysses": 2}[transport]


def _seconds(transport: str, received: int, costs: Costs) -> float:
    return waits(transport, costs) * LATENCY_S + received / BYTES_PER_S

"""What all ranks must have in common, compared before anything else is sent.

Every call sends one small tensor: the number of this rank's rows, a seed and a hash of everything else. Nobody can leave it
out because his own arguments did not change: those of another may have. Only if hashes differ, or a rank refuses its
arguments, are the facts themselves exchanged, and every rank raises.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from dataclasses import dataclass, fields
from threading import Thread
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch.distributed.transport import backend_for, failure, resolve_group
from dilated_attention_pytorch.shards import Shards

# Hashes that the ranks of a group have agreed on; they are asked only where all lengths are known beforehand.
_agreed: WeakKeyDictionary[dist.ProcessGroup, set[int]] = WeakKeyDictionary()
# How often the ranks of a group have compared: the same number on all.
_comparisons: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_SETTLE_S = 2.0  # time for the others to notice that a comparison has failed


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the ranks of a call have in common; a kind of call has a class of its own."""

    call: ClassVar[str]

    @property
    def hash(self) -> int:
        """63 bits, the same in every process."""
        return int.from_bytes(hashlib.sha256(repr(self).encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True, slots=True)
class Facts(Arguments):
    """Those of ``attention``: they decide, with the rows of every rank, what travels and what is computed."""

    call = "attention"
    version: str
    device: str
    dtype: str
    batch: int
    heads: int
    key_heads: int
    head_dim: int
    requires_grad: bool
    pattern: str
    is_causal: bool
    scale: float
    dropout_p: float
    seed: int | None
    lengths: tuple[int, ...] | None
    cu_seqlens: tuple[int, ...] | None
    order: str | None  # its fingerprint
    mixing_gradient: str
    backend: str
    return_lse: bool
    layout: Any
    bucket_size: int | None
    transport: str
    comm_dtype: str


@dataclass(frozen=True, slots=True)
class Layout(Arguments):
    """Of a call that begins with asking for the rows of all."""

    call = "a pattern by rank"
    layout: str


def agree(group: dist.ProcessGroup, facts: Arguments, rows: int, seed: int) -> tuple[list[int], int]:
    """The rows of every rank, and the seed of the first; the same ValueError on every rank if facts differ."""
    everyone = _gather(group, [rows, seed, facts.hash])
    if any(other[2] != everyone[0][2] or other[0] < 0 for other in everyone):
        _raise(_gather_objects(group, facts))
    return [other[0] for other in everyone], everyone[0][1]


def agree_once(group: dist.ProcessGroup, facts: Arguments, rows: int) -> None:
    """The same for ranks that know the rows of all: nothing is sent if they have agreed before."""
    known = _agreed.setdefault(group, set())
    if facts.hash not in known:
        agree(group, facts, rows, 0)
        known.add(facts.hash)


def shards_of_call(group: dist.ProcessGroup | DeviceMesh, rows: int, layout: str | Shards) -> Shards:
    """The shards of all ranks, each of which says how many rows it has."""
    if isinstance(layout, Shards):
        return layout
    group = resolve_group(group)
    every = [rows] if dist.get_world_size(group) == 1 else agree(group, Layout(layout), rows, 0)[0]
    return Shards.of(every, layout)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it is not traced
def refuse(group: dist.ProcessGroup | DeviceMesh, layout: str | Shards, mistake: Exception) -> None:
    """Tell the others that this rank is about to raise, so that they do not wait for it.

    Not where all lengths are known beforehand: the others may not be listening.
    """
    group = resolve_group(group)
    if dist.get_world_size(group) > 1 and not isinstance(layout, Shards):
        _gather(group, [-1, 0, 0])
        _gather_objects(group, str(mistake))


def _gather(group: dist.ProcessGroup, numbers: list[int]) -> list[list[int]]:
    # NCCL alone has no CPU tensors.
    device = "cpu" if backend_for("cpu", group) else dist.get_backend_config(group).split(":")[0]
    mine = torch.tensor(numbers, device=device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    _comparisons[group] = _comparisons.get(group, 0) + 1
    try:
        dist.all_gather(parts, mine, group=group)
    except RuntimeError as error:
        what = f"rank {dist.get_rank(group)} could not compare its arguments with the others"
        absent = _absent(group)
        raise failure(f"{what}; {_named(absent)} did not come" if absent else what, error) from error
    return torch.stack(parts).tolist()


def _absent(group: dist.ProcessGroup) -> list[int]:
    """Who did not come to a comparison that failed, as far as can be known: a collective does not say whom it waited for.

    Ranks that fail say so in the group's store. By a thread that is not waited for: the process that holds the store may be
    the one that is gone or stalled.
    """
    absent: list[int] = []
    thread = Thread(target=_look_for_others, args=(group, absent), daemon=True)
    thread.start()
    thread.join(_SETTLE_S + 1.0)
    return absent


def _look_for_others(group: dist.ProcessGroup, absent: list[int]) -> None:
    names = [f"comparison {_comparisons[group]} of rank {rank}" for rank in range(dist.get_world_size(group))]
    stop = time.monotonic() + _SETTLE_S
    try:
        store = group.get_group_store()
        store.set(names[dist.get_rank(group)], "failed")
        while time.monotonic() < stop:
            time.sleep(0.1)
            absent[:] = [rank for rank, name in enumerate(names) if not store.check([name])]
            if not absent:
                return
    except RuntimeError:  # the store went with its process: what is known stays
        return


def _gather_objects(group: dist.ProcessGroup, mine: Arguments | str) -> list[Arguments | str]:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _raise(everyone: list[Arguments | str]) -> None:
    refusals = [f"rank {rank} refused its arguments: {x}" for rank, x in enumerate(everyone) if isinstance(x, str)]
    raise ValueError("; ".join(refusals) or differences([x for x in everyone if isinstance(x, Arguments)]))


def differences(everyone: list[Arguments]) -> str:
    """What differs, field by field, and on which ranks."""
    kinds = _by_value([facts.call for facts in everyone])
    if len(kinds) > 1:
        return f"all ranks must make the same call, got {_listed(kinds)}"
    lines = []
    for field in fields(everyone[0]):
        values = _by_value([_short(repr(getattr(facts, field.name))) for facts in everyone])
        if len(values) > 1:
            lines.append(f"  {field.name}: {_listed(values)}")
    return "all ranks must call with the same arguments, apart from the rows of their tensors; these differ:\n" + "\n".join(
        lines
    )


def _by_value(values: list[str]) -> dict[str, list[int]]:
    """The ranks that have each value."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    return ranks


def _listed(ranks: dict[str, list[int]]) -> str:
    return ", ".join(f"{value} on {_named(some)}" for value, some in ranks.items())


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:160]} ... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _named(ranks: list[int]) -> str:
    few = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {few}" if len(ranks) == 1 else f"ranks {few}"

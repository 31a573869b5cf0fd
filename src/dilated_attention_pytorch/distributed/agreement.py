"""What all ranks must have in common, compared before anything else is sent.

In every call, each rank gets three numbers of every rank: its rows, a seed and a hash of all other arguments. No rank can
skip this because its own arguments did not change: those of another rank may have. Only if hashes differ, or a rank refuses
its arguments, do the ranks exchange the arguments themselves, and every rank raises.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

import dilated_attention_pytorch
from dilated_attention_pytorch.call import Call, Sharding
from dilated_attention_pytorch.distributed.failures import GroupError, named, refusal
from dilated_attention_pytorch.distributed.groups import backend_for, resolve_group
from dilated_attention_pytorch.distributed.watch import Watch, watch_of
from dilated_attention_pytorch.orders.kinds import Identity
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.values import Inputs

# The tag of comparisons. In a comparison, a rank gets at most one message from each other rank.
_TAG = 2**30 - 2**11

# Hashes that the ranks of a group have agreed on; read only where all ranks know the rows of all.
_agreed: WeakKeyDictionary[dist.ProcessGroup, set[int]] = WeakKeyDictionary()


# Arguments of a call that are compared, by name. Rows differ, and sharded rows are always in order. The probability and the
# seed of dropout are compared as numbers, because a seed may be an integer on one rank and a tensor on another.
_NOT_AS_GIVEN = ("queries", "keys", "in_order", "sharding", "dropout_p", "seed")
_OF_CALL = tuple(x.name for x in fields(Call) if x.name not in _NOT_AS_GIVEN)
_OF_SHARDING = tuple(x.name for x in fields(Sharding) if x.name != "group")
_NAMES = (*_OF_CALL, *_OF_SHARDING, "dropout_p", "seed", "requires_grad")
_values_of = attrgetter(*_OF_CALL, *(f"sharding.{name}" for name in _OF_SHARDING))


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments that all ranks of a call have in common."""

    function: str
    values: tuple[tuple[str, Any], ...]  # by name
    hash: int = field(init=False, repr=False)  # 63 bits, the same in every process

    def __post_init__(self) -> None:
        digest = hashlib.sha256(repr(self).encode()).digest()
        object.__setattr__(self, "hash", int.from_bytes(digest[:8], "big") >> 1)

    def texts(self) -> dict[str, str]:
        """The values by name, shortened, for messages."""
        return {name: _short(repr(value)) for name, value in self.values}


def arguments_of(call: Call, inputs: Inputs) -> Arguments:
    """The arguments of ``attention``. With the rows of every rank, they decide what travels and what is computed."""
    requires_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    seed = None if call.seed is None or call.dropout_p == 0.0 else int(call.seed)
    values = (*_values_of(call), float(call.dropout_p), seed, requires_grad)
    tensors = call.seed, call.lengths, call.starts, call.cu_seqlens, call.order
    # Equal keys must have equal texts: 0.0 and -0.0 have not.
    is_plain = isinstance(call.pattern, Dilated) and call.scale != 0.0 and all(x is None for x in tensors)
    return _known_arguments(*values) if is_plain else _make_arguments(*values)


def _make_arguments(*values: Any) -> Arguments:
    named = zip(_NAMES, map(comparable, values), strict=True)
    return Arguments("attention", (("version", dilated_attention_pytorch.__version__), *named))


_known_arguments = lru_cache(maxsize=64, typed=True)(_make_arguments)


def comparable(value: Any) -> Any:
    """The same for equal values in every process."""
    if isinstance(value, BlockSparse):
        return value.digest
    if isinstance(value, Dilated):
        return value.spec
    if isinstance(value, Shards):
        return value.identity
    if isinstance(value, Order):
        # The identity by its name: it is computed without positions, and an order equal to it is not.
        return repr(value) if isinstance(value, Identity) else value.fingerprint
    if isinstance(value, Tensor):
        return tuple(value.tolist())
    if isinstance(value, torch.device):
        return value.type
    return str(value) if isinstance(value, torch.dtype) else value


def agree(group: dist.ProcessGroup, arguments: Arguments, rows: int, seed: int = 0) -> tuple[list[int], int]:
    """The rows of every rank, and the seed of the first; the same ValueError on every rank if arguments differ."""
    everyone = _gather(group, [rows, seed, arguments.hash])
    if any(other[2] != everyone[0][2] or other[0] < 0 for other in everyone):
        objects = _gather_objects(group, arguments)
        refusals = [x for x in objects if isinstance(x, str)]
        raise ValueError("; ".join(refusals) or differences(objects))
    return [other[0] for other in everyone], everyone[0][1]


def agree_once(group: dist.ProcessGroup, arguments: Arguments, rows: int) -> None:
    """The same for ranks that know the rows of all: nothing is sent if they have agreed before."""
    known = _agreed.setdefault(group, set())
    if arguments.hash not in known:
        agree(group, arguments, rows)
        known.add(arguments.hash)


def shards_of_call(sharding: Sharding, rows: int) -> Shards:
    """The shards of all ranks, which exchange their numbers of rows if the layout does not give them."""
    if isinstance(sharding.layout, Shards):
        return sharding.layout
    group = resolve_group(sharding.group)
    arguments = Arguments("a pattern by rank", (("layout", sharding.layout),))
    every = [rows] if dist.get_world_size(group) == 1 else agree(group, arguments, rows)[0]
    return Shards.of(every, sharding.layout)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it is not traced
def refuse(sharding: Sharding, mistake: Exception) -> None:
    """Report to the other ranks that this rank is about to raise, so that they do not wait for it.

    If the layout gives all lengths, the other ranks may not compare their arguments. They learn it while they wait.
    """
    group = resolve_group(sharding.group)
    if dist.get_world_size(group) == 1:
        return
    if isinstance(sharding.layout, Shards):
        watch_of(group).refuse(mistake)
    else:
        _gather(group, [-1, 0, 0])
        _gather_objects(group, refusal(dist.get_rank(group), mistake))


class reporting:  # noqa: N801  a context, named like a function
    """Report an exception of this rank to the other ranks, which raise as well. Without a group there are none."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, GroupError) and self._sharding.group is not None:
            refuse(self._sharding, error)


def _gather(group: dist.ProcessGroup, numbers: list[int]) -> list[list[int]]:
    watch, host = watch_of(group), backend_for("cpu", group)
    # NCCL has no CPU tensors.
    own = torch.tensor(numbers, device="cpu" if host else dist.get_backend_config(group).split(":")[0])
    with watch.turn("a comparison"), watch.waiting("compare its arguments with the others"):
        if host == "gloo":
            return _gather_in_rounds(watch, group, own).tolist()
        every = own.new_empty((watch.world, len(numbers)))
        dist.all_gather(list(every.unbind()), own, group=group)
    return every.tolist()


def _gather_in_rounds(watch: Watch, group: dist.ProcessGroup, own: Tensor) -> Tensor:
    """The numbers of every rank (world, numbers), in ``ceil(log2(world))`` rounds. Gloo's all_gather has world - 1 steps.

    After a round, rank 4 of 6 ranks has the numbers of ranks 4, 5. After two, of 4, 5, 0, 1. After three it has all.
    """
    world, ranks = watch.world, watch.global_ranks
    known = own.new_empty((world, len(own)))  # of this rank and those after it
    known[0] = own
    distances = [2**i for i in range((world - 1).bit_length())]
    # All receives are posted first, so that no send waits until its receiver is in the same round.
    arriving = [dist.irecv(known[d : min(2 * d, world)], ranks[(watch.rank + d) % world], group, _TAG) for d in distances]
    for d, received in zip(distances, arriving, strict=True):
        sent = dist.isend(known[: min(d, world - d)], ranks[(watch.rank - d) % world], group, _TAG)
        for handle in (sent, received):
            assert handle is not None
            handle.wait()
    return known.roll(watch.rank, 0)


def _gather_objects(group: dist.ProcessGroup, own: Arguments | str) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    watch = watch_of(group)
    with watch.turn("the exchange of arguments"), watch.waiting("send its arguments to the others"):
        dist.all_gather_object(everyone, own, group=group)
    return everyone


def differences(everyone: list[Arguments]) -> str:
    """What differs, argument by argument, and on which ranks."""
    functions = _by_value([arguments.function for arguments in everyone])
    if len(functions) > 1:
        return f"all ranks must make the same call, got {_listed(functions)}"
    by_name = [dict(arguments.values) for arguments in everyone]
    values = {name: _by_value([_short(repr(own.get(name))) for own in by_name]) for name in by_name[0]}
    lines = [f"  {name}: {_listed(ranks)}" for name, ranks in values.items() if len(ranks) > 1]
    rule = "all ranks must call with the same arguments, apart from the rows of their tensors; these differ:"
    return "\n".join([rule, *lines])


def _by_value(values: list[str]) -> dict[str, list[int]]:
    """The ranks that have each value."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    return ranks


def _listed(ranks_by_value: dict[str, list[int]]) -> str:
    return ", ".join(f"{value} on {named(ranks)}" for value, ranks in ranks_by_value.items())


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:160]} ... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"

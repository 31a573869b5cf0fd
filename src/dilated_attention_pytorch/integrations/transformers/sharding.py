"""Sequences of transformers models, sharded over the ranks of a process group. It is imported only if there is a group."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from dilated_attention_pytorch.call import Sharding, check_group
from dilated_attention_pytorch.distributed.agreement import Arguments, agree, reporting
from dilated_attention_pytorch.distributed.failures import named
from dilated_attention_pytorch.distributed.groups import resolve_group
from dilated_attention_pytorch.distributed.sequence import rows_of
from dilated_attention_pytorch.distributed.watch import watch_of
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.integrations.transformers.reading import ODD_MASK, Documents, Samples
from dilated_attention_pytorch.integrations.transformers.rows import ForwardRows
from dilated_attention_pytorch.integrations.transformers.sharding_checks import (
    OF_DOCUMENTS,
    OF_ROWS,
    check_arguments,
    check_model,
    check_output,
    counts_tokens,
    loss_is_shifted,
)
from dilated_attention_pytorch.shards import Shards

_FACTOR = -0x61C8864680B583EB
IGNORED = -100  # the label of a row without a target


class ShardRows(ForwardRows):
    """The rows of one rank, with what the hook has read from the whole batch."""

    def __init__(self, batch: int, count: int, samples: Samples | None, documents: Documents | None) -> None:
        super().__init__(batch, count, count, count, True)
        self._read = samples, documents
        self.by_positions = False  # documents were found in position_ids

    def view(self, *_: int) -> ShardRows:
        """The object itself. Models call this method of masks."""
        return self

    def checked(self, mask_function: Callable[..., Tensor], local_size: int | None) -> ShardRows:
        """The rows for layers with this mask function, which must be causal or bidirectional."""
        if local_size is not None:
            raise ValueError(
                f"sdpa computes layers with a sliding window or with chunks, and it knows no group: got a window of "
                f"{local_size}; set config.sliding_window to None, or apply without group"
            )
        kinds: tuple[Any, ...] = causal_mask_function, bidirectional_mask_function
        if mask_function not in kinds:
            raise ValueError(ODD_MASK)
        is_causal = kinds.index(mask_function) == 0
        if self.by_positions and not is_causal:
            raise ValueError(
                "position_ids do not go up by one, which means packed documents in causal models only: with a group, pass "
                "cu_seq_lens_q for packed documents of a bidirectional model"
            )
        rows = copy(self)
        rows.is_causal = is_causal
        return rows

    def read(
        self, position_ids: Tensor | None = None, cu_seqlens: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Samples | None, Documents | None]:  # fmt: skip
        """Samples or documents of the whole batch."""
        return self._read


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """The targets of a rank's rows, and the number of items by which their losses are divided."""

    labels: Tensor  # (B, rows), not shifted any more
    items: Tensor | float
    is_mean: bool  # the loss is the mean over the whole batch, on all ranks
    in_model: bool  # the model computes it


class ShardHook:
    """Hooks of a model whose ranks compute one batch together: the first slices the inputs, the second checks outputs.

    All ranks of the group are given the same batch of whole sequences, of any length. Rank ``p`` computes the rows
    ``Shards.even(length, world_size, layout)`` of all samples. Outputs are its rows: logits are (B, rows, V), and
    ``distributed.gather_sequence(logits, group, layout=layout)`` is the whole sequence. The layout is ``"contiguous"``,
    unless ``group`` is a ``Sharding`` with another one. Only branches that cross ranks are uneven there, and the zigzag
    layout sends 2.1 to 2.7 times the bytes.

    The loss has two forms, and gradients of both are to be averaged over ranks, which ``DistributedDataParallel`` does:

    * Without ``num_items_in_batch``, it is the mean over all targets of the batch, the same on all ranks. Its gradient on
      a rank is that of the rank's rows times the number of ranks.
    * With it, it is the sum over the rank's rows divided by ``num_items_in_batch``, as in transformers.

    Ranks compare a checksum of their batches in every forward, and all raise if batches differ.
    """

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup | DeviceMesh | Sharding) -> None:
        if not isinstance(group, Sharding):
            check_group(group)
        sharding = group if isinstance(group, Sharding) else Sharding(group)
        sharding.check()
        if isinstance(sharding.layout, Shards):
            raise TypeError(
                "batches have different lengths, so the layout of a model must be a name, 'contiguous' or 'zigzag': got "
                "Shards, which are for one length"
            )
        self.sharding = replace(sharding, group=resolve_group(sharding.group))
        self._signature = inspect.signature(type(model).forward)
        check_model(model, self._signature)
        self._counts_tokens = counts_tokens(model)
        self._handles: tuple[RemovableHandle, ...] = ()
        self._shape, self._is_empty = (0, 0), False  # samples and rows of a forward; whether the rows are padding
        self._targets: Targets | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that compute a batch together."""
        return resolve_group(self.sharding.group)

    def attach(self, model: PreTrainedModel) -> ShardHook:
        """Register the hooks."""
        before = model.register_forward_pre_hook(self.before, with_kwargs=True)
        self._handles = before, model.register_forward_hook(self.after)
        return self

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @torch.compiler.disable  # the exchange is not traced
    def before(
        self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """The arguments for this rank's rows, from those of the whole batch."""
        with reporting(self.sharding):
            given = self._arguments(model, args, kwargs)
            tensors = {name: x for name, x in given.items() if isinstance(x, Tensor) and name != "num_items_in_batch"}
            own_digest = _digest(tensors)
        self._compare(own_digest, tensors)
        with reporting(self.sharding):
            return (), self._shard(model, given)

    @torch.compiler.disable
    def after(self, model: PreTrainedModel, args: tuple[Any, ...], output: Any) -> Any:
        """The outputs of this rank's rows, with the loss."""
        targets, self._targets = self._targets, None
        check_output(model, output, self._shape)
        if targets is not None:
            loss = output.loss if targets.in_model else _loss(output.logits, targets)
            if targets.is_mean:
                loss = loss + (self.mean(loss.detach()) - loss.detach())
            output = type(output)(**dict(output) | {"loss": loss})
        return type(output)(**{name: _without_rows(x) for name, x in output.items()}) if self._is_empty else output

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the ranks of the group."""
        total, watch = value.clone(), watch_of(self.group)
        with watch.turn("the mean of the loss"), watch.waiting("add up the losses of all"):
            dist.all_reduce(total, group=self.group)
        return total / watch.world

    def _arguments(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of ``forward`` by name, checked."""
        if model.config._attn_implementation != "dilated":
            raise ValueError(
                f"{type(model).__name__} has a group, and its attention is {model.config._attn_implementation!r}, which "
                "knows none; call remove(model) before another attention implementation is set"
            )
        given = dict(self._signature.bind_partial(model, *args, **kwargs).arguments)
        given.pop(next(iter(self._signature.parameters)))
        for parameter in self._signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        given = {name: x for name, x in given.items() if x is not None}
        for name in ("output_attentions", "output_router_logits"):
            given.setdefault(name, getattr(model.config, name, False) or None)
        check_arguments(type(model).__name__, given)
        if self._counts_tokens and "position_ids" not in given:
            raise ValueError(
                f"{type(model).__name__} makes position_ids from tokens or from its mask, and a rank has not all of them: "
                "pass position_ids of the whole sequences"
            )
        return given

    def _compare(self, digest: int, tensors: dict[str, Tensor]) -> None:
        """Raise on all ranks if their batches differ."""
        watch = watch_of(self.group)
        if watch.world == 1:
            return
        arguments = Arguments("a transformers model", (("layout", self.sharding.layout),))
        every, _ = agree(self.group, arguments, digest)
        if len(set(every)) > 1:
            same = [rank for rank, other in enumerate(every) if other == digest]
            others = [rank for rank, other in enumerate(every) if other != digest]
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
            raise ValueError(
                "the ranks of a group compute one batch together, so all of them must be given the same one: "
                f"{named(same)} got {shapes}, and {named(others)} got another batch. Train with SequenceTrainer, or give "
                "the ranks of a group the same samples in the same order, without random changes of their own"
            )

    def _shard(self, model: PreTrainedModel, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments for this rank's rows."""
        watch = watch_of(self.group)
        given, n = _padded(given, watch.world)
        whole = _inputs(given)
        self._is_empty, (batch, n) = n <= watch.rank, whole.shape[:2]
        shards = Shards.even(n, watch.world, str(self.sharding.layout))
        own = rows_of(shards, watch.rank, whole.device)
        mask, positions = given.pop("attention_mask", None), given.pop("position_ids", None)
        rows = self._rows(batch, n, None if mask is None else mask.bool(), positions, given, shards)
        self._shape, self._targets = (batch, len(own)), self._read_targets(model, given, own)
        for name in (*OF_DOCUMENTS, "labels", "shift_labels", "num_items_in_batch"):
            given.pop(name, None)
        given |= {name: given[name].index_select(1, own) for name in OF_ROWS if name in given}
        given |= {"attention_mask": rows, "position_ids": own[None] if positions is None else positions[..., own]}
        if "use_cache" in self._signature.parameters:
            given["use_cache"] = False
        if self._targets is not None and self._targets.in_model:
            labels, items = self._targets.labels, self._targets.items
            given |= {"labels": labels, "shift_labels": labels, "num_items_in_batch": items}
        return given

    def _rows(
        self, batch: int, n: int, mask: Tensor | None, positions: Tensor | None, given: dict[str, Any], shards: Shards
    ) -> ShardRows:  # fmt: skip
        """What layers know about the rows, read from the whole batch."""
        bounds = [given[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k") if name in given]
        packed = (bounds[0], bounds[-1]) if bounds else None
        samples, documents = ForwardRows(batch, n, n, n, True, mask).read(positions, packed)
        rank, layout = watch_of(self.group).rank, shards
        if documents is not None:  # of all samples one behind the other
            layout = Shards(
                tuple(
                    tuple(range(b * n + chunk.start, b * n + chunk.stop) for b in range(batch) for chunk in chunks)
                    for chunks in shards.chunks
                )
            )
            valid = documents.valid
            if valid is not None:
                valid = valid.index_select(1, rows_of(shards, rank, valid.device))
            documents = Documents(documents.cu_seqlens, valid)
        rows = ShardRows(batch, shards.rows(rank), samples, documents)
        rows.sharding, rows.by_positions = replace(self.sharding, layout=layout), documents is not None and packed is None
        return rows

    def _read_targets(self, model: PreTrainedModel, given: dict[str, Any], own: Tensor) -> Targets | None:
        if "labels" not in given and "shift_labels" not in given:
            return None
        in_model = loss_is_shifted(model)
        if "shift_labels" not in given:
            whole = nn.functional.pad(given["labels"], (0, 1), value=IGNORED)[..., 1:] if in_model else given["labels"]
        elif in_model:
            whole = given["shift_labels"]
        else:
            raise ValueError(f"the loss of {type(model).__name__} does not shift labels, got shift_labels; pass labels")
        items = given.get("num_items_in_batch")
        share = whole.ne(IGNORED).sum() / watch_of(self.group).world if items is None else items
        return Targets(whole.index_select(1, own), share, items is None, in_model)


def _inputs(given: dict[str, Any]) -> Tensor:
    """Tokens (B, N), or their embeddings (B, N, C)."""
    inputs: Tensor = given["input_ids"] if "input_ids" in given else given["inputs_embeds"]
    return inputs


def _padded(given: dict[str, Any], world: int) -> tuple[dict[str, Any], int]:
    """The arguments with at least one row per rank, because models cannot compute without rows; and the length before.

    The rows that are added are padding. The rank that computes one of them takes it away from the outputs.
    """
    inputs = _inputs(given)
    n, missing = inputs.shape[1], world - inputs.shape[1]
    if missing <= 0:
        return given, n
    mask = given.get("attention_mask", torch.ones(inputs.shape[:2], dtype=torch.int64, device=inputs.device))
    padded = given | {"attention_mask": nn.functional.pad(mask, (0, missing))}
    for name in (*OF_ROWS, "position_ids"):
        if name in given:
            x, value = given[name], IGNORED if "labels" in name else 0
            sides = (0, 0) * (x.dim() - 2 if name in OF_ROWS else 0) + (0, missing)
            padded[name] = nn.functional.pad(x, sides, value=value)
    return padded, n


def _without_rows(x: Any) -> Any:
    """Outputs of rows, without their only row. Gradients of parameters are then 0."""
    if isinstance(x, tuple | list):
        return type(x)(map(_without_rows, x))
    return x[:, :0] if isinstance(x, Tensor) and x.dim() > 1 else x


def _loss(logits: Tensor, targets: Targets) -> Tensor:
    """The loss of a model that does not shift labels."""
    losses = nn.functional.cross_entropy(
        logits.to(accumulate_dtype(logits.dtype)).flatten(0, 1),
        targets.labels.flatten().to(logits.device),
        ignore_index=IGNORED,
        reduction="sum",
    )
    return losses / targets.items


def _digest(tensors: dict[str, Tensor]) -> int:
    """63 bits that depend on the shapes of all tensors and on the values of those of integers."""
    sums = [_checksum(x.reshape(-1).long()) for x in tensors.values() if not x.is_floating_point()]
    values = torch.stack([x.to(sums[0].device) for x in sums]).tolist() if sums else []
    shapes = [(name, tuple(x.shape)) for name, x in tensors.items()]
    return int.from_bytes(sha256(repr((shapes, values)).encode()).digest()[:8], "big") >> 1


def _checksum(x: Tensor) -> Tensor:
    """The sum of the numbers times odd factors that look random. Products of integers wrap."""
    factors = torch.arange(1, len(x) + 1, device=x.device) * _FACTOR
    factors = ((factors ^ (factors >> 29)) * _FACTOR) | 1
    return (x * factors).sum()

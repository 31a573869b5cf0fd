"""Sequences of transformers models, sharded over the ranks of a process group. It is imported only if there is a group."""

from __future__ import annotations

import inspect
import re
import sys
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
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.utils.generic import ModelOutput

from dilated_attention_pytorch.call import Sharding, check_group
from dilated_attention_pytorch.distributed.agreement import Arguments, agree, reporting
from dilated_attention_pytorch.distributed.failures import named
from dilated_attention_pytorch.distributed.groups import resolve_group
from dilated_attention_pytorch.distributed.sequence import rows_of
from dilated_attention_pytorch.distributed.watch import watch_of
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.integrations.transformers.reading import ODD_MASK, Documents, Samples
from dilated_attention_pytorch.integrations.transformers.rows import Rows
from dilated_attention_pytorch.shards import Shards

_FACTOR = -0x61C8864680B583EB
IGNORED = -100  # the label of a row without a target
_ROWS = ("input_ids", "inputs_embeds", "token_type_ids", "labels", "shift_labels")  # (B, N, ...)
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_READ = ("attention_mask", "position_ids", "num_items_in_batch", *_PACKED)
_REASONS = {
    "past_key_values": "a sharded sequence has no cache; leave it out, and generate with a model without a group",
    "use_cache": "a sharded sequence has no cache; pass use_cache=False, and generate with a model without a group",
    "output_attentions": "weights of pairs on different ranks exist on no rank; use a model without a group",
    "output_router_logits": "the loss of the router is a mean over all rows, which no rank has; leave it out",
    "logits_to_keep": "a rank has other rows than the last ones of the sequence; leave it out and choose from its rows",
    "encoder_hidden_states": "dilated attention is self-attention; leave it out",
}
_COUNTS_TOKENS = re.compile(r"create_position_ids|mask\b[^\n]*\.cumsum\(|cumsum\(\s*(attention_)?mask\b")


class ShardRows(Rows):
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
        _check_model(model, self._signature)
        sources = {sys.modules[type(x).__module__] for x in model.modules() if isinstance(x, PreTrainedModel)}
        self._counts_tokens = any(_COUNTS_TOKENS.search(inspect.getsource(source)) for source in sources)
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the exchange is not traced
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(self, model: PreTrainedModel, args: tuple[Any, ...], output: Any) -> Any:
        """The outputs of this rank's rows, with the loss."""
        targets, self._targets = self._targets, None
        _check_output(model, output, self._shape)
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
        for name, x in given.items():
            if name in _REASONS and (isinstance(x, Tensor) or x):
                raise ValueError(f"{type(model).__name__} has a group and does not take {name}: {_REASONS[name]}")
            if isinstance(x, Tensor) and name not in _ROWS + _READ:
                raise ValueError(
                    f"{type(model).__name__} has a group, which knows how to shard {', '.join(_ROWS)}, attention_mask and "
                    f"position_ids: got the tensor {name} as well; use a model without a group"
                )
        _check_shapes(given)
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
        for name in (*_PACKED, "labels", "shift_labels", "num_items_in_batch"):
            given.pop(name, None)
        given |= {name: given[name].index_select(1, own) for name in _ROWS if name in given}
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
        samples, documents = Rows(batch, n, n, n, True, mask).read(positions, packed)
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
        in_model = _loss_is_shifted(model)
        if "shift_labels" not in given:
            whole = nn.functional.pad(given["labels"], (0, 1), value=IGNORED)[..., 1:] if in_model else given["labels"]
        elif in_model:
            whole = given["shift_labels"]
        else:
            raise ValueError(f"the loss of {type(model).__name__} does not shift labels, got shift_labels; pass labels")
        items = given.get("num_items_in_batch")
        share = whole.ne(IGNORED).sum() / watch_of(self.group).world if items is None else items
        return Targets(whole.index_select(1, own), share, items is None, in_model)


def _check_model(model: PreTrainedModel, signature: inspect.Signature) -> None:
    """Raise for models that cannot compute a shard by itself."""
    name, way_out = type(model).__name__, "apply without group"
    if "position_ids" not in signature.parameters:
        raise ValueError(
            f"a rank passes the positions of its rows as position_ids, which {name}.forward does not take: its rows would "
            f"be those of a shorter sequence; {way_out}"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has an encoder and a decoder, and a group shards one sequence; {way_out}")
    for module in model.modules():
        kinds = getattr(getattr(module, "config", None), "layer_types", None) or []
        others = [kind for kind in kinds if kind != "full_attention"]
        if others or isinstance(module, nn.modules.conv._ConvNd | nn.RNNBase):
            raise ValueError(
                f"rows of other ranks reach a rank through dilated attention only: {name} has layers of the kind "
                f"{others[0] if others else type(module).__name__!r}, which mix rows as well; {way_out}"
            )


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
    for name in (*_ROWS, "position_ids"):
        if name in given:
            x, value = given[name], IGNORED if "labels" in name else 0
            sides = (0, 0) * (x.dim() - 2 if name in _ROWS else 0) + (0, missing)
            padded[name] = nn.functional.pad(x, sides, value=value)
    return padded, n


def _without_rows(x: Any) -> Any:
    """Outputs of rows, without their only row. Gradients of parameters are then 0."""
    if isinstance(x, tuple | list):
        return type(x)(map(_without_rows, x))
    return x[:, :0] if isinstance(x, Tensor) and x.dim() > 1 else x


def _check_shapes(given: dict[str, Any]) -> None:
    """Raise if the tensors are not those of whole sequences."""
    inputs = [given[name] for name in ("input_ids", "inputs_embeds") if name in given]
    if len(inputs) != 1:
        raise ValueError(f"pass either input_ids or inputs_embeds, got {len(inputs)} of them")
    size = tuple(inputs[0].shape[:2])
    for name in (*_ROWS, "attention_mask"):
        x = given.get(name)
        if x is not None and (
            not isinstance(x, Tensor) or tuple(x.shape[:2]) != size or (name not in _ROWS and x.dim() != 2)
        ):
            got = tuple(x.shape) if isinstance(x, Tensor) else x
            raise ValueError(
                f"a model with a group takes tensors of whole sequences, {size} for this batch: got {name} {got}; pass "
                "the same tensors as to a model without a group"
            )
    positions = given.get("position_ids")
    if positions is not None and positions.shape[-1] != size[1]:
        raise ValueError(f"position_ids must be those of the whole sequences, {size}: got {tuple(positions.shape)}")


def _check_output(model: PreTrainedModel, output: Any, shape: tuple[int, int]) -> None:
    """Raise if an output is not one of a rank's rows."""
    if not isinstance(output, ModelOutput):
        raise TypeError(f"a model with a group returns a ModelOutput, got {type(output).__name__}; pass return_dict=True")
    for name in ("last_hidden_state", "logits"):
        x = output.get(name)
        if x is not None and (x.dim() != 3 or tuple(x.shape[:2]) != shape):
            raise ValueError(
                f"a rank has {shape[1]} rows of the sequence, so outputs of a model with a group must be outputs of rows, "
                f"{(*shape, 'features')}: {type(model).__name__} returned {name} {tuple(x.shape)}; apply without group"
            )
    for name in ("pooler_output", "aux_loss"):
        if output.get(name) is not None:
            raise ValueError(
                f"{name} is computed from rows that a rank may not have; make {type(model).__name__} without it "
                "(add_pooling_layer=False), or apply without group"
            )


def _loss_is_shifted(model: PreTrainedModel) -> bool:
    """Whether row ``i`` predicts the label of row ``i + 1``; raise if the loss is not a mean over rows."""
    function = LOSS_MAPPING.get(str(getattr(model, "loss_type", None)))
    if function is ForCausalLMLoss and "loss_function" in inspect.getsource(inspect.unwrap(type(model).forward)):
        return True
    if function in (ForMaskedLMLoss, ForTokenClassification) and not hasattr(model, "_loss_function"):
        return False
    raise ValueError(
        f"{type(model).__name__} has a group, and its loss is not known to be a mean over rows; leave out labels, and "
        "compute the loss from the rows of the ranks"
    )


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

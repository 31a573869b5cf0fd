"""``Trainer`` for models whose sequences are sharded over a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import (  # type: ignore[import-untyped]  # accelerate has no types
    BatchSamplerShard,
    IterableDatasetShard,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from dilated_attention_pytorch.distributed.sequence import gather_sequence
from dilated_attention_pytorch.integrations.transformers.convert import HOOK
from dilated_attention_pytorch.integrations.transformers.sharding import ShardHook


class SequenceTrainer(Trainer):
    """``Trainer`` for a model with ``apply(model, ..., group=group)``, started by torchrun.

    The ranks of a group get the same batches, and ``per_device_train_batch_size`` is the number of samples of a group. If
    the group has fewer ranks than the job, groups are consecutive ranks and get different batches. Losses and gradients are
    those of ``Trainer`` with one process per group. ``evaluate`` and ``predict`` return whole sequences: every rank of a
    group gathers the logits of a batch if there are metrics to compute.

    The context parallelism of transformers (``ParallelismConfig(cp_size=...)``) cannot be used instead: it replaces
    ``scaled_dot_product_attention`` and refuses every attention implementation but ``"sdpa"``.

    Refused: ``label_smoothing_factor`` and ``compute_loss_func``, which compare whole labels with a rank's rows, and data
    loaders that send batches from the first rank (``accelerator_config={"dispatch_batches": False}`` turns that off).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._is_counting = False
        super().__init__(*args, **kwargs)
        hook, options = self._hook(), self.args
        world, size, rank = options.world_size, hook.group.size(), options.process_index
        first = rank // size * size
        if world % size or dist.get_process_group_ranks(hook.group) != list(range(first, first + size)):
            raise ValueError(
                f"groups of SequenceTrainer are consecutive ranks of equal number: got ranks "
                f"{dist.get_process_group_ranks(hook.group)} of {world} on rank {rank}; make them by "
                "init_device_mesh(device, (groups, ranks), mesh_dim_names=('data', 'cp'))"
            )
        given = {
            "label_smoothing_factor": options.label_smoothing_factor, "compute_loss_func": self.compute_loss_func,
            "several GPUs in one process": options.n_gpu > 1, "parallelism_config": self._other_parallelism(),
        }  # fmt: skip
        for name, value in given.items():
            if value:
                raise ValueError(f"SequenceTrainer does not support {name}, got {value!r}; leave it out")

    def get_cp_size(self) -> int:
        """The number of ranks that compute a batch together."""
        return 1 if self._is_counting else self._hook().group.size()

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """The loss of the whole batch, its logits and its labels."""
        hook = self._hook()
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return None if loss is None else hook.mean(loss), _gathered(logits, hook), labels

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The loop of ``Trainer``, with results of one rank of each group."""
        self.gather_function = self._gather_groups
        return super().evaluation_loop(*args, **kwargs)

    def _hook(self) -> ShardHook:
        modules = () if self.model is None else self.model.modules()
        hooks = [getattr(module, HOOK) for module in modules if hasattr(module, HOOK)]
        if len(hooks) != 1:
            raise ValueError(
                f"SequenceTrainer takes a model with a group: call apply(model, ..., group=group) for one of its modules, "
                f"got {len(hooks)}; use Trainer for a model without a group"
            )
        hook: ShardHook = hooks[0]
        return hook

    def _other_parallelism(self) -> Any:
        config = getattr(self.accelerator, "parallelism_config", None)
        return config if config is not None and config.non_data_parallel_size > 1 else None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | int | None:
        # Some releases divide by get_cp_size(), and others do not.
        self._is_counting = True
        try:
            items: Tensor | int | None = super()._get_num_items_in_batch(batch_samples, device)
        finally:
            self._is_counting = False
        return items / self.get_cp_size() if isinstance(items, Tensor) else items

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        loader: DataLoader[Any] = super()._get_dataloader(*args, **kwargs)
        size, world = self.get_cp_size(), self.args.world_size
        if size == 1:
            return loader
        sharded = [
            x for x in (loader.batch_sampler, loader.sampler, loader.dataset)
            if isinstance(x, BatchSamplerShard | IterableDatasetShard)
        ]  # fmt: skip
        if len(sharded) != 1 or sharded[0].num_processes != world:
            raise ValueError(
                "SequenceTrainer gives the ranks of a group the same batches, which it cannot do with a "
                f"{type(loader).__name__} over {type(loader.dataset).__name__}; pass "
                "accelerator_config={'dispatch_batches': False} and a dataset of torch.utils.data, without "
                "train_sampling_strategy='batch_rebalance'"
            )
        shard = sharded[0]
        shard.num_processes, shard.process_index = world // size, self.args.process_index // size
        if shard.num_processes == 1:  # one process has no need of last batches of equal size, to which samples are added
            shard.even_batches = False
            shard.batch_size = 1 if isinstance(shard, IterableDatasetShard) else shard.batch_size
        return loader

    def _gather_groups(self, tensors: Any) -> Any:
        """The tensors of one rank of each group, one behind the other, without samples that were added at the end."""
        if isinstance(tensors, tuple | list):
            return type(tensors)(map(self._gather_groups, tensors))
        every = self.accelerator.gather(tensors).unflatten(0, (self.args.world_size, -1))
        state, found = self.accelerator.gradient_state, every[:: self.get_cp_size()].flatten(0, 1)
        return found[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else found


def _gathered(logits: Any, hook: ShardHook) -> Any:
    """Outputs of rows, of the whole sequence."""
    if isinstance(logits, tuple | list):
        return type(logits)(_gathered(x, hook) for x in logits)
    if not isinstance(logits, Tensor):
        return logits
    return gather_sequence(logits, hook.group, layout=str(hook.sharding.layout))

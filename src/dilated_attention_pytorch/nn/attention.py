"""Attention with a fixed pattern and fixed options, as modules without parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack

from torch import Tensor, nn

from dilated_attention_pytorch.api import attention
from dilated_attention_pytorch.call import AttentionOptions, Sharding, as_sharding, check_options
from dilated_attention_pytorch.checks import check_inputs, check_pattern, check_tensors
from dilated_attention_pytorch.lengths import Lengths
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.blocks import BlockSparse, SparsePatternConfig
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.patterns.tiers import DistributedSparseConfig
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.values import Inputs

if TYPE_CHECKING:  # a process without a group never imports torch.distributed
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
C = TypeVar("C", SparsePatternConfig, DistributedSparseConfig)


class ModuleOptions(TypedDict, total=False):
    """The keyword arguments of ``Attention``, which documents them."""

    scale: float | None
    dropout_p: float
    mixing_gradient: str
    backend: str
    order: Order | None
    ordered: bool | None
    group: ProcessGroup | DeviceMesh | Sharding | None
    layout: str | Shards | None


class Attention(nn.Module):
    """``attention`` with a fixed pattern and fixed options. The module has no parameters and an empty state.

    Args:
        pattern: a ``Dilated`` or a ``BlockSparse``. With ``group``, it may also be a ``DistributedSparseConfig``: each
            call then computes its pattern from the shards of the ranks.
        scale, mixing_gradient, backend: see ``attention``.
        dropout_p: see ``attention``. Dropout is active in training mode only.
        order, ordered: see ``attention``. An order fixes the length of the sequence. It moves with the module to another
            device, and it is not in the state dict. A call can pass its own.
        group, layout: see ``attention``. With ``group``, tensors hold the rows of this rank, and ``lengths`` and
            ``cu_seqlens`` count positions of the whole sequence. ``Sharding(None)`` means all ranks of the job.

    >>> import torch
    >>> attend = Attention(Dilated([256, 512], [1, 2]))
    >>> attend(torch.randn(1, 1000, 8, 64), is_causal=True).shape
    torch.Size([1, 1000, 8, 64])
    """

    def __init__(
        self, pattern: Dilated | BlockSparse | DistributedSparseConfig, *, scale: float | None = None,
        dropout_p: float = 0.0, mixing_gradient: str = "exact", backend: str = "auto", order: Order | None = None,
        ordered: bool | None = None, group: ProcessGroup | DeviceMesh | Sharding | None = None,
        layout: str | Shards | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.pattern, self.sharding = pattern, as_sharding(group, layout)
        self.scale, self.dropout_p, self.mixing_gradient, self.backend = scale, dropout_p, mixing_gradient, backend
        self.order, self.ordered = order, ordered
        check_options(self._options())
        if not isinstance(pattern, DistributedSparseConfig):
            check_pattern(pattern)
            if self.sharding is not None:
                self.sharding.check_pattern(pattern)
        elif self.sharding is None:
            raise ValueError(
                "the pattern of a DistributedSparseConfig follows from the shards of the ranks: pass group, or "
                "pattern=config.pattern(shards) on one device"
            )

    def _options(self) -> AttentionOptions:
        return {
            "scale": self.scale, "dropout_p": self.dropout_p, "mixing_gradient": self.mixing_gradient,
            "backend": self.backend, "order": self.order, "ordered": self.ordered, "group": self.sharding,
        }  # fmt: skip

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, is_causal: bool = False, *,
        lengths: Lengths | None = None, starts: Lengths | None = None, cu_seqlens: Lengths | None = None,
        order: Order | None = None, ordered: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend (B, N, H, D) over (B, M, G, D) and return (B, N, H, D).

        ``key`` defaults to ``query`` and ``value`` to ``key``. ``order`` and ``ordered`` each replace that of the
        constructor unless None. See ``attention`` for the other arguments.

        >>> import torch
        >>> from dilated_attention_pytorch import Hilbert
        >>> attend, slide = Attention(Dilated([256, 512], [1, 2])), torch.rand(1000, 2)
        >>> attend(torch.randn(1, 1000, 8, 64), order=Hilbert.coordinates(slide)).shape
        torch.Size([1, 1000, 8, 64])
        """
        inputs = self.report_errors(self._inputs, query, key, value)
        sharding = self._sharding_of_call()
        options: AttentionOptions = {
            **self._options(), "is_causal": is_causal, "lengths": lengths, "starts": starts,
            "cu_seqlens": cu_seqlens, "dropout_p": self.dropout_p if self.training else 0.0, "group": sharding,
            "order": self.order if order is None else order, "ordered": self.ordered if ordered is None else ordered,
        }  # fmt: skip
        return attention(*inputs, self._pattern_of_call(inputs.key, sharding), **options)

    def report_errors(self, prepare: Callable[..., T], *arguments: Any) -> T:
        """Return ``prepare(*arguments)``. If it raises on a rank, the other ranks raise as well instead of waiting for it.

        The function runs before the ranks compare their arguments. PyTorch raises a RuntimeError if a projection does not
        fit its input.
        """
        if self.sharding is None:
            return prepare(*arguments)
        try:
            return prepare(*arguments)
        except (ValueError, TypeError, RuntimeError) as mistake:
            from dilated_attention_pytorch.distributed.agreement import refuse  # imports torch.distributed

            refuse(self._sharding_of_call(), mistake)
            raise

    def _inputs(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> Inputs:
        if key is None and value is not None:
            raise ValueError("got value without key: pass both, or neither to attend over the queries")
        key = query if key is None else key
        inputs = Inputs(query, key, key if value is None else value)
        if isinstance(self.pattern, DistributedSparseConfig):  # the shape of key is read before ``attention`` checks it
            check_tensors(*inputs)
            check_inputs(*inputs)
        return inputs

    def _sharding_of_call(self) -> Sharding | None:
        """The sharding, over all ranks of the job if it has no group."""
        if self.sharding is None or self.sharding.group is not None:
            return self.sharding
        import torch.distributed as dist

        if dist.group.WORLD is None:
            raise RuntimeError(
                "a sharded sequence needs a process group: start with torchrun and call torch.distributed."
                "init_process_group(), or use DilatedAttention or BlockSparseRingDilatedAttention on one device"
            )
        return replace(self.sharding, group=dist.group.WORLD)

    def _pattern_of_call(self, key: Tensor, sharding: Sharding | None) -> Dilated | BlockSparse:
        """The pattern. A ``DistributedSparseConfig`` gives it for the shards, whose lengths the ranks exchange."""
        if not isinstance(self.pattern, DistributedSparseConfig):
            return self.pattern
        from dilated_attention_pytorch.distributed.agreement import shards_of_call  # imports torch.distributed

        assert sharding is not None
        shards = shards_of_call(sharding, key.shape[1])
        return self.pattern.pattern(shards, token_bytes=2 * key.shape[2] * key.shape[3] * key.element_size())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.order is not None:
            self.order = self.order.to(fn(self.order.positions).device)
        return self

    def extra_repr(self) -> str:
        """The pattern and the options, for ``print(module)``."""
        pattern: Any = self.pattern
        if isinstance(pattern, BlockSparse):
            pattern = pattern.digest if pattern.config is None else pattern.config
        return ", ".join([str(pattern), *(f"{name}={x!r}" for name, x in self._options().items() if x is not None)])


class DilatedAttention(Attention):
    """``Attention`` with the pattern ``Dilated(segment_lengths, dilation_rates, offsets, torchscale_padding)``.

    >>> import torch
    >>> attend = DilatedAttention(segment_lengths=[256, 512], dilation_rates=[1, 2])
    >>> q, k, v = torch.randn(3, 1, 1000, 8, 64).unbind(0)
    >>> attend(q, k, v, is_causal=True).shape
    torch.Size([1, 1000, 8, 64])
    """

    def __init__(
        self, segment_lengths: Sequence[int], dilation_rates: Sequence[int], *,
        offsets: str | Sequence[int] = "interleaved", torchscale_padding: bool = False, **options: Unpack[ModuleOptions],
    ) -> None:  # fmt: skip
        super().__init__(Dilated(segment_lengths, dilation_rates, offsets, torchscale_padding), **options)


class RingDilatedAttention(Attention):
    """``DilatedAttention`` over a sharded sequence: every rank passes its own rows and gets their results.

    The default of ``group`` is all ranks of the job. The first rank of the group draws the seed of dropout.

    With ``order``, the tensors are this rank's rows of the ordered sequence:
    ``distributed.shard_sequence(..., order=order)`` makes them.
    """

    def __init__(
        self, segment_lengths: Sequence[int], dilation_rates: Sequence[int], *,
        offsets: str | Sequence[int] = "interleaved", **options: Unpack[ModuleOptions],
    ) -> None:  # fmt: skip
        default_to_all_ranks(options)
        super().__init__(Dilated(segment_lengths, dilation_rates, offsets), **options)


class BlockSparseRingDilatedAttention(Attention):
    """``Attention`` with the pattern ``BlockSparse.from_config(sparse_config)``.

    Args:
        segment_lengths, dilation_rates: the branches of the pattern type ``"dilated_sparse"``, in tokens and in blocks.
            Other pattern types have no branches and refuse them.
        sparse_config: the pattern. The default is ``"dilated_sparse"`` with a tenth of the blocks.
        options: see ``Attention``.

    >>> import torch
    >>> config = SparsePatternConfig("dilated_sparse", sparsity_ratio=0.5, block_size=64)
    >>> attend = BlockSparseRingDilatedAttention([256, 512], [1, 2], config)
    >>> attend(torch.randn(1, 1000, 8, 64)).shape
    torch.Size([1, 1000, 8, 64])
    """

    def __init__(
        self, segment_lengths: Sequence[int] | None = None, dilation_rates: Sequence[int] | None = None,
        sparse_config: SparsePatternConfig | None = None, **options: Unpack[ModuleOptions],
    ) -> None:  # fmt: skip
        config = SparsePatternConfig("dilated_sparse", 0.1) if sparse_config is None else sparse_config
        if not isinstance(config, SparsePatternConfig):
            raise TypeError(f"sparse_config must be a SparsePatternConfig, got {type(config).__name__}")
        if segment_lengths is not None or dilation_rates is not None:
            config = with_branches(config, segment_lengths or (), dilation_rates or ())
        super().__init__(BlockSparse.from_config(config), **options)


def with_branches(config: C, lengths: Sequence[int], rates: Sequence[int]) -> C:
    """The configuration with these branches; raise if it has others, or a pattern type that reads none."""
    branches, name = Dilated(lengths, rates), type(config).__name__
    if isinstance(config, SparsePatternConfig) and config.pattern_type != "dilated_sparse":
        raise ValueError(
            f"segment_lengths and dilation_rates are read by 'dilated_sparse' only, got {branches.branches} for "
            f"{config.pattern_type!r}; leave them out: BlockSparseRingDilatedAttention(sparse_config=config)"
        )
    given = Dilated(config.segment_lengths, config.dilation_rates) if config.segment_lengths else branches
    if given != branches:
        raise ValueError(
            f"the {name} has the branches {given.branches}, the module {branches.branches}; leave out one of them"
        )
    return replace(config, segment_lengths=branches.segment_lengths, dilation_rates=branches.dilation_rates)


def default_to_all_ranks(options: ModuleOptions) -> None:
    """Let ``group`` be all ranks of the job if it is None."""
    if options.get("group") is None:
        layout = options.pop("layout", None)
        options["group"] = Sharding(None, "contiguous" if layout is None else layout)

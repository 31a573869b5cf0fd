"""Multi-head attention by dilated patterns, and by block patterns that depend on ranks and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from dilated_attention_pytorch.nn.attention import default_to_all_ranks
from dilated_attention_pytorch.nn.projected import ProjectedAttention, ProjectionOptions
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.patterns.tiers import DistributedSparseConfig


class MultiheadDilatedAttention(ProjectedAttention):
    """Multi-head attention by a dilated pattern, as a replacement for ``nn.MultiheadAttention``.

    The positional arguments of the call and its result ``(out, weights)`` are those of ``nn.MultiheadAttention``, with two
    differences. ``need_weights`` is False by default, because the weights grow with the square of the length.
    ``attn_mask`` is refused, because the pattern is the mask (use ``is_causal``).

    ``nn.TransformerEncoderLayer`` can hold this module in training. In evaluation, that class reads the parameters of
    ``nn.MultiheadAttention`` directly unless ``torch.backends.mha.set_fastpath_enabled(False)``.

    Args:
        embed_dim: size of an embedding, split evenly over the heads.
        num_heads: query heads.
        segment_lengths, dilation_rates, offsets, torchscale_padding: the pattern, see ``Dilated``.
        options: see ``ProjectedAttention`` and ``Attention``.

    >>> import torch
    >>> module = MultiheadDilatedAttention(512, 8, segment_lengths=[256, 512], dilation_rates=[1, 2])
    >>> x = torch.randn(1, 1000, 512)
    >>> out, weights = module(x, x, x, is_causal=True)
    >>> out.shape, weights
    (torch.Size([1, 1000, 512]), None)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        offsets: str | Sequence[int] = "interleaved",
        torchscale_padding: bool = False,
        **options: Unpack[ProjectionOptions],
    ) -> None:
        pattern = Dilated(segment_lengths, dilation_rates, offsets, torchscale_padding)
        super().__init__(pattern, embed_dim, num_heads, **options)


class BlockSparseRingDistributedDilatedAttention(ProjectedAttention):
    """Multi-head attention over a sharded sequence that reads fewer blocks of ranks and nodes that are farther away.

    It is called like ``MultiheadDilatedAttention``, with this rank's rows, and returns ``(out, None)``. The result is this
    rank's rows of what one device computes with the pattern ``distributed_config.pattern(shards)``.

    Args:
        embed_dim: size of an embedding, split evenly over the heads.
        num_heads: query heads.
        segment_lengths, dilation_rates: must be None. The patterns follow from the shards and have no branches.
        distributed_config: the pattern. The default is ``DistributedSparseConfig()``.
        options: see ``ProjectedAttention`` and ``Attention``. The default of ``group`` is all ranks of the job.

    >>> config = DistributedSparseConfig(sparsity_ratio=0.05, pattern_type="hierarchical")
    >>> module = BlockSparseRingDistributedDilatedAttention(512, 8, distributed_config=config)
    >>> sum(p.numel() for p in module.parameters())
    1051648
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: None = None,
        dilation_rates: None = None,
        distributed_config: DistributedSparseConfig | None = None,
        **options: Unpack[ProjectionOptions],
    ) -> None:
        if segment_lengths is not None or dilation_rates is not None:
            raise ValueError(
                "the patterns of DistributedSparseConfig follow from the shards of the ranks and have no branches, got "
                f"segment_lengths={segment_lengths} and dilation_rates={dilation_rates}; leave them out, or use "
                "MultiheadDilatedAttention(..., group=group) for a dilated pattern"
            )
        config = DistributedSparseConfig() if distributed_config is None else distributed_config
        if not isinstance(config, DistributedSparseConfig):
            raise TypeError(f"distributed_config must be a DistributedSparseConfig, got {type(config).__name__}")
        default_to_all_ranks(options)
        super().__init__(config, embed_dim, num_heads, **options)

"""Multi-head attention: projections around ``Attention``, as a replacement for ``nn.MultiheadAttention``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.api import attention_weights
from dilated_attention_pytorch.nn.attention import Attention, ModuleOptions, default_to_all_ranks
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.patterns.tiers import DistributedSparseConfig

MAX_WEIGHTS = 2**26  # B * H * N * M that need_weights=True returns: 256 MiB in float32


class ProjectionOptions(ModuleOptions, total=False):
    """The keyword arguments of ``ProjectedAttention``, which documents them."""

    num_kv_heads: int | None
    bias: bool
    layer_norm: bool
    layer_norm_eps: float
    gamma_init: float
    batch_first: bool
    kdim: int | None
    vdim: int | None
    device: torch.device | str | None
    dtype: torch.dtype | None


class ProjectedAttention(nn.Module):
    """Multi-head attention: query, key, value and output projections around ``Attention(pattern, **options)``.

    Args:
        pattern: see ``Attention``.
        embed_dim: size of an embedding, split evenly over the heads.
        num_heads: query heads.
        num_kv_heads: key and value heads (grouped-query attention). The default is as many as query heads.
        bias: whether the projections have a bias.
        layer_norm: normalise before the output projection (MAGNETO's sub-LN, as in LongNet).
        layer_norm_eps: epsilon of that normalisation.
        gamma_init: gain of the initial value and output projections (MAGNETO).
        batch_first: tensors are (batch, sequence, embedding), otherwise (sequence, batch, embedding).
        kdim, vdim: embedding sizes of key and value if they differ.
        device, dtype: of the parameters.
        options: see ``Attention``. With ``group``, the embeddings are those of this rank's rows, and the parameters are
            the same on every rank: sum their gradients over the ranks, or average them as DDP does. The weights are not
            available with ``group`` or ``order``.
    """

    def __init__(
        self, pattern: Dilated | BlockSparse | DistributedSparseConfig, embed_dim: int, num_heads: int, *,
        num_kv_heads: int | None = None, bias: bool = True, layer_norm: bool = True, layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0, batch_first: bool = True, kdim: int | None = None, vdim: int | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, **options: Unpack[ModuleOptions],
    ) -> None:  # fmt: skip
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a positive multiple of num_heads, got {embed_dim=}, {num_heads=}")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads=}, {num_kv_heads=}")
        if isinstance(pattern, Dilated):
            pattern.check_key_heads(num_kv_heads)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim, self.batch_first, self.gamma_init = embed_dim // num_heads, batch_first, gamma_init
        self.attention = Attention(pattern, **options)
        linear: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, embed_dim, **linear)
        self.k_proj = nn.Linear(embed_dim if kdim is None else kdim, num_kv_heads * self.head_dim, **linear)
        self.v_proj = nn.Linear(embed_dim if vdim is None else vdim, num_kv_heads * self.head_dim, **linear)
        self.out_proj = nn.Linear(embed_dim, embed_dim, **linear)
        self.inner_attn_ln = nn.LayerNorm(embed_dim, eps=layer_norm_eps, device=device, dtype=dtype) if layer_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the projections Xavier-uniform and the biases with 0, as ``nn.MultiheadAttention`` does."""
        gains = {self.q_proj: 1.0, self.k_proj: 1.0, self.v_proj: self.gamma_init, self.out_proj: self.gamma_init}
        for projection, gain in gains.items():
            nn.init.xavier_uniform_(projection.weight, gain=gain)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        if self.inner_attn_ln is not None:
            self.inner_attn_ln.reset_parameters()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = False, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False, *, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attend and project. Return ``(out, weights)``, where weights are None unless ``need_weights``.

        Args:
            query, key, value: (batch, sequence, embedding), or (sequence, batch, embedding) if not ``batch_first``, or
                (sequence, embedding).
            key_padding_mask: (batch, keys), True (or -inf) for padding, which must be at the end of each sample.
            need_weights: also return the weights, averaged over the heads, or per head if not ``average_attn_weights``.
            attn_mask: must be None.
            average_attn_weights: see ``need_weights``.
            is_causal: a position sees itself and earlier ones only.
            lengths: (batch,), the valid positions of each sample. It replaces ``key_padding_mask``.
            cu_seqlens: (documents + 1,), boundaries of packed documents, see ``attention``.
        """
        arguments = query, key, value, key_padding_mask, need_weights, attn_mask, lengths, cu_seqlens
        q, k, v, lengths = self.attention.report_errors(self._prepare, *arguments)
        x = self.attention(q, k, v, is_causal, lengths=lengths, cu_seqlens=cu_seqlens).flatten(-2)
        if self.inner_attn_ln is not None:
            x = self.inner_attn_ln(x)
        out: Tensor = self.out_proj(x)
        if not self.batch_first:
            out = out.transpose(0, 1)
        weights = None
        if need_weights:
            weights = self._weights(q, k, range(q.shape[1]), is_causal, lengths)
            weights = weights.mean(1) if average_attn_weights else weights
        if query.dim() == 2:
            out = out.squeeze(0 if self.batch_first else 1)
            weights = None if weights is None else weights.squeeze(0)
        return out, weights

    def attention_map(
        self, query: Tensor, key: Tensor, query_rows: Sequence[int] | Tensor, *, is_causal: bool = False,
        lengths: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The weights (batch, heads, rows, keys) of chosen query rows, at any length, in memory proportional to it.

        >>> module = MultiheadDilatedAttention(64, 4, segment_lengths=[256, 512], dilation_rates=[1, 2])
        >>> x = torch.randn(1, 1000, 64)
        >>> module.attention_map(x, x, query_rows=[0, -1]).shape
        torch.Size([1, 4, 2, 1000])
        """
        self._check_weights("attention_map")
        q, k = self._project({"query": query, "key": key})
        weights = self._weights(q, k, query_rows, is_causal, lengths)
        return weights.squeeze(0) if query.dim() == 2 else weights

    def _prepare(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, need_weights: bool,
        attn_mask: Tensor | None, lengths: Tensor | None, cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Check and project: query, key and value (B, N, heads, head size), and the lengths or None."""
        if attn_mask is not None:
            raise ValueError(
                "attn_mask is not supported: the pattern decides which positions meet; use is_causal=True for causal "
                "attention and key_padding_mask or lengths for padding"
            )
        q, k, v = self._project({"query": query, "key": key, "value": value})
        if need_weights:
            self._check_weights("need_weights=True")
            if cu_seqlens is not None:
                raise ValueError("need_weights=True needs one sequence per sample; use attention_map for each document")
        if key_padding_mask is not None:
            self._check_one_device("key_padding_mask")
            if lengths is not None:
                raise ValueError("key_padding_mask and lengths say the same thing; pass one of them")
            mask = key_padding_mask.unsqueeze(0) if query.dim() == 2 else key_padding_mask
            lengths = _lengths_from_mask(mask, k.shape[0], k.shape[1])
        sizes = (q.shape[0], self.num_heads, q.shape[1], k.shape[1])
        if need_weights and prod(sizes) > MAX_WEIGHTS:
            raise ValueError(
                f"need_weights=True returns at most {MAX_WEIGHTS} weights (batch * heads * queries * keys), got "
                f"{' * '.join(map(str, sizes))}; use attention_map(query_rows=...) for the rows of interest"
            )
        return q, k, v, lengths

    def _project(self, embeddings: dict[str, Tensor]) -> list[Tensor]:
        """Check embeddings by their names and project them to (B, N, heads, head size)."""
        projections = {"query": self.q_proj, "key": self.k_proj, "value": self.v_proj}
        dims, query = "batch, sequence" if self.batch_first else "sequence, batch", embeddings["query"]
        for name, x in embeddings.items():
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
            size = projections[name].in_features
            shape = tuple(x.shape)
            if x.dim() not in (2, 3) or x.shape[-1] != size:
                raise ValueError(f"{name} must be ({dims}, {size}), or (sequence, {size}) for one sample; got {shape}")
            if x.dim() != query.dim():
                raise ValueError(f"{name} must have as many dimensions as query, got {shape} and {tuple(query.shape)}")
        projected = []
        for name, x in embeddings.items():
            y = projections[name](x if x.dim() == 3 else x.unsqueeze(0 if self.batch_first else 1))
            y = y if self.batch_first else y.transpose(0, 1)
            projected.append(y.view(*y.shape[:2], projections[name].out_features // self.head_dim, self.head_dim))
        return projected

    def _weights(
        self, q: Tensor, k: Tensor, rows: Sequence[int] | Tensor, is_causal: bool, lengths: Tensor | None
    ) -> Tensor:
        pattern, scale = self.attention.pattern, self.attention.scale
        assert not isinstance(pattern, DistributedSparseConfig)  # it needs a group, with which there are no weights
        return attention_weights(q, k, pattern, rows, is_causal=is_causal, scale=scale, lengths=lengths)

    def _check_one_device(self, what: str) -> None:
        if self.attention.sharding is not None:
            raise ValueError(
                f"{what} needs the whole sequence, of which a rank has a shard; use lengths for padding, and "
                "attention_weights on gathered tensors (distributed.gather_sequence) for weights"
            )

    def _check_weights(self, what: str) -> None:
        self._check_one_device(what)
        if self.attention.order is not None:
            raise ValueError(
                f"{what} is not available with an order; attention_weights of tensors that order.permute has put in order "
                "gives the weights in that order, if not causal"
            )


def _lengths_from_mask(mask: Tensor, batch: int, keys: int) -> Tensor:
    """The lengths that a ``key_padding_mask`` of suffixes describes."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"key_padding_mask must be a torch.Tensor, got {type(mask).__name__}; use torch.tensor(mask)")
    if mask.shape != (batch, keys):
        raise ValueError(f"key_padding_mask must be (batch, keys) = {(batch, keys)}, got {tuple(mask.shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"key_padding_mask must be bool or floating-point, got {mask.dtype}")
    padding = mask if mask.dtype == torch.bool else mask == -torch.inf
    if mask.is_floating_point() and not bool((padding | (mask == 0)).all()):
        raise ValueError("a floating-point key_padding_mask must hold 0 (keep) and -inf (ignore) only")
    lengths = (~padding).sum(-1)
    suffix = torch.arange(keys, device=mask.device) >= lengths.unsqueeze(-1)
    wrong = (padding != suffix).any(-1)
    if bool(wrong.any()):
        raise ValueError(
            "key_padding_mask must mark padding (True) at the end of samples only: patterns count from the start; samples "
            f"{wrong.nonzero().squeeze(1).tolist()} have padding before or between tokens, move it to the end"
        )
    return lengths


class MultiheadDilatedAttention(ProjectedAttention):
    """Multi-head attention by a dilated pattern, as a replacement for ``nn.MultiheadAttention``.

    The positional arguments of the call and its result ``(out, weights)`` are those of ``nn.MultiheadAttention``, with two
    differences. ``need_weights`` is False by default, because the weights grow with the square of the length.
    ``attn_mask`` is refused, because the pattern is the mask (use ``is_causal``).

    ``nn.TransformerEncoderLayer`` can hold this module in training. In evaluation, that class reads the parameters of
    ``nn.MultiheadAttention`` directly unless ``torch.backends.mha.set_fastpath_enabled(False)``.

    Args:
        segment_lengths, dilation_rates, offsets, torchscale_padding: the pattern, see ``Dilated``.
        embed_dim, num_heads, options: see ``ProjectedAttention`` and ``Attention``.

    >>> module = MultiheadDilatedAttention(512, 8, segment_lengths=[256, 512], dilation_rates=[1, 2])
    >>> x = torch.randn(1, 1000, 512)
    >>> out, weights = module(x, x, x, is_causal=True)
    >>> out.shape, weights
    (torch.Size([1, 1000, 512]), None)
    """

    def __init__(
        self, embed_dim: int, num_heads: int, segment_lengths: Sequence[int], dilation_rates: Sequence[int], *,
        offsets: str | Sequence[int] = "interleaved", torchscale_padding: bool = False,
        **options: Unpack[ProjectionOptions],
    ) -> None:  # fmt: skip
        pattern = Dilated(segment_lengths, dilation_rates, offsets, torchscale_padding)
        super().__init__(pattern, embed_dim, num_heads, **options)


class BlockSparseRingDistributedDilatedAttention(ProjectedAttention):
    """Multi-head attention over a sharded sequence that reads fewer blocks of ranks and nodes that are farther away.

    It is called like ``MultiheadDilatedAttention``, with this rank's rows, and returns ``(out, None)``. The result is this
    rank's rows of what one device computes with the pattern ``distributed_config.pattern(shards)``.

    Args:
        embed_dim, num_heads: see ``ProjectedAttention``.
        segment_lengths, dilation_rates: must be None. The patterns follow from the shards and have no branches.
        distributed_config: the pattern. The default is ``DistributedSparseConfig()``.
        options: see ``ProjectedAttention`` and ``Attention``. The default of ``group`` is all ranks of the job.

    >>> config = DistributedSparseConfig(sparsity_ratio=0.05, pattern_type="hierarchical")
    >>> module = BlockSparseRingDistributedDilatedAttention(512, 8, distributed_config=config)
    >>> sum(p.numel() for p in module.parameters())
    1051648
    """

    def __init__(
        self, embed_dim: int, num_heads: int, segment_lengths: None = None, dilation_rates: None = None,
        distributed_config: DistributedSparseConfig | None = None, **options: Unpack[ProjectionOptions],
    ) -> None:  # fmt: skip
        if segment_lengths is not None or dilation_rates is not None:
            raise ValueError(
                "the patterns of DistributedSparseConfig follow from the shards and have no branches, got "
                f"{segment_lengths=} and {dilation_rates=}; leave them out, or use MultiheadDilatedAttention with group"
            )
        config = DistributedSparseConfig() if distributed_config is None else distributed_config
        if not isinstance(config, DistributedSparseConfig):
            raise TypeError(f"distributed_config must be a DistributedSparseConfig, got {type(config).__name__}")
        default_to_all_ranks(options)
        super().__init__(config, embed_dim, num_heads, **options)

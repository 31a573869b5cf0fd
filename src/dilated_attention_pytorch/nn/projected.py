"""Multi-head attention: projections around ``Attention``, as a replacement for ``nn.MultiheadAttention``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from math import prod
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from dilated_attention_pytorch.api import attention_weights
from dilated_attention_pytorch.lengths import Lengths
from dilated_attention_pytorch.nn.attention import Attention, ModuleOptions, default_to_all_ranks, with_branches
from dilated_attention_pytorch.nn.masks import is_causal_mask, samples_of_mask
from dilated_attention_pytorch.nn.nested import is_nested, nested_like, packed_rows
from dilated_attention_pytorch.nn.projections import HeadOptions, HeadProjections
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.patterns.tiers import DistributedSparseConfig

MAX_WEIGHTS = 2**26  # B * H * N * M that need_weights=True returns: 256 MiB in float32
Masks = tuple[Tensor | None, Tensor | None]  # key_padding_mask and attn_mask


class WeightOptions(TypedDict):
    """Options that weights depend on."""

    is_causal: bool
    lengths: Lengths | None
    starts: Lengths | None


class SequenceOptions(WeightOptions):
    """The keyword arguments of ``Attention.forward``."""

    cu_seqlens: Lengths | None
    order: Order | None
    ordered: bool | None


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


class ProjectedAttention(HeadProjections):
    """Multi-head attention: query, key, value and output projections around ``Attention(pattern, **options)``.

    The parameters have the names, shapes and initial values of those of ``nn.MultiheadAttention``.

    Args:
        pattern: see ``Attention``.
        embed_dim: size of an embedding, split evenly over the heads.
        num_heads: query heads.
        num_kv_heads: key and value heads (grouped-query attention). The default is as many as query heads. With fewer, the
            key and value rows of ``in_proj_weight`` and ``in_proj_bias`` are fewer.
        bias: whether the projections have a bias.
        layer_norm: normalise before the output projection (MAGNETO's sub-LN, as in LongNet), by ``inner_attn_ln``.
        layer_norm_eps: epsilon of that normalisation.
        gamma_init: 1 initialises the projections as ``nn.MultiheadAttention`` does. With another value, the projections
            of values and of the output are Xavier-uniform with this gain, each by its own shape (MAGNETO).
        batch_first: tensors are (batch, sequence, embedding), otherwise (sequence, batch, embedding).
        kdim, vdim: embedding sizes of key and value if they differ from ``embed_dim``.
        device, dtype: of the parameters.
        options: see ``Attention``. With ``group``, the embeddings are those of this rank's rows, and the parameters are
            the same on every rank: sum their gradients over the ranks, or average them as DDP does. The weights are not
            available with ``group`` or ``order``.

    ``load_state_dict`` takes a state of ``nn.MultiheadAttention``. It also takes a state with ``q_proj``, ``k_proj``,
    ``v_proj`` and ``out_proj``, as in the paper authors' checkpoints. These have ``inner_attn_ln`` as well, which needs
    ``layer_norm=True``.
    """

    def __init__(
        self, pattern: Dilated | BlockSparse | DistributedSparseConfig, embed_dim: int, num_heads: int, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, **options: Unpack[ProjectionOptions],
    ) -> None:  # fmt: skip
        given: dict[str, Any] = {**options}
        of_heads = {field.name: given.pop(field.name) for field in fields(HeadOptions) if field.name in given}
        unknown = ", ".join(sorted(set(given) - set(ModuleOptions.__annotations__)))
        if unknown:
            hint = "; dropout is called dropout_p" if "dropout" in given else ""
            name = type(self).__name__
            raise TypeError(
                f"{name} got an unexpected keyword argument {unknown!r}{hint}; its docstring has those it takes"
            )
        super().__init__(embed_dim, num_heads, HeadOptions(**of_heads), device, dtype)
        if isinstance(pattern, Dilated):
            pattern.check_key_heads(self.num_kv_heads)
        self.attention = Attention(pattern, **given)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = False, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False, *, lengths: Lengths | None = None, starts: Lengths | None = None,
        cu_seqlens: Lengths | None = None, order: Order | None = None, ordered: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attend and project. Return ``(out, weights)``, where weights are None unless ``need_weights``.

        Args:
            query, key, value: (batch, sequence, embedding), or (sequence, batch, embedding) if not ``batch_first``, or
                (sequence, embedding). Nested tensors (batch, sequence, embedding) of one set of lengths are a batch of
                sequences: the result is nested. They exclude masks, ``lengths``, ``starts``, ``cu_seqlens`` and weights.
            key_padding_mask: (batch, keys), or (keys,) without a batch. True (or -inf) marks padding, which must be before
                or behind the tokens of a sample. Positions count from its first token. Reading it costs a device
                synchronisation.
            need_weights: also return the weights, averaged over the heads, or per head if not ``average_attn_weights``.
            attn_mask: (queries, keys) or (batch * heads, queries, keys). It must be causal, True (or -inf) above the
                diagonal and False (or 0) elsewhere, or hide nothing. Reading it costs a device synchronisation and time
                and memory of its size. ``is_causal=True`` without a mask means the same and costs nothing.
            average_attn_weights: see ``need_weights``.
            is_causal: a position sees itself and earlier ones only. An ``attn_mask`` must then be causal, or None.
            lengths: (batch,), the valid positions of each sample. It replaces ``key_padding_mask``.
            starts: (batch,), the first key row of each sample: padding in front, see ``attention``.
            cu_seqlens: (documents + 1,), boundaries of packed documents, see ``attention``.
            order, ordered: each replaces that of the constructor unless None, see ``attention``.
        """
        options: SequenceOptions = {
            "is_causal": is_causal, "lengths": lengths, "starts": starts, "cu_seqlens": cu_seqlens, "order": order,
            "ordered": ordered,
        }  # fmt: skip
        masks = key_padding_mask, attn_mask
        if is_nested(query, key, value):
            return self._forward_nested((query, key, value), masks, need_weights, options), None
        prepare = partial(self._prepare, query, key, value)
        (q, k, v), options = self.attention.report_errors(prepare, masks, need_weights, options)
        x = self.attention(q, k, v, **options).flatten(-2)
        if self.inner_attn_ln is not None:
            x = self.inner_attn_ln(x)
        out: Tensor = self.out_proj(x)
        if not self.batch_first:
            out = out.transpose(0, 1)
        weights = None
        if need_weights:
            weights = self._weights(q, k, range(q.shape[1]), options)
            weights = weights.mean(1) if average_attn_weights else weights
        if query.dim() == 2:
            out = out.squeeze(0 if self.batch_first else 1)
            weights = None if weights is None else weights.squeeze(0)
        return out, weights

    def _forward_nested(
        self, embeddings: tuple[Tensor, Tensor, Tensor], masks: Masks, need_weights: bool, options: SequenceOptions
    ) -> Tensor:
        """Attend over nested tensors as packed documents."""
        (q, k, v), cu_seqlens = self.attention.report_errors(self._prepare_nested, embeddings, masks, options)
        options["cu_seqlens"] = cu_seqlens
        out, _ = self.forward(q, k, v, need_weights=need_weights, **options)
        return nested_like(embeddings[0], out, cu_seqlens)

    def _prepare_nested(
        self, embeddings: tuple[Tensor, Tensor, Tensor], masks: Masks, options: SequenceOptions
    ) -> tuple[list[Tensor], Tensor]:
        self._check_one_device("a nested tensor")
        if any(x is not None for x in (*masks, options["lengths"], options["starts"], options["cu_seqlens"])):
            got = "key_padding_mask, attn_mask, lengths or cu_seqlens" if options["starts"] is None else "starts"
            raise ValueError(
                f"a nested tensor has the lengths of its sequences, got {got} beside it; leave them out, and use "
                "is_causal=True for causal attention"
            )
        return packed_rows(*embeddings)

    def attention_map(
        self, query: Tensor, key: Tensor, query_rows: Sequence[int] | Tensor, *, is_causal: bool = False,
        lengths: Lengths | None = None, starts: Lengths | None = None,
    ) -> Tensor:  # fmt: skip
        """The weights (batch, heads, rows, keys) of chosen query rows, at any length, in memory proportional to it.

        >>> module = MultiheadDilatedAttention(64, 4, segment_lengths=[256, 512], dilation_rates=[1, 2])
        >>> x = torch.randn(1, 1000, 64)
        >>> module.attention_map(x, x, query_rows=[0, -1]).shape
        torch.Size([1, 4, 2, 1000])
        """
        self._check_weights("attention_map", self.attention.order)
        if is_nested(query, key):
            raise TypeError("attention_map needs sequences of one length, got a nested tensor; call once for each sequence")
        q, k = self._project({"query": query, "key": key})
        options: WeightOptions = {"is_causal": is_causal, "lengths": lengths, "starts": starts}
        weights = self._weights(q, k, query_rows, options)
        return weights.squeeze(0) if query.dim() == 2 else weights

    def _prepare(
        self, query: Tensor, key: Tensor, value: Tensor, masks: Masks, need_weights: bool, options: SequenceOptions
    ) -> tuple[list[Tensor], SequenceOptions]:
        """Check and project: query, key and value (B, N, heads, head size), and what the masks say as options."""
        projected = self._project({"query": query, "key": key, "value": value})
        q, k = projected[:2]
        key_padding_mask, attn_mask = masks
        options = options.copy()
        if need_weights:
            self._check_weights("need_weights=True", self._order_of_call(options))
            if options["cu_seqlens"] is not None:
                raise ValueError("need_weights=True needs one sequence per sample; call once for each sequence")
        if attn_mask is not None:
            self._check_one_device("attn_mask")
            sizes = (q.shape[0] * self.num_heads, q.shape[1], k.shape[1])
            options["is_causal"] = is_causal_mask(attn_mask, options["is_causal"], sizes)
            if options["is_causal"] and self._rows_are_ordered(options):
                raise ValueError(
                    "a causal attn_mask compares rows, and is_causal compares original positions, which differ with "
                    "ordered=True; use is_causal=True without attn_mask"
                )
        if key_padding_mask is not None:
            self._check_one_device("key_padding_mask")
            if options["lengths"] is not None or options["starts"] is not None:
                raise ValueError("key_padding_mask and lengths or starts say the same thing; pass one of them")
            shape = tuple(k.shape[:2] if query.dim() == 3 else k.shape[1:2])
            options["starts"], options["lengths"] = samples_of_mask(key_padding_mask, shape)
        entries = (q.shape[0], self.num_heads, q.shape[1], k.shape[1])
        if need_weights and prod(entries) > MAX_WEIGHTS:
            raise ValueError(
                f"need_weights=True returns at most {MAX_WEIGHTS} weights (batch * heads * queries * keys), got "
                f"{' * '.join(map(str, entries))}; use attention_map(query_rows=...) for the rows of interest"
            )
        return projected, options

    def _order_of_call(self, options: SequenceOptions) -> Order | None:
        return self.attention.order if options["order"] is None else options["order"]

    def _rows_are_ordered(self, options: SequenceOptions) -> bool:
        ordered = self.attention.ordered if options["ordered"] is None else options["ordered"]
        return bool(ordered) and self._order_of_call(options) is not None

    def _weights(
        self, q: Tensor, k: Tensor, rows: Sequence[int] | Tensor, options: WeightOptions | SequenceOptions
    ) -> Tensor:  # fmt: skip
        pattern, scale = self.attention.pattern, self.attention.scale
        assert not isinstance(pattern, DistributedSparseConfig)  # it needs a group, with which there are no weights
        samples = {"lengths": options["lengths"], "starts": options["starts"]}
        return attention_weights(q, k, pattern, rows, is_causal=options["is_causal"], scale=scale, **samples)

    def _check_one_device(self, what: str) -> None:
        if self.attention.sharding is not None:
            raise ValueError(
                f"{what} needs the whole sequence, of which a rank has a shard; use is_causal=True, lengths for padding, "
                "and attention_weights on gathered tensors (distributed.gather_sequence) for weights"
            )

    def _check_weights(self, what: str, order: Order | None) -> None:
        self._check_one_device(what)
        if order is not None:
            raise ValueError(
                f"{what} is not available with an order; attention_weights of tensors that order.permute has put in order "
                "gives the weights in that order, if not causal"
            )


class MultiheadDilatedAttention(ProjectedAttention):
    """Multi-head attention by a dilated pattern, as a replacement for ``nn.MultiheadAttention``.

    The parameters, their initial values and the state dict are those of ``nn.MultiheadAttention``. With one segment that
    covers the sequence, as in ``segment_lengths=[N], dilation_rates=[1]``, so are the output and the gradients. The module
    can be ``self_attn`` of ``nn.TransformerEncoderLayer`` and ``nn.TransformerDecoderLayer``. Its ``batch_first`` must be
    that of the layer.

    The constructor differs from that of ``nn.MultiheadAttention``:

    * ``segment_lengths`` and ``dilation_rates`` follow ``num_heads``, and all other arguments are keywords.
    * ``batch_first`` is True by default.
    * ``dropout`` is called ``dropout_p``.
    * ``add_bias_kv`` and ``add_zero_attn`` do not exist.

    The call differs as follows:

    * ``need_weights`` is False by default. Weights are those before dropout, at most 2**26 of them, and not available with
      ``cu_seqlens``, ``order`` or ``group``. ``attention_map`` gives chosen rows at any length.
    * ``attn_mask`` must be causal, or hide nothing. Any other mask or bias is refused, because the pattern is the mask.
    * ``is_causal=True`` means causal attention, with or without ``attn_mask``. A mask beside it is checked.
    * ``key_padding_mask`` must mark the ends of samples. A floating-point mask must hold 0 and -inf only.
    * Query rows in the padding attend to nothing, so that their output is the bias of ``out_proj``. This holds for
      cross-attention as well, because query rows are positions of the keys.
    * A query row that meets no key in a head contributes zeros there, instead of NaN. Patterns without a branch of rate 1
      have such rows.
    * With fewer queries than keys, the queries are the last positions. More queries than keys are refused, and shorter
      samples need as many queries as keys. Cross-attention with another length belongs to ``nn.MultiheadAttention``.
    * Dropout depends on a seed and on positions, so that it drops other weights than ``nn.MultiheadAttention``.
    * Nested tensors are served in training as well. They must have the same lengths, and they exclude masks.
    * Masks are read on the host: each costs a device synchronisation and a graph break of ``torch.compile``. ``is_causal``
      and ``lengths`` on the CPU cost neither.

    The rest of PyTorch sees these differences:

    * ``nn.TransformerEncoderLayer`` calls the module in evaluation too. The fused path of that class is never taken,
      because it computes dense attention.
    * ``nn.TransformerEncoder`` warns in its constructor that it will not use nested tensors.
    * The module is no instance of ``nn.MultiheadAttention``. It has no ``dropout``, ``bias_k``, ``bias_v``,
      ``add_zero_attn`` and ``merge_masks``, and ``torch.jit.script`` does not compile it.
    * Second derivatives and forward mode need ``backend="reference"``.

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
        segment_lengths, dilation_rates: branches that restrict which blocks are seen, in tokens and in blocks, see
            ``DistributedSparseConfig``. By default, a query block sees every block.
        distributed_config: the pattern. The default is ``DistributedSparseConfig()``.
        options: see ``ProjectedAttention`` and ``Attention``. The default of ``group`` is all ranks of the job.

    >>> config = DistributedSparseConfig(sparsity_ratio=0.05, pattern_type="hierarchical")
    >>> module = BlockSparseRingDistributedDilatedAttention(512, 8, distributed_config=config)
    >>> sum(p.numel() for p in module.parameters())
    1050624
    """

    def __init__(
        self, embed_dim: int, num_heads: int, segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None, distributed_config: DistributedSparseConfig | None = None,
        **options: Unpack[ProjectionOptions],
    ) -> None:  # fmt: skip
        config = DistributedSparseConfig() if distributed_config is None else distributed_config
        if not isinstance(config, DistributedSparseConfig):
            raise TypeError(f"distributed_config must be a DistributedSparseConfig, got {type(config).__name__}")
        if segment_lengths is not None or dilation_rates is not None:
            config = with_branches(config, segment_lengths or (), dilation_rates or ())
        default_to_all_ranks(options)
        super().__init__(config, embed_dim, num_heads, **options)

"""Multi-head dilated attention: projections around ``DilatedAttention``, in the place of ``nn.MultiheadAttention``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dilated_attention_pytorch.checks import check_no_sharding
from dilated_attention_pytorch.nn.dilated import DilatedAttention
from dilated_attention_pytorch.nn.projected import ProjectedAttention
from dilated_attention_pytorch.nn.ring import RingDilatedAttention
from dilated_attention_pytorch.orders.order import Order

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from dilated_attention_pytorch.shards import Shards


class MultiheadDilatedAttention(ProjectedAttention):
    """Drop-in for ``nn.MultiheadAttention`` whose heads attend by a dilated pattern.

    The forward arguments and the ``(out, weights)`` it returns are those of ``nn.MultiheadAttention``, with two
    differences: ``need_weights`` is False by default, because the weights grow with the square of the length, and
    ``attn_mask`` is refused, because the pattern is the mask (use ``is_causal``). Inside ``nn.TransformerEncoderLayer`` it
    serves in training; in evaluation that class reads the parameters of ``nn.MultiheadAttention`` directly unless
    ``torch.backends.mha.set_fastpath_enabled(False)``.

    Args:
        embed_dim: size of an embedding, split evenly over the heads.
        num_heads: query heads.
        segment_lengths, dilation_rates, offsets, torchscale_padding: the pattern, see ``Dilated``.
        mixing_gradient: see ``attention``.
        num_kv_heads: key and value heads (grouped-query attention); as many as query heads by default.
        dropout: probability of dropping an attention weight in training.
        bias: whether the projections have one.
        layer_norm: normalise before the output projection (MAGNETO's sub-LN, as in LongNet).
        layer_norm_eps: of that normalisation.
        gamma_init: gain of the initial value and output projections (MAGNETO).
        batch_first: tensors are (batch, sequence, embedding), else (sequence, batch, embedding).
        kdim, vdim: embedding sizes of key and value if they differ.
        softmax_scale: of the scores; ``head size ** -0.5`` by default.
        backend: see ``attention``.
        group: ranks over which the sequence is sharded, see ``attention``: query, key and value are then this rank's rows,
            ``lengths`` counts positions of the whole sequence, and the weights cannot be asked for.
        layout, bucket_size, transport, comm_dtype: with ``group``, how rows travel, see ``attention``.
        order, ordered: an order of the positions, and whether the rows of query, key and value already lie in it (with
            ``group`` always), see ``attention``. The weights cannot be asked for then.

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
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        batch_first: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        offsets: str | Sequence[int] = "interleaved",
        torchscale_padding: bool = False,
        mixing_gradient: str = "exact",
        softmax_scale: float | None = None,
        backend: str = "auto",
        group: ProcessGroup | DeviceMesh | None = None,
        layout: str | Shards = "contiguous",
        bucket_size: int | None = None,
        transport: str = "auto",
        comm_dtype: torch.dtype | None = None,
        order: Order | None = None,
        ordered: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sharding: dict[str, Any] = {
            "layout": layout, "bucket_size": bucket_size, "transport": transport, "comm_dtype": comm_dtype
        }  # fmt: skip
        attention: DilatedAttention | RingDilatedAttention
        if group is None:
            check_no_sharding(**sharding)
            attention = DilatedAttention(
                segment_lengths,
                dilation_rates,
                softmax_scale,
                dropout,
                offsets,
                backend,
                torchscale_padding=torchscale_padding,
                mixing_gradient=mixing_gradient,
                order=order,
                ordered=ordered,
            )
        else:
            if torchscale_padding:
                raise ValueError("a sharded sequence has no torchscale_padding; leave it out, or leave out group")
            attention = RingDilatedAttention(
                segment_lengths,
                dilation_rates,
                group=group,
                attention_dropout=dropout,
                offsets=offsets,
                softmax_scale=softmax_scale,
                mixing_gradient=mixing_gradient,
                backend=backend,
                order=order,
                ordered=ordered,
                **sharding,
            )
        attention.pattern.check_key_heads(num_heads if num_kv_heads is None else num_kv_heads)
        super().__init__(
            attention, embed_dim, num_heads, sharded=group is not None, num_kv_heads=num_kv_heads, bias=bias,
            layer_norm=layer_norm, layer_norm_eps=layer_norm_eps, gamma_init=gamma_init, batch_first=batch_first, kdim=kdim,
            vdim=vdim, device=device, dtype=dtype,
        )  # fmt: skip

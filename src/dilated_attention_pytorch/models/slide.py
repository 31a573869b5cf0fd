"""``SlideEncoder``: Prov-GigaPath's LongNet, from the tiles of a slide and their coordinates to an embedding."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, overload

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.api import attention_weights
from dilated_attention_pytorch.integers import as_integer
from dilated_attention_pytorch.lengths import Lengths
from dilated_attention_pytorch.models.checkpoints import read_checkpoint
from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.encoder import LongNetEncoder
from dilated_attention_pytorch.models.files import Pretrained
from dilated_attention_pytorch.models.layers import LongNetLayer, reset_parameters
from dilated_attention_pytorch.models.nested import NestedConfig
from dilated_attention_pytorch.models.sequences import ModelRows
from dilated_attention_pytorch.models.slide_batch import SlideBatch, check_cells, grid_positions
from dilated_attention_pytorch.orders.order import Order

POOLINGS = ("cls", "mean")
_PRESETS = {768: "gigapath-12x768", 1024: "gigapath-24x1024", 1536: "gigapath-12x1536"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideConfig(NestedConfig):
    """The sizes and options of a ``SlideEncoder``. Every field is checked.

    Args:
        encoder: of the LongNet, without positions of its own; its width is a multiple of 4.
        in_chans: the width of tile embeddings.
        tile_size: the pixels of a cell of the grid.
        slide_ngrids: the cells of the grid along x and along y.
        pooling: ``"cls"``, or ``"mean"`` over the tiles.
        norm_eps: of the norm of pooled states.

    >>> config = SlideConfig.gigapath(768)
    >>> config.encoder.segment_lengths
    (1024, 5792, 32768, 185363, 1048576)
    >>> SlideConfig.from_dict(config.to_dict()) == config
    True
    """

    encoder: LongNetConfig
    in_chans: int = 1536
    tile_size: int = 256
    slide_ngrids: int = 1000
    pooling: str = "cls"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        self.check_fields({"in_chans": 1, "tile_size": 1, "slide_ngrids": 1}, ("norm_eps",))
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(map(repr, POOLINGS))}, got {self.pooling!r}")
        if self.encoder.embed_dim % 4:
            raise ValueError(
                "positions are sine and cosine of a row and of a column, so embed_dim must be a multiple of 4, got "
                f"{self.encoder.embed_dim}"
            )

    @staticmethod
    def gigapath(
        embed_dim: int = 768, *, tile_size: int = 256, slide_ngrids: int = 1000, max_wsi_size: int = 262144,
        pooling: str = "cls", **changes: Any,
    ) -> SlideConfig:  # fmt: skip
        """One of the three published sizes: widths of 768 (12 layers), 1024 (24 layers) and 1536 (12 layers).

        Args:
            embed_dim: 768, 1024 or 1536.
            tile_size, slide_ngrids, pooling: see ``SlideConfig``.
            max_wsi_size: the side of the largest slide in pixels. With ``tile_size``, it gives the segment lengths.
            changes: other values for fields of the encoder, for example ``dropout=0.0``.
        """
        if embed_dim not in _PRESETS:
            raise ValueError(f"embed_dim must be one of {', '.join(map(str, _PRESETS))}, got {embed_dim!r}")
        tile_size = as_integer("tile_size", tile_size, 1)
        longest = (as_integer("max_wsi_size", max_wsi_size, tile_size) // tile_size) ** 2
        step = (int(math.log2(longest)) - 10) / 4  # five lengths from 2**10 on, in equal ratios
        segments = tuple(int(2 ** (10 + step * i)) for i in range(5))
        encoder = LongNetConfig.preset(_PRESETS[embed_dim], **{"segment_lengths": segments, **changes})
        return SlideConfig(encoder=encoder, tile_size=tile_size, slide_ngrids=slide_ngrids, pooling=pooling)


class SlideBody:
    """The modules of a slide encoder and what they compute, for a class that is also a ``torch.nn.Module``.

    A subclass says where its sizes are.
    """

    cls_token: nn.Parameter
    patch_embed: nn.ModuleDict
    encoder: LongNetEncoder
    norm: nn.LayerNorm

    @property
    def sizes(self) -> SlideConfig:
        """The sizes and options of this model."""
        raise NotImplementedError

    def add_modules(self, **factory: Any) -> None:
        """Make all modules. ``factory`` has the device and the dtype of parameters."""
        config = self.sizes
        width = config.encoder.embed_dim
        self.cls_token = nn.Parameter(torch.empty(1, 1, width, **factory))
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(config.in_chans, width, **factory)})
        self.encoder = LongNetEncoder(config.encoder, **factory)
        self.norm = nn.LayerNorm(width, config.norm_eps, **factory)

    def embeddings(
        self, tiles: Tensor, coordinates: Tensor, *, lengths: Lengths | None = None, order: Order | bool | None = None,
        all_layer_embed: bool = False, check_coordinates: bool = True,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """The embeddings of slides, and those of all layers if they are asked for. See ``SlideEncoder.forward``."""
        batch, x, rows = self._start(tiles, coordinates, lengths, order, check_coordinates)
        every = []
        for states in self._states(x, rows):
            x = states
            if all_layer_embed:
                every.append(self._pool(x, batch))
        if self.sizes.pooling == "cls":
            cls_rows = torch.stack([own[0] for own in batch.rows(x)])
            return self._norm(self.encoder.leave(cls_rows, rows)), every
        return self._pool(self.encoder.leave(x, rows), batch), every

    def attention_map(
        self, tiles: Tensor, coordinates: Tensor, *, layer: int = -1, average_heads: bool = True,
        lengths: Lengths | None = None, order: Order | bool | None = None, check_coordinates: bool = True,
    ) -> Tensor:  # fmt: skip
        """The attention weights of the CLS row for each tile in one layer, exactly as the layer computes them.

        A tile that CLS does not meet in the pattern of a head has weight 0 there. The weight of CLS for itself is left out,
        and so is that of zero keys (``torchscale_padding``). With these two, the weights of a head add up to 1.

        Args:
            tiles, coordinates, lengths, order, check_coordinates: see ``forward``.
            layer: the number of the layer; negative ones are counted from the end.
            average_heads: average over heads.

        Returns:
            (B, N), or (B, H, N) for each head, nested if the tiles are; 0 for padding. The tiles are in the order in which
            they were passed, also with ``order``.
        """
        layers = self.sizes.encoder.num_layers
        if not isinstance(layer, int) or not -layers <= layer < layers:
            raise ValueError(f"layer must be the number of a layer, from {-layers} to {layers - 1}, got {layer!r}")
        batch, x, rows = self._start(tiles, coordinates, lengths, order, check_coordinates)
        for _, states in zip(range(layer % layers + 1), self._states(x, rows), strict=False):
            x = states
        own = self.encoder.layers[layer]
        assert isinstance(own, LongNetLayer)
        x, head = own.self_attn_layer_norm(x), (-1, self.sizes.encoder.head_dim)
        query, key = (project(x).unflatten(-1, head) for project in (own.self_attn.q_proj, own.self_attn.k_proj))
        pattern, maps = self.sizes.encoder.pattern, []
        for q, k in zip(batch.rows(query), batch.rows(key), strict=True):
            weights = attention_weights(q.unsqueeze(0), k.unsqueeze(0), pattern, [0])[0, :, 0, 1:]
            maps.append(weights.mean(0) if average_heads else weights)
        return batch.maps(maps)

    def _start(
        self, tiles: Tensor, coordinates: Tensor, lengths: Lengths | None, order: Order | bool | None, check: bool
    ) -> tuple[SlideBatch, Tensor, ModelRows]:
        """The slides, their tokens, and what the layers have to know about these."""
        config = self.sizes
        batch = SlideBatch.of(tiles, coordinates, lengths, config.in_chans, config.tile_size)
        if check:
            check_cells(batch, config.tile_size, config.slide_ngrids)
        batch = batch.ordered(order)
        dtype, device = self.cls_token.dtype, batch.tiles.device
        cells = batch.cells if device.type == "mps" else batch.cells.to(device, non_blocking=True)
        positions = grid_positions(cells, config.encoder.embed_dim).to(device, dtype)
        embedded = self.patch_embed["proj"](batch.tiles.to(dtype)) + positions
        x = batch.tokens(embedded, self.cls_token)
        return batch, x, self.encoder.rows_of(x, {"cu_seqlens": batch.cu_seqlens})

    def _states(self, x: Tensor, rows: ModelRows) -> Iterator[Tensor]:
        """The states in front of the first layer and behind each layer."""
        x = self.encoder.enter(x, rows)
        yield x
        for number in range(len(self.encoder.layers)):
            x = self.encoder.layers.run(number, x, rows, False)
            yield x

    def _pool(self, x: Tensor, batch: SlideBatch) -> Tensor:
        """The embeddings (B, E) of states."""
        mean = self.sizes.pooling == "mean"
        return self._norm(torch.stack([own[1:].mean(0) if mean else own[0] for own in batch.rows(x)]))

    def _norm(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x)
        return result


class SlideEncoder(SlideBody, Pretrained):
    """Prov-GigaPath's slide encoder. Parameters have the names of its checkpoints.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    >>> encoder = LongNetConfig.preset("gigapath-12x768", embed_dim=64, num_layers=2, ffn_dim=128)
    >>> model = SlideEncoder(SlideConfig(encoder=encoder)).eval()
    >>> tiles = torch.randn(2, 100, 1536)
    >>> coordinates = 256 * torch.randint(0, 400, (2, 100, 2))
    >>> model(tiles, coordinates, lengths=[100, 60]).shape
    torch.Size([2, 64])
    >>> model.attention_map(tiles, coordinates, lengths=[100, 60]).shape
    torch.Size([2, 100])
    """

    config_type = SlideConfig
    model_type = "longnet_slide"
    config: SlideConfig

    def __init__(
        self, config: SlideConfig, *, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        if not isinstance(config, SlideConfig):
            raise TypeError(f"config must be a SlideConfig, got {type(config).__name__}; see SlideConfig.gigapath")
        super().__init__(config)
        self.add_modules(device="meta", dtype=dtype)
        self.materialise(device)

    @property
    def sizes(self) -> SlideConfig:
        """The configuration."""
        return self.config

    def reset_parameters(self) -> None:
        """Draw new parameters, as the constructor does."""
        reset_parameters(self, self.config.encoder)
        nn.init.normal_(self.cls_token, std=0.02)
        projection = self.patch_embed["proj"]
        assert isinstance(projection, nn.Linear)
        nn.init.xavier_uniform_(projection.weight)
        nn.init.zeros_(projection.bias)

    @overload
    def forward(
        self, tiles: Tensor, coordinates: Tensor, *, lengths: Lengths | None = ..., order: Order | bool | None = ...,
        all_layer_embed: Literal[False] = ..., check_coordinates: bool = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, tiles: Tensor, coordinates: Tensor, *, lengths: Lengths | None = ..., order: Order | bool | None = ...,
        all_layer_embed: bool, check_coordinates: bool = ...,
    ) -> Tensor | list[Tensor]: ...  # fmt: skip
    def forward(
        self, tiles: Tensor, coordinates: Tensor, *, lengths: Lengths | None = None, order: Order | bool | None = None,
        all_layer_embed: bool = False, check_coordinates: bool = True,
    ) -> Tensor | list[Tensor]:  # fmt: skip
        """The embeddings (B, E) of slides.

        Args:
            tiles: (B, N, in_chans), or a jagged nested tensor (B, sequence, in_chans). They are converted to the dtype of
                the parameters.
            coordinates: (B, N, 2), the pixel position (x, y) of each tile, or nested likewise; integers, float32 or
                float64. Column ``floor(x / tile_size)`` and row ``floor(y / tile_size)`` give the positions.
            lengths: (B,), the number of tiles of each slide, see ``attention``. The other rows have no effect, and each
                slide has the result that it would have by itself.
            order: an order of the tiles: the pattern of attention follows it, and CLS stays in front. True is a Hilbert
                curve over the cells of each slide. This changes the result: published weights were trained on tiles
                in the order in which they were cut. With ``lengths`` or nested tensors, see ``attention``. True
                on coordinates on a GPU costs further device synchronisations.
            all_layer_embed: return a list with the embeddings of the states in front of the first layer and behind each
                layer. As in the authors' code, they are without ``encoder.layer_norm``, so that the last one differs
                from the plain result.
            check_coordinates: refuse coordinates that are not finite, negative, off the grid, or all in one cell.
                This costs one device synchronisation if they are on a GPU, and none on the CPU. False leaves it out.
                Cells off the grid then get positions with which the model was not trained.
        """
        pooled, every = self.embeddings(
            tiles, coordinates, lengths=lengths, order=order, all_layer_embed=all_layer_embed,
            check_coordinates=check_coordinates,
        )  # fmt: skip
        return every if all_layer_embed else pooled

    @classmethod
    def from_gigapath(
        cls, file: str | os.PathLike[str], *, config: SlideConfig | None = None, pooling: str | None = None,
        device: torch.device | str | int | None = None, dtype: torch.dtype | None = None,
    ) -> Self:  # fmt: skip
        """The encoder with the weights of a file of Prov-GigaPath, ``slide_encoder.pth``.

        Missing, unexpected and misshapen tensors raise and are all listed. So does a truncated file, with its name. The
        model is in training mode as every new module; call ``eval()`` for inference.

        Args:
            file: of ``torch.save``, or a safetensors file. Nothing but tensors is unpickled. The prefixes of DDP and
                fairscale are removed from names.
            config: None for the published size whose width the file has, with ``SlideConfig.gigapath``.
            pooling: instead of that of the config.
            device, dtype: of the parameters; PyTorch's default device and the dtypes of the file if None.
        """
        tensors = read_checkpoint(file)
        if config is None:
            config = SlideConfig.gigapath(_width(tensors, str(file)))
        if pooling is not None:
            config = config.replace(pooling=pooling)
        return cls.from_tensors(config, tensors, str(file), device=device, dtype=dtype)


def _width(tensors: Mapping[str, Tensor], source: str) -> int:
    """The width of a published model by the shapes of its tensors."""
    shapes = {name: tuple(tensors[name].shape) for name in ("cls_token", "patch_embed.proj.weight") if name in tensors}
    found = {shape[-1] if name == "cls_token" else shape[0] for name, shape in shapes.items() if shape}
    if len(found) != 1 or not found <= _PRESETS.keys():
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "neither of them"
        known = ", ".join(map(str, _PRESETS))
        raise ValueError(
            f"{source} is not a published slide encoder of Prov-GigaPath: cls_token and patch_embed.proj.weight give its "
            f"width, one of {known}; it has {got}. Pass config=SlideConfig(...) for another size"
        )
    return int(found.pop())

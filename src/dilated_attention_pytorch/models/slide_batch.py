"""Batches of slides: where their tiles are on the grid, which rows belong to which slide, and the tokens of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dilated_attention_pytorch.checks import check_index_vector, check_is_order, check_order_keeps
from dilated_attention_pytorch.dtypes import DTYPES
from dilated_attention_pytorch.jagged import is_jagged, pack
from dilated_attention_pytorch.lengths import Lengths, few, host_lengths, index_tensor
from dilated_attention_pytorch.orders.kinds import Hilbert
from dilated_attention_pytorch.orders.order import Order

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_SKIP = "check_coordinates=False leaves this check out"


@dataclass(frozen=True, slots=True, eq=False)
class SlideBatch:
    """Tiles (B, N, C) and cells (B, N, 2) in float64: padded slides, or packed ones with B = 1 and ``offsets``."""

    tiles: Tensor
    cells: Tensor  # (column, row) on the grid
    counts: tuple[int, ...] | None  # the tiles of each slide; None if all have N
    offsets: Tensor | None  # of nested tensors
    order: Order | None = None

    @staticmethod
    def of(tiles: Tensor, coordinates: Tensor, lengths: Lengths | None, channels: int, tile_size: int) -> SlideBatch:
        """The batch that a user passes. Lengths and offsets on a GPU are read."""
        counts, offsets = None, None
        if is_jagged(tiles, coordinates):
            if lengths is not None:
                raise ValueError("nested tensors hold the lengths of their sequences, got lengths as well; leave it out")
            (tiles, coordinates), offsets = pack(tiles=tiles, coordinates=coordinates)
            bounds = offsets.tolist()
            counts = tuple(stop - start for start, stop in pairwise(bounds))
        _check_shapes(tiles, coordinates, channels)
        if lengths is not None:
            given = index_tensor("lengths", lengths)
            check_index_vector("lengths", given, len(tiles), tiles.device)
            counts = host_lengths(given, tiles.shape[1])
            counts = None if counts is not None and all(n == tiles.shape[1] for n in counts) else counts
        if (counts is None and tiles.shape[1] == 0) or (counts is not None and 0 in counts):
            got = f"slides of {few(counts)} tiles" if counts is not None else f"tiles of shape {tuple(tiles.shape)}"
            raise ValueError(f"a slide must have at least one tile, got {got}; leave out slides without tiles")
        points = coordinates.detach()
        points = points.cpu() if points.device.type == "mps" else points  # it has no float64
        return SlideBatch(tiles, (points.to(torch.float64) / tile_size).floor(), counts, offsets)

    @property
    def slides(self) -> tuple[Tensor, ...]:
        """The cells (tiles, 2) of each slide."""
        return self._each(self.cells)

    def _each(self, x: Tensor) -> tuple[Tensor, ...]:
        """The rows of each slide, without padding."""
        if self.counts is None:
            return x.unbind(0)
        if self.offsets is not None:
            return torch.split(x[0], list(self.counts))
        return tuple(rows[:n] for rows, n in zip(x, self.counts, strict=True))

    def ordered(self, order: Order | bool | None) -> SlideBatch:
        """The batch with tiles and cells in this order, or along Hilbert curves if True."""
        if order is None or order is False:
            return self
        if order is True:
            order = self._hilbert()
        check_is_order(order)
        bounds = None if self.offsets is None else torch.tensor([0, *accumulate(self.counts or ())])
        lengths = None if self.counts is None or bounds is not None else torch.tensor(self.counts)
        check_order_keeps(order, lengths, bounds)
        tiles, cells = (order.to(x.device).permute(x) for x in (self.tiles, self.cells))
        return replace(self, tiles=tiles, cells=cells, order=order.to(tiles.device))

    def _hilbert(self) -> Order:
        if self.offsets is not None:
            return Order.packed([Hilbert.coordinates(cells.to(torch.int64)) for cells in self.slides])
        return Hilbert.coordinates(self.cells.nan_to_num(0.0).to(torch.int64), lengths=self.counts)

    def tokens(self, embedded: Tensor, cls_token: Tensor) -> Tensor:
        """The rows of the encoder: CLS in front of each slide. Slides of different lengths are packed, without padding."""
        if self.counts is None:
            return torch.cat((cls_token.expand(len(embedded), -1, -1), embedded), 1)
        return torch.cat([x for rows in self._each(embedded) for x in (cls_token[0], rows)]).unsqueeze(0)

    @property
    def cu_seqlens(self) -> tuple[int, ...] | None:
        """The boundaries of packed slides, each with its CLS row."""
        return None if self.counts is None else (0, *accumulate(n + 1 for n in self.counts))

    def rows(self, x: Tensor) -> tuple[Tensor, ...]:
        """The rows (n + 1, ...) of each slide in the encoder."""
        return x.unbind(0) if self.counts is None else torch.split(x[0], [n + 1 for n in self.counts])

    def maps(self, weights: Sequence[Tensor]) -> Tensor:
        """Weights (..., tiles) of each slide in the form and the order of the tiles that were passed."""
        if self.offsets is not None:
            packed = torch.cat(list(weights), -1)
            packed = packed if self.order is None else self.order.unpermute(packed, dim=-1)
            return torch.nested.nested_tensor_from_jagged(packed, self.offsets, jagged_dim=packed.dim())
        n = self.tiles.shape[1]
        padded = torch.stack([torch.nn.functional.pad(x, (0, n - x.shape[-1])) for x in weights])
        return padded if self.order is None else self.order.unpermute(padded, dim=-1)


def _check_shapes(tiles: Tensor, coordinates: Tensor, channels: int) -> None:
    for name, x in (("tiles", tiles), ("coordinates", coordinates)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if tiles.dtype not in DTYPES:
        raise TypeError(f"tiles must be floating-point embeddings, got {tiles.dtype}")
    if coordinates.dtype not in (torch.float32, torch.float64, *_INTEGERS):
        hint = "; 16 bits do not hold pixel positions exactly" if coordinates.is_floating_point() else ""
        raise TypeError(f"coordinates must be integers, float32 or float64, got {coordinates.dtype}{hint}")
    if tiles.dim() != 3 or tiles.shape[-1] != channels:
        hint = "; add the batch by unsqueeze(0)" if tiles.dim() == 2 else ""
        raise ValueError(f"tiles must be (slides, tiles, {channels}), got {tuple(tiles.shape)}{hint}")
    if coordinates.shape != (*tiles.shape[:2], 2):
        raise ValueError(
            f"coordinates must be (slides, tiles, 2), one (x, y) for each tile: got {tuple(coordinates.shape)} for tiles "
            f"{tuple(tiles.shape)}"
        )


def check_cells(batch: SlideBatch, tile_size: int, side: int) -> None:
    """Raise unless all tiles are on the grid, and the tiles of no slide are all in one cell.

    It reads four numbers of each slide: one device synchronisation if the coordinates are on a GPU.
    """
    extremes = torch.stack([torch.cat((x.amin(0), x.amax(0))) for x in batch.slides]).tolist()
    for number, (left, top, right, bottom) in enumerate(extremes):
        if not (left >= 0 and top >= 0 and right < side and bottom < side):  # also for NaN
            _refuse(batch, number, tile_size, side)
        tiles = len(batch.slides[number])
        if tiles > 1 and (left, top) == (right, bottom):
            raise ValueError(
                f"coordinates must be the pixel positions of tiles of {tile_size} pixels: all {tiles:,} tiles of slide "
                f"{number} are in the cell ({int(left)}, {int(top)}). Multiply grid indices by tile_size={tile_size}, and "
                f"positions in other units by the pixels of a unit; {_SKIP}"
            )


def _refuse(batch: SlideBatch, number: int, tile_size: int, side: int) -> None:
    """Name the first tile of a slide that is not on the grid."""
    cells = batch.slides[number]
    outside = ~((cells >= 0) & (cells < side)).all(-1)
    tile, count = int(outside.nonzero()[0, 0]), int(outside.sum())
    cell = cells[tile].tolist()
    at = f"tile {tile} of slide {number}"
    others = f" ({count:,} tiles of this slide are not)" if count > 1 else ""
    if not all(map(math.isfinite, cell)):
        raise ValueError(f"coordinates must be finite, those of {at} are {cell}{others}; leave out such tiles; {_SKIP}")
    column, row = map(int, cell)
    if min(cell) < 0:
        raise ValueError(
            f"coordinates must not be negative, {at} is in the cell ({column}, {row}){others}; subtract the smallest x and "
            f"y of the slide; {_SKIP}"
        )
    raise ValueError(
        f"coordinates must be on the grid of {side} x {side} cells of {tile_size} pixels, 0 <= x, y < "
        f"{side * tile_size:,}: {at} is in the cell ({column}, {row}){others}. Pass positions at the magnification "
        f"at which tiles have {tile_size} pixels, or set tile_size or slide_ngrids in the config; {_SKIP}"
    )


def grid_positions(cells: Tensor, width: int) -> Tensor:
    """The embeddings (..., width) of cells (..., 2) in float32: sine and cosine of the row, then of the column.

    Angles are computed in float64, so that no table is needed to reproduce that of the authors' code.
    """
    quarter = width // 4
    frequencies = 1.0 / 10000.0 ** (torch.arange(quarter, dtype=torch.float64, device=cells.device) / quarter)
    halves = []
    for axis in (1, 0):
        angles = cells[..., axis, None] * frequencies
        halves += [angles.sin().to(torch.float32), angles.cos().to(torch.float32)]
    return torch.cat(halves, -1)

"""The orders that the library offers: the identity, those of sharded layouts, and the Hilbert curve."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.integers import as_integer
from dilated_attention_pytorch.lengths import Lengths, host_lengths, index_tensor
from dilated_attention_pytorch.measure import device_memory
from dilated_attention_pytorch.orders import hilbert
from dilated_attention_pytorch.orders.hilbert import Device
from dilated_attention_pytorch.orders.order import Order


def _on(device: Device) -> Tensor:
    """An empty tensor on the device of the order: the default device if None."""
    return torch.empty(0, device=device)


def _check_fits(points: int, device: Device, what: str) -> None:
    """Raise if the tensors of so many points are larger than the memory of the device. The system might end the process."""
    if torch.compiler.is_compiling():
        return
    needed, memory = 24 * points, device_memory(_on(device).device)
    if memory is not None and needed > memory:
        raise ValueError(
            f"{what} needs about {needed / 2**30:,.0f} GiB, the device has {memory / 2**30:,.0f} GiB; order shorter "
            "sequences, or pass Hilbert.coordinates the points that exist"
        )


class Identity(Order):
    """The order that moves no position."""

    def __init__(self, n: int, *, device: Device = None) -> None:
        n = as_integer("n", n, 0)
        _check_fits(n, device, f"Identity({n})")
        super().__init__(_positions=torch.arange(n, device=device), _description=f"Identity({n})")


class ZigZag(Order):
    """The rows of a zigzag layout, rank by rank: each rank has an early and a late range of the sequence.

    >>> ZigZag(8, 2).positions  # rank 0: 0, 1, 6, 7
    tensor([0, 1, 6, 7, 2, 3, 4, 5])
    """

    def __init__(self, n: int, world_size: int, *, device: Device = None) -> None:
        n, world_size = as_integer("n", n, 0), as_integer("world_size", world_size, 1)
        _check_fits(n, device, f"ZigZag({n}, {world_size})")
        start, stop, ranges = 0, n, []
        for length in (n // world_size + (rank < n % world_size) for rank in range(world_size)):
            early, late = start + (length + 1) // 2, stop - length // 2
            ranges += [torch.arange(start, early, device=device), torch.arange(late, stop, device=device)]
            start, stop = early, late
        super().__init__(_positions=torch.cat(ranges), _description=f"ZigZag({n}, {world_size})")


class Striped(Order):
    """Every ``world_size``-th position for each rank, rank by rank.

    >>> Striped(7, 3).positions
    tensor([0, 3, 6, 1, 4, 2, 5])
    """

    def __init__(self, n: int, world_size: int, *, device: Device = None) -> None:
        n, world_size = as_integer("n", n, 0), as_integer("world_size", world_size, 1)
        _check_fits(n, device, f"Striped({n}, {world_size})")
        stripes = [torch.arange(min(rank, n), n, world_size, device=device) for rank in range(world_size)]
        super().__init__(_positions=torch.cat(stripes), _description=f"Striped({n}, {world_size})")


class Hilbert(Order):
    """The positions along a Hilbert curve, so that consecutive positions are close in space.

    >>> Hilbert.grid(4, 4).positions.tolist()
    [0, 4, 5, 1, 2, 3, 7, 6, 10, 11, 15, 14, 13, 9, 8, 12]
    """

    @staticmethod
    def grid(*shape: int, device: Device = None) -> Hilbert:
        """The row-major positions of a grid ``(height, width)`` or ``(depth, height, width)`` of any sizes.

        The curve is that of the enclosing cube whose side is a power of two, without the points outside the grid.
        """
        if len(shape) not in (2, 3):
            raise ValueError(
                f"a grid is (height, width) or (depth, height, width), got {len(shape)} sizes: {shape}; a tuple of them is "
                "passed as Hilbert.grid(*shape)"
            )
        names = ("depth", "height", "width")[-len(shape) :]
        shape = tuple(as_integer(name, size, 0) for name, size in zip(names, shape, strict=True))
        for name, size in zip(names, shape, strict=True):
            if size > hilbert.LONGEST_SIDE:
                raise ValueError(f"{name} must be at most 2**31, got {size}; Hilbert.line(n) orders a sequence")
        if not torch.compiler.is_compiling():
            _check_fits(hilbert.grid_points(shape), device, f"Hilbert.grid{shape}")
        return Hilbert(_positions=hilbert.grid_of(_on(device), shape), _description=f"Hilbert.grid{shape}")

    @staticmethod
    def line(n: int, *, device: Device = None) -> Hilbert:
        """The sequence is written row by row into the smallest square that holds it, and read along the curve."""
        n = as_integer("n", n, 0)
        _check_fits(n, device, f"Hilbert.line({n})")
        return Hilbert(_positions=hilbert.line_of(_on(device), n), _description=f"Hilbert.line({n})")

    @staticmethod
    def segments(n: int, length: int, *, device: Device = None) -> Hilbert:
        """``Hilbert.line`` inside each segment of ``length`` positions. The last segment may be shorter.

        >>> Hilbert.segments(6, 4).positions
        tensor([0, 1, 3, 2, 4, 5])
        """
        n, length = as_integer("n", n, 0), as_integer("length", length, 1)
        _check_fits(n, device, f"Hilbert.segments({n}, {length})")
        whole, on = n // length, _on(device)
        positions = whole * length + hilbert.line_of(on, n - whole * length)
        if whole:  # no curve is made for a length larger than the sequence
            starts = torch.arange(whole, device=device).unsqueeze(1) * length
            positions = torch.cat(((starts + hilbert.line_of(on, length)).flatten(), positions))
        return Hilbert(_positions=positions, _description=f"Hilbert.segments({n}, {length})")

    @staticmethod
    def coordinates(coords: Tensor, *, lengths: Lengths | None = None, device: Device = None) -> Hilbert:
        """Points in space, (n, 2) or (n, 3), or (B, n, 2) or (B, n, 3) with an order for each sample.

        Integer coordinates are cells of a grid whose side is the smallest power of two above the largest coordinate. All
        points of a grid in row-major order give ``Hilbert.grid``. Floating-point coordinates are shifted and scaled by the
        bounding box of the sample. Its longest side has the cells 0 to 2**21 - 1, and all axes have the same scale. Points
        in one cell keep their relative order.

        ``lengths`` (B,) says how many points each sample of a padded batch has. The order of a sample is then that of its
        own points, and its padding stays behind them. The coordinates of padding may have any values.

        >>> Hilbert.coordinates(torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1], [0, 0]])).positions
        tensor([0, 4, 2, 3, 1])
        >>> slides = torch.tensor([[[0, 0], [1, 0], [0, 1]], [[1, 1], [0, 0], [-1, -1]]])  # the second has two points
        >>> Hilbert.coordinates(slides, lengths=[3, 2]).positions
        tensor([[0, 2, 1],
                [1, 0, 2]])
        """
        if isinstance(coords, Tensor) and (coords.is_nested or coords.layout != torch.strided):
            raise TypeError(
                "coordinates must be a dense tensor; of a nested one, each sequence has its own order: "
                "Order.packed([Hilbert.coordinates(x) for x in coords.unbind()])"
            )
        keep = isinstance(coords, Tensor) and device is None
        points = (coords if keep else torch.as_tensor(coords, device=device)).detach()
        if points.dim() not in (2, 3) or points.shape[-1] not in (2, 3):
            shapes = "(n, 2), (n, 3), (batch, n, 2) or (batch, n, 3)"
            raise ValueError(f"coordinates must be {shapes}, got shape {tuple(points.shape)}")
        if points.is_complex() or points.dtype == torch.bool:
            raise TypeError(f"coordinates are integers or floating-point numbers, got {points.dtype}")
        given = index_tensor("lengths", lengths)
        if given is not None and (points.dim() != 3 or given.shape != points.shape[:1]):
            got = f"got {tuple(given.shape)} for coordinates of shape {tuple(points.shape)}"
            raise ValueError(f"lengths has one entry for each sample of coordinates (batch, n, 2 or 3), {got}")
        own = None if given is None else given.to(points.device, torch.int64)
        order = Hilbert(_positions=hilbert.order_of(points, own), _description="Hilbert.coordinates({})")
        return order if given is None else order._bounded(host_lengths(given, points.shape[1]), None)


def perimeters(points: Tensor, segment_length: int) -> Tensor:
    """The perimeter of the bounding box of each segment, in cells: (segments,). The cells (n, 2) are in order.

    >>> row_by_row = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    >>> perimeters(row_by_row, 4)  # every segment is a row of 1 x 4
    tensor([10, 10, 10, 10])
    >>> perimeters(row_by_row, 7)  # the last one has two cells
    tensor([12, 14,  6])
    """
    n = points.shape[0]
    if n == 0:
        return points.new_zeros(0)
    segment_length = min(segment_length, n)
    # Copies of the last point complete the last segment without enlarging its box.
    whole = torch.cat((points, points[-1:].expand(-n % segment_length, -1))).view(-1, segment_length, 2)
    return 2 * (whole.amax(1) - whole.amin(1) + 1).sum(-1)


# Files that hold orders and tensors are safe to load: torch.load(weights_only=True) then accepts these classes.
torch.serialization.add_safe_globals([Order, Identity, ZigZag, Striped, Hilbert])

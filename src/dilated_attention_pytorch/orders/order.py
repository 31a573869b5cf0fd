"""Orders: permutations of the positions of a sequence.

A pattern is applied to the ordered sequence, and causality compares original positions. Index ``a`` of the ordered sequence
holds position ``positions[..., a]``, and position ``i`` is at index ``places[..., i]``.

Shape letters: B batch, n positions.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.orders import hilbert
from dilated_attention_pytorch.orders.hilbert import Device


def _gather(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """``x`` with its rows along ``dim`` chosen by ``index`` (n,), or (B, n) for each sample (dimension 0)."""
    if index.dim() == 1:
        return x.index_select(dim, index)
    # The result is always a new tensor: if an autograd function ends in a contiguous() that returns its input, code that
    # PyTorch 2.11 compiles has gradients of 0.
    if dim == 1:
        return x[torch.arange(index.shape[0], device=index.device).unsqueeze(1), index]
    shape = [1] * x.dim()
    shape[0], shape[dim] = index.shape
    sizes = [*x.shape[:dim], index.shape[1], *x.shape[dim + 1 :]]
    return x.gather(dim, index.view(shape).expand(sizes))


class _Permute(torch.autograd.Function):
    """A permutation whose gradient is a gather by the inverse. Autograd's own gradient of a gather adds by index."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor, dim: int) -> Tensor:
        return _gather(x, index, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, index, inverse, ctx.dim = inputs
        ctx.save_for_backward(index, inverse)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        index, inverse = ctx.saved_tensors
        return _Permute.apply(gradient, inverse, index, ctx.dim), None, None, None  # type: ignore[no-untyped-call]


def check_dim(x: Tensor, dim: int) -> None:
    """Raise if this is not a tensor with this dimension."""
    if not isinstance(x, Tensor):
        raise TypeError(f"the sequence must be a torch.Tensor, got {type(x).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be one of the {x.dim()} dimensions of a tensor of shape {tuple(x.shape)}, got {dim}")


class Order:
    """A permutation of the positions of a sequence, one for all samples or one for each sample.

    Orders are made by ``Hilbert.grid``, ``Hilbert.coordinates``, ``Hilbert.line``, ``Hilbert.segments``, ``ZigZag``,
    ``Striped``, ``Identity`` or ``Order.from_permutation``. Two orders are equal if their positions are equal.

    The example orders a grid of 2 rows and 3 columns along a Hilbert curve: down, right, up, right and down again.

    >>> order = Hilbert.grid(2, 3)
    >>> order.positions
    tensor([0, 3, 4, 1, 2, 5])
    >>> x = torch.tensor([0.0, 0.1, 0.2, 1.0, 1.1, 1.2])  # row.column
    >>> order.permute(x, dim=0)
    tensor([0.0000, 1.0000, 1.1000, 0.1000, 0.2000, 1.2000])
    >>> order.unpermute(order.permute(x, dim=0), dim=0).equal(x)
    True
    >>> order.then(order.inverse) == Identity(6)
    True
    """

    def __init__(self, positions: Tensor, description: str, places: Tensor | None = None) -> None:
        if not isinstance(positions, Tensor):
            raise TypeError(
                "an order is made by Hilbert.grid(height, width), ZigZag(n, world_size), Order.from_permutation(p) and so "
                f"on, not by {type(self).__name__}({positions!r}, ...)"
            )
        if places is None:
            every = torch.arange(positions.shape[-1], device=positions.device).expand(positions.shape)
            places = torch.empty_like(positions).scatter_(-1, positions, every)
        # Both directions are made now: a tracer that made one later could leave a fake tensor here.
        self._positions, self._places = positions, places
        # "{}" stands for the size. With the size itself, compilers would compile once for each size.
        self._description = description
        self._fingerprint: str | None = None

    @staticmethod
    def from_permutation(p: Tensor | Sequence[int], *, device: Device = None) -> Order:
        """The order with ``positions`` equal to ``p``: (n,), or (B, n) with a permutation for each sample.

        >>> Order.from_permutation([2, 0, 1]).permute(torch.tensor([10, 11, 12]), dim=0)
        tensor([12, 10, 11])
        """
        given = torch.as_tensor(p, device=device)
        if given.numel() == 0:
            given = given.to(torch.int64)
        if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise TypeError(f"a permutation holds integers, got {given.dtype}; p.argsort() makes one of any values")
        if given.dim() not in (1, 2):
            raise ValueError(f"a permutation must be (n,) or (batch, n), got shape {tuple(given.shape)}")
        positions, n = given.to(torch.int64, copy=True), given.shape[-1]
        rule = f"a permutation of {n} positions holds each of 0 to {n - 1} once"
        hint = "p.argsort().argsort() makes ranks of any values"
        low, high = (int(positions.min()), int(positions.max())) if positions.numel() else (0, 0)
        if low < 0 or high > max(0, n - 1):
            raise ValueError(f"{rule}, got values from {low} to {high}; {hint}")
        missing = torch.ones_like(positions, dtype=torch.bool).scatter_(-1, positions, False)
        if missing.any():
            example = int(missing.nonzero()[0, -1])
            raise ValueError(f"{rule}, got {int(missing.sum())} of them not at all, for example {example}; {hint}")
        return Order(positions, "Order.from_permutation({})")

    @property
    def positions(self) -> Tensor:
        """The position at each index of the ordered sequence: (n,) or (B, n), int64."""
        return self._positions

    @property
    def places(self) -> Tensor:
        """The index of each position in the ordered sequence: (n,) or (B, n), int64."""
        return self._places

    @property
    def device(self) -> torch.device:
        """The device of the order."""
        return self._positions.device

    @property
    def inverse(self) -> Order:
        """The order that undoes this one."""
        return Order(self._places, f"{self!r}.inverse", self._positions)

    def then(self, other: Order) -> Order:
        """The order that applies this one, and then ``other`` to the ordered sequence.

        >>> Hilbert.grid(2, 2).then(Striped(4, 2)).positions  # entries 0, 2, 1 and 3 of the curve 0, 1, 3, 2
        tensor([0, 3, 1, 2])
        """
        if not isinstance(other, Order):
            raise TypeError(f"other must be an Order, got {type(other).__name__}")
        a, b = self._positions, other._positions
        if a.shape[-1] != b.shape[-1] or (a.dim() == b.dim() == 2 and a.shape[0] != b.shape[0]):
            raise ValueError(f"both orders must be over the same number of positions, got {_shape(a)} and {_shape(b)}")
        if a.device != b.device:
            raise ValueError(f"orders must be on one device, got {a.device} and {b.device}; use .to(device)")
        a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
        return Order(a.gather(-1, b), f"{self!r}.then({other!r})")

    def permute(self, x: Tensor, dim: int = 1) -> Tensor:
        """Put the positions of ``x`` along ``dim`` in order. Both this and its gradient are gathers.

        If every sample has its own order, the samples must be in dimension 0.
        """
        return self._apply(x, dim, self._positions, self._places)

    def unpermute(self, x: Tensor, dim: int = 1) -> Tensor:
        """Undo ``permute``."""
        return self._apply(x, dim, self._places, self._positions)

    def take(self, x: Tensor, places: Tensor, dim: int = 1) -> Tensor:
        """The entries of ``permute(x)`` at these indices (m,), for example those of one rank's rows.

        >>> Order.from_permutation([2, 0, 1]).take(torch.tensor([10, 11, 12]), torch.tensor([1, 2]), dim=0)
        tensor([10, 11])
        """
        self._check(x, dim)
        return _gather(x, self._positions[..., places], dim % x.dim())

    def _apply(self, x: Tensor, dim: int, index: Tensor, inverse: Tensor) -> Tensor:
        self._check(x, dim)
        if not x.requires_grad:  # supports forward-mode derivatives, which the autograd function does not
            return _gather(x, index, dim % x.dim())
        result: Tensor = _Permute.apply(x, index, inverse, dim % x.dim())  # type: ignore[no-untyped-call]
        return result

    def _check(self, x: Tensor, dim: int) -> None:
        check_dim(x, dim)
        shape = tuple(x.shape)
        if x.shape[dim] != len(self):
            got = f"got {x.shape[dim]} in dimension {dim} of a tensor of shape {shape}"
            raise ValueError(f"the order is over {len(self)} positions, {got}; pass the dimension of the sequence as dim")
        if self._positions.dim() == 2 and (dim % x.dim() == 0 or x.shape[0] != self._positions.shape[0]):
            rule = f"an order for each of {self._positions.shape[0]} samples needs them in dimension 0"
            raise ValueError(f"{rule} and the sequence in another, got a tensor of shape {shape} and dim={dim}")
        if x.device != self.device:
            raise ValueError(f"the order is on {self.device} and the tensor on {x.device}; use order.to({str(x.device)!r})")

    @property
    def fingerprint(self) -> str:
        """A short string that is the same for equal orders in every process, so that ranks can compare it."""
        if self._fingerprint is None:
            host = self._positions.cpu().contiguous()
            raw = (ctypes.c_char * host.nbytes).from_address(host.data_ptr()) if host.nbytes else b""
            self._fingerprint = f"{_shape(host)}, {hashlib.sha256(raw).hexdigest()[:12]}"
        return self._fingerprint

    def to(self, device: torch.device | str) -> Order:
        """The same order on another device."""
        moved, device = copy.copy(self), torch.device(device)  # refuses a dtype, which Tensor.to would accept
        moved._positions, moved._places = self._positions.to(device), self._places.to(device)
        return moved

    def __len__(self) -> int:
        return self._positions.shape[-1]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Order):
            return NotImplemented
        return torch.equal(self._positions, other._positions.to(self.device))

    __hash__ = None  # type: ignore[assignment]  # equality reads the positions

    def __repr__(self) -> str:
        return self._description.format(_shape(self._positions))


def _shape(positions: Tensor) -> str:
    n = f"{positions.shape[-1]} positions"
    return n if positions.dim() == 1 else f"{positions.shape[0]} samples of {n}"


def _check_sizes(least: int = 0, **sizes: int) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def _on(device: Device) -> Tensor:
    """An empty tensor on the device of the order: the default device if None."""
    return torch.empty(0, device=device)


class Identity(Order):
    """The order that moves no position."""

    def __init__(self, n: int, *, device: Device = None) -> None:
        _check_sizes(n=n)
        super().__init__(torch.arange(n, device=device), f"Identity({n})")


class ZigZag(Order):
    """The rows of a zigzag layout, rank by rank: each rank has an early and a late range of the sequence.

    >>> ZigZag(8, 2).positions  # rank 0: 0, 1, 6, 7
    tensor([0, 1, 6, 7, 2, 3, 4, 5])
    """

    def __init__(self, n: int, world_size: int, *, device: Device = None) -> None:
        _check_sizes(n=n)
        _check_sizes(least=1, world_size=world_size)
        start, stop, ranges = 0, n, []
        for length in (n // world_size + (rank < n % world_size) for rank in range(world_size)):
            early, late = start + (length + 1) // 2, stop - length // 2
            ranges += [torch.arange(start, early, device=device), torch.arange(late, stop, device=device)]
            start, stop = early, late
        super().__init__(torch.cat(ranges), f"ZigZag({n}, {world_size})")


class Striped(Order):
    """Every ``world_size``-th position for each rank, rank by rank.

    >>> Striped(7, 3).positions
    tensor([0, 3, 6, 1, 4, 2, 5])
    """

    def __init__(self, n: int, world_size: int, *, device: Device = None) -> None:
        _check_sizes(n=n)
        _check_sizes(least=1, world_size=world_size)
        stripes = [torch.arange(min(rank, n), n, world_size, device=device) for rank in range(world_size)]
        super().__init__(torch.cat(stripes), f"Striped({n}, {world_size})")


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
        for name, size in zip(("depth", "height", "width")[-len(shape) :], shape, strict=True):
            _check_sizes(**{name: size})
            if size > hilbert.LONGEST_SIDE:
                raise ValueError(f"{name} must be at most 2**31, got {size}; Hilbert.line(n) orders a sequence")
        return Hilbert(hilbert.grid_of(_on(device), shape), f"Hilbert.grid{shape}")

    @staticmethod
    def line(n: int, *, device: Device = None) -> Hilbert:
        """The sequence is written row by row into the smallest square that holds it, and read along the curve."""
        _check_sizes(n=n)
        return Hilbert(hilbert.line_of(_on(device), n), f"Hilbert.line({n})")

    @staticmethod
    def segments(n: int, length: int, *, device: Device = None) -> Hilbert:
        """``Hilbert.line`` inside each segment of ``length`` positions. The last segment may be shorter.

        >>> Hilbert.segments(6, 4).positions
        tensor([0, 1, 3, 2, 4, 5])
        """
        _check_sizes(n=n)
        _check_sizes(least=1, length=length)
        whole, on = n // length, _on(device)
        positions = whole * length + hilbert.line_of(on, n - whole * length)
        if whole:  # no curve is made for a length larger than the sequence
            starts = torch.arange(whole, device=device).unsqueeze(1) * length
            positions = torch.cat(((starts + hilbert.line_of(on, length)).flatten(), positions))
        return Hilbert(positions, f"Hilbert.segments({n}, {length})")

    @staticmethod
    def coordinates(coords: Tensor, *, device: Device = None) -> Hilbert:
        """Points in space, (n, 2) or (n, 3), or (B, n, 2) or (B, n, 3) with an order for each sample.

        Integer coordinates are cells of a grid whose side is the smallest power of two above the largest coordinate. All
        points of a grid in row-major order give ``Hilbert.grid``. Floating-point coordinates are shifted and scaled by the
        bounding box of the sample. Its longest side has the cells 0 to 2**21 - 1, and all axes have the same scale. Points
        in one cell keep their relative order.

        >>> Hilbert.coordinates(torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1], [0, 0]])).positions
        tensor([0, 4, 2, 3, 1])
        """
        points = torch.as_tensor(coords, device=device).detach()
        if points.dim() not in (2, 3) or points.shape[-1] not in (2, 3):
            shapes = "(n, 2), (n, 3), (batch, n, 2) or (batch, n, 3)"
            raise ValueError(f"coordinates must be {shapes}, got shape {tuple(points.shape)}")
        if points.is_complex() or points.dtype == torch.bool:
            raise TypeError(f"coordinates are integers or floating-point numbers, got {points.dtype}")
        return Hilbert(hilbert.order_of(points), "Hilbert.coordinates({})")


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

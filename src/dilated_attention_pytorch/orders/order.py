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
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from dilated_attention_pytorch.integers import as_integer
from dilated_attention_pytorch.lengths import Lengths, host_cu_seqlens, host_lengths, index_tensor
from dilated_attention_pytorch.orders.hilbert import Device

_FACTORIES = (
    "an order is made by Hilbert.grid(height, width), Hilbert.coordinates(coords), Hilbert.line(n), ZigZag(n, world_size), "
    "Striped(n, world_size), Identity(n) or Order.from_permutation(p)"
)


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
    if x.is_nested:
        raise TypeError("an order moves rows of dense tensors; pass a nested tensor and the order to attention")
    dim = as_integer("dim", dim)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be one of the {x.dim()} dimensions of a tensor of shape {tuple(x.shape)}, got {dim}")


class Order:
    """A permutation of the positions of a sequence, one for all samples or one for each sample.

    Orders are made by ``Hilbert.grid``, ``Hilbert.coordinates``, ``Hilbert.line``, ``Hilbert.segments``, ``ZigZag``,
    ``Striped``, ``Identity`` or ``Order.from_permutation``. Two orders are equal if their positions are equal.

    Samples of different lengths and packed documents have orders that keep their rows together: ``Order.padded``,
    ``Order.packed`` and ``Order.within`` make them. ``torch.save``, ``torch.load(weights_only=True)`` and workers of a
    ``DataLoader`` handle orders like tensors.

    The example orders a grid of 2 rows and 3 columns along a Hilbert curve: down, right, up, right and down again.

    >>> from dilated_attention_pytorch import Hilbert, Identity
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

    def __init__(
        self, *arguments: object, _positions: Tensor | None = None, _places: Tensor | None = None, _description: str = "",
        **named: object,
    ) -> None:  # fmt: skip
        """Used by the factories, which give a permutation and, where they have it, its inverse ``_places``."""
        if _positions is None or arguments or named:
            raise TypeError(f"{_FACTORIES}, not by {type(self).__name__}(...)")
        positions, places = _positions, _places
        if places is None:
            every = torch.arange(positions.shape[-1], device=positions.device).expand(positions.shape)
            places = torch.empty_like(positions).scatter_(-1, positions, every)
        # Both directions are made now: a tracer that made one later could leave a fake tensor here.
        self._positions, self._places = positions, places
        # "{}" stands for the size. With the size itself, compilers would compile once for each size.
        self._description = _description
        self._fingerprint: str | None = None
        self._lengths: tuple[int, ...] | None = None
        self._cu_seqlens: tuple[int, ...] | None = None

    @staticmethod
    def from_permutation(p: Tensor | Sequence[int], *, device: Device = None) -> Order:
        """The order with ``positions`` equal to ``p``: (n,), or (B, n) with a permutation for each sample.

        >>> Order.from_permutation([2, 0, 1]).permute(torch.tensor([10, 11, 12]), dim=0)
        tensor([12, 10, 11])
        """
        try:
            given = p if isinstance(p, Tensor) and device is None else torch.as_tensor(p, device=device)
        except (TypeError, ValueError, RuntimeError):  # as PyTorch refuses None, strings and ragged lists
            raise TypeError(f"a permutation is a tensor or a list of integers, got {p!r}") from None
        if given.is_meta:
            raise ValueError("a permutation must have values, got one on the meta device; pass device='cpu'")
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
        return Order(_positions=positions, _description="Order.from_permutation({})")

    @staticmethod
    def padded(orders: Sequence[Order]) -> Order:
        """One order for each sample of a padded batch. The padding of a sample stays behind its own positions.

        >>> order = Order.padded([Order.from_permutation([1, 0]), Order.from_permutation([2, 0, 1])])
        >>> order.positions, order.lengths
        (tensor([[1, 0, 2],
                [2, 0, 1]]), (2, 3))
        """
        _check_single(orders)
        lengths, device = tuple(map(len, orders)), orders[0].device
        positions = torch.arange(max(lengths), device=device).repeat(len(orders), 1)
        for row, order in zip(positions, orders, strict=True):
            row[: len(order)] = order.positions
        return Order(_positions=positions, _description="Order.padded({})")._bounded(lengths, None)

    @staticmethod
    def packed(orders: Sequence[Order]) -> Order:
        """One order for each of several documents that follow one another in a sequence.

        >>> order = Order.packed([Order.from_permutation([1, 0]), Order.from_permutation([2, 0, 1])])
        >>> order.positions, order.cu_seqlens
        (tensor([1, 0, 4, 2, 3]), (0, 2, 5))
        """
        _check_single(orders)
        starts = tuple(accumulate(map(len, orders), initial=0))
        positions = torch.cat([order.positions + start for order, start in zip(orders, starts, strict=False)])
        return Order(_positions=positions, _description="Order.packed({})")._bounded(None, starts)

    def within(self, *, lengths: Lengths | None = None, cu_seqlens: Lengths | None = None) -> Order:
        """This order inside each sample or document: no position leaves its own, and padding stays behind.

        ``lengths`` and ``cu_seqlens`` are those of ``attention``, which takes the result together with them. Values on a
        GPU cost one device synchronisation.

        >>> order = Order.from_permutation([4, 0, 3, 1, 2])
        >>> order.within(lengths=[5, 3]).positions  # the second sample has the positions 0, 1 and 2
        tensor([[4, 0, 3, 1, 2],
                [0, 1, 2, 4, 3]])
        >>> order.within(cu_seqlens=[0, 2, 5]).positions
        tensor([0, 1, 4, 3, 2])
        """
        if (lengths is None) == (cu_seqlens is None):
            raise ValueError("within takes either lengths (padded samples) or cu_seqlens (packed documents)")
        n, positions = len(self), self._positions
        bounded = (
            host_lengths(index_tensor("lengths", lengths), n),
            host_cu_seqlens(index_tensor("cu_seqlens", cu_seqlens), n),
        )
        if bounded[0] is not None:
            if positions.dim() == 2 and positions.shape[0] != len(bounded[0]):
                raise ValueError(f"the order is for {positions.shape[0]} samples, got {len(bounded[0])} lengths")
            positions = positions.expand(len(bounded[0]), n)
            sequence = positions >= torch.tensor(bounded[0], device=positions.device).unsqueeze(1)
        else:
            ends = torch.tensor(bounded[1], device=positions.device)
            sequence = torch.searchsorted(ends, positions, right=True)
        positions = positions.gather(-1, sequence.to(torch.int64).argsort(dim=-1, stable=True))
        return Order(_positions=positions, _description=f"{self!r}.within(...)")._bounded(*bounded)

    def _bounded(self, lengths: tuple[int, ...] | None, cu_seqlens: tuple[int, ...] | None) -> Self:
        """Record the samples or documents whose rows this order keeps together."""
        self._lengths, self._cu_seqlens = lengths, cu_seqlens
        return self

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """The lengths of the samples whose padding stays behind; None for an order of whole sequences."""
        return self._lengths

    @property
    def cu_seqlens(self) -> tuple[int, ...] | None:
        """The boundaries of the documents that no position leaves; None for an order of whole sequences."""
        return self._cu_seqlens

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
        inverse = Order(_positions=self._places, _places=self._positions, _description=f"{self!r}.inverse")
        return inverse._bounded(self._lengths, self._cu_seqlens)

    def then(self, other: Order) -> Order:
        """The order that applies this one, and then ``other`` to the ordered sequence.

        >>> from dilated_attention_pytorch import Hilbert, Striped
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
        result = Order(_positions=a.gather(-1, b), _description=f"{self!r}.then({other!r})")
        same = (self._lengths, self._cu_seqlens) == (other._lengths, other._cu_seqlens)
        return result._bounded(self._lengths, self._cu_seqlens) if same else result

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


def _check_single(orders: Sequence[Order]) -> None:
    if not orders or not all(isinstance(order, Order) and order.positions.dim() == 1 for order in orders):
        raise ValueError("expected a list of orders, at least one, each over the positions of one sequence")

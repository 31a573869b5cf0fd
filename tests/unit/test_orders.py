"""Orders: bijections, the curve, gathers and their gradients."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from dilated_attention_pytorch import Hilbert, Identity, Order, Striped, ZigZag
from dilated_attention_pytorch.orders import hilbert
from dilated_attention_pytorch.shards import Shards

sizes = st.integers(0, 40)


def assert_bijection(order: Order, n: int) -> None:
    assert len(order) == n
    assert order.positions.dtype == torch.int64
    every = torch.arange(n).expand(order.positions.shape)
    assert torch.equal(order.positions.sort(-1).values, every)
    assert torch.equal(order.positions.gather(-1, order.places), every)
    assert torch.equal(order.inverse.positions, order.places)


@given(shape=st.one_of(st.tuples(sizes, sizes), st.tuples(*[st.integers(0, 12)] * 3), st.tuples(sizes, st.just(1), sizes)))
def test_any_grid_is_a_bijection(shape):
    order = Hilbert.grid(*shape)
    assert_bijection(order, torch.Size(shape).numel())
    # The same by another way: the points one by one, sorted by their code.
    points = torch.cartesian_prod(*(torch.arange(size) for size in shape))
    assert order == Hilbert.coordinates(points.reshape(-1, len(shape)))


@given(n=st.integers(0, 200), length=st.integers(1, 70), world=st.integers(1, 9))
def test_any_length_is_a_bijection(n, length, world):
    for order in (Identity(n), Hilbert.line(n), Hilbert.segments(n, length), ZigZag(n, world), Striped(n, world)):
        assert_bijection(order, n)
    positions = Hilbert.segments(n, length).positions
    assert torch.equal(positions // length, torch.arange(n) // length)  # segments stay what they were
    whole = positions[: n // length * length].reshape(-1, length)
    assert all(torch.equal(row - row.min(), Hilbert.line(length).positions) for row in whole)
    assert Hilbert.segments(n, 2**40) == Hilbert.line(n)  # which costs nothing
    rest = positions[n // length * length :]
    assert torch.equal(rest - n // length * length, Hilbert.line(len(rest)).positions)


@given(n=st.integers(0, 100), world=st.integers(1, 9))
def test_zigzag_and_striped_are_the_rows_of_the_ranks(n, world):
    shards = Shards.of([n // world + (p < n % world) for p in range(world)], "zigzag")
    rows = [i for chunks in shards.chunks for chunk in chunks for i in chunk]
    assert ZigZag(n, world).positions.tolist() == rows
    assert Striped(n, world).positions.tolist() == [i for p in range(world) for i in range(p, n, world)]


@given(data=st.data(), dims=st.sampled_from([2, 3]), batch=st.sampled_from([None, 1, 3]), n=st.integers(0, 30))
def test_any_coordinates_are_a_bijection(data, dims, batch, n):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    shape = (n, dims) if batch is None else (batch, n, dims)
    most = data.draw(st.sampled_from([1, 7, 2**21 - 1]))
    whole = torch.randint(0, most + 1, shape)
    for coords in (whole, whole.double(), torch.rand(shape), torch.rand(shape).half(), whole.int()):
        order = Hilbert.coordinates(coords)
        assert_bijection(order, n)
        if batch is not None:  # each sample as it would be alone
            for b in range(batch):
                assert torch.equal(order.positions[b], Hilbert.coordinates(coords[b]).positions)
    assert Hilbert.coordinates(torch.rand(shape).flip(-1) * 1e-300).positions.shape == shape[:-1]


@pytest.mark.parametrize(("dims", "bits"), [(2, 1), (2, 2), (2, 5), (2, 31), (3, 1), (3, 2), (3, 4), (3, 21)])
def test_codes_are_those_of_the_package_hilbertcurve(dims, bits):
    from hilbertcurve.hilbertcurve import HilbertCurve  # here, so that GPU tests can be collected where there is only torch

    points = torch.randint(0, 2**bits, (300, dims))
    if dims * bits <= 12:
        points = torch.cartesian_prod(*[torch.arange(2**bits)] * dims)
    expected = HilbertCurve(bits, dims).distances_from_points(points.tolist())
    assert hilbert.codes(points, bits).tolist() == expected


@pytest.mark.parametrize("shape", [(2, 2), (4, 4), (32, 32), (256, 256), (2, 2, 2), (8, 8, 8), (32, 32, 32)])
def test_neighbours_on_the_curve_are_neighbours_on_the_grid(shape):
    order = Hilbert.grid(*shape)
    places = torch.stack(torch.unravel_index(order.positions, shape), -1)
    assert (places.diff(dim=0).abs().sum(-1) == 1).all()
    dims, side = len(shape), shape[0]
    assert torch.equal(hilbert.codes(places, side.bit_length() - 1), torch.arange(side**dims))


@pytest.mark.parametrize("shape", [(5, 7), (100, 3), (1, 50), (50, 1), (6, 5, 3), (40, 2, 2)])
def test_a_grid_is_the_part_of_the_enclosing_one(shape):
    side = 1 << (max(shape) - 1).bit_length()
    inside = torch.stack(torch.unravel_index(Hilbert.grid(*(side,) * len(shape)).positions, (side,) * len(shape)), -1)
    inside = inside[(inside < torch.tensor(shape)).all(-1)]
    numbers = torch.zeros(len(inside), dtype=torch.int64)
    for axis, size in enumerate(shape):
        numbers = numbers * size + inside[:, axis]
    assert torch.equal(Hilbert.grid(*shape).positions, numbers)


def test_floating_point_coordinates_are_scaled_by_the_longest_side():
    points = torch.cartesian_prod(torch.arange(16), torch.arange(16))[torch.randperm(256)]
    whole = Hilbert.coordinates(points)
    for coords in (points.double(), points.float() * 0.37 + 5.0, points.double() * 1e-200):
        assert Hilbert.coordinates(coords) == whole
    # A long thin strip: the short axis is not stretched, so the order goes along the strip.
    strip = torch.stack((torch.linspace(0, 1, 100), torch.rand(100) * 1e-6), -1)
    assert Hilbert.coordinates(strip) in (Identity(100), Identity(100).then(Order.from_permutation(range(99, -1, -1))))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16])
def test_coordinates_of_any_integer_type(dtype):
    points = torch.randint(0, 128, (50, 3))
    assert Hilbert.coordinates(points.to(dtype)) == Hilbert.coordinates(points)


def test_repeated_coordinates_keep_their_order():
    points = torch.randint(0, 3, (500, 2))
    for coords in (points, points.double()):
        positions = Hilbert.coordinates(coords).positions
        ordered = points[positions]
        same = (ordered[1:] == ordered[:-1]).all(-1)
        assert same.sum() == 500 - 9
        assert (positions.diff()[same] > 0).all()
    for coords in (torch.full((20, 3), 7), torch.full((20, 3), 0.7)):
        assert Hilbert.coordinates(coords) == Identity(20)


def test_empty_and_single():
    for order in (
        *(Identity(n) for n in (0, 1)),
        *(Hilbert.line(n) for n in (0, 1)),
        *(Hilbert.segments(n, 4) for n in (0, 1)),
        *(ZigZag(n, 3) for n in (0, 1)),
        *(Striped(n, 3) for n in (0, 1)),
        *(Order.from_permutation(range(n)) for n in (0, 1)),
        *(Hilbert.coordinates(torch.ones(n, 2)) for n in (0, 1)),
        Hilbert.grid(0, 5),
        Hilbert.grid(1, 1, 1),
    ):
        x = torch.randn(2, len(order), 3, requires_grad=True)
        assert torch.equal(order.permute(x), x)
        order.unpermute(x).sum().backward()
        assert order == Identity(len(order))
    assert Order.from_permutation(torch.empty(2, 0)).permute(torch.zeros(2, 0)).shape == (2, 0)


BATCH = Order.from_permutation(torch.stack([torch.randperm(6), torch.randperm(6)]))


@pytest.mark.parametrize("order", [Hilbert.grid(2, 3), BATCH], ids=repr)
@pytest.mark.parametrize("dim", [1, 2, -1])
def test_permute_and_unpermute(order, dim):
    x = torch.randn(2, 6, 6, dtype=torch.float64, requires_grad=True)
    ordered = order.permute(x, dim)
    for b in range(2):
        positions = order.positions if order.positions.dim() == 1 else order.positions[b]
        assert torch.equal(ordered[b], x[b].index_select(dim % 3 - 1, positions))
    assert torch.equal(order.unpermute(ordered, dim), x)
    assert torch.equal(order.inverse.permute(ordered, dim), x)
    with torch.no_grad():
        assert torch.equal(order.permute(x, dim), ordered)
        assert torch.equal(order.unpermute(ordered, dim), x)
    for call in (order.permute, order.unpermute):
        assert torch.autograd.gradcheck(lambda y: call(y, dim), x)  # noqa: B023
        assert torch.autograd.gradgradcheck(lambda y: call(y, dim).square(), x)  # noqa: B023
    _, tangent = torch.func.jvp(lambda y: order.permute(y, dim), (x.detach(),), (x.detach(),))
    assert torch.equal(tangent, ordered)
    (gradient,) = torch.func.vjp(lambda y: order.permute(y, dim), x.detach())[1](ordered)
    assert torch.equal(gradient, x)


def test_composition_and_equality():
    a, b = Hilbert.grid(3, 4), Order.from_permutation(torch.randperm(12))
    x = torch.randn(2, 12)
    assert torch.equal(a.then(b).permute(x), b.permute(a.permute(x)))
    assert a.then(a.inverse) == Identity(12) == a.inverse.then(a)
    assert a.then(b).inverse == b.inverse.then(a.inverse)
    batch = Order.from_permutation(torch.stack([torch.randperm(12), torch.randperm(12)]))
    for first, second in ((a, batch), (batch, a), (batch, batch)):
        assert torch.equal(first.then(second).permute(x), second.permute(first.permute(x)))
    assert a != b
    assert a != Identity(11)
    assert a != Order.from_permutation(a.positions.expand(2, -1))
    assert a == Order.from_permutation(a.positions)
    assert a != "a"
    with pytest.raises(TypeError, match="unhashable"):
        hash(a)


def test_small_things():
    assert repr(Hilbert.grid(2, 3).then(ZigZag(6, 2)).inverse) == "Hilbert.grid(2, 3).then(ZigZag(6, 2)).inverse"
    assert repr(Order.from_permutation([1, 0])) == "Order.from_permutation(2 positions)"
    assert repr(Hilbert.coordinates(torch.rand(3, 5, 2))) == "Hilbert.coordinates(3 samples of 5 positions)"
    order = Hilbert.line(5)
    assert order.to("cpu") == order
    assert type(order.to("meta")) is Hilbert
    assert order.to("meta").device.type == "meta"
    with pytest.raises(TypeError):
        order.to(torch.float32)  # positions are integers
    assert pickle.loads(pickle.dumps(order)) == order
    given_positions = torch.tensor([1, 0])
    kept = Order.from_permutation(given_positions)
    given_positions[:] = 0
    assert kept.positions.tolist() == [1, 0]
    with torch.device("meta"):
        made = (Identity(6), ZigZag(6, 2), Striped(6, 2), Hilbert.grid(2, 3), Hilbert.line(6), Hilbert.segments(6, 4))
    for order in (*made, Hilbert.coordinates(torch.rand(6, 2, device="meta")), Hilbert.grid(1, 2, 3, device="meta")):
        assert order.positions.device.type == order.places.device.type == "meta"
        assert order.positions.shape == (6,)


@pytest.mark.parametrize("order", [Hilbert.grid(4, 5), Order.from_permutation(torch.stack([torch.randperm(20)] * 2))])
def test_compiled(order):
    counter = CompileCounterWithBackend("aot_eager")

    def layer(x):
        y = order.unpermute((order.permute(x) * torch.arange(20)[:, None]).sin())
        return order.unpermute((order.permute(y.mT, dim=2) * torch.arange(20)).cos(), dim=2).mT

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for _ in range(3):
        x = torch.randn(2, 20, 3, requires_grad=True)
        dout = torch.randn(2, 20, 3)
        out, expected = compiled(x), layer(x)
        torch.testing.assert_close(out, expected)
        for a, e in zip(torch.autograd.grad(out, x, dout), torch.autograd.grad(expected, x, dout), strict=True):
            torch.testing.assert_close(a, e)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Identity(x.shape[1]),
        lambda x: Hilbert.grid(x.shape[1] // 5, 5),
        lambda x: Hilbert.grid(2, x.shape[1] // 10, 5),
        lambda x: Hilbert.line(x.shape[1]),
        lambda x: Hilbert.segments(x.shape[1], 7),
        lambda x: Hilbert.coordinates(x[..., :2].square()),
        lambda x: ZigZag(x.shape[1], 3),
        lambda x: Striped(x.shape[1], 3),
    ],
    ids=["identity", "grid", "grid_3d", "line", "segments", "coordinates", "zigzag", "striped"],
)
def test_made_inside_a_compiled_function(make):
    """Without leaving the graph, also when the compiler takes the length for a variable, from the second one on."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x: make(x).permute(x.sin()), fullgraph=True, backend="aot_eager")
    for n in (20, 30, 50):
        x = torch.randn(2, n, 3, requires_grad=True)
        dout = torch.randn(2, n, 3)
        out, expected = compiled(x), make(x.detach()).permute(x.sin())
        assert torch.equal(out, expected)
        (dx,), (expected_dx,) = torch.autograd.grad(out, x, dout), torch.autograd.grad(expected, x, dout)
        torch.testing.assert_close(dx, expected_dx)


def test_points_are_checked_inside_a_compiled_function():
    compiled = torch.compile(lambda x: Hilbert.coordinates(x).positions, fullgraph=True, backend="aot_eager")
    for n in range(3, 20):  # one program for any number of points
        assert compiled(torch.arange(n)[:, None].expand(n, 2)).tolist() == list(range(n))
    with pytest.raises(ValueError, match="must not be negative, got -1 at"):
        compiled(torch.tensor([[0, 0], [1, 0], [0, -1]]))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("hilbert_grid", (torch.empty(0), [3, 5])),
        ("hilbert_line", (torch.empty(0), 7)),
        ("hilbert_order", (torch.rand(2, 5, 3),)),
    ],
)
def test_operators(name, arguments):
    torch.library.opcheck(getattr(torch.ops.dilated_attention, name).default, arguments)


def test_many_points():
    """No loop over tokens: a million points in far less than a second."""
    order = Hilbert.grid(1024, 1024)
    assert_bijection(order, 2**20)


def square(order, *args, **options):
    return order.permute(torch.zeros(2, 9), *args, **options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Hilbert.grid(3), ValueError, "(height, width) or (depth, height, width), got 1 sizes: (3,)"),
        (lambda: Hilbert.grid(3, 3, 3, 3), ValueError, "got 4 sizes"),
        (lambda: Hilbert.grid((3, 3)), ValueError, "got 1 sizes: ((3, 3),); a tuple of them is"),
        (lambda: Hilbert.grid(1, 2**31 + 1), ValueError, "width must be at most 2**31, got 2147483649; Hilbert.line(n)"),
        (lambda: Hilbert.grid(3, -1), ValueError, "width must be an integer, at least 0, got -1"),
        (lambda: Hilbert.grid(3.0, 1), TypeError, "height must be an integer, at least 0, got 3.0"),
        (lambda: Hilbert.grid(True, 1), TypeError, "height must be an integer, at least 0, got True"),
        (lambda: Hilbert.line(-2), ValueError, "n must be an integer, at least 0, got -2"),
        (lambda: Hilbert.segments(8, 0), ValueError, "length must be an integer, at least 1, got 0"),
        (lambda: Hilbert.segments(-8, 4), ValueError, "n must be an integer, at least 0, got -8"),
        (lambda: Identity(-1), ValueError, "n must be an integer, at least 0, got -1"),
        (lambda: ZigZag(-1, 2), ValueError, "n must be an integer, at least 0, got -1"),
        (lambda: ZigZag(8, 0), ValueError, "world_size must be an integer, at least 1, got 0"),
        (lambda: Striped(-1, 2), ValueError, "n must be an integer, at least 0, got -1"),
        (lambda: Striped(8, -1), ValueError, "world_size must be an integer, at least 1, got -1"),
        (lambda: Hilbert(3, 3), TypeError, "an order is made by Hilbert.grid(height, width)"),
        (lambda: Hilbert.coordinates(torch.tensor([[0, 1], [2, -3]])), ValueError,
         "must not be negative, got -3 at [1, 1]; subtract the smallest"),
        (lambda: Hilbert.coordinates(torch.tensor([[0.0, -0.5]])), ValueError, "must not be negative, got -0.5 at [0, 1]"),
        (lambda: Hilbert.coordinates(torch.tensor([[0.0, torch.nan]])), ValueError, "finite, got nan at [0, 1]; drop"),
        (lambda: Hilbert.coordinates(torch.tensor([[torch.inf, 0.0]])), ValueError, "must be finite, got inf at [0, 0]"),
        (lambda: Hilbert.coordinates(torch.zeros(5)), ValueError, "(batch, n, 3), got shape (5,)"),
        (lambda: Hilbert.coordinates(torch.zeros(5, 4)), ValueError, "(batch, n, 3), got shape (5, 4)"),
        (lambda: Hilbert.coordinates(torch.zeros(5, 2, dtype=torch.bool)), TypeError, "got torch.bool"),
        (lambda: Hilbert.coordinates(torch.tensor([[0, 0, 2**21]])), ValueError, "in 3-D must be below 2**21, got 2097152"),
        (lambda: Hilbert.coordinates(torch.tensor([[0, 2**31]])), ValueError, "in 2-D must be below 2**31, got 2147483648"),
        (lambda: Order.from_permutation([0, 2, 3]), ValueError,
         "a permutation of 3 positions holds each of 0 to 2 once, got values from 0 to 3"),
        (lambda: Order.from_permutation([0, -1]), ValueError, "got values from -1 to 0"),
        (lambda: Order.from_permutation([0, 2, 2, 0]), ValueError, "got 2 of them not at all, for example 1"),
        (lambda: Order.from_permutation(torch.tensor([[0, 1], [1, 1]])), ValueError, "1 of them not at all, for example 0"),
        (lambda: Order.from_permutation([0.0, 1.0]), TypeError, "holds integers, got torch.float32; p.argsort()"),
        (lambda: Order.from_permutation(torch.zeros(1, 1, 1, dtype=torch.int64)), ValueError, "got shape (1, 1, 1)"),
        (lambda: square(Identity(8)), ValueError, "the order is over 8 positions, got 9 in dimension 1 of a tensor"),
        (lambda: square(Identity(9), 2), ValueError, "one of the 2 dimensions of a tensor of shape (2, 9), got 2"),
        (lambda: Identity(9).permute([1.0] * 9), TypeError, "the sequence must be a torch.Tensor, got list"),
        (lambda: BATCH.permute(torch.zeros(3, 6)), ValueError, "for each of 2 samples needs them in dimension 0"),
        (lambda: BATCH.permute(torch.zeros(6, 2), 0), ValueError, "for each of 2 samples needs them in dimension 0"),
        (lambda: Identity(9).permute(torch.zeros(2, 9, device="meta")), ValueError,
         "the order is on cpu and the tensor on meta; use order.to('meta')"),
        (lambda: Identity(9).then(Identity(8)), ValueError, "the same number of positions, got 9 positions and 8"),
        (lambda: BATCH.then(Order.from_permutation(torch.arange(6).expand(3, 6))), ValueError,
         "got 2 samples of 6 positions and 3 samples of 6 positions"),
        (lambda: Identity(9).then([0]), TypeError, "other must be an Order, got list"),
        (lambda: Identity(9).then(Identity(9, device="meta")), ValueError, "on one device, got cpu and meta"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


@settings(max_examples=20)
@given(st.permutations(range(7)))
def test_any_permutation(p):
    assert_bijection(Order.from_permutation(p), 7)


def test_take_is_a_part_of_permute():
    one, each = Order.from_permutation(torch.randperm(11)), torch.stack([torch.randperm(11) for _ in range(2)])
    x = torch.randn(2, 11, 3, dtype=torch.float64, requires_grad=True)
    places = torch.tensor([4, 0, 9])
    for order in (one, Order.from_permutation(each)):
        assert torch.equal(order.take(x, places), order.permute(x)[:, places])
        assert torch.equal(order.take(x.transpose(1, 2), places, dim=-1), order.permute(x)[:, places].transpose(1, 2))
        assert order.take(x, places[:0]).shape == (2, 0, 3)
        assert torch.autograd.gradcheck(lambda x, o=order: o.take(x, places), x)
    with pytest.raises(ValueError, match="the order is over 11 positions, got 10 in dimension 1"):
        one.take(x[:, 1:], places)


def test_fingerprint():
    order = Hilbert.grid(5, 6)
    assert order.fingerprint == Order.from_permutation(order.positions.tolist()).fingerprint == order.to("cpu").fingerprint
    each = order.positions.expand(2, -1)
    others = [Hilbert.grid(6, 5), order.inverse, Hilbert.line(0), Hilbert.line(1), Order.from_permutation(each)]
    others.append(Order.from_permutation(torch.stack((each[0], each[1].flip(0)))))
    assert len({order.fingerprint, *(other.fingerprint for other in others)}) == 7

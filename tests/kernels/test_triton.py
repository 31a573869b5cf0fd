"""The Triton kernels in float32 through the public function: interpreted here, compiled on a GPU."""

from __future__ import annotations

import importlib.util
from itertools import pairwise

import pytest
import torch

import oracle
from dilated_attention_pytorch import BlockSparse, Dilated, attention
from neighbours import check_bits_of_a_sample

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(b, n, m, heads, key_heads, d, dtype=torch.float32):
    shapes = ((b, n, heads, d), (b, m, key_heads, d), (b, m, key_heads, d))
    return [torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes]


def results(call, tensors, dout, dlse):
    out, lse = call(*tensors)
    return [out, lse, *oracle.grads((out, lse), tensors, (dout.to(out), dlse.to(lse)))]


def check(pattern, tensors, causal, *, exact=oracle.attention, **options):
    """All five results against the oracle in float64, with plain attention in float32 as the yardstick."""
    q = tensors[0]
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[0], q.shape[2], q.shape[1], device=DEVICE)
    doubles = [x.detach().cpu().double().requires_grad_() for x in tensors]
    expected = results(lambda *x: exact(*x, pattern, is_causal=causal), doubles, dout.cpu(), dlse.cpu())
    yardstick = results(oracle.plain(pattern, causal), tensors, dout, dlse)
    call = lambda *x: attention(*x, pattern, is_causal=causal, backend="triton", return_lse=True, **options)  # noqa: E731
    actual = results(call, tensors, dout, dlse)
    oracle.assert_rounding_only(actual, yardstick, expected, torch.float32)
    return actual


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("segments", "rates", "n", "m"),
    [
        ([64, 128], [1, 2], 128, 128),  # whole segments and blocks
        ([50, 100, 1000], [1, 3, 4], 133, 133),  # everything cut
        ([48, 96], [2, 4], 100, 100),  # no branch covers all rows
        pytest.param([64], [1], 65, 65, marks=pytest.mark.quick),  # one launch, one row left over
        ([64, 256], [1, 4], 20, 150),  # decoding
    ],
)
def test_every_shape_of_tile(segments, rates, n, m, causal):
    check(Dilated(segments, rates), inputs(1, n, m, 4, 2, 16), causal)


@pytest.mark.filterwarnings("ignore:.*(invalid value|divide by zero|overflow):RuntimeWarning")  # of NumPy
@pytest.mark.parametrize("pattern", [Dilated([32, 96], [1, 3]), BlockSparse.custom(torch.ones(2, 2).bool(), block_size=64)])
def test_the_bits_of_a_sample_are_its_own(pattern):
    call = lambda *x: attention(*x, pattern, backend="triton", return_lse=True)  # noqa: E731
    check_bits_of_a_sample(call, n=96, heads=2, head_dim=16, device=DEVICE)


def test_rates_that_do_not_divide_segments():
    """Rate 6 is added to 2, in segments of no multiple of 6. Tables have it so with and without a mask."""
    check(Dilated([32, 28, 50, 104], [1, 2, 6, 12]), inputs(1, 130, 130, 4, 2, 16), True)


@pytest.mark.parametrize("head_dim", [8, 24, 48, 80, 96, 160, 256])
def test_head_sizes(head_dim):
    check(Dilated([40, 80], [1, 2]), inputs(1, 70, 70, 2, 2, head_dim), True)


@pytest.mark.parametrize("head_dim", [16, 48, 128])
def test_parts_whose_columns_lie_in_fours(head_dim):
    from part_kernels import copy_parts

    # As results of products lie in registers: of 16 columns in a row, thread t has the pairs 2 t and 8 + 2 t.
    rows = torch.randn(4, head_dim, device=DEVICE)
    parts = rows.view(4, -1, 2, 4, 2).transpose(2, 3).reshape(4, head_dim).contiguous()
    block = 1 << (head_dim - 1).bit_length()
    out = torch.full((4, block), torch.nan, device=DEVICE)
    copy_parts[(1,)](parts, out, head_dim, block)
    expected = torch.zeros_like(out)
    expected[:3, :head_dim] = rows[:3]
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_batches_and_layouts():
    pattern = Dilated([32, 64], [1, 2], "blocked")
    tensors = inputs(3, 70, 70, 2, 1, 16)
    expected = check(pattern, tensors, True)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]
    out = attention(*strided, pattern, is_causal=True, backend="triton")
    torch.testing.assert_close(out, expected[0])


def test_lengths_and_documents():
    pattern = Dilated([24, 64], [1, 3])
    tensors = inputs(3, 70, 70, 2, 2, 16)
    lengths = [70, 0, 33]

    def alone(q, k, v, pattern, is_causal):
        parts = [
            oracle.attention(*(x[b : b + 1, :n] for x in (q, k, v)), pattern, is_causal=is_causal)
            for b, n in enumerate(lengths)
        ]
        out, lse = torch.zeros_like(q), torch.full((3, 2, 70), -torch.inf, dtype=torch.float64)
        for b, n in enumerate(lengths):
            out[b, :n], lse[b, :, :n] = parts[b][0][0], parts[b][1][0]
        return out, lse

    dout = torch.randn_like(tensors[0])
    zero = torch.zeros(3, 2, 70, device=DEVICE)
    call = lambda *x: attention(*x, pattern, lengths=torch.tensor(lengths), backend="triton", return_lse=True)  # noqa: E731
    doubles = [x.detach().cpu().double().requires_grad_() for x in tensors]
    expected = results(lambda *x: alone(*x, pattern, False), doubles, dout.cpu(), zero.cpu())
    for a, e in zip(results(call, tensors, dout, zero), expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), e, rtol=1e-5, atol=1e-5)
    packed = attention(*tensors, pattern, cu_seqlens=torch.tensor([0, 40, 41, 70]), backend="triton")
    for a, b in ((0, 40), (40, 41), (41, 70)):
        document = oracle.attention(*(x[:, a:b].cpu() for x in tensors), pattern)[0]
        torch.testing.assert_close(packed[:, a:b].cpu().double(), document, rtol=1e-5, atol=1e-5)


# The scale and the mixing have nothing to do with each other.
@pytest.mark.parametrize(
    ("options", "mixing"),
    [
        ({"dropout_p": 0.3, "seed": 2**40 + 7}, "exact"),
        ({"dropout_p": 0.3, "seed": 2**40 + 7}, "detached"),
        ({"scale": -0.4}, "exact"),
        ({"scale": 0.0}, "exact"),
        ({}, "exact"),
        ({}, "detached"),
    ],
)
def test_same_as_the_reference(options, mixing):
    """What the oracle does not know; the reference is tested against independent sums in other files."""
    pattern = Dilated([24, 64], [1, 3], torchscale_padding=not options)
    tensors = inputs(2, 70, 70, 2, 1, 16)
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(2, 2, 70, device=DEVICE)
    both = [
        results(
            lambda *x, backend=backend: attention(
                *x, pattern, backend=backend, return_lse=True, mixing_gradient=mixing, **options
            ),
            tensors,
            dout,
            dlse,
        )
        for backend in ("triton", "reference")
    ]
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), *both, strict=True):
        torch.testing.assert_close(a, e, rtol=2e-5, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("rates", [[1, 3], [2, 4]])
def test_bit_for_bit(rates, monkeypatch):
    """One head of a sample after the other has the bits of all at once."""
    from dilated_attention_pytorch.backends.gpu import launch_plan

    tensors, pattern = inputs(2, 70, 70, 2, 2, 16), Dilated([24, 64], rates)
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(2, 2, 70, device=DEVICE)
    call = lambda *x: attention(*x, pattern, is_causal=True, backend="triton", return_lse=True)  # noqa: E731
    at_once = results(call, tensors, dout, dlse)
    monkeypatch.setattr(launch_plan, "PARTIAL_ELEMENTS", 16)
    assert all(map(torch.equal, at_once, results(call, tensors, dout, dlse)))


def test_division_by_an_inverse():
    """As kernels do it, for numbers below 2**31: at multiples, just below them, and at the end."""
    from dilated_attention_pytorch.backends.gpu.launch_plan import inverse

    for divisor in [*range(1, 300), 5792, 2**16 - 1, 2**16 + 1, 185363, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1]:
        factor, shift = inverse(divisor) % 2**32, inverse(divisor) >> 32
        last = (2**31 - 1) // divisor * divisor
        for x in {0, 1, divisor - 1, divisor, 7 * divisor - 1, 7 * divisor, last - 1, last, 2**31 - 1}:
            if 0 <= x < 2**31:
                assert (2 * x * factor >> 32) >> shift == x // divisor


ROWS = [(100, 100, None), (17, 100, None), (100, 100, (100, 63)), (17, 100, (97, 84))]
RATES = [[1, 3, 2], [2, 3, 4], [1, 2, 4], [2, 4, 12], [1, 6, 2]]
SEGMENTS = [(16, 50, 1000), (16, 48, 96), (16, 50, 28)]
# Any three values of different parameters meet.
TABLES = [
    (*ROWS[i], (i + j) % 2 == 0, RATES[j], (i // 2 + j + k) % 2 == 0, SEGMENTS[k], (i + j + k) % 3 + 1)
    for i in range(len(ROWS))
    for j in range(len(RATES))
    for k in range(len(SEGMENTS))
]
TABLES += [(*x[:3], not x[3], x[4], not x[5], x[6], x[7] % 3 + 1) for x in TABLES]


@pytest.mark.parametrize(("n", "m", "lengths", "causal", "rates", "by_keys", "lengths_w", "least_shares"), TABLES)
def test_every_row_has_one_writer_and_every_part_one_reader(
    n, m, lengths, causal, rates, by_keys, lengths_w, least_shares, monkeypatch
):
    """The tables alone: no two tiles write one row, and each part is read once, after it was written, where it lies."""
    from dilated_attention_pytorch.backends.gpu import launch_plan
    from dilated_attention_pytorch.backends.gpu.tables import FAMILY_COLUMNS
    from dilated_attention_pytorch.plan.problem import Problem

    problem = Problem(Dilated(lengths_w, rates), causal, 2, n, m, 3, 3, lengths, None)
    options = {"block": 32, "by_keys": by_keys, "head_dim": 64, "device": torch.device("cpu")}
    all_rows = launch_plan.find_launch_plan(problem, **options).partial_rows
    most_rows = -(-all_rows // least_shares)
    monkeypatch.setattr(launch_plan, "PARTIAL_ELEMENTS", most_rows * 64)
    plan = launch_plan.find_launch_plan(problem, **options)
    begins = [i for i, launch in enumerate(plan.launches) if launch.begins_share]
    shares = [plan.launches[i:j] for i, j in pairwise([*begins, None])]
    assert plan.partial_rows <= most_rows or n != m
    assert (len(shares) > 1) == (n == m and least_shares > 1)
    if lengths is None and n == m:
        assert len(shares) == {1: 1, 2: 2, 3: 4}[least_shares]  # samples, then heads
    side, total = ("k", m) if by_keys else ("q", n)

    def rows(launch):
        """Row of the table, sample, head, row of the tensor, place in the parts."""
        ends = [*launch.table[1:, 0].tolist(), launch.programs]
        for columns, end in zip(launch.table.tolist(), ends, strict=True):
            c = dict(zip(FAMILY_COLUMNS, columns, strict=True))
            blocks = -(-c[f"{side}_rows"] // (32 if launch.attends else launch_plan.SUM_ROWS))
            samples, rest = divmod(end - c["first_program"], blocks * c["tiles"] * c["heads"])
            assert rest == 0
            for b in range(samples):
                for t in range(c["tiles"]):
                    for a in range(c["heads"]):
                        g = c["first_head"] + a * c["head_step"]
                        start = c[f"{side}_start"] + t * c["tile_step"] + a * c["head_row_step"]
                        segment = (b * 3 + g) * c["segments"] + c["own_segment"] + t
                        for x in range(c[f"{side}_rows"]):
                            assert launch.final or 0 <= c["own_number"] + x < c["capacity"]
                            place = c["partial_base"] + segment * c["capacity"] + c["own_number"] + x
                            yield c, b, g, start + x * c["row_stride"], place

    results = []
    for share in shares:
        parts, read = {}, []
        for launch in share:
            written = {}
            for c, b, g, row, place in rows(launch):
                i = row + c["to_position"]
                for child in range(c["first_child"], c["first_child"] + c["children"]):
                    entry = plan.layout[c["batch_slice"] * plan.bundles + child].tolist()
                    base, segments, capacity, w, r, segment, low, *_ = entry
                    number, rest = divmod(i % w - int(plan.offsets[child, g]), r)
                    if number >= 0 and rest == 0:
                        source = base + ((b * 3 + g) * segments + i // w - segment) * capacity + number - low
                        assert source in parts or not plan.complete
                        if source in parts:
                            assert parts[source] == (c["batch_slice"], b, g, i)
                            read.append(source)
                if launch.final:
                    results.append((c["first_sample"] + b, g, row))
                else:
                    assert place not in written
                    assert place not in parts
                    written[place] = (c["batch_slice"], b, g, i)
            parts |= written
        assert sorted(read) == sorted(parts)
        assert all(0 <= place < plan.partial_rows for place in parts)
    assert len(set(results)) == len(results)
    assert all(0 <= row < total for _, _, row in results)
    if n == m:
        assert len(results) == sum(lengths or (n, n)) * 3


def test_a_denser_branch_adds_the_parts_of_the_sparser_ones_it_covers():
    from dilated_attention_pytorch.backends.gpu.launch_plan import find_launch_plan
    from dilated_attention_pytorch.backends.gpu.tables import FAMILY_COLUMNS
    from dilated_attention_pytorch.plan.problem import Problem

    pattern = Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
    problem = Problem(pattern, False, 1, 2**16, 2**16, 12, 12, None, None)
    plan = find_launch_plan(problem, block=128, by_keys=False, head_dim=64, device=torch.device("cpu"))
    rates = [sorted({row[FAMILY_COLUMNS.index("row_stride")] for row in launch.table.tolist()}) for launch in plan.launches]
    # 16384 is no multiple of 6 and 32768 none of 12: rows have other rests by 6 and by 12 in every segment. But segments
    # begin at even rows, and at multiples of 4: 6 is added to 2, and 12 to 4.
    assert rates == [[6, 12], [4], [2], [1]]
    assert [launch.children for launch in plan.launches] == [0, 1, 2, 1]


def test_a_branch_that_misses_rows_of_a_sparser_one_does_not_add_its_parts():
    from dilated_attention_pytorch.backends.gpu.launch_plan import find_launch_plan
    from dilated_attention_pytorch.plan.problem import Problem

    for lengths, rates in (([16, 30, 45], [1, 2, 4]), ([16, 15, 32], [1, 2, 4]), ([16, 32, 32], [1, 2, 3])):
        problem = Problem(Dilated(lengths, rates), False, 1, 256, 256, 4, 4, None, None)
        plan = find_launch_plan(problem, block=128, by_keys=False, head_dim=64, device=torch.device("cpu"))
        assert [launch.children for launch in plan.launches] == [0, 2]


def test_a_single_branch_adds_no_parts():
    """Hopper kernels are compiled without the code that looks for parts."""
    from dilated_attention_pytorch.backends.gpu.launch_plan import find_launch_plan
    from dilated_attention_pytorch.plan.problem import Problem

    problem = Problem(Dilated([64], [1]), False, 1, 128, 128, 4, 4, None, None)
    plan = find_launch_plan(problem, block=128, by_keys=False, head_dim=64, device=torch.device("cpu"))
    assert plan.bundles == 0
    assert [launch.children for launch in plan.launches] == [0]


def test_parts_of_a_decoding_step_do_not_grow_with_the_sequence():
    from dilated_attention_pytorch.backends.gpu.launch_plan import find_launch_plan
    from dilated_attention_pytorch.plan.problem import Problem

    pattern = Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
    for keys in (10**5, 10**6):
        problem = Problem(pattern, True, 1, 1, keys, 32, 32, None, None)
        plan = find_launch_plan(problem, block=64, by_keys=False, head_dim=64, device=torch.device("cpu"))
        assert plan.partial_rows <= 2 * 10 * 32


def test_rows_further_apart_than_32_bits_reach(monkeypatch):
    """A storage of 2**31 elements is too much for a test; the same kernel with 64-bit offsets on a small one is not."""
    from dilated_attention_pytorch.backends.gpu import launch_plan, portable

    tensors = inputs(1, 70, 70, 2, 1, 16)
    pattern = Dilated([24, 64], [1, 3])
    narrow = attention(*tensors, pattern, backend="triton")
    made, original = [], portable.tile_constants

    def wide(*arguments):
        made.append(original(*arguments) | {"WIDE": True})
        return made[-1]

    monkeypatch.setattr(portable, "tile_constants", wide)
    launch_plan._launch_plan.cache_clear()  # with the calls that were made
    out = attention(*tensors, pattern, backend="triton")
    assert torch.equal(out, narrow)
    torch.autograd.grad(out.sum(), tensors)
    assert made
    launch_plan._launch_plan.cache_clear()


def test_kernels_know_columns_by_their_names():
    from dilated_attention_pytorch.backends.gpu import tables
    from dilated_attention_pytorch.backends.gpu.kernels import columns as kernel_columns

    for prefix in ("FAMILY", "LAYOUT", "BLOCK"):
        names = getattr(tables, f"{prefix}_COLUMNS")
        assert getattr(kernel_columns, f"{prefix}_WIDTH").value == len(names)
        found = [getattr(kernel_columns, f"{prefix}_{name.upper()}").value for name in names]
        assert found == list(range(len(names)))


def test_refusals():
    x = torch.zeros(1, 4, 1, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"triton: Triton kernels take torch\.float32"):
        attention(x.double(), x.double(), x.double(), Dilated([4], [1]), backend="triton")
    wide = torch.zeros(1, 4, 1, 264, device=DEVICE)
    with pytest.raises(ValueError, match="head sizes up to 256, got 264"):
        attention(wide, wide, wide, Dilated([4], [1]), backend="triton")


def test_shifts_are_sums_of_three():
    """-lse / scale and -delta of every row, each in three of eight columns, to the precision of float32."""
    from dilated_attention_pytorch.backends.gpu.portable import row_statistics
    from dilated_attention_pytorch.values import Saved

    dout, out = (torch.randn(2, 70, 3, 16, device=DEVICE) for _ in range(2))
    lse = torch.randn(2, 3, 70, device=DEVICE) * 10
    lse[0, 0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan], device=DEVICE)
    shifts = torch.full((2, 3, 70, 16), 7.0, dtype=torch.bfloat16, device=DEVICE)
    delta = row_statistics(Saved(out, lse, dout), shifts, 1 / 0.125).delta
    exact = torch.stack([-lse.double() / 0.125, -delta.double()], -1)
    pieces = shifts.double().unflatten(-1, (2, 8))
    assert not pieces[..., 3:].any()
    torch.testing.assert_close(pieces.sum(-1), exact, rtol=2.0**-22, atol=0.0, equal_nan=True)
    torch.testing.assert_close(delta, torch.einsum("bnhd,bnhd->bhn", dout, out))

"""A stream: its generator, its checksum, the check of its rows, and its checkpoints."""

from __future__ import annotations

import dataclasses
import math
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import Dilated, DilatedKVCache, attention
from dilated_attention_pytorch import streaming_rows as rows_of
from dilated_attention_pytorch.streaming import CheckpointError, Stream, StreamSettings, default_pattern
from dilated_attention_pytorch.streaming_check import check_row, checked_positions, head_keys, tolerance

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
PATTERN = Dilated([16, 64, 256], [1, 4, 16])
SMALL = StreamSettings(600, PATTERN, 4, 8, torch.float32, CPU, chunk=50, seed=3, rows=24)


def finaliser(x: int) -> int:
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def defined_word(seed: int, tensor: int, counter: int) -> int:
    s = finaliser((finaliser(seed % 2**32) + seed // 2**32) % 2**32)
    a = finaliser((s + tensor) % 2**32)
    b = finaliser(a ^ 0x9E3779B9)
    return finaliser(finaliser((counter + a) % 2**32) ^ ((counter // 2**32 + b) % 2**32))


def defined_element(seed: int, tensor: int, number: int) -> float:
    byte = defined_word(seed, tensor, number // 4).to_bytes(4, "little")[number % 4]
    return (2 * byte - 255) / 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("seed", "first"), [(0, 0), (12, 5), (2**63 - 1, 2**31 - 2), (2**40 + 9, 2**36 - 1)])
def test_rows_are_those_of_the_definition(seed, first, dtype):
    """In Python's integers. Positions around 2**36 have counters on both sides of a multiple of 2**32."""
    heads, d = 3, 4
    for tensor in (rows_of.QUERY, rows_of.KEY, rows_of.VALUE):
        out = torch.full((5, heads, d), torch.nan, dtype=dtype)
        rows_of.fill_rows(out, seed, tensor, first)
        numbers = range(first * heads * d, (first + 5) * heads * d)
        assert out.flatten().tolist() == [defined_element(seed, tensor, n) for n in numbers]
        assert rows_of.word(seed, tensor, first) == defined_word(seed, tensor, first)


@pytest.mark.parametrize(("heads", "d"), [(3, 4), (2, 6), (4, 1), (1, 16)])
def test_single_rows_of_a_head_are_those_of_the_tensor(heads, d):
    out = torch.empty(40, heads, d, dtype=torch.float64)
    rows_of.fill_rows(out, 7, rows_of.KEY, 2**33)
    at = torch.tensor([31, 0, 7, 7])
    for head in range(heads):
        assert rows_of.head_rows(7, rows_of.KEY, at + 2**33, head, (heads, d)).equal(out[at, head])


def test_rows_look_random():
    made = []
    for tensor in (rows_of.QUERY, rows_of.KEY, rows_of.VALUE):
        for seed, first in ((0, 0), (1, 0), (0, 2**29)):
            out = torch.empty(2000, 4, 8, dtype=torch.float64)
            rows_of.fill_rows(out, seed, tensor, first)
            made.append(out.flatten())
    everything = torch.stack(made)
    assert everything.unique().numel() == 256
    assert everything.mean(1).abs().max() < 5 * 1.155 / math.sqrt(64000)
    correlation = torch.corrcoef(everything) - torch.eye(len(made))
    assert correlation.abs().max() < 5 / math.sqrt(64000)


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 4), (torch.float64, 8)]
)
def test_checksum_is_that_of_the_definition(dtype, size):
    out, seed, first = torch.randn(5, 2, 6).to(dtype), 11, 2**35 + 3
    raw = out.view(torch.uint8).flatten(1).tolist()
    expected = 0
    for i, row in enumerate(raw):
        for e in range(12):
            bits = int.from_bytes(bytes(row[e * size : (e + 1) * size]), "little", signed=True)
            weights = (defined_word(seed, 3, first + i) | 1) * (defined_word(seed, 4, e) | 1)
            expected += weights * bits
    found = rows_of.checksum(out, rows_of.column_weights(seed, 12, CPU), seed, first)
    assert int(found) % 2**64 == expected % 2**64
    halves = [rows_of.checksum(x, rows_of.column_weights(seed, 12, CPU), seed, first + at) for x, at in
              ((out[:2], 0), (out[2:], 2))]  # fmt: skip
    assert sum(map(int, halves)) % 2**64 == expected % 2**64


def test_the_default_pattern_ends_with_the_stream_or_at_2_to_the_30():
    assert default_pattern(1).branches == ((2048, 1),)
    assert default_pattern(2049).branches == ((2048, 1), (8192, 4))
    assert default_pattern(10**9).branches == tuple((2048 * 4**i, 4**i) for i in range(11))
    assert default_pattern(2**40).segment_lengths[-1] == 2**31


def _reference(tokens: int, shape: tuple[int, int], seed: int, pattern: Dilated) -> torch.Tensor:
    inputs = [torch.empty(1, tokens, *shape, dtype=torch.float64) for _ in range(3)]
    for tensor, x in enumerate(inputs):
        rows_of.fill_rows(x[0], seed, tensor, 0)
    return attention(*inputs, pattern, is_causal=True, backend="reference")[0]


@pytest.mark.parametrize("pattern", [PATTERN, Dilated([24, 50], [2, 3]), Dilated([7], [1])], ids=str)
def test_the_check_agrees_with_the_reference_and_finds_a_wrong_row(pattern):
    out = _reference(200, (4, 8), 5, pattern)
    for position in (0, 1, 15, 16, 63, 64, 100, 199):
        row = check_row(out[position], position, pattern.branches, 5, 1e-12)
        assert row.passed, row
        wrong = out[position].clone()
        wrong[2, 3] += 1e-3
        row = check_row(wrong, position, pattern.branches, 5, tolerance(torch.float32))
        assert not row.passed
        # A neighbour's row is as wrong as a row can be.
        assert check_row(out[(position + 1) % 200], position, pattern.branches, 5, 0.5).error > 0.5
    nothing = check_row(torch.full((4, 8), torch.nan), 9, pattern.branches, 5, 1e9)
    assert not nothing.passed
    assert math.isnan(nothing.error)


def test_keys_of_a_row_by_enumeration():
    for position in (0, 5, 63, 64, 255, 300):
        for head in range(4):
            counts = [PATTERN.multiplicity(position, j, key_head=head, key_heads=4, is_causal=True) for j in range(301)]
            found = head_keys(position, head, PATTERN.branches).bincount(minlength=301)
            assert found.tolist() == counts


@settings(max_examples=30)
@given(st.integers(1, 3000), st.integers(0, 80), st.integers(0, 5))
def test_checked_positions(tokens, rows, seed):
    found = checked_positions(tokens, rows, PATTERN.branches, 4, seed)
    assert len(found) == min(tokens, rows)
    assert list(found) == sorted(set(found))
    assert all(0 <= p < tokens for p in found)
    if rows >= 2:
        assert {0, tokens - 1} <= set(found)


def test_checked_positions_of_a_billion_tokens():
    branches = default_pattern(10**9).branches
    found = checked_positions(10**9, 64, branches, 8, 0)
    assert len(found) == 64
    assert {0, 10**9 - 1, 2**29} <= set(found)
    assert checked_positions(10**9, 64, branches, 8, 1) != found
    for w, r in branches:
        # Rows of each branch, rows with the most keys of it, and the first row of a segment.
        inside = [p for p in found if p % w % r < 8]
        assert len(inside) >= 5, (w, r)
        if w < 10**9:
            assert any(p % w // r == 2047 for p in inside), (w, r)
            assert any(p % w == 0 for p in found if p), (w, r)


def finish(stream: Stream) -> Stream:
    for _ in stream.run():
        pass
    return stream


def figures(stream: Stream) -> tuple:
    result = stream.result()
    return result.checksum, result.checked, result.point.position


def test_a_stream_is_the_reference():
    stream = finish(Stream(dataclasses.replace(SMALL, dtype=torch.float64, chunk=47)))
    result = stream.result()
    assert not result.failed
    assert len(result.checked) == 24
    out = _reference(600, (4, 8), 3, PATTERN)
    torch.testing.assert_close(stream._rows, out[list(stream.positions)], rtol=0, atol=1e-12)
    assert result.point.position == 600
    assert result.cache_bytes == DilatedKVCache.max_nbytes(PATTERN, 1, 4, 8, dtype=torch.float64, max_rollback=0)


def test_positions_past_2_to_the_31(tmp_path):
    """All segments begin at 2**31, so a run that starts there with nothing held is exact."""
    start, path = 2**31, tmp_path / "state"
    settings = dataclasses.replace(SMALL, tokens=start + 700, dtype=torch.float64)
    Stream(settings).save(path)
    state = torch.load(path, weights_only=True)
    state["cache"]["tokens_seen"].fill_(start)
    state["points"] = [(0, 0.0, 0), (start, 1.0, 0)]
    torch.save(state, path)
    run = Stream(settings)
    run.load(path)
    checked = [row for row in finish(run).result().checked if row.position >= start]
    assert len(checked) >= 6
    assert all(row.passed for row in checked)
    assert checked[-1].position == start + 699


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_within_the_tolerance(dtype):
    result = finish(Stream(dataclasses.replace(SMALL, dtype=dtype, tokens=300, head_dim=16))).result()
    assert not result.failed
    assert 0 < max(row.error for row in result.checked) < tolerance(dtype)


def test_results_do_not_depend_on_checkpoints(tmp_path):
    expected = figures(finish(Stream(SMALL)))
    path = tmp_path / "state"
    for stop in range(1, 12, 3):
        run = Stream(SMALL)
        points = run.run()
        for _ in range(stop):
            next(points)
            run.save(path)
        again = Stream(SMALL)
        again.load(path)
        assert again.points[-1].position == 50 * stop
        assert figures(finish(again)) == expected
        assert [point.position for point in again.points] == list(range(0, 601, 50))
    assert [x.name for x in tmp_path.iterdir()] == ["state"]
    assert figures(finish(Stream(dataclasses.replace(SMALL, seed=4)))) != expected


def test_a_finished_run_is_loaded_as_it_was(tmp_path):
    run = finish(Stream(SMALL))
    run.save(tmp_path / "state")
    again = Stream(SMALL)
    again.load(tmp_path / "state")
    assert list(again.run()) == []
    assert figures(again) == figures(run)
    assert again.points == run.points


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 4}, "seed 3 instead of 4"),
        ({"tokens": 700}, "tokens 600 instead of 700"),
        ({"chunk": 60}, "chunk 50 instead of 60"),
        ({"heads": 8}, "heads 4 instead of 8"),
        ({"rows": 8}, "rows 24 instead of 8"),
        ({"dtype": torch.float64}, "dtype 'float32' instead of 'float64'"),
        ({"pattern": Dilated([16, 64], [1, 4])}, r"segment_lengths \[16, 64, 256\] instead of \[16, 64\], dilation_rates"),
    ],
)
def test_other_settings_are_refused_and_named(tmp_path, change, said):
    path = tmp_path / "state"
    Stream(SMALL).save(path)
    run = Stream(dataclasses.replace(SMALL, **change))
    with pytest.raises(ValueError, match=f"{path} .*{said}"):
        run.load(path)
    assert run.points[-1].position == 0
    assert run._cache.tokens_seen.item() == 0


def test_a_damaged_checkpoint_raises_and_names_itself(tmp_path):
    """Every truncation and every damaged byte either raises or, where the archive ignores the byte, changes nothing."""
    run = Stream(dataclasses.replace(SMALL, pattern=Dilated([4], [1]), heads=1, head_dim=4, rows=2, chunk=100))
    next(run.run())
    good, path = tmp_path / "good", tmp_path / "damaged"
    run.save(good)
    data, raised = good.read_bytes(), 0
    for size in range(0, len(data), 97):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=f"{path} is not a complete checkpoint"):
            Stream(run.settings).load(path)
    expected = figures(finish(run))
    for at in range(5, len(data), 41):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        again = Stream(run.settings)
        try:
            again.load(path)
        except CheckpointError as error:
            raised += str(path) in str(error)
        else:
            assert figures(finish(again)) == expected
    with zipfile.ZipFile(good) as archive:
        stored = sum(info.file_size for info in archive.infolist())
    assert raised >= stored // 41 - 1  # every byte of the content counts


def test_other_files_are_not_checkpoints(tmp_path):
    path = tmp_path / "other"
    torch.save({"weights": torch.ones(3)}, path)
    with pytest.raises(CheckpointError, match="is not a checkpoint of a stream"):
        Stream(SMALL).load(path)
    path.write_text("no archive")
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        Stream(SMALL).load(path)


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "state"
    run = Stream(SMALL)
    run.save(path)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        run.save(path)
    assert path.read_bytes() == before
    assert [x.name for x in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": 0}, "tokens must be an integer, at least 1, got 0"),
        ({"tokens": 2**41}, "tokens must be at most"),
        ({"seed": -1}, "seed must be from 0"),
        ({"chunk": 0}, "chunk must be an integer, at least 1"),
        ({"rows": -1}, "rows must be an integer, at least 0"),
        ({"heads": 3, "head_dim": 3}, r"multiple of 4.*got 3 \* 3"),
        ({"pattern": Dilated([16], [4], "blocked")}, "interleaved"),
    ],
)
def test_settings_are_checked(change, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(SMALL, **change)


def test_rates_of_tenths():
    run = finish(Stream(SMALL))
    result = run.result()
    seconds = {point.position: point.seconds for point in run.points}
    # Chunks of 50 of 600 tokens: the first end behind 60 is 100, the last one before 540 is 500.
    assert result.first_tenth == pytest.approx(100 / seconds[100])
    assert result.last_tenth == pytest.approx(100 / (seconds[600] - seconds[500]))
    unfinished = Stream(SMALL)
    next(unfinished.run())
    assert unfinished.result().first_tenth is None
    assert unfinished.result().last_tenth is None

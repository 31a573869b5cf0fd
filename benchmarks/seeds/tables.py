"""The tables of the reports: their settings, their figures, and the same measured here."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention_pytorch import BlockSparse, Dilated, SparsePatternConfig
from seeds.measure import Case, Ranks, on_one, on_ranks, once

# Where a call runs: one device with one or two threads, or two ranks with one thread each.
PLACES = ("one", "two threads", "two ranks")
SHORT_S, LONG_S = 3.0, 20.0  # in between, one more call is timed; above, only the call that measures memory


@dataclass(frozen=True)
class Setting:
    """A row of a table: what the report measured, and the case that is measured here."""

    name: str
    case: Case
    old: dict[str, Any]  # the report's figures by column
    places: tuple[str, ...] = PLACES


def segments(*branches: tuple[int, int]) -> Dilated:
    return Dilated([w for w, _ in branches], [r for _, r in branches])


def dense(tokens: int, rate: int = 1) -> Dilated:
    return segments((tokens, rate))


def baseline() -> list[Setting]:
    case = Case(16384, segments((2048, 1), (4096, 2), (8192, 4)))
    old = {"milliseconds": 14.70, "tokens_per_second": 1_114_470, "gigabytes": 0.28}
    return [Setting("16,384", case, old)]


def ring() -> list[Setting]:
    figures = {
        8192: ((78.5, 0.078), (139.4, 0.094)),
        32768: ((1887.7, 0.276), (3159.5, 0.377)),
        65536: ((None, None), (15444.6, 0.754)),
    }
    return [
        Setting(
            f"{n:,}",
            Case(n, segments((2048, 1), (n, 8))),
            {"one_ms": one[0], "one_gb": one[1], "two_ms": two[0], "two_gb": two[1]},
        )
        for n, (one, two) in figures.items()
    ]


def bucketed() -> list[Setting]:
    cases = [
        Case(64, segments((16, 1), (64, 2)), heads=2, head_dim=16),
        Case(512, segments((128, 1), (512, 2)), heads=4, head_dim=32, bucket_size=128),
        Case(2048, segments((512, 1), (2048, 2)), heads=8, head_dim=64, bucket_size=512),
        Case(8192, segments((512, 1), (8192, 4)), heads=8, head_dim=64, bucket_size=512),
    ]
    old = ["correct", "works", "succeeded", "may time out or run out of memory"]
    return [Setting(f"{c.tokens:,}", c, {"status": text}) for c, text in zip(cases, old, strict=True)]


def data_parallel() -> list[Setting]:
    figures = ((2048, 8, 58.0, 452.1), (4096, 4, 60.5, 406.7), (8192, 2, 74.8, 455.2), (16384, 1, 271.8, 211.1))
    return [
        Setting(
            f"{n:,} x {batch}",
            Case(n, segments((1024, 1), (4096, 4)), batch=batch),
            {"one_ms": one, "two_ms": two, "speedup": one / two},
            ("one", "two threads", "two ranks", "two samples"),
        )
        for n, batch, one, two in figures
    ]


LONGEST = 237_568
# One case here takes as long as all others together. Two heads of 16 numbers keep it below some minutes.
_LONG = {"heads": 2, "head_dim": 16}


def longest() -> list[Setting]:
    rows = [
        ("one segment, no dilation", Case(LONGEST, dense(LONGEST), **_LONG), 4.53, 9_016, None),
        ("one segment, dilation 2", Case(LONGEST, dense(LONGEST, 2), **_LONG), 4.53, 52_205, 5.8),
        ("[4096, 8192]", Case(204_800, segments((4096, 1), (8192, 2)), **_LONG), 4.60, 42_967, 4.8),
        ("[4096, 8192, 16384]", Case(212_992, segments((4096, 1), (8192, 2), (16384, 4)), **_LONG), 4.60, 49_089, 5.4),
    ]
    found = []
    for name, case, gigabytes, rate, speedup in rows:
        old = {"gigabytes": gigabytes, "tokens_per_second": rate, "speedup": speedup}
        found.append(Setting(name, case, old, ("two threads",)))
    return found


def two_devices() -> list[Setting]:
    figures = ((8192, 1, 21.2, 0.24), (8192, 2, 3717.5, 0.24), (16384, 1, 165.7, 0.85), (16384, 2, 24017.7, 0.85),
               (32768, 1, 4825.3, 3.19), (32768, 2, None, None))  # fmt: skip
    return [
        Setting(
            f"{n:,}, {'no dilation' if rate == 1 else 'dilation 2'}",
            Case(n, dense(n, rate), heads=4, transport="ring"),
            {"two_ms": ms, "two_gb": gb},
            PLACES if n < 32768 else ("two threads", "two ranks"),
        )
        for n, rate, ms, gb in figures
    ]


def far() -> list[Setting]:
    """Lengths of the scaling table that two ranks did not reach, and twice as many tokens."""
    return [
        Setting(f"{n:,}", Case(n, segments((4096, 1), (8192, 2), (n, 64)), **_LONG), {}, ("two threads", "two ranks"))
        for n in (65_536, LONGEST, 2 * LONGEST)
    ]


def blocks() -> list[Setting]:
    config = SparsePatternConfig("dilated_sparse", 0.1, segment_lengths=[4096, 8192], dilation_rates=[1, 2])
    hierarchical = SparsePatternConfig("hierarchical", 0.05)
    return [
        Setting("dilated_sparse, 0.1", Case(32768, BlockSparse.from_config(config)), {"status": "tested"}),
        Setting("hierarchical, 0.05", Case(65536, BlockSparse.from_config(hierarchical)), {"status": "allocated"}),
    ]


def hilbert() -> list[Setting]:
    pattern = segments((2048, 1), (8192, 4))
    return [
        Setting("rows of the grid", Case(16384, pattern), {}, ("one", "two ranks")),
        Setting("Hilbert curve", Case(16384, pattern, grid=(128, 128)), {}, ("one", "two ranks")),
    ]


TABLES: dict[str, Callable[[], list[Setting]]] = {
    "baseline": baseline, "ring": ring, "bucketed": bucketed, "data_parallel": data_parallel, "longest": longest,
    "two_devices": two_devices, "far": far, "blocks": blocks, "hilbert": hilbert,
}  # fmt: skip


def measure(name: str, ranks: Ranks, report: Callable[[str], None], *, repeats: int, shrink: int) -> list[dict[str, Any]]:
    """The rows of a table. Memory and errors come from one call in each place, times from ``repeats`` rounds."""
    settings = [replace(x, case=_shrunk(x.case, shrink)) for x in TABLES[name]()]
    rows = []
    for setting in settings:
        report(f"{name}: {setting.name}, memory and error")
        rows.append(_first_row(setting, ranks))
    for turn in range(repeats):
        for setting, row in zip(settings, rows, strict=True):
            for place, found in row["places"].items():
                if turn >= rounds_of(row, repeats):
                    continue
                report(f"{name}: {setting.name}, {place}, round {turn + 1}")
                times = _timed(setting.case, place, ranks, warm=is_short(row))
                found["seconds"].append(times["seconds"])
                for key in ("busiest_s", "together_s"):
                    found[key].append(times[key])
    for row in rows:
        for found in row["places"].values():
            # The first call fills caches and is measured for memory, which matters for short calls.
            times = found["seconds"][is_short(row) :] or found["seconds"]
            found["median_s"] = statistics.median(times)
    return rows


def is_short(row: dict[str, Any]) -> bool:
    """Whether the first call of a row took little time in every place."""
    return max(x["seconds"][0] for x in row["places"].values()) < SHORT_S


def rounds_of(row: dict[str, Any], repeats: int) -> int:
    """How often a row is timed after its first call: the same in all places, so that they take turns."""
    longest = max(x["seconds"][0] for x in row["places"].values())
    return repeats if is_short(row) else min(repeats, int(longest < LONG_S))


def _shrunk(case: Case, factor: int) -> Case:
    """The case with fewer tokens, to try the script."""
    if factor == 1 or case.tokens <= 2048:
        return case
    n, pattern = case.tokens // factor, case.pattern
    if isinstance(pattern, Dilated):
        pattern = Dilated([n if w == case.tokens else w for w in pattern.segment_lengths], pattern.dilation_rates)
    return replace(
        case, tokens=n, pattern=pattern, grid=None if case.grid is None else (case.grid[0] // factor, case.grid[1])
    )


def _first_row(setting: Setting, ranks: Ranks) -> dict[str, Any]:
    case, places = setting.case, {}
    for place in setting.places:
        if place == "two samples":  # half of the batch on each rank, without communication
            halves = replace(case, batch=max(1, case.batch // 2))
            reports = ranks.run(2, _alone, halves, "memory") if case.batch > 1 else []
            exact = {"error": max((x["error"] for x in reports), default=0.0), "finite": True, "rows_checked": len(reports)}
        elif place == "two ranks":
            exact, reports = on_ranks(ranks, 2, case)
        else:
            torch.set_num_threads(2 if place == "two threads" else 1)
            exact, reports = on_one(case)
        if reports:
            seconds, most = (max(x[key] for x in reports) for key in ("seconds", "bytes"))
            used = [x["cpu_seconds"] for x in reports]
            places[place] = {
                **exact,
                "bytes": most,
                "seconds": [seconds],
                "busiest_s": [max(used)],
                "together_s": [sum(used)],
            }
    shape = [case.batch, case.tokens, case.heads, case.head_dim]
    return {"name": setting.name, "shape": shape, "pattern": described(case), "old": setting.old, "places": places}


def described(case: Case) -> str:
    """The pattern in words.

    >>> described(Case(512, Dilated([128, 512], [1, 2]), bucket_size=128))
    'w = 128, 512; r = 1, 2; buckets of 128'
    """
    if isinstance(case.pattern, BlockSparse):
        config = case.pattern.config
        assert config is not None
        return f"{config.pattern_type}, {config.sparsity_ratio:g} of the blocks of {config.block_size}"
    lengths, rates = (", ".join(map(str, x)) for x in (case.pattern.segment_lengths, case.pattern.dilation_rates))
    bucket = "" if case.bucket_size is None else f"; buckets of {case.bucket_size}"
    transport = "" if case.transport == "auto" else f"; transport {case.transport}"
    return f"w = {lengths}; r = {rates}{bucket}{transport}"


def _alone(group: Any, case: Case, what: str) -> dict[str, Any]:
    """A call without communication on a rank of its own."""
    if what == "time":
        return once(None, case, warm=True)
    exact, (report,) = on_one(case)
    return {**exact, **{key: report[key] for key in ("seconds", "cpu_seconds", "bytes")}}


def _timed(case: Case, place: str, ranks: Ranks, *, warm: bool) -> dict[str, float]:
    if place == "two samples":
        reports = ranks.run(2, _alone, replace(case, batch=max(1, case.batch // 2)), "time")
    elif place == "two ranks":
        reports = ranks.run(2, once, case, warm)
    else:
        torch.set_num_threads(2 if place == "two threads" else 1)
        reports = [once(None, case, warm)]
    used = [x["cpu_seconds"] for x in reports]
    return {"seconds": max(x["seconds"] for x in reports), "busiest_s": max(used), "together_s": sum(used)}

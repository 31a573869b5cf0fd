"""Requirements on the measured tables. They read only the figures, so the page can be made again from the JSON."""

from __future__ import annotations

import math
from typing import Any

from seeds.measure import LIMIT
from seeds.outcome import Outcome, of_error, of_ratio, together

Tables = dict[str, list[dict[str, Any]]]


def _row(tables: Tables, table: str, start: str) -> dict[str, Any]:
    return next(row for row in tables[table] if row["name"].startswith(start))


def _seconds(row: dict[str, Any], place: str, kind: str = "busiest_s") -> float:
    """The least processor time of a call, of the busiest process: other programs on the machine hardly change it."""
    return min(row["places"][place][kind])


def _memory(row: dict[str, Any], place: str) -> float:
    return row["places"][place]["bytes"]


def speedup(tables: Tables, table: str, slow: tuple[str, str], fast: tuple[str, str]) -> float:
    """The processor time of the busiest process in one row and place, over that in another one."""
    (row, place), (other, there) = slow, fast
    return _seconds(_row(tables, table, row), place) / _seconds(_row(tables, table, other), there)


def _exact(tables: Tables, names: tuple[str, ...], place: str | None = None) -> Outcome:
    found = [
        x["error"] if x["finite"] else math.inf
        for name in names for row in tables[name] for key, x in row["places"].items() if place in (None, key)
    ]  # fmt: skip
    return of_error(max(found, default=math.inf), f"{len(found)} configuration(s)", LIMIT)


def all_exact(tables: Tables) -> Outcome:
    """every configuration of every table: finite, and rows against the definition"""
    return _exact(tables, tuple(tables))


def baseline_exact(tables: Tables) -> Outcome:
    """16,384 tokens on one device; rows against the definition"""
    return _exact(tables, ("baseline",), "one")


def two_ranks_exact(tables: Tables) -> Outcome:
    """every configuration that ran on 2 ranks: finite, and rows against the definition"""
    return _exact(tables, tuple(tables), "two ranks")


def bucketed_exact(tables: Tables) -> Outcome:
    """64, 512 and 2,048 tokens on 2 ranks in the buckets of the report; rows against the definition"""
    return _exact({"bucketed": tables["bucketed"][:3]}, ("bucketed",), "two ranks")


def ring_memory(tables: Tables) -> Outcome:
    """memory per rank with 2 ranks over that of one device (the report: 1.21 and 1.37)"""
    found = [(row["name"], _memory(row, "two ranks") / _memory(row, "one")) for row in tables["ring"]]
    return together(*(of_ratio(x, f"{n} tokens:", most=0.65) for n, x in found))


def dense_memory(tables: Tables) -> Outcome:
    """memory per rank at 16K and at 32K over that at 8K, no dilation (the report: 3.5 and 13)"""
    first = _memory(_row(tables, "two_devices", "8,192, no"), "two ranks")
    found = [_memory(_row(tables, "two_devices", f"{n}, no"), "two ranks") / first for n in ("16,384", "32,768")]
    return together(of_ratio(found[0], "2 x the tokens:", most=2.2), of_ratio(found[1], "4 x the tokens:", most=4.4))


def dense_memory_two_over_one(tables: Tables) -> Outcome:
    """memory per rank with 2 ranks over that of one device, 8K to 32K tokens in one segment"""
    found = [_memory(row, "two ranks") / _memory(row, "two threads") for row in tables["two_devices"]]
    return of_ratio(max(found), "largest ratio", most=0.75)


def ring_speed(tables: Tables) -> Outcome:
    """one device over 2 ranks, processor time of the busiest process (the report: 0.56 and 0.60)"""
    found = [(n, speedup(tables, "ring", (n, "one"), (n, "two ranks"))) for n in ("8,192", "32,768", "65,536")]
    return together(*(of_ratio(x, f"{n} tokens:", least=1.0) for n, x in found))


def efficiency(tables: Tables) -> Outcome:
    """half of one device over 2 ranks, one thread each, 65,536 tokens"""
    return of_ratio(speedup(tables, "ring", ("65,536", "one"), ("65,536", "two ranks")) / 2, "efficiency", least=0.9)


def work_of_ranks(tables: Tables) -> Outcome:
    """processor time of one device over that of 2 ranks together, 65,536 tokens: what distribution adds"""
    row = _row(tables, "ring", "65,536")
    return of_ratio(_seconds(row, "one") / _seconds(row, "two ranks", "together_s"), "ratio", least=0.9)


def small_overhead(tables: Tables) -> Outcome:
    """2 ranks over one device at 2,048 tokens, one thread each: at most twice"""
    return of_ratio(1 / speedup(tables, "bucketed", ("2,048", "one"), ("2,048", "two ranks")), "time", most=2.0)


def batches(tables: Tables) -> Outcome:
    """one device over 2 ranks with half of the batch each, one thread each (the report: 0.13, 0.15 and 0.16)"""
    names = [row["name"] for row in tables["data_parallel"] if "two samples" in row["places"]]
    found = [speedup(tables, "data_parallel", (n, "one"), (n, "two samples")) for n in names]
    return together(*(of_ratio(x, f"{n}:", least=1.0) for n, x in zip(names, found, strict=True)))


def batch_efficiency(tables: Tables) -> Outcome:
    """half of one device over 2 ranks with half of the batch each, the best row (the report: 0.7 to 0.8 at best)"""
    names = [row["name"] for row in tables["data_parallel"] if "two samples" in row["places"]]
    return of_ratio(
        max(speedup(tables, "data_parallel", (n, "one"), (n, "two samples")) for n in names) / 2, "efficiency", least=0.7
    )


def sequence_of_one(tables: Tables) -> Outcome:
    """one sample of 16,384 tokens, which data parallelism cannot divide: one device over 2 ranks with half the rows each"""
    return of_ratio(speedup(tables, "data_parallel", ("16,384", "one"), ("16,384", "two ranks")), "speed-up", least=1.29)


def batch_or_sequence(tables: Tables) -> Outcome:
    """2 samples of 8,192 tokens on 2 ranks: divided by samples over divided by rows"""
    ratio = speedup(tables, "data_parallel", ("8,192", "two samples"), ("8,192", "two ranks"))
    return of_ratio(ratio, "time", least=0.5, most=1.5)


def _dilation(tables: Tables, place: str, tokens: str) -> float:
    return speedup(tables, "two_devices", (f"{tokens}, no", place), (f"{tokens}, dil", place))


def dilation_longest(tables: Tables) -> Outcome:
    """dilation 2 against none, 237,568 tokens in one segment, one device; the work is a quarter"""
    ratio = speedup(tables, "longest", ("one segment, no", "two threads"), ("one segment, dil", "two threads"))
    return of_ratio(ratio, "speed-up", least=3.0)


def dilation_above_work(tables: Tables) -> Outcome:
    """the figure itself: dilation 2 gains 5.8 x or more"""
    ratio = speedup(tables, "longest", ("one segment, no", "two threads"), ("one segment, dil", "two threads"))
    return of_ratio(
        ratio, "the work is a quarter, so a baseline as efficient as the dilated call allows 4; speed-up", least=5.8
    )


def segments_longest(tables: Tables) -> Outcome:
    """tokens per second of [4096, 8192] and [4096, 8192, 16384] over those of one segment without dilation"""
    first = _row(tables, "longest", "one segment, no")
    rate = [first["shape"][1] / _seconds(first, "two threads")]
    for name in ("[4096, 8192]", "[4096, 8192, 16384]"):
        row = next(x for x in tables["longest"] if x["name"] == name)
        rate.append(row["shape"][1] / _seconds(row, "two threads"))
    return together(
        of_ratio(rate[1] / rate[0], "two segments:", least=4.8), of_ratio(rate[2] / rate[0], "three:", least=5.4)
    )


def dilation_on_ranks(tables: Tables) -> Outcome:
    """dilation 2 against none on 2 ranks, 8K, 16K and 32K tokens (the report: 175 and 145 times slower)"""
    return together(
        *(of_ratio(_dilation(tables, "two ranks", n), f"{n} tokens:", least=2.0) for n in ("8,192", "16,384", "32,768"))
    )


def dilation_everywhere(tables: Tables) -> Outcome:
    """speed-up by dilation on 2 ranks over that on one device, 16K tokens"""
    return of_ratio(_dilation(tables, "two ranks", "16,384") / _dilation(tables, "one", "16,384"), "ratio", least=0.6)


def two_over_one_dense(tables: Tables) -> Outcome:
    """one device over 2 ranks in one segment of 8K and 16K tokens, one thread each"""
    return together(*(
        of_ratio(speedup(tables, "two_devices", (f"{n}, no", "one"), (f"{n}, no", "two ranks")), f"{n} tokens:", least=1.0)
        for n in ("8,192", "16,384")
    ))  # fmt: skip


def reached(tables: Tables) -> Outcome:
    """65,536, 237,568 and 475,136 tokens on 2 ranks; rows against the definition"""
    return together(
        _exact(tables, ("far",), "two ranks"), Outcome(len(tables["far"]) == 3, f"up to {tables['far'][-1]['name']} tokens")
    )


def far_memory(tables: Tables) -> Outcome:
    """memory per rank for 475,136 tokens on 2 ranks over that of one device for 237,568"""
    ratio = _memory(_row(tables, "far", "475,136"), "two ranks") / _memory(_row(tables, "far", "237,568"), "two threads")
    return of_ratio(ratio, "measured", most=1.1)


def longest_exact(tables: Tables) -> Outcome:
    """the four patterns at 204,800 to 237,568 tokens; rows against the definition"""
    return _exact(tables, ("longest",))


def allocated(tables: Tables) -> Outcome:
    """forwards over 32,768 and 65,536 tokens on one device and on 2 ranks; rows against the definition"""
    return _exact({"ring": tables["ring"][1:]}, ("ring",))


def blocks_exact(tables: Tables) -> Outcome:
    """dilated_sparse and hierarchical patterns, 32,768 and 65,536 tokens, one device and 2 ranks; rows against float64"""
    return _exact(tables, ("blocks",))


def hilbert_speed(tables: Tables) -> Outcome:
    """16,384 tokens in order of a Hilbert curve against row by row, one device, the same pattern: the speed"""
    text = "the pattern computes as many pairs in every order, and an order moves rows; speed"
    return of_ratio(speedup(tables, "hilbert", ("rows", "one"), ("Hilbert", "one")), text, least=1.0)


def hilbert_ranks(tables: Tables) -> Outcome:
    """the same on 2 ranks, whose rows are in the order before the call"""
    return of_ratio(speedup(tables, "hilbert", ("rows", "two ranks"), ("Hilbert", "two ranks")), "speed", least=0.8)


CONDITIONS = (
    all_exact, baseline_exact, two_ranks_exact, bucketed_exact, ring_memory, dense_memory, dense_memory_two_over_one,
    ring_speed, efficiency, work_of_ranks, small_overhead, batches, batch_efficiency, sequence_of_one,
    batch_or_sequence, dilation_longest, dilation_above_work, segments_longest, dilation_on_ranks,
    dilation_everywhere, two_over_one_dense, reached, far_memory, longest_exact, allocated, blocks_exact,
    hilbert_speed, hilbert_ranks,
)  # fmt: skip

"""The tables of the command ``plan``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from rich.table import Table

from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.workbench.plan import PlanReport, ScalePoint
from dilated_attention_pytorch.workbench.plan_measure import Measured
from dilated_attention_pytorch.workbench.plan_memory import MemoryParts
from dilated_attention_pytorch.workbench.plan_settings import PlanSettings
from dilated_attention_pytorch.workbench.plan_time import TimeParts

_PARTS = {
    "query": "query", "key": "key", "value": "value", "out": "out", "lse": "lse",
    "partials": "partial results, sums, statistics", "buffers": "buffers of messages",
    "gradients": "gradients of out, query, key, value", "weights": "weights", "weight_gradients": "gradients of weights",
    "optimizer": "optimizer", "activations": "activations of layers",
}  # fmt: skip


def bytes_text(size: float) -> str:
    """A number of bytes with its unit, in powers of 1,000 as on data sheets.

    >>> bytes_text(141e9), bytes_text(2.5e6), bytes_text(12)
    ('141.00 GB', '2.50 MB', '12 B')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.2f} {unit}"
    return f"{size:,.0f} B"


def seconds_text(seconds: float) -> str:
    """A time with three digits.

    >>> seconds_text(0.0312), seconds_text(12.34), seconds_text(0.000012), seconds_text(0)
    ('31.2 ms', '12.3 s', '12.0 us', '0 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            value = seconds / factor
            digits = 0 if value >= 100 else 1 if value >= 10 else 2
            return f"{value:,.{digits}f} {unit}"
    return "0 s"


def call_title(settings: PlanSettings) -> str:
    """What is planned, in one line."""
    gpus = f"{settings.gpus:,} GPU{'s' * (settings.gpus > 1)} {settings.machine.gpu.name}"
    heads = f"{settings.heads} heads" if settings.key_heads == settings.heads else (
        f"{settings.heads} heads, {settings.key_heads} key heads"
    )  # fmt: skip
    what = "one call" if settings.model is None else f"{settings.model.num_layers} layers"
    mode = f"{', causal' * settings.is_causal}{', training' * settings.train}"
    tokens = f"{settings.batch} x " * (settings.batch > 1) + f"{settings.tokens:,} tokens"
    return f"{tokens}, {heads} of size {settings.head_dim}, {settings.dtype}, {what}{mode}, on {gpus}"


def _time_text(x: TimeParts) -> str:
    named = (
        ("own tiles", x.compute), ("tiles of messages", x.remote), ("memory", x.memory), ("linear", x.linear),
        ("waiting", x.exposed),
    )  # fmt: skip
    parts = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in named if seconds)
    sent = f"; messages {seconds_text(x.communication)}" if x.communication else ""
    return f"{seconds_text(x.total)} ({parts}{sent})"


def _summary(found: PlanReport) -> Iterator[tuple[str, str]]:
    settings, said, work = found.settings, found.explanation, found.work
    if isinstance(settings.pattern, Dilated):
        yield "pattern", ", ".join(f"{w:,}/{r:,}" for w, r in settings.pattern.branches) + " (segment/rate)"
    else:
        yield "pattern", str(said.blocks)
    refused = "".join(f"; not {name}: {reasons[0]}" for name, reasons in said.refused)
    yield "backend", f"{found.backend}{refused}"
    share = said.pairs / said.dense_pairs if said.dense_pairs else 0.0
    backward = f", {said.backward_flops / 1e12:,.2f} backward" if settings.train else ""
    yield "work", f"{said.forward_flops / 1e12:,.2f} TFLOP forward{backward}, {share:.4%} of dense, a layer"
    if work.transport is None:
        yield "messages", found.reason
    else:
        yield "transport", f"{work.transport}: {found.reason}" if work.received else found.reason
    if work.received:
        yield (
            "messages",
            f"rank {work.rank} receives {bytes_text(work.received)} in a forward, {bytes_text(work.received_near)} of it "
            f"inside its node, and waits {work.messages:,} time{'s' * (work.messages != 1)}; "
            f"{bytes_text(work.backward_received)} in a backward",
        )
        machine = settings.machine
        yield "links", ", ".join(f"{x.name} {bytes_text(x.bandwidth)}/s" for x in (machine.inside, machine.between))
    yield "forward", _time_text(found.forward)
    if found.backward is not None:
        yield "backward", _time_text(found.backward)
    if found.step is not None:
        yield "training step" if settings.train else "all layers", _time_text(found.step)
    yield "tokens/s", f"{settings.batch * settings.tokens / max(found.seconds, 1e-12):,.0f}"
    memory = settings.machine.gpu.memory
    yield "memory", f"{bytes_text(found.memory.total)} of {bytes_text(memory)} ({found.memory.total / memory:.1%})"
    yield "longest that fits", "not known" if found.longest is None else f"{found.longest:,} tokens"


def summary_table(found: PlanReport) -> Table:
    """The figures, one per line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in _summary(found):
        table.add_row(*row)
    return table


def memory_table(found: PlanReport) -> Table:
    """The memory of the rank by component, without those that it does not have."""
    table = Table(box=None, pad_edge=False)
    table.add_column(f"memory of rank {found.work.rank}")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    total = max(1, found.memory.total)
    for field in fields(MemoryParts):
        size = getattr(found.memory, field.name)
        if size:
            table.add_row(_PARTS[field.name], bytes_text(size), f"{size / total:.1%}")
    table.add_row("together", bytes_text(found.memory.total), "100.0%")
    return table


def scale_table(points: Sequence[ScalePoint]) -> Table:
    """One line for each number of GPUs."""
    table = Table(box=None, pad_edge=False)
    for name in ("GPUs", "time", "speed-up", "memory", "received", "transport", "longest that fits"):
        table.add_column(name, justify="right", no_wrap=True)
    for x in points:
        faster, longest = points[0].seconds / max(x.seconds, 1e-12), "-" if x.longest is None else f"{x.longest:,}"
        table.add_row(
            f"{x.gpus:,}", seconds_text(x.seconds), f"{faster:,.1f}", bytes_text(x.memory), bytes_text(x.received),
            x.transport or "-", longest,
        )  # fmt: skip
    return table


def measured_table(measured: Measured) -> Table:
    """Measured rates beside those that the table of GPUs gives."""
    table = Table(box=None, pad_edge=False, title=f"measured on {measured.device}", title_justify="left")
    for name in ("rate", "measured", "from the table"):
        table.add_column(name, justify="left" if name == "rate" else "right")
    for x in measured.rates:
        table.add_row(x.name, f"{x.measured:,.4g}", "-" if x.table is None else f"{x.table:,.4g}")
    return table

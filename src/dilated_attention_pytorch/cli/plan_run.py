"""What the command ``plan`` does: the plan, its tables, its JSON and its picture."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dilated_attention_pytorch.cli.demo import choose_device
from dilated_attention_pytorch.cli.outputs import Outputs, end, versions
from dilated_attention_pytorch.cli.plan_options import PlanOptions, given, make_settings
from dilated_attention_pytorch.cli.plan_tables import (
    bytes_text,
    call_title,
    measured_table,
    memory_table,
    scale_table,
    summary_table,
)
from dilated_attention_pytorch.cli.progress import show_progress
from dilated_attention_pytorch.cli.streams import interruptible
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.workbench.plan import PlanReport, ScalePoint, make_report, powers, scale
from dilated_attention_pytorch.workbench.plan_measure import MEASUREMENTS, Measured, measure_machine
from dilated_attention_pytorch.workbench.plan_settings import MOST_GPUS, PlanSettings
from dilated_attention_pytorch.workbench.suggest import Suggestion, figures, pattern_warnings, suggest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_plan(options: PlanOptions) -> None:
    """Plan, or suggest a pattern."""
    outputs = Outputs(options.json, options.plot, options.quiet)
    try:
        settings = make_settings(options)
        device = choose_device(options.device) if options.measure else None
        if options.suggest and options.plot is not None:
            raise ValueError("--plot draws a plan: leave out --suggest")
        if options.device is not None and not options.measure:
            raise ValueError("--device is measured: give --measure as well, or name a GPU by --gpu")
        outputs.check()
    except (TypeError, ValueError) as error:
        end(error, 2)
    console = outputs.console()
    if options.suggest:
        _suggest(options, settings, outputs, console)
        return
    points: list[ScalePoint] = []
    measured = None
    try:
        with interruptible():
            if device is not None:
                measured = _measure(settings, device, console, quiet=options.quiet)
                settings = replace(settings, machine=measured.machine)
            counts = _counts(settings, every=options.scale or options.plot is not None)
            with show_progress(console, len(counts), "{:,} steps", quiet=options.quiet) as report:
                for point in _points(settings, counts):
                    points.append(point)
                    report(len(points), lambda: f"{points[-1].gpus:,} GPUs")
            found = make_report(settings, tuple(points))
    except KeyboardInterrupt:
        console.print(scale_table(points))
        end(f"Interrupted: {len(points)} numbers of GPUs are planned.", 130)
    except torch.OutOfMemoryError as error:
        end(f"--measure needs more memory than is free: {error}", 1)
    except ValueError as error:
        end(error, 2)
    _show(found, measured, console)
    outputs.write(_json(options, found, measured))
    outputs.draw(lambda: _picture(found))
    if not found.fits:
        end(_does_not_fit(found), 1)


def _counts(settings: PlanSettings, *, every: bool) -> tuple[int, ...]:
    """The numbers of GPUs to show: powers of two up to all, or up to those asked for; of many only powers of four."""
    shown = powers(MOST_GPUS if every else settings.gpus)
    shown = shown[::2] if not every and len(shown) > 7 else shown
    return tuple(x for x in sorted({*shown, settings.gpus}) if x <= settings.tokens)


def _points(settings: PlanSettings, counts: tuple[int, ...]) -> Any:
    """Block-sparse patterns by content are planned on one GPU."""
    adaptive = not isinstance(settings.pattern, Dilated) and settings.pattern.is_adaptive
    return scale(settings, tuple(x for x in counts if x == 1 or not adaptive))


def _measure(settings: PlanSettings, device: torch.device, console: Console, *, quiet: bool) -> Measured:
    found = None
    with show_progress(console, MEASUREMENTS, "step {:,}", quiet=quiet) as report:
        for number, (name, found) in enumerate(measure_machine(settings, device)):  # noqa: B007
            report(number, lambda name=name: name)  # type: ignore[misc]
    assert found is not None
    return found


def _show(found: PlanReport, measured: Measured | None, console: Console) -> None:
    console.print(call_title(found.settings), soft_wrap=True)
    if measured is not None:
        console.print(measured_table(measured))
    console.print(summary_table(found))
    console.print()
    console.print(memory_table(found))
    console.print()
    console.print(scale_table(found.scaling))
    for text in found.warnings:
        console.print(f"warning: {text}", soft_wrap=True)


def _does_not_fit(found: PlanReport) -> str:
    """What would fit."""
    settings, gpu = found.settings, found.settings.machine.gpu
    text = (
        f"Does not fit: a rank needs {bytes_text(found.memory.total)}, and a GPU {gpu.name} has {bytes_text(gpu.memory)}. "
    )
    more = next((x.gpus for x in found.scaling if x.gpus > settings.gpus and x.memory <= gpu.memory), None)
    if more is None:
        with_more = (x for x in scale(settings, powers(MOST_GPUS)) if x.gpus > settings.gpus and x.memory <= gpu.memory)
        more = next((x.gpus for x in with_more), None) if isinstance(settings.pattern, Dilated) else None
    ways = [] if more is None else [f"{more:,} GPUs for {settings.tokens:,} tokens"]
    if found.longest:
        ways.append(f"{found.longest:,} tokens on {settings.gpus:,} GPU{'s' * (settings.gpus > 1)}")
    if not ways:
        return f"{text}Nothing fits up to {MOST_GPUS:,} GPUs; use a GPU with more memory, or a smaller model."
    return f"{text}What fits: {', or '.join(ways)}."


def _picture(found: PlanReport) -> Figure:
    from dilated_attention_pytorch.cli.plan_picture import plan_picture  # imports matplotlib

    gpu, call = found.settings.machine.gpu, call_title(found.settings).rpartition(", on ")[0]
    return plan_picture(found.scaling, f"{call}, on GPUs {gpu.name}", gpu.memory)


def _json(options: PlanOptions, found: PlanReport, measured: Measured | None) -> dict[str, Any]:
    """All figures of a plan."""
    settings, work, said = found.settings, found.work, found.explanation
    pattern = settings.pattern
    return {
        "versions": versions(),
        "device": settings.machine.gpu.name if measured is None else measured.device,
        "options": given(options),
        "pattern": list(map(list, pattern.branches)) if isinstance(pattern, Dilated) else str(pattern.config),
        "gpu": asdict(settings.machine.gpu),
        "links": {"inside": asdict(settings.machine.inside), "between": asdict(settings.machine.between)},
        "measured": None if measured is None else [asdict(x) for x in measured.rates],
        "backend": {"name": found.backend, "refused": {name: list(reasons) for name, reasons in said.refused}},
        "work": {
            "pairs": said.pairs,
            "dense_pairs": said.dense_pairs,
            "forward_flops": said.forward_flops,
            "backward_flops": said.backward_flops,
            "rank_pairs": sum(x.pairs for x in (*work.own, *work.remote)),
        },
        "rank": work.rank,
        "memory_bytes": asdict(found.memory) | {"total": found.memory.total},
        "fits": found.fits,
        "longest_tokens": found.longest,
        "messages": {
            "transport": work.transport,
            "reason": found.reason,
            "forward_bytes": work.received,
            "forward_bytes_inside_node": work.received_near,
            "backward_bytes": work.backward_received,
            "waits": work.messages,
        },
        "seconds": {
            "asked": found.seconds,
            "forward": asdict(found.forward) | {"total": found.forward.total},
            "backward": None if found.backward is None else asdict(found.backward) | {"total": found.backward.total},
            "model": None if found.step is None else asdict(found.step) | {"total": found.step.total},
        },
        "scaling": [asdict(point) for point in found.scaling],
        "warnings": list(found.warnings),
    }


def _suggest(options: PlanOptions, settings: PlanSettings, outputs: Outputs, console: Console) -> None:
    """Propose a pattern. A pattern that is given is shown with its warnings in front of it."""
    proposal = suggest(settings.tokens, settings.key_heads, is_causal=settings.is_causal)
    given_pattern = settings.pattern if options.segments is not None and isinstance(settings.pattern, Dilated) else None
    warnings: tuple[str, ...] = ()
    if given_pattern is not None:
        own, share = figures(given_pattern, settings.tokens, settings.key_heads, is_causal=settings.is_causal)
        warnings = pattern_warnings(given_pattern, settings.tokens, settings.key_heads)
        console.print(_branches(Suggestion(given_pattern, settings.tokens, settings.key_heads, own, (), share), "given"))
        for text in warnings or ("nothing is unusual",):
            console.print(f"warning: {text}" if warnings else text, soft_wrap=True)
        console.print()
    console.print(_branches(proposal, "suggested"))
    lengths, rates = (",".join(map(str, x)) for x in (proposal.pattern.segment_lengths, proposal.pattern.dilation_rates))
    console.print(f"--segments {lengths} --rates {rates}", soft_wrap=True)
    for text in proposal.reasons:
        console.print(f"* {text}", soft_wrap=True)
    suggestion = asdict(proposal) | {"pattern": list(map(list, proposal.pattern.branches))}
    outputs.write({"versions": versions(), "suggestion": suggestion, "warnings": list(warnings)})
    if options.quiet and options.json is None:
        typer.echo(f"--segments {lengths} --rates {rates}")


def _branches(proposal: Suggestion, name: str) -> Table:
    title = f"{name}: {proposal.tokens:,} tokens, {proposal.key_heads} key heads, {proposal.dense_share:.3%} of dense"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for column in ("segment", "rate", "tile rows", "pairs per row", "cost", "read", "reach"):
        table.add_column(column, justify="right", no_wrap=True)
    for x in proposal.branches:
        table.add_row(
            f"{x.segment_length:,}", f"{x.dilation_rate:,}", f"{x.tile_rows:,}", f"{x.pairs_per_row:,.1f}",
            f"{x.cost:.1%}", f"{x.coverage:.1%}", f"{x.reach:,}",
        )  # fmt: skip
    return table

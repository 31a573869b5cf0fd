"""The command ``profile``: its progress, and what it prints and writes of the results."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from dilated_attention_pytorch.cli.outputs import (
    Outputs,
    check_file,
    device_name,
    end,
    parse_count,
    parse_integers,
    reported,
    versions,
    write_file,
)
from dilated_attention_pytorch.cli.profile_options import ProfileOptions
from dilated_attention_pytorch.cli.progress import show_progress
from dilated_attention_pytorch.cli.streams import interruptible
from dilated_attention_pytorch.cli.train_run import process_group
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.streaming import default_pattern
from dilated_attention_pytorch.workbench.processes import ProcessError
from dilated_attention_pytorch.workbench.profile_run import model_config, profile_call, profile_ranks
from dilated_attention_pytorch.workbench.profile_values import DTYPES, ProfileResult, ProfileSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TOKENS = {"cpu": 8192, "cuda": 2**18}
_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
_MOST_RANKS = 64
_OF_CALL = ("tokens", "heads", "head_dim", "segment_lengths", "dilation_rates", "backend")


def make_settings(options: ProfileOptions, device: torch.device) -> ProfileSettings:
    """The settings that the options describe. Raise a ValueError if one of them is not valid."""
    name = options.dtype or _DTYPE[device.type]
    if name not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    if options.top < 1:
        raise ValueError(f"--top must be at least 1, got {options.top}")
    if options.ranks is not None and not 1 <= options.ranks <= _MOST_RANKS:
        raise ValueError(f"--ranks must be from 1 to {_MOST_RANKS}, got {options.ranks}; each is a process of this machine")
    dtype: torch.dtype = getattr(torch, name)
    if options.preset is not None:
        given = [f"--{x.replace('_', '-')}" for x in _OF_CALL if getattr(options, x) is not None]
        given += [f"--{x}" for x in ("causal", "backward") if getattr(options, x)]
        if given:
            raise ValueError(f"--preset has a pattern and sizes of its own: leave out {', '.join(given)}")
        model_config(options.preset)
        context = parse_count("--context", options.context or "1024")
        if context < 1:
            raise ValueError(f"--context must be at least 1, got {options.context}")
        return ProfileSettings(device=device, dtype=dtype, tokens=context, preset=options.preset)
    if options.context is not None:
        raise ValueError("--context is of a training step: give --preset as well, or use --tokens")
    tokens = _TOKENS[device.type] if options.tokens is None else parse_count("--tokens", options.tokens)
    return ProfileSettings(
        device=device, dtype=dtype, tokens=tokens, pattern=_pattern(options, tokens),
        heads=8 if options.heads is None else options.heads, head_dim=64 if options.head_dim is None else options.head_dim,
        is_causal=options.causal, backward=options.backward, backend=options.backend or "auto",
    )  # fmt: skip


def _pattern(options: ProfileOptions, tokens: int) -> Dilated:
    lengths, rates = options.segment_lengths, options.dilation_rates
    if (lengths is None) != (rates is None):
        raise ValueError("--segment-lengths and --dilation-rates describe branches pairwise: give both or neither")
    if lengths is None or rates is None:
        return default_pattern(tokens)
    return Dilated(parse_integers("--segment-lengths", lengths), parse_integers("--dilation-rates", rates))


def run_profile(options: ProfileOptions) -> None:
    """Run the command. Under torchrun, every process is a rank, and the first one prints and writes."""
    with _endings(), process_group(options.device) as device:
        settings = make_settings(options, device)
        world = dist.get_world_size() if dist.is_initialized() else 1
        first = world == 1 or dist.get_rank() == 0
        if world > 1 and options.ranks is not None:
            raise ValueError(f"--ranks starts processes, and torchrun has started {world}: leave out --ranks")
        outputs = Outputs(options.json if first else None, options.plot if first else None, options.quiet or not first)
        outputs.check()
        if options.trace is not None and first:
            with reported(options.trace):
                check_file(options.trace)
        console = outputs.console()
        results = _profile(options, settings, console, quiet=outputs.quiet)
        if not first:
            return
        _print(settings, results, console)
        outputs.write({
            "command": "profile", "versions": versions(), "device": device_name(device),
            "settings": settings.description(), "ranks": [x.figures() for x in results],
        })  # fmt: skip
        outputs.draw(lambda: _picture(settings, results))


@contextlib.contextmanager
def _endings() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        end("Interrupted: the profile is not finished, and nothing was written.", 130)
    except ProcessError as error:
        end(error, 1)
    except (TypeError, ValueError) as error:
        end(error, 2)
    except torch.OutOfMemoryError as error:
        end(f"The device has too little memory; use fewer tokens: {error}", 1)


def _profile(options: ProfileOptions, settings: ProfileSettings, console: Console, *, quiet: bool) -> list[ProfileResult]:
    """The results of all ranks, in their order. The trace is written."""
    world = dist.get_world_size() if dist.is_initialized() else options.ranks or 1
    first = not dist.is_initialized() or dist.get_rank() == 0
    with (
        tempfile.TemporaryDirectory() as folder,
        interruptible(),
        show_progress(console, world, "rank {:,}", quiet=quiet) as report,
    ):
        trace = Path(folder, "trace.json") if options.trace is not None and first else None
        report(0, "a call that is not counted, and the profile".__str__)
        found: list[ProfileResult] = []
        if dist.is_initialized():
            own = profile_call(settings, dist.group.WORLD, options.top, trace)
            gathered: list[ProfileResult | None] = [None] * world
            dist.all_gather_object(gathered, own)
            found = [x for x in gathered if x is not None]
        elif world == 1:
            found.append(profile_call(settings, None, options.top, trace))
        else:
            for result in profile_ranks(settings, world, options.top, trace):
                found.append(result)
                report(len(found), f"rank {result.rank} is finished".__str__)
        if trace is not None and options.trace is not None:
            with reported(options.trace):
                write_file(options.trace, lambda unfinished: shutil.copyfile(trace, unfinished))
    return sorted(found, key=lambda x: x.rank)


def _picture(settings: ProfileSettings, results: Sequence[ProfileResult]) -> Figure:
    from dilated_attention_pytorch.cli.profile_picture import profile_picture  # imports matplotlib

    return profile_picture(results[0], _title(settings, len(results)))


def _title(settings: ProfileSettings, world: int) -> str:
    dtype = str(settings.dtype).removeprefix("torch.")
    ranks = f", {world} ranks" if world > 1 else ""
    if settings.preset is not None:
        what = f"training step of {settings.preset}, context {settings.tokens:,}"
    else:
        both = "forward and backward" if settings.backward else "forward"
        what = f"{both}, {settings.tokens:,} tokens, {settings.heads} heads of size {settings.head_dim}"
        what += ", causal" if settings.is_causal else ""
    return f"{what}, {dtype}, {device_name(settings.device)}{ranks}"


def _print(settings: ProfileSettings, results: Sequence[ProfileResult], console: Console) -> None:
    console.print(_title(settings, len(results)), soft_wrap=True)
    for result in results:
        where = f" of rank {result.rank}" if len(results) > 1 else ""
        console.print(f"\nmemory{where}, MiB")
        console.print(_memory_table(result))
        if result.communication is not None:
            sent = result.communication
            console.print(
                f"messages{where}: {sent.messages}, in flight {_ms(sent.in_flight_seconds)} ms, of which operators ran in "
                f"{_ms(sent.overlapped_seconds)} ms ({sent.overlap:.0%})",
                soft_wrap=True,
            )
    result = results[0]
    where = " of rank 0" if len(results) > 1 else ""
    console.print(f"\noperators{where} by their own time; {_ms(result.seconds)} ms in all, with the profiler")
    console.print(_operator_table(result))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f}"


def _plain_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))


def _memory_table(result: ProfileResult) -> Table:
    """The components when the memory of the call was largest, and the most of each."""
    table, memory = _plain_table(), result.memory
    for name in ("component", "at the peak", "at most"):
        table.add_column(name, justify="left" if name == "component" else "right", no_wrap=True)
    for name, size in result.made_before:
        table.add_row(f"{name} (made before)", _mib(size), _mib(size))
    largest = [max((sizes[i] for sizes in memory.sizes), default=0) for i in range(len(memory.names))]
    for name, size, most in zip(memory.names, memory.peak, largest, strict=True):
        table.add_row(name, _mib(size), _mib(most))
    table.add_row("allocated by the call", _mib(memory.peak_bytes), "")
    return table


def _operator_table(result: ProfileResult) -> Table:
    table, total = _plain_table(), max(result.seconds, 1e-9)
    for name in ("operator", "calls", "ms", "share"):
        table.add_column(name, justify="left" if name == "operator" else "right", no_wrap=name != "operator")
    for row in result.operators:
        table.add_row(row.name, f"{row.calls:,}", _ms(row.seconds), f"{row.seconds / total:.1%}")
    return table

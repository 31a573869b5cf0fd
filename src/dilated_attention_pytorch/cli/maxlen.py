"""The command ``maxlen``: its options, its progress and what it prints and writes of the results."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dilated_attention_pytorch.cli.demo import choose_device
from dilated_attention_pytorch.cli.outputs import Outputs, device_name, end, parse_count, parse_integers, versions
from dilated_attention_pytorch.cli.streams import interruptible
from dilated_attention_pytorch.explain import explain
from dilated_attention_pytorch.measure import available_memory
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.models.presets import PRESETS
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.streaming import DTYPES
from dilated_attention_pytorch.workbench.maxlen import Bounds, TryResult, TrySettings, search
from dilated_attention_pytorch.workbench.tries import Tries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_START = {"cpu": 4096, "cuda": 65_536}
_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
_DECODERS = tuple(name for name, fields in PRESETS.items() if fields.get("vocab_size"))
_OF_ATTENTION = ("heads", "head_dim", "segment_lengths", "dilation_rates", "backend", "against")


@dataclass(frozen=True, slots=True)
class MaxlenOptions:
    """The options as they are given. Typer reads the fields."""

    train: Annotated[bool, typer.Option("--train", help="Forward and backward instead of a forward.")] = False
    causal: Annotated[bool, typer.Option("--causal", help="A token sees itself and earlier tokens only.")] = False
    heads: Annotated[int | None, typer.Option(help="The number of heads. By default 8.")] = None
    head_dim: Annotated[int | None, typer.Option(help="The size of a head. By default 64.")] = None
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}. By default bfloat16, float32 on a CPU.")] = None
    segment_lengths: Annotated[
        str | None, typer.Option(help="The pattern: integers separated by commas. By default 2048 * 4**i for each length.")
    ] = None
    dilation_rates: Annotated[str | None, typer.Option(help="As many integers as segment lengths.")] = None
    backend: Annotated[str | None, typer.Option(help="A backend of attention(). By default auto.")] = None
    preset: Annotated[str | None, typer.Option(help=f"A decoder instead of attention: {', '.join(_DECODERS)}.")] = None
    against: Annotated[str | None, typer.Option(help="dense: search for PyTorch's dense attention as well.")] = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:NUMBER. By default the GPU, if any.")] = None
    memory: Annotated[
        str | None, typer.Option(help="For one try, such as 2GiB. By default half of what is free, and all of a GPU.")
    ] = None
    seconds: Annotated[float, typer.Option(help="The longest time of one try, without the start of its process.")] = 60.0
    start: Annotated[str | None, typer.Option(help="The first length, such as 64k.")] = None
    precision: Annotated[float, typer.Option(help="The width of the last interval, as a share of the length.")] = 0.05
    json: Annotated[str | None, typer.Option(help="A file for all figures, or - for standard output.")] = None
    plot: Annotated[Path | None, typer.Option(help="A .png or .svg file: memory and time of all tries.")] = None
    quiet: Annotated[bool, typer.Option("--quiet", help="Print neither progress nor tables.")] = False


def maxlen(**options: Any) -> None:
    """Find the longest sequence that runs on this device, by bisection.

    Each length is tried in a child process, so that running out of memory is a result. Too slow is a result too. The memory
    of a try includes query, key, value and, with --train, all gradients.

    \b
    Examples:
      dilated-attention maxlen
      dilated-attention maxlen --train --causal --heads 16 --head-dim 128
      dilated-attention maxlen --memory 2GiB --against dense --plot maxlen.png
      dilated-attention maxlen --preset tiny --train --seconds 20 --json -
    """
    _run(MaxlenOptions(**options))


maxlen.__signature__ = inspect.signature(MaxlenOptions, eval_str=True)  # type: ignore[attr-defined]


def _run(options: MaxlenOptions) -> None:
    outputs = Outputs(options.json, options.plot, options.quiet)
    try:
        searches, start = make_settings(options)
        kernel = _kernel(searches[0])
        outputs.check()
    except (TypeError, ValueError) as error:
        end(error, 2)
    console = outputs.console()
    console.print(_title(searches[0], kernel), soft_wrap=True)
    found: dict[str, list[TryResult]] = {settings.method: [] for settings in searches}
    interrupted = False
    try:
        with interruptible():
            for settings in searches:
                _search(settings, start, options, found[settings.method])
    except KeyboardInterrupt:
        interrupted = True
    console.print(_table(found))
    outputs.write(_figures(searches, found, kernel, finished=not interrupted))
    for method, tries in found.items():
        if tries:
            console.print(_sentence(method, tries, several=len(found) > 1), soft_wrap=True)
    if interrupted:
        count = sum(map(len, found.values()))
        end(f"Interrupted: {count} tries are finished. The bounds are those found so far.", 130)
    outputs.draw(lambda: _picture(searches[0], found))
    if Bounds.of(found["dilated"]).longest is None:
        raise typer.Exit(1)


def make_settings(options: MaxlenOptions) -> tuple[tuple[TrySettings, ...], int]:
    """The searches that the options describe, and the first length. Raise a ValueError if an option is not valid."""
    device = choose_device(options.device)
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())  # a limit of memory is one of a numbered GPU
    if device.type == "cpu" and sys.platform != "linux":
        raise ValueError(f"maxlen on a CPU needs Linux, which limits the memory of a process, got {sys.platform}")
    _check_preset(options)
    if options.against not in (None, "dense"):
        raise ValueError(f"--against must be dense, got {options.against!r}")
    dtype = options.dtype or _DTYPE[device.type]
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if not 0.0 <= options.precision < 1.0:
        raise ValueError(f"--precision must be a share from 0 to below 1, got {options.precision}")
    start = _START[device.type] if options.start is None else parse_count("--start", options.start)
    if not 1 <= start <= 2**40:
        raise ValueError(f"--start must be from 1 to 2**40 tokens, got {start}")
    settings = TrySettings(
        heads=8 if options.heads is None else options.heads, head_dim=64 if options.head_dim is None else options.head_dim,
        dtype=dtype, device=str(device), is_causal=options.causal or options.preset is not None, train=options.train,
        backend=options.backend or "auto", pattern=_branches(options), preset=options.preset,
        memory=_memory(options.memory, device), seconds=options.seconds,
    )  # fmt: skip
    searches = [settings] if options.against is None else [settings, replace(settings, method="dense", backend="auto")]
    return tuple(searches), start


def _check_preset(options: MaxlenOptions) -> None:
    if options.preset is None:
        return
    if options.preset not in _DECODERS:
        raise ValueError(f"--preset must be a decoder, one of {', '.join(_DECODERS)}, got {options.preset!r}")
    given = [f"--{name.replace('_', '-')}" for name in _OF_ATTENTION if getattr(options, name) is not None]
    if given:
        raise ValueError(f"{', '.join(given)} belong to one attention call, and --preset {options.preset} is a model")
    if options.dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"--preset runs in float32 or under autocast to bfloat16, got --dtype {options.dtype}")


def _branches(options: MaxlenOptions) -> tuple[tuple[int, int], ...] | None:
    if (options.segment_lengths is None) != (options.dilation_rates is None):
        raise ValueError("--segment-lengths and --dilation-rates describe branches pairwise: give both or neither")
    if options.segment_lengths is None or options.dilation_rates is None:
        return None
    lengths, rates = options.segment_lengths, options.dilation_rates
    return Dilated(parse_integers("--segment-lengths", lengths), parse_integers("--dilation-rates", rates)).branches


def _memory(text: str | None, device: torch.device) -> int | None:
    """The bytes for a try; None for all of a GPU. Half of what is free on the host leaves the rest to other programs."""
    if text is not None:
        number = re.fullmatch(r"([\d.]+[kmg]i?)b?", text.strip(), re.IGNORECASE)
        if number is None:
            raise ValueError(f"--memory must be a size with a unit, such as 512MiB or 2GiB, got {text!r}")
        size = parse_count("--memory", number[1])
        if size < 2**20:
            raise ValueError(f"--memory must be at least 1MiB, got {text!r}")
        return size
    if device.type == "cuda":
        return None
    free = available_memory()
    if free is None:
        raise ValueError("the free memory of this machine is not known; give the memory of a try, such as --memory 2GiB")
    return free // 2


def _kernel(settings: TrySettings) -> str:
    """What computes the attention, or a ValueError with every reason why the backend cannot."""
    if settings.preset is not None:
        config = LongNetConfig.preset(settings.preset)
        pattern, heads, head_dim = config.pattern, config.num_heads, config.head_dim
    else:
        branches = settings.pattern or ((2048, 1),)
        pattern = Dilated([w for w, _ in branches], [r for _, r in branches])
        heads, head_dim = settings.heads, settings.head_dim
    x = torch.empty(1, 1, heads, head_dim, dtype=getattr(torch, settings.dtype), device="meta")
    found = explain(x, x, x, pattern, is_causal=settings.is_causal, backend=settings.backend, device=settings.device)
    return f"{found.backend}: {found.kernel}"


def _search(settings: TrySettings, start: int, options: MaxlenOptions, tries: list[TryResult]) -> None:
    """Append the tries of a search to a list, and show each one on standard error."""
    shown = Console(stderr=True, highlight=False, quiet=options.quiet, soft_wrap=True)
    status = shown.status("starting") if shown.is_terminal and not options.quiet else None
    with Tries(settings) as children:

        def run(tokens: int) -> TryResult:
            if status is not None:
                status.update(f"{settings.method}: {tokens:,} tokens")
                with status:
                    return children.run(tokens)
            return children.run(tokens)

        for result in search(run, start, options.precision):
            tries.append(result)
            shown.print(f"{settings.method}: {_line(result)}")


def _line(result: TryResult) -> str:
    memory = "" if result.memory_bytes is None else f", {_mib(result.memory_bytes)}"
    seconds = "" if result.seconds is None else f", {result.seconds:,.2f} s"
    return f"{result.tokens:>13,} tokens  {result.outcome}{memory}{seconds}"


def _sentence(method: str, tries: Sequence[TryResult], *, several: bool) -> str:
    bounds = Bounds.of(tries)
    name = f"{method}: " if several else ""
    if bounds.longest is None:
        ran = "no length ran"
    else:
        memory = "" if bounds.longest.memory_bytes is None else f" in {_mib(bounds.longest.memory_bytes)}"
        seconds = "" if bounds.longest.seconds is None else f" and {bounds.longest.seconds:,.2f} s"
        ran = f"longest that ran: {bounds.longest.tokens:,} tokens{memory}{seconds}"
    if bounds.failed is None:
        return f"{name}{ran}; no length has failed."
    why = f": {bounds.failed.reason}" if bounds.failed.reason else ""
    return f"{name}{ran}; shortest that failed: {bounds.failed.tokens:,} tokens, {bounds.failed.outcome}{why}."


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _title(settings: TrySettings, kernel: str) -> str:
    device = torch.device(settings.device)
    what = "forward and backward" if settings.train else "forward"
    if settings.preset is not None:
        work = f"{what} of the decoder {settings.preset}, {settings.dtype}"
    else:
        causal = ", causal" if settings.is_causal else ""
        heads = f"{settings.heads} head{'s' * (settings.heads != 1)} of size {settings.head_dim}"
        work = f"{what}, {heads}, {settings.dtype}{causal}"
    memory = "all memory" if settings.memory is None else f"at most {_mib(settings.memory)}"
    return f"{work}, {device_name(device)}, {memory} and {settings.seconds:g} s for a try, {kernel}"


def _table(found: dict[str, list[TryResult]]) -> Table:
    """All tries by length. A figure that a try does not have is a dash."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    several = len(found) > 1
    for name in (*(["method"] * several), "tokens", "outcome", "memory", "seconds"):
        table.add_column(name, justify="left" if name in ("method", "outcome") else "right", no_wrap=True)
    for method, tries in found.items():
        for x in sorted(tries, key=lambda x: x.tokens):
            memory = "-" if x.memory_bytes is None else _mib(x.memory_bytes)
            seconds = "-" if x.seconds is None else f"{x.seconds:,.3f}"
            table.add_row(*([method] * several), f"{x.tokens:,}", x.outcome, memory, seconds)
    return table


def _figures(
    searches: Sequence[TrySettings], found: dict[str, list[TryResult]], kernel: str, *, finished: bool
) -> dict[str, Any]:  # fmt: skip
    """Everything that is known of a run, for JSON."""
    results = {}
    for method, tries in found.items():
        bounds = Bounds.of(tries)
        longest, failed = (None if x is None else asdict(x) for x in (bounds.longest, bounds.failed))
        results[method] = {"longest": longest, "shortest_failed": failed, "tries": [asdict(x) for x in tries]}
    settings = {name: value for name, value in asdict(searches[0]).items() if name != "method"}
    device = torch.device(searches[0].device)
    return {
        "versions": versions(), "device": device_name(device), "settings": settings, "kernel": kernel,
        "finished": finished, "results": results,
    }  # fmt: skip


def _picture(settings: TrySettings, found: dict[str, list[TryResult]]) -> Figure:
    from dilated_attention_pytorch.cli.maxlen_picture import maxlen_picture  # imports matplotlib

    return maxlen_picture(found, settings)

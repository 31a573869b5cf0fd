"""The options of the command ``plan``, and the settings that they describe."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dilated_attention_pytorch.cli.outputs import parse_count, parse_integers
from dilated_attention_pytorch.hardware import GPUS, LINKS, Gpu, find_gpu, find_link
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.models.presets import PRESETS
from dilated_attention_pytorch.patterns.blocks import BlockSparse, SparsePatternConfig
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.workbench.plan_settings import DTYPES, LAYOUTS, TRANSPORTS, Machine, PlanSettings
from dilated_attention_pytorch.workbench.suggest import suggest

_BYTES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options as they are given. Typer reads the fields."""

    tokens: Annotated[str, typer.Option(help="Tokens of a sequence, on all GPUs together: 65536, 10M, 1B or 64Ki.")]
    gpus: Annotated[int, typer.Option(help="The number of GPUs that share a sequence, up to 4096.")] = 1
    gpu: Annotated[str, typer.Option(help=f"{', '.join(GPUS)}.")] = "h100"
    gpu_memory: Annotated[str | None, typer.Option(help="For other GPUs: memory, such as 80GB.")] = None
    gpu_tflops: Annotated[float | None, typer.Option(help="Of dense matrix products in the type of --dtype.")] = None
    gpu_bandwidth: Annotated[str | None, typer.Option(help="Of the memory, per second: 3.3TB.")] = None
    gpu_capability: Annotated[str | None, typer.Option(help="The compute capability: 9.0. By default 8.0.")] = None
    gpus_per_node: Annotated[int, typer.Option(help="GPUs that the link inside a node connects.")] = 8
    link: Annotated[str, typer.Option(help=f"Between nodes: {', '.join(LINKS)}.")] = "ndr"
    heads: Annotated[int | None, typer.Option(help="Query heads. By default 32, or those of --model.")] = None
    kv_heads: Annotated[int | None, typer.Option(help="Key heads. By default as many as query heads.")] = None
    head_dim: Annotated[int | None, typer.Option(help="The size of a head. By default 128, or that of --model.")] = None
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 1
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "bfloat16"
    segments: Annotated[
        str | None,
        typer.Option("--segments", "--segment-lengths", help="Integers separated by commas. By default as --suggest."),
    ] = None
    rates: Annotated[
        str | None, typer.Option("--rates", "--dilation-rates", help="As many integers as segment lengths.")
    ] = None
    blocks: Annotated[str | None, typer.Option(help="A block-sparse pattern instead: local_window, ...")] = None
    ratio: Annotated[float, typer.Option(help="Of --blocks: the share of blocks that is computed.")] = 0.1
    block_size: Annotated[int, typer.Option(help="Of --blocks.")] = 128
    causal: Annotated[bool, typer.Option("--causal", help="A token sees itself and earlier tokens only.")] = False
    train: Annotated[bool, typer.Option("--train", help="With gradients, and the optimizer if there are layers.")] = False
    layers: Annotated[int | None, typer.Option(help="Plan a model of so many layers, not one call.")] = None
    ffn: Annotated[int | None, typer.Option(help="Of --layers: the inner width. By default 4 times the width.")] = None
    vocab: Annotated[int | None, typer.Option(help="Of --layers: token ids.")] = None
    model: Annotated[str | None, typer.Option(help=f"A model by its name: {', '.join(PRESETS)}.")] = None
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help="Compute activations of layers again.")] = False
    layout: Annotated[str, typer.Option(help=f"{', '.join(LAYOUTS)}.")] = "contiguous"
    transport: Annotated[str, typer.Option(help=f"{', '.join(TRANSPORTS)}.")] = "auto"
    suggest: Annotated[bool, typer.Option("--suggest", help="Propose segment lengths and rates, and say why.")] = False
    scale: Annotated[bool, typer.Option("--scale", help="Show 1 to 4096 GPUs, not only up to --gpus.")] = False
    measure: Annotated[bool, typer.Option("--measure", help="Use the rates of this machine, measured in seconds.")] = False
    device: Annotated[str | None, typer.Option(help="Of --measure: cpu, cuda or cuda:NUMBER. By default the GPU.")] = None
    json: Annotated[str | None, typer.Option(help="A file for all figures, or - for standard output.")] = None
    plot: Annotated[Path | None, typer.Option(help="A .png or .svg file: time, memory and bytes over the GPUs.")] = None
    quiet: Annotated[bool, typer.Option("--quiet", help="Print neither progress nor tables.")] = False


def parse_bytes(option: str, text: str) -> float:
    """A number of bytes such as ``80GB``, ``3.3TB`` or ``40GiB``; ``/s`` may follow.

    >>> parse_bytes("--gpu-bandwidth", "3.3TB/s"), parse_bytes("--gpu-memory", "16 GiB")
    (3300000000000.0, 17179869184.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)(?:/s)?", text.strip().lower())
    unit = _BYTES.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) == 0:
        raise ValueError(f"{option} must be a number of bytes above 0 such as 80GB or 3.3TB, got {text!r}")
    return float(found[1]) * unit


def make_machine(options: PlanOptions) -> Machine:
    """The GPUs and links. A GPU that is given by numbers needs all three of them, unless its name is known."""
    numbers = {name: getattr(options, name) for name in ("gpu_memory", "gpu_tflops", "gpu_bandwidth")}
    given = [name for name, x in numbers.items() if x is not None]
    if options.gpu.lower() in GPUS or not given:
        gpu = find_gpu(options.gpu)
    elif len(given) < len(numbers):
        missing = ", ".join(f"--{name.replace('_', '-')}" for name in numbers if name not in given)
        raise ValueError(f"{options.gpu!r} is not a GPU of the table, so its numbers are needed: give {missing} as well")
    else:
        gpu = replace(find_gpu("a100-80"), name=options.gpu, nvlink=None, source="given")
    return Machine(_with_numbers(gpu, options), options.gpus_per_node, find_link(options.link))


def _with_numbers(gpu: Gpu, options: PlanOptions) -> Gpu:
    """A GPU with the numbers that are given."""
    if options.gpu_memory is not None:
        gpu = replace(gpu, memory=int(parse_bytes("--gpu-memory", options.gpu_memory)))
    if options.gpu_bandwidth is not None:
        gpu = replace(gpu, bandwidth=parse_bytes("--gpu-bandwidth", options.gpu_bandwidth))
    if options.gpu_tflops is not None:
        if not 0 < options.gpu_tflops < 10**6:
            raise ValueError(f"--gpu-tflops must be a number above 0, got {options.gpu_tflops}")
        # Exponentials are as fast in proportion.
        peak = options.gpu_tflops * 1e12
        gpu = replace(gpu, clock=gpu.clock * peak / gpu.half, half=peak, tf32=peak / 2, float32=peak / 8)
    if options.gpu_capability is not None:
        found = re.fullmatch(r"(\d+)\.(\d)", options.gpu_capability)
        if found is None:
            raise ValueError(f"--gpu-capability must be two numbers such as 9.0, got {options.gpu_capability!r}")
        gpu = replace(gpu, capability=(int(found[1]), int(found[2])))
    return gpu


def make_settings(options: PlanOptions) -> PlanSettings:
    """The settings that the options describe. Raise a ValueError if one of them is not valid."""
    tokens, config = parse_count("--tokens", options.tokens), _model(options)
    if tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {options.tokens}")
    heads, kv_heads, head_dim = _sizes(options, config)
    if heads < 1 or kv_heads < 1:
        raise ValueError(f"heads must be positive, got {heads} and {kv_heads} key heads")
    # The sizes are checked before a pattern is suggested for them.
    settings = PlanSettings(
        tokens=tokens, pattern=Dilated([1], [1]), heads=heads, kv_heads=kv_heads, head_dim=head_dim, batch=options.batch,
        dtype=options.dtype, is_causal=options.causal, train=options.train, gpus=options.gpus,
        machine=make_machine(options), layout=options.layout, transport=options.transport, model=config,
    )  # fmt: skip
    return replace(settings, pattern=_pattern(options, config, tokens, kv_heads))


def _model(options: PlanOptions) -> LongNetConfig | None:
    """The model, if one is planned; its pattern is not read."""
    if options.model is not None:
        if options.layers is not None or options.ffn is not None or options.vocab is not None:
            raise ValueError("--model has layers, an inner width and a vocabulary; leave out --layers, --ffn and --vocab")
        changes: dict[str, Any] = {"checkpoint_layers": options.checkpoint} if options.checkpoint else {}
        return LongNetConfig.preset(options.model, **changes)
    if options.layers is None:
        for name in ("ffn", "vocab", "checkpoint"):
            if getattr(options, name) not in (None, False):
                raise ValueError(f"--{name} is an option of a model; give --layers or --model as well")
        return None
    heads, head_dim = options.heads or 32, options.head_dim or 128
    return LongNetConfig(
        embed_dim=heads * head_dim, num_layers=options.layers, num_heads=heads, num_kv_heads=options.kv_heads,
        ffn_dim=4 * heads * head_dim if options.ffn is None else options.ffn, vocab_size=options.vocab,
        segment_lengths=(1,), dilation_rates=(1,), checkpoint_layers=options.checkpoint,
    )  # fmt: skip


def _sizes(options: PlanOptions, config: LongNetConfig | None) -> tuple[int, int, int]:
    """Query heads, key heads and head size."""
    if options.model is not None and config is not None:
        if any(x is not None for x in (options.heads, options.kv_heads, options.head_dim)):
            raise ValueError("--model has heads and a head size; leave out --heads, --kv-heads and --head-dim")
        return config.num_heads, config.key_heads, config.head_dim
    heads = 32 if options.heads is None else options.heads
    kv_heads = heads if options.kv_heads is None else options.kv_heads
    return heads, kv_heads, 128 if options.head_dim is None else options.head_dim


def _pattern(options: PlanOptions, config: LongNetConfig | None, tokens: int, key_heads: int) -> Dilated | BlockSparse:
    if (options.segments is None) != (options.rates is None):
        raise ValueError("--segments and --rates describe branches pairwise: give both or neither")
    if options.blocks is not None:
        if options.segments is not None:
            raise ValueError("--blocks and --segments are two patterns: give one of them")
        return BlockSparse.from_config(
            SparsePatternConfig(options.blocks, sparsity_ratio=options.ratio, block_size=options.block_size)
        )
    if options.segments is not None and options.rates is not None:
        return Dilated(parse_integers("--segments", options.segments), parse_integers("--rates", options.rates))
    if options.model is not None and config is not None:
        return config.pattern
    return suggest(tokens, key_heads, is_causal=options.causal).pattern


def given(options: PlanOptions) -> dict[str, Any]:
    """The options as JSON."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: str(x) if isinstance(x, Path) else x for name, x in values.items()}

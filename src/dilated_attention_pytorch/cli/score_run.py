"""The command ``score``: bits per token of files under a trained decoder."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from rich.console import Console

from dilated_attention_pytorch.cli.demo import choose_device
from dilated_attention_pytorch.cli.outputs import Outputs, check_file, device_name, end, versions
from dilated_attention_pytorch.cli.streams import interruptible
from dilated_attention_pytorch.cli.train_options import ScoreOptions
from dilated_attention_pytorch.cli.train_run import reported
from dilated_attention_pytorch.training import Corpus, LossError, ScoreBins, load_decoder, log_probabilities
from dilated_attention_pytorch.training.costs import peak_memory
from dilated_attention_pytorch.training.files import KINDS, kind_of, list_files
from dilated_attention_pytorch.training.log import naming
from dilated_attention_pytorch.training.score import trained_kind
from dilated_attention_pytorch.training.settings import DTYPES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CHUNK = {"cpu": 4096, "cuda": 65_536}
_LINE_S = 2.0


def run_score(options: ScoreOptions) -> None:
    """Run the command."""
    outputs = Outputs(options.json, options.plot, options.quiet)
    with reported(), tempfile.TemporaryDirectory(prefix="dilated-attention-") as temporary:
        outputs.check()
        device = choose_device(options.device)
        dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        if dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        chunk = _CHUNK[device.type] if options.chunk is None else options.chunk
        if chunk < 1 or options.bins < 1:
            raise ValueError(f"--chunk and --bins must be at least 1, got {chunk} and {options.bins}")
        if options.log_probabilities is not None:
            check_file(options.log_probabilities)
        trained = trained_kind(options.model)
        kind = _kind(options, trained)
        corpus = Corpus.of(options.data, options.cache or Path(temporary), kind, options.model)
        counted = max(0, len(corpus) - 1)
        counted -= corpus.ignored(0, counted)
        if not counted:
            raise ValueError(
                f"a document needs 2 tokens, because its first has no prediction: got {len(corpus)} tokens in "
                f"{len(corpus.documents)} documents; name a longer file"
            )
        model = load_decoder(options.model, device, getattr(torch, dtype))
        size = model.config.vocab_size or 0
        if size < corpus.vocabulary or (trained is None and options.tokens == "auto" and size != corpus.vocabulary):
            raise ValueError(
                f"the vocabulary of the model has {size} tokens, and {corpus.kind} need {corpus.vocabulary}; use --tokens, "
                "or another model"
            )
        bins = ScoreBins(len(corpus), options.bins)
        console = outputs.console()
        begin = printed = time.monotonic()
        try:
            with interruptible(), _opened(options.log_probabilities) as target:
                for first, values in log_probabilities(model, corpus, chunk):
                    bins.add(first, values)
                    if target is not None:
                        target.write(bytes(values.contiguous().view(torch.uint8)))
                    if time.monotonic() - printed >= _LINE_S and not options.quiet:
                        printed = time.monotonic()
                        done = first + len(values)
                        rate = done / (printed - begin)
                        text = f"{done / len(corpus):4.0%}  {done:,} tokens, {rate:,.0f} tokens/s"
                        Console(stderr=True, soft_wrap=True, highlight=False).print(
                            f"{text}, {bins.bits:.4f} bits per token"
                        )
        except KeyboardInterrupt:
            end(f"Interrupted: {bins.tokens:,} of {len(corpus) - 1:,} tokens are scored.", 130)
        seconds = time.monotonic() - begin
        if bins.tokens != counted or not math.isfinite(bins.bits):
            raise LossError(
                f"{counted - bins.tokens} of {counted} log-probabilities are NaN, and the mean of the others is "
                f"{bins.bits} bits; check the parameters of the model, or use --dtype float32"
            )
        figures = {
            "versions": versions(), "device": device_name(device), "model": str(options.model), "kind": corpus.kind,
            "tokens": bins.tokens, "seconds": seconds, "dtype": dtype, "chunk": chunk,
            "tokens_per_second": bins.tokens / seconds, "bits_per_token": bins.bits,
            "peak_memory_bytes": peak_memory(device), "positions": bins.positions, "bits": bins.means,
        }  # fmt: skip
        _print(console, figures)
        outputs.write(figures)
        outputs.draw(lambda: _picture(options, bins))


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[BinaryIO | None]:
    """The file of log-probabilities. Errors of writing and closing it name it."""
    if path is None:
        yield None
        return
    with naming(path), path.open("wb") as file:
        yield file


def _picture(options: ScoreOptions, bins: ScoreBins) -> Figure:
    from dilated_attention_pytorch.cli.train_picture import score_picture  # imports matplotlib

    found = [(x, y) for x, y in zip(bins.positions, bins.means, strict=True) if y is not None]
    title = f"{', '.join(path.name for path in options.data)}: {bins.bits:.4f} bits per token"
    return score_picture([x for x, _ in found], [y for _, y in found], title)


def _kind(options: ScoreOptions, trained: str | None) -> str:
    """The kind of tokens. Raise a ValueError if it is not the one that the model was trained on."""
    if options.tokens not in ("auto", *KINDS):
        raise ValueError(f"--tokens must be one of auto, {', '.join(KINDS)}, got {options.tokens!r}")
    kind = options.tokens
    if kind == "auto":
        kind = kind_of(list_files(options.data, options.model))
        if trained not in (None, kind):
            raise ValueError(
                f"the model was trained on {trained}, and by their names the files contain {kind}; use --tokens {trained} "
                f"to read them as {trained}, or name other files"
            )
    if trained not in (None, kind):
        raise ValueError(f"the model was trained on {trained}, got --tokens {kind}; use --tokens {trained}")
    return kind


def _print(console: Console, figures: dict[str, Any]) -> None:
    console.print(f"bits per token   {figures['bits_per_token']:.4f}")
    console.print(f"perplexity       {math.pow(2.0, figures['bits_per_token']):.4f}")
    console.print(f"tokens           {figures['tokens']:,} {figures['kind']}")
    console.print(f"rate             {figures['tokens_per_second']:,.0f} tokens/s")
    console.print(f"peak memory      {figures['peak_memory_bytes'] / 2**20:,.0f} MiB")

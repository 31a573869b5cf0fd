"""The commands ``train`` and ``score``. What they do is imported when they run, because the imports take seconds."""

from __future__ import annotations

import inspect
from typing import Any

from dilated_attention_pytorch.cli.train_options import ScoreOptions, TrainOptions


def train(**options: Any) -> None:
    """Train a LongNet decoder on text or on bases. The same command goes on where an interrupted run has stopped.

    \b
    Examples:
      dilated-attention train --context 256 --steps 20 --out first-run
      dilated-attention train my-texts --preset small --context 16384 --recompute --json losses.json
      torchrun --nproc-per-node 2 -m dilated_attention_pytorch train --sequence-ranks 2 --context 4096
    """
    from dilated_attention_pytorch.cli.train_run import run_training

    run_training(TrainOptions(**options))


def score(**options: Any) -> None:
    """Compute the bits per token of files under a trained decoder, in one pass and in bounded memory.

    \b
    Examples:
      dilated-attention score first-run README.md
      dilated-attention score first-run my-texts --plot bits.png --json bits.json
    """
    from dilated_attention_pytorch.cli.score_run import run_score

    run_score(ScoreOptions(**options))


train.__signature__ = inspect.signature(TrainOptions, eval_str=True)  # type: ignore[attr-defined]
score.__signature__ = inspect.signature(ScoreOptions, eval_str=True)  # type: ignore[attr-defined]

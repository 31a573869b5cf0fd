"""The commands ``train`` and ``score``. What they do is imported when they run, because the imports take seconds."""

from __future__ import annotations

import inspect
from typing import Any

from dilated_attention_pytorch.cli.train_options import ScoreOptions, TrainOptions


def train(**options: Any) -> None:
    """Train a LongNet decoder on text or on bases. The same command goes on where an interrupted run has stopped."""
    from dilated_attention_pytorch.cli.train_run import run_training

    run_training(TrainOptions(**options))


def score(**options: Any) -> None:
    """Compute the bits per token of files under a trained decoder, in one pass and in bounded memory."""
    from dilated_attention_pytorch.cli.score_run import run_score

    run_score(ScoreOptions(**options))


train.__signature__ = inspect.signature(TrainOptions, eval_str=True)  # type: ignore[attr-defined]
score.__signature__ = inspect.signature(ScoreOptions, eval_str=True)  # type: ignore[attr-defined]

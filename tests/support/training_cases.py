"""Small training runs, in this process or in one that the test ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.training import Trainer, TrainSettings, read_log

MODEL: dict[str, Any] = {
    "embed_dim": 16, "num_layers": 2, "num_heads": 2, "ffn_dim": 32, "vocab_size": 256, "segment_lengths": (16, 64),
    "dilation_rates": (1, 4),
}  # fmt: skip
EXACT = ("step", "loss", "learning_rate", "gradient_norm", "tokens", "held_out_loss")


def write_text(folder: Path) -> Path:
    """A text of 8,000 bytes that a small model learns something of."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "text.txt"
    generator = torch.Generator().manual_seed(7)
    words = ["one", "two", "three", "four ", "fivefive", "six\n"]
    path.write_text(" ".join(words[i] for i in torch.randint(6, (2000,), generator=generator))[:8000])
    return path


def make_settings(path: Path, model: dict[str, Any] | None = None, **changes: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "context": 64, "steps": 8, "batch": 4, "every": 2, "evaluate_every": 4, "warm_up": 2, "evaluate_windows": 2,
        "data": (str(path),), "learning_rate": 1e-2,
    }  # fmt: skip
    return TrainSettings(model=LongNetConfig.from_dict(MODEL | (model or {})), **(values | changes))


def finish(settings: TrainSettings, out: Path) -> Trainer:
    """Go on to the end."""
    trainer = Trainer(settings, out, torch.device("cpu"))
    for _ in trainer.run():
        pass
    trainer.close()
    return trainer


def curve(out: Path) -> list[dict[str, Any]]:
    """What a log says of the computation, without times and memory."""
    return [{name: line[name] for name in EXACT} for line in read_log(out / "log.jsonl")]


def kill_at_event(number: int, folder: Path) -> None:
    """End this process by SIGKILL at the ``number``-th operation on files in ``folder``."""
    left = [number]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"):
            if not any(isinstance(x, str | Path) and str(folder) in str(x) for x in arguments):
                return
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill_after(seconds: float) -> None:
    """End this process by SIGKILL after some time."""

    def wait() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()

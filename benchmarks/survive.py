"""Kill a training run twenty times at random moments, by SIGKILL, and compare it with one that nobody killed.

Each start is a process of its own that goes on from the last checkpoint. It is killed at a random time after its imports.
That time may lie in a step or in a checkpoint. The losses of all steps must be those of the uninterrupted run to the last
digit, and no checkpoint may be lost. It takes a few minutes on two cores, most of them for imports.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.training import Checkpoints, Trainer, TrainSettings, read_log

EXACT = ("step", "loss", "learning_rate", "gradient_norm", "tokens", "held_out_loss")
SETTINGS = TrainSettings(
    model=LongNetConfig.preset("tiny", vocab_size=256, dropout=0.1, num_layers=1),
    context=128, steps=300, batch=2, accumulate=2, every=3, keep=2, evaluate_every=50, evaluate_windows=2,
)  # fmt: skip


def child(out: Path) -> None:
    """Go on to the end. The first line of output says that the imports are done."""
    torch.set_num_threads(1)
    print("ready", flush=True)
    trainer = Trainer(SETTINGS, out, torch.device("cpu"))
    for _ in trainer.run():
        pass


def start(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def curve(out: Path) -> list[dict]:
    return [{name: line[name] for name in EXACT} for line in read_log(out / "log.jsonl")]


def torn(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").glob(".*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begin = time.monotonic()
        process = start(folder / "whole")
        imports_s = time.monotonic() - begin
        assert process.wait() == 0
        whole_s = time.monotonic() - begin - imports_s
        expected, out = curve(folder / "whole"), folder / "out"
        checkpoints, kills, lost = Checkpoints(out / "checkpoints", SETTINGS.keep), [], 0
        while len(kills) < options.kills:
            process = start(out)
            done = kills[-1]["checkpoint"] if kills else 0
            left_s = whole_s * (SETTINGS.steps - done) / SETTINGS.steps  # other programs may have slowed down the first run
            wait_s = chance.uniform(0.0, 1.4 * left_s / (options.kills - len(kills) + 1))
            time.sleep(wait_s)
            process.send_signal(signal.SIGKILL)
            code = process.wait()
            logged = len((out / "log.jsonl").read_bytes().splitlines()) if (out / "log.jsonl").exists() else 0
            kill = {"after_s": wait_s, "exit_code": code, "logged_steps": logged, "torn": torn(out)}
            kill["checkpoint"] = max(checkpoints.steps(), default=0)
            lost += kill["checkpoint"] < done
            kills.append(kill)
            print(json.dumps(kill), flush=True)
            if code == 0:
                raise SystemExit("the run ended before all kills: use more steps")
        process = start(out)
        assert process.wait() == 0
        found = curve(out)
        report = {
            "command": "python benchmarks/survive.py",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "settings": SETTINGS.description(),
            "checkpoint_every": SETTINGS.every,
            "kills": len(kills),
            "kills_while_a_checkpoint_was_written": sum(bool(kill["torn"]) for kill in kills),
            "checkpoints_lost": lost,
            "final_loss": found[-1]["loss"],
            "final_loss_uninterrupted": expected[-1]["loss"],
            "all_losses_equal": found == expected,
            "steps_computed_again": sum(max(0, kill["logged_steps"] - kill["checkpoint"]) for kill in kills),
            "left_behind": torn(out),
            "uninterrupted_s": whole_s,
            "moments": kills,
        }
    print(json.dumps({key: value for key, value in report.items() if key not in ("moments", "settings")}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if not report["all_losses_equal"] or lost or report["left_behind"]:
        raise SystemExit("the killed run differs from the uninterrupted one")


if __name__ == "__main__":
    main()

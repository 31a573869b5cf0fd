"""Does the order of tokens change what a model learns? Masked pixels of real pictures, Hilbert and row-major order.

    pip install --no-deps scikit-image==0.26.0
    python benchmarks/orders_learning.py [--quick] [--out FILE] [--picture FILE]

A model of two layers of dilated attention sees a crop of 64 x 64 pixels, one token per pixel. Half of the pixels are
hidden in squares of 4 x 4, and the model predicts them. The runs differ only in the order of the tokens: initial
weights, crops, masks and steps are equal, and every token carries its two coordinates. Training and test pictures are
different pictures.

It takes about 10 minutes on two cores, with one process on each.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch
from images import picture, wheel_version
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, mse_loss

import dilated_attention_pytorch
from dilated_attention_pytorch import Dilated, DilatedAttention, Hilbert, Identity, Order

Predict = Callable[[Tensor, Tensor], Tensor]
# Chosen before the first run: photographs, textures and medicine on both sides.
TRAINING = (
    "astronaut.png", "brick.png", "camera.png", "clock_motion.png", "coins.png", "gravel.png", "hubble_deep_field.jpg",
    "moon.png", "motorcycle_left.png", "retina.jpg",
)  # fmt: skip
HELD_OUT = ("chelsea.png", "coffee.png", "grass.png", "ihc.png", "rocket.jpg")
SIDE, SQUARE, HIDDEN = 64, 4, 0.5
SEGMENT_LENGTHS, DILATION_RATES = (64, 512, 4096), (1, 4, 16)
LAYERS, WIDTH, HEADS = 2, 64, 4
BATCH, STEPS, RATE, SEEDS = 2, 200, 2e-3, 5
TEST_CROPS, TESTS = 12, 4  # of each held-out picture; how often a run is tested, the last time at its end
MIDDLE, SCALE = 0.5, 0.25  # of grey levels from 0 to 1


def orders() -> dict[str, Order]:
    return {"hilbert": Hilbert.grid(SIDE, SIDE), "row_major": Identity(SIDE * SIDE)}


def load(names: tuple[str, ...]) -> list[Tensor]:
    return [(picture(name).float() / 255 - MIDDLE) / SCALE for name in names]


def crop(image: Tensor, generator: torch.Generator) -> Tensor:
    """A random part of a picture: (SIDE * SIDE,), row by row."""
    top, left = (int(torch.randint(size - SIDE + 1, (), generator=generator)) for size in image.shape)
    return image[top : top + SIDE, left : left + SIDE].flatten()


def hide(generator: torch.Generator) -> Tensor:
    """Which pixels are hidden: squares whose grid starts anywhere, so that no order has them aligned to its segments."""
    squares = SIDE // SQUARE + 1
    hidden = torch.rand(squares, squares, generator=generator) < HIDDEN
    top, left = torch.randint(SQUARE, (2,), generator=generator).tolist()
    pixels = hidden.repeat_interleave(SQUARE, 0).repeat_interleave(SQUARE, 1)
    return pixels[top : top + SIDE, left : left + SIDE].flatten()


def batch(images: list[Tensor], which: list[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Crops and what is hidden of them, each (len(which), SIDE * SIDE), row by row."""
    return torch.stack([crop(images[i], generator) for i in which]), torch.stack([hide(generator) for _ in which])


class Block(nn.Module):
    """Pre-norm attention and MLP; queries and keys are turned by their coordinates (rotary), half of a head for each."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.attend = DilatedAttention(SEGMENT_LENGTHS, DILATION_RATES)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = self.qkv(layer_norm(x, (WIDTH,))).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
        x = x + self.out(self.attend(turn(q, turns), turn(k, turns), v).flatten(2))
        return x + self.narrow(gelu(self.wide(layer_norm(x, (WIDTH,)))))


def turn(x: Tensor, turns: Tensor) -> Tensor:
    """Turn pairs of features (..., N, H, D) by angles whose cosines and sines are ``turns`` (2, N, 1, D / 2)."""
    a, b = x.chunk(2, -1)
    cos, sin = turns
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Model(nn.Module):
    """From grey levels and what of them is hidden, each (B, N) row by row, to predictions (B, N)."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order
        self.embed, self.predict = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        frequencies = math.pi / 4 * 2.0 ** -torch.arange(WIDTH // HEADS // 4)  # periods of 8, 16, 32 and 64 pixels
        places = torch.cartesian_prod(*[torch.arange(SIDE)] * 2)[order.positions]
        angles = (places[:, :, None] * frequencies).flatten(1)[:, None]
        self.turns = torch.stack((angles.cos(), angles.sin()))

    def forward(self, grey: Tensor, hidden: Tensor) -> Tensor:
        # The order is applied once for the whole model.
        x = self.order.permute(self.embed(torch.stack((grey.masked_fill(hidden, 0.0), hidden.float()), -1)))
        for block in self.blocks:
            x = block(x, self.turns)
        return self.order.unpermute(self.predict(layer_norm(x, (WIDTH,))).squeeze(-1))


def error(predict: Predict, images: list[Tensor]) -> list[float]:
    """Root mean square error of the hidden pixels of each picture, of 255 grey levels; the crops are always the same."""
    generator = torch.Generator().manual_seed(2**31)
    found = []
    for i in range(len(images)):
        grey, hidden = batch(images, [i] * TEST_CROPS, generator)
        with torch.no_grad():
            guess = torch.cat([predict(g, h) for g, h in zip(grey.split(4), hidden.split(4), strict=True)])
        found.append(255 * SCALE * math.sqrt(mse_loss(guess[hidden], grey[hidden])))
    return found


def visible_mean(grey: Tensor, hidden: Tensor) -> Tensor:
    """What needs no model: the mean of a crop's visible pixels."""
    return (grey.masked_fill(hidden, 0.0).sum(1) / (~hidden).sum(1)).unsqueeze(1).expand_as(grey)


def train(name: str, seed: int, steps: int) -> dict:
    torch.set_num_threads(1)
    start = time.process_time()
    torch.manual_seed(seed)
    model = Model(orders()[name])
    generator = torch.Generator().manual_seed(seed)
    training, held_out = load(TRAINING), load(HELD_OUT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    losses, curve = [], []
    for step in range(1, steps + 1):
        which = torch.randint(len(training), (BATCH,), generator=generator).tolist()
        grey, hidden = batch(training, which, generator)
        loss = mse_loss(model(grey, hidden)[hidden], grey[hidden])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % (steps // TESTS) == 0:
            curve.append({"step": step, "error": dict(zip(HELD_OUT, error(model, held_out), strict=True))})
    return {
        "order": name,
        "seed": seed,
        "error": statistics.mean(curve[-1]["error"].values()),
        "training_error_last_50": 255 * SCALE * math.sqrt(statistics.mean(losses[-50:])),
        "cpu_seconds": time.process_time() - start,
        "curve": curve,
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "standard_deviation": statistics.stdev(values)}


def summary(runs: list[dict]) -> dict:
    """Means over the held-out pictures, then mean and spread over the seeds; differences are of the same seed."""
    by = {name: sorted((r for r in runs if r["order"] == name), key=lambda r: r["seed"]) for name in orders()}
    pairs = list(zip(by["row_major"], by["hilbert"], strict=True))
    return {
        **{name: spread([r["error"] for r in some]) for name, some in by.items()},
        "row_major_minus_hilbert": spread([a["error"] - b["error"] for a, b in pairs]),
        "seeds_hilbert_is_better": sum(a["error"] > b["error"] for a, b in pairs),
        "pictures": {
            image: {name: spread([r["curve"][-1]["error"][image] for r in some]) for name, some in by.items()}
            for image in HELD_OUT
        },
    }


def plot(file: Path, runs: list[dict]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, label, colour in (("row_major", "row by row", "#c8551b"), ("hilbert", "Hilbert", "#1f5fa8")):
        for one in (r for r in runs if r["order"] == name):
            errors = [statistics.mean(point["error"].values()) for point in one["curve"]]
            axes.plot(
                [point["step"] for point in one["curve"]], errors, "o-", color=colour, markersize=3, linewidth=1,
                label=label if one["seed"] == 0 else None,
            )  # fmt: skip
    axes.set(xlabel="training steps", ylabel="error of hidden pixels, grey levels", ylim=(0, None))
    axes.set_title("Held-out pictures, a line for each seed", fontsize=11)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds of 8 steps")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--picture", type=Path, help="draw the results into this file")
    options = parser.parse_args()
    steps, seeds = (8, 2) if options.quick else (STEPS, SEEDS)
    baseline = dict(zip(HELD_OUT, error(visible_mean, load(HELD_OUT)), strict=True))
    print(f"mean of the visible pixels: {statistics.mean(baseline.values()):.2f}")
    runs = []
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(train, name, seed, steps) for seed in range(seeds) for name in orders()]
        for job in as_completed(jobs):
            runs.append(job.result())
            print(json.dumps({key: value for key, value in runs[-1].items() if key != "curve"}), flush=True)
    runs.sort(key=lambda r: (r["seed"], r["order"]))
    result = summary(runs)
    print(json.dumps(result, indent=1))
    report = {
        "command": "python benchmarks/orders_learning.py",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "library": dilated_attention_pytorch.__version__,
        "scikit_image": wheel_version(),
        "machine": platform.machine(),
        "setting": {
            "training": TRAINING, "held_out": HELD_OUT, "test_crops_of_each": TEST_CROPS, "side": SIDE, "square": SQUARE,
            "hidden": HIDDEN, "pattern": Dilated(SEGMENT_LENGTHS, DILATION_RATES).spec, "layers": LAYERS, "width": WIDTH,
            "heads": HEADS, "parameters": sum(p.numel() for p in Model(orders()["hilbert"]).parameters()), "batch": BATCH,
            "steps": steps, "learning_rate": RATE, "dtype": "float32",
        },
        "unit": "root mean square error of hidden pixels, of 255 grey levels",
        "mean_of_visible_pixels": {"error": statistics.mean(baseline.values()), "pictures": baseline},
        "summary": result,
        "runs": runs,
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if options.picture:
        plot(options.picture, runs)


if __name__ == "__main__":
    main()

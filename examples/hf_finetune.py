"""Extend the context of a causal model of transformers by dilated attention.

    python examples/hf_finetune.py                              a small run for a CPU, 256 -> 4,096 tokens
    python examples/hf_finetune.py --short 2048 --long 65536    for a GPU

A Llama of bytes is trained by ``Trainer`` on the sources of Python's standard library, with sdpa and short windows. Then
``apply`` gives it dilated attention, and it is trained on a few long windows. The script prints the loss of held-out long
windows before and after, and the speed of training with both kinds of attention at the long context.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from dilated_attention_pytorch.integrations.transformers import apply


def sources() -> torch.Tensor:
    """All bytes of the standard library's sources, in one order everywhere."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def windows(data: torch.Tensor, context: int, count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """A data set of windows of ``context`` bytes at random positions."""
    starts = torch.randint(0, len(data) - context, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = [data[start : start + context].long() for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer_of(model: LlamaForCausalLM, context: int, batch: int, options: argparse.Namespace) -> Trainer:
    """A trainer at a context, which evaluates long windows."""
    is_long = context == options.long
    arguments = TrainingArguments(
        output_dir=options.folder, max_steps=options.long_steps if is_long else options.steps, seed=options.seed,
        learning_rate=options.lr / 4 if is_long else options.lr, warmup_steps=5, lr_scheduler_type="cosine",
        per_device_train_batch_size=batch, per_device_eval_batch_size=1, bf16=torch.cuda.is_available(),
        logging_steps=10, save_strategy="no", report_to=[],
    )  # fmt: skip
    train = windows(options.train, context, batch * arguments.max_steps, options.seed)
    return Trainer(model, arguments, train_dataset=train, eval_dataset=windows(options.held_out, options.long, 4, seed=1))


def tokens_per_second(model: LlamaForCausalLM, options: argparse.Namespace) -> float:
    """Forward and backward of one long window, the faster of three after one that is not counted."""
    tokens = options.train[: options.long].long()[None].to(model.device)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=torch.cuda.is_available()):
            model(tokens, labels=tokens).loss.backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        model.zero_grad()
    return options.long / min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"short": 256, "long": 4096, "steps": 60, "long-steps": 12, "batch": 16, "width": 128, "layers": 2, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    data = sources()
    options.train, options.held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    heads = max(2, options.width // 64)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=options.width, intermediate_size=4 * options.width, num_hidden_layers=options.layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=options.long,
    ))  # fmt: skip
    segments = [options.short * 4**i for i in range(12) if options.short * 4**i < options.long] + [options.long]
    with tempfile.TemporaryDirectory() as options.folder:
        trainer = trainer_of(model, options.short, options.batch, options)
        trainer.train()
        dense, speed = trainer.evaluate()["eval_loss"], tokens_per_second(model, options)
        apply(model, segments, [w // options.short for w in segments])
        trainer = trainer_of(model, options.long, 1, options)
        before, dilated_speed = trainer.evaluate()["eval_loss"], tokens_per_second(model, options)
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    print(f"trained at {options.short:,} bytes, held-out windows of {options.long:,}: loss {dense:.4f} with sdpa")
    print(f"dilated, segments {segments}: loss {before:.4f} before {options.long_steps} long steps, {after:.4f} after them")
    print(f"training at {options.long:,}: {speed:,.0f} tokens/s with sdpa, {dilated_speed:,.0f} with dilated attention")


if __name__ == "__main__":
    main()

"""Extend the context of a causal model of transformers by dilated attention.

    python examples/hf_finetune.py                              a small run for a CPU, 256 -> 4,096 tokens
    python examples/hf_finetune.py --short 2048 --long 65536    for a GPU

A Llama of bytes is trained by ``Trainer`` on Python's standard library, with sdpa and short windows. ``apply`` then
gives it dilated attention, and it is trained on a few long windows. The script prints losses and speeds.
"""

import argparse
import json
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from dilated_attention_pytorch.integrations.transformers import apply


def sources() -> torch.Tensor:
    """All bytes of the standard library's sources, in one order everywhere."""
    files = sorted(path for path in Path(sysconfig.get_path("stdlib")).rglob("*.py") if "site-packages" not in path.parts)
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def windows(data: torch.Tensor, context: int, count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """A data set of windows of ``context`` bytes at random positions."""
    starts = torch.randint(0, len(data) - context, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [dict.fromkeys(("input_ids", "labels"), data[start : start + context].long()) for start in starts]


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
    """Forward and backward of one long window, the fastest of three after one that is not counted."""
    tokens = options.train[: options.long].long()[None].to(model.device)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=torch.cuda.is_available()):
            model(tokens, labels=tokens).loss.backward()
        model.get_input_embeddings().weight.grad.sum().item()  # the last gradient: waits for the device
        seconds.append(time.perf_counter() - start)
        model.zero_grad()
    return options.long / min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"short": 256, "long": 4096, "steps": 60, "long-steps": 12, "batch": 16, "width": 128, "layers": 2, "heads": 2}
    for name, default in {**sizes, "seed": 0, "lr": 2e-3}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    data = sources()
    options.train, options.held_out = data.tensor_split([len(data) * 9 // 10])
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=options.width, intermediate_size=4 * options.width, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, num_key_value_heads=options.heads // 2, max_position_embeddings=options.long,
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
    figures = {
        "segments": segments, "loss with sdpa": dense, "loss dilated": before, "loss after long steps": after,
        "tokens/s with sdpa": speed, "tokens/s dilated": dilated_speed, "device": str(model.device),
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    print(f"held-out windows of {options.long:,} bytes, before and after {options.long_steps} long steps:", figures)
    if options.out:
        settings = {name: value for name, value in vars(options).items() if isinstance(value, int | float)}
        options.out.write_text(json.dumps(settings | figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Train a LongNet decoder on text or genomes, in one process or on many ranks, and go on after any interruption.

    python examples/train_longnet.py                                    the sources of Python's standard library
    python examples/train_longnet.py genome.fa.gz --context 4096        a genome, one token per base
    torchrun --nproc-per-node 4 examples/train_longnet.py --sequence-ranks 2

The modules are those of ``dilated-attention train``. On four ranks with ``--sequence-ranks 2``, the batch is distributed
over two pairs of ranks, and each pair shares its windows. Parameters are sharded over all ranks (FSDP2). Whatever ends the
process, the same command goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.training import Corpus, Trainer, TrainSettings, load_decoder, log_probabilities
from dilated_attention_pytorch.training.files import VOCABULARIES, kind_of, list_files


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="*", help="text or FASTA files, also gzip; the standard library if none")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence-ranks", type=int, default=1, help="ranks that share each window")
    parser.add_argument("--out", type=Path, default=Path("train-output"))
    return parser.parse_args()


def join_ranks() -> torch.device:
    """The device of this process. Under torchrun, the process also joins the default process group."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "LOCAL_RANK" in os.environ:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def main() -> None:
    options = parse()
    device = join_ranks()
    data = tuple(str(path.absolute()) for path in options.data)
    kind = kind_of(list_files(data, options.out))  # bytes, or bases of FASTA files
    settings = TrainSettings(
        model=LongNetConfig.preset("tiny", vocab_size=VOCABULARIES[kind]),
        data=data, context=options.context, steps=options.steps, batch=options.batch, every=20, evaluate_every=20,
        dtype="bfloat16" if device.type == "cuda" else "float32", sequence_ranks=options.sequence_ranks,
    )  # fmt: skip
    trainer = Trainer(settings, options.out, device)  # goes on if the folder holds a checkpoint
    first = trainer.ranks.rank == 0
    if first:
        print(f"{len(trainer.corpus):,} tokens, {trainer.training.per_epoch:,} windows, from step {trainer.step}")

    def stop(number: int, frame: object) -> None:
        trainer.stop = True  # the step in progress ends with a checkpoint

    signal.signal(signal.SIGINT, stop)
    for point in trainer.run():
        if first and (point.step % 10 == 0 or point.held_out_loss is not None):
            held_out = "" if point.held_out_loss is None else f", held out {point.held_out_loss / math.log(2):.3f} bits"
            print(
                f"step {point.step}: {point.loss / math.log(2):.3f} bits{held_out}, {point.tokens_per_second:,.0f} tokens/s"
            )
    trainer.close()
    if first:
        # Score a text of any length in one pass: the caches of the decoder do not grow with it.
        model = load_decoder(options.out, torch.device("cpu"))
        corpus = Corpus.of(data[:1] or [__file__], options.out / "data", kind, options.out)
        chunks = itertools.islice(log_probabilities(model, corpus, 1024), 4)
        scores = torch.cat([values for _, values in chunks])
        name, bits = corpus.files[0].path, -float(scores.nanmean()) / math.log(2)
        print(f"the first {len(scores):,} tokens of {name}: {bits:.3f} bits per token")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

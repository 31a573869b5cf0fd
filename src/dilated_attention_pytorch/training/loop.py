"""The training loop. A run is a sequence of steps, each of which follows from the settings, the data and its number.

Only the parameters and the optimizer's sums are carried from one step to the next. Windows, learning rates and the seeds of
dropout are computed from the number of the step. A run that goes on from a checkpoint repeats what it would have done.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from dilated_attention_pytorch.distributed.sequence import shard_sequence
from dilated_attention_pytorch.models import LongNetDecoder
from dilated_attention_pytorch.training.checkpoint import Checkpoints
from dilated_attention_pytorch.training.costs import peak_memory, peak_of, window_flops
from dilated_attention_pytorch.training.data import Corpus, batch_of, derived_seed, split
from dilated_attention_pytorch.training.lock import FolderLock
from dilated_attention_pytorch.training.log import TrainLog
from dilated_attention_pytorch.training.ranks import TrainRanks
from dilated_attention_pytorch.training.settings import TrainSettings

LAYOUT = "zigzag"  # causal attention has the same number of pairs on every rank


class LossError(RuntimeError):
    """A loss or a gradient that is not finite."""


@dataclass(frozen=True, slots=True)
class TrainPoint:
    """What is known after a step."""

    step: int  # that is finished, from 1 on
    loss: float  # mean over the targets of the step, in nats
    learning_rate: float
    gradient_norm: float  # before clipping
    tokens: int  # read so far, by all ranks
    seconds: float  # of this step
    tokens_per_second: float
    mfu: float | None  # share of the GPU's largest rate; None if that is not known
    memory_bytes: int  # the largest so far, of this rank
    held_out_loss: float | None = None  # mean over the held-out windows, if this step is evaluated


class Trainer:
    """A run in the folder ``out``: its checkpoints, its log and its caches of data. It goes on from the last checkpoint.

    The folder is locked until ``close``, or until the process ends. A second run in it raises a SaveError.
    """

    def __init__(self, settings: TrainSettings, out: str | Path, device: str | torch.device) -> None:
        self.settings, self.out, self.device = settings, Path(out), torch.device(device)
        self.log: TrainLog | None = None
        self.lock: FolderLock | None = None
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._begin()
            stack.pop_all()

    def _begin(self) -> None:
        settings, out, device = self.settings, self.out, self.device
        self.ranks = TrainRanks.make(settings.sequence_ranks, device)
        if settings.batch % (settings.accumulate * self.ranks.data):
            raise ValueError(
                f"batch must be a multiple of accumulate times the ranks of data, got {settings.batch}, "
                f"{settings.accumulate} and {self.ranks.data}"
            )
        self.lock = self.ranks.first_then_others(lambda: FolderLock(out) if self.ranks.rank == 0 else None)
        self.checkpoints = Checkpoints(out / "checkpoints", settings.keep)
        self.corpus = self.ranks.first_then_others(lambda: Corpus.of(settings.data, out / "data", settings.kind, out))
        if (settings.model.vocab_size or 0) < self.corpus.vocabulary:
            raise ValueError(
                f"vocab_size must be at least {self.corpus.vocabulary} for tokens that are {self.corpus.kind}, got "
                f"{settings.model.vocab_size}"
            )
        self.training, self.held_out = split(self.corpus, settings.context, settings.held_out, settings.seed)
        if self.held_out is not None:  # an evaluation without targets is reported before the first step
            self.corpus.targets(self.held_out.spread(settings.evaluate_windows), settings.context)
        torch.manual_seed(derived_seed("parameters", settings.seed))  # the same on every rank
        layout = None if self.ranks.group is None else LAYOUT
        self.model = LongNetDecoder(settings.model, group=self.ranks.group, layout=layout, device=device)
        self.flops = window_flops(self.model, settings.model, settings.context) * settings.batch
        self.peak = peak_of(device)
        if self.ranks.mesh is not None:
            for layer in self.model.layers:
                fully_shard(layer, mesh=self.ranks.mesh)
            fully_shard(self.model, mesh=self.ranks.mesh)
        self.optimizer = _optimizer(self.model, settings)
        self.step = 0
        self.stop = False  # set by a handler of signals: the run ends after this step, with a checkpoint
        self.checkpoints.prepare()
        self._resume()
        self.log = TrainLog(out / "log.jsonl", self.step) if self.ranks.rank == 0 else None

    def _resume(self) -> None:
        step = self.checkpoints.newest()
        if step is None:
            return
        state = self.checkpoints.state(step)
        self.settings.compare(state["settings"], str(self.out))
        self.corpus.compare(state["data"])
        self.checkpoints.load(step, self._tensors())
        self.step = step

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and the optimizer's sums, by name. They are the tensors themselves, so that loading fills them."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            found |= {f"optimizer.{name}.{key}": state[key] for key in ("step", "exp_avg", "exp_avg_sq")}
        return found

    def save(self) -> None:
        """Write a checkpoint of the last step."""
        self.ranks.first_then_others(self.corpus.check_unchanged)
        self._check_parameters()
        if self.log is not None:
            self.log.sync()
        state = {"settings": self.settings.description(), "data": self.corpus.fingerprints(), "ranks": self.ranks.world}
        self.checkpoints.save(self.step, self._tensors(), state)

    def _check_parameters(self) -> None:
        """Raise a LossError if a parameter is not finite, so that no checkpoint holds it."""
        local = [p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters()]
        wrong = torch.stack([(~p.detach().isfinite()).sum() for p in local]).sum()
        if count := int(self.ranks.add(wrong)):
            raise LossError(
                f"{count} numbers in the parameters are not finite after step {self.step}. {self._last_good()}. "
                f"{self._way_out()}"
            )

    def run(self) -> Iterator[TrainPoint]:
        """Go on to the last step and yield a point after each. The caller may set ``stop``, which the ranks agree on."""
        settings = self.settings
        while self.step < settings.steps:
            point, stop = self._advance()
            if self.log is not None:
                self.log.append(asdict(point))
            if stop or self.step % settings.every == 0 or self.step == settings.steps:
                self.save()
            yield point
            if stop:
                return

    def _advance(self) -> tuple[TrainPoint, bool]:
        """One step: gradients of all windows, clipping, and an update of the parameters."""
        settings, ranks = self.settings, self.ranks
        begin = time.perf_counter()
        starts = self.training.starts(self.step, settings.batch)
        rate = settings.rate(self.step)
        for values in self.optimizer.param_groups:
            values["lr"] = rate
        self.optimizer.zero_grad()
        loss = self._gradients(starts)
        norm = clip_grad_norm_(self.model.parameters(), settings.clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        loss_value, stopped = ranks.add(torch.stack((loss, loss.new_tensor(float(self.stop))))).tolist()
        norm_value = float(norm)
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            raise LossError(self._report(loss_value, norm_value, starts))
        self.optimizer.step()
        self.step += 1
        seconds = time.perf_counter() - begin
        evaluated = self.step % settings.evaluate_every == 0 or self.step == settings.steps
        held_out = self.evaluate() if evaluated else None
        if held_out is not None and not math.isfinite(held_out):
            raise LossError(
                f"the held-out loss after step {self.step} is {held_out}. {self._last_good()}. {self._way_out()}"
            )
        count = settings.batch * settings.context
        point = TrainPoint(
            self.step, loss_value, rate, norm_value, self.step * count, seconds, count / seconds,
            None if self.peak is None else self.flops / seconds / (self.peak[1] * ranks.world),
            peak_memory(self.device), held_out,
        )  # fmt: skip
        return point, stopped > 0

    def _gradients(self, starts: list[int]) -> Tensor:
        """Add up the gradients of a step's windows, and return this rank's share of the loss in float64."""
        settings, ranks = self.settings, self.ranks
        targets = self.corpus.targets(starts, settings.context)
        size = settings.batch // settings.accumulate
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number in range(settings.accumulate):
            torch.manual_seed(derived_seed("dropout", settings.seed, self.step, number, ranks.rank))
            loss = self._loss(ranks.share(starts[number * size : (number + 1) * size]))
            # FSDP takes the mean over ranks, and the loss is a mean over all targets of the step.
            torch.autograd.backward(loss * (ranks.world / targets))
            total += loss.detach().double() / targets
        return total

    def _loss(self, starts: Sequence[int]) -> Tensor:
        """The sum of the losses of this rank's rows of some windows."""
        batch: Sequence[Tensor] = batch_of(self.corpus, starts, self.settings.context)
        if self.ranks.group is not None:
            batch = [shard_sequence(x, self.ranks.group, layout=LAYOUT) for x in batch]
        tokens, targets = (x.to(self.device, non_blocking=True) for x in batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"):
            return self.model.loss(tokens, targets, reduction="sum")

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """The mean loss of the held-out windows. Every rank of data evaluates all of them."""
        starts = [] if self.held_out is None else self.held_out.spread(self.settings.evaluate_windows)
        if not starts:
            return None
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for start in starts:
            total += self._loss([start]).double()
        self.model.train()
        targets = self.corpus.targets(starts, self.settings.context)
        return float(self.ranks.add(total)) / (targets * self.ranks.data)

    def _report(self, loss: float, norm: float, starts: list[int]) -> str:
        where = "; ".join(self.corpus.where(start) for start in starts)
        return (
            f"step {self.step + 1} stopped: its loss is {loss} and the norm of its gradients is {norm}. Its windows of "
            f"{self.settings.context} tokens begin at {where}. {self._last_good()}. {self._way_out()}"
        )

    def _last_good(self) -> str:
        last = self.checkpoints.last()
        return "There is no checkpoint" if last is None else f"The last good checkpoint is {last}"

    def _way_out(self) -> str:
        rate, warm_up = self.settings.learning_rate, self.settings.warm_up
        return f"Use a smaller learning rate than {rate:g}, or a longer warm-up than {warm_up} steps, in another folder."

    def close(self) -> None:
        """Close the log and release the folder."""
        if self.log is not None:
            self.log.close()
        if self.lock is not None:
            self.lock.close()


def _optimizer(model: torch.nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW in one kernel. Weight decay is for matrices. The sums exist from the start, so that a checkpoint fills them."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=settings.learning_rate, betas=settings.betas, fused=True,
    )  # fmt: skip
    for parameter in parameters:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        sums = (torch.zeros_like(parameter, memory_format=torch.preserve_format) for _ in range(2))
        optimizer.state[parameter] = dict(zip(("step", "exp_avg", "exp_avg_sq"), (step, *sums), strict=True))
    return optimizer

"""What ``show ring`` draws: the steps of a forward over ranks. It imports ``torch.distributed``, which is slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dilated_attention_pytorch.distributed.messages import Message
from dilated_attention_pytorch.distributed.rank_plans import DilatedSection, DilatedStep, dilated_plan
from dilated_attention_pytorch.distributed.schedules import default_bucket_size
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.workbench.views import check_size


@dataclass(frozen=True, slots=True)
class RingSizes:
    """The sizes of a call that decide what ranks compute and send."""

    tokens: int
    heads: int
    key_heads: int
    head_dim: int = 64
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name, most in (("tokens", 2**40), ("heads", 2**10), ("key_heads", 2**10), ("head_dim", 2**12)):
            check_size(name, getattr(self, name), most)
        if self.heads % self.key_heads:
            raise ValueError(f"heads must be a multiple of key heads, got {self.heads} and {self.key_heads}")


@dataclass(frozen=True, slots=True)
class RingStep:
    """What a rank does in one tick: the message that it sends, the one that it receives, and what it computes."""

    name: str
    target: int | None = None  # the rank that it sends to
    sent_bytes: int = 0
    source: int | None = None  # the rank that it receives from
    received_bytes: int = 0
    pairs: int = 0  # query-key pairs over all query heads


@dataclass(frozen=True, slots=True)
class RingView:
    """The steps of a forward over a ring of ranks. Step 0 computes a rank's own rows, and messages follow.

    >>> view = RingView.of(Dilated([4, 16], [1, 4]), RingSizes(16, 4, 4, head_dim=8), ranks=2)
    >>> [step.pairs for step in view.ranks[0]], view.ranks[0][1].source, view.ranks[0][1].received_bytes
    ([144, 16], 1, 256)
    """

    layout: str
    is_causal: bool
    rows: tuple[int, ...]  # by rank
    ranks: tuple[tuple[RingStep, ...], ...]  # by rank and tick

    @staticmethod
    def of(
        pattern: Dilated, sizes: RingSizes, ranks: int, *, layout: str = "contiguous", is_causal: bool = False,
        bucket_size: int | None = None, report: Callable[[int], object] = int,
    ) -> RingView:  # fmt: skip
        """The steps of all ranks, from the plans that the ranks themselves execute.

        ``report`` is called with the number of ranks so far.
        """
        check_size("ranks", ranks, 4096)
        pattern.check_key_heads(sizes.key_heads)
        if bucket_size is not None:
            check_size("bucket_size", bucket_size, 2**40)
        shards = Shards.even(sizes.tokens, ranks, layout)
        bucket_size = default_bucket_size(shards) if bucket_size is None else bucket_size
        problem = Problem(pattern, is_causal, 1, sizes.tokens, sizes.tokens, sizes.heads, sizes.key_heads)
        steps = []
        for rank in range(ranks):
            plan = dilated_plan(problem, shards, rank, bucket_size)
            own = RingStep("own rows", pairs=_pairs(plan.own, problem))
            steps.append((own, *(_step(sent, received, sizes, problem) for sent, received in plan.ticks)))
            report(rank + 1)
        return RingView(layout, is_causal, tuple(shards.rows(rank) for rank in range(ranks)), tuple(steps))

    @property
    def steps(self) -> int:
        """The number of steps, the same for all ranks."""
        return len(self.ranks[0])

    def pairs(self) -> list[list[int]]:
        """The pairs by rank and step."""
        return [[step.pairs for step in steps] for steps in self.ranks]

    def balance(self) -> float:
        """The pairs of the mean rank over those of the rank that has most; 1 is even work."""
        totals = [sum(pairs) for pairs in self.pairs()]
        return sum(totals) / len(totals) / max(totals) if max(totals) else 1.0


def _step(sent: Message | None, received: Message | None, sizes: RingSizes, problem: Problem) -> RingStep:
    number = sent or received
    found = [section for section in (received.sections if received else ()) if isinstance(section, DilatedSection)]
    return RingStep(
        "no message" if number is None else number.name,
        target=None if sent is None else sent.target,
        sent_bytes=_bytes(sent, sizes),
        source=None if received is None else received.source,
        received_bytes=_bytes(received, sizes),
        pairs=_pairs((step for section in found for step in section.steps()), problem),
    )


def _bytes(message: Message | None, sizes: RingSizes) -> int:
    return 0 if message is None else message.numel(sizes.head_dim) * sizes.element_bytes


def _pairs(steps: object, problem: Problem) -> int:
    assert hasattr(steps, "__iter__")
    return problem.heads_per_key * sum(step.plan.pairs for step in steps if isinstance(step, DilatedStep))

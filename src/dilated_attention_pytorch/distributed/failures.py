"""The error of a group that cannot be used any more, and sentences about ranks."""

from __future__ import annotations

WAY_OUT = (
    "No result was returned; once all ranks have called destroy_process_group() and init_process_group() again, the call "
    "can be repeated"
)
ORDER = "all ranks of a group must make the same calls, and run their backwards, in the same order"


class GroupError(RuntimeError):
    """A rank of the group has failed, or ranks have made different calls. The group cannot be used any more."""


def refusal(rank: int, mistake: Exception) -> str:
    """The sentence for the other ranks about a rank that refused its arguments.

    >>> refusal(1, ValueError("scale must be finite, got nan"))
    'rank 1 refused its arguments: scale must be finite, got nan'
    >>> refusal(1, MemoryError("no memory"))
    'rank 1 refused its arguments: MemoryError: no memory'
    """
    is_rule = isinstance(mistake, ValueError | TypeError | NotImplementedError)
    return f"rank {rank} refused its arguments: {mistake if is_rule else f'{type(mistake).__name__}: {mistake}'}"


def named(ranks: list[int]) -> str:
    """The ranks of a message.

    >>> named([3]), named([3, 4])
    ('rank 3', 'ranks 3, 4')
    """
    few = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {few}" if len(ranks) == 1 else f"ranks {few}"

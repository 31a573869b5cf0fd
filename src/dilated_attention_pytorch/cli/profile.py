"""The command ``profile``. What it does is imported when it runs, because the imports take seconds."""

from __future__ import annotations

import inspect
from typing import Any

from dilated_attention_pytorch.cli.profile_options import ProfileOptions


def profile(**options: Any) -> None:
    """Show where the memory and the time of one attention call or one training step go.

    The memory is that of PyTorch's allocator, by component over time. Operators are listed by their own time. With several
    ranks, the time of messages and its overlap with operators is shown. The profiler slows the call down, so use bench
    for speeds.

    \b
    Examples:
      dilated-attention profile --tokens 16k --backward --plot profile.png
      dilated-attention profile --tokens 64k --segment-lengths 2048,16384 --dilation-rates 1,8
      dilated-attention profile --preset tiny --context 4096 --trace trace.json
      dilated-attention profile --tokens 16k --backward --ranks 2
      torchrun --nproc-per-node 2 -m dilated_attention_pytorch profile --tokens 16k
    """
    from dilated_attention_pytorch.cli.profile_run import run_profile

    run_profile(ProfileOptions(**options))


profile.__signature__ = inspect.signature(ProfileOptions, eval_str=True)  # type: ignore[attr-defined]

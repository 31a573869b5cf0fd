"""The command ``plan``. What it does is imported when it runs."""

from __future__ import annotations

import inspect
from typing import Any

from dilated_attention_pytorch.cli.plan_options import PlanOptions


def plan(**options: Any) -> None:
    """Plan a call or a model on so many GPUs: work, memory of a rank by component, messages and time. No GPU is needed.

    Times and bytes are those of the rank that has most to do. A call is one forward, with --train also its backward. With
    --layers or --model, a model is planned: a forward, or a training step. If the memory of a GPU is too small, the plan is
    printed with the sentence what would fit, and the exit code is 1. Wrong options end with 2.

    \b
    Examples:
      dilated-attention plan --tokens 10M --gpus 8 --causal --train
      dilated-attention plan --tokens 1M --gpu h200 --heads 12 --head-dim 64 \\
          --segments 2048,4096,8192,16384,32768 --rates 1,2,4,6,12
      dilated-attention plan --tokens 1M --gpu h200 --model small --train --checkpoint --causal
      dilated-attention plan --tokens 1B --gpus 4096 --scale --plot scaling.png --json plan.json
      dilated-attention plan --tokens 100k --blocks local_window --ratio 0.05
      dilated-attention plan --suggest --tokens 300k --heads 16
      dilated-attention plan --tokens 64k --dtype float32 --measure --device cpu
      dilated-attention plan --tokens 1M --gpu mine --gpu-memory 80GB --gpu-tflops 500 --gpu-bandwidth 3.3TB
    """
    from dilated_attention_pytorch.cli.plan_run import run_plan

    run_plan(PlanOptions(**options))


plan.__signature__ = inspect.signature(PlanOptions, eval_str=True)  # type: ignore[attr-defined]

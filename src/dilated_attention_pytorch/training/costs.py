"""How many operations a training step needs, and how many a GPU could do in the same time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from dilated_attention_pytorch.hardware import reported_gpu
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.plan.tiles import compile_plan


def peak_of(device: torch.device) -> tuple[str, float] | None:
    """The name of a GPU and its largest rate in bfloat16; None for a CPU and for a GPU that the table does not have."""
    if device.type != "cuda":
        return None
    found = reported_gpu(torch.cuda.get_device_name(device))
    return None if found is None else (found.name.upper(), found.half)


def attention_flops(config: LongNetConfig, context: int) -> int:
    """Forward and backward of attention over one window, of all layers: only pairs that meet are counted."""
    plan = compile_plan(config.pattern, context, config.key_heads, is_causal=True)
    heads_per_key = config.num_heads // config.key_heads
    both = (plan.flops(config.head_dim, queries_per_key=heads_per_key, backward=x) for x in (False, True))
    return config.num_layers * sum(both)


def window_flops(model: nn.Module, config: LongNetConfig, context: int) -> int:
    """Operations of a forward and a backward of one window: 6 for each token and parameter, and attention.

    The table of embeddings is not counted unless it is also the output layer. Nothing that is computed twice, such as
    checkpointed activations, is counted twice.
    """
    return 6 * multiplied_parameters(model, config) * context + attention_flops(config, context)


def multiplied_parameters(model: nn.Module, config: LongNetConfig) -> int:
    """The parameters that every token is multiplied with."""
    table = 0 if config.tie_embeddings else (config.vocab_size or 0) * config.embed_dim
    return sum(p.numel() for p in model.parameters()) - table


def peak_memory(device: torch.device) -> int:
    """The largest number of bytes so far: of tensors on a GPU, of the resident process on a CPU, 0 if not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.is_file():  # not Linux
        return 0
    lines = status.read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)

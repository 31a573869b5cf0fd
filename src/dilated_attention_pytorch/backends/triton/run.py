"""Launching the kernels: buffers, tables, order of launches."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from dilated_attention_pytorch import dropout
from dilated_attention_pytorch.backends.triton.backward import delta_kernel, dkv_kernel, dq_kernel
from dilated_attention_pytorch.backends.triton.configs import Config, Configs, configs, padded
from dilated_attention_pytorch.backends.triton.forward import forward_kernel
from dilated_attention_pytorch.backends.triton.tables import Launch, launches, table
from dilated_attention_pytorch.plan import Plan
from dilated_attention_pytorch.spans import Span

_LOG2_E = math.log2(math.e)


def _configs(x: Tensor) -> Configs:
    capability = torch.cuda.get_device_capability(x.device) if x.device.type == "cuda" else (9, 0)
    return configs(capability, x.dtype, x.shape[-1])


def _constants(x: Tensor, config: Config, dropout_p: float) -> dict[str, Any]:
    """What all kernels over tiles are specialised on."""
    # float32 products are exact to float32 unless the caller allowed less for all of PyTorch.
    exact = x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return {
        "D": x.shape[-1],
        "BLOCK_D": padded(x.shape[-1]),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "DROPOUT": dropout_p > 0.0,
        "PRECISION": "ieee" if exact else "tf32",
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def _keep(dropout_p: float) -> tuple[int, float]:
    return dropout.threshold(dropout_p), 1.0 / (1.0 - dropout_p)


def _covers(last: Launch, whole_batch: bool) -> bool:
    """Whether a launch writes every row: then it can write the result, and nothing must be zeroed before."""
    return whole_batch and last.rate == 1


class _Sums:
    """A result that several launches add to: kept in float32 until the launch that completes it writes it.

    ``partial`` and ``out`` are one tensor for float32. Rows that no launch writes are zero at the end.
    """

    def __init__(self, like: Tensor, steps: list[Launch], covered: bool) -> None:
        self.covered = covered and bool(steps)
        single = len(steps) <= 1 or like.dtype == torch.float32
        make = torch.empty if self.covered else torch.zeros
        self.out = make(like.shape, dtype=like.dtype, device=like.device)
        self.partial = self.out if single else make(like.shape, dtype=torch.float32, device=like.device)
        self.last = len(steps) - 1

    def final(self, step: int) -> bool:
        """Whether this launch writes ``out`` instead of ``partial``."""
        return self.partial is self.out or (self.covered and step == self.last)

    def result(self) -> Tensor:
        """The complete tensor."""
        return self.out if self.partial is self.out or self.covered else self.partial.to(self.out.dtype)


def _whole(plans: list[tuple[Span, Plan]], batch: int, rows: int) -> bool:
    """Whether the plans are one sequence of this many rows in every sample."""
    return len(plans) == 1 and plans[0][0].samples == slice(0, batch) and len(plans[0][1].queries) == rows


def forward(
    plans: list[tuple[Span, Plan]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))``."""
    batch, n, heads, _ = query.shape
    group = heads // key.shape[2]
    steps = launches(plans)
    config = _configs(query).forward
    constants = _constants(query, config, dropout_p)
    covered = bool(steps) and _covers(steps[-1], _whole(plans, batch, n))
    sums = _Sums(query, steps, covered)
    lse = torch.full((batch, heads, n), -torch.inf, dtype=torch.float32, device=query.device)
    for step, launch in enumerate(steps):
        rows = table(launch, block=config.block_m, by_keys=False, group=group, device=query.device)
        forward_kernel[(rows.programs,)](
            query, key, value, sums.partial, sums.out, lse, rows.rows, lse if seed is None else seed, rows.families,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], n, heads, group, key.shape[1] - n,
            -1.0 if scale < 0 else 1.0, abs(scale) * _LOG2_E, *_keep(dropout_p),
            MERGE=step > 0, FINAL=sums.final(step), **constants,
        )  # fmt: skip
    return sums.result(), lse


def backward(
    plans: list[tuple[Span, Plan]],
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    detach_mixing: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` from the merged ``out`` and ``lse``."""
    batch, n, heads, _ = query.shape
    m, key_heads = key.shape[1], key.shape[2]
    steps = launches(plans)
    chosen = _configs(query)
    seed = lse if seed is None else seed
    whole = _whole(plans, batch, n)
    delta = _delta(dout, out, dlse)
    deltas = [delta] * len(steps)
    if detach_mixing:
        deltas = _branch_deltas(plans, steps, dout, dlse, query, key, value, scale=scale, dropout_p=dropout_p, seed=seed)
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *dout.stride()[:3])
    scales = (scale * _LOG2_E, scale, *_keep(dropout_p))
    device = query.device

    # dq before dk and dv, so that the float32 sums of both never exist together.
    sums = _Sums(query, steps, bool(steps) and _covers(steps[-1], whole))
    written = torch.zeros((batch, heads, n), dtype=torch.int8, device=device)
    constants = _constants(query, chosen.dq, dropout_p)
    for step, launch in enumerate(steps):
        rows = table(launch, block=chosen.dq.block_m, by_keys=False, group=heads // key_heads, device=device)
        dq_kernel[(rows.programs,)](
            query, key, value, dout, lse, deltas[step], sums.partial, sums.out, written, rows.rows, seed, rows.families,
            *strides, n, heads, heads // key_heads, m - n, *scales,
            MERGE=step > 0, FINAL=sums.final(step), **constants,
        )  # fmt: skip
    dq = sums.result()
    del sums, written

    covered = bool(steps) and _covers(steps[-1], whole and n == m)
    k_sums, v_sums = _Sums(key, steps, covered), _Sums(value, steps, covered)
    written = torch.zeros((batch, key_heads, m), dtype=torch.int8, device=device)
    constants = _constants(query, chosen.dkv, dropout_p)
    for step, launch in enumerate(steps):
        rows = table(launch, block=chosen.dkv.block_n, by_keys=True, group=heads // key_heads, device=device)
        dkv_kernel[(rows.programs,)](
            query, key, value, dout, lse, deltas[step], k_sums.partial, v_sums.partial, k_sums.out, v_sums.out, written,
            rows.rows, seed, rows.families, *strides, n, m, heads, key_heads, heads // key_heads, m - n, *scales,
            MERGE=step > 0, FINAL=k_sums.final(step), **constants,
        )  # fmt: skip
    return dq, k_sums.result(), v_sums.result()


def _delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    batch, n, heads, d = out.shape
    delta = torch.empty((batch, heads, n), dtype=torch.float32, device=out.device)
    if out.numel():
        block = 64
        delta_kernel[(triton.cdiv(batch * n * heads, block),)](
            dout, out, delta if dlse is None else dlse.contiguous(), delta, *dout.stride()[:3], batch * n * heads, n, heads,
            D=d, BLOCK_D=padded(d), BLOCK=block, HAS_DLSE=dlse is not None,
        )  # fmt: skip
    return delta


def _branch_deltas(
    plans: list[tuple[Span, Plan]],
    steps: list[Launch],
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    **options: Any,
) -> list[Tensor]:
    """For constant mixing weights: delta from the output that each branch has alone, computed again."""
    by_branch: dict[int, Tensor] = {}
    for launch in steps:
        if launch.branch not in by_branch:
            alone = [(span, plan.of_branch(launch.branch)) for span, plan in plans]
            branch_out, _ = forward(alone, query, key, value, **options)
            by_branch[launch.branch] = _delta(dout, branch_out, dlse)
    return [by_branch[launch.branch] for launch in steps]

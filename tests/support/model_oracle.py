"""LongNet models written out for one sequence in float64: norms, projections and positions without library code."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import oracle


def norm(x: Tensor, w: dict[str, Tensor], name: str, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def xpos(x: Tensor, config, positions: Tensor, sign: int) -> Tensor:
    """The authors' XPOS in complex numbers, for x (n, heads, D); sign 0 is rotary."""
    half = config.head_dim // 2
    k = torch.arange(half, dtype=torch.float64)
    angle = positions.double()[:, None, None] / config.rotary_base ** (k / half)
    zeta = (2 * k + 0.4 * config.head_dim) / (1.4 * config.head_dim)
    factor = zeta ** (sign * positions.double()[:, None, None] / config.xpos_scale_base)
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], half, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(factor.expand_as(angle).contiguous(), angle)).flatten(-2)


def forward(w: dict[str, Tensor], config, x: Tensor, *, causal: bool, positions: Tensor | None = None) -> Tensor:
    """The states of one sequence (n, E), or of token ids (n,), behind the last norm."""
    eps = config.layer_norm_eps
    x = w["embed_tokens.weight"][x] if x.dim() == 1 else x.double()
    positions = torch.arange(len(x)) if positions is None else positions
    for i in range(config.num_layers):
        here = f"layers.{i}."
        own = {name.removeprefix(here): tensor for name, tensor in w.items() if name.startswith(here)}
        h = norm(x, own, "self_attn_layer_norm", eps)
        q, k, v = (linear(h, own, f"self_attn.{n}_proj").reshape(len(x), -1, config.head_dim) for n in "qkv")
        if config.positions != "none":
            sign = int(config.positions == "xpos")
            q, k = xpos(q, config, positions, sign), xpos(k, config, positions, -sign)
        h = oracle.attention(q[None], k[None], v[None], config.pattern, is_causal=causal)[0][0].flatten(-2)
        if config.sub_norm:
            h = norm(h, own, "self_attn.inner_attn_ln", eps)
        x = x + linear(h, own, "self_attn.out_proj")
        h = norm(x, own, "final_layer_norm", eps)
        if config.activation == "gelu":
            h = gelu(linear(h, own, "ffn.fc1"))
        else:
            first = linear(h, own, "ffn.fc1")
            h = first * torch.sigmoid(first) * linear(h, own, "ffn.gate")
        if config.sub_norm:
            h = norm(h, own, "ffn.ffn_layernorm", eps)
        x = x + linear(h, own, "ffn.fc2")
    return norm(x, w, "layer_norm", eps) if config.final_norm else x


def weights(model) -> dict[str, Tensor]:
    return {name: x.detach().double() for name, x in model.state_dict().items()}


def perturb(model) -> None:
    """Change every parameter, norms and biases most: unit norms and zero biases hide mistakes."""
    with torch.no_grad():
        for x in model.parameters():
            x += torch.randn_like(x) * (0.5 if x.dim() == 1 else 0.05)

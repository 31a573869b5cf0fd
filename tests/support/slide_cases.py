"""A small slide encoder, slides, and the published formulas written out."""

from __future__ import annotations

import math

import torch

import model_oracle
from dilated_attention_pytorch import LongNetConfig, SlideConfig, SlideEncoder

ENCODER = LongNetConfig(
    embed_dim=16, num_layers=2, num_heads=4, ffn_dim=24, segment_lengths=(8, 20, 64), dilation_rates=(1, 2, 4),
    offsets="blocked", torchscale_padding=True, positions="none", dropout=0.25, drop_path=0.1,
)  # fmt: skip
CONFIG = SlideConfig(encoder=ENCODER, in_chans=6, slide_ngrids=50)
COUNTS = (33, 12, 1)


def model_of(config=CONFIG, dtype=torch.float64):
    torch.manual_seed(0)
    model = SlideEncoder(config, dtype=dtype).eval()
    model_oracle.perturb(model)
    return model


def slides(counts=COUNTS, dtype=torch.float64):
    """Tiles and pixel coordinates of slides, tiles not aligned to cells."""
    torch.manual_seed(1)
    return [(torch.randn(n, 6, dtype=dtype), torch.randint(0, 50 * 256, (n, 2))) for n in counts]


def padded(samples, value=math.nan):
    n = max(len(tiles) for tiles, _ in samples)
    tiles = torch.full((len(samples), n, 6), value, dtype=samples[0][0].dtype)
    coordinates = torch.full((len(samples), n, 2), -7)
    for b, (own, points) in enumerate(samples):
        tiles[b, : len(own)], coordinates[b, : len(own)] = own, points
    return tiles, coordinates


def nested(samples):
    tiles = torch.nested.nested_tensor([x for x, _ in samples], layout=torch.jagged)
    coordinates = torch.nested.nested_tensor([x for _, x in samples], layout=torch.jagged)
    return tiles, coordinates


def position_of(x: float, y: float, width: int) -> list[float]:
    """The row of the authors' table: index = gx * side + gy, and their ``meshgrid`` puts gy into the first half."""
    row = []
    for cell in (math.floor(y / 256), math.floor(x / 256)):
        angles = [cell / 10000 ** (k / (width // 4)) for k in range(width // 4)]
        row += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return row


def oracle_states(model, tiles, coordinates, layers=None):
    """The states (n + 1, E) behind so many layers, with ``encoder.layer_norm`` if it is all of them (None)."""
    w = model_oracle.weights(model)
    config = model.config.encoder
    width = config.embed_dim
    positions = torch.tensor([position_of(*point, width) for point in coordinates.tolist()], dtype=torch.float64).float()
    x = tiles.double() @ w["patch_embed.proj.weight"].T + w["patch_embed.proj.bias"] + positions.double()
    x = torch.cat((w["cls_token"][0], x))
    own = {name.removeprefix("encoder."): t for name, t in w.items() if name.startswith("encoder.")}
    if layers is not None:
        config = config.replace(num_layers=layers, final_norm=False) if layers else None
    return x if config is None else model_oracle.forward(own, config, x, causal=False)


def oracle_embedding(model, tiles, coordinates, layers=None):
    w, states = model_oracle.weights(model), oracle_states(model, tiles, coordinates, layers)
    pooled = states[0] if model.config.pooling == "cls" else states[1:].mean(0)
    return model_oracle.norm(pooled, w, "norm", 1e-6)

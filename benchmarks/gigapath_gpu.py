"""Prov-GigaPath's slide encoder on one GPU: this library beside the authors' method, with the same random weights.

    PYTHONPATH=src python3 benchmarks/gigapath_gpu.py [--out FILE]

``ours`` is ``SlideEncoder`` as a user calls it, with the check of coordinates. ``authors`` is a reimplementation of the
authors' code (prov-gigapath 09d8e87) in this file: its position table, its layers, and its dilated attention with the same
copies. Flash attention is PyTorch's. Both run in bfloat16, in turns, and times are medians over turns. Peaks are beyond
weights, inputs and the table. Errors are against this library in float32, with the same rounded weights and tiles. On a CPU
(``--device cpu --tiles 500 --layers 2``) both run in float32, which compares the two methods to rounding.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import dilated_attention_pytorch
from dilated_attention_pytorch import SlideConfig, SlideEncoder, explain
from dilated_attention_pytorch.measure import peak_extra_bytes

TURNS, SECONDS = 5, 0.4  # of calls that are not counted, and of calls that are, in every turn


def flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Dense attention (b, h, l, d) with the logarithm of the sum of its exponentials (b, h, l)."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False)[:2]


class AuthorsAttention:
    """``DilatedAttention`` of the authors' code, step by step; comments are the patterns of its ``rearrange``."""

    def __init__(self, segment_lengths: tuple[int, ...], dilation_rates: tuple[int, ...], heads: int) -> None:
        if any(heads % rate for rate in dilation_rates):
            raise ValueError(f"{heads} heads must be a multiple of all rates {dilation_rates}")
        self.branches, self.heads = list(zip(segment_lengths, dilation_rates, strict=True)), heads

    def gathering(self, x: Tensor, rate: int, segment: int) -> Tensor:
        """Pad to whole segments, and take each head's rows of every segment."""
        segment = min(segment, x.shape[1])
        x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % segment))
        x = x.reshape(-1, segment, *x.shape[2:])  # b (n g) h d -> (b n) g h d
        x = F.pad(x, (0, 0, 0, 0, 0, -segment % rate))
        b, length, h, d = x.shape
        # b (l r1) (r2 h) d -> b l h d r1 r2
        x = x.reshape(b, length // rate, rate, rate, h // rate, d).permute(0, 1, 4, 5, 2, 3)
        x = torch.diagonal(x, offset=0, dim1=4, dim2=5)
        x = x.permute(0, 1, 4, 2, 3).reshape(b, length // rate, h, d)  # b l h d r -> b l (r h) d
        return x.permute(0, 2, 1, 3).reshape(b * h, length // rate, d)  # b l h d -> (b h) l d

    def sparse_to_dense(self, out: Tensor, lse: Tensor, rate: int) -> tuple[Tensor, Tensor]:
        """The rows of a branch among zeros."""
        b, length, h, d = out.shape
        out = out.reshape(b, length, rate, h // rate, d).permute(0, 1, 3, 4, 2)  # b l (r h) d -> b l h d r
        out = torch.diag_embed(out, offset=0, dim1=4, dim2=5)
        out = out.permute(0, 5, 2, 1, 4, 3).reshape(b, h, length * rate, d)  # b l h d r1 r2 -> b (r2 h) (l r1) d
        lse = lse.reshape(b, rate, h // rate, length).permute(0, 3, 2, 1)  # b (r h) l -> b l h r
        lse = torch.diag_embed(lse, offset=0, dim1=3, dim2=4)
        lse = lse.masked_fill_(lse == 0, -1e8)
        return out, lse.permute(0, 4, 2, 1, 3).reshape(b, h, length * rate, 1)  # b l h r1 r2 -> b (r2 h) (l r1) 1

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, N, H * D) from queries, keys and values of this shape."""
        batch, n, heads = q.shape[0], q.shape[1], self.heads
        # b l (h d) -> (b h) l d -> b l h d
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        outs, lses = [], []
        for segment, rate in self.branches:
            ki, vi, qi = (self.gathering(x, rate, segment) for x in (k, v, q))
            out, lse = flash(*(x.unflatten(0, (-1, heads)) for x in (qi, ki, vi)))
            outs.append(out.transpose(1, 2).flatten(2))
            lses.append(lse[:, :, : out.shape[2]])
        all_outs, all_lses = [], []
        for (_, rate), o, lse in zip(self.branches, outs, lses, strict=True):
            o, lse = self.sparse_to_dense(o.unflatten(-1, (heads, -1)), lse, rate)
            # (b n) h g d -> (b h) (n g) d
            o, lse = (x.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1) for x in (o, lse))
            all_outs.append(o[:, :n])
            all_lses.append(lse[:, :n])
        most = torch.stack(all_lses, dim=0).max(0)[0]
        all_lses = [torch.exp(lse - most) for lse in all_lses]
        total = torch.stack(all_lses, dim=0).sum(0)
        all_lses = [lse / total for lse in all_lses]
        result: Tensor | int = 0
        for o, lse in zip(all_outs, all_lses, strict=True):
            result += o * lse.type_as(o)
        assert isinstance(result, Tensor)
        return result.unflatten(0, (batch, heads)).transpose(1, 2).flatten(2)  # (b h) l d -> b l (h d)


def position_table(side: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The authors' table (side * side + 1, width): row 0 is that of CLS."""
    quarter = width // 4
    frequencies = 1.0 / 10000.0 ** (torch.arange(quarter, dtype=torch.float64, device=device) / quarter)
    angles = torch.arange(side, dtype=torch.float64, device=device)[:, None] * frequencies
    line = torch.cat((angles.sin(), angles.cos()), 1).float().to(dtype)
    table = torch.zeros(side * side + 1, width, dtype=dtype, device=device)
    table[1:].view(side, side, width)[..., : width // 2] = line  # by gy, the fast index
    table[1:].view(side, side, width)[..., width // 2 :] = line[:, None]
    return table


class AuthorsEncoder:
    """``LongNetViT`` of the authors' code with the tensors of a ``SlideEncoder``, for inference."""

    def __init__(self, model: SlideEncoder) -> None:
        self.w, self.config = dict(model.state_dict()), model.config
        encoder = model.config.encoder
        self.attention = AuthorsAttention(encoder.segment_lengths, encoder.dilation_rates, encoder.num_heads)
        token = self.w["cls_token"]
        self.table = position_table(model.config.slide_ngrids, encoder.embed_dim, token.device, token.dtype)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def norm(self, x: Tensor, name: str, eps: float = 1e-5) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], eps)

    def __call__(self, tiles: Tensor, coordinates: Tensor) -> Tensor:
        x = self.linear(tiles, "patch_embed.proj")
        cells = torch.floor(coordinates / self.config.tile_size)
        index = (cells[..., 0] * self.config.slide_ngrids + cells[..., 1]).long() + 1
        x = x + self.table[index]
        token = self.w["cls_token"] + self.table[None, :1]
        x = torch.cat((token.expand(x.shape[0], -1, -1), x), dim=1)
        for i in range(self.config.encoder.num_layers):
            here = f"encoder.layers.{i}"
            h = self.norm(x, f"{here}.self_attn_layer_norm")
            q, k, v = (self.linear(h, f"{here}.self_attn.{name}_proj") for name in "qkv")
            h = self.norm(self.attention(q, k, v), f"{here}.self_attn.inner_attn_ln")
            x = x + self.linear(h, f"{here}.self_attn.out_proj")
            h = self.linear(self.norm(x, f"{here}.final_layer_norm"), f"{here}.ffn.fc1")
            h = self.norm(F.gelu(h.float()).type_as(h), f"{here}.ffn.ffn_layernorm")
            x = x + self.linear(h, f"{here}.ffn.fc2")
        x = self.norm(x, "encoder.layer_norm")
        if self.config.pooling == "mean":
            return self.norm(x[:, 1:].mean(1), "norm", self.config.norm_eps)
        return self.norm(x, "norm", self.config.norm_eps)[:, 0]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """The times of single calls for so many seconds, at least two."""
    times: list[float] = []
    while sum(times) < seconds or len(times) < 2:
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times


def random_model(config: SlideConfig, device: torch.device) -> SlideEncoder:
    """A model whose norms and biases are random too: unit norms hide mistakes."""
    torch.manual_seed(0)
    model = SlideEncoder(config, device=device).eval()
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() == 1:
                x += 0.1 * torch.randn_like(x)
    return model


def relative(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict:
    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    changes = {} if options.layers is None else {"num_layers": options.layers}
    config = SlideConfig.gigapath(options.width, pooling=options.pooling, **changes)
    model = random_model(config, device).to(dtype)
    cells = torch.randperm(config.slide_ngrids**2)[: options.tiles].sort().values
    coordinates = 256 * torch.stack((cells // config.slide_ngrids, cells % config.slide_ngrids), -1)[None].to(device)
    tiles = torch.randn(1, options.tiles, config.in_chans, device=device).to(dtype)
    exact = copy.deepcopy(model).float()(tiles.float(), coordinates)
    theirs = AuthorsEncoder(model)
    methods: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: model(tiles, coordinates), "authors": lambda: theirs(tiles, coordinates),
    }  # fmt: skip
    results = {name: call() for name, call in methods.items()}
    errors = {name: relative(x, exact) for name, x in results.items()}
    difference = relative(results["ours"], results["authors"])
    # Both methods round at other places, so they differ by as much as each of them differs from float32.
    bound = 1e-4 if dtype == torch.float32 else 2 * errors["authors"]
    assert max(errors["ours"], difference) <= bound, f"ours {errors['ours']}, difference {difference}, bound {bound}"
    assert errors["authors"] <= (1e-4 if dtype == torch.float32 else 0.1), errors
    peaks = {name: peak_extra_bytes(call, device) for name, call in methods.items()}
    seconds = 0.0 if device.type == "cpu" else SECONDS
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(1 if device.type == "cpu" else TURNS):
        for name, call in methods.items():
            timed(call, device, seconds)
            times[name].append(statistics.median(timed(call, device, seconds)))
    encoder = config.encoder
    rows = torch.empty(1, options.tiles + 1, encoder.num_heads, encoder.head_dim, dtype=dtype, device=device)
    assert encoder.offsets == "blocked"
    assert encoder.torchscale_padding
    milliseconds = {name: [1e3 * x for x in own] for name, own in times.items()}
    return {
        "model": f"{encoder.num_layers} x {encoder.embed_dim}", "tiles": options.tiles, "dtype": str(dtype),
        "pooling": config.pooling, "backend": explain(rows, rows, rows, encoder.pattern).backend,
        "milliseconds": {name: statistics.median(own) for name, own in milliseconds.items()}, "turns": milliseconds,
        "peak_bytes": peaks, "weights_bytes": sum(x.nbytes for x in model.parameters()), "tiles_bytes": tiles.nbytes,
        "authors_table_bytes": theirs.table.nbytes, "relative_error": errors, "relative_difference": difference,
        "speedup": statistics.median(milliseconds["authors"]) / statistics.median(milliseconds["ours"]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiles", type=int, default=45_680)
    parser.add_argument("--width", type=int, default=768, choices=(768, 1024, 1536))
    parser.add_argument("--layers", type=int, help="other than the published number")
    parser.add_argument("--pooling", default="cls", choices=("cls", "mean"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = measure(options)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    versions = {"torch": torch.__version__, "library": dilated_attention_pytorch.__version__}
    print(f"{found['model']}, {found['tiles']:,} tiles, {found['dtype']}, {name}, backend {found['backend']}, {versions}")
    print(f"weights {found['weights_bytes'] / 2**20:,.0f} MiB, tiles {found['tiles_bytes'] / 2**20:,.0f} MiB, table of the "
          f"authors' code {found['authors_table_bytes'] / 2**20:,.0f} MiB")  # fmt: skip
    print("| method | ms | peak beyond weights, tiles and table | relative error |\n| --- | ---: | ---: | ---: |")
    for method in ("ours", "authors"):
        peak = f"{found['peak_bytes'][method] / 2**20:,.0f} MiB"
        print(f"| {method} | {found['milliseconds'][method]:,.1f} | {peak} | {found['relative_error'][method]:.1e} |")
    print(f"ours is {found['speedup']:.2f} times as fast; the results differ by {found['relative_difference']:.1e}")
    if options.out is not None:
        options.out.write_text(json.dumps({"device": name, "versions": versions, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The slide encoder on a GPU: against the same model on the CPU in float64, in batches, and what it waits for."""

from __future__ import annotations

import warnings

import pytest
import torch

from dilated_attention_pytorch import LongNetConfig, SlideConfig, SlideEncoder

pytestmark = pytest.mark.gpu
ENCODER = LongNetConfig(
    embed_dim=192, num_layers=2, num_heads=4, ffn_dim=384, segment_lengths=(64, 250, 1024), dilation_rates=(1, 2, 4),
    offsets="blocked", torchscale_padding=True, positions="none",
)  # fmt: skip
COUNTS = (700, 33, 301)
TOLERANCE = {torch.bfloat16: 5e-2, torch.float32: 1e-5}


def model_of(pooling: str) -> SlideEncoder:
    torch.manual_seed(0)
    model = SlideEncoder(SlideConfig(encoder=ENCODER, in_chans=64, pooling=pooling), device="cpu").eval()
    with torch.no_grad():
        for x in model.parameters():
            x += torch.randn_like(x) * (0.3 if x.dim() == 1 else 0.02)
    return model


def slides() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(1)
    tiles = torch.randn(len(COUNTS), max(COUNTS), 64, generator=generator, device="cpu")
    return tiles, torch.randint(0, 256_000, (len(COUNTS), max(COUNTS), 2), generator=generator, device="cpu")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("order", [None, True])
@torch.no_grad()
def test_embeddings_and_maps(dtype, pooling, order):
    model = model_of(pooling).to(dtype)
    tiles, coordinates = slides()
    exact = model_of(pooling).to(dtype).double()
    own = {"lengths": COUNTS, "order": order}
    expected, weights = exact(tiles.to(dtype), coordinates, **own), exact.attention_map(tiles.to(dtype), coordinates, **own)
    model, tiles = model.to("cuda"), tiles.to("cuda", dtype)
    for points in (coordinates, coordinates.to("cuda")):
        found = model(tiles, points, **own)
        error = (found.cpu().double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype]
        error = (model.attention_map(tiles, points, **own).cpu().double() - weights).norm() / weights.norm()
        assert error < TOLERANCE[dtype]
    samples = [(x[:n], p[:n]) for x, p, n in zip(tiles, coordinates.to("cuda"), COUNTS, strict=True)]
    nested = [torch.nested.nested_tensor([pair[i] for pair in samples], layout=torch.jagged) for i in (0, 1)]
    error = (model(*nested, order=order).cpu().double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype]


def test_the_check_of_coordinates_waits_once():
    model, (tiles, coordinates) = model_of("cls").to("cuda"), slides()
    tiles, coordinates = tiles.to("cuda"), coordinates.to("cuda")
    model(tiles, coordinates)  # tables and kernels are made
    counts = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        for check in (False, True):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(tiles, coordinates, check_coordinates=check)
            counts.append(sum("called a synchronizing" in str(one.message) for one in caught))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts == [0, 1]


def test_coordinates_off_the_grid_are_refused():
    """Without a failed assertion on the device, which would end the process's use of it."""
    model, (tiles, coordinates) = model_of("cls").to("cuda"), slides()
    with pytest.raises(ValueError, match="0 <= x, y < 256,000"):
        model(tiles.to("cuda"), coordinates.to("cuda") + 256_000)
    assert model(tiles.to("cuda"), coordinates.to("cuda")).isfinite().all()

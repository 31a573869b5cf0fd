"""``LongViT``: a vision transformer over all patches of a large image, with the checkpoints of its authors."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention_pytorch.integers import as_integer
from dilated_attention_pytorch.models.checkpoints import read_checkpoint
from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.encoder import LongNetEncoder
from dilated_attention_pytorch.models.files import Pretrained
from dilated_attention_pytorch.models.layers import reset_parameters
from dilated_attention_pytorch.models.nested import NestedConfig
from dilated_attention_pytorch.models.presets import PRESETS

_POSITIONS = "model.pos_embed"
_ENTRIES = ("model", "module", "teacher")  # of the authors' training scripts


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig(NestedConfig):
    """The sizes and options of a ``LongViT``. Every field is checked.

    Args:
        encoder: of the LongNet, without positions of its own.
        image_size: the side in pixels of the square images for which there are learned positions.
        patch_size: the side of a patch, a divisor of ``image_size``.
        in_chans: the channels of images.
        num_classes: the outputs of the head; 0 for no head.

    >>> ImageConfig.longvit(4096, num_classes=2).encoder.segment_lengths
    (1024, 2048, 4096, 8192, 16384)
    """

    encoder: LongNetConfig
    image_size: int
    patch_size: int = 32
    in_chans: int = 3
    num_classes: int = 0

    def __post_init__(self) -> None:
        self.check_fields({"image_size": 1, "patch_size": 1, "in_chans": 1, "num_classes": 0})
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size must be a multiple of patch_size, got {self.image_size} and {self.patch_size}")

    @property
    def side(self) -> int:
        """The patches along each side of an image."""
        return self.image_size // self.patch_size

    @staticmethod
    def longvit(image_size: int, *, num_classes: int = 0, **changes: Any) -> ImageConfig:
        """LongViT for square images of so many pixels: 12 layers of width 384, and segment lengths by the image size.

        Sizes of 4,096, 8,192, 16,384 and 32,768 pixels have segment lengths of their own. All others have those of 1,024
        pixels, as in the authors' code. ``changes`` are other values for fields of the encoder.
        """
        image_size = as_integer("image_size", image_size, 1)
        name = f"longvit-{image_size}" if f"longvit-{image_size}" in PRESETS else "longvit-1024"
        return ImageConfig(encoder=LongNetConfig.preset(name, **changes), image_size=image_size, num_classes=num_classes)


class _ImageBackbone(nn.Module):
    """Patches, learned positions and layers, under the names of the authors' code."""

    def __init__(self, config: ImageConfig, **factory: Any) -> None:
        super().__init__()
        width, patch = config.encoder.embed_dim, config.patch_size
        self.pos_embed = nn.Parameter(torch.empty(1, config.side**2, width, **factory))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(config.in_chans, width, patch, patch, **factory)})
        self.encoder = LongNetEncoder(config.encoder, **factory)


class LongViT(Pretrained):
    """LongViT: non-overlapping patches, learned positions, LongNet layers, the mean over patches, a norm and a head.

    There is no CLS token, and no norm behind the last layer (``final_norm=False``). Parameters have the names of the
    authors' ``LongViTForTCGAClassification``.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    >>> config = ImageConfig.longvit(1024, num_classes=3, embed_dim=64, num_layers=2, ffn_dim=128)
    >>> LongViT(config).eval()(torch.randn(1, 3, 256, 320)).shape
    torch.Size([1, 3])
    """

    config_type = ImageConfig
    config: ImageConfig

    def __init__(
        self, config: ImageConfig, *, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        if not isinstance(config, ImageConfig):
            raise TypeError(f"config must be an ImageConfig, got {type(config).__name__}; see ImageConfig.longvit")
        super().__init__(config)
        factory: dict[str, Any] = {"device": "meta", "dtype": dtype}
        width = config.encoder.embed_dim
        self.model = _ImageBackbone(config, **factory)
        self.fc_norm = nn.LayerNorm(width, **factory)
        self.head = nn.Linear(width, config.num_classes, **factory) if config.num_classes else None
        self.materialise(device)

    def reset_parameters(self) -> None:
        """Draw new parameters, as the constructor does."""
        reset_parameters(self, self.config.encoder)
        nn.init.trunc_normal_(self.model.pos_embed, std=0.02)
        projection = self.model.patch_embed["proj"]
        assert isinstance(projection, nn.Conv2d)
        projection.reset_parameters()

    def forward(self, images: Tensor) -> Tensor:
        """The outputs (B, num_classes) of the head for images (B, in_chans, height, width), or the features without one.

        Height and width are multiples of the patch size. Positions are resized for sizes other than that of the config.
        """
        features = self.features(images)
        return features if self.head is None else self.head(features)

    def features(self, images: Tensor) -> Tensor:
        """The norm of the mean over patches, (B, E)."""
        config, dtype = self.config, self.model.pos_embed.dtype
        if not isinstance(images, Tensor) or not images.is_floating_point():
            got = images.dtype if isinstance(images, Tensor) else type(images).__name__
            raise TypeError(f"images must be a floating-point tensor, got {got}; scale and normalise pixels first")
        if images.dim() != 4 or images.shape[1] != config.in_chans:
            raise ValueError(f"images must be (batch, {config.in_chans}, height, width), got {tuple(images.shape)}")
        height, width = images.shape[2:]
        if height % config.patch_size or width % config.patch_size or 0 in images.shape:
            raise ValueError(
                f"height and width must be positive multiples of the patch size {config.patch_size}, got {height} x "
                f"{width}; crop or pad the images"
            )
        patches = self.model.patch_embed["proj"](images.to(dtype)).flatten(2).transpose(1, 2)
        sides = height // config.patch_size, width // config.patch_size
        states = self.model.encoder(patches + self.positions(*sides))
        result: Tensor = self.fc_norm(states.mean(1))
        return result

    def positions(self, rows: int, columns: int) -> Tensor:
        """The learned positions (1, rows * columns, E), by bicubic interpolation unless this is their own size.

        As in the authors' code, the scale of the interpolation is that of 0.1 more rows and columns.
        """
        own, side = self.model.pos_embed, self.config.side
        if rows == columns == side:
            return own
        grid = own.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        scale = (rows + 0.1) / side, (columns + 0.1) / side
        resized = F.interpolate(grid, scale_factor=scale, mode="bicubic")
        assert resized.shape[2:] == (rows, columns)
        return resized.flatten(2).transpose(1, 2)

    @classmethod
    def from_checkpoint(
        cls, file: str | os.PathLike[str], *, image_size: int | None = None, num_classes: int | None = None,
        config: ImageConfig | None = None, device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:  # fmt: skip
        """The model with the weights of a file of LongViT's authors.

        Missing, unexpected and misshapen tensors raise and are all listed. So does a truncated file, with its name. The
        model is in training mode as every new module; call ``eval()`` for inference.

        Args:
            file: of ``torch.save``, or a safetensors file. Nothing but tensors is unpickled. The prefixes of DDP and
                fairscale are removed from names.
            image_size: the side of images in pixels, which decides about segment lengths; that of the file if None.
                Positions are resized by bicubic interpolation, and rounded to float16, as in the authors' code.
            num_classes: None for the head of the file. Otherwise the model gets a new head unless that of the file has so
                many outputs; 0 is for no head. A file of pretraining has no head and no ``fc_norm``: pass ``num_classes``,
                and the norm gets its initial values. Its tensors have names with ``backbone.`` instead of ``model.``.
            config: None for ``ImageConfig.longvit``. It excludes ``image_size`` and ``num_classes``.
            device, dtype: of the parameters; PyTorch's default device and the dtypes of the file if None.
        """
        found = read_checkpoint(file, _ENTRIES)
        tensors = {re.sub(r"^backbone\.", "model.", name): x for name, x in found.items()}
        if config is None:
            config = _config(tensors, image_size, num_classes, str(file))
        elif image_size is not None or num_classes is not None:
            raise ValueError("a config has image_size and num_classes; leave out these arguments, or the config")
        if num_classes is not None:
            tensors = _with_head(tensors, config)
        return cls.from_tensors(config, _resized(tensors, config.side), str(file), device=device, dtype=dtype)


def _side(positions: Tensor, source: str) -> int:
    """The side of the square grid of these positions."""
    side = math.isqrt(positions.shape[1]) if positions.dim() == 3 else 0
    if positions.dim() != 3 or side**2 != positions.shape[1] or side == 0:
        shape = tuple(positions.shape)
        raise ValueError(f"{source}: {_POSITIONS} must be (1, side * side, width) for a square of patches, got {shape}")
    return side


def _config(
    tensors: Mapping[str, Tensor], image_size: int | None, num_classes: int | None, source: str
) -> ImageConfig:  # fmt: skip
    """The configuration of a checkpoint by the shapes of its tensors."""
    if image_size is None:
        if _POSITIONS not in tensors:
            raise ValueError(f"{source} is not a LongViT: it has no {_POSITIONS}")
        image_size = 32 * _side(tensors[_POSITIONS], source)
    head = tensors.get("head.weight")
    if num_classes is None and (head is None or head.dim() != 2):
        raise ValueError(f"{source} has no head.weight; pass num_classes for a new head, or num_classes=0 for features")
    return ImageConfig.longvit(image_size, num_classes=len(head) if num_classes is None else num_classes)  # type: ignore[arg-type]


def _with_head(tensors: dict[str, Tensor], config: ImageConfig) -> dict[str, Tensor]:
    """The tensors with a new head if theirs has another number of outputs, and with the norm in front of it."""
    width, classes, head = config.encoder.embed_dim, config.num_classes, tensors.get("head.weight")
    if head is None or head.shape != (classes, width):
        tensors = {name: x for name, x in tensors.items() if not name.startswith("head.")}
        if classes:
            weight = nn.init.trunc_normal_(torch.empty(classes, width, device="cpu"), std=0.02)
            tensors |= {"head.weight": weight, "head.bias": torch.zeros(classes, device="cpu")}
    if not any(name.startswith("fc_norm.") for name in tensors):
        tensors |= {"fc_norm.weight": torch.ones(width, device="cpu"), "fc_norm.bias": torch.zeros(width, device="cpu")}
    return tensors


def _resized(tensors: dict[str, Tensor], side: int) -> dict[str, Tensor]:
    """The tensors with positions for a square of ``side`` x ``side`` patches."""
    positions = tensors.get(_POSITIONS)
    if positions is None or positions.dim() != 3 or math.isqrt(positions.shape[1]) ** 2 != positions.shape[1]:
        return tensors  # the model says what is missing or misshapen
    old = math.isqrt(positions.shape[1])
    if old in (0, side):
        return tensors
    grid = positions.reshape(-1, old, old, positions.shape[-1]).permute(0, 3, 1, 2).float()
    grid = F.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)
    return tensors | {_POSITIONS: grid.half().to(positions.dtype).permute(0, 2, 3, 1).flatten(1, 2)}

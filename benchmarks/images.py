"""Pictures from the wheel of scikit-image, read without importing it.

pip install --no-deps scikit-image==0.26.0
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor


def wheel_version() -> str:
    return version("scikit-image")


def picture(name: str, mode: str = "L") -> Tensor:
    """A picture as uint8: (height, width) grey levels, or (height, width, 3) with mode ``"RGB"``."""
    import numpy
    from PIL import Image

    found = find_spec("skimage")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("This benchmark reads pictures of scikit-image: pip install --no-deps scikit-image==0.26.0")
    with Image.open(Path(found.submodule_search_locations[0], "data", name)) as image:
        return torch.from_numpy(numpy.array(image.convert(mode)))

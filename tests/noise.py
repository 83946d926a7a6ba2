"""Images of noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def noise(n: int, size: int) -> Tensor:
    """uint8 [n, 3, size, size], the same for the same n."""
    return torch.randint(256, (n, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))


def noise_file(path: Path, width: int = 70, height: int = 50) -> Path:
    """Write an image file, the same for the same width and height."""
    path.parent.mkdir(exist_ok=True)
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path

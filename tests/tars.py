"""Images of noise, and folders and tars of them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def encode(pixels: np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    """uint8 [H, W, 3] or [H, W] as an encoded image."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth random colours, uint8 [H, W, 3], so that JPEG changes little."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)).copy()


def noise_batch(n: int, size: int) -> Tensor:
    """uint8 [n, 3, size, size], the same for the same n."""
    return torch.randint(256, (n, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))


def draw(path: Path, seed: int, width: int = 40, height: int = 30) -> Path:
    """Write an image of 6 times 8 patches of random colours, of the format of the name's ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST).save(path, quality=95)
    return path


def photos_in(folder: Path, n: int = 12) -> Path:
    """Photos without captions, every second one in a subfolder."""
    for i in range(n):
        draw(folder / ("deep" if i % 2 else "") / f"{i:02}.jpg", i)
    return folder


def far(a: np.ndarray, b: np.ndarray) -> int:
    """The greatest difference, in levels."""
    assert a.shape == b.shape
    return int(np.abs(a.astype(int) - b.astype(int)).max())


def photo(seed: int = 0) -> bytes:
    return encode(noise(12, 16, seed))


def write_tar(path: Path, members: Mapping[str, bytes] | list[tuple[str, bytes]]) -> Path:
    """A plain tar with these members in this order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items() if isinstance(members, Mapping) else members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def pairs(count: int, first: int = 0) -> dict[str, bytes]:
    """Members of `count` good samples."""
    rows = range(first, first + count)
    return {f"{i:04d}.{s}": photo(i) if s == "png" else f"image {i}".encode() for i in rows for s in ("png", "txt")}

"""Small tars and images for the tests of reading."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image


def encode(pixels: np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    """uint8 [H, W, 3] or [H, W] as an encoded image."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth random colours, uint8 [H, W, 3], so that JPEG changes little."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)).copy()


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

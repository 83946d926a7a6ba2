"""Images of pages and sheets: thumbnails, heat over an image, data addresses."""

from __future__ import annotations

import base64
import io

import numpy as np
import numpy.typing as npt
from PIL import Image

from kiloword.report.blocks import Pixels

Floats = npt.NDArray[np.floating]
SMALL = 96  # pixels: pages enlarge smaller images with hard edges, as the model saw them
GLOW = np.array([255, 140, 10])  # colour of high values, visible on dark and on bright images


def thumbnail(image: Image.Image | Pixels, side: int = 320) -> Pixels:
    """An image as RGB [H, W, 3] of at most `side` pixels a side; smaller ones stay as they are, pages enlarge them."""
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image = image.convert("RGB")
    image.thumbnail((side, side), Image.Resampling.BICUBIC)
    return np.asarray(image)


def overlay(image: Pixels, looks: Floats, side: int) -> Pixels:
    """The image [H, W, 3] at `side` pixels: grey where a map [rows, columns] is at most its mean, glowing above it.

    Full glow is at the map's largest value, but at least at 4 times its mean, so that a nearly constant map hardly
    glows; negative values count as zero.
    """
    positive = np.clip(np.asarray(looks, np.float32), 0, None)
    mean = float(positive.mean())
    full = max(float(positive.max()), 4 * mean, 1e-12)
    strength = Image.fromarray((positive - mean) / (full - mean)).resize((side, side), Image.Resampling.BICUBIC)
    glow = np.clip(np.asarray(strength), 0, 1)[..., None]  # [side, side, 1]
    colours = np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC), np.float32)
    grey = 0.55 * colours.mean(-1, keepdims=True) + 70
    lit = 0.35 * colours + 0.65 * GLOW
    shown: Pixels = (grey + glow * (lit - grey)).round().clip(0, 255).astype(np.uint8)
    return shown


def image_data(pixels: Pixels) -> str:
    """An image [H, W, 3] as a data address that holds a PNG, or a JPEG where that is far smaller, as of a photo."""
    png, jpeg = io.BytesIO(), io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    Image.fromarray(pixels).save(jpeg, "JPEG", quality=85)
    kind, file = ("png", png)
    if min(pixels.shape[:2]) >= SMALL and len(jpeg.getvalue()) < len(png.getvalue()) / 3:
        kind, file = "jpeg", jpeg
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"

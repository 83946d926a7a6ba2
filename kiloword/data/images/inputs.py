"""From images as users of a `Matcher` pass them to the uint8 pixels that a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kiloword.addresses import is_url, scrubbed
from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.images.decode import Pixels, to_rgb
from kiloword.errors import article
from kiloword.types import BadSample

OneImage: TypeAlias = "Image.Image | str | Path | bytes | np.ndarray[Any, Any] | Tensor"
"""A Pillow image, a path, the bytes of an image file, an array [H, W, 3] or a tensor [3, H, W], uint8 or float from 0
to 1. Addresses (https://...) are not fetched."""

Images: TypeAlias = "OneImage | Sequence[OneImage]"
"""One image or several; an array [I, H, W, 3] and a tensor [I, 3, H, W] are several."""

EXPECTED = (
    "expected a Pillow image, a path, bytes of an image file, an array [H, W, 3] or a tensor [3, H, W], of uint8 or of "
    "floats from 0 to 1, or a list of these"
)


def is_one(images: Any) -> bool:
    """Whether the value is one image, not several."""
    if isinstance(images, np.ndarray | Tensor):
        return images.ndim != 4
    return isinstance(images, str | Path | bytes | bytearray | memoryview | Image.Image)


def as_list(images: Images) -> Any:
    """The images in a form with a length and slices: a list of one, a sequence, or an array or tensor of several.

    Raises: ValueError for anything else, and for no images.
    """
    if is_one(images):
        return [images]
    if not isinstance(images, Sequence | np.ndarray | Tensor):
        raise ValueError(f"got {kind(images)} as images: {EXPECTED}.")
    if not len(images):
        raise ValueError("got no images: expected at least one.")
    return images


def prepare(images: Any, transform: EvalTransform, first: int = 0) -> Tensor:
    """A slice of the images of `as_list` as uint8 [n, 3, size, size]; `first` is its start, for messages.

    Raises: ValueError for a value that is not an image, or a file that cannot be read.
    """
    if isinstance(images, Tensor) and images.dtype == torch.uint8 and images.shape[1:] == (3, *[transform.size] * 2):
        return images
    return torch.stack([_prepare(image, transform, first + i) for i, image in enumerate(images)])


def _prepare(image: Any, transform: EvalTransform, place: int) -> Tensor:
    if isinstance(image, str) and is_url(image):
        raise ValueError(
            f"image {scrubbed(image)[:200]} is an address, which is not fetched: download it, give its path."
        )
    try:
        if isinstance(image, str | Path):
            return transform(Path(image).read_bytes())
        if isinstance(image, Image.Image):
            return transform(np.asarray(to_rgb(image)))
        if isinstance(image, bytes | bytearray | memoryview):
            return transform(bytes(image))
        return transform(_pixels(image, place))
    except OSError as error:
        raise ValueError(f"image {image} cannot be read: {error.strerror}") from error
    except BadSample as error:
        name = image if isinstance(image, str | Path) else place
        raise ValueError(f"image {name} cannot be used: {error}") from error


def _pixels(image: Any, place: int) -> Pixels:
    """An array [H, W, 3] or tensor [3, H, W] as uint8 [H, W, 3]; floats from 0 to 1 are scaled. Raises: ValueError."""
    if not isinstance(image, np.ndarray | Tensor):
        raise ValueError(f"got {kind(image)} as image {place}: {EXPECTED}.")
    what, shape = f"a {image.dtype} {'tensor' if isinstance(image, Tensor) else 'array'}", list(image.shape)
    if isinstance(image, Tensor):
        image = (image.float() if image.is_floating_point() else image).detach().cpu().numpy()
        image = np.moveaxis(image, 0, -1) if image.ndim == 3 else image
    floats = np.issubdtype(image.dtype, np.floating)
    if image.ndim != 3 or image.shape[2] != 3 or not image.size or not (floats or image.dtype == np.uint8):
        raise ValueError(f"image {place} is {what} {shape}: {EXPECTED}.")
    if floats:
        least, most = float(image.min()), float(image.max())
        if not 0 <= least <= most <= 1:
            raise ValueError(
                f"image {place} is {what} with values from {least:.3g} to {most:.3g}: expected 0 to 1; the model "
                "normalises images itself."
            )
        image = (image.astype(np.float32) * 255).round().astype(np.uint8)
    return np.ascontiguousarray(image)


def kind(value: Any) -> str:
    """The name of the value's type, with its article."""
    return article(type(value).__name__)

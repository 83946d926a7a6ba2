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
from kiloword.data.sources.sample import MAX_IMAGE, read_whole
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
    if isinstance(image, bytes | bytearray | memoryview):
        image = bytes(image)
    if isinstance(image, str) and is_url(image):
        raise ValueError(
            f"image {scrubbed(image)[:200]} is an address, which is not fetched: download it, give its path."
        )
    path = Path(image) if isinstance(image, str | Path) else None
    if path is not None and path.is_dir():
        raise ValueError(f"image {path} is a folder: expected an image file.")
    try:
        if path is not None:
            return transform(read_whole(path, "it", MAX_IMAGE))
        return transform(image if isinstance(image, bytes) else _pixels(image, place))
    except OSError as error:
        raise ValueError(f"image {path} cannot be read: {error.strerror}") from error
    except BadSample as error:
        raise ValueError(f"image {place if path is None else path} cannot be used: {error}") from error


def _pixels(image: Any, place: int) -> Pixels:
    """An image in memory as uint8 [H, W, 3]. Raises: ValueError, BadSample."""
    if isinstance(image, Image.Image):
        return np.asarray(to_rgb(image))
    if isinstance(image, Tensor):
        return _of_tensor(image, place)
    if not isinstance(image, np.ndarray):
        raise ValueError(f"got {kind(image)} as image {place}: {EXPECTED}.")
    of_type = image.dtype == np.uint8 or np.issubdtype(image.dtype, np.floating)
    if not of_type or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise ValueError(f"image {place} is a {image.dtype} array {list(image.shape)}: {EXPECTED}.")
    return _of_floats(image, f"a {image.dtype} array", place) if image.dtype != np.uint8 else image


def _of_tensor(image: Tensor, place: int) -> Pixels:
    supported = image.dtype == torch.uint8 or image.is_floating_point()
    if not supported or image.ndim != 3 or image.shape[0] != 3 or not image.numel():
        raise ValueError(f"image {place} is a {image.dtype} tensor {list(image.shape)}: {EXPECTED}.")
    pixels = image.detach().cpu().permute(1, 2, 0)
    if image.is_floating_point():
        return _of_floats(pixels.float().numpy(), f"a {image.dtype} tensor", place)
    return pixels.contiguous().numpy()


def _of_floats(pixels: np.ndarray[Any, Any], what: str, place: int) -> Pixels:
    """Values from 0 to 1 as uint8. Raises: ValueError for others."""
    least, most = float(pixels.min()), float(pixels.max())
    if not 0 <= least <= most <= 1:
        raise ValueError(
            f"image {place} is {what} with values from {least:.3g} to {most:.3g}: expected 0 to 1; the model "
            "normalises images itself."
        )
    return np.ascontiguousarray((pixels.astype(np.float32) * 255).round().astype(np.uint8))


def kind(value: Any) -> str:
    """The name of the value's type, with its article."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"

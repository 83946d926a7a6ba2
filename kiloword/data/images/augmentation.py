"""From a stored image to uint8 [3, size, size]: augmented for training, as the tower expects it for evaluation.

Training crops are drawn before decoding, so that a large JPEG is decoded no finer than its crop needs. torch resizes
them (antialiased bicubic): several times faster than Pillow, and at most 1 level of 255 off. Evaluation decodes fully
and resizes with Pillow, bit for bit as open_clip's users do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter
from torch import Tensor
from torch.nn import functional as F

from kiloword.config.recipes import AugmentConfig, Resize
from kiloword.data.images.decode import MAX_PIXELS, Decoder, Pixels, check_decoder, decode, image_size, to_rgb
from kiloword.randomness import Draw

Box = tuple[float, float, float, float]  # left, top, width, height as shares of the image's sides


@dataclass(frozen=True)
class EvalTransform:
    """Resize the shorter side (bicubic) and crop the centre, or squash: uint8 [3, size, size].

    Args: resize: "shortest": to `size`; a number: to that number of pixels, at least `size`.
    `torchvision.transforms.Resize` and `CenterCrop` on a Pillow image give the same pixels.
    """

    size: int
    resize: Resize = "shortest"

    def __post_init__(self) -> None:
        check_resize(self.size, self.resize)

    def __call__(self, image: bytes | Pixels) -> Tensor:
        """Errors: BadSample for an image that cannot be decoded."""
        return fit(Image.fromarray(decode(image)), self.size, self.resize)


def fit(image: Image.Image, size: int, resize: Resize = "shortest") -> Tensor:
    """What `EvalTransform` does, for a Pillow image of any mode: uint8 [3, size, size].

    Errors: BadSample for a floating-point image.
    """
    image = to_rgb(image)
    wide = high = size
    if resize != "squash":
        side = size if resize == "shortest" else resize
        shorter = min(image.size)
        wide, high = (int(side * length / shorter) for length in image.size)  # rounded down, as torchvision does
    left, top = round((wide - size) / 2), round((high - size) / 2)
    if wide * high > MAX_PIXELS:  # of an extremely narrow image: only the crop is computed
        x, y = image.width / wide, image.height / high
        box = left * x, top * y, min((left + size) * x, image.width), min((top + size) * y, image.height)
        return _tensor(np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box=box))).contiguous()
    if (wide, high) != image.size:
        image = image.resize((wide, high), Image.Resampling.BICUBIC)
    return _tensor(np.asarray(image.crop((left, top, left + size, top + size)))).contiguous()


def check_resize(size: int, resize: Resize) -> None:
    """Raises: ValueError for a shorter side below the size of the crop."""
    if isinstance(resize, int) and resize < size:
        raise ValueError(
            f"resize {resize} is smaller than the image size {size}, which is cropped from its centre: expected at "
            f"least {size}, such as {round(size * 8 / 7)}, or shortest."
        )


@dataclass(frozen=True)
class TrainTransform:
    """Random crop, flip, colour jitter, grey and blur by `augment`, drawn from `Draw`: uint8 [3, size, size].

    Without a random crop (`augment.crop` 1) the image is resized as for evaluation (`resize`).
    `natural` False (positions and directions in the image have a meaning) turns crop and flip off.
    """

    size: int
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    resize: Resize = "shortest"
    decoder: Decoder = "pillow"
    natural: bool = True

    def __post_init__(self) -> None:
        check_decoder(self.decoder)
        check_resize(self.size, self.resize)

    def __call__(self, image: bytes | Pixels, draw: Draw) -> Tensor:
        """Errors: BadSample for an image that cannot be decoded."""
        width, height = image_size(image)
        box: Box = (0.0, 0.0, 1.0, 1.0)
        if self.crops:
            box = random_box(width, height, self.augment, draw)
        elif self.resize != "squash":  # the part of the image that evaluation sees
            share = self.size / self.resize if isinstance(self.resize, int) else 1.0
            box = _centre(width, height, 1.0, 1.0, share)
        least = self.size / min(box[2] * width, box[3] * height)  # scale below which the crop would lose detail
        pixels = decode(image, self.decoder, math.ceil(least * min(width, height)))
        cropped = _crop_resize(pixels, box, self.size)
        if self.natural and _happens(self.augment.flip, draw, "flip"):
            cropped = cropped.flip(-1)
        return _colour(cropped, self.augment, draw)

    @property
    def crops(self) -> bool:
        """Whether images are cropped at random."""
        return self.natural and self.augment.crop < 1


def random_box(width: int, height: int, augment: AugmentConfig, draw: Draw) -> Box:
    """RandomResizedCrop (arXiv:1409.4842, sec. 6): area uniform in [crop, 1], log of the aspect ratio uniform.

    After ten boxes that do not fit, the largest allowed centre crop. As torchvision, but with a keyed generator.
    """
    rng, log_ratio = draw.rng("crop"), math.log(augment.ratio)
    for _ in range(10):
        area = width * height * rng.uniform(augment.crop, 1.0)
        ratio = math.exp(rng.uniform(-log_ratio, log_ratio))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, top = rng.integers(width - wide + 1), rng.integers(height - high + 1)
            return left / width, top / height, wide / width, high / height
    return _centre(width, height, 1 / augment.ratio, augment.ratio)


def _centre(width: int, height: int, narrowest: float, widest: float, share: float = 1.0) -> Box:
    """A share of the largest centre crop with an aspect ratio (width over height) in [narrowest, widest]."""
    wide, high = min(1.0, height * widest / width), min(1.0, width / narrowest / height)
    left, top = (1 - wide) / 2, (1 - high) / 2
    return left + wide * (1 - share) / 2, top + high * (1 - share) / 2, wide * share, high * share


def _crop_resize(pixels: Pixels, box: Box, size: int) -> Tensor:
    """[H, W, 3] to [3, size, size]; the box is rounded to whole pixels."""
    height, width = pixels.shape[:2]
    left, top = round(box[0] * width), round(box[1] * height)
    wide, high = max(1, round(box[2] * width)), max(1, round(box[3] * height))
    left, top = min(left, width - wide), min(top, height - high)
    cropped = _tensor(pixels[top : top + high, left : left + wide])
    if (wide, high) == (size, size):
        return cropped
    # [1, 3, H, W] with channels last in memory: the layout of torch's fast uint8 kernel
    return F.interpolate(cropped[None], (size, size), mode="bicubic", antialias=True)[0]


def _tensor(pixels: Pixels) -> Tensor:
    """A copy [3, H, W] that keeps channels last in memory; decoders may hand out read-only arrays."""
    return torch.from_numpy(np.array(pixels, order="C")).permute(2, 0, 1)


def _happens(probability: float, draw: Draw, purpose: str) -> bool:
    return probability > 0 and draw.rng(purpose).random() < probability


def _colour(image: Tensor, augment: AugmentConfig, draw: Draw) -> Tensor:
    """Colour jitter, grey, blur, in this order, with Pillow's operations: [3, H, W] to [3, H, W]."""
    jitter = _happens(augment.jitter, draw, "jitter")
    grey = _happens(augment.grayscale, draw, "grayscale")
    blur = _happens(augment.blur, draw, "blur")
    if not (jitter or grey or blur):
        return image.contiguous()
    coloured = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    if jitter:
        coloured = _jitter(coloured, augment.jitter_strength, draw)
    if grey:
        coloured = coloured.convert("L").convert("RGB")
    if blur:
        low, high = augment.blur_sigma
        coloured = coloured.filter(ImageFilter.GaussianBlur(draw.rng("blur sigma").uniform(low, high)))
    return _tensor(np.asarray(coloured)).contiguous()


def _jitter(image: Image.Image, strength: tuple[float, float, float, float], draw: Draw) -> Image.Image:
    """Brightness, contrast, saturation by factors in [1 - s, 1 + s], hue by a turn in [-s, s], in random order."""
    rng = draw.rng("jitter strength")
    factors = [rng.uniform(max(0.0, 1 - s), 1 + s) for s in strength[:3]]
    turn = rng.uniform(-strength[3], strength[3])
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for which in rng.permutation(4):
        image = _turn_hue(image, turn) if which == 3 else enhancers[which](image).enhance(factors[which])
    return image


def _turn_hue(image: Image.Image, turn: float) -> Image.Image:
    """`turn` is a share of the full circle."""
    hue, saturation, value = image.convert("HSV").split()
    turned = np.asarray(hue) + np.uint8(round(turn * 255) % 256)  # wraps around, as a circle does
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")

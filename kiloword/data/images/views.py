"""Augmented views of an image that are computed once and stored, and the augmentation that makes them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kiloword.config.recipes import AugmentConfig, Resize
from kiloword.config.settings import check, setting
from kiloword.data.images.augmentation import EvalTransform, TrainTransform
from kiloword.data.images.decode import Pixels
from kiloword.randomness import Draw, key

LATER = ("drop_words", "drop_patches")  # settings of the augmentation that do not change images
MOST = 2048  # views of an image whose features are stored: a bound of what a file of settings may claim


def view_draw(seed: int, view: int, name: str) -> Draw:
    """The random choices of one view of an image. Args: name: its key."""
    return Draw(seed, view, key(name))


@dataclass(frozen=True)
class Augmented:
    """Which views of an image are stored: those that training draws in the epochs 0 to K - 1.

    Args: views: K; seed: of the augmentation; transform, by_key: see `of`.
    """

    views: int = setting(1, "", 1, MOST)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    seed: int = 0
    transform: TrainTransform | EvalTransform = field(default_factory=lambda: EvalTransform(1))
    by_key: bool = False

    @property
    def size(self) -> int:
        """Height and width in pixels."""
        return self.transform.size

    def __call__(self, image: bytes | Pixels, row: int, name: str) -> Tensor:
        """uint8 [K, 3, size, size]. Args: name: the image's key. Errors: BadSample."""
        if isinstance(self.transform, EvalTransform):
            return self.transform(image)[None]
        draws = (view_draw(self.seed, n, name) if self.by_key else Draw(self.seed, n, row) for n in range(self.views))
        return torch.stack([self.transform(image, draw) for draw in draws])

    def check(self) -> None:
        """Raises: ValueError for numbers out of range, and for settings that change no image."""
        check(self)
        for name in LATER:
            if getattr(self.augment, name):
                raise ValueError(f"--augment.{name.replace('_', '-')} changes no image: leave it to the training.")
        if not changes(self.augment) and (self.views > 1 or self.seed):
            flag = f"--views {self.views}" if self.views > 1 else f"--seed {self.seed}"
            raise ValueError(f"{flag} without augmentation has no effect: add such as --augment.flip 0.5, or omit it.")

    def of(self, size: int, resize: Resize, natural: bool, by_key: bool = False) -> Augmented:
        """The views at a size; without augmentation the image as evaluation sees it.

        Args: by_key: draw by the image's key, not by its row, so that a run whose rows are others draws the same.
        """
        drawn = TrainTransform(size, self.augment, resize, natural=natural)
        return replace(self, transform=drawn if changes(self.augment) else EvalTransform(size, resize), by_key=by_key)


PLAIN = Augmented()  # images as evaluation sees them


def of_images(augment: AugmentConfig) -> dict[str, Any]:
    """The settings of an augmentation that change images."""
    return {name: value for name, value in asdict(augment).items() if name not in LATER}


def changes(augment: AugmentConfig) -> dict[str, Any]:
    """The settings of an augmentation that change images, where they are not the default."""
    usual = of_images(AugmentConfig())
    return {name: value for name, value in of_images(augment).items() if value != usual[name]}


def in_words(augment: AugmentConfig) -> str:
    """What an augmentation does to images."""
    return ", ".join(f"augment.{name} {value}" for name, value in changes(augment).items()) or "no augmentation"

"""Transforms: changes of an example that see the whole data set (`kiloword.types.Transform`)."""

from kiloword.data.transforms.mix import Compose, Cutmix, Mixup, Stylistic
from kiloword.data.transforms.settings import ComposeSettings, CutmixSettings, MixupSettings, StylisticSettings

__all__ = [
    "Compose",
    "ComposeSettings",
    "Cutmix",
    "CutmixSettings",
    "Mixup",
    "MixupSettings",
    "Stylistic",
    "StylisticSettings",
]

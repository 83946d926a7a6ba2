"""Options of embed. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import Suppress

from kiloword.config.execution import Execution
from kiloword.config.recipes import AugmentConfig, Resize


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(Execution):
    """How features or tokens are made."""

    model: str = ""  # as messages name it
    name: str = "teacher"  # name of the features; a run that reads several feature stores needs different names
    precision: Literal["fp32", "bf16"] = "fp32"  # precision of the computation; recorded in the feature store
    # type of the stored values; int8 is for tokens: bytes, with a minimum and a step for every 64 channels
    dtype: Literal["fp16", "fp32", "int8"] = "fp16"
    # pixels of the shorter side before the centre crop, such as 256 for 224; default: as the model has it
    resize: Resize | None = None
    dim: int | None = None  # store the first N numbers of the features, normalised again; default: all
    views: int = 1  # number of augmented views of each image; training shows one view in each epoch
    augment: AugmentConfig = field(default_factory=AugmentConfig)  # augmentation of the images
    seed: int = 0  # seed of the augmentation
    part: Annotated[int, Suppress] = 0  # rows of a part, which a stopped command keeps; 0: by the size of a row

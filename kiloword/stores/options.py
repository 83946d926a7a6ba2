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
    name: str = "teacher"  # name of the features, to tell several feature stores of a run apart
    precision: Literal["fp32", "bf16"] = "fp32"  # precision of the computation; recorded in the feature store
    # type of the stored features; int8, of tokens: bytes, with a minimum and a step for every 64 channels
    dtype: Literal["fp16", "fp32", "int8"] = "fp16"
    # pixels of the shorter side before the centre crop, such as 256 for 224; default: as the model has it
    resize: Resize | None = None
    dim: int | None = None  # store the first N numbers of the features, normalised again; default: all
    views: int = 1  # augmented images of each image, of which training shows one in each epoch
    augment: AugmentConfig = field(default_factory=AugmentConfig)  # augmentation of the images
    seed: int = 0  # seed of the augmentation
    part: Annotated[int, Suppress] = 0  # rows between interruptions; 0: by size

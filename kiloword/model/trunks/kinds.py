"""Which image trunks there are: a trunk from its config, and what its tokens look like."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from kiloword.config.recipes import ImageConfig, TrunkConfig
from kiloword.model.trunks.library import ANY_SIZE, HfVision, LibraryTrunk, OpenClipVision, TimmVision
from kiloword.model.trunks.lite import VARIANTS, EfficientNetLite
from kiloword.model.trunks.trunk import Trunk, fitting

TIMM, OPEN_CLIP, HF = "timm:", "open_clip:", "hf"
KINDS = (*VARIANTS, "timm:NAME", "open_clip:NAME", HF)


def image_trunk(config: ImageConfig) -> Trunk:
    """The trunk of an image tower. Raises: ValueError for a trunk that does not exist or does not fit the config."""
    trunk = config.trunk
    if trunk.name in VARIANTS:
        return fitting(EfficientNetLite(trunk.name), trunk, EfficientNetLite.shape(config.size))
    made = library_trunk(trunk, config.size)
    return fitting(made, trunk, (trunk.width, made.prefix, trunk.grid))  # a forward pass compares the others


def library_trunk(trunk: TrunkConfig, size: int | None) -> LibraryTrunk:
    """The trunk of another library. Args: size: of images in pixels; None: the trunk's own.

    Raises: ValueError for one that does not exist, or whose library is missing.
    """
    with _refused(trunk):
        if trunk.name.startswith(TIMM):
            return TimmVision(trunk.name.removeprefix(TIMM), size)
        if trunk.name.startswith(OPEN_CLIP):
            return OpenClipVision(trunk.name.removeprefix(OPEN_CLIP))
        if trunk.name == HF:
            return HfVision(trunk.config)
    raise ValueError(f"the image trunk {trunk.name[:200]!r} is unknown: expected one of {', '.join(KINDS)}.")


@contextmanager
def _refused(trunk: TrunkConfig) -> Iterator[None]:
    """Turn whatever a library raises for a model that it cannot make or run into a ValueError."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # of a tag, a config or an architecture
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"the trunk {trunk.name[:200]} cannot be used ({type(error).__name__}: {reason}): name another tower."
        ) from error


def resized_trunk(config: TrunkConfig, size: int) -> TrunkConfig:
    """The config of an image trunk for images of another size; unchanged without a trunk.

    Raises: ValueError for a trunk whose size is fixed.
    """
    if not config.name:
        return config
    if config.name in VARIANTS:
        return replace(config, grid=EfficientNetLite.shape(size)[2])
    return measured(config, size)[0]


def measured(config: TrunkConfig, size: int | None) -> tuple[TrunkConfig, int]:
    """The config of a library's trunk with the shape of its tokens, and the image size in pixels, without weights.

    Args: size: in pixels; None: the trunk's own. Raises: ValueError for a size that it cannot take.
    """
    with torch.device("meta"):
        trunk = library_trunk(config, size)
        size = size or trunk.size
        if size != trunk.size and config.config.get("model_type") not in ANY_SIZE:
            raise ValueError(f"the trunk {config.name} takes images of {trunk.size} pixels, not of {size}.")
        with _refused(config):
            tokens = trunk(torch.empty(1, 3, size, size))
    places = tokens.shape[1] - trunk.prefix
    side = math.isqrt(max(places, 0))
    if side < 1 or side * side != places:
        raise ValueError(f"the trunk {config.name} has {places} tokens: expected a square map of them.")
    return replace(config, width=int(tokens.shape[2]), prefix=trunk.prefix, grid=side), size

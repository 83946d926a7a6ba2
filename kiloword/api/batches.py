"""How many images or texts a model encodes at a time, and features that would not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from kiloword.distributed.device import free_bytes
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.model.model import Model

IMAGES_ON_CPU, IMAGES_ON_GPU, TEXTS_ON_CPU, TEXTS_ON_GPU = 64, 512, 256, 1024  # a GPU that is full gets half


def image_batch(model: Model) -> int:
    """Images to encode at a time."""
    return IMAGES_ON_CPU if model.device.type == "cpu" else IMAGES_ON_GPU


def text_batch(model: Model) -> int:
    """Texts to encode at a time."""
    return TEXTS_ON_CPU if model.device.type == "cpu" else TEXTS_ON_GPU


def check_room(few: Features, count: int, what: str, device: torch.device) -> None:
    """Raises: ValueError where features of `count` items exceed the free memory of a device.

    Args: few: features of a few of them, on any device; what: "images" or "texts".
    """
    needed = count * sum(value[0].numel() * value.element_size() for value in few.values())
    if needed > (free := free_bytes(device)):
        raise ValueError(
            f"the features of {count:,} {what} take {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are "
            "free: evaluate fewer, or search in an index (`kiloword index`)."
        )


def in_batches(count: int, batch: int, encode: Callable[[slice], Features], smaller: bool) -> Iterator[Features]:
    """Features of `count` images, a batch at a time.

    Args: smaller: go on with half the batch where a GPU's memory is exhausted.
    """
    done = 0
    while done < count:
        try:
            features = encode(slice(done, min(done + batch, count)))
        except torch.OutOfMemoryError:
            batch = min(batch, count - done) // 2
            if not (smaller and batch):
                raise
            torch.cuda.empty_cache()
            continue
        yield features
        done += len(features["vec"])

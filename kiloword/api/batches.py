"""How many images or texts a model encodes at a time, by the memory that is free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from kiloword.distributed.device import free_bytes
from kiloword.model.encoding import chunks
from kiloword.terminal.progress import track
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.model.model import Model

SHARE = 4  # of the free memory a quarter is planned for activations: the estimate is rough
ON_CPU, ON_GPU = 64, 512  # at most; not tuned
TEXTS_ON_GPU, TEXTS_ON_CPU = 1024, 256


def image_batch(model: Model) -> int:
    """Images to encode at a time: what fits into a quarter of the free memory, from 1 to 64, or to 512 on a GPU."""
    device = model.device
    return max(1, min(ON_CPU if device.type == "cpu" else ON_GPU, free_bytes(device) // SHARE // bytes_of_image(model)))


def text_batch(model: Model) -> int:
    """Texts to encode at a time: as `image_batch`, from 1 to 256, or to 1024 on a GPU."""
    config, device = model.config.text, model.device
    tokens = config.context
    each = 4 * (tokens * (6 * config.width + 2 * config.mlp) + config.heads * tokens**2)
    most = TEXTS_ON_CPU if device.type == "cpu" else TEXTS_ON_GPU
    return max(1, min(most, free_bytes(device) // SHARE // each))


def bytes_of_image(model: Model) -> int:
    """What encoding one image takes at most, roughly: the activations of one block, pixels, and a trunk's first maps.

    A block holds queries, keys, values, attention of every head, and the MLP's hidden layer, in fp32.
    """
    config = model.config.image
    tokens = (config.size // config.patch) ** 2 + config.extra_tokens + 2
    block = tokens * (6 * config.width + 2 * config.mlp) + config.heads * tokens**2
    return 4 * block + 200 * config.size**2


def check_room(few: Features, count: int, what: str, device: torch.device) -> None:
    """Refuse to keep features of `count` items where they exceed the free memory of a device.

    Args: few: features of a few of them, on any device; what: "images" or "texts".
    Raises: ValueError with the memory, and where a shortlist needs less.
    """
    each = {name: value[0].numel() * value.element_size() for name, value in few.items()}
    needed, free = count * sum(each.values()), free_bytes(device)
    if needed <= free:
        return
    largest = max(each, key=lambda name: each[name])
    shape = " x ".join(map(str, few[largest].shape[1:]))
    raise ValueError(
        f"the features of {count:,} {what} take {needed / 2**30:,.1f} GiB, mostly {largest} of {shape} numbers each, "
        f"and {free / 2**30:,.1f} GiB of memory are free: evaluate fewer, or keep them on disk by `kiloword index`, "
        "whose search scores a shortlist of photos by the vectors alone (--shortlist here saves time, not memory)."
    )


def in_batches(
    count: int, batch: int, encode: Callable[[slice], Features], what: str, smaller: bool
) -> Iterator[Features]:
    """Features of `count` items, a batch at a time, with progress.

    Args: smaller: go on with half the batch where a GPU's memory is exhausted.
    """
    done = 0

    def parts() -> Iterator[Features]:
        nonlocal batch, done
        while done < count:
            part = slice(done, min(done + batch, count))
            try:
                features = encode(part)
            except torch.OutOfMemoryError:
                if not smaller or part.stop - part.start == 1:
                    raise
                batch = max(1, (part.stop - part.start) // 2)
                torch.cuda.empty_cache()
                continue
            yield features
            done = part.stop

    next(chunks(count, batch))  # refuses a batch below 1
    return track(parts(), what, what, count, lambda part: len(part["vec"]))

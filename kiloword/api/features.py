"""Features as a `Matcher` takes them: as lists, in batches, and refused where they or memory do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kiloword.distributed.device import free_bytes
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.model.model import Model

ON_CPU, ON_GPU = (64, 256), (512, 1024)  # images and texts that are encoded at a time; a GPU that is full gets half


def rows_of(features: Features, gaussian: bool = False) -> Features:
    """Features of one item, "vec" [D], as features of a list of one. Args: gaussian: a variance is needed.

    Raises: ValueError for anything else.
    """
    vec = features.get("vec") if isinstance(features, dict) else None
    if not isinstance(vec, Tensor) or vec.ndim not in (1, 2):
        raise ValueError('features need a "vec", a tensor [D] or [N, D], as encode_image gives it.')
    if gaussian and ("log_var" not in features or features["log_var"].shape != vec.shape):
        raise ValueError(
            'these features have no "log_var": their model is not Gaussian. Use prolip, or another method '
            "with +gaussian, and all features of one item or list."
        )
    return {name: value[None] for name, value in features.items()} if vec.ndim == 1 else features


def both(a: Features, b: Features, gaussian: bool = False) -> tuple[Features, Features]:
    """As `rows_of`. Raises: ValueError for features of two numbers of dimensions, too."""
    a, b = rows_of(a, gaussian), rows_of(b, gaussian)
    if (one := a["vec"].shape[1]) != (other := b["vec"].shape[1]):
        raise ValueError(f"got features of {one} and of {other} dimensions: expected features of one model.")
    return a, b


def finite(scores: Tensor) -> Tensor:
    """Scores [I, T], or of pairs [N], as they are. Raises: ValueError when any is NaN or infinite."""
    if not bool(scores.isfinite().all()):
        place = (~scores.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"the score of image {place[0]} with text {place[-1]} is {float(scores[tuple(place)])}: the model's "
            "weights are damaged, or diverged in training, or the features were computed by such a model."
        )
    return scores


def batches(model: Model) -> tuple[int, int]:
    """Images and texts to encode at a time."""
    return ON_CPU if model.device.type == "cpu" else ON_GPU


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

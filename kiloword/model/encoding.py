"""Encode texts with a model; slice and join features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kiloword.distributed import collectives
from kiloword.distributed.sharing import in_turns, share
from kiloword.errors import naming_truncated
from kiloword.terminal.progress import track
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.data.text.tokenizer import Tokenizer
    from kiloword.model.model import Model

TEXTS = 256  # encoded at a time


def rows(features: Features, which: slice | Tensor) -> Features:
    """Some rows of every value."""
    return {name: value[which] for name, value in features.items()}


def join(parts: Sequence[Features]) -> Features:
    """Concatenate the rows of parts."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def moved(features: Features, device: torch.device | str) -> Features:
    """Copy features to a device."""
    return {name: value.to(device) for name, value in features.items()}


def chunks(n: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover n rows."""
    if size < 1:
        raise ValueError(f"the batch size is {size}: expected at least 1.")
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


@contextmanager
def inference(model: Model) -> Iterator[None]:
    """Context without gradients and in eval mode; restores the training mode at its end.

    A sharded model reuses gathered parameters in training, so that it must not run in torch's inference mode.
    """
    training = model.training
    sharded = any(collectives.sharded(p) for p in model.parameters())
    model.eval()
    try:
        with torch.no_grad() if sharded else torch.inference_mode():
            yield
    finally:
        model.train(training)


def encode_texts(model: Model, tokenizer: Tokenizer, captions: Sequence[str], batch: int = TEXTS) -> Features:
    """Features of T captions, every value [T, ...], on the model's device."""
    device = model.device
    parts, alone = list(chunks(len(captions), batch)), share()[1] == 1

    def encode(part: slice) -> Features:
        texts = tokenizer.encode(list(captions[part]), model.config.text)
        features: Features = model.encode_text(texts.to(device))[1]
        return features if alone else moved(features, "cpu")

    with inference(model), naming_truncated():
        encoded = track(in_turns(parts, encode), "texts", "texts", len(captions), lambda part: len(part["vec"]))
        return moved(join(list(encoded)), device)

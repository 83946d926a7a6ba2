"""Features by rows: what every task slices, joins and encodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kiloword.types import Features, Skipped, Source

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.data.tokenizer import Tokenizer
    from kiloword.model import Model


def rows(features: Features, which: slice) -> Features:
    """Some rows of every value."""
    return {name: value[which] for name, value in features.items()}


def join(parts: Sequence[Features]) -> Features:
    """Rows of several parts, one after the other."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def chunks(n: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover n rows."""
    if size < 1:
        raise ValueError(f"a batch of {size} rows; expected at least 1")
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


@contextmanager
def inference(model: Model) -> Iterator[None]:
    """No gradients, and eval mode until the end: a model that was training goes on training."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)


def encode_texts(model: Model, tokenizer: Tokenizer, captions: Sequence[str], batch: int = 256) -> Features:
    """Features of T captions, every value [T, ...], on the model's device."""
    device = next(model.parameters()).device
    parts = []
    with inference(model):
        for part in chunks(len(captions), batch):
            texts = tokenizer.encode(list(captions[part]), model.config.text)
            parts.append(model.encode_text(texts.to(device))[1])
    return join(parts)


@dataclass
class Seen:
    """One encoded batch of a source, in the source's order, bad rows left out."""

    rows: list[int]
    keys: list[str]
    images: Features  # [n, ...]
    captions: list[list[str]]
    labels: Tensor | None  # [n] int64, -1: none, or [n, C] for many labels a picture; None: no row has one

    def without(self, bad: Sequence[bool], reason: str, skipped: list[Skipped]) -> Seen:
        """The same without some rows, which are named in `skipped`."""
        if not any(bad):
            return self
        skipped += [Skipped(row, key, reason) for row, key, b in zip(self.rows, self.keys, bad, strict=True) if b]
        keep = [i for i, b in enumerate(bad) if not b]
        return Seen(
            [self.rows[i] for i in keep],
            [self.keys[i] for i in keep],
            {name: value[keep] for name, value in self.images.items()},
            [self.captions[i] for i in keep],
            None if self.labels is None else self.labels[keep],
        )


def seen(matcher: Matcher, source: Source, batch: int, workers: int, skipped: list[Skipped]) -> Iterator[Seen]:
    """Encode every picture of a source once; bad rows are appended to `skipped` with their reasons."""
    from kiloword.data.loader import eval_batches

    config = matcher.model.config
    empty = True
    for part in eval_batches(source, config.image.size, config.preprocess.resize, batch, workers):
        skipped += part.skipped
        if part.rows:
            empty = False
            images = matcher.encode_image(part.images, batch)
            yield Seen(part.rows, part.keys, images, part.captions, part.labels)
    if empty:
        why = f", the first because: {skipped[0].reason}" if skipped else ""
        raise ValueError(f"{source.name}: none of its {len(source)} rows is a usable picture{why}")


def labelled(parts: Iterable[Seen], source: Source, skipped: list[Skipped]) -> Iterator[Seen]:
    """The same without rows that have no class label; these are appended to `skipped`."""
    none = True
    for part in parts:
        if part.labels is None:
            part.without([True] * len(part.rows), "no class label", skipped)
            continue
        none = False
        yield part.without((part.labels < 0).tolist(), "no class label", skipped) if part.labels.ndim == 1 else part
    if none:
        raise ValueError(f"{source.name} has no class labels (.cls members): one a picture is needed")

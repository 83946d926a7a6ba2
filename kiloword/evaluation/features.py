"""Encode the images of sources. Ranks that share the work encode batches in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from kiloword.data.reading import EvalBatch, eval_batches
from kiloword.distributed.sharing import gathered, lockstep, own, share
from kiloword.model.encoding import chunks, moved
from kiloword.terminal.progress import track
from kiloword.types import Features, Skipped, Source

if TYPE_CHECKING:
    from kiloword.api import Matcher


Made = TypeVar("Made")


@dataclass
class Seen:
    """One encoded batch of a source, in the order of the source, without bad rows."""

    rows: list[int]
    keys: list[str]
    images: Features  # [n, ...]
    captions: list[list[str]]
    labels: Tensor | None  # [n] int64, -1: none, or [n, C] for many labels an image; None: no row has one

    def without(self, bad: Sequence[bool], reason: str, skipped: list[Skipped]) -> Seen:
        """A copy without the bad rows, which are appended to `skipped`."""
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


def seen(
    matcher: Matcher,
    source: Source,
    batch: int,
    workers: int,
    skipped: list[Skipped],
    encode: Callable[[Tensor], Features] | None = None,
) -> Iterator[Seen]:
    """Encode every image of a source once; bad rows are appended to `skipped` with their reasons.

    Args: encode: uint8 [n, 3, H, W] to features, in place of `matcher.encode_image`.
    """
    encode = encode or partial(matcher.encode_image, batch=batch)
    empty = True
    for part, bad in batches_in_turns(matcher, source, batch, workers, partial(_seen, encode)):
        skipped += bad
        if part is not None:
            empty = False
            device = next(matcher.model.parameters()).device
            yield part if share()[1] == 1 else replace(part, images=moved(part.images, device))
    if empty:
        why = f", the first because: {skipped[0].reason}" if skipped else ""
        raise ValueError(f"{source.name}: none of its {len(source)} rows is a usable image{why}")


def _seen(encode: Callable[[Tensor], Features], part: EvalBatch) -> Seen:
    images = encode(part.images)
    return Seen(part.rows, part.keys, images if share()[1] == 1 else moved(images, "cpu"), part.captions, part.labels)


def batches_in_turns(
    matcher: Matcher, source: Source, batch: int, workers: int, do: Callable[[EvalBatch], Made]
) -> Iterator[tuple[Made | None, list[Skipped]]]:
    """Yield the result of `do` for every batch of images of a source, in order, and the bad rows of the batch.

    The result is None for a batch without a readable image. Each rank processes its share of the batches; in lockstep,
    a rank without a batch runs `do` on a dummy batch. Results must be on the CPU if ranks share the work.
    """
    config = matcher.model.config
    read = partial(eval_batches, source, config.image.size, config.preprocess.resize, batch, workers)
    if share()[1] == 1:
        for part in track(read(), "images", "images", len(source), _read_rows):
            yield do(part) if part.rows else None, part.skipped
        return
    rows = range(len(source))
    every = [rows[part] for part in chunks(len(source), batch)]
    mine = read(parts=own(every))
    turns = range(0, len(every), share()[1])
    for first in track(turns, "images", "images", len(source), lambda n: sum(map(len, every[n : n + share()[1]]))):
        read_now = next(mine, None)
        made = _or_lost(matcher, read_now, do)
        yield from gathered((made, [] if read_now is None else read_now.skipped))[: len(every) - first]


def _read_rows(part: EvalBatch) -> int:
    return len(part.rows) + len(part.skipped)


def _or_lost(matcher: Matcher, part: EvalBatch | None, do: Callable[[EvalBatch], Made]) -> Made | None:
    if part is not None and part.rows:
        return do(part)
    if lockstep():
        size = matcher.model.config.image.size
        do(EvalBatch([-1], [""], torch.zeros(1, 3, size, size, dtype=torch.uint8), [[]], None, [], [{}]))
    return None


def labelled(parts: Iterable[Seen], source: Source, skipped: list[Skipped]) -> Iterator[Seen]:
    """Drop rows without a class label and append them to `skipped`."""
    none = True
    for part in parts:
        if part.labels is None:
            part.without([True] * len(part.rows), "no class label", skipped)
            continue
        none = False
        yield part.without((part.labels < 0).tolist(), "no class label", skipped) if part.labels.ndim == 1 else part
    if none:
        raise ValueError(f"{source.name} has no class labels (.cls members): one per image is needed")

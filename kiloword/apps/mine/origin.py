"""The data behind a feature store: pixels, and ground truth for scenes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from kiloword.apps.mine.corpus import Corpus, Ints
from kiloword.data.images.decode import decode
from kiloword.data.joins import CaptionTable
from kiloword.data.reading import captions_at
from kiloword.stores.features import FeatureStore
from kiloword.types import BadSample, Source

THUMB = 160  # longer side of images in the report, in pixels


@dataclass(frozen=True)
class Origin:
    """The rows of a source behind N keys."""

    source: Source
    rows: Ints  # [N]

    @staticmethod
    def of(source: Source, corpus: Corpus, table: FeatureStore) -> tuple[Origin, Corpus]:
        """The source rows of a feature store's images, and the corpus restricted to them.

        A store can have more than the source: other parts of a mixture, captions of other tables.
        """
        places = table.places(source)
        rows = np.full(len(corpus.keys), -1, np.int64)
        found = np.flatnonzero(places >= 0)[::-1]  # of an image that has several rows, the first
        rows[places[found]] = found
        captions = np.zeros(len(corpus.captions), bool)
        for n in np.flatnonzero(rows >= 0).tolist():
            source_captions = set(captions_at(source, int(rows[n])))
            caption_rows = slice(int(corpus.starts[n]), int(corpus.starts[n + 1]))
            captions[caption_rows] = [caption in source_captions for caption in corpus.captions[caption_rows]]
        if not captions.all() or (rows < 0).any():
            corpus = corpus.only(captions, rows >= 0)
        return Origin(source, rows[rows >= 0]), corpus

    def thumbnail(self, image: int) -> NDArray[np.uint8] | None:
        """An image [H, W, 3], downscaled if large; None if it cannot be read."""
        try:
            pixels = decode(self.source.record(int(self.rows[image])).image, at_least=2 * THUMB)
        except BadSample:
            return None
        small = Image.fromarray(pixels)
        small.thumbnail((THUMB, THUMB))
        return np.asarray(small)

    def truth(self, captions: Sequence[str]) -> Truths | None:
        """Ground truth, if the source has it for all captions; else None."""
        relevance = getattr(self.source, "relevance", None)
        if not callable(relevance):
            return None
        unique, inverse = np.unique(np.array(captions, dtype=object), return_inverse=True)
        try:
            relevance(unique.tolist(), self.rows[:1].tolist())
        except ValueError:  # captions that the source cannot parse
            return None
        return Truths(relevance, unique.tolist(), inverse.reshape(-1), self.rows)


@dataclass(frozen=True)
class Truths:
    """Which of T captions are true of which of N images; equal captions are evaluated once."""

    relevance: Callable[[Sequence[str], Sequence[int]], NDArray[np.bool_]]
    unique: Sequence[str]
    inverse: Ints  # [T] places in `unique`
    rows: Ints  # [N]

    def __call__(self, captions: Ints, images: Ints) -> Tensor:
        """bool [t, i]."""
        needed, place = np.unique(self.inverse[captions], return_inverse=True)
        relevant = self.relevance([self.unique[n] for n in needed], self.rows[images].tolist())
        return torch.from_numpy(np.asarray(relevant))[torch.from_numpy(place.reshape(-1))]


def split_extra(corpus: Corpus, paths: Sequence[Path]) -> dict[str, Corpus]:
    """All captions, or the original captions and those of extra tables."""
    parts: dict[str, Corpus] = {}
    if tables := [CaptionTable(path) for path in paths]:
        of_keys = [{caption for table in tables for caption in table.captions(key)} for key in corpus.keys]
        extra = np.array([caption in of_keys[n] for n, caption in zip(corpus.owner, corpus.captions, strict=True)])
        parts = {"own": corpus.only(~extra), "extra": corpus.only(extra)}
    return {name: part for name, part in parts.items() if len(np.unique(part.owner[part.paired])) > 1} or {
        "captions": corpus
    }

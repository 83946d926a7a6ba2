"""Teacher features of a whole data set, loaded in blocks, and the data behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kiloword.data.reading import captions_at
from kiloword.model.encoding import chunks
from kiloword.stores.features import FeatureStore, means_of
from kiloword.types import BadSample, Source

Ints = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]
Truth = Callable[[Ints, Ints], Tensor]
"""Ground truth: which captions [t] are true of which images [i]: bool [t, i]."""
ROWS = 65536  # loaded at once


@dataclass(frozen=True)
class Corpus:
    """Features of N images and their T captions by one teacher, of unit norm."""

    keys: Sequence[str]  # [N]
    captions: Sequence[str]  # [T]
    starts: Ints  # [N + 1], first caption of every image
    images: Floats  # [N, D]
    texts: Floats  # [T, D]
    device: str = "cpu"

    @cached_property
    def owner(self) -> Ints:
        """[T] the image of each caption."""
        return np.repeat(np.arange(len(self.keys)), np.diff(self.starts))

    @cached_property
    def means(self) -> Floats:
        """[N, D] mean over the captions of an image, not normalised."""
        return means_of(self.texts, self.starts)

    def load(self, values: Floats, which: slice | Ints) -> Tensor:
        """Load rows of `images`, `texts` or `means`: [n, D] float32 on the device."""
        return torch.from_numpy(np.array(values[which], np.float32)).to(self.device)

    def annotated(self, captions: Ints | None = None) -> Floats:
        """S_it of captions with their images, [n] float32. Args: captions: all by default."""
        captions = np.arange(len(self.captions)) if captions is None else captions
        found = np.zeros(len(captions), np.float32)
        for part in chunks(len(captions), ROWS):
            images = self.load(self.images, self.owner[captions[part]])
            found[part] = (images * self.load(self.texts, captions[part])).sum(1).cpu().numpy()
        return found

    def similarities(self, images: slice | Ints, captions: slice | Ints) -> Tensor:
        """S_it, S_ii and S_tt of images with captions: [3, i, t] (arXiv:2405.10286, eq. 2 and section 4.3).

        S_tt is the mean over the captions of an image.
        """
        vectors, texts = self.load(self.images, images), self.load(self.texts, captions)
        owners, means = self.load(self.images, self.owner[captions]), self.load(self.means, images)
        return torch.stack([vectors @ texts.T, vectors @ owners.T, means @ texts.T])


def corpus_of(source: Source, table: FeatureStore, device: str = "cpu") -> tuple[Corpus, Ints]:
    """The images and captions that both a store and a source have, and the images' rows in the source [N].

    Raises: ValueError for a store of other data.
    """
    places, rows = np.unique(table.places(source), return_index=True)  # of an image that has several rows, the first
    places, rows = places[places >= 0], rows[places >= 0]
    of_images = list[list[int]]()
    for place, row in zip(places.tolist(), rows.tolist(), strict=True):
        captions = list[str]()
        with suppress(BadSample):  # no caption
            captions = captions_at(source, row)
        texts = range(*table.starts[place : place + 2].tolist())
        of_images.append([text for text in texts if table.captions[text] in captions])
    chosen = np.array([text for texts in of_images for text in texts], np.int64)
    images, features = table.images(), table.texts()
    made = Corpus(
        [table.keys[place] for place in places.tolist()],
        [table.captions[text] for text in chosen.tolist()],
        np.cumsum([0, *map(len, of_images)]),
        images if len(places) == len(images) else images[places],
        features if len(chosen) == len(features) else features[chosen],
        device,
    )
    return made, rows


def truth_of(source: Source, captions: Sequence[str], rows: Ints) -> Truth | None:
    """Ground truth, if the source has it for all T captions; else None. Args: rows of N images."""
    relevance: Any = getattr(source, "relevance", None)
    different, place = np.unique(np.array(captions, object), return_inverse=True)

    def truth(some: Ints, images: Ints) -> Tensor:
        needed, again = np.unique(place[some], return_inverse=True)  # equal captions are judged once
        return torch.from_numpy(np.asarray(relevance(different[needed].tolist(), rows[images].tolist()))[again])

    with suppress(ValueError):  # captions that the source cannot parse
        if relevance is not None and len(truth(np.arange(len(captions)), np.arange(1))):
            return truth
    return None

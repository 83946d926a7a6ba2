"""Teacher features of a whole data set, loaded in blocks, and the data behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kiloword.data.reading import captions_at
from kiloword.model.encoding import chunks
from kiloword.stores.features import FeatureStore
from kiloword.types import Source

Ints = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]
Truth = Callable[[Ints, Ints], Tensor]
"""Ground truth: which captions [t] are true of which images [i]: bool [t, i]."""


@dataclass(frozen=True)
class Corpus:
    """Features of N images and their T captions by one teacher. Rows have unit norm, or are zero if missing."""

    keys: Sequence[str]  # [N]
    captions: Sequence[str]  # [T]
    starts: Ints  # [N + 1], first caption of every image
    images: Floats  # [N, D]
    texts: Floats  # [T, D]
    means: Floats  # [N, D], mean over the captions of an image, not normalised
    device: str = "cpu"

    @staticmethod
    def of(table: FeatureStore, device: str = "cpu") -> Corpus:
        """Corpus of a feature store."""
        starts = np.asarray(table.starts, np.int64)
        return Corpus(table.keys, table.captions, starts, table.images(), table.texts(), table.text_means(), device)

    def only(self, captions: NDArray[np.bool_], images: NDArray[np.bool_] | None = None) -> Corpus:
        """Select captions by mask [T] and images by mask [N]; captions of dropped images are dropped."""
        images = np.ones(len(self.keys), bool) if images is None else images
        rows, kept = np.flatnonzero(images), np.flatnonzero(captions & images[self.owner])
        owner = (np.cumsum(images) - 1)[self.owner[kept]]
        starts = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(rows)))])
        texts = np.array(self.texts[kept], np.float32)
        means = np.zeros((len(rows), texts.shape[1]), np.float32)
        np.add.at(means, owner, texts)
        means /= np.maximum(np.diff(starts), 1)[:, None]
        keys, names = [self.keys[n] for n in rows.tolist()], [self.captions[t] for t in kept.tolist()]
        return Corpus(keys, names, starts, np.array(self.images[rows]), texts, means, self.device)

    @cached_property
    def owner(self) -> Ints:
        """[T] the image of each caption."""
        return np.repeat(np.arange(len(self.keys)), np.diff(self.starts))

    @cached_property
    def known_images(self) -> Ints:
        """Images with features, ascending."""
        return np.flatnonzero(np.any(self.images, axis=1))

    @cached_property
    def known_texts(self) -> Ints:
        """Captions with features, ascending."""
        return np.flatnonzero(np.any(self.texts, axis=1))

    @cached_property
    def paired(self) -> Ints:
        """Captions with features of images with features, ascending."""
        return self.known_texts[np.isin(self.owner[self.known_texts], self.known_images)]

    def load(self, values: Floats, which: slice | Ints) -> Tensor:
        """Load rows of `images`, `texts` or `means`: [n, D] float32 on the device."""
        return torch.from_numpy(np.array(values[which], dtype=np.float32)).to(self.device)

    def annotated(self, captions: Ints | None = None) -> Floats:
        """S_it of captions with their images, [n] float32. Args: captions: default: `paired`."""
        captions = self.paired if captions is None else captions
        found = np.zeros(len(captions), np.float32)
        for part in chunks(len(captions), 65536):
            images = self.load(self.images, self.owner[captions[part]])
            found[part] = (images * self.load(self.texts, captions[part])).sum(1).cpu().numpy()
        return found


def similarities(images: Tensor, means: Tensor, texts: Tensor, owners: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """S_it, S_ii and S_tt of images with captions, [i, t] each (arXiv:2405.10286, eq. 2 and section 4.3).

    Args: images and means [i, D] of the images; texts [t, D]; owners [t, D], the images of the captions. S_tt is the
    mean over the captions of an image.
    """
    return images @ texts.T, images @ owners.T, means @ texts.T


def corpus_of(source: Source, table: FeatureStore, device: str = "cpu") -> tuple[Corpus, Ints]:
    """The images and captions that both a store and a source have, and the images' rows in the source [N]."""
    corpus, places = Corpus.of(table, device), table.places(source)
    rows = np.full(len(corpus.keys), -1, np.int64)
    found = np.flatnonzero(places >= 0)[::-1]  # of an image that has several rows, the first
    rows[places[found]] = found
    captions = np.zeros(len(corpus.captions), bool)
    for n in np.flatnonzero(rows >= 0).tolist():
        of_source, of_image = set(captions_at(source, int(rows[n]))), slice(*corpus.starts[n : n + 2].tolist())
        captions[of_image] = [caption in of_source for caption in corpus.captions[of_image]]
    if not captions.all() or (rows < 0).any():
        corpus = corpus.only(captions, rows >= 0)
    return corpus, rows[rows >= 0]


def truth_of(source: Source, captions: Sequence[str], rows: Ints) -> Truth | None:
    """Ground truth, if the source has it for all T captions; else None. Args: rows of N images."""
    relevance = getattr(source, "relevance", None)
    different, inverse = np.unique(np.array(captions, dtype=object), return_inverse=True)
    try:
        if relevance is None:
            return None
        relevance(different.tolist(), rows[:1].tolist())
    except ValueError:  # captions that the source cannot parse
        return None

    def truth(some: Ints, images: Ints) -> Tensor:
        needed, place = np.unique(inverse.reshape(-1)[some], return_inverse=True)  # equal captions are judged once
        true = relevance(different[needed].tolist(), rows[images].tolist())
        return torch.from_numpy(np.asarray(true))[torch.from_numpy(place.reshape(-1))]

    return truth

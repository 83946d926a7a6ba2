"""Features of a teacher in a store, joined to examples."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kiloword.data.rows import key_text
from kiloword.stores.store import Places, Store, check_captions
from kiloword.types import BadSample, Example, Source

_CHUNK = 65536  # images whose captions are averaged at once


def means_of(texts: NDArray[np.floating[Any]], starts: NDArray[np.int64]) -> NDArray[np.float32]:
    """[N, D], the mean of each image's texts [T, D], float32, not of unit norm; zeros for one without captions."""
    means = list[Tensor]()
    for first in range(0, len(starts) - 1, _CHUNK):
        part = starts[first : first + _CHUNK + 1]
        lengths = torch.from_numpy(np.diff(part))
        values = torch.from_numpy(texts[part[0] : part[-1]].astype(np.float32))
        means.append(torch.segment_reduce(values, "mean", lengths=lengths, initial=0))
    return torch.cat(means).numpy()


class FeatureStore(Store):
    """Features of N images and their T captions by one teacher; `kiloword embed` writes the folder.

    Images are those of the data in its order, without bad rows; their number is the place. Errors: see `Store`.
    """

    kind = "features"

    @property
    def name(self) -> str:
        """Name of the features in a batch, by default "teacher"."""
        return self.file.name

    @cached_property
    def keys(self) -> list[str]:
        """The keys [N]."""
        return [key_text(key) for key in self.cells("key").column("key").to_pylist()]

    @cached_property
    def captions(self) -> list[str]:
        """The captions [T], image by image."""
        return [
            key_text(text) for text in self.cells("captions").column("captions").combine_chunks().flatten().to_pylist()
        ]

    @property
    def starts(self) -> NDArray[np.int64]:
        """[N + 1]: the captions of image n are starts[n] to starts[n + 1]."""
        return self.column("starts")

    def images(self) -> NDArray[np.floating[Any]]:
        """[N, D], unit norm, as stored (by default float16); memory-mapped.

        Raises: ValueError for a store of augmented views.
        """
        if self.file.augmented:
            raise ValueError(
                f"the feature store {self.path} has {self.file.shown}, which `train --features` alone reads: make one "
                "without --augment in another folder by `kiloword embed`."
            )
        return self.column("images")[:, 0]

    def texts(self) -> NDArray[np.floating[Any]]:
        """[T, D], unit norm, as stored; memory-mapped."""
        return self.column("texts")

    def text_means(self) -> NDArray[np.float32]:
        """See `means_of`."""
        return means_of(self.texts(), self.starts)

    def places(self, source: Source) -> NDArray[np.int64]:
        """The place of each row of a source [n]; -1 where it is bad. Raises: as `Features`."""
        features = Features(self, source)
        return np.array([features.place(source, row) for row in range(len(source))], np.int64)


class Features(Places[FeatureStore]):
    """Features of a source's rows.

    A call adds `image_features[name]` [D] and `text_features[name]` [captions, D] (unit norm; zeros, which match
    nothing, for a row that was bad) and `image_features[name + ".texts"]` [D], the mean of the example's
    `text_features` rows. Raises: ValueError for a store of other images or captions.
    """

    def __init__(self, store: FeatureStore, source: Source) -> None:
        super().__init__([store], source)
        self.store = store
        check_captions([store], source, lambda whole, row: self.place(whole, row) < 0)

    def place(self, source: Source, row: int) -> int:
        """The place of a row; -1 where it is bad."""
        found = self.find(source, row)
        return -1 if found is None else found[1]

    def __call__(self, example: Example, source: Source, view: int = 0) -> None:
        """Add features to an example. Raises: BadSample for a caption that the store lacks.

        Args: source: of which `example.row` is a row; view: the one of its image.
        """
        store = self.store
        image = np.zeros(store.file.width, np.float32)
        texts = np.zeros((len(example.captions), len(image)), np.float32)
        place = self.place(source, example.row)
        if place >= 0:
            image[:] = store.column("images")[place, view]
            for n, caption in enumerate(example.captions):
                if (text := store.find(caption)) is None:
                    raise BadSample(f"a caption has no features in {store.path}")
                texts[n] = store.column("texts")[text]
        example.image_features[store.name] = torch.from_numpy(image)
        example.text_features[store.name] = torch.from_numpy(texts)
        example.image_features[store.name + ".texts"] = example.text_features[store.name].mean(0)

"""Images of the report with lists of captions: raw beside pseudo-captions, and what ranks above an image's own caption.

Source: arXiv:2405.10286, figures 4 and 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from kiloword.apps.mine.analyses import one_caption_each
from kiloword.apps.mine.corpus import Corpus
from kiloword.apps.mine.images import CaptionLists, Image, Scored
from kiloword.apps.mine.origin import Truths
from kiloword.randomness import generator
from kiloword.report import ladder

HIGHER = 5  # captions of an image that rank above its own


def raw_and_pseudo(parts: Mapping[str, Corpus], count: int, seed: int) -> Iterator[CaptionLists]:
    """Random images that have captions of their own and extra ones; nothing without extra captions."""
    if not {"own", "extra"} <= set(parts):
        return
    both = np.flatnonzero((np.diff(parts["own"].starts) > 0) & (np.diff(parts["extra"].starts) > 0))
    for image in generator(seed, "gallery", "beside").permutation(both)[:count].tolist():
        names = {"Raw captions": parts["own"], "Pseudo-captions": parts["extra"]}
        yield CaptionLists(image, {name: _captions_of(part, image) for name, part in names.items()})


def _captions_of(corpus: Corpus, image: int) -> list[Scored]:
    """The captions of an image, best first."""
    places = slice(int(corpus.starts[image]), int(corpus.starts[image + 1]))
    scores = corpus.load(corpus.texts, places) @ corpus.load(corpus.images, np.array([image]))[0]
    pairs = zip(corpus.captions[places], scores.tolist(), strict=True)
    return sorted(((text, score, None) for text, score in pairs), key=lambda one: -one[1])


def ranked_above(corpus: Corpus, batch: int, count: int, seed: int, truths: Truths | None) -> Iterator[CaptionLists]:
    """Images of the first batch of `analyses.ranks` whose own caption is not first, with those that rank above it."""
    order, caption = one_caption_each(corpus, seed)
    part = order[:batch]
    texts = corpus.load(corpus.texts, caption[part])
    for place, image in enumerate(part.tolist()):
        if count == 0:
            return
        scores = texts @ corpus.load(corpus.images, np.array([image]))[0]
        ranked = scores.argsort(descending=True, stable=True)
        higher: list[int] = ranked[scores[ranked] > scores[place]][:HIGHER].tolist()
        if not higher:
            continue
        count -= 1
        columns = caption[part[higher]]
        true = [None] * len(higher) if truths is None else _true(truths, columns, image)
        rows = [(corpus.captions[t], float(scores[n]), r) for t, n, r in zip(columns, higher, true, strict=True)]
        annotated = (corpus.captions[caption[image]], float(scores[place]), None)
        yield CaptionLists(image, {"Its own caption": [annotated], "Captions of other images, ranked above it": rows})


def _true(truths: Truths, captions: np.ndarray, image: int) -> list[bool | None]:
    right: torch.Tensor = truths(captions, np.array([image]))
    return [bool(one) for one in right[:, 0]]


def drawn(lists: Sequence[CaptionLists], keys: Sequence[str], image: Image) -> Iterator[str]:
    """A figure of every image that can still be read."""
    for one in lists:
        pixels = image(one.image)
        if pixels is not None:
            columns = [
                (name, [(f"{score:.2f}  {text}", right) for text, score, right in scored])
                for name, scored in one.lists.items()
            ]
            yield ladder(pixels, keys[one.image], columns)

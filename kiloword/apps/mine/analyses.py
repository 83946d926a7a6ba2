"""The paper's analyses of a data set under a teacher (arXiv:2405.10286, section 2, figures 2, 3 and 5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kiloword.apps.mine.calibrate import some
from kiloword.apps.mine.corpus import Corpus, Floats, Ints
from kiloword.distributed.sharing import in_turns
from kiloword.evaluation.metrics import rounding
from kiloword.model.encoding import chunks
from kiloword.randomness import generator, key

BATCHES = 16  # at most, of which the true caption is ranked
QUERIES = 4096  # at most, captions whose nearest ones are looked up
NEAREST = 100


@dataclass(frozen=True)
class Ranks:
    """Rank of the true partner among those of a random batch, 1: first; equal scores share their mean rank."""

    batch: int  # images
    batches: int
    captions: Floats  # [batches * batch] rank of each image's own caption
    images: Floats  # [batches * batch] rank of each caption's own image


def ranks(corpus: Corpus, batch: int, seed: int) -> Ranks:
    """Rank of the true caption in random batches of images with one caption each; whole batches, at most BATCHES."""
    order, caption = one_caption_each(corpus, seed)
    batch = min(batch, len(order))
    number = min(len(order) // batch, BATCHES)
    by_image, by_caption = [], []
    for n in range(number):
        part = order[n * batch : (n + 1) * batch]
        scores = corpus.load(corpus.images, part) @ corpus.load(corpus.texts, caption[part]).T  # [b, b]
        by_image.append(_rank_of_diagonal(scores))
        by_caption.append(_rank_of_diagonal(scores.T))
    return Ranks(batch, number, np.concatenate(by_image), np.concatenate(by_caption))


def one_caption_each(corpus: Corpus, seed: int) -> tuple[Ints, Ints]:
    """Images that have a known caption, in random order; [N] one such caption of every image."""
    rng = generator(seed, "ranks")
    captions = rng.permutation(corpus.paired)
    caption = np.full(len(corpus.keys), -1, np.int64)
    caption[corpus.owner[captions]] = captions
    return rng.permutation(np.flatnonzero(caption >= 0)), caption


def _rank_of_diagonal(scores: Tensor) -> Floats:
    true = scores.diagonal()[:, None]
    higher = (scores > true + rounding(true)).sum(1)
    tied = (scores >= true - rounding(true)).sum(1) - higher  # itself included
    return (higher + (tied + 1) / 2).cpu().numpy()


def nearest(corpus: Corpus, seed: int, k: int = NEAREST, chunk: int = 4096) -> Floats:
    """Mean similarity of a caption to its k nearest others (also of equal words), [Q]; at most QUERIES are drawn."""
    texts = corpus.known_texts
    queries = some(texts, QUERIES, key(seed, "nearest"))
    k = min(k, len(texts) - 1)

    def means(part: slice) -> Floats:
        asked = corpus.load(corpus.texts, queries[part])
        best = asked.new_full((len(asked), k), -torch.inf)
        for columns in chunks(len(texts), chunk):
            scores = asked @ corpus.load(corpus.texts, texts[columns]).T
            scores[torch.from_numpy(queries[part][:, None] == texts[columns][None])] = -torch.inf
            best = torch.cat([best, scores], 1).topk(k, dim=1).values
        return np.asarray(best.mean(1).cpu().numpy())

    return np.concatenate(list(in_turns(list(chunks(len(queries), 512)), means)))


def among(corpus: Corpus) -> Floats:
    """Mean similarity between the captions of one image, for the images with two known captions or more.

    Of k unit vectors with the sum s, all pairs together have (|s|^2 - k) / (k (k - 1)).
    """
    count = np.bincount(corpus.owner[corpus.known_texts], minlength=len(corpus.keys))
    total = np.concatenate([sums.square().sum(1).cpu().numpy() for _, sums in _sums(corpus)])
    which = count > 1
    k = count[which]
    return np.asarray((total[which] - k) / (k * (k - 1)))


def one_and_mean(corpus: Corpus, seed: int) -> tuple[Floats, Floats]:
    """Similarity of images that have several captions with one of them, drawn, and with the mean of all; [n] each."""
    _, caption = one_caption_each(corpus, seed)
    count = np.bincount(corpus.owner[corpus.paired], minlength=len(corpus.keys))
    one, mean = [], []
    for part, sums in _sums(corpus):
        which = part.start + np.flatnonzero(count[part] > 1)
        images = corpus.load(corpus.images, which).double()
        means = torch.nn.functional.normalize(sums[which - part.start], dim=1)
        one.append((images * corpus.load(corpus.texts, caption[which])).sum(1).cpu().numpy())
        mean.append((images * means).sum(1).cpu().numpy())
    return np.concatenate(one), np.concatenate(mean)


def _sums(corpus: Corpus) -> Iterator[tuple[slice, Tensor]]:
    """Parts of the images, with the sum of each image's captions' features, [n, D] float64."""
    for part in chunks(len(corpus.keys), 8192):
        texts = slice(int(corpus.starts[part.start]), int(corpus.starts[part.stop]))
        values = corpus.load(corpus.texts, texts).double()
        place = torch.from_numpy(corpus.owner[texts] - part.start).to(values.device)
        yield part, values.new_zeros(part.stop - part.start, values.shape[1]).index_add_(0, place, values)

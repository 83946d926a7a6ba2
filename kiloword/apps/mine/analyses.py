"""The paper's analyses of a data set under a teacher (arXiv:2405.10286, section 2, figures 2, 3 and 5)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kiloword.apps.mine.calibrate import some
from kiloword.apps.mine.corpus import Corpus, Floats, Ints
from kiloword.evaluation.metrics import standing
from kiloword.model.encoding import chunks
from kiloword.randomness import generator, key

BATCHES = 16  # at most, of which the true caption is ranked
QUERIES, NEAREST = 4096, 100  # captions, at most, whose nearest ones are looked up; and how many of them


def ranks(corpus: Corpus, batch: int, seed: int) -> tuple[Floats, Floats]:
    """Rank of each image's own caption, and of each caption's own image, in random batches of images with one each.

    1 is first, and equal scores share their mean rank. [n] each, whole batches, at most BATCHES of them.
    """
    order, caption = one_caption_each(corpus, seed)
    batch, found = min(batch, len(order)), list[tuple[Floats, Floats]]()
    for n in range(min(len(order) // batch, BATCHES)):
        part = order[n * batch : (n + 1) * batch]
        scores = corpus.load(corpus.images, part) @ corpus.load(corpus.texts, caption[part]).T  # [b, b]
        found.append((_rank_of_diagonal(scores), _rank_of_diagonal(scores.T)))
    by_image, by_caption = zip(*found, strict=True)
    return np.concatenate(by_image), np.concatenate(by_caption)


def one_caption_each(corpus: Corpus, seed: int) -> tuple[Ints, Ints]:
    """Images that have a known caption, in random order; [N] one such caption of every image."""
    rng = generator(seed, "ranks")
    captions = rng.permutation(corpus.paired)
    caption = np.full(len(corpus.keys), -1, np.int64)
    caption[corpus.owner[captions]] = captions
    return rng.permutation(np.flatnonzero(caption >= 0)), caption


def _rank_of_diagonal(scores: Tensor) -> Floats:
    where = standing(scores, torch.eye(len(scores), dtype=torch.bool, device=scores.device))
    return (where.higher + (where.tied + 1) / 2).cpu().numpy()


def nearest(corpus: Corpus, seed: int, k: int = NEAREST) -> Floats:
    """Mean similarity of a caption to its k nearest others (also of equal words), [Q]; at most QUERIES are drawn."""
    texts = corpus.known_texts
    queries = some(texts, QUERIES, key(seed, "nearest"))
    asked = corpus.load(corpus.texts, queries)
    best = asked.new_full((len(asked), min(k, len(texts) - 1)), -torch.inf)
    for part in chunks(len(texts), 4096):
        scores = asked @ corpus.load(corpus.texts, texts[part]).T
        scores[torch.from_numpy(queries[:, None] == texts[None, part])] = -torch.inf
        best = torch.cat([best, scores], 1).topk(best.shape[1], dim=1).values
    return best.mean(1).cpu().numpy()


def among(corpus: Corpus) -> Floats:
    """Mean similarity between the captions of one image, for the images with two known captions or more.

    Of k unit vectors with the sum s, all pairs together have (|s|^2 - k) / (k (k - 1)).
    """
    count = np.bincount(corpus.owner[corpus.known_texts], minlength=len(corpus.keys))
    which, norms = count > 1, _products(corpus.means, corpus.means) * np.diff(corpus.starts) ** 2
    return np.asarray((norms[which] - count[which]) / (count[which] * (count[which] - 1)))


def one_and_mean(corpus: Corpus, seed: int) -> tuple[Floats, Floats]:
    """Similarity of images that have several captions with one of them, drawn, and with the mean of all; [n] each."""
    _, caption = one_caption_each(corpus, seed)
    which = np.flatnonzero(np.bincount(corpus.owner[corpus.paired], minlength=len(corpus.keys)) > 1)
    mean = _products(corpus.images, corpus.means)[which] / np.sqrt(_products(corpus.means, corpus.means)[which])
    return corpus.annotated(caption[which]), mean


def _products(a: Floats, b: Floats) -> Floats:
    """The product of each row with the other's, [n] float64."""
    return np.asarray(np.einsum("nd,nd->n", a, b, dtype=np.float64))

"""The paper's analyses of a data set under a teacher (arXiv:2405.10286, section 2, figures 2, 3 and 5)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from kiloword.apps.mine.corpus import Corpus, Floats, Ints
from kiloword.evaluation.metrics import standing
from kiloword.model.encoding import chunks
from kiloword.randomness import generator, some

BATCHES = 16  # at most, of which the true caption is ranked
QUERIES, NEAREST = 4096, 100  # captions, at most, whose nearest ones are looked up; and how many of them


def analysed(corpus: Corpus, batch: int, seed: int) -> dict[str, Any]:
    """The analyses of all captions, of the original or of the extra ones."""
    of_captions = ranks(corpus, batch, seed)
    several = np.diff(corpus.starts) > 1  # images with several captions, k of them
    k, one = np.diff(corpus.starts)[several], one_caption_each(corpus, seed)[1][several]
    images, means = corpus.images[several], corpus.means[several]
    of_image, of_mean = (np.einsum("nd,nd->n", x, means, dtype=np.float64) for x in (images, means))
    return {
        "captions": len(corpus.captions),
        "repeated": len(corpus.captions) - len(set(corpus.captions)),
        "frequent": Counter(corpus.captions).most_common(100),
        "rank_of_own_caption": spread(of_captions),
        "own_caption_first": float(np.mean(of_captions <= 1)),
        "annotated_similarity": spread(corpus.annotated()),
        "nearest_captions_similarity": spread(nearest(corpus, seed)),
        # pairs of k unit vectors with the sum s have (|s|^2 - k) / (k (k - 1)) on average
        "similarity_among_captions": spread((of_mean * k**2 - k) / (k * (k - 1))),
        "similarity_with_one_caption": spread(corpus.annotated(one)),
        "similarity_with_mean_caption": spread(of_image / np.sqrt(of_mean)),
    }


def spread(values: ArrayLike) -> dict[str, float] | None:
    """Mean, deviation and quantiles; None without values."""
    array = np.asarray(values, np.float64)
    if not len(array):
        return None
    names, quantiles = ("q05", "median", "q95", "max"), np.quantile(array, (0.05, 0.5, 0.95, 1)).tolist()
    return {"mean": float(array.mean()), "std": float(array.std()), **dict(zip(names, quantiles, strict=True))}


def one_caption_each(corpus: Corpus, seed: int) -> tuple[Ints, Ints]:
    """Images that have a caption, in random order; [N] one caption of every image, -1: it has none."""
    rng = generator(seed, "ranks")
    captions = rng.permutation(len(corpus.captions))
    caption = np.full(len(corpus.keys), -1, np.int64)
    caption[corpus.owner[captions]] = captions
    return rng.permutation(np.flatnonzero(caption >= 0)), caption


def ranks(corpus: Corpus, batch: int, seed: int) -> Floats:
    """Rank of each image's own caption in random batches of images with one caption each.

    1 is first, and equal scores share their mean rank. [n], whole batches, at most BATCHES of them.
    """
    order, caption = one_caption_each(corpus, seed)
    batch = min(batch, len(order))
    found = list[Floats]()
    for part in order[: min(len(order) // batch, BATCHES) * batch].reshape(-1, batch):
        scores = corpus.load(corpus.images, part) @ corpus.load(corpus.texts, caption[part]).T  # [b, b]
        where = standing(scores, torch.eye(batch, dtype=torch.bool, device=scores.device))
        found.append((where.higher + (where.tied + 1) / 2).cpu().numpy())
    return np.concatenate(found)


def nearest(corpus: Corpus, seed: int, k: int = NEAREST) -> Floats:
    """Mean similarity of a caption to its k nearest others (also of equal words), [Q]; at most QUERIES are drawn."""
    n = len(corpus.captions)
    queries = some(n, QUERIES, seed, "nearest")
    asked = corpus.load(corpus.texts, queries)
    best = asked.new_full((len(asked), min(k, n - 1)), -torch.inf)
    for part in chunks(n, 4096):
        scores = asked @ corpus.load(corpus.texts, part).T
        scores[torch.from_numpy(queries[:, None] == np.arange(part.start, part.stop))] = -torch.inf
        best = torch.cat([best, scores], 1).topk(best.shape[1]).values
    return best.mean(1).cpu().numpy()

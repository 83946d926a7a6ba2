"""Search all pairs of images and captions in blocks for matches by eq. 2, and by each of its terms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kiloword.apps.mine.corpus import Corpus, Truth, similarities
from kiloword.config.settings import check
from kiloword.distributed.sharing import own, sums
from kiloword.methods.fff.preset import Mined, matches
from kiloword.model.encoding import chunks
from kiloword.terminal.progress import track

TERMS = {"it": "image_text", "ii": "image_image", "tt": "text_text"}
"""The terms of eq. 2 and the fields of `Mined` that enable them."""


@dataclass
class MinedPairs:
    """Result of a search. Mined pairs are matches that are not annotated."""

    column: Tensor  # [N, most] int64, captions of the best mined pairs of each image by S_it, -1: none
    scores: Tensor  # [3, N, most] float32: S_it, S_ii, S_tt
    per_image: Tensor  # [N] int64 mined pairs
    # [3, 5] pairs that are mined, mined and true, annotated: by eq. 2, by each term; last, accepted or not: those that
    # are not annotated, true ones of these, annotated ones
    counts: Tensor


def by_term(settings: Mined, it: Tensor, ii: Tensor, tt: Tensor) -> Tensor:
    """Pairs accepted by each term of eq. 2: bool [3, ...]."""
    fields = TERMS.values()
    alone: list[Any] = [{other: getattr(settings, other) and other == one for other in fields} for one in fields]
    return torch.stack([matches(replace(settings, **on), it, ii, tt) for on in alone])


def search(
    corpus: Corpus, settings: Mined, *, most: int = 20, chunk: int = 2048, truth: Truth | None = None
) -> MinedPairs:
    """The pairs of a data set that eq. 2 accepts; ranks that share the work each search some blocks of images.

    Args: most: number of mined pairs per image to return, best S_it first, equal ones as the captions stand (all are
    counted); chunk: images and captions per block; truth: ground truth, if known.
    Errors: ValueError for thresholds out of range.
    """
    check(settings, prefix="")
    n, t, device = len(corpus.keys), len(corpus.captions), corpus.device
    most = min(most, t)
    column, scores = torch.full((n, most), -1), torch.full((3, n, most), -torch.inf)
    per_image, counts = torch.zeros(n, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64)
    mine = own(list(chunks(n, chunk)))
    blocks = [(r, c) for c in chunks(t, chunk) for r in mine]
    for r, c in track(blocks, "pairs", "blocks of pairs", len(blocks)):
        owner = corpus.owner[c]
        texts, owners = corpus.load(corpus.texts, c), corpus.load(corpus.images, owner)
        values = torch.stack(similarities(corpus.load(corpus.images, r), corpus.load(corpus.means, r), texts, owners))
        annotated = torch.from_numpy(owner[None] == np.arange(r.start, r.stop)[:, None]).to(device)  # [i, t]
        every = torch.ones_like(annotated)
        hits = torch.stack([matches(settings, *values), *by_term(settings, *values), every])  # [5, i, t]
        mined = hits & ~annotated
        counts[0] += mined.sum((1, 2)).cpu()
        counts[2] += (hits & annotated).sum((1, 2)).cpu()
        if truth is not None:
            true = truth(np.arange(c.start, c.stop), np.arange(r.start, r.stop)).T.to(device)
            counts[1] += (mined & true).sum((1, 2)).cpu()
        per_image[r] += mined[0].sum(1).cpu()
        # ties, such as the 0 of missing features, in the order of the captions: far below float32's differences
        width, exact = values.shape[2], torch.float32 if device == "mps" else torch.float64
        ordered = values[0].to(exact) - 1e-13 * torch.arange(width, device=device)
        place = ordered.masked_fill(~mined[0], -torch.inf).topk(min(most, width), 1).indices
        none = ~mined[0].gather(1, place)
        block = values.gather(2, place.expand(3, -1, -1)).masked_fill(none, -torch.inf).cpu()
        joined = torch.cat([scores[:, r], block], 2)
        order = joined[0].argsort(dim=1, descending=True, stable=True)[:, :most]
        column[r] = torch.cat([column[r], torch.where(none, -1, place + c.start).cpu()], 1).gather(1, order)
        scores[:, r] = joined.gather(2, order.expand(3, -1, -1))
    # the images of other ranks add nothing
    column, finite, per_image, counts = sums(column + 1, scores.masked_fill(column < 0, 0), per_image, counts)
    return MinedPairs(column - 1, finite.masked_fill(column == 0, -torch.inf), per_image, counts)

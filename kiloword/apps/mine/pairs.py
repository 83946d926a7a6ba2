"""Search all pairs of images and captions in blocks for matches by eq. 2, and by each of its terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from kiloword.apps.mine.corpus import Corpus, Truth, similarities
from kiloword.config.settings import check
from kiloword.distributed.sharing import own, share, to_first
from kiloword.methods.fff.preset import Mined, matches
from kiloword.model.encoding import chunks

TERMS = {"it": "image_text", "ii": "image_image", "tt": "text_text"}
"""The terms of eq. 2 and the fields of `Mined` that enable them."""

Progress = Callable[[int, int], None]
"""Called after every block with the number of pairs done and in total."""


@dataclass
class PairCounts:
    """Numbers of pairs, by the terms that accept them."""

    whole: int = 0  # eq. 2
    term: Counter[str] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)  # by no other term

    def add(self, whole: Tensor, terms: Mapping[str, Tensor]) -> None:
        """Add the pairs of a block, bool of any shape."""
        self.whole += int(whole.sum())
        times = torch.stack(list(terms.values())).sum(0)
        for name, hit in terms.items():
            self.term[name] += int(hit.sum())
            self.alone[name] += int((hit & (times == 1)).sum())

    def plus(self, other: PairCounts) -> None:
        """Add the counts of another rank."""
        self.whole += other.whole
        self.term.update(other.term)
        self.alone.update(other.alone)


@dataclass
class MinedPairs:
    """Result of a search. Mined pairs are matches that are not annotated."""

    column: Tensor  # [N, most] int64, captions of the best mined pairs of each image by S_it, -1: none
    scores: dict[str, Tensor]  # "it", "ii", "tt": [N, most] float32
    per_image: Tensor  # [N] int64 mined pairs
    per_text: Tensor  # [T] int64
    mined: PairCounts = field(default_factory=PairCounts)
    annotated: PairCounts = field(default_factory=PairCounts)  # annotated pairs that eq. 2 accepts
    right: PairCounts = field(default_factory=PairCounts)  # mined pairs that are true, with ground truth
    true: int | None = None  # true pairs that are not annotated
    pairs: int = 0  # pairs that are not annotated
    annotated_pairs: int = 0

    def add(self, images: Tensor, other: MinedPairs) -> None:
        """Add the results of the images [n], of another rank."""
        self.column[images], self.per_image[images] = other.column, other.per_image
        for name in TERMS:
            self.scores[name][images] = other.scores[name]
        self.per_text += other.per_text
        self.mined.plus(other.mined)
        self.annotated.plus(other.annotated)
        self.right.plus(other.right)
        self.true = None if self.true is None and other.true is None else (self.true or 0) + (other.true or 0)
        self.pairs, self.annotated_pairs = self.pairs + other.pairs, self.annotated_pairs + other.annotated_pairs


def by_term(settings: Mined, it: Tensor, ii: Tensor, tt: Tensor) -> dict[str, Tensor]:
    """Pairs accepted by each term of eq. 2: bool, by "it", "ii" and "tt"."""
    accepted = {}
    for name, switch in TERMS.items():
        off = {other: False for other in TERMS.values() if other != switch}
        accepted[name] = matches(replace(settings, **off), it, ii, tt)  # type: ignore[arg-type]  # switches are bool
    return accepted


def search(
    corpus: Corpus,
    settings: Mined,
    *,
    most: int = 20,
    chunk: int = 2048,
    truth: Truth | None = None,
    progress: Progress | None = None,
) -> MinedPairs:
    """The pairs of a data set that eq. 2 accepts.

    Args: most: number of mined pairs per image to return, best S_it first (all are counted); chunk: images and captions
    per block; truth: ground truth, if known.
    Ranks that share the work each search some blocks of images; the first one returns the whole result.
    Errors: ValueError for thresholds out of range.
    """
    check(settings, prefix="")
    n, t = len(corpus.keys), len(corpus.captions)
    mined, local_rows = _nothing(corpus, min(most, t)), own(list(chunks(n, chunk)))
    done, of = 0, t * sum(rows.stop - rows.start for rows in local_rows)
    for columns in chunks(t, chunk):
        texts, owner = corpus.load(corpus.texts, columns), corpus.owner[columns]
        owners, image_of_caption = corpus.load(corpus.images, owner), torch.from_numpy(owner).to(corpus.device)
        true = (
            None if truth is None else truth(np.arange(columns.start, columns.stop), np.arange(n)).T.to(corpus.device)
        )
        for rows in local_rows:
            images, means = corpus.load(corpus.images, rows), corpus.load(corpus.means, rows)
            values = dict(zip(TERMS, similarities(images, means, texts, owners), strict=True))
            annotated = image_of_caption == torch.arange(rows.start, rows.stop, device=corpus.device)[:, None]
            _count(mined, settings, values, annotated, rows, columns, None if true is None else true[rows])
            if progress is not None:
                done += (rows.stop - rows.start) * len(owner)
                progress(done, of)
    return _of_all(mined, local_rows)


def _of_all(mined: MinedPairs, local_rows: list[slice]) -> MinedPairs:
    """Merge the results of all ranks on the first one. Args: local_rows: images of this rank."""
    if share()[1] == 1:
        return mined
    which = _numbers(local_rows)
    scores = {name: values[which] for name, values in mined.scores.items()}
    own_part = replace(mined, column=mined.column[which], scores=scores, per_image=mined.per_image[which])
    for rows, other in to_first((local_rows, own_part))[1:]:
        mined.add(_numbers(rows), other)
    return mined


def _numbers(rows: list[slice]) -> Tensor:
    return torch.tensor([n for part in rows for n in range(part.start, part.stop)], dtype=torch.int64)


def _nothing(corpus: Corpus, most: int) -> MinedPairs:
    n, t = len(corpus.keys), len(corpus.captions)
    scores = {name: torch.full((n, most), -torch.inf) for name in TERMS}
    per_image, per_text = (torch.zeros(size, dtype=torch.int64) for size in (n, t))
    return MinedPairs(torch.full((n, most), -1), scores, per_image, per_text)


def _count(
    mined: MinedPairs,
    settings: Mined,
    values: Mapping[str, Tensor],
    annotated_mask: Tensor,
    rows: slice,
    columns: slice,
    true: Tensor | None,
) -> None:
    """Add a block: similarities [i, t]; annotated_mask [i, t] bool; true [i, t] bool."""
    terms = by_term(settings, **values)
    whole = matches(settings, **values)
    mined.annotated.add(whole[annotated_mask], {name: hit[annotated_mask] for name, hit in terms.items()})
    whole &= ~annotated_mask
    for hit in terms.values():
        hit &= ~annotated_mask
    mined.mined.add(whole, terms)
    annotated = int(annotated_mask.sum())
    mined.annotated_pairs += annotated
    mined.pairs += whole.numel() - annotated
    mined.per_image[rows] += whole.sum(1).cpu()
    mined.per_text[columns] += whole.sum(0).cpu()
    if true is not None:
        mined.right.add(whole & true, {name: hit & true for name, hit in terms.items()})
        mined.true = (mined.true or 0) + int((true & ~annotated_mask).sum())
    _keep(mined, values, whole, rows, columns.start)


def _keep(mined: MinedPairs, values: Mapping[str, Tensor], whole: Tensor, rows: slice, start: int) -> None:
    """Merge a block's mined pairs into the best of their images."""
    most = mined.column.shape[1]
    best, place = values["it"].masked_fill(~whole, -torch.inf).topk(min(most, whole.shape[1]), dim=1)
    nothing = best == -torch.inf
    column = torch.where(nothing, -1, place + start).cpu()
    block = {name: value.gather(1, place).masked_fill(nothing, -torch.inf).cpu() for name, value in values.items()}
    joined = {name: torch.cat([mined.scores[name][rows], block[name]], 1) for name in TERMS}
    order = joined["it"].argsort(dim=1, descending=True, stable=True)[:, :most]
    mined.column[rows] = torch.cat([mined.column[rows], column], 1).gather(1, order)
    for name in TERMS:
        mined.scores[name][rows] = joined[name].gather(1, order)

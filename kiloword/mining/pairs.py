"""Every image against every caption, a block at a time: which pairs match by eq. 2, and by which of its terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kiloword.distributed.sharing import own, share, to_first
from kiloword.evaluation.features import chunks
from kiloword.methods.fff.preset import Mined, check, matches
from kiloword.mining.corpus import Corpus, similarities

TERMS = {"it": "image_text", "ii": "image_image", "tt": "text_text"}
"""The terms of eq. 2 and the switches of `Mined` that they have."""

Truth = Callable[[slice], Tensor]
"""Which of some captions are true of which images, bool [t, N]."""

Progress = Callable[[int, int], None]
"""Told after every block: pairs done, pairs in all."""


@dataclass
class PairCounts:
    """Pairs by what accepted them."""

    whole: int = 0  # eq. 2
    term: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TERMS, 0))
    alone: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TERMS, 0))  # by no other term

    def add(self, whole: Tensor, terms: Mapping[str, Tensor]) -> None:
        """Count the pairs of a block, bool of any shape."""
        self.whole += int(whole.sum())
        times = torch.stack(list(terms.values())).sum(0)
        for name, hit in terms.items():
            self.term[name] += int(hit.sum())
            self.alone[name] += int((hit & (times == 1)).sum())

    def plus(self, other: PairCounts) -> None:
        """Add another rank's."""
        self.whole += other.whole
        for name in TERMS:
            self.term[name] += other.term[name]
            self.alone[name] += other.alone[name]


@dataclass
class MinedPairs:
    """What a search found. Mined pairs are those of an image and a caption that was not written for it."""

    column: Tensor  # [N, most] int64, the captions of each image's best mined pairs by S_it, -1: none
    scores: dict[str, Tensor]  # "it", "ii", "tt": [N, most] float32
    per_image: Tensor  # [N] int64 mined pairs
    per_text: Tensor  # [T] int64
    mined: PairCounts = field(default_factory=PairCounts)
    annotated: PairCounts = field(default_factory=PairCounts)  # annotated pairs that eq. 2 accepts on the scores alone
    right: PairCounts = field(default_factory=PairCounts)  # mined pairs that are true, where the truth is known
    true: int | None = None  # true pairs that are not annotated
    pairs: int = 0  # pairs that are not annotated
    annotated_pairs: int = 0

    def add(self, images: Tensor, other: MinedPairs) -> None:
        """Add what was found of some more images, [n] their numbers."""
        self.column[images], self.per_image[images] = other.column, other.per_image
        for name in TERMS:
            self.scores[name][images] = other.scores[name]
        self.per_text += other.per_text
        for mine, theirs in (
            (self.mined, other.mined),
            (self.annotated, other.annotated),
            (self.right, other.right),
        ):
            mine.plus(theirs)
        self.true = None if self.true is None and other.true is None else (self.true or 0) + (other.true or 0)
        self.pairs, self.annotated_pairs = self.pairs + other.pairs, self.annotated_pairs + other.annotated_pairs


def by_term(settings: Mined, it: Tensor, ii: Tensor, tt: Tensor) -> dict[str, Tensor]:
    """Which term of eq. 2 accepts which pair: bool like the similarities, by "it", "ii" and "tt"."""
    found = {}
    for name, switch in TERMS.items():
        off = {other: False for other in TERMS.values() if other != switch}
        found[name] = matches(replace(settings, **off), it, ii, tt)  # type: ignore[arg-type]  # switches are bool
    return found


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

    Args: most, how many mined pairs of an image are kept, best S_it first (all are counted); chunk, images and
    captions of a block, whose similarities are held at once; truth, where it is known.
    Ranks that share the work take the blocks of images in turns; the first one has all that was found.
    Errors: ValueError for thresholds out of range.
    """
    check(settings)
    n, t = len(corpus.keys), len(corpus.captions)
    found, mine = _nothing(corpus, min(most, t)), own(list(chunks(n, chunk)))
    done, of = 0, t * sum(rows.stop - rows.start for rows in mine)
    for columns in chunks(t, chunk):
        texts, owner = corpus.load(corpus.texts, columns), corpus.owner[columns]
        owners, wanted = corpus.load(corpus.images, owner), torch.from_numpy(owner).to(corpus.device)
        true = None if truth is None else truth(columns).T.to(corpus.device)  # [N, t]
        for rows in mine:
            images, means = corpus.load(corpus.images, rows), corpus.load(corpus.means, rows)
            values = dict(zip(TERMS, similarities(images, means, texts, owners), strict=True))
            written = wanted[None] == torch.arange(rows.start, rows.stop, device=wanted.device)[:, None]
            _count(found, settings, values, written, rows, columns, None if true is None else true[rows])
            if progress is not None:
                done += (rows.stop - rows.start) * len(owner)
                progress(done, of)
    return _of_all(found, mine)


def _of_all(found: MinedPairs, mine: list[slice]) -> MinedPairs:
    """What all ranks found, on the first one. Args: mine: this rank's images."""
    if share()[1] == 1:
        return found
    which = _numbers(mine)
    scores = {name: values[which] for name, values in found.scores.items()}
    own_part = replace(found, column=found.column[which], scores=scores, per_image=found.per_image[which])
    for rows, other in to_first((mine, own_part))[1:]:
        found.add(_numbers(rows), other)
    return found


def _numbers(rows: list[slice]) -> Tensor:
    return torch.tensor([n for part in rows for n in range(part.start, part.stop)], dtype=torch.int64)


def _nothing(corpus: Corpus, most: int) -> MinedPairs:
    n = len(corpus.keys)
    scores = {name: torch.full((n, most), -torch.inf) for name in TERMS}
    empty = torch.full((n, most), -1)
    return MinedPairs(
        empty, scores, torch.zeros(n, dtype=torch.int64), torch.zeros(len(corpus.captions), dtype=torch.int64)
    )


def _count(
    found: MinedPairs,
    settings: Mined,
    values: Mapping[str, Tensor],
    own: Tensor,
    rows: slice,
    columns: slice,
    true: Tensor | None,
) -> None:
    """Add a block: similarities [i, t], own [i, t] bool the annotated pairs, true [i, t] bool."""
    terms = by_term(settings, **values)
    whole = matches(settings, **values)
    found.annotated.add(whole[own], {name: hit[own] for name, hit in terms.items()})
    whole &= ~own
    for hit in terms.values():
        hit &= ~own
    found.mined.add(whole, terms)
    annotated = int(own.sum())
    found.annotated_pairs += annotated
    found.pairs += whole.numel() - annotated
    found.per_image[rows] += whole.sum(1).cpu()
    found.per_text[columns] += whole.sum(0).cpu()
    if true is not None:
        found.right.add(whole & true, {name: hit & true for name, hit in terms.items()})
        found.true = (found.true or 0) + int((true & ~own).sum())
    _keep(found, values, whole, rows, columns.start)


def _keep(found: MinedPairs, values: Mapping[str, Tensor], whole: Tensor, rows: slice, start: int) -> None:
    """Merge a block's mined pairs into the best of their images."""
    most = found.column.shape[1]
    best, place = values["it"].masked_fill(~whole, -torch.inf).topk(min(most, whole.shape[1]), dim=1)
    nothing = best == -torch.inf
    column = torch.where(nothing, -1, place + start).cpu()
    block = {name: value.gather(1, place).masked_fill(nothing, -torch.inf).cpu() for name, value in values.items()}
    joined = {name: torch.cat([found.scores[name][rows], block[name]], 1) for name in TERMS}
    order = joined["it"].argsort(dim=1, descending=True, stable=True)[:, :most]
    found.column[rows] = torch.cat([found.column[rows], column], 1).gather(1, order)
    for name in TERMS:
        found.scores[name][rows] = joined[name].gather(1, order)

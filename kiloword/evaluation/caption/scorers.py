"""BLEU, ROUGE-L and CIDEr-D of tokenized captions, as pycocoevalcap 1.2 computes them, without its loops."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LONGEST = 4  # words of an n-gram
TINY, SMALL = 1e-15, 1e-9  # BLEU: added to the matches and to the number of n-grams, against division by 0
BETA = 1.2  # ROUGE-L: weight of recall relative to precision
SIGMA = 6.0  # CIDEr-D: width in words of the penalty for another length


@dataclass(frozen=True)
class Captions:
    """One candidate and at least one reference for each of I images, tokenized: words and single spaces."""

    candidates: Sequence[str]
    references: Sequence[Sequence[str]]

    def __len__(self) -> int:
        return len(self.candidates)

    @cached_property
    def owner(self) -> Ints:
        """The image of each reference, [R]."""
        return np.repeat(np.arange(len(self)), list(map(len, self.references)))

    @cached_property
    def lengths(self) -> tuple[Ints, Ints]:
        """Words of candidates [I] and of references [R]."""
        texts = (self.candidates, [r for of_image in self.references for r in of_image])
        candidates, references = (np.array([len(text.split()) for text in several], np.int64) for several in texts)
        return candidates, references

    @cached_property
    def shared(self) -> list[SharedNgrams]:
        """The n-grams of 1 to LONGEST words."""
        texts = [*self.candidates, *(r for of_image in self.references for r in of_image)]
        return [_share(counts, self.owner, len(self)) for counts in _grams(texts)]


@dataclass(frozen=True)
class NgramCounts:
    """Counts of n-grams in captions; rows in the order of captions, then of n-grams."""

    caption: Ints  # [N]
    gram: Ints  # [N] a number for each different n-gram
    count: Ints  # [N] at least 1


@dataclass(frozen=True)
class SharedNgrams:
    """The n-grams of one length of all candidates and references."""

    kinds: int  # different ones
    candidates: NgramCounts
    known: NgramCounts  # of references
    row: Ints  # [H] rows of `known` whose n-gram the image's candidate has, too
    by: Ints  # [H] the rows of `candidates` with that n-gram


def _grams(texts: Sequence[str]) -> Iterator[NgramCounts]:
    """The n-grams of 1 to LONGEST words of C texts."""
    words = [text.split() for text in texts]
    caption = np.repeat(np.arange(len(words)), list(map(len, words)))  # [S]
    numbers: dict[str, int] = {}
    word = np.array([numbers.setdefault(w, len(numbers)) for of_text in words for w in of_text], np.int64)  # [S]
    start, gram = np.arange(len(word)), word  # first words of n-grams, and which these are, [Q]
    for n in range(LONGEST):
        if n:
            fits = start + n < len(word)
            start, gram = start[fits], gram[fits]
            fits = caption[start + n] == caption[start]
            start, gram = start[fits], gram[fits]
            gram = np.unique(gram * len(numbers) + word[start + n], return_inverse=True)[1]
        kinds = int(gram.max(initial=0)) + 1
        place, count = np.unique(caption[start] * kinds + gram, return_counts=True)
        yield NgramCounts(place // kinds, place % kinds, count)


def _share(counts: NgramCounts, owner: Ints, images: int) -> SharedNgrams:
    """Candidates, which are the first texts, against references."""
    split = int(np.searchsorted(counts.caption, images))
    candidates = NgramCounts(counts.caption[:split], counts.gram[:split], counts.count[:split])
    known = NgramCounts(counts.caption[split:] - images, counts.gram[split:], counts.count[split:])
    kinds = int(counts.gram.max(initial=0)) + 1
    keys = np.append(candidates.caption * kinds + candidates.gram, -1)  # ascending, but for the end
    wanted = owner[known.caption] * kinds + known.gram
    by = np.searchsorted(keys[:-1], wanted)
    row = np.flatnonzero(keys[by] == wanted)
    return SharedNgrams(kinds, candidates, known, row, by[row])


def bleu(captions: Captions) -> list[float]:
    """BLEU-1 to BLEU-4 of the whole set: n-grams and lengths are added over images before anything is divided.

    An n-gram counts as often as in the reference that has it most; the reference length is the closest one, of two the
    shorter. Source: Papineni et al. 2002, as in pycocoevalcap.
    """
    candidate_lengths, reference_lengths = captions.lengths
    total, nearest = int(candidate_lengths.sum()), _nearest(candidate_lengths, reference_lengths, captions.owner)
    ratio = (total + TINY) / (nearest + SMALL)
    penalty = math.exp(1 - 1 / ratio) if ratio < 1 else 1.0
    values, product = [], 1.0
    for n, shared in enumerate(captions.shared):
        most = np.zeros(len(shared.candidates.count), np.int64)
        np.maximum.at(most, shared.by, shared.known.count[shared.row])
        right = int(np.minimum(most, shared.candidates.count).sum())
        product *= (right + TINY) / (int(np.maximum(candidate_lengths - n, 0).sum()) + SMALL)
        values.append(product ** (1 / (n + 1)) * penalty)
    return values


def _nearest(candidate_lengths: Ints, reference_lengths: Ints, owner: Ints) -> int:
    """The sum of the reference lengths nearest to the candidates'."""
    order = np.lexsort((reference_lengths, np.abs(reference_lengths - candidate_lengths[owner]), owner))
    first = np.flatnonzero(np.diff(owner, prepend=-1))  # of each image, in an order that keeps images together
    return int(reference_lengths[order][first].sum())


def cider(captions: Captions) -> Floats:
    """CIDEr-D of every image, [I]: 0 to 10. Papers print the mean times 100.

    The cosine of n-gram counts weighed by rarity, clipped to the reference's, with a penalty for another length; mean
    over n and over references. Rarity is taken from the references of these images, so one image alone scores 0.
    Source: arXiv:1411.5726, section 5, as in pycocoevalcap (lengths are numbers of bigrams).
    """
    owner, images = captions.owner, len(captions)
    total = np.zeros(len(owner))
    for shared in captions.shared:
        rarity = _rarity(shared, owner, images)
        count, gram, reference = (x[shared.row] for x in (shared.known.count, shared.known.gram, shared.known.caption))
        clipped = np.minimum(shared.candidates.count[shared.by], count)
        alike = np.bincount(reference, clipped * count * rarity[gram] ** 2, len(owner))
        norms = _norms(shared.candidates, rarity, images)[owner] * _norms(shared.known, rarity, len(owner))
        total += np.divide(alike, norms, out=np.zeros(len(owner)), where=norms > 0)
    bigrams = [np.maximum(length - 1, 0) for length in captions.lengths]
    penalty = np.exp(-((bigrams[0][owner] - bigrams[1]) ** 2) / (2 * SIGMA**2))
    means = np.bincount(owner, total / LONGEST * penalty, images) / np.bincount(owner, minlength=images)
    return np.asarray(10 * means)


def _rarity(shared: SharedNgrams, owner: Ints, images: int) -> Floats:
    """The logarithm of images over those whose references hold an n-gram, [kinds]; unknown ones count as in one."""
    held = np.unique(owner[shared.known.caption] * shared.kinds + shared.known.gram) % shared.kinds
    return np.asarray(math.log(images) - np.log(np.maximum(np.bincount(held, minlength=shared.kinds), 1)))


def _norms(counts: NgramCounts, rarity: Floats, captions: int) -> Floats:
    return np.sqrt(np.bincount(counts.caption, (counts.count * rarity[counts.gram]) ** 2, captions))


def rouge_l(captions: Captions) -> Floats:
    """ROUGE-L of every image, [I], in [0, 1]: F of the longest common subsequence, with beta 1.2.

    The greatest precision and the greatest recall are taken over references, each by itself, so they may come from two.
    Source: Lin 2004, as in pycocoevalcap (an empty caption there is one empty word).
    """
    return np.array([_rouge(c, of_image) for c, of_image in zip(captions.candidates, captions.references, strict=True)])


def _rouge(candidate: str, references: Sequence[str]) -> float:
    words_of_candidate = candidate.split(" ")
    known = [reference.split(" ") for reference in references]
    common = [common_subsequence(words_of_candidate, words) for words in known]
    precision = max(common) / len(words_of_candidate)
    recall = max(c / len(words) for c, words in zip(common, known, strict=True))
    if not precision:
        return 0.0
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """The length of the longest common subsequence, a row of its table as the bits of one number.

    Source: Hyyrö 2004, "Bit-parallel LCS-length computation revisited".
    """
    places: dict[str, int] = {}
    for i, word in enumerate(a):
        places[word] = places.get(word, 0) | 1 << i
    row = every = (1 << len(a)) - 1
    for word in b:
        hit = row & places.get(word, 0)
        row = (row + hit) | (row - hit)
    return len(a) - (row & every).bit_count()

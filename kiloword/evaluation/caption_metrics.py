"""BLEU, ROUGE-L and CIDEr-D as pycocoevalcap 1.2 computes them, but faster; CLIPScore; METEOR and SPICE by Java."""

from __future__ import annotations

import math
import re
import shutil
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kiloword.errors import needs
from kiloword.evaluation.tasks import TokenizerName

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LONGEST = 4  # words of an n-gram
TINY, SMALL = 1e-15, 1e-9  # BLEU: added to the matches and to the number of n-grams, against division by 0
BETA = 1.2  # ROUGE-L: weight of recall relative to precision
SIGMA = 6.0  # CIDEr-D: width in words of the penalty for another length
WEIGHT = 2.5  # of CLIPScore
CORENLP = "stanford-corenlp-3.6.0-models.jar"
VARIETY = ("distinct", "words", "vocabulary")  # metrics of captions alone
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)

_SAME = {ord(mark): same for mark, same in zip("’‘‐‑\N{VARIATION SELECTOR-16}", "''-- ", strict=True)}
_CLITIC = re.compile(r"(?<=[^\W\d_])(?:n't|'(?:s|m|d|re|ve|ll))(?![\w'])|(?<=\d)'s(?![\w'])")
_JOINED = re.compile(r"\b(?:(can)(not)|(gon|wan)(na)|(got)(ta))\b")
_LETTER = r"[^\s.,;:?!\"'`()\[\]{}\-$%&#@+=*~^<>|/\\]"  # neither ASCII punctuation nor a symbol of it
_WORD = re.compile(
    r"(?:[^\W\d_]\.){2,}"  # u.s.
    r"|'(?:s|m|d|re|ve|ll)(?!\w)"  # what was cut off
    r"|\d+(?:[.,:/]\d+)+(?!\w)"  # 8:30, 1,000, 1/2
    rf"|{_LETTER}+(?:[-./']{_LETTER}+)*"  # black-and-white, o'clock, www.x.com
    r"|[$%&#@+=*~^<>|/\\]"
)


class _Apart(dict[int, str]):
    """Outside ASCII punctuation becomes a space, and a symbol stands alone; marks within words stay."""

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        kind = "L" if code < 128 or letter in "·׳״" else unicodedata.category(letter)[0]
        self[code] = " " if kind == "P" else f" {letter} " if kind == "S" else letter
        return self[code]


_APART = _Apart(_SAME)


def own(caption: str) -> str:
    """A caption in lower case, NFC and without punctuation of any script, one space between words.

    It splits as the Penn treebank does: "does n't", "man 's". It differs from Stanford's tokenizer for 0.1% of COCO's
    captions: it drops brackets, "!!!" and the period of abbreviations except those like "u.s.".
    """
    text = _CLITIC.sub(r" \g<0>", unicodedata.normalize("NFC", caption.lower()).translate(_APART))
    text = _JOINED.sub(lambda m: " ".join(part for part in m.groups() if part), text)
    return " ".join(_WORD.findall(text))


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
    def words(self) -> list[list[str]]:
        """Words of the candidates, then of the references."""
        return [text.split() for text in (*self.candidates, *chain.from_iterable(self.references))]

    @cached_property
    def lengths(self) -> tuple[Ints, Ints]:
        """Numbers of words of candidates [I] and of references [R]."""
        every = np.array(list(map(len, self.words)), np.int64)
        return every[: len(self)], every[len(self) :]

    @cached_property
    def ngrams(self) -> list[Ngrams]:
        """The n-grams of 1 to LONGEST words."""
        return list(_ngrams(self))


class Ngrams(NamedTuple):
    """The n-grams of one length: N rows, one for each different n-gram of each caption, candidates first."""

    kinds: int  # different n-grams
    caption: Ints  # [N] a candidate, or I + a reference
    gram: Ints  # [N]
    times: Ints  # [N] at least 1
    first: int  # row of references
    row: Ints  # [H] rows of references whose n-gram the image's candidate has, too
    by: Ints  # [H] the rows of candidates with that n-gram


def _ngrams(captions: Captions) -> Iterator[Ngrams]:
    words, images = captions.words, len(captions)
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
        first = int(np.searchsorted(place, images * kinds))
        keys = np.append(place[:first], -1)  # ascending, but for the end
        wanted = captions.owner[place[first:] // kinds - images] * kinds + place[first:] % kinds
        by = np.searchsorted(keys[:-1], wanted)
        row = np.flatnonzero(keys[by] == wanted)
        yield Ngrams(kinds, place // kinds, place % kinds, count, first, row + first, by[row])


def bleu(captions: Captions) -> list[float]:
    """BLEU-1 to BLEU-4 of the whole set: n-grams and lengths are added over images before anything is divided.

    An n-gram counts as often as in the reference that has it most; the reference length is the closest one, of two the
    shorter. Source: Papineni et al. 2002, as in pycocoevalcap.
    """
    (lengths, known), owner = captions.lengths, captions.owner
    order = np.lexsort((known, np.abs(known - lengths[owner]), owner))
    nearest = int(known[order][np.flatnonzero(np.diff(owner, prepend=-1))].sum())  # the first of each image
    ratio = (int(lengths.sum()) + TINY) / (nearest + SMALL)
    penalty = math.exp(1 - 1 / ratio) if ratio < 1 else 1.0
    values, product = [], 1.0
    for n, grams in enumerate(captions.ngrams):
        most = np.zeros(grams.first, np.int64)
        np.maximum.at(most, grams.by, grams.times[grams.row])
        right = int(np.minimum(most, grams.times[: grams.first]).sum())
        product *= (right + TINY) / (int(np.maximum(lengths - n, 0).sum()) + SMALL)
        values.append(product ** (1 / (n + 1)) * penalty)
    return values


def cider(captions: Captions) -> Floats:
    """CIDEr-D of every image, [I]: 0 to 10. Papers print the mean times 100.

    The cosine of n-gram counts weighed by rarity, clipped to the reference's, with a penalty for another length; mean
    over n and over references. Rarity is taken from the references of these images, so one image alone has none.
    Source: arXiv:1411.5726, section 5, as in pycocoevalcap (lengths are numbers of bigrams).
    """
    owner, images = captions.owner, len(captions)
    total = np.zeros(len(owner))
    for grams in captions.ngrams:
        held = np.unique(owner[grams.caption[grams.first :] - images] * grams.kinds + grams.gram[grams.first :])
        images_with = np.maximum(np.bincount(held % grams.kinds, minlength=grams.kinds), 1)  # unknown ones: as in one
        rarity = math.log(images) - np.log(images_with)  # [kinds]
        clipped = np.minimum(grams.times[grams.by], grams.times[grams.row]) * grams.times[grams.row]
        weighed = clipped * rarity[grams.gram[grams.row]] ** 2
        alike = np.bincount(grams.caption[grams.row] - images, weighed, len(owner))
        squares = (grams.times * rarity[grams.gram]) ** 2
        norms = np.sqrt(np.bincount(grams.caption, squares, images + len(owner)))
        both = norms[:images][owner] * norms[images:]
        total += np.divide(alike, both, out=np.zeros(len(owner)), where=both > 0)
    bigrams = [np.maximum(length - 1, 0) for length in captions.lengths]
    penalty = np.exp(-((bigrams[0][owner] - bigrams[1]) ** 2) / (2 * SIGMA**2))
    means = np.bincount(owner, total / LONGEST * penalty, images) / np.bincount(owner, minlength=images)
    return np.asarray(10 * means)


def rouge_l(captions: Captions) -> Floats:
    """ROUGE-L of every image, [I], in [0, 1]: F of the longest common subsequence, with beta 1.2.

    The greatest precision and the greatest recall are taken over references, each by itself, so they may come from two.
    Source: Lin 2004, as in pycocoevalcap (an empty caption there is one empty word).
    """

    def score(candidate: str, references: Sequence[str]) -> float:
        words, known = candidate.split(" "), [reference.split(" ") for reference in references]
        common = [common_subsequence(words, of_reference) for of_reference in known]
        precision = max(common) / len(words)
        recall = max(c / len(of_reference) for c, of_reference in zip(common, known, strict=True))
        return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision) if precision else 0.0

    return np.array(list(map(score, captions.candidates, captions.references)))


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


def clipscore(image: Tensor, candidate: Tensor, references: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """CLIPScore and RefCLIPScore of I images, [I] each: 2.5 max(cos, 0) of image and caption; its harmonic mean with
    the largest max(cos, 0) of the caption and a reference.

    Args: unit vectors of images [I, D], of captions [I, D], of the references of each image [R_i, D].
    Source: Hessel et al. 2021 (arXiv:2104.08718), section 3.
    """
    alone = WEIGHT * (image * candidate).sum(1).clamp(min=0)
    known = torch.stack([(r @ c).amax() for r, c in zip(references, candidate, strict=True)]).clamp(min=0)
    return alone, (2 * alone * known / (alone + known)).nan_to_num()


@dataclass(frozen=True)
class Scored:
    """Values of a whole set by name, and CIDEr-D of each image, [I]; NaN where there is none."""

    values: dict[str, float]
    cider: Floats
    notes: Sequence[str] = ()  # what is omitted, and why


def score_captions(
    candidates: Sequence[str],
    references: Sequence[Sequence[str]],
    tokenizer: TokenizerName = "own",
    meteor: bool = False,
    spice: bool = False,
) -> Scored:
    """Metrics of one caption per image against all captions that the image has.

    `bleu_1` to `bleu_4`, `rouge_l`, `cider` (CIDEr-D; papers print it times 100), `spice` and `meteor` if asked for;
    then of the candidates alone: `distinct` (share of different ones), `words` (mean length), `vocabulary` (number of
    different words). What cannot be computed is omitted, with a note. By tokenizer "ptb" all are pycocoevalcap's.

    Args: I candidates, which may be empty; I lists of at least one reference.
    Errors: ValueError where Java or what it needs is missing.
    """
    check_programs(tokenizer, spice)
    every = [*candidates, *chain.from_iterable(references)]
    lines: Iterator[str] = map(own, every)
    if tokenizer == "ptb":
        from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer  # type: ignore[import-untyped]

        split = PTBTokenizer().tokenize({n: [{"caption": " ".join(text.split())}] for n, text in enumerate(every)})
        lines = (split[n][0] for n in range(len(every)))
    captions = Captions([next(lines) for _ in candidates], [[next(lines) for _ in of_image] for of_image in references])
    none, distinct = np.full(len(candidates), math.nan), len(set(captions.candidates)) / len(candidates)
    letters = "".join(letter for text in every for letter in text if letter.isalpha())
    if len(UNSPACED.findall(letters)) > len(letters) / 2:
        note = "the captions have no spaces between words: BLEU, ROUGE-L, CIDEr-D and METEOR are omitted"
        return Scored({"distinct": distinct}, none, [note])
    notes = list[str]()
    values = {f"bleu_{n}": value for n, value in enumerate(bleu(captions), start=1)}
    values["rouge_l"] = float(rouge_l(captions).mean())
    if len(captions) > 1:
        none = cider(captions)
        values["cider"] = float(none.mean())
    else:
        notes.append("CIDEr-D is omitted: it weighs words by their rarity among images, and there is one image")
    if spice:
        values["spice"] = _by_java("spice.spice", "Spice", captions)
    if meteor and (why := _missing()):
        notes.append(f"METEOR is omitted: {why}")
    elif meteor:
        try:
            values["meteor"] = _by_java("meteor.meteor", "Meteor", captions)
        except (OSError, ValueError) as error:
            notes.append(f"METEOR is omitted, as it failed: {error}")
    said = captions.words[: len(captions)]
    words = {"words": sum(map(len, said)) / len(said), "vocabulary": float(len(set(chain.from_iterable(said))))}
    return Scored({**values, "distinct": distinct, **words}, none, notes)


def check_programs(tokenizer: TokenizerName, spice: bool) -> None:
    """Raises: ValueError for what is asked for and not there, before anything is computed."""
    if (tokenizer == "ptb" or spice) and (why := _missing()):
        raise ValueError(f"the tokenizer ptb and SPICE cannot run: {why}.")
    spec = find_spec("pycocoevalcap.spice") if spice else None
    if spec and not Path(str(spec.origin)).with_name("lib").joinpath(CORENLP).is_file():  # which it would download
        raise ValueError(
            f"SPICE needs {CORENLP} of nlp.stanford.edu in pycocoevalcap/spice/lib; nothing is downloaded."
        )


def _missing() -> str | None:
    """Why pycocoevalcap's programs cannot run; None: they can."""
    if find_spec("pycocoevalcap") is None:
        return needs("it", "pycocoevalcap", "eval")
    return None if shutil.which("java") else "there is no java on the PATH"


def _by_java(module: str, name: str, captions: Captions) -> float:
    """The mean over images of a metric of pycocoevalcap."""
    scorer: Any = getattr(import_module(f"pycocoevalcap.{module}"), name)()
    scorer.lock, process = RLock(), getattr(scorer, "meteor_p", None)  # its own lock stays locked where it fails
    known = dict(enumerate(map(list, captions.references)))
    try:
        value, _ = scorer.compute_score(known, {n: [text] for n, text in enumerate(captions.candidates)})
    finally:
        for pipe in (process.stdout, process.stderr) if process else ():
            pipe.close()
    return float(value)

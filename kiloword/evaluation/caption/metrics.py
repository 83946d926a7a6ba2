"""How close captions are to those that people wrote: BLEU, ROUGE-L, CIDEr-D, METEOR, SPICE, and their variety."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from kiloword.evaluation.caption import CaptionOptions, java
from kiloword.evaluation.caption.scorers import Captions, Floats, bleu, cider, rouge_l
from kiloword.terminal import warn

VARIETY = ("distinct", "words", "vocabulary")  # metrics of captions alone


@dataclass(frozen=True)
class Scored:
    """Values of a whole set by name, and CIDEr-D of each image, [I]."""

    values: dict[str, float]
    cider: Floats


def score_captions(
    candidates: Sequence[str], references: Sequence[Sequence[str]], options: CaptionOptions | None = None
) -> Scored:
    """Metrics of one caption per image against all captions that the image has.

    `bleu_1` to `bleu_4`, `rouge_l`, `cider` (CIDEr-D; papers print it times 100), `spice` and `meteor` if the options
    ask for them (METEOR is omitted with a warning where it cannot run); then of the candidates alone: `distinct` (share
    of different ones), `words` (mean length), `vocabulary` (number of different words). With tokenizer "ptb" all values
    are pycocoevalcap's; "own" needs no Java.

    Args: I candidates, which may be empty; I lists of at least one reference; options: by default without METEOR.
    Errors: ValueError without an image or a reference, or where Java or what it needs is missing or fails.
    """
    options = options or CaptionOptions(meteor=False)
    _check(candidates, references)
    check_programs(options.tokenizer, options.spice)
    captions = tokenized(candidates, references, options.tokenizer, options.limit)
    of_image = cider(captions)
    values = {f"bleu_{n}": value for n, value in enumerate(bleu(captions), start=1)}
    values |= {"rouge_l": float(rouge_l(captions).mean()), "cider": float(of_image.mean())}
    if options.spice:
        values["spice"] = java.spice(captions.candidates, captions.references, options.limit)
    if options.meteor:
        try:
            values["meteor"] = java.meteor(captions.candidates, captions.references, options.limit)[0]
        except ValueError as error:
            warn(f"meteor is omitted: {error}")
    return Scored(values | _variety(captions.candidates), of_image)


def check_programs(tokenizer: TokenizerName, spice: bool) -> None:
    """Raises: ValueError for what is asked for and not there, before anything is computed."""
    why = java.missing(java.TOKENIZER) if tokenizer == "ptb" else None
    if why is not None:
        raise ValueError(f"the tokenizer ptb cannot run: {why}.")
    why = java.no_spice() if spice else None
    if why is not None:
        raise ValueError(f"SPICE cannot be computed: {why}.")


def tokenized(
    candidates: Sequence[str], references: Sequence[Sequence[str]], tokenizer: TokenizerName, limit: float
) -> Captions:
    """Candidates and references in words; see `tokenize`."""
    lines = iter(tokenize([*candidates, *(r for of_image in references for r in of_image)], tokenizer, limit))
    return Captions([next(lines) for _ in candidates], [[next(lines) for _ in of_image] for of_image in references])


def _variety(candidates: Sequence[str]) -> dict[str, float]:
    """How much tokenized captions differ; a model that writes the same for every image has `distinct` near 0."""
    words = [candidate.split() for candidate in candidates]
    return {
        "distinct": len(set(candidates)) / len(candidates),
        "words": sum(map(len, words)) / len(words),
        "vocabulary": float(len(set(chain.from_iterable(words)))),
    }


def _check(candidates: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if isinstance(candidates, str) or any(isinstance(of_image, str) for of_image in references):
        raise ValueError("captions came as one string. Expected a list of captions, and a list of lists of references.")
    if not candidates or len(candidates) != len(references):
        raise ValueError(
            f"{len(candidates)} captions came for {len(references)} images. Expected one for each of some images."
        )
    bare = next((i for i, of_image in enumerate(references) if not of_image), None)
    if bare is not None:
        raise ValueError(f"image {bare} has no references. Omit images without captions.")


TokenizerName = Literal["own", "ptb"]

# What pycocoevalcap drops. It looks for -LRB-, but brackets come as -lrb-, so they stay: a quirk of its figures.
PUNCTUATION = frozenset(
    ("''", "'", "``", "`", "-LRB-", "-RRB-", "-LCB-", "-RCB-", ".", "?", "!", ",", ":", "-", "--", "...", ";")
)
_SAME = str.maketrans({"’": "'", "‘": "'", "“": " ", "”": " ", "…": " ", "–": " ", "—": " "})
_CLITIC = re.compile(r"(?<=[^\W\d_])(?:n't|'(?:s|m|d|re|ve|ll))(?![\w'])|(?<=\d)'s(?![\w'])")
_JOINED = re.compile(r"\b(?:(can)(not)|(gon|wan)(na)|(got)(ta))\b")
_LETTER = (
    r"[^\s.,;:?!\"'`()\[\]{}\-$%&#@+=*~^<>|/\\]"  # neither punctuation nor a symbol; marks and signs of any script
)
_WORD = re.compile(
    r"(?:[^\W\d_]\.){2,}"  # u.s.
    r"|'(?:s|m|d|re|ve|ll)(?!\w)"  # what was cut off
    r"|\d+(?:[.,:/]\d+)+(?!\w)"  # 8:30, 1,000, 1/2
    rf"|{_LETTER}+(?:[-./']{_LETTER}+)*"  # black-and-white, o'clock, www.x.com
    r"|[$%&#@+=*~^<>|/\\]"
)


def tokenize(captions: Sequence[str], tokenizer: TokenizerName = "own", limit: float = 600) -> list[str]:
    """Captions in lower case without punctuation, one space between words.

    Args: tokenizer: "own"; "ptb", Stanford's of pycocoevalcap, in Java; limit in seconds for the latter.

    They differ for 0.1% of COCO's captions: "own" drops brackets, which "ptb" keeps as words ("-lrb-"), "!!!", and
    the period of abbreviations ("st.", "etc.") except those like "u.s."; "9:00pm" is split at another place.
    Errors: ValueError for an unknown tokenizer, or when Java or the package is missing or fails.
    """
    if tokenizer not in ("own", "ptb"):
        raise ValueError(f"the tokenizer of captions is {tokenizer!r}. Expected own or ptb.")
    if tokenizer == "own":
        return list(map(own, captions))
    lines = java.ptb([" ".join(caption.split()) for caption in captions], limit)
    return [" ".join(word for word in line.split(" ") if word not in PUNCTUATION) for line in lines]


def own(caption: str) -> str:
    """One caption by the package's tokenizer, which splits as the Penn treebank does: "does n't", "man 's"."""
    text = _CLITIC.sub(r" \g<0>", caption.lower().translate(_SAME))
    text = _JOINED.sub(lambda m: " ".join(part for part in m.groups() if part), text)
    return " ".join(_WORD.findall(text))

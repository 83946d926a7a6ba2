"""How near captions are to those that people wrote: BLEU, ROUGE-L, CIDEr-D, METEOR, SPICE, and how much they differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kiloword.evaluation.caption import java
from kiloword.evaluation.caption.scorers import Captions, Floats, bleu, cider, rouge_l


@dataclass(frozen=True)
class Scored:
    """Values of a whole set by name, those of each image, [I], and the words that were compared."""

    values: dict[str, float]
    cider: Floats
    rouge_l: Floats
    captions: Captions


def score_captions(
    candidates: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    tokenizer: TokenizerName = "own",
    meteor: bool = False,
    spice: bool = False,
    limit: float = 600,
) -> dict[str, float]:
    """Metrics of one caption an image against all captions that the image has.

    `bleu_1` to `bleu_4`, `rouge_l`, `cider` (CIDEr-D; papers print it times 100), `meteor` and `spice` where asked for;
    then of the candidates alone: `distinct` (share of different ones), `words` (mean length), `vocabulary` (different
    words). With tokenizer "ptb" all figures are pycocoevalcap's; "own" needs no Java.

    Args: I candidates, which may be empty; I lists of at least one reference; limit in seconds for each Java program.
    Errors: ValueError without an image or a reference, or where Java or what it needs is missing or fails.
    """
    found = score(candidates, references, tokenizer=tokenizer, meteor=meteor, spice=spice, limit=limit)
    return {**found.values, **variety(found.captions.candidates)}


def score(
    candidates: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    tokenizer: TokenizerName = "own",
    meteor: bool = False,
    spice: bool = False,
    limit: float = 600,
) -> Scored:
    """As `score_captions`, without what `variety` finds, and with the values of each image."""
    _check(candidates, references)
    check_programs(tokenizer, spice)
    captions = tokenized(candidates, references, tokenizer, limit)
    each_cider, each_rouge = cider(captions), rouge_l(captions)
    values = {f"bleu_{n}": value for n, value in enumerate(bleu(captions), start=1)}
    values |= {"rouge_l": float(each_rouge.mean()), "cider": float(each_cider.mean())}
    if meteor:
        values["meteor"] = java.meteor(captions.candidates, captions.references, limit)[0]
    if spice:
        values["spice"] = java.spice(captions.candidates, captions.references, limit)
    return Scored(values, each_cider, each_rouge, captions)


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
    """Candidates and references in words, as `tokenize` cuts them."""
    lines = iter(tokenize([*candidates, *(r for own in references for r in own)], tokenizer, limit))
    tokenized = [next(lines) for _ in candidates]
    return Captions(tokenized, [[next(lines) for _ in own] for own in references])


def variety(candidates: Sequence[str]) -> dict[str, float]:
    """How much tokenized captions differ: a model that says the same of every image has `distinct` near 0."""
    words = [candidate.split() for candidate in candidates]
    return {
        "distinct": len(set(candidates)) / len(candidates),
        "words": sum(map(len, words)) / len(words),
        "vocabulary": float(len({word for own in words for word in own})),
    }


def _check(candidates: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if isinstance(candidates, str) or any(isinstance(own, str) for own in references):
        raise ValueError("captions came as one string. Expected a list of captions, and a list of lists of references.")
    if not candidates or len(candidates) != len(references):
        raise ValueError(
            f"{len(candidates)} captions came for {len(references)} images. Expected one for each of some images."
        )
    bare = next((i for i, own in enumerate(references) if not own), None)
    if bare is not None:
        raise ValueError(f"image {bare} has no references. Leave images without captions of their own out.")


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

    They differ for 0.1% of COCO's captions: "own" drops brackets, which "ptb" keeps as words ("-lrb-"), and "!!!", and
    the period of every abbreviation but those like "u.s." ("st.", "etc."); "9:00pm" comes apart elsewhere.
    Errors: ValueError for an unknown tokenizer, or when Java or the package is missing or fails.
    """
    if tokenizer not in ("own", "ptb"):
        raise ValueError(f"the tokenizer of captions is {tokenizer!r}. Expected own or ptb.")
    if tokenizer == "own":
        return [own(caption) for caption in captions]
    lines = java.ptb([" ".join(caption.split()) for caption in captions], limit)
    return [" ".join(word for word in line.split(" ") if word not in PUNCTUATION) for line in lines]


def own(caption: str) -> str:
    """One caption by our own tokenizer, which cuts as the Penn treebank does ("does n't", "man 's", "can not")."""
    text = _CLITIC.sub(r" \g<0>", caption.lower().translate(_SAME))
    text = _JOINED.sub(lambda m: " ".join(part for part in m.groups() if part), text)
    return " ".join(_WORD.findall(text))

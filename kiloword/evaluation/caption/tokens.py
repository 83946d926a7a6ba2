"""From captions to the words that are compared: our own tokenizer, or the field's through Java."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from kiloword.evaluation.caption import java

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

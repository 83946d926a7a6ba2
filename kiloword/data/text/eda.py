"""Easy data augmentation of captions: synonyms, insertions, swaps, deletions (arXiv:1901.11196, section 2); word drop.

Words are separated by white space; punctuation around a word and its first capital are kept. Only words with a synonym
are replaced, so that no list of stop words is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from numpy.random import Generator

from kiloword.randomness import Draw

T = TypeVar("T")
Synonyms = Mapping[str, Sequence[str]]
"""Word -> the other words of its group, all in lower case."""

# English groups for captions of everyday photos. A group has one form (number, tense), so that any of its words can
# replace another. No colours, numbers, places or relations: a caption must stay true.
BUILT_IN = Path(__file__).with_name("synonyms.txt")

_PARTS = re.compile(r"(\W*)(.*?)(\W*)\Z", re.DOTALL)  # punctuation before the word, the word, punctuation after it


def eda(caption: str, synonyms: Synonyms, edits: float, rng: Generator) -> str:
    """Change a caption by one of the four operations, with equal probability.

    Args: edits: share of words to change, at least one word; or the probability of each deletion.
    Returns: a caption that is empty only if the input was.
    """
    words = caption.split()
    if not words:
        return caption
    operation, count = int(rng.integers(4)), max(1, int(edits * len(words)))
    parts = [_PARTS.findall(word)[0] for word in words]
    known = [n for n, (_, core, _) in enumerate(parts) if core.lower() in synonyms]
    if operation == 0:  # replace words by synonyms
        for n in rng.permutation(known)[:count].tolist():
            before, core, after = parts[n]
            new = _pick(synonyms[core.lower()], rng)
            words[n] = before + (new[0].upper() + new[1:] if core[:1].isupper() else new) + after
    elif operation == 1:  # insert synonyms of words at random places
        for _ in range(count if known else 0):
            new = _pick(synonyms[parts[_pick(known, rng)][1].lower()], rng)
            words.insert(int(rng.integers(len(words) + 1)), new)
    elif operation == 2:  # swap two words
        for _ in range(count if len(words) > 1 else 0):
            a, b = rng.choice(len(words), 2, replace=False)
            words[a], words[b] = words[b], words[a]
    else:  # delete words; at least one stays
        words = _kept(words, edits, rng) or [_pick(words, rng)]
    return " ".join(words)


@lru_cache(maxsize=4)
def read_synonyms(path: str | None = None) -> Synonyms:
    """Synonyms from a text file, each line a group of words separated by commas; None: the built-in list.

    A word in several groups has the synonyms of all of them.
    Raises: ValueError when the file cannot be read, or holds no group of two words.
    """
    file, synonyms = BUILT_IN if path is None else Path(path), dict[str, list[str]]()
    try:
        lines = file.read_text("utf-8-sig").lower().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"synonyms {file} cannot be read as UTF-8 text: {error}.") from None
    for line in lines:
        group = [word.strip() for word in line.split(",") if word.strip()]
        for word in group:
            if others := [other for other in group if other != word]:
                synonyms.setdefault(word, []).extend(others)
    if not synonyms:
        raise ValueError(f"synonyms {file}: no line has two words. Expected groups such as `dog, hound`.")
    return synonyms


def _pick(options: Sequence[T], rng: Generator) -> T:
    return options[int(rng.integers(len(options)))]


def drop_words(captions: Sequence[str], share: float, draw: Draw) -> list[str]:
    """Captions without a keyed random share of their words; unchanged if no word would remain.

    Against memorising captions: each epoch sees other words.
    """
    rng = draw.rng("words")
    return [" ".join(_kept(caption.split(), share, rng)) or caption for caption in captions]


def _kept(words: Sequence[str], share: float, rng: Generator) -> list[str]:
    """The words without a random share of them; may be empty."""
    return [word for word, number in zip(words, rng.random(len(words)), strict=True) if number >= share]

"""Easy data augmentation of captions: synonyms, insertions, swaps, deletions (arXiv:1901.11196, section 2); word drop.

Words are separated by white space; punctuation around a word and its first capital are kept. Only words with a synonym
are replaced, so that no list of stop words is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from numpy.random import Generator

from kiloword.randomness import Draw

Synonyms = Mapping[str, Sequence[str]]
"""Word -> the other words of its group, all in lower case."""

# English groups for captions of everyday photos. A group has one form (number, tense), so that any of its words can
# replace another. No colours, numbers, places or relations: a caption must stay true.
BUILT_IN = Path(__file__).with_name("synonyms.txt")

_CORE = re.compile(r"(\W*)(.*?)(\W*)", re.DOTALL)  # punctuation before the word, the word, punctuation after it


def eda(caption: str, synonyms: Synonyms, edits: float, rng: Generator) -> str:
    """Change a caption by one of the four operations, with equal probability.

    Args: edits: share of words to change, at least one word; or the probability of each deletion.
    Returns: a caption that is empty only if the input was.
    """
    words = caption.split()
    if not words:
        return caption
    operation = int(rng.integers(4))
    count = max(1, int(edits * len(words)))
    if operation == 0:
        words = replace_words(words, count, synonyms, rng)
    elif operation == 1:
        words = insert_words(words, count, synonyms, rng)
    elif operation == 2:
        words = swap_words(words, count, rng)
    else:
        words = delete_words(words, edits, rng)
    return " ".join(words)


def replace_words(words: Sequence[str], count: int, synonyms: Synonyms, rng: Generator) -> list[str]:
    """Replace `count` words that have a synonym (or all of them, if fewer) by one of their synonyms."""
    out, replaceable = list(words), [n for n, word in enumerate(words) if _bare(word) in synonyms]
    for place in rng.permutation(replaceable)[:count].tolist():
        out[place] = _dressed(words[place], _pick(synonyms[_bare(words[place])], rng))
    return out


def insert_words(words: Sequence[str], count: int, synonyms: Synonyms, rng: Generator) -> list[str]:
    """Insert `count` times a synonym of a word at a random place; nothing if no word has a synonym."""
    out, replaceable = list(words), [word for word in words if _bare(word) in synonyms]
    for _ in range(count if replaceable else 0):
        new = _pick(synonyms[_bare(_pick(replaceable, rng))], rng)
        out.insert(int(rng.integers(len(out) + 1)), new)
    return out


def swap_words(words: Sequence[str], count: int, rng: Generator) -> list[str]:
    """Swap two words `count` times."""
    out = list(words)
    for _ in range(count if len(out) > 1 else 0):
        a, b = rng.choice(len(out), 2, replace=False)
        out[a], out[b] = out[b], out[a]
    return out


def delete_words(words: Sequence[str], probability: float, rng: Generator) -> list[str]:
    """Drop each word with `probability`; at least one stays."""
    return _kept(words, probability, rng) or [_pick(words, rng)]


@lru_cache(maxsize=4)
def read_synonyms(path: str | None = None) -> Synonyms:
    """Synonyms from a text file, each line a group of words separated by commas; None: the built-in list.

    A word in several groups has the synonyms of all of them.
    Raises: ValueError when the file cannot be read, or holds no group of two words.
    """
    file, synonyms = BUILT_IN if path is None else Path(path), dict[str, list[str]]()
    try:
        lines = file.read_text(encoding="utf-8-sig").lower().splitlines()
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


def _parts(word: str) -> tuple[str, str, str]:
    match = _CORE.fullmatch(word)
    assert match is not None
    return match[1], match[2], match[3]


def _bare(word: str) -> str:
    return _parts(word)[1].lower()


def _dressed(word: str, new: str) -> str:
    """`new` with the punctuation and the first capital of `word`."""
    before, core, after = _parts(word)
    return before + (new[0].upper() + new[1:] if core[:1].isupper() else new) + after


def _pick(words: Sequence[str], rng: Generator) -> str:
    return words[int(rng.integers(len(words)))]


def drop_words(captions: Sequence[str], share: float, draw: Draw) -> list[str]:
    """Captions without a keyed random share of their words; unchanged if no word would remain.

    Against memorising captions: each epoch sees other words.
    """
    rng = draw.rng("words")
    return [" ".join(_kept(caption.split(), share, rng)) or caption for caption in captions]


def _kept(words: Sequence[str], share: float, rng: Generator) -> list[str]:
    """The words without a random share of them; may be empty."""
    return [word for word, number in zip(words, rng.random(len(words)), strict=True) if number >= share]

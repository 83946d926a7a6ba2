"""Phrases of captions: short runs of content words, and the photos that each is true of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kiloword.methods.negatives import PLAIN

WORDS = range(2, 5)  # of a phrase
SHORT = frozenset(
    re.findall(r"\w+", "a an of in on at by to up as is it he i we us or so no")
)  # PLAIN has longer words


@dataclass(frozen=True)
class Phrases:
    """P phrases, in the order of the alphabet, and the photos with a caption that has each."""

    texts: list[str]  # [P]
    photos: list[list[int]]  # [P], rising

    def of_at_most(self, photos: int) -> Phrases:
        """The phrases that are true of at most so many photos."""
        pairs = [pair for pair in zip(self.texts, self.photos, strict=True) if len(pair[1]) <= photos]
        return Phrases([text for text, _ in pairs], [of for _, of in pairs])


def phrases(captions: Sequence[Sequence[str]]) -> Phrases:
    """Maximal runs of two to four content words, and all photos with a caption that has them.

    Args: captions of every photo [I][any].
    """
    of_photos = [[run for caption in of_photo for run in runs(caption)] for of_photo in captions]
    photos: dict[str, set[int]] = {
        " ".join(run): set() for of_photo in of_photos for run in of_photo if len(run) in WORDS
    }
    for photo, of_photo in enumerate(of_photos):
        for text in (text for run in of_photo for text in _within(run)):
            if text in photos:
                photos[text].add(photo)
    texts = sorted(photos)
    return Phrases(texts, [sorted(photos[text]) for text in texts])


def _within(run: Sequence[str]) -> Iterator[str]:
    """All phrases of neighbouring words of a run: of "large brown dog" also "brown dog"."""
    for length in WORDS:
        for start in range(len(run) - length + 1):
            yield " ".join(run[start : start + length])


def runs(caption: str) -> list[list[str]]:
    """Maximal runs of words between function words and punctuation, in lower case."""
    made: list[list[str]] = [[]]
    for word in re.findall(r"[a-z'-]+|[^a-z'\s-]+", caption.lower()):
        if word in PLAIN or word in SHORT or not word[0].isalpha():
            made.append([])
        else:
            made[-1].append(word)
    return [run for run in made if run]

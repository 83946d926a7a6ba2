"""The images of the report of `kiloword mine`: mined pairs, and captions that fit many images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kiloword import report
from kiloword.apps.mine.results import MiningResults
from kiloword.methods.fff.preset import Mined

Pixels = NDArray[np.uint8]
Image = Callable[[int], Pixels | None]

MEANING = {"it": "Image and caption alike", "ii": "Both images alike", "tt": "Both captions alike"}


@dataclass(frozen=True)
class Pair:
    """One mined pair of the gallery."""

    image: int
    caption: int
    scores: Mapping[str, float]
    true: bool | None


Scored = tuple[str, float, bool | None]
"""A caption, its S_it, and whether it is true of the image; None: unknown, or not asked."""


@dataclass(frozen=True)
class CaptionLists:
    """An image, and lists of captions by heading."""

    image: int
    lists: Mapping[str, Sequence[Scored]]


@dataclass(frozen=True)
class ReportImages:
    """What the report shows as images: pairs by the term that found them, captions with the images they fit."""

    pairs: Mapping[str, Sequence[Pair]]
    wide: Sequence[tuple[int, Sequence[tuple[int, float, bool | None]]]]  # caption, (image, S_it, true) best first
    raw_and_pseudo: Sequence[CaptionLists] = ()
    above: Sequence[CaptionLists] = ()  # captions that rank above an image's own


def term_rule(name: str, s: Mined) -> str:
    """A term of eq. 2 with its thresholds."""
    rules = {"it": f"S_it > {s.p1:g}", "ii": f"S_ii > {s.p2:g}", "tt": f"S_tt > {s.p3:g} and S_it > {s.p1_text:g}"}
    return rules.get(name, "all terms")


def mined_pairs(results: MiningResults, shown: ReportImages, image: Image) -> Iterator[str]:
    """Cards of the pairs, term by term."""
    for name, pairs in shown.pairs.items():
        if cards := report.grid(_card(pair, results, image) for pair in pairs):
            yield f"{MEANING[name]}: {term_rule(name, results.settings)}."
            yield cards


def _card(pair: Pair, results: MiningResults, image: Image) -> str:
    corpus = results.corpus
    this, other = image(pair.image), image(int(corpus.owner[pair.caption]))
    if this is None or other is None:
        return ""
    start, end = int(corpus.starts[pair.image]), int(corpus.starts[pair.image + 1])
    first = f"Its own: “{corpus.captions[start]}”" if end > start else "It has no caption of its own."
    scores = "  ".join(f"S_{name} {value:.2f}" for name, value in pair.scores.items())
    verdict = [] if pair.true is None else ["✓ true of the image" if pair.true else "✗ not true of the image"]
    return report.card(
        [(this, "the image"), (other, "the caption’s image")],
        [scores, *verdict, first],
        strong=f"“{corpus.captions[pair.caption]}”",
    )


def wide_captions(results: MiningResults, shown: ReportImages, image: Image) -> Iterator[str]:
    """Captions with the images that they fit best."""
    queries = []
    for caption, hits in shown.wide:
        images = [(p, score, true) for n, score, true in hits if (p := image(n)) is not None]
        text = f"{results.corpus.captions[caption]} ({int(results.mined.per_text[caption]):,} images)"
        queries.append((text, images))
    if queries:
        yield "With how many images each was mined, and the best of them by S_it."
        yield report.gallery(queries)

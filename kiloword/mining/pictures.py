"""The pictures of the report of `kiloword mine`: mined pairs, and captions that fit many pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kiloword import report
from kiloword.methods.fff.preset import Mined
from kiloword.mining.results import Results

Pixels = NDArray[np.uint8]
Picture = Callable[[int], Pixels | None]

MEANING = {"it": "Picture and caption alike", "ii": "Both pictures alike", "tt": "Both captions alike"}


@dataclass(frozen=True)
class Pair:
    """One mined pair of the gallery."""

    picture: int
    caption: int
    scores: Mapping[str, float]
    true: bool | None


@dataclass(frozen=True)
class Shown:
    """What the report shows as pictures: pairs by the term that found them, captions with the pictures they fit."""

    pairs: Mapping[str, Sequence[Pair]]
    wide: Sequence[tuple[int, Sequence[tuple[int, float, bool | None]]]]  # caption, (picture, S_it, true) best first


def term_rule(name: str, s: Mined) -> str:
    """A term of eq. 2 with its thresholds."""
    rules = {
        "it": f"S_it > {s.p1:g}",
        "ii": f"S_ii > {s.p2:g}",
        "tt": f"S_tt > {s.p3:g} and S_it > {s.p1_text:g}",
    }
    return rules.get(name, name)


def mined_pairs(results: Results, shown: Shown, picture: Picture) -> str:
    """Cards of the pairs, term by term."""
    parts = []
    for name, pairs in shown.pairs.items():
        cards = [card for pair in pairs if (card := _card(pair, results, picture))]
        if cards:
            parts.append(report.paragraph(f"{MEANING[name]}: {term_rule(name, results.settings)}."))
            parts.append(report.grid(cards))
    return "".join(parts)


def _card(pair: Pair, results: Results, picture: Picture) -> str:
    corpus = results.corpus
    owner = int(corpus.owner[pair.caption])
    this, other = picture(pair.picture), picture(owner)
    if this is None or other is None:
        return ""
    start, end = int(corpus.starts[pair.picture]), int(corpus.starts[pair.picture + 1])
    own = f"Its own: “{corpus.captions[start]}”" if end > start else "It has no caption of its own."
    scores = "  ".join(f"S_{name} {value:.2f}" for name, value in pair.scores.items())
    verdict = [] if pair.true is None else ["✓ true of the picture" if pair.true else "✗ not true of the picture"]
    return report.card(
        [(this, "the picture"), (other, "the caption’s picture")],
        [scores, *verdict, own],
        strong=f"“{corpus.captions[pair.caption]}”",
    )


def wide_captions(results: Results, shown: Shown, picture: Picture) -> str:
    """Captions with the pictures that they fit best."""
    queries = []
    for caption, hits in shown.wide:
        pictures = [(p, score, true) for n, score, true in hits if (p := picture(n)) is not None]
        text = f"{results.corpus.captions[caption]} ({int(results.found.per_text[caption]):,} pictures)"
        queries.append((text, pictures))
    if not queries:
        return ""
    return report.paragraph("With how many pictures each was mined, and the best of them by S_it.") + report.gallery(
        queries
    )

"""The page of `kiloword eval caption MODEL --html`: figures, and captions beside those that people wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from kiloword.data.images.decode import decode
from kiloword.data.reading import read
from kiloword.evaluation.caption.scorers import Floats
from kiloword.evaluation.caption.truth import KINDS, JudgedCaption
from kiloword.randomness import key
from kiloword.report import card, grid, histogram, page, paragraph, table
from kiloword.report.distributions import bins
from kiloword.report.parts import Cell, percent
from kiloword.types import BadSample, Source

NOTHING = "(nothing)"
SIDE = 256  # pixels of an image, at most
CARDS = 6  # of each kind: best, worst, any
REFERENCES = 5  # of each card
FREQUENT = 8  # captions in the table of those said most often
_FIGURES = {
    "cider": "CIDEr-D",
    "bleu_1": "BLEU-1",
    "bleu_4": "BLEU-4",
    "rouge_l": "ROUGE-L",
    "meteor": "METEOR",
    "spice": "SPICE",
    "distinct": "different captions, share",
    "words": "words a caption",
    "vocabulary": "different words",
}
_TRUTH = {
    "parsable": "captions in the language",
    "wholly_true": "captions wholly true",
    "wholly_true_elsewhere": "— of another image",
    "statements_true": "statements true, of captions in the language",
    "statements_true_elsewhere": "— of another image",
    "caption_statements_true": "true share of a caption, 0 outside the language",
    "caption_statements_true_elsewhere": "— of another image",
    "objects_mentioned": "objects mentioned",
    "objects_mentioned_elsewhere": "— of another image",
    "statements": "statements a caption",
}
_INTRO = (
    "Every caption is compared with all that the data has of its image: BLEU, ROUGE-L and METEOR ask how much of the "
    "wording agrees, CIDEr-D weighs what is rare in these captions (papers print it times 100)."
)


@dataclass(frozen=True)
class Told:
    """What was said of one image, and what people say of it."""

    row: int
    key: str
    caption: str
    references: Sequence[str]


@dataclass(frozen=True)
class CaptionPageData:
    """What the page draws of one model."""

    source: Source
    told: Sequence[Told]
    cider: Floats  # of each
    judged: Sequence[JudgedCaption] | None  # of each, where the ground truth is known


def report(results: Mapping[str, Mapping[str, float]], data: str, shown: Mapping[str, Mapping[str, Any]]) -> str:
    """A page about several models: model -> what `run` yields, and what it shows."""
    sections = [("Figures", _figures(results, _FIGURES))]
    if any("parsable" in values for values in results.values()):
        note = paragraph("Of another image: the same captions judged on the image half the set further on.")
        sections.append(("What is true", _figures(results, _TRUTH) + note + _kinds(results)))
    drawn: dict[str, CaptionPageData] = {model: more["captions"] for model, more in shown.items() if "captions" in more}
    sections.append(("CIDEr-D of single images", _spread(drawn)))
    sections += [(f"Captions of {model}", _examples(one)) for model, one in drawn.items()]
    return page("Captions", f"On {data}. {_INTRO}", sections)


def _figures(results: Mapping[str, Mapping[str, float]], names: Mapping[str, str]) -> str:
    """A row for every figure, a column for every model."""
    rows: list[list[Cell]] = [
        [title, *(_number(values.get(name), whole=name == "vocabulary") for values in results.values())]
        for name, title in names.items()
        if any(name in values for values in results.values())
    ]
    return table(rows, ["", *results])


def _number(value: float | None, whole: bool = False) -> Cell:
    return None if value is None else f"{value:.{0 if whole else 3}f}"


def _kinds(results: Mapping[str, Mapping[str, float]]) -> str:
    """Shares of the statements of each kind that are true."""
    rows: list[list[Cell]] = []
    for kind in KINDS:
        name = f"statements_true@{kind}"
        if any(name in values for values in results.values()):
            rows.append([kind, *(_number(values.get(name)) for values in results.values())])
    return table(rows, ["statements true, of those about", *results]) if rows else ""


def _spread(drawn: Mapping[str, CaptionPageData]) -> str:
    """How many images score how much."""
    edges = bins([v for one in drawn.values() for v in one.cider.tolist()] + [0.0], 30)
    counts = {model: np.histogram(one.cider, edges)[0].tolist() for model, one in drawn.items()}
    return histogram(counts, edges, "CIDEr-D", "images")


def _examples(one: CaptionPageData) -> str:
    """Images chosen blindly, the best and the worst, and what is said most often."""
    order = np.argsort(-one.cider, kind="stable").tolist()
    some = sorted(order, key=lambda i: key(one.source.fingerprint, "captions", one.told[i].row))
    parts = {
        "Chosen blindly, the same images for every model:": some[:CARDS],
        "Nearest to the data's own captions, by CIDEr-D:": order[:CARDS],
        "Farthest from them:": order[: -CARDS - 1 : -1],
    }
    shown = [paragraph(words) + _cards(one, places) for words, places in parts.items()]
    return "".join([*shown, _frequent(one)])


def _cards(one: CaptionPageData, places: Sequence[int]) -> str:
    """Images that can no longer be read are skipped."""
    cards = []
    for place in places:
        with suppress(BadSample):
            cards.append(_card(one, place))
    return grid(cards, narrow=True)


def _card(one: CaptionPageData, place: int) -> str:
    """One image with its caption. Raises BadSample."""
    told = one.told[place]
    lines = [f"CIDEr-D {one.cider[place]:.2f}"]
    if one.judged is not None:
        lines.append(_verdict(one.judged[place]))
    lines += [f"“{reference}”" for reference in told.references[:REFERENCES]]
    if len(told.references) > REFERENCES:
        lines.append(f"and {len(told.references) - REFERENCES} more")
    return card([(_small(one.source, told.row), told.key)], lines, strong=told.caption or NOTHING)


def _small(source: Source, row: int) -> npt.NDArray[np.uint8]:
    """An image [H, W, 3] of at most SIDE pixels a side. Raises BadSample."""
    image = Image.fromarray(decode(read(source, row).image))
    image.thumbnail((SIDE, SIDE))
    return np.asarray(image)


def _verdict(judged: JudgedCaption) -> str:
    """Every statement with a mark."""
    if not judged.parsable:
        return "✗ outside the language"
    marks = [f"{'✓' if s.true else '✗'} {s.words}".replace(" ", "\N{NO-BREAK SPACE}") for s in judged.statements]
    return ", ".join([*(marks or ["states nothing"]), f"{judged.mentioned} of {judged.objects} objects mentioned"])


def _frequent(one: CaptionPageData) -> str:
    """The captions that most images get: a model that has collapsed says one of all."""
    counts = Counter(told.caption for told in one.told)
    rows: list[list[Cell]] = [
        [caption or NOTHING, count, percent(count / len(one.told))] for caption, count in counts.most_common(FREQUENT)
    ]
    note = paragraph(f"{len(counts):,} different captions of {len(one.told):,} images.")
    return table(rows, ["caption", "images", "share"]) + note

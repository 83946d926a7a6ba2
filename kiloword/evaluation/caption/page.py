"""The page of `kiloword eval caption MODEL --html`: figures, and captions beside those that people wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from kiloword.data.images.decode import decode
from kiloword.data.reading import read
from kiloword.evaluation.caption.scorers import Floats
from kiloword.evaluation.caption.truth import KINDS, JudgedCaption
from kiloword.evaluation.task import Results
from kiloword.randomness import key
from kiloword.report import bins, card, distribution, grid, metric_table, page, percent, section, table
from kiloword.types import BadSample, Source

NOTHING = "(nothing)"
SIDE = 256  # pixels of an image, at most
CARDS = 6  # of each kind: best, worst, any
REFERENCES = 5  # of each card
FREQUENT = 8  # captions in the table of the most frequent ones
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
class CaptionedImage:
    """One image with its caption, and those that people wrote."""

    row: int
    key: str
    caption: str
    references: Sequence[str]
    info: Mapping[str, Any] = field(default_factory=dict)  # `Record.info`: what groups and result files need


@dataclass(frozen=True)
class CaptionPageData:
    """What the page draws of one model."""

    source: Source
    captioned: Sequence[CaptionedImage]
    cider: Floats  # of each
    judged: Sequence[JudgedCaption] | None  # of each, where the ground truth is known


def report(results: Results, data: str, shown: Mapping[str, Mapping[str, Any]]) -> str:
    """A page about several models: model -> what `run` yields, and what it shows."""
    drawn: dict[str, CaptionPageData] = {model: more["captions"] for model, more in shown.items() if "captions" in more}
    cider = {model: one.cider for model, one in drawn.items()}
    kinds = {f"statements_true@{kind}": kind for kind in KINDS}
    truth = [
        metric_table(results, _TRUTH),
        "Of another image: the same captions judged on the image half the set further on.",
        metric_table(results, kinds, first="statements true, of those about"),
    ]
    by_group = dict.fromkeys(name for values in results.values() for name in values if name.startswith("cider_"))
    edges = bins([0.0, *(end for each in cider.values() for end in (float(each.min()), float(each.max())))], 30)
    return page(
        "Captions",
        f"On {data}. {_INTRO}",
        [
            section("Figures", metric_table(results, _FIGURES, whole=["vocabulary"])),
            section("CIDEr-D by group", *([metric_table(results, {n: n[6:] for n in by_group})] if by_group else [])),
            section("What is true", *(truth if any("parsable" in values for values in results.values()) else [])),
            section("CIDEr-D of single images", distribution(cider, "CIDEr-D", "images", edges=edges)),
            *(section(f"Captions of {model}", *_examples(one)) for model, one in drawn.items()),
        ],
    )


def _examples(one: CaptionPageData) -> Iterator[str]:
    """Images chosen at random, the best and the worst, and the most frequent captions."""
    best = np.argsort(-one.cider, kind="stable").tolist()
    blindly = sorted(best, key=lambda i: key(one.source.fingerprint, "captions", one.captioned[i].row))
    for heading, places in (
        ("Chosen blindly, the same images for every model:", blindly),
        ("Nearest to the data's own captions, by CIDEr-D:", best),
        ("Farthest from them:", best[::-1]),
    ):
        yield heading
        yield grid(filter(None, (_card(one, place) for place in places[:CARDS])), narrow=True)
    counts = Counter(image.caption for image in one.captioned)
    frequent = counts.most_common(FREQUENT)
    yield table(
        [[text or NOTHING, n, percent(n / len(one.captioned))] for text, n in frequent], ["caption", "images", "share"]
    )
    yield f"{len(counts):,} different captions of {len(one.captioned):,} images."


def _card(one: CaptionPageData, place: int) -> str:
    """One image with its caption; nothing for an image that can no longer be read."""
    captioned = one.captioned[place]
    try:
        image = Image.fromarray(decode(read(one.source, captioned.row).image))
    except BadSample:
        return ""
    image.thumbnail((SIDE, SIDE))
    lines = [f"CIDEr-D {one.cider[place]:.2f}"]
    if one.judged is not None:
        lines.append(_verdict(one.judged[place]))
    lines += [f"“{reference}”" for reference in captioned.references[:REFERENCES]]
    if len(captioned.references) > REFERENCES:
        lines.append(f"and {len(captioned.references) - REFERENCES} more")
    return card([(np.asarray(image), captioned.key)], lines, strong=captioned.caption or NOTHING)


def _verdict(judged: JudgedCaption) -> str:
    """Every statement with a mark."""
    if not judged.parsable:
        return "✗ outside the language"
    marks = [f"{'✓' if s.true else '✗'} {s.words}".replace(" ", "\N{NO-BREAK SPACE}") for s in judged.statements]
    return ", ".join([*(marks or ["states nothing"]), f"{judged.mentioned} of {judged.objects} objects mentioned"])

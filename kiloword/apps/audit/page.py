"""The page of an audit: galleries of what was found, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
from PIL import Image

from kiloword import report
from kiloword.apps.audit import AuditOptions, Kind
from kiloword.apps.audit.findings import WIDE, WIDEST, Audit, Finding
from kiloword.apps.audit.similar import ALIKE, Pixels
from kiloword.report import Html, percent, section

Look = Callable[[int], Pixels | None]
"""The pixels of a row of the source [H, W, 3]; None where it cannot be read."""

SIDE = 240  # pixels of a thumbnail's longer side
NAMES: dict[Kind, str] = {
    "mismatch": "Pairs that do not match",
    "generic": "Captions that fit many images",
    "duplicate-image": "Near-duplicate images",
    "duplicate-caption": "Repeated captions",
    "label": "Labels that look wrong",
    "unreadable": "Unreadable samples",
}


def page(audit: Audit, keep: pa.Table, name: str, options: AuditOptions, look: Look, training: str) -> str:
    """The whole HTML document. Args: look: of a row of the source; training: the command that takes the keep-list."""
    shown = _Shown(audit, options.gallery, look)
    sections: dict[Kind, list[str]] = {
        "mismatch": [*_mismatch(audit, options), *shown.cards("mismatch")],
        "generic": [_generic(audit), *shown.cards("generic")],
        "duplicate-image": [_same_images(audit), *shown.cards("duplicate-image")],
        "duplicate-caption": [*shown.repeats()],
        "label": [_labels(audit), *shown.cards("label")],
        "unreadable": [*shown.unreadable()],
    }
    return report.page(
        "Audit",
        _intro(audit, name),
        [
            section("In short", _short(audit), *_kept(audit, keep, options, training)),
            *(section(NAMES[kind], *sections[kind]) for kind in NAMES if audit.of(kind) or kind == "mismatch"),
        ],
    )


def _intro(audit: Audit, name: str) -> str:
    corpus = audit.corpus
    return (
        f"{name}: {len(corpus.keys):,} images with {len(corpus.texts):,} captions, judged by a model. What is listed "
        "here is a suggestion to look, not a verdict: the model may be weak, or trained on this data itself."
    )


def _short(audit: Audit) -> Html:
    counts = audit.counts
    figures = [(f"{counts[kind]:,}", words) for kind, words in _WORDS.items() if counts[kind] or kind == "mismatch"]
    return report.headline(figures)


_WORDS: dict[Kind, str] = {
    "mismatch": "pairs that do not match",
    "generic": "captions that fit many images",
    "duplicate-image": "near-duplicates of another image",
    "duplicate-caption": "captions that repeat another",
    "label": "labels that look wrong",
    "unreadable": "samples that cannot be read",
}


def _kept(audit: Audit, keep: pa.Table, options: AuditOptions, training: str) -> Iterator[str]:
    reasons = keep.column("reason").to_pylist()
    rows = [
        [NAMES[kind], f"{audit.counts[kind]:,}", f"{reasons.count(kind):,}"] for kind in NAMES if audit.counts[kind]
    ]
    omitted = sum(reason != "" for reason in reasons)
    yield report.table(rows, ["finding", "found", "captions that the keep-list omits"])
    yield (
        f"The keep-list omits {omitted:,} of {len(reasons):,} captions, for {', '.join(options.drop) or 'no reason'} "
        "(--drop). To train on the others:"
    )
    yield report.code(training)


def _mismatch(audit: Audit, options: AuditOptions) -> Iterator[str]:
    fits, rule = audit.fits, audit.rule
    if fits is None or rule is None:
        yield "The data has no captions."
        return
    yield (
        "The fit of a pair says how far it stands above random pairs of the same image and of the same caption, in "
        "their standard deviations; a caption of another image has a fit near 0. From both distributions an estimated "
        f"{percent(rule.share)} of the pairs do not match."
    )
    if rule.precision is None:
        yield f"No threshold has an estimated precision of {options.target_precision:g}, so that no pair is flagged."
    else:
        yield (
            f"Flagged are the {rule.flagged:,} pairs with a fit below {rule.threshold:.2f}: by estimate "
            f"{rule.precision:.0%} of them do not match, "
            f"and they are {rule.recall:.0%} of all that do not. Where the model was trained on "
            "these pairs the share and the precision are underestimated."
        )
    low, high = float(np.quantile(fits.random, 0.001)), float(np.quantile(fits.annotated, 0.999))
    series = {"annotated": fits.annotated, "random": fits.random}
    clipped = {name: np.clip(values, low, high) for name, values in series.items()}
    yield report.distribution(clipped, "fit of a pair", "% of each", total=100)


def _generic(audit: Audit) -> str:
    return (
        f"They match their image, but at least {percent(WIDE)} of all images score as high with them (at most the "
        f"widest {percent(WIDEST)} are listed): often short or general captions, which are right, and teach little."
    )


def _same_images(audit: Audit) -> str:
    return (
        "Images of equal pixels, and those near by features of which the colours of small copies, or of one mirrored, "
        f"correlate by at least {ALIKE:g}. Between training and validation data they make figures too good; in one "
        "batch they are false negatives."
    )


def _labels(audit: Audit) -> str:
    return (
        "The image lies nearer to images of another class than to those of its own, clearly by the standard of either "
        "class (confident learning, arXiv:1911.00068). The number is the probability of its label minus that of the "
        "other class."
    )


class _Shown:
    """The galleries."""

    def __init__(self, audit: Audit, most: int, look: Look) -> None:
        self.audit, self.most, self._look = audit, most, look

    def look(self, image: int) -> Pixels | None:
        """A thumbnail of an image of the corpus."""
        pixels = self._look(self.audit.corpus.rows[image])
        if pixels is None:
            return None
        small = Image.fromarray(pixels)
        small.thumbnail((SIDE, SIDE))
        return np.asarray(small)

    def cards(self, kind: Kind) -> Iterator[Html]:
        """Cards of the worst findings of a kind."""
        findings = self.audit.of(kind)
        made = [card for finding in findings[: self.most] if (card := self._card(finding)) is not None]
        if made:
            yield report.grid(made, narrow=kind != "duplicate-image")
            yield from _more(len(made), len(findings))

    def _card(self, finding: Finding) -> Html | None:
        images = [image for image in (finding.image, finding.other_image) if image >= 0]
        pixels = [self.look(image) for image in images]
        named = [(p, self.audit.corpus.keys[i]) for p, i in zip(pixels, images, strict=True) if p is not None]
        if len(named) < len(images):
            return None
        lines = [finding.detail]
        if finding.kind == "mismatch":
            siblings = [c for c in self.audit.corpus.captions[finding.image] if c != finding.caption][:1]
            lines += [f"Another caption of this image: {text}" for text in siblings]
        return report.card(named, lines, strong=finding.caption)

    def repeats(self) -> Iterator[Html]:
        """The captions that repeat most often."""
        counts = dict[str, int]()
        for finding in self.audit.of("duplicate-caption"):
            first = f"{finding.caption}\0{finding.other}"
            counts[first] = counts.get(first, 1) + 1
        ordered = sorted(counts.items(), key=lambda one: -one[1])
        rows = [[text.partition("\0")[0], f"{n:,}", text.partition("\0")[2]] for text, n in ordered[: self.most]]
        yield report.table(rows, ["caption", "how often", "first image"])
        yield from _more(len(rows), len(ordered))

    def unreadable(self) -> Iterator[Html]:
        """The samples that cannot be read, with the reason."""
        findings = self.audit.of("unreadable")
        rows = [[one.key, one.detail] for one in findings[: self.most]]
        yield report.table(rows, ["key", "reason"])
        yield from _more(len(rows), len(findings))


def _more(shown: int, of: int) -> Iterator[Html]:
    if 0 < shown < of:
        yield report.stack(f"{shown:,} of {of:,}; findings.parquet has all.")

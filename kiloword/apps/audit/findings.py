"""What an audit finds, and the keep-list that follows from it."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from torch import Tensor

from kiloword.apps.audit import KINDS, AuditOptions, Kind
from kiloword.apps.audit.labels import WrongLabel
from kiloword.apps.audit.outliers import OutlierRule
from kiloword.apps.audit.pairs import Fits
from kiloword.apps.audit.similar import SameImage
from kiloword.data.joins import sampled_images
from kiloword.data.reading import captions_at
from kiloword.data.rows import key_bytes, key_text
from kiloword.data.source import key_of
from kiloword.files import write_atomic
from kiloword.types import BadSample, Features, Skipped, Source

WIDE, FEWEST = 0.02, 10  # share and number of other images that a generic caption fits at least as well as its own
WIDEST = 0.05  # and the largest share of captions that are called generic


@dataclass
class AuditedData:
    """An encoded data set: its readable images in their order, and their captions."""

    rows: list[int]  # of the source
    keys: list[str]
    captions: list[list[str]]
    labels: Tensor  # [I] int64, -1: none
    images: Features
    skipped: list[Skipped]

    @property
    def texts(self) -> list[str]:
        """All captions [T], image by image."""
        return [caption for of_image in self.captions for caption in of_image]

    @property
    def owner(self) -> np.ndarray:
        """[T] int64: the image of each caption."""
        return np.repeat(np.arange(len(self.keys)), [len(captions) for captions in self.captions])


@dataclass(frozen=True)
class Finding:
    """One thing to look at. `row` is that of the source, `index` counts the captions of an image; -1: no caption."""

    kind: Kind
    key: str
    row: int
    index: int = -1
    caption: str = ""
    score: float | None = None  # by kind: fit, correlation of pixels, share of images, margin
    other: str = ""  # key of the image of which this one is a duplicate, or that has the caption too
    detail: str = ""
    image: int = field(default=-1, compare=False)  # in the corpus
    text: int = field(default=-1, compare=False)
    other_image: int = field(default=-1, compare=False)


@dataclass
class Audit:
    """All results of an audit."""

    corpus: AuditedData
    findings: list[Finding]
    fits: Fits | None  # None: no captions
    rule: OutlierRule | None
    classnames: list[str] | None

    def of(self, kind: Kind) -> list[Finding]:
        """The findings of a kind, worst first."""
        return [finding for finding in self.findings if finding.kind == kind]

    @property
    def counts(self) -> dict[str, int]:
        """The number of findings of each kind."""
        numbers = Counter(finding.kind for finding in self.findings)
        return {kind: numbers[kind] for kind in KINDS}


def mismatches(corpus: AuditedData, fits: Fits, rule: OutlierRule) -> Iterator[Finding]:
    """The pairs whose fit is below the threshold, worst first."""
    texts, owner, places = corpus.texts, corpus.owner, _places(corpus)
    below = np.flatnonzero(fits.annotated < rule.threshold)
    for t in below[np.argsort(fits.annotated[below], kind="stable")].tolist():
        fitting = int(fits.fitting[t])
        detail = f"fit {fits.annotated[t]:.1f}; {fitting:,} other images score at least as high with this caption"
        yield _of_text("mismatch", corpus, int(owner[t]), t, int(places[t]), texts[t], fits.annotated[t], detail)


def generic(corpus: AuditedData, fits: Fits, rule: OutlierRule) -> Iterator[Finding]:
    """The captions that match their image, but many others at least as well; those of most images first."""
    texts, owner, places, n = corpus.texts, corpus.owner, _places(corpus), len(corpus.keys)
    least = max(FEWEST, WIDE * n, np.quantile(fits.fitting, 1 - WIDEST, method="higher"))
    wide = (fits.fitting >= least) & (fits.annotated >= rule.threshold)
    chosen = np.flatnonzero(wide)
    for t in chosen[np.argsort(-fits.fitting[chosen], kind="stable")].tolist():
        detail = f"{int(fits.fitting[t]):,} other images score at least as high"
        share = float(fits.fitting[t]) / max(1, n - 1)
        yield _of_text("generic", corpus, int(owner[t]), t, int(places[t]), texts[t], share, detail)


def _of_text(
    kind: Kind, corpus: AuditedData, image: int, text: int, index: int, caption: str, score: float, detail: str
) -> Finding:
    key, row = corpus.keys[image], corpus.rows[image]
    return Finding(kind, key, row, index, caption, float(score), "", detail, image, text)


def duplicate_images(
    corpus: AuditedData, same: Sequence[SameImage], together: Sequence[Sequence[int]]
) -> Iterator[Finding]:
    """Every image of a group except its first, with that one."""
    best = {image: pair for pair in reversed(same) for image in (pair.first, pair.second)}
    for first, *others in together:
        for image in others:
            pair = best[image]
            detail = f"pixels correlate by {pair.pixels:.2f}, features by {pair.cosine:.2f}"
            yield Finding(
                "duplicate-image", corpus.keys[image], corpus.rows[image], score=pair.pixels, other=corpus.keys[first],
                detail=detail, image=image, other_image=first,
            )  # fmt: skip


def duplicate_captions(corpus: AuditedData, repeats: Sequence[Sequence[int]]) -> Iterator[Finding]:
    """Every caption of a group except its first, with the image of that one."""
    texts, owner, places = corpus.texts, corpus.owner, _places(corpus)
    for first, *others in repeats:
        for t in others:
            image, source = int(owner[t]), int(owner[first])
            where = "of the same image" if image == source else f"of {len(others) + 1:,}"
            yield Finding(
                "duplicate-caption", corpus.keys[image], corpus.rows[image], int(places[t]), texts[t],
                other=corpus.keys[source], detail=f"one {where} that are the same", image=image, text=t,
                other_image=source,
            )  # fmt: skip


def label_findings(corpus: AuditedData, wrong: Sequence[WrongLabel], names: Sequence[str] | None) -> Iterator[Finding]:
    """Images whose features say another class than their label."""

    def name(label: int) -> str:
        return names[label] if names and label < len(names) else f"class {label}"

    for one in wrong:
        detail = f"labelled {name(one.label)}, features say {name(one.suggested)}"
        image = one.image
        yield Finding("label", corpus.keys[image], corpus.rows[image], score=one.margin, detail=detail, image=image)


def unreadable(skipped: Sequence[Skipped]) -> Iterator[Finding]:
    """The rows that cannot be read, with the reason."""
    for one in skipped:
        yield Finding("unreadable", one.key, one.row, detail=one.reason)


def _places(corpus: AuditedData) -> np.ndarray:
    """[T] int64: the index of each caption among those of its image."""
    return np.concatenate([np.arange(len(captions)) for captions in corpus.captions] or [np.zeros(0, np.int64)])


def keep_list(audit: Audit, source: Source, options: AuditOptions) -> pa.Table:
    """The keep-list (`kiloword.data.joins`): a row for each caption of the source, in its order."""
    reasons: dict[tuple[int, int], Kind] = {}
    for finding in audit.findings:
        if finding.kind in options.drop:
            reasons.setdefault((finding.row, finding.index), finding.kind)
    rows = list(_caption_rows(audit, source, reasons))
    keys, indices, captions, why, scores = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    return pa.table(
        {
            "key": text_array(keys),
            "index": pa.array(indices, pa.int32()),
            "caption": text_array(captions),
            "keep": pa.array([reason == "" for reason in why], pa.bool_()),
            "reason": pa.array(why, pa.string()),
            "score": pa.array(scores, pa.float32()),
        },
        metadata={"kiloword": json.dumps({"images": sampled_images(source)})},
    )


def _caption_rows(
    audit: Audit, source: Source, reasons: Mapping[tuple[int, int], Kind]
) -> Iterator[tuple[str, int, str, str, float | None]]:
    corpus, t = audit.corpus, 0
    for image, (row, key) in enumerate(zip(corpus.rows, corpus.keys, strict=True)):
        whole = reasons.get((row, -1), "")
        if not corpus.captions[image]:
            yield key, -1, "", whole, None
        for index, caption in enumerate(corpus.captions[image]):
            score = None if audit.fits is None else float(audit.fits.annotated[t])
            yield key, index, caption, whole or reasons.get((row, index), ""), score
            t += 1
    for skipped in corpus.skipped:
        captions = list[str]()
        with suppress(BadSample):
            captions = captions_at(source, skipped.row)
        whole = reasons.get((skipped.row, -1), "")
        for index, caption in list(enumerate(captions)) or [(-1, "")]:
            yield stored_key(source, skipped), index, caption, whole, None


def stored_key(source: Source, skipped: Skipped) -> str:
    """The key as the source has it; what a message names is without control characters."""
    try:
        return key_of(source, skipped.row)
    except (BadSample, OSError):
        return skipped.key


def text_array(texts: Sequence[str]) -> pa.Array:
    """Texts as text, or as bytes where UTF-8 cannot hold one (lone surrogates of file names)."""
    raw = pa.array(map(key_bytes, texts), pa.binary())
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        return raw


def findings_table(findings: Sequence[Finding]) -> pa.Table:
    """A row for each finding, worst of each kind first."""
    columns = {name: [getattr(one, name) for one in findings] for name in ("kind", "key", "row", "index", "caption")}
    columns |= {name: [getattr(one, name) for one in findings] for name in ("score", "other", "detail")}
    arrays = {name: text_array(columns[name]) for name in ("kind", "key", "caption", "other", "detail")}
    numbers = {"row": pa.int64(), "index": pa.int32(), "score": pa.float64()}
    return pa.table({name: arrays[name] if name in arrays else pa.array(values, numbers[name])
                     for name, values in columns.items()})  # fmt: skip


def write_table(path: Path, table: pa.Table) -> None:
    """Write a parquet table atomically."""
    buffer = io.BytesIO()
    pa.parquet.write_table(table, buffer)
    write_atomic(path, buffer.getvalue())


def as_json(audit: Audit, keep: pa.Table, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What audit.json holds."""
    kept = keep.column("keep").to_numpy()
    rule = None if audit.rule is None else asdict(audit.rule)
    if rule is not None and not np.isfinite(rule["threshold"]):
        rule["threshold"] = None
    images = {key_text(k) if isinstance(k, bytes) else k for k in keep.filter(keep.column("keep"))["key"].to_pylist()}
    return {
        **facts,
        "images": len(audit.corpus.keys),
        "captions": len(audit.corpus.texts),
        "findings": audit.counts,
        "rule": rule,
        "weights": {} if audit.fits is None else audit.fits.weights,
        "keep": {"rows": len(kept), "kept": int(kept.sum()), "omitted": int((~kept).sum()), "keys": len(images)},
    }

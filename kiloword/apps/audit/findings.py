"""What an audit finds, and the keep-list that follows from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
from torch import Tensor

from kiloword.apps.audit.labels import wrong_labels
from kiloword.apps.audit.outliers import OutlierRule
from kiloword.apps.audit.pairs import Fits
from kiloword.apps.audit.similar import Look, groups, near_duplicates, repeated
from kiloword.data.joins import sampled_images
from kiloword.data.reading import captions_at
from kiloword.data.rows import key_bytes
from kiloword.data.source import key_of
from kiloword.types import BadSample, Features, Skipped, Source

WIDE, FEWEST = 0.02, 10  # share and number of other images that a generic caption fits at least as well as its own
WIDEST = 0.05  # and the largest share of captions that are called generic


class AuditedData:
    """An encoded data set: its I readable images in their order, and their T captions."""

    def __init__(
        self,
        images_read: Sequence[tuple[int, str, list[str]]],
        labels: Tensor,
        images: Features,
        texts: Features,
        skipped: list[Skipped],
    ) -> None:
        """Args: images_read: row of the source, key and captions [I]; labels [I] int64, -1: none; texts: {}: none."""
        self.rows, self.keys, self.captions = map(list, zip(*images_read, strict=True))
        self.labels, self.images, self.texts, self.skipped = labels, images, texts, skipped
        self.places = [(i, index) for i, captions in enumerate(self.captions) for index in range(len(captions))]  # [T]
        self.owner = np.array([image for image, _ in self.places], np.int64)  # [T]
        self.flat = [caption for captions in self.captions for caption in captions]  # [T]


@dataclass(frozen=True)
class Finding:
    """One thing to look at; the first eight are the columns of findings.parquet."""

    kind: str
    key: str
    row: int  # of the source
    index: int = -1  # among the captions of the image; -1: no caption
    caption: str = ""
    score: float | None = None  # by kind: fit, correlation of pixels, share of images, margin
    other: str = ""  # key of the image that this one duplicates, or that has the caption too
    detail: str = ""
    image: int = -1  # in the data
    other_image: int = -1


def findings_of(
    data: AuditedData, fits: Fits | None, rule: OutlierRule | None, look: Look, names: Sequence[str] | None, chunk: int
) -> Iterator[Finding]:
    """All findings, the worst of each kind first. Args: look: pixels of a row; names: of the classes."""

    def of_image(kind: str, image: int, score: float, detail: str, other: int = -1) -> Finding:
        whose = data.keys[other] if other >= 0 else ""
        key, row = data.keys[image], data.rows[image]
        return Finding(kind, key, row, -1, "", score, whose, detail, image, other)

    def of_text(kind: str, text: int, score: float | None, detail: str, other: int = -1) -> Finding:
        image, index = data.places[text]
        whose = data.keys[other] if other >= 0 else ""
        key, row = data.keys[image], data.rows[image]
        return Finding(kind, key, row, index, data.flat[text], score, whose, detail, image, other)

    if fits is not None and rule is not None:
        fit, fitting, n = fits.annotated, fits.fitting, len(data.keys)
        for t in _first(fit, fit < rule.threshold):
            detail = f"fit {fit[t]:.1f}; {fitting[t]:,} other images score at least as high with this caption"
            yield of_text("mismatch", t, float(fit[t]), detail)
        least = max(FEWEST, WIDE * n, np.quantile(fitting, 1 - WIDEST, method="higher"))
        for t in _first(-fitting, (fitting >= least) & (fit >= rule.threshold)):
            detail = f"{fitting[t]:,} other images score at least as high"
            yield of_text("generic", t, float(fitting[t]) / max(1, n - 1), detail)
    for first, *others in repeated(data.flat):
        for t in others:
            image, source = int(data.owner[t]), int(data.owner[first])
            where = "of the same image" if image == source else f"of {len(others) + 1:,}"
            yield of_text("duplicate-caption", t, None, f"one {where} that are the same", source)
    vectors = data.images["vec"].float().cpu()
    same = near_duplicates(vectors, lambda image: look(data.rows[image]), chunk)
    best = {image: pair for pair in reversed(same) for image in (pair.first, pair.second)}
    for first, *others in groups(same):
        for image in others:
            detail = f"pixels correlate by {best[image].pixels:.2f}, features by {best[image].cosine:.2f}"
            yield of_image("duplicate-image", image, best[image].pixels, detail, first)
    for margin, image, *classes in wrong_labels(vectors, data.labels):
        label, suggested = (names[c] if names and c < len(names) else f"class {c}" for c in classes)
        yield of_image("label", image, margin, f"labelled {label}, features say {suggested}")
    for one in data.skipped:
        yield Finding("unreadable", one.key, one.row, detail=one.reason)


def _first(order: np.ndarray, chosen: np.ndarray) -> list[int]:
    """The chosen places, the smallest value first."""
    places = np.flatnonzero(chosen)
    found: list[int] = places[np.argsort(order[places], kind="stable")].tolist()
    return found


def findings_table(findings: Sequence[Finding]) -> pa.Table:
    """findings.parquet: a row for each finding."""
    numbers = {"row": pa.int64(), "index": pa.int32(), "score": pa.float64()}
    columns = {column.name: [getattr(one, column.name) for one in findings] for column in fields(Finding)[:8]}
    return pa.table({n: pa.array(v, numbers[n]) if n in numbers else text_array(v) for n, v in columns.items()})


def keep_list(
    data: AuditedData, findings: Sequence[Finding], fits: Fits | None, source: Source, drop: Sequence[str]
) -> pa.Table:
    """The keep-list (`kiloword.data.joins`): a row for each caption of the source, images that were read first."""
    reasons: dict[tuple[int, int], str] = {}
    for finding in findings:
        if finding.kind in drop:
            reasons.setdefault((finding.row, finding.index), finding.kind)
    rows, scores = list[tuple[str, int, str, str]](), iter([] if fits is None else fits.annotated.tolist())
    for row, key, captions in [*zip(data.rows, data.keys, data.captions, strict=True), *_unread(data, source)]:
        whole = reasons.get((row, -1), "")
        for index, caption in list(enumerate(captions)) or [(-1, "")]:
            rows.append((key, index, caption, whole or reasons.get((row, index), "")))
    keys, indices, texts, why = zip(*rows, strict=True) if rows else ((), (), (), ())
    read = sum(len(captions) or 1 for captions in data.captions)
    return pa.table(
        {
            "key": text_array(keys),
            "index": pa.array(indices, pa.int32()),
            "caption": text_array(texts),
            "keep": pa.array([reason == "" for reason in why], pa.bool_()),
            "reason": pa.array(why, pa.string()),
            "score": pa.array(
                [next(scores, None) if n < read and index >= 0 else None for n, index in enumerate(indices)],
                pa.float32(),
            ),
        },
        metadata={"kiloword": json.dumps({"images": sampled_images(source)})},
    )


def _unread(data: AuditedData, source: Source) -> Iterator[tuple[int, str, list[str]]]:
    """Row, key as the source has it, and captions of what could not be read."""
    for skipped in data.skipped:
        key, captions = skipped.key, list[str]()
        with suppress(BadSample, OSError):
            key = key_of(source, skipped.row)
        with suppress(BadSample):
            captions = captions_at(source, skipped.row)
        yield skipped.row, key, captions


def text_array(texts: Sequence[str]) -> pa.Array:
    """Texts as text, or as bytes where UTF-8 cannot hold one (lone surrogates of file names)."""
    raw = pa.array(map(key_bytes, texts), pa.binary())
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        return raw

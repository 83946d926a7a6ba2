"""What an audit finds, and the keep-list that follows from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from kiloword.apps.audit.labels import wrong_labels
from kiloword.apps.audit.pairs import Fits
from kiloword.apps.audit.similar import near_duplicates, repeated
from kiloword.data.joins import sampled_images
from kiloword.data.reading import captions_at
from kiloword.data.rows import key_bytes
from kiloword.data.source import key_of
from kiloword.report import Pixels
from kiloword.types import BadSample, Features, Skipped, Source

WIDE, FEWEST = 0.02, 10  # share and number of other images that match a generic caption as pairs usually do
WIDEST = 0.05  # and the largest share of captions that are called generic
TEXT = pa.binary()  # or text, see `table_of`
FINDING = {"kind": TEXT, "key": TEXT, "row": pa.int64(), "index": pa.int32(), "caption": TEXT, "score": pa.float64(),
           "other": TEXT, "detail": TEXT}  # fmt: skip
KEEP = {"key": TEXT, "index": pa.int32(), "caption": TEXT, "keep": pa.bool_(), "reason": TEXT, "score": pa.float32()}

Finding = dict[str, Any]
"""One thing to look at, a row of findings.parquet: kind; key and row of the image; index of its caption, -1: none;
caption; score: by kind fit, correlation of pixels, share of images, margin; other: key of the image that this one
duplicates, or that has the caption too; detail."""


@dataclass
class AuditedData:
    """An encoded data set: its I readable images in their order, and their T captions."""

    rows: Sequence[int]  # [I] of the source
    keys: Sequence[str]  # [I]
    captions: Sequence[Sequence[str]]  # [I]
    labels: Tensor  # [I] int64, -1: none
    images: Features
    texts: Features  # {}: none
    skipped: list[Skipped]

    @property
    def places(self) -> list[tuple[int, int, str]]:
        """[T] the image of each caption, its index among the captions of the image, and the caption."""
        return [(i, index, text) for i, texts in enumerate(self.captions) for index, text in enumerate(texts)]


def findings_of(
    data: AuditedData, fits: Fits | None, look: Callable[[int], Pixels], names: Sequence[str] | None
) -> Iterator[Finding]:
    """All findings, the worst of each kind first. Args: look: pixels of a row; names: of the classes."""
    places = data.places

    def of_image(kind: str, image: int, score: float | None, detail: str, other: str = "") -> Finding:
        return _finding(kind, data.keys[image], data.rows[image], score, detail, other)

    def of_text(kind: str, text: int, score: float | None, detail: str, other: str = "") -> Finding:
        image, index, caption = places[text]
        return of_image(kind, image, score, detail, other) | {"index": index, "caption": caption}

    if fits is not None:
        fit, fitting, n = fits.annotated, fits.fitting, len(data.keys)
        wrong = fit < (-np.inf if fits.rule.threshold is None else fits.rule.threshold)
        least = max(FEWEST, WIDE * n, np.quantile(fitting, 1 - WIDEST, method="higher"))
        for t in np.argsort(fit, kind="stable")[: wrong.sum()].tolist():
            detail = f"fit {fit[t]:.1f}; {fitting[t]:,} other images match this caption as pairs usually do"
            yield of_text("mismatch", t, float(fit[t]), detail)
        for t in np.argsort(-fitting, kind="stable").tolist():
            if fitting[t] >= least and not wrong[t]:
                detail = f"{fitting[t]:,} other images match it as pairs usually do"
                yield of_text("generic", t, float(fitting[t]) / max(1, n - 1), detail)
    for first, *others in repeated([caption for *_, caption in places]):
        for t in others:
            yield of_text("duplicate-caption", t, None, f"one of {len(others) + 1:,}", data.keys[places[first][0]])
    vectors = data.images["vec"].float().cpu()
    for first, image, alike in near_duplicates(vectors, lambda image: look(data.rows[image])):
        yield of_image("duplicate-image", image, alike, "pixels and features agree", data.keys[first])
    for margin, image, *classes in wrong_labels(vectors, data.labels):
        label, suggested = (names[c] if names and c < len(names) else f"class {c}" for c in classes)
        yield of_image("label", image, margin, f"labelled {label}, features say {suggested}")
    for one in data.skipped:
        yield _finding("unreadable", one.key, one.row, None, one.reason)


def _finding(kind: str, key: str, row: int, score: float | None, detail: str, other: str = "") -> Finding:
    return dict(zip(FINDING, (kind, key, row, -1, "", score, other, detail), strict=True))


def keep_list(
    data: AuditedData, findings: Sequence[Finding], fits: Fits | None, source: Source, drop: Sequence[str]
) -> pa.Table:
    """The keep-list (`kiloword.data.joins`): a row for each caption of the source, images that were read first."""
    reasons = {(one["row"], one["index"]): one["kind"] for one in reversed(findings) if one["kind"] in drop}
    every = list[tuple[int, str, Sequence[str]]](zip(data.rows, data.keys, data.captions, strict=True))
    for one in data.skipped:
        key, captions = one.key, list[str]()
        with suppress(BadSample, OSError):
            key = key_of(source, one.row)  # as the source has it
        with suppress(BadSample):
            captions = captions_at(source, one.row)
        every.append((one.row, key, captions))
    cells, scores, readable = list[tuple[Any, ...]](), iter([] if fits is None else fits.annotated), len(data.rows)
    for n, (row, key, texts) in enumerate(every):
        for index, caption in enumerate(texts) if texts else [(-1, "")]:
            reason = reasons.get((row, -1)) or reasons.get((row, index), "")
            score = next(scores, None) if n < readable and texts else None
            cells.append((key, index, caption, not reason, reason, score))
    made = table_of([dict(zip(KEEP, cell, strict=True)) for cell in cells], KEEP)
    return made.replace_schema_metadata({"kiloword": json.dumps({"images": sampled_images(source)})})


def table_of(rows: Sequence[Finding], types: dict[str, pa.DataType]) -> pa.Table:
    """Rows as a table. Text is text, or bytes where UTF-8 cannot hold one (lone surrogates of file names)."""
    columns = {}
    for name, kind in types.items():
        values = [row[name] for row in rows]
        columns[name] = pa.array(map(key_bytes, values) if kind == TEXT else values, kind)
        with suppress(pa.ArrowInvalid):
            columns[name] = columns[name].cast(pa.string()) if kind == TEXT else columns[name]
    return pa.table(columns)

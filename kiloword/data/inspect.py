"""Inspect a data set before training: `kiloword data index | check | stats SRC`."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from kiloword.config.recipes import DataConfig
from kiloword.data.images.contact import contact_sheet
from kiloword.data.images.decode import decode, image_size
from kiloword.data.open import open_source
from kiloword.data.reading import left_out, name_of, read
from kiloword.data.rows import Rows
from kiloword.data.steps import in_order
from kiloword.data.tar import index_beside
from kiloword.terminal import say
from kiloword.terminal.screen import say_table
from kiloword.types import BadSample, Skipped, Source, indices_of

_CHUNK = 1000  # rows per task of a worker
_SHOWN = 20  # bad samples printed for each reason
_QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
MEASURES = ("captions per image", "words per caption", "characters per caption", "image width", "image height")


@dataclass
class Stats:
    """Statistics of a data set; measures, labels and texts are of readable samples only."""

    rows: int
    bad: list[Skipped] = field(default_factory=list)
    measures: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in MEASURES})
    labels: Counter[int] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)  # how often each caption occurs


def main(what: Literal["index", "check", "stats"], src: str, png: Path | None = None) -> int:
    """Run and print `kiloword data WHAT SRC`.

    Returns: the number of bad samples (check), of damaged tars (index), or 0 (stats).
    Errors: ValueError when `src` is not a data set or `png` cannot be written.
    """
    start = time.perf_counter()
    source = open_source(src)
    say(f"{source.name}: {len(source):,} samples, opened in {time.perf_counter() - start:.1f} s")
    say(f"fingerprint {source.fingerprint}")
    if what == "index":
        path, damaged = index_beside(source) if isinstance(source, Rows) else (None, 0)
        say(f"index {path}: a remote set needs it beside its tars" if path else "nothing to index: only tars have one.")
        return damaged
    found, names = stats(source, decoded=what == "check"), getattr(source, "classnames", None) or []
    if what == "stats":
        _print(found, names)
    say(*left_out(found.bad, _SHOWN).lines())
    bad = f"{len(found.bad):,} of {found.rows:,} samples are bad ({len(found.bad) / found.rows:.2%})"
    if what == "check" or found.bad:
        say(bad if found.bad else "all samples are good")
    if len(found.bad) > (share := DataConfig().bad_share) * found.rows:
        say(f"`kiloword train` would stop, as more than {share:.2%} are bad: mend them, or allow more by --bad-share.")
    if what == "check":
        return len(found.bad)
    say("Only headers of images were read: `kiloword data check` decodes them, and names those that are cut.")
    if png:
        contact_sheet(source, png)
        say(f"samples: {png}")
    return 0


def stats(source: Source, workers: int | None = None, decoded: bool = False) -> Stats:
    """Read every sample and the header of its image.

    Args: workers: processes; None: the number of cores, but 0 for small data sets; decoded: decode whole images, and
    count bad samples alone.
    """
    total, chunks = Stats(len(source)), -(-len(source) // _CHUNK)
    if workers is None:
        workers = min(os.cpu_count() or 1, chunks // 10)
    for part in in_order(partial(_look, source, decoded), range(chunks), workers, timeout=0):
        total.bad += part.bad
        for name, values in part.measures.items():
            total.measures[name] += values
        total.texts.update(part.texts)
        total.labels.update(part.labels)
    return total


def _look(source: Source, decoded: bool, chunk: int) -> Stats:
    """Of a chunk of rows."""
    names, rows = getattr(source, "classnames", None), range(len(source))[chunk * _CHUNK : (chunk + 1) * _CHUNK]
    found = Stats(len(rows))
    for row in rows:
        try:
            record = read(source, row)
            labels, texts = indices_of(record.label), record.captions
            if names and (highest := max(labels, default=0)) >= len(names):
                raise BadSample(f"class index {highest}, but there are {len(names)} class names")
            if decoded:
                decode(record.image)
                continue
            words, letters = [len(text.split()) for text in texts], [len(text) for text in texts]
            width, height = image_size(record.image)
            for name, values in zip(MEASURES, ([len(texts)], words, letters, [width], [height]), strict=True):
                found.measures[name] += values
            found.texts.update(texts)
            found.labels.update(labels)
        except BadSample as error:
            found.bad.append(Skipped(row, name_of(source, row), str(error)))
    return found


def _print(found: Stats, classnames: Sequence[str]) -> None:
    """Counts, quantiles, classes and the most frequent captions."""
    captions = found.texts.total()
    say(f"images {len(found.measures[MEASURES[0]]):,}   captions {captions:,}   bad {len(found.bad):,}")
    rows = [
        [name, *(f"{q:,.0f}" for q in np.quantile(values, _QUANTILES)), f"{np.mean(values):,.1f}"]
        for name, values in found.measures.items()
        if values
    ]
    say_table(rows, "", "least", "5%", "median", "95%", "most", "mean")
    for label, count in sorted(found.labels.items()):
        say(f"class {label} {classnames[label] if label < len(classnames) else ''}: {count:,}")
    if captions:
        extra = captions - len(found.texts)
        say(f"captions that repeat an earlier one: {extra:,} ({extra / captions:.2%})")
    say(*(f"    {count:,} x {text[:100]}" for text, count in found.texts.most_common(10) if count > 1))

"""Inspect a data set before training: `kiloword data index | check | stats SRC`."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from rich.table import Table

from kiloword.data.images.contact import contact_sheet
from kiloword.data.images.decode import decode, image_size
from kiloword.data.reading import left_out, name_of
from kiloword.data.sources.digest import whole
from kiloword.data.sources.open import open_source
from kiloword.data.tars.index import open_index
from kiloword.terminal import say
from kiloword.terminal.screen import Screen
from kiloword.types import BadSample, Record, Skipped, Source, indices_of

_CHUNK = 1000  # rows per task of a process
_SHOWN = 20  # bad samples printed for each reason
_QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
T = TypeVar("T")


@dataclass
class Stats:
    """Statistics of a data set; lengths and sizes are of readable samples only."""

    rows: int
    bad: list[Skipped] = field(default_factory=list)
    captions: list[int] = field(default_factory=list)  # of each image
    words: list[int] = field(default_factory=list)  # of each caption, separated by white space
    characters: list[int] = field(default_factory=list)  # of each caption
    widths: list[int] = field(default_factory=list)  # pixels, of each image
    heights: list[int] = field(default_factory=list)
    labels: Counter[int] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)  # how often each caption occurs

    def add(self, record: Record, size: tuple[int, int]) -> None:
        """Count one readable sample."""
        self.captions.append(len(record.captions))
        self.words += [len(caption.split()) for caption in record.captions]
        self.characters += [len(caption) for caption in record.captions]
        self.widths.append(size[0])
        self.heights.append(size[1])
        self.texts.update(record.captions)
        self.labels.update(indices_of(record.label))

    def duplicates(self, most: int = 10) -> list[tuple[str, int]]:
        """The captions that occur more than once, most frequent first."""
        return [(text, n) for text, n in self.texts.most_common(most) if n > 1]


def main(what: Literal["index", "check", "stats"], src: str, png: Path | None = None, digest: bool = False) -> int:
    """Run and print `kiloword data WHAT SRC`.

    Args: digest: with index, hash all images and texts; resumed runs compare it.

    Returns: the number of bad samples (check), of damaged tars (index), or 0 (stats).
    Errors: ValueError when `src` is not a data set or `png` cannot be written.
    """
    start = time.perf_counter()
    source = open_source(src)
    if digest:
        local_tars(source)  # refused before anything is printed
    say(f"{source.name}: {len(source):,} samples, opened in {time.perf_counter() - start:.1f} s")
    say(f"fingerprint {source.fingerprint}")
    if what == "index":
        if digest:
            say(f"digest {digest_all(src, source)}")
        if not getattr(source, "tars", []):
            say("nothing to index: only tars have one.")
        return len(getattr(source, "damaged", []))
    if what == "check":
        bad = check(source)
        print_bad(bad, len(source))
        return len(bad)
    statistics = stats(source)
    print_stats(statistics, getattr(source, "classnames", None))
    if png:
        contact_sheet(source, png)
        say(f"samples: {png}")
    return 0


def digest_all(src: str, source: Source) -> str:
    """Add a digest to the index of every tar of `src` that has none. Returns: the digest of all.

    Raises: ValueError unless the data is local tars.
    """
    for tar in local_tars(source):
        open_index(tar, digest=True)
    return whole(open_source(src))


def local_tars(source: Source) -> list[Path]:
    """The tars of a source. Raises: ValueError unless the data is local tars."""
    tars = [tar for tar in getattr(source, "tars", []) if isinstance(tar, Path)]
    if not tars:
        raise ValueError(
            f"{source.name}: --digest needs local tars. docs/data.md describes what resumed runs compare for other "
            "data."
        )
    return tars


def check(source: Source, workers: int | None = None) -> list[Skipped]:
    """Read and decode every sample. Returns: bad samples with reasons, in order of rows.

    Args: workers: processes; None: the number of cores, but 0 for small data sets.
    """
    return [result for result in _each(_decoded, source, workers) if isinstance(result, Skipped)]


def stats(source: Source, workers: int | None = None) -> Stats:
    """Read every sample and the header of its image. Args: as of `check`."""
    total = Stats(len(source))
    for result in _each(_measured, source, workers):
        if isinstance(result, Skipped):
            total.bad.append(result)
        else:
            total.add(*result)
    return total


def print_bad(bad: list[Skipped], rows: int) -> None:
    """Print the bad samples by reason, and their share."""
    say(*left_out(bad, _SHOWN).lines())
    say(f"{len(bad):,} of {rows:,} samples are bad ({len(bad) / rows:.2%})" if bad else "all samples are good")


def print_stats(statistics: Stats, classnames: list[str] | None) -> None:
    """Print counts, quantiles, classes and the most frequent captions."""
    say(f"images {len(statistics.captions):,}   captions {sum(statistics.captions):,}   bad {len(statistics.bad):,}")
    table = Table(*["", "least", "5%", "median", "95%", "most", "mean"], box=None, header_style="bold")
    measures = {
        "captions per image": statistics.captions,
        "words per caption": statistics.words,
        "characters per caption": statistics.characters,
        "image width": statistics.widths,
        "image height": statistics.heights,
    }
    for name, values in measures.items():
        if values:
            cells = [f"{q:,.0f}" for q in np.quantile(values, _QUANTILES)]
            table.add_row(name, *cells, f"{np.mean(values):,.1f}")
    Screen(soft_wrap=True).print(table)
    for label, count in sorted(statistics.labels.items()):
        name = classnames[label] if classnames and label < len(classnames) else ""
        say(f"class {label} {name}: {count:,}")
    if statistics.texts:
        extra = sum(statistics.captions) - len(statistics.texts)
        say(f"captions that repeat an earlier one: {extra:,} ({extra / sum(statistics.captions):.2%})")
    for text, count in statistics.duplicates():
        say(f"    {count:,} x {text[:100]}")
    if statistics.bad:
        print_bad(statistics.bad, statistics.rows)
    say("Only headers of images were read: `kiloword data check` decodes them, and names those that are cut.")


def _each(use: Callable[[Record], T], source: Source, workers: int | None) -> Iterator[T | Skipped]:
    """The result of `use` for every sample, or why it is bad, in order of rows."""
    chunks = [range(start, min(start + _CHUNK, len(source))) for start in range(0, len(source), _CHUNK)]
    of_rows = partial(_of_rows, use, source)
    if workers is None:
        workers = min(os.cpu_count() or 1, len(chunks) // 10)
    if workers < 2:
        yield from chain.from_iterable(map(of_rows, chunks))
        return
    # spawn: a fork of a process with running threads may hang
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from chain.from_iterable(pool.map(of_rows, chunks))


def _of_rows(use: Callable[[Record], T], source: Source, rows: range) -> list[T | Skipped]:
    names, results = getattr(source, "classnames", None), list[T | Skipped]()
    for row in rows:
        try:
            record = source.record(row)
            if names and (highest := max(indices_of(record.label), default=0)) >= len(names):
                raise BadSample(f"class index {highest}, but there are {len(names)} class names")
            results.append(use(record))
        except BadSample as error:
            key = name_of(source, row) if hasattr(source, "key") else str(row)
            results.append(Skipped(row, key, str(error)))
    return results


def _decoded(record: Record) -> None:
    decode(record.image)


def _measured(record: Record) -> tuple[Record, tuple[int, int]]:
    """The record without its image, which is not sent to the main process; width and height."""
    return Record(record.key, b"", record.captions, record.label), image_size(record.image)

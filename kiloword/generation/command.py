"""Captions of a whole data set, into a table that training reads: what `kiloword caption` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kiloword.data.reading import EvalBatch, eval_batches
from kiloword.data.sources import open_data
from kiloword.embed import Report, every_row
from kiloword.generation.options import GenerationOptions
from kiloword.generation.table import CaptionFile, CaptionWriter, Rows, columns, content_of
from kiloword.interop.captioners import Describer, open_captioner
from kiloword.recipes import DataConfig
from kiloword.types import Skipped, Source

PART = 1024  # rows a part: what an interruption costs at most
_OTHERS = (".csv", ".tsv", ".json", ".jsonl", ".txt", ".html", ".tar")  # names that would promise another format


def main(
    model: str,
    data: Sequence[str],
    out: Path,
    options: GenerationOptions,
    batch: int = 16,
    workers: int = 0,
    device: str = "auto",
    precision: str = "fp32",
) -> None:
    """What the command line calls; prints. Errors: see `open_captioner`, `open_data` and `write_captions`."""
    options.check()
    if out.suffix.lower() in _OTHERS:
        raise ValueError(f"{out}: captions are written as a parquet table: let --out end in .parquet.")
    describer = open_captioner(model, device, precision)
    describer.check(options)
    source = open_data(DataConfig(sources=tuple(data)), describer.transform.size)
    report = Report(sys.stderr)
    pictures, captions = write_captions(
        describer,
        source,
        out,
        options,
        model=model,
        precision=precision,
        batch=batch,
        workers=workers,
        report=report,
    )
    print(f"{out}: {captions:,} captions of {pictures:,} pictures, {out.stat().st_size / 1e6:,.1f} MB")


def write_captions(
    describer: Describer,
    source: Source,
    out: Path | str,
    options: GenerationOptions,
    *,
    model: str = "",
    precision: str = "fp32",
    batch: int = 16,
    workers: int = 0,
    part: int = PART,
    report: Report | None = None,
) -> tuple[int, int]:
    """A table of captions of every readable picture; goes on with what is there.

    Args: source: pictures, which need no captions of their own; of a mixture every row of each part is described,
    whatever its weight; model: as messages name the describer; batch: pictures at a time; part: rows between
    interruptions.
    Returns: numbers of pictures and captions in the table. `kiloword.data.extra_captions` reads it.
    Errors: ValueError when `out` holds something else, keys repeat with other pictures, or no row is usable.
    """
    if batch < 1:
        raise ValueError(f"a batch of {batch} pictures; expected at least 1")
    report, whole = report or Report(None), every_row(source)
    file = CaptionFile(
        model=model,
        model_fingerprint=describer.fingerprint,
        precision=precision,
        options=options,
        data=source.name,
        fingerprint=whole.fingerprint,
        rows=len(whole),
        part=part,
    )
    writer = CaptionWriter(Path(out), file)
    _fill(writer, whole, describer, batch, workers, report)
    made = writer.finish()
    if writer.skipped:
        report.say(f"{len(writer.skipped):,} of {writer.file.rows:,} rows are bad, and not in the table.")
    if writer.repeated:
        report.say(f"{writer.repeated:,} rows repeat an earlier one's key and picture.")
    return made


def _fill(
    writer: CaptionWriter, source: Source, describer: Describer, batch: int, workers: int, report: Report
) -> None:
    """Make and write the parts that are missing."""
    todo = [writer.rows_of(number) for number in writer.missing]
    report.start(sum(map(len, todo)), len(source))
    transform = describer.transform
    batches = eval_batches(
        source, transform.size, batch=batch, workers=workers, parts=todo, transform=transform, captions=False
    )
    for number, rows in zip(writer.missing, todo, strict=True):
        made, left = Rows(), len(rows)
        while left:
            some = next(batches)
            before = len(made.skipped)
            captions = _describe(some, made, describer, writer)
            for bad in made.skipped[before:]:
                report.say(f"skipped {bad.key}: {bad.reason}")
            read = len(some.rows) + len(some.skipped)
            left -= read
            report.add(read, captions)
        writer.write(number, made)


def _describe(some: EvalBatch, made: Rows, describer: Describer, writer: CaptionWriter) -> int:
    """Add one batch to a part; returns the number of new captions."""
    made.skipped += some.skipped
    new, contents = [], []
    for n, (row, key, image) in enumerate(zip(some.rows, some.keys, some.images, strict=True)):
        if not _utf8(key):
            made.skipped.append(Skipped(row, key, "the key is not UTF-8, which a table of captions cannot hold"))
            continue
        content = content_of(image)
        if writer.is_new(key, content):
            new.append(n)
            contents.append(content)
    if not new:
        return 0
    keys = [some.keys[n] for n in new]
    captions, scores = columns(describer.describe(some.images[new], writer.file.options, keys))
    made.keys += keys
    made.contents += contents
    made.captions += captions
    made.scores += scores
    return sum(map(len, captions))


def _utf8(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:  # a file name that is no UTF-8
        return False
    return True

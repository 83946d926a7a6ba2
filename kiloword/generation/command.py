"""Captions of a whole data set, into a table that training reads: what `kiloword caption` does."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from kiloword.checkpoint.lock import Lock
from kiloword.checkpoint.trust import NONE, Trust
from kiloword.config.by_device import announce, image_bytes, workers_of
from kiloword.config.recipes import DataConfig
from kiloword.data.reading import EvalBatch, eval_batches
from kiloword.data.sources.open import open_data
from kiloword.distributed.device import choose
from kiloword.distributed.sharing import alone, interruptible, is_first, missing_parts, part_by_part, share, together
from kiloword.features.extract import ProgressReport, every_row
from kiloword.generation.captioners import Describer, open_captioner
from kiloword.generation.options import GenerationOptions
from kiloword.generation.table import (
    CaptionFile,
    CaptionRows,
    CaptionWriter,
    columns,
    content_of,
    made_of,
    parts_of,
    what_is_there,
)
from kiloword.terminal import say
from kiloword.types import Skipped, Source

PART = 1024  # rows a part: what an interruption costs at most
_OTHERS = (".csv", ".tsv", ".json", ".jsonl", ".txt", ".html", ".tar")  # names that would promise another format


def main(
    model: str,
    data: Sequence[str],
    out: Path,
    options: GenerationOptions,
    batch: int = 16,
    workers: int | Literal["auto"] = "auto",
    device: str = "auto",
    precision: str = "auto",
    trust: Trust = NONE,
) -> None:
    """What the command line calls; prints. Ranks that torchrun started share the rows.

    A table that resumes keeps its precision with "auto", whatever the device.

    Errors: see `open_captioner`, `open_data` and `write_captions`.
    """
    options.check()
    if out.suffix.lower() in _OTHERS:
        raise ValueError(f"{out}: captions are written as a parquet table: let --out end in .parquet.")
    device = choose(device)
    reason, begun = "as given", None
    if precision == "auto":
        begun = made_of(out)
        reason = "by model and device" if begun is None else "as the table began"
    with together(device):
        describer = open_captioner(model, device, precision if begun is None else begun.precision, trust)
        describer.check(options)
        room = image_bytes(4 * batch, describer.transform.size)  # transformers' own are of floats
        workers = workers_of(workers, device, room)
        announce(device, describer.precision, reason, workers)
        source = open_data(DataConfig(sources=tuple(data)), describer.transform.size)
        file = _file(describer, source, options, model, describer.precision, PART)
        made = _write(describer, source, out, file, batch, workers, ProgressReport(sys.stderr))
        if made is not None:
            images, captions = made
            say(f"{out}: {captions:,} captions of {images:,} images, {out.stat().st_size / 1e6:,.1f} MB")


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
    report: ProgressReport | None = None,
) -> tuple[int, int]:
    """A table of captions of every readable image; goes on with what is there.

    Args: source: images, which need no captions of their own; of a mixture every row of each part is described,
    whatever its weight; model: as messages name the describer; batch: images at a time; part: rows between
    interruptions.
    Returns: numbers of images and captions in the table. `kiloword.data.sources.extra_captions` reads it.
    Errors: ValueError when `out` holds something else, keys repeat with other images, or no row is usable.
    """
    with alone():
        file = _file(describer, source, options, model, precision, part)
        made = _write(describer, source, Path(out), file, batch, workers, report or ProgressReport(None))
    assert made is not None, "the only rank is the first"
    return made


def _file(
    describer: Describer, source: Source, options: GenerationOptions, model: str, precision: str, part: int
) -> CaptionFile:
    whole = every_row(source)
    return CaptionFile(
        model=model,
        model_fingerprint=describer.fingerprint,
        precision=precision,
        options=options,
        data=source.name,
        fingerprint=whole.fingerprint,
        rows=len(whole),
        part=part,
    )


def _write(
    describer: Describer, source: Source, out: Path, file: CaptionFile, batch: int, workers: int, report: ProgressReport
) -> tuple[int, int] | None:
    """As `write_captions`. Of ranks that share the rows the first one alone writes, and knows the numbers."""
    if batch < 1:
        raise ValueError(f"a batch of {batch} images; expected at least 1")
    if not is_first():
        _fill(None, every_row(source), describer, file.options, batch, workers, report)
        return None
    finished = what_is_there(out, file) is not None and out.exists()
    with nullcontext() if finished else Lock(out, "writing", parts_of(out)):
        writer = CaptionWriter(out, file)
        try:
            _fill(writer, every_row(source), describer, file.options, batch, workers, report)
            made = writer.finish()
        except BaseException:
            kept = writer.leave()
            if kept:
                report.say(f"{kept} of {writer.file.parts} parts stay in {writer.folder}: the same command goes on.")
            raise
    if writer.skipped:
        report.say(f"{len(writer.skipped):,} of {writer.file.rows:,} rows are bad, and not in the table.")
    if writer.repeated:
        report.say(f"{writer.repeated:,} rows repeat an earlier one's key and image.")
    return made


def _fill(
    writer: CaptionWriter | None,
    source: Source,
    describer: Describer,
    options: GenerationOptions,
    batch: int,
    workers: int,
    report: ProgressReport,
) -> None:
    """Make and write the parts that are missing. Args: writer: on the first rank."""
    numbers, todo = missing_parts(writer, "captions")
    report.start(sum(map(len, todo)), len(source))
    transform = describer.transform

    def make(batches: list[range]) -> Iterator[CaptionRows]:
        for some in eval_batches(
            source, transform.size, batch=batch, workers=workers, parts=batches, transform=transform, captions=False
        ):
            with alone():
                made = _describe(some, describer, options)
            report.add(len(some.rows) + len(some.skipped), sum(map(len, made.captions)), share()[1])
            yield made

    with interruptible(todo, len(source)) as written:
        for n, made in enumerate(part_by_part(todo, batch, make)):
            if writer is not None:
                writer.write(numbers[n], _together(writer, made, report))
                written.append(todo[n])


def _together(writer: CaptionWriter, made: list[CaptionRows], report: ProgressReport) -> CaptionRows:
    """Batches put together, without rows that came before."""
    rows = CaptionRows()
    for one in made:
        for bad in one.skipped:
            report.say(f"skipped {bad.key}: {bad.reason}")
        rows.skipped += one.skipped
        for key, content, captions, scores in zip(one.keys, one.contents, one.captions, one.scores, strict=True):
            if writer.is_new(key, content):
                rows.keys.append(key)
                rows.contents.append(content)
                rows.captions.append(captions)
                rows.scores.append(scores)
    return rows


def _describe(some: EvalBatch, describer: Describer, options: GenerationOptions) -> CaptionRows:
    """One batch."""
    skipped = list(some.skipped)
    usable = [n for n, key in enumerate(some.keys) if _utf8(key)]
    for n, key in enumerate(some.keys):
        if not _utf8(key):
            why = "the key is not UTF-8, which a table of captions cannot hold"
            skipped.append(Skipped(some.rows[n], key, why))
    if not usable:
        return CaptionRows(skipped=skipped)
    keys, images = [some.keys[n] for n in usable], some.images[usable]
    captions, scores = columns(describer.describe(images, options, keys))
    return CaptionRows(keys, [content_of(image) for image in images], captions, scores, skipped)


def _utf8(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:  # a file name that is no UTF-8
        return False
    return True

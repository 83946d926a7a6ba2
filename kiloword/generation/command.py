"""Captions of a whole data set, into a table that training reads: what `kiloword caption` does."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal, TextIO

from kiloword.config.recipes import DataConfig
from kiloword.data.edits import every_row
from kiloword.data.joins import check_keys, sampled_images
from kiloword.data.open import open_data
from kiloword.data.reading import EvalBatch, eval_batches
from kiloword.data.rows import key_bytes
from kiloword.distributed.by_device import announce, workers_of
from kiloword.distributed.device import choose
from kiloword.distributed.sharing import alone, is_first, together
from kiloword.files import Lock
from kiloword.generation.captioners import Describer, open_captioner
from kiloword.generation.options import GenerationOptions
from kiloword.generation.table import PART as PART_ROWS
from kiloword.generation.table import CaptionFile, CaptionWriter, begun, columns, existing_table, parts_of
from kiloword.models.trust import NONE, Trust
from kiloword.stores.pieces import Rows, fill, rows_table
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
    reason = "as given"
    if precision == "auto":
        existing = begun(out)
        precision = "auto" if existing is None else existing.precision
        reason = "by model and device" if existing is None else "as the table began"
    with together(device):
        describer = open_captioner(model, device, precision, trust)
        describer.check(options)
        workers = workers_of(workers, device, 4 * batch, describer.transform.size)  # transformers' own are of floats
        announce(device, describer.precision, reason, workers)
        source = open_data(DataConfig(sources=tuple(data)), describer.transform.size)
        file = _file(describer, source, options, model, describer.precision, PART)
        made = _write(describer, source, out, file, batch, workers, sys.stderr)
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
    report: TextIO | None = None,
) -> tuple[int, int]:
    """A table of captions of every readable image; goes on with what is there.

    Args: source: images, which need no captions of their own; of a mixture every row of each part is described,
    whatever its weight; model: as messages name the describer; batch: images at a time; part: rows between
    interruptions.
    Returns: numbers of images and captions in the table. `kiloword.data.joins` reads it.
    Errors: ValueError when `out` holds something else, keys repeat with other images, or no row is usable.
    """
    with alone():
        file = _file(describer, source, options, model, precision, part)
        made = _write(describer, source, Path(out), file, batch, workers, report)
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
        images=sampled_images(whole),
        data=source.name,
        fingerprint=whole.fingerprint,
        rows=len(whole),
        part=part,
    )


def _write(
    describer: Describer, source: Source, out: Path, file: CaptionFile, batch: int, workers: int, report: TextIO | None
) -> tuple[int, int] | None:
    """As `write_captions`. Ranks share the rows; only the first one writes and returns the numbers."""
    if batch < 1:
        raise ValueError(f"--batch is {batch}: expected at least 1.")
    source, transform = every_row(source), describer.transform

    def read(batches: list[range]) -> Iterator[EvalBatch]:
        return eval_batches(
            source, transform.size, batch=batch, workers=workers, parts=batches, transform=transform, captions=False
        )

    def work(writer: CaptionWriter | None) -> None:
        fill(writer, source, batch, read, lambda images: _describe(images, describer, file), report)

    if not is_first():
        work(None)
        return None
    finished = existing_table(out, file) is not None and out.exists()
    with nullcontext() if finished else Lock(out, "writing", parts_of(out)):
        writer = CaptionWriter(out, file)
        try:
            if writer.done < file.parts:
                check_keys(source, "the table of captions")
            work(writer)
            made = writer.finish(report)
        except BaseException:
            done = writer.leave()
            if done and report is not None:
                stay = f"{done} of {writer.file.parts} parts stay in {writer.folder}"
                say(f"{stay}: the same command goes on.", to=report)
            raise
    return made


def _describe(images: EvalBatch, describer: Describer, file: CaptionFile) -> Rows:
    """Captions of a batch. An image whose key is not UTF-8 (a file name) is skipped."""
    usable = [n for n, key in enumerate(images.keys) if _utf8(key)]
    why = "the key is not UTF-8, which a table of captions cannot hold"
    unusable = [Skipped(images.rows[n], key, why) for n, key in enumerate(images.keys) if n not in usable]
    bad = [{"row": one.row, "key": key_bytes(one.key), "reason": one.reason} for one in (*images.skipped, *unusable)]
    if not usable:
        return Rows(rows_table(PART_ROWS, bad))
    keys = [images.keys[n] for n in usable]
    captions, scores = columns(describer.describe(images.images[usable], file.options, keys))
    described = zip(usable, keys, captions, scores, strict=True)
    rows = ({"row": images.rows[n], "key": key.encode(), "captions": c, "scores": s} for n, key, c, s in described)
    return Rows(rows_table(PART_ROWS, [*rows, *bad]))


def _utf8(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True

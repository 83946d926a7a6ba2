"""A teacher's features of a whole data set, once, into a feature store: what `kiloword embed` does."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
import torch

from kiloword.checkpoint.lock import Lock
from kiloword.checkpoint.trust import NONE, Trust
from kiloword.config.by_device import announce, image_bytes, workers_of
from kiloword.config.recipes import DataConfig
from kiloword.data.feature_store import FeatureStore, StoredFeatures, TableFile, contents
from kiloword.data.files import key_bytes
from kiloword.data.reading import EvalBatch, eval_batches
from kiloword.data.sources.mixture import MixtureSource, mix
from kiloword.data.sources.open import open_data
from kiloword.distributed.device import choose
from kiloword.distributed.sharing import alone, interruptible, is_first, missing_parts, part_by_part, share, together
from kiloword.features.teachers import Teacher, open_teacher
from kiloword.features.writer import FeatureRows, FeatureWriter, content_of, what_is_there
from kiloword.terminal import say
from kiloword.terminal.progress import ProgressLine, duration, per_second
from kiloword.types import Skipped, Source

PART = 4096  # rows in a part: an interruption costs seconds of work, a worker maps megabytes


def main(
    model: str,
    data: Sequence[str],
    out: Path,
    name: str = "teacher",
    extra_captions: Sequence[str] = (),
    batch: int = 64,
    workers: int | Literal["auto"] = "auto",
    device: str = "auto",
    precision: Literal["fp32", "bf16"] = "fp32",
    dtype: Literal["fp16", "fp32"] = "fp16",
    trust: Trust = NONE,
) -> None:
    """Run and print `kiloword embed`. Ranks of torchrun share the rows.

    The precision is part of the feature store's identity and does not depend on the device, so that any can resume.

    Errors: see `open_teacher`, `open_data` and `embed`.
    """
    device = choose(device)
    with together(device):
        teacher = open_teacher(model, device, precision, trust)
        workers = workers_of(workers, device, image_bytes(batch, teacher.size))
        announce(device, precision, "on every device, unless given", workers)
        source = open_data(DataConfig(sources=tuple(data), extra_captions=tuple(extra_captions)), teacher.size)
        file = _file(teacher, source, model, name, precision, dtype, PART)
        table = _embed(teacher, source, out, file, batch, workers, ProgressReport(sys.stderr))
        if table is not None:
            _say(out, table)


def _say(out: Path, store: FeatureStore) -> None:
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    captions = int(store.starts[-1])
    say(f"{out}: {len(store):,} images, {captions:,} captions, {store.dim} dimensions, {size:,.1f} MB")


def embed(
    teacher: Teacher,
    source: Source,
    out: Path | str,
    *,
    teacher_name: str = "",
    name: str = "teacher",
    precision: str = "fp32",
    dtype: Literal["fp16", "fp32"] = "fp16",
    batch: int = 64,
    workers: int = 0,
    part: int = PART,
    report: ProgressReport | None = None,
) -> FeatureStore:
    """Compute features of every readable image, without augmentation, and of all its captions; resumes in `out`.

    Args: source: in a mixture every row of each source is embedded, whatever its weight; teacher_name: for messages;
    name: of the features in a batch; precision: of the teacher; dtype: of the features on disk; batch: images in a
    batch; part: rows in a file; report: receives progress and bad rows.
    Errors: ValueError when `out` holds something else, keys repeat with other content, or no row is usable.
    """
    with alone():
        file = _file(teacher, source, teacher_name, name, precision, dtype, part)
        table = _embed(teacher, source, Path(out), file, batch, workers, report or ProgressReport(None))
    assert table is not None, "the only rank is the first"
    return table


def _file(
    teacher: Teacher,
    source: Source,
    teacher_name: str,
    name: str,
    precision: str,
    dtype: Literal["fp16", "fp32"],
    part: int,
) -> TableFile:
    whole = every_row(source)
    return TableFile(
        name=name,
        dim=_dim(teacher),
        teacher=teacher_name,
        teacher_fingerprint=teacher.fingerprint,
        precision=precision,
        dtype=dtype,
        data=source.name,
        fingerprint=whole.fingerprint,
        contents=tuple(sorted(contents(whole))),
        rows=len(whole),
        part=part,
    )


def _embed(
    teacher: Teacher, source: Source, out: Path, file: TableFile, batch: int, workers: int, report: ProgressReport
) -> FeatureStore | None:
    """As `embed`. Ranks share the rows; only the first one writes and returns the store."""
    if batch < 1:
        raise ValueError(f"batch is {batch}: expected at least 1")
    if not is_first():
        _fill(None, every_row(source), teacher, batch, workers, report)
        return None
    what_is_there(out, file)  # a folder of something else gets no lock
    with Lock(out, "writing"):
        writer = FeatureWriter(out, file)
        _fill(writer, every_row(source), teacher, batch, workers, report)
        return _finish(writer, report)


def _finish(writer: FeatureWriter, report: ProgressReport) -> FeatureStore:
    """The finished store, and messages about rows that it lacks."""
    table = writer.finish()
    if writer.skipped:
        report.say(f"{len(writer.skipped):,} of {writer.file.rows:,} rows are bad, and not in the feature store.")
    if writer.repeated:
        report.say(f"{writer.repeated:,} rows repeat an earlier one's key and content.")
    return table


def _fill(
    writer: FeatureWriter | None, source: Source, teacher: Teacher, batch: int, workers: int, report: ProgressReport
) -> None:
    """Compute and write the missing parts. Args: writer: on the first rank, else None."""
    numbers, todo = missing_parts(writer, "features")
    report.start(sum(map(len, todo)), len(source))

    def make(batches: list[range]) -> Iterator[FeatureBatch]:
        for read_batch in eval_batches(source, teacher.size, teacher.resize, batch, workers, batches):
            with alone():
                encoded = _encode(read_batch, teacher)
            report.add(len(read_batch.rows) + len(read_batch.skipped), sum(map(len, read_batch.captions)), share()[1])
            yield encoded

    with interruptible(todo, len(source)) as written:
        for n, encoded in enumerate(part_by_part(todo, batch, make)):
            if writer is not None:
                writer.write(numbers[n], _rows(writer, encoded, report))
                written.append(todo[n])


def _rows(writer: FeatureWriter, batches: list[FeatureBatch], report: ProgressReport) -> FeatureRows:
    """Concatenate batches, without repeated rows."""
    rows = FeatureRows()
    for batch in batches:
        for bad in batch.skipped:
            report.say(f"skipped {bad.key}: {bad.reason}")
        rows.skipped += batch.skipped
        if not batch.keys:
            continue
        new = [writer.is_new(key, content) for key, content in zip(batch.keys, batch.contents, strict=True)]
        of_text = np.repeat(new, [len(captions) for captions in batch.captions])
        new_places = [n for n, is_new in enumerate(new) if is_new]
        rows.keys += [key_bytes(batch.keys[n]) for n in new_places]
        rows.captions += [batch.captions[n] for n in new_places]
        rows.images.append(batch.images[new_places])
        rows.texts.append(batch.texts[of_text.astype(bool)])
    return rows


@dataclass
class FeatureBatch:
    """Features of a batch of rows."""

    keys: list[str]
    contents: list[bytes]
    captions: list[list[str]]
    images: StoredFeatures  # [n, D]
    texts: StoredFeatures  # [t, D]
    skipped: list[Skipped]


def _encode(batch: EvalBatch, teacher: Teacher) -> FeatureBatch:
    """Encode a batch. Raises: ValueError when the teacher returns NaN or infinite features."""
    contents = [content_of(image, captions) for image, captions in zip(batch.images, batch.captions, strict=True)]
    if not batch.rows:
        nothing = np.empty((0, 0), np.float32)
        return FeatureBatch([], [], [], nothing, nothing, batch.skipped)
    images = teacher.encode_images(batch.images)
    texts = teacher.encode_texts([caption for several in batch.captions for caption in several])
    for what, features in (("images", images), ("captions", texts)):
        if not bool(torch.isfinite(features).all()):
            raise ValueError(f"the teacher's features of {what} are NaN or infinite, near {batch.keys[0]!r}.")
    return FeatureBatch(batch.keys, contents, batch.captions, images.numpy(), texts.numpy(), batch.skipped)


def every_row(source: Source) -> Source:
    """The source, or a mixture of the same sources, each once, whatever its weight."""
    parts = {part.fingerprint: part for part in _parts(source)}
    return mix(list(parts.values()))


def _parts(source: Source) -> Iterator[Source]:
    if not isinstance(source, MixtureSource):
        yield source
        return
    for part in source.sources:
        yield from _parts(part)


def _dim(teacher: Teacher) -> int:
    """Dimension of the features. Raises: ValueError when that of images and texts differs."""
    with alone():
        image = teacher.encode_images(torch.zeros(1, 3, teacher.size, teacher.size, dtype=torch.uint8)).shape[1]
        text = teacher.encode_texts(["a"]).shape[1]
    if image != text:
        raise ValueError(f"the teacher gives images {image} dimensions and texts {text}: expected equal numbers.")
    return image


class ProgressReport:
    """Messages and progress of work on rows. Args: out: None prints nothing."""

    def __init__(self, out: TextIO | None) -> None:
        self.out = out

    def say(self, message: str) -> None:
        """Print a message on its own line."""
        if self.out is not None:
            say(message, to=self.out)

    def start(self, rows: int, of: int) -> None:
        """Begin with `rows` rows to do, of `of` rows in total."""
        if rows < of:
            self.say(f"{of - rows:,} of {of:,} rows are done already.")
        self.rows, self.done, self.captions = rows, 0, 0
        self._line, self._start = ProgressLine(self.out), time.perf_counter()

    def add(self, rows: int, captions: int, ranks: int = 1) -> None:
        """Count finished rows and their captions. Args: ranks: number of ranks that have done about as much."""
        self.done = min(self.done + rows * ranks, self.rows)
        self.captions += captions * ranks
        seconds = max(time.perf_counter() - self._start, 1e-9)
        line = (
            f"row {self.done:,}/{self.rows:,}  {per_second(self.done / seconds)} images/s  "
            f"{per_second(self.captions / seconds)} captions/s  "
            f"ETA {duration(seconds / max(self.done, 1) * (self.rows - self.done))}"
        )
        self._line.show(line, self.done, self.rows)

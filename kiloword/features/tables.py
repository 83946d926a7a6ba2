"""Tables of features or captions, computed from a data set part by part, so that an interrupted run can resume."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TextIO, TypeVar

import pyarrow as pa
from torch import Tensor

from kiloword.config.settings import read_config
from kiloword.data.files import key_bytes
from kiloword.data.joins import check_keys
from kiloword.data.parts import Part, TableSettings, part_path, write_part
from kiloword.data.reading import EvalBatch, left_out
from kiloword.distributed.sharing import alone, interruptible, of_first, part_by_part, share
from kiloword.files import is_taken, write_json
from kiloword.terminal import say
from kiloword.terminal.progress import ProgressLine, duration, per_second
from kiloword.types import Skipped, Source

Settings = TypeVar("Settings", bound=TableSettings)


@dataclass
class Rows:
    """Computed rows of a batch of images."""

    batch: pa.RecordBatch  # with the columns of the table
    skipped: list[Skipped]


class TableWriter(Generic[Settings]):
    """Writes the parts of a table in a folder: all of a new table, or those that a table lacks.

    Args: existing: settings of the table that is there (see `resumed`), None for a new one; finished: nothing is
    missing. Raises: ValueError when parts are missing and the data has its rows in another order.
    """

    what: ClassVar[str]  # of the table, in a word
    by_key: bool = True  # rows are found by the keys of their images
    of_texts: ClassVar[bool] = False  # a row depends on captions too, not on the image alone

    def __init__(self, folder: Path, name: str, settings: Settings, existing: Settings | None, finished: bool = False):
        self.folder, self.file = folder, existing or settings
        if existing is None:
            write_json(folder / name, settings.written())
        self._keys: set[bytes] = set()  # so far
        self.skipped: list[Skipped] = []
        self.repeated = 0  # number of rows that repeat a key with its content
        self.missing = [] if finished else [number for number in range(self.file.parts) if not self._is_whole(number)]
        if self.missing and self.file.fingerprint != settings.fingerprint:  # parts are ranges of rows
            raise ValueError(
                f"{folder} holds part of the {self.what} of {self.file.data}, and {settings.data} has the same rows in "
                "another order: name the sources in the order of the first call, or choose another --out."
            )

    def rows_of(self, number: int) -> range:
        """The rows of the data in a part."""
        return self.file.rows_of(number)

    def part(self, number: int) -> Part:
        """Open a part. Raises: ValueError when it is missing or damaged."""
        return Part(part_path(self.folder, number), self.file.schema())

    def _is_whole(self, number: int) -> bool:
        """Whether a part exists and is undamaged; records its keys and bad rows."""
        try:
            part = self.part(number)
        except ValueError:
            return False
        if part.table != self.file.identity() or not part.whole():
            return False
        self._keys.update(_keys(part.batch))
        self._count(number, part.batch.num_rows, part.skipped)
        return True

    def _count(self, number: int, new: int, skipped: Sequence[Skipped]) -> None:
        self.skipped += skipped
        self.repeated += len(self.rows_of(number)) - len(skipped) - new

    def _is_new(self, key: bytes) -> bool:
        """Whether no earlier row has the key; adds it."""
        before = len(self._keys)
        self._keys.add(key)
        return len(self._keys) > before

    def write(self, number: int, rows: Sequence[Rows]) -> None:
        """Write one part atomically, without rows that repeat earlier ones. Errors: ValueError when that fails."""
        batches = []
        for batch in (one.batch for one in rows):
            new = [n for n, key in enumerate(_keys(batch)) if self._is_new(key)]
            batches += [batch] if len(new) == len(batch) else [batch.slice(n, 1) for n in new]
        skipped = [bad for one in rows for bad in one.skipped]
        write_part(part_path(self.folder, number), batches, skipped, self.file)
        self._count(number, sum(map(len, batches)), skipped)

    def check_usable(self) -> None:
        """Raises: ValueError when no row of the data is usable."""
        if not self._keys:
            why = f": {left_out(self.skipped)}" if self.skipped else ""
            raise ValueError(f"{self.file.data}: none of its {self.file.rows} rows is a usable image{why}.")

    def report(self, report: ProgressReport) -> None:
        """Print how many rows the table lacks."""
        for line in left_out(self.skipped).lines():
            report.say(line)
        if self.skipped:
            report.say(f"{len(self.skipped):,} of {self.file.rows:,} rows are bad, and not in the table.")
        if self.repeated:
            report.say(f"{self.repeated:,} rows repeat an earlier one's key and content.")


def _keys(batch: pa.RecordBatch) -> list[bytes]:
    keys: list[bytes] = batch.column("key").cast(pa.binary()).to_pylist()
    return keys


def resumed(folder: Path, name: str, settings: Settings, what: str) -> Settings | None:
    """Settings of the table in a folder; None in a new folder.

    Raises: ValueError when the folder holds something else, or a table of another model, other data or options.
    """
    if (folder / name).is_file():
        existing = read_config(folder / name, type(settings))
        check_same(folder, existing, settings, what)
        return existing
    if is_taken(folder):
        raise ValueError(f"{folder} exists and holds no {what}: choose another --out, or remove it.")
    return None


def check_same(path: Path, existing: TableSettings, new: TableSettings, what: str) -> None:
    """Raises: ValueError for a table of another model, other data or options."""
    for (old_value, old), (value, here) in zip(existing.compared(), new.compared(), strict=True):
        if old_value != value:
            raise ValueError(
                f"{path} holds other {what}: {old} there, {here} here. Choose another --out, or remove what is there."
            )


def fill(
    writer: TableWriter[Settings] | None,
    what: str,
    source: Source,
    batch: int,
    read: Callable[[list[range]], Iterator[EvalBatch]],
    compute: Callable[[EvalBatch], Rows],
    report: ProgressReport,
) -> None:
    """Compute and write the missing parts of a table; ranks share the batches.

    Args: writer: on the first rank, else None; what: the table, in a word; read: ranges of rows to batches of images.
    Raises: ValueError before the first row where keys repeat with other content.
    """
    missing = {} if writer is None else {number: writer.rows_of(number) for number in writer.missing}
    if writer is not None and missing and writer.by_key:
        check_keys(source, f"the table of {what}", texts=writer.of_texts)
    missing = of_first(missing)
    numbers, todo = list(missing), list(missing.values())
    report.start(sum(map(len, todo)), len(source))

    def make(batches: list[range]) -> Iterator[Rows]:
        for images in read(batches):
            with alone():
                rows = compute(images)
            has_captions = "captions" in rows.batch.schema.names
            captions = len(rows.batch.column("captions").flatten()) if has_captions else 0
            report.add(len(images.rows) + len(images.skipped), captions, share()[1])
            yield rows

    with interruptible(todo, len(source)) as written:
        for number, rows_of_part, rows in zip(numbers, todo, part_by_part(todo, batch, make), strict=True):
            if writer is not None:
                writer.write(number, rows)
                written.append(rows_of_part)


def content_of(image: Tensor, captions: Iterable[str] = ()) -> bytes:
    """A digest of a preprocessed image [3, H, W], and of its captions."""
    digest = hashlib.blake2b(image.contiguous().numpy().data, digest_size=16)
    for caption in captions:
        digest.update(b"\0" + key_bytes(caption))
    return digest.digest()


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
            + (f"{per_second(self.captions / seconds)} captions/s  " if self.captions else "")
            + f"ETA {duration(seconds / max(self.done, 1) * (self.rows - self.done))}"
        )
        self._line.show(line, self.done, self.rows)

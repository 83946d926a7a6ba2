"""A table of captions.

While it is written: `OUT.parts/captions.json` (`CaptionFile`) and the parts (`kiloword.stores.pieces`). At the end OUT,
a parquet table with the columns key, captions (list of text, best first) and scores, whose metadata is the
`CaptionFile`; the parts are then removed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from kiloword.config.settings import parse, read_config
from kiloword.data.stored import TableSettings
from kiloword.files import atomic
from kiloword.generation.captioner import Caption
from kiloword.generation.options import GenerationOptions
from kiloword.stores.pieces import COMMON, PieceWriter, check_same, read_table, resumed, say_bad

FILE = "captions.json"
SCHEMA = pa.schema({"key": pa.string(), "captions": pa.list_(pa.string()), "scores": pa.list_(pa.float32())})
PART = pa.schema({**COMMON, "captions": SCHEMA.field("captions").type, "scores": SCHEMA.field("scores").type})


@dataclass(frozen=True, kw_only=True)
class CaptionFile(TableSettings):
    """Model, data and options that captions were generated with."""

    model_fingerprint: str
    precision: str  # compute precision
    options: GenerationOptions
    images: dict[str, str] = field(default_factory=dict)  # see `kiloword.data.joins.sampled_images`
    format: Literal["kiloword-captions-1"] = "kiloword-captions-1"


class CaptionWriter(PieceWriter[CaptionFile]):
    """Writes the table of captions at a path: new, resumed, or finished. Errors: see `existing_table`."""

    def __init__(self, out: Path, file: CaptionFile) -> None:
        self.out, self.finished = out, out.exists()
        super().__init__(parts_of(out), FILE, file, existing_table(out, file), self.finished)

    def finish(self, report: TextIO | None) -> tuple[int, int]:
        """Merge the parts, of equal keys the first row; returns the numbers of images and captions.

        Raises: ValueError if there are none.
        """
        if not self.finished:
            every = self.table()
            say_bad(every, report)
            table = every.filter(every.column("reason").is_null())
            first = {key: n for n, key in reversed(list(enumerate(table.column("key").to_pylist())))}
            schema = SCHEMA.with_metadata({"kiloword": json.dumps(asdict(self.file))})
            table = table.take(sorted(first.values())).select(SCHEMA.names).cast(schema)
            with atomic(whole := self.folder / "captions.parquet") as file:  # the lock sweeps this folder alone
                pq.write_table(table.combine_chunks(), file)
            whole.replace(self.out)
        shutil.rmtree(self.folder, ignore_errors=True)
        whole = read_table(self.out, ["captions"]).column("captions").combine_chunks()
        return len(whole), len(whole.flatten())

    def leave(self) -> int:
        """After a failure: the number of finished parts; removes the folder if they have no captions."""
        tables = [] if self.finished else [read_table(self.path(number)) for number in range(self.done)]
        if not self.finished and not any(table.column("reason").null_count for table in tables):
            shutil.rmtree(self.folder, ignore_errors=True)
            return 0
        return len(tables)


def parts_of(out: Path) -> Path:
    """The folder of a table's parts."""
    return out.with_name(out.name + ".parts")


def existing_table(out: Path, file: CaptionFile) -> CaptionFile | None:
    """`CaptionFile` of the captions at a path; None if there are none.

    Raises: ValueError if the path has anything else, or captions of another model, other data or other options.
    """
    existing = _finished(out)
    if existing is None:
        return resumed(parts_of(out), FILE, file, "captions")
    check_same(out, existing, file, "captions")
    return existing


def begun(out: Path) -> CaptionFile | None:
    """`CaptionFile` of finished or unfinished captions at a path. Raises: ValueError for anything else."""
    path = parts_of(out) / FILE
    return _finished(out) or (read_config(path, CaptionFile) if path.is_file() else None)


def _finished(path: Path) -> CaptionFile | None:
    """`CaptionFile` of a finished table; None if there is no file. Raises: ValueError for another file."""
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            meta = pq.read_schema(file).metadata or {}
        return parse(json.loads(meta[b"kiloword"]), CaptionFile)
    except (OSError, pa.ArrowException, KeyError, ValueError):
        raise ValueError(f"{path} exists and is no table of captions: choose another --out, or remove it.") from None


def columns(captions: Sequence[Sequence[Caption]]) -> tuple[list[list[str]], list[list[float]]]:
    """Texts and scores of n images, without empty texts."""
    kept = [[one for one in of_image if one.text] for of_image in captions]
    return [[one.text for one in of_image] for of_image in kept], [[one.score for one in of_image] for of_image in kept]

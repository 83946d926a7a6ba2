"""Captions of a whole data set, into a table that training reads: what `kiloword caption` does.

While it is written, `OUT.parts` holds its parts (`kiloword.stores.pieces`). At the end OUT is a parquet table with the
columns key, captions (list of text, best first) and scores, whose metadata is the `CaptionFile`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from kiloword.config.settings import parse
from kiloword.data.edits import every_row
from kiloword.data.joins import check_keys, sampled_images
from kiloword.data.reading import EvalBatch, eval_batches
from kiloword.data.rows import key_bytes
from kiloword.data.stored import TableSettings
from kiloword.distributed.sharing import is_first
from kiloword.files import atomic
from kiloword.generation.captioner import Captioner
from kiloword.generation.captioners import TransformersCaptioner
from kiloword.generation.options import GenerationOptions
from kiloword.stores.pieces import COMMON, Rows, check_same, computed, read_table
from kiloword.types import Source

PART = 1024  # rows a part: what an interruption costs at most
FILE = "captions.json"
SCHEMA = pa.schema({"key": pa.string(), "captions": pa.list_(pa.string()), "scores": pa.list_(pa.float32())})
PART_ROWS = pa.schema([*pa.schema(COMMON), *list(SCHEMA)[1:]])


Describer = Captioner | TransformersCaptioner


@dataclass(frozen=True, kw_only=True)
class CaptionFile(TableSettings):
    """Model, data and options that captions were generated with."""

    model_fingerprint: str
    precision: str  # compute precision
    options: GenerationOptions
    images: dict[str, str] = field(default_factory=dict)  # see `kiloword.data.joins.sampled_images`
    format: Literal["kiloword-captions-1"] = "kiloword-captions-1"


def write_captions(
    describer: Describer,
    source: Source,
    out: Path | str,
    options: GenerationOptions,
    *,
    model: str = "",
    batch: int = 16,
    workers: int = 0,
    part: int = 0,
    report: TextIO | None = None,
) -> tuple[int, int] | None:
    """A table of captions of every readable image; goes on with what is there.

    Args: source: images, which need no captions of their own; of a mixture every row of each part is described,
    whatever its weight; model: as messages name the describer; batch: images at a time; part: rows between
    interruptions.
    Returns: numbers of images and captions in the table, which `kiloword.data.joins` reads. Of ranks that share the
    work the first one writes, and the others return None.
    Errors: ValueError for options that do not fit, when `out` holds something else, keys repeat with other images, or
    no row is usable.
    """
    describer.check(options)
    source, transform, out = every_row(source), describer.transform, Path(out)
    folder = out.with_name(out.name + ".parts")
    file = CaptionFile(
        model=model,
        model_fingerprint=describer.fingerprint,
        precision=describer.precision,
        options=options,
        images=sampled_images(source),
        data=source.name,
        fingerprint=source.fingerprint,
        rows=len(source),
        part=part or PART,
    )

    def read(batches: list[range]) -> Iterator[EvalBatch]:
        return eval_batches(source, transform.size, "shortest", batch, workers, batches, transform, captions=False)

    def compute(images: EvalBatch) -> Rows:
        return Rows(list(_rows(images, describer, options)))

    finished = _finished(out)
    if finished is not None:
        check_same(out, finished, file, "captions")
        if is_first():
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed at its very end
    else:
        if is_first():
            check_keys(source, "the table of captions")
        names: dict[str, Any] = {"out": out, "name": FILE, "what": "captions"}
        with computed(folder, file, PART_ROWS, source, batch, read, compute, report, **names) as made:
            if made is None:
                return None
            file, every = made
            table = every.filter(every.column("reason").is_null())
            first = {key: n for n, key in reversed(list(enumerate(table.column("key").to_pylist())))}
            schema = SCHEMA.with_metadata({"kiloword": json.dumps(asdict(file))})
            with atomic(folder / "captions.parquet") as handle:  # the lock sweeps this folder alone
                table = table.take(sorted(first.values())).select(SCHEMA.names).cast(schema)
                pq.write_table(table.combine_chunks(), handle)
            (folder / "captions.parquet").replace(out)
            shutil.rmtree(folder, ignore_errors=True)
    captions = read_table(out, ["captions"]).column("captions").combine_chunks()
    return len(captions), len(captions.flatten())


def _rows(images: EvalBatch, describer: Describer, options: GenerationOptions) -> Iterator[dict[str, object]]:
    """Captions of a batch, without empty ones. An image whose key is not UTF-8 (a file name) is skipped."""
    for one in images.skipped:
        yield {"row": one.row, "key": key_bytes(one.key), "reason": one.reason}
    usable = []
    for n, (row, key) in enumerate(zip(images.rows, images.keys, strict=True)):
        if key == key.encode(errors="ignore").decode():
            usable.append(n)
        else:
            reason = "the key is not UTF-8, which a table of captions cannot hold"
            yield {"row": row, "key": key_bytes(key), "reason": reason}
    described = describer.caption(images.images[usable], options, [images.keys[n] for n in usable]) if usable else []
    for n, captions in zip(usable, described, strict=True):
        kept = [one for one in captions if one.text]
        cells = {"captions": [one.text for one in kept], "scores": [one.score for one in kept]}
        yield {"row": images.rows[n], "key": images.keys[n].encode(), **cells}


def _finished(path: Path) -> CaptionFile | None:
    """`CaptionFile` of a finished table; None if there is no file. Raises: ValueError for another file."""
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            return parse(json.loads((pq.read_schema(file).metadata or {})[b"kiloword"]), CaptionFile)
    except (OSError, pa.ArrowException, KeyError, ValueError):
        raise ValueError(f"{path} exists and is no table of captions: choose another --out, or remove it.") from None

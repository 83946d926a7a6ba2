"""What users type, and the tables and tars that they have."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tars import photo, write_tar

Run = Callable[..., tuple[int, str]]
Refused = Callable[..., str]
Row = Mapping[str, Any]


def write_table(path: Path, rows: Sequence[Row]) -> Path:
    """Rows in the format that the suffix of the path names."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows)))
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writerows([rows[0].keys(), *(row.values() for row in rows)])
    return path


def write_photos(folder: Path, names: Sequence[str]) -> list[str]:
    """An image under each of these names. Returns: the names."""
    folder.mkdir(parents=True, exist_ok=True)
    for n, name in enumerate(names):
        (folder / name).write_bytes(photo(n))
    return list(names)


def captioned(*stems: str) -> list[tuple[str, bytes]]:
    """Members of a tar: for each stem an image, and the stem as its caption."""
    return [m for n, stem in enumerate(stems) for m in ((f"{stem}.png", photo(n)), (f"{stem}.txt", stem.encode()))]


def write_tars(folder: Path, *tars: list[tuple[str, bytes]] | bytes) -> Path:
    """Tars 00000.tar, 00001.tar, ... with these members, or files of these bytes. Returns: the folder."""
    for n, members in enumerate(tars):
        path = folder / f"{n:05d}.tar"
        write_tar(path, members if isinstance(members, list) else [])
        if isinstance(members, bytes):
            path.write_bytes(members)
    return folder


def captions(source: Any) -> list[list[str]]:
    return [source.captions(row) for row in range(len(source))]

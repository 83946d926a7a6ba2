"""Whatever a data set holds is a row, or is counted and named: members of tars, rows of tables, files of folders."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kiloword.cli.main import main
from kiloword.data.sources.open import open_source
from tars import photo

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
WORDS = ["बिल्ली सो रही है", "قطة تنام", "一只猫在睡觉", "🐈 sleeps", "a cat sleeps"]


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Exit code and output of a command."""
    try:
        code = main(list(map(str, words)))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    printed = capsys.readouterr()
    return code or 0, printed.out + printed.err


def table(folder: Path, kind: str, images: Sequence[bytes | str | None], captions: Sequence[str]) -> Path:
    """A table. Args: kind: "bytes" or "struct" of a parquet, "parquet" of paths, "csv", "tsv" or "json"."""
    path = folder / f"x.{'parquet' if kind in ('bytes', 'struct') else kind}"
    if path.suffix == ".parquet":
        cells = [{"bytes": image, "path": None} for image in images] if kind == "struct" else images
        of_images = {"bytes": pa.binary(), "struct": STRUCT, "parquet": pa.string()}[kind]
        pq.write_table(pa.table({"image": pa.array(cells, of_images), "caption": captions}), path)
    elif kind == "json":
        rows = [{"image": image, "caption": text} for image, text in zip(images, captions, strict=True)]
        path.write_text(json.dumps(rows, ensure_ascii=False))
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if kind == "tsv" else ",")
            writer.writerows([("image", "caption"), *zip(images, captions, strict=True)])
    return path


def captions(source: Any) -> list[list[str]]:
    return [source.captions(row) for row in range(len(source))]


@pytest.mark.parametrize("absent", [None, ""])
@pytest.mark.parametrize("kind", ["bytes", "struct", "parquet", "csv", "tsv", "json"])
def test_each_row_without_an_image_is_a_bad_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, absent: str | None
) -> None:
    (tmp_path / "a.png").write_bytes(photo())
    there: bytes | str = photo() if kind in ("bytes", "struct") else "a.png"
    none = absent if absent is None or isinstance(there, str) else absent.encode()
    data = table(tmp_path, kind, [none, there, none, there, *[none] * 4], [*WORDS, "x", "y", "z"])
    code, output = run(capsys, "data", "check", data)
    assert code > 0
    assert "6 of 7 samples are bad" in output  # one image with two captions, and six rows without an image
    assert captions(open_source(str(data)))[:3] == [[WORDS[0]], [WORDS[1], WORDS[3]], [WORDS[2]]]


@pytest.mark.parametrize("kind", ["bytes", "csv"])
def test_rows_without_an_image_stop_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    (tmp_path / "a.png").write_bytes(photo())
    names = [f"{n}.png" for n in range(0, 40, 2)]
    for n, name in enumerate(names):
        (tmp_path / name).write_bytes(photo(n))
    images = [None if n % 2 else photo(n) if kind == "bytes" else names[n // 2] for n in range(40)]
    data = table(tmp_path, kind, images, [f"caption {n}" for n in range(40)])
    words = ["train", "siglip", "--data", data, "--size", "debug", "--vocab", 300, "--batch", 8, "--epochs", 1]
    code, output = run(capsys, *words, "--workers", 0, "--bad-share", 0.1, "--out", tmp_path / "run")
    assert code == 2
    assert "of the data set's 40 rows are bad" in output

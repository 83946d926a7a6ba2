"""Data that cannot be used, and what is said of it: each refusal that no other test provokes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kiloword.config.recipes import DataConfig, TextConfig
from kiloword.data import reading
from kiloword.data.classes.names import text_lines
from kiloword.data.joins import with_captions
from kiloword.data.loader import Loader
from kiloword.data.reading import eval_batches, name_of, read, read_image
from kiloword.data.sampler import Order
from kiloword.data.sources import embedded, folder, tables
from kiloword.data.sources.embedded import Embedded, arrow_errors
from kiloword.data.sources.folder import Folder
from kiloword.data.sources.map_style import MapStyleSource
from kiloword.data.sources.tables import TableSource
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.types import BadSample, NoCaption, Record
from tars import noise, photo


def reason(read: Callable[[], object]) -> str:
    with pytest.raises(BadSample) as caught:
        read()
    return str(caught.value)


class Rows:
    """A row is what it is read as: a record's captions, or an error."""

    name, fingerprint = "rows", "f"

    def __init__(self, *rows: Any) -> None:
        self.rows, self.asked = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, row: int) -> Record:
        self.asked += 1
        if isinstance(self.rows[row], BaseException):
            raise self.rows[row]
        return Record(f"k{row}", noise(8, 8, row), list(self.rows[row]))


def test_errors_of_the_disk_stay_errors_of_the_disk() -> None:
    with pytest.raises(FileNotFoundError), arrow_errors(Path("x")):
        raise FileNotFoundError(errno.ENOENT, "gone")
    with pytest.raises(ValueError, match=r"x cannot be read as a table: bad magic$"), arrow_errors(Path("x")):
        raise OSError("bad magic\nand more")
    with pytest.raises(ValueError, match=r"x cannot be read as a table: ArrowInvalid$"), arrow_errors(Path("x")):
        raise pa.ArrowInvalid("")


def test_laid_out_images_that_are_cut_or_of_another_table_are_laid_out_again(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"image": [b"one", b"", b"three"], "caption": ["a", "b", "c"]}), path)
    print_ = tables.fingerprint(path)
    first = Embedded(path, "image", print_)
    whole = first.path.read_bytes()
    for harmed in (b"", whole[:50], whole[1:], whole[:-1], whole[:-40] + b"x" * 8 + whole[-32:], whole[:-1] + b"!"):
        first.path.write_bytes(harmed)
        assert [Embedded(path, "image", print_).read(row) for row in range(3)] == [b"one", b"", b"three"]
        assert first.path.read_bytes() == whole
    assert len(set(Embedded(path, "image", print_).digests().tolist())) == 3
    with pytest.raises(ValueError, match="x is damaged: its columns have 2 and 3 rows"):
        embedded.check_rows(Path("x"), 2, 3)


def test_a_damaged_row_does_not_hide_that_captions_match() -> None:
    """Nor is its key told as the example."""
    source, path = Rows(BadSample("damaged"), ["own"], ["own"]), "table.parquet"
    pq.write_table(
        pa.table({"key": ["k1"], "caption": ["more"]}), path := str(Path(os.environ["KILOWORD_CACHE"]).parent / path)
    )
    assert with_captions(source, [path]).record(1).captions == ["own", "more"]
    pq.write_table(pa.table({"key": ["other"], "caption": ["more"]}), path)
    with pytest.raises(ValueError, match=r"none of the 3 images of rows. Its keys are such as 'other', .* as 'k1'"):
        with_captions(source, [path])


def test_folders_without_images_and_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"holds no images \(\.jpg, \.jpeg, \.png, "):
        Folder("x", tmp_path)
    (tmp_path / "a.png").write_bytes(photo())
    (tmp_path / "a.txt").write_bytes(b"a dog")
    source = Folder("x", tmp_path)
    assert source.stored(0) == [photo(), b"a dog", None, None]

    def refuse(path: Path, what: str, most: int) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(folder, "read_whole", refuse)
    assert reason(lambda: source.record(0)) == "the image cannot be read (Permission denied)"


def test_rows_without_captions_are_replaced_and_named() -> None:
    source, tokenizer = Rows([], ["a dog"], ["a cat"], ["a cow"]), Tokenizer.train(["a dog"] * 9, 262)
    text = TextConfig(context=8, vocab=tokenizer.vocab)
    loader = Loader(source, Order(4, 2, seed=1), DataConfig(), text, 8, tokenizer)
    skipped = [one for step in range(2) for one in loader.batch(step).skipped]
    assert [(one.row, one.key, one.reason) for one in skipped] == [(0, "row 0", "no caption")]


def test_bad_samples_of_ones_own_data_keep_their_reason() -> None:
    class Mine:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, row: int) -> tuple[Any, Any]:
            if row:
                raise (BadSample("mine"), MemoryError("no room"), KeyError("x" * 300))[row - 1]
            return b"encoded", "a dog"

    source = MapStyleSource(Mine(), fingerprint="f")
    assert (source.fingerprint, source.key(3), source.captions(0)) == ("f", "3", ["a dog"])
    assert reason(lambda: source.record(1)) == "mine"
    with pytest.raises(MemoryError, match="no room"):
        source.record(2)
    assert reason(lambda: source.record(3)) == f"KeyError: '{'x' * 189}"


def test_a_drive_is_asked_four_times_and_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(reading.time, "sleep", waits.append)
    source = Rows(
        OSError(errno.ESTALE, "stale"),
        OSError(errno.ENOENT, "gone"),
        MemoryError("full"),
        NoCaption(Record("k", b"", [])),
    )
    assert (reason(lambda: read(source, 0)), source.asked) == ("OSError: [Errno 116] stale", 4)
    assert waits == [0.1, 0.4, 1.0]
    assert (reason(lambda: read(source, 1)), source.asked) == ("FileNotFoundError: [Errno 2] gone", 5)
    with pytest.raises(MemoryError, match="full"):
        read(source, 2)
    assert reason(lambda: read(source, 3)) == "no caption"
    assert read_image(source, 3).key == "k"
    assert (name_of(source, 2), len(waits)) == ("row 2", 3)
    with pytest.raises(ValueError, match="batch is 0: expected at least 1"):
        eval_batches(source, 8, batch=0)


def test_tables_of_questions(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(photo())
    (tmp_path / "zero.png").write_bytes(b"")
    rows = b"a.png,what?,yes\nzero.png,what?,no\na.png,\xff,no\nb.png,what?,no\na.png,too,many,cells\n"
    (tmp_path / "x.csv").write_bytes(b"image,question,answer\n" + rows)
    source = TableSource("x", tmp_path / "x.csv")
    assert [source.key(row) for row in range(5)] == ["a#0", "zero#1", "a#2", "b#3", "line a.png,too,many,cells"]
    assert (source.record(0).captions, source.stored(0), source.stored(4)) == (["yes"], [photo()], [])
    assert [reason(lambda row=row: source.record(row)) for row in range(1, 5)] == [  # type: ignore[misc]
        "the image has zero bytes",
        "caption is not UTF-8",
        "image cannot be read (No such file or directory)",
        "line without 3 columns",
    ]
    for row in (-1, 5):
        with pytest.raises(IndexError, match=f"row {row} of 5"):
            source.record(row)
    (tmp_path / "x.csv").write_bytes(b"image,question,answer\n")
    with pytest.raises(ValueError, match="has no rows"):
        TableSource("x", tmp_path / "x.csv")
    (tmp_path / "x.csv").write_bytes(b"image,caption\na.png,\xff\n")
    plain = TableSource("x", tmp_path / "x.csv")
    for row in (-1, 1):
        with pytest.raises(IndexError, match=f"row {row} of 1"):
            plain.captions(row)
    pq.write_table(
        pa.table({"image": ["a.png"], "caption": pa.array([b"\xff"]).cast(pa.binary())}), tmp_path / "x.parquet"
    )
    assert reason(lambda: TableSource("x", tmp_path / "x.parquet").captions(0)) == "caption is not UTF-8"


def test_a_list_that_is_not_utf8() -> None:
    with pytest.raises(ValueError, match=r"list\.txt is not UTF-8"):
        text_lines("list.txt", b"\xff\n")

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
from kiloword.data.joins import with_captions
from kiloword.data.loader import Loader
from kiloword.data.map_style import MapStyleSource
from kiloword.data.reading import eval_batches, name_of, read, read_image
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.types import BadSample, NoCaption, Record
from tars import noise


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

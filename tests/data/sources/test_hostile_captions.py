"""Captions, tables and settings made by someone who means harm: text as documented, or a reason."""

from __future__ import annotations

import io
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counting import calls
from kiloword.config.recipes import TextConfig
from kiloword.data.joins import CaptionTable
from kiloword.data.sources.open import open_source
from kiloword.data.sources.sample import MAX_CAPTION, make_record, parse_captions
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.types import BadSample
from tars import photo


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a dog on the grass", "two cats and a dog"] * 20, 400)


def told(call: Callable[[], Any]) -> Any:
    """What comes back, or the one sentence that says why nothing does."""
    try:
        return call()
    except (BadSample, ValueError) as error:
        found = error
    output = str(found)
    assert output.isprintable()
    assert 0 < len(output) < (200 if isinstance(found, BadSample) else 500)
    assert not isinstance(found, UnicodeError)
    return output


def outcome(text: bytes | None = None, meta: bytes | None = None) -> list[str] | str:
    """Captions, or the reason why there are none."""
    found: list[str] | str = told(lambda: make_record("x", b"x", text, meta, None).captions)
    return found


NESTED = b"[" * 100_000
TEXTS: dict[bytes, list[str] | str] = {
    b"a\0b": ["a\0b"],
    b"\xef\xbb\xbfmark": ["mark"],
    b"\xff\xfea\0": "caption is not UTF-8",
    b"caf\xe9": "caption is not UTF-8",
    b"\xed\xa0\x80": "caption is not UTF-8",  # a surrogate, encoded
    b"\xc0\x80": "caption is not UTF-8",  # an overlong zero
    b"\x1b[2J\x07bell": ["\x1b[2J\x07bell"],
    "\u202eright to left\u200f".encode(): ["\u202eright to left\u200f"],
    "👩‍👩‍👧‍👦 ".encode(): ["👩‍👩‍👧‍👦"],
    "\u00a0\u2003\u3000".encode(): "no caption",
    b" \r\n\t\v\f\n": "no caption",
    b"": "no caption",
    b"a\r\nb\rc\nd": ["a", "b\rc", "d"],
    b"3": ["3"],
    b"x" * (MAX_CAPTION + 1): "caption has 1,000,001 characters, more than 1,000,000",
}
METAS: dict[bytes, list[str] | str] = {
    NESTED: "the json cannot be parsed",
    b'{"a":' * 100_000: "the json cannot be parsed",
    b'{"caption": "x", "a": NaN, "b": Infinity, "c": -1e999}': ["x"],
    b'{"caption": "x", "n": ' + b"9" * 5000 + b"}": "the json cannot be parsed",
    b'{"caption": "\\ud800"}': "caption is not UTF-8",
    b'{"captions": ["\\ud83d\\ude00"]}': ["😀"],
    b'{"caption": "a", "caption": "b"}': ["b"],
    b'{"caption": 3}': "the captions of the json are not strings",
    b'{"captions": [null]}': "the captions of the json are not strings",
    b'{"captions": ["a", 3]}': "the captions of the json are not strings",
    b'{"captions": {"a": "b"}}': "the captions of the json are not strings",
    b'{"captions": []}': "no caption",
    b'{"captions": ["", " "]}': "no caption",
    b'{"caption": "a\\u0000b"}': ["a\0b"],
    b'\xef\xbb\xbf{"caption": "mark"}': ["mark"],
    b'{"caption": "x"} trailing': "the json cannot be parsed",
    b"null": "the json is not an object with `captions` or `caption`",
    b'"x"': "the json is not an object with `captions` or `caption`",
    b"": "the json cannot be parsed",
    b'{"question": ["x"], "answers": ["a"]}': "the question is not text",
    b'{"question": "x", "answers": [[["a"]]]}': 'the answers are not strings (write "3" for 3)',
}


@pytest.mark.parametrize("raw", TEXTS, ids=range(len(TEXTS)))
def test_texts(raw: bytes) -> None:
    assert outcome(raw) == TEXTS[raw]


@pytest.mark.parametrize("raw", METAS, ids=range(len(METAS)))
def test_metas(raw: bytes) -> None:
    assert outcome(b"text", raw) == METAS[raw]
    assert calls(lambda: outcome(b"text", raw)) < 2000


@settings(max_examples=100, deadline=None)
@given(text=st.binary(max_size=200) | st.text(max_size=100).map(str.encode), meta=st.none() | st.binary(max_size=100))
def test_any_bytes_are_captions_or_a_reason(tokenizer: Tokenizer, text: bytes, meta: bytes | None) -> None:
    found = outcome(text, meta)
    if isinstance(found, list):
        assert all(caption == caption.strip() and caption for caption in found)
        assert len(tokenizer.encode(found, TextConfig(vocab=512))) == len(found)


@pytest.mark.parametrize("text", ["word " * 200_000, "x" * 1_000_000, "\u0301" * 500_000, "\0" * 1_000_000])
def test_the_longest_caption_is_truncated_in_time(tokenizer: Tokenizer, text: str) -> None:
    """Work that grew as the square of its length would take hours."""
    captions = parse_captions(text.encode(), None)[0]
    found = tokenizer.encode(captions, TextConfig(vocab=512))
    assert (found.truncated, found.longest) == (1, 77)


# Tables


def table_outcome(path: Path) -> list[Any] | str:
    """Captions or reasons of every row, or why the table cannot be read."""
    source = told(lambda: open_source(str(path)))
    if isinstance(source, str):
        return source.replace(str(path), "TABLE")
    return [told(lambda row=row: source.record(row).captions) for row in range(len(source))]


HEAD = b"image,caption\n"
TABLES: dict[bytes, list[Any] | str] = {
    HEAD + b"a.png,a\0b\n": [["a\0b"]],
    HEAD + b'a.png,"two\nlines"\na.png,"a ""quote"""\n': [["two\nlines", 'a "quote"']],
    HEAD + b'a.png,"never closed\n': [["never closed"]],
    HEAD + b"a.png,caf\xe9\n": ["caption is not UTF-8"],
    HEAD + b"\xff\x1b[2J.png,x\n": ["image cannot be read (No such file or directory)"],
    HEAD + b"a\n\x1b[2J,c,d\n": ["line without 2 columns", "line without 2 columns"],
    HEAD + b"a.png,caf\xe9\n\xff\na.png,ok\n": ["caption is not UTF-8", "line without 2 columns"],
    HEAD + b"\xe9.png,x\na,b,\xff\n": [
        "image cannot be read (No such file or directory)",
        "line without 2 columns",
    ],
    b"image,caption,caption\na.png,x,y\n": "TABLE has 2 columns named caption. Expected one.",
    "image,caption\na.png,x\n".encode("utf-16"): "TABLE: the first line is not UTF-8. Expected column names such as "
    "`image,caption`.",
    b"image,caption," + b",".join(b"c%d" % n for n in range(1_000_000)) + b"\na.png,x" + b",1" * 1_000_000: [["x"]],
    b"image\tcaptions\na.png\t" + b"[" * 100_000 + b"\n": [["[" * 100_000]],
    b'image\tcaptions\na.png\t["a", NaN]\na.png\t[null]\n': [
        "a cell that looks like a list is not one of texts, as JSON or Python write it"
    ],
    b'image\tcaptions\na.png\t["\\ud800"]\n': ["caption is not UTF-8"],
    b"im\x1b[2Jage,caption\n": "TABLE has the columns im\\x1b[2Jage, caption. Expected `image` (or `filepath`) and "
    "`caption`, `captions` (or `title`) in its first line; or `image`, `question` and `answers` (or `answer`); or "
    "`image` and `label`. Other columns are named by FILE?image=COLUMN&caption=COLUMN,COLUMN.",
    HEAD: "TABLE has no rows. Expected an image and a caption, or a question and its answers, in each row.",
}


@pytest.mark.parametrize("raw", TABLES, ids=range(len(TABLES)))
def test_tables_of_text(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a.png").write_bytes(photo())
    (tmp_path / "x.csv").write_bytes(raw)
    found = table_outcome(tmp_path / "x.csv")
    assert found == TABLES[raw]


def parquet(columns: dict[str, Any] | pa.Table) -> bytes:
    out = io.BytesIO()
    pa.parquet.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), out)
    return out.getvalue()


def twice(*names: str) -> pa.Table:
    return pa.Table.from_arrays([pa.array(["a.png"])] * len(names), names=list(names))


PARQUETS: dict[str, tuple[Any, list[Any] | str]] = {
    "captions are numbers": ({"image": ["a.png"], "caption": [3]}, "TABLE cannot be read as"),
    "captions are structs": ({"image": ["a.png"], "captions": [[{"raw": "x"}]]}, "TABLE cannot be read"),
    "captions are null": ({"image": ["a.png"], "captions": pa.array([[None]], pa.list_(pa.null()))}, ["no caption"]),
    "no UTF-8": ({"image": ["a.png", "b"], "caption": [b"\xff", b"x"]},
        ["caption is not UTF-8", "image cannot be read"]),
    "no image is named": ({"image": [None], "caption": ["x"]}, ["no image is named"]),
    "two captions": (twice("image", "caption", "caption"), "TABLE has 2 columns named caption. Expected one."),
    "two images": (twice("image", "image", "caption"), "TABLE has 2 columns named image. Expected one."),
    "a struct of text": ({"image": [{"bytes": "x"}], "caption": ["x"]}, "TABLE: the column image is"),
    "a struct without bytes": ({"image": [{"path": "a"}], "caption": ["x"]}, "TABLE: the column image is struct<path"),
    "images that are null": ({"image": pa.array([None, b""], pa.binary()), "caption": ["x", "y"]},
        ["the image has zero bytes"] * 2),
    "a list of images": ({"image": [["a.png"]], "caption": ["x"]}, "TABLE cannot be read as"),
    "no rows": ({"image": pa.array([], pa.binary()), "caption": pa.array([], pa.string())}, "TABLE has no rows"),
    "no images": ({"image": pa.array([], pa.struct([("bytes", pa.binary())])), "caption": pa.array([], pa.string())},
        "TABLE has no rows"),
    "no questions": ({"image": pa.array([], pa.struct([("bytes", pa.binary())])), "question": pa.array([], pa.string()),
        "answer": pa.array([], pa.string())}, "TABLE has no rows"),
    "a question, a number": ({"image": ["a.png"], "question": [5], "answers": [[1]]}, ["the question is not text"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PARQUETS)
def test_tables_of_parquet(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.png").write_bytes(photo())
    columns, expected = PARQUETS[name]
    (tmp_path / "x.parquet").write_bytes(parquet(columns))
    found = table_outcome(tmp_path / "x.parquet")
    assert isinstance(found, str) == isinstance(expected, str)
    pairs = [(found, expected)] if isinstance(expected, str) else zip(found, expected, strict=True)
    assert all(str(output).startswith(str(part)) for output, part in pairs)


def test_damaged_parquet_is_a_sentence(tmp_path: Path) -> None:
    """Headers, pages and names of columns, wherever the damage is."""
    (tmp_path / "a.png").write_bytes(photo())
    whole = parquet({"image": ["a.png"] * 50, "caption": [f"word {n}" for n in range(50)]})
    inside = parquet({"image": [photo(n) for n in range(4)], "caption": ["x"] * 4})
    extra = parquet({"key": ["a", "b"], "captions": [["x"], ["y"]]})
    for raw in (whole, inside, extra):
        for place in range(4, len(raw), 29 if raw is whole else 97):
            harmed = raw[:place] + bytes([raw[place] ^ 0xFF]) + raw[place + 1 :]
            (tmp_path / "x.parquet").write_bytes(harmed)
            if raw is not extra:
                table_outcome(tmp_path / "x.parquet")
                continue
            told(lambda: CaptionTable(tmp_path / "x.parquet").captions("a"))


@pytest.mark.parametrize("suffix", [".tar", ".csv", ".parquet"])
def test_a_pipe_is_no_data(tmp_path: Path, suffix: str) -> None:
    """Opening one would wait for a writer for ever."""
    pipe = tmp_path / f"x{suffix}"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="is no regular file: expected a file, no folder, pipe, socket or device"):
        open_source(str(pipe))


@pytest.mark.parametrize(
    ("columns", "name"), [("image,caption,caption", "caption"), ("image,image,caption", "image"),
    ("image,question,question,answer", "question"), ("image,question,answer,answer", "answer")],
)  # fmt: skip
def test_a_column_twice_is_refused(tmp_path: Path, columns: str, name: str) -> None:
    """Nobody can tell which one counts."""
    names = columns.split(",")
    (tmp_path / "x.csv").write_text(columns + "\n" + ",".join("abcd"[: len(names)]) + "\n")
    pa.parquet.write_table(pa.table([pa.array(["a"])] * len(names), names), tmp_path / "x.parquet")
    for suffix in ("csv", "parquet"):
        with pytest.raises(ValueError, match=rf"x\.{suffix} has 2 columns named {name}\. Expected one\."):
            open_source(str(tmp_path / f"x.{suffix}"))


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("column", ["caption", "captions", "question"])
def test_a_small_table_of_endless_text_is_refused(tmp_path: Path, column: str, listed: bool) -> None:
    """A parquet of some kB whose every cell is the same long text: 10 GB once it is laid out."""
    cells = pa.DictionaryArray.from_arrays(pa.array(np.zeros(200_000, np.int32)), pa.array(["x" * 50_000]))
    if listed:
        cells = pa.ListArray.from_arrays(pa.array(np.arange(200_001, dtype=np.int32)), cells)
    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(200_000, np.int32)), pa.array(["a.png"]))
    columns = {"image": names, column: cells} | ({"answer": names} if column == "question" else {})
    path = tmp_path / "x.parquet"
    pa.parquet.write_table(pa.table(columns), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 100_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"x\.parquet: the columns .* hold more than 8,589,934,592 bytes of text"):
        open_source(str(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000

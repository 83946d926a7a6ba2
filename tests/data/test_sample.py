"""The parts of a sample, .txt, .json, .cls and .npy: what they are read as, or why they cannot be used."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiloword.data.open import open_source
from kiloword.data.sample import MAX_CAPTION, parse_beside, parse_label
from kiloword.types import BadSample, LabelSet
from tars import photo, write_tar


def outcome(text: bytes | None = None, meta: bytes | None = None) -> list[str] | str:
    """Captions, or the reason why there are none, in one line."""
    try:
        captions: list[str] = parse_beside(text, meta, None)["captions"]
        return captions or "no caption"
    except BadSample as error:
        return str(error)


NESTED = b"[" * 100_000
TEXTS: dict[bytes, list[str] | str] = {
    b"a\0b": ["a\0b"],
    b"\xef\xbb\xbfmark": ["mark"],
    b"\xff\xfea\0": "caption is not UTF-8",
    b"caf\xe9": "caption is not UTF-8",
    "👩‍👩‍👧‍👦 ".encode(): ["👩‍👩‍👧‍👦"],
    "\u00a0\u2003\u3000".encode(): "no caption",
    b" \r\n\t\v\f\n": "no caption",
    b"": "no caption",
    b"a\r\nb\rc\nd": ["a", "b\rc", "d"],
    b"x" * (MAX_CAPTION + 1): "caption has 1,000,001 characters, more than 1,000,000",
}
METAS: dict[bytes, list[str] | str] = {
    NESTED: "the json cannot be parsed",
    b'{"caption": "x", "a": NaN, "b": Infinity, "c": -1e999}': ["x"],
    b'{"caption": "x", "n": ' + b"9" * 5000 + b"}": "the json cannot be parsed",
    b'{"caption": "\\ud800"}': "caption is not UTF-8",
    b'{"captions": ["\\ud83d\\ude00"]}': ["😀"],
    b'{"caption": 3}': "the captions of the json are not strings",
    b'{"captions": [null]}': "the captions of the json are not strings",
    b'{"captions": []}': "no caption",
    b'\xef\xbb\xbf{"caption": "mark"}': ["mark"],
    b'{"caption": "x"} trailing': "the json cannot be parsed",
    b'"x"': "the json is not an object with `captions` or `caption`",
    b"": "the json cannot be parsed",
    b'{"question": ["x"], "answers": ["a"]}': "the question is not text",
}


def asks(**more: Any) -> bytes:
    return json.dumps({"question": "is it red?", **more}).encode()


METAS |= {
    asks(): "a question without an answer",
    asks(answers=["", " "]): "a question without an answer",
    asks(answers=[3]): 'the answers are not strings (write "3" for 3)',
    asks(answers=[{"text": "yes"}]): 'the answers are not strings (write "3" for 3)',
    asks(answers=["yes", "no "]): ["yes", "no"],
    asks(answers=[{"answer": "yes", "answer_id": 1}, {"answer": ""}]): ["yes"],
    asks(answer="yes", caption="red"): ["yes"],
    asks(captions=["a red star"]): ["a red star"],
    b'{"question": 5, "answer": "yes"}': "the question is not text",
}


@pytest.mark.parametrize("raw", TEXTS, ids=range(len(TEXTS)))
def test_texts(raw: bytes) -> None:
    assert outcome(raw) == TEXTS[raw]


@pytest.mark.parametrize("raw", METAS, ids=range(len(METAS)))
def test_metas(raw: bytes) -> None:
    assert outcome(b"text", raw) == METAS[raw]


# Labels

LABELS = {None: None, b"0": 0, b" 12\n": 12, b"9" * 18: 10**18 - 1, b"[2, 0]": LabelSet((0, 2))}


def test_classes() -> None:
    assert {raw: parse_label(raw) for raw in LABELS} == LABELS


@pytest.mark.parametrize(
    "raw", [b"", b"-1", b"1.0", b"9" * 19, b"[1, -2]", b"[1, true]", b'["a"]', b"[" * 9999, b"1 2", b"[1e3]", b"[[1]]"]
)
def test_bad_classes(raw: bytes) -> None:
    with pytest.raises(BadSample, match="class"):
        parse_label(raw)


def vector(values: Any, dtype: str = "int64") -> bytes:
    out = io.BytesIO()
    np.save(out, np.array(values, dtype))
    return out.getvalue()


def test_tars_of_several_classes(tmp_path: Path) -> None:
    members = [
        ("a.npy", vector([0, 1, 1])),
        ("a.png", photo()),
        ("b.png", photo()),
        ("b.cls", b"[2, 0]"),
        ("c.png", photo()),
        ("c.npy", vector([0.5, 0.1], "float32")),  # an embedding
        ("c.txt", b"a caption"),
        ("d.npy", vector([1, 0, 0])),
        ("d.cls", b"2"),
        ("d.png", photo()),
        ("lone.npy", vector([1, 0, 0])),
    ]
    source: Any = open_source(str(write_tar(tmp_path / "0.tar", members)))
    assert [source.key(row) for row in range(4)] == list("abcd")
    assert [source.record(row).label for row in range(4)] == [LabelSet((1, 2), 3), LabelSet((0, 2)), None, 2]
    assert source.labels.tolist() == [-1, -1, -1, 2]


def test_arrays_beside_labels_are_groups(tmp_path: Path) -> None:
    """As in DataComp's Dollar Street, GeoDE and FMoW; a json has precedence, an embedding is none."""
    members = [
        (f"{key}.{suffix}", raw)
        for key, array, more in (
            ("a", vector([3, 0]), []),
            ("b", vector([2.0, 0.5], "float32"), []),
            ("c", vector([1, 0]), [("json", b'{"region": "x"}')]),
            ("d", vector([0.5] * 65, "float32"), []),
            ("e", vector([[1]]), []),
        )
        for suffix, raw in [("npy", array), ("cls", b"1"), ("png", photo()), *more]
    ]
    source: Any = open_source(str(write_tar(tmp_path / "0.tar", members)))
    assert [source.record(row).label for row in range(5)] == [1] * 5
    infos = [source.record(row).info for row in range(5)]
    assert infos == [{"npy": [3, 0]}, {"npy": [2, 0.5]}, {"region": "x"}, {}, {}]
    assert [source.captions(row) for row in range(5)] == [[]] * 5


def test_other_arrays_are_no_labels(tmp_path: Path) -> None:
    """Nor one that would have to be unpickled."""
    out = io.BytesIO()
    np.save(out, np.array([{"a": tmp_path}], object), allow_pickle=True)
    numbers = (vector([[0, 1]]), vector([0, 2]), vector([0, 1])[:-1], vector([0])[:30])
    for raw in (*numbers, vector(["a"], "U1"), b"\x93NUMPY", out.getvalue()):
        assert parse_label(raw) is None

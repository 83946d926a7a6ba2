"""Limits on tokenizers and tables of strangers, at the limit and one above; files beside data, and where else."""

from __future__ import annotations

import base64
import errno
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kiloword.data import files
from kiloword.data.sources import embedded
from kiloword.data.sources.embedded import check_expanded
from kiloword.data.tars import catalogue
from kiloword.data.tars.shards import TarSource
from kiloword.data.text import tokenizer_file
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.data.text.tokenizer_file import Roles, check
from tars import pairs, write_tar

TOKENIZER = json.loads(Tokenizer.train(["a dog"] * 9, 270).to_bytes())


def refused(document: Any) -> str:
    try:
        check(json.dumps(document))
    except ValueError as error:
        return str(error)
    return "allowed"


def allowed(document: Any) -> None:
    check(json.dumps(document))


def test_words_of_a_vocabulary() -> None:
    allowed(TOKENIZER)
    allowed({})
    for model, said in (
        ({"vocab": {"x" * 513: 0, "y": 1}}, "a token of its vocabulary has 513 characters: expected at most 512"),
        ({"vocab": [["x" * 513, 0.5]]}, "a token of its vocabulary has 513 characters"),
        ({"unk_token": "x" * 65}, "its model has a unk_token of 65 characters"),
        ({"end_of_word_suffix": "x" * 65}, "its model has a end_of_word_suffix of 65"),
        ({"continuing_subword_prefix": "x" * 65}, "its model has a continuing_subword_prefix of 65"),
        ({"max_input_chars_per_word": 513}, "its model has words of 513 characters"),
        ({"dropout": 0.1}, "its model drops merges at random"),
    ):
        assert said in refused({"model": model})
    largest = {"vocab": {"x" * 512: 0}, "unk_token": "x" * 64, "max_input_chars_per_word": 512, "dropout": 0.0}
    allowed({"model": largest})
    allowed({"added_tokens": [{"content": "x" * (1 << 19)}] * 2})
    assert "its added tokens have 1,048,577 characters" in refused(
        {"added_tokens": [{"content": "x" * (1 << 19)}] * 2 + [{"content": "y"}]}
    )


def test_components_of_a_tokenizer() -> None:
    strip, lower = {"type": "Strip"}, {"type": "Lowercase"}
    allowed({"normalizer": {"type": "Sequence", "normalizers": [strip] * 24}})
    assert "has 25 components, too many more than once" in refused(
        {"normalizer": {"type": "Sequence", "normalizers": [strip] * 25}}
    )
    nested = {"type": "Sequence", "normalizers": [lower, {"type": "Sequence", "normalizers": [strip, lower]}]}
    assert "has 3 components, Lowercase, Lowercase more than once" in refused({"normalizer": nested})
    assert "its pre_tokenizer has the component 'Odd': expected one of ByteLevel" in refused(
        {"pre_tokenizer": {"type": "Odd"}}
    )
    for name in ("content", "prepend", "replacement", "prefix", "suffix", "delimiter", "pad_token"):
        allowed({"normalizer": {"type": "Prepend", name: "x" * 16}})
        assert f"its normalizer has a {name} of 17 characters" in refused(
            {"normalizer": {"type": "Prepend", name: "x" * 17}}
        )
    kind = "post_processor"
    for name in ("single", "pair"):
        allowed({kind: {"type": "TemplateProcessing", name: [0] * 16}})
        assert f"its {kind} puts 17 components in a row" in refused(
            {kind: {"type": "TemplateProcessing", name: [0] * 17}}
        )
    for wrong in ([], {"normalizer": 3}, {"normalizer": {}}, {"model": {"vocab": 3}}):
        assert "it is not what the tokenizers library writes" in refused(wrong)


def replaces(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"normalizer": {"type": "Replace", "pattern": pattern, "content": content}}


def test_replacements_never_make_a_text_longer() -> None:
    allowed(replaces({"String": "ab"}, "xy"))
    allowed(replaces({"Regex": r"\s+"}, " "))
    assert "its normalizer replaces 2 characters by 3: a text grows" in refused(replaces({"String": "ab"}, "xyz"))
    assert "replaces 1 characters by 2" in refused(replaces({"Regex": r"\s+"}, "  "))
    assert "replaces 0 characters by 0" in refused(replaces({"String": ""}, ""))
    assert "searches by the regular expression '(a+)+b'" in refused(replaces({"Regex": "(a+)+b"}, ""))


def charsmap(longest: int, cut: int = 0) -> dict[str, Any]:
    raw = (8).to_bytes(4, "little") + bytes(8) + b"ab\0" + b"x" * longest + b"\0"
    return {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw[: len(raw) - cut]).decode()}
    }


def test_tables_of_normalizers() -> None:
    allowed(charsmap(256))
    assert "its normalizer makes more than 256 bytes of a character" in refused(charsmap(257))
    allowed(charsmap(5, 9))
    assert "has a truncated table" in refused(charsmap(5, 10))


def test_files_of_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match=r"no tokenizer\.json at"):
        tokenizer_file.read(path)
    path.write_text(json.dumps(TOKENIZER))
    monkeypatch.setattr(tokenizer_file, "LARGEST", path.stat().st_size)
    assert tokenizer_file.read(path) == path.read_text()
    monkeypatch.setattr(tokenizer_file, "LARGEST", path.stat().st_size - 1)
    with pytest.raises(ValueError, match=rf"has {path.stat().st_size:,} bytes: expected a tokenizer\.json of at most"):
        tokenizer_file.read(path)
    monkeypatch.undo()
    path.write_text(json.dumps(TOKENIZER | {"model": {"type": "BPE", "vocab": {"x" * 600: 0}}}))
    with pytest.raises(
        ValueError, match=r"damaged tokenizer file .*tokenizer\.json: a token of its vocabulary has 600"
    ):
        tokenizer_file.read(path)
    roles = Roles(start=0, end=1, pad=2, mask=3, cls=4, unc=315, prefix=False)
    template: Any = json.loads(str(roles.template().__getstate__().decode()))
    assert Roles.read({"post_processor": template}, 300) == roles
    assert roles.ids() == {"start": 0, "end": 1, "pad": 2, "mask": 3, "cls": 4, "unc": 315}


@pytest.mark.parametrize("column", ["text", "lists"])
def test_text_of_a_table_counts_as_it_expands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str) -> None:
    """Ten times the same cell is stored once."""
    cells = ["x" * 1000] * 10 if column == "text" else [["x" * 600, "x" * 400]] * 10
    pq.write_table(pa.table({column: cells, "other": ["y" * 9999] * 10}), tmp_path / "x.parquet")
    monkeypatch.setattr(embedded, "MAX_TABLE", 10_000)
    check_expanded(tmp_path / "x.parquet", [column])
    monkeypatch.setattr(embedded, "MAX_TABLE", 9_999)
    with pytest.raises(ValueError, match=f"the columns {column} hold more than 9,999 bytes of text"):
        check_expanded(tmp_path / "x.parquet", [column])


def test_files_are_kept_beside_the_data_or_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, inside = tmp_path / "data" / "0.tar", tmp_path / "cache"
    data.parent.mkdir()
    data.write_bytes(b"x")
    beside, kept = data.with_name("0.tar.new"), Path(files.fallback(str(data), ".new", str(inside)))
    assert files.places(data, ".new") == [beside, kept]
    data.parent.chmod(0o555)
    try:
        assert files.places(data, ".new") == [kept]
        assert files.write(data, ".new", lambda file: None) == kept
        assert kept.read_bytes() == b""
    finally:
        data.parent.chmod(0o755)
    assert files.write(data, ".new", lambda file: (file.write(b"new"), None)[1]) == beside
    data.parent.chmod(0o555)
    try:
        assert files.places(data, ".new") == [beside, kept], "what lies there is read"
    finally:
        data.parent.chmod(0o755)

    def full(file: BinaryIO) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(
        ValueError, match=rf"{beside}: No space left on device; {kept}: No space left .*Set KILOWORD_CACHE"
    ):
        files.write(data, ".new", full)
    assert beside.read_bytes() == b"new"
    monkeypatch.delenv("KILOWORD_CACHE")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert files.folder() == Path("/home/somebody/.cache/kiloword")
    assert files.fallback("a/../0.tar", ".x", "/c") == files.fallback(os.path.abspath("0.tar"), ".x", "/c")


def test_a_catalogue_is_kept_from_its_least_number_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tars = [write_tar(tmp_path / f"{n}.tar", pairs(n + 1)) for n in range(3)]
    monkeypatch.setattr(catalogue, "LEAST", 4)
    first = TarSource("x", tars)
    assert not list((tmp_path / "cache").glob("*.kwcatalogue"))
    monkeypatch.setattr(catalogue, "LEAST", 3)
    for _ in range(2):
        again = TarSource("x", tars)
        assert (again.fingerprint, len(again), again._digests) == (first.fingerprint, 6, first._digests)
        (file,) = (tmp_path / "cache").glob("*.kwcatalogue")
    assert file.name.startswith(files.fallback(str(tars[0]), "", "").lstrip("/")[:24])
    entries = catalogue._read(file)
    assert [entry.header.samples for entry in entries.values()] == [1, 2, 3]
    assert all(entry.header.blocks == () for entry in entries.values())
    assert [entry.stamps[0] for entry in entries.values()] == [(t.stat().st_size, t.stat().st_mtime_ns) for t in tars]
    opened: list[Path] = []
    real = catalogue.open_header
    monkeypatch.setattr(catalogue, "open_header", lambda tar: (opened.append(tar), real(tar))[1])
    write_tar(tars[1], pairs(9))
    assert [header.samples for header in catalogue.headers(tars)] == [1, 9, 3]
    assert set(opened) == {tars[1]}
    opened.clear()
    assert [header.samples for header in catalogue.headers(tars)] == [1, 9, 3]
    assert opened == []
    raw = file.read_bytes()
    for wrong in (raw[:-1], b"", raw[1:], b"{}"):
        file.write_bytes(wrong)
        assert catalogue._read(file) == {}
    assert [header.samples for header in catalogue.headers(tars[::-1])] == [3, 9, 1]
    assert np.array_equal(TarSource("x", tars)._ends, [1, 10, 13])

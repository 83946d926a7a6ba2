"""What headers of http answers mean: sizes, dates, checksums, waits, refusals, as the RFCs and clouds write them."""

from __future__ import annotations

import email.utils
import time
import urllib.error
from email.message import Message
from types import SimpleNamespace
from typing import Any

import pytest

from kiloword.addresses import Address
from kiloword.data.remote import http_files
from kiloword.data.remote.config import RemoteConfig
from kiloword.data.remote.errors import Fault, Unreachable
from kiloword.data.remote.http_files import Http
from kiloword.data.remote.transport import LARGEST, Checksum, Stat, checked_size, decimal

MD5, SHA = "0" * 31 + "1", "ab" * 32
DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


def headers(**values: str) -> Message:
    made = Message()
    for name, value in values.items():
        made[name.replace("_", "-")] = value
    return made


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"Repr_Digest": "sha-256=:q6urq6urq6urq6urq6urq6urq6urq6urq6urq6urq6s=:"}, Checksum("sha256", SHA)),
        ({"Digest": "SHA-256=q6urq6urq6urq6urq6urq6urq6urq6urq6urq6urq6s="}, Checksum("sha256", SHA)),
        ({"x_goog_hash": "crc32c=AAAAAA==,md5=AAAAAAAAAAAAAAAAAAAAAQ=="}, Checksum("md5", MD5)),
        ({"Digest": "sha-256=!!", "x_goog_hash": "md5=AAAAAAAAAAAAAAAAAAAAAQ=="}, Checksum("md5", MD5)),
        ({"Server": "AmazonS3", "ETag": f'"{MD5}"'}, Checksum("md5", MD5)),
        ({"Server": "AmazonS3", "ETag": f'"{MD5}"', "x_amz_server_side_encryption": "AES256"}, Checksum("md5", MD5)),
        ({"Server": "AmazonS3", "ETag": f'"{MD5}"', "x_amz_server_side_encryption": "aws:kms"}, None),
        ({"Server": "AmazonS3", "ETag": f'"{MD5}-2"'}, None),  # of several parts
        ({"Server": "nginx", "ETag": f'"{MD5}"'}, None),
        ({}, None),
    ],
)
def test_checksums(given: dict[str, str], expected: Checksum | None) -> None:
    assert http_files._checksum(headers(**given)) == expected


@pytest.mark.parametrize(
    ("given", "tag"),
    [
        ({"ETag": '"abc"'}, '"abc"'),
        ({"ETag": 'W/"abc"'}, '"abc"'),
        ({"ETag": '"abc"', "Last_Modified": DATE}, DATE),  # servers of one cluster may give a file several
        ({"ETag": f'"{MD5}"', "Last_Modified": DATE}, f'"{MD5}"'),
        ({"ETag": f'"{MD5}-12"', "Last_Modified": DATE}, f'"{MD5}-12"'),
        ({"Last_Modified": DATE}, DATE),
        ({}, ""),
        ({"ETag": "x" * 300}, "x" * 200),
    ],
)
def test_what_changes_with_the_file(given: dict[str, str], tag: str) -> None:
    assert http_files._tag(headers(**given)) == tag


def test_waits_that_a_server_asks_for() -> None:
    assert http_files._retry_after(headers(Retry_After="7")) == 7.0
    soon = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert 90 < http_files._retry_after(headers(Retry_After=soon)) <= 100
    for nothing in (DATE, "soon", "-3", ""):
        assert http_files._retry_after(headers(Retry_After=nothing)) == 0.0
    assert http_files._retry_after(headers()) == 0.0
    assert http_files.date(DATE) == 1445412480.0
    assert http_files.date("Wed, 99 Oct 2015") is None


def answer(status: int, **values: str) -> Any:
    return SimpleNamespace(status=status, headers=headers(**values))


def test_lengths() -> None:
    assert http_files._length(answer(206, Content_Range="bytes 5-9/1234 ", Content_Length="5")) == "1234"
    assert http_files._length(answer(200, Content_Range="bytes 5-9/1234", Content_Length=" 5 ")) == "5"
    assert http_files._length(answer(200)) == ""
    assert [decimal(text) for text in ("0", "12", "9" * 18)] == [0, 12, 10**18 - 1]
    assert [decimal(text) for text in ("", "-1", "1.5", "9" * 19, "²")] == [None] * 5
    address = Address("https://data.org/0.tar")
    assert [checked_size(claim, address) for claim in ("12", str(LARGEST))] == [12, LARGEST]
    for claim, message in (
        (str(LARGEST + 1), f"{LARGEST + 1:,} bytes. Expected at most"),
        ("", "does not say how long"),
        ("1e9", "'1e9' as its length"),
    ):
        with pytest.raises(Unreachable, match=f"https://data.org/0.tar: .*{message}"):
            checked_size(claim, address)


@pytest.fixture
def file() -> Http:
    return Http(Address("https://data.org/0.tar"), RemoteConfig())


def refused(file: Http, code: int, reason: str = "Because", **values: str) -> Exception:
    return file._refused(urllib.error.HTTPError("u", code, reason, headers(**values), None))


def test_refusals(file: Http) -> None:
    """What may be over soon is tried again, after the time that the server asks for; all else is said."""
    for code in (500, 503, 408, 425, 429):
        fault = refused(file, code, Retry_After="3")
        assert isinstance(fault, Fault)
        assert f"the server answers {code} Because" in str(fault)
        assert fault.wait == 3.0
    for code, words in (
        (401, "401: it asks for a login."),
        (403, "403: access denied."),
        (404, "404: no such file."),
        (410, "410: no such file."),
        (451, "451 Because."),
        (499, "499 Because."),
    ):
        error = refused(file, code)
        assert isinstance(error, Unreachable)
        assert f"https://data.org/0.tar: the server answers {words}" in str(error)
    long = str(refused(file, 500, "x" * 200))
    assert "x" * 80 in long
    assert "x" * 81 not in long


def test_another_file_is_no_part_of_this_one(file: Http) -> None:
    """How many bytes come before the part; what shows that the file has changed meanwhile."""
    stat = Stat(100, '"a"', True)
    part = {"ETag": '"a"', "Content_Range": "bytes 40-59/100"}
    assert file._check(answer(206, **part), stat, 40) == 0
    assert file._check(answer(200, ETag='"a"', Content_Length="100"), stat, 40) == 40
    assert file._check(answer(206, **part), Stat(100, "", True), 40) == 0  # nothing was known of it
    for changed, message in (
        (part | {"ETag": '"b"'}, 'has changed since it was opened: "b", not "a"'),
        ({"Content_Range": "bytes 40-59/100"}, "undated, not"),
        (part | {"Content_Range": "bytes 40-59/101"}, "has 101 bytes, not 100"),
        (part | {"Content_Range": "bytes 4-59/100"}, "asked for bytes from 40, the server sends bytes 4-59/100"),
    ):
        with pytest.raises(Fault, match=message):
            file._check(answer(206, **changed), stat, 40)


def test_what_came_although_it_was_not_asked_for(file: Http) -> None:
    closed: list[int] = []
    for coding in ("", "identity", " Identity "):
        plain = answer(200, Content_Encoding=coding)
        assert file._plain(plain) is plain
    with pytest.raises(Unreachable, match="the server compresses it \\(gzip\\)"):
        file._plain(SimpleNamespace(headers=headers(Content_Encoding="GZip"), close=lambda: closed.append(1)))
    assert closed == [1]


def test_errors_in_words() -> None:
    assert http_files._words(TimeoutError()) == "no byte came in time"
    assert http_files._words(ConnectionResetError(104, "Connection Reset")) == "connection reset"
    assert http_files._words(OSError("Odd")) == "odd"
    assert http_files._words(OSError()) == "oserror"
    assert http_files._words(ValueError("Kept")) == "Kept"
    assert http_files._words(ValueError()) == "ValueError"

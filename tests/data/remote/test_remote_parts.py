"""Remote files part by part, without a server: patience, file systems, answers, settings, what is fetched ahead."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import threading
import time
import urllib.error
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from kiloword.addresses import Address
from kiloword.data.edits import MixtureSource
from kiloword.data.remote import errors, http_files, index
from kiloword.data.remote import sets as remote
from kiloword.data.remote.ahead import Ahead, ahead_of
from kiloword.data.remote.config import RemoteConfig, remote_config
from kiloword.data.remote.errors import PROGRESS, Fault, Patience, TooLarge, Unreachable
from kiloword.data.remote.file import RemoteFile
from kiloword.data.remote.fsspec_files import Fsspec, _checksum
from kiloword.data.remote.http_files import Http
from kiloword.data.remote.index import Whole, open_remote_index
from kiloword.data.remote.transport import Checksum, Stat, bounded
from kiloword.data.sources.open import open_source
from kiloword.data.tars.shards import TarSource
from tars import pairs, write_tar

ADDRESS = Address("https://data.org/0.tar")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(errors, "time", SimpleNamespace(sleep=slept.append))
    return slept


def test_waits_double_to_a_minute_and_are_what_a_server_asks_for(waits: list[float]) -> None:
    patience = Patience(ADDRESS, RemoteConfig(retries=9, backoff=1.0))
    for n in range(8):
        patience.again(Fault("busy"))
        longest = min(2.0**n, 60.0)
        assert longest / 2 <= waits[-1] <= longest
    patience.again(Fault("busy", 90.0))
    assert waits[-1] == 90.0
    with pytest.raises(Unreachable, match=r"https://data\.org/0\.tar: busy \(tried 10 times\)\. Check the network"):
        patience.again(Fault("busy"))
    assert len(waits) == 9
    Patience(ADDRESS, RemoteConfig(retries=1, backoff=0)).again(Fault("busy", 1e6))
    assert waits[-1] == 120.0
    with pytest.raises(Unreachable, match=r"busy \(tried once\)"):
        Patience(ADDRESS, RemoteConfig(retries=0)).again(Fault("busy"))


def test_a_download_that_advances_is_never_given_up(waits: list[float]) -> None:
    patience = Patience(ADDRESS, RemoteConfig(retries=1))
    for _ in range(4):
        patience.again(Fault("cut"))
        patience.progress(PROGRESS)
    patience.again(Fault("cut"))
    patience.progress(PROGRESS - 1)
    with pytest.raises(Unreachable, match="cut"):
        patience.again(Fault("cut"))


class Shelf(MemoryFileSystem):  # type: ignore[misc]
    """Says of a file what `about` says."""

    protocol = "shelf"
    store: dict[str, Any] = {}  # noqa: RUF012  # as in the parent
    about: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("shelf://", "memory://")))

    def info(self, path: str, **options: Any) -> Any:
        return {"name": path, "type": "file", "size": 9} | Shelf.about


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Fsspec:
    fsspec.register_implementation("shelf", Shelf, clobber=True)
    Shelf().pipe_file("/b/0.tar", b"123456789")
    Shelf().pipe_file("/b/inner/1.tar", b"1")
    monkeypatch.setattr(Shelf, "about", {})
    return Fsspec(Address("shelf://b/0.tar"), RemoteConfig(timeout=20))


def test_what_a_file_system_says_of_a_file(shelf: Fsspec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shelf.stat() == Stat(9, "", True)
    for about, expected in (
        ({"ETag": "e", "mtime": 3}, Stat(9, "e", True)),
        ({"mtime": 3}, Stat(9, "3", True)),
        (
            {"md5Hash": "AAAAAAAAAAAAAAAAAAAAAQ=="},
            Stat(9, "AAAAAAAAAAAAAAAAAAAAAQ==", True, Checksum("md5", "0" * 31 + "1")),
        ),
    ):
        monkeypatch.setattr(Shelf, "about", about)
        assert shelf.stat() == expected
    for wrong, said in (
        ({"type": "directory"}, r"0\.tar is a folder\. Write a / at its end"),
        ({"size": None}, "does not say how long it is"),
        ({"size": -3}, "gives '-3' as its length"),
        ({"size": 10**14}, "it has 100,000,000,000,000 bytes"),
    ):
        monkeypatch.setattr(Shelf, "about", wrong)
        with pytest.raises(Unreachable, match=said):
            shelf.stat()
    assert _checksum({"lfs": {"sha256": "ab"}, "md5Hash": "!"}) == Checksum("sha256", "ab")
    assert [_checksum(info) for info in ({"lfs": "x"}, {"md5Hash": "!"}, {"lfs": {}, "md5Hash": 3})] == [None] * 3


def test_what_a_file_system_gives(shelf: Fsspec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiloword.data.remote.fsspec_files._AT_ONCE", 4)
    stat = Stat(9, "", True)
    assert list(shelf.read(stat, 0, 9)) == [b"1234", b"5678", b"9"]
    assert list(shelf.read(stat, 2, 6)) == [b"3456"]
    assert list(shelf.read(stat, 6, 20)) == [b"789"], "a short answer is the last"
    assert shelf.small(9) == b"123456789"
    with pytest.raises(TooLarge, match=r"0\.tar has more than 8 bytes"):
        shelf.small(8)
    assert Fsspec(Address("shelf://b/none"), RemoteConfig()).small(9) is None
    entries = [{"name": "/b/0.tar", "type": "file"}, {"name": "/b/inner", "type": "directory"}]
    monkeypatch.setattr(Shelf, "ls", lambda self, path, detail: entries)
    monkeypatch.setattr(Shelf, "unstrip_protocol", lambda self, name: f"shelf:/{name}")
    inside = Fsspec(Address("shelf://b/", "login", "?q=1"), RemoteConfig()).folder()
    assert inside == [Address("shelf://b/0.tar", "login", "?q=1")]
    with pytest.raises(Unreachable, match=r"nosuch://b/x cannot be opened .*pip install 'kiloword\[remote\]'"):
        Fsspec(Address("nosuch://b/x"), RemoteConfig()).stat()
    with pytest.raises(Fault, match="slow"):
        shelf._call(lambda fs, path: _raise(Fault("slow", 7.0)))
    with pytest.raises(Fault, match=r"^OSError: odd$"):
        shelf._call(lambda fs, path: _raise(OSError("odd")))
    with pytest.raises(Unreachable, match=r"access denied \(no\)"):
        shelf._call(lambda fs, path: _raise(PermissionError("no")))


def _raise(error: Exception) -> None:
    raise error


def test_a_call_is_waited_for_four_time_outs() -> None:
    assert bounded(lambda: 3, 5) == 3
    with pytest.raises(KeyError, match="mine"):
        bounded(lambda: _raise(KeyError("mine")), 5)
    late: list[int] = []
    with pytest.raises(Fault, match=r"no answer in 0\.04 s"):
        bounded(lambda: time.sleep(0.3) or 7, 0.01, late.append)
    deadline = time.monotonic() + 60
    while not late and time.monotonic() < deadline:
        time.sleep(0.01)
    assert late == [7], "who comes too late is let go"


class Answer(io.BytesIO):
    """A body that comes a few bytes at a time."""

    chunked, status = False, 200

    def __init__(self, body: bytes, step: int = 1 << 20, **headers: str) -> None:
        super().__init__(body)
        self.step, self.headers = step, Message()
        for name, value in headers.items():
            self.headers[name.replace("_", "-")] = value

    def read1(self, size: int = -1) -> bytes:
        return self.read(min(size, self.step))


def http(monkeypatch: pytest.MonkeyPatch, answer: Any) -> Http:
    def request(*_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(http_files, "request", request)
    return Http(ADDRESS, RemoteConfig(timeout=10))


def refusal(code: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("u", code, "Because", Message(), None)


def test_empty_files_and_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert http(monkeypatch, refusal(416)).stat() == Stat(0, "", True)
    for code in (400, 404):
        with pytest.raises(Unreachable, match=f"the server answers {code}"):
            http(monkeypatch, refusal(code)).stat()
    for code in (403, 404, 410):
        assert http(monkeypatch, refusal(code)).small(9) is None
    with pytest.raises(Fault, match="the server answers 500"):
        http(monkeypatch, refusal(500)).small(9)
    assert http(monkeypatch, Answer(b"123456789")).small(9) == b"123456789"
    assert http(monkeypatch, Answer(b"123", Content_Length="3")).small(9) == b"123"
    for answer in (Answer(b"1234567890"), Answer(b"", Content_Length="10")):
        with pytest.raises(TooLarge, match="more than 9 bytes"):
            http(monkeypatch, answer).small(9)
    with pytest.raises(Fault, match="the body ended after 3 of 5 bytes"):
        http(monkeypatch, Answer(b"123", Content_Length="5")).small(9)
    with pytest.raises(Unreachable, match="no URL that can be opened"):
        http(monkeypatch, ValueError("Invalid IPv6 URL"))._get(None)


@pytest.mark.parametrize("step", [1, 3, 100])
def test_servers_without_ranges_are_read_past_what_comes_before(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    body = bytes(range(50))
    for start, stop in ((0, 50), (7, 9), (49, 50)):
        file = http(monkeypatch, Answer(body, step, Content_Length="50"))
        assert b"".join(file.read(Stat(50, "", False), start, stop)) == body[start:stop]


@pytest.mark.parametrize(("each", "fails"), [(99_000, False), (101, True)])
def test_bodies_below_a_kilobyte_a_second_are_given_up(monkeypatch: pytest.MonkeyPatch, each: int, fails: bool) -> None:
    """Looked at once a time-out of 10 seconds; here a read takes 6."""
    now = iter(range(0, 10**6, 6))
    monkeypatch.setattr(http_files, "time", SimpleNamespace(monotonic=lambda: next(now)))
    file = http(monkeypatch, None)
    answer: Any = Answer(b"x" * (5 * each), each)
    if fails:
        with pytest.raises(Fault, match="slower than 1,000 bytes a second"):
            list(file._chunks(answer, 5 * each))
    else:
        assert sum(map(len, file._chunks(answer, 10**6))) == 5 * each


def test_settings_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", "limit=2t block=3K ahead=7 timeout=1.5 threads=2 hosts=A.org,*.b.org c:1")
    config = remote_config()
    assert (config.limit, config.block, config.ahead, config.timeout, config.threads) == (2e12, 3e3, 7, 1.5, 2)
    assert isinstance(config.ahead, int)
    assert config.hosts == ("a.org", "*.b.org", "c:1")
    assert [config.allows(host) for host in ("A.ORG.", "x.b.org", "b.org", "xa.org")] == [True, True, False, False]
    assert RemoteConfig().allows("any")
    for name, low, most in (("retries", 0, 1000), ("timeout", 0.001, 86_400), ("threads", 1, 256), ("ahead", 0, 10**9)):
        for value in (low - 0.01 if name == "timeout" else low - 1, most + 1):
            with pytest.raises(ValueError, match=f"KILOWORD_REMOTE: {name} is .*: expected {low:g} to {most}"):
                RemoteConfig(**{name: value})
        RemoteConfig(**{name: low})
        RemoteConfig(**{name: most})
    monkeypatch.setenv("KILOWORD_REMOTE", "retries=1e300")
    with pytest.raises(ValueError, match=r"retries is 1e\+300: expected 0 to 1000"):
        remote_config()


def local(path: Path, block: float = 700, checksum: Checksum | None = None, ranged: bool = True) -> RemoteFile:
    """A file of this machine as a remote one."""
    address = Address(f"file://{path}")
    return RemoteFile(
        address, Stat(path.stat().st_size, "tag", ranged, checksum), RemoteConfig(block=block, limit=10**6)
    )


@pytest.mark.parametrize("block", [512, 700, 10**6])
def test_any_bytes_of_a_file_come_by_its_blocks(tmp_path: Path, block: int) -> None:
    raw = os.urandom(2100)
    (tmp_path / "x").write_bytes(raw)
    file = local(tmp_path / "x", block)
    assert file.block_size == min(block, 2100)
    for offset, size in ((0, 2100), (699, 2), (1400, 700), (2099, 10), (2100, 5), (512, 0)):
        assert file.read(offset, size) == raw[offset : offset + size]
    size = file.block_size
    covering = [list(file.covering(start, stop)) for start, stop in ((0, 1), (size - 1, size), (size, size + 1))]
    assert covering == [[0], [0], [1]]
    file.drop()
    file.fetch(0)
    names = {one.name for one in (tmp_path / "cache/remote/blocks").iterdir()} - {"total"}
    assert names == {file.block_name(0)}
    whole = Whole(file)
    assert [whole.read(*span) for span in ((0, 600), (1500, 9), (3, 4))] == [raw[:600], raw[1500:1509], raw[3:7]]
    whole.finish()
    assert whole.checksum.hexdigest() == hashlib.sha256(raw).hexdigest()
    parts = [raw[at : at + file.block_size] for at in range(0, 2100, file.block_size)]
    assert [one.digest() for one in whole.sums] == [hashlib.sha256(part).digest() for part in parts]


def test_an_index_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar = local(write_tar(tmp_path / "0.tar", pairs(2)))
    with monkeypatch.context() as patch:
        patch.setattr(index, "header_file", lambda path: None)
        with pytest.raises(ValueError, match=r"was written, but cannot be read\. Set KILOWORD_CACHE to a local disk"):
            open_remote_index(tar)
    with (tmp_path / "cache/remote/index" / f"{tar.index.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("KILOWORD_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot keep an index \(Not a directory\)\. Set KILOWORD_CACHE to a folder"):
        open_remote_index(local(tmp_path / "0.tar"))


def test_files_of_this_machine_stay_where_they_are_and_others_come(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"a,b\n")
    assert remote.local(tmp_path / "x.csv") == remote.local(str(tmp_path / "x.csv")) == tmp_path / "x.csv"
    there = remote.local(f"file://{tmp_path}/x.csv")
    assert there.parent == tmp_path / "cache/remote/tables"
    assert there.read_bytes() == b"a,b\n"


def test_a_long_indexing_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in range(3):
        write_tar(tmp_path / f"{n}.tar", pairs(2))
    monkeypatch.setattr(remote, "_SAY", -1.0)
    makers: list[str] = []
    monkeypatch.setattr(remote, "open_remote_index", lambda tar: makers.append(threading.current_thread().name))
    open_source(f"file://{tmp_path}/")
    assert len(makers) == 3
    assert "MainThread" not in makers, "several at once"
    said = capsys.readouterr().err
    assert [f"{n} of 3 tars are indexed" in said for n in (0, 1, 2, 3)] == [False, True, True, True]


class Queue(list[Any]):
    put = list.append


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TarSource:
    """A remote set of 3 tars of 4 samples each, a block a tar; nothing is fetched in the background."""
    for n in range(3):
        write_tar(tmp_path / f"{n}.tar", pairs(4))
    monkeypatch.setenv("KILOWORD_REMOTE", "ahead=5 threads=2")
    monkeypatch.setattr(Ahead, "_start", lambda self: None)
    source: Any = open_source(f"file://{tmp_path}/")
    return source


def test_what_the_next_steps_need_is_asked_for_once(far: TarSource) -> None:
    """A step of two rows; three more are looked at, up to the end."""
    made = ahead_of(far, lambda step: (far, range(2 * step, 2 * step + 2)), 2, stop=6)
    assert made is not None
    assert made.most == 3
    made._owner, made._queue = os.getpid(), Queue()  # type: ignore[assignment]
    asked = []
    for step in range(6):
        made.at(step)
        asked.append([tar.name for tar, _ in made._queue])  # type: ignore[attr-defined]
    assert asked == [["0.tar", "1.tar"], *[["0.tar", "1.tar", "2.tar"]] * 5]
    assert [file.name for file, _ in made._waited] == ["2.tar"], "what was needed before is forgotten"
    copied = Ahead.__new__(Ahead)
    copied.__setstate__({"rows_of": made.rows_of, "most": 3, "stop": 6})
    assert (copied.most, copied.stop, copied._next, copied._waited) == (3, 6, 0, {})
    made.most = 0
    made._queue.clear()  # type: ignore[attr-defined]
    made._next = 0
    made.at(0)
    assert not made._queue


def test_what_is_near_is_not_fetched_ahead(far: TarSource, tmp_path: Path) -> None:
    near = TarSource("x", [write_tar(tmp_path / "near.tar", pairs(2))])
    assert ahead_of(near, lambda step: (near, []), 2) is None
    mixed = MixtureSource([near, far], [1.0, 1.0])
    made = ahead_of(mixed, lambda step: (mixed, range(14)), 14)
    assert made is not None
    made._owner, made._queue = os.getpid(), Queue()  # type: ignore[assignment]
    made.at(0)
    assert [tar.name for tar, _ in made._queue] == ["0.tar", "1.tar", "2.tar"]  # type: ignore[attr-defined]
    assert far.remote_blocks(0) == [(far.tars[0], 0)]

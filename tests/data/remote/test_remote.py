"""Remote shards: the same data as local ones, whatever the network does; each byte fetched once, few kept."""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from kiloword.config import recipes
from kiloword.config.recipes import DataConfig, TextConfig
from kiloword.data.inspect import check
from kiloword.data.loader import Loader
from kiloword.data.reading import eval_batches
from kiloword.data.remote import cache as remote_cache
from kiloword.data.remote import index as remote_index
from kiloword.data.remote.cache import FileCache
from kiloword.data.remote.config import RemoteConfig, remote_config
from kiloword.data.remote.errors import Unreachable
from kiloword.data.sampler import Order
from kiloword.data.sources.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.defaults import default_recipe
from kiloword.randomness import Draw
from kiloword.training.log import read_metrics
from kiloword.training.loop import RunOptions, train
from kiloword.types import Source
from servers import Server
from tars import pairs, photo, write_tar

QUICK = "backoff=0.01 timeout=10 ahead=0"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KILOWORD_REMOTE", QUICK)
    monkeypatch.setenv("no_proxy", "*")


def shards(folder: Path, count: int, rows: int = 6) -> dict[str, bytes]:
    """Small tars in a folder, and as a server serves them."""
    tars = [write_tar(folder / f"{n:02d}.tar", pairs(rows, n * rows)) for n in range(count)]
    return {tar.name: tar.read_bytes() for tar in tars}


def everything(source: Source) -> list[tuple[str, object, list[str]]]:
    return [(r.key, r.image, r.captions) for r in map(source.record, range(len(source)))]


def forget(tmp_path: Path) -> None:
    """All blocks, as if they had been given up; indexes stay."""
    for block in (tmp_path / "cache/remote/blocks").iterdir():
        block.unlink()


FAULTS = [
    "stall",
    "hang",
    "cut",
    "short",
    "shorter",
    "drop",
    "page",
    "redirect",
    "500",
    "503:0",
    "429:0",
    "408",
    "drip",
]


@pytest.mark.parametrize("block", [pytest.param("8MB", marks=pytest.mark.slow), "5000"])
def test_remote_equals_local_under_every_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", f"{QUICK} block={block} timeout=0.3 backoff=0.001 retries=30")
    files = shards(tmp_path / "data", len(FAULTS), rows=2)
    local = open_source(str(tmp_path / "data"))
    with Server(files) as server:
        for name, fault in zip(files, FAULTS, strict=True):
            server.faults[f"{name} probe"] = [fault] if fault not in ("drip", "cut", "page") else []
            server.faults[name] = [fault]
        remote = open_source(f"{server.url}/{{00..{len(FAULTS) - 1:02d}}}.tar")
        assert remote.fingerprint == local.fingerprint
        assert everything(remote) == everything(local)
        forget(tmp_path)
        for name, fault in zip(files, FAULTS, strict=True):
            server.faults[name] = [fault, "500", fault]
        assert everything(pickle.loads(pickle.dumps(remote))) == everything(local)
        assert not any(server.faults.values())


@pytest.mark.parametrize("ranges", [True, False])
def test_servers_without_ranges_send_whole_tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", f"{QUICK} block=3000")
    files = shards(tmp_path / "data", 2, rows=8)
    with Server(files, ranges=ranges) as server:
        for name in files:
            server.faults[name] = ["cut"]
        remote = open_source(f"{server.url}/{{00..01}}.tar")
        assert everything(remote) == everything(open_source(str(tmp_path / "data")))
        size = len(files["00.tar"])
        assert server.asked["00.tar"] == (-(-size // 3000) if ranges else 1) + 1


def test_one_process_fetches_for_all(tmp_path: Path) -> None:
    files = shards(tmp_path / "data", 6)
    context, expected = get_context("fork"), everything(open_source(str(tmp_path / "data")))
    with Server(files) as server, context.Pool(4) as pool:
        src = f"{server.url}/{{00..05}}.tar"
        assert pool.map(_everything, [src] * 4) == [expected] * 4
        assert [server.asked[name] for name in files] == [1] * 6
        forget(tmp_path)
        assert pool.map(_everything, [src] * 4) == [expected] * 4
        assert [server.asked[name] for name in files] == [2] * 6


def _everything(src: str) -> list[tuple[str, object, list[str]]]:
    return everything(open_source(src))


class Peak:
    """The most bytes in a folder of blocks, looked at whenever this process, or one forked from it, adds some."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.real, self._most = folder, remote_cache._allocate, RawValue("q", 0)
        monkeypatch.setattr(remote_cache, "_allocate", self.allocate)

    def allocate(self, fd: int, size: int) -> bool:
        """Called under the lock of all that add."""
        done = self.real(fd, size)
        self._most.value = max(self.most, bytes_of(self.folder))
        return done

    @property
    def most(self) -> int:
        return int(self._most.value)


def bytes_of(folder: Path) -> int:
    """Bytes of the blocks in a folder, whose lock the caller holds: nothing is added or renamed."""
    sizes = []
    for file in os.scandir(folder):
        with suppress(FileNotFoundError):  # its maker failed
            sizes.append(0 if file.name == "total" else file.stat().st_size)
    return sum(sizes)


def loader(source: Source, workers: int = 0) -> Loader:
    order = Order(len(source), 6, seed=1)
    return Loader(
        source,
        order,
        DataConfig(),
        TextConfig(context=16, vocab=300),
        16,
        Tokenizer.train(["image 1"], 300),
        workers=workers,
    )


@pytest.mark.parametrize("ahead", [0, 24])
def test_the_cache_keeps_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """12 shards in a cache of 3, read in random order by two processes."""
    files = shards(tmp_path / "data", 12)
    limit = 3 * len(files["00.tar"])
    monkeypatch.setenv("KILOWORD_REMOTE", f"backoff=0.01 ahead={ahead} limit={limit} block={limit // 3} threads=1")
    peak = Peak(tmp_path / "cache/remote/blocks", monkeypatch)
    with Server(files) as server:
        batches = list(loader(open_source(f"{server.url}/{{00..11}}.tar"), workers=2).batches(0, 24))
        fetched = sum(server.asked.values())
    expected = list(loader(open_source(str(tmp_path / "data"))).batches(0, 24))
    assert [b.images.tolist() for b in batches] == [b.images.tolist() for b in expected]
    assert [b.texts.ids.tolist() for b in batches] == [b.texts.ids.tolist() for b in expected]
    assert fetched > 24  # shards came again and again
    assert limit / 3 < peak.most <= limit


def test_oldest_pieces_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = shards(tmp_path / "data", 5)
    limit = 4 * len(files["00.tar"])
    monkeypatch.setenv("KILOWORD_REMOTE", f"{QUICK} limit={limit} block={limit // 4}")
    with Server(files) as server:
        source = open_source(f"{server.url}/{{00..04}}.tar")
        forget(tmp_path)
        dead = tmp_path / "cache/remote/blocks/dead-000000.part"  # of a process that was killed
        dead.write_bytes(b"x")
        for shard in (0, 1, 2, 0, 3, 4):  # the second and third go for the last two
            source.record(6 * shard)
            time.sleep(0.02)
        assert not dead.exists()
        server.asked.clear()
        for shard in (0, 3, 4):
            source.record(6 * shard)
        assert not server.asked
        source.record(6)
        assert server.asked == {"01.tar": 1}


@contextmanager
def killed_when(path: Path, pattern: str, src: str) -> Iterator[None]:
    """A process that opens `src`, and dies as soon as such a file is there."""
    process = get_context("fork").Process(target=_everything, args=(src,))
    process.start()
    try:
        deadline = time.monotonic() + 200
        while not any(file.stat().st_blocks for file in path.glob(pattern)) and time.monotonic() < deadline:
            time.sleep(0.005)
        yield
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()


def test_a_killed_download_leaves_nothing_bad(tmp_path: Path) -> None:
    files, blocks = shards(tmp_path / "data", 2), tmp_path / "cache/remote/blocks"
    with Server(files) as server:
        src = f"{server.url}/{{00..01}}.tar"
        server.always = dict.fromkeys(files, "drip")
        with killed_when(blocks, "*.part", src):
            time.sleep(0.1)
        left = list(blocks.glob("*.part"))
        assert left
        assert len(left) == len(list(blocks.glob("*-*")))
        server.always = {}
        assert everything(open_source(src)) == everything(open_source(str(tmp_path / "data")))
        assert not list(blocks.glob("*.part"))


def _md5(raw: bytes) -> str:
    return hashlib.md5(raw).hexdigest()


@pytest.mark.parametrize("kind", ["SHA256SUMS", "s3", "google", "repr-digest", "digest"])
def test_wrong_bytes_of_the_right_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", f"{QUICK} block=4000 retries=2")
    files = shards(tmp_path / "data", 1)
    raw = files["00.tar"]
    sha256, md5 = (base64.b64encode(hashlib.new(name, raw).digest()).decode() for name in ("sha256", "md5"))
    with Server(files, etag=(lambda _: f'"{_md5(raw)}"') if kind == "s3" else None) as server:
        server.headers = {
            "s3": {"Server": "AmazonS3"},
            "google": {"x-goog-hash": f"crc32c=AAAAAA==,md5={md5}"},
            "repr-digest": {"Repr-Digest": f"sha-256=:{sha256}:"},
            "digest": {"Digest": f"SHA-256={sha256}"},
        }.get(kind, {})
        if kind == "SHA256SUMS":
            server.files[kind] = f"{hashlib.sha256(raw).hexdigest()}  00.tar\n".encode()
        server.faults["00.tar"] = ["", "wrong"]  # the second block
        remote = open_source(f"{server.url}/00.tar")
        assert everything(remote) == everything(open_source(str(tmp_path / "data")))
        assert server.asked["00.tar"] == 2 * -(-len(raw) // 4000)
        forget(tmp_path)
        server.faults["00.tar"] = ["", "wrong"]
        assert everything(remote) == everything(open_source(str(tmp_path / "data")))
        forget(tmp_path)
        server.always["00.tar"] = "wrong"
        with pytest.raises(Unreachable, match=r"00.tar: wrong bytes came, .* \(tried 3 times\)"):
            everything(remote)
        assert not list((tmp_path / "cache/remote/blocks").glob("*-*"))


def test_missing_and_forbidden_are_reported_at_once(tmp_path: Path) -> None:
    files = shards(tmp_path / "data", 2)
    with Server(files) as server:
        with pytest.raises(ValueError, match=r"02.tar: the server answers 404: no such file"):
            open_source(f"{server.url}/{{00..02}}.tar")
        server.faults["00.tar probe"] = ["403"]
        with pytest.raises(ValueError, match=r"00.tar: the server answers 403: access denied"):
            open_source(f"{server.url}/00.tar?signature=secret")
        source = open_source(f"{server.url}/00.tar")
        forget(tmp_path)
        server.asked.clear()
        server.always["00.tar"] = "404"
        with pytest.raises(Unreachable, match="404"):
            source.record(0)
        assert server.asked["00.tar"] == 1
        with pytest.raises(ValueError, match="http has no folders"):
            open_source(f"{server.url}/")
        with pytest.raises(ValueError, match="unknown kind of data"):
            open_source(f"{server.url}/images")


def test_signatures_are_not_shown(tmp_path: Path) -> None:
    with Server({}) as server, pytest.raises(ValueError) as caught:
        open_source(f"{server.url}/00.tar?X-Amz-Signature=secret")
    assert "secret" not in str(caught.value)


def test_a_dead_server_ends_the_run_and_makes_no_row_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", f"{QUICK} retries=2")
    files = shards(tmp_path / "data", 4)
    with Server(files) as server:
        source = open_source(f"{server.url}/{{00..03}}.tar")
        assert len(list(loader(source, workers=1).batches(0, 4))) == 4
    forget(tmp_path)
    for workers in (0, 1):
        with pytest.raises(ValueError, match=r"^http\S*tar: connection refused \(tried 3 times\). Check"):
            list(loader(source, workers).batches(0, 4))


def test_what_stays_broken_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", f"{QUICK} retries=2")
    files = shards(tmp_path / "data", 1)
    said = {
        "short": "the body ended",
        "cut": "connection reset by peer",
        "stall": "no byte came in time",
        "429:0": "the server answers 429 Too Many Requests",
        "page": "the server says that the file has 22 bytes",
        "drop": "remote end closed connection without response",
    }
    with Server(files) as server:
        patient = open_source(f"{server.url}/00.tar")
        monkeypatch.setenv("KILOWORD_REMOTE", f"{QUICK} retries=2 timeout=0.5")
        impatient = open_source(f"{server.url}/00.tar")
        for fault, words in said.items():
            source = impatient if fault == "stall" else patient
            forget(tmp_path)
            server.always["00.tar"] = fault
            with pytest.raises(Unreachable, match=rf"^http\S*00.tar: {words}.* \(tried 3 times\). Check the network"):
                source.record(0)
            assert not list((tmp_path / "cache/remote/blocks").glob("*-*"))


def test_one_process_indexes_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, scans, real = shards(tmp_path / "data", 2), tmp_path / "scans", remote_index.scan

    def scan(tar: Any) -> Any:
        with scans.open("a") as file:
            file.write(f"{tar}\n")
        time.sleep(0.3)
        return real(tar)

    monkeypatch.setattr(remote_index, "scan", scan)
    with Server(files) as server, get_context("fork").Pool(3) as pool:
        src = f"{server.url}/{{00..01}}.tar"
        assert pool.map(_length, [src] * 3, chunksize=1) == [12] * 3
        assert sorted(scans.read_text().split()) == [f"{server.url}/{name}" for name in files]


def test_no_file_of_the_cache_stays_open(tmp_path: Path) -> None:
    files = shards(tmp_path / "data", 3)
    files["02.tar"] = b"no tar" * 500
    with Server(files) as server:
        source = open_source(f"{server.url}/{{00..01}}.tar")
        everything(source)
        assert not opened_in(tmp_path / "cache")
        with pytest.raises(ValueError, match=r"02\.tar"):
            open_source(f"{server.url}/02.tar")
        server.always["00.tar"] = "404"
        forget(tmp_path)
        with pytest.raises(Unreachable):
            source.record(0)
        assert not opened_in(tmp_path / "cache")


def opened_in(folder: Path) -> list[str]:
    """The blocks and locks in a folder that this process holds open; an index may stay open with its source."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of listing them
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [link for link in links if link.startswith(f"{folder}/") and not link.endswith(".kwindex")]


def _length(src: str) -> int:
    return len(open_source(src))


def test_a_file_that_changes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", f"{QUICK} retries=1")
    files = shards(tmp_path / "data", 1)
    with Server(files, etag=lambda raw: f'"{_md5(raw)}"') as server:
        src = f"{server.url}/00.tar"
        source = open_source(src)
        server.files = shards(tmp_path / "other", 2)
        server.files["00.tar"] = server.files["01.tar"]
        forget(tmp_path)
        with pytest.raises(Unreachable, match="the file has changed since it was opened"):
            source.record(0)
        assert open_source(src).key(0) == "0006"
        server.files["00.tar"] = write_tar(tmp_path / "longer.tar", pairs(9)).read_bytes()
        assert len(open_source(src)) == 9


def test_an_index_beside_the_tar_is_taken(tmp_path: Path) -> None:
    files = shards(tmp_path / "data", 1)
    local = open_source(str(tmp_path / "data"))
    index = (tmp_path / "data/00.tar.kwindex").read_bytes()
    with Server({**files, "00.tar.kwindex": index}) as server:
        server.headers["Last-Modified"] = "Mon, 05 Oct 2099 07:28:00 GMT"
        remote = open_source(f"{server.url}/00.tar")
        assert server.asked["00.tar"] == 0
        assert remote.fingerprint == local.fingerprint
        assert everything(remote) == everything(local)
        server.files["00.tar.kwindex"] = index[:-5]  # damaged: the tar is read instead
        server.files["new.tar"], server.files["new.tar.kwindex"] = files["00.tar"], index[:-5]
        assert everything(open_source(f"{server.url}/new.tar")) == everything(local)


@pytest.mark.parametrize("opened", [False, True])
def test_a_kept_index_that_is_damaged_is_made_again(tmp_path: Path, opened: bool) -> None:
    """Behind its header, which is all that opening reads."""
    with Server(shards(tmp_path / "data", 1)) as server:
        source = open_source(f"{server.url}/00.tar")
        expected = everything(source)
        (index,) = (tmp_path / "cache").rglob("*.kwindex")
        whole = index.read_bytes()
        source = open_source(f"{server.url}/00.tar")
        index.write_bytes(whole.replace(b"0000", b"0009"))
        if not opened:
            source = open_source(f"{server.url}/00.tar")
        assert everything(source) == expected
        assert index.read_bytes() == whole


def test_an_index_of_another_tar_is_left(tmp_path: Path) -> None:
    """Tars are padded to 10 kB, so that the size alone says little."""
    old = write_tar(tmp_path / "old/00.tar", pairs(3))
    open_source(str(tmp_path / "old"))
    index = (tmp_path / "old/00.tar.kwindex").read_bytes()
    new = write_tar(tmp_path / "new/00.tar", pairs(3, first=5)).read_bytes()
    assert len(new) == old.stat().st_size
    with Server({"00.tar": new, "00.tar.kwindex": index}) as server:
        server.headers["Last-Modified"] = "Mon, 05 Oct 1998 07:28:00 GMT"  # the index is of a newer tar
        assert open_source(f"{server.url}/00.tar").key(0) == "0005"


def test_damage_is_counted_as_at_home(tmp_path: Path) -> None:
    members = {**pairs(6), "0002.png": b"no image", "0003.txt": b"\xff\xfe"}
    tar = write_tar(tmp_path / "data/00.tar", members)
    tar.write_bytes(tar.read_bytes()[: 512 * 17 + 100])
    local = open_source(str(tmp_path / "data"))
    with Server({"00.tar": tar.read_bytes()}) as server:
        remote = open_source(f"{server.url}/00.tar")
        found = check(remote)
        assert found == check(local)
        assert len(found) > 1
        assert [note.partition(": ")[2] for note in remote.notes] == [n.partition(": ")[2] for n in local.notes]  # type: ignore[attr-defined]
        assert remote.fingerprint == local.fingerprint
        server.files |= {"empty.tar": b"", "zip.tar": b"PK" * 5000}
        with pytest.raises(ValueError, match="holds no images"):
            open_source(f"{server.url}/empty.tar")
        with pytest.raises(ValueError, match=r"zip.tar cannot be read as a plain tar"):
            open_source(f"{server.url}/zip.tar")


def test_class_data(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "0.tar", {"a.png": photo(1), "a.cls": b"1", "b.png": photo(2), "b.cls": b"0"})
    words = {"set/classnames.txt": b"cat\ndog\n", "set/test/zeroshot_classification_templates.txt": b"a {c}"}
    with Server({"set/test/0.tar": tar.read_bytes(), **words}) as server:
        source = open_source(f"{server.url}/set/test/0.tar")
        assert source.classnames == ["cat", "dog"]
        assert source.templates == ["a {c}"]
        assert source.labels.tolist() == [1, 0]  # type: ignore[attr-defined]


def test_tables(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    table = pa.table({"image": [photo(n) for n in range(3)], "caption": [f"image {n}" for n in range(3)]})
    pa.parquet.write_table(table, data / "inside.parquet")
    (data / "0.png").write_bytes(photo(0))
    (data / "relative.csv").write_text("image,caption\n0.png,one\n")
    (data / "absolute.csv").write_text(f"image,caption\n{data}/0.png,one\n")
    with Server({file.name: file.read_bytes() for file in data.iterdir() if file.suffix != ".png"}) as server:
        for name in ("inside.parquet", "absolute.csv"):
            server.faults[name] = ["cut", "503"]
            remote, local = open_source(f"{server.url}/{name}"), open_source(str(data / name))
            assert remote.fingerprint == local.fingerprint
            assert everything(remote) == everything(local)
        with pytest.raises(ValueError, match=r"relative.csv names its images by paths that are not of this machine"):
            open_source(f"{server.url}/relative.csv")


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """A file system that fails every other time, sends short answers, and once hangs."""

    protocol = "flaky"
    store: dict[str, Any] = {}  # noqa: RUF012  # as in the parent
    calls = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("flaky://", "memory://")))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        Flaky.calls += 1
        if Flaky.calls == 1:
            time.sleep(1.0)
        if Flaky.calls % 4 == 2:
            raise OSError("Please reduce your request rate.")
        raw: bytes = super().cat_file(path, start, end, **more)
        return raw[:100] if Flaky.calls % 4 == 0 and len(raw) > 100 else raw


def test_other_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", "backoff=0.001 timeout=0.2 block=3000 retries=20 ahead=0")
    local = open_source(str(tmp_path / "data")) if shards(tmp_path / "data", 11) else None
    assert local is not None
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    for protocol, fs in (("memory", MemoryFileSystem()), ("flaky", Flaky())):
        for tar in (tmp_path / "data").glob("*.tar"):
            fs.pipe_file(f"/bucket/set/{int(tar.stem)}.tar", tar.read_bytes())
            fs.pipe_file("/bucket/set/notes.txt", b"no tar")
        src = f"{protocol}://bucket/set/"
        assert everything(open_source(src)) == everything(local)
        assert everything(open_source(src + "{0..10}.tar")) == everything(local)
        forget(tmp_path)
        assert everything(open_source(src)) == everything(local)
        with pytest.raises(ValueError, match=r"11.tar: no such file"):
            open_source(src + "11.tar")
        with pytest.raises(ValueError, match="a folder without tars"):
            open_source(f"{protocol}://bucket/")
    assert everything(open_source(f"file://{tmp_path}/data/")) == everything(local)
    with pytest.raises(ValueError, match=r"pip install 'kiloword\[remote\]'"):
        open_source("nosuch://bucket/0.tar")
    monkeypatch.setenv("KILOWORD_REMOTE", "retries=0")
    with pytest.raises(ValueError, match=r"ftp://127.0.0.1:9/0.tar: .*refused"):
        open_source("ftp://127.0.0.1:9/0.tar")


def test_ftp_that_refuses_the_login_is_asked_once() -> None:
    asked: list[socket.socket] = []

    def serve() -> None:
        for answers in ((b"421 too many users",), (b"220 hello", b"331 password", b"530 not you")):
            asked.append(listener.accept()[0])
            with asked[-1], asked[-1].makefile("rwb", buffering=0) as lines:
                for answer in answers:
                    lines.write(answer + b"\r\n")
                    lines.readline()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(Unreachable, match=r"0\.tar: access denied \(530 not you\)\. Check your rights"):
            open_source(f"ftp://127.0.0.1:{listener.getsockname()[1]}/0.tar")
        server.join()
    assert len(asked) == 2  # a server that is busy is asked again


def test_what_a_file_system_cannot_do_is_not_tried_again() -> None:
    asked: list[str] = []

    class Lacking(MemoryFileSystem):
        protocol = "lacking"

        def info(self, path: str, **options: Any) -> Any:
            asked.append(path)
            raise NotImplementedError("no sizes here")

    fsspec.register_implementation("lacking", Lacking, clobber=True)
    with pytest.raises(Unreachable, match=r"lacking://b/0\.tar cannot be opened \(no sizes here\)\. Check the address"):
        open_source("lacking://b/0.tar")
    assert len(asked) == 1


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", "limit=200GB, retries=8 timeout=1.5 block=16MB")
    assert remote_config() == RemoteConfig(limit=200e9, retries=8, timeout=1.5, block=16e6)
    for wrong in ("limits=3", "limit", "limit=many", "retries=-1", "limit=1MB", "timeout=0"):
        monkeypatch.setenv("KILOWORD_REMOTE", wrong)
        with pytest.raises(ValueError, match="KILOWORD_REMOTE"):
            remote_config()
    monkeypatch.setenv("KILOWORD_REMOTE", "limit=1")
    with pytest.raises(ValueError, match="limit is 1: expected at least a block, 8388608"):
        remote_config()


class Disk:
    """A disk of `room` bytes for the blocks in a folder. Once it is full, each sleep pops and calls one of `waits`."""

    def __init__(self, folder: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.room, self.real = folder, room, os.posix_fallocate
        self.waits: list[Callable[[], object]] = []
        monkeypatch.setattr(os, "posix_fallocate", self.allocate)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        """As much as there is, and then an error, as some file systems do."""
        free = max(0, self.room - bytes_of(self.folder))
        os.ftruncate(fd, min(size, free))
        if size > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.real(fd, offset, size)

    def sleep(self, seconds: float) -> None:
        self.waits.pop(0)()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = shards(tmp_path / "data", 3)
    disk = Disk(tmp_path / "cache/remote/blocks", int(1.5 * len(files["00.tar"])), monkeypatch)
    with Server(files) as server:
        source = open_source(f"{server.url}/{{00..02}}.tar")  # three tars at once: each waits for the one before it
        assert everything(source) == everything(open_source(str(tmp_path / "data")))  # others are given up
        forget(tmp_path)
        disk.room = 100
        with pytest.raises(Unreachable, match=r"cannot keep what is fetched \(No space left on device\)"):
            source.record(0)


@pytest.mark.parametrize("user", ["reader", "maker"])
def test_a_full_disk_waits_for_files_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    cache, contents = FileCache(tmp_path, limit=1000), {"a": b"a" * 100, "b": b"b" * 100}
    disk = Disk(tmp_path, 150, monkeypatch)
    monkeypatch.setattr(remote_cache, "time", SimpleNamespace(monotonic=time.monotonic, sleep=disk.sleep))
    with ExitStack() as use:
        if user == "reader":
            use.enter_context(cache.opened("a", 100, lambda fd: os.pwrite(fd, contents["a"], 0)))
        else:  # another process, which does not finish its file
            other = use.enter_context((tmp_path / "a.part").open("wb"))
            other.write(contents["a"])
            other.flush()
            fcntl.flock(other, fcntl.LOCK_EX)
        held: list[int] = []
        disk.waits = [lambda: held.append(bytes_of(tmp_path)), use.close]
        with cache.opened("b", 100, lambda fd: os.pwrite(fd, contents["b"], 0)) as fd:
            assert os.pread(fd, 200, 0) == contents["b"]
    assert held == [100]  # who waits holds no space
    assert not disk.waits
    assert {file.name for file in tmp_path.iterdir()} == {"b", "total"}


def test_a_full_disk_with_nothing_to_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that waits for space too has nothing to give up."""
    disk = Disk(tmp_path, 60, monkeypatch)
    monkeypatch.setattr(remote_cache, "time", SimpleNamespace(monotonic=time.monotonic, sleep=disk.sleep))
    with (tmp_path / "a.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with (
            pytest.raises(Unreachable, match="No space left on device"),
            FileCache(tmp_path, 1000).opened("b", 100, print),
        ):
            pass
    assert not (tmp_path / "b.part").exists()


@pytest.mark.parametrize("lock", ["block", "index"])
def test_a_lock_ends_although_a_process_forked_meanwhile_lives(tmp_path: Path, lock: str) -> None:
    """A data worker inherits the descriptors that other threads have open; closing them here alone frees nothing."""
    context = get_context("fork")
    over = context.Event()
    worker = context.Process(target=over.wait)
    if lock == "block":
        path, held = tmp_path / "a", FileCache(tmp_path).opened("a", 3, lambda fd: os.pwrite(fd, b"abc", 0))
    else:
        path, held = tmp_path / "a.lock", remote_index._locked(tmp_path / "a")
    with held:
        worker.start()
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        over.set()
        worker.join()


def test_rows_are_fetched_before_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", "backoff=0.01 ahead=12")
    files = shards(tmp_path / "data", 8, rows=6)
    with Server(files) as server:
        source = open_source(f"{server.url}/{{00..07}}.tar")
        ours = loader(source)
        forget(tmp_path)
        server.asked.clear()
        ours.batch(0)
        needed = {row // 6 for step in range(3) for row in ours.order.batch_rows(step)[1].tolist()}
        deadline = time.monotonic() + 200
        while len(server.asked) < len(needed) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.asked == {f"{shard:02d}.tar": 1 for shard in needed}


def test_evaluation_reads_ahead_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", "backoff=0.01 ahead=12")
    files = shards(tmp_path / "data", 5)
    with Server(files) as server:
        source = open_source(f"{server.url}/{{00..04}}.tar")
        forget(tmp_path)
        server.asked.clear()
        batches = eval_batches(source, 16, batch=4)
        first = next(batches)
        deadline = time.monotonic() + 200
        while len(server.asked) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.asked == {f"{n:02d}.tar": 1 for n in range(3)}  # rows 0 to 15
        keys = first.keys + [key for batch in batches for key in batch.keys]
        assert keys == [f"{n:04d}" for n in range(30)]


def _reads_forever(src: str, seed: int) -> None:
    source, rng = open_source(src), np.random.default_rng(seed)
    while True:
        row = int(rng.integers(len(source)))
        assert source.record(row).captions == [f"image {row}"]


@pytest.mark.slow
def test_forty_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three readers of a small cache behind a bad network die at any moment; what is left is right, and small."""
    files, draw = shards(tmp_path / "data", 12), Draw(0, 0, 0).rng("moments")
    limit, blocks = 3 * len(files["00.tar"]), tmp_path / "cache/remote/blocks"
    monkeypatch.setenv("KILOWORD_REMOTE", f"{QUICK} limit={limit} block=8000 retries=20")
    peak, context = Peak(blocks, monkeypatch), get_context("fork")
    with Server(files) as server:
        src = f"{server.url}/{{00..11}}.tar"
        faults = ["", "cut", "short", "500", "", "drop", "shorter", "redirect", ""]
        for _ in range(40):
            for name in files:
                server.faults[name] = [faults[i] for i in draw.integers(len(faults), size=20)]
            readers = [context.Process(target=_reads_forever, args=(src, seed)) for seed in range(3)]
            for reader in readers:
                reader.start()
            time.sleep(float(draw.uniform(0.05, 0.5)))
            assert all(reader.is_alive() for reader in readers)
            for reader in readers:
                reader.kill()
            for reader in readers:
                reader.join()
        server.faults.clear()
        assert everything(open_source(src)) == everything(open_source(str(tmp_path / "data")))
    assert limit / 3 < peak.most <= limit
    assert not list(blocks.glob("*.part"))


def test_training_is_that_of_the_local_copy(tmp_path: Path) -> None:
    files = shards(tmp_path / "data", 4, rows=8)

    def losses(src: str, name: str) -> list[float]:
        base = default_recipe("siglip", "debug", (src,))
        recipe = recipes.replace(base, data=recipes.replace(base.data, tokenizer_vocab=300), batch=8, steps=6)
        train(recipe, tmp_path / name, options=RunOptions(log_every=1, quiet=True))
        return [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")]

    with Server(files) as server:
        server.faults.update({name: ["500", "cut"] for name in files})
        assert losses(f"{server.url}/{{00..03}}.tar", "remote") == losses(str(tmp_path / "data"), "local")

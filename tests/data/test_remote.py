"""Remote data: the same rows as local data whatever the network does; each file fetched once, few kept."""

from __future__ import annotations

import io
import os
import signal
import time
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from kiloword.addresses import address_of
from kiloword.cli.main import main
from kiloword.config.recipes import DataConfig, TextConfig
from kiloword.data import remote
from kiloword.data.inspect import stats
from kiloword.data.loader import Loader
from kiloword.data.open import open_source
from kiloword.data.reading import captions_of, eval_batches, read
from kiloword.data.remote import Unreachable
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.types import Source
from servers import Guarded, Server
from sources import records
from tars import pairs, photo, write_tar

QUICK = "backoff=0.01 timeout=10 ahead=0"
INDEX = "kiloword-index.arrow"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", QUICK)
    monkeypatch.setenv("no_proxy", "*")


def shards(folder: Path, count: int, rows: int = 6, index: bool = False) -> dict[str, bytes]:
    """Small tars in a folder, and as a server serves them. Args: index: with the file that `data index` makes."""
    for n in range(count):
        write_tar(folder / f"{n:02d}.tar", pairs(rows, n * rows))
    if index:
        main(["data", "index", str(folder)])
    return served(folder)


def served(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def copies(tmp_path: Path) -> list[Path]:
    """The fetched files."""
    return [path for path in (tmp_path / "cache/remote").glob("*") if path.is_file()]


def forget(tmp_path: Path) -> None:
    for path in copies(tmp_path):
        path.unlink(missing_ok=True)


FAULTS = ["stall", "hang", "cut", "short", "shorter", "drop", "page", "redirect", "500", "429:0", "408"]


def test_remote_equals_local_under_every_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", f"{QUICK} timeout=0.3 backoff=0.001 retries=30")
    files = shards(tmp_path / "data", len(FAULTS), rows=2)
    local = open_source(str(tmp_path / "data"))
    with Server(files) as server:
        for name, fault in zip(files, FAULTS, strict=True):
            server.faults[f"{name} probe"] = [fault] if fault not in ("cut", "page") else []
            server.faults[name] = [fault]
        source = open_source(f"{server.url}/{{00..{len(FAULTS) - 1:02d}}}.tar")
        assert source.fingerprint == local.fingerprint
        assert records(source) == records(local)
        forget(tmp_path)
        for name, fault in zip(files, FAULTS, strict=True):
            server.faults[name] = [fault, "500", fault]
        assert records(source) == records(local)
        assert not any(server.faults.values())


def test_one_process_fetches_for_all(tmp_path: Path) -> None:
    files = shards(tmp_path / "data", 6)
    expected = records(str(tmp_path / "data"))
    with Server(files) as server, get_context("fork").Pool(8) as pool:
        for times in (1, 2):
            assert pool.map(records, [f"{server.url}/{{00..05}}.tar"] * 8) == [expected] * 8
            assert [server.asked[name] for name in files] == [times] * 6
            forget(tmp_path)


def loader(source: Source, workers: int = 0) -> Loader:
    order, tokenizer = Order(len(source), 6, seed=1), Tokenizer.train(["image 1"], 300)
    return Loader(source, order, DataConfig(), TextConfig(context=16, vocab=300), 16, tokenizer, workers=workers)


def test_the_cache_keeps_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 tars in a cache of 3, read in random order by two processes that fetch ahead."""
    files, peaks = shards(tmp_path / "data", 12), list[int]()
    limit = 3 * len(files["00.tar"])
    monkeypatch.setenv("KILOWORD_REMOTE", f"backoff=0.01 ahead=24 limit={limit}")

    class Watched(Server):
        def answer(self, request: Any) -> None:
            peaks.append(size())
            super().answer(request)

    def size() -> int:
        found, before = {0: 0}, dict[int, int]()
        while found != before:  # two equal looks: all these files were there at one moment
            before, found = found, {}
            for path in copies(tmp_path):
                with suppress(FileNotFoundError):
                    found[path.stat().st_ino] = path.stat().st_size
        return sum(found.values())

    with Watched(files) as server:
        batches = list(loader(open_source(f"{server.url}/{{00..11}}.tar"), workers=2).batches(0, 24))
    expected = list(loader(open_source(str(tmp_path / "data"))).batches(0, 24))
    assert [b.images.tolist() for b in batches] == [b.images.tolist() for b in expected]
    assert sum(server.asked.values()) > 24  # tars came again and again
    assert limit / 3 < max(peaks) <= limit


def test_many_tars_need_an_index(tmp_path: Path) -> None:
    """It suffices to open them: of the tars only those come whose images are read."""
    files = shards(tmp_path / "data", 20)
    with Server(files) as server:
        src = f"{server.url}/{{00..19}}.tar"
        with pytest.raises(ValueError, match=r"20 tars without an index.* `kiloword data index FOLDER`"):
            open_source(src)
        main(["data", "index", str(tmp_path / "data")])
        server.files = served(tmp_path / "data")
        local, source = open_source(str(tmp_path / "data")), open_source(src)
        assert (source.fingerprint, len(source)) == (local.fingerprint, 120)
        assert list(captions_of(source)) == [f"image {row}" for row in range(120)]
        assert sum(server.asked[name] for name in files) == 0
        assert source.record(45) == local.record(45)
        assert {name for name, count in server.asked.items() if count and name.endswith(".tar")} == {"07.tar"}
        assert open_source(src).record(46) == local.record(46)
        assert (server.asked[INDEX], server.asked["07.tar"]) == (1, 1)
        assert records(f"{server.url}/{{03..04}}.tar") == records(local)[18:30]
        with pytest.raises(ValueError, match=r"lacks 2 of 22 tars, the first is 20\.tar.*`kiloword data index FOLDER`"):
            open_source(f"{server.url}/{{00..21}}.tar")


def test_an_index_is_renewed_with_its_tars(tmp_path: Path) -> None:
    with Server(shards(tmp_path / "data", 18, index=True), etag=lambda raw: f'"{hash(raw):064x}"') as server:
        source = open_source(f"{server.url}/{{00..17}}.tar")
        write_tar(tmp_path / "data/07.tar", pairs(9, 700))
        server.files["07.tar"] = (tmp_path / "data/07.tar").read_bytes()
        with pytest.raises(Unreachable, match=r"07\.tar: the server says that it has .* bytes"):
            source.record(42)
        main(["data", "index", str(tmp_path / "data")])
        server.files = served(tmp_path / "data")
        again = records(f"{server.url}/{{00..17}}.tar")
        assert again == records(str(tmp_path / "data"))
        assert again[42].key == "0700"


def test_files_that_change_are_fetched_again(tmp_path: Path) -> None:
    with Server({"x.csv": b"a,b\n"}, etag=lambda raw: f'"{raw.hex():0>32}"') as server:
        for content, asked in ((b"a,b\n", 1), (b"a,b\n", 1), (b"a,c\n", 2)):
            server.files["x.csv"] = content
            assert remote.local(address_of(f"{server.url}/x.csv")).read_bytes() == content
            assert server.asked["x.csv"] == asked


def test_a_network_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sample is bad for it."""
    monkeypatch.setenv("KILOWORD_REMOTE", f"{QUICK} retries=1")
    with Server(shards(tmp_path / "data", 3)) as server:
        source = open_source(f"{server.url}/{{00..02}}.tar")
        forget(tmp_path)
    for use in (
        lambda: read(source, 0),
        lambda: loader(source).batch(0),
        lambda: list(eval_batches(source, 16)),
        lambda: list(loader(source, workers=1).batches(0, 1)),
        lambda: stats(source, decoded=True).bad,
    ):
        with pytest.raises(ValueError, match=r"0\d\.tar: .*refused \(tried 2 times\)"):
            use()


@pytest.mark.parametrize("fault", ["stall", "hang", "short", "shorter", "500", "page", "404", "403"])
def test_a_server_that_stays_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", "retries=1 timeout=0.2 backoff=0")
    with Server(shards(tmp_path / "data", 1)) as server:
        server.faults["00.tar probe"], server.always["00.tar"] = [""], fault
        with pytest.raises(Unreachable, match=r"^http://127.0.0.1:\d+/00\.tar: ") as error:
            open_source(f"{server.url}/00.tar")
    assert ("tried 2 times" in str(error.value)) == (not fault.startswith("40"))
    assert not copies(tmp_path)


def test_readers_that_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave parts of files, and locks, that keep nobody from going on."""
    files = shards(tmp_path / "data", 3)
    monkeypatch.setenv("KILOWORD_REMOTE", f"{QUICK} limit={2 * len(files['00.tar'])}")
    with Server(files) as server:
        src = f"{server.url}/{{00..02}}.tar"
        server.faults.update({name: ["drip"] for name in files})
        for _ in range(2):
            reader = get_context("fork").Process(target=records, args=(src,))
            reader.start()
            while not copies(tmp_path):
                time.sleep(0.01)
            os.kill(reader.pid or 0, signal.SIGKILL)
            reader.join()
        server.faults.clear()
        assert records(src) == records(str(tmp_path / "data"))


def test_damaged_tars_and_class_data(tmp_path: Path) -> None:
    members = {"a.png": photo(1), "a.cls": b"1", **pairs(4), "c.mp3": b"", "b.png": b"cut here" * 500}
    tar = write_tar(tmp_path / "data/00.tar", members)
    tar.write_bytes(tar.read_bytes().partition(b"cut here")[0])
    words = {
        "set/classnames.txt": b"\xef\xbb\xbfcat\r\ndog\r\n\n",
        "set/test/zeroshot_classification_templates.txt": b"a {c}",
    }
    with Server(
        {"set/test/00.tar": tar.read_bytes(), **words, "empty.tar": bytes(1024), "no.tar": b"PK" * 5000}
    ) as server:
        source: Any = open_source(f"{server.url}/set/test/00.tar")
        local: Any = open_source(str(tar))
        assert (source.classnames, source.templates, source.labels.tolist()[0]) == (["cat", "dog"], ["a {c}"], 1)
        assert stats(source, decoded=True).bad == stats(local, decoded=True).bad != []
        notes = [[note.partition(": ")[2] for note in one.notes] for one in (source, local)]
        assert notes[0] == notes[1] != []
        for name, said in (
            ("", "0 tars without an index"),
            ("empty.tar", "holds no images"),
            ("no.tar", "no.tar cannot be read as a plain tar"),
        ):
            with pytest.raises(ValueError, match=said):
                open_source(f"{server.url}/{name}")


def test_tables(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table = pa.table({"image": [photo(n) for n in range(3)], "caption": [f"image {n}" for n in range(3)]})
    pq.write_table(table, tmp_path / "data/inside.parquet")
    (tmp_path / "0.png").write_bytes(photo(0))
    (tmp_path / "data/relative.csv").write_text("image,caption\n0.png,one\n")
    (tmp_path / "data/absolute.csv").write_text(f"image,caption\n{tmp_path}/0.png,one\n")
    with Server(served(tmp_path / "data")) as server:
        for name in ("inside.parquet", "absolute.csv"):
            server.faults[name] = ["cut", "503"]
            source, local = open_source(f"{server.url}/{name}"), open_source(str(tmp_path / "data" / name))
            assert (source.fingerprint, records(source)) == (local.fingerprint, records(local))
        with pytest.raises(ValueError, match=r"relative.csv names its images by paths that are not of this machine"):
            open_source(f"{server.url}/relative.csv")


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """A file system that fails at times and sends short answers."""

    protocol = "flaky"
    store: dict[str, Any] = {}  # noqa: RUF012  # as in the parent
    calls = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("flaky://", "memory://")))

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        Flaky.calls += mode == "rb"
        if Flaky.calls % 4 == 2 and mode == "rb":
            raise OSError("Please reduce your request rate.")
        file = super()._open(path, mode, **more)
        return io.BytesIO(file.read()[:100]) if Flaky.calls % 4 == 0 and mode == "rb" else file


@pytest.mark.parametrize("index", [False, True])
def test_other_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: bool) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", "backoff=0.001 timeout=0.2 retries=20 ahead=0")
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    fs, files = Flaky(), shards(tmp_path / "data", 11, index=index)
    fs.store.clear()
    for name, content in {**files, "notes.txt": b"no tar", "11.tar/0.png": b""}.items():
        fs.pipe_file(f"/bucket/set/{name}", content)
    src, expected = "flaky://bucket/set/", records(str(tmp_path / "data"))
    assert records(src) == records(src + "{00..10}.tar") == expected
    forget(tmp_path)
    assert records(src) == expected
    with pytest.raises(ValueError, match=r"lacks .* 11\.tar" if index else r"11\.tar is no file"):
        open_source(src + "11.tar")


@pytest.mark.parametrize(
    ("src", "said"),
    [
        ("memory://bucket/0.tar", "no such file"),
        ("nosuch://bucket/0.tar", r"pip install 'kiloword\[remote\]'"),
        ("memory://bucket/none/", "no such file"),
        ("http://127.0.0.1:9/0.doc", "unknown kind of data. Expected a .tar"),
        ("http://127.0.0.1:9/0.tar", "refused"),
        ("ftp://127.0.0.1:9/0.tar", "refused"),
        ("http://127.0.0.1:9/{0..99999999999}.tar", "Expected at most 1,000,000"),
    ],
)
def test_addresses_of_no_data(monkeypatch: pytest.MonkeyPatch, src: str, said: str) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", "retries=0")
    with pytest.raises(ValueError, match=said):
        open_source(src)


@pytest.mark.parametrize("target", ["ftp://127.0.0.1/0.tar", "file:///etc/passwd", "data:text/plain,x"])
def test_redirects_to_other_protocols(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", "retries=0")
    with Guarded({}, login=False) as server:
        server.targets["0.csv"] = target
        with pytest.raises(Unreachable, match=r"0\.csv: .*(refused|not allowed|302)"):
            open_source(f"{server.url}/0.csv")


def test_a_login_of_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login planteduser password planted/pass\n")
    (tmp_path / ".netrc").chmod(0o600)
    with Guarded(shards(tmp_path / "data", 1)) as server:
        with pytest.raises(Unreachable, match="401"):
            open_source(f"{server.url}/00.tar")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert len(open_source(f"{server.url}/00.tar")) == 6


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", "limit=200GB, retries=8 timeout=1.5 ahead=7k")
    found = remote.settings()
    assert (found.limit, found.retries, found.timeout, found.ahead) == (200e9, 8, 1.5, 7000)
    with Server(shards(tmp_path / "data", 1)) as server:
        for given, word in (("timeout=3 limit=many", "KILOWORD_REMOTE"), ("limit=5000", r"20,480 bytes.* 5,000")):
            monkeypatch.setenv("KILOWORD_REMOTE", given)
            with pytest.raises(ValueError, match=word):
                open_source(f"{server.url}/00.tar")


def test_tars_of_the_next_batches_are_fetched_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", "backoff=0.01 ahead=12")
    with Server(shards(tmp_path / "data", 8)) as server:
        ours = loader(open_source(f"{server.url}/{{00..07}}.tar"))
        forget(tmp_path)
        server.asked.clear()
        next(ours.batches())
        needed = {f"{row // 6:02d}.tar" for step in range(3) for row in ours.order.batch_rows(step)[1].tolist()}
        deadline = time.monotonic() + 200
        while len(+server.asked) < len(needed) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert {name for name, count in server.asked.items() if count} == needed
        expected = loader(open_source(str(tmp_path / "data"))).batches(0, 9)
        assert [b.images.tolist() for b in ours.batches(0, 9)] == [b.images.tolist() for b in expected]

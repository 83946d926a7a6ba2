"""Servers that claim, delay, redirect and send without end: each ends with one message, in bounded time and memory."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import tracemalloc
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kiloword.addresses import public, scrubbed
from kiloword.cli.main import main
from kiloword.data.remote import errors
from kiloword.data.remote.config import RemoteConfig, remote_config
from kiloword.data.remote.errors import Unreachable
from kiloword.data.remote.file import open_remote_file
from kiloword.data.remote.http_files import _Redirects
from kiloword.data.sources.open import open_source
from kiloword.data.tars.shards import natural
from servers import Guarded, Server
from tars import pairs, write_tar

Speak = Callable[[str, socket.socket, threading.Event], None]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", "retries=0 timeout=10 backoff=0 ahead=0")
    monkeypatch.setenv("no_proxy", "*")


@contextmanager
def raw(speak: Speak) -> Iterator[str]:
    """The URL of a server that answers a request for a path by what `speak` writes to the socket."""
    over, listener = threading.Event(), socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with client, suppress(OSError):
            client.settimeout(5)
            request = b""
            while b"\r\n\r\n" not in request:
                request += client.recv(1 << 16)
            speak(request.split()[1].decode(), client, over)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def says(head: str, body: bytes = b"x") -> Speak:
    """One answer for every tar and table."""
    text = head.replace("\n", "\r\n").encode("latin-1")
    answer, none = b"HTTP/1.1 " + text + b"\r\n\r\n" + body, b"HTTP/1.1 404 none\r\nContent-Length: 0\r\n\r\n"
    return lambda path, client, _over: client.sendall(answer if path.endswith((".tar", ".csv")) else none)


def refused(url: str, match: str, megabytes: float = 20.0) -> None:
    """Opening it ends, with a message and without memory."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=match) as caught:
            open_source(url)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert url.partition("?")[0] in str(caught.value)
    assert peak < megabytes * 1e6


CLAIMS = {
    "206 x\nContent-Range: bytes 0-0/100000000000000": "100,000,000,000,000 bytes. Expected at most 10,000,000,000,000",
    "206 x\nContent-Range: bytes 0-0/10000000000000": "the body ended .* before its end|the limit of what is fetched",
    "206 x\nContent-Range: bytes 0-0/99999999999999999999999": "gives '99999999999999999999999' as its length",
    "206 x\nContent-Range: bytes 0-0/\xb2": r"gives '.' as its length\. Expected a whole number",
    "206 x\nContent-Range: bytes 0-0/-5": "gives '-5' as its length",
    "206 x\nContent-Range: bytes 0-0/*": r"gives '\*' as its length",
    "206 x\nContent-Range: bytes 0-0/1_000": "gives '1_000' as its length",
    "200 x\nContent-Length: \xb2": "as its length|does not say how long",
    "200 x\nContent-Length: 100000000000000": "says that it has 100,000,000,000,000 bytes",
    "200 x\nContent-Length: 1000000000000": "the limit of what is fetched is 50,000,000,000",
    "200 x": "does not say how long it is",
    "200 x\nContent-Length: 1\nContent-Encoding: gzip": "compresses it .gzip. although it was asked not to",
}


@pytest.mark.parametrize("head", CLAIMS)
@pytest.mark.parametrize("name", ["0.tar", "0.csv"])
def test_lengths_that_are_claimed(head: str, name: str, tmp_path: Path) -> None:
    with raw(says(head)) as url:
        refused(f"{url}/{name}", CLAIMS[head])
    kept = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*"))
    assert kept < 1e6


def drip(what: bytes, forever: bytes = b"x", pause: float = 0.02) -> Speak:
    """A beginning, and then a byte at a time, or as fast as it goes, without end."""

    def speak(_path: str, client: socket.socket, over: threading.Event) -> None:
        client.sendall(what)
        while not over.wait(pause) if pause else not over.is_set():
            client.sendall(forever)

    return speak


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Content-Length: 100\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "status": drip(b"HTTP/1.1 200 "),
    "header": drip(HEAD + b"X: "),
    "headers": drip(HEAD, b"X: y\r\n", 0),
    "long header": drip(HEAD + b"X: ", b"y" * 65536, 0),
    "continue": drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0),
    "redirect header": drip(b"HTTP/1.1 302 Found\r\nLocation: /1.tar\r\nX: "),
}


IMPATIENT = "retries=0 timeout=0.2 backoff=0 ahead=0"
LATE = r"no answer in 0.8 s|no byte came in time"  # on a loaded machine a server may pause for longer than 0.2 s


@pytest.mark.parametrize("kind", ENDLESS)
def test_headers_without_end(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", IMPATIENT)
    with raw(ENDLESS[kind]) as url:
        refused(f"{url}/0.tar", rf"{LATE}|more than 100 headers|more than 65536 bytes")


@pytest.mark.parametrize("kind", ["chunk size", "trailers"])
def test_chunks_without_end(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is opened well; its body is hostile."""
    monkeypatch.setenv("KILOWORD_REMOTE", IMPATIENT)

    def speak(path: str, client: socket.socket, over: threading.Event) -> None:
        client.sendall(CHUNKED if path == "/0.tar" else b"HTTP/1.1 404 none\r\nContent-Length: 0\r\n\r\n")
        if path == "/0.tar" and kind == "chunk size":
            drip(b"", b"0")(path, client, over)
        elif path == "/0.tar":
            drip(b"0\r\n", b"X: y\r\n", 0)(path, client, over)

    with raw(speak) as url:
        refused(f"{url}/0.tar", LATE)


@pytest.mark.parametrize("name", ["SHA256SUMS", "classnames.txt", "0.tar.kwindex"])
@pytest.mark.parametrize("claims", [True, False])
def test_small_files_without_end(name: str, claims: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiloword.data.remote.file.MOST_SMALL", 1 << 20)
    tar = write_tar(tmp_path / "0.tar", pairs(3)).read_bytes()
    with Server({"0.tar": tar, name: b"a\n" * (1 << 20)}) as server:
        send = server._head

        def head(request: Any, status: int, headers: dict[str, str]) -> None:
            unsaid = not claims and request.path.endswith(name)
            send(request, status, {k: v for k, v in headers.items() if not (unsaid and k == "Content-Length")})

        server._head = head  # type: ignore[method-assign]
        if name == "0.tar.kwindex":
            assert len(open_source(f"{server.url}/0.tar")) == 3  # the tar is read instead
        else:
            with pytest.raises(Unreachable, match=f"{name} has more than 1,048,576 bytes"):
                open_source(f"{server.url}/0.tar")


def test_texts_that_would_take_long(tmp_path: Path) -> None:
    """Each would cost a search that is quadratic in its length hours, and this test its time limit."""
    tar = write_tar(tmp_path / "0.tar", pairs(3)).read_bytes()
    with Server({"0.tar": tar, "SHA256SUMS": b"0" * 64 + b"  " + b" " * (1 << 20) + b"x"}) as server:
        assert len(open_source(f"{server.url}/0.tar")) == 3
    for text in ("a" * (1 << 20), "a://" * (1 << 18), "a://" + "b" * (1 << 20), "a://b?" * (1 << 18)):
        scrubbed(text)
        public(text)


def test_patterns_that_name_too_many_files() -> None:
    for pattern in ("http://h/{0..99999999999}.tar", "{0..9999}/{0..999}.tar"):
        with pytest.raises(ValueError, match=r"files\. Expected at most 1,000,000"):
            open_source(pattern)
    names = sorted(("2" * 5000, "10", "9", "x٢", "x²"), key=natural)
    assert names == ["9", "10", "2" * 5000, "x²", "x٢"]


def test_an_index_whose_members_are_far_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fetched ahead of a sample is what its members need, not all that lies between them."""
    monkeypatch.setenv("KILOWORD_REMOTE", "block=1000 ahead=0")
    with Server({"0.tar": write_tar(tmp_path / "0.tar", pairs(3)).read_bytes()}) as server:
        source: Any = open_source(f"{server.url}/0.tar")
        index, tar = source._block(0, 0), source.tars[0]
        near = [n for _, n in source.remote_blocks(0)]
        assert near == [0, 1, 2]  # 1,000 bytes each: the image, and the text behind its header
        source.tars[0] = replace(tar, info=replace(tar.info, size=10**13))
        table = index.table.copy()
        table[0, 2:4] = 9 * 10**12, 20  # the text
        table[1, :2] = 0, 10**13  # an image
        source._block = lambda *_: replace(index, table=table)
        assert [n for _, n in source.remote_blocks(0)] == [0, 1, 9 * 10**9]
        assert len(source.remote_blocks(1)) < 5


def test_redirects_without_end() -> None:
    asked: list[str] = []

    def speak(path: str, client: socket.socket, over: threading.Event) -> None:
        asked.append(path)
        head = f"HTTP/1.1 302 \x1b[31mFound\r\nLocation: {path}x\r\n\r\n".encode()
        drip(head, b"y" * 65536, 0)(path, client, over)  # nobody reads the body, which has no end

    with raw(speak) as url:
        refused(f"{url}/0.tar", "redirects more than 10 times")
    assert len(asked) == 11


@pytest.mark.parametrize(
    "target", ["ftp://127.0.0.1/0.tar", "file:///etc/passwd", "data:text/plain,x", "", "gopher://x/", "http://[x/"]
)
def test_redirects_to_other_protocols(target: str) -> None:
    with raw(says(f"302 Found\nLocation: {target}")) as url:
        refused(f"{url}/0.tar", r"redirects (from http to \w+, which is refused|to an address that cannot be opened)")


def test_https_redirects_to_https_alone() -> None:
    redirects = _Redirects(RemoteConfig())
    asked = urllib.request.Request("https://host.org/0.tar")
    assert redirects._target(asked, "", "https://other.org/0.tar?sig=1").asked == "https://other.org/0.tar?sig=1"
    assert redirects._target(asked, "", "/1.tar").url == "https://host.org/1.tar"
    for target in ("http://host.org/0.tar", "HTTP://host.org/0.tar", "ftp://host.org/0.tar", "file:///etc/passwd"):
        with pytest.raises(Unreachable, match=r"redirects from https to \w+, which is refused"):
            redirects._target(asked, "", target)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl, which makes the certificate")
def test_a_server_of_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a login; its certificate is checked; its redirect to http is refused."""
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{tmp_path}/key", "-out", f"{tmp_path}/certificate"]
    subprocess.run(["openssl", *made.split(), *names], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    with Guarded({"0.tar": write_tar(tmp_path / "0.tar", pairs(3)).read_bytes()}) as server:
        server.targets["1.tar"] = f"{server.url}/0.tar"
        server._http.socket = context.wrap_socket(server._http.socket, server_side=True)
        server.url = server.url.replace("http:", "https:")
        with pytest.raises(Unreachable, match=f"^{server.url}/0.tar: its certificate is not trusted"):
            open_source(server.secret("0.tar"))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate"))
        monkeypatch.setenv("KILOWORD_REMOTE", "retries=0 timeout=5.5")
        assert len(open_source(server.secret("0.tar"))) == 3
        with pytest.raises(Unreachable, match="redirects from https to http, which is refused"):
            open_source(server.secret("1.tar"))


def test_hosts_that_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server({"0.tar": write_tar(tmp_path / "0.tar", pairs(3)).read_bytes()}) as server:
        monkeypatch.setenv("KILOWORD_REMOTE", "hosts=data.org,127.0.0.* retries=0")
        assert len(open_source(f"{server.url}/0.tar")) == 3
        with raw(says(f"302 Found\nLocation: {server.url.replace('127.0.0.1', 'localhost')}/0.tar")) as url:
            refused(f"{url}/0.tar", r"redirects to the host localhost, which is not one of the KILOWORD_REMOTE hosts")
        monkeypatch.setenv("KILOWORD_REMOTE", "retries=0, hosts=data.org, *.data.org")
        refused(
            f"{server.url}/0.tar", r"the host 127.0.0.1 is not one of the KILOWORD_REMOTE hosts \(data.org, \*.data"
        )
    for src in ("s3://bucket/0.tar", "memory://bucket/0.tar", "http://mydata.org/0.tar", "file:///0.tar"):
        refused(src, "is not one of the KILOWORD_REMOTE hosts")


def test_what_a_server_asks_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(errors.time, "sleep", waits.append)
    monkeypatch.setenv("KILOWORD_REMOTE", "retries=1 backoff=0")
    values = (
        "1000000000",
        "9" * 5000,
        "\xb2",
        "1e400",
        "nan",
        "Mon, 32 Oct 99999 07:28:00 GMT",
        "Fri, 01 Jan 0001 00:00:00 -2359",
        "7",
    )
    for value in values:
        with raw(says(f"503 busy\nRetry-After: {value}\nContent-Length: 0")) as url, pytest.raises(Unreachable):
            open_remote_file(f"{url}/0.tar", remote_config())
    assert waits == [120, 0, 0, 0, 0, 0, 0, 7]


@pytest.mark.parametrize(
    "word",
    [
        "retries=1e400",
        "timeout=1e300",
        "retries=2000",
        "threads=1e9",
        "limit=1e400",
        "backoff=1e5",
        "retries=\u00b2",
        "retries=\u0663",
        "hosts=",
        "hosts=a/b",
        "ahead=1e99",
        "block=1e13 limit=1e15",
    ],
)
def test_settings_out_of_range(word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", word)
    with pytest.raises(SystemExit) as end:
        main(["data", "check", "http://127.0.0.1:9/0.tar"])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("kiloword: KILOWORD_REMOTE: ")


def test_the_largest_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "KILOWORD_REMOTE", "limit=1e18 retries=1000 timeout=86400 backoff=3600 threads=256 ahead=1e9 block=1e12"
    )
    with Server({}) as server, pytest.raises(Unreachable, match="404"):
        open_remote_file(f"{server.url}/0.tar", remote_config())


def test_odd_paths(tmp_path: Path) -> None:
    """White space, quotes and letters of any script are sent percent-encoded, as a browser does."""
    tar = write_tar(tmp_path / "0.tar", pairs(3)).read_bytes()
    with Server({"a%20b/%C3%A4.tar": tar}) as server:
        assert len(open_source(f"{server.url}/a b/\u00e4.tar")) == 3
        with pytest.raises(Unreachable, match="404"):
            open_source(f"{server.url}/a\r\nX: y/0.tar")

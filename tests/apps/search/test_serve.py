"""The served site: what it answers, and that neither data nor visitors get anything else from it."""

from __future__ import annotations

import http.client
import random
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

import pytest

from folders import model_folder
from kiloword.api import load
from kiloword.apps.search import index, serve
from kiloword.apps.search.library import Library
from kiloword.apps.search.rank import Ranker
from kiloword.apps.search.site import Site
from photo_folders import draw, photos_in, refused

HOSTILE = "<img src=x onerror=alert(1)>\"'.jpg"


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("siglip", "prolip")]


@pytest.fixture(scope="module", params=["llip", *OTHERS])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    model_folder(folder / "model", request.param)
    photos = photos_in(folder / "photos", 6)
    draw(photos / HOSTILE, 99)
    (photos / HOSTILE).with_suffix(".txt").write_text("<script>alert(2)</script>")
    index.main(photos, str(folder / "model"), folder / "library", device="cpu")
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[serve.SearchServer]:
    with serve.bound("127.0.0.1", 0) as server:
        server.site = Site(Library(root / "library"), load(root / "model"), "model")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(
    server: serve.SearchServer, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    with closing(connection):
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        text = answer.read().decode("latin-1" if answer.headers["Content-Type"] == "image/jpeg" else "utf-8")
        return answer.status, text, answer.headers


def form(image: bytes) -> tuple[bytes, str]:
    start = (
        b'--limit\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
    )
    return start + image + b"\r\n--limit--\r\n", "multipart/form-data; boundary=limit"


def numbers(html: str) -> list[int]:
    return [int(n) for n in re.findall(r"/thumb/[0-9a-f]{16}/(\d+)", html)]


def raw(server: serve.SearchServer, request: bytes) -> tuple[int, str]:
    """The answer to bytes that no client of HTTP sends."""
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    return int(answer.split()[1]) if answer else 0, answer.decode()


def test_a_search_shows_the_photos_in_order(server: serve.SearchServer) -> None:
    ranker: Ranker = server.site.ranker
    status, html, headers = ask(server, "/?q=a+dog")
    assert status == 200
    library = ranker.library
    assert numbers(html) == [int(library.ids[match.row]) for match in ranker.by_text("a dog", 24)]
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; ")
    assert "script" not in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert len(numbers(ask(server, "/")[1])) == 7
    assert len(numbers(ask(server, "/?q=a+dog&in=deep")[1])) == 3
    assert numbers(ask(server, "/?q=a+dog&in=nowhere")[1]) == []


def test_more_like_a_photo(server: serve.SearchServer) -> None:
    first = numbers(ask(server, "/?q=a+dog")[1])[0]
    shown = numbers(ask(server, f"/?like={first}")[1])
    assert shown[0] == first  # the photo itself, above the others
    assert first not in shown[1:]
    assert len(shown) == 7


def test_an_uploaded_photo_finds_itself(server: serve.SearchServer, root: Path) -> None:
    body, kind = form((root / "photos" / "deep" / "03.jpg").read_bytes())
    status, html, _ = ask(server, "/", "POST", body, Content_Type=kind)
    library = server.site.ranker.library
    assert status == 200
    assert library.path(library.row_of[numbers(html)[0]]) == "deep/03.jpg"


def test_why_a_photo_matched(server: serve.SearchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the file itself: what the page shows of it, resized, has another score."""
    matcher, explained = server.site.matcher, list[object]()
    explain = matcher.explain
    monkeypatch.setattr(matcher, "explain", lambda image, texts: explained.append(image) or explain(image, texts))
    number = numbers(ask(server, "/?q=a+dog")[1])[0]
    status, html, _ = ask(server, f"/photo/{number}?q=a+dog")
    assert status == 200
    library = server.site.ranker.library
    assert explained == [library.photo(library.row_of[number]).read_bytes()]
    assert "data:image/" in html.partition("Why it matched")[2]
    assert ("mixture token" in html) == bool(server.site.ranker.library.file.shapes)
    gaussian = server.site.ranker.library.file.gaussian
    assert ("uncertainty" in html) == gaussian
    assert ("uncertainty is" in ask(server, "/?q=a+dog")[1]) == gaussian
    assert not re.search(r"u [0-9.e-]+ · <a", ask(server, "/?q=a+dog")[1]), "the link is in the next line"


def test_photos_are_encoded_anew(server: serve.SearchServer) -> None:
    number = int(server.site.ranker.library.ids[0])
    library = server.site.ranker.library.file.id
    assert f'src="/large/{library}/{number}"' in ask(server, f"/photo/{number}")[1]
    for size in ("thumb", "large"):
        status, jpeg, headers = ask(server, f"/{size}/{library}/{number}")
        assert (status, headers["Content-Type"]) == (200, "image/jpeg")
        assert jpeg.encode("latin-1")[:2] == b"\xff\xd8"
        assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("query", ["<script>alert(3)</script>", '"><img src=x onerror=alert(4)>', "a\u202eb\x1b[31m"])
def test_hostile_words_stay_text(server: serve.SearchServer, query: str) -> None:
    """Of queries, file names and captions, on every page."""
    number = next(
        n for n, row in server.site.ranker.library.row_of.items() if "<img" in server.site.ranker.library.path(row)
    )
    for path in (
        f"/?q={quote(query)}&in={quote(query)}",
        f"/?q={quote(query)}",
        f"/photo/{number}?q={quote(query)}",
        "/",
    ):
        html = ask(server, path)[1]
        tags = {tag.lower() for tag in re.findall(r"<(\w+)", html)}
        assert not tags & {"script", "iframe", "object", "embed", "svg"}
        assert not re.search(r"<[^>]*\son\w+=", re.sub(r'"[^"]*"', '""', html))
        assert "\u202e" not in html
        assert "\x1b" not in html


@pytest.mark.parametrize(
    "path",
    [
        *("/thumb/999", "/thumb/-1", "/thumb/0x1", "/thumb/1/../../library.json", "/photo/%2e%2e%2flibrary.json"),
        *("/library.json", "/../model/config.json", "/thumb/" + "9" * 40, "/thumb/¹", "/?like=../1", "/?like=77"),
        *("//example.org/a", "/thumb/0", "/large/0", "/thumb/0123456789abcdef/0", "/photo/0123456789abcdef/0"),
    ],
)
def test_there_is_nothing_else(server: serve.SearchServer, path: str) -> None:
    status, html, _ = ask(server, quote(path, safe="/?=%."))
    assert status == 404
    assert "no such" in html


def test_queries_that_cannot_be_answered(server: serve.SearchServer) -> None:
    status, html, _ = ask(server, "/?q=+")
    assert (status, "The query is empty" in html) == (400, True)
    status, html, _ = ask(server, "/?q=" + "a" * 10_001)
    assert (status, "10,001 characters" in html) == (400, True)
    assert ask(server, "/?q=" + "a" * 70_000)[0] == 414
    with suppress(OSError, http.client.HTTPException):  # it hangs up on more
        assert ask(server, "/?q=" + "a" * 10_000_000)[0] == 414
    status, html, _ = ask(server, "/?q=https://example.org/dog.jpg")
    assert (status, "nothing is fetched" in html) == (200, True)
    assert ask(server, "/?" + "&".join(f"a{n}=1" for n in range(100)))[0] == 400


def test_uploads_that_are_no_photo(server: serve.SearchServer) -> None:
    body, kind = form(b"no image")
    status, html, _ = ask(server, "/", "POST", body, Content_Type=kind)
    assert (status, "not an image" in html) == (400, True)
    assert (
        ask(server, "/", "POST", b"q=https://example.org", Content_Type="application/x-www-form-urlencoded")[0] == 400
    )
    assert ask(server, "/", "POST", b"", Content_Type=kind, Content_Length=str(33 << 20))[0] == 413
    assert ask(server, "/", "POST", b"", Content_Type=kind, Content_Length="x")[0] == 411
    assert ask(server, "/", "POST", body, Content_Type=kind, Origin="https://example.org")[0] == 403


@pytest.mark.parametrize(("host", "status"), [("example.org", 421), ("127.0.0.1.example.org", 421), ("[::1", 421)])
def test_another_name_for_this_machine_is_refused(server: serve.SearchServer, host: str, status: int) -> None:
    assert ask(server, "/", Host=host)[0] == status
    assert ask(server, "/", Host="localhost:1")[0] == 200


def test_the_machine_is_asked_for_its_name_once(server: serve.SearchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`getfqdn` asks a name server."""
    asked: list[object] = []
    monkeypatch.setattr(socket, "getfqdn", lambda name="": asked.append(name) or "machine.example")
    own = socket.gethostname().lower()
    expected = {"localhost:1": 200, "127.0.0.1": 200, "[::1]:80": 200, own: 200, "machine.example": 421, "": 421}
    assert {host: ask(server, "/", Host=host)[0] for host in expected} == expected
    assert asked == []
    with serve.bound("127.0.0.1", 0) as other:
        assert other.names == {own, "machine.example"}
    assert serve.names_this_machine("machine.example:80", other.names)


@pytest.mark.parametrize(
    "request_",
    [
        b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"HEAD http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://[\r\nContent-Length: 1\r\n\r\na",
        b"GET /?q=dog HTTP/1.1\r\nHost: [\r\n\r\n",
    ],
)
def test_malformed_requests_are_answered(
    server: serve.SearchServer, capsys: pytest.CaptureFixture[str], request_: bytes
) -> None:
    status, _ = raw(server, request_)
    assert status == (421 if b"Host: [" in request_ else 400)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("digits", [11, 5_000])
def test_lengths_of_many_digits_are_refused(
    server: serve.SearchServer, capsys: pytest.CaptureFixture[str], digits: int
) -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * digits + b"\r\n\r\n"
    status, html = raw(server, head)
    assert (status, "32 MiB" in html) == (413, True)
    assert capsys.readouterr().err == ""


def test_malformed_forms_are_refused(server: serve.SearchServer, capsys: pytest.CaptureFixture[str]) -> None:
    body = "".join(f"--b{n}\r\nContent-Type: multipart/mixed; boundary=b{n + 1}\r\n\r\n" for n in range(3_000))
    status, html, _ = ask(server, "/", "POST", body.encode(), Content_Type="multipart/form-data; boundary=b0")
    assert (status, "cannot be read" in html) == (400, True)
    body, kind = form(b"a photo")
    assert ask(server, "/", "POST", body.replace(b'filename="a.jpg"', b"filename*"), Content_Type=kind)[0] == 400
    assert capsys.readouterr().err == ""


def test_any_bytes_come_whole_through_a_form() -> None:
    image = random.Random(0).randbytes(50_000) + b"\r\r\n\n--limi\r\n"
    body, kind = form(image)
    assert serve.uploaded(kind, body) == image


def test_the_site_follows_the_library(root: Path, server: serve.SearchServer) -> None:
    """Also two servers on one library, while `kiloword index` changes it."""
    second = Site(Library(root / "library"), load(root / "model"), "model")
    draw(root / "photos" / "later.jpg", 200)
    index.main(root / "photos", None, root / "library", device="cpu")
    assert "later.jpg" in ask(server, "/?q=dog")[1]
    assert "later.jpg" in second.get("/", "q=dog").body.decode()
    (root / "photos" / "later.jpg").unlink()
    library = server.site.ranker.library
    row = next(row for row in range(len(library)) if library.path(row) == "later.jpg")
    status, html, _ = ask(server, f"/thumb/{library.file.id}/{library.ids[row]}")
    assert (status, "cannot be read" in html) == (404, True)
    assert ask(server, f"/photo/{library.ids[row]}?q=dog")[0] == 200
    index.main(root / "photos", None, root / "library", device="cpu")
    assert "later.jpg" not in ask(server, "/?q=dog")[1]


def test_a_port_in_use(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refused(capsys, "serve", root / "library", "--port", port)
    assert f"port {port} is in use" in error
    assert "choose another --port" in error
    assert "expected 1 to 65535" in refused(capsys, "serve", root / "library", "--port", 70_000)


def test_who_reaches_it() -> None:
    assert [serve.is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")] == [
        *(True, True, True),
        *(False, False),
    ]

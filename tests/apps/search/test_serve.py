"""The served site: what it answers, and that neither data nor visitors get anything else from it, or take too much."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest

from folders import model_folder
from kiloword.api import load
from kiloword.apps.search.command import Index
from kiloword.apps.search.library import Library
from kiloword.apps.search.rank import find
from servers import Site
from tars import draw, photos_in

pytest.importorskip("starlette", reason="needs starlette, the extra search")
pytest.importorskip("uvicorn", reason="needs uvicorn, the extra search")
HOSTILE = "<img src=x onerror=alert(1)>\"'\u202e.jpg"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=limit\r\n"
START = b'--limit\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n'
FORM = "multipart/form-data; boundary=limit"
MB = 1 << 20


def index(root: Path, model: str | None = None) -> None:
    Index(photos=root / "photos", out=root / "library", model=model, device="cpu").run()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    model_folder(folder / "model", "llip")
    photos = photos_in(folder / "photos", 6)
    draw(photos / HOSTILE, 99)
    (photos / HOSTILE).with_suffix(".txt").write_text("<script>alert(2)</script>")
    index(folder, str(folder / "model"))
    return folder


@pytest.fixture(scope="module")
def site(root: Path) -> Iterator[Site]:
    with Site(root / "library") as site:
        yield site
    assert "stopped." in site.said
    assert "Traceback" not in site.warned
    assert "dog" not in site.warned  # queries are private


def ids(html: bytes) -> list[str]:
    return re.findall(r"/thumb/([0-9a-f]{16})", html.decode())


def ask(site: Site, path: str) -> bytes:
    status, html, _ = site.ask(path)
    assert status == 200
    return html


def status_of(site: Site, request: bytes) -> int:
    """The status of the answer to bytes that no client sends; 0: it hung up."""
    with closing(site.connect(request)) as connection:
        answer = connection.recv(1 << 16)
    return int(answer.split()[1]) if answer else 0


def test_a_search_shows_the_photos_in_order(site: Site, root: Path) -> None:
    library = Library(root / "library")
    found = find(library, load(root / "model"), [("a dog", 1)], 24)
    status, html, headers = site.ask("/?q=a+dog")
    assert (status, ids(html)) == (200, [library.cells(one.row)["id"] for one in found])
    assert [f"{one.score:.3f}" in html.decode() for one in found] == [True] * 7
    assert re.findall('"id": "(.{16})"', ask(site, "/photos.json?q=a+dog").decode()) == ids(html)
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert ("frame-ancestors 'none'" in policy, "script" in policy) == (True, False)
    assert len(ids(ask(site, "/"))) == 7
    assert len(ids(ask(site, "/?q=a+dog&in=deep"))) == 3
    assert ids(ask(site, "/?q=a+dog&in=nowhere")) == ids(ask(site, "/?in=nowhere")) == []
    like = ids(ask(site, f"/?like={ids(html)[2]}"))
    assert (like[0], sorted(like)) == (ids(html)[2], sorted(ids(html)))
    for size in ("thumb", "large"):
        status, jpeg, headers = site.ask(f"/{size}/{like[0]}")
        assert (status, headers["Content-Type"], jpeg[:2]) == (200, "image/jpeg", b"\xff\xd8")
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_an_uploaded_photo_finds_itself(site: Site, root: Path) -> None:
    library, photo = Library(root / "library"), root / "photos" / "deep" / "03.jpg"
    body = START + photo.read_bytes() + b"\r\n--limit--\r\n"
    status, html, headers = site.ask("/", "POST", body, Content_Type=FORM, Origin=f"http://127.0.0.1:{site.port}")
    assert headers["Referrer-Policy"] == "same-origin"  # with no-referrer, browsers send the form with "Origin: null"
    assert (status, b"</b> 1.000" in html) == (200, True)
    assert library.cells(library.row_of(ids(html)[0]))["path"] == "deep/03.jpg"


@pytest.mark.parametrize("query", ["<script>alert(3)</script>", '"><img src=x onerror=alert(4)>', "a\u202eb\x1b[31m"])
def test_hostile_words_stay_text(site: Site, query: str) -> None:
    """Of queries, file names and captions, on every page."""
    for path in (f"/?q={quote(query)}&in={quote(query)}", f"/?q={quote(query)}", f"/?in={quote(query)}", "/"):
        html = site.ask(path)[1].decode()
        assert not {tag.lower() for tag in re.findall(r"<(\w+)", html)} & {"script", "iframe", "object", "embed", "svg"}
        assert not re.search(r"<[^>]*\son\w+=", re.sub(r'"[^"]*"', '""', html))
        assert not {"\u202e", "\x1b"} & set(html)


NOTHING = ["/thumb/999", "/thumb/1/../../library.json", "/large/%2e%2e%2flibrary.json", "/library.json", "/thumb/¹"]
NOTHING += ["/../model/config.json", "/?like=../1", "//example.org/a", "/other/0123456789abcdef", "/style.css"]


@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("/?q=+", 400, "expected words"),
        ("/photos.json?q=+", 400, '{"error":"'),
        ("/?q=https://example.org/dog.jpg", 200, "https://example.org/dog.jpg"),
        (f"/?q={'dog+' * 2_000}", 200, "tokens"),
        *((quote(path, safe="/?=%."), 404, "") for path in NOTHING),
    ],
)
def test_unusual_queries_and_paths_to_nothing(site: Site, path: str, status: int, word: str) -> None:
    found, html, _ = site.ask(path)
    assert (found, word in html.decode(errors="replace")) == (status, True)


def test_uploads_that_are_no_photo(site: Site) -> None:
    body = START + b"no image\r\n--limit--\r\n"
    status, html, _ = site.ask("/", "POST", body, Content_Type=FORM)
    assert (status, b"mage 0" in html) == (400, False)
    assert site.ask("/", "POST", START + b"\r\n--limit--\r\n", Content_Type=FORM)[0] == 400
    assert site.ask("/", "POST", b"q=a", Content_Type="application/x-www-form-urlencoded")[0] == 400
    assert site.ask("/", "POST", body, Content_Type=FORM, Origin="https://example.org")[0] == 403
    assert site.ask("/", "POST", b"a", Content_Type=FORM.partition(";")[0])[0] == 400
    for length, status in ((str(33 * MB), 413), ("9" * 11, 413), ("x", 400), ("9" * 5_000, 400)):
        assert status_of(site, POST + f"Content-Length: {length}\r\n\r\n".encode()) == status
    assert status_of(site, POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n") == 411
    several = (START + b"a\r\n") * 3 + b"--limit--\r\n"
    assert site.ask("/", "POST", several, Content_Type=FORM)[0] == 400
    assert status_of(site, b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n") == 405


HERE = ("localhost:1", "127.0.0.1", "[::1]:80", "[fe80::2]", "192.168.0.7:80")
ELSEWHERE = ("", "[::1", "example.org", "127.0.0.1.example.org", "example.org@127.0.0.1", "localhost.example.org")
HOSTS = dict.fromkeys(HERE, 200) | dict.fromkeys(ELSEWHERE, 400)


def test_another_name_for_this_machine_is_refused(site: Site) -> None:
    assert {host: site.ask("/", Host=host)[0] for host in HOSTS} == HOSTS


def test_a_request_is_read_as_one(site: Site) -> None:
    """A body of a GET is not the next request, and a body that ends early is not a form."""
    inner = b"GET /?q=inner HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = b"GET /thumb/0 HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(inner)
    with closing(site.connect(head + inner)) as connection:
        time.sleep(1)
        assert connection.recv(1 << 20).count(b"HTTP/1.1 ") == 1
    with closing(site.connect(POST + b"Content-Length: 100000\r\n\r\n" + START + b"a\r\n--limit--\r\n")) as connection:
        connection.settimeout(1)
        with pytest.raises(TimeoutError):
            connection.recv(1)


ATTACKS = {
    "empty parts": b"--limit\r\n\r\n\r\n" * (8 * MB // 13),
    "empty fields": b'--limit\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * (8 * MB // 54),
    "semicolons": b"--limit\r\nContent-Disposition: form-data" + b";" * (8 * MB) + b"\r\n\r\na\r\n--limit--\r\n",
    "a long header": b"--limit\r\nContent-Disposition: " + b"a" * (8 * MB) + b"\r\n\r\na\r\n--limit--\r\n",
    "boundaries": b"\r\n--limi" * MB,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_form_takes_little(site: Site, name: str) -> None:
    before, memory = site.used()
    assert site.ask("/", "POST", ATTACKS[name], Content_Type=FORM)[0] == 400
    seconds, peak = site.used()
    assert seconds - before < 3
    assert peak - memory < 100 * MB


def test_unfinished_uploads_take_little(site: Site, root: Path) -> None:
    _, memory = site.used()
    sent = POST + b"Content-Length: %d\r\n\r\n" % (31 * MB) + START + b"a" * (4 * MB)
    with ThreadPoolExecutor(20) as pool:
        connections = list(pool.map(site.connect, [sent] * 20))
    assert ids(ask(site, "/?q=a+dog"))
    assert site.used()[1] - memory < 200 * MB
    for connection in connections:
        connection.close()
    body = START + (root / "photos/00.jpg").read_bytes() + b"\r\n--limit--\r\n"
    assert site.ask("/", "POST", body, Content_Type=FORM)[0] == 200


def test_thirty_clients_at_once(site: Site) -> None:
    expected = {path: ask(site, path) for path in ("/?q=a+dog", "/?q=cats", "/")}
    expected |= {f"/thumb/{number}": ask(site, f"/thumb/{number}") for number in ids(expected["/"])}
    wanted = random.Random(0).choices([*expected], k=300)
    with ThreadPoolExecutor(30) as pool:
        assert list(pool.map(lambda path: ask(site, path), wanted)) == [expected[path] for path in wanted]


def test_the_site_follows_the_library(root: Path, site: Site) -> None:
    draw(root / "photos" / "later.jpg", 200)
    before = ids(ask(site, "/"))
    index(root)
    (new,) = {*ids(ask(site, "/"))} - {*before}
    (root / "photos" / "later.jpg").unlink()
    status, html, _ = site.ask(f"/thumb/{new}")
    assert (status, b"cannot be read" in html) == (404, True)
    library = (root / "library/library.json").read_text()
    index(root)
    assert ids(ask(site, "/")) == before
    for damage, word in ((library, "damaged"), (library.replace('fingerprint": "', 'fingerprint": "0'), "")):
        stored = (root / "library/library.json").read_text()
        (root / "library/library.json").write_text(damage)
        status, html, _ = site.ask("/?q=dog")
        assert (status, word in html.decode()) == (503, True)
        (root / "library/library.json").write_text(stored)
        assert ids(ask(site, "/")) == before

"""What a request and its redirects carry: time limits, headers, logins; and how often they are followed."""

from __future__ import annotations

import socket
import urllib.request
from email.message import Message
from types import SimpleNamespace
from typing import Any

import pytest

from kiloword.addresses import Address
from kiloword.data.remote import http_files
from kiloword.data.remote.config import RemoteConfig
from kiloword.data.remote.errors import Unreachable
from kiloword.data.remote.http_files import _origin, _quoted, _Redirects, end, request
from kiloword.data.remote.transport import check_host

CONFIG = RemoteConfig(timeout=7.0, hosts=("data.org", "*.cdn.org"))


def test_a_request_has_its_headers_its_login_and_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    opener = SimpleNamespace(open=lambda one, timeout: asked.append((one, timeout)) or "response")
    monkeypatch.setattr(http_files, "_opener", lambda config: opener)
    assert request(Address("https://data.org/a b.tar"), {"Range": "bytes=0-0"}, CONFIG) == "response"
    one, timeout = asked[0]
    assert (one.full_url, one.headers, one.unredirected_hdrs, timeout) == (
        "https://data.org/a%20b.tar", {"Range": "bytes=0-0"}, {}, 7.0,
    )  # fmt: skip
    with pytest.raises(Unreachable, match=r"the host other\.org is not one of the KILOWORD_REMOTE hosts"):
        request(Address("https://other.org/a.tar"), {}, CONFIG)
    assert len(asked) == 1
    check_host(Address("https://x.cdn.org/a"), CONFIG)
    with pytest.raises(Unreachable, match=r"first: redirects to the host evil\.org, which is not one"):
        check_host(Address("https://evil.org/a"), CONFIG, "first")


def redirected(asked: urllib.request.Request, location: str) -> tuple[urllib.request.Request, float]:
    """The request that follows, and its time limit."""
    following: list[Any] = []
    handler = _Redirects(CONFIG)
    handler.parent = SimpleNamespace(open=lambda one, timeout: following.append((one, timeout)))  # type: ignore[assignment]
    headers, closed = Message(), list[bool]()
    headers["Location"] = location
    handler.http_error_302(asked, SimpleNamespace(close=lambda: closed.append(True)), 302, "Found", headers)
    assert closed == [True], "its body is not read"
    one, timeout = following[0]
    return one, timeout


def first() -> urllib.request.Request:
    asked = urllib.request.Request("https://data.org/0.tar", headers={"Range": "bytes=0-0", "Cookie": "c"})
    asked.add_unredirected_header("Authorization", "Basic secret")
    asked.timeout = 3.0
    return asked


def test_logins_go_to_the_same_origin_alone() -> None:
    for location, keeps in (
        ("/1.tar", True),
        ("https://data.org:443/1.tar", True),
        ("https://data.org:444/1.tar", False),
        ("https://x.cdn.org/1.tar", False),
    ):
        following, timeout = redirected(first(), location)
        assert timeout == 3.0
        assert following.headers == {"Range": "bytes=0-0"}
        assert following.get_header("Authorization") == ("Basic secret" if keeps else None)
    following, _ = redirected(first(), "https://user:pass@data.org/1.tar?sig=1")
    assert following.full_url == "https://data.org/1.tar?sig=1", "no server gives a login"
    assert _origin("http://h/a") == ("http", "h", 80) != _origin("https://h/a") == ("https", "h", 443)
    assert _quoted("https://h/a b?c=ü&d=%20") == "https://h/a%20b?c=%C3%BC&d=%20"


def test_ten_redirects_are_followed() -> None:
    asked = first()
    for hop in range(10):
        asked, _ = redirected(asked, f"/{hop}.tar")
        asked.timeout = 3.0
    with pytest.raises(Unreachable, match=r"^https://data\.org/0\.tar: the server redirects more than 10 times"):
        redirected(asked, "/11.tar")


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("", "redirects from https to nowhere, which is refused"),
        ("http://data.org/1.tar", "redirects from https to http, which is refused"),
        ("ftp://data.org/1.tar", "redirects from https to ftp, which is refused"),
        ("https://[::1/", "redirects to an address that cannot be opened"),
        ("https://evil.org/1.tar", r"redirects to the host evil\.org"),
    ],
)
def test_where_no_redirect_leads(location: str, said: str) -> None:
    with pytest.raises(Unreachable, match=said):
        redirected(first(), location)


def test_a_connection_is_ended_for_who_reads_from_it() -> None:
    here, there = socket.socketpair()
    with here, there:
        end(here)
        assert there.recv(9) == b""
        assert here.fileno() >= 0, "its owner closes it"
    end(SimpleNamespace(fileno=lambda: 10**6))

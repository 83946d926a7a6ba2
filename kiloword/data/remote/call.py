"""Requests of http(s): a time limit on the whole of each, redirects that leak nothing, hosts that may be asked."""

from __future__ import annotations

import os
import socket
import string
import threading
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote, urljoin, urlsplit

from kiloword.addresses import Address, split
from kiloword.data.remote.config import VARIABLE, RemoteConfig
from kiloword.data.remote.errors import Fault, Unreachable, foreign

_HOPS = 10  # redirects one after another
_SECONDS = 4  # time-outs that a whole call may take, however slowly its bytes come
_TO = {"https": ("https",), "http": ("http", "https")}  # schemes that one may redirect to
_SECRET_HEADERS = ("authorization", "proxy-authorization", "cookie")
T = TypeVar("T")


def bounded(call: Callable[[], T], seconds: float, discard: Callable[[T], object] = lambda _late: None) -> T:
    """What a call returns, or raises. Args: discard: takes a result that comes when time is over.

    A call that hangs is left behind in its thread. Raises: Fault when 4 times `seconds` are over.
    """
    results: list[T] = []
    errors: list[Exception] = []
    lock, over = threading.Lock(), threading.Event()

    def work() -> None:
        try:
            result = call()
        except Exception as error:  # of any of a dozen libraries
            errors.append(error)
            return
        with lock:
            (discard if over.is_set() else results.append)(result)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_SECONDS * seconds)
    with lock:
        over.set()
    if errors:
        raise errors.pop()  # out of the list, which its own traceback holds: no cycle keeps the connection open
    if results:
        return results[0]
    raise Fault(f"no answer in {_SECONDS * seconds:g} s")


def request(address: Address, headers: dict[str, str], config: RemoteConfig) -> Any:
    """The response, after redirects. Raises: those of urllib; Unreachable for what is refused; Fault."""
    check_host(address, config)
    asked = urllib.request.Request(_quoted(address.asked), headers=headers)
    if address.authorization:
        asked.add_unredirected_header("Authorization", address.authorization)
    opener = _opener(config)
    return bounded(lambda: opener.open(asked, timeout=config.timeout), config.timeout, lambda late: late.close())


def end(response: Any) -> None:
    """Ends the connection, so that a thread that reads from it stops."""
    with suppress(OSError, ValueError), socket.socket(fileno=os.dup(response.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def check_host(address: Address, config: RemoteConfig, asked: str = "") -> None:
    """Args: asked: the address that redirected here. Raises: Unreachable for a host that the settings do not allow."""
    host = urlsplit(address.url).hostname or ""
    if not config.allows(host):
        what = f"redirects to the host {foreign(host)}, which is" if asked else f"the host {host} is"
        raise Unreachable(
            f"{asked or address}: {what} not one of the {VARIABLE} hosts ({', '.join(config.hosts)}). Add it there if "
            "you trust it."
        )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, of which credentials go to the same origin alone."""

    def __init__(self, config: RemoteConfig) -> None:
        self.config = config

    def http_error_302(self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any) -> Any:
        """Raises: Unreachable for too many redirects, one to another protocol, or to a host that is not allowed."""
        fp.close()  # unread: the body may have no end
        first, hops = getattr(req, "first", str(split(req.full_url))), getattr(req, "hops", 0) + 1
        if hops > _HOPS:
            raise Unreachable(f"{first}: the server redirects more than {_HOPS} times. Check the address.")
        target = self._target(req, first, headers.get("Location", ""))
        again = urllib.request.Request(_quoted(target.asked), headers=_kept(req))
        if _origin(again.full_url) == _origin(req.full_url) and req.has_header("Authorization"):
            again.add_unredirected_header("Authorization", req.get_header("Authorization") or "")
        again.first, again.hops = first, hops  # type: ignore[attr-defined]
        return self.parent.open(again, timeout=req.timeout)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def _target(self, req: urllib.request.Request, first: str, location: str) -> Address:
        """Without a login: no server gives credentials to this process."""
        try:
            url = split(urljoin(req.full_url, location))
        except ValueError:
            raise Unreachable(f"{first}: the server redirects to an address that cannot be opened.") from None
        old, new = (one.partition("://")[0].lower() for one in (req.full_url, url.url))
        if not location or new not in _TO[old]:
            raise Unreachable(
                f"{first}: the server redirects from {old} to {foreign(new) if location else 'nowhere'}, which is "
                "refused. Name the file's own address if you trust it."
            )
        check_host(url, self.config, first)
        return Address(url.url, "", url.query)


@lru_cache(8)
def _opener(config: RemoteConfig) -> urllib.request.OpenerDirector:
    """http and https, with the proxies of the environment; no other protocol has a handler."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(config),
    ):
        opener.add_handler(handler)
    return opener


def _kept(req: urllib.request.Request) -> dict[str, str]:
    return {name: value for name, value in req.headers.items() if name.lower() not in _SECRET_HEADERS}


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _quoted(url: str) -> str:
    """As urllib takes it: no white space, no control characters, ASCII alone."""
    return quote(url, safe=string.punctuation)

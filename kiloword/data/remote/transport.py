"""What the transports (http, fsspec) share: what a server says about a file, time limits, hosts that may be asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from kiloword.addresses import Address
from kiloword.data.remote.config import VARIABLE, RemoteConfig
from kiloword.data.remote.errors import Fault, Unreachable, foreign

LARGEST = 10 * 10**12  # bytes of a file: twice the largest object of S3
_SECONDS = 4  # time-outs that a whole call may take, however slowly its bytes come
T = TypeVar("T")


@dataclass(frozen=True)
class Checksum:
    """`algorithm` as hashlib names it; `value` hexadecimal."""

    algorithm: str
    value: str


@dataclass(frozen=True)
class Stat:
    """`tag` changes when the file does ("": unknown); `ranged`: any range of bytes can be requested."""

    size: int  # bytes
    tag: str
    ranged: bool
    checksum: Checksum | None = None


def decimal(text: str) -> int | None:
    """A whole number of at most 18 ASCII digits, as headers have it; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def checked_size(claim: str, address: Address) -> int:
    """The length of a file from what a server says. Raises: Unreachable for one that cannot be."""
    size = decimal(claim)
    if size is not None and size <= LARGEST:
        return size
    if not claim:
        problem = "the server does not say how long it is. Expected a Content-Length."
    elif size is None:
        problem = f"the server gives {claim[:40]!r} as its length. Expected a whole number of bytes."
    else:
        problem = f"the server says that it has {size:,} bytes. Expected at most {LARGEST:,}: use several tars."
    raise Unreachable(f"{address}: {foreign(problem)}")


def bounded(call: Callable[[], T], seconds: float, discard: Callable[[T], object] = lambda _late: None) -> T:
    """What a call returns or raises. Args: discard: receives a result that comes too late.

    A call that hangs is abandoned in its thread. Raises: Fault after 4 times `seconds`.
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


def check_host(address: Address, config: RemoteConfig, origin: str = "") -> None:
    """Args: origin: the address that redirected here. Raises: Unreachable for a host that the settings do not allow."""
    host = urlsplit(address.url).hostname or ""
    if not config.allows(host):
        what = f"redirects to the host {foreign(host)}, which is" if origin else f"the host {host} is"
        raise Unreachable(
            f"{origin or address}: {what} not one of the {VARIABLE} hosts ({', '.join(config.hosts)}). Add it there if "
            "you trust it."
        )

"""Addresses of data: what of a URL is stored and printed, and its credentials, which are used and neither.

The command line and `DataConfig` pass every URL through `public`, which remembers its credentials in this process and
returns the rest; `address_of` brings both together where the data is opened.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^?#]*)(.*)", re.DOTALL)
_WORD = re.compile(r"([^\s/?#@]*?)([A-Za-z][A-Za-z0-9+.-]{0,30}://.*)", re.DOTALL)  # what comes before a URL, and it
_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s?#'\"<>]*(?:[?#][^\s'\"<>)]*)?")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:@\[\]\s]+)(:[0-9]{0,5})?")
_CHECKED = ("http", "https", "ftp", "ftps", "sftp")  # schemes whose authority is a host and a port
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs", "github")  # schemes where NAME@ names a container, no user
_SIGNATURE = re.compile(
    r"x-(amz|goog|oss|cos|ms|obs)-.*|q-(sign|ak|key|header|url).*|signature|expires|policy|key-pair-id|awsaccesskeyid"
    r"|googleaccessid|ossaccesskeyid|security-token|s(ig|e|p|v|r|t|pr|ip|i)|sk(oid|tid|t|e|s|v)|hdn(ea|ts)|verify|hmac"
    r"|((access|auth|refresh|id|session)[-_]?)?token|auth|authorization|((api|access)[-_]?)?key|api[-_]?key"
    r"|pass|passwd|password|pwd|secret|jwt|md5|download"
)
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|SIGNATURE|APIKEY|(_|^)KEY(_ID)?$")
_HIDDEN = "***"
_LEAST, _LEAST_VALUE = 4, 8  # characters of a password, and of other values, to be hidden: shorter ones are everywhere

_known: dict[str, Address] = {}
_secrets: set[str] = set()


@dataclass(frozen=True)
class Address:
    """Where a file is. `url` is its identity, which is printed and compared: scheme, host, port and path."""

    url: str
    login: str = field(default="", repr=False, compare=False)  # `user:password`, as in the URL
    query: str = field(default="", repr=False, compare=False)  # `?query#fragment`, as in the URL

    def __str__(self) -> str:
        return self.url

    @property
    def full(self) -> str:
        """With all credentials: for a library that reads them from the URL."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{self.login}{'@' if self.login else ''}{rest}{self.query}"

    @property
    def selector(self) -> str:
        """The parameters of the query that are no known signature: they may select the file."""
        query = self.query.partition("#")[0].removeprefix("?")
        pairs = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
        return "&".join(sorted(f"{name}={value}" for name, value in pairs if not _SIGNATURE.fullmatch(name.lower())))


def is_url(text: str) -> bool:
    """Whether a text begins as a URL does."""
    return _URL.match(text) is not None


def split(url: str) -> Address:
    """A URL as its identity and its credentials. Raises: ValueError, which does not repeat the URL, where a part of a
    login could pass for the identity, as when a password holds a / that is not written as %2F."""
    match = _URL.fullmatch(url)
    if match is None:
        raise ValueError("an address has no scheme. Expected scheme://host/path, such as https://host/0.tar.")
    scheme, authority, path, query = match[1].lower(), match[2], match[3], match[4]
    login, at, host = authority.rpartition("@")
    inside = "@" in path and ("://" in path or (":" in host and scheme not in _CHECKED))
    if inside or (scheme in _CHECKED and not _HOST.fullmatch(host)):
        raise ValueError(
            f"an address of {scheme} has no valid host and port, or a login in its path. Expected "
            f"{scheme}://user:password@host:8080/path; in a login write %2F for /, %3F for ?, %23 for #, %40 for @."
        )
    if at and scheme in _CONTAINERS and (":" not in login or scheme == "github"):
        login, host = "", authority
    return Address(f"{scheme}://{host}{path}", login, query)


def public(word: str) -> str:
    """A word of the command line, or a source, without the credentials of the URL in it, which are remembered.

    The URL begins the word, or follows a flag and "=" (or ":" or ","), and goes on to the word's end.
    Raises: ValueError for two URLs that only their queries tell apart, and as `split`.
    """
    if (match := _WORD.match(word)) is None:
        return word
    address = address_of(match[2])
    return match[1] + address.url if address.login or address.query else word


def without_credentials(value: Any) -> Any:
    """Plain data from a file: its URLs without credentials, which are not remembered (they are not this user's)."""
    if isinstance(value, dict):
        return {name: without_credentials(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_credentials, value))
    match = _WORD.match(value) if isinstance(value, str) else None
    return value if match is None else match[1] + split(match[2]).url


def address_of(url: str) -> Address:
    """A URL with its own credentials, which are remembered and hidden by `scrubbed`, else with those remembered for it.

    Raises: ValueError where another query of the same address names another file, and as `split`.
    """
    address = split(url)
    before = _known.get(address.url, address)
    if not (address.login or address.query):
        return before
    if before.selector != address.selector:
        raise ValueError(
            f"{address.url} comes with two different queries. Data is told apart by its address without the query, "
            "which may be a signature: give the two files different paths, or fetch one of them first."
        )
    _known[address.url] = address
    _secrets.update(_secrets_of(address.login, address.query))
    return address


def scrubbed(text: str) -> str:
    """A text of a server or a library without credentials: those in use, of the environment, of any URL in it."""
    secrets = set(_secrets)
    for name, value in os.environ.items():
        if name.upper().endswith("_PROXY") and "@" in value:
            secrets.update(_secrets_of(value.rpartition("@")[0].rpartition("//")[2], ""))
        elif _SECRET_NAME.search(name.upper()) and len(value) >= _LEAST_VALUE and not os.path.exists(value):
            secrets.add(value)
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return _IN_TEXT.sub(_identity, text)


def _identity(match: re.Match[str]) -> str:
    try:
        return split(match[0]).url
    except ValueError:  # it may be a login that is not quoted
        return match[0].partition("://")[0] + "://" + _HIDDEN


def _secrets_of(login: str, query: str) -> Iterator[str]:
    user, _, password = login.partition(":")
    if login:
        yield login
        yield base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    yield from (one for one in (password or user, unquote(password or user)) if len(one) >= _LEAST)
    raw, _, fragment = query.removeprefix("?").partition("#")
    values = [pair.partition("=")[2] or pair for pair in raw.split("&")] + [raw, fragment]
    yield from (one for value in values for one in (value, unquote(value)) if len(one) >= _LEAST_VALUE)

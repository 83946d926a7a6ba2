"""s3, gs, hf and all other file systems of fsspec."""

from __future__ import annotations

import base64
import binascii
import ftplib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from kiloword.addresses import Address, split
from kiloword.data.remote.config import RemoteConfig
from kiloword.data.remote.errors import Fault, TooLarge, Unreachable, foreign
from kiloword.data.remote.transport import Checksum, Stat, bounded, check_host, checked_size
from kiloword.errors import needs

_TAGS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "last_modified", "updated", "mtime", "created")
_AT_ONCE = 8 << 20  # bytes
T = TypeVar("T")


class Fsspec:
    """One file or folder. Raises: Fault for errors that may pass, else Unreachable."""

    def __init__(self, address: Address, config: RemoteConfig) -> None:
        self.address, self.config = address, config

    def stat(self) -> Stat:
        """Size and version as the file system reports them. Raises: Unreachable for a folder or a bad size."""
        info = self._call(lambda fs, path: fs.info(path))
        if info.get("type") == "directory":
            raise Unreachable(f"{self.address} is a folder. Write a / at its end to read the tars in it.")
        size = checked_size("" if info.get("size") is None else str(info["size"]), self.address)
        tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
        return Stat(size, tag, True, _checksum(info))

    def read(self, stat: Stat, start: int, stop: int) -> Iterator[bytes]:
        """The bytes [start, stop) in parts, each of which is in memory as a whole; a short part is the last."""
        for at in range(start, stop, _AT_ONCE):
            end = min(at + _AT_ONCE, stop)
            raw = self._call(lambda fs, path, at=at, end=end: fs.cat_file(path, start=at, end=end))  # type: ignore[misc]
            yield raw[: end - at]
            if len(raw) < end - at:
                return

    def small(self, most: int) -> bytes | None:
        """The content of a small file; None if there is none. Raises: TooLarge."""
        try:
            raw = bytes(self._call(lambda fs, path: fs.cat_file(path, start=0, end=most + 1)))
        except Unreachable:
            return None
        if len(raw) > most:
            raise TooLarge(f"{self.address} has more than {most:,} bytes, the most that such a file may have.")
        return raw

    def folder(self) -> list[Address]:
        """The files in a folder, with its credentials."""
        entries = self._call(lambda fs, path: [(fs.unstrip_protocol(e["name"]), e) for e in fs.ls(path, detail=True)])
        urls = [split(str(url)).url for url, entry in entries if entry.get("type") != "directory"]
        return [Address(url, self.address.login, self.address.query) for url in urls]

    def _call(self, use: Callable[[Any, str], T]) -> T:
        """Use a new file system: one made before a fork does not work after it."""
        check_host(self.address, self.config)
        try:
            import fsspec

            fs, path = fsspec.url_to_fs(self.address.full)
        except (ImportError, ValueError, TypeError) as error:
            raise Unreachable(
                f"{self.address} cannot be opened ({foreign(str(error))}). "
                + needs("s3, gs or hf", "the packages of its store", "remote", "; http and https need nothing more.")
            ) from None
        except Exception as error:  # ftp and others connect at once
            raise self._failed(error) from None
        try:
            return bounded(lambda: use(fs, path), self.config.timeout)
        except Fault:
            raise
        except Exception as error:  # of any of a dozen libraries
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> Exception:
        if isinstance(error, FileNotFoundError):
            return Unreachable(f"{self.address}: no such file. Check the address.")
        reason = foreign(str(error))[:200]
        if isinstance(error, (PermissionError, ftplib.error_perm)) or "credentials" in type(error).__name__.lower():
            return Unreachable(f"{self.address}: access denied ({reason}). Check your rights and credentials.")
        if isinstance(error, NotImplementedError) or type(error).__name__ == "HfUriError":
            return Unreachable(f"{self.address} cannot be opened ({reason}). Check the address.")
        return Fault(f"{type(error).__name__}: {error}")


def _checksum(info: dict[str, Any]) -> Checksum | None:
    """Hugging Face's SHA-256, Google's MD5. S3's ETag is no MD5 in encrypted buckets, which cannot be seen here."""
    lfs = info.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
    if isinstance(sha256, str):
        return Checksum("sha256", sha256)
    md5 = info.get("md5Hash")
    with suppress(binascii.Error):
        return Checksum("md5", base64.b64decode(md5, validate=True).hex()) if isinstance(md5, str) else None
    return None

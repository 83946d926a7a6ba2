"""s3, gs, hf and whatever else fsspec knows."""

from __future__ import annotations

import base64
import binascii
import ftplib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from kiloword.addresses import Address, split
from kiloword.data.remote.call import bounded, check_host
from kiloword.data.remote.config import RemoteConfig
from kiloword.data.remote.errors import Fault, TooLarge, Unreachable, foreign
from kiloword.data.remote.stat import Checksum, Stat, size_problem

_TAGS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "last_modified", "updated", "mtime", "created")
_AT_ONCE = 8 << 20  # bytes
T = TypeVar("T")


class Fsspec:
    """One file or folder. Raises Fault for what may be over soon, else Unreachable."""

    def __init__(self, address: Address, config: RemoteConfig) -> None:
        self.address, self.config = address, config

    def stat(self) -> Stat:
        """Size and version as the file system gives them. Raises: Unreachable for a folder or a bad size."""
        info = self._call(lambda fs, path: fs.info(path))
        if info.get("type") == "directory":
            raise Unreachable(f"{self.address} is a folder. Write a / at its end to read the tars in it.")
        claim = "" if info.get("size") is None else str(info["size"])
        problem = size_problem(claim)
        if problem is not None:
            raise Unreachable(f"{self.address}: {foreign(problem)}")
        tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
        return Stat(int(claim), tag, True, _checksum(info))

    def read(self, stat: Stat, start: int, stop: int) -> Iterator[bytes]:
        """In parts, as each is one value in memory; a short one is the last."""
        for at in range(start, stop, _AT_ONCE):
            end = min(at + _AT_ONCE, stop)
            raw = self._call(lambda fs, path, at=at, end=end: fs.cat_file(path, start=at, end=end))  # type: ignore[misc]
            yield raw[: end - at]
            if len(raw) < end - at:
                return

    def small(self, most: int) -> bytes | None:
        """A small file; None where there is none. Raises: TooLarge."""
        try:
            raw = bytes(self._call(lambda fs, path: fs.cat_file(path, start=0, end=most + 1)))
        except Unreachable:
            return None
        if len(raw) > most:
            raise TooLarge(f"{self.address} has more than {most:,} bytes, the most that such a file may have.")
        return raw

    def folder(self) -> list[Address]:
        """The files in a folder, with its credentials."""
        found = self._call(lambda fs, path: [fs.unstrip_protocol(e["name"]) for e in _files(fs.ls(path, detail=True))])
        return [Address(split(str(url)).url, self.address.login, self.address.query) for url in found]

    def _call(self, use: Callable[[Any, str], T]) -> T:
        """The file system is asked for each time: one made before a fork does not work behind it."""
        check_host(self.address, self.config)
        try:
            import fsspec

            fs, path = fsspec.url_to_fs(self.address.full)
        except (ImportError, ValueError, TypeError) as error:
            raise Unreachable(
                f"{self.address} cannot be opened ({foreign(str(error))}). http and https need nothing more; s3, gs "
                "and hf: pip install 'kiloword[remote]'."
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
        if isinstance(error, (PermissionError, ftplib.error_perm)) or "credentials" in type(error).__name__.lower():
            return Unreachable(
                f"{self.address}: access denied ({foreign(str(error))[:200]}). Check your rights and credentials."
            )
        if isinstance(error, NotImplementedError) or type(error).__name__ == "HfUriError":
            return Unreachable(f"{self.address} cannot be opened ({foreign(str(error))[:200]}). Check the address.")
        return Fault(f"{type(error).__name__}: {error}")


def _files(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry.get("type") != "directory"]


def _checksum(info: dict[str, Any]) -> Checksum | None:
    """Google's MD5, Hugging Face's SHA-256. S3's ETag is none when the bucket is encrypted, which is not said here."""
    lfs = info.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
    if isinstance(sha256, str):
        return Checksum("sha256", sha256)
    md5 = info.get("md5Hash")
    if isinstance(md5, str):
        try:
            return Checksum("md5", base64.b64decode(md5, validate=True).hex())
        except binascii.Error:
            return None
    return None

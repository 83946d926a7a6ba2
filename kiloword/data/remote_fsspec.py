"""s3, gs, hf and whatever else fsspec knows."""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from kiloword.data.remote_config import RemoteConfig
from kiloword.data.remote_errors import Fault, Unreachable, shown
from kiloword.data.remote_stat import Checksum, Stat

_TAGS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "last_modified", "updated", "mtime", "created")
_SECONDS = 4  # time-outs that a whole call may take: the libraries do not say when a byte comes
_AT_ONCE = 8 << 20  # bytes
T = TypeVar("T")


class Fsspec:
    """One URL. Raises Fault for what may be over soon, else Unreachable."""

    def __init__(self, url: str, config: RemoteConfig) -> None:
        self.url, self.config = url, config

    def stat(self) -> Stat:
        info = self._call(lambda fs, path: fs.info(path))
        if info.get("type") == "directory":
            raise Unreachable(f"{shown(self.url)} is a folder. Write a / at its end to read the tars in it.")
        if info.get("size") is None:
            raise Unreachable(f"{shown(self.url)}: the server does not say how long it is.")
        tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
        return Stat(int(info["size"]), tag, True, _checksum(info))

    def read(self, stat: Stat, start: int, stop: int) -> Iterator[bytes]:
        """In parts, as each is one value in memory; a short one is the last."""
        for at in range(start, stop, _AT_ONCE):
            end = min(at + _AT_ONCE, stop)
            raw = self._call(lambda fs, path, at=at, end=end: fs.cat_file(path, start=at, end=end))  # type: ignore[misc]
            yield raw[: end - at]
            if len(raw) < end - at:
                return

    def small(self, most: int) -> bytes | None:
        try:
            return bytes(self._call(lambda fs, path: fs.cat_file(path, start=0, end=most)))
        except Unreachable:
            return None

    def folder(self) -> list[str]:
        """URLs of the files in a folder."""
        found = self._call(lambda fs, path: [fs.unstrip_protocol(e["name"]) for e in _files(fs.ls(path, detail=True))])
        return [str(url) for url in found]

    def _call(self, use: Callable[[Any, str], T]) -> T:
        """The file system is asked for each time: one made before a fork does not work behind it."""
        import fsspec

        try:
            fs, path = fsspec.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise Unreachable(
                f"{shown(self.url)} cannot be opened ({error}). http and https need nothing more; s3, gs and hf: "
                "pip install 'kiloword[remote]'."
            ) from None
        except OSError as error:  # ftp and others connect at once
            raise self._failed(error) from None
        return self._bounded(lambda: use(fs, path))

    def _bounded(self, call: Callable[[], T]) -> T:
        """A library that hangs is left behind in its thread."""
        results: list[T] = []
        errors: list[Exception] = []

        def work() -> None:
            try:
                results.append(call())
            except Exception as error:  # of any of a dozen libraries
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(_SECONDS * self.config.timeout)
        if results:
            return results[0]
        raise self._failed(errors[0]) if errors else Fault(f"no answer in {_SECONDS * self.config.timeout:g} s")

    def _failed(self, error: Exception) -> Exception:
        url = shown(self.url)
        if isinstance(error, FileNotFoundError):
            return Unreachable(f"{url}: no such file. Check the address.")
        if isinstance(error, PermissionError) or "credentials" in type(error).__name__.lower():
            return Unreachable(f"{url}: access denied ({str(error)[:200]}). Check your rights and credentials.")
        return Fault(f"{type(error).__name__}: {error}"[:300])


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

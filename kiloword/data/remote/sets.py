"""Data sets at URLs: tars by http(s), s3, gs, hf or another file system of fsspec, and tables."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow.compute

from kiloword.addresses import Address, address_of, is_url
from kiloword.data.remote.config import RemoteConfig, remote_config
from kiloword.data.remote.errors import retried
from kiloword.data.remote.file import RemoteFile, name_of, open_remote_file, small_file
from kiloword.data.remote.fsspec_files import Fsspec
from kiloword.data.remote.index import open_remote_index
from kiloword.data.remote.transport import Checksum
from kiloword.data.sources.tables import TableSource
from kiloword.data.tars.shards import TarSource, expand, natural, text_lines
from kiloword.terminal import warn
from kiloword.types import Source

_TABLES = (".csv", ".tsv", ".parquet")
_KINDS = "a .tar, a brace pattern x-{000..123}.tar, a csv, tsv or parquet, or a folder of tars with a / at its end"
_SAY = 10.0  # seconds between messages about a long pass
_SUM = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")  # as `sha256sum` writes it


def open_remote(src: str) -> Source:
    """The data set at a URL: a tar, a brace pattern of tars, a folder of tars (not of http), or a table.

    Its name is the URL without credentials; those in it, or remembered for it (see `addresses`), are used.
    A table is downloaded now, and a tar without an index beside it is read once; later, blocks of tars are fetched as
    needed.
    Errors: ValueError for other data; Unreachable, a ValueError, for data that cannot be read.
    """
    config, address = remote_config(), address_of(src)
    if _suffix(address.url) in _TABLES:
        return _open_table(address, config)
    addresses = _tars(address, config)
    with ThreadPoolExecutor(int(config.threads)) as pool:
        try:
            tars = list(pool.map(lambda tar: open_remote_file(tar, config), addresses))
            tars = _with_sums(tars, config)
            _index(address.url, tars, pool)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    names, templates = (
        _lines(addresses[0], config, name) for name in ("classnames.txt", "zeroshot_classification_templates.txt")
    )
    return TarSource(address.url, tars, names, templates)


def local(path: Path | str) -> Path:
    """The local path of a file at a path or a URL. Raises: Unreachable."""
    return open_remote_file(str(path), remote_config()).whole() if is_url(str(path)) else Path(path)


def _tars(address: Address, config: RemoteConfig) -> list[Address]:
    src = address.url
    if _suffix(src) == ".tar":
        return [Address(url, address.login, address.query) for url in expand(src)]
    if not src.endswith("/"):
        raise ValueError(f"{src}: unknown kind of data. Expected {_KINDS}.")
    if src.startswith(("http://", "https://")):
        raise ValueError(f"{src}: http has no folders. Expected a brace pattern, such as {src}{{00000..00099}}.tar.")
    files = retried(address, config, Fsspec(address, config).folder)
    tars = [file for file in files if _suffix(file.url) == ".tar"]
    if not tars:
        raise ValueError(f"{src} is a folder without tars. Expected {_KINDS}.")
    return sorted(tars, key=lambda file: natural(name_of(file.url)))


def _suffix(url: str) -> str:
    return Path(urlsplit(url).path).suffix.lower()


def _index(src: str, tars: Sequence[RemoteFile], pool: ThreadPoolExecutor) -> None:
    """Make the index of every tar in the cache folder, with messages about progress if that takes long."""
    last_message = time.monotonic()
    for done, _ in enumerate(pool.map(_make_index, tars), 1):
        if time.monotonic() - last_message > _SAY:
            last_message = time.monotonic()
            warn(f"{src}: {done:,} of {len(tars):,} tars are indexed")


def _make_index(tar: RemoteFile) -> None:
    """Returns nothing: results wait for their turn, and an open file each would be too many."""
    open_remote_index(tar)


def _with_sums(tars: list[RemoteFile], config: RemoteConfig) -> list[RemoteFile]:
    """The tars, with the checksums of a file SHA256SUMS beside them if there is one."""
    folders = {_folder(tar.url): tar.address for tar in tars if not tar.address.query}
    sums: dict[str, str] = {}
    for folder, address in folders.items():
        raw = small_file(address.beside(folder + "SHA256SUMS"), config)
        lines = (raw or b"").decode("utf-8", "replace").splitlines()
        matches = filter(None, (_SUM.fullmatch(line.strip()) for line in lines))
        sums |= {folder + match[2]: match[1].lower() for match in matches}
    return [
        replace(tar, info=replace(tar.info, checksum=Checksum("sha256", sums[tar.url]))) if tar.url in sums else tar
        for tar in tars
    ]


def _folder(url: str) -> str:
    return url.rpartition("/")[0] + "/"


def _lines(address: Address, config: RemoteConfig, name: str) -> list[str] | None:
    """The lines of a file beside a tar or one folder higher; None if there is none. Errors: as of `text_lines`."""
    beside = _folder(address.url)
    for folder in (beside, _folder(beside.rstrip("/"))):
        has_host = urlsplit(folder).netloc and not folder.endswith("://")
        raw = small_file(address.beside(folder + name), config) if has_host else None
        if raw is not None:
            return text_lines(folder + name, raw)
    return None


def _open_table(address: Address, config: RemoteConfig) -> Source:
    """Errors: ValueError for a table whose images are files beside it."""
    table = TableSource(address.url, open_remote_file(address, config).whole())
    paths = table.paths()
    if paths is not None and not pyarrow.compute.all(pyarrow.compute.starts_with(paths, "/")).as_py():
        raise ValueError(
            f"{address} names its images by paths that are not of this machine. Expected a parquet that holds the "
            "images, or absolute paths; download the table together with its images, or write tars."
        )
    return table

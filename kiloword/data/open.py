"""Open a data set by its name on the command line (SRC)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pyarrow.compute

from kiloword.addresses import address_of, is_url
from kiloword.config.recipes import DataConfig
from kiloword.data import remote
from kiloword.data.columns import JSON, class_data
from kiloword.data.edits import held_out, mix, part_of
from kiloword.data.folders import (
    has_class_folders,
    has_shards,
    image_folders,
    is_image,
    open_classes,
    open_described,
    open_images,
    parents_of_images,
)
from kiloword.data.joins import kept, with_captions
from kiloword.data.map_style import MapStyleSource
from kiloword.data.query import FORM, parse_query, split_query
from kiloword.data.rows import Rows
from kiloword.data.sample import check_regular
from kiloword.data.tables import open_table, open_tables
from kiloword.data.tar import RANGE, expand, natural, open_remote_tars, open_tars
from kiloword.data.tree import tree_source
from kiloword.errors import LeftOut
from kiloword.terminal import shown, warn_once
from kiloword.types import Source

_TABLES = (".csv", ".tsv", ".parquet", ".txt", ".token", *JSON)
_TAR = re.compile(r".*\.(tar(\.(gz|bz2|xz|zst))?|tgz|tbz2|txz)", re.I)  # those that are packed are refused as tars
_BESIDE_TARS = (".txt", ".json", ".csv", ".parquet", ".arrow", ".kwindex", ".md", ".log")  # what tools write
_KINDS = (
    "a folder of tars (not packed), a tar, a brace pattern x-{000..123}.tar, csv, tsv, parquet, json, jsonl, a folder "
    "of images, class folders, or scenes"
)


def open_source(src: Any, size: int | None = None) -> Source:
    """The data set that `src` names.

    Args: src: see docs/data.md, or a data set in Python; after "tree:" class data, with captions by a tree
    of classes; after "train-part:" or "val-part:" one part of any; size: side of drawn images (scenes) in pixels.
    Errors: ValueError when nothing is there, or nothing can be read. What is left out (`notes`) is printed on stderr.
    """
    if not isinstance(src, str | Path):
        return src if hasattr(src, "record") else MapStyleSource(src)
    source = _open(str(src), size)
    warn_once(*getattr(source, "notes", []))
    return source


def _open(src: str, size: int | None) -> Source:
    part, whole = part_of(src)
    is_there = Path(src).exists()
    if part and not is_there:
        return held_out(open_source(whole, size), part)
    if re.match(r"scenes([:?]|$)", src) and not is_there:
        from kiloword.data.scenes.source import open_scenes

        return open_scenes(src, size or 64)
    if src.startswith("tree:") and not is_there:
        data, query = split_query(src.removeprefix("tree:"))
        return tree_source(open_source(data, size), Path(part_of(data)[1]).expanduser(), query, src)
    if is_url(src):
        return _open_url(src)
    if RANGE.search(src):
        pattern, _, query = src.partition("?")
        is_table = Path(pattern).suffix.lower() in _TABLES
        files = [Path(name) for name in expand(pattern if is_table else src)]
        if missing := [file for file in files if not file.is_file()]:
            raise ValueError(f"{src}: {len(missing)} of {len(files)} files are missing, the first is {missing[0]}.")
        return open_tables(src, files, parse_query(pattern, query)) if is_table else _shards(src, files)
    name, query = split_query(src)
    path = Path(name).expanduser()
    if not path.exists():
        raise ValueError(f"{name}: no such file or folder. Expected {_KINDS}; {{a,b}}, * and ; belong to a name.")
    if path.suffix.lower() in _TABLES and path.is_file():
        return open_table(src, path, parse_query(name, query))
    if query:
        raise ValueError(
            f"{name} takes no parameters, but ?{shown(query[:60])} follows it: only tables and json do ({FORM})."
        )
    if path.is_dir():
        return _open_folder(src, path)
    check_regular(path)
    if _TAR.fullmatch(path.name):
        return _shards(src, [path])
    raise ValueError(f"{src}: unknown kind of file. Expected {_KINDS}.")


def _open_url(src: str) -> Source:
    """Tars, or a table whose images lie in it. Errors: ValueError for other data; Unreachable."""
    address = address_of(src)
    url, suffix = address.url, os.path.splitext(address.url)[1].lower()
    if suffix in _TABLES[:3]:
        table = open_table(url, remote.local(address))
        if not pyarrow.compute.all(pyarrow.compute.starts_with(table.table.column("file"), "/")).as_py():
            raise ValueError(
                f"{url} names its images by paths that are not of this machine. Expected a parquet that holds the "
                "images, or absolute paths; download the table together with its images, or write tars."
            )
        return table
    if suffix != ".tar" and not url.endswith("/"):
        raise ValueError(
            f"{url}: unknown kind of data. Expected a .tar, a brace pattern x-{{000..123}}.tar, a csv, tsv or parquet, "
            "or a folder of tars with a / at its end."
        )
    return open_remote_tars(src)


def open_data(data: DataConfig, size: int | None = None, source: Source | None = None) -> Source:
    """The training data of the settings: sources, their weights, extra captions, and what keep-lists keep of them.

    Args: size: height and width of drawn images (scenes) in pixels; source: in place of the named sources.
    Errors: ValueError when something is missing or does not fit.
    """
    sources = [open_source(src, size=size) for src in data.sources] if source is None else [source]
    return kept(with_captions(mix(sources, data.weights), data.extra_captions, data.raw_captions), data.keep)


def _open_folder(src: str, folder: Path) -> Source:
    files, tars = sorted(os.listdir(folder)), _tars(folder)
    if not tars:
        if described := open_described(src, folder):
            return described
        if any(map(is_image, files)):
            return open_images(src, folder)
        if (folder / "classnames.txt").is_file():
            tars = _tars(folder / "test")  # CLIP_benchmark's layout
    if tars:
        return _shards(src, tars, folder)
    if has_shards(folder):
        return open_images(src, folder, deep=True)
    if has_class_folders(folder):
        return open_classes(src, folder)
    tables = [f for f in files if f.lower().endswith(_TABLES[:3]) and f[0] != "." and (folder / f).is_file()]
    if tables and all(re.fullmatch(r"[0-9]{5,}\.parquet", table) for table in tables):  # of img2dataset
        return open_tables(src, [folder / table for table in tables])
    if inner := [file for file in files if _tars(folder / file)] or tables or parents_of_images(folder):
        raise ValueError(f"{src} is no data itself, but may hold some: name one of {shown(', '.join(inner[:8]))}.")
    what = "a folder without tars or images" if files else "an empty folder"
    raise ValueError(f"{src} is {what}. Expected {_KINDS}.")


def _tars(folder: Path) -> list[Path]:
    """The tars directly in a folder, in natural order: 2.tar before 10.tar."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.name.lower().endswith(".tar") and e.name[0] != "." and e.is_file()]
    return [folder / name for name in sorted(names, key=natural)]


def _shards(src: str, tars: list[Path], folder: Path | None = None) -> Rows:
    """Tars as one source. Args: folder: that of the tars or above it, whose other files are named in the notes."""
    source, left = open_tars(src, tars, *class_data(tars[0].parent)), LeftOut("file")
    for place in {folder, tars[0].parent} if folder else ():
        used = {*(tar.name for tar in tars), "train", "test"}
        used |= {name for name in os.listdir(place) if name.endswith(_BESIDE_TARS) or name.startswith(".")}
        _, images, _ = next(image_folders(place, left, deep=False, used=used))
        for image in images:
            left.add(image, "an image beside tars, which are the data")
    source.notes += [f"{src}: {line}" for line in left.lines()]
    return source

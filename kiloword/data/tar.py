"""Tars as img2dataset and webdataset write them: each is read once, and becomes rows of one Arrow file for its set.

The file lies in the cache folder, or beside the tars, where `kiloword data index` puts it. Its metadata say which size
and time of change each tar had: only tars that are new, or have changed, are read again.

The key of a member is its name without the last suffix: `IMG_2023.05.01.jpg` and `IMG_2023.05.01.txt` are one sample.
Where that leaves an image or a text alone, words before the suffix are the name of a field, as in webdataset:
`0.image.jpg` and `0.caption.txt` are sample 0. Members that are not read are counted by reason. A .npy of at most
`MAX_LABEL` bytes, which may name several classes, stands for the cls of a sample without one; beside a cls it may hold
groups (DataComp), and stands for the json of a sample without one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
from filelock import FileLock

from kiloword import addresses
from kiloword.addresses import Address, address_of, is_url
from kiloword.data import remote
from kiloword.data.classes.names import text_lines
from kiloword.data.rows import Rows, cached, keeping, key_bytes, mapped, version_of
from kiloword.data.sample import IMAGE_SUFFIXES, MAX_TEXT, check_size, parse_captions, parse_label
from kiloword.errors import LeftOut
from kiloword.files import cache_folder, replacing, swept
from kiloword.terminal import shown, warn
from kiloword.types import BadSample, LabelSet

INDEX = "kiloword-index.arrow"  # the file of a set, beside its tars
MAX_LABEL = 1 << 17  # bytes of a .npy
RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
_MOST_NAMES = 1_000_000  # files of one pattern
_FEW = 16  # remote tars that are read without an index
_TOGETHER = 8  # tars for each process that reads
_BATCH = 65_536  # rows, at least, of a record batch
_ROWS = 8192  # that are parsed together
_SAY = 10.0  # seconds between messages about a long pass
_PADDING = 1 << 20  # zeros that may follow the end; tar itself writes at most 10 kB
_PARTS = ("image", "txt", "json", "cls")
_BY_ARRAY = (3, 2)  # parts for which a .npy may stand: the first that the sample lacks
_READ = (*IMAGE_SUFFIXES, *_PARTS[1:], "npy")  # suffixes
_FIELD = re.compile(r"(?<=[^/])(\.[^\W\d][^./]*)+$")  # words between the key and the suffix
_KIND = b"kiloword tars 1"  # of the metadata
_SCHEMA = pa.schema(
    {
        "key": pa.binary(), "captions": pa.list_(pa.string()), "label": pa.int64(), "labels": pa.list_(pa.int64()),
        "of": pa.int64(), "info": pa.string(), "error": pa.string(), "offset": pa.int64(), "size": pa.int64(),
    }
)  # fmt: skip
_FILE = pa.field("file", pa.dictionary(pa.int32(), pa.binary()))


@dataclass
class Tar:
    """What the file of a set says of one of its tars."""

    name: str  # below the folder of the set
    version: str  # its size, and what else changes with it
    rows: int = 0
    digest: str = ""  # of names, places and sizes of all members
    note: str = ""  # what is wrong with it as a whole
    left_out: dict[str, int] = field(default_factory=dict)  # number of members that are not read, by reason
    named: dict[str, list[str]] = field(default_factory=dict)  # the first of them


def open_tars(
    name: str, tars: Sequence[Path], classnames: list[str] | None = None, templates: list[str] | None = None
) -> Rows:
    """The samples of local tars, in order of the tars. Args: classnames, templates: of class data, else None.

    Errors: ValueError without tars or images, for a file that is no plain tar, and when the rows cannot be kept.
    """
    if not tars:
        raise ValueError(f"{name}: no tars. Expected at least one, as img2dataset writes them.")
    folder = os.path.commonpath([os.path.abspath(tar.parent) for tar in tars])
    wanted = list[Tar]()
    for tar in tars:
        wanted.append(Tar(os.path.relpath(tar, folder), version_of(tar.stat())))
    beside = Path(folder, INDEX)
    kept = [beside, _kept(os.path.abspath(name))]
    return _rows(name, folder, wanted, list(map(str, tars)), kept, [beside], classnames, templates)


def open_remote_tars(src: str) -> Rows:
    """The samples of tars at URLs: a tar, a brace pattern, or a folder (not of http).

    They are opened by the index beside them, which `kiloword data index` makes where the data lie; a few tars are read
    without one. Errors: as of `open_tars`; Unreachable.
    """
    address = address_of(src)
    folder = address.url.partition("{")[0].rpartition("/")[0] + "/"
    names = [] if address.url == folder else [url.removeprefix(folder) for url in expand(address.url)]

    def at(name: str) -> Address:
        return Address(folder + name, address.login, address.query)

    def lines(name: str) -> list[str] | None:
        above = folder.rstrip("/").rpartition("/")[0] + "/"
        for url in (folder, above) if not above.endswith("://") else (folder,):
            with suppress(remote.Missing):
                path = remote.local(Address(url + name, address.login, address.query))
                return text_lines(url + name, path.read_bytes())
        return None

    known = list[Path]()
    try:
        known = [remote.local(at(INDEX))]
    except remote.Missing:
        names = names or _listed(at(""))
        if len(names) > _FEW:
            raise ValueError(
                f"{address} are {len(names):,} tars without an index. Make it by `kiloword data index FOLDER` where "
                f"the data lie, and put it beside them: {folder}{INDEX}."
            ) from None
        with ThreadPoolExecutor(_FEW) as pool:
            wanted = list(map(Tar, names, pool.map(remote.version_of, map(at, names))))
    else:
        indexed = {name: tar for tar in _read(known[0]) for name in (tar.name, quote(tar.name))}
        if missing := [name for name in names if name not in indexed]:
            raise ValueError(
                f"{folder}{INDEX} lacks {len(missing):,} of {len(names):,} tars, the first is {missing[0]}. Make it "
                "again by `kiloword data index FOLDER` where the data lie."
            ) from None
        wanted = [replace(indexed[name], name=name) for name in names] or _read(known[0])
    for tar in wanted:
        addresses.remember(at(tar.name))
    urls, kept = [folder + tar.name for tar in wanted], [_kept(f"{address.url}\n{address.selector}")]
    classes = lines("classnames.txt"), lines("zeroshot_classification_templates.txt")
    return _rows(address.url, folder, wanted, urls, kept, known, *classes)


def _listed(folder: Address) -> list[str]:
    """The tars in a folder, in natural order. Errors: ValueError without any."""
    if folder.url.startswith("http"):
        raise ValueError(f"{folder}: http has no folders. Expected a brace pattern, or an index {INDEX} in it.")
    tars = sorted((name for name in remote.files_in(folder) if name.lower().endswith(".tar")), key=natural)
    if not tars:
        raise ValueError(f"{folder} is a folder without tars. Expected a .tar, or a folder of tars.")
    return tars


def index_beside(rows: Rows) -> tuple[Path, int] | None:
    """Put the rows of a folder of local tars beside them, so that nobody reads the tars again.

    Returns: the file, which remote sets need, and the number of damaged tars; None for other data.
    Errors: ValueError where the folder cannot be written.
    """
    if rows.path is None or not (tars := _read(rows.path)):
        return None
    path = Path(rows.folder, INDEX)
    if not rows.remote and path != rows.path:
        with keeping(path), replacing(swept(path)) as out, rows.path.open("rb") as kept:
            shutil.copyfileobj(kept, out, 1 << 24)
    return path, sum(bool(tar.note) for tar in tars)


# The file of a set


def _rows(
    name: str, folder: str, wanted: list[Tar], places: list[str], kept: list[Path], known: list[Path], *classes: Any
) -> Rows:
    """Args: places: of the tars; kept: files that may hold the set, the last is made; known: files with some of it."""
    for path in kept:
        if _fits(tars := _read(path), wanted):
            break
    else:
        tars = _made(path, name, wanted, places, [path, *known])
    lines, damaged, empty, members = list[str](), list[str](), LeftOut("tar"), LeftOut("member")
    for tar, place in zip(tars, places, strict=True):
        file = remote.name_of(place) if is_url(place) else os.path.basename(place)
        lines.append(f"{file} {tar.version.partition('-')[0]} {tar.digest}")
        members.extend(LeftOut("member", counts=tar.left_out, first=tar.named))
        if tar.note:
            damaged.append(f"{place}: {tar.note}")
        if not tar.rows:
            empty.add(file, "no images in it")
    if not any(tar.rows for tar in tars):
        raise ValueError(f"{name} holds no images. Expected webdataset tars, as img2dataset writes. {members}".strip())
    fingerprint = hashlib.blake2b("\n".join(lines).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    notes = [*damaged, *(f"{name}: {line}" for line in (*empty.lines(), *members.lines()))]
    names, templates = classes
    return Rows(
        name, mapped(path), folder, fingerprint, classnames=names, templates=templates, notes=notes, path=path,
        versions={} if is_url(folder) else {tar.name: tar.version for tar in tars},
    )  # fmt: skip


def _kept(identity: str) -> Path:
    digest = hashlib.blake2b(identity.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return cache_folder() / "tars" / f"{digest}.arrow"


def _read(path: Path) -> list[Tar]:
    """What a file says of its tars; nothing where there is no such file, or of another version."""
    try:
        with pa.memory_map(os.fsencode(path)) as file:
            metadata = pa.ipc.open_file(file).schema.metadata or {}
    except (OSError, pa.ArrowInvalid):
        return []
    return [Tar(*one) for one in json.loads(metadata.get(_KIND, b"[]"))]


def _fits(tars: list[Tar], wanted: list[Tar]) -> bool:
    return [(tar.name, tar.version) for tar in tars] == [(tar.name, tar.version) for tar in wanted]


def _made(path: Path, name: str, wanted: list[Tar], places: list[str], known: list[Path]) -> list[Tar]:
    """Write the file of a set; a tar is read unless a known file has its rows."""
    with keeping(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock").acquire()
    with lock:
        if _fits(tars := _read(path), wanted):  # another process has made it
            return tars
        there = dict[tuple[str, str], tuple[Tar, pa.Table]]()
        for file in known:
            old, start = _read(file), 0
            rows = mapped(file) if old else None
            for tar in old:
                there[unquote(tar.name), tar.version] = tar, rows.slice(start, tar.rows)  # type: ignore[union-attr]
                start += tar.rows
        keys = [(unquote(tar.name), tar.version) for tar in wanted]
        new = _scanned(name, [(place, key[1]) for place, key in zip(places, keys, strict=True) if key not in there])
        parts = [None if key in there else next(new) for key in keys]
        found = [_read(part)[0] if part else there[key][0] for part, key in zip(parts, keys, strict=True)]
        tars = [replace(tar, name=one.name, version=one.version) for tar, one in zip(found, wanted, strict=True)]
        tables = (mapped(part) if part else there[key][1] for part, key in zip(parts, keys, strict=True))
        with keeping(path):
            write_set(path, tars, tables, [f"{t.name}#{t.version}" if is_url(places[0]) else t.name for t in tars])
            for part in filter(None, parts):
                part.unlink(missing_ok=True)
    return tars


def write_set(path: Path, tars: list[Tar], tables: Iterable[pa.Table], files: list[str]) -> None:
    """Write the rows of all tars in large record batches, and what is said of the tars as metadata."""
    names = pa.array(map(os.fsencode, files), pa.binary())
    metadata, waiting = {_KIND: json.dumps([list(vars(tar).values()) for tar in tars])}, list[pa.Table]()
    with replacing(path) as file, pa.ipc.new_file(file, pa.schema([*_SCHEMA, _FILE], metadata)) as out:
        for n, table in enumerate(tables):
            numbers = pa.array(np.full(len(table), n), pa.int32(), mask=np.asarray(table["offset"].is_null()))
            rows = table.select(_SCHEMA.names).replace_schema_metadata()
            waiting.append(rows.append_column("number", numbers))
            if n == len(tars) - 1 or sum(map(len, waiting)) >= _BATCH:
                rows = pa.concat_tables(waiting).combine_chunks()
                numbers = rows["number"].combine_chunks()
                of = pa.DictionaryArray.from_arrays(numbers, names)
                out.write_table(rows.drop_columns("number").append_column(_FILE, of))
                waiting.clear()


def _scanned(name: str, tars: list[tuple[str, str]]) -> Iterator[Path]:
    """The rows of each tar in a file of its own, so that a start after a killed one goes on."""
    workers = min(os.cpu_count() or 1, len(tars) // _TOGETHER)
    with ExitStack() as stack:
        read: Any = map
        if tars and is_url(tars[0][0]):
            read = stack.enter_context(ThreadPoolExecutor(remote.THREADS)).map
        elif workers:
            read = stack.enter_context(ProcessPoolExecutor(workers, get_context("fork"))).map
        last = time.monotonic()
        for done, path in enumerate(read(_rows_of, tars), 1):
            if time.monotonic() - last > _SAY:
                last = time.monotonic()
                warn(f"{name}: {done:,} of {len(tars):,} tars are read")
            yield path


def _rows_of(tar: tuple[str, str]) -> Path:
    place = "#".join(tar) if is_url(tar[0]) else tar[0]
    return cached(" ".join(tar), lambda: scan(place))


# One tar


def scan(place: str) -> pa.Table:
    """The rows of a tar, in order of the first member of each; none where it has no image. The metadata hold a `Tar`.

    Args: place: a path, or a URL as `remote.opened` takes it. Errors: ValueError when the file is no plain tar.
    """
    left_out = LeftOut("member")
    with remote.opened(place) if is_url(place) else open(place, "rb") as file:
        fd, total = file.fileno(), os.fstat(file.fileno()).st_size
        members, note = _members(place.rpartition("#")[0] if is_url(place) else place, file, total, left_out)
        keys, places = _samples(members, left_out)
        names = [key.encode("utf-8", "surrogateescape") for key in keys]
        ends = np.cumsum(list(map(len, names)), dtype="<i8")
        table = np.column_stack([np.array(places, "<i8").reshape(-1, 2 * len(_PARTS)), ends])
        digest = hashlib.blake2b(table.tobytes() + b"".join(names), digest_size=16).hexdigest()
        because = [""] * (len(keys) - 1) + [f" (the tar is {note})" if note else ""]
        rows = (_row(*one, fd, total) for one in zip(map(key_bytes, keys), places, because, strict=False))
        batches = list[pa.RecordBatch]()
        while together := list(islice(rows, _ROWS)):
            batches.append(pa.RecordBatch.from_pylist(together, _SCHEMA))
    metadata = json.dumps([["", "", len(keys), digest, note, left_out.counts, left_out.first]])
    return pa.Table.from_batches(batches, _SCHEMA).replace_schema_metadata({_KIND: metadata})


def _members(name: str, file: BinaryIO, total: int, left_out: LeftOut) -> tuple[list[tuple[str, int, int]], str]:
    """Name, offset and size of the regular files in a tar, and what is wrong with the tar."""
    found, before, is_cut = list[tuple[str, int, int]](), -1, not total
    try:
        tar = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape") if total else None
    except tarfile.ReadError:
        raise ValueError(
            f"{name} cannot be read as a plain tar (it does not begin with a header of a tar). Compressed tars have no "
            "byte offsets: unpack the .gz."
        ) from None
    while tar is not None:
        try:
            member = tar.next()
        except (tarfile.TarError, ValueError, OverflowError, MemoryError):
            member, is_cut = None, file.tell() >= total
        if member is None or member.offset <= before:  # damaged sizes lead back
            break
        before = member.offset
        tar.members.clear()  # type: ignore[attr-defined]  # for memory
        if member.isreg() and not member.issparse():  # a sparse one does not lie in one piece
            found.append((member.name, member.offset_data, min(member.size, total + 1)))
        elif not member.isdir():
            left_out.add(shown(member.name), "no file, but a link or the like")
    position = tar.offset if tar else 0
    file.seek(min(position, total))
    block = file.read(tarfile.BLOCKSIZE)
    if is_cut or len(block) < tarfile.BLOCKSIZE:
        return found, f"cut at byte {total:,}"
    if any(block):
        return found, f"damaged at byte {position:,}; what follows is not read"
    rest = file.read(_PADDING)  # a second tar (`cat a.tar b.tar`), or the zeros of a download that never finished
    more = any(rest) or len(rest) == _PADDING
    return found, f"ended at byte {position:,}; what follows is not read" if more else ""


def _samples(members: list[tuple[str, int, int]], left_out: LeftOut) -> tuple[list[str], list[list[int]]]:
    """The key of each sample, and the offset and size of each of its `_PARTS`; -1 for one that it lacks."""
    keys, places = list[str](), list[list[int]]()
    current, seen = dict[str, int](), set[tuple[int, str]]()  # members of a sample need not be neighbours
    named = [(name, *_split(name), offset, size) for name, offset, size in members]
    key_of = _keys((stem, suffix) for _, stem, suffix, *_ in named)
    for name, stem, suffix, offset, size in sorted(named, key=lambda one: one[2] == "npy"):
        row, free = list[int](), list[int]()  # parts for which the member may stand, the first choice first
        if suffix not in _READ:
            reason = f".{suffix} is not read" if suffix else "the name is hidden or has no suffix"
        elif suffix == "npy":  # alone it is no sample
            row = places[current[stem]] if stem in current and size <= MAX_LABEL else []
            free = [part for part in _BY_ARRAY if row and row[2 * part] < 0]
            reason = "a .npy that is too large, or whose sample lacks neither .cls nor .json"
        elif not (key := key_of[stem]):
            reason = "its sample has a member of this kind without a field's name"
        else:
            number = current.get(key)
            if number is None or (number, name) in seen:  # the same member again: another sample of the same name
                number = current[key] = len(places)
                places.append([-1] * (2 * len(_PARTS)))
                keys.append(key)
            seen.add((number, name))
            row, part = places[number], "image" if suffix in IMAGE_SUFFIXES else suffix
            free = [one for one in [_PARTS.index(part)] if row[2 * one] < 0]
            reason = f"the sample has another {part} before"
        if free:
            row[2 * free[0] : 2 * free[0] + 2] = offset, size
        else:
            left_out.add(shown(name), reason)
    return (keys, places) if any(row[0] >= 0 for row in places) else ([], [])


def _split(name: str) -> tuple[str, str]:
    """A member's name without its suffix, and the suffix; no suffix for names that are hidden or meant for others."""
    folder, slash, base = name.rpartition("/")
    stem, _, suffix = base.rpartition(".")
    hidden = base.startswith((".", "__"))
    return (name, "") if hidden or not stem else (folder + slash + stem, suffix.lower())


def _keys(members: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The key of the sample of each member, by the member's name without its suffix; "": the sample has its own."""
    kinds, joined = dict[str, set[bool]](), dict[str, set[bool]]()  # whether there are images, and texts
    for stem, suffix in members:
        if suffix in _READ[:-1]:
            kinds.setdefault(stem, set()).add(suffix in IMAGE_SUFFIXES)
    key_of = {stem: stem if len(both) > 1 else _FIELD.sub("", stem) for stem, both in kinds.items()}
    key_of |= {stem: "" for stem, key in key_of.items() if key != stem and kinds[stem] <= kinds.get(key, set())}
    for stem, both in kinds.items():
        joined.setdefault(key_of[stem], set()).update(both)
    return {stem: key if not key or len(joined[key]) > 1 else stem for stem, key in key_of.items()}


def _row(key: bytes, places: list[int], because: str, fd: int, total: int) -> dict[str, Any]:
    """One sample as a row. Args: because: why members of it may be missing; fd, total: the tar, and its bytes."""
    row: dict[str, Any] = {"key": key}
    if places[0] >= 0:
        row |= {"offset": places[0], "size": places[1]}
    try:
        texts = list[bytes | None]()
        for part, offset, size in zip(_PARTS, places[::2], places[1::2], strict=True):
            if offset >= 0 and offset + size > total:
                raise BadSample("the tar ends in the middle of this sample")
            if part != "image":
                check_size(f"the .{part}", size, MAX_TEXT)
                texts.append(os.pread(fd, size, offset) if offset >= 0 else None)
        captions, info = parse_captions(texts[0], texts[1])
        label = parse_label(texts[2])
        if because and (places[0] < 0 or (not captions and label is None)):
            raise BadSample("no image" if places[0] < 0 else "no caption")
        row |= {"captions": captions, "info": json.dumps(info) if info else None}
        if isinstance(label, LabelSet):
            row |= {"labels": label.indices, "of": label.classes}
        else:
            row["label"] = label
    except BadSample as error:
        row["error"] = f"{error}{because}"
    return row


# Names


def expand(pattern: str) -> list[str]:
    """The names of a brace pattern: `x-{08..10}.tar` gives x-08.tar, x-09.tar and x-10.tar, as wide as the first.

    Errors: ValueError for a range that is empty, and for more than a million names.
    """
    sizes = [max(1, int(last) - int(first) + 1) for first, last in RANGE.findall(pattern)]
    if math.prod(sizes) > _MOST_NAMES:
        raise ValueError(f"{pattern} names {math.prod(sizes):,} files. Expected at most {_MOST_NAMES:,}.")
    match = RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match[1], match[2]
    if int(last) < int(first):
        raise ValueError(f"{pattern}: the range {match[0]} is empty. Write the smaller number first.")
    numbers = (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
    return [name for n in numbers for name in expand(pattern[: match.start()] + n + pattern[match.end() :])]


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key that compares numbers in names as numbers: 2.tar before 10.tar."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]{1,1000})", name)]

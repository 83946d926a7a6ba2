"""Tars as img2dataset and webdataset write them: each is read once, and becomes rows of one Arrow file for its set.

The file lies in the cache folder, or beside the tars, where `kiloword data index` puts it. Its metadata say which size
and time of change each tar had: only tars that are new, or have changed, are read again. docs/data.md says what the
keys of members are. A .npy stands for the cls of a sample without one, or for the json beside a cls (DataComp).
"""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from kiloword import addresses
from kiloword.addresses import Address, address_of, is_url
from kiloword.data import remote
from kiloword.data.classes.names import text_lines
from kiloword.data.edits import digest
from kiloword.data.rows import PLAIN, Rows, key_bytes, known, made_once, mapped, write
from kiloword.data.sample import IMAGE_SUFFIXES, MAX_TEXT, check_size, parse_beside
from kiloword.errors import LeftOut
from kiloword.files import TEMPORARY
from kiloword.terminal import shown
from kiloword.terminal.progress import ProgressLine
from kiloword.types import BadSample

INDEX = "kiloword-index.arrow"  # the file of a set, beside its tars
MAX_LABEL = 1 << 17  # bytes of a .npy
RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
_MOST_NAMES = 1_000_000  # files of one pattern
_FEW = 16  # remote tars that are read without an index
_TOGETHER = 8  # tars for each process that reads
_BATCH = 65_536  # rows, at least, of a record batch
_ROWS = 8192  # that are parsed together
_PADDING = 1 << 20  # zeros that may follow the end; tar itself writes at most 10 kB
_PART_OF = dict.fromkeys(IMAGE_SUFFIXES, "image") | {suffix: suffix for suffix in ("txt", "json", "cls", "npy")}
_FIELD = re.compile(r"(?<=[^/])(\.[^\W\d][^./]*)+$")  # words between the key and the suffix
_KIND = b"kiloword tars 2"  # of the metadata
_SCHEMA = pa.schema({"key": pa.binary(), "captions": pa.list_(pa.string()), "of": pa.int64(), **PLAIN})
_FILE = pa.field("file", pa.dictionary(pa.int32(), pa.binary()))


Parts = dict[str, tuple[int, int]]
"""Offset and size of the members of a sample: image, txt, json, cls."""


class Tar(NamedTuple):
    """What the metadata of rows say of each tar."""

    file: str  # NAME#VERSION, see `kiloword.data.rows`; the name is below the folder of the set
    rows: int
    digest: str  # of its size, and of names, places and sizes of all members
    note: str  # what is wrong with it as a whole
    left_out: dict[str, int]  # number of members that are not read, by reason
    named: dict[str, list[str]]  # the first of them


def open_tars(
    name: str, tars: Sequence[Path], classnames: list[str] | None = None, templates: list[str] | None = None
) -> Rows:
    """The samples of local tars, in order of the tars. Args: classnames, templates: of class data, else None.

    Errors: ValueError without images, and for a file that is no plain tar.
    """
    folder, wanted = os.path.commonpath([os.path.abspath(tar.parent) for tar in tars]), list[str]()
    for tar in tars:
        status = tar.stat()
        wanted.append(f"{os.path.relpath(tar, folder)}#{status.st_size}-{status.st_mtime_ns}")
    return _rows(name, folder, wanted, Path(folder, INDEX), classnames, templates)


def open_remote_tars(src: str) -> Rows:
    """The samples of tars at URLs: a tar, a brace pattern, or a folder (not of http).

    They are opened by the index beside them, which `kiloword data index` makes where the data lie; a few tars are read
    without one. Errors: as of `open_tars`; Unreachable.
    """
    address = address_of(src)
    folder = address.url.partition("{")[0].rpartition("/")[0] + "/"
    names = [] if address.url == folder else [url.removeprefix(folder) for url in expand(address.url)]

    def at(name: str, place: str = folder) -> Address:
        return Address(place + name, address.login, address.query)

    def lines(name: str) -> list[str] | None:
        for place in (folder, folder[:-1].rpartition("/")[0] + "/"):
            with suppress(remote.Missing):
                if not place.endswith("://"):
                    return text_lines(place + name, remote.local(at(name, place)).read_bytes())
        return None

    index = None
    try:
        index = remote.local(at(INDEX))
    except remote.Missing:
        if not names and not folder.startswith("http"):  # which has no folders
            names = sorted((name for name in remote.files_in(at("")) if name.lower().endswith(".tar")), key=natural)
        if not 0 < len(names) <= _FEW:
            raise ValueError(
                f"{address}: {len(names):,} tars without an index. Expected 1 to {_FEW}, or the index that `kiloword "
                f"data index FOLDER` makes where the data lie: {folder}{INDEX}."
            ) from None
        files = {unquote(name): f"{name}#{remote.version_of(at(name))}" for name in names}
    else:
        files = {unquote(_name(tar.file)): tar.file for tar in _said(_mapped(index))}
    if missing := [name for name in names if unquote(name) not in files]:
        raise ValueError(
            f"{folder}{INDEX} lacks {len(missing):,} of {len(names):,} tars, the first is {missing[0]}. Make it again "
            "by `kiloword data index FOLDER` where the data lie."
        )
    wanted = [files[unquote(name)] for name in names] or list(files.values())
    for file in wanted:
        addresses.address_of(at(_name(file)).full)
    classes = lines("classnames.txt"), lines("zeroshot_classification_templates.txt")
    return _rows(address.url, folder, wanted, index, *classes)


def index_beside(rows: Rows) -> tuple[Path | None, int]:
    """Put the rows of a folder of local tars beside them, so that nobody reads the tars again.

    Returns: the file, which remote sets need, and the number of damaged tars; None and 0 for other data.
    Errors: OSError where the folder cannot be written.
    """
    path = Path(rows.folder, INDEX)
    if not (tars := _said(rows.table)):
        return None, 0
    if not rows.remote and path != rows.path:
        for left in path.parent.glob(f".{INDEX}.*{TEMPORARY}"):  # of a killed process
            left.unlink(missing_ok=True)
        write(path, rows.table)
    return path, sum(bool(tar.note) for tar in tars)


# The rows of a set


def _rows(name: str, folder: str, wanted: list[str], index: Path | None, *classes: list[str] | None) -> Rows:
    """Args: wanted: NAME#VERSION of the tars; index: a file that may have their rows."""
    known = _mapped(index)
    if [tar.file for tar in _said(known)] == wanted and not is_url(folder):
        table, path = known, index
    else:
        identity = "\n".join(["tars 2", folder, *wanted])
        table, path = made_once(identity, lambda: merged(list(_parts(name, folder, wanted, known))))
    lines, damaged, empty, members = list[str](), list[str](), LeftOut("tar"), LeftOut("member")
    for tar in _said(table):
        place = os.path.join(folder, _name(tar.file))
        file = os.path.basename(place)
        lines.append(f"{file} {tar.digest}")
        members.extend(LeftOut("member", counts=tar.left_out, first=tar.named))
        if tar.note:
            damaged.append(f"{place}: {tar.note}")
        if not tar.rows:
            empty.add(file, "no images in it")
    if not len(table):
        raise ValueError(f"{name} holds no images. Expected webdataset tars, as img2dataset writes. {members}".strip())
    notes = [*damaged, *(f"{name}: {line}" for line in (*empty.lines(), *members.lines()))]
    names, templates = classes
    return Rows(name, table, folder, digest(*lines), classnames=names, templates=templates, notes=notes, path=path)


def _name(file: str) -> str:
    return file.rpartition("#")[0]


def _mapped(index: Path | None) -> pa.Table:
    """The rows of an index; none where there is no such file."""
    return (known(index) if index else None) or _SCHEMA.empty_table()


def _said(table: pa.Table) -> list[Tar]:
    return [Tar(*one) for one in json.loads((table.schema.metadata or {}).get(_KIND, b"[]"))]


def _parts(name: str, folder: str, wanted: list[str], known: pa.Table) -> Iterator[tuple[Tar, pa.Table | Path]]:
    """The rows of each tar, or a file with them; it is read unless they are known."""
    there, start = dict[str, tuple[Tar, pa.Table]](), 0
    for tar in _said(known):
        there[tar.file] = tar, known.slice(start, tar.rows)
        start += tar.rows
    new = _scanned(name, [os.path.join(folder, file) for file in wanted if file not in there])
    for file in wanted:
        tar, rows = there[file] if file in there else next(new)
        yield tar._replace(file=file), rows


def merged(parts: list[tuple[Tar, pa.Table | Path]]) -> pa.RecordBatchReader:
    """The rows of tars in large batches."""
    files = pa.array((os.fsencode(tar.file) for tar, _ in parts), pa.binary())

    def batches() -> Iterator[pa.RecordBatch]:
        waiting = list[pa.Table]()
        for n, (_, part) in enumerate(parts):
            rows = (mapped(part) if isinstance(part, Path) else part).select(_SCHEMA.names).replace_schema_metadata()
            numbers = pa.array(np.full(len(rows), n), pa.int32(), mask=np.asarray(rows["offset"].is_null()))
            waiting.append(rows.append_column(_FILE, pa.DictionaryArray.from_arrays(numbers, files)))
            if n == len(parts) - 1 or sum(map(len, waiting)) >= _BATCH:
                yield from pa.concat_tables(waiting).combine_chunks().to_batches()
                waiting.clear()

    schema = pa.schema([*_SCHEMA, _FILE], {_KIND: json.dumps([tar for tar, _ in parts])})
    return pa.RecordBatchReader.from_batches(schema, batches())


def _scanned(name: str, places: list[str]) -> Iterator[tuple[Tar, pa.Table | Path]]:
    """Each tar's rows, which have a file of their own, so that a start after a killed one goes on."""
    pool: Any = nullcontext()
    if places and is_url(places[0]):
        pool = ThreadPoolExecutor(remote.THREADS)
    elif workers := min(os.cpu_count() or 1, len(places) // _TOGETHER):
        pool = ProcessPoolExecutor(workers, get_context("fork"))
    with pool as executor:
        line = ProgressLine(sys.stderr)
        for done, part in enumerate(executor.map(_part, places) if executor else map(_part, places), 1):
            if done < len(places):
                line.show(f"{name}: {done:,} of {len(places):,} tars are read", done, len(places))
            yield part


def _part(place: str) -> tuple[Tar, pa.Table | Path]:
    table, path = made_once(f"tar 2 {place}", lambda: scan(place))
    return _said(table)[0], path or table


# One tar


def scan(place: str) -> pa.Table:
    """The rows of a tar, in order of the first member of each; none where it has no image. The metadata hold a `Tar`.

    Args: place: a path or URL, #, and the version. Errors: ValueError when the file is no plain tar.
    """
    name, left_out = _name(place), LeftOut("member")
    with remote.opened(place) if is_url(place) else open(name, "rb") as file:
        fd, total = file.fileno(), os.fstat(file.fileno()).st_size
        members, note = _members(name, file, total, left_out)
        samples = _samples(members, left_out)
        rows, batches = (_row(key, parts, fd, total) for key, parts in samples), list[pa.RecordBatch]()
        while together := list(islice(rows, _ROWS)):
            batches.append(pa.RecordBatch.from_pylist(together, _SCHEMA))
    metadata = json.dumps(
        [Tar(place, len(samples), digest(repr((total, samples))), note, left_out.counts, left_out.first)]
    )
    return pa.Table.from_batches(batches, _SCHEMA).replace_schema_metadata({_KIND: metadata})


def _members(name: str, file: BinaryIO, total: int, left_out: LeftOut) -> tuple[list[tuple[str, tuple[int, int]]], str]:
    """Name, and offset and size, of the regular files in a tar, and what is wrong with the tar."""
    found, before = list[tuple[str, tuple[int, int]]](), -1
    try:
        tar = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape") if total else None
    except tarfile.ReadError:
        raise ValueError(
            f"{name} cannot be read as a plain tar (it does not begin with a header of a tar). Compressed tars have no "
            "byte offsets: unpack the .gz."
        ) from None
    with suppress(tarfile.TarError, ValueError, OverflowError, MemoryError):
        while tar and (member := tar.next()) and member.offset > before:  # damaged sizes lead back
            before = member.offset
            tar.members.clear()  # type: ignore[attr-defined]  # for memory
            if member.isreg() and not member.issparse():  # a sparse one does not lie in one piece
                found.append((member.name, (member.offset_data, min(member.size, total + 1))))
            elif not member.isdir():
                left_out.add(shown(member.name), "no file, but a link or the like")
    end = min(tar.offset if tar else 0, total)
    file.seek(end)
    rest = file.read(tarfile.BLOCKSIZE + _PADDING)
    if tarfile.BLOCKSIZE <= len(rest) < tarfile.BLOCKSIZE + _PADDING and not any(rest):
        return found, ""
    return found, f"read up to byte {end:,} of {total:,}: it is cut or damaged there, or goes on after its end"


def _samples(members: list[tuple[str, tuple[int, int]]], left_out: LeftOut) -> list[tuple[str, Parts]]:
    """The key and parts of each sample."""
    named, kinds = list[tuple[str, str, str, tuple[int, int]]](), dict[str, set[bool]]()
    for name, place in members:
        path, suffix = os.path.splitext(name)
        hidden = os.path.basename(name).startswith((".", "__")) or not suffix
        if part := "" if hidden else _PART_OF.get(suffix[1:].lower(), ""):
            named.append((name, path, part, place))
            if part != "npy":
                kinds.setdefault(path, set()).add(part == "image")
        else:
            left_out.add(shown(name), "the name is hidden or has no suffix" if hidden else f"{suffix} is not read")
    samples, key_of = list[tuple[str, Parts]](), _keys(kinds)
    current, seen = dict[str, int](), set[tuple[int, str]]()  # members of a sample need not be neighbours
    for name, stem, part, place in sorted(named, key=lambda one: one[2] == "npy"):
        if part == "npy":  # alone it is no sample
            is_read = stem in current and place[1] <= MAX_LABEL
            parts = samples[current[stem]][1] if is_read else {"cls": place, "json": place}
            free = [kind for kind in ("cls", "json") if kind not in parts]
            reason = "a .npy that is too large, or whose sample lacks neither .cls nor .json"
        elif key := key_of[stem]:
            number = current.get(key)
            if number is None or (number, name) in seen:  # the same member again: another sample of the same name
                number = current[key] = len(samples)
                samples.append((key, {}))
            seen.add((number, name))
            parts = samples[number][1]
            free, reason = [part] if part not in parts else [], f"the sample has another {part} before"
        else:
            free, reason = [], "its sample has a member of this kind without a field's name"
        if free:
            parts[free[0]] = place
        else:
            left_out.add(shown(name), reason)
    return samples if any("image" in parts for _, parts in samples) else []


def _keys(kinds: dict[str, set[bool]]) -> dict[str, str]:
    """The key of the sample of each member, by the member's name without its suffix; "": the sample has its own.

    Args: kinds: whether there are images, and texts, of each name.
    """
    joined = dict[str, set[bool]]()
    key_of = {stem: stem if len(both) > 1 else _FIELD.sub("", stem) for stem, both in kinds.items()}
    key_of |= {stem: "" for stem, key in key_of.items() if key != stem and kinds[stem] <= kinds.get(key, set())}
    for stem, both in kinds.items():
        joined.setdefault(key_of[stem], set()).update(both)
    return {stem: key if not key or len(joined[key]) > 1 else stem for stem, key in key_of.items()}


def _row(key: str, parts: Parts, fd: int, total: int) -> dict[str, Any]:
    """One sample as a row. Args: parts: as of `_samples`; fd, total: the tar, and its bytes."""
    row: dict[str, Any] = {"key": key_bytes(key)}
    if "image" in parts:
        row["offset"], row["size"] = parts["image"]
    try:
        if any(offset + size > total for offset, size in parts.values()):
            raise BadSample("the tar ends in the middle of this sample")
        texts = dict[str, bytes]()
        for part in sorted(parts.keys() - {"image"}):
            check_size(f"the .{part}", parts[part][1], MAX_TEXT)
            texts[part] = os.pread(fd, *reversed(parts[part]))
        row |= parse_beside(texts.get("txt"), texts.get("json"), texts.get("cls"))
    except BadSample as error:
        row["error"] = str(error)
    return row


# Names


def expand(pattern: str) -> list[str]:
    """The names of a brace pattern: `x-{08..10}.tar` gives x-08.tar, x-09.tar and x-10.tar, as wide as the first.

    Errors: ValueError for a range that is empty, and for more than a million names.
    """
    if (match := RANGE.search(pattern)) is None:
        return [pattern]
    before, after = pattern[: match.start()], expand(pattern[match.end() :])
    numbers = range(int(match[1]), int(match[2]) + 1)
    if not 0 < (files := len(numbers) * len(after)) <= _MOST_NAMES:
        raise ValueError(
            f"{pattern} names {files:,} files. Expected at most {_MOST_NAMES:,}, and the smaller number first."
        )
    return [f"{before}{n:0{len(match[1])}}{end}" for n in numbers for end in after]


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key that compares numbers in names as numbers: 2.tar before 10.tar."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]{1,1000})", name)]

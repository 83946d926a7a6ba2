"""`kiloword index`: encode the photos of a folder that are new or changed, forget those that are gone.

The library is published every now and then, so that it can be searched while it grows, and the same command goes on
after an interruption.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from kiloword.apps.search.library import (
    FILE,
    OF_GAUSSIANS,
    ROWS,
    Library,
    LibraryFile,
    ids_of,
    publish,
    read_file,
    tidy,
)
from kiloword.data.folders import open_images
from kiloword.data.reading import EvalBatch, eval_batches
from kiloword.data.rows import Rows
from kiloword.distributed.by_device import announce, reason_of, workers_of
from kiloword.distributed.device import choose
from kiloword.errors import LeftOut, count
from kiloword.files import Lock, is_taken, utf8, write_json
from kiloword.interop.names import absolute, local_folder, split
from kiloword.model.encoding import inference, join
from kiloword.terminal import say, warn
from kiloword.terminal.progress import track
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.apps.search.command import Index, Opened

SECONDS, PAUSE = 10.0, 20  # between two states of a library, at least; and such multiples of the time that one took


def run(options: Index) -> None:
    """Run and print `kiloword index`. Raises: ValueError for options that do not fit the library."""
    began, out, left = time.perf_counter(), options.out, LeftOut("path")
    found = scan(options.photos, left)
    with Lock(out, "indexing"):
        there = (out / FILE).is_file()
        if not there and is_taken(out):
            raise ValueError(f"{out} holds other files: choose a new folder for --out.")
        file, folder = read_file(out) if there else LibraryFile(dim=options.dim), utf8(str(options.photos.resolve()))
        if options.dim not in (None, file.dim):
            raise ValueError(f"{out} was made with another --dim, {file.dim}: omit it, or choose another --out.")
        matcher, file = opened(options, file)
        library = Library(out) if file.state else None
        known, ids = ids_of(library.rows) if library else {}, ids_of(found)
        gone, wanted = known.keys() - ids.keys(), [path for path in ids if known.get(path) != ids[path]]
        changed = known.keys() & wanted
        lost = gone if file.folder in ("", folder) else gone | changed  # another disk may have photos of the same names
        if 2 * len(lost) > len(known) and not options.forget:
            raise ValueError(
                f"{folder} lacks {len(lost):,} of {count(len(known), 'photo')} of the library {out}, such as "
                f"{min(lost)}. Name the folder that has them, choose another --out, or give them up by --forget."
            )
        for path in sorted(gone):
            left.add(path, "it is not in the folder any more")
        new = len(wanted) - len(changed)
        say(f"{new:,} new, {len(changed):,} changed, {len(gone):,} gone, {len(ids):,} in the folder")
        file = replace(file, folder=folder)
        write_json(out / FILE, asdict(file))
        last, took, rows, parts = time.monotonic(), 0.0, list[int](), list[Features]()
        found = found.filter(pa.array([known.get(path) != one for path, one in ids.items()]))
        for batch in chain(_batches(matcher, found, options), (None,)):
            for bad in batch.skipped if batch else ():
                why = f"{bad.reason}; the next index tries again, and keeps what it had until then"
                left.add(wanted[bad.row], why)
            if batch and batch.rows:
                rows += batch.rows
                parts.append(encode(matcher, batch.images))
            begin = time.monotonic()
            if (rows or gone) and (batch is None or begin - last > max(SECONDS, PAUSE * took)):
                replaced = gone.union(wanted[row] for row in rows)
                paths = ids_of(library.rows) if library else {}
                kept = np.array([row for row, path in enumerate(paths) if path not in replaced], np.int64)
                features = {name: value.numpy() for name, value in join(parts).items()} if parts else {}
                library = publish(out, file, found.take(pa.array(rows, pa.int64())), features, library, kept)
                gone, rows, parts, last = set(), [], [], time.monotonic()
                took = last - begin
        warn(*left.lines())
        if library is None:
            raise ValueError(f"none of the photos in {folder} can be read.")
        tidy(out, library.file.state)
    say(f"{out}: {count(len(library), 'photo')}, {time.perf_counter() - began:.1f} s")


def scan(root: Path, left: LeftOut) -> pa.Table:
    """The photos of a folder and its subfolders as rows of a library; what is not used is named, or goes to `left`.

    Links to outside are omitted. Captions are those of the texts beside photos, for people alone.
    Raises: ValueError when there is no photo, so that a disk that is not mounted does not empty a library.
    """
    source, whole, rows = open_images(str(root), root, deep=True), root.resolve(), list[dict[str, object]]()
    warn(*source.notes)
    for one in source.table.select(["file", "captions", "error"]).to_pylist():
        path = os.fsdecode(one["file"])
        beside = (path, *(os.path.splitext(path)[0] + suffix for suffix in (".txt", ".json")))
        links = [file for file in beside if os.path.islink(root / file)]
        outside = [file for file in links if not (root / file).resolve().is_relative_to(whole)]
        for file in outside:
            left.add(file, "a link to a file outside the folder")
        if path in outside:
            continue
        if one["error"]:
            left.add(path, f"but for the photo itself: {one['error']}")
        try:
            status = os.stat(root / path)
        except OSError as error:
            left.add(path, f"it cannot be read ({error.strerror})")
            continue
        stamp = f"{status.st_size}-{status.st_mtime_ns}"
        caption = "" if outside else " / ".join(one["captions"] or [])
        digest = hashlib.blake2b(one["file"] + f"{stamp}{caption}".encode(errors="surrogatepass"), digest_size=8)
        plain = path.encode("utf-8", "backslashreplace").decode()
        rows.append({"id": digest.hexdigest(), "path": plain, "file": one["file"], "stamp": stamp, "caption": caption})
    return pa.Table.from_pylist(rows, ROWS)


def _batches(matcher: Matcher, rows: pa.Table, options: Index) -> Iterable[EvalBatch]:
    """Preprocessed photos of rows of a library."""
    config = matcher.model.config
    size, resize = config.image.size, config.preprocess.resize
    workers = workers_of(options.workers, choose(options.device), options.batch, size)
    announce(str(matcher.model.device), matcher.model.precision, reason_of(options.precision, config), workers)
    photos = Rows("", pa.table({"key": rows["path"].cast(pa.binary()), "file": rows["file"]}), options.photos, "")
    batches = eval_batches(photos, size, resize, options.batch, workers, captions=False)
    return track(batches, "images", "images", len(rows), lambda batch: len(batch.rows) + len(batch.skipped))


def opened(options: Index | Opened, file: LibraryFile) -> tuple[Matcher, LibraryFile]:
    """The model that the user names, or a library, and the settings of the library with it.

    A library may be a stranger's: a model that it names is not fetched.
    Raises: ValueError for no model, or another one than that of the library, and as `kiloword.load`.
    """
    from kiloword.api import load
    from kiloword.models.model_folder import model_files
    from kiloword.stores.teachers import digest

    name, trust = options.model or file.model, options.trust
    if not name:
        raise ValueError("a new library needs a model: kiloword index PHOTOS --model MODEL --out DIR.")
    if split(name)[1] is None:
        if options.model is None:
            raise ValueError(f"the library names the model {name[:200]!r}, which is not fetched unasked: add --model.")
        name = str(local_folder(name))
    name = utf8(absolute(name))
    own, code, precision = trust.method, trust.trust_code, options.precision
    matcher = load(name, options.device, method=own, trust_code=code, precision=precision, dim=file.dim)
    weights = digest(model_files(local_folder(name)))
    if file.fingerprint not in ("", weights):
        raise ValueError(
            f"the library was made by another model than {name}: give the model that made it ({file.model}) by "
            "--model, or index the photos again in a new folder."
        )
    return matcher, replace(file, model=name, fingerprint=weights)


def opened_for(options: Opened) -> tuple[Library, Matcher]:
    """A library and its model. Raises: ValueError where the library holds other features, and as `opened`."""
    library = Library(options.library)
    matcher, _ = opened(options, library.file)
    size = matcher.model.config.image.size
    blank = encode(matcher, torch.zeros(1, 3, size, size, dtype=torch.uint8))
    shapes = {name: values.shape[1:] for name, values in library.features.items()}
    if shapes != {name: value.shape[1:] for name, value in blank.items()}:
        raise ValueError(f"the library {library.folder} is damaged: its features are not those of its model.")
    return library, matcher


def encode(matcher: Matcher, images: Tensor) -> Features:
    """Features of preprocessed images as a library stores them, with "penalty" and "uncertainty" [n] of Gaussians.

    Raises: ValueError where one is NaN or infinite.
    """
    features, uncertainty = dict(matcher.encode_image(images, progress=False)), matcher.model.head.uncertainty
    if "log_var" in features and uncertainty is not None:
        with inference(matcher.model):
            features["penalty"] = uncertainty.penalty(features)
        features["uncertainty"] = matcher.uncertainty(features)
    if not all(bool(value.isfinite().all()) for value in features.values()):
        raise ValueError("the model gives features that are NaN or infinite: it cannot search.")
    exact = ("vec", *OF_GAUSSIANS)
    return {name: (value.float() if name in exact else value.half()).cpu() for name, value in features.items()}

"""`kiloword index`: encode the photos of a folder that are new or changed, forget those that are gone."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from kiloword.apps.search import library as libraries
from kiloword.apps.search.library import FILE, OF_GAUSSIANS, Library, LibraryFile, Part
from kiloword.apps.search.photos import Scan, scan
from kiloword.data.reading import EvalBatch, eval_batches
from kiloword.data.rows import Rows, key_bytes
from kiloword.data.stored import TableSettings
from kiloword.distributed.by_device import announce, reason_of, workers_of
from kiloword.distributed.device import choose
from kiloword.errors import count
from kiloword.files import Lock, atomic, is_taken, utf8, write_json
from kiloword.interop.names import absolute, local_folder, split
from kiloword.model.encoding import inference
from kiloword.model.prefix import keep_prefix_
from kiloword.stores import pieces
from kiloword.terminal import say, warn
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.apps.search.command import Index, Search, Serve

PIECE = 256  # photos that a killed process loses, at most


def run(options: Index) -> None:
    """Run and print `kiloword index`. Raises: ValueError for options that do not fit the library."""
    began, out = time.perf_counter(), options.out
    scanned, file = scan(options.photos), libraries.read_file(out) if (out / FILE).is_file() else None
    if file is None and is_taken(out):
        raise ValueError(f"{out} holds other files: choose a new folder for --out.")
    dim = options.dim if file is None else file.dim
    if options.dim not in (None, dim):
        raise ValueError(f"{out} was made with --dim {dim}, and not {options.dim}: omit it, or choose another --out.")
    matcher, name, weights = opened(options, file, dim)
    network = matcher.model
    workers = workers_of(options.workers, choose(options.device), options.batch, network.config.image.size)
    announce(str(network.mean.device), network.precision, reason_of(options.precision, network.config), workers)
    with Lock(out, "indexing"):
        folder = utf8(str(scanned.root.resolve()))
        if file is None:
            file = LibraryFile(folder=folder, model=name, fingerprint=weights, dim=dim)
            write_json(out / FILE, vars(file))
        if file.folder != folder and Path(file.folder).is_dir():
            raise ValueError(f"{out} is a library of {file.folder}, not of {folder}: choose another --out.")
        if next_rows(out, file).is_file():  # of an interrupted command
            file = advance(out, file, Scan(scanned.root), set(), matcher, options, workers)
        wanted, gone = plan(scanned, out, file, folder, options.forget)
        with atomic(next_rows(out, file)) as planned:
            pq.write_table(scanned.rows(wanted), planned)
        advance(out, replace(file, folder=folder), scanned, gone, matcher, options, workers)
    warn(*scanned.left.lines())
    size = sum(path.stat().st_size for path in out.iterdir() if path.is_file()) / 1e6
    say(f"{out}: {count(len(Library(out)), 'photo')}, {size:,.1f} MB, {time.perf_counter() - began:.1f} s")


def opened(
    options: Index | Search | Serve, file: LibraryFile | None, dim: int | None = None
) -> tuple[Matcher, str, str]:
    """The model that the user names, or a library, its local name, and a digest of its weights.

    A library may be a stranger's: a model that it names is not fetched.

    Args: file: of the library, which the model must have made; dim: numbers of the embedding that are kept.
    Raises: ValueError for no model, or another one than that of the library, and as `kiloword.load`.
    """
    from kiloword.api import load

    name = options.model or (file.model if file else "")
    if not name:
        raise ValueError("a new library needs a model: kiloword index PHOTOS --model MODEL --out DIR.")
    fetched, trust = split(name)[1] is None, options.trust
    if fetched and options.model is None:
        raise ValueError(f"the library names the model {name[:200]!r}, which is not fetched unasked: add --model.")
    name = str(Path(local_folder(name)).resolve()) if fetched else utf8(absolute(name))
    matcher = load(name, options.device, "fp32", None, None, trust.method, trust.trust_code, options.precision)
    weights = fingerprint(matcher)
    if file and weights != file.fingerprint:
        raise ValueError(
            f"the library was made by another model than {name}: its features cannot be compared. Give the model that "
            f"made it ({file.model}) by --model, or index the photos again in a new folder."
        )
    if dim is not None and (note := keep_prefix_(matcher.model, dim)):
        warn(f"note: {note}")
    return matcher, name, weights


def opened_for(options: Search | Serve, library: Library) -> Matcher:
    """The model of a library. Raises: ValueError where the library holds other features, and as `opened`."""
    matcher = opened(options, library.file, library.file.dim)[0]
    if _shapes(matcher) != {name: values.shape[1:] for name, values in library.features.items()}:
        raise ValueError(f"the library {library.folder} is damaged: its features are not those of its model.")
    return matcher


def fingerprint(matcher: Matcher) -> str:
    """A digest of the model's weights, shape and tokenizer, wherever it lies and whatever it runs on."""
    digest = hashlib.blake2b(repr(matcher.model.config).encode(), digest_size=16)
    digest.update(matcher.tokenizer.to_bytes())
    for name, value in sorted(matcher.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(value.detach().float().cpu().numpy()).data)
    return digest.hexdigest()


def next_rows(out: Path, file: LibraryFile) -> Path:
    """The file of photos to encode for the next state of a library."""
    return out / f"next-{file.state + 1}" / "rows.parquet"


def plan(scanned: Scan, out: Path, file: LibraryFile, folder: str, forget: bool) -> tuple[list[str], set[str]]:
    """Photos to encode, and those to remove, to bring a library to the state of a folder.

    Raises: ValueError where most photos of the library would be removed, or are not in a folder that replaces that of
    the library.
    """
    known, stamps = Library(out).stamps if file.state else dict[str, str](), scanned.stamps
    gone, away = scanned.missing(known)
    lost = gone
    if folder != file.folder:  # another disk may have other photos of the same names
        lost = gone | away | {path for path, stamp in stamps.items() if known.get(path, stamp) != stamp}
    if forget:
        gone, away = gone | away, set()
    elif 2 * len(lost) > len(known):
        raise ValueError(
            f"{folder} lacks, or has in another state, {len(lost):,} of {count(len(known), 'photo')} of the library "
            f"{out}, such as {min(lost)}. Name the folder that has them, or give them up by --forget."
        )
    wanted = [path for path, stamp in stamps.items() if known.get(path) != stamp]
    changed = len(known.keys() & wanted)
    say(f"{len(wanted) - changed:,} new, {changed:,} changed, {len(gone):,} gone, {len(stamps):,} in the folder")
    if away:
        warn(
            f"{count(len(away), 'photo')} kept that cannot be read now: {', '.join(sorted(away)[:10])}. A disk may not "
            "be mounted. If the photos were deleted, --forget removes them."
        )
    return wanted, gone


def advance(
    out: Path, file: LibraryFile, scanned: Scan, gone: set[str], matcher: Matcher, options: Index, workers: int
) -> LibraryFile:
    """Encode the planned photos, piece by piece, and make the next state of a library with them and without `gone`."""
    rows, work = pieces.read_table(next_rows(out, file)), next_rows(out, file).parent
    image, exact = matcher.model.config.image, {"vec", *OF_GAUSSIANS}
    shapes = {name: (of, np.dtype("<f4" if name in exact else "<f2")) for name, of in _shapes(matcher).items()}
    about = TableSettings(data="", fingerprint="", rows=max(1, len(rows)), part=PIECE, model="")
    writer = pieces.PieceWriter(work, "pieces.json", about, None, not len(rows), shapes)
    paths = list(map(os.fsdecode, rows["file"].to_pylist()))
    keys = pa.array(map(key_bytes, paths), pa.binary())
    photos = Rows("", pa.table({"key": keys, "file": rows["file"]}), scanned.root, "")

    def read(batches: list[range]) -> Iterator[EvalBatch]:
        resize = matcher.model.config.preprocess.resize
        return eval_batches(photos, image.size, resize, options.batch, workers, batches, captions=False)

    def computed(images: EvalBatch) -> pieces.Rows:
        features = encode(matcher, images.images) if images.rows else {}
        if not all(bool(torch.isfinite(value).all()) for value in features.values()):
            raise ValueError(f"the model's features are NaN or infinite, near {images.keys[0]}.")
        reasons = dict.fromkeys(images.rows) | {one.row: one.reason for one in images.skipped}
        table = pa.table({"row": pa.array(reasons, pa.int64()), "reason": pa.array(reasons.values(), pa.string())})
        return pieces.Rows(table, {name: value.numpy() for name, value in features.items()})

    if len(rows):
        pieces.fill(writer, photos, options.batch, read, computed, sys.stderr)
    done = [
        row for n in range(writer.done if len(rows) else 0) for row in pieces.read_table(writer.path(n)).to_pylist()
    ]
    for one in (one for one in done if one["reason"]):
        why = f"{one['reason']}; the next index tries again, and keeps what it had until then"
        scanned.left.add(paths[one["row"]], why)
    good = [one["row"] for one in done if not one["reason"]]
    before = Library(out) if file.state else None
    if good or gone or not before or before.file != file:
        parts = list[Part]()
        if before:
            replaced = gone.union(paths[row] for row in good)
            kept = [row for row, path in enumerate(before.stamps) if path not in replaced]
            parts.append(Part(before.rows, before.features, np.array(kept, np.int64)))
        if good or not before:
            features = {name: np.load(work / f"{name}.npy", mmap_mode="r") for name in shapes}
            parts.append(Part(rows.take(pa.array(good, pa.int64())), features, np.arange(len(good))))
        libraries.publish(out, replace(file, features=tuple(shapes)), parts)
    libraries.tidy(out)
    return libraries.read_file(out)


def _shapes(matcher: Matcher) -> dict[str, tuple[int, ...]]:
    """The shape of each feature of a photo."""
    size = matcher.model.config.image.size
    blank = encode(matcher, torch.zeros(1, 3, size, size, dtype=torch.uint8))
    return {name: tuple(value.shape[1:]) for name, value in blank.items()}


def encode(matcher: Matcher, images: Tensor) -> Features:
    """Features of preprocessed images on the CPU, float32, with "penalty" and "uncertainty" [n] of Gaussians."""
    model = matcher.model
    with inference(model):
        features = dict(model.encode_image(images.to(model.device))[1])
        if "log_var" in features and model.head.uncertainty is not None:
            features["penalty"] = model.head.uncertainty.penalty(features)
            features["uncertainty"] = matcher.uncertainty(features)
    return {name: value.float().cpu() for name, value in features.items()}

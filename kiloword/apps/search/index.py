"""`kiloword index`: encode the photos of a folder that are new or changed, forget those that are gone."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from kiloword.apps.search import library as libraries
from kiloword.apps.search.library import FILE, OF_GAUSSIANS, ROWS, Library, LibraryFile, Part
from kiloword.apps.search.photos import Scan, scan
from kiloword.data.reading import EvalBatch, eval_batches
from kiloword.data.rows import Rows, key_bytes
from kiloword.data.stored import TableSettings
from kiloword.distributed.by_device import announce, reason_of, workers_of
from kiloword.distributed.device import choose
from kiloword.errors import count
from kiloword.files import Lock, is_taken, utf8, write_json
from kiloword.interop.names import absolute, local_folder, split
from kiloword.model.encoding import inference
from kiloword.model.prefix import keep_prefix_
from kiloword.stores import pieces
from kiloword.terminal import say, warn
from kiloword.terminal.progress import Bar
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.apps.search.command import Index, Search, Serve

PIECES, PIECE = "pieces", 256  # folder of what is encoded until a state is finished; photos of a piece
STORED = ROWS.append(pa.field("reason", pa.string()))  # why a photo cannot be read; null: it can


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
        update(out, file, folder, scanned, matcher, options, workers)
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


def fingerprint(matcher: Matcher) -> str:
    """A digest of the model's weights, shape and tokenizer, wherever it lies and whatever it runs on."""
    digest = hashlib.blake2b(repr(matcher.model.config).encode(), digest_size=16)
    digest.update(matcher.tokenizer.to_bytes())
    for name, value in sorted(matcher.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(value.detach().float().cpu().numpy()).data)
    return digest.hexdigest()


def update(
    out: Path, file: LibraryFile, folder: str, scanned: Scan, matcher: Matcher, options: Index, workers: int
) -> None:
    """Bring a library to the state of a folder.

    Raises: ValueError where most photos of the library would be removed, or are not in a folder that replaces that of
    the library; KeyboardInterrupt, whose message counts what is done.
    """
    before = Library(out) if file.state else None
    known, stamps = before.stamps if before else {}, scanned.stamps
    gone, away = scanned.missing(known)
    lost = gone
    if folder != file.folder:  # another disk may have other photos of the same names
        lost = gone | away | {path for path, stamp in stamps.items() if known.get(path, stamp) != stamp}
    if options.forget:
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
    new = _encoded(out, scanned, wanted, matcher, options.batch, workers)
    if len(new.rows) or gone or folder != file.folder or not file.state:
        replaced = gone.union(map(os.fsdecode, new.table.take(new.rows)["file"].to_pylist()))
        kept = np.array([row for row, path in enumerate(known) if path not in replaced], np.int64)
        parts = [Part(before.rows, before.features, kept)] if before else []
        libraries.publish(out, replace(file, folder=folder, features=tuple(new.features)), [*parts, new])
    libraries.tidy(out)
    shutil.rmtree(out / PIECES, ignore_errors=True)


def _encoded(out: Path, scanned: Scan, wanted: Sequence[str], matcher: Matcher, batch: int, workers: int) -> Part:
    """Encode photos piece by piece, but for those that an interrupted command has encoded; names what is unreadable."""
    stamps = {path: scanned.stamps[path] for path in wanted}
    image, resize = matcher.model.config.image, matcher.model.config.preprocess.resize
    blank = encode(matcher, torch.zeros(1, 3, image.size, image.size, dtype=torch.uint8))
    exact = {"vec", *OF_GAUSSIANS}
    shapes = {name: (tuple(v.shape[1:]), np.dtype("<f4" if name in exact else "<f2")) for name, v in blank.items()}
    about = TableSettings(data="", fingerprint="", rows=max(1, len(wanted)), part=PIECE, model="")
    writer = pieces.PieceWriter(out / PIECES, "pieces.json", about, None, False, shapes)

    def stored() -> tuple[pa.Table, list[str], list[bool]]:
        """What is done: rows, paths, and whether it is wanted still."""
        done = [pieces.read_table(writer.path(n)).replace_schema_metadata() for n in range(writer.done)]
        table = pa.concat_tables([STORED.empty_table(), *done]).combine_chunks()
        paths = list(map(os.fsdecode, table["file"].to_pylist()))
        now = [stamps.get(path) == stamp for path, stamp in zip(paths, table["stamp"].to_pylist(), strict=True)]
        return table, paths, now

    _, paths, now = stored()
    done = {path for path, same in zip(paths, now, strict=True) if same}
    rows = scanned.rows(path for path in wanted if path not in done)
    keys = [key_bytes(os.fsdecode(file)) for file in rows["file"].to_pylist()]
    photos = Rows("", pa.table({"key": pa.array(keys, pa.binary()), "file": rows["file"]}), scanned.root, "")
    step, bar, ended = max(1, PIECE // batch) * batch, Bar("index", "photos"), 0
    ranges = [range(n, min(n + step, len(rows))) for n in range(0, len(rows), step)]

    def piece_of(images: EvalBatch) -> int:
        nonlocal ended
        ended += len(images.rows) + len(images.skipped)
        bar(ended, len(rows))
        return (ended - 1) // step

    def computed(images: EvalBatch) -> pieces.Rows:
        features = encode(matcher, images.images) if images.rows else {}
        if not all(bool(torch.isfinite(value).all()) for value in features.values()):
            raise ValueError(f"the model's features are NaN or infinite, near {images.keys[0]}.")
        table = rows.take(pa.array([*images.rows, *(one.row for one in images.skipped)], pa.int64()))
        reasons = pa.array([*[None] * len(images.rows), *(one.reason for one in images.skipped)], pa.string())
        return pieces.Rows(
            table.append_column(STORED.field("reason"), reasons), {n: v.numpy() for n, v in features.items()}
        )

    try:
        batches = eval_batches(photos, image.size, resize, batch, workers, ranges, captions=False)
        for _, piece in groupby(batches, piece_of):
            writer.write([computed(images) for images in piece])
    except KeyboardInterrupt:
        done_now = len(stored()[1])
        raise KeyboardInterrupt(f"{done_now:,} photos are done; the same command does the others.") from None
    table, paths, now = stored()
    for path, reason, same in zip(paths, table["reason"].to_pylist(), now, strict=True):
        if same and reason:
            scanned.left.add(path, f"{reason}; the next index tries again, and keeps what it had until then")
    good = table["reason"].is_null().to_numpy()
    features = {name: np.zeros((0, *shape), dtype) for name, (shape, dtype) in shapes.items()}
    if good.any():
        features = {name: np.load(out / PIECES / f"{name}.npy", mmap_mode="r") for name in shapes}
    return Part(table.filter(pa.array(good)).select(ROWS.names), features, np.flatnonzero(np.array(now, bool)[good]))


def encode(matcher: Matcher, images: Tensor) -> Features:
    """Features of preprocessed images on the CPU, float32, with "penalty" and "uncertainty" [n] of Gaussians."""
    model = matcher.model
    with inference(model):
        features = dict(model.encode_image(images.to(model.device))[1])
        if "log_var" in features and model.head.uncertainty is not None:
            features["penalty"] = model.head.uncertainty.penalty(features)
            features["uncertainty"] = matcher.uncertainty(features)
    return {name: value.float().cpu() for name, value in features.items()}

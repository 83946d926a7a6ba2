"""`kiloword index`: encode the photos of a folder that are new or changed, forget those that are gone.

The library is published every now and then, so that it can be searched while it grows, and the same command goes on
after an interruption.
"""

from __future__ import annotations

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

from kiloword.apps.search.library import FILE, OF_GAUSSIANS, Library, LibraryFile, publish, read_file, stamps_of, tidy
from kiloword.apps.search.photos import deleted, scan
from kiloword.data.reading import EvalBatch, eval_batches
from kiloword.data.rows import Rows, key_bytes
from kiloword.distributed.by_device import announce, reason_of, workers_of
from kiloword.distributed.device import choose
from kiloword.errors import LeftOut, count
from kiloword.files import Lock, is_taken, utf8, write_json
from kiloword.interop.names import absolute, local_folder, split
from kiloword.model.encoding import inference, join
from kiloword.model.prefix import keep_prefix_
from kiloword.models.tensors import weights_digest
from kiloword.terminal import say, warn
from kiloword.terminal.progress import track
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.apps.search.command import Index, Search, Serve

SECONDS, PAUSE = 10.0, 20  # between two states of a library, at least; and such multiples of the time that one took


def run(options: Index) -> None:
    """Run and print `kiloword index`. Raises: ValueError for options that do not fit the library."""
    began, out, left = time.perf_counter(), options.out, LeftOut("path")
    found = scan(options.photos, left)
    with Lock(out, "indexing"):
        file = read_file(out) if (out / FILE).is_file() else None
        if file is None and is_taken(out):
            raise ValueError(f"{out} holds other files: choose a new folder for --out.")
        folder = utf8(str(options.photos.resolve()))
        if file and options.dim not in (None, file.dim):
            raise ValueError(f"{out} was made with another --dim, {file.dim}: omit it, or choose another --out.")
        if file and file.folder != folder and Path(file.folder).is_dir():
            raise ValueError(f"{out} is a library of {file.folder}, not of {folder}: choose another --out.")
        matcher, name, weights = opened(options, file, options.dim)
        library = Library(out) if file and file.state else None
        known, stamps = stamps_of(library.rows) if library else {}, stamps_of(found)
        missing, wanted = known.keys() - stamps.keys(), [path for path in stamps if known.get(path) != stamps[path]]
        gone = set(missing) if options.forget else deleted(options.photos, missing)
        # another disk may have other photos of the same names
        lost = gone if file is None or file.folder == folder else missing | (known.keys() & wanted)
        if 2 * len(lost) > len(known) and not options.forget:
            raise ValueError(
                f"{folder} lacks, or has in another state, {len(lost):,} of {count(len(known), 'photo')} of the "
                f"library {out}, such as {min(lost)}. Name the folder that has them, or give them up by --forget."
            )
        changed, away = len(known.keys() & wanted), sorted(missing - gone)
        say(f"{len(wanted) - changed:,} new, {changed:,} changed, {len(gone):,} gone, {len(stamps):,} in the folder")
        if away:
            some = f"{count(len(away), 'photo')} kept that cannot be read now: {', '.join(away[:10])}"
            warn(f"{some}. A disk may not be mounted. If the photos were deleted, --forget removes them.")
        file = replace(file or LibraryFile(dim=options.dim), folder=folder, model=name, fingerprint=weights)
        write_json(out / FILE, asdict(file))
        last, took, rows, parts = time.monotonic(), 0.0, list[int](), list[Features]()
        found = found.filter(pa.array([known.get(path) != stamp for path, stamp in stamps.items()]))
        for batch in chain(_batches(matcher, found, options), (None,)):
            for bad in batch.skipped if batch else ():
                left.add(
                    wanted[bad.row],
                    f"{bad.reason}; the next index tries again"
                    f"{', and keeps the old entry' if wanted[bad.row] in known else ''}",
                )
            if batch and batch.rows:
                rows += batch.rows
                parts.append(encode(matcher, batch.images))
            begin = time.monotonic()
            if (rows or gone) and (batch is None or begin - last > max(SECONDS, PAUSE * took)):
                replaced = gone.union(wanted[row] for row in rows)
                paths = stamps_of(library.rows) if library else {}
                kept = np.array([row for row, path in enumerate(paths) if path not in replaced], np.int64)
                features = {name: value.numpy() for name, value in join(parts).items()} if parts else {}
                publish(out, file, found.take(pa.array(rows, pa.int64())), features, library, kept)
                library, gone, rows, parts, last = Library(out), set(), [], [], time.monotonic()
                took = last - begin
        warn(*left.lines())
        if library is None:
            raise ValueError(f"none of the photos in {folder} can be read.")
        tidy(out, library.file.state)
    say(f"{out}: {count(len(library), 'photo')}, {time.perf_counter() - began:.1f} s")


def _batches(matcher: Matcher, rows: pa.Table, options: Index) -> Iterable[EvalBatch]:
    """Preprocessed photos of rows of a library."""
    config, keys = matcher.model.config, [key_bytes(os.fsdecode(file)) for file in rows["file"].to_pylist()]
    workers = workers_of(options.workers, choose(options.device), options.batch, config.image.size)
    announce(str(matcher.model.device), matcher.model.precision, reason_of(options.precision, config), workers)
    photos = Rows("", pa.table({"key": pa.array(keys, pa.binary()), "file": rows["file"]}), options.photos, "")
    size, resize = config.image.size, config.preprocess.resize
    batches = eval_batches(photos, size, resize, options.batch, workers, captions=False)
    return track(batches, "images", "images", len(rows), lambda batch: len(batch.rows) + len(batch.skipped))


def opened(
    options: Index | Search | Serve, file: LibraryFile | None, dim: int | None = None
) -> tuple[Matcher, str, str]:
    """The model that the user names, or a library, its local name, and a digest of its weights.

    A library may be a stranger's: a model that it names is not fetched.

    Args: file: of the library, which the model must have made; dim: numbers of the embedding that a new one keeps.
    Raises: ValueError for no model, or another one than that of the library, and as `kiloword.load`.
    """
    from kiloword.api import load

    name, trust = options.model or (file.model if file else ""), options.trust
    if not name:
        raise ValueError("a new library needs a model: kiloword index PHOTOS --model MODEL --out DIR.")
    path = split(name)[1]
    if options.model is None and not (path and path.exists()):
        raise ValueError(f"the library's model {name[:200]!r} is not there, and is not fetched unasked: name --model.")
    if path is None:
        name = str(local_folder(name))
    name = utf8(absolute(name))
    matcher = load(name, options.device, "fp32", None, None, trust.method, trust.trust_code, options.precision)
    weights = fingerprint(matcher)
    if file and weights != file.fingerprint:
        raise ValueError(
            f"the library was made by another model than {name}: give the model that made it ({file.model}) by "
            "--model, or index the photos again in a new folder."
        )
    dim = file.dim if file else dim
    if dim is not None:
        keep_prefix_(matcher.model, dim)
    return matcher, name, weights


def opened_for(options: Search | Serve, library: Library) -> Matcher:
    """The model of a library. Raises: ValueError where the library holds other features, and as `opened`."""
    matcher = opened(options, library.file)[0]
    size = matcher.model.config.image.size
    blank = encode(matcher, torch.zeros(1, 3, size, size, dtype=torch.uint8))
    shapes = {name: values.shape[1:] for name, values in library.features.items()}
    if shapes != {name: value.shape[1:] for name, value in blank.items()}:
        raise ValueError(f"the library {library.folder} is damaged: its features are not those of its model.")
    return matcher


def fingerprint(matcher: Matcher) -> str:
    """A digest of the model's weights, shape and tokenizer, wherever it lies and whatever it runs on."""
    model = matcher.model
    return weights_digest(model.state_dict(), repr(model.config).encode(), matcher.tokenizer.to_bytes())


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

"""`kiloword index`: encode the photos of a folder that are new or changed, forget those that are gone."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from kiloword.apps.search.codes import CodeKind, StoredKind
from kiloword.apps.search.library import FILE, PART, Library, create, settings_of
from kiloword.apps.search.nearest import open_nearest, update_nearest
from kiloword.apps.search.part import LibraryFile
from kiloword.apps.search.photos import Photos, Scan, scan
from kiloword.apps.search.rank import Ranker, measure
from kiloword.data.reading import EvalBatch, eval_batches
from kiloword.distributed.by_device import announce, reason_of, workers_of
from kiloword.distributed.device import choose
from kiloword.errors import count
from kiloword.files import Lock, utf8
from kiloword.interop.names import absolute, split
from kiloword.model.encoding import inference
from kiloword.model.prefix import check_dim, check_prefix, cosine_alone, keep_prefix_
from kiloword.models.trust import NONE, Trust
from kiloword.terminal import say, warn
from kiloword.terminal.progress import Bar
from kiloword.types import Features, Skipped

if TYPE_CHECKING:
    from kiloword.api import Matcher

COMMIT_S = 30.0  # seconds of work that a killed process loses at most, and one batch
NAMED = 10  # kept photos that are listed


def main(
    photos: Path,
    model: str | None,
    out: Path,
    batch: int = 64,
    workers: int | Literal["auto"] = "auto",
    device: str = "auto",
    precision: str = "auto",
    trust: Trust = NONE,
    dim: int | None = None,
    codes: CodeKind | None = None,
    vectors: StoredKind | None = None,
    forget: bool = False,
) -> None:
    """Run and print `kiloword index`. Raises: ValueError for options that do not fit together, or the library."""
    began = time.perf_counter()
    scanned = scan(photos)
    kept = _kept(out, dim, codes, vectors)
    matcher = opened(_model_of(model, out), device, precision, trust, kept.of_model, note=True)
    if kept.of_codes is not None:
        _note(check_prefix(matcher.model, kept.of_codes))
    network = matcher.model
    workers = workers_of(workers, choose(device), batch, network.config.image.size)
    announce(str(network.mean.device), network.precision, reason_of(precision, network.config), workers)
    if (out / FILE).exists():
        settings_of(out)  # a folder of something else gets no lock
    with Lock(out, "indexing"):
        library = _library_at(out, photos, _model_of(model, out), matcher, kept)
        skipped = update(library, photos, scanned, matcher, batch, workers, forget)
    known = library.stamps() if skipped else {}
    for one in skipped:
        scanned.left.add(one.key, one.reason + ", the library keeps what it was before" * (one.key in known))
    warn(*scanned.left.lines(), *scanned.cut.lines())
    if skipped:
        warn("Photos that cannot be read are tried again by the next index.")
    for line in describe(library):
        say(line)
    seconds = time.perf_counter() - began
    size = sum(path.stat().st_size for path in out.iterdir() if path.is_file()) / 1e6
    kind = f"{library.file.compared} dimensions" + f", {library.file.codes} codes" * (library.file.codes != "float")
    say(f"{out}: {count(len(library), 'photo')}, {kind}, {size:,.1f} MB, {seconds:.1f} s")


@dataclass(frozen=True)
class VectorForm:
    """What a library keeps of each photo's vector; None: all of its numbers."""

    dim: int | None = None
    codes: CodeKind = "float"
    vectors: StoredKind = "fp16"  # beside codes

    @property
    def of_codes(self) -> int | None:
        """How many numbers of whole vectors have codes."""
        return self.dim if self.codes != "float" and self.vectors != "none" else None

    @property
    def of_model(self) -> int | None:
        """How many numbers of the model's embedding are kept at all."""
        return self.dim if self.of_codes is None else None


def _kept(out: Path, dim: int | None, codes: CodeKind | None, vectors: StoredKind | None) -> VectorForm:
    """What the options ask for, or what the library has. Raises: ValueError where they differ, or do not fit."""
    if vectors is not None and codes in (None, "float") and not (out / FILE).exists():
        raise ValueError("--vectors stores vectors beside codes: add --codes int8 or --codes binary, or omit it.")
    if (codes, vectors) == ("int8", "int8"):
        raise ValueError("--codes int8 are vectors in int8: choose --vectors fp16, or none.")
    if not (out / FILE).is_file():
        return VectorForm(dim, codes or "float", vectors or "fp16")
    file = settings_of(out)
    here = {"dim": file.compared, "codes": file.codes, "vectors": file.vectors}
    asked = {"dim": dim, "codes": codes, "vectors": vectors}
    for name, value in asked.items():
        if value not in (None, here[name]):
            raise ValueError(
                f"{out} was made with --{name} {here[name]}, and not with {value}: omit it, or choose a new --out."
            )
    return VectorForm(file.prefix or file.code_dim, file.codes, file.vectors)


def _model_of(model: str | None, out: Path) -> str:
    """The model of --model, or that of the library. Raises: ValueError for none."""
    if model is None and not (out / FILE).is_file():
        raise ValueError("a new library needs a model: kiloword index PHOTOS --model MODEL --out DIR.")
    return model or settings_of(out).model


def opened(
    model: str, device: str, precision: str, trust: Trust = NONE, dim: int | None = None, note: bool = False
) -> Matcher:
    """The model of a library. Args: dim: see `keep_prefix_`; note: print its note.

    Raises: ValueError as `kiloword.load`; where the model is not there, it names --model.
    """
    from kiloword.api import load

    path = split(model)[1]
    try:
        matcher = load(model, device=device, method=trust.method, trust_code=trust.trust_code, precision=precision)
    except ValueError as error:
        if path is None or path.exists():
            raise
        reason = str(error).rstrip(".")
        raise ValueError(f"{reason}. Give the model that made the library by --model, if it was moved.") from error
    known = "" if dim is None else keep_prefix_(matcher.model, dim)
    _note(known if note else "")
    return matcher


def _note(note: str) -> None:
    if note:
        warn(f"note: {note}")


def opened_for(
    library: Library, model: str | None, device: str, precision: str, trust: Trust = NONE, dim: int | None = None
) -> Matcher:
    """The model that made a library, and compares as many numbers. Args: dim: compare fewer.

    Raises: ValueError for another model, numbers that the library does not have, and those of `kiloword.load`.
    """
    file, name = library.file, model or library.file.model
    matcher = opened(name, device, precision, trust, file.prefix)
    check_model(library, matcher, name)
    if dim is not None and file.codes != "float":
        if dim != file.compared:
            raise ValueError(
                f"{library.folder} has {file.codes} codes of {file.compared} numbers, in which --dim {dim} cannot "
                f"search: omit it, or index the photos in a new folder with --dim {dim}."
            )
    elif dim is not None:
        check_dim(dim, file.dim, f"{library.folder}")
        if dim < file.dim:
            _note(keep_prefix_(matcher.model, dim))
    return matcher


def fingerprint(matcher: Matcher) -> str:
    """A digest of the model's weights, shape and tokenizer, wherever it lies and whatever it runs on."""
    digest = hashlib.blake2b(repr(matcher.model.config).encode(), digest_size=16)
    digest.update(matcher.tokenizer.to_bytes())
    for name, value in sorted(matcher.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(value.detach().float().cpu().numpy()).data)
    return digest.hexdigest()


def check_model(library: Library, matcher: Matcher, name: str) -> None:
    """Raises: ValueError when the library was made by another model."""
    if fingerprint(matcher) != library.file.fingerprint:
        raise ValueError(
            f"the library {library.folder} was made by another model than {name}: its features cannot be compared. "
            f"Give the model that made it ({library.file.model}) by --model, or index the photos again in a new folder."
        )


def check_same_model(library: Library, before: Library) -> None:
    """Raises: ValueError when a library was made anew by another model than before."""
    if library.file.fingerprint != before.file.fingerprint:
        raise ValueError(f"the library {library.folder} was made anew by another model meanwhile: start again.")


def _library_at(out: Path, photos: Path, model: str, matcher: Matcher, kept: VectorForm) -> Library:
    """The library of a folder, or a new one. Raises: ValueError for one of another model or of other photos."""
    folder = utf8(str(photos.resolve()))
    if (out / FILE).is_file():
        library = Library(out, mend=True)
        check_model(library, matcher, model)
        old = Path(library.file.folder)
        if old != Path(folder) and old.is_dir():
            raise ValueError(f"{out} is a library of {old}, not of {photos}: choose another --out for other photos.")
        whole = [part.name for part in library.parts]
        damaged = [name for name in library.file.parts if name not in whole]
        for name in damaged:
            warn(f"{name} is damaged: its photos are encoded again.")
        if damaged:
            library.commit()  # without them
        return library
    size = matcher.model.config.image.size
    features = encode(matcher, torch.zeros(1, 3, size, size, dtype=torch.uint8))
    extra = {n: tuple(v.shape[1:]) for n, v in features.items() if n not in ("vec", "log_var", *_UNCERTAIN)}
    place = utf8(absolute(model))  # a search may start elsewhere
    file = LibraryFile(folder=folder, model=place, fingerprint=fingerprint(matcher), dim=features["vec"].shape[1])
    if kept.codes != "float" and not cosine_alone(matcher.model.head):
        raise ValueError(
            f"--codes {kept.codes} are for models that score a pair by the cosine of one vector each, and {model} "
            "compares more: omit it."
        )
    file = replace(file, gaussian="log_var" in features, shapes=extra, shortened=kept.of_model is not None)
    return create(out, replace(file, codes=kept.codes, code_dim=kept.of_codes, vectors=kept.vectors))


_UNCERTAIN = ("penalty", "uncertainty")


def encode(matcher: Matcher, images: Tensor) -> Features:
    """Features of preprocessed images on the CPU, float32, with "penalty" and "uncertainty" [n] of Gaussians."""
    model = matcher.model
    with inference(model):
        features = dict(model.encode_image(images.to(model.device))[1])
        if "log_var" in features and model.head.uncertainty is not None:
            features["penalty"] = model.head.uncertainty.penalty(features)
            features["uncertainty"] = matcher.uncertainty(features)
    return {name: value.float().cpu() for name, value in features.items()}


def update(
    library: Library,
    photos: Path,
    scanned: Scan,
    matcher: Matcher,
    batch: int = 64,
    workers: int = 0,
    forget: bool = False,
) -> list[Skipped]:
    """Bring a library to the state of its folder; what is done is kept when the process ends early.

    Args: forget: remove all photos that are not in the folder now, however many.
    Returns: photos that cannot be read. Raises: ValueError where most photos of the library would be removed, or are
    not in a folder that replaces that of the library; KeyboardInterrupt, whose message counts what is done.
    """
    known, stamps, folder = library.stamps(), scanned.stamps, utf8(str(photos.resolve()))
    gone, away = scanned.missing(known)
    lost = gone
    if folder != library.file.folder:  # another disk may have other photos of the same names
        lost = gone.union(away, (path for path, stamp in stamps.items() if known.get(path, stamp) != stamp))
    if forget:
        gone, away = gone.union(away), []
    elif 2 * len(lost) > len(known):
        raise ValueError(
            f"{photos} lacks, or has in another state, {len(lost):,} of {count(len(known), 'photo')} of the library "
            f"{library.folder}, such as {min(lost)}. Name the folder that has them, or give them up by --forget."
        )
    wanted = [path for path, stamp in stamps.items() if known.get(path) != stamp]
    changed = frozenset(path for path in wanted if path in known)
    new = len(wanted) - len(changed)
    say(f"{new:,} new, {len(changed):,} changed, {len(gone):,} gone, {len(stamps):,} in the folder")
    if away:
        few = ", ".join(sorted(away)[:NAMED])
        warn(f"{count(len(away), 'photo')} kept that cannot be read now (an empty folder, a link or error): {few}")
        warn("A disk may not be mounted. If the photos were deleted, --forget removes them from the library.")
    if gone or folder != library.file.folder:
        library.commit(drop=gone, folder=folder)
    try:
        skipped = _add(library, photos, scanned, wanted, changed, matcher, batch, workers) if wanted else []
    except KeyboardInterrupt:
        kept = count(len(library), "photo")
        raise KeyboardInterrupt(f"{kept} are in the library; the same command indexes the others.") from None
    library.merge()
    update_nearest(library)
    library.refresh_recall(lambda: measure(Ranker(library, matcher)), bool(gone or wanted))
    return skipped


def _add(
    library: Library,
    photos: Path,
    scanned: Scan,
    wanted: Sequence[str],
    changed: frozenset[str],
    matcher: Matcher,
    batch: int,
    workers: int,
) -> list[Skipped]:
    """Encode photos and commit them, every PART rows or COMMIT_S seconds. Args: changed: in it, kept if unreadable."""
    config, source = matcher.model.config, Photos(photos, wanted)
    waiting: list[pa.Table] = []
    out: set[str] = set()
    skipped: list[Skipped] = []
    bar, done, last = Bar("index", "photos"), 0, time.monotonic()
    for images in eval_batches(
        source, config.image.size, config.preprocess.resize, batch, workers=workers, captions=False
    ):
        if images.keys:
            waiting.append(_rows(library.file, images, encode(matcher, images.images), scanned))
        skipped += images.skipped
        out |= set(images.keys)
        done += len(images.keys) + len(images.skipped)
        full = sum(map(len, waiting)) >= PART or time.monotonic() - last > COMMIT_S
        if full or done >= len(wanted):
            library.commit(pa.concat_tables(waiting) if waiting else None, changed.intersection(out))
            waiting, out, last = [], set(), time.monotonic()
        bar(done, len(wanted))
    return skipped


def _rows(file: LibraryFile, images: EvalBatch, features: Features, scanned: Scan) -> pa.Table:
    """Rows of a batch, without ids. Raises: ValueError for features that are NaN or infinite."""
    if not all(bool(torch.isfinite(value).all()) for value in features.values()):
        raise ValueError(f"the model's features are NaN or infinite, near {images.keys[0]}.")
    paths = [path.encode("utf-8", "backslashreplace").decode() for path in images.keys]
    raw = [path.encode("utf-8", "surrogateescape") for path in images.keys]
    columns: dict[str, pa.Array] = {
        "path": pa.array(paths),
        "raw": pa.array(
            [None if text.encode() == one else one for text, one in zip(paths, raw, strict=True)], pa.binary()
        ),
        "stamp": pa.array([scanned.stamps[path] for path in images.keys]),
        "caption": pa.array(list(map(scanned.caption, images.keys, images.captions))),
    }
    for name, value in features.items():
        flat = value.numpy().reshape(len(value), -1)
        if name in file.shapes:
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(flat.astype(np.float16).ravel()), flat.shape[1])
        elif value.ndim == 1:
            columns[name] = pa.array(flat.ravel())
        else:
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), flat.shape[1])
    return pa.table(columns)


def describe(library: Library) -> list[str]:
    """What searches in the library compute, and how exact that is."""
    recall = library.file.recall
    codes = library.file.codes
    if not recall or not (library.file.shapes or codes != "float" or open_nearest(library)):
        return []
    by = "vectors" if codes == "float" else f"{codes} codes"
    return [
        f"a search scores the {recall['shortlist']:,.0f} photos nearest by their {by} exactly: of the 10 best of "
        f"all photos, {recall['recall@10']:.1%} are among them ({recall['queries']:.0f} texts tried)"
    ]

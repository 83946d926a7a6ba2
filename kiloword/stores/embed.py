"""A teacher's features of a whole data set, once, into a store: what `kiloword embed` does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import torch

from kiloword.config.recipes import DataConfig, Resize
from kiloword.data.edits import contents, every_row, origin, origins
from kiloword.data.files import key_bytes
from kiloword.data.images.augmentation import check_resize
from kiloword.data.images.views import PLAIN, Augmented
from kiloword.data.reading import EvalBatch, eval_batches
from kiloword.data.sources.open import open_data
from kiloword.data.stored import STORE, StoredSource, StoreFile
from kiloword.distributed.by_device import announce, workers_of
from kiloword.distributed.device import choose
from kiloword.distributed.sharing import alone, is_first, together
from kiloword.errors import naming_truncated
from kiloword.files import Lock
from kiloword.model.prefix import check_dim, cosine_alone, note_of
from kiloword.models.trust import NONE, Trust
from kiloword.stores.features import FeatureStore, check_name
from kiloword.stores.pieces import ProgressReport, Rows, fill, resumed, rows_table
from kiloword.stores.store import SCHEMA, WHAT, StoreWriter
from kiloword.stores.teachers import KilowordTeacher, PrefixTeacher, SentenceTeacher, Teacher, open_teacher
from kiloword.terminal import say, warn
from kiloword.types import Source

PART = 4096  # rows in a piece: an interruption costs seconds of work


def main(
    model: str,
    data: Sequence[str],
    out: Path,
    name: str = "teacher",
    extra_captions: Sequence[str] = (),
    batch: int = 64,
    workers: int | Literal["auto"] = "auto",
    device: str = "auto",
    precision: Literal["fp32", "bf16"] = "fp32",
    dtype: Literal["fp16", "fp32"] = "fp16",
    trust: Trust = NONE,
    resize: Resize | None = None,
    dim: int | None = None,
    augmented: Augmented = PLAIN,
) -> None:
    """Run and print `kiloword embed`. Ranks of torchrun share the rows.

    The precision is part of the store's identity and does not depend on the device, so that any can resume.

    Errors: see `open_teacher`, `open_data` and `embed`.
    """
    augmented.check()
    device = choose(device)
    with together(device):
        opened_teacher = open_teacher(model, device, precision, trust)
        if isinstance(opened_teacher, SentenceTeacher) and (resize is not None or augmented != PLAIN):
            raise ValueError(f"{model} reads texts, which --resize, --views and --augment do not change: omit them.")
        teacher = shortened(resized(opened_teacher, resize), dim)
        workers = workers_of(workers, device, batch * augmented.views, teacher.size)
        announce(device, precision, "on every device, unless given", workers)
        source = open_data(DataConfig(sources=tuple(data), extra_captions=tuple(extra_captions)), teacher.size)
        file = feature_file(teacher, source, model, name, precision, dtype, max(1, PART // augmented.views), augmented)
        store = write_features(teacher, source, out, file, batch, workers, ProgressReport(sys.stderr))
        if store is not None:
            size, captions = sum(path.stat().st_size for path in out.iterdir()) / 1e6, int(store.starts[-1])
            if isinstance(teacher.teacher if isinstance(teacher, PrefixTeacher) else teacher, SentenceTeacher):
                say("note: the model encodes texts alone: features of images are zeros, which match nothing.")
            views = f"{store.file.shown}, of " if store.file.augmented else ""
            say(f"{out}: {views}{len(store):,} images, {captions:,} captions, {store.dim} dimensions, {size:,.1f} MB")


def resized(teacher: Teacher, resize: Resize | None) -> Teacher:
    """The teacher with images that are resized in another way, which makes other features. None: as it is.

    Raises: ValueError for a number of pixels below the teacher's image size.
    """
    if resize is not None and resize != teacher.resize:
        check_resize(teacher.size, resize)
        teacher.resize, teacher.fingerprint = resize, f"{teacher.fingerprint} resize {resize}"
    return teacher


def shortened(teacher: Teacher, dim: int | None) -> Teacher:
    """A teacher of the first `dim` numbers of features, normalised again. None: of all.

    Raises: ValueError for a model that compares more than one vector each, and a dimension that features do not have.
    """
    if dim is None:
        return teacher
    head = teacher.model.head if isinstance(teacher, KilowordTeacher) else None
    if head is not None and not cosine_alone(head):
        raise ValueError(
            "--dim keeps the first numbers of features whose cosine scores a pair; the model compares more: omit it."
        )
    check_dim(dim, size := _dim(teacher))
    if dim == size:
        return teacher
    note = (
        "nothing says that the model was trained on prefixes of its features." if head is None else note_of(head, dim)
    )
    if note:
        warn(f"note: {note}")
    return PrefixTeacher(teacher, dim)


def embed(
    teacher: Teacher,
    source: Source,
    out: Path | str,
    *,
    teacher_name: str = "",
    name: str = "teacher",
    precision: str = "fp32",
    dtype: Literal["fp16", "fp32"] = "fp16",
    batch: int = 64,
    workers: int = 0,
    part: int = PART,
    augmented: Augmented = PLAIN,
    report: ProgressReport | None = None,
) -> FeatureStore:
    """Compute features of every readable image, or of views of it, and of all its captions; resumes in `out`.

    Args: source: in a mixture every row of each source is embedded, whatever its weight; teacher_name: for messages;
    name: of the features in a batch; precision: of the teacher; dtype: of the features on disk; batch: images in a
    batch; part: rows between interruptions; augmented: the views, drawn by the image's key; report: receives progress
    and bad rows.
    Errors: ValueError when `out` holds something else, or no row is usable.
    """
    with alone():
        file = feature_file(teacher, source, teacher_name, name, precision, dtype, part, augmented)
        store = write_features(teacher, source, Path(out), file, batch, workers, report or ProgressReport(None))
    assert store is not None, "the only rank is the first"
    return store


def feature_file(
    teacher: Teacher,
    source: Source,
    teacher_name: str,
    name: str,
    precision: str,
    dtype: Literal["fp16", "fp32"],
    part: int,
    augmented: Augmented = PLAIN,
) -> StoreFile:
    """Settings of a new store. Raises: ValueError for a bad name, and an augmentation that the images do not take."""
    check_name(name)
    natural = getattr(every_row(source), "natural", True)
    if not natural and (augmented.augment.crop < 1 or augmented.augment.flip > 0):
        raise ValueError(
            f"images of {source.name} are neither cropped nor mirrored, as their captions speak of places: omit "
            "--augment.crop and --augment.flip."
        )
    augmented.of(teacher.size, teacher.resize, natural)  # refuses what makes no views
    return StoreFile(
        kind="features",
        name=name,
        model=teacher_name,
        weights=teacher.fingerprint,
        precision=precision,
        dtype=dtype,
        width=_dim(teacher),
        part=part,
        views=augmented.views,
        seed=augmented.seed,
        augment=augmented.augment,
        **made_from(source),
    )


def made_from(source: Source) -> dict[str, Any]:
    """What `StoreFile` says of the data."""
    whole = every_row(source)
    bases = origins(whole)
    number = {(base.name, base.fingerprint): n for n, base in enumerate(bases)}
    stored = [len(bases[0])] if bases == [whole] else [0] * len(bases)
    for row in range(len(whole)) if bases != [whole] else ():
        base, _ = origin(whole, row)
        stored[number[base.name, base.fingerprint]] += 1
    return {
        "data": source.name,
        "fingerprint": whole.fingerprint,
        "rows": len(whole),
        "sources": tuple(
            StoredSource(name=base.name, fingerprint=base.fingerprint, rows=len(base), stored=n)
            for base, n in zip(bases, stored, strict=True)
        ),
        "captions": tuple(sorted(one for one in contents(whole) if not one.endswith(" images"))),
    }


def write_features(
    teacher: Teacher, source: Source, out: Path, file: StoreFile, batch: int, workers: int, report: ProgressReport
) -> FeatureStore | None:
    """As `embed`. Ranks share the rows; only the first one writes and returns the store."""
    source = every_row(source)
    views = Augmented(file.views, file.augment, file.seed).of(
        teacher.size, teacher.resize, getattr(source, "natural", True), by_key=True
    )

    def read(batches: list[range]) -> Iterator[EvalBatch]:
        return eval_batches(source, teacher.size, teacher.resize, batch, workers, batches, views)

    written = write(file, source, out, batch, read, lambda images: _encode(images, teacher, file, source), report)
    return FeatureStore(out) if written else None


@naming_truncated()
def write(
    file: StoreFile,
    source: Source,
    out: Path,
    batch: int,
    read: Callable[[list[range]], Iterator[EvalBatch]],
    compute: Callable[[EvalBatch], Rows],
    report: ProgressReport,
) -> bool:
    """Fill and finish a store. Returns: whether this rank, the first one, has written it."""
    if batch < 1:
        raise ValueError(f"--batch is {batch}: expected at least 1.")
    if not is_first():
        fill(None, source, batch, read, compute, report)
        return False
    resumed(out, STORE, file, WHAT[file.kind])  # a folder of something else gets no lock
    with Lock(out, "writing"):
        writer = StoreWriter(out, file)
        fill(writer, source, batch, read, compute, report)
        report.say_bad(writer.finish())
    return True


def placed(source: Source, file: StoreFile, batch: EvalBatch, cells: Sequence[dict[str, Any]]) -> pa.Table:
    """The rows of a batch in `keys.parquet`, also bad ones. Args: cells: further ones of each row that is not bad."""
    number = {(one.name, one.fingerprint): n for n, one in enumerate(file.sources)}

    def located(row: int) -> dict[str, Any]:
        base, at = origin(source, row)
        return {"row": row, "source": number[base.name, base.fingerprint], "at": at}

    good = [{**located(row), **more} for row, more in zip(batch.rows, cells, strict=True)]
    for cell, key in zip(good, batch.keys, strict=False):  # captions alone have none
        cell["key"] = key_bytes(key)
    for cell, image in zip(good, batch.stored, strict=False):
        cell["image"] = image
    bad = [{**located(one.row), "key": key_bytes(one.key), "reason": one.reason} for one in batch.skipped]
    return rows_table(SCHEMA, [*good, *bad])


def _encode(images: EvalBatch, teacher: Teacher, file: StoreFile, source: Source) -> Rows:
    """Features of a batch. Raises: ValueError when the teacher returns NaN or infinite features."""
    captions = [caption for of_image in images.captions for caption in of_image]
    cells = [{"captions": list(map(key_bytes, of_image))} for of_image in images.captions]
    table = placed(source, file, images, cells)
    if not images.rows:
        return Rows(table)
    of_views = [teacher.encode_images(view.contiguous()) for view in images.images.unbind(1)]
    features = {"images": torch.stack(of_views, 1), "texts": teacher.encode_texts(captions)}
    for name, values in features.items():
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"the teacher's features of {name} are NaN or infinite, near {images.keys[0]!r}.")
    return Rows(table, len(captions), {name: values.numpy() for name, values in features.items()})


def _dim(teacher: Teacher) -> int:
    """Dimension of the features. Raises: ValueError when that of images and texts differs."""
    with alone():
        image = teacher.encode_images(torch.zeros(1, 3, teacher.size, teacher.size, dtype=torch.uint8)).shape[1]
        text = teacher.encode_texts(["a"]).shape[1]
    if image != text:
        raise ValueError(f"the teacher gives images {image} dimensions and texts {text}: expected equal numbers.")
    return image

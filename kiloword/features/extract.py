"""A teacher's features of a whole data set, once, into a feature store: what `kiloword embed` does."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import torch

from kiloword.config.recipes import DataConfig, Resize
from kiloword.data.edits import every_row
from kiloword.data.feature_store import INDEX, TABLE, FeatureStore, StorePart, TableFile, check_name, contents
from kiloword.data.files import key_bytes, lookup_table
from kiloword.data.images.augmentation import check_resize
from kiloword.data.images.views import PLAIN, Augmented
from kiloword.data.parts import empty_batch, part_path
from kiloword.data.reading import EvalBatch, eval_batches
from kiloword.data.sources.open import open_data
from kiloword.distributed.by_device import announce, workers_of
from kiloword.distributed.device import choose
from kiloword.distributed.sharing import alone, is_first, together
from kiloword.errors import naming_truncated
from kiloword.features.tables import ProgressReport, Rows, TableWriter, content_of, fill, resumed
from kiloword.features.teachers import KilowordTeacher, PrefixTeacher, SentenceTeacher, Teacher, open_teacher
from kiloword.files import Lock, write_atomic
from kiloword.model.prefix import check_dim, cosine_alone, note_of
from kiloword.models.trust import NONE, Trust
from kiloword.terminal import say, warn
from kiloword.types import Source

PART = 4096  # rows in a part: an interruption costs seconds of work, a worker maps megabytes


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

    The precision is part of the feature store's identity and does not depend on the device, so that any can resume.

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
        file = _file(teacher, source, model, name, precision, dtype, max(1, PART // augmented.views), augmented)
        store = _embed(teacher, source, out, file, batch, workers, ProgressReport(sys.stderr))
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
    batch; part: rows in a file; augmented: the views, drawn by the image's key; report: receives progress and bad rows.
    Errors: ValueError when `out` holds something else, keys repeat with other content, or no row is usable.
    """
    with alone():
        file = _file(teacher, source, teacher_name, name, precision, dtype, part, augmented)
        store = _embed(teacher, source, Path(out), file, batch, workers, report or ProgressReport(None))
    assert store is not None, "the only rank is the first"
    return store


def _file(
    teacher: Teacher,
    source: Source,
    teacher_name: str,
    name: str,
    precision: str,
    dtype: Literal["fp16", "fp32"],
    part: int,
    augmented: Augmented = PLAIN,
) -> TableFile:
    """Settings of a new store. Raises: ValueError for an augmentation that the images do not take."""
    whole = every_row(source)
    natural = getattr(whole, "natural", True)
    if not natural and (augmented.augment.crop < 1 or augmented.augment.flip > 0):
        raise ValueError(
            f"images of {source.name} are neither cropped nor mirrored, as their captions speak of places: omit "
            "--augment.crop and --augment.flip."
        )
    augmented.of(teacher.size, teacher.resize, natural)  # refuses what makes no views
    return TableFile(
        name=name,
        dim=_dim(teacher),
        teacher=teacher_name,
        teacher_fingerprint=teacher.fingerprint,
        precision=precision,
        dtype=dtype,
        data=source.name,
        fingerprint=whole.fingerprint,
        contents=tuple(sorted(contents(whole))),
        rows=len(whole),
        part=part,
        views=augmented.views,
        seed=augmented.seed,
        augment=augmented.augment,
    )


@naming_truncated()
def _embed(
    teacher: Teacher, source: Source, out: Path, file: TableFile, batch: int, workers: int, report: ProgressReport
) -> FeatureStore | None:
    """As `embed`. Ranks share the rows; only the first one writes and returns the store."""
    if batch < 1:
        raise ValueError(f"--batch is {batch}: expected at least 1.")
    source = every_row(source)
    views = Augmented(file.views, file.augment, file.seed).of(
        teacher.size, teacher.resize, getattr(source, "natural", True), by_key=True
    )
    transform = views if file.augmented else None

    def read(batches: list[range]) -> Iterator[EvalBatch]:
        return eval_batches(source, teacher.size, teacher.resize, batch, workers, batches, transform)

    def work(writer: FeatureWriter | None) -> None:
        fill(writer, "features", source, batch, read, lambda images: _encode(images, teacher, file), report)

    if not is_first():
        work(None)
        return None
    existing_store(out, file)  # a folder of something else gets no lock
    with Lock(out, "writing"):
        writer = FeatureWriter(out, file)
        work(writer)
        store = writer.finish()
        writer.report(report)
        return store


def existing_store(folder: Path, file: TableFile) -> TableFile | None:
    """Settings of the store in a folder; None in a new one. Raises: ValueError for other contents, and a bad name."""
    check_name(file.name)
    return resumed(folder, TABLE, file, "features")


class FeatureWriter(TableWriter[TableFile]):
    """Writes the feature store in a folder. Errors: see `existing_store`."""

    what, of_texts = "features", True

    def __init__(self, folder: Path, file: TableFile) -> None:
        super().__init__(folder, TABLE, file, existing_store(folder, file))
        if self.missing:
            (folder / INDEX).unlink(missing_ok=True)  # readers then see that the store is not finished

    def part(self, number: int) -> StorePart:
        return StorePart(part_path(self.folder, number), self.file.schema())

    def finish(self) -> FeatureStore:
        """Write the index after all parts. Raises: ValueError when no image is usable."""
        self.check_usable()
        write_index(self.folder, [self.part(number).keys for number in range(self.file.parts)])
        return FeatureStore(self.folder)


def write_index(folder: Path, parts: Sequence[pa.Array]) -> None:
    """Write the index of a store. Args: parts: what is looked up, by part."""
    keys = [part.to_pylist() for part in parts]
    places = [(n << 32) + np.arange(len(of_part), dtype=np.uint64) for n, of_part in enumerate(keys)]
    index = io.BytesIO()
    np.save(index, lookup_table([key for of_part in keys for key in of_part], np.concatenate(places)))
    write_atomic(folder / INDEX, index.getvalue())


def _encode(images: EvalBatch, teacher: Teacher, file: TableFile) -> Rows:
    """Features of a batch. Raises: ValueError when the teacher returns NaN or infinite features."""
    if not images.rows:
        return Rows(empty_batch(file.schema()), images.skipped)
    captions = [caption for of_image in images.captions for caption in of_image]
    views = images.images.unbind(1) if file.augmented else [images.images]
    of_views = torch.stack([teacher.encode_images(view.contiguous()) for view in views], 1)
    features = {"images": of_views, "captions": teacher.encode_texts(captions)}
    for name, values in features.items():
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"the teacher's features of {name} are NaN or infinite, near {images.keys[0]!r}.")
    image_vectors, text_vectors = _vectors(of_views.flatten(1), file), _vectors(features["captions"], file)
    starts = pa.array(np.cumsum([0, *map(len, images.captions)], dtype=np.int32))
    columns = [
        pa.array(map(key_bytes, images.keys), pa.binary()),
        pa.array(map(content_of, images.images, images.captions), pa.binary(16)),
        image_vectors,
        pa.ListArray.from_arrays(starts, pa.array(map(key_bytes, captions), pa.binary())),
        pa.ListArray.from_arrays(starts, text_vectors),
    ]
    return Rows(pa.RecordBatch.from_arrays(columns, schema=file.schema()), images.skipped)


def _vectors(features: torch.Tensor, file: TableFile) -> pa.Array:
    """[n, D], or of K views [n, K * D], as stored."""
    flat = features.numpy().astype(np.float16 if file.dtype == "fp16" else np.float32).ravel()
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), features.shape[1])


def _dim(teacher: Teacher) -> int:
    """Dimension of the features. Raises: ValueError when that of images and texts differs."""
    with alone():
        image = teacher.encode_images(torch.zeros(1, 3, teacher.size, teacher.size, dtype=torch.uint8)).shape[1]
        text = teacher.encode_texts(["a"]).shape[1]
    if image != text:
        raise ValueError(f"the teacher gives images {image} dimensions and texts {text}: expected equal numbers.")
    return image

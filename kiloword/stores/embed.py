"""A teacher's features of a whole data set, once, into a store: what `kiloword embed` does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F

from kiloword.config.recipes import DataConfig, Resize
from kiloword.data.edits import every_row, origin, origins
from kiloword.data.images.augmentation import check_resize
from kiloword.data.images.views import PLAIN, Augmented
from kiloword.data.open import open_data
from kiloword.data.reading import EvalBatch, eval_batches
from kiloword.data.rows import key_bytes
from kiloword.data.stored import STORE, Kind, StoredSource, StoreFile
from kiloword.distributed.by_device import announce, workers_of
from kiloword.distributed.device import choose
from kiloword.distributed.sharing import alone, is_first, together
from kiloword.errors import naming_truncated
from kiloword.files import Lock, atomic
from kiloword.model.prefix import check_dim, check_prefix
from kiloword.models.trust import NONE, Trust
from kiloword.stores.features import FeatureStore, check_name
from kiloword.stores.joins import caption_origins
from kiloword.stores.pieces import PieceWriter, Rows, fill, read_table, resumed, rows_table, say_bad
from kiloword.stores.store import KEYS, SCHEMA, WHAT, Store, columns_of, found_by, place_of
from kiloword.stores.teachers import KilowordTeacher, SentenceTeacher, Teacher, open_teacher, prefix_fingerprint
from kiloword.terminal import say, warn
from kiloword.types import Source

PART = 4096  # rows in a piece: an interruption costs seconds of work


@dataclass(frozen=True, kw_only=True)
class EmbedOptions:
    """How features or tokens are made, see `kiloword embed`.

    Args: model: as messages name it; part: rows between interruptions, 0: by size; augmented: of images; resize: of
    images, None: as the teacher has it; dim: first numbers of features that are kept, normalised again.
    """

    model: str = ""
    name: str = "teacher"
    precision: Literal["fp32", "bf16"] = "fp32"
    dtype: Literal["fp16", "fp32", "int8"] = "fp16"
    batch: int = 64
    workers: int = 0
    part: int = 0
    augmented: Augmented = PLAIN
    resize: Resize | None = None
    dim: int | None = None


class Maker:
    """What is made of the rows of a source: `file` says what, `store` reads it, `batch` rows are read at once."""

    file: StoreFile
    store: type[Store]

    def __init__(self, source: Source, options: EmbedOptions) -> None:
        self.source, self.options, self.batch = every_row(source), options, options.batch
        self.numbers = {(base.name, base.fingerprint): n for n, base in enumerate(origins(self.source))}

    def read(self, batches: list[range]) -> Iterator[EvalBatch]:
        """Batches of rows. Args: batches: each within a piece."""
        raise NotImplementedError

    def rows(self, batch: EvalBatch) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """For each row of a batch that is not bad further cells of `store.SCHEMA`; and its values in the columns.

        Raises: ValueError for values that cannot be stored.
        """
        raise NotImplementedError

    def about(self, kind: Kind, weights: str, **more: Any) -> StoreFile:
        """The settings of the store."""
        bases = origins(self.source)
        return StoreFile(
            kind=kind,
            model=self.options.model,
            weights=weights,
            precision=self.options.precision,
            dtype=self.options.dtype,
            data=self.source.name,
            fingerprint=self.source.fingerprint,
            rows=len(self.source),
            sources=tuple(StoredSource(name=one.name, fingerprint=one.fingerprint, rows=len(one)) for one in bases),
            captions=() if kind == "images" else tuple(sorted(caption_origins(self.source))),
            **more,
        )

    def _placed(self, batch: EvalBatch) -> Rows:
        """The rows of a batch in the store, also bad ones."""
        cells, columns = self.rows(batch) if batch.rows else ([], None)
        good = [{"row": row, **more} for row, more in zip(batch.rows, cells, strict=True)]
        for cell, key, image in zip(good, batch.keys, batch.stored, strict=False):  # captions alone have none
            cell |= {"key": key_bytes(key), "image": image}
        bad = [{"row": one.row, "key": key_bytes(one.key), "reason": one.reason} for one in batch.skipped]
        for cell in (*good, *bad):
            base, cell["at"] = origin(self.source, cell["row"])
            cell["source"] = self.numbers[base.name, base.fingerprint]
        return Rows(rows_table(SCHEMA, [*good, *bad]), columns)

    def write(self, out: Path | str, report: TextIO | None) -> bool:
        """Fill and finish the store in a folder. Returns: whether this rank, the first one, has written it."""
        if self.options.batch < 1:
            raise ValueError(f"--batch is {self.options.batch}: expected at least 1.")
        with naming_truncated():
            if not is_first():
                fill(None, self.source, self.batch, self.read, self._placed, report)
                return False
            folder = place_of(out, self.file.kind)
            existing = resumed(folder, STORE, self.file, WHAT[self.file.kind])  # what is no store gets no lock
            keys, columns = folder / KEYS, columns_of(self.file)
            with Lock(folder, "writing"):
                finished = keys.is_file()
                writer = PieceWriter(folder, STORE, self.file, existing, finished, columns)
                fill(writer, self.source, self.batch, self.read, self._placed, report)
                if not finished:
                    table = writer.table()
                    for name, values in found_by(table, self.file.kind).items():
                        with atomic(folder / f"{name}.npy") as file:
                            np.save(file, values)
                    with atomic(keys) as file:
                        pq.write_table(table, file)
                for piece in folder.glob("part-*.parquet"):
                    piece.unlink()
                say_bad(read_table(keys), report)
        return True


def embed(
    teacher: Teacher, source: Source, out: Path | str, report: TextIO | None = None, **options: Any
) -> FeatureStore | None:
    """Compute features of every readable image, or of views of it, and of all its captions; resumes in `out`.

    Ranks share the rows; only the first one writes and returns the store.

    Args: source: in a mixture every row of each source is embedded, whatever its weight; report: receives progress and
    bad rows; options: of `EmbedOptions`; views are drawn by the image's key.
    Errors: ValueError when `out` holds something else, or no row is usable.
    """
    return FeatureStore(out) if _Features(teacher, source, EmbedOptions(**options)).write(out, report) else None


class _Features(Maker):
    store = FeatureStore

    def __init__(self, teacher: Teacher, source: Source, options: EmbedOptions) -> None:
        super().__init__(source, options)
        self.teacher, drawn = teacher, options.augmented
        check_name(options.name)
        natural = getattr(self.source, "natural", True)
        if not natural and (drawn.augment.crop < 1 or drawn.augment.flip > 0):
            raise ValueError(
                f"images of {source.name} are neither cropped nor mirrored, as their captions speak of places: omit "
                "--augment.crop and --augment.flip."
            )
        self.resize, weights = options.resize or teacher.resize, teacher.fingerprint
        if self.resize != teacher.resize:
            check_resize(teacher.size, self.resize)
            weights += f" resize {self.resize}"
        with alone():
            blank = torch.zeros(1, 3, teacher.size, teacher.size, dtype=torch.uint8)
            size, of_texts = (values.shape[1] for values in (teacher.encode_images(blank), teacher.encode_texts(["a"])))
        if size != of_texts:
            raise ValueError(
                f"the teacher gives images {size} dimensions and texts {of_texts}: expected equal numbers."
            )
        self.dim = size if options.dim is None else options.dim
        check_dim(self.dim, size)
        weights = weights if self.dim == size else prefix_fingerprint(weights, self.dim)
        self.views = drawn.of(teacher.size, self.resize, natural, by_key=True)
        part = options.part or max(1, PART // drawn.views)
        more = {"views": drawn.views, "seed": drawn.seed, "augment": drawn.augment, "part": part}
        self.file = self.about("features", weights, name=options.name, width=self.dim, **more)

    def read(self, batches: list[range]) -> Iterator[EvalBatch]:
        size, options = self.teacher.size, self.options
        return eval_batches(self.source, size, self.resize, options.batch, options.workers, batches, self.views)

    def rows(self, batch: EvalBatch) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        captions = [caption for of_image in batch.captions for caption in of_image]
        of_views = [self.teacher.encode_images(view.contiguous()) for view in batch.images.unbind(1)]
        features = {"images": torch.stack(of_views, 1), "texts": self.teacher.encode_texts(captions)}
        for name, values in features.items():
            if self.dim < values.shape[-1]:
                features[name] = values = F.normalize(values[..., : self.dim], dim=-1)
            if not bool(torch.isfinite(values).all()):
                raise ValueError(f"the teacher's features of {name} are NaN or infinite, near {batch.keys[0]!r}.")
        cells = [{"captions": list(map(key_bytes, of_image))} for of_image in batch.captions]
        return cells, {name: values.numpy() for name, values in features.items()}


def of_teacher(
    data: DataConfig, options: EmbedOptions, workers: int | Literal["auto"], device: str, trust: Trust
) -> Iterator[Maker]:
    """What makes features. Errors: see `open_teacher` and `open_data`."""
    teacher = open_teacher(options.model, device, options.precision, trust)
    of_texts = isinstance(teacher, SentenceTeacher)
    if of_texts and (options.resize is not None or options.augmented != PLAIN):
        raise ValueError(
            f"{options.model} reads texts, which --resize, --views and --augment do not change: omit them."
        )
    if options.dim is not None:
        unknown = "nothing says that the model was trained on prefixes of its features."
        if note := check_prefix(teacher.model, options.dim) if isinstance(teacher, KilowordTeacher) else unknown:
            warn(f"note: {note}")
    if of_texts:
        say("note: the model encodes texts alone: features of images are zeros, which match nothing.")
    options = settled(options, workers, device, teacher.size)
    yield _Features(teacher, open_data(data, teacher.size), options)


def settled(options: EmbedOptions, workers: int | Literal["auto"], device: str, size: int) -> EmbedOptions:
    """The options with their number of workers, which is printed. Args: size: of images."""
    number = workers_of(workers, device, options.batch * options.augmented.views, size)
    announce(device, options.precision, "on every device, unless given", number)
    return replace(options, workers=number)


def main(
    data: DataConfig,
    out: Path,
    options: EmbedOptions,
    workers: int | Literal["auto"],
    device: str,
    trust: Trust = NONE,
    makers: Callable[..., Iterable[Maker]] = of_teacher,
) -> None:
    """Run and print `kiloword embed`. Ranks of torchrun share the rows.

    The precision is part of the store's identity and does not depend on the device, so that any can resume.

    Args: makers: see `of_teacher`. Errors: see `open_teacher`, `open_data` and `embed`.
    """
    options.augmented.check()
    device = choose(device)
    with together(device):
        for maker in makers(data, options, workers, device, trust):
            if maker.write(out, sys.stderr):
                say(f"{out}: {maker.store(out)}")

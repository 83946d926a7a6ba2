"""Features or tokens of a whole data set, once, into stores: what `kiloword embed` does.

Tokens of an image are computed in a group of 32 rows of the data at its place there, whatever the batch is and wherever
a command was interrupted, as kernels round by the number of images. Captions are computed with those of the same 32
rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.recipes import DataConfig, Resize
from kiloword.data.edits import every_row, origin, origins
from kiloword.data.images.augmentation import check_resize
from kiloword.data.images.views import PLAIN, Augmented
from kiloword.data.open import open_data
from kiloword.data.reading import EvalBatch, captions_at, eval_batches, name_of
from kiloword.data.rows import key_bytes
from kiloword.data.stored import STORE, Kind, StoredSource, StoreFile
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed.by_device import announce, workers_of
from kiloword.distributed.device import choose, precision_of
from kiloword.distributed.sharing import alone, is_first, together
from kiloword.errors import naming_truncated
from kiloword.files import Lock, atomic
from kiloword.model.encoding import inference
from kiloword.model.model import Model
from kiloword.model.prefix import check_dim, check_prefix
from kiloword.models.trust import NONE, Trust
from kiloword.stores.features import FeatureStore, check_name
from kiloword.stores.pieces import PieceWriter, Rows, fill, read_table, resumed, rows_table, say_bad
from kiloword.stores.runs import trunk_digest, trunk_of
from kiloword.stores.store import KEYS, SCHEMA, WHAT, Store, columns_of, found_by, place_of
from kiloword.stores.teachers import (
    KilowordTeacher,
    SentenceTeacher,
    Teacher,
    open_teacher,
    open_tower,
    prefix_fingerprint,
    trunk_tokens,
)
from kiloword.stores.tokens import ImageTokens, TextTokens, TokenKind, quantised, tokenizer_digest
from kiloword.terminal import say, warn
from kiloword.types import BadSample, Skipped, Source

PART = 4096  # rows in a piece of features, or of tokens of images, at most: an interruption costs seconds of work
TEXT_PART = 512  # of tokens of captions
PART_BYTES = 1 << 25  # of tokens of images in a piece, at most
TOGETHER = 32  # rows of the data whose tokens are computed together
HALF_MAX = 65504.0


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


def main(
    data: DataConfig,
    out: Path,
    options: EmbedOptions,
    workers: int | Literal["auto"],
    device: str,
    trust: Trust = NONE,
    tokens: bool = False,
) -> None:
    """Run and print `kiloword embed`, with `tokens` that of a tower's tokens. Ranks of torchrun share the rows.

    The precision is part of the store's identity and does not depend on the device, so that any can resume.

    Errors: see `open_teacher`, `open_tower`, `open_data` and `embed`.
    """
    options.augmented.check()
    device = choose(device)
    with together(device):
        note, reads = "", list[TokenKind](("images", "texts"))
        if tokens:
            model, tokenizer, note = open_tower(options.model, trust)
            model, size = model.to(device), model.config.image.size
            reads = [kind for kind in reads if trunk_of(model, kind) is not None]
        else:
            teacher = open_teacher(options.model, device, options.precision, trust)
            size = teacher.size
            if options.dim is not None:
                note = "nothing says that the model was trained on prefixes of its features."
                if isinstance(teacher, KilowordTeacher):
                    note = check_prefix(teacher.model, options.dim)
            if isinstance(teacher, SentenceTeacher):
                reads = ["texts"]
                note = "the model encodes texts alone: features of images are zeros, which match nothing."
        if note:
            warn(f"note: {note}")
        if reads == ["texts"] and (options.resize is not None or options.augmented != PLAIN):
            raise ValueError(
                f"{options.model} reads texts, which --resize, --views and --augment do not change: omit them."
            )
        if reads == ["images"] and data.extra_captions:
            raise ValueError(f"{options.model} reads images, which --extra-captions does not change: omit it.")
        options = replace(options, workers=workers_of(workers, device, options.batch * options.augmented.views, size))
        announce(device, options.precision, "on every device, unless given", options.workers)
        source = open_data(data, size)
        stores: list[Store | None]
        if tokens:
            stores = [embed_tokens(model, tokenizer, kind, source, out, options, sys.stderr) for kind in reads]
        else:
            stores = [embed(teacher, source, out, sys.stderr, **vars(options))]
        say(*(f"{out}: {store}" for store in stores if store is not None))


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


def embed_tokens(
    model: Model,
    tokenizer: Tokenizer | None,
    kind: TokenKind,
    source: Source,
    out: Path | str,
    options: EmbedOptions,
    report: TextIO | None = None,
) -> ImageTokens | TextTokens | None:
    """As `embed`, tokens of every readable image, or of all captions, by the trunk of a model.

    Args: tokenizer: of texts; out: folder of features, which gets a folder `images` or `texts`.
    """
    if kind == "images":
        return ImageTokens(out) if _ImageTokens(model, source, options).write(out, report) else None
    assert tokenizer is not None
    return TextTokens(out) if _TextTokens(model, tokenizer, source, options).write(out, report) else None


class _Maker:
    """What is made of the rows of a source: `file` says what, `batch` rows are read at once."""

    kind: Kind
    views: Augmented

    def __init__(self, source: Source, options: EmbedOptions, batch: int, weights: str, **more: Any) -> None:
        self.source, self.batch, self.workers = every_row(source), batch, options.workers
        bases = origins(self.source)
        self.numbers = {(base.name, base.fingerprint): n for n, base in enumerate(bases)}
        self.file = StoreFile(
            kind=self.kind,
            model=options.model,
            weights=weights,
            precision=options.precision,
            dtype=options.dtype,
            data=self.source.name,
            fingerprint=self.source.fingerprint,
            rows=len(self.source),
            sources=tuple(StoredSource(name=one.name, fingerprint=one.fingerprint, rows=len(one)) for one in bases),
            **more,
        )

    def read(self, batches: list[range]) -> Iterator[EvalBatch]:
        """Batches of rows. Args: batches: each within a piece."""
        how: dict[str, Any] = {"batch": self.batch, "workers": self.workers, "parts": batches, "transform": self.views}
        return eval_batches(self.source, self.views.size, captions=self.kind == "features", **how)

    def rows(self, batch: EvalBatch) -> tuple[dict[str, Any], list[int]]:
        """Values of the columns, of the rows that are not bad, and how many tokens each caption has, if it has some."""
        raise NotImplementedError

    def _placed(self, batch: EvalBatch) -> Rows:
        """The rows of a batch in the store, also bad ones. Raises: ValueError for values that cannot be stored."""
        columns, lengths = self.rows(batch) if batch.rows else ({}, [])
        for name, values in columns.items():
            largest = float(np.abs(values).max(initial=0.0))
            if not np.isfinite(largest):
                raise ValueError(f"the model's {name} are NaN or infinite, near row {batch.rows[0]}.")
            if largest > HALF_MAX and self.file.dtype != "fp32":
                raise ValueError(f"the model's {name} reach {largest:.3g}, more than fp16 has: use --dtype fp32.")
        if self.file.dtype == "int8" and columns:
            columns = dict(zip(("tokens", "scales"), quantised(columns["tokens"]), strict=True))
        cells: list[dict[str, Any]]
        cells = [{"row": one.row, "key": key_bytes(one.key), "reason": one.reason} for one in batch.skipped]
        for row, texts in zip(batch.rows, batch.captions, strict=True):
            cells.append({"row": row})
            if self.kind != "images":
                cells[-1]["captions"] = list(map(key_bytes, texts))
            if self.kind == "texts":
                cells[-1]["lengths"], lengths = lengths[: len(texts)], lengths[len(texts) :]
        for cell, key, image in zip(cells[len(batch.skipped) :], batch.keys, batch.stored, strict=False):
            cell |= {"key": key_bytes(key), "image": image}
        for cell in cells:
            base, cell["at"] = origin(self.source, cell["row"])
            cell["source"] = self.numbers[base.name, base.fingerprint]
        return Rows(rows_table(SCHEMA, cells), columns)

    def write(self, out: Path | str, report: TextIO | None) -> bool:
        """Fill and finish the store in a folder. Returns: whether this rank, the first one, has written it."""
        if self.batch < 1:
            raise ValueError(f"--batch is {self.batch}: expected at least 1.")
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


class _Features(_Maker):
    kind = "features"

    def __init__(self, teacher: Teacher, source: Source, options: EmbedOptions) -> None:
        self.teacher, drawn = teacher, options.augmented
        check_name(options.name)
        natural = getattr(source, "natural", True)
        if not natural and (drawn.augment.crop < 1 or drawn.augment.flip > 0):
            raise ValueError(
                f"images of {source.name} are neither cropped nor mirrored, as their captions speak of places: omit "
                "--augment.crop and --augment.flip."
            )
        resize, weights = options.resize or teacher.resize, teacher.fingerprint
        if resize != teacher.resize:
            check_resize(teacher.size, resize)
            weights += f" resize {resize}"
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
        self.views = drawn.of(teacher.size, resize, natural, by_key=True)
        part = options.part or max(1, PART // drawn.views)
        more = {"views": drawn.views, "seed": drawn.seed, "augment": drawn.augment, "name": options.name}
        super().__init__(source, options, options.batch, weights, width=self.dim, part=part, **more)

    def rows(self, batch: EvalBatch) -> tuple[dict[str, Any], list[int]]:
        captions = [caption for of_image in batch.captions for caption in of_image]
        of_views = [self.teacher.encode_images(view.contiguous()) for view in batch.images.unbind(1)]
        features = {"images": torch.stack(of_views, 1), "texts": self.teacher.encode_texts(captions)}
        for name, values in features.items():
            if self.dim < values.shape[-1]:
                features[name] = F.normalize(values[..., : self.dim], dim=-1)
        return {name: values.numpy() for name, values in features.items()}, []


class _Tokens(_Maker):
    """Tokens of a trunk. `batch` and pieces are whole groups of TOGETHER rows."""

    kind: TokenKind

    def __init__(self, model: Model, source: Source, options: EmbedOptions, **more: Any) -> None:
        self.model = model
        batch = -(-options.batch // TOGETHER) * TOGETHER
        super().__init__(source, options, batch, trunk_digest(model, self.kind), **more)

    def rows(self, batch: EvalBatch) -> tuple[dict[str, Any], list[int]]:
        with inference(self.model), precision_of(self.file.precision, self.model.device.type)():
            groups = groupby(range(len(batch.rows)), lambda n: batch.rows[n] // TOGETHER)
            made = [self.group(batch, list(group)) for _, group in groups]
        tokens = torch.cat([values for values, _ in made]).float().cpu().numpy()
        return {"tokens": tokens}, [length for _, lengths in made for length in lengths]

    def group(self, batch: EvalBatch, which: list[int]) -> tuple[Tensor, list[int]]:
        """As `rows`, tokens [m, W] of some rows of a batch that lie together."""
        raise NotImplementedError


class _ImageTokens(_Tokens):
    kind = "images"

    def __init__(self, model: Model, source: Source, options: EmbedOptions) -> None:
        drawn, config = options.augmented, model.config
        size, resize, trunk = config.image.size, config.preprocess.resize, config.image.trunk
        self.views = drawn.of(size, resize, getattr(source, "natural", True))
        tokens = trunk.prefix + trunk.grid**2
        bytes_of_row = drawn.views * tokens * trunk.width * {"fp16": 2, "fp32": 4, "int8": 1}[options.dtype]
        part = options.part or min(PART, max(1, PART_BYTES // bytes_of_row // TOGETHER) * TOGETHER)
        more = {"views": drawn.views, "seed": drawn.seed, "augment": drawn.augment, "size": size, "resize": resize}
        super().__init__(model, source, options, width=trunk.width, part=part, tokens=tokens, **more)

    def group(self, batch: EvalBatch, which: list[int]) -> tuple[Tensor, list[int]]:
        file, places = self.file, [batch.rows[n] % TOGETHER for n in which]
        trunk: Any = self.model.image_tower.trunk
        filled, tokens = torch.zeros(TOGETHER, *batch.images.shape[2:], dtype=torch.uint8), list[Tensor]()
        for view in range(file.views):
            filled[places] = batch.images[which, view]
            tokens.append(trunk(self.model.normalise(filled.to(self.model.device)))[places])
        return torch.stack(tokens, 1).flatten(0, 2), []


class _TextTokens(_Tokens):
    kind = "texts"

    def __init__(self, model: Model, tokenizer: Tokenizer, source: Source, options: EmbedOptions) -> None:
        self.tokenizer, config, part = tokenizer, model.config.text, options.part or TEXT_PART
        more = {"context": config.context, "tokenizer": tokenizer_digest(tokenizer)}
        super().__init__(model, source, options, width=config.trunk.width, part=part, **more)

    def read(self, batches: list[range]) -> Iterator[EvalBatch]:
        """Captions without images."""
        for rows in batches:
            batch = EvalBatch([], [], torch.empty(0), [], None, [], [])
            for row in rows:
                try:
                    if not (captions := captions_at(self.source, row)):
                        raise BadSample("no caption")
                except BadSample as error:
                    batch.skipped.append(Skipped(row, name_of(self.source, row), str(error)))
                    continue
                batch.captions.append(captions)
                batch.rows.append(row)
            yield batch

    def group(self, batch: EvalBatch, which: list[int]) -> tuple[Tensor, list[int]]:
        texts, tokens = trunk_tokens(self.model, self.tokenizer, [t for n in which for t in batch.captions[n]])
        return tokens, texts.starts.diff().tolist()

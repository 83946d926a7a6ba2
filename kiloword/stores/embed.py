"""Features or tokens of a whole data set, once, into stores: what `kiloword embed` does.

Tokens of an image are computed in a group of 32 rows of the data at its place there, whatever the batch is and wherever
a command was interrupted, as kernels round by the number of images. Captions are computed with those of the same 32
rows.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.recipes import DataConfig
from kiloword.data.edits import every_row, origin, origins
from kiloword.data.images.views import PLAIN, Augmented
from kiloword.data.open import open_data
from kiloword.data.reading import EvalBatch, captions_at, eval_batches, name_of
from kiloword.data.rows import key_bytes
from kiloword.data.stored import STORE, StoredSource, StoreFile
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed.by_device import announce, workers_of
from kiloword.distributed.device import choose, precision_of
from kiloword.distributed.sharing import alone, together
from kiloword.errors import naming_truncated
from kiloword.files import atomic
from kiloword.model.encoding import inference
from kiloword.model.model import Model
from kiloword.model.prefix import check_dim, check_prefix
from kiloword.stores.features import FeatureStore
from kiloword.stores.options import EmbedOptions
from kiloword.stores.pieces import Rows, computed
from kiloword.stores.runs import trunk_digest, trunk_of
from kiloword.stores.store import KEYS, SCHEMA, WHAT, Kept, Store, columns_of, found_by, place_of
from kiloword.stores.teachers import SentenceTeacher, Teacher, open_teacher, open_tower, trunk_tokens
from kiloword.stores.tokens import ImageTokens, TextTokens, TokenKind, quantised, tokenizer_digest
from kiloword.terminal import say, warn_once
from kiloword.types import BadSample, Skipped, Source

if TYPE_CHECKING:
    from kiloword.stores.command import Embed

PART = 4096  # rows in a piece of features, or of tokens of images, at most: an interruption costs seconds of work
TEXT_PART = 512  # of tokens of captions
PART_BYTES = 1 << 25  # of tokens of images in a piece, at most
TOGETHER = 32  # rows of the data whose tokens are computed together
HALF_MAX = 65504.0
Made = tuple[dict[str, Any], list[int]]
"""Values of a batch for the columns, of the rows that are not bad; how many tokens each caption has, of tokens."""


def run(asked: Embed, kinds: Sequence[TokenKind] = ("images", "texts")) -> None:
    """What `kiloword embed` does, and prints. Ranks of torchrun share the rows. Args: kinds: of tokens.

    The precision is part of the store's identity and does not depend on the device, so that any can resume.

    Errors: see `open_teacher`, `open_tower`, `open_data` and `embed`.
    """
    drawn = Augmented(asked.views, asked.augment, asked.seed)
    drawn.check()
    device = choose(asked.device)
    with together(device):
        note, reads = "", list(kinds)
        if asked.tokens:
            model, tokenizer, note = open_tower(asked.model, kinds, asked.trust)
            model, size = model.to(device), model.config.image.size
            reads = [kind for kind in reads if trunk_of(model, kind) is not None]
        else:
            teacher = open_teacher(asked.model, device, asked.precision, asked.trust)
            size = teacher.size
            if isinstance(teacher, SentenceTeacher):
                reads = ["texts"]
                note = "the model encodes texts alone: features of images are zeros, which match nothing."
            elif asked.dim is not None:
                note = check_prefix(teacher.model, asked.dim)
        if note:
            warn_once(f"note: {note}")
        if reads == ["texts"] and (asked.resize is not None or drawn != PLAIN):
            raise ValueError(
                f"{asked.model} reads texts, which --resize, --views and --augment do not change: omit them."
            )
        if reads == ["images"] and asked.extra_captions:
            raise ValueError(f"{asked.model} reads images, which --extra-captions does not change: omit it.")
        workers = workers_of(asked.workers, device, asked.batch * asked.views, size)
        announce(device, asked.precision, "on every device, unless given", workers)
        source = open_data(DataConfig(sources=asked.data, extra_captions=asked.extra_captions), size)
        options, stores = replace(asked, workers=workers), list[Store | None]()
        if asked.tokens:
            stores += [embed_tokens(model, tokenizer, kind, source, asked.out, options, sys.stderr) for kind in reads]
        else:
            how = {one.name: getattr(options, one.name) for one in fields(EmbedOptions)}
            stores.append(embed(teacher, source, asked.out, sys.stderr, **how))
        say(*(f"{asked.out}: {store}" for store in stores if store is not None))


def embed(
    teacher: Teacher, source: Source, out: Path | str, report: TextIO | None = None, **options: Any
) -> FeatureStore | None:
    """Compute features of every readable image, or of views of it, and of all its captions; resumes in `out`.

    Ranks share the rows; only the first one writes and returns the store.

    Args: source: in a mixture every row of each source is embedded, whatever its weight; report: receives progress and
    bad rows; options: of `EmbedOptions`; views are drawn by the image's key.
    Errors: ValueError when `out` holds something else, or no row is usable.
    """
    made = EmbedOptions(**options)
    drawn = Augmented(made.views, made.augment, made.seed)
    natural, weights = getattr(source, "natural", True), teacher.fingerprint
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", made.name) or made.name in ("truth", "position"):
        raise ValueError(f"features cannot be named {made.name!r}: expected letters, digits, - and _, and not 'truth'.")
    if not natural and (drawn.augment.crop < 1 or drawn.augment.flip > 0):
        raise ValueError(
            f"images of {source.name} are neither cropped nor mirrored, as their captions speak of places: omit "
            "--augment.crop and --augment.flip."
        )
    resize = made.resize or teacher.resize
    if resize != teacher.resize:
        weights += f" resize {resize}"
    with alone():
        blank = torch.zeros(1, 3, teacher.size, teacher.size, dtype=torch.uint8)
        size, of_texts = (values.shape[1] for values in (teacher.encode_images(blank), teacher.encode_texts(["a"])))
    if size != of_texts:
        raise ValueError(f"the teacher gives images {size} dimensions and texts {of_texts}: expected equal numbers.")
    dim = size if made.dim is None else made.dim
    check_dim(dim, size)
    if dim < size:
        weights += f" dim {dim}"

    def rows(batch: EvalBatch) -> Made:
        captions = [caption for of_image in batch.captions for caption in of_image]
        of_views = [teacher.encode_images(view.contiguous()) for view in batch.images.unbind(1)]
        features = {"images": torch.stack(of_views, 1), "texts": teacher.encode_texts(captions)}
        if dim < size:
            features = {name: F.normalize(values[..., :dim], dim=-1) for name, values in features.items()}
        return {name: values.numpy() for name, values in features.items()}, []

    views = drawn.of(teacher.size, resize, natural, by_key=True)
    part = made.part or max(1, PART // drawn.views)
    more = {"weights": weights, "name": made.name, "width": dim, "part": part}
    return _written(FeatureStore, source, out, made, made.batch, views, rows, report, **more)


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
    batch_rows = -(-options.batch // TOGETHER) * TOGETHER
    config, weights = model.config, trunk_digest(model, kind)
    drawn = Augmented(options.views, options.augment, options.seed)

    def of_texts(batch: EvalBatch, which: list[int]) -> tuple[Tensor, list[int]]:
        assert tokenizer is not None
        texts, tokens = trunk_tokens(model, tokenizer, [text for n in which for text in batch.captions[n]])
        return tokens, texts.starts.diff().tolist()

    def of_images(batch: EvalBatch, which: list[int]) -> tuple[Tensor, list[int]]:
        places, tokens, trunk = [batch.rows[n] % TOGETHER for n in which], list[Tensor](), trunk_of(model, "images")
        assert trunk is not None
        filled = torch.zeros(TOGETHER, *batch.images.shape[2:], dtype=torch.uint8)
        for view in range(drawn.views):
            filled[places] = batch.images[which, view]
            tokens.append(trunk(model.normalise(filled.to(model.device)))[places])
        return torch.stack(tokens, 1).flatten(0, 2), []

    def rows(batch: EvalBatch) -> Made:
        with inference(model), precision_of(options.precision, model.device.type)():
            groups = groupby(range(len(batch.rows)), lambda n: batch.rows[n] // TOGETHER)
            found = [(of_texts if kind == "texts" else of_images)(batch, list(group)) for _, group in groups]
        tokens = torch.cat([values for values, _ in found]).float().cpu().numpy()
        return {"tokens": tokens}, [length for _, lengths in found for length in lengths]

    if kind == "texts":
        assert tokenizer is not None
        text, part = config.text, options.part or TEXT_PART
        more = {"width": text.trunk.width, "context": text.context, "tokenizer": tokenizer_digest(tokenizer)}
        return _written(
            TextTokens, source, out, options, batch_rows, None, rows, report, weights=weights, part=part, **more
        )
    size, resize, trunk = config.image.size, config.preprocess.resize, config.image.trunk
    tokens = trunk.prefix + trunk.grid**2
    bytes_of_row = drawn.views * tokens * trunk.width * {"fp16": 2, "fp32": 4, "int8": 1}[options.dtype]
    part = options.part or min(PART, max(1, PART_BYTES // bytes_of_row // TOGETHER) * TOGETHER)
    more = {"width": trunk.width, "tokens": tokens, "size": size, "resize": resize, "weights": weights, "part": part}
    views = drawn.of(size, resize, getattr(source, "natural", True))
    return _written(ImageTokens, source, out, options, batch_rows, views, rows, report, **more)


def _written(
    store: type[Kept],
    source: Source,
    out: Path | str,
    options: EmbedOptions,
    batch: int,
    views: Augmented | None,
    rows: Callable[[EvalBatch], Made],
    report: TextIO | None,
    **more: Any,
) -> Kept | None:
    """Fill and finish a store in a folder, on the first rank; the others return None.

    Args: batch: rows that are read at once; views: of images, None: captions alone are read; more: of `StoreFile`.
    """
    kind, whole = store.kind, every_row(source)
    workers = 0 if options.workers == "auto" else options.workers
    bases = origins(whole)
    numbers = {(base.name, base.fingerprint): n for n, base in enumerate(bases)}
    if views is not None:
        more |= {"views": options.views, "seed": options.seed, "augment": options.augment}
    file = StoreFile(
        kind=kind,
        model=options.model,
        precision=options.precision,
        dtype=options.dtype,
        data=whole.name,
        fingerprint=whole.fingerprint,
        rows=len(whole),
        sources=tuple(StoredSource(name=one.name, fingerprint=one.fingerprint, rows=len(one)) for one in bases),
        **more,
    )

    def read(batches: list[range]) -> Iterator[EvalBatch]:
        if views is None:
            return captions(whole, batches)
        return eval_batches(whole, views.size, "shortest", batch, workers, batches, views, kind == "features")

    def compute(images: EvalBatch) -> Rows:
        made = _rows(images, file, *(rows(images) if images.rows else ({}, [])))
        for cell in made.cells:
            base, cell["at"] = origin(whole, cell["row"])
            cell["source"] = numbers[base.name, base.fingerprint]
        return made

    folder = place_of(out, kind)
    what, columns, finished = WHAT[kind], columns_of(file), folder / KEYS
    pieces = folder, file, SCHEMA, whole, batch, read, compute, report
    with (
        naming_truncated(),
        computed(*pieces, out=folder, name=STORE, what=what, columns=columns, finished=finished) as made,
    ):
        if made is None:
            return None
        if not finished.is_file():
            for name, values in found_by(made[1], kind).items():
                with atomic(folder / f"{name}.npy") as opened:
                    np.save(opened, values)
            with atomic(finished) as opened:
                pq.write_table(made[1], opened)
        for piece in folder.glob("part-*.parquet"):
            piece.unlink()
    return store(out)


def _rows(batch: EvalBatch, file: StoreFile, columns: dict[str, Any], lengths: list[int]) -> Rows:
    """The rows of a batch, also bad ones, with columns as stored. Raises: ValueError for what cannot be stored."""
    for name, values in columns.items():
        largest = float(np.abs(values).max(initial=0.0))
        if not np.isfinite(largest):
            raise ValueError(f"the model's {name} are NaN or infinite, near row {batch.rows[0]}.")
        if largest > HALF_MAX and file.dtype != "fp32":
            raise ValueError(f"the model's {name} reach {largest:.3g}, more than fp16 has: use --dtype fp32.")
    if file.dtype == "int8" and columns:
        columns = dict(zip(("tokens", "scales"), quantised(columns["tokens"]), strict=True))
    cells: list[dict[str, Any]]
    cells = [{"row": one.row, "key": key_bytes(one.key), "reason": one.reason} for one in batch.skipped]
    for n, row in enumerate(batch.rows):
        cells.append({"row": row})
        if file.kind != "texts":
            cells[-1] |= {"key": key_bytes(batch.keys[n]), "image": batch.stored[n]}
        if file.kind != "images":
            cells[-1]["captions"] = list(map(key_bytes, batch.captions[n]))
        if file.kind == "texts":
            of_row = len(batch.captions[n])
            cells[-1]["lengths"], lengths = lengths[:of_row], lengths[of_row:]
    return Rows(cells, columns)


def captions(source: Source, parts: list[range]) -> Iterator[EvalBatch]:
    """Captions of rows, without images."""
    for rows in parts:
        batch = EvalBatch([], [], torch.empty(0), [], None, [], [])
        for row in rows:
            try:
                if not (captions := captions_at(source, row)):
                    raise BadSample("no caption")
            except BadSample as error:
                batch.skipped.append(Skipped(row, name_of(source, row), str(error)))
                continue
            batch.captions.append(captions)
            batch.rows.append(row)
        yield batch

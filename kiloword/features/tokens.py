"""Tokens of a frozen trunk for a whole data set, once, into a token store: what `kiloword embed --tokens` does.

An image is computed in a group of 32 rows of the data at its place there, whatever the batch is and wherever a command
was interrupted, as kernels round by the number of images. Captions are computed with those of the same 32 rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from kiloword.config.recipes import AugmentConfig
from kiloword.data.edits import every_row
from kiloword.data.feature_store import INDEX, TABLE
from kiloword.data.files import key_bytes
from kiloword.data.images.views import Augmented
from kiloword.data.parts import Part, empty_batch, part_path
from kiloword.data.reading import EvalBatch, captions_at, eval_batches, name_of
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.data.token_join import tokenizer_digest
from kiloword.data.token_store import (
    Dtype,
    ImageTokens,
    Kind,
    TextPart,
    TextTokens,
    TokenFile,
    TokenPart,
    origins,
    quantised,
)
from kiloword.distributed.device import precision_of
from kiloword.distributed.sharing import is_first
from kiloword.errors import naming_truncated
from kiloword.features.extract import write_index
from kiloword.features.tables import ProgressReport, Rows, TableWriter, fill, resumed
from kiloword.features.token_runs import trunk_digest, trunk_of
from kiloword.files import Lock
from kiloword.model.encoding import inference
from kiloword.model.model import Model
from kiloword.types import BadSample, Skipped, Source, Texts

TOGETHER = 32  # rows of the data whose tokens are computed together
PART_BYTES = 1 << 25  # of image tokens: an interruption costs seconds of work
TEXT_PART, IMAGE_PART = 512, 4096  # rows in a part, at most
HALF_MAX = 65504.0


@dataclass(frozen=True)
class TokenOptions:
    """How tokens are made. Args: see `kiloword embed`; part: rows in a part, a multiple of TOGETHER; 0: by size."""

    views: int = 1
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    seed: int = 0
    dtype: Dtype = "fp16"
    precision: str = "fp32"
    batch: int = 64
    workers: int = 0
    part: int = 0


@naming_truncated()
def embed_tokens(
    model: Model,
    tokenizer: Tokenizer | None,
    kind: Kind,
    source: Source,
    out: Path | str,
    options: TokenOptions,
    tower: str = "",
    report: ProgressReport | None = None,
) -> ImageTokens | TextTokens | None:
    """Compute the tokens of every readable image, or of all captions, by the trunk of a model; resumes in `out`.

    Ranks share the rows; only the first one writes and returns the store. Args: tokenizer: of texts; out: folder of
    features, which gets a folder `images` or `texts`; tower: for messages, and for the runs that read the store.
    Errors: ValueError when the folder holds something else, keys repeat with other images, or no row is usable.
    """
    source, report = every_row(source), report or ProgressReport(None)
    made = _Made(model, tokenizer, kind, source, options, tower)

    def work(writer: TokenWriter | None) -> None:
        fill(writer, f"tokens of {kind}", source, made.batch, made.read, made.rows, report)

    if not is_first():
        work(None)
        return None
    inside = Path(out) / kind
    resumed(inside, TABLE, made.file, f"tokens of {kind}")  # a folder of something else gets no lock
    with Lock(inside, "writing"):
        writer = TokenWriter(inside, made.file)
        work(writer)
        writer.finish()
        writer.report(report)
        return ImageTokens(out) if kind == "images" else TextTokens(out)


class TokenWriter(TableWriter[TokenFile]):
    """Writes the token store in a folder. Errors: as `tables.resumed`."""

    what = "tokens"

    def __init__(self, folder: Path, file: TokenFile) -> None:
        super().__init__(folder, TABLE, file, resumed(folder, TABLE, file, f"tokens of {file.kind}"))
        self.by_key = file.kind == "images"  # captions are found by their text
        if self.missing:
            (folder / INDEX).unlink(missing_ok=True)  # readers then see that the store is not finished

    def part(self, number: int) -> Part:
        kind = TokenPart if self.file.kind == "images" else TextPart
        return kind(part_path(self.folder, number), self.file)

    def finish(self) -> None:
        """Write the index after all parts. Raises: ValueError when no row is usable."""
        self.check_usable()
        parts = (self.part(number) for number in range(self.file.parts))
        write_index(self.folder, [(p.captions if isinstance(p, TextPart) else p.batch.column("key")) for p in parts])


class _Made:
    """The tokens of a source: their file, how rows are read, and how tokens are made of them."""

    def __init__(
        self, model: Model, tokenizer: Tokenizer | None, kind: Kind, source: Source, options: TokenOptions, tower: str
    ) -> None:
        trunk = trunk_of(model, kind)
        if trunk is None:
            raise ValueError(f"{tower} has no {kind[:-1]} tower of another library: --tokens stores tokens of those.")
        self.model, self.trunk, self.tokenizer, self.source, self.options = model, trunk, tokenizer, source, options
        config = model.config
        self.text = replace(config.text, extra_tokens=())
        self.batch = -(-options.batch // TOGETHER) * TOGETHER
        drawn = Augmented(options.views, options.augment, options.seed)
        size, natural = config.image.size, getattr(source, "natural", True)
        self.views = drawn.of(size, config.preprocess.resize, natural) if kind == "images" else None
        self.file = self._file(kind, tower)

    def _file(self, kind: Kind, tower: str) -> TokenFile:
        source, options, config = self.source, self.options, self.model.config
        shared: dict[str, Any] = {
            "kind": kind,
            "tower": tower,
            "trunk": trunk_digest(self.model, kind),
            "precision": options.precision,
            "dtype": options.dtype,
            "data": source.name,
            "fingerprint": source.fingerprint,
            "contents": tuple(sorted(origins(source, kind))),
            "rows": len(source),
        }
        if kind == "texts":
            assert self.tokenizer is not None
            width, digest = config.text.trunk.width, tokenizer_digest(self.tokenizer)
            part = options.part or TEXT_PART
            return TokenFile(**shared, width=width, part=part, context=config.text.context, tokenizer=digest)
        trunk = config.image.trunk
        tokens = trunk.prefix + trunk.grid**2
        bytes_of_row = options.views * tokens * trunk.width * {"fp16": 2, "fp32": 4, "int8": 1}[options.dtype]
        part = min(IMAGE_PART, max(1, PART_BYTES // bytes_of_row // TOGETHER) * TOGETHER)
        return TokenFile(
            **shared,
            width=trunk.width,
            part=options.part or part,
            tokens=tokens,
            views=options.views,
            seed=options.seed,
            augment=options.augment,
            size=config.image.size,
            resize=config.preprocess.resize,
        )

    def read(self, batches: list[range]) -> Iterator[EvalBatch]:
        """Batches of rows, each within a part."""
        if self.views is None:
            return (self._captions(rows) for rows in batches)
        size = self.model.config.image.size
        options = self.options
        return eval_batches(
            self.source, size, "shortest", self.batch, options.workers, batches, self.views, captions=False
        )

    def _captions(self, rows: range) -> EvalBatch:
        """Captions without images."""
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
        return batch

    def rows(self, batch: EvalBatch) -> Rows:
        """The rows of a batch in the store. Raises: ValueError for tokens that are NaN, infinite or too large."""
        schema = self.file.schema()
        if not batch.rows:
            return Rows(empty_batch(schema), batch.skipped)
        with inference(self.model), precision_of(self.options.precision, self.model.device.type)():
            columns = self._images(batch) if self.views is not None else self._texts(batch)
        arrays = [columns[name] for name in schema.names]
        return Rows(pa.RecordBatch.from_arrays(arrays, schema=schema), batch.skipped)

    def _images(self, batch: EvalBatch) -> dict[str, pa.Array]:
        images, file = batch.images, self.file
        tokens = np.empty((len(images), file.views, file.tokens, file.width), np.float32)
        for _, group in groupby(range(len(images)), lambda n: batch.rows[n] // TOGETHER):
            which = list(group)
            places = [batch.rows[n] % TOGETHER for n in which]
            for view in range(file.views):
                filled = torch.zeros(TOGETHER, *images.shape[2:], dtype=torch.uint8)
                filled[places] = images[which, view]
                computed = self.trunk(self.model.normalise(filled.to(self.model.device)))
                tokens[which, view] = self._checked(computed, batch, which[0])[places]
        stored, scales = self._stored(tokens.reshape(-1, file.width))
        keys = pa.array(map(key_bytes, batch.keys), pa.binary())
        columns = {"key": keys, "content": pa.array(batch.stored, pa.binary(16))}
        count = len(images)
        columns["tokens"] = pa.FixedSizeListArray.from_arrays(stored, len(stored) // count)
        if scales is not None:
            columns["scales"] = pa.FixedSizeListArray.from_arrays(scales, len(scales) // count)
        return columns

    def _texts(self, batch: EvalBatch) -> dict[str, pa.Array]:
        file, parts, lengths = self.file, list[Any](), list[Any]()
        for _, group in groupby(range(len(batch.rows)), lambda n: batch.rows[n] // TOGETHER):
            which = list(group)
            texts = self._packed([caption for n in which for caption in batch.captions[n]])
            lengths.append(texts.starts.diff().numpy())
            texts = texts.to(self.model.device)
            computed = self.trunk(texts, self.model.text_tower.packing(texts))[: len(texts.ids)]
            parts.append(self._checked(computed, batch, which[0]))
        of_caption = np.concatenate(lengths).astype(np.int32)
        captions = np.cumsum([0, *map(len, batch.captions)], dtype=np.int32)
        places = pa.array(np.concatenate([[0], np.cumsum(of_caption)])[captions].astype(np.int32))
        stored, scales = self._stored(np.concatenate(parts))
        flat = [key_bytes(caption) for of_row in batch.captions for caption in of_row]
        contents = (hashlib.blake2b(b"\0".join(map(key_bytes, c)), digest_size=16).digest() for c in batch.captions)
        columns = {
            "key": pa.array((str(row).encode() for row in batch.rows), pa.binary()),  # captions are what is looked up
            "content": pa.array(contents, pa.binary(16)),
            "captions": pa.ListArray.from_arrays(pa.array(captions), pa.array(flat, pa.binary())),
            "lengths": pa.ListArray.from_arrays(pa.array(captions), pa.array(of_caption)),
            "tokens": pa.ListArray.from_arrays(places, pa.FixedSizeListArray.from_arrays(stored, file.width)),
        }
        if scales is not None:
            of_token = pa.FixedSizeListArray.from_arrays(scales, 2 * file.groups)
            columns["scales"] = pa.ListArray.from_arrays(places, of_token)
        return columns

    def _packed(self, captions: Sequence[str]) -> Texts:
        assert self.tokenizer is not None
        return self.tokenizer.encode(captions, self.text)

    def _checked(self, tokens: Tensor, batch: EvalBatch, n: int) -> Any:
        """Tokens as an array. Raises: ValueError for NaN, infinite and too large ones."""
        values = tokens.float().cpu().numpy()
        largest = float(np.abs(values).max(initial=0.0))
        name = batch.keys[n] if batch.keys else f"row {batch.rows[n]}"
        if not np.isfinite(largest):
            raise ValueError(f"the tower's tokens are NaN or infinite, near {name!r}.")
        if largest > HALF_MAX and self.options.dtype != "fp32":
            raise ValueError(
                f"the tower's tokens reach {largest:.3g}, near {name!r}, more than fp16 has: use --dtype fp32."
            )
        return values

    def _stored(self, tokens: Any) -> tuple[pa.Array, pa.Array | None]:
        """Flat values of tokens [n, W] as stored, and of their minima and steps."""
        if self.options.dtype == "int8":
            levels, scales = quantised(tokens)
            return pa.array(levels.ravel()), pa.array(scales.ravel())
        return pa.array(tokens.astype(np.float16 if self.options.dtype == "fp16" else np.float32).ravel()), None

"""Tokens of a frozen trunk for a whole data set, once, into stores: what `kiloword embed --tokens` does.

An image is computed in a group of 32 rows of the data at its place there, whatever the batch is and wherever a command
was interrupted, as kernels round by the number of images. Captions are computed with those of the same 32 rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kiloword.config.recipes import AugmentConfig, DataConfig, ModelConfig, sizes
from kiloword.config.settings import check
from kiloword.data.edits import every_row
from kiloword.data.files import key_bytes
from kiloword.data.images.views import Augmented
from kiloword.data.reading import EvalBatch, captions_at, eval_batches, name_of
from kiloword.data.sources.open import open_data
from kiloword.data.stored import StoreFile
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed.by_device import announce, workers_of
from kiloword.distributed.device import choose, precision_of
from kiloword.distributed.sharing import together
from kiloword.errors import suggestion
from kiloword.interop import text_towers, towers
from kiloword.methods.registry import preset
from kiloword.model.encoding import inference
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.models.model_folder import load_model
from kiloword.models.trust import NONE, Trust
from kiloword.stores.embed import made_from, placed, write
from kiloword.stores.pieces import ProgressReport, Rows
from kiloword.stores.runs import is_model_folder, trunk_digest, trunk_of
from kiloword.stores.tokens import Dtype, ImageTokens, TextTokens, TokenKind, quantised, tokenizer_digest
from kiloword.terminal import say
from kiloword.types import BadSample, Skipped, Source

TOGETHER = 32  # rows of the data whose tokens are computed together
PART_BYTES = 1 << 25  # of image tokens in a piece: an interruption costs seconds of work
TEXT_PART, IMAGE_PART = 512, 4096  # rows in a piece, at most
HALF_MAX = 65504.0


@dataclass(frozen=True)
class TokenOptions:
    """How tokens are made. Args: see `kiloword embed`; part: rows in a piece, a multiple of TOGETHER; 0: by size."""

    views: int = 1
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    seed: int = 0
    dtype: Dtype = "fp16"
    precision: str = "fp32"
    batch: int = 64
    workers: int = 0
    part: int = 0


def main(
    model: str,
    data: Sequence[str],
    out: Path,
    extra_captions: Sequence[str] = (),
    batch: int = 64,
    workers: int | Literal["auto"] = "auto",
    device: str = "auto",
    precision: Literal["fp32", "bf16"] = "fp32",
    dtype: Dtype = "fp16",
    trust: Trust = NONE,
    views: int = 1,
    augment: AugmentConfig | None = None,
    seed: int = 0,
) -> None:
    """Run and print `kiloword embed --tokens`. Ranks of torchrun share the rows.

    Args: model: a tower, or a model folder that has one; see `kiloword.cli.embed`. Errors: see `embed_tokens`.
    """
    for name, value in (("--batch", batch), ("--views", views)):
        if value < 1:
            raise ValueError(f"{name} is {value}: expected at least 1.")
    device, augment = choose(device), augment or AugmentConfig()
    check(augment, prefix="--augment.")
    with together(device):
        opened, tokenizer, message = open_tower(model, trust)
        opened = opened.to(device)
        size = opened.config.image.size
        workers = workers_of(workers, device, batch * views, size)
        announce(device, precision, "on every device, unless given", workers)
        report = ProgressReport(sys.stderr)
        if message:
            report.say(message)
        source = open_data(DataConfig(sources=tuple(data), extra_captions=tuple(extra_captions)), size)
        options = TokenOptions(views, augment, seed, dtype, precision, batch, workers)
        kinds: list[TokenKind] = [kind for kind in ("images", "texts") if trunk_of(opened, kind) is not None]
        if kinds == ["texts"] and (views > 1 or augment != AugmentConfig()):
            raise ValueError(f"{model} reads texts, which --views and --augment do not change: omit them.")
        if kinds == ["images"] and extra_captions:
            raise ValueError(f"{model} reads images, which --extra-captions does not change: omit it.")
        for kind in kinds:
            store = embed_tokens(opened, tokenizer, kind, source, out, options, model, report)
            if store is not None:
                say(f"{out}: {in_numbers(store)}")


def in_numbers(store: ImageTokens | TextTokens) -> str:
    """The contents of a store on one line."""
    file, size = store.file, sum(path.stat().st_size for path in store.path.iterdir()) / 1e6
    if isinstance(store, ImageTokens):
        views = f"{file.shown}, of " if file.augmented else ""
        return f"{views}{len(store):,} images, {file.tokens} tokens x {file.width} as {file.dtype}, {size:,.1f} MB"
    captions = len(store.column("starts")) - 1
    return f"{captions:,} captions, tokens x {file.width} as {file.dtype}, {size:,.1f} MB"


def open_tower(tower: str, trust: Trust = NONE) -> tuple[Model, Tokenizer | None, str]:
    """A model with the towers of other libraries that the user named, its tokenizer, and a message about the weights.

    Args: tower: as `--image-tower` or `--text-tower` of train take it, or a model folder.
    Raises: ValueError for a tower that does not exist or whose weights are not named, and for a model folder without
    such towers.
    """
    if is_model_folder(tower):
        loaded = load_model(Path(tower).expanduser(), trust=trust)
        if trunk_of(loaded[0], "images") is None and trunk_of(loaded[0], "texts") is None:
            raise ValueError(f"{tower} has no tower of another library: omit --tokens for features of its own towers.")
        return *loaded, ""
    kinds = (*towers.LITES, "minilm", "timm", "open_clip", "hf")
    kind = tower.partition(":")[0]
    if kind not in kinds:
        raise ValueError(
            f"unknown tower {tower[:200]!r}: expected a model folder, {', '.join(towers.LITES)}, minilm, "
            f"timm:NAME:FILE, open_clip:NAME:FILE or hf:FOLDER.{suggestion(kind, kinds)}"
        )
    towers.check_weights_named(tower)
    config, errors = sizes()["top"], list[ValueError]()
    tokenizer: Tokenizer | None = None
    try:
        config = towers.with_image_tower(config, tower)
    except ValueError as error:
        errors.append(error)
    try:
        config, tokenizer = _with_text(config, tower)
    except ValueError as error:
        errors.append(error)
    if len(errors) == 2:
        image_error, text_error = map(str, errors)
        if kind == "hf" and tower != "hf:" and image_error != text_error:
            raise ValueError(f"{tower[:200]} is no tower. Of images: {image_error} Of texts: {text_error}")
        raise errors[1 if kind == "minilm" else 0]
    of_image, of_text = (tower if x.trunk.name else "" for x in (config.image, config.text))
    towers.check_declared(config, of_image, of_text)
    model = build(config, preset("clip"))
    image, text = trunk_of(model, "images"), trunk_of(model, "texts")
    lines = [] if image is None else [towers.load(image, tower, "image tower")]
    lines += [] if text is None else [text_towers.load(text, tower)]
    return model, tokenizer, " ".join(lines)


def _with_text(config: ModelConfig, tower: str) -> tuple[ModelConfig, Tokenizer]:
    config, tokenizer = text_towers.with_text_tower(config, tower), text_towers.tokenizer_of(tower)
    text = replace(config.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids())
    return replace(config, text=text), tokenizer


def embed_tokens(
    model: Model,
    tokenizer: Tokenizer | None,
    kind: TokenKind,
    source: Source,
    out: Path | str,
    options: TokenOptions,
    tower: str = "",
    report: ProgressReport | None = None,
) -> ImageTokens | TextTokens | None:
    """Compute the tokens of every readable image, or of all captions, by the trunk of a model; resumes in `out`.

    Ranks share the rows; only the first one writes and returns the store. Args: tokenizer: of texts; out: folder of
    features, which gets a folder `images` or `texts`; tower: for messages, and for the runs that read the store.
    Errors: ValueError when the folder holds something else, or no row is usable.
    """
    made = _Made(model, tokenizer, kind, every_row(source), options, tower)
    report = report or ProgressReport(None)
    if not write(made.file, made.source, Path(out) / kind, made.batch, made.read, made.rows, report):
        return None
    return ImageTokens(out) if kind == "images" else TextTokens(out)


class _Made:
    """The tokens of a source: their file, how rows are read, and how tokens are made of them."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        kind: TokenKind,
        source: Source,
        options: TokenOptions,
        tower: str,
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

    def _file(self, kind: TokenKind, tower: str) -> StoreFile:
        options, config = self.options, self.model.config
        shared: dict[str, Any] = {
            "kind": kind,
            "model": tower,
            "weights": trunk_digest(self.model, kind),
            "precision": options.precision,
            "dtype": options.dtype,
            **made_from(self.source),
        }
        if kind == "texts":
            assert self.tokenizer is not None
            width, digest = config.text.trunk.width, tokenizer_digest(self.tokenizer)
            part = options.part or TEXT_PART
            return StoreFile(**shared, width=width, part=part, context=config.text.context, tokenizer=digest)
        trunk = config.image.trunk
        tokens = trunk.prefix + trunk.grid**2
        bytes_of_row = options.views * tokens * trunk.width * {"fp16": 2, "fp32": 4, "int8": 1}[options.dtype]
        part = min(IMAGE_PART, max(1, PART_BYTES // bytes_of_row // TOGETHER) * TOGETHER)
        return StoreFile(
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
        """Batches of rows, each within a piece."""
        if self.views is None:
            return (self._captions(rows) for rows in batches)
        size, workers = self.model.config.image.size, self.options.workers
        return eval_batches(self.source, size, "shortest", self.batch, workers, batches, self.views, captions=False)

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
        if not batch.rows:
            return Rows(placed(self.source, self.file, batch, []))
        with inference(self.model), precision_of(self.options.precision, self.model.device.type)():
            tokens, cells = self._images(batch) if self.views is not None else self._texts(batch)
        columns = {"tokens": tokens}
        if self.options.dtype == "int8":
            columns["tokens"], columns["scales"] = quantised(tokens)
        captions = sum(len(cell.get("captions", ())) for cell in cells)
        return Rows(placed(self.source, self.file, batch, cells), captions, columns)

    def _images(self, batch: EvalBatch) -> tuple[Any, list[dict[str, Any]]]:
        """Tokens [n * K * N, W] of images."""
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
        return tokens.reshape(-1, file.width), [{} for _ in batch.rows]

    def _texts(self, batch: EvalBatch) -> tuple[Any, list[dict[str, Any]]]:
        """Tokens [S, W] of captions, and their lengths."""
        assert self.tokenizer is not None
        parts, cells = list[Any](), list[dict[str, Any]]()
        for _, group in groupby(range(len(batch.rows)), lambda n: batch.rows[n] // TOGETHER):
            which = list(group)
            texts = self.tokenizer.encode([caption for n in which for caption in batch.captions[n]], self.text)
            lengths = iter(texts.starts.diff().tolist())
            for n in which:
                captions = list(map(key_bytes, batch.captions[n]))
                cells.append({"captions": captions, "lengths": [next(lengths) for _ in captions]})
            texts = texts.to(self.model.device)
            computed = self.trunk(texts, self.model.text_tower.packing(texts))[: len(texts.ids)]
            parts.append(self._checked(computed, batch, which[0]))
        return np.concatenate(parts), cells

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

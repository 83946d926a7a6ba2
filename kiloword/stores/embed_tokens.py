"""Tokens of a frozen trunk for a whole data set, once, into stores: what `kiloword embed --tokens` does.

An image is computed in a group of 32 rows of the data at its place there, whatever the batch is and wherever a command
was interrupted, as kernels round by the number of images. Captions are computed with those of the same 32 rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import torch
from torch import Tensor

from kiloword.config.recipes import DataConfig, sizes
from kiloword.data.images.views import PLAIN
from kiloword.data.open import open_data
from kiloword.data.reading import EvalBatch, captions_at, eval_batches, name_of
from kiloword.data.rows import key_bytes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed.device import precision_of
from kiloword.interop import text_towers, towers
from kiloword.methods.registry import preset
from kiloword.model.encoding import inference
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.models.model_folder import load_model
from kiloword.models.trust import NONE, Trust
from kiloword.stores import embed
from kiloword.stores.embed import EmbedOptions, Maker, settled
from kiloword.stores.runs import is_model_folder, trunk_digest, trunk_of
from kiloword.stores.tokens import ImageTokens, TextTokens, TokenKind, quantised, tokenizer_digest
from kiloword.terminal import warn
from kiloword.types import BadSample, Skipped, Source

TOGETHER = 32  # rows of the data whose tokens are computed together
PART_BYTES = 1 << 25  # of image tokens in a piece: an interruption costs seconds of work
TEXT_PART, IMAGE_PART = 512, 4096  # rows in a piece, at most
HALF_MAX = 65504.0


def of_tower(
    data: DataConfig, options: EmbedOptions, workers: int | Literal["auto"], device: str, trust: Trust
) -> Iterator[Maker]:
    """What makes tokens by a tower, or by a model folder that has one. Errors: as `open_tower`."""
    model, tokenizer, message = open_tower(options.model, trust)
    model, size = model.to(device), model.config.image.size
    options = settled(options, workers, device, size)
    if message:
        warn(message)
    source = open_data(data, size)
    kinds: list[TokenKind] = [kind for kind in ("images", "texts") if trunk_of(model, kind) is not None]
    if kinds == ["texts"] and options.augmented != PLAIN:
        raise ValueError(f"{options.model} reads texts, which --views and --augment do not change: omit them.")
    if kinds == ["images"] and data.extra_captions:
        raise ValueError(f"{options.model} reads images, which --extra-captions does not change: omit it.")
    yield from (_maker(model, tokenizer, kind, source, options) for kind in kinds)


main = partial(embed.main, makers=of_tower)


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
    towers.check_weights_named(tower)
    config, tokenizer, errors = sizes()["top"], None, list[str]()
    try:
        config = towers.with_image_tower(config, tower)
    except ValueError as error:
        errors.append(str(error))
    try:
        config, tokenizer = text_towers.with_text_tower(config, tower), text_towers.tokenizer_of(tower)
        text_config = replace(config.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids())
        config = replace(config, text=text_config)
    except ValueError as error:
        errors.append(str(error))
    if len(errors) == 2:
        raise ValueError(f"{tower[:200]} is no tower. Of images: {errors[0]} Of texts: {errors[1]}")
    of_image, of_text = (tower if x.trunk.name else "" for x in (config.image, config.text))
    towers.check_declared(config, of_image, of_text)
    model = build(config, preset("clip"))
    image, text = trunk_of(model, "images"), trunk_of(model, "texts")
    lines = [] if image is None else [towers.load(image, tower, "image tower")]
    lines += [] if text is None else [text_towers.load(text, tower)]
    return model, tokenizer, " ".join(lines)


def embed_tokens(
    model: Model,
    tokenizer: Tokenizer | None,
    kind: TokenKind,
    source: Source,
    out: Path | str,
    options: EmbedOptions,
    report: TextIO | None = None,
) -> ImageTokens | TextTokens | None:
    """Compute the tokens of every readable image, or of all captions, by the trunk of a model; resumes in `out`.

    Ranks share the rows; only the first one writes and returns the store. Args: tokenizer: of texts; out: folder of
    features, which gets a folder `images` or `texts`.
    Errors: ValueError when the folder holds something else, or no row is usable.
    """
    maker = _maker(model, tokenizer, kind, source, options)
    return maker.store(out) if maker.write(out, report) else None


def _maker(
    model: Model, tokenizer: Tokenizer | None, kind: TokenKind, source: Source, options: EmbedOptions
) -> _ImageTokens | _TextTokens:
    if kind == "images":
        return _ImageTokens(model, source, options)
    return _TextTokens(model, source, options, tokenizer)


class _Tokens(Maker):
    """Tokens of a trunk. `batch` and pieces are whole groups of TOGETHER rows."""

    def __init__(self, model: Model, kind: TokenKind, source: Source, options: EmbedOptions) -> None:
        super().__init__(source, options)
        trunk = trunk_of(model, kind)
        if trunk is None:
            raise ValueError(
                f"{options.model} has no {kind[:-1]} tower of another library: --tokens stores tokens of those."
            )
        self.model, self.trunk, self.weights = model, trunk, trunk_digest(model, kind)
        self.batch = -(-options.batch // TOGETHER) * TOGETHER

    def rows(self, batch: EvalBatch) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        with inference(self.model), precision_of(self.options.precision, self.model.device.type)():
            groups = groupby(range(len(batch.rows)), lambda n: batch.rows[n] // TOGETHER)
            made = [self.group(batch, list(group)) for _, group in groups]
        tokens = np.concatenate([values for _, values in made])
        columns = {"tokens": tokens}
        if self.options.dtype == "int8":
            columns["tokens"], columns["scales"] = quantised(tokens)
        return [cell for cells, _ in made for cell in cells], columns

    def group(self, batch: EvalBatch, which: list[int]) -> tuple[list[dict[str, Any]], Any]:
        """Further cells, and tokens [..., W], of some rows of a batch that lie together."""
        raise NotImplementedError

    def checked(self, tokens: Tensor, row: int) -> Any:
        """Tokens as an array. Raises: ValueError for NaN, infinite and too large ones."""
        values = tokens.float().cpu().numpy()
        largest = float(np.abs(values).max(initial=0.0))
        if not np.isfinite(largest):
            raise ValueError(f"the tower's tokens are NaN or infinite, near row {row}.")
        if largest > HALF_MAX and self.options.dtype != "fp32":
            raise ValueError(
                f"the tower's tokens reach {largest:.3g}, near row {row}, more than fp16 has: use --dtype fp32."
            )
        return values


class _ImageTokens(_Tokens):
    store: type[ImageTokens] = ImageTokens

    def __init__(self, model: Model, source: Source, options: EmbedOptions) -> None:
        super().__init__(model, "images", source, options)
        drawn, config = options.augmented, model.config
        size, resize, trunk = config.image.size, config.preprocess.resize, config.image.trunk
        self.views = drawn.of(size, resize, getattr(self.source, "natural", True))
        tokens = trunk.prefix + trunk.grid**2
        bytes_of_row = drawn.views * tokens * trunk.width * {"fp16": 2, "fp32": 4, "int8": 1}[options.dtype]
        part = options.part or min(IMAGE_PART, max(1, PART_BYTES // bytes_of_row // TOGETHER) * TOGETHER)
        more = {"views": drawn.views, "seed": drawn.seed, "augment": drawn.augment, "size": size, "resize": resize}
        self.file = self.about("images", self.weights, width=trunk.width, part=part, tokens=tokens, **more)

    def read(self, batches: list[range]) -> Iterator[EvalBatch]:
        size, workers = self.model.config.image.size, self.options.workers
        return eval_batches(self.source, size, "shortest", self.batch, workers, batches, self.views, captions=False)

    def group(self, batch: EvalBatch, which: list[int]) -> tuple[list[dict[str, Any]], Any]:
        file, places = self.file, [batch.rows[n] % TOGETHER for n in which]
        tokens = np.empty((len(which), file.views, file.tokens, file.width), np.float32)
        for view in range(file.views):
            filled = torch.zeros(TOGETHER, *batch.images.shape[2:], dtype=torch.uint8)
            filled[places] = batch.images[which, view]
            computed = self.trunk(self.model.normalise(filled.to(self.model.device)))
            tokens[:, view] = self.checked(computed, batch.rows[which[0]])[places]
        return [{} for _ in which], tokens.reshape(-1, file.width)


class _TextTokens(_Tokens):
    store: type[TextTokens] = TextTokens

    def __init__(self, model: Model, source: Source, options: EmbedOptions, tokenizer: Tokenizer | None) -> None:
        super().__init__(model, "texts", source, options)
        assert tokenizer is not None
        config = model.config.text
        self.tokenizer, self.config, part = tokenizer, replace(config, extra_tokens=()), options.part or TEXT_PART
        more = {"context": config.context, "tokenizer": tokenizer_digest(tokenizer)}
        self.file = self.about("texts", self.weights, width=config.trunk.width, part=part, **more)

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

    def group(self, batch: EvalBatch, which: list[int]) -> tuple[list[dict[str, Any]], Any]:
        texts = self.tokenizer.encode([caption for n in which for caption in batch.captions[n]], self.config)
        lengths = iter(texts.starts.diff().tolist())
        captions = [list(map(key_bytes, batch.captions[n])) for n in which]
        cells = [{"captions": of_row, "lengths": [next(lengths) for _ in of_row]} for of_row in captions]
        texts = texts.to(self.model.device)
        computed = self.trunk(texts, self.model.text_tower.packing(texts))[: len(texts.ids)]
        return cells, self.checked(computed, batch.rows[which[0]])

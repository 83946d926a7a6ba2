"""A model for Ray Data: a class that embeds a data set in the actors of a Ray cluster. Ray itself is not imported.

    ray.data.read_parquet("photos/").map_batches(
        Embedder, fn_constructor_args=["run/model"], batch_format="pyarrow", batch_size=64, concurrency=2
    ).write_parquet("features/")

Ray pickles the class and its arguments; every actor loads the model itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from kiloword.api import load
from kiloword.types import Features

VECTORS, NUMBERS = ("vec", "log_var"), ("uncertainty",)


class Embedder:
    """Adds features to batches of images, texts or both; a row that cannot be used gets nulls and its reason.

    New columns, PREFIX being "image" or "text": `PREFIX_vec` [D] of norm 1 and, of Gaussians, `PREFIX_log_var` [D] and
    `PREFIX_uncertainty`; `generated`, a caption; `error`, null where all is well. Lists of D have fixed size.

    Args: model: as of `kiloword.load`, on every node; its folder runs no code; image, text: columns to read, None for
    none; caption: also write a caption; keep_images: keep a column of images that are not paths.
    Raises: ValueError for no column, for captions of a model that cannot write, and as `kiloword.load`.
    """

    def __init__(
        self,
        model: str | Path,
        image: str | None = "image",
        text: str | None = None,
        caption: bool = False,
        keep_images: bool = False,
        device: str = "cpu",
        precision: str = "fp32",
    ) -> None:
        if image is None and (text is None or caption):
            raise ValueError("the Embedder has no column to read: give image, text or both; captions need image.")
        self.image, self.text, self.caption, self.keep_images = image, text, caption, keep_images
        self.matcher = load(model, device=device, precision=precision)
        if caption:
            from kiloword.generation.captioner import Captioner

            Captioner(self.matcher.model, self.matcher.tokenizer)  # refuses a model without a text decoder
        one = self.matcher.encode_text(["a"], progress=False)
        self.dim, self.gaussian = one["vec"].shape[1], "log_var" in one

    def __call__(self, batch: pa.Table | Mapping[str, Any]) -> pa.Table:
        """The batch with the new columns. Args: batch: a table, or columns as arrays or lists.

        Raises: ValueError for a column that is missing, for one that would be overwritten, and for features that are
        NaN or infinite.
        """
        columns = {name: _values(batch[name]) for name in _names(batch)}
        for name in (self.image, self.text):
            if name is not None and name not in columns:
                raise ValueError(f"the batch has no column {name!r}: it has {', '.join(map(repr, columns))}.")
        rows = len(next(iter(columns.values()), ()))
        errors: list[str | None] = [None] * rows
        new: dict[str, pa.Array] = {}
        if self.image is not None:
            new |= self._images(columns[self.image], errors)
        if self.text is not None:
            new |= self._texts(columns[self.text], errors)
        dropped = self.image if self.image and not self.keep_images and _holds_images(batch[self.image]) else None
        kept = {
            name: batch[name] if isinstance(batch, pa.Table) else _stored(name, values)
            for name, values in columns.items()
            if name != dropped
        }
        new["error"] = pa.array(errors, pa.string())
        if taken := [name for name in kept if name in new]:
            raise ValueError(f"the batch has a column {taken[0]!r}, which the Embedder writes: rename or drop it.")
        return pa.table(kept | new)

    def _images(self, images: Sequence[Any], errors: list[str | None]) -> dict[str, pa.Array]:
        good: list[int] = []
        pixels: list[Tensor] = []
        for row, one in enumerate(images):
            try:
                pixels.append(self.matcher.preprocess(_content(one)))
                good.append(row)
            except ValueError as error:
                errors[row] = re.sub(r"^(got [^:]* as )?image 0\b", r"\1the image", str(error))
        several = torch.stack(pixels) if pixels else None
        features = {} if several is None else self.matcher.encode_image(several, progress=False)
        columns = self._columns("image", features, good, len(images))
        if self.caption:
            texts: list[str | None] = [None] * len(images)
            for row, captions in zip(good, [] if several is None else self.matcher.caption(several), strict=True):
                texts[row] = captions[0].text
            columns["generated"] = pa.array(texts, pa.string())
        return columns

    def _texts(self, texts: Sequence[Any], errors: list[str | None]) -> dict[str, pa.Array]:
        good = [row for row, text in enumerate(texts) if isinstance(text, str)]
        for row in set(range(len(texts))) - set(good):
            reason = f"the text is {type(texts[row]).__name__}: expected a string"
            errors[row] = reason if errors[row] is None else f"{errors[row]}; {reason}"
        features = self.matcher.encode_text([texts[row] for row in good], progress=False) if good else {}
        return self._columns("text", features, good, len(texts))

    def _columns(self, prefix: str, features: Features, good: list[int], rows: int) -> dict[str, pa.Array]:
        """Features of the good rows as columns of all rows, the others null."""
        features = dict(features)
        if self.gaussian and features:
            features["uncertainty"] = self.matcher.uncertainty(features)
        place = np.full(rows, -1)
        place[good] = np.arange(len(good))
        take = pa.array(place, mask=place < 0)
        columns = {}
        for name in (*VECTORS, *NUMBERS) if self.gaussian else VECTORS[:1]:
            value = features.get(name, torch.zeros(0, self.dim)).float().cpu()
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"the model's {prefix} features are NaN or infinite.")
            flat: pa.Array = pa.array(value.numpy().ravel())
            if name in VECTORS:
                flat = pa.FixedSizeListArray.from_arrays(flat, self.dim)
            columns[f"{prefix}_{name}"] = flat.take(take)
        return columns


def _names(batch: pa.Table | Mapping[str, Any]) -> list[str]:
    return list(batch.column_names if isinstance(batch, pa.Table) else batch)


def _values(column: Any) -> list[Any]:
    """A column's items: images [H, W, 3], bytes, strings."""
    return column.to_pylist() if isinstance(column, pa.ChunkedArray) else list(column)


def _content(image: Any) -> Any:
    """An image; of {"bytes", "path"}, as tables of the library datasets hold them, its bytes or else its path."""
    return (image.get("bytes") or image.get("path")) if isinstance(image, Mapping) else image


def _stored(name: str, values: list[Any]) -> pa.Array:
    """A column of the result. Raises: ValueError for values that no table holds, such as numbers among strings."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeError) as error:
        raise ValueError(f"the column {name!r} cannot be kept in a table ({error}): drop it or change it.") from None


def _holds_images(column: Any) -> bool:
    """Whether a column holds images, not their paths; of a table by its type, whatever a block has."""
    if isinstance(column, pa.ChunkedArray):
        kind, types = column.type, pa.types
        return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_nested(kind)) or isinstance(
            kind, pa.BaseExtensionType
        )
    return any(isinstance(one, bytes | Mapping | np.ndarray) for one in column)

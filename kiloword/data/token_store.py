"""Token stores: tokens of a frozen trunk for a data set's images, or for its captions, joined by key.

A folder of features holds `images/`, `texts/` or both; each is a `KeyedStore` as `feature_store` describes it. Images
have K augmented views, found by the image's key; captions are found by their text. Tokens are fp16, fp32, or bytes with
a minimum and a step for every `group` channels of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from kiloword.config.recipes import AugmentConfig, Resize
from kiloword.config.settings import about, read_config
from kiloword.data.feature_store import AGAIN, TABLE, KeyedStore, contents
from kiloword.data.files import key_bytes
from kiloword.data.images.views import in_words, of_images
from kiloword.data.parts import Part, TableSettings
from kiloword.types import Source

Kind = Literal["images", "texts"]
Dtype = Literal["fp16", "fp32", "int8"]
GROUP = 64  # channels that share a minimum and a step
LEVELS = 255
VALUES = {"fp16": pa.float16(), "fp32": pa.float32(), "int8": pa.uint8()}


def group_of(width: int) -> int:
    """Channels of a token that share a minimum and a step: GROUP, or all where that does not divide them."""
    return GROUP if width % GROUP == 0 else width


@dataclass(frozen=True, kw_only=True)
class TokenFile(TableSettings):
    """The contents of `table.json`."""

    kind: Kind
    tower: str  # as given by the user
    trunk: str  # digest of its weights, and of how images are normalised
    width: int = field(metadata=about(low=1, high=1 << 16))  # W, of a token
    precision: str  # of the computation
    dtype: Dtype  # of the tokens in the file
    contents: tuple[str, ...]  # see `feature_store.contents`; those of this kind
    tokens: int = field(default=0, metadata=about(low=0, high=1 << 20))  # N, of an image
    views: int = field(default=1, metadata=about(low=1, high=1 << 16))  # K
    seed: int = 0  # of the augmentation
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    size: int = 0  # of images, in pixels
    resize: Resize = "shortest"
    context: int = 0  # of texts
    tokenizer: str = ""  # digest
    format: Literal["kiloword-tokens-1"] = "kiloword-tokens-1"

    def schema(self) -> pa.Schema:
        """Columns of a part. Tokens are fixed-size lists, so that a column is one flat buffer."""
        token, scales = (pa.list_(VALUES[self.dtype], self.width), pa.list_(pa.float32(), 2 * self.groups))
        columns = {"key": pa.binary(), "content": pa.binary(16)}
        if self.kind == "images":
            of_image = self.views * self.tokens
            columns["tokens"] = pa.list_(VALUES[self.dtype], of_image * self.width)
            scales = pa.list_(pa.float32(), of_image * 2 * self.groups)
        else:
            columns |= {"captions": pa.list_(pa.binary()), "lengths": pa.list_(pa.int32()), "tokens": pa.list_(token)}
            scales = pa.list_(scales)
        return pa.schema(columns | ({"scales": scales} if self.dtype == "int8" else {}))

    @property
    def groups(self) -> int:
        """Groups of channels of a token."""
        return self.width // group_of(self.width)

    def alike(self) -> list[tuple[Any, str]]:
        """Values that all stores of a run share, each with its text in messages."""
        names = ("width", "precision", "size", "resize", "tokens", "context", "tokenizer")
        return [
            (self.trunk, f"tower {self.tower} ({self.trunk[:16]})"),
            *((getattr(self, name), f"{name} {getattr(self, name)}") for name in names),
        ]

    def compared(self) -> list[tuple[Any, str]]:
        return [
            *self.alike(),
            (self.contents, f"data {self.data} ({self.fingerprint[:16]})"),
            (of_images(self.augment), in_words(self.augment)),
            *((getattr(self, name), f"{name} {getattr(self, name)}") for name in ("views", "seed", "dtype", "kind")),
        ]


def origin_of(file: TokenFile) -> str:
    """How the tokens of a store were computed: the tower by its digest, not by its path."""
    by = f"tokens of {file.kind} of the tower {file.trunk} in {file.precision}, as {file.dtype}"
    return f"{by}, {file.views} views, seed {file.seed}, {in_words(file.augment)}" if file.kind == "images" else by


def quantised(tokens: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Tokens [n, W] as bytes [n, W], and the minimum and the step [n, groups, 2] of each group of channels."""
    grouped = tokens.astype(np.float32).reshape(len(tokens), -1, group_of(tokens.shape[1]))
    least = grouped.min(-1)
    step = (grouped.max(-1) - least) / LEVELS
    step[step == 0] = 1.0
    levels = np.rint((grouped - least[..., None]) / step[..., None]).clip(0, LEVELS)
    return levels.astype(np.uint8).reshape(tokens.shape), np.stack([least, step], -1)


def restored(levels: NDArray[np.uint8], scales: NDArray[np.float32]) -> Tensor:
    """The inverse of `quantised`: float16 [n, W]."""
    n, width = levels.shape
    grouped = torch.from_numpy(levels.astype(np.float32)).view(n, -1, group_of(width))
    least, step = torch.from_numpy(scales.reshape(n, -1, 2).copy()).unbind(-1)
    return torch.addcmul(least[..., None], grouped, step[..., None]).half().view(n, width)


class TokenPart(Part):
    """A part of a token store. Errors: ValueError when the file is missing or damaged."""

    again = AGAIN

    def __init__(self, path: Path, file: TokenFile) -> None:
        super().__init__(path, file.schema())
        self.file = file
        self.keys = self.batch.column("key")
        self._tokens = self._flat("tokens", file.width)
        self._scales = self._flat("scales", 2 * file.groups) if file.dtype == "int8" else None

    def _flat(self, name: str, width: int) -> NDArray[Any]:
        """All tokens of the part [n, width]."""
        values = self.batch.column(name)
        while hasattr(values, "values"):
            values = values.values
        return values.to_numpy().reshape(-1, width)  # type: ignore[no-any-return]

    def read(self, start: int, count: int) -> Tensor:
        """A copy of tokens [count, W], fp16 or fp32."""
        rows = slice(start, start + count)
        if self._scales is not None:
            return restored(self._tokens[rows], self._scales[rows])
        return torch.from_numpy(self._tokens[rows].copy())

    def read_into(self, out: NDArray[Any], start: int) -> None:
        """Copy tokens from `start` to `out` [n, W]."""
        rows = slice(start, start + len(out))
        out[:] = self._tokens[rows] if self._scales is None else self.read(start, len(out)).numpy()


class TextPart(TokenPart):
    """A part with captions."""

    def __init__(self, path: Path, file: TokenFile) -> None:
        super().__init__(path, file)
        self.captions = self.batch.column("captions").values
        lengths = self.batch.column("lengths").values.to_numpy()
        if len(lengths) != len(self.captions) or lengths.sum(dtype=np.int64) != len(self._tokens):
            raise ValueError(f"{path} is damaged. {AGAIN}")
        self.starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


AnyPart = TypeVar("AnyPart", bound=TokenPart)


class _TokenStore(KeyedStore[AnyPart], Generic[AnyPart]):
    file: TokenFile
    kind: Kind

    def __init__(self, folder: Path | str) -> None:
        inside, other = Path(folder) / self.kind, Path(folder) / ("texts" if self.kind == "images" else "images")
        if not (inside / TABLE).is_file():
            holds = f"it has tokens of {other.name} alone" if (other / TABLE).is_file() else "it has none"
            if (Path(folder) / TABLE).is_file() and (Path(folder).parent / self.kind / TABLE).is_file():
                raise ValueError(f"{folder} is a part of a folder of features: name the folder, {Path(folder).parent}.")
            if (Path(folder) / TABLE).is_file():
                holds = "it has features of whole images and captions, which --features takes"
            raise ValueError(
                f"{folder} holds no tokens of {self.kind}: {holds}. Make them by `kiloword embed TOWER --data SRC "
                f"--out {folder} --tokens`."
            )
        super().__init__(inside)

    def read_settings(self, path: Path) -> TokenFile:
        """The contents of `table.json`."""
        return read_config(path, TokenFile)


class ImageTokens(_TokenStore[TokenPart]):
    """Tokens of a data set's images, in the folder `images` of a folder of features. Errors: see `KeyedStore`."""

    kind = "images"
    what = "store of image tokens"

    def open_part(self, path: Path) -> TokenPart:
        """Open a part. Raises: ValueError when it is missing or damaged."""
        return TokenPart(path, self.file)

    def find(self, key: str) -> StoredImage | None:
        """The tokens of an image; None where the store has none."""
        raw = key_bytes(key)
        for part, row in self.places(raw):
            if row < len(part.keys) and part.keys[row].as_py() == raw:
                return StoredImage(part, row)
        return None


@dataclass(frozen=True)
class StoredImage:
    """The tokens of an image, in place of its pixels (`kiloword.types.StoredTokens`)."""

    part: TokenPart
    row: int

    def tokens(self, epoch: int) -> Tensor:
        """The view of an epoch: [N, W], fp16 or fp32."""
        file = self.part.file
        view = self.row * file.views + epoch % file.views
        return self.part.read(view * file.tokens, file.tokens)


@dataclass(frozen=True)
class StoredText:
    """Where the tokens of a caption are."""

    part: TextPart
    start: int  # of its tokens in the part
    length: int  # number of its tokens


class TextTokens(_TokenStore[TextPart]):
    """Tokens of captions, in the folder `texts` of a folder of features. Errors: see `KeyedStore`."""

    kind = "texts"
    what = "store of text tokens"

    def open_part(self, path: Path) -> TextPart:
        """Open a part. Raises: ValueError when it is missing or damaged."""
        return TextPart(path, self.file)

    def find(self, caption: str) -> StoredText | None:
        """The tokens of a caption; None where the store has none."""
        raw = key_bytes(caption)
        for part, row in self.places(raw):
            if row < len(part.captions) and part.captions[row].as_py() == raw:
                start = int(part.starts[row])
                return StoredText(part, start, int(part.starts[row + 1]) - start)
        return None


Store = TypeVar("Store", ImageTokens, TextTokens)


def opened(folders: Sequence[str], kind: type[Store]) -> list[Store]:
    """The stores of several folders. Raises: ValueError where they are of different towers."""
    stores = [kind(folder) for folder in folders]
    for other in stores[1:]:
        for (value, words), (first, first_words) in zip(other.file.alike(), stores[0].file.alike(), strict=True):
            if value != first:
                raise ValueError(
                    f"{stores[0].path.parent} has {first_words} and {other.path.parent} {words}: expected tokens of "
                    "one tower, made alike."
                )
    return stores


def origins(source: Source, kind: Kind) -> frozenset[str]:
    """The origins of a source's images, or of its captions; see `feature_store.contents`."""
    images = frozenset(origin for origin in contents(source) if origin.endswith(" images"))
    return images if kind == "images" else contents(source) - images


def serving(stores: Sequence[Store], source: Source) -> list[Store]:
    """The first stores that together were made from all images, or captions, of a source; none where they were not."""
    chosen: list[Store] = []
    missing = origins(source, stores[0].kind) if stores else frozenset()
    for store in stores:
        if missing & set(store.file.contents):
            chosen.append(store)
            missing -= set(store.file.contents)
    return [] if missing else chosen


def served(stores: Sequence[Store], source: Source) -> list[Store]:
    """As `serving`. Raises: ValueError when the stores were not made from all images, or captions, of a source."""
    chosen = serving(stores, source)
    if chosen or not stores:
        return chosen
    kind, tower = stores[0].kind, stores[0].file.tower
    folders = " ".join(str(store.path.parent) for store in stores)
    made = " + ".join(dict.fromkeys(store.file.data for store in stores))
    more = "" if kind == "images" else " and extra captions"
    raise ValueError(
        f"the tokens of {kind} in {folders} were made from {made}, and lack those of {source.name} (fingerprint "
        f"{source.fingerprint[:16]}): make them by `kiloword embed {tower} --data SRC --out FOLDER --tokens`, from the "
        f"same data{more}, and name that folder."
    )


def as_evaluated(stores: Sequence[ImageTokens]) -> list[ImageTokens]:
    """The stores whose images are as in evaluation: without augmentation."""
    usual = of_images(AugmentConfig())
    return [store for store in stores if of_images(store.file.augment) == usual]


def augmented_first(stores: Sequence[ImageTokens], augment: AugmentConfig) -> list[ImageTokens]:
    """The stores whose images a run augments so, then the others; each in their order."""
    wanted = of_images(augment)
    return sorted(stores, key=lambda store: of_images(store.file.augment) != wanted)


def check_alike(stores: Sequence[ImageTokens], augment: AugmentConfig) -> None:
    """Raises: ValueError when stores of training images differ, or were not augmented as the run asks."""
    for store in stores:
        if of_images(store.file.augment) != of_images(augment):
            raise ValueError(
                f"{store.path.parent} has images with {in_words(store.file.augment)}, but the run asks for "
                f"{in_words(augment)}: omit --augment, or make others by `kiloword embed --tokens --views K` with that "
                "augmentation."
            )
        for name in ("views", "dtype"):
            value, first = getattr(store.file, name), getattr(stores[0].file, name)
            if value != first:
                raise ValueError(
                    f"{stores[0].path.parent} has {name} {first} and {store.path.parent} {value}: expected the same in "
                    "all stores of the training images."
                )

"""Precomputed features and tokens as the loader sees them: their settings, and objects that `kiloword.stores` opens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kiloword.config.recipes import AugmentConfig, Resize
from kiloword.config.settings import BaseSettings, about, read_config
from kiloword.data.images.views import MOST, changes, in_words
from kiloword.data.source import key_of, texts_of
from kiloword.randomness import Draw, key
from kiloword.types import BadSample, Example, NoCaption, Record, Source, StoredTokens

STORE = "store.json"
Kind = Literal["features", "images", "texts"]  # features of a teacher; tokens of images; tokens of captions


@dataclass(frozen=True, kw_only=True)
class TableSettings(BaseSettings):
    """What a table is computed from."""

    data: str  # as given by the user
    fingerprint: str  # of the data
    rows: int = field(metadata=about(low=1, high=1e12))  # of the data, including bad ones
    part: int = field(metadata=about(low=1, high=1e9))  # rows that are computed between interruptions
    model: str  # as given by the user

    @property
    def parts(self) -> int:
        return -(-self.rows // self.part)


@dataclass(frozen=True, kw_only=True)
class StoredSource(BaseSettings):
    """A data set that a store was made from."""

    name: str
    fingerprint: str
    rows: int  # of the data set


@dataclass(frozen=True, kw_only=True)
class StoreFile(TableSettings):
    """The contents of `store.json`."""

    kind: Kind
    name: str = ""  # of features in a batch
    weights: str  # fingerprint of the teacher; digest of the trunk and of how images are normalised
    precision: str  # of the computation
    dtype: Literal["fp16", "fp32", "int8"]  # of the numbers in the file
    width: int = field(metadata=about(low=1, high=1e6))  # D of features, W of a token
    tokens: int = 0  # N, of an image
    views: int = field(default=1, metadata=about(low=1, high=MOST))  # K, of each image
    seed: int = 0  # of the augmentation
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    size: int = 0  # of images whose tokens are stored, in pixels
    resize: Resize = "shortest"
    context: int = 0  # of texts whose tokens are stored
    tokenizer: str = ""  # digest
    sources: tuple[StoredSource, ...]
    format: Literal["kiloword-store-1"] = "kiloword-store-1"

    @property
    def origin(self) -> str:
        """How a store was computed: the model by its fingerprint, not by its path."""
        what = self.name or f"tokens of {self.kind}"
        return (
            f"{what} of the model {self.weights} in {self.precision}, width {self.width} as {self.dtype}, {self.shown}"
        )

    @property
    def augmented(self) -> bool:
        """Whether images are augmented views."""
        return bool(changes(self.augment))

    @property
    def shown(self) -> str:
        """What the model saw of each image; equal for equal pixels."""
        if not self.augmented:
            return "images without augmentation"
        return f"{self.views} view{'s' * (self.views > 1)} with seed {self.seed}, {in_words(self.augment)}"

    def view(self, draw: Draw, seed: int) -> int:
        """The view that a draw shows: in an epoch, that of its number; for others than the run's `seed`, any."""
        turn = draw.epoch if draw.seed == seed else key(draw.seed, draw.epoch, draw.row, "view")
        return turn % self.views


def store_file(folder: Path | str) -> StoreFile:
    """The settings of the store in a folder. Raises: ValueError for a folder without one."""
    return read_config(Path(folder) / STORE, StoreFile)


Join = Callable[[Example, Source, int], None]
"""Adds stored features to an example, whose row is one of the source; of a view of its image."""
FindTokens = Callable[[Source, int], StoredTokens | None]
"""The stored tokens of the image of a row; None where there are none."""


class WithTokens:
    """A source whose records have the tokens of their images; other members are those of the source.

    Args: lean: records lack image, label and what else training does not read, where the source can give captions
    without the image. A row without tokens is bad.
    """

    def __init__(self, source: Source, stored: FindTokens, lean: bool = False) -> None:
        self.source, self.stored, self.name, self.fingerprint = source, stored, source.name, source.fingerprint
        self.lean = lean and hasattr(source, "captions") and hasattr(source, "key")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":  # during unpickling there is no source yet
            raise AttributeError(name)
        member = getattr(self.source, name)
        return member if name != "at" else lambda epoch: WithTokens(member(epoch), self.stored, self.lean)

    def __len__(self) -> int:
        return len(self.source)

    def record(self, row: int) -> Record:
        """The stored sample with its tokens. Raises BadSample with the reason."""
        if self.lean:
            key, tokens, captions = key_of(self.source, row), self._tokens(row), texts_of(self.source, row)
            info = dict(self.source.info(row)) if hasattr(self.source, "info") else {}
            return Record(key, b"", captions, info=info, tokens=tokens)
        try:
            record = self.source.record(row)
        except NoCaption as error:
            raise NoCaption(replace(error.record, tokens=self._tokens(row))) from error
        return replace(record, tokens=self._tokens(row))

    def _tokens(self, row: int) -> StoredTokens:
        tokens = self.stored(self.source, row)
        if tokens is None:
            raise BadSample("no tokens in the image features, as `embed` could not read it")
        return tokens
